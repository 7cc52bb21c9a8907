"""At which ops Inductor can part a graph that is cut there.

Inductor parts graphs at calls of custom ops, as they are after AOTAutograd's tracing. This file
knows names only: what comes of them is looked at when the graph is compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compile_backend.errors import shown
from compile_backend.torch_internals.graphs import is_name_of_higher_order_op

if TYPE_CHECKING:
    from collections.abc import Iterable

# AOTAutograd traces it to one of these, or to plain ops that nothing can be parted at.
_ATTENTION_OF_TORCH = tuple(
    f"aten::_scaled_dot_product_{kind}"
    for kind in (
        *("flash_attention", "efficient_attention", "cudnn_attention"),
        *("flash_attention_for_cpu", "fused_attention_overrideable"),
    )
)
_TRACED_TO = {
    "torch._C._nn.scaled_dot_product_attention": _ATTENTION_OF_TORCH,
    "aten::scaled_dot_product_attention": _ATTENTION_OF_TORCH,
}


def partition_ops(names: Iterable[str]) -> tuple[str, ...] | str:
    """What to name to Inductor, as `ns::op` or `ns::op.overload`; as text, why it cannot part.

    Args:
        names: of the ops that a graph is cut at, as `op_name` gives them.
    """
    found: dict[str, None] = {}
    for name in names:
        if name not in _TRACED_TO and "::" not in name:
            kind = "a higher-order op" if is_name_of_higher_order_op(name) else "a function"
            return f"{shown(name)} is {kind}, and Inductor parts at custom ops only"
        found.update(dict.fromkeys(_TRACED_TO.get(name, (name,))))
    return tuple(found)
