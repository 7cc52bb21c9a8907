"""Triton kernels of the ops that give 8-bit floats: one program for each row.

They round where the eager references do. Sums of squares have another order, and `rsqrt` and
`exp` are those of Triton; all else is the same, bit for bit. A row is held whole, so one launch
does all, but for one scale of a whole tensor: that needs every row before the first is quantised.
This file refuses to know graphs and ops; where a value is kept is its caller's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from passes.exact_quotient import divided

if TYPE_CHECKING:
    from collections.abc import Sequence

    _Given = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
    _Made = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]

MAX_ROW = 65536
"""Elements of a row that one program can hold."""

_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max

_SCALES_AT_ONCE = 3
"""Static scales of one launch: those of queries, keys and values."""

_PART = 1024
"""Elements of a row for one program, where programs may share a row."""


def norm_rows(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    summed: torch.Tensor | None,
    made: torch.Tensor | None,
    largest: torch.Tensor | None,
    scales: Sequence[torch.Tensor],
    quantised: Sequence[torch.Tensor],
    scale: torch.Tensor | None,
    least: float,
    *,
    multiplies: bool,
) -> None:
    """Norm rows, and quantise them by static scales, by a scale of each row, or not yet.

    Args:
        x: `[rows, hidden]`, the elements of a row side by side.
        residual: likewise, added first.
        weight: `[hidden]`.
        eps: added to the mean of squares.
        summed: `[rows, hidden]` for the sum, where there is a residual.
        made: `[rows, hidden]` for the norm itself.
        largest: one float32, not below 0, that becomes the largest magnitude of all rows.
        scales: static ones, of one float32 each.
        quantised: `[rows, hidden]` for each static scale, or one for the dynamic ones.
        scale: `[rows]` float32 for the scale of each row.
        least: the smallest scale of a row.
        multiplies: by the scale, or by the reciprocal of a dynamic one.
    """
    given, kept = (x, residual, weight, summed), (made, _bits_of(largest), scale)
    _launch(given, True, eps, kept, scales, quantised, least, multiplies=multiplies)


def silu_mul_rows(
    gate: torch.Tensor,
    up: torch.Tensor,
    made: torch.Tensor | None,
    largest: torch.Tensor | None,
    scales: Sequence[torch.Tensor],
    quantised: Sequence[torch.Tensor],
    scale: torch.Tensor | None,
    least: float,
    *,
    multiplies: bool,
) -> None:
    """`silu(gate) * up` of rows, quantised likewise; arguments as for `norm_rows`."""
    given, kept = (gate, up, None, None), (made, _bits_of(largest), scale)
    _launch(given, False, 0.0, kept, scales, quantised, least, multiplies=multiplies)


def _bits_of(largest: torch.Tensor | None) -> torch.Tensor | None:
    """Magnitudes are in the order of their bits, and those of no number come last."""
    return None if largest is None else largest.view(torch.int32)


def _launch(
    given: _Given,
    is_norm: bool,  # noqa: FBT001
    eps: float,
    made: _Made,
    scales: Sequence[torch.Tensor],
    quantised: Sequence[torch.Tensor],
    least: float,
    *,
    multiplies: bool,
) -> None:
    """By all static scales, as many at once as one launch takes."""
    x, other, weight, summed = given
    num_rows, size = x.shape
    if not num_rows:
        return
    per_token, keeps = made[2] is not None, made[0] is not None
    # Without a sum over the row or a largest of it, parts of a row are quantised side by side.
    block = triton.next_power_of_2(size if is_norm or per_token or keeps else min(size, _PART))
    spare = [x] * _SCALES_AT_ONCE  # pointers that are never followed
    for first in range(0, max(1, len(scales)), _SCALES_AT_ONCE):
        if first and summed is not None:  # the sum is there by now
            x, other, summed = summed, None, None
        some = scales[first : first + _SCALES_AT_ONCE]
        _rows_kernel[(num_rows, triton.cdiv(size, block))](
            x,
            x if other is None else other,
            x if weight is None else weight,
            x if summed is None else summed,
            *(x if each is None else each for each in made),
            *[*some, *spare][:_SCALES_AT_ONCE],
            *[*quantised[first:], *spare][:_SCALES_AT_ONCE],
            x.stride(0),
            x.stride(0) if other is None else other.stride(0),
            eps,
            least,
            SIZE=size,
            BLOCK=block,
            IS_NORM=is_norm,
            HAS_OTHER=other is not None,
            KEEPS=keeps,
            PER_TOKEN=per_token,
            NUM_SCALES=len(some),
            MULTIPLIES=multiplies,
            FP8_MAX=_FP8_MAX,
            IS_INTERPRETED=triton.knobs.runtime.interpret,
            num_warps=min(16, max(4, block // 512)),
        )


def quantise_by_largest(
    made: torch.Tensor,
    largest: torch.Tensor,
    quantised: torch.Tensor,
    scale: torch.Tensor,
    least: float,
    *,
    multiplies: bool,
) -> None:
    """Quantise rows by one scale, which follows from the largest magnitude, and tell the scale.

    Args:
        made: `[rows, size]`, contiguous.
        largest: one float32.
        quantised: `[rows, size]`, contiguous.
        scale: one float32, written.
        least: the smallest scale.
        multiplies: by the reciprocal of the scale.
    """
    count, block = made.numel(), 4096
    _quantise_kernel[(max(1, triton.cdiv(count, block)),)](
        made,
        largest,
        quantised,
        scale,
        count,
        least,
        BLOCK=block,
        MULTIPLIES=multiplies,
        FP8_MAX=_FP8_MAX,
        IS_INTERPRETED=triton.knobs.runtime.interpret,
        num_warps=8,
    )


@triton.jit
def _scaled(
    values,
    scale,
    KIND: tl.constexpr,
    MULTIPLIES: tl.constexpr,
    FP8_MAX: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    scaled = values * scale if MULTIPLIES else divided(values, scale, KIND, IS_INTERPRETED)
    # What is no number stays none.
    return tl.clamp(scaled, -FP8_MAX, FP8_MAX, tl.PropagateNan.ALL)


@triton.jit
def _largest(values, KEEP_DIMS: tl.constexpr):
    """The bits of the largest magnitude; what is no number is larger than any, as in torch."""
    return tl.max(tl.abs(values).to(tl.int32, bitcast=True), keep_dims=KEEP_DIMS)


@triton.jit
def _scale_of(largest, least, FP8_MAX: tl.constexpr):
    scale = tl.math.div_rn(largest, tl.zeros_like(largest) + FP8_MAX)
    return tl.where(scale < least, least, scale)


@triton.jit
def _rows_kernel(
    x,
    other,
    weight,
    summed,
    made,
    largest,
    scale,
    scale_0,
    scale_1,
    scale_2,
    quantised_0,
    quantised_1,
    quantised_2,
    x_stride,
    other_stride,
    eps,
    least,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_NORM: tl.constexpr,
    HAS_OTHER: tl.constexpr,
    KEEPS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    MULTIPLIES: tl.constexpr,
    FP8_MAX: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < SIZE
    here = row * SIZE + columns
    # All that is read is asked for at once, since most of it comes from the device's memory; what
    # is not used is not read.
    loaded = tl.load(x + row * x_stride + columns, mask=is_there, other=0.0)
    second = tl.load(other + row * other_stride + columns, mask=is_there, other=0.0)
    second = second.to(tl.float32)
    weights = tl.load(weight + columns, mask=is_there, other=0.0).to(tl.float32)
    by_0, by_1, by_2 = tl.load(scale_0), tl.load(scale_1), tl.load(scale_2)
    kind = loaded.dtype
    values = loaded.to(tl.float32)
    if IS_NORM:
        if HAS_OTHER:
            total = (values + second).to(kind)
            tl.store(summed + here, total, mask=is_there)
            values = total.to(tl.float32)
        mean = tl.sum(values * values) / SIZE
        values = (values * tl.rsqrt(mean + eps)).to(kind).to(tl.float32)
        values = (weights * values).to(kind).to(tl.float32)
    else:
        activated = (values / (1.0 + tl.exp(-values))).to(kind).to(tl.float32)
        values = (activated * second).to(kind).to(tl.float32)
    if KEEPS:
        tl.store(made + here, values.to(kind), mask=is_there)
        tl.atomic_max(largest, _largest(values, False))
    elif PER_TOKEN:
        by_row = _largest(values, True).to(tl.float32, bitcast=True)
        by_row = _scale_of(by_row, least, FP8_MAX)
        tl.store(scale + row + tl.arange(0, 1), by_row)
        if MULTIPLIES:
            by_row = tl.math.div_rn(tl.full((1,), 1.0, tl.float32), by_row)
        result = _scaled(values, tl.sum(by_row, 0), kind, MULTIPLIES, FP8_MAX, IS_INTERPRETED)
        tl.store(quantised_0 + here, result.to(quantised_0.dtype.element_ty), mask=is_there)
    else:
        result = _scaled(values, by_0, kind, MULTIPLIES, FP8_MAX, IS_INTERPRETED)
        tl.store(quantised_0 + here, result.to(quantised_0.dtype.element_ty), mask=is_there)
        if NUM_SCALES > 1:
            result = _scaled(values, by_1, kind, MULTIPLIES, FP8_MAX, IS_INTERPRETED)
            tl.store(quantised_1 + here, result.to(quantised_1.dtype.element_ty), mask=is_there)
        if NUM_SCALES > 2:
            result = _scaled(values, by_2, kind, MULTIPLIES, FP8_MAX, IS_INTERPRETED)
            tl.store(quantised_2 + here, result.to(quantised_2.dtype.element_ty), mask=is_there)


@triton.jit
def _quantise_kernel(
    made,
    largest,
    quantised,
    scale,
    count,
    least,
    BLOCK: tl.constexpr,
    MULTIPLIES: tl.constexpr,
    FP8_MAX: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    here = program * BLOCK + tl.arange(0, BLOCK)
    one = tl.arange(0, 1)
    loaded = tl.load(made + here, mask=here < count, other=0.0)
    factor = _scale_of(tl.load(largest + one), least, FP8_MAX)
    if program == 0:
        tl.store(scale + one, factor)
    if MULTIPLIES:
        factor = tl.math.div_rn(tl.full((1,), 1.0, tl.float32), factor)
    values = loaded.to(tl.float32)
    factor = tl.sum(factor, 0)  # of one
    result = _scaled(values, factor, loaded.dtype, MULTIPLIES, FP8_MAX, IS_INTERPRETED)
    tl.store(quantised + here, result.to(quantised.dtype.element_ty), mask=here < count)
