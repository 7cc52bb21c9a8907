"""Calls that change nothing are left out.

A model is written for every shape and dtype, so for the one at hand much of it does nothing. Left
in, such calls stand between what a fusion looks for.

Before::

    a = x.view(s0, 64)             # already [s0, 64]
    b = a.to(torch.bfloat16)       # already bfloat16
    c = b[:, :64]                  # all of it
    d = dropout(c, 0.1, False)     # not training
    e = d * 1
    f = linear(e, w)

After::

    f = linear(x, w)
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from passes.matching import called
from passes.reading import Memory, memory_of

# Calls that may hand on the memory they are given. Whether one does is read off its value.
_ALIASING = frozenset(
    {
        *("view", "reshape", "expand", "view_as", "reshape_as", "expand_as", "flatten"),
        *("squeeze", "unflatten", "broadcast_to", "permute", "transpose", "swapaxes", "movedim"),
        *("narrow", "contiguous", "detach", "to", "type", "type_as", "float", "half", "bfloat16"),
        *("double", "int", "long", "bool", "cpu", "cuda"),
    }
)


class NoopPass:
    """Numerics-preserving: leaves out calls whose result is their input, bit for bit.

    What is kept: whatever the graph returns, memory that some call may write, and additions of 0
    to floats, which make -0.0 a 0.0. Sizes count as equal only where that holds for every call.
    """

    name = "noop"

    def __call__(self, graph: torch.fx.Graph) -> int:
        """Rewrite `graph` in place; return the number of calls left out."""
        memory = Memory.of(graph)
        ends = graph.find_nodes(op="output")
        kept = {node for end in ends for node in end.all_input_nodes}
        changed = 0
        for node in list(graph.nodes):
            source = _handed_on(node)
            if source is not None and node not in kept and _is_idle(node, source, memory):
                _leave_out(node, source)
                changed += 1
        holders = Counter(map(memory_of, graph.nodes))
        for node in list(graph.nodes):
            source = _copied(node)
            # A view of the copy would go by memory that is no more.
            if source is None or holders[memory_of(node)] > 1:
                continue
            if memory_of(node) not in memory.returned and _is_idle(node, source, memory):
                _leave_out(node, source)
                changed += 1
        return changed

    def uuid(self) -> str:
        """Identifies this version of the rewrite."""
        return "noop-1"


def _handed_on(node: torch.fx.Node) -> torch.fx.Node | None:
    """The tensor whose very memory a call hands on; None where it hands on none."""
    name = called(node)
    is_idle = _takes_slices(node.args[1]) if name == "getitem" else name in _ALIASING
    source = node.args[0] if is_idle and node.args else None
    if not isinstance(source, torch.fx.Node) or memory_of(node) != memory_of(source):
        return None
    a, b = node.meta.get("example_value"), source.meta.get("example_value")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return None
    return source if statically_known_true(a.storage_offset() == b.storage_offset()) else None


def _copied(node: torch.fx.Node) -> torch.fx.Node | None:
    """The tensor whose numbers a call gives, in fresh memory or not; None for other numbers."""
    name = called(node)
    is_idle = name in ("clone", "to") or (name == "dropout" and not _is_training(node))
    if is_idle and node.args and isinstance(node.args[0], torch.fx.Node):
        return node.args[0]
    if name not in _NEUTRAL or len(node.args) != 2 or node.kwargs:
        return None
    numbers = [arg for arg in node.args if type(arg) in (int, float)]
    tensors = [arg for arg in node.args if isinstance(arg, torch.fx.Node)]
    if len(numbers) != 1 or len(tensors) != 1 or str(numbers[0]) not in _NEUTRAL[name]:
        return None
    commutes = name in ("add", "mul")
    if not commutes and node.args[0] is not tensors[0]:
        return None
    value = tensors[0].meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return None
    has_signed_zero = value.dtype.is_floating_point or value.dtype.is_complex
    return None if name == "add" and has_signed_zero else tensors[0]


def _is_training(node: torch.fx.Node) -> bool:
    """Whether a call of `dropout(input, p, training)` may drop something."""
    flag = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
    return flag is not False


def _is_idle(node: torch.fx.Node, source: torch.fx.Node, memory: Memory) -> bool:
    """Whether every reader may read `source` in place of `node`."""
    if memory_of(node) is None or memory_of(source) is None:
        return False
    if memory.may_be_written(node) or memory.may_be_written(source):
        return False
    return _looks_same(node.meta["example_value"], source.meta["example_value"])


def _leave_out(node: torch.fx.Node, source: torch.fx.Node) -> None:
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)


def _takes_slices(index: Any) -> bool:
    """Whether an index can select all of a tensor, in its own shape and memory."""
    items = index if isinstance(index, tuple) else (index,)
    return all(item is Ellipsis or isinstance(item, slice) for item in items)


# The numbers that change nothing, as they print: to subtract -0.0 is to add 0.0.
_ZERO, _ONE = ("0", "0.0"), ("1", "1.0")
_NEUTRAL = {
    "add": _ZERO,
    "sub": _ZERO,
    "mul": _ONE,
    "div": _ONE,
    "truediv": _ONE,
    "true_divide": _ONE,
}


def _looks_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two values are equal in all but their memory, for all sizes."""
    if type(a) is not type(b) or a.dim() != b.dim():
        return False
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    facts = [
        (t.dtype, t.device, t.requires_grad, t.is_conj(), t.is_neg(), t.is_inference())
        for t in (a, b)
    ]
    return facts[0] == facts[1] and all(
        statically_known_true(one == other)
        for one, other in zip((*a.shape, *a.stride()), (*b.shape, *b.stride()), strict=True)
    )
