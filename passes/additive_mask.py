"""Boolean attention masks become additive ones, once for all layers.

`scaled_dot_product_attention` turns a boolean mask into an additive one in every call: three
launches for each layer. A model passes one mask to all its layers, so one conversion serves them
all, in the piece where the mask is made.

Before::

    a = scaled_dot_product_attention(q0, k0, v0, attn_mask=mask)
    b = scaled_dot_product_attention(q1, k1, v1, attn_mask=mask)

After::

    allowed = zeros_like(mask, dtype=q0.dtype).masked_fill(mask.logical_not(), -inf)
    a = scaled_dot_product_attention(q0, k0, v0, attn_mask=allowed)
    b = scaled_dot_product_attention(q1, k1, v1, attn_mask=allowed)
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.fx

from passes.reading import Memory


class AdditiveMaskPass:
    """Numerics-preserving: does what attention itself does with a boolean mask, but once."""

    name = "additive_mask"

    def __call__(self, graph: torch.fx.Graph) -> int:
        """Rewrite `graph` in place; return the number of attention calls changed."""
        converted: dict[tuple[torch.fx.Node, torch.dtype], torch.fx.Node] = {}
        memory = functools.cache(lambda: Memory.of(graph))  # what is added writes none of it
        changed = 0
        for node in list(graph.nodes):
            if node.target is not torch.nn.functional.scaled_dot_product_attention:
                continue
            mask = _mask_of(node)
            if mask is None or memory().may_be_written(mask):
                continue
            dtype = node.args[0].meta["example_value"].dtype
            if (mask, dtype) not in converted:
                converted[mask, dtype] = _convert(graph, mask, dtype)
            _set_mask(node, converted[mask, dtype])
            changed += 1
        return changed

    def uuid(self) -> str:
        """Identifies this version of the rewrite."""
        return "additive_mask-1"


def _mask_of(node: torch.fx.Node) -> torch.fx.Node | None:
    """The boolean mask of an attention call; None where it has none, or no plain query."""
    mask: Any = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    if not isinstance(mask, torch.fx.Node) or not node.args:
        return None
    query: Any = node.args[0]
    values = [mask.meta.get("example_value"), query.meta.get("example_value")]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return None
    return mask if values[0].dtype is torch.bool else None


def _set_mask(node: torch.fx.Node, mask: torch.fx.Node) -> None:
    if len(node.args) > 3:
        node.update_arg(3, mask)
    else:
        node.update_kwarg("attn_mask", mask)


def _convert(graph: torch.fx.Graph, mask: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
    """Nodes right behind `mask` that make it additive, with their values."""
    calls: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = (
        (torch.logical_not, (mask,), {}),
        (torch.zeros_like, (mask,), {"dtype": dtype}),
    )
    after = mask
    made = []
    for function, args, kwargs in calls:
        after = _call(graph, after, function, args, kwargs)
        made.append(after)
    forbidden, zeros = made
    return _call(graph, after, torch.masked_fill, (zeros, forbidden, float("-inf")), {})


def _call(
    graph: torch.fx.Graph,
    after: torch.fx.Node,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.fx.Node:
    if after.op == "placeholder":  # inputs stand before all else
        after = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(after):
        node = graph.call_function(function, args, kwargs)
    values = torch.fx.map_arg(args, lambda arg: arg.meta["example_value"])
    fake = next(value for value in values if isinstance(value, torch.Tensor))
    with getattr(fake, "fake_mode", torch.no_grad()):
        node.meta["example_value"] = function(*values, **kwargs)
    return node
