"""Quantisation to 8-bit floats, as plain ops write it.

What counts as one, for `x` of any dtype; everything but the largest element is float32::

    q = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)

- *static*: `scale` is a tensor of one element, made elsewhere;
- *per token*: `scale = (x.abs().amax(-1, keepdim=True).float() / 448).clamp(min=least)`;
- *per tensor*: the same with `x.abs().amax()` or `x.abs().max()`.

`least` may be absent, or stand inside the division. Limits may be two calls, and the largest of a
row the values of `max(-1, keepdim=True)`, or of either without `keepdim` before `unsqueeze(-1)`.
Instead of a division there may be a product: with a static scale that is an inverse already, or
with `scale.reciprocal()` of a dynamic one. This file knows nothing of what made `x`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from passes.matching import (
    FLOATS,
    cast,
    clamped,
    dtype_of,
    has_sizes,
    in_float32,
    is_number,
    largest_of_rows,
    product,
    quotient,
    single,
    tensor_of,
)
from passes.ops_fp8 import FP8, FP8_MAX

STATIC, PER_TOKEN, PER_TENSOR = "static", "per_token", "per_tensor"


@dataclass(frozen=True, slots=True)
class Quantisation:
    """One quantisation in a graph.

    Attributes:
        source: what is quantised.
        result: the 8-bit floats.
        scale: given where static, else made on the way.
        kind: `STATIC`, `PER_TOKEN` or `PER_TENSOR`.
        multiplies: whether by the scale, where static, or by the reciprocal of a dynamic one.
        least: the smallest dynamic scale.
        inner: every node on the way from the source to the result, without these two.
    """

    source: torch.fx.Node
    result: torch.fx.Node
    scale: torch.fx.Node
    kind: str
    multiplies: bool
    least: float
    inner: frozenset[torch.fx.Node]

    @property
    def recipe(self) -> tuple[str, bool, float]:
        """What must be equal for two quantisations of one tensor to be done at once."""
        return self.kind, self.multiplies, self.least


def quantisations(graph: torch.fx.Graph) -> dict[torch.fx.Node, list[Quantisation]]:
    """All quantisations in a graph, by what they quantise."""
    found: dict[torch.fx.Node, list[Quantisation]] = {}
    for node in graph.nodes:
        one = quantisation(node)
        if one is not None:
            found.setdefault(one.source, []).append(one)
    return found


def quantisation(node: torch.fx.Node) -> Quantisation | None:
    """The quantisation that ends with this node."""
    cut = cast(node) if dtype_of(node) is FP8 else None
    limits = clamped(cut)
    if limits is None or limits[1:3] != (-FP8_MAX, FP8_MAX):
        return None
    scaled = limits[0]
    division = quotient(scaled)
    factors = division or product(scaled)
    if factors is None or dtype_of(scaled) is not torch.float32:
        return None
    wide, scale = factors
    # A product is the same in either order.
    if division is None and _has_one_element(wide):
        wide, scale = scale, wide
    source, casts = _before_cast(wide)
    if source is None or not has_sizes(_value(source), _value(scaled).shape):
        return None
    inner = {*limits[3], scaled, *casts}
    return _dynamic(node, source, scale, inner, multiplies=division is None) or _static(
        node, source, scale, inner, multiplies=division is None
    )


def _before_cast(node: Any) -> tuple[torch.fx.Node | None, frozenset[torch.fx.Node]]:
    """The float tensor that is scaled, before it is made float32."""
    widened = in_float32(node)
    if widened is not None:
        return widened
    # Divided by a float32 tensor that is no scalar, it becomes float32 by itself.
    is_float = dtype_of(node) in (torch.bfloat16, torch.float16)
    return (node if is_float and isinstance(node, torch.fx.Node) else None), frozenset()


def _static(
    node: torch.fx.Node,
    source: torch.fx.Node,
    scale: Any,
    inner: set[torch.fx.Node],
    *,
    multiplies: bool,
) -> Quantisation | None:
    value = tensor_of(scale)
    if value is None or not _has_one_element(scale) or value.dtype is not torch.float32:
        return None
    if value.device != node.meta["example_value"].device:
        return None
    return Quantisation(source, node, scale, STATIC, multiplies, 0.0, frozenset(inner))


def _dynamic(
    node: torch.fx.Node,
    source: torch.fx.Node,
    scale: Any,
    inner: set[torch.fx.Node],
    *,
    multiplies: bool,
) -> Quantisation | None:
    if multiplies:
        inverse = scale
        scale = single(inverse, "reciprocal") or _reciprocal(inverse)
        if scale is None:
            return None
        inner = {*inner, inverse}
    if not isinstance(scale, torch.fx.Node):
        return None
    found = _scale_of_largest(scale)
    if found is None:
        return None
    largest, least, between = found
    reduction = _largest(largest)
    if reduction is None:
        return None
    kind, of_what, on_the_way = reduction
    if of_what is not source:
        return None
    inner = {*inner, *between, *on_the_way, scale}
    return Quantisation(source, node, scale, kind, multiplies, least, frozenset(inner))


def _reciprocal(node: Any) -> torch.fx.Node | None:
    division = quotient(node)
    if division is None or not is_number(division[0]) or division[0] != 1:
        return None
    return division[1] if isinstance(division[1], torch.fx.Node) else None


def _scale_of_largest(
    scale: torch.fx.Node,
) -> tuple[torch.fx.Node, float, set[torch.fx.Node]] | None:
    """What is divided by the largest 8-bit float, the least scale, and the nodes between."""
    if dtype_of(scale) is not torch.float32:
        return None
    limits = clamped(scale)
    if limits is not None:  # after the division
        divided, least = limits[0], _least(limits)
        division = quotient(divided)
        if least is None or division is None or not _is_max(division[1]):
            return None
        return division[0], least, {*limits[3], divided}
    division = quotient(scale)
    if division is None or not _is_max(division[1]):
        return None
    limits = clamped(division[0])
    if limits is None:
        return division[0], 0.0, {scale}
    least = _least(limits)
    if least is None or dtype_of(division[0]) is not torch.float32:
        return None
    # Division rounds in order, so the limit may as well be divided.
    divided_least = float(torch.tensor(least) / FP8_MAX)
    return limits[0], divided_least, {scale, *limits[3]}


def _least(limits: tuple[torch.fx.Node, Any, Any, Any]) -> float | None:
    least = limits[1]
    return float(least) if limits[2] is None and is_number(least) and least >= 0 else None


def _is_max(value: Any) -> bool:
    return is_number(value) and value == FP8_MAX


def _largest(
    node: Any,
) -> tuple[str, torch.fx.Node, set[torch.fx.Node]] | None:
    """How the largest magnitude is taken, of what, and the nodes on the way."""
    widened = in_float32(node)
    if widened is None:
        return None
    taken, inner = widened[0], set(widened[1])
    per_token = largest_of_rows(taken)
    magnitudes = single(taken, "amax", "max") if per_token is None else per_token[0]
    source = single(magnitudes, "abs", "absolute")
    if magnitudes is None or source is None:
        return None
    inner |= {taken, magnitudes, *(() if per_token is None else per_token[1])}
    wide = cast(source)
    # The largest element is the same in either dtype.
    if wide is not None and dtype_of(source) is torch.float32 and dtype_of(wide) in FLOATS:
        inner.add(source)
        source = wide
    return PER_TOKEN if per_token is not None else PER_TENSOR, source, inner


def _has_one_element(node: Any) -> bool:
    value = tensor_of(node)
    return value is not None and has_sizes(value, (1,) * value.dim())


def _value(node: torch.fx.Node) -> torch.Tensor:
    value: torch.Tensor = node.meta["example_value"]
    return value
