"""New nodes with the values that they stand for.

Whoever splits a graph reads sizes, dtypes and memory off `meta["example_value"]`, so no rewrite
may leave a node without one. Values are worked out on fake tensors: nothing is computed.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from passes.reading import memory_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def call_function(
    graph: torch.fx.Graph,
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
) -> torch.fx.Node:
    """A call at the graph's insertion point, with its value."""
    node = graph.call_function(function, tuple(args), dict(kwargs or {}))
    fill_value(node)
    return node


def call_method(graph: torch.fx.Graph, name: str, args: Sequence[Any]) -> torch.fx.Node:
    """A method call at the graph's insertion point, with its value."""
    node = graph.call_method(name, tuple(args))
    fill_value(node)
    return node


def fill_value(node: torch.fx.Node) -> None:
    """Work out what a call gives, from the values of its arguments.

    Raises:
        KeyError: an argument has no value either.
        Exception: whatever the call itself raises.
    """
    args = torch.fx.map_arg(node.args, _value)
    kwargs = torch.fx.map_arg(node.kwargs, _value)
    target: Any = node.target
    with _mode_of(node):
        if node.op == "call_method":
            node.meta["example_value"] = getattr(args[0], target)(*args[1:], **kwargs)
        else:
            node.meta["example_value"] = target(*args, **kwargs)


def refresh(graph: torch.fx.Graph, stale: set[int | None]) -> None:
    """Work out anew what shares memory with values that are no more."""
    gone = stale - {None}
    for node in graph.nodes:
        if node.op in ("call_function", "call_method") and memory_of(node) in gone:
            fill_value(node)


def _value(node: torch.fx.Node) -> Any:
    return node.meta["example_value"]


def _mode_of(node: torch.fx.Node) -> contextlib.AbstractContextManager[Any]:
    """The fake-tensor mode of a graph that a node belongs to; none where values are real."""
    for other in node.graph.nodes:
        mode = getattr(other.meta.get("example_value"), "fake_mode", None)
        if mode is not None:
            found: contextlib.AbstractContextManager[Any] = mode
            return found
    return contextlib.nullcontext()
