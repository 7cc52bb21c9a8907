"""RMSNorm and the quantisation behind it become one op, with the residual sum in front of it.

It takes the norm as Llama, Mistral, Qwen3 and Mixtral of transformers write it, and any number of
linear layers that quantise what it gives.

Before::

    h = residual + x
    wide = h.to(torch.float32)
    wide = wide * rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    n = weight * wide.to(h.dtype)
    q = (n.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)

After::

    h, q = rms_norm_static_fp8(residual, x, weight, [scale], eps, False)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from passes.fp8_fusion import Group, fuse, fuse_each, group_of, place_of
from passes.fp8_quantisation import PER_TOKEN, STATIC
from passes.matching import (
    FLOATS,
    cast,
    dtype_of,
    in_float32,
    is_alike,
    is_contiguous,
    is_number,
    operands,
    product,
    reduced,
    single,
    tensor_of,
    total,
)
from passes.ops_fp8 import OPS

if TYPE_CHECKING:
    from passes.fp8_fusion import Found
    from passes.reading import Memory


@dataclass(frozen=True, slots=True)
class Norm:
    """One RMSNorm in a graph.

    Attributes:
        source: what is normed.
        weight: `[hidden]`.
        eps: added to the mean of squares.
        nodes: that make it, its value included.
    """

    source: torch.fx.Node
    weight: torch.fx.Node
    eps: float
    nodes: frozenset[torch.fx.Node]


class RMSNormFp8Pass:
    """Changes numerics on devices with a kernel, where sums of squares have another order.

    A norm that anyone else reads is left alone, and so is one under which gradients flow.
    """

    name = "rms_norm_fp8"

    def __call__(self, graph: torch.fx.Graph) -> int:
        """Rewrite `graph` in place; return the number of norms that were fused."""
        return fuse_each(graph, _fuse_at)

    def uuid(self) -> str:
        """Identifies this version of the rewrite."""
        return "rms_norm_fp8-2"


def _fuse_at(node: torch.fx.Node, found: Found, memory: Memory) -> set[int | None]:
    norm = norm_of(node)
    if norm is None or memory.may_be_written(norm.source):
        return set()
    group = group_of(node, norm.nodes, found, memory)
    return set() if group is None else _fused(norm, group, memory)


def norm_of(node: torch.fx.Node) -> Norm | None:
    """The norm whose value this node is."""
    factors = product(node)
    if factors is None:
        return None
    for weight, scaled in (factors, factors[::-1]):
        found = _norm(node, weight, scaled)
        if found is not None:
            return found
    return None


def _norm(node: torch.fx.Node, weight: Any, scaled: Any) -> Norm | None:
    dtype, weights = dtype_of(node), tensor_of(weight)
    if dtype not in FLOATS or weights is None or weights.dim() != 1 or weights.dtype is not dtype:
        return None
    nodes = {node}
    narrow = cast(scaled)
    if narrow is not None and dtype_of(scaled) is dtype:
        nodes.add(scaled)
        scaled = narrow
    factors = product(scaled) if dtype_of(scaled) is torch.float32 else None
    if factors is None:
        return None
    nodes.add(scaled)
    for wide, inverse in (factors, factors[::-1]):
        eps = _inverse_root(inverse, wide)
        widened = in_float32(wide)
        if eps is None or widened is None or dtype_of(widened[0]) is not dtype:
            continue
        source = tensor_of(widened[0])
        if source is None or not is_contiguous(widened[0]) or source.shape[-1] != weights.shape[0]:
            return None
        return Norm(widened[0], weight, eps[0], frozenset({*nodes, *widened[1], *eps[1]}))
    return None


def _inverse_root(node: Any, wide: torch.fx.Node) -> tuple[float, frozenset[torch.fx.Node]] | None:
    """The epsilon and the nodes of `rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)`."""
    added = single(node, "rsqrt")
    terms = total(added)
    if terms is None or added is None:
        return None
    mean, eps = terms if is_number(terms[1]) else terms[::-1]
    squares = reduced(mean, "mean")
    power = operands(squares, "pow")
    if not is_number(eps) or squares is None or power is None:
        return None
    if power[0] is not wide or not is_number(power[1]) or power[1] != 2:
        return None
    return float(eps), frozenset({node, added, mean, squares})


def _fused(norm: Norm, group: Group, memory: Memory) -> set[int | None]:
    """Put the op in the place of a norm, and of the sum before it if possible; see `fuse`."""
    first = group.first
    if first.kind == STATIC:
        op = OPS["rms_norm_static_fp8"]
        args: tuple[Any, ...] = (norm.weight, group.scales, norm.eps, first.multiplies)
    else:
        op = OPS["rms_norm_dynamic_fp8"]
        per_token = first.kind == PER_TOKEN
        args = (norm.weight, norm.eps, first.least, per_token, first.multiplies)
    terms = _terms(norm.source)
    if terms is not None:
        before = place_of(group, (*terms, norm.weight), memory, norm.source)
        if before is not None:
            return fuse(group, op, (*terms, *args), before, norm.source)
    before = place_of(group, (norm.source, norm.weight), memory)
    return set() if before is None else fuse(group, op, (norm.source, None, *args), before)


def _terms(node: torch.fx.Node) -> tuple[torch.fx.Node, torch.fx.Node] | None:
    """Both terms, where a node is the sum of two tensors of its own shape and dtype."""
    terms = total(node)
    value = tensor_of(node)
    if terms is None or value is None or value.requires_grad:
        return None
    given = [tensor_of(term) for term in terms]
    if any(term is None or not is_alike(term, value) for term in given):
        return None
    return terms[0], terms[1]
