"""What a node computes, whichever way it is written: `x * y`, `torch.mul(x, y)`, `x.mul(y)`.

Each function answers for one node and takes nothing for granted: another dtype, another constant
or an argument too many is another computation, and gives None. Sums and products are the same in
either order, bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

if TYPE_CHECKING:
    from collections.abc import Sequence

_PLAIN_MODULES = ("torch", "_operator", "torch.nn.functional", "torch._C._nn")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_CASTS = ("to", "float", "half", "bfloat16", "type")


def called(node: torch.fx.Node) -> str | None:
    """The plain name of a method, or of a function of torch's; None for all else."""
    target: Any = node.target
    if node.op == "call_method":
        return str(target)
    if node.op != "call_function" or hasattr(target, "_qualified_op_name"):
        return None
    is_plain = str(getattr(target, "__module__", None)) in _PLAIN_MODULES
    return str(target.__name__) if is_plain else None


def tensor_of(node: Any) -> torch.Tensor | None:
    """The value of a node that stands for one tensor."""
    value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def dtype_of(node: Any) -> torch.dtype | None:
    """The dtype of a node that stands for one tensor."""
    value = tensor_of(node)
    return None if value is None else value.dtype


def operands(node: Any, *names: str) -> tuple[Any, Any] | None:
    """Both arguments of a call by one of these names, without options."""
    if not isinstance(node, torch.fx.Node) or called(node) not in names:
        return None
    return (node.args[0], node.args[1]) if len(node.args) == 2 and not node.kwargs else None


def product(node: Any) -> tuple[Any, Any] | None:
    """What is multiplied."""
    return operands(node, "mul", "multiply")


def total(node: Any) -> tuple[Any, Any] | None:
    """What is added."""
    return operands(node, "add")


def quotient(node: Any) -> tuple[Any, Any] | None:
    """What is divided, by what."""
    return operands(node, "truediv", "div", "true_divide", "divide")


def single(node: Any, *names: str) -> torch.fx.Node | None:
    """The one argument of a call by one of these names, without options."""
    if not isinstance(node, torch.fx.Node) or called(node) not in names:
        return None
    is_single = len(node.args) == 1 and not node.kwargs
    return node.args[0] if is_single and isinstance(node.args[0], torch.fx.Node) else None


def cast(node: Any) -> torch.fx.Node | None:
    """What a call only brings to another dtype, or to its own."""
    if not isinstance(node, torch.fx.Node) or called(node) not in _CASTS or not node.args:
        return None
    source, others = node.args[0], (*node.args[1:], *node.kwargs.values())
    value, before = tensor_of(node), tensor_of(source)
    if value is None or before is None or value.device != before.device:
        return None
    is_cast = all(isinstance(other, (torch.dtype, torch.device)) for other in others)
    return source if is_cast and isinstance(source, torch.fx.Node) else None


def in_float32(node: Any) -> tuple[torch.fx.Node, frozenset[torch.fx.Node]] | None:
    """What stands behind a float32 value but for a cast, and the cast if there is one."""
    if not isinstance(node, torch.fx.Node) or dtype_of(node) is not torch.float32:
        return None
    source = cast(node)
    is_float = dtype_of(source) in FLOATS
    return (source, frozenset({node})) if source is not None and is_float else (node, frozenset())


def clamped(
    node: Any,
) -> tuple[torch.fx.Node, Any, Any, frozenset[torch.fx.Node]] | None:
    """What is cut to a range, the range's numbers, None for an open end, and the nodes that cut.

    A limit on one side may be behind one on the other side: the range is the same in either order.
    """
    outer = _clamped_once(node)
    inner = None if outer is None else _clamped_once(outer[0])
    if outer is None:
        return None
    if inner is not None:
        source, (low, high) = inner[0], inner[1:]
        is_split = (low, outer[2]) == (None, None) or (high, outer[1]) == (None, None)
        least, most = (outer[1], high) if low is None else (low, outer[2])
        if is_split and is_number(least) and is_number(most) and least <= most:
            return source, least, most, frozenset({node, outer[0]})
    return *outer, frozenset({node})


_CLAMPS = {
    "clamp": ("min", "max"),
    "clip": ("min", "max"),
    "clamp_min": ("min",),
    "clamp_max": ("max",),
}


def _clamped_once(node: Any) -> tuple[torch.fx.Node, Any, Any] | None:
    if not isinstance(node, torch.fx.Node) or called(node) not in _CLAMPS:
        return None
    limits = _CLAMPS[str(called(node))]
    given = dict(zip(("source", *limits), node.args, strict=False))
    given.update(node.kwargs)
    source = given.pop("source", None)
    if not isinstance(source, torch.fx.Node) or not given.keys() <= {*limits}:
        return None
    return source, given.get("min"), given.get("max")


def is_number(value: Any) -> bool:
    """Whether an argument is a Python number that never changes."""
    return type(value) in (int, float)


def reduced(node: Any, *names: str, keeps: bool = True) -> torch.fx.Node | None:
    """What a call by one of these names reduces over the last dimension.

    Args:
        node: of the call.
        names: of the calls.
        keeps: whether the dimension is kept at size 1, or left out.
    """
    if not isinstance(node, torch.fx.Node) or called(node) not in names:
        return None
    given = dict(zip(("source", "dim", "keepdim"), node.args, strict=False))
    given.update(node.kwargs)
    source, dim = given.pop("source", None), given.pop("dim", None)
    value = tensor_of(source)
    if value is None or given.pop("keepdim", False) is not keeps or given:
        return None
    if not isinstance(source, torch.fx.Node):
        return None
    dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    return source if dims in ((-1,), (value.dim() - 1,)) else None


def largest_of_rows(node: Any) -> tuple[torch.fx.Node, frozenset[torch.fx.Node]] | None:
    """What a node has the largest of each row of, as a column, and the nodes that take it.

    `x.amax(-1, keepdim=True)`, the values of `x.max(-1, keepdim=True)`, or either of them without
    that option and `unsqueeze(-1)` behind.
    """
    taken = _largest_of_rows(node, keeps=True)
    if taken is not None:
        return taken
    column = operands(node, "unsqueeze")
    if column is None or column[1] != -1:
        return None
    taken = _largest_of_rows(column[0], keeps=False)
    return None if taken is None else (taken[0], taken[1] | {node})


def _largest_of_rows(
    node: Any, *, keeps: bool
) -> tuple[torch.fx.Node, frozenset[torch.fx.Node]] | None:
    source = reduced(node, "amax", keeps=keeps)
    if source is not None:
        return source, frozenset({node})
    values = operands(node, "getitem")
    if values is None or values[1] != 0:
        return None
    source = reduced(values[0], "max", keeps=keeps)
    return None if source is None else (source, frozenset({node, values[0]}))


def keeps_rows(node: torch.fx.Node) -> torch.fx.Node | None:
    """What a call gives another shape, while the last dimension stays what it is."""
    if called(node) not in ("view", "reshape") or node.kwargs:
        return None
    source = node.args[0]
    before, after = tensor_of(source), tensor_of(node)
    if before is None or after is None or not before.dim() or not after.dim():
        return None
    if not all(isinstance(size, (int, torch.fx.Node)) for size in new_sizes(node)):
        return None
    is_kept = statically_known_true(before.shape[-1] == after.shape[-1])
    return source if is_kept and isinstance(source, torch.fx.Node) else None


def new_sizes(view: torch.fx.Node) -> tuple[Any, ...]:
    """The sizes that a `view` or `reshape` is given, one by one or as one tuple."""
    first = view.args[1]
    return tuple(first) if isinstance(first, (tuple, list)) else tuple(view.args[1:])


def is_contiguous(node: torch.fx.Node) -> bool:
    """Whether a tensor lies in memory row by row, whatever its free sizes are."""
    value = tensor_of(node)
    if value is None or value.layout is not torch.strided:
        return False
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not statically_known_true(size == 1) and not statically_known_true(stride == expected):
            return False
        expected = expected * size
    return True


def has_sizes(a: torch.Tensor, sizes: Sequence[Any]) -> bool:
    """Whether a tensor has these sizes, whatever the free ones are."""
    return a.dim() == len(sizes) and all(
        statically_known_true(one == other) for one, other in zip(a.shape, sizes, strict=True)
    )


def is_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same sizes, dtype and device."""
    return a.dtype is b.dtype and a.device == b.device and has_sizes(a, b.shape)
