"""What a graph returns, told before and after a rewrite by somebody else.

Callers go by the number, shapes and types of what they get, and look at none of them. Numbers are
nobody's business here: to change these is what a rewrite is for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from compile_backend.errors import number_of
from compile_backend.torch_internals.graphs import tree_leaves
from compile_backend.torch_internals.sizes import surely_differ

if TYPE_CHECKING:
    from collections.abc import Sequence


def returned_values(graph: torch.fx.Graph) -> list[Any]:
    """The values that stand for what a graph returns, in order."""
    (output,) = graph.find_nodes(op="output")
    return [_value(item) for item in tree_leaves(output.args)]


def difference(before: Sequence[Any], after: Sequence[Any]) -> str | None:
    """How what is returned differs, as the rest of a sentence; None where it does not.

    Args:
        before: told by `returned_values`.
        after: likewise, of the same graph.
    """
    if len(before) != len(after):
        return f"has the graph return {number_of('value', len(after))} instead of {len(before)}"
    for position, (old, new) in enumerate(zip(before, after, strict=True)):
        if _differ(old, new):
            return f"has the graph return {_text(new)} instead of {_text(old)} as value {position}"
    return None


def _value(item: Any) -> Any:
    return item.meta.get("example_value") if isinstance(item, torch.fx.Node) else item


def _differ(old: Any, new: Any) -> bool:
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return isinstance(old, torch.Tensor) is not isinstance(new, torch.Tensor)
    facts = ("dtype", "device", "layout", "ndim")
    if any(getattr(old, fact) != getattr(new, fact) for fact in facts):
        return True
    return any(map(surely_differ, old.shape, new.shape))


def _text(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    dtype, sizes = str(value.dtype).removeprefix("torch."), ", ".join(map(str, value.shape))
    return f"{dtype} [{sizes}] on {value.device}"
