"""The paged cache of keys and values, and how a step's are stored in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache of one layer.

    Attributes:
        keys: `[num_blocks, block_size, num_kv_heads, head_size]`.
        values: like `keys`.
        key_scale: stored keys are the true ones divided by this.
        value_scale: likewise.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0


def store(
    key: torch.Tensor, value: torch.Tensor, cache: LayerCache, slot_mapping: torch.Tensor
) -> None:
    """Write each token's key and value to its slot; tokens with slot -1 are skipped.

    It may be captured: nothing here reads a tensor from the host.

    Args:
        key: `[num_tokens, num_kv_heads, head_size]`.
        value: like `key`.
        cache: written in place.
        slot_mapping: `[num_tokens]` int64.
    """
    if key.is_cuda:
        from compile_backend.attention.triton_cache import store_with_triton

        store_with_triton(
            key, value, cache.keys, cache.values, slot_mapping, cache.key_scale, cache.value_scale
        )
        return
    _store(key, cache.keys, cache.key_scale, slot_mapping)
    _store(value, cache.values, cache.value_scale, slot_mapping)


def _store(rows: torch.Tensor, cache: torch.Tensor, scale: float, slots: torch.Tensor) -> None:
    """Rows to be skipped repeat the write of the first row that is not: no size depends on data.

    Where every row is to be skipped they write the first slot's own contents back. Contents move
    as bits, so that they stay what they are.
    """
    if not len(rows):
        return
    bits = _BITS[cache.dtype.itemsize]
    flat = cache.view(-1, *cache.shape[2:]).view(bits)
    rows = to_cache_dtype(rows, cache.dtype, scale).view(bits)
    is_stored = slots >= 0
    # Of one element, not of none: the latter would be read by the host when it indexes.
    first = is_stored.to(torch.int32).argmax(0, keepdim=True)
    stand_in = torch.where(is_stored[first, None, None], rows[first], flat[:1])
    rows = torch.where(is_stored[:, None, None], rows, stand_in)
    flat[torch.where(is_stored, slots, slots[first].clamp(min=0))] = rows


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def to_cache_dtype(rows: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Rows as they are stored: divided by the scale, and cut to the range of 8-bit floats."""
    if dtype.itemsize > 1:
        return rows.to(dtype)
    limit = torch.finfo(dtype).max
    return (rows.float() / scale).clamp(-limit, limit).to(dtype)
