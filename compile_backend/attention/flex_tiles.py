"""`flex_attention` of tiles over the whole paged cache: the part that is compiled.

The query heads of a key-value head are rows of the same tile, so that a program reads keys and
values once for all of them, and any ratio of heads will do. On CUDA `flex_attention` is compiled
with what surrounds it; on the CPU its uncompiled reference runs, which is slow, and for tests.
This file refuses to know requests and steps.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from compile_backend.attention.flex_mask import MIN_ROWS, next_power_of_2
from compile_backend.torch_internals.sizes import with_dynamic_sizes

if TYPE_CHECKING:
    from collections.abc import Callable

    from compile_backend.attention.spec import AttentionSpec

_LN_2 = math.log(2)

_MAX_COMPILATIONS = 256
"""Of one process; Dynamo's limit of 8 is meant for code that recompiles by mistake."""

_DYNAMIC_AXES = ((0,), (0,), (0,), (0,), (0,), (0,), (0,), (0, 2), (0,))
"""Of each tensor of `TiledAttention.forward`; all other sizes are those of the spec."""

_MAX_KV_BYTES = 16384
"""Of the keys that a program holds at once: three stages of keys and values fit beside a tile."""


class TiledAttention(torch.nn.Module):
    """Attention of tiles, `[num_tiles, tile_len, num_heads, head_size]`.

    A module, since Dynamo holds integers of modules constant, and those of other objects not.

    Args:
        spec: the mathematics.
        page_size: tokens of a cache block.
        kv_block: slots of a block of the mask.
        tile_len: most tokens of a tile.
        num_splits: parts of a context that are attended to in parallel.
        is_compiled: whether it is traced, not run.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        page_size: int,
        kv_block: int,
        tile_len: int,
        num_splits: int,
        is_compiled: bool,
    ) -> None:
        super().__init__()
        self.num_kv_heads = spec.num_kv_heads
        self.group = spec.num_heads // spec.num_kv_heads
        self.head_size = spec.head_size
        self.window = spec.sliding_window
        # As text, since Dynamo makes an input of a float that differs from one spec to the next.
        self.scale = repr(float(spec.scale))
        self.soft_cap = None if spec.soft_cap is None else repr(float(spec.soft_cap))
        self.page_size = page_size
        self.kv_block = kv_block
        self.tile_len = tile_len
        self.num_splits = num_splits
        self.is_compiled = is_compiled
        self.num_rows = tile_len * self.group
        self.block_m = max(MIN_ROWS, next_power_of_2(self.num_rows))
        self.num_warps = 4 if self.block_m < 64 else 8

    def forward(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
        table_starts: torch.Tensor,
        kv_num_blocks: torch.Tensor,
        kv_indices: torch.Tensor,
        logical_pages: torch.Tensor,
    ) -> None:
        """Attend, and write `output`; rows without a token become 0.

        Args:
            query: `[num_tiles, tile_len, num_heads, head_size]`.
            output: like `query`.
            keys: `[num_blocks, page_size, num_kv_heads, head_size]`, the whole cache.
            values: like `keys`.
            positions: see `TileMask`.
            table_starts: likewise.
            kv_num_blocks: likewise.
            kv_indices: likewise.
            logical_pages: `[num_reqs * (num_blocks + 1)]`, see `TileMask.refresh`.
        """
        num_tiles, splits = query.shape[0], self.num_splits
        num_slots = keys.shape[0] * self.page_size
        page_size, group, window = self.page_size, self.group, self.window

        # It may capture sizes of inputs, but nothing that is computed from them: torch 2.11 lowers
        # `num_blocks + 1` as if it were a tensor, and fails.
        def is_seen(
            batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, slot: torch.Tensor
        ) -> torch.Tensor:
            del head
            tile = batch // splits
            page = logical_pages[table_starts[tile] + slot // page_size]
            distance = positions[tile, row // group] - (page * page_size + slot % page_size)
            seen = (page >= 0) & (distance >= 0)
            return seen if window is None else seen & (distance < window)

        heads = (self.num_kv_heads, self.num_rows, self.head_size)
        rows = query.view(num_tiles, self.tile_len, self.num_kv_heads, group, self.head_size)
        rows = rows.transpose(1, 2).reshape(num_tiles, *heads)
        if splits > 1:
            rows = rows.unsqueeze(1).expand(num_tiles, splits, *heads).flatten(0, 1)
        block_mask = BlockMask.from_kv_blocks(
            kv_num_blocks.view(num_tiles * splits, 1, 1),
            kv_indices.view(num_tiles * splits, 1, 1, kv_indices.shape[2]),
            BLOCK_SIZE=(self.block_m, self.kv_block),
            mask_mod=is_seen,
            seq_lengths=(self.num_rows, num_slots),
            compute_q_blocks=False,
        )
        result, lse = self._flex(
            rows, _by_heads(keys, num_slots), _by_heads(values, num_slots), block_mask
        )
        if splits > 1:
            result = _merged(
                result.view(num_tiles, splits, *heads), lse.view(num_tiles, splits, *heads[:2])
            )
        result = result.view(num_tiles, heads[0], self.tile_len, group, self.head_size)
        output.copy_(result.transpose(1, 2).flatten(2, 3))

    def _flex(
        self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block_mask: BlockMask
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention of rows, and the logarithm of the sum of each row's weights."""
        scale, cap = float(self.scale), None if self.soft_cap is None else float(self.soft_cap)

        def score_mod(
            score: torch.Tensor,
            batch: torch.Tensor,
            head: torch.Tensor,
            row: torch.Tensor,
            slot: torch.Tensor,
        ) -> torch.Tensor:
            del batch, head, row, slot
            return score if cap is None else cap * torch.tanh(score / cap)

        if not self.is_compiled:
            # The op itself: the function would compile the reference, for every mask anew.
            result, lse, _ = torch.ops.higher_order.flex_attention(
                rows, keys, values, score_mod, block_mask.as_tuple(), scale, {}
            )
            return result, lse * _LN_2
        options: dict[str, Any] = {
            "BACKEND": "TRITON",
            "BLOCK_M": self.block_m,
            "BLOCK_N": self._block_n(keys),
            "num_warps": self.num_warps,
            # Said here, since flex_attention takes no dynamic length for a multiple of anything.
            "IS_DIVISIBLE": self.num_rows == self.block_m and self.page_size == self.kv_block,
        }
        flex: Any = flex_attention  # its overloads know no dict of options
        inputs = (rows, keys, values, score_mod, block_mask, scale)
        if self.num_splits == 1:
            result = flex(*inputs, kernel_options=options)
            return result, result
        result, aux = flex(*inputs, kernel_options=options, return_aux=AuxRequest(lse=True))
        return result, aux.lse

    def _block_n(self, keys: torch.Tensor) -> int:
        """The greatest power of two that divides a block of the mask, of what fits."""
        fits = _MAX_KV_BYTES // (next_power_of_2(self.head_size) * keys.element_size())
        return max(MIN_ROWS, min(self.kv_block & -self.kv_block, fits))


def _by_heads(cache: torch.Tensor, num_slots: int) -> torch.Tensor:
    """The cache as `[1, num_kv_heads, num_slots, head_size]`, a view."""
    return cache.view(1, num_slots, cache.shape[2], cache.shape[3]).transpose(1, 2)


def _merged(results: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Attention over contexts from that over their parts, `[num_tiles, num_splits, ...]`."""
    weights = (lse - lse.amax(1, keepdim=True).clamp(min=-1e30)).exp()
    weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-30)
    return (results * weights.unsqueeze(-1)).sum(1)


class CompiledTiles:
    """Compiled attention of tiles, which makes room for its compilations at Dynamo's limit.

    Which sizes are dynamic is said before the first compilation. Dynamo would find out by
    compiling twice, and would take sizes that only differ from one spec to the next for dynamic.
    """

    def __init__(self, attention: TiledAttention) -> None:
        self._compiled = torch.compile(attention, fullgraph=True, dynamic=False)
        self._met: set[tuple[object, ...]] = set()

    def __call__(self, *tensors: torch.Tensor) -> None:
        """See `TiledAttention.forward`."""
        layouts = (tensors[0].dtype, *[(item.shape, item.stride()) for item in tensors])
        if layouts in self._met:
            self._compiled(*tensors)
            return
        self._met.add(layouts)
        limits = {
            "recompile_limit": _MAX_COMPILATIONS,
            "accumulated_recompile_limit": _MAX_COMPILATIONS,
        }
        config: Any = torch.compiler.config
        with config.patch(limits):
            self._compiled(*map(with_dynamic_sizes, tensors, _DYNAMIC_AXES))


@functools.cache
def tiled_attention(
    spec: AttentionSpec,
    page_size: int,
    kv_block: int,
    tile_len: int,
    num_splits: int,
    is_compiled: bool,  # noqa: FBT001 - part of a key
) -> Callable[..., None]:
    """The one `TiledAttention` of the process with these settings, compiled if so asked."""
    attention = TiledAttention(
        spec,
        page_size=page_size,
        kv_block=kv_block,
        tile_len=tile_len,
        num_splits=num_splits,
        is_compiled=is_compiled,
    )
    return CompiledTiles(attention) if is_compiled else attention
