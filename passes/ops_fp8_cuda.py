"""The ops that give 8-bit floats on CUDA: the kernels where they can run, else the references.

Memory is allocated here, rows are made of whatever dimensions there are, and nothing is read back:
a CUDA graph may hold any of it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from passes import ops_fp8
from passes.kernels_fp8 import MAX_ROW, norm_rows, quantise_by_largest, silu_mul_rows
from passes.ops_fp8 import FP8

if TYPE_CHECKING:
    from collections.abc import Sequence


def rms_norm_static_fp8(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    scales: Sequence[torch.Tensor],
    eps: float,
    multiplies: bool,  # noqa: FBT001 - the order of the schema
    *,
    dtype: torch.dtype = FP8,
) -> list[torch.Tensor]:
    """See `ops_fp8.rms_norm_static_fp8`; `dtype` other than `FP8` is for tests."""
    if not can_run(x, weight):
        return ops_fp8.rms_norm_static_fp8(x, residual, weight, scales, eps, multiplies)
    summed, quantised = _sum_of(x, residual), [_like(x, dtype) for _ in scales]
    norm_rows(
        _rows(x),
        None if residual is None else _rows(residual),
        weight.contiguous(),
        eps,
        None if summed is None else _rows(summed),
        None,
        None,
        scales,
        [_rows(each) for each in quantised],
        None,
        0.0,
        multiplies=multiplies,
    )
    return quantised if summed is None else [summed, *quantised]


def rms_norm_dynamic_fp8(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    least: float,
    per_token: bool,  # noqa: FBT001
    multiplies: bool,  # noqa: FBT001
    *,
    dtype: torch.dtype = FP8,
) -> list[torch.Tensor]:
    """See `ops_fp8.rms_norm_dynamic_fp8`."""
    if not can_run(x, weight):
        return ops_fp8.rms_norm_dynamic_fp8(x, residual, weight, eps, least, per_token, multiplies)
    summed, quantised = _sum_of(x, residual), _like(x, dtype)
    scale, made, largest = _scale_and_scratch(x, per_token=per_token)
    norm_rows(
        _rows(x),
        None if residual is None else _rows(residual),
        weight.contiguous(),
        eps,
        None if summed is None else _rows(summed),
        made,
        largest,
        (),
        [_rows(quantised)],
        scale if made is None else None,
        least,
        multiplies=multiplies,
    )
    if made is not None and largest is not None:
        quantise_by_largest(made, largest, _rows(quantised), scale, least, multiplies=multiplies)
    return [quantised, scale] if summed is None else [summed, quantised, scale]


def silu_mul_static_fp8(
    gate: torch.Tensor,
    up: torch.Tensor,
    scales: Sequence[torch.Tensor],
    multiplies: bool,  # noqa: FBT001
    *,
    dtype: torch.dtype = FP8,
) -> list[torch.Tensor]:
    """See `ops_fp8.silu_mul_static_fp8`."""
    if not can_run(gate, up):
        return ops_fp8.silu_mul_static_fp8(gate, up, scales, multiplies)
    quantised = [_like(gate, dtype) for _ in scales]
    rows = [_rows(each) for each in quantised]
    silu_mul_rows(
        _rows(gate), _rows(up), None, None, scales, rows, None, 0.0, multiplies=multiplies
    )
    return quantised


def silu_mul_dynamic_fp8(
    gate: torch.Tensor,
    up: torch.Tensor,
    least: float,
    per_token: bool,  # noqa: FBT001
    multiplies: bool,  # noqa: FBT001
    *,
    dtype: torch.dtype = FP8,
) -> list[torch.Tensor]:
    """See `ops_fp8.silu_mul_dynamic_fp8`."""
    if not can_run(gate, up):
        return ops_fp8.silu_mul_dynamic_fp8(gate, up, least, per_token, multiplies)
    quantised = _like(gate, dtype)
    scale, made, largest = _scale_and_scratch(gate, per_token=per_token)
    silu_mul_rows(
        _rows(gate),
        _rows(up),
        made,
        largest,
        (),
        [_rows(quantised)],
        scale if made is None else None,
        least,
        multiplies=multiplies,
    )
    if made is not None and largest is not None:
        quantise_by_largest(made, largest, _rows(quantised), scale, least, multiplies=multiplies)
    return [quantised, scale]


def can_run(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the kernels take these, on this device."""
    from_floats = x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    fits = x.dim() > 0 and 0 < x.shape[-1] <= MAX_ROW
    return _has_kernels(x.device) and from_floats and x.dtype == other.dtype and fits


@functools.cache
def _has_kernels(device: torch.device) -> bool:
    """Whether Triton makes 8-bit floats of this kind for a device, or runs in its interpreter."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`[rows, size]`, the elements of a row side by side; a view where that can be."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _like(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _sum_of(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor | None:
    return None if residual is None else _like(x, x.dtype)


def _is_by_row(x: torch.Tensor, *, per_token: bool) -> bool:
    """Whether each row follows from itself: a single row is the whole tensor."""
    return per_token or x.numel() == x.shape[-1]


def _scale_and_scratch(
    x: torch.Tensor, *, per_token: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The scale, and where it is one for many rows, memory for the value and its largest."""
    shape = (*x.shape[:-1], 1) if per_token else ()
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    if _is_by_row(x, per_token=per_token):
        return scale, None, None
    largest = torch.zeros((), dtype=torch.float32, device=x.device)
    return scale, _rows(_like(x, x.dtype)), largest
