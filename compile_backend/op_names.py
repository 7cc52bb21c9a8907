"""Names of the ops in a graph, and which of them cut it.

Dynamo shows an attention op as an op overload, an op packet, a builtin, a higher-order op or a
Python function. Each has one name here; the split and the support table know only names.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib
from typing import TYPE_CHECKING, Any

from compile_backend.errors import ConfigError
from compile_backend.support import STANDS_FOR
from compile_backend.torch_internals.graphs import (
    is_higher_order_op,
    is_name_of_higher_order_op,
    is_op_overload,
    is_op_packet,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.fx


def op_name(node: torch.fx.Node) -> str | None:
    """The name of the op that a node calls; None where it calls none.

    `ns::op.overload` for an op overload (`ns::op` when it has just the default one), `ns::op` for
    a packet, the bare name for a higher-order op, `package.module.function` for all else.
    """
    target: Any = node.target
    if node.op == "call_method":
        return f"torch.Tensor.{target}"
    if node.op != "call_function":
        return None
    if is_op_overload(target):
        return str(target.name())
    if is_op_packet(target):
        return str(target).replace(".", "::", 1)
    if is_higher_order_op(target):
        return str(target.name())
    return _function_name(target)


def _function_name(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"


def normal_name(name: str) -> str:
    """The name that `op_name` gives to what a user calls `name`.

    Python functions may be imported from several places, and go by where they were made.
    """
    is_dotted = all(part.isidentifier() for part in name.split("."))
    function = _python_function(name) if is_dotted else None
    return name if function is None else _function_name(function)


class SplittingOps:
    """The ops at which graphs are cut.

    Args:
        names: `ns::op`, `ns::op.overload`, the name of a higher-order op, a qualified Python
            function, or a pattern of these with `*`.

    Raises:
        ConfigError: a name is not of these forms.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        for name in names:
            _check_form(name)
        self._exact = frozenset(name for name in names if "*" not in name)
        self._patterns = tuple(name for name in names if "*" in name)
        self._functions = tuple(
            found for name in self._exact if (found := _python_function(name)) is not None
        )

    def cuts(self, node: torch.fx.Node) -> bool:
        """Whether the graph is cut at this node."""
        name = op_name(node)
        if name is None or node.op != "call_function":
            return False
        names = {name, STANDS_FOR.get(name, name)}
        if any(not self._exact.isdisjoint(_spellings(each)) for each in names):
            return True
        if any(fnmatch.fnmatchcase(each, glob) for each in names for glob in self._patterns):
            return True
        return any(node.target is function for function in self._functions)

    def cutting(self, graph: torch.fx.Graph) -> list[torch.fx.Node]:
        """One node for each op in a graph at which it is cut."""
        return list({node.target: node for node in graph.nodes if self.cuts(node)}.values())

    def matching_none_of(self, nodes: Sequence[torch.fx.Node]) -> tuple[str, ...]:
        """The names that stand for none of these nodes, which all cut."""
        return tuple(
            name
            for name in self.names
            if not any(SplittingOps((name,)).cuts(node) for node in nodes)
        )


def _spellings(name: str) -> frozenset[str]:
    """The ways in which a user may name this op exactly."""
    if "::" not in name:
        return frozenset({name})
    packet, _, overload = name.partition(".")
    return frozenset({name, packet} if overload else {name, f"{name}.default"})


def _check_form(name: str) -> None:
    if "*" in name:
        return
    namespace, separator, op = name.partition("::")
    parts = [namespace, *op.split(".")] if separator else name.split(".")
    can_be = len(parts) <= 3 if separator else len(parts) > 1 or is_name_of_higher_order_op(name)
    if not can_be or not all(part.isidentifier() for part in parts):
        raise ConfigError(
            "splitting_ops",
            name,
            "is neither an op nor a Python function",
            "write `ns::op`, `ns::op.overload` or `package.module.function`",
        )


@functools.cache
def _python_function(name: str) -> Any | None:
    """The function that a dotted name stands for; None for op names and what is not installed."""
    module_name, _, attribute = name.rpartition(".")
    if "::" in name or not module_name:
        return None
    try:
        return getattr(importlib.import_module(module_name), attribute, None)
    except ImportError:
        return None
