"""Replay plans: a PIECEWISE step as one flat function, once every piece holds a graph.

Pieces are bare replays, what is not captured runs on the tensors that the graphs read and write,
and nobody looks up a context, a key or an address on the way. A plan holds for one key, as long
as its graphs do; it knows nothing of how calls find it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compile_backend.piecewise import PieceRunner
from compile_backend.stitch import stitch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from compile_backend.batch import BatchDescriptor
    from compile_backend.piecewise import UncapturedRunner
    from compile_backend.split import SplitGraph


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """One key's step.

    Attributes:
        program: from the graph's inputs, at their static addresses, to its outputs.
        num_replays: graphs that it replays.
    """

    program: Callable[[Sequence[Any]], tuple[Any, ...]]
    num_replays: int


def make_plan(
    split: SplitGraph,
    runners: Mapping[str, PieceRunner | UncapturedRunner],
    key: BatchDescriptor,
) -> ReplayPlan | None:
    """The plan of a key; None while a piece lacks its graph, or where results may move.

    Args:
        split: the sections.
        runners: of the sections, by name.
        key: of the step.
    """
    calls: dict[str, Callable[..., Any]] = {}
    held: dict[str, Sequence[Any]] = {}
    for name, runner in runners.items():
        if isinstance(runner, PieceRunner):
            graph = runner.planned(key)
            if graph is None:
                return None
            calls[name], held[name] = graph.replay, graph.outputs
        else:
            call = runner.planned(key)
            if call is None:
                return None
            calls[name] = call
    return ReplayPlan(stitch(split, calls, held=held), len(held))
