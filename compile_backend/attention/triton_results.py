"""Triton kernels that finish what attention left: partial results, and what is quantised later.

A kernel that attends may quantise by itself, without a launch more. But with that at its end the
compiler orders the loop over keys in a way that takes a tenth longer, so where the loop is long
another kernel quantises. This file refuses to know how results come about.
"""

from __future__ import annotations

import triton
import triton.language as tl

from passes.exact_quotient import divided


@triton.jit(do_not_specialize=["num_reqs"])
def reduce_kernel(
    partial,
    output,
    query_start_loc,
    output_scale,
    num_reqs,
    output_token_stride,
    output_head_stride,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    RESULT_SIZE: tl.constexpr,
    ROUNDED: tl.constexpr,
    FP8_MAX: tl.constexpr,
    MULTIPLIES: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Reduce the partial results of one token and head. Grid: (tokens, heads).

    - `partial` is what `attend_kernel` leaves of split keys.
    - `FP8_MAX` 0 is an output that is not quantised; then `output_scale` is never followed.
    - `ROUNDED`: dtype that results have without quantisation.
    - `MULTIPLIES`: see `as_fp8`.
    """
    token = tl.program_id(0).to(tl.int64)
    if token >= tl.load(query_start_loc + num_reqs):
        return
    head = tl.program_id(1)
    by = tl.load(output_scale) if FP8_MAX > 0 else 1.0
    splits = tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, HEAD_PAD)
    row = (token * tl.num_programs(1) + head) * NUM_SPLITS
    results = partial + (row + splits) * RESULT_SIZE
    log_sums = tl.load(results + HEAD_SIZE)
    is_full = log_sums > float("-inf")
    largest = tl.max(log_sums, 0)
    weights = tl.exp2(log_sums - tl.where(largest > float("-inf"), largest, 0.0))
    total = tl.sum(weights, 0)
    accs = tl.load(
        results[:, None] + dims[None, :],
        mask=is_full[:, None] & (dims < HEAD_SIZE)[None, :],
        other=0.0,
    )
    acc = tl.sum(accs * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    if FP8_MAX > 0:
        acc = as_fp8(acc.to(ROUNDED), by, ROUNDED, FP8_MAX, MULTIPLIES, IS_INTERPRETED)
    place = token * output_token_stride + head * output_head_stride
    result = acc.to(output.dtype.element_ty)
    tl.store(output + place + dims, result, mask=dims < HEAD_SIZE)


@triton.jit(do_not_specialize=["num_reqs"])
def quantise_kernel(
    wide,
    output,
    query_start_loc,
    output_scale,
    num_reqs,
    output_token_stride,
    output_head_stride,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    KIND: tl.constexpr,
    FP8_MAX: tl.constexpr,
    MULTIPLIES: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Quantise some heads of one token. Grid: (tokens, blocks of `HEADS` heads).

    - `wide` is `[num_tokens, NUM_HEADS, HEAD_SIZE]`, contiguous, of dtype `KIND`.
    - `FP8_MAX`, `MULTIPLIES`: see `as_fp8`.
    """
    token = tl.program_id(0).to(tl.int64)
    if token >= tl.load(query_start_loc + num_reqs):
        return
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, HEAD_PAD)
    is_element = (heads < NUM_HEADS)[:, None] & (dims < HEAD_SIZE)[None, :]
    places = wide + token * (NUM_HEADS * HEAD_SIZE) + heads[:, None] * HEAD_SIZE + dims[None, :]
    values = tl.load(places, mask=is_element, other=0.0)
    by = tl.load(output_scale)
    result = as_fp8(values, by, KIND, FP8_MAX, MULTIPLIES, IS_INTERPRETED)
    place = token * output_token_stride + heads * output_head_stride
    tl.store(
        output + place[:, None] + dims[None, :],
        result.to(output.dtype.element_ty),
        mask=is_element,
    )


@triton.jit
def as_fp8(
    values,
    scale,
    KIND: tl.constexpr,
    FP8_MAX: tl.constexpr,
    MULTIPLIES: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Values of dtype `KIND` by a scale and cut to the range, in float32.

    They are multiplied or divided exactly, so that torch finds the same bits. What is no number
    stays none.
    """
    values = values.to(tl.float32)
    values = values * scale if MULTIPLIES else divided(values, scale, KIND, IS_INTERPRETED)
    return tl.clamp(values, -FP8_MAX, FP8_MAX, tl.PropagateNan.ALL)
