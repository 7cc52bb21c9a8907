"""The inputs of one step in memory that stays: laid out for the padded batch, sent in one copy.

All tensors of a step lie in one block of bytes, one after the other for the sizes of its key, on
the host and on the device alike. A step writes the host's block and copies it at once; the copy
may be part of a graph. Keys share the block, since only one step runs at a time; nothing here
knows what the tensors mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from compile_backend import shortcuts
from compile_backend.errors import ConfigError
from compile_backend.given_numbers import array_of, check_has_rows, integers_of, tensor_of
from compile_backend.torch_internals.cuda import weak_part

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from compile_backend.shortcuts import Row

_ALIGNMENT = 256

Arrays = Mapping[str, np.ndarray[Any, np.dtype[Any]]]


class Dim(Enum):
    """A size that changes from step to step."""

    NUM_TOKENS = "num_tokens"
    NUM_REQS = "num_reqs"
    NUM_REQS_PLUS_1 = "num_reqs + 1"

    def of(self, num_tokens: int, num_reqs: int) -> int:
        """The size in one batch."""
        if self is Dim.NUM_TOKENS:
            return num_tokens
        return num_reqs if self is Dim.NUM_REQS else num_reqs + 1


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One tensor that every step brings.

    Attributes:
        name: of the argument.
        shape: fixed sizes, and one `Dim`.
        dtype: of the elements.
        pad: fills the rows beyond the batch's own.
        indexes: the size that each number is an index below, so that none points at padding;
            None for other numbers. What is on the device already is taken as it is.
        axis: which dimension changes.
        dim: how it changes.

    Raises:
        ConfigError: a field is of another kind, the shape does not hold exactly one `Dim`, or the
            dtype not the padding.
    """

    name: str
    shape: tuple[int | Dim, ...]
    dtype: torch.dtype
    pad: float = 0
    indexes: Dim | None = None
    axis: int = field(init=False, repr=False)
    dim: Dim = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_fields(self)
        object.__setattr__(self, "shape", tuple(self.shape))
        if sum(isinstance(size, Dim) for size in self.shape) != 1:
            raise ConfigError(
                f"input_spec[{self.name!r}].shape",
                self.shape,
                "does not hold exactly one size that changes with the batch",
                "use one of Dim.NUM_TOKENS, Dim.NUM_REQS, Dim.NUM_REQS_PLUS_1, such as "
                "(1, Dim.NUM_TOKENS)",
            )
        is_fraction = type(self.pad) is float and not self.dtype.is_floating_point
        if is_fraction or not _holds(self.dtype, self.pad):
            raise ConfigError(
                f"input_spec[{self.name!r}].pad",
                self.pad,
                f"is {'no integer' if is_fraction else 'out of the range'} of {self.dtype}",
                "use a number that the dtype holds",
            )
        for axis, size in enumerate(self.shape):
            if isinstance(size, Dim):
                object.__setattr__(self, "axis", axis)
                object.__setattr__(self, "dim", size)

    def sizes(self, num_tokens: int, num_reqs: int) -> tuple[int, ...]:
        """The shape in one batch."""
        return tuple(
            size.of(num_tokens, num_reqs) if isinstance(size, Dim) else size for size in self.shape
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Where one input lies in a layout.

    Attributes:
        spec: of the input.
        host: in the block of the host.
        array: the same as an array; None for an element type that arrays lack.
        device: on the device.
    """

    spec: InputSpec
    host: torch.Tensor
    array: np.ndarray[Any, Any] | None
    device: torch.Tensor

    def rows(self, start: int | None, end: int | None) -> tuple[slice, ...]:
        """The index of rows in the dimension that changes."""
        rows = slice(start, end)
        return (rows,) if not self.spec.axis else (*(slice(None),) * self.spec.axis, rows)


@dataclass(frozen=True, slots=True)
class Layout:
    """The inputs of all batches with one padded size.

    Attributes:
        num_tokens: padded.
        num_reqs: padded.
        tensors: by name, on the device, at addresses that stay.
        places: likewise, with the memory of the host.
        arrays: by name, on the host, where the element type has arrays.
        rows: the same in the order of the specs, as `shortcuts.put_inputs` takes them.
        block: what is copied, from the host and to the device.
    """

    num_tokens: int
    num_reqs: int
    tensors: Mapping[str, torch.Tensor]
    places: Mapping[str, Place]
    arrays: Arrays
    rows: tuple[Row, ...]
    block: tuple[torch.Tensor, torch.Tensor]


class StepInputs:
    """Persistent memory for the inputs of a step.

    Args:
        specs: every input; names are unique.
        device: where graphs read them.
        max_num_tokens: most tokens of a step, padding included.
        max_num_reqs: most requests of a step, padding included.
        on_new: given every tensor that a layout brings, and its spec.

    Raises:
        ConfigError: two inputs have one name.

    Attributes:
        held: the layout of the last batch on the host, for whoever writes batches to tell; None
            while one is being written.
    """

    def __init__(
        self,
        specs: Sequence[InputSpec],
        device: torch.device,
        *,
        max_num_tokens: int,
        max_num_reqs: int,
        on_new: Callable[[torch.Tensor, InputSpec], None] | None = None,
    ) -> None:
        names = [spec.name for spec in specs]
        if len(set(names)) < len(names):
            raise ConfigError("input_spec", names, "holds a name twice", "name each input once")
        self._specs = tuple(specs)
        self._on_new = on_new
        self._layouts: dict[tuple[int, int], Layout] = {}
        self.device = device
        self.max_num_tokens, self.max_num_reqs = max_num_tokens, max_num_reqs
        _, num_bytes = self._offsets(max_num_tokens, max_num_reqs)
        self._device_bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.held: Layout | None = None
        self._host_bytes = self._device_bytes
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._host_bytes = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
            # Every replay of a graph that holds the copy records it, as a plain copy does.
            self._copied = torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]

    @property
    def num_bytes(self) -> int:
        """Memory on the device."""
        return self._device_bytes.numel()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this memory on the device, which stays."""
        start = self._device_bytes.data_ptr()
        return start <= tensor.data_ptr() < start + self.num_bytes

    def layout(self, num_tokens: int, num_reqs: int, *, keep: bool = True) -> Layout:
        """Where the inputs of a padded batch lie.

        Args:
            num_tokens: of the padded batch.
            num_reqs: of the padded batch.
            keep: hold on to the layout; a batch that is not padded may never come again.
        """
        layout = self._layouts.get((num_tokens, num_reqs))
        if layout is None:
            layout = self._make(num_tokens, num_reqs)
            if keep:
                self._layouts[num_tokens, num_reqs] = layout
        return layout

    def begin(self) -> None:
        """Wait until the device has read the last step's block; then the host's may be written."""
        if self._copied is not None and not self._copied.query():  # type: ignore[no-untyped-call]
            self._copied.synchronize()

    def until_read(self) -> tuple[object | None, bool]:
        """For `shortcuts`: what `begin` waits for, if anything, and whether that can be told."""
        if self._copied is None:
            return None, True
        event = shortcuts.event_of(self._copied)
        return event, event is not None

    def put(self, place: Place, value: Any, size: int, limit: int | None = None) -> None:
        """Write one input of the batch, and fill what the padding adds.

        Args:
            place: where the input lies.
            value: numbers, an array or a tensor. One on the device comes by way of the host's
                block, so that the step's one copy brings it too; nobody waits for that.
            size: its rows in the dimension that changes, without padding.
            limit: the size that its numbers are indices below; None for other numbers.

        Raises:
            ValueError: the value has another shape, is no number or cannot be read, has fractions
                where the spec has integers, or is out of their range or of the batch.
        """
        spec = place.spec
        host: Any = place.host if place.array is None else place.array
        inside = place.rows(None, size)
        own = host[inside]
        if host.shape[spec.axis] > size:
            host[place.rows(size, None)] = spec.pad
        name = f"input {spec.name!r}"
        if isinstance(value, list | tuple) and not value and 0 in own.shape:
            return  # no rows, however long they are
        if place.array is None and not isinstance(value, torch.Tensor | np.ndarray):
            value = tensor_of(name, value)
        if isinstance(value, torch.Tensor):
            check_has_rows(name, value)
            _check_shape(spec, value.shape, own.shape)
            _check_kind(spec, value.dtype, is_fraction=value.is_floating_point())
            _check_tensor(spec, value, limit)
            with torch.no_grad():
                place.host[inside].copy_(value, non_blocking=True)
            if self._copied is not None and value.is_cuda:
                self._copied.record()
            return
        read = array_of if spec.dtype.is_floating_point else integers_of
        value = read(name, value)
        if value.dtype.kind not in "biuf":
            raise ValueError(f"{name} has values of {value.dtype}; give numbers")
        _check_shape(spec, value.shape, own.shape)
        if value.size:  # an empty list counts as fractions
            _check_kind(spec, value.dtype, is_fraction=value.dtype.kind == "f")
            _check_numbers(spec, value, limit)
            own[...] = value if place.array is not None else tensor_of(name, value)

    def send(self, layout: Layout) -> None:
        """Copy the block to the device; in a capture, that becomes a part of the graph."""
        if self._copied is not None:
            source, target = layout.block
            target.copy_(source, non_blocking=True)
            self._copied.record()

    def sending(self, layout: Layout) -> object | None:
        """For `shortcuts.copy`: what `send` does outside of captures, after it did that once."""
        if self._copied is None:
            return None
        source, target = layout.block
        return shortcuts.copies_of([(target, source)], self._copied)

    def _offsets(self, num_tokens: int, num_reqs: int) -> tuple[list[int], int]:
        offsets, end = [], 0
        for spec in self._specs:
            offsets.append(end)
            size = math.prod(spec.sizes(num_tokens, num_reqs)) * spec.dtype.itemsize
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return offsets, end

    def _make(self, num_tokens: int, num_reqs: int) -> Layout:
        assert num_tokens <= self.max_num_tokens
        assert num_reqs <= self.max_num_reqs
        offsets, num_bytes = self._offsets(num_tokens, num_reqs)
        places = {}
        for spec, offset in zip(self._specs, offsets, strict=True):
            sizes = spec.sizes(num_tokens, num_reqs)
            host = _view(self._host_bytes, offset, spec.dtype, sizes)
            array = None if spec.dtype in _NOT_IN_NUMPY else host.numpy()
            device = _view(self._device_bytes, offset, spec.dtype, sizes)
            if self._on_new is not None:
                self._on_new(device, spec)
            places[spec.name] = Place(spec, host, array, device)
        tensors = {name: place.device for name, place in places.items()}
        arrays = {name: place.array for name, place in places.items() if place.array is not None}
        rows = tuple(
            (
                spec.name,
                places[spec.name].array,
                spec.axis,
                _DIMS.index(spec.dim),
                spec.pad,
                -1 if spec.indexes is None else _DIMS.index(spec.indexes),
            )
            for spec in self._specs
        )
        block = (self._host_bytes[:num_bytes], self._device_bytes[:num_bytes])
        return Layout(num_tokens, num_reqs, tensors, places, arrays, rows, block)


def _check_fields(spec: Any) -> None:
    """Refuse fields of another kind."""
    name, shape, dtype, pad = spec.name, spec.shape, spec.dtype, spec.pad
    if not isinstance(name, str) or not name:
        raise ConfigError("input_spec.name", name, "names no argument", "use a name, as 'tokens'")
    option = f"input_spec[{name!r}]"
    is_shape = isinstance(shape, tuple | list) and all(
        isinstance(size, Dim) or (type(size) is int and size >= 0) for size in shape
    )
    if not is_shape:
        fix = "use a tuple of numbers and one Dim, such as (Dim.NUM_TOKENS,)"
        raise ConfigError(f"{option}.shape", shape, "is no shape", fix)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"{option}.dtype", dtype, "is no dtype", "use torch.int64 or another")
    indexes = spec.indexes
    if indexes is not None and not (isinstance(indexes, Dim) and _is_integer(dtype)):
        problem = f"is no Dim that numbers of {dtype} are indices below"
        fix = "use Dim.NUM_TOKENS for integers that are rows of tokens, or leave it out"
        raise ConfigError(f"{option}.indexes", indexes, problem, fix)
    if not isinstance(pad, int | float):
        raise ConfigError(f"{option}.pad", pad, "is no number", "use 0")


_DIMS = tuple(Dim)

_NOT_IN_NUMPY = (
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)


def _view(
    block: torch.Tensor, offset: int, dtype: torch.dtype, sizes: tuple[int, ...]
) -> torch.Tensor:
    """A part of a block, as a tensor that starts its own storage.

    Dynamo would take the offset of an ordinary view for one more size that changes.
    """
    if 0 in sizes:  # numpy's stride of nothing is one that torch refuses to view
        return torch.empty(sizes, dtype=dtype, device=block.device)
    part = block[offset : offset + math.prod(sizes) * dtype.itemsize]
    part = weak_part(part) if part.is_cuda else torch.from_numpy(part.numpy())
    return part.view(dtype).view(sizes)


def _check_kind(spec: InputSpec, given: object, *, is_fraction: bool) -> None:
    """Refuse numbers that would lose what is behind the point, with nobody to notice."""
    if is_fraction and not spec.dtype.is_floating_point:
        raise ValueError(
            f"input {spec.name!r} has numbers of {given}, but its spec says {spec.dtype}; give "
            "integers, or change the spec"
        )


def _check_numbers(spec: InputSpec, value: np.ndarray[Any, Any], limit: int | None) -> None:
    """Refuse numbers that would come out as others."""
    if value.dtype.kind in "iu" and not _fits(spec.dtype, int(value.min()), int(value.max())):
        raise ValueError(
            f"input {spec.name!r} holds {value.min()} to {value.max()}, which {spec.dtype} does "
            "not; change the numbers, or the spec"
        )
    if limit is not None:
        _check_indices(spec, int(value.min()), int(value.max()), limit)


def _check_tensor(spec: InputSpec, value: torch.Tensor, limit: int | None) -> None:
    """The same for a tensor, whose numbers are looked at where that waits for no device."""
    if value.is_complex():
        raise ValueError(f"input {spec.name!r} has values of {value.dtype}; give numbers")
    is_looked_at = limit is not None or (
        value.dtype is not spec.dtype and _is_integer(value.dtype)
    )
    if is_looked_at and value.device.type == "cpu" and value.numel():
        _check_numbers(spec, value.numpy(), limit)


def _check_indices(spec: InputSpec, lowest: int, highest: int, limit: int) -> None:
    """Refuse what points at a row of padding, or at one of another batch's."""
    if lowest < 0 or highest >= limit:
        assert spec.indexes is not None
        raise ValueError(
            f"input {spec.name!r} holds {lowest} to {highest}, which are to be indices below "
            f"{spec.indexes.value}={limit} of this batch; change them, or the spec"
        )


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def _fits(dtype: torch.dtype, lowest: float, highest: float) -> bool:
    """Whether a dtype can hold integers; fractions and booleans take what they get."""
    if not _is_integer(dtype):
        return True
    limits = torch.iinfo(dtype)
    return limits.min <= lowest and highest <= limits.max


def _holds(dtype: torch.dtype, pad: float) -> bool:
    """Whether padding stays the number that it is, but for its last digits."""
    if dtype.is_floating_point and math.isfinite(pad):
        return abs(pad) <= torch.finfo(dtype).max
    return _fits(dtype, pad, pad)


def _check_shape(spec: InputSpec, given: Sequence[int], expected: Sequence[int]) -> None:
    if given != expected and tuple(given) != tuple(expected):
        raise ValueError(
            f"input {spec.name!r} has shape {tuple(given)}, but this batch needs "
            f"{tuple(expected)}; its spec is {spec.shape}"
        )
