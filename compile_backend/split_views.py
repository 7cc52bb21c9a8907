"""Views and allocations: calls that do no work on a device, and views that cross a cut.

It looks at one graph and the nodes of one section. Where graphs are cut is not known here.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
import torch.fx

from compile_backend.mutation import written_arguments
from compile_backend.op_names import op_name
from compile_backend.torch_internals.graphs import storage_id

if TYPE_CHECKING:
    from collections.abc import Sequence

ALLOCATIONS = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"})
_VIEWS = frozenset(
    {
        *("view", "reshape", "flatten", "unflatten", "ravel", "_unsafe_view", "contiguous"),
        *("unsqueeze", "squeeze", "expand", "broadcast_to", "as_strided", "unfold", "diagonal"),
        *("transpose", "permute", "t", "adjoint", "swapaxes", "swapdims", "movedim", "moveaxis"),
        *("select", "narrow", "getitem", "chunk", "split", "split_with_sizes", "unsafe_split"),
        *("tensor_split", "hsplit", "vsplit", "dsplit", "unbind"),
        *("view_as", "reshape_as", "expand_as", "view_as_real", "view_as_complex"),
        *("detach", "alias", "getattr", "sym_size"),
    }
)

# They change a tensor, so what a view of it shows depends on when it is made.
_OF_LAYOUT = frozenset(
    {"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_"}
    | {"resize_", "resize_as_", "set_", "detach_"}
)


def is_trivial(node: torch.fx.Node) -> bool:
    """Whether a node does no device work: it allocates, views, or picks an element."""
    name = call_name(node)
    if name in ALLOCATIONS:
        return True
    if name not in _VIEWS:
        return False
    value = node.meta.get("example_value")
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    if not isinstance(first, torch.Tensor):
        return True
    source = next(iter(node.all_input_nodes), None)
    seen = source.meta.get("example_value") if source is not None else None
    if isinstance(seen, (tuple, list)):
        return True
    return storage_id(first) == storage_id(seen)


def views_again(nodes: Sequence[torch.fx.Node]) -> frozenset[torch.fx.Node]:
    """Views from elsewhere that a piece makes again, of what they show.

    A compiler takes care of inputs that share memory, of which one is written, only as long as
    they are views of each other as eager ops make them. What a compiled piece returns is not.
    """
    own = frozenset(nodes)
    taken = dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes if arg not in own)
    times = Counter(memory for node in taken if (memory := _memory_of(node)) is not None)
    shared = {memory for memory, count in times.items() if count > 1}
    if not shared:
        return frozenset()
    mixed = shared & {_memory_of(arg) for node in nodes for arg in written_arguments(node)}
    again: set[torch.fx.Node] = set()
    for node in taken:
        if _memory_of(node) in mixed:
            views = _views_down_to(node)
            if not any(call_name(user) in _OF_LAYOUT for view in views for user in view.users):
                again.update(views[:-1])
    return frozenset(again - own)


def _memory_of(node: torch.fx.Node) -> int | None:
    value = node.meta.get("example_value")
    return storage_id(value) if isinstance(value, torch.Tensor) else None


def _views_down_to(node: torch.fx.Node) -> list[torch.fx.Node]:
    """A value, what it is a view of, and so on to what is no view."""
    views = [node]
    while views[-1].op.startswith("call_") and _is_view(views[-1]):
        views.append(views[-1].all_input_nodes[0])
    return views


def _is_view(node: torch.fx.Node) -> bool:
    return call_name(node) in _VIEWS and is_trivial(node)


def call_name(node: torch.fx.Node) -> str:
    """The bare name of what a node calls, without namespace and overload."""
    name = str(node.target) if node.op == "call_method" else str(op_name(node))
    return name.rsplit("::", 1)[-1].split(".")[0] if "::" in name else name.rsplit(".", 1)[-1]
