"""FlashAttention 2 as torch ships it, over the paged cache.

torch's `varlen_attn_out` reads pages since 2.13. A release is judged by the arguments that the
function takes, never by its number.

Batches whose requests have one query length can be captured: lengths of keys are read on the
device, and how often they are split follows from `max_seq_len`, which a graph freezes as the
worst case. This file refuses to know graphs.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn.attention import varlen

from compile_backend.attention.backend import AttentionBackend
from compile_backend.attention.limits import even_head_size, no_soft_cap, only_16_bits
from compile_backend.attention.requirements import it_needs, lacking_device
from compile_backend.errors import ConfigError
from compile_backend.support import AttentionCGSupport

if TYPE_CHECKING:
    from collections.abc import Callable

    from compile_backend.attention.kv_cache import LayerCache
    from compile_backend.attention.metadata import AttentionMetadata
    from compile_backend.attention.spec import AttentionSpec, CacheFormat

PAGED_ARGUMENTS = ("seqused_k", "block_table", "enable_gqa", "window_size", "scale")
"""What torch's function must take so that it can read the paged cache."""

_BLOCK_SIZE_UNIT = 256


def arguments_lacking(function: Callable[..., Any] | None) -> tuple[str, ...]:
    """Which of `PAGED_ARGUMENTS` the function does not take; all of them if there is none."""
    taken = inspect.signature(function).parameters if function is not None else ()
    return tuple(name for name in PAGED_ARGUMENTS if name not in taken)


class FlashAttention2(AttentionBackend):
    """FlashAttention 2 on Ampere and later; see the module's text.

    Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work
    Partitioning", 2023.
    """

    name: ClassVar[str] = "flash_attn_2"
    support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, spec: AttentionSpec, cache: CacheFormat, device: torch.device) -> None:
        super().__init__(spec, cache, device)
        self._attend = varlen.varlen_attn_out
        self._window = (spec.window_left, 0)

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        """A GPU of the last generations, and a torch whose function reads pages."""
        return it_needs(
            lacking_device(device, minimum=(8, 0)),
            lacking_torch(getattr(varlen, "varlen_attn_out", None)),
        )

    @classmethod
    def unsupported(cls, spec: AttentionSpec, cache: CacheFormat) -> Exception | None:
        """A soft cap, another cache than of 16-bit floats, small blocks, odd or large heads."""
        return (
            no_soft_cap(spec, "torch's FlashAttention 2")
            or only_16_bits(cache, "has no kernels")
            or _whole_units(cache)
            or even_head_size(spec)
        )

    def attend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        prepared: Any,
    ) -> None:
        """See `AttentionBackend.attend`."""
        del prepared
        self._attend(
            output,
            query,
            cache.keys,
            cache.values,
            metadata.query_start_loc,
            None,  # where keys start is the block table's business
            metadata.max_query_len,
            metadata.max_seq_len,
            scale=self.spec.scale,
            window_size=self._window,
            enable_gqa=self.spec.num_heads != self.spec.num_kv_heads,
            seqused_k=metadata.seq_lens,
            block_table=metadata.block_table,
        )


def lacking_torch(function: Callable[..., Any] | None) -> str | None:
    """Which torch is needed instead of this one; None if this one reads pages.

    Args:
        function: `torch.nn.attention.varlen.varlen_attn_out`; None if torch has none.
    """
    lacking = arguments_lacking(function)
    if not lacking:
        return None
    what = f"takes no {', '.join(lacking)}" if function is not None else "does not exist"
    return (
        f"a torch whose torch.nn.attention.varlen.varlen_attn_out reads a paged cache: in torch "
        f"{torch.__version__} it {what}; install torch>=2.13, or use attention backend 'triton'"
    )


def _whole_units(cache: CacheFormat) -> ConfigError | None:
    """The error for blocks that the kernels' tiles do not fit into; None for others."""
    if not cache.block_size % _BLOCK_SIZE_UNIT:
        return None
    return ConfigError(
        "block_size",
        cache.block_size,
        f"is not a multiple of {_BLOCK_SIZE_UNIT}",
        f"use {_BLOCK_SIZE_UNIT}, or attention backend 'triton'",
    )
