"""Which numbers of tokens the pieces of a graph are compiled for by themselves.

Worked out with the plan, before anything is compiled: which of a graph's free sizes is the number
of tokens, which of the sizes and ranges asked for can occur, and why none can.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compile_backend.config import CUDAGraphMode
from compile_backend.context import SetBy, context_set_by, current_forward_context
from compile_backend.sizes import (
    PaddingTable,
    TokenRange,
    check_compile_sizes,
    listed_sizes,
    ranges_between,
)
from compile_backend.specialise import Specialisations
from compile_backend.torch_internals.narrowing import clipped, example_of, symbol_and_factor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compile_backend.batch import BatchDescriptor
    from compile_backend.config import CompilationConfig
    from compile_backend.dispatch import CudagraphDispatcher
    from compile_backend.plain_calls import BatchReader


def plan_specialisations(
    config: CompilationConfig,
    dispatcher: CudagraphDispatcher,
    mode: CUDAGraphMode,
    reader: BatchReader,
    values: Sequence[Any],
    first_call: BatchDescriptor,
    *,
    needs_grad: bool,
) -> tuple[Specialisations, list[str]]:
    """What a graph's pieces are compiled for, and why it is less than asked for, as notes.

    Args:
        config: what is asked for.
        dispatcher: its keys.
        mode: what the mode was lowered to.
        reader: describes plain calls.
        values: the graph's inputs, as fake tensors and sizes.
        first_call: what `reader` makes of the call that the graph is made for.
        needs_grad: whether the graph is compiled for gradients.

    Raises:
        ConfigError: a listed size is padded to another one.
    """
    if not config.compile_sizes and not config.compile_ranges_endpoints:
        return Specialisations(), []
    modes = (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
    captured = {key.num_tokens for each in modes for key in dispatcher.keys(each)}
    if mode.mixed_mode() is not CUDAGraphMode.NONE:  # else batches of any size run as they are
        check_compile_sizes(config, PaddingTable(captured))
    num_tokens = _num_tokens(reader, values, first_call)
    found = None
    if num_tokens is not None:
        listed = listed_sizes(config.compile_sizes, captured)
        found = specialisations_for(num_tokens, listed, config.compile_ranges_endpoints)
    why_not = None
    if config.piece_compiler == "eager":
        why_not = "pieces are not compiled, by piece_compiler='eager'"
    elif needs_grad:
        why_not = "a call that needs gradients is compiled for all sizes at once"
    elif found is None:
        why_not = "the number of tokens does not follow from one free size"
    if found is not None and why_not is None:
        return found, []
    return Specialisations(), [f"compile_sizes and compile_ranges_endpoints do nothing: {why_not}"]


def _num_tokens(reader: BatchReader, values: Sequence[Any], first_call: BatchDescriptor) -> Any:
    """The number of tokens of all calls of a graph, symbolic where it is free; None if unknown."""
    sizes = [value for value in values if isinstance(value, torch.SymInt)]
    context = current_forward_context()
    is_told = context is not None and context_set_by() in (SetBy.USER, SetBy.RUNNER)
    told = context.batch_descriptor if context is not None and is_told else None
    if told is not None:
        return _size_of(told.num_tokens, sizes)
    num_tokens = reader.num_tokens(values)
    # Dynamo compiles 1 row by itself, whatever else is free.
    is_settled = isinstance(num_tokens, torch.SymInt) or not sizes or num_tokens == 1
    return num_tokens if is_settled and example_of(num_tokens) == first_call.num_tokens else None


def _size_of(num_tokens: int, sizes: Sequence[torch.SymInt]) -> Any:
    """The size that is a batch's number of tokens, or a multiple of the only one that is free."""
    if not sizes or num_tokens == 1:
        return num_tokens
    for size in sizes:
        if example_of(size) == num_tokens:
            return size
    example = example_of(sizes[0])
    is_multiple = len(sizes) == 1 and example and num_tokens % example == 0
    return sizes[0] * (num_tokens // example) if is_multiple and example else None


def specialisations_for(
    num_tokens: Any, listed: Sequence[int], endpoints: Sequence[int]
) -> Specialisations | None:
    """What a graph's pieces are compiled for.

    Args:
        num_tokens: of the calls that run the graph, as an integer or a symbolic size.
        listed: sizes to compile by themselves.
        endpoints: of ranges to compile by themselves.

    Returns:
        None where something is asked for, but the number of tokens depends on several free sizes.
    """
    asked = (
        *(TokenRange(size, size, is_listed=True) for size in listed),
        *ranges_between(endpoints),
    )
    if isinstance(num_tokens, int):
        return Specialisations(is_listed_size=num_tokens in listed)
    found = symbol_and_factor(num_tokens)
    if found is None or example_of(num_tokens) is None:
        return None if asked else Specialisations()
    symbol, factor = found
    ranges: list[TokenRange] = []
    for tokens in asked:
        bounds = clipped(num_tokens, symbol, -(-tokens.first // factor), tokens.last // factor)
        if bounds is None:
            continue
        first, last = (value * factor for value in bounds)
        if not _all_listed(first, last, factor, listed) or tokens.is_listed:
            ranges.append(TokenRange(first, last, tokens.is_listed))
    return Specialisations(tuple(ranges), symbol, factor)


def _all_listed(first: int, last: int, step: int, listed: Sequence[int]) -> bool:
    """Whether every number of tokens of a range is compiled by itself."""
    num_listed = sum(first <= size <= last and size % step == 0 for size in listed)
    return num_listed == (last - first) // step + 1
