"""FlashAttention 3 over the paged cache: one kernel for prefill, decode and mixtures of them.

Why every batch can be captured: what the package decides on the host (tile shape, whether heads
are packed, the most parts that a request's keys are split into) it takes from shapes and from
`max_query_len`, which a graph freezes together with its key. How many parts each request gets,
and which tiles exist, a small kernel works out from the lengths on the device, so a replay adapts
to them. It runs once a step, in the first layer, which is how it comes into a graph too. Requests
without tokens have no tiles.

This file refuses to know graphs: it runs the same way inside and outside of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from compile_backend.attention.backend import AttentionBackend, on_host
from compile_backend.attention.first_layer import FirstLayer
from compile_backend.attention.limits import even_head_size, no_soft_cap, only_16_bits
from compile_backend.attention.requirements import it_needs, lacking_device, lacking_package
from compile_backend.support import AttentionCGSupport

if TYPE_CHECKING:
    from compile_backend.attention.kv_cache import LayerCache
    from compile_backend.attention.metadata import AttentionMetadata
    from compile_backend.attention.spec import AttentionSpec, CacheFormat

REQUIREMENT = "tokenspeed-fa3==3.0.0.post20260810"
"""The build of FlashAttention 3 that these calls were checked against."""


@dataclass(slots=True)
class _Schedule:
    """What the small kernel made for the running step, and which layer runs it."""

    first_layer: FirstLayer = field(default_factory=FirstLayer)
    made: torch.Tensor | None = None


class FlashAttention3(AttentionBackend):
    """FlashAttention 3 on Hopper (compute capability 9.x); see the module's text.

    Source: Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and
    Low-precision", 2024.
    """

    name: ClassVar[str] = "flash_attn_3"
    support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, spec: AttentionSpec, cache: CacheFormat, device: torch.device) -> None:
        super().__init__(spec, cache, device)
        from flash_attn_interface import get_scheduler_metadata  # registers the ops as well

        # `flash_attn_with_kvcache` takes no `out` and goes through a custom op written in Python,
        # which costs the host more than the kernels' own op does.
        self._attend = torch.ops.flash_attn_3.fwd.default
        self._make_schedule = get_scheduler_metadata

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        """A Hopper GPU and the package."""
        return it_needs(
            lacking_device(device, minimum=(9, 0), same_major=True),
            lacking_package("flash_attn_interface", REQUIREMENT),
        )

    @classmethod
    def unsupported(cls, spec: AttentionSpec, cache: CacheFormat) -> Exception | None:
        """A soft cap, an 8-bit or 32-bit cache, heads that are too large or of an odd size."""
        eight_bits = cache.dtype.itemsize == 1
        return (
            no_soft_cap(spec, "this build of FlashAttention 3")
            or only_16_bits(
                cache, "would need queries of 8 bits too" if eight_bits else "has no kernels"
            )
            or even_head_size(spec)
        )

    @on_host
    def prepare(self, metadata: AttentionMetadata) -> _Schedule:
        """An empty schedule: the first layer of every run fills it."""
        del metadata
        return _Schedule()

    def attend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        prepared: Any,
    ) -> None:
        """See `AttentionBackend.attend`."""
        self._attend(
            query,
            cache.keys,
            cache.values,
            out=output,
            cu_seqlens_q=metadata.query_start_loc,
            seqused_k=metadata.seq_lens,
            max_seqlen_q=metadata.max_query_len,
            page_table=metadata.block_table,
            softmax_scale=self.spec.scale,
            is_causal=True,
            window_size_left=self.spec.window_left,
            window_size_right=0,
            num_splits=0,  # the package's choice: see the module's text
            scheduler_metadata=self._schedule(query, cache, metadata, prepared),
        )

    def _schedule(
        self,
        query: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        prepared: _Schedule | None,
    ) -> torch.Tensor | None:
        if prepared is None:
            return None
        if prepared.first_layer.is_of(cache):
            prepared.made = self._make_schedule(
                metadata.num_reqs,
                metadata.max_query_len,
                metadata.block_table.shape[1] * self.cache.block_size,
                self.spec.num_heads,
                self.spec.num_kv_heads,
                self.spec.head_size,
                metadata.seq_lens,
                qkv_dtype=query.dtype,
                cu_seqlens_q=metadata.query_start_loc,
                page_size=self.cache.block_size,
                causal=True,
                window_size=(self.spec.window_left, 0),
            )
        return prepared.made
