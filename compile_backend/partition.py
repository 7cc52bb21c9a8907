"""Graphs that Inductor partitions by itself: our runner in place of each, in PIECEWISE steps.

Between partitions runs code that Inductor wrote; in all other steps partitions run as it made
them. What becomes of a partition's arguments is that of its runner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compile_backend.compiled_graph import Programs
from compile_backend.context import current_forward_context
from compile_backend.partition_calls import PartitionCall
from compile_backend.partition_memory import StepMemory
from compile_backend.partition_origins import tensors_of
from compile_backend.partition_runner import PartitionRunner, running_key
from compile_backend.replay_plan import ReplayPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from compile_backend.batch import BatchDescriptor
    from compile_backend.context import ForwardContext
    from compile_backend.partition_memory import Growth
    from compile_backend.torch_internals.partition import Partitions
    from compile_backend.wrapper import CUDAGraphWrapper

    Wrap = Callable[[Callable[..., Any], str, frozenset[int]], CUDAGraphWrapper]


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
    steps = _Steps(program, device, growth)
    instead: list[Callable[[list[Any]], Sequence[Any]]] = []
    for index, function in enumerate(partitions.functions):
        if not function.does_work:
            instead.append(function.call)
            continue
        called = PartitionCall(function)
        wrapper = wrap(called, f"partition_{index}", function.unwritten)
        steps.runners.append(PartitionRunner(index, called, wrapper, steps.memory))
        instead.append(steps.runners[-1])
    partitions.divert(instead, steps.take_over)
    return Programs(program, steps.run, steps.capture, tuple(steps.runners), steps.plan)


class _Steps:
    """The PIECEWISE steps of one graph: what its partitions share.

    Args:
        program: runs the whole graph, and asks `take_over` whether our runners are to run in it.
        device: where graphs are captured.
        growth: how many times larger tensors may be at other keys, by key.
    """

    def __init__(
        self,
        program: Callable[[Sequence[Any]], tuple[Any, ...]],
        device: torch.device,
        growth: Growth,
    ) -> None:
        self.runners: list[PartitionRunner] = []
        self.memory = StepMemory(device, growth, self._is_captured)
        self._program = program
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
        is_ready = all(runner.is_ready(key) for runner in self.runners)
        return ReplayPlan(self.run, 0) if is_ready else None

    def _is_captured(self, index: int, key: BatchDescriptor) -> bool:
        return any(runner.index == index and runner.is_captured(key) for runner in self.runners)
