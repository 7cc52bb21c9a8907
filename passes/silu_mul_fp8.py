"""`silu(gate) * up` and the quantisation behind it become one op.

Before::

    m = silu(gate) * up
    scale = (m.abs().amax(-1, keepdim=True).float() / 448).clamp(min=least)
    q = (m.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)

After::

    q, scale = silu_mul_dynamic_fp8(gate, up, least, True, False)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from passes.fp8_fusion import Group, fuse, fuse_each, group_of, place_of
from passes.fp8_quantisation import PER_TOKEN, STATIC
from passes.matching import FLOATS, called, is_alike, product, tensor_of
from passes.ops_fp8 import OPS

if TYPE_CHECKING:
    from passes.fp8_fusion import Found
    from passes.reading import Memory


class SiluMulFp8Pass:
    """Changes numerics on devices with a kernel, whose exponential is another one.

    A product that anyone else reads is left alone, and so is one under which gradients flow.
    """

    name = "silu_mul_fp8"

    def __call__(self, graph: torch.fx.Graph) -> int:
        """Rewrite `graph` in place; return the number of products that were fused."""
        return fuse_each(graph, _fuse_at)

    def uuid(self) -> str:
        """Identifies this version of the rewrite."""
        return "silu_mul_fp8-2"


def _fuse_at(node: torch.fx.Node, found: Found, memory: Memory) -> set[int | None]:
    factors = _gate_and_up(node)
    if factors is None:
        return set()
    gate, up, silu = factors
    group = group_of(node, frozenset({node, silu}), found, memory)
    return set() if group is None else _fused(gate, up, group, memory)


def _gate_and_up(
    node: torch.fx.Node,
) -> tuple[torch.fx.Node, torch.fx.Node, torch.fx.Node] | None:
    """Gate, up and `silu(gate)`, where a node is the product of the latter two."""
    factors = product(node)
    for silu, up in (factors, factors[::-1]) if factors is not None else ():
        gate = _gate_of(silu)
        value, other = tensor_of(gate), tensor_of(up)
        if gate is None or value is None or other is None or value.dtype not in FLOATS:
            continue
        if is_alike(value, other):
            return gate, up, silu
    return None


def _gate_of(node: Any) -> torch.fx.Node | None:
    """What `silu` is taken of, not in place."""
    if not isinstance(node, torch.fx.Node) or called(node) != "silu" or not node.args:
        return None
    options = (*node.args[1:], *node.kwargs.values())
    source = node.args[0]
    return source if isinstance(source, torch.fx.Node) and not any(options) else None


def _fused(
    gate: torch.fx.Node, up: torch.fx.Node, group: Group, memory: Memory
) -> set[int | None]:
    """Put the op in the place of a product; see `fuse`."""
    before = place_of(group, (gate, up), memory)
    if before is None:
        return set()
    first = group.first
    if first.kind == STATIC:
        args: tuple[Any, ...] = (gate, up, group.scales, first.multiplies)
        return fuse(group, OPS["silu_mul_static_fp8"], args, before)
    args = (gate, up, first.least, first.kind == PER_TOKEN, first.multiplies)
    return fuse(group, OPS["silu_mul_dynamic_fp8"], args, before)
