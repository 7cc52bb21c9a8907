"""Writes by index into a part of a cache go to the cache itself.

Compilers bring writes into a form without mutation and back. They find back for writes to a whole
input, but a write by index into a view of one copies what the view shows: a layer of a cache for
every token. The same write with one index more shows no view.

Before::

    layer = cache[3]                          # cache: [num_layers, num_blocks, block_size, ...]
    flat = layer.view(-1, num_heads, head_size)
    flat[slots] = key

After::

    layer = cache[3]
    flat = layer.view(-1, num_heads, head_size)
    cache.index_put_((3, slots // block_size, slots % block_size), key)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from passes.building import call_function, call_method
from passes.matching import called, has_sizes, tensor_of
from passes.reading import memory_of


@dataclass(frozen=True, slots=True)
class Write:
    """A write by index.

    Attributes:
        target: the tensor that is written.
        indices: of its leading dimensions: numbers, tensors, and `Split` ones.
        values: what is written.
    """

    target: torch.fx.Node
    indices: tuple[Any, ...]
    values: torch.fx.Node


@dataclass(frozen=True, slots=True)
class Split:
    """An index into two dimensions that a view made one.

    Attributes:
        index: into the one.
        inner: the size of the second.
    """

    index: torch.fx.Node
    inner: int


class IndexWritesPass:
    """Numerics-preserving: the same numbers are written to the same places.

    Only writes to inputs of the graph are changed, of their own dtype, by int64 indices.
    """

    name = "index_writes"

    def __call__(self, graph: torch.fx.Graph) -> int:
        """Rewrite `graph` in place; return the number of writes changed."""
        changed = 0
        for node in list(graph.nodes):
            write = _write_of(node)
            whole = _behind_views(write) if write is not None else None
            if write is None or whole is None:
                continue
            with graph.inserting_before(node):
                indices = tuple(_as_tensors(graph, whole))
                call_method(graph, "index_put_", (whole.target, indices, whole.values))
            node.replace_all_uses_with(write.target)
            graph.erase_node(node)
            changed += 1
        return changed

    def uuid(self) -> str:
        """Identifies this version of the rewrite."""
        return "index_writes-1"


def _write_of(node: torch.fx.Node) -> Write | None:
    """The write that a node is, where indices are numbers first and then tensors."""
    name = called(node)
    target: Any
    values: Any
    indices: tuple[Any, ...]
    if name == "setitem" and len(node.args) == 3:
        target, key, values = node.args
        indices = key if isinstance(key, tuple) else (key,)
    elif name == "index_copy_" and len(node.args) == 4 and node.args[1] == 0:
        target, _, first, values = node.args
        indices = (first,)
    elif name == "index_put_" and len(node.args) == 3 and not node.kwargs:
        target, given, values = node.args
        indices = tuple(given) if isinstance(given, (tuple, list)) else ()
    else:
        return None
    value, written = tensor_of(target), tensor_of(values)
    if value is None or written is None or value.requires_grad or written.requires_grad:
        return None
    if value.dtype is not written.dtype or value.device != written.device:
        return None
    tensors: list[Any] = [index for index in indices if not _is_number(index)]
    are_first = all(map(_is_number, indices[: len(indices) - len(tensors)]))
    if not tensors or not are_first or not all(_is_index(index, value) for index in tensors):
        return None
    num_dims = max(index.meta["example_value"].dim() for index in tensors)
    if written.dim() != num_dims + value.dim() - len(indices):
        return None
    return Write(target, indices, values)


def _is_number(index: Any) -> bool:
    return type(index) is int


def _is_index(index: Any, target: torch.Tensor) -> bool:
    value = tensor_of(index)
    if value is None or value.dtype is not torch.int64 or value.dim() == 0:
        return False
    return value.device == target.device


def _behind_views(write: Write) -> Write | None:
    """The same write to an input of the graph; None where it is that already, or cannot be."""
    whole = write
    while whole.target.op != "placeholder":
        before = _behind_pick(whole) or _behind_merge(whole)
        if before is None or memory_of(before.target) != memory_of(whole.target):
            return None
        whole = before
    is_same = whole is write and not any(map(_is_number, write.indices))
    return None if is_same or memory_of(whole.target) is None else whole


def _behind_pick(write: Write) -> Write | None:
    """Before `source[number, ...]`."""
    node = write.target
    if node.target is not operator.getitem:
        return None
    source, key = node.args
    numbers = key if isinstance(key, tuple) else (key,)
    if not isinstance(source, torch.fx.Node) or not all(map(_is_number, numbers)):
        return None
    return replace(write, target=source, indices=(*numbers, *write.indices))


def _behind_merge(write: Write) -> Write | None:
    """Before a view that makes the first two dimensions one."""
    node, first = write.target, write.indices[0]
    if called(node) not in ("view", "reshape", "flatten") or not isinstance(first, torch.fx.Node):
        return None
    source = node.args[0]
    after, before = tensor_of(node), tensor_of(source)
    if after is None or before is None or before.dim() != after.dim() + 1:
        return None
    inner = before.shape[1]
    is_merged = has_sizes(after, (before.shape[0] * inner, *before.shape[2:]))
    if not is_merged or type(inner) is not int or not isinstance(source, torch.fx.Node):
        return None
    return replace(write, target=source, indices=(Split(first, inner), *write.indices[1:]))


def _as_tensors(graph: torch.fx.Graph, write: Write) -> list[torch.fx.Node]:
    """Indices that `index_put_` takes, made at the insertion point."""
    device = write.target.meta["example_value"].device
    made: list[torch.fx.Node] = []
    for index in write.indices:
        if isinstance(index, Split):
            made += [
                call_function(graph, function, (index.index, index.inner))
                for function in (operator.floordiv, operator.mod)
            ]
        elif isinstance(index, torch.fx.Node):
            made.append(index)
        else:
            number = {"dtype": torch.int64, "device": device}
            made.append(call_function(graph, torch.full, ((), index), number))
    return made
