"""A Triton kernel that stores a step's keys and values in the paged cache.

One launch for both, and nothing of it is decided on the host: slots are read on the device, so a
graph may hold it. This file refuses to know requests: a token has a slot or it has none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile_backend.attention.triton_kept import KeptKernel
from compile_backend.attention.triton_plan import next_power_of_2

MAX_ELEMENTS = 1024
"""Of a token's keys that one program copies: eight for each of 128 threads, 16 bytes of bf16."""


def store_with_triton(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Write each token's key and value to its slot; tokens with slot -1 are not even read.

    Caches of 8-bit floats hold the rows divided by their scale and cut to the range of the type;
    others hold them as they are. It may be captured: the grid depends on shapes alone.

    Args:
        key: `[num_tokens, num_kv_heads, head_size]`, a view of any strides.
        value: likewise.
        key_cache: `[num_blocks, block_size, num_kv_heads, head_size]`, of any strides but with
            the elements of a head side by side.
        value_cache: of the same shape and strides.
        slot_mapping: `[num_tokens]` int64; `block * block_size + offset` of each token, or -1.
        key_scale: used by caches of 8-bit floats.
        value_scale: likewise.
    """
    facts = (key.shape, key_scale, value_scale)
    tensors = (key, value, key_cache, value_cache, slot_mapping)
    if _STORE.repeat(id(key_cache), tensors, facts):
        return
    num_tokens, num_kv_heads, head_size = key.shape
    if not num_tokens:
        return
    key, value = with_adjacent_elements(key), with_adjacent_elements(value)
    block_stride, slot_stride, head_stride = cache_strides(key_cache, value_cache)
    dtype = key_cache.dtype
    num_elements = num_kv_heads * head_size
    block = min(MAX_ELEMENTS, next_power_of_2(num_elements))
    _STORE.launch(
        (num_tokens, -(-num_elements // block)),
        (key, value, key_cache, value_cache, slot_mapping),
        (
            float(key_scale),
            float(value_scale),
            *key.stride()[:2],
            *value.stride()[:2],
            block_stride,
            slot_stride,
            head_stride,
        ),
        (
            num_kv_heads,
            head_size,
            key_cache.shape[1],
            block,
            torch.finfo(dtype).max if dtype.itemsize == 1 else 0.0,
        ),
        slot=id(key_cache),
        facts=facts,
        num_warps=4,
    )


def with_adjacent_elements(rows: torch.Tensor) -> torch.Tensor:
    """The rows themselves, or a copy where the elements of a head are not side by side."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def cache_strides(key_cache: torch.Tensor, value_cache: torch.Tensor) -> tuple[int, int, int]:
    """Strides of blocks, slots and heads, which the kernels take once for both caches."""
    strides = key_cache.stride()
    assert strides == value_cache.stride(), "keys and values must be laid out alike"
    assert strides[3] == 1, "the elements of a head must be side by side"
    return strides[0], strides[1], strides[2]


@triton.jit
def store_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_scale,
    value_scale,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    slot_stride,
    head_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Copy `BLOCK` elements of one token. Grid: tokens, then the parts of a token's heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    elements = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = elements < NUM_KV_HEADS * HEAD_SIZE
    heads = elements // HEAD_SIZE
    dims = elements % HEAD_SIZE
    keys = tl.load(key + token * key_token_stride + heads * key_head_stride + dims, mask=is_inside)
    values = tl.load(
        value + token * value_token_stride + heads * value_head_stride + dims, mask=is_inside
    )
    if LIMIT > 0:
        keys = _to_range(keys, key_scale, LIMIT)
        values = _to_range(values, value_scale, LIMIT)
    place = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride
    place += heads * head_stride + dims
    tl.store(key_cache + place, keys.to(key_cache.dtype.element_ty), mask=is_inside)
    tl.store(value_cache + place, values.to(value_cache.dtype.element_ty), mask=is_inside)


@triton.jit
def _to_range(rows, scale, LIMIT: tl.constexpr):
    """Divide exactly, so that a cache written by torch holds the same bits."""
    rows = tl.div_rn(rows.to(tl.float32), scale)
    return tl.minimum(tl.maximum(rows, -LIMIT), LIMIT)


_STORE = KeptKernel(store_kernel)
