"""What a caller gets back from a replay: its own memory, never the graph's.

A graph writes the same output memory in every replay. Callers get copies (or, if they asked for
it, the memory itself until the next call), and views of inputs as views of their own inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from compile_backend.layout import memory_of, owners_of_memory

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


@dataclass(frozen=True, slots=True)
class _View:
    """An output in the memory of an input."""

    position: int
    offset: int


@dataclass(frozen=True, slots=True)
class _Together:
    """Outputs in one memory: copied once, as a whole, and viewed as they were."""

    members: tuple[int, ...]
    start: int
    extent: int


class OutputReturns:
    """Turns a graph's outputs into the caller's.

    Args:
        clone: whether outputs are copied.
    """

    def __init__(self, *, clone: bool) -> None:
        self._clone = clone
        self._plans: dict[Hashable, tuple[list[Any], list[_Together]]] = {}

    def give(
        self,
        key: Hashable,
        outputs: Sequence[Any],
        static_args: Sequence[Any],
        args: Sequence[Any],
    ) -> list[Any]:
        """The caller's outputs.

        Args:
            key: whose graphs made the outputs.
            outputs: in the graph's memory.
            static_args: what the graph ran on.
            args: what the caller passed.
        """
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make(outputs, static_args)
        returned = []
        for output, how in zip(outputs, plan[0], strict=True):
            if how is None:
                returned.append(output)
            elif how is _COPY:
                returned.append(output.clone())
            else:
                owner = args[how.position]
                offset = owner.storage_offset() + how.offset
                returned.append(owner.as_strided(output.size(), output.stride(), offset))
        for together in plan[1]:
            _copy_together(together, outputs, returned)
        return returned

    def reset(self) -> None:
        """Forget every key."""
        self._plans.clear()

    def _make(
        self, outputs: Sequence[Any], static_args: Sequence[Any]
    ) -> tuple[list[Any], list[_Together]]:
        owners = owners_of_memory(static_args)
        plan: list[Any] = []
        groups: dict[int, list[int]] = {}
        for index, output in enumerate(outputs):
            plan.append(None)
            if not isinstance(output, torch.Tensor) or not output.numel():
                continue
            storage = output.untyped_storage().data_ptr()
            owner = owners.get(storage)
            if owner is not None and static_args[owner].dtype == output.dtype:
                offset = output.storage_offset() - static_args[owner].storage_offset()
                plan[index] = _View(owner, offset)
            elif self._clone:
                plan[index] = _COPY
                groups.setdefault(storage, []).append(index)
        together = []
        for members in groups.values():
            is_dense = len(members) == 1 and 0 not in outputs[members[0]].stride()
            if not is_dense and len({outputs[i].dtype for i in members}) == 1:
                together.append(_span(members, outputs))
                for index in members:
                    plan[index] = None
        return plan, together


_COPY = object()


def _span(members: Sequence[int], outputs: Sequence[Any]) -> _Together:
    start = min(outputs[i].storage_offset() for i in members)
    end = max(outputs[i].storage_offset() + memory_of(outputs[i]).numel() for i in members)
    return _Together(tuple(members), start, end - start)


def _copy_together(together: _Together, outputs: Sequence[Any], returned: list[Any]) -> None:
    first = outputs[together.members[0]]
    copy = first.as_strided((together.extent,), (1,), together.start).clone()
    for i in together.members:
        offset = outputs[i].storage_offset() - together.start
        returned[i] = copy.as_strided(outputs[i].size(), outputs[i].stride(), offset)
