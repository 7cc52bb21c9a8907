"""What kernels of FlashAttention cannot compute, as the errors that say so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compile_backend.errors import ConfigError

if TYPE_CHECKING:
    from compile_backend.attention.spec import AttentionSpec, CacheFormat

_MAX_HEAD_SIZE = 256


def no_soft_cap(spec: AttentionSpec, where: str) -> ConfigError | None:
    """The error for a soft cap; None without one.

    Args:
        spec: of the layer.
        where: it is not.
    """
    if spec.soft_cap is None:
        return None
    return ConfigError(
        "soft_cap",
        spec.soft_cap,
        f"is not in {where}",
        "use attention backend 'triton' or 'flashinfer'",
    )


def only_16_bits(cache: CacheFormat, problem: str) -> ConfigError | None:
    """The error for a cache of anything but 16-bit floats; None for those.

    Args:
        cache: of the layer.
        problem: with other dtypes.
    """
    if cache.dtype in (torch.float16, torch.bfloat16):
        return None
    return ConfigError(
        "cache_dtype",
        cache.dtype,
        problem,
        "use torch.bfloat16 or torch.float16, or attention backend 'triton'",
    )


def even_head_size(spec: AttentionSpec) -> ConfigError | None:
    """The error for heads that are too large or of an odd size; None for others."""
    if spec.head_size <= _MAX_HEAD_SIZE and not spec.head_size % 8:
        return None
    return ConfigError(
        "head_size",
        spec.head_size,
        f"is not a multiple of 8 up to {_MAX_HEAD_SIZE}",
        "use attention backend 'triton'",
    )
