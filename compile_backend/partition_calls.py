"""A partition as something that can be captured: tensors in, new tensors out.

Inductor's own form is neither: arguments may be tuples of which little is read, and are handed on
among the outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from compile_backend.torch_internals.graphs import tree_map
from compile_backend.torch_internals.partition_between import Leaf

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compile_backend.torch_internals.partition import PartitionFunction


@dataclass(frozen=True, slots=True)
class _PassedOn:
    """Stands for an output that is an argument."""

    position: int


class PartitionCall:
    """A partition as something that can be captured: tensors in, new tensors out.

    Arguments are flat: what only some elements are read of is given by these. Outputs that are
    arguments are not returned, only told: whoever replays has them.

    Args:
        function: the partition.
    """

    def __init__(self, function: PartitionFunction) -> None:
        self._call = function.call
        self._elements = function.elements
        self._taken: list[tuple[int, ...] | None] | None = None

    def leaves(self, args: Sequence[Any]) -> list[Any]:
        """The arguments, flat."""
        if self._taken is None:
            self._taken = [
                self._elements.get(position, tuple(range(len(arg))))
                if isinstance(arg, (tuple, list))
                else None
                for position, arg in enumerate(args)
            ]
            if all(taken is None for taken in self._taken):
                self._taken = []
        if not self._taken:
            return list(args)
        leaves: list[Any] = []
        for arg, taken in zip(args, self._taken, strict=True):
            leaves.extend([arg] if taken is None else [arg[i] for i in taken])
        return leaves

    def places(self, num_leaves: int) -> list[Leaf]:
        """What each flat argument is of those that the partition takes."""
        if not self._taken:
            return [Leaf(position) for position in range(num_leaves)]
        return [
            Leaf(position, element)
            for position, taken in enumerate(self._taken)
            for element in ((None,) if taken is None else taken)
        ]

    def __call__(self, *leaves: Any) -> list[Any]:
        """Run it on flat arguments."""
        outputs = self._call(self._args(leaves))
        positions = {id(leaf): position for position, leaf in enumerate(leaves)}

        def told(item: Any) -> Any:
            is_given = isinstance(item, torch.Tensor) and id(item) in positions
            return _PassedOn(positions[id(item)]) if is_given else item

        mapped: list[Any] = tree_map(told, list(outputs))
        return mapped

    def _args(self, leaves: Sequence[Any]) -> list[Any]:
        if not self._taken:
            return list(leaves)
        left = iter(leaves)
        args: list[Any] = []
        for taken in self._taken:
            if taken is None:
                args.append(next(left))
                continue
            elements: list[Any] = [None] * (1 + max(taken, default=-1))
            for i in taken:
                elements[i] = next(left)
            args.append(tuple(elements))
        return args


def passed_on(output: Any) -> int | None:
    """The position of the argument that an output is; None where it is a new tensor."""
    return output.position if type(output) is _PassedOn else None


def given(outputs: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    """What a partition returns, arguments that it hands on included."""
    return [
        leaves[item.position]
        if type(item) is _PassedOn
        else tuple(given(item, leaves))
        if type(item) in (tuple, list)
        else item
        for item in outputs
    ]
