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

from compile_backend.boundary import SharedBuffer
from compile_backend.torch_internals import (
    copy_all,
    input_source_name,
    is_static_address,
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
class GraphInput:
    """One input of a graph.

    Attributes:
        name: of the value in the graph.
        source: how the user's code would write it.
        kind: what it is.
    """

    name: str
    source: str
    kind: InputClass


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
        GraphInput(node.name, input_source_name(node), _class_of(node, value, device))
        for node, value in zip(placeholders, example_inputs, strict=True)
    )


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
    """One key's inputs: at their static addresses, and how to fill them."""

    static_args: list[Any]
    addresses: list[int]
    copies: list[tuple[list[torch.Tensor], list[int]]]
    irregular: list[tuple[torch.Tensor, int]]


class InputBuffers:
    """Brings a graph's inputs to static addresses, with one fused copy per dtype.

    Args:
        inputs: what each input is.
        device: where the buffers are.
        copy_inputs: whether callers' tensors are copied; without, callers promise that they stay.
        mutated: positions of the inputs that the graph writes to.
    """

    def __init__(
        self,
        inputs: Sequence[GraphInput],
        device: torch.device,
        *,
        copy_inputs: bool,
        mutated: frozenset[int],
    ) -> None:
        moving = [i for i, item in enumerate(inputs) if item.kind is InputClass.CALLER]
        fixed = [
            i
            for i, item in enumerate(inputs)
            if item.kind in (InputClass.PARAMETER, InputClass.STATIC)
        ]
        self.copied = tuple(moving) if copy_inputs else ()
        self._fixed = fixed if copy_inputs else sorted((*fixed, *moving))
        self._written_back = tuple(i for i in self.copied if i in mutated)
        self._buffers = {i: SharedBuffer(device) for i in self.copied}
        self._loaded: dict[Hashable, _Loaded] = {}

    @property
    def writes_back(self) -> bool:
        """Whether the graph writes to copied inputs."""
        return bool(self._written_back)

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
        """
        loaded = self._loaded.get(key)
        if loaded is None:
            loaded = self._loaded[key] = self._make(args, growth)
            has_moved = False
        else:
            has_moved = _addresses(args, self._fixed) != loaded.addresses
            if has_moved:
                self._rebind(loaded, args)
        for targets, positions in loaded.copies:
            copy_all(targets, [args[i] for i in positions])
        for target, position in loaded.irregular:
            target.copy_(_unexpanded(args[position]))
        return loaded.static_args, has_moved

    def write_back(self, static_args: Sequence[Any], args: Sequence[Any]) -> None:
        """Show callers what the graph wrote to their tensors."""
        for i in self._written_back:
            _unexpanded(args[i]).copy_(_unexpanded(static_args[i]))

    def overlaps(self, args: Sequence[Any]) -> bool:
        """Whether a tensor that is written shares memory with another input.

        Copies of the two would not share it.
        """
        if not self._written_back:
            return False
        storages = [
            arg.untyped_storage().data_ptr() if isinstance(arg, torch.Tensor) else None
            for arg in args
        ]
        return any(
            storages[i] == storage
            for i in self._written_back
            for j, storage in enumerate(storages)
            if i != j
        )

    def static_args(self, key: Hashable) -> list[Any]:
        """The static inputs of a key that was loaded before."""
        return self._loaded[key].static_args

    def reset(self) -> None:
        """Forget every key."""
        self._loaded.clear()

    def _make(self, args: Sequence[Any], growth: int) -> _Loaded:
        static_args = list(args)
        by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[int]]] = {}
        irregular = []
        for i in self.copied:
            static_args[i] = self._buffers[i].like(args[i], growth)
            if 0 in args[i].stride():
                irregular.append((_unexpanded(static_args[i]), i))
            else:
                targets, positions = by_dtype.setdefault(args[i].dtype, ([], []))
                targets.append(static_args[i])
                positions.append(i)
        loaded = _Loaded(static_args, [], list(by_dtype.values()), irregular)
        self._rebind(loaded, args)
        return loaded

    def _rebind(self, loaded: _Loaded, args: Sequence[Any]) -> None:
        loaded.addresses = _addresses(args, self._fixed)
        for i in self._fixed:
            loaded.static_args[i] = args[i]


def _addresses(args: Sequence[Any], positions: Sequence[int]) -> list[int]:
    """Where the tensors at these positions are; asked for hundreds of weights in every step."""
    return [*map(torch.Tensor.data_ptr, [args[i] for i in positions])]


def _unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """One element of each dimension along which all are the same memory."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
