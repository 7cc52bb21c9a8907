"""Autocast and gradient-mode regions of a graph, kept whole when the graph is cut.

Dynamo writes `with torch.autocast(...)` as a pair of enter and exit nodes and `torch.no_grad()`
as calls that set the mode. A cut between them would leave one half on either side, so each section
opens what its nodes ran under and closes it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from compile_backend.torch_internals.graphs import enter_autocast, leave_autocast, set_grad_enabled

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Region:
    """What a node runs under: autocast regions, outermost first, and a gradient mode if set."""

    autocasts: tuple[torch.fx.Node, ...] = ()
    grad_enabled: bool | None = None

    @staticmethod
    def of(node: torch.fx.Node) -> str | None:
        """The kind of border that a node is, or None."""
        if node.op != "call_function":
            return None
        return _BORDERS.get(getattr(node.target, "__name__", ""))


_BORDERS = {
    "_enter_autocast": "enter",
    "_exit_autocast": "exit",
    "_set_grad_enabled": "grad",
}


def region_of_nodes(graph: torch.fx.Graph, *, keep_grad_mode: bool) -> dict[torch.fx.Node, Region]:
    """The region of every node of a graph that runs under one."""
    regions: dict[torch.fx.Node, Region] = {}
    current = Region()
    for node in graph.nodes:
        border = Region.of(node)
        if border == "enter":
            current = Region((*current.autocasts, node), current.grad_enabled)
        elif border == "exit":
            left = node.args[0]
            kept = tuple(autocast for autocast in current.autocasts if autocast is not left)
            current = Region(kept, current.grad_enabled)
        elif border == "grad" and not keep_grad_mode:
            continue
        elif border == "grad":
            current = Region(current.autocasts, bool(node.args[0]))
        elif current != Region():
            regions[node] = current
    return regions


class RegionWriter:
    """Opens and closes regions in a graph that is being written."""

    def __init__(self, graph: torch.fx.Graph, regions: Mapping[torch.fx.Node, Region]) -> None:
        self._graph = graph
        self._regions = regions
        self._open: list[tuple[torch.fx.Node, torch.fx.Node]] = []
        self._grad_enabled: bool | None = None

    def enter(self, node: torch.fx.Node) -> None:
        """Change to the region of `node`, which is written next."""
        region = self._regions.get(node, Region())
        self._autocast(region.autocasts)
        if region.grad_enabled is not None and region.grad_enabled != self._grad_enabled:
            self._set_grad_enabled(enabled=region.grad_enabled)
        elif region.grad_enabled is None and self._grad_enabled is not None:
            self._set_grad_enabled(enabled=torch.is_grad_enabled())
            self._grad_enabled = None

    def close(self) -> None:
        """Leave every open region."""
        self._autocast(())
        if self._grad_enabled is not None:
            self._set_grad_enabled(enabled=torch.is_grad_enabled())

    def _autocast(self, wanted: tuple[torch.fx.Node, ...]) -> None:
        opened = [original for original, _ in self._open]
        common = 0
        while common < min(len(opened), len(wanted)) and opened[common] is wanted[common]:
            common += 1
        while len(self._open) > common:
            _, entered = self._open.pop()
            self._call(leave_autocast, (entered,))
        for original in wanted[common:]:
            entered = self._call(enter_autocast, original.args)
            self._open.append((original, entered))

    def _set_grad_enabled(self, *, enabled: bool) -> None:
        self._call(set_grad_enabled, (enabled,))
        self._grad_enabled = enabled

    def _call(self, function: Any, args: Any) -> torch.fx.Node:
        return self._graph.call_function(function, args)
