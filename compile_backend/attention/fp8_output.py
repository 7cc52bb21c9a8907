"""8-bit floats of what attention gives, by plain ops: the reference for kernels that write them.

The numbers are those of a graph that attends and then quantises, bit for bit. Nothing is read on
the host, so a graph may hold it. This file refuses to know backends.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max


def quantise(
    x: torch.Tensor, output: torch.Tensor, scale: torch.Tensor, *, multiplies: bool
) -> None:
    """Write 8-bit floats of `x`, divided by a scale or multiplied by it, cut to their range.

    Args:
        x: rounded to the dtype that attention has without quantisation.
        output: of the same shape, in `FP8`.
        scale: float32, one element.
        multiplies: by the scale, instead of a division by it.
    """
    factor = scale.reshape(())
    wide = x.to(torch.float32)
    scaled = wide * factor if multiplies else wide / factor
    output.copy_(scaled.clamp_(-FP8_MAX, FP8_MAX))
