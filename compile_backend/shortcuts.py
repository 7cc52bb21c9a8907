"""What a step does on the host, in C where that was built; each function may decline.

Every one handles the plain case, arrays of integers that agree with each other, in a fraction of
a microsecond. It answers None, False or 0 for everything else, errors included, and always where
the C part was not built: then the caller's general code does the work, and says what is wrong. So
results never depend on it. This file refuses to know models and modes.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

from compile_backend.layout import memory_of
from compile_backend.torch_internals.cuda import (
    address_in_cpp,
    copy_functions,
    data_ptr_function,
    event_functions,
    kernel_functions,
    launch_functions,
    layout_functions,
    storage_in_cpp,
    tensor_handles,
)

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

_built: Any = None
with contextlib.suppress(ImportError):
    _built = importlib.import_module("compile_backend._shortcuts")

NOT_BUILT = (
    "the C part of this package was not built, so each step takes several times as long on the "
    "host; install the package again where there is a C compiler, and Python's headers"
)

DRIVEN = "cuda"
"""The type of devices whose memory the driver copies; what is on a host only waits for it."""

MOST_PARAMETERS = 64
"""Of a kernel that `kernel_of` takes."""

MOST_INPUTS = 16
"""That `inputs_of` takes."""

Row = tuple[str, Any, int, int, float, int]
"""An input: its name, its array on the host or None, the dimension that changes, with what it
changes (0: tokens, 1: requests, 2: requests + 1), the value of padding, and of what its numbers
are indices (-1: of nothing)."""

Known = tuple[tuple[Row, ...], int, Any, Any, object | None, tuple[Any, ...] | None, Any]
"""A step for `prepare`: all rows of its layout, how many of them are the model's, the owner of
the memory, the layout, what `event_of` returned or None, the held arrays and limits of
`fill_attention` or None without attention, and what to return."""


def are_built() -> bool:
    """Whether there is a C part."""
    return _built is not None


def _declined(answer: Any) -> Callable[..., Any]:
    return lambda *_: answer


count_tokens: Callable[[Any, int], tuple[int, bool] | None] = (
    _built.count_tokens if _built is not None else _declined(None)
)
"""`(query_lens, query_len)`: the tokens of a batch, each request with at least one, and whether
all of them have `query_len`."""

all_longer: Callable[[Any, Any], bool | None] = (
    _built.all_longer if _built is not None else _declined(None)
)
"""`(seq_lens, query_lens)`: whether every request is longer than what the step adds."""

lengths: Callable[[Any, Any], tuple[int, int, int] | None] = (
    _built.lengths if _built is not None else _declined(None)
)
"""`(query_lens, seq_lens)`: the longest query, the longest sequence, and the query length that all
requests have, or else 0."""

put_inputs: Callable[[tuple[Row, ...], int, Any, int, int], int] = (
    _built.put_inputs if _built is not None else _declined(0)
)
"""`(rows, num_rows, values, num_tokens, num_reqs)`: write the values of the first rows, by name,
and the padding behind each; how many were written, from the first on."""

fill_attention: Callable[..., bool] = (
    _built.fill_attention if _built is not None else _declined(False)
)
"""`(query_lens, seq_lens, block_table, slot_mapping, padded query_start_loc, padded seq_lens,
padded block_table, padded slot_mapping, max_model_len, num_blocks, block_size, is_refill)`: what
`AttentionMetadataBuilder.fill` does. It may have written a part when it declines."""

plain_key: Callable[[Any, int], int | None] = (
    _built.plain_key if _built is not None else _declined(None)
)
"""`(batch, query_len)`: a number for all that routes a batch whose lengths alone tell where it
runs: its tokens, its requests, whether all of them decode, and whether it brings attention."""

prepare: Callable[[Mapping[int, Known], int, Any], Any] = (
    _built.prepare if _built is not None else _declined(None)
)
"""`(known, query_len, batch)`: the step that is known for a batch's `plain_key`, once the batch
lies in the step's memory. If it declines after it wrote a part, that memory's `held` is None."""

have_moved: Callable[[object], bool] = _built.have_moved if _built is not None else _declined(True)
"""`(what watch returned)`: whether a watched tensor is elsewhere, lies there in another way, was
replaced or is gone."""

are_in_place: Callable[[object, tuple[Any, ...]], bool] = (
    _built.are_in_place if _built is not None else _declined(False)
)
"""`(what places_of returned, args)`: whether the arguments are the very tensors, where they
were."""

launch: Callable[[object], bool] = _built.launch if _built is not None else _declined(False)
"""`(what launch_of returned)`: replay on the current stream, if the graph's device is current."""

copy: Callable[[object], bool] = _built.copy if _built is not None else _declined(False)
"""`(what copies_of returned)`: put the copies on the current stream, if their device is
current."""

copy_to: Callable[[object, int], bool] = _built.copy_to if _built is not None else _declined(False)
"""`(what copies_of returned of one pair, address)`: the same to another target, whose bytes there
are as many."""

copy_inputs: Callable[[object, tuple[Any, ...]], bool] = (
    _built.copy_inputs if _built is not None else _declined(False)
)
"""`(what inputs_of returned, args)`: put the copies on the current stream, likewise, if the
arguments are tensors of the same sizes, strides and dtypes."""

NOTHING, INPUTS_SENT, LAUNCHED = range(3)
"""What `replay_call` did."""

replay_call: Callable[[object, object | None, object | None, tuple[Any, ...]], int] = (
    _built.replay_call if _built is not None else _declined(NOTHING)
)
"""`(what places_of returned, what inputs_of returned or None, what launch_of returned, args)`:
`copy_inputs` and then `launch`, if the arguments are in place, none of those to copy lies in
memory that the graph writes, and nobody captures the current stream."""

repeat_kernel: Callable[[object, tuple[Any, ...], object, tuple[Any, ...]], bool] = (
    _built.repeat_kernel if _built is not None else _declined(False)
)
"""`(what kernel_of returned, tensors, facts, fresh)`: launch a kernel on the current stream, if
its tensors are the very ones and where they were, its facts are equal and its device is current.
`fresh` are the tensors of its first parameters, which are new each time."""


def watch(
    tables: Sequence[Mapping[str, torch.Tensor | None]],
    names: Sequence[str],
    tensors: Sequence[torch.Tensor | None],
    addresses: Sequence[int | None],
) -> object | None:
    """Take note of tensors in dicts, for `have_moved`; they live as long as what it returns.

    Args:
        tables: the dict of each tensor.
        names: its name there.
        tensors: what the dicts hold.
        addresses: where each of them is; None for a tensor without an address of its own, which
            has to be the same object.
    """
    own = [
        None if address is None else tensor
        for tensor, address in zip(tensors, addresses, strict=True)
    ]
    handles = None if _built is None else tensor_handles(own)
    if handles is None:
        return None
    watched: object | None = _built.watch(
        list(tables),
        list(names),
        handles.capsules,
        list(addresses),
        [0 if tensor is None else storage_in_cpp(tensor) for tensor in own],
        *handles.functions,
    )
    return watched


def places_of(
    args: tuple[Any, ...], addresses: Sequence[int | None], positions: Sequence[int]
) -> object | None:
    """Take note of some arguments of a call, for `are_in_place`; it keeps none alive.

    Args:
        args: of the call.
        addresses: where each argument's data is.
        positions: of those to look at: tensors, each with an address.
    """
    function = None if _built is None else data_ptr_function()
    if function is None:
        return None
    places: object | None = _built.places_of(
        list(positions),
        [address_in_cpp(args[i]) for i in positions],
        [addresses[i] for i in positions],
        [storage_in_cpp(args[i]) for i in positions],
        args,
        function,
    )
    return places


def event_of(event: torch.cuda.Event) -> object | None:
    """A short way to wait for an event that was recorded before, for `prepare`.

    Args:
        event: must outlive what is returned.
    """
    functions = None if _built is None else event_functions()
    if functions is None:
        return None
    held: object = _built.event_of(event.cuda_event, *functions)
    return held


def launch_of(graph: torch.cuda.CUDAGraph, device: int) -> object | None:
    """A short way to replay a graph that draws no random numbers, for `launch`.

    torch's own replay costs some microseconds more: it also looks after generators.

    Args:
        graph: must outlive what is returned.
        device: the graph's.
    """
    functions = None if _built is None else launch_functions()
    if functions is None:
        return None
    held: object = _built.launch_of(graph.raw_cuda_graph_exec(), device, *functions)
    return held


def copies_of(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], event: torch.cuda.Event | None = None
) -> object | None:
    """A short way to copy between tensors that stay, for `copy`.

    Args:
        pairs: targets on one CUDA device, and sources there or in pinned memory. All of it must
            outlive what is returned.
        event: recorded behind them, as it was before; must outlive what is returned.

    Returns:
        None where torch has to copy: on a host, and tensors whose bytes are not the same.
    """
    functions = None if _built is None else copy_functions()
    if functions is None or not pairs or not all(_can_be_copied(*pair) for pair in pairs):
        return None
    numbers: list[int] = []
    for target, source in pairs:
        num_bytes = source.numel() * source.element_size()
        numbers += [target.data_ptr(), source.data_ptr(), num_bytes]
    handle = 0 if event is None else event.cuda_event
    device = pairs[0][0].device.index or 0
    copies: object = _built.copies_of(numbers, device, handle, *functions)
    return copies


def inputs_of(
    args: tuple[Any, ...],
    positions: Sequence[int],
    targets: Sequence[torch.Tensor],
    written: Iterable[int],
) -> object | None:
    """A short way to copy some arguments of a call, for `copy_inputs`; it keeps none alive.

    Args:
        args: of the call; on the device of the targets, and neither negative nor conjugate views:
            what Dynamo guards, so that it holds for all later calls.
        positions: of those to copy.
        targets: where to; must outlive what is returned.
        written: where the memory starts that the call writes, but for what is copied.

    Returns:
        None where torch has to copy.
    """
    copying = None if _built is None else copy_functions()
    telling = None if copying is None else layout_functions()
    sources = [args[i] for i in positions]
    if copying is None or telling is None or not sources or len(sources) > MOST_INPUTS:
        return None
    if not all(map(_can_be_copied, targets, sources)):
        return None
    inputs: object | None = _built.inputs_of(
        args,
        list(positions),
        [address_in_cpp(source) for source in sources],
        [target.data_ptr() for target in targets],
        [source.numel() * source.element_size() for source in sources],
        [source.element_size() for source in sources],
        list(written),
        targets[0].device.index or 0,
        (*copying[:3], *telling),
    )
    return inputs


def _can_be_copied(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether bytes of one are bytes of the other, on a device, none of them between elements."""
    is_alike = (target.dtype, target.stride()) == (source.dtype, source.stride())
    is_plain = not any(tensor.is_neg() or tensor.is_conj() for tensor in (target, source))
    has_no_gaps = memory_of(source).numel() == source.numel()
    is_there = target.device.type == DRIVEN
    return is_there and is_alike and target.shape == source.shape and is_plain and has_no_gaps


def kernel_of(
    function: int,
    device: int,
    sizes: tuple[int, int, int, int, int],
    parameters: bytes,
    num_fresh: int,
    tensors: Sequence[weakref.ref[torch.Tensor]],
    addresses: Sequence[int],
    facts: object,
) -> object | None:
    """A short way to launch a kernel of the driver again, for `repeat_kernel`.

    Args:
        function: the driver's handle, which must outlive what is returned.
        device: of the function.
        sizes: of the grid, x, y and z; threads of a block; bytes of dynamic shared memory.
        parameters: 8 bytes for each.
        num_fresh: how many of the first are replaced at each launch.
        tensors: what else must be the same.
        addresses: of them.
        facts: likewise.
    """
    functions = None if _built is None else kernel_functions()
    if functions is None:
        return None
    held: object = _built.kernel_of(
        tuple(functions),
        device,
        function,
        sizes,
        parameters,
        num_fresh,
        tuple(tensors),
        tuple(addresses),
        facts,
    )
    return held
