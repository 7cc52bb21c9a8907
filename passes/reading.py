"""Which nodes surely write none of their inputs. A rewrite that shares a value must know."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx


def only_reads(node: torch.fx.Node) -> bool:
    """Whether a node is known to write none of its inputs: plain torch, or an op that says so."""
    target: Any = node.target
    if node.op == "output" or target is torch.nn.functional.scaled_dot_product_attention:
        return True
    schemas = _schemas_of(target)
    if schemas:
        return not any(
            argument.alias_info is not None and argument.alias_info.is_write
            for schema in schemas
            for argument in schema.arguments
        )
    name = target if isinstance(target, str) else getattr(target, "__name__", "_")
    if name.endswith("_") or "out" in node.kwargs:
        return False
    if node.op == "call_method":
        return name != "__setitem__"
    if not inspect.isroutine(target):  # a higher-order op may run anything
        return False
    module = str(getattr(target, "__module__", None))
    if module == "_operator":
        return name != "setitem" and not name.startswith("i")
    return module.startswith("torch") and not _writes_where_told(node)


@dataclass(frozen=True, slots=True)
class Memory:
    """What a graph does with the memory behind its values, under whatever names.

    Attributes:
        written: identities of memory that some node may write.
        returned: of what the graph returns.
        unknown: nodes whose memory has no identity, and which some node may write.
    """

    written: frozenset[int]
    returned: frozenset[int]
    unknown: frozenset[torch.fx.Node]

    @classmethod
    def of(cls, graph: torch.fx.Graph) -> Memory:
        """Look through a whole graph, once for many questions."""
        touched = {
            source
            for node in graph.nodes
            if node.op.startswith("call_") and not only_reads(node)
            for source in node.all_input_nodes
        }
        outputs = [node for node in graph.nodes if node.op == "output"]
        returned = {memory_of(value) for node in outputs for value in node.all_input_nodes}
        written = {memory_of(source) for source in touched}
        return cls(
            frozenset(memory for memory in written if memory is not None),
            frozenset(memory for memory in returned if memory is not None),
            frozenset(source for source in touched if memory_of(source) is None),
        )

    def may_be_written(self, node: torch.fx.Node) -> bool:
        """Whether some node of the graph may write the memory of `node`."""
        return node in self.unknown or memory_of(node) in self.written


def memory_of(node: torch.fx.Node) -> int | None:
    """An identity of the memory of a node's tensor, or of the first of several (views of one)."""
    value = node.meta.get("example_value")
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    if not isinstance(first, torch.Tensor):
        return None
    try:
        return int(first.untyped_storage()._cdata)
    except NotImplementedError:  # wrappers, such as those that function transforms leave
        return None


def _schemas_of(target: Any) -> list[Any]:
    """The schemas of an op, of all its overloads where it is a packet; none of a function."""
    if hasattr(target, "_schema"):
        return [target._schema]
    if hasattr(target, "_qualified_op_name"):
        return [getattr(target, overload)._schema for overload in target.overloads()]
    return []


def _writes_where_told(node: torch.fx.Node) -> bool:
    """Whether a function of torch that may work in place, or keep statistics, does."""
    target: Any = node.target
    if getattr(target, "__name__", "") in ("batch_norm", "instance_norm"):
        return True
    try:
        bound = inspect.signature(target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):  # builtins have no signature, and no such argument
        return bool(node.kwargs.get("inplace"))
    return bool(bound.arguments.get("inplace"))
