"""What the graphs of a runner's pieces do that those of other callers do not.

A runner's inputs lie in one block on the host, and its caller is done with a step's outputs by the
next step. So the first piece's graph begins with the copy of that block, and the last piece writes
to the memory pool of the runner, which no other caller's step writes: bringing the one and saving
the other are nothing that the host does in each step. How runners get their numbers is not known
here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from compile_backend.batch import runner_of
from compile_backend.context import current_forward_context

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    import torch

    from compile_backend.batch import BatchDescriptor
    from compile_backend.graph_engine import GraphEngine


@dataclass(frozen=True, slots=True)
class OfRunner:
    """What a runner brings to its graphs.

    Attributes:
        engine: captures into the runner's own memory pool.
        send: puts the copy of a key's inputs on the stream; None where graphs are not to hold it,
            as where Python runs between the copy and the first piece.
        holds: whether a tensor lies where the runner's inputs do, at an address that stays.
        kept: what its graphs write to besides, by whatever tells the graphs apart.
    """

    engine: GraphEngine
    send: Callable[[BatchDescriptor], None] | None
    holds: Callable[[torch.Tensor], bool]
    kept: dict[Hashable, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunnerGraphs:
    """The runners of one `torch.compile` call, by number.

    Attributes:
        runners: what each of them brings, while it lives.
    """

    runners: dict[int, OfRunner] = field(default_factory=dict)

    def of(self, key: BatchDescriptor) -> OfRunner | None:
        """The runner of a key; None if it is gone, or the key is no runner's."""
        return self.runners.get(runner_of(key))

    def opened(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A first piece that brings its runner's inputs before it runs."""

        def run(*args: Any) -> Any:
            key = running_key()
            runner = None if key is None else self.of(key)
            if key is not None and runner is not None and runner.send is not None:
                runner.send(key)
            return call(*args)

        return run

    def sends(self, key: BatchDescriptor) -> bool:
        """Whether the first graph of a key brings the inputs."""
        runner = self.of(key)
        return runner is not None and runner.send is not None

    def engine_of(self, key: BatchDescriptor) -> GraphEngine | None:
        """What captures a last piece; None for keys that are no runner's."""
        runner = self.of(key)
        return None if runner is None else runner.engine

    def graphs_are_gone(self) -> None:
        """Let go of what graphs wrote to."""
        for runner in self.runners.values():
            runner.kept.clear()


def running_key() -> BatchDescriptor | None:
    """The key of the step that runs, if it is a runner's."""
    context = current_forward_context()
    key = None if context is None else context.batch_descriptor
    return key if key is not None and runner_of(key) else None
