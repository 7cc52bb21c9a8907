"""RMSNorm and SiLU * up that give 8-bit floats: `cudagraph_modes::*_fp8`, and what they mean.

Each op's eager reference here is its specification, rounding of every step included, and is what
runs where there is no kernel. Rows are the last dimension; an op takes any others. What it gives
is a list: the sum of `x` and `residual` if there is one, then the 8-bit floats, one for each
static scale, then the dynamic scale if it makes one: float32, `[..., 1]` per token or `[]` per
tensor.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max

_LIBRARY = torch.library.Library("cudagraph_modes", "FRAGMENT")  # type: ignore[no-untyped-call]
_GIVEN = {
    "rms_norm_static_fp8": "Tensor x, Tensor? residual, Tensor weight, Tensor[] scales, float eps",
    "rms_norm_dynamic_fp8": "Tensor x, Tensor? residual, Tensor weight, float eps, float least, "
    "bool per_token",
    "silu_mul_static_fp8": "Tensor gate, Tensor up, Tensor[] scales",
    "silu_mul_dynamic_fp8": "Tensor gate, Tensor up, float least, bool per_token",
}
for _name, _given in _GIVEN.items():
    _LIBRARY.define(  # type: ignore[no-untyped-call]
        f"{_name}({_given}, bool multiplies) -> Tensor[]"
    )

OPS: dict[str, Any] = {name: getattr(torch.ops.cudagraph_modes, name).default for name in _GIVEN}
"""By name."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of Llama and its kin: float32 inside, rounded to `x`'s dtype before the weight.

    Args:
        x: `[..., hidden]`.
        weight: `[hidden]`, of the same dtype.
        eps: added to the mean of squares.
    """
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gate)`, rounded to its dtype, times `up`."""
    return torch.nn.functional.silu(gate) * up


def quantise(x: torch.Tensor, scale: torch.Tensor, *, multiplies: bool) -> torch.Tensor:
    """8-bit floats of `x`, divided by a float32 scale or multiplied by it, cut to their range."""
    wide = x.to(torch.float32)
    scaled = wide * scale if multiplies else wide / scale
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def dynamic_scale(x: torch.Tensor, least: float, *, per_token: bool) -> torch.Tensor:
    """The float32 scale that maps the largest magnitude, of each row or of all, to the largest."""
    magnitudes = x.abs()
    largest = magnitudes.amax(-1, keepdim=True) if per_token else magnitudes.amax()
    return (largest.to(torch.float32) / FP8_MAX).clamp(min=least)


def rms_norm_static_fp8(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    scales: Sequence[torch.Tensor],
    eps: float,
    multiplies: bool,  # noqa: FBT001 - the order of the schema
) -> list[torch.Tensor]:
    """`[sum?, quantised by each scale]` of the norm of `x`, or of `x + residual`."""
    summed = x if residual is None else x + residual
    normed = rms_norm(summed, weight, eps)
    sums = [] if residual is None else [summed]
    return sums + [quantise(normed, scale, multiplies=multiplies) for scale in scales]


def rms_norm_dynamic_fp8(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    least: float,
    per_token: bool,  # noqa: FBT001
    multiplies: bool,  # noqa: FBT001
) -> list[torch.Tensor]:
    """`[sum?, quantised, scale]` of the norm of `x`, or of `x + residual`."""
    summed = x if residual is None else x + residual
    normed = rms_norm(summed, weight, eps)
    sums = [] if residual is None else [summed]
    return sums + _quantised(normed, least, per_token=per_token, multiplies=multiplies)


def silu_mul_static_fp8(
    gate: torch.Tensor,
    up: torch.Tensor,
    scales: Sequence[torch.Tensor],
    multiplies: bool,  # noqa: FBT001
) -> list[torch.Tensor]:
    """`silu(gate) * up`, quantised by each scale."""
    made = silu_mul(gate, up)
    return [quantise(made, scale, multiplies=multiplies) for scale in scales]


def silu_mul_dynamic_fp8(
    gate: torch.Tensor,
    up: torch.Tensor,
    least: float,
    per_token: bool,  # noqa: FBT001
    multiplies: bool,  # noqa: FBT001
) -> list[torch.Tensor]:
    """`[quantised, scale]` of `silu(gate) * up`."""
    return _quantised(silu_mul(gate, up), least, per_token=per_token, multiplies=multiplies)


def _quantised(
    x: torch.Tensor, least: float, *, per_token: bool, multiplies: bool
) -> list[torch.Tensor]:
    scale = dynamic_scale(x, least, per_token=per_token)
    factor = scale.reciprocal() if multiplies else scale
    return [quantise(x, factor, multiplies=multiplies), scale]


REFERENCES: dict[str, Callable[..., list[torch.Tensor]]] = {
    "rms_norm_static_fp8": rms_norm_static_fp8,
    "rms_norm_dynamic_fp8": rms_norm_dynamic_fp8,
    "silu_mul_static_fp8": silu_mul_static_fp8,
    "silu_mul_dynamic_fp8": silu_mul_dynamic_fp8,
}
"""By the name of the op."""


def _on_cuda(name: str) -> Callable[..., list[torch.Tensor]]:
    """An op on CUDA, whose kernels are looked for at its first call."""

    @functools.cache
    def found() -> Callable[..., list[torch.Tensor]]:
        if importlib.util.find_spec("triton") is None:
            return REFERENCES[name]
        from passes import ops_fp8_cuda  # noqa: PLC0415 - Triton is optional

        made: Callable[..., list[torch.Tensor]] = getattr(ops_fp8_cuda, name)
        return made

    def run(*args: Any) -> list[torch.Tensor]:
        return found()(*args)

    return run


for _name, _reference in REFERENCES.items():
    _LIBRARY.impl(_name, _reference, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _on_cuda(_name), "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"cudagraph_modes::{_name}", _reference, lib=_LIBRARY)
