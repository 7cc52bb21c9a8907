"""Which inputs a graph writes to, read from its ops' schemas.

Whoever copies an input must bring a write back to the caller. Where an op does not say what it
writes to, every tensor it takes counts as written: a needless copy back changes nothing.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from compile_backend.op_names import op_name
from compile_backend.torch_internals.graphs import (
    is_op_overload,
    is_op_packet,
    op_schema,
    storage_id,
)

if TYPE_CHECKING:
    from collections.abc import Iterable


def mutated_inputs(module: torch.fx.GraphModule) -> tuple[int, ...]:
    """Positions of the inputs whose memory some op of the graph writes to."""
    written = {
        storage_id(arg.meta.get("example_value"))
        for node in module.graph.nodes
        for arg in written_arguments(node)
    }
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    return tuple(
        index
        for index, node in enumerate(placeholders)
        if isinstance(node.meta.get("example_value"), torch.Tensor)
        and storage_id(node.meta["example_value"]) in written
    )


def written_arguments(node: torch.fx.Node) -> Iterable[torch.fx.Node]:
    """The arguments that one call writes to."""
    yield from _nodes_in(node.kwargs.get("out"))
    if node.op == "call_method":
        name = str(node.target)
        if (name.endswith("_") and not name.endswith("__")) or name == "__setitem__":
            yield from _nodes_in(node.args[0])
    elif node.op == "call_function":
        for written in _written_by_function(node):
            yield from _nodes_in(written)


def _nodes_in(argument: Any) -> Iterable[torch.fx.Node]:
    found: list[torch.fx.Node] = []
    torch.fx.map_arg(argument, found.append)
    return found


_PURE_MODULES = ("torch", "torch._C._nn", "torch._C._linalg", "torch._C._fft", "torch._C._special")
_WRITING_OPERATORS = frozenset(
    {
        *("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
        *("iand", "ior", "ixor", "ilshift", "irshift", "iconcat"),
    }
)


def _written_by_function(node: torch.fx.Node) -> Iterable[Any]:
    target: Any = node.target
    if is_op_overload(target) or is_op_packet(target):
        yield from _written_by_schema(node, op_schema(target))
        return
    module, _, name = str(op_name(node)).rpartition(".")
    if module in ("_operator", "operator", "builtins", "math"):
        if name in _WRITING_OPERATORS:
            yield node.args[0]
    elif "_VariableFunctions" in module or module in _PURE_MODULES:
        if name.endswith("_") and not name.endswith("__"):
            yield node.args[0]
    elif module.startswith("torch.nn.functional"):
        if _is_inplace(node):
            yield node.args[0]
        elif name in ("batch_norm", "instance_norm"):
            yield from node.all_input_nodes
    elif not module.startswith(("torch.amp", "torch._C", "torch.sym_")):
        yield from node.all_input_nodes


def _written_by_schema(node: torch.fx.Node, schema: Any) -> Iterable[Any]:
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = node.args[position] if position < len(node.args) else None
        yield node.kwargs.get(argument.name, given)


def _is_inplace(node: torch.fx.Node) -> bool:
    try:
        bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return bool(node.kwargs.get("inplace"))
    return bool(bound.arguments.get("inplace"))
