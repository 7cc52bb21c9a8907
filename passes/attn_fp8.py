"""Attention writes 8-bit floats itself, where its output is quantised and not read otherwise.

The buffer that it writes is allocated in the graph, so it becomes one of 8-bit floats, and changes
of its shape stay. Both ops are given: this file knows what they take, not what they do.

Before::

    out = torch.empty((s0, 32, 128), dtype=torch.bfloat16, device=device)
    attention(query, key, value, out, "0")
    rows = out.unsqueeze(0).reshape(1, s0, -1).reshape(-1, 4096)
    q = (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)

After::

    out = torch.empty((s0, 32, 128), dtype=torch.float8_e4m3fn, device=device)
    attention_fp8(query, key, value, out, scale, "0", False)
    q = out.unsqueeze(0).reshape(1, s0, -1).reshape(-1, 4096)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from passes.building import call_function, fill_value, refresh
from passes.fp8_quantisation import STATIC, Quantisation, quantisations
from passes.matching import FLOATS, called, is_alike, is_contiguous, tensor_of
from passes.ops_fp8 import FP8
from passes.reading import Memory, memory_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ARGUMENTS = ("query", "key", "value", "output", "layer_name")
_TENSORS = _ARGUMENTS[:4]
_ALLOCATIONS = ("empty", "empty_like", "new_empty")
_RESHAPES = ("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "contiguous")


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention whose output is only quantised.

    Attributes:
        node: the call.
        given: its arguments, by name.
        buffer: the allocation of the output, then all of it in other shapes, as they are made.
        quantised: what reads it.
        scale: of that, as it was made before the attention.
    """

    node: torch.fx.Node
    given: Mapping[str, Any]
    buffer: tuple[torch.fx.Node, ...]
    quantised: Quantisation
    scale: torch.fx.Node


class AttnQuantFusionPass:
    """Numerics-preserving: attention rounds as it did, and quantises what it has rounded.

    Only quantisations by a static scale, which is there before the attention, are taken. An output
    that anyone else reads or writes is left alone, and so is one under which gradients flow.

    Args:
        attention: an op that takes `_ARGUMENTS` and writes `output`.
        attention_fp8: the same with 8-bit output; takes the scale in front of the name, and
            whether to multiply by it behind.
    """

    name = "attn_fp8"

    def __init__(self, attention: Any, attention_fp8: Any) -> None:
        self._attention = attention
        self._attention_fp8 = attention_fp8

    def __call__(self, graph: torch.fx.Graph) -> int:
        """Rewrite `graph` in place; return the number of attentions that were fused."""
        found = quantisations(graph)
        memory = Memory.of(graph)
        order = {node: number for number, node in enumerate(graph.nodes)}
        matched = [
            match
            for node in graph.nodes
            if node.target in (self._attention, self._attention.overloadpacket)
            and (match := _match(node, found, memory, order)) is not None
        ]
        # Held until all is done: memory that is free again could be found under another name.
        values = [match.quantised.result.meta["example_value"] for match in matched]
        stale = {memory_of(match.quantised.result) for match in matched}
        for match in matched:
            self._fuse(match, order)
        refresh(graph, stale)
        del values
        return len(matched)

    def uuid(self) -> str:
        """Identifies this version of the rewrite."""
        return "attn_fp8-2"

    def _fuse(self, match: Attention, order: Mapping[torch.fx.Node, int]) -> None:
        graph, quantised = match.node.graph, match.quantised
        match.buffer[0].update_kwarg("dtype", FP8)
        for node in match.buffer:
            fill_value(node)
        tensors = [match.given[name] for name in _TENSORS]
        layer_name, multiplies = match.given["layer_name"], quantised.multiplies
        with graph.inserting_before(match.node):
            args = (*tensors, match.scale, layer_name, multiplies)
            call_function(graph, self._attention_fp8, args)
        quantised.result.replace_all_uses_with(quantised.source)
        for node in sorted({*quantised.inner, quantised.result}, key=order.__getitem__)[::-1]:
            graph.erase_node(node)
        graph.erase_node(match.node)


def _match(
    node: torch.fx.Node,
    found: Mapping[torch.fx.Node, Sequence[Quantisation]],
    memory: Memory,
    order: Mapping[torch.fx.Node, int],
) -> Attention | None:
    """What can be fused with a call of attention; None where nothing can."""
    given: dict[str, Any] = {**dict(zip(_ARGUMENTS, node.args, strict=False)), **node.kwargs}
    if given.keys() != set(_ARGUMENTS) or not _is_plain(given):
        return None
    buffer = _buffer_of(given["output"])
    quantised = [one for part in buffer for one in found.get(part, ())]
    if len(quantised) != 1 or quantised[0].kind != STATIC:
        return None
    (one,) = quantised
    scale = _made_before(one.scale, node, order)
    if scale is None or memory.may_be_written(scale) or memory.may_be_written(one.result):
        return None
    inside = {*one.inner, one.result}
    readers = {user for part in buffer for user in part.users} - set(buffer)
    is_only_quantised = readers - one.inner == {node} and not node.users
    is_closed = all(inside.issuperset(each.users) for each in one.inner)
    is_behind = all(order[node] < order[reader] for reader in readers & one.inner)
    is_read = any(given[name] in buffer for name in ("query", "key", "value"))
    if not is_only_quantised or not is_closed or not is_behind or is_read:
        return None
    return Attention(node, given, buffer, one, scale)


def _is_plain(given: Mapping[str, Any]) -> bool:
    """Whether the output is like the queries, in floats, and no gradient flows."""
    tensors = [tensor_of(given[name]) for name in _TENSORS]
    query, output = tensors[0], tensors[3]
    if query is None or output is None or any(each is None for each in tensors):
        return False
    needs_grad = any(each is not None and each.requires_grad for each in tensors)
    return output.dtype in FLOATS and is_alike(output, query) and not needs_grad


def _buffer_of(output: torch.fx.Node) -> tuple[torch.fx.Node, ...]:
    """The allocation behind an output and all its reshapes; nothing where it is none."""
    allocation = output
    while _is_reshape(allocation):
        (allocation, *_) = allocation.all_input_nodes
    is_allocated = called(allocation) in _ALLOCATIONS and is_contiguous(allocation)
    if not is_allocated or not allocation.kwargs.keys() <= {"dtype", "device"}:
        return ()
    buffer = [allocation]
    for part in buffer:  # which grows
        buffer += [user for user in part.users if _is_reshape(user) and user not in buffer]
    return tuple(buffer)


def _is_reshape(node: torch.fx.Node) -> bool:
    """Whether a call gives all of a tensor, in its order and memory, another shape at most."""
    source = node.args[0] if node.args else None
    value, before = tensor_of(node), tensor_of(source)
    if called(node) not in _RESHAPES or value is None or before is None:
        return False
    if any(isinstance(each, torch.dtype) for each in (*node.args, *node.kwargs.values())):
        return False  # a view of the bits
    assert isinstance(source, torch.fx.Node)
    shared = memory_of(node)
    return shared is not None and shared == memory_of(source) and is_contiguous(node)


def _made_before(
    scale: torch.fx.Node, node: torch.fx.Node, order: Mapping[torch.fx.Node, int]
) -> torch.fx.Node | None:
    """A scale as it was made in front of a node; one element is the same in every shape."""
    while order[scale] > order[node]:
        if not _is_reshape(scale):
            return None
        (scale, *_) = scale.all_input_nodes
    value = tensor_of(scale)
    return None if value is None or value.requires_grad else scale
