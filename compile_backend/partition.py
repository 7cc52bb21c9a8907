"""Graphs that Inductor partitions by itself: our runner in place of each, in PIECEWISE steps.

Between partitions runs code that Inductor wrote; in all other steps partitions run as it made
them. What becomes of a partition's arguments is that of its runner.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from compile_backend.attention.ops import WITHOUT_DISPATCHER
from compile_backend.compiled_graph import Programs
from compile_backend.context import current_forward_context
from compile_backend.partition_calls import PartitionCall
from compile_backend.partition_memory import StepMemory
from compile_backend.partition_origins import tensors_of
from compile_backend.partition_plan import planned_step
from compile_backend.partition_runner import PartitionRunner, running_key
from compile_backend.replay_plan import ReplayPlan
from compile_backend.torch_internals.partition_between import Between

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from compile_backend.batch import BatchDescriptor
    from compile_backend.compiled_graph import SectionRunner
    from compile_backend.context import ForwardContext
    from compile_backend.partition_memory import Growth
    from compile_backend.partition_plan import PlannedStep
    from compile_backend.torch_internals.partition import Partitions
    from compile_backend.wrapper import CUDAGraphWrapper

    Wrap = Callable[[Callable[..., Any], str, frozenset[int]], CUDAGraphWrapper]

logger = logging.getLogger(__name__)

# How often to plan the steps of a key whose inputs do not stay where they are.
_MAX_ATTEMPTS = 4


def partitioned_programs(
    program: Callable[[Sequence[Any]], tuple[Any, ...]],
    partitions: Partitions,
    device: torch.device,
    wrap: Wrap,
    growth: Growth,
) -> Programs:
    """The programs of a graph that Inductor partitioned.

    Args:
        program: runs the whole graph.
        partitions: of the code that it runs.
        device: where graphs are captured.
        wrap: makes the wrapper of a callable with this name and these unwritten outputs.
        growth: how many times larger tensors may be at other keys, by key.
    """
    steps = _Steps(program, device, growth, functools.cache(lambda: _code_between(partitions)))
    instead: list[Callable[[list[Any]], Sequence[Any]]] = []
    for index, function in enumerate(partitions.functions):
        if not function.does_work:
            instead.append(function.call)
            continue
        called = PartitionCall(function)
        wrapper = wrap(called, f"partition_{index}", function.unwritten)
        steps.runners.append(PartitionRunner(index, called, wrapper, steps.memory))
        instead.append(steps.runners[-1])
    partitions.divert(instead, steps.take_over, steps.planned)
    runners: tuple[SectionRunner, ...] = (*steps.runners, steps)
    return Programs(program, steps.run, steps.capture, runners, steps.plan)


def _code_between(partitions: Partitions) -> Between | None:
    """The code between partitions; None where it has a form that is not known."""
    try:
        return Between(partitions.between, partitions.names, WITHOUT_DISPATCHER)
    except Exception as error:  # noqa: BLE001 - they run as they are, only slower
        logger.warning("steps of partitions are not planned: %s: %s", type(error).__name__, error)
        return None


class _Steps:
    """The PIECEWISE steps of one graph: what its partitions share.

    Args:
        program: runs the whole graph, and asks `take_over` whether our runners are to run in it.
        device: where graphs are captured.
        growth: how many times larger tensors may be at other keys, by key.
        between: reads the code between the partitions; None where nothing can be planned.
    """

    def __init__(
        self,
        program: Callable[[Sequence[Any]], tuple[Any, ...]],
        device: torch.device,
        growth: Growth,
        between: Callable[[], Between | None],
    ) -> None:
        self.runners: list[PartitionRunner] = []
        self.memory = StepMemory(device, growth, self._is_captured)
        self._program = program
        self._between = between
        self._planned: dict[BatchDescriptor, PlannedStep] = {}
        self._attempts: Counter[BatchDescriptor] = Counter()
        self._starting: ForwardContext | None = None

    def run(self, static_args: Sequence[Any]) -> tuple[Any, ...]:
        """Run a PIECEWISE step, in its context."""
        memory = self.memory
        memory.inputs = static_args
        self._starting = current_forward_context()
        try:
            outputs = self._program(static_args)
            if memory.known is not None:
                for runner in self.runners:
                    runner.learn(running_key(), memory.known)
            return outputs
        finally:
            self._starting = None
            memory.inputs = ()
            memory.known = None

    def take_over(self) -> bool:
        """Whether the call that begins is the step's own, not another thread's or a nested one."""
        if self._starting is None or self._starting is not current_forward_context():
            return False
        self._starting = None
        return True

    def planned(self, args: list[Any]) -> PlannedStep | None:
        """What repeats the step that begins with these inputs; None where it runs as ever."""
        key = running_key()
        step = self._planned.get(key)
        if step is None and self._attempts[key] < _MAX_ATTEMPTS and self._is_ready(key):
            self._attempts[key] += 1
            step = self._make(key, args)
            if step is not None:
                self._planned[key] = step
        if step is None or step.fits(args):
            return step
        del self._planned[key]
        return None

    def drop(self, key: BatchDescriptor) -> None:
        """Plan the steps of one key anew."""
        self._planned.pop(key, None)
        self._attempts.pop(key, None)

    forget = drop  # plans are all that is known here

    def reset(self) -> None:
        """Plan all steps anew."""
        self._planned.clear()
        self._attempts.clear()

    def _make(self, key: BatchDescriptor, args: list[Any]) -> PlannedStep | None:
        between = self._between()
        if between is None:
            return None
        graphs = {runner.index: runner.captured(key) for runner in self.runners}
        captured = {index: graph for index, graph in graphs.items() if graph is not None}
        return planned_step(between, captured, args)

    def capture(self, static_args: Sequence[Any]) -> tuple[Any, ...]:
        """Capture every partition of a warmed-up key, and run nothing.

        Raises:
            CaptureError: one cannot be captured, so those after it have no inputs.
        """
        key = running_key()
        made: dict[int | None, list[Any]] = {None: tensors_of(static_args)}
        for runner in self.runners:
            runner.capture_ahead(key, made)
            # Later captures may take the memory of what is not needed any more, as in a step.
            for earlier in self.runners:
                earlier.let_go(key, made, runner.index)
        return ()

    def plan(self, key: BatchDescriptor) -> ReplayPlan | None:
        """The program itself, once every partition that can be captured is; it counts replays."""
        return ReplayPlan(self.run, 0) if self._is_ready(key) else None

    def _is_ready(self, key: BatchDescriptor) -> bool:
        return all(runner.is_ready(key) for runner in self.runners)

    def _is_captured(self, index: int, key: BatchDescriptor) -> bool:
        return any(runner.index == index and runner.is_captured(key) for runner in self.runners)
