"""How the attention kernels are called: from a layer, a batch and a launch plan to arguments.

No tensor is read on the host, so all of it may be captured. This file refuses to choose sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from compile_backend.attention.fp8_output import FP8_MAX
from compile_backend.attention.triton_cache import cache_strides, with_adjacent_elements
from compile_backend.attention.triton_kept import KeptKernel, together
from compile_backend.attention.triton_kernels import attend_kernel
from compile_backend.attention.triton_plan import MIN_DOT_SIZE, next_power_of_2
from compile_backend.attention.triton_results import quantise_kernel, reduce_kernel
from compile_backend.torch_internals.cuda import maker_on

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

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
"""What kernels are told that do not quantise."""

NUM_STATS = 4
"""Floats after a partial result: the log2 of its sum, and some to keep 16 bytes aligned."""

QUANTISED_AT_ONCE = 4096
"""Elements of one program of `quantise_kernel`, at most."""


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
    slot = id(cache.keys)
    stored = AS_ATTENDED if scale is None else (DTYPES[query.dtype], FP8_MAX, multiplies)
    of_cache = (cache.key_scale, cache.value_scale)
    facts = (plan, spec, metadata.num_reqs, query.shape, *of_cache, *stored)
    starts = metadata.query_start_loc
    output_scale = starts if scale is None else scale  # a pointer that is never followed
    lengths = (starts, metadata.seq_lens, metadata.block_table)
    read = (query, cache.keys, cache.values, *lengths, output_scale)
    if plan.num_splits == 1 and (scale is None or plan.quantises):
        if not _ATTEND.repeat(slot, (output, *read), facts):
            call = _attending((output, *read), cache, metadata, spec, plan, stored)
            _launch(_ATTEND, call, slot, facts, 0)
        return
    results = _room(query, metadata.num_tokens, spec, plan)
    if not _ATTEND.repeat(slot, read, facts, fresh=(results,)):
        call = _attending((results, *read), cache, metadata, spec, plan, AS_ATTENDED)
        _launch(_ATTEND, call, slot, facts, 1)
    kernel = _REDUCE if plan.num_splits > 1 else _QUANTISE
    finished = (output, starts, output_scale)
    if not kernel.repeat(slot, finished, facts, fresh=(results,)):
        call = _finishing(kernel, (results, *finished), metadata, spec, plan, stored)
        _launch(kernel, call, slot, facts, 1)


def _room(
    query: torch.Tensor, num_tokens: int, spec: AttentionSpec, plan: LaunchPlan
) -> torch.Tensor:
    """Where `attend_kernel` writes what is not yet the output."""
    size, heads = spec.head_size, spec.num_heads
    if plan.num_splits == 1:
        shape, strides = (num_tokens, heads, size), (heads * size, size, 1)
        return _new(shape, strides, query.dtype, query)
    num_results = num_tokens * heads * plan.num_splits
    return _new((num_results * (size + NUM_STATS),), (1,), torch.float32, query)


def _new(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor
) -> torch.Tensor:
    """A tensor on the device of another one; each layer of each step asks for one."""
    if like.is_cuda:
        made = _MAKE(shape, strides, dtype)
        if made.get_device() == like.get_device():
            return made
    return torch.empty_strided(shape, strides, dtype=dtype, device=like.device)


def compile_for(
    plans: Sequence[LaunchPlan],
    query: torch.Tensor,
    output: torch.Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    scale: torch.Tensor | None = None,
    *,
    multiplies: bool = False,
) -> int:
    """Compile, at the same time, the kernels of all launches that are to come.

    Args:
        plans: one of each form.
        query: as for `attend_with_triton`, of any batch.
        output: likewise.
        cache: likewise.
        metadata: likewise.
        spec: likewise.
        scale: likewise.
        multiplies: likewise.

    Returns:
        How many kernels there are; 0 where they are compiled one by one, when they are launched.
    """
    query = with_adjacent_elements(query)
    stored = AS_ATTENDED if scale is None else (DTYPES[query.dtype], FP8_MAX, multiplies)
    starts = metadata.query_start_loc
    output_scale = starts if scale is None else scale
    lengths = (starts, metadata.seq_lens, metadata.block_table)
    read = (query, cache.keys, cache.values, *lengths, output_scale)
    partial = torch.empty(1, dtype=torch.float32, device=query.device)
    attended = torch.empty(1, *query.shape[1:], dtype=query.dtype, device=query.device)
    compiles: list[tuple[KeptKernel, Callable[[], Any]]] = []

    def add(kernel: KeptKernel, call: _Call) -> None:
        def compile_it() -> Any:
            return kernel.compile(call.tensors, call.numbers, call.constants, **call.options)

        compiles.append((kernel, compile_it))

    for plan in plans:
        if plan.num_splits == 1 and (scale is None or plan.quantises):
            add(_ATTEND, _attending((output, *read), cache, metadata, spec, plan, stored))
            continue
        results = partial if plan.num_splits > 1 else attended
        given = (results, *read)
        add(_ATTEND, _attending(given, cache, metadata, spec, plan, AS_ATTENDED))
        kernel = _REDUCE if plan.num_splits > 1 else _QUANTISE
        finished = (results, output, starts, output_scale)
        add(kernel, _finishing(kernel, finished, metadata, spec, plan, stored))
    return together(compiles)


@dataclass(frozen=True, slots=True)
class _Call:
    """What `KeptKernel.launch` takes."""

    grid: tuple[int, int]
    tensors: tuple[torch.Tensor, ...]
    numbers: tuple[float, ...]
    constants: tuple[Any, ...]
    options: dict[str, int]


def _attending(
    tensors: tuple[torch.Tensor, ...],
    cache: LayerCache,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    plan: LaunchPlan,
    stored: tuple[Any, float, bool],
) -> _Call:
    results, query = tensors[:2]
    is_split = plan.num_splits > 1  # and then strides of results are not read
    is_scaled = cache.keys.dtype.itemsize == 1
    options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    if stored is not AS_ATTENDED and plan.fp8_registers is not None:
        options["maxnreg"] = plan.fp8_registers
    return _Call(
        (plan.num_blocks * spec.num_kv_heads, plan.num_splits),
        tensors,
        (
            metadata.num_reqs,
            spec.scale * LOG2_E * (cache.key_scale if is_scaled else 1.0),
            float(cache.value_scale) if is_scaled else 1.0,
            *query.stride()[:2],
            *((0, 0) if is_split else _strides_of(results)),
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
            is_split,
            spec.head_size + NUM_STATS,
            *stored,
            IS_INTERPRETED,
        ),
        options,
    )


def _finishing(
    kernel: KeptKernel,
    tensors: tuple[torch.Tensor, ...],
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    plan: LaunchPlan,
    stored: tuple[Any, float, bool],
) -> _Call:
    num_heads, size, padded = spec.num_heads, spec.head_size, _padded(spec.head_size)
    sizes: tuple[int, ...]
    if kernel is _REDUCE:
        per_token = num_heads
        sizes = (size, padded, plan.num_splits, size + NUM_STATS)
    else:
        heads = min(next_power_of_2(num_heads), QUANTISED_AT_ONCE // padded)
        per_token = -(-num_heads // heads)
        sizes = (num_heads, heads, size, padded)
    return _Call(
        (metadata.num_tokens, per_token),
        tensors,
        (metadata.num_reqs, *_strides_of(tensors[1])),
        (*sizes, *stored, IS_INTERPRETED),
        {"num_warps": 4},
    )


def _launch(kernel: KeptKernel, call: _Call, slot: int, facts: Hashable, num_fresh: int) -> None:
    kernel.launch(
        call.grid,
        call.tensors,
        call.numbers,
        call.constants,
        slot=slot,
        facts=facts,
        num_fresh=num_fresh,
        **call.options,
    )


def _strides_of(output: torch.Tensor) -> tuple[int, int]:
    """Of tokens and heads."""
    strides = output.stride()
    assert strides[2] == 1, "the elements of a head must be side by side"
    return strides[0], strides[1]


def _padded(head_size: int) -> int:
    return max(MIN_DOT_SIZE, next_power_of_2(head_size))


_MAKE = maker_on(torch.device("cuda"))
_ATTEND, _REDUCE = KeptKernel(attend_kernel), KeptKernel(reduce_kernel)
_QUANTISE = KeptKernel(quantise_kernel)
