"""A step as one CUDA graph made with PyTorch alone: what replaying can cost at least."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from compile_backend.bench.rounds import Step

_NUM_WARM_UPS = 3


def captured_by_hand(step: Step, plan: Callable[[], object] | None = None) -> Step:
    """Capture a step.

    Args:
        step: on inputs of its own, which must not be changed by anything else.
        plan: what has to be done on the host before every replay.

    Returns:
        What replays it; the logits that it returns are those of the last replay.
    """
    for _ in range(_NUM_WARM_UPS):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()

    def replay(_inputs: object = step) -> Any:  # the graph reads what `step` holds
        if plan is not None:
            plan()
        graph.replay()
        return logits

    return replay
