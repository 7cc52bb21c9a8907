"""A step in a graph that breaks at attention, by the package `breakable-cuda-graphs`.

It needs no compiler: the model runs as it is, and attention is marked to run eagerly between the
segments of one capture. The package is optional and known to this file alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from compile_backend.attention.ops import WITHOUT_DISPATCHER, attention
from compile_backend.context import set_forward_context

if TYPE_CHECKING:
    from collections.abc import Callable

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
    from transformers import AttentionInterface  # noqa: PLC0415 - optional, too

    package: Any = importlib.import_module("breakable_cuda_graphs")
    attend = package.no_graph(WITHOUT_DISPATCHER[attention])
    AttentionInterface.register(_INTERFACE, _through(attend))
    before = str(model.config._attn_implementation)  # noqa: SLF001 - there is no other way
    model.set_attn_implementation(_INTERFACE)
    try:
        for _ in range(_NUM_WARM_UPS):
            step()
        graph = package.BreakableCUDAGraph()
        with package.breakable_graph(graph):
            logits = step()
    finally:
        model.set_attn_implementation(before)

    def replay(_inputs: object = step) -> Any:  # the graph reads what `step` holds
        with set_forward_context(metadata):
            graph.replay()
        return logits

    return replay


def _through(attend: Callable[..., None]) -> Callable[..., tuple[torch.Tensor, None]]:
    """What transformers calls for attention that writes into a buffer, as a break must."""

    def interface(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        del attention_mask
        query, key, value = (item[0].transpose(0, 1) for item in (query, key, value))
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        attend(query, key, value, output, str(module.layer_idx))
        return output.unsqueeze(0), None

    return interface
