"""Sizes become integers, tuples become their elements.

A piece may take only tensors and integers, so nothing else may be alive where a graph is cut.

Before::

    size = x.size()                      # torch.Size
    parts = torch.split(x, 4)            # tuple
    y = attention(parts[0])              # <- cut
    z = torch.cat(parts).view(size)

After::

    parts = torch.split(x, 4)
    part_0, part_1 = parts[0], parts[1]
    y = attention(part_0)
    z = torch.cat((part_0, part_1)).view(s0, 16)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx


class DecomposeSizesPass:
    """Numerics-preserving: takes `torch.Size` and tuple values apart into their elements."""

    name = "decompose_sizes"

    def __call__(self, graph: torch.fx.Graph) -> int:
        """Rewrite `graph` in place; return the number of values taken apart."""
        symbols = _symbol_placeholders(graph)
        changed = 0
        for node in list(graph.nodes):
            value = node.meta.get("example_value")
            if isinstance(value, torch.Size):
                changed += _take_apart(graph, node, _size_elements(graph, node, symbols))
            elif type(value) in (tuple, list) and node.op.startswith("call_"):
                changed += _take_apart(graph, node, _tuple_elements(graph, node))
            elif isinstance(value, torch.SymInt) and node.op.startswith("call_"):
                changed += _use_placeholder(node, value, symbols)
        return changed

    def uuid(self) -> str:
        """Identifies this version of the rewrite."""
        return "decompose_sizes-1"


def _symbol_placeholders(graph: torch.fx.Graph) -> dict[Any, torch.fx.Node]:
    """The placeholder that carries each free size, by its sympy symbol."""
    symbols: dict[Any, torch.fx.Node] = {}
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if node.op == "placeholder" and isinstance(value, torch.SymInt):
            symbols.setdefault(value.node.expr, node)
    return symbols


def _use_placeholder(
    node: torch.fx.Node, value: torch.SymInt, symbols: dict[Any, torch.fx.Node]
) -> int:
    placeholder = symbols.get(value.node.expr)
    if placeholder is None or not node.users:
        return 0
    node.replace_all_uses_with(placeholder)
    node.graph.erase_node(node)
    return 1


def _size_elements(
    graph: torch.fx.Graph, node: torch.fx.Node, symbols: dict[Any, torch.fx.Node]
) -> list[Any] | None:
    """Integers, placeholders or new `sym_size` nodes for each dimension of a `torch.Size`."""
    is_size = node.op == "call_method" and node.target == "size" and len(node.args) == 1
    if not is_size and not (node.target is getattr and node.args[1] == "shape"):
        return None
    tensor = node.args[0]
    elements: list[Any] = []
    with graph.inserting_after(node):
        for dim, size in enumerate(node.meta["example_value"]):
            if not isinstance(size, torch.SymInt):
                elements.append(int(size))
            elif size.node.expr in symbols:
                elements.append(symbols[size.node.expr])
            else:
                element = graph.call_function(torch.ops.aten.sym_size.int, (tensor, dim))
                element.meta["example_value"] = size
                elements.append(element)
    return elements


def _tuple_elements(graph: torch.fx.Graph, node: torch.fx.Node) -> list[Any] | None:
    """One element pick for each item of a multi-output node whose tuple is used whole."""
    if all(_picks_element(user) for user in node.users):
        return None
    elements: list[Any] = []
    picks = {user.args[1]: user for user in node.users if _picks_element(user)}
    anchor = node
    for index, value in enumerate(node.meta["example_value"]):
        pick = picks.get(index)
        if pick is None:
            with graph.inserting_after(anchor):
                pick = graph.call_function(operator.getitem, (node, index))
            pick.meta["example_value"] = value
            anchor = pick
        elements.append(pick)
    # A pick further down may stand after a use of the whole tuple: bring all picks up.
    for pick in reversed(elements):
        node.append(pick)
    return elements


def _picks_element(user: torch.fx.Node) -> bool:
    return user.target is operator.getitem and isinstance(user.args[1], int)


def _take_apart(graph: torch.fx.Graph, node: torch.fx.Node, elements: list[Any] | None) -> int:
    """Let every user of `node` use its elements instead."""
    if elements is None:
        return 0
    changed = 0
    for user in list(node.users):
        if user.target is operator.getitem:
            if user in elements:
                continue
            picked = elements[user.args[1]]  # type: ignore[index]
            if isinstance(picked, list):  # a slice of sizes
                _replace_argument(user, node, elements)
            elif isinstance(picked, torch.fx.Node):
                user.replace_all_uses_with(picked)
                graph.erase_node(user)
            else:
                _inline_constant(user, picked)
                graph.erase_node(user)
        elif user.op == "call_method" and user.args[0] is node:
            continue  # a method of torch.Size itself
        else:
            _replace_argument(user, node, elements)
        changed = 1
    if not node.users:
        graph.erase_node(node)
    return changed


def _inline_constant(node: torch.fx.Node, constant: int) -> None:
    for user in list(node.users):
        _replace_argument(user, node, constant)


def _replace_argument(user: torch.fx.Node, old: torch.fx.Node, new: Any) -> None:
    def replaced(argument: torch.fx.Node) -> Any:
        if argument is not old:
            return argument
        return tuple(new) if isinstance(new, list) else new

    user.args = torch.fx.map_arg(user.args, replaced)
    user.kwargs = torch.fx.map_arg(user.kwargs, replaced)
