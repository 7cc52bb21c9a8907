"""How the attention kernels are called: from a layer, a batch and a launch plan to arguments.

No tensor is read on the host, so all of it may be captured. This file refuses to choose sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from compile_backend.attention.fp8_output import FP8_MAX
from compile_backend.attention.triton_cache import cache_strides, with_adjacent_elements
from compile_backend.attention.triton_kept import KeptKernel
from compile_backend.attention.triton_kernels import attend_kernel, reduce_kernel
from compile_backend.attention.triton_plan import MIN_DOT_SIZE, next_power_of_2

if TYPE_CHECKING:
    from collections.abc import Hashable

    from compile_backend.attention.kv_cache import LayerCache
    from compile_backend.attention.metadata import AttentionMetadata
    from compile_backend.attention.spec import AttentionSpec
    from compile_backend.attention.triton_plan import LaunchPlan

LOG2_E = 1.4426950408889634

# These are arguments, not globals of the kernels: Triton compares globals at every launch.
IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
"""Of queries, as Triton calls them."""

AS_ATTENDED = (None, 0.0, False)
"""What `_as_output` is told for an output that is not quantised."""

NUM_STATS = 4
"""Floats after a partial result: the log2 of its sum, and some to keep 16 bytes aligned."""


def attend_with_triton(
    query: torch.Tensor,
    output: torch.Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    plan: LaunchPlan,
    scale: torch.Tensor | None = None,
    *,
    multiplies: bool = False,
) -> None:
    """Attend over what the cache holds, this step's keys and values included.

    Rows of `output` that are padding are left as they are.

    Args:
        query: `[num_tokens, num_heads, head_size]`.
        output: like `query`, with the elements of a head side by side; in 8-bit floats where there
            is a scale.
        cache: of the layer.
        metadata: of the step.
        spec: of the layer.
        plan: of the launch.
        scale: of the output, one float32; None for an output that is not quantised.
        multiplies: by the scale, instead of a division by it.
    """
    if not metadata.num_tokens:
        return
    query = with_adjacent_elements(query)
    num_splits = plan.num_splits
    result_size = spec.head_size + NUM_STATS
    partial = output
    if num_splits > 1:
        num_results = metadata.num_tokens * spec.num_heads * num_splits
        partial = torch.empty(num_results * result_size, dtype=torch.float32, device=query.device)
    slot = id(cache.keys)
    stored = AS_ATTENDED if scale is None else (DTYPES[query.dtype], FP8_MAX, multiplies)
    of_cache = (cache.key_scale, cache.value_scale)
    facts = (plan, spec, metadata.num_reqs, query.shape, *of_cache, *stored)
    lengths = (metadata.query_start_loc, metadata.seq_lens, metadata.block_table)
    output_scale = lengths[0] if scale is None else scale  # a pointer that is never followed
    tensors = (query, cache.keys, cache.values, output, *lengths, output_scale)
    reduced = (output, lengths[0], output_scale)
    if not _ATTEND.repeat(slot, tensors, facts, fresh=(partial,)):
        _attend(partial, tensors, cache, metadata, spec, plan, stored, slot, facts)
    if num_splits > 1 and not _REDUCE.repeat(slot, reduced, facts, fresh=(partial,)):
        _REDUCE.launch(
            (metadata.num_tokens, spec.num_heads),
            (partial, *reduced),
            (metadata.num_reqs, *output.stride()[:2]),
            (
                spec.head_size,
                _padded(spec.head_size),
                num_splits,
                result_size,
                *stored,
                IS_INTERPRETED,
            ),
            slot=slot,
            facts=facts,
            num_fresh=1,
            num_warps=4,
        )


def _attend(
    partial: torch.Tensor,
    tensors: tuple[torch.Tensor, ...],
    cache: LayerCache,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    plan: LaunchPlan,
    stored: tuple[Any, float, bool],
    slot: int,
    facts: Hashable,
) -> None:
    query, output = tensors[0], tensors[3]
    output_strides = output.stride()
    assert output_strides[2] == 1, "the elements of a head must be side by side"
    is_scaled = cache.keys.dtype.itemsize == 1
    _ATTEND.launch(
        (plan.num_blocks * spec.num_kv_heads, plan.num_splits),
        (partial, *tensors),
        (
            metadata.num_reqs,
            spec.scale * LOG2_E * (cache.key_scale if is_scaled else 1.0),
            float(cache.value_scale) if is_scaled else 1.0,
            *query.stride()[:2],
            *output_strides[:2],
            *cache_strides(cache.keys, cache.values),
            metadata.block_table.stride(0),
        ),
        (
            spec.num_kv_heads,
            spec.num_heads // spec.num_kv_heads,
            spec.head_size,
            _padded(spec.head_size),
            cache.keys.shape[1],
            spec.sliding_window or 0,
            spec.soft_cap or 0.0,
            plan.block_rows,
            plan.tile,
            plan.is_whole,
            plan.num_splits > 1,
            spec.head_size + NUM_STATS,
            *stored,
            IS_INTERPRETED,
        ),
        slot=slot,
        facts=facts,
        num_fresh=1,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )


def _padded(head_size: int) -> int:
    return max(MIN_DOT_SIZE, next_power_of_2(head_size))


_ATTEND, _REDUCE = KeptKernel(attend_kernel), KeptKernel(reduce_kernel)
