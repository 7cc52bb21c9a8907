"""The inputs of a compiled graph: what each one is, and static memory for those that move.

Parameters, buffers and tensors marked static stay where they are until somebody rebinds them;
callers' tensors are new in every step. Nothing here knows modes or pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from compile_backend import shortcuts
from compile_backend.boundary import SharedBuffer
from compile_backend.errors import ConfigError
from compile_backend.layout import memory_of
from compile_backend.torch_internals.cuda import are_at_addresses, copy_all
from compile_backend.torch_internals.graphs import (
    input_source_name,
    is_static_address,
    names_of_wrapped,
    parts_of,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


class InputClass(Enum):
    """What an input of a graph is."""

    PARAMETER = "parameter"
    STATIC = "buffer or marked static"
    CALLER = "caller's tensor"
    OTHER_DEVICE = "tensor on another device"
    SIZE = "size"


@dataclass(frozen=True, slots=True)
class Format:
    """What compiled code relies on of a tensor.

    Attributes:
        dtype: of its elements.
        sizes: None for what may change.
        strides: likewise.
    """

    dtype: torch.dtype
    sizes: tuple[int | None, ...]
    strides: tuple[int | None, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Format:
        """That of a tensor, whose sizes may be symbols."""
        return cls(tensor.dtype, _numbers(tensor.shape), _numbers(tensor.stride()))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has it. Strides of one element mean nothing."""
        return (
            tensor.dtype is self.dtype
            and tensor.dim() == len(self.sizes)
            and all(
                known in (None, size) and (step in (None, stride) or size == 1)
                for known, size, step, stride in zip(
                    self.sizes, tensor.shape, self.strides, tensor.stride(), strict=True
                )
            )
        )

    def __str__(self) -> str:
        sizes, strides = (
            f"({', '.join('any' if number is None else str(number) for number in numbers)})"
            for numbers in (self.sizes, self.strides)
        )
        return f"{self.dtype} of shape {sizes}, strides {strides}"


def _numbers(sizes: Sequence[Any]) -> tuple[int | None, ...]:
    return tuple(size if isinstance(size, int) else None for size in sizes)


@dataclass(frozen=True, slots=True)
class GraphInput:
    """One input of a graph.

    Attributes:
        name: of the value in the graph.
        source: how the user's code would write it.
        kind: what it is.
        format: it was compiled for; None where that is not known, or no tensor with strides.
    """

    name: str
    source: str
    kind: InputClass
    format: Format | None = None


def classify_inputs(
    graph: torch.fx.Graph, example_inputs: Sequence[Any], device: torch.device
) -> tuple[GraphInput, ...]:
    """What each input of a Dynamo graph is.

    Args:
        graph: its placeholders are in call order.
        example_inputs: what the graph is first called with.
        device: where graphs are captured.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    return tuple(
        GraphInput(
            node.name, input_source_name(node), _class_of(node, value, device), _format_of(node)
        )
        for node, value in zip(placeholders, example_inputs, strict=True)
    )


def _format_of(node: torch.fx.Node) -> Format | None:
    traced = node.meta.get("example_value")
    if isinstance(traced, torch.Tensor) and traced.layout is torch.strided:
        return Format.of(traced)
    return None


def _class_of(node: torch.fx.Node, value: Any, device: torch.device) -> InputClass:
    if not isinstance(value, torch.Tensor):
        return InputClass.SIZE
    if value.device != device:
        return InputClass.OTHER_DEVICE
    if isinstance(value, torch.nn.Parameter):
        return InputClass.PARAMETER
    return InputClass.STATIC if is_static_address(node, value) else InputClass.CALLER


@dataclass(slots=True)
class _Loaded:
    """One key's buffers, how to fill them, and where all else was. Holds no weights alive.

    `wrappers` has the addresses inside of inputs that only wrap others, as quantized weights do;
    `places` is a short way to compare all addresses, None where there is none, and `short` one to
    copy.
    """

    buffers: list[tuple[int, torch.Tensor]]
    addresses: list[int | None]
    wrappers: dict[int, tuple[int, ...]]
    places: object | None
    memories: frozenset[int]
    written_memories: frozenset[int]
    copies: list[tuple[list[torch.Tensor], list[int]]]
    irregular: list[tuple[torch.Tensor, int]]
    short: object | None = None


ShortWay = tuple[object, object | None]
"""The first two arguments of `shortcuts.replay_call`."""


class InputBuffers:
    """Brings a graph's inputs to static addresses, with one fused copy per dtype.

    Args:
        inputs: what each input is.
        copy_inputs: whether callers' tensors are copied; without, callers promise that they stay.
        mutated: positions of the inputs that the graph writes to.
    """

    def __init__(
        self,
        inputs: Sequence[GraphInput],
        *,
        copy_inputs: bool,
        mutated: frozenset[int],
    ) -> None:
        kinds = [item.kind for item in inputs]
        moving = [i for i, kind in enumerate(kinds) if kind is InputClass.CALLER]
        still = (InputClass.PARAMETER, InputClass.STATIC)
        fixed = [i for i, kind in enumerate(kinds) if kind in still]
        self.copied = tuple(moving) if copy_inputs else ()
        self._fixed = fixed if copy_inputs else sorted((*fixed, *moving))
        self._written = tuple(i for i in self._fixed if i in mutated)
        self.written_back = tuple(i for i in self.copied if i in mutated)
        self._buffers = {i: SharedBuffer() for i in self.copied}
        self._loaded: dict[Hashable, _Loaded] = {}
        self._traced = {i: inputs[i] for i in fixed}

    @property
    def num_bytes(self) -> int:
        """Memory that the buffers take."""
        return sum(buffer.num_bytes for buffer in self._buffers.values())

    def load(self, key: Hashable, args: Sequence[Any], growth: int = 1) -> tuple[list[Any], bool]:
        """Fill the key's buffers from `args`.

        Args:
            key: whose graphs read the buffers; the same key must always come with equal shapes.
            args: the graph's inputs.
            growth: how many times larger inputs may be at other keys.

        Returns:
            The inputs at their static addresses, and whether an input that is not copied has
            moved since the key was first loaded, so that its graphs are stale.

        Raises:
            ConfigError: a weight has another format than the one it was compiled for.
        """
        static_args = list(args)
        loaded = self._loaded.get(key)
        if loaded is None:
            loaded = self._loaded[key] = self._make(args, growth)
            has_moved = False
        else:
            has_moved = self._have_moved(loaded, args)
            if has_moved:
                self._look_at(loaded, args)
        _copy(loaded, args)
        for position, buffer in loaded.buffers:
            static_args[position] = buffer
        return static_args, has_moved

    def reload(self, key: Hashable, args: tuple[Any, ...]) -> bool:
        """Fill the key's buffers as `load` does, if that is all there is to do.

        Args:
            key: that was loaded before.
            args: the graph's inputs.

        Returns:
            Whether the buffers were filled: not if an input has moved, if that takes long to
            find out, if inputs overlap, or if callers are to see what the graph writes.
        """
        loaded = self._loaded.get(key)
        if loaded is None or loaded.places is None or self.written_back:
            return False
        if not shortcuts.are_in_place(loaded.places, args):
            return False
        if self.overlaps(key, args):
            return False
        _copy(loaded, args)
        return True

    def short_way(self, key: Hashable) -> ShortWay | None:
        """How a call past here does what `reload` does; None where `reload` has to.

        Args:
            key: that was loaded, and is not to be loaded anew.
        """
        loaded = self._loaded.get(key)
        if loaded is None or loaded.places is None or self.written_back:
            return None
        if self.copied and loaded.short is None:
            return None
        return loaded.places, loaded.short

    def write_back(self, static_args: Sequence[Any], args: Sequence[Any]) -> None:
        """Show callers what the graph wrote to their tensors."""
        for i in self.written_back:
            memory_of(args[i]).copy_(memory_of(static_args[i]))

    def overlaps(self, key: Hashable, args: Sequence[Any]) -> bool:
        """Whether a tensor that is written shares memory with another input.

        Copies of the two would not share it.

        Args:
            key: whether it was loaded or not; if so, with these inputs.
            args: the graph's inputs.
        """
        if not self.written_back and not self._written:
            return False
        loaded = self._loaded.get(key)
        still = loaded.memories if loaded else _memories(args, self._fixed)
        still_written = loaded.written_memories if loaded else _memories(args, self._written)
        memories = {
            i: args[i].untyped_storage().data_ptr() for i in self.copied if args[i].numel()
        }
        if not still_written.isdisjoint(memories.values()):
            return True
        written = [memories[i] for i in self.written_back if i in memories]
        others = list(memories.values())
        return any(m in still or others.count(m) > 1 for m in written)

    def forget(self, key: Hashable) -> None:
        """Forget one key."""
        self._loaded.pop(key, None)

    def reset(self) -> None:
        """Forget every key."""
        self._loaded.clear()

    def _make(self, args: Sequence[Any], growth: int) -> _Loaded:
        buffers = []
        by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[int]]] = {}
        irregular = []
        for i in self.copied:
            buffer = self._buffers[i].like(args[i], growth)
            buffers.append((i, buffer))
            if 0 in args[i].stride():
                irregular.append((memory_of(buffer), i))
            else:
                targets, positions = by_dtype.setdefault(args[i].dtype, ([], []))
                targets.append(buffer)
                positions.append(i)
        copies = list(by_dtype.values())
        loaded = _Loaded(buffers, [], {}, None, frozenset(), frozenset(), copies, irregular)
        self._look_at(loaded, args)
        return loaded

    def _have_moved(self, loaded: _Loaded, args: Sequence[Any]) -> bool:
        """Whether an input that is not copied is elsewhere."""
        places = loaded.places
        if places is not None and shortcuts.are_in_place(places, tuple(args)):
            return False
        return not are_at_addresses(list(args), loaded.addresses, self._fixed) or any(
            _addresses_inside(args[i]) != addresses for i, addresses in loaded.wrappers.items()
        )

    def _look_at(self, loaded: _Loaded, args: Sequence[Any]) -> None:
        """Note where the inputs are that are not copied."""
        loaded.short = None
        self._check_formats(args)
        loaded.wrappers = {
            i: _addresses_inside(args[i]) for i in self._fixed if names_of_wrapped(args[i])
        }
        loaded.addresses = [None] * len(args)
        for i in self._fixed:
            loaded.addresses[i] = args[i].data_ptr()
        loaded.places = None
        if not loaded.wrappers:
            loaded.places = shortcuts.places_of(tuple(args), loaded.addresses, self._fixed)
        if self.copied:
            loaded.memories = _memories(args, self._fixed)
            loaded.written_memories = _memories(args, self._written)
            if not loaded.irregular:
                targets = [buffer for _, buffer in loaded.buffers]
                written = loaded.written_memories
                loaded.short = shortcuts.inputs_of(tuple(args), self.copied, targets, written)

    def _check_formats(self, args: Sequence[Any]) -> None:
        """Refuse what was not compiled, where Dynamo did not notice it before.

        It may have been told not to. Some releases of torch do not look at tensors either whose
        tables are the same, so that they miss other strides of `weight.data`.
        """
        for i, traced in self._traced.items():
            if traced.format is not None and not traced.format.holds(args[i]):
                raise ConfigError(
                    "weight",
                    traced.source,
                    f"was compiled for {traced.format} and is {Format.of(args[i])} now, which no "
                    "guard of Dynamo noticed",
                    "call torch._dynamo.reset() after such a change; keep all guards if a "
                    "guard_filter_fn leaves some out",
                )


def _copy(loaded: _Loaded, args: Sequence[Any]) -> None:
    if loaded.short is not None and shortcuts.copy_inputs(loaded.short, tuple(args)):
        return
    for targets, positions in loaded.copies:
        copy_all(targets, [args[i] for i in positions])
    for target, position in loaded.irregular:
        target.copy_(memory_of(args[position]))


def _memories(args: Sequence[Any], positions: Sequence[int]) -> frozenset[int]:
    return frozenset(
        part.untyped_storage().data_ptr()
        for i in positions
        for part in parts_of(args[i])
        if part.numel()
    )


def _addresses_inside(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple([part.data_ptr() for part in parts_of(tensor)])
