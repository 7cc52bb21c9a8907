"""Attention by `torch.nn.attention.flex_attention` over the whole paged cache, gathering nothing.

Keys and values are the cache as one sequence of slots, which a batch of tiles shares; a tile is a
run of tokens of one request (see `flex_mask`). The block mask lists the cache blocks of a tile's
request, and `mask_mod` maps a slot back to its position by a table of that request's pages, so a
block may be shared by any number of requests.

*Graphs.* The first layer of a step computes the mask, for all layers, in its `forward`, on the
device alone: inside a graph it is part of the graph, so nothing has to be renewed before a
replay. That layer is known by its cache.

*Compilation.* Numbers of tiles and the size of the cache are dynamic; what a kernel is specialised
on is not: tiles of 1 to 8 tokens of uniform batches, else four heights of tiles; and three numbers
of splits. Each of these that is met costs one compilation per spec, and one more for a single
tile. No size after that costs any; warm up before a capture.

*Block sizes.* The Triton template wants blocks of the mask of at least 16 slots, and reads as many
at a time as the greatest power of two that divides them. A page of a multiple of 16 tokens is a
block. Others are bridged by blocks of `lcm(page, 16)` slots that hold some page of the request,
of which the mask drops the others: up to 16 times as much is read. Pages of 64 tokens suit best.

The cache must hold finite values, also where nobody looks, as the kernel multiplies them by a
weight of zero: start it with zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

import torch

from compile_backend.attention.backend import AttentionBackend
from compile_backend.attention.first_layer import FirstLayer
from compile_backend.attention.flex_mask import MAX_ROWS, MIN_ROWS, TileMask, choose_tiling
from compile_backend.attention.flex_tiles import tiled_attention
from compile_backend.errors import ConfigError
from compile_backend.support import AttentionCGSupport

if TYPE_CHECKING:
    from collections.abc import Callable

    from compile_backend.attention.kv_cache import LayerCache
    from compile_backend.attention.metadata import AttentionMetadata
    from compile_backend.attention.spec import AttentionSpec, CacheFormat
    from compile_backend.batch import BatchDescriptor


@dataclass(slots=True)
class FlexStep:
    """What all layers of a step share.

    Attributes:
        mask: at addresses that stay for the key.
        attend: `TiledAttention.forward`, compiled on CUDA.
        logical_pages: `[num_reqs, num_blocks + 1]` int32; see `TileMask.refresh`.
        first_layer: computes the mask.
    """

    mask: TileMask
    attend: Callable[..., None]
    logical_pages: torch.Tensor | None = None
    first_layer: FirstLayer = field(default_factory=FirstLayer)


class FlexAttention(AttentionBackend):
    """`flex_attention` with shapes that the key fixes, so that any batch may be in a graph."""

    name: ClassVar[str] = "flex_attention"
    support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, spec: AttentionSpec, cache: CacheFormat, device: torch.device) -> None:
        super().__init__(spec, cache, device)
        self._is_cuda = device.type == "cuda"
        if self._is_cuda and spec.head_size < MIN_ROWS:
            raise ConfigError(
                "head_size",
                spec.head_size,
                "is too small for flex_attention on CUDA",
                f"use {MIN_ROWS} or more, or another attention backend",
            )
        self._num_programs = (
            2 * torch.cuda.get_device_properties(device).multi_processor_count
            if self._is_cuda
            else 1
        )
        self._kv_block = math.lcm(cache.block_size, MIN_ROWS)
        self._steps: dict[tuple[BatchDescriptor, int, int, int], FlexStep] = {}
        self._logical_pages = torch.empty((0, 0), dtype=torch.int32, device=device)

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        """Triton on CUDA; and a device that is CUDA or CPU."""
        if device.type == "cuda" and find_spec("triton") is None:
            return "triton is not installed: pip install triton (Linux)"
        if device.type not in ("cuda", "cpu"):
            return f"flex_attention runs on cuda and cpu here, not on {device.type}"
        return None

    @classmethod
    def unsupported(cls, spec: AttentionSpec, cache: CacheFormat) -> Exception | None:
        """Caches of 8-bit floats or no floats, and groups of heads that no tile holds."""
        if cache.dtype.itemsize == 1 or not cache.dtype.is_floating_point:
            return ConfigError(
                "cache_dtype",
                cache.dtype,
                "is not read by flex_attention",
                "use the dtype of the model, or another attention backend",
            )
        if spec.num_heads > MAX_ROWS * spec.num_kv_heads:
            return ConfigError(
                "num_heads",
                spec.num_heads,
                f"are more than {MAX_ROWS} for each of {spec.num_kv_heads} key-value heads",
                "use another attention backend",
            )
        return None

    def prepare(self, metadata: AttentionMetadata) -> FlexStep:
        """Room for the mask of one step; the first layer computes it."""
        spec, page_size = self.spec, self.cache.block_size
        tiling = choose_tiling(
            metadata,
            group=spec.num_heads // spec.num_kv_heads,
            num_kv_heads=spec.num_kv_heads,
            num_programs=self._num_programs,
        )
        mask = TileMask(
            tiling,
            metadata,
            page_size=page_size,
            kv_block=self._kv_block,
            sliding_window=spec.sliding_window,
            device=self.device,
        )
        attend = tiled_attention(
            spec, page_size, self._kv_block, tiling.tile_len, tiling.num_splits, self._is_cuda
        )
        return FlexStep(mask, attend)

    def prepare_for_graph(self, metadata: AttentionMetadata, key: BatchDescriptor) -> FlexStep:
        """The same room whenever the same key is asked for."""
        shape = (metadata.num_tokens, metadata.num_reqs, metadata.uniform_query_len)
        step = self._steps.get((key, *shape))
        if step is None:
            step = self._steps[key, *shape] = self.prepare(metadata)
        return step

    @torch.no_grad()
    def attend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        prepared: FlexStep,
    ) -> None:
        """See `AttentionBackend.attend`."""
        if not (metadata.num_tokens and metadata.num_reqs):
            return
        table = self._refreshed(prepared, cache, metadata)
        mask, tiling = prepared.mask, prepared.mask.tiling
        shape = (tiling.num_tiles, tiling.tile_len, *query.shape[1:])
        if tiling.is_uniform:
            query, result = query.view(shape), output.view(shape)
        else:
            query = query.index_select(0, mask.rows_of_tiles).view(shape)
            result = torch.empty_like(query)
        prepared.attend(
            query,
            result,
            cache.keys,
            self._finite(cache.values),
            mask.positions,
            mask.table_starts,
            mask.kv_num_blocks,
            mask.kv_indices,
            table.view(-1),
        )
        if not tiling.is_uniform:
            torch.index_select(result.flatten(0, 1), 0, mask.rows_of_tokens, out=output)

    def _refreshed(
        self, step: FlexStep, cache: LayerCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """The pages of the step's requests; computed, as the mask is, in the first layer."""
        if step.logical_pages is None:
            step.logical_pages = self._table(metadata.num_reqs, cache)
        if step.first_layer.is_of(cache):
            step.mask.refresh(metadata, step.logical_pages)
        return step.logical_pages

    def _table(self, num_reqs: int, cache: LayerCache) -> torch.Tensor:
        """One table for all steps; each writes what it reads, and steps follow each other."""
        num_blocks = cache.keys.shape[0]
        if num_blocks * cache.keys.stride(0) >= 2**31:
            raise ConfigError(
                "num_blocks",
                num_blocks,
                "makes a cache of more than 2**31 elements, which flex_attention cannot address",
                "use fewer blocks, or another attention backend",
            )
        num_rows, num_columns = self._logical_pages.shape
        if num_rows < num_reqs or num_columns != num_blocks + 1:
            shape = (max(num_reqs, num_rows), num_blocks + 1)
            self._logical_pages = self._logical_pages.new_full(shape, -1)
        return self._logical_pages

    def _finite(self, values: torch.Tensor) -> torch.Tensor:
        """The reference reads the whole cache, also what no block of the mask holds."""
        return values if self._is_cuda else values.nan_to_num()
