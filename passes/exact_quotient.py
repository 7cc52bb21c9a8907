"""Division of many float32 numbers by one, in Triton kernels that quantise to 8-bit floats.

Exact division takes a dozen instructions and a branch for each number, and with a cold cache of
instructions more than the rest of such a kernel. This file refuses to know what is divided.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def divided(values, divisor, IS_INTERPRETED: tl.constexpr):
    """Values by one divisor, rounded as exact division rounds, with one division for all of them.

    Two corrections of the product with the reciprocal, each by what is left over, give the exact
    quotient rounded once (Markstein, "Computation of elementary functions on the IBM RISC
    System/6000 processor", 1990), as long as nothing leaves the range of float32: a divisor near
    its ends is brought to the middle, and quotients above 1024, which 8-bit floats do not reach,
    become 1024. What is left over is negated, so that zeros keep their signs. The interpreter
    rounds products before it adds, so it divides.
    """
    if IS_INTERPRETED:
        return tl.math.div_rn(values, tl.zeros_like(values) + divisor)
    size = tl.abs(divisor)
    is_usual = (size > 0.0) & (size < float("inf"))
    shift = tl.where(size < 2.0**-60, 2.0**80, tl.where(size > 2.0**60, 2.0**-64, 1.0))
    limit = tl.where(is_usual, size * shift * 1024.0, float("inf"))
    divisor *= shift
    inverse = tl.math.div_rn(1.0, divisor)
    values = tl.clamp(values * shift, -limit, limit, tl.PropagateNan.ALL)
    quotient = values * inverse
    exact = tl.fma(-tl.fma(quotient, divisor, -values), inverse, quotient)
    exact = tl.fma(-tl.fma(exact, divisor, -values), inverse, exact)
    return tl.where(is_usual, exact, quotient)
