"""Which nodes surely write none of their inputs. A rewrite that shares a value must know."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx


def only_reads(node: torch.fx.Node) -> bool:
    """Whether a node is known to write none of its inputs: plain torch, by a plain name."""
    target: Any = node.target
    if node.op == "output" or target is torch.nn.functional.scaled_dot_product_attention:
        return True
    name = target if isinstance(target, str) else getattr(target, "__name__", "_")
    if name.endswith("_") or "out" in node.kwargs:
        return False
    if node.op == "call_method":
        return name != "__setitem__"
    module = str(getattr(target, "__module__", None))
    if module == "_operator":
        return name != "setitem" and not name.startswith("i")
    is_custom_op = hasattr(target, "_schema") or hasattr(target, "_qualified_op_name")
    return module.startswith("torch") and not is_custom_op


def has_only_readers(graph: torch.fx.Graph, node: torch.fx.Node) -> bool:
    """Whether no node of the graph may write the memory of `node`, under whatever name."""
    memory = _memory(node.meta.get("example_value"))
    return all(
        only_reads(reader)
        for reader in graph.nodes
        for source in reader.all_input_nodes
        if source is node or _memory(source.meta.get("example_value")) == memory is not None
    )


def _memory(value: Any) -> int | None:
    """An identity of the memory of a tensor, or of the first of several (views of one)."""
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    if not isinstance(first, torch.Tensor):
        return None
    try:
        return int(first.untyped_storage()._cdata)
    except NotImplementedError:  # wrappers, such as those that function transforms leave
        return None
