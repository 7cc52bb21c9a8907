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
    its ends is brought to the middle. Quotients below 2**-20 or above 2**20, far beyond the range
    of 8-bit floats, are not corrected. The interpreter rounds products before it adds, so it
    divides.
    """
    if IS_INTERPRETED:
        return tl.math.div_rn(values, tl.zeros_like(values) + divisor)
    size = tl.abs(divisor)
    shift = tl.where(size < 2.0**-60, 2.0**80, tl.where(size > 2.0**60, 2.0**-64, 1.0))
    divisor *= shift
    values *= shift
    inverse = tl.math.div_rn(1.0, divisor)
    quotient = values * inverse
    corrected = tl.fma(tl.fma(-quotient, divisor, values), inverse, quotient)
    corrected = tl.fma(tl.fma(-corrected, divisor, values), inverse, corrected)
    size = tl.abs(quotient)
    return tl.where((size > 2.0**-20) & (size < 2.0**20), corrected, quotient)
