"""The Triton kernels of the 8-bit ops against their references, in Triton's interpreter.

The interpreter rounds neither to bfloat16 nor to 8 bits as a GPU does. So kernels run on float32
and float16 here, and what they would round to 8 bits is kept as float32 and rounded by torch.
Sums of squares of `n` numbers in another order differ by at most `n` roundings, `rsqrt` and `exp`
by a few more; what is rounded to 16 bits then may be one step off, and so may a product with it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from passes import ops_fp8, ops_fp8_cuda
from passes.exact_quotient import divided, product_suffices

FP8 = ops_fp8.FP8
SIZES = (64, 96, 7, 1)


def given(dtype: torch.dtype, *shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(*shape, generator=generator) for _ in range(2))
    weight = 1 + 0.3 * torch.randn(shape[-1], generator=generator)
    return (3 * x).to(dtype), y.to(dtype), weight.to(dtype)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    found = torch.device(request.param)
    if found.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no 8-bit floats of this kind")
    return found


def check(
    actual: list[torch.Tensor], expected: list[torch.Tensor], dtype: torch.dtype, size: int
) -> None:
    """Compare lists of sums, 8-bit floats and scales.

    A value is off by `size + 8` roundings of float32 and, of 16 bits, one rounding more. Scaled,
    it lies within that of the reference, and so rounds to the same 8-bit float or to one next to
    it: 3 bits of mantissa make these an eighth apart, and below 2**-6 they are 2**-9 apart.
    """
    wide = (size + 8) * torch.finfo(torch.float32).eps
    off = wide if dtype is torch.float32 else wide + 2 * torch.finfo(dtype).eps
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        if other.dtype is FP8:
            torch.testing.assert_close(
                one.to(FP8).float(), other.float(), rtol=0.125 + off, atol=2**-9
            )
            # Few numbers lie that near the middle between two 8-bit floats.
            assert (one.to(FP8).float() != other.float()).float().mean() <= 0.1
        else:
            assert one.dtype is other.dtype
            torch.testing.assert_close(one, other, rtol=off, atol=0)


DTYPES = (torch.float32, torch.float16)


def kept_as(device: torch.device) -> dict[str, torch.dtype]:
    return {} if device.type == "cuda" else {"dtype": torch.float32}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("multiplies", [False, True])
@pytest.mark.parametrize("num_scales", [1, 2, 3, 5])
def test_norms_by_static_scales(
    device: torch.device,
    size: int,
    dtype: torch.dtype,
    has_residual: bool,
    multiplies: bool,
    num_scales: int,
) -> None:
    x, y, weight = (tensor.to(device) for tensor in given(dtype, 2, 3, size))
    scales = [torch.tensor(0.01 * (n + 1), device=device) for n in range(num_scales)]
    args = (x, y if has_residual else None, weight, scales, 1e-6, multiplies)
    actual = ops_fp8_cuda.rms_norm_static_fp8(*args, **kept_as(device))
    check(actual, ops_fp8.rms_norm_static_fp8(*args), dtype, size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("multiplies", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_norms_by_dynamic_scales(
    device: torch.device,
    size: int,
    dtype: torch.dtype,
    has_residual: bool,
    multiplies: bool,
    per_token: bool,
) -> None:
    x, y, weight = (tensor.to(device) for tensor in given(dtype, 2, 3, size))
    x[0, 0], y[0, 0] = 0, 0  # the least scale
    args = (x, y if has_residual else None, weight, 1e-6, 1e-4, per_token, multiplies)
    actual = ops_fp8_cuda.rms_norm_dynamic_fp8(*args, **kept_as(device))
    check(actual, ops_fp8.rms_norm_dynamic_fp8(*args), dtype, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("multiplies", [False, True])
@pytest.mark.parametrize("kind", ["static", "per_token", "per_tensor"])
def test_gates(device: torch.device, dtype: torch.dtype, multiplies: bool, kind: str) -> None:
    """With gate and up as the halves of one product, which lie in rows of twice the size."""
    halves, _, _ = given(dtype, 2, 3, 192)
    gate, up = halves.to(device).chunk(2, dim=-1)
    if kind == "static":
        scales = [torch.tensor(0.01 * (n + 1), device=device) for n in range(4)]
        static = (gate, up, scales, multiplies)
        actual = ops_fp8_cuda.silu_mul_static_fp8(*static, **kept_as(device))
        expected = ops_fp8.silu_mul_static_fp8(*static)
    else:
        dynamic = (gate, up, 1e-12, kind == "per_token", multiplies)
        actual = ops_fp8_cuda.silu_mul_dynamic_fp8(*dynamic, **kept_as(device))
        expected = ops_fp8.silu_mul_dynamic_fp8(*dynamic)
    check(actual, expected, dtype, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("multiplies", [False, True])
def test_a_single_row_has_one_scale(
    device: torch.device, dtype: torch.dtype, multiplies: bool
) -> None:
    x, y, weight = (tensor.to(device) for tensor in given(dtype, 1, 1, 96))
    normed = (x, y, weight, 1e-6, 1e-12, False, multiplies)
    actual = ops_fp8_cuda.rms_norm_dynamic_fp8(*normed, **kept_as(device))
    check(actual, ops_fp8.rms_norm_dynamic_fp8(*normed), dtype, 96)
    gated = (x, y, 1e-12, False, multiplies)
    actual = ops_fp8_cuda.silu_mul_dynamic_fp8(*gated, **kept_as(device))
    check(actual, ops_fp8.silu_mul_dynamic_fp8(*gated), dtype, 8)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what is no number
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("multiplies", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
def test_what_is_no_number_reaches_its_scale(
    device: torch.device, dtype: torch.dtype, multiplies: bool, per_token: bool, bad: float
) -> None:
    """That of its row, or of all: nobody quantises by what is left."""
    x, y, weight = (tensor.to(device) for tensor in given(dtype, 3, 96))
    x[1, 5], y[1, 5] = bad, 1
    gated = (x, y, 1e-12, per_token, multiplies)
    normed = (x, None, weight, 1e-6, 1e-12, per_token, multiplies)
    for name, args in (("silu_mul_dynamic_fp8", gated), ("rms_norm_dynamic_fp8", normed)):
        quantised, scale = getattr(ops_fp8_cuda, name)(*args, **kept_as(device))
        expected = getattr(ops_fp8, name)(*args)
        torch.testing.assert_close(scale, expected[1], rtol=1e-2, atol=0, equal_nan=True)
        assert torch.equal(quantised.float().isnan(), expected[0].float().isnan())


@triton.jit
def _divide(values, divisor, quotients, SIZE: tl.constexpr):
    here = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    given = tl.load(values + here)
    quotient = divided(given.to(tl.float32), tl.load(divisor), given.dtype, False)
    tl.store(quotients + here, quotient)


@triton.jit
def _ask(divisors, answers, KIND: tl.constexpr):
    place = tl.program_id(0)
    tl.store(answers + place, product_suffices(tl.load(divisors + place), KIND))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(tl.bfloat16, torch.bfloat16), (tl.float16, torch.float16)],
    ids=["bfloat16", "float16"],
)
def test_products_are_taken_only_where_they_round_alike(kind: Any, dtype: torch.dtype) -> None:
    """All numbers of 16 bits, by divisors of any kind and by those that lead near a middle."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()
    values = values[values.isfinite()]
    generator = torch.Generator().manual_seed(0)
    near = torch.randint(128, 256, (40,), generator=generator) / torch.arange(17, 57) * 16
    near = torch.cat([near * (1 + n * 2.0**-24) for n in (-1, 0, 1)])
    spread = 2 ** torch.empty(120).uniform_(-20, 20, generator=generator)
    divisors = torch.cat([near, spread, torch.tensor([1.0, 0.5, 448.0, 2 - 2**-23])])
    answers = torch.zeros(len(divisors), dtype=torch.int32)
    _ask[(len(divisors),)](divisors, answers, KIND=kind)
    differ = []
    for divisor, answer in zip(divisors, answers.tolist(), strict=True):
        exact = (values / divisor).clamp(-448, 448).to(FP8).view(torch.uint8)
        product = (values * (1.0 / divisor)).clamp(-448, 448).to(FP8).view(torch.uint8)
        differ.append(not torch.equal(exact, product))
        assert not (differ[-1] and answer), divisor
    assert any(differ)
    assert answers[len(near) : -4].float().mean() > 0.9


@pytest.mark.parametrize("kind", [tl.float32, tl.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("divisor", [0.0, -0.0, 1e-30, 1e30, float("inf"), float("nan")])
def test_products_are_not_taken_by_divisors_near_the_ends(kind: Any, divisor: float) -> None:
    answers = torch.ones(1, dtype=torch.int32)
    _ask[(1,)](torch.tensor([divisor]), answers, KIND=kind)
    assert answers.item() == 0


def check_quotients(values: torch.Tensor, scale: torch.Tensor) -> None:
    """As 8-bit floats they are those of torch, the signs of zeros included."""
    values = torch.nn.functional.pad(values, (0, -len(values) % 256))
    quotients = torch.empty(len(values), dtype=torch.float32, device=values.device)
    _divide[(len(values) // 256,)](values, scale, quotients, SIZE=256)
    made, expected = (
        wide.clamp(-448, 448).to(FP8) for wide in (quotients, values.to(torch.float32) / scale)
    )
    is_same = made.view(torch.uint8) == expected.view(torch.uint8)
    is_right = is_same | (made.float().isnan() & expected.float().isnan())
    assert is_right.all(), (scale, values[~is_right], quotients[~is_right])


ENDS = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3e38, -1e-45)
EXPONENTS = (-149, -127, -61, -60, -20, -1, 0, 7, 59, 60, 61, 127)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what leaves the range
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_quotients_of_zeros_and_ends(
    device: torch.device, exponent: int, dtype: torch.dtype
) -> None:
    """Also where products are rounded before they are added to."""
    scales = [sign * mantissa * 2.0**exponent for mantissa in (1.0, 1.7) for sign in (-1, 1)]
    for scale in torch.tensor([*scales, 0.0, -0.0, *ENDS[2:5]], device=device):
        whole = torch.tensor([1.0, -2.0, 448.0, -0.5, 1000.0], device=device) * scale
        check_quotients(torch.cat([torch.tensor(ENDS, device=device), whole]).to(dtype), scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_quotients_are_those_of_exact_division(exponent: int, dtype: torch.dtype) -> None:
    """Bit for bit, at middles between two 8-bit floats and next to them."""
    generator = torch.Generator().manual_seed(exponent + 200)
    middles = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    middles = torch.cat([middles, (middles[:127] + middles[1:128]) / 2]).cuda()
    mantissas = [1.0, 2 - 2**-23, *(1 + torch.rand(30, generator=generator)).tolist()]
    scales = [mantissa * 2.0**exponent for mantissa in (*mantissas, -mantissas[-1])]
    for scale in torch.tensor(scales, device="cuda"):
        near = middles * scale
        above, below = (
            near.nextafter(near.new_tensor(3e38)),
            near.nextafter(near.new_tensor(-3e38)),
        )
        spread = torch.randn(4096, generator=generator).cuda() * 100 * scale
        check_quotients(torch.cat([near, above, below, spread]).to(dtype), scale)


def test_no_rows_at_all(device: torch.device) -> None:
    x, y, weight = (tensor.to(device) for tensor in given(torch.float32, 0, 8))
    summed, quantised, scale = ops_fp8_cuda.rms_norm_dynamic_fp8(
        x, y, weight, 1e-6, 1e-12, True, False, **kept_as(device)
    )
    assert summed.shape == quantised.shape == (0, 8)
    assert scale.shape == (0, 1)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.ones(2, 8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)),
        (torch.ones(2, 8, dtype=torch.float16), torch.ones(8)),
        (torch.ones(2, 0), torch.ones(0)),
        (torch.ones(()), torch.ones(())),
    ],
)
def test_what_the_kernels_do_not_take(x: torch.Tensor, weight: torch.Tensor) -> None:
    assert not ops_fp8_cuda.can_run(x, weight)


def test_the_reference_runs_where_the_kernels_cannot() -> None:
    x = torch.randn(2, 8, dtype=torch.float64)
    weight = torch.ones(8, dtype=torch.float64)
    args = (x, None, weight, [torch.tensor(0.1)], 1e-6, False)
    (actual,), (expected,) = (
        module.rms_norm_static_fp8(*args) for module in (ops_fp8_cuda, ops_fp8)
    )
    assert torch.equal(actual.float(), expected.float())
