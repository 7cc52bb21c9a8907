"""Triton kernels of causal attention over a paged cache: for every batch, in a graph or not.

One kernel serves prefill, decode and mixes of them. A program takes a block of queries of one
key-value head, all query heads of the group packed as rows, so that keys and values are loaded
once for the group; it walks over its share of the keys with an online softmax in float32. Where
the keys are split among programs, each leaves a partial result.

All lengths are read on the device. What the host decides (grids, tiles, splits) is in
`triton_plan.py` and holds for every batch of a graph's key; this file refuses to know why, and
what becomes of partial results (`triton_results.py`).

Sources: FlashAttention (arXiv 2205.14135, 2307.08691), Flash-Decoding (split keys), and
PagedAttention (arXiv 2309.06180).
"""

from __future__ import annotations

import triton
import triton.language as tl

from compile_backend.attention.triton_results import as_fp8


@triton.jit(do_not_specialize=["num_reqs"])
def attend_kernel(
    results,
    query,
    key_cache,
    value_cache,
    query_start_loc,
    seq_lens,
    block_table,
    output_scale,
    num_reqs,
    qk_scale,
    value_scale,
    query_token_stride,
    query_head_stride,
    result_token_stride,
    result_head_stride,
    block_stride,
    slot_stride,
    head_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    RESULT_SIZE: tl.constexpr,
    ROUNDED: tl.constexpr,
    FP8_MAX: tl.constexpr,
    MULTIPLIES: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Attend with one block of queries to one share of the keys.

    Grid: (blocks of queries times key-value heads, splits). Rows of a block are
    `token * GROUP + head of the group`.

    - `IS_SPLIT`: results are `[num_tokens, num_heads, splits, RESULT_SIZE]` in float32: each is
      over some of the keys, with the log2 of its sum after its elements.
    - `qk_scale` is the scale of the scores times that of the keys and log2(e), and positive.
    - `WINDOW` is how many of the latest tokens a query sees, 0 for all; `SOFT_CAP` 0 is none.
    - `IS_WHOLE`: each request's queries fit in one block, so block `r` is request `r`.
    - `ROUNDED`, `FP8_MAX`, `MULTIPLIES`: as of `reduce_kernel`; results that are to be reduced or
      quantised later have an `FP8_MAX` of 0.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)
    # Later queries of a request see more keys: they start first, so that none runs alone at last.
    block = (tl.num_programs(0) - 1 - tl.program_id(0)) // NUM_KV_HEADS
    if IS_WHOLE:
        req = block
        first = 0
    else:
        req = _request_of(block, query_start_loc, num_reqs, BLOCK_Q)
        first = (block - tl.load(query_start_loc + req) // BLOCK_Q - req) * BLOCK_Q
    query_start = tl.load(query_start_loc + req)
    query_len = tl.load(query_start_loc + req + 1) - query_start
    if first >= query_len:
        return
    seq_len = tl.load(seq_lens + req)
    context = seq_len - query_len
    by = tl.load(output_scale) if FP8_MAX > 0 else 1.0  # early: it comes while keys are read

    rows = tl.arange(0, BLOCK_M)
    tokens = first + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = (rows < BLOCK_Q * GROUP) & (tokens < query_len)
    dims = tl.arange(0, HEAD_PAD)
    is_element = is_row[:, None] & (dims < HEAD_SIZE)[None, :]
    token_rows = (query_start + tokens).to(tl.int64)
    queries = tl.load(
        query
        + (token_rows * query_token_stride + heads * query_head_stride)[:, None]
        + dims[None, :],
        mask=is_element,
        other=0.0,
    )
    positions = context + tokens

    end = tl.minimum(context + first + BLOCK_Q, seq_len)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(context + first - WINDOW + 1, 0) // TILE * TILE
    if IS_SPLIT:
        share = tl.cdiv(tl.cdiv(end - begin, TILE), num_splits) * TILE
        begin += split * share
        end = tl.minimum(end, begin + share)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
    keys = key_cache + kv_head * head_stride
    values = value_cache + kv_head * head_stride
    table = block_table + req.to(tl.int64) * table_stride
    # The keys that every row sees need no mask. Few queries leave too little work to pay for
    # filling the pipeline twice.
    masked_begin = begin
    if WINDOW == 0 and not IS_WHOLE:
        masked_begin = tl.maximum(begin, tl.minimum(end, context + first + 1) // TILE * TILE)
        for start in range(begin, masked_begin, TILE):
            acc, row_max, row_sum = _attend_tile(
                acc, row_max, row_sum, queries, positions, start, end, keys, values, table,
                block_stride, slot_stride, qk_scale,
                HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, WINDOW, SOFT_CAP, TILE, IS_INTERPRETED,
                IS_MASKED=False,
            )  # fmt: skip
    for start in range(masked_begin, end, TILE):
        acc, row_max, row_sum = _attend_tile(
            acc, row_max, row_sum, queries, positions, start, end, keys, values, table,
            block_stride, slot_stride, qk_scale,
            HEAD_SIZE, HEAD_PAD, BLOCK_SIZE, WINDOW, SOFT_CAP, TILE, IS_INTERPRETED,
            IS_MASKED=True,
        )  # fmt: skip

    is_empty = row_sum == 0.0
    row_sum = tl.where(is_empty, 1.0, row_sum)
    acc = acc * (value_scale / row_sum)[:, None]
    if IS_SPLIT:
        log_sum = tl.where(is_empty, float("-inf"), row_max + tl.log2(row_sum))
        num_heads = NUM_KV_HEADS * GROUP
        result = ((token_rows * num_heads + heads) * num_splits + split) * RESULT_SIZE
        tl.store(results + result + HEAD_SIZE, log_sum, mask=is_row)
        if begin < end:
            tl.store(results + result[:, None] + dims[None, :], acc, mask=is_element)
    else:
        if FP8_MAX > 0:
            acc = as_fp8(acc.to(ROUNDED), by, ROUNDED, FP8_MAX, MULTIPLIES, IS_INTERPRETED)
        place = token_rows * result_token_stride + heads * result_head_stride
        tl.store(
            results + place[:, None] + dims[None, :],
            acc.to(results.dtype.element_ty),
            mask=is_element,
        )


@triton.jit
def _request_of(block, query_start_loc, num_reqs, BLOCK_Q: tl.constexpr):
    """The request whose queries a block takes.

    Requests start their blocks at `query_start_loc[r] // BLOCK_Q + r`: at least as many blocks
    apart as they need, without a sum over those before. Counting the starts up to `block` is one
    round trip to memory for 256 requests, where a binary search is eight.
    """
    count = 0
    for base in range(0, num_reqs, 256):
        reqs = base + tl.arange(0, 256)
        starts = tl.load(query_start_loc + reqs, mask=reqs < num_reqs, other=0) // BLOCK_Q + reqs
        count += tl.sum(((starts <= block) & (reqs < num_reqs)).to(tl.int32))
    return count - 1


@triton.jit
def _attend_tile(
    acc,
    row_max,
    row_sum,
    queries,
    positions,
    start,
    end,
    keys,
    values,
    table,
    block_stride,
    slot_stride,
    qk_scale,
    HEAD_SIZE: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    TILE: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """One step of the online softmax: the keys `start:start + TILE`, none of them past `end`."""
    slots = start + tl.arange(0, TILE)
    dims = tl.arange(0, HEAD_PAD)
    if IS_MASKED:
        is_key = slots < end
        blocks = tl.load(table + slots // BLOCK_SIZE, mask=is_key, other=0)
    else:
        is_key = slots >= 0
        blocks = tl.load(table + slots // BLOCK_SIZE)
    places = blocks.to(tl.int64) * block_stride + (slots % BLOCK_SIZE) * slot_stride
    is_dim = dims < HEAD_SIZE
    key_places = keys + places[None, :] + dims[:, None]
    value_places = values + places[:, None] + dims[None, :]
    if IS_MASKED or HEAD_SIZE != HEAD_PAD:
        tile_keys = tl.load(key_places, mask=is_key[None, :] & is_dim[:, None], other=0.0)
        tile_values = tl.load(value_places, mask=is_key[:, None] & is_dim[None, :], other=0.0)
    else:
        tile_keys = tl.load(key_places)
        tile_values = tl.load(value_places)

    scores = _dot(queries, tile_keys.to(queries.dtype), IS_INTERPRETED)
    if SOFT_CAP > 0:
        # tanh(x) is 1 - 2 / (1 + exp(2x)); the cap turns natural exponents to those of 2.
        grown = tl.exp2(scores * (qk_scale * (2.0 / SOFT_CAP)))
        scores = (SOFT_CAP * 1.4426950408889634) * (1.0 - 2.0 / (1.0 + grown))
        scale = 1.0
    else:
        scale = qk_scale
    if IS_MASKED:
        is_seen = slots[None, :] <= positions[:, None]
        if WINDOW > 0:
            is_seen &= slots[None, :] > (positions - WINDOW)[:, None]
        scores = tl.where(is_seen, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    # A row that has seen nothing yet must not subtract infinity from infinity.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max) if IS_MASKED else new_max
    weights = tl.exp2(scores * scale - shift[:, None])
    shrink = tl.exp2(row_max - shift)
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc += _dot(weights.to(queries.dtype), tile_values.to(queries.dtype), IS_INTERPRETED)
    return acc, new_max, row_sum


@triton.jit
def _dot(left, right, IS_INTERPRETED: tl.constexpr):
    """In Triton's interpreter the product of bfloat16 is wrong in silence."""
    if IS_INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")
