"""The passes that run on a Dynamo graph before it is split. The only module that imports them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from passes.additive_mask import AdditiveMaskPass
from passes.constant_tensors import ConstantTensorsPass
from passes.decompose_sizes import DecomposeSizesPass

if TYPE_CHECKING:
    import torch.fx

    from passes.base import GraphPass


def passes_before_split() -> tuple[GraphPass, ...]:
    """In the order they run."""
    return (DecomposeSizesPass(), ConstantTensorsPass(), AdditiveMaskPass())


def prepare_for_split(graph_module: torch.fx.GraphModule) -> None:
    """Rewrite a Dynamo graph in place, so that only tensors and integers cross its cuts."""
    for graph_pass in passes_before_split():
        graph_pass(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
