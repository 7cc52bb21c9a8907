"""A step in a graph that breaks at attention, by the package `breakable-cuda-graphs`.

It needs no compiler: the model runs as it is, and attention is marked to run eagerly between the
segments of one capture. The package is optional and known to this file alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from compile_backend.attention.huggingface import attention_interface, attention_through
from compile_backend.attention.ops import WITHOUT_DISPATCHER, attention
from compile_backend.context import set_forward_context

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compile_backend.bench.rounds import Step

_INTERFACE = "cudagraph_modes_with_breaks"
_NUM_WARM_UPS = 3


def captured_with_breaks(model: PreTrainedModel, step: Step, metadata: object) -> Step:
    """Capture an eager step.

    Args:
        model: calls attention by transformers' interface; its choice is restored afterwards.
        step: runs the model on inputs of its own.
        metadata: what attention finds in the forward context of every replay.

    Returns:
        What replays it; the logits that it returns are those of the last replay.
    """
    package: Any = importlib.import_module("breakable_cuda_graphs")
    interface = attention_interface(package.no_graph(WITHOUT_DISPATCHER[attention]))
    with attention_through(model, _INTERFACE, interface):
        for _ in range(_NUM_WARM_UPS):
            step()
        graph = package.BreakableCUDAGraph()
        with package.breakable_graph(graph):
            logits = step()

    def replay(_inputs: object = step) -> Any:  # the graph reads what `step` holds
        with set_forward_context(metadata):
            graph.replay()
        return logits

    return replay
