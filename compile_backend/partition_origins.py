"""Where the arguments of a graph's partitions come from: found in a warm-up, used in captures.

A partition is handed tensors by code that is not ours. Those in the memory of the graph's inputs,
or of what an earlier partition returned, stay where they are once that one is captured. All others
are made anew in each step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from compile_backend.torch_internals.graphs import StorageReference, parts_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one argument comes from in each step of a key.

    Attributes:
        partition: that returned it; None for the graph's inputs.
        position: among the tensors of those.
        size: of the argument.
        stride: of the argument.
        offset: of the argument, from the start of that tensor, in elements.
    """

    partition: int | None
    position: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self, made: Mapping[int | None, Sequence[Any]]) -> torch.Tensor | None:
        """The argument, from what the partitions returned and, under None, the inputs."""
        owner = made[self.partition][self.position] if self.partition in made else None
        if owner is None:
            return None
        if not self.offset and (owner.size(), owner.stride()) == (self.size, self.stride):
            found: torch.Tensor = owner
            return found
        return torch.as_strided(
            owner, self.size, self.stride, owner.storage_offset() + self.offset
        )


@dataclass(frozen=True, slots=True)
class _Owned:
    """A memory, as long as it is alive, and whose it is."""

    memory: StorageReference
    partition: int | None
    position: int
    dtype: torch.dtype
    offset: int


class Origins:
    """Whose memory is whose in one warm-up.

    Args:
        inputs: tensors of the graph's inputs, and what else it takes.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._owned: dict[int, _Owned] = {}
        self._returned: dict[int | None, list[int]] = {}
        self._last_needed: dict[tuple[int | None, int], int] = {}
        self.add(None, inputs)

    def add(self, partition: int | None, tensors: Sequence[Any]) -> None:
        """Remember the memory of what a partition returned."""
        for position, tensor in enumerate(tensors):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                self._returned.setdefault(partition, []).append(position)
                memory = StorageReference(tensor)
                self._owned[memory.address] = _Owned(
                    memory, partition, position, tensor.dtype, int(tensor.storage_offset())
                )

    def of(self, argument: Any) -> Origin | None:
        """Where an argument comes from; None where it is made anew, or is no tensor."""
        if not isinstance(argument, torch.Tensor) or not argument.numel():
            return None
        owned = self._owned.get(argument.untyped_storage().data_ptr())
        if owned is None or not owned.memory.is_alive() or owned.dtype != argument.dtype:
            return None
        return Origin(
            owned.partition,
            owned.position,
            tuple(argument.size()),
            tuple(argument.stride()),
            int(argument.storage_offset()) - owned.offset,
        )

    def look(self, partition: int) -> None:
        """Note what is still alive when a partition starts."""
        for owned in self._owned.values():
            if owned.memory.is_alive():
                self._last_needed[owned.partition, owned.position] = partition

    def needed_until(self, partition: int) -> dict[int, int]:
        """By position, the last partition at whose start a tensor of this one was alive."""
        return {
            position: self._last_needed.get((partition, position), partition)
            for position in self._returned.get(partition, ())
        }


def tensors_of(inputs: Sequence[Any]) -> list[Any]:
    """What a graph takes, with the parts of tensors that only wrap others in their place."""
    return [
        part
        for item in inputs
        for part in (parts_of(item) if isinstance(item, torch.Tensor) else (item,))
    ]
