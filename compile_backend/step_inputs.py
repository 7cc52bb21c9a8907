"""The inputs of one step in memory that stays: laid out for the padded batch, sent in one copy.

All tensors of a step lie in one block of bytes, one after the other for the sizes of its key, on
the host and on the device alike. A step writes the host's block and copies it at once. Keys share
the block, since only one step runs at a time; nothing here knows what the tensors mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from compile_backend.errors import ConfigError
from compile_backend.torch_internals import copy_all, weak_part

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
        axis: which dimension changes.
        dim: how it changes.

    Raises:
        ConfigError: the shape does not hold exactly one `Dim`.
    """

    name: str
    shape: tuple[int | Dim, ...]
    dtype: torch.dtype
    pad: int = 0
    axis: int = field(init=False, repr=False)
    dim: Dim = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if sum(isinstance(size, Dim) for size in self.shape) != 1:
            raise ConfigError(
                f"input_spec[{self.name!r}].shape",
                self.shape,
                "does not hold exactly one size that changes with the batch",
                "use one of Dim.NUM_TOKENS, Dim.NUM_REQS, Dim.NUM_REQS_PLUS_1, such as "
                "(1, Dim.NUM_TOKENS)",
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
        hosts: in each block of the host.
        arrays: the same as arrays; None for an element type that arrays lack.
        device: on the device.
    """

    spec: InputSpec
    hosts: tuple[torch.Tensor, ...]
    arrays: tuple[np.ndarray[Any, Any], ...] | None
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
        arrays: by name, for each block of the host, where the element type has arrays.
        blocks: what is copied, from the host and to the device, for each block of the host.
    """

    num_tokens: int
    num_reqs: int
    tensors: Mapping[str, torch.Tensor]
    places: Mapping[str, Place]
    arrays: tuple[Arrays, ...]
    blocks: tuple[tuple[torch.Tensor, torch.Tensor], ...]


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
        if device.type == "cuda":
            # Two blocks: the host fills one while the device may still read the other.
            self._host_bytes = [
                torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)
            ]
            self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        else:
            self._host_bytes = [self._device_bytes]
            self._copied = []
        self._turn = 0

    @property
    def num_bytes(self) -> int:
        """Memory on the device."""
        return self._device_bytes.numel()

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

    def begin(self) -> int:
        """Take a host block for the next step; waits if the device still reads it."""
        if self._copied:
            self._turn ^= 1
            self._copied[self._turn].synchronize()
        return self._turn

    def put(
        self, place: Place, value: Any, size: int, turn: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Write one input of the batch, and fill what the padding adds.

        Args:
            place: where the input lies.
            value: numbers, an array or a tensor.
            size: its rows in the dimension that changes, without padding.
            turn: which host block.

        Returns:
            The tensors to copy to and from once the block is sent, if the value is on a device.

        Raises:
            ValueError: the value has another shape, or fractions where the spec has integers.
        """
        axis = place.spec.axis
        host: Any = place.hosts[turn] if place.arrays is None else place.arrays[turn]
        inside = place.rows(None, size)
        own = host[inside]
        if host.shape[axis] > size:
            host[place.rows(size, None)] = place.spec.pad
        if isinstance(value, torch.Tensor):
            _check_shape(place.spec, value.shape, own.shape)
            _check_kind(place.spec, value.dtype, is_fraction=value.is_floating_point())
            if value.device.type != "cpu":
                return place.device[inside], value
            with torch.no_grad():
                place.hosts[turn][inside].copy_(value)
            return None
        value = np.asarray(value) if place.arrays is not None else torch.as_tensor(value)
        _check_shape(place.spec, value.shape, own.shape)
        if isinstance(value, np.ndarray) and value.size:  # an empty list counts as fractions
            _check_kind(place.spec, value.dtype, is_fraction=value.dtype.kind in "fc")
        own[...] = value
        return None

    def send(
        self,
        layout: Layout,
        turn: int,
        from_device: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> None:
        """Copy the block to the device, then over it what is there already."""
        if self._copied:
            source, target = layout.blocks[turn]
            target.copy_(source, non_blocking=True)
            self._copied[turn].record()
        if from_device:
            targets, sources = zip(*from_device, strict=True)
            with torch.no_grad():
                copy_all(targets, sources)

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
            hosts = tuple(_view(block, offset, spec.dtype, sizes) for block in self._host_bytes)
            has_arrays = spec.dtype not in _NOT_IN_NUMPY
            arrays = tuple(host.numpy() for host in hosts) if has_arrays else None
            device = _view(self._device_bytes, offset, spec.dtype, sizes)
            if self._on_new is not None:
                self._on_new(device, spec)
            places[spec.name] = Place(spec, hosts, arrays, device)
        blocks = tuple(
            (block[:num_bytes], self._device_bytes[:num_bytes]) for block in self._host_bytes
        )
        tensors = {name: place.device for name, place in places.items()}
        by_turn: tuple[Arrays, ...] = tuple(
            {
                name: place.arrays[turn]
                for name, place in places.items()
                if place.arrays is not None
            }
            for turn in range(len(self._host_bytes))
        )
        return Layout(num_tokens, num_reqs, tensors, places, by_turn, blocks)


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


def _check_shape(spec: InputSpec, given: Sequence[int], expected: Sequence[int]) -> None:
    if given != expected and tuple(given) != tuple(expected):
        raise ValueError(
            f"input {spec.name!r} has shape {tuple(given)}, but this batch needs "
            f"{tuple(expected)}; its spec is {spec.shape}"
        )
