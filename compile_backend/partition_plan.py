"""Planned steps of a graph that Inductor partitioned: replays between its code, in one function.

Once every partition that can be captured holds a key's graph, only what is made anew in each step
is left to look at: all else comes from inputs of the graph, or from graphs that the plan itself
replays. So the inputs' addresses are compared once a step, and nothing is on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from compile_backend import shortcuts
from compile_backend.layout import memory_of
from compile_backend.partition_calls import passed_on
from compile_backend.torch_internals.cuda import are_at_addresses
from compile_backend.torch_internals.partition_between import Leaf, Replay
from compile_backend.torch_internals.partition_text import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from compile_backend.stats import KeyStats
    from compile_backend.torch_internals.partition_between import Between
    from compile_backend.torch_internals.partition_text import Argument, Source


@dataclass(frozen=True, slots=True)
class CapturedPartition:
    """A partition's graph of one key.

    Attributes:
        replay: fills the outputs.
        outputs: of the graph.
        leaves: the arguments that it was captured with.
        targets: memory that stays, for the positions of those that are made anew in each step.
        others: what is no tensor, by position.
        addresses: of the rest, by position.
        stats: the counts of the key.
    """

    replay: Callable[[], object]
    outputs: Sequence[Any]
    leaves: Sequence[Leaf]
    targets: Mapping[int, torch.Tensor]
    others: Mapping[int, Any]
    addresses: Mapping[int, int]
    stats: KeyStats


class PlannedStep:
    """What repeats the steps of one key.

    Args:
        call: runs it on what holds the other partitions, and on the list of inputs.
        inputs: of a step.
        fixed: positions of those that graphs read where they are.
        numbers: inputs that are no tensors, by position.
        captured: the partitions that it replays.
    """

    def __init__(
        self,
        call: Callable[[Any, list[Any]], Sequence[Any]],
        inputs: Sequence[Any],
        fixed: Sequence[int],
        numbers: Mapping[int, Any],
        captured: Sequence[CapturedPartition],
    ) -> None:
        self._call = call
        self._fixed = list(fixed)
        self._numbers = dict(numbers)
        self._addresses: list[int | None] = [None] * len(inputs)
        for i in fixed:
            self._addresses[i] = inputs[i].data_ptr()
        self._places = shortcuts.places_of(tuple(inputs), self._addresses, self._fixed)
        self._num_replays = len(captured)
        self._stats = captured[0].stats

    def fits(self, args: list[Any]) -> bool:
        """Whether a step's inputs are where the graphs read them."""
        if any(args[i] != number for i, number in self._numbers.items()):
            return False
        if self._places is not None and shortcuts.are_in_place(self._places, tuple(args)):
            return True
        return are_at_addresses(args, self._addresses, self._fixed)

    def __call__(self, others: Any, args: list[Any]) -> Sequence[Any]:
        """Run a step."""
        outputs = self._call(others, args)
        self._stats.replays += self._num_replays
        return outputs


def planned_step(
    between: Between, captured: Mapping[int, CapturedPartition], inputs: Sequence[Any]
) -> PlannedStep | None:
    """The planned step of a key; None where an argument may come to lie elsewhere.

    Args:
        between: the code between partitions.
        captured: the graphs of the key, by partition; all others run as they are.
        inputs: of a step.
    """
    if not captured or any(index not in between.arguments for index in captured):
        return None
    found = _Arguments(captured, inputs, between)
    if not all(found.stay(index) for index in captured):
        return None
    fixed = sorted(found.fixed)
    if any(inputs[i].data_ptr() % ALIGNMENT for i in between.realigned.intersection(fixed)):
        return None
    replays = {index: _replay(each) for index, each in captured.items()}
    call = between.with_replays(replays)
    return PlannedStep(call, inputs, fixed, found.numbers, list(captured.values()))


class _Arguments:
    """What the arguments of captured partitions are.

    Attributes:
        fixed: positions of the inputs that have to be where they are.
        numbers: the inputs that have to be equal.
    """

    def __init__(
        self,
        captured: Mapping[int, CapturedPartition],
        inputs: Sequence[Any],
        between: Between,
    ) -> None:
        self._captured = captured
        self._inputs = inputs
        self._between = between
        self.fixed: set[int] = set()
        self.numbers: dict[int, Any] = {}

    def stay(self, index: int) -> bool:
        """Whether a partition always takes what its graph was captured with, copies aside."""
        graph = self._captured[index]
        arguments = self._between.arguments[index]
        if any(leaf.position >= len(arguments) for leaf in graph.leaves):
            return False
        if any(isinstance(output, (tuple, list)) for output in graph.outputs):
            return False
        for position, leaf in enumerate(graph.leaves):
            argument = arguments[leaf.position]
            if position in graph.others:
                if not self._is_number(argument, graph.others[position]):
                    return False
            elif position not in graph.targets and (
                leaf.element is not None
                or graph.addresses[position] != self._address(argument.source)
            ):
                return False
        return True

    def _is_number(self, argument: Argument, value: Any) -> bool:
        if argument.is_size:
            return True  # of the key
        source = argument.source
        if source is None or source.partition is not None:
            return False
        self.numbers[source.position] = value
        return bool(self._inputs[source.position] == value)

    def _address(self, source: Source | None) -> int | None:
        """Where a value always is; None where that is not known."""
        if source is None:
            return None
        if source.partition is None:
            item = self._inputs[source.position]
            if not isinstance(item, torch.Tensor):
                return None
            self.fixed.add(source.position)
            return item.data_ptr()
        graph = self._captured.get(source.partition)
        if graph is None:
            return None
        output = graph.outputs[source.position]
        given = passed_on(output)
        if given is None:
            return output.data_ptr() if isinstance(output, torch.Tensor) else None
        if given in graph.targets:
            return graph.targets[given].data_ptr()
        leaf = graph.leaves[given]
        if leaf.element is not None:
            return None
        return self._address(self._between.arguments[source.partition][leaf.position].source)


def _replay(graph: CapturedPartition) -> Replay:
    def returned(output: Any) -> Any:
        given = passed_on(output)
        if given is None:
            return output
        return graph.targets.get(given, graph.leaves[given])

    return Replay(
        graph.replay,
        tuple(
            (graph.leaves[position], target.shape, _copy_to(target))
            for position, target in graph.targets.items()
        ),
        tuple(returned(output) for output in graph.outputs),
    )


def _copy_to(target: torch.Tensor) -> Callable[[Any], object]:
    if 0 not in target.stride():
        return target.copy_
    memory = memory_of(target)
    return lambda value: memory.copy_(memory_of(value))
