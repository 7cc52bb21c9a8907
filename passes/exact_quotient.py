"""Division of many float32 numbers by one, in Triton kernels that quantise to 8-bit floats.

Exact division takes a dozen instructions and a branch for each number, which at the end of a
kernel cost more than a kernel that only quantises. This file refuses to know what is divided.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def divided(values, divisor, KIND: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Values by one divisor; as 8-bit floats they are those of exact division, bit for bit.

    For nearly all divisors of numbers with 16 bits a product with the reciprocal is enough.
    Others get two corrections, each by what is left over: these give the exact quotient rounded
    once (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor",
    1990), as long as nothing leaves the range of float32. So a divisor near its ends is brought
    to the middle, and quotients above 1024, which 8-bit floats do not reach, become 1024. Zeros
    need no correction, and would lose their signs. The interpreter rounds products before it
    adds, so it divides.

    Args:
        values: float32, each a number of `KIND`.
        divisor: one float32.
        KIND: float32, float16 or bfloat16.
        IS_INTERPRETED: whether Triton runs in its interpreter.
    """
    if IS_INTERPRETED:
        return tl.math.div_rn(values, tl.zeros_like(values) + divisor)
    quotient = values
    if product_suffices(divisor, KIND):
        quotient = values * tl.math.div_rn(1.0, divisor)
    else:
        size = tl.abs(divisor)
        is_usual = (size > 0.0) & (size < float("inf"))
        shift = tl.where(size < 2.0**-60, 2.0**80, tl.where(size > 2.0**60, 2.0**-64, 1.0))
        limit = tl.where(is_usual, size * shift * 1024.0, float("inf"))
        divisor *= shift
        inverse = tl.math.div_rn(1.0, divisor)
        values = tl.clamp(values * shift, -limit, limit, tl.PropagateNan.ALL)
        quotient = values * inverse
        exact = tl.fma(tl.fma(-quotient, divisor, values), inverse, quotient)
        exact = tl.fma(tl.fma(-exact, divisor, values), inverse, exact)
        exact = tl.where(quotient == 0.0, quotient, exact)
        quotient = tl.where(is_usual, exact, quotient)
    return quotient


@triton.jit
def product_suffices(divisor, KIND: tl.constexpr):
    """Whether products of numbers of `KIND` with the reciprocal round to the right 8-bit floats.

    A product is within 2**-23 of the quotient, exact division within 2**-24. So they round to
    different 8-bit floats only if a middle between two of these is that near to a quotient, and
    the middle times the divisor to a number of `KIND`. The significands of middles, those of
    subnormal 8-bit floats included, are 16/16 to 31/16. Reciprocals of powers of two are exact.
    """
    if tl.float32 == KIND:
        return False
    UNIT: tl.constexpr = 1 << (16 if tl.bfloat16 == KIND else 13)  # of KIND, in bits of float32
    size = tl.abs(divisor)
    significand = (divisor.to(tl.int32, bitcast=True) & 0x7FFFFF | 0x3F800000).to(
        tl.float32, bitcast=True
    )
    middles = (16 + tl.arange(0, 16)).to(tl.float32) * significand
    bits = middles.to(tl.int32, bitcast=True) + UNIT // 2
    nearest = (bits & -UNIT).to(tl.float32, bitcast=True)
    is_near = tl.abs(middles - nearest) <= middles * 2.0**-21
    is_clear = (tl.max(is_near.to(tl.int32), 0) == 0) | (significand == 1.0)
    return is_clear & (size > 2.0**-60) & (size < 2.0**60)
