"""Which static scales fuse: the rows of the table in how-it-works.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from compile_backend import explain

if TYPE_CHECKING:
    from collections.abc import Callable

FP8 = torch.float8_e4m3fn
IDLE = "enable_fusion was asked for and changed nothing in this graph"

FLOAT_FIRST: Callable[[Any, Any], Any] = lambda x, scale: x.float() / scale  # noqa: E731
AS_IT_IS: Callable[[Any, Any], Any] = lambda x, scale: x / scale  # noqa: E731
BY_INVERSE: Callable[[Any, Any], Any] = lambda x, scale: x.float() * scale  # noqa: E731


def scale(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, 0.5, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("scaled", "by", "fuses"),
    [
        (FLOAT_FIRST, scale(()), True),
        (FLOAT_FIRST, scale((1,)), True),
        (FLOAT_FIRST, scale((1, 1)), True),
        (BY_INVERSE, scale(()), True),
        (AS_IT_IS, scale((1,)), True),
        (AS_IT_IS, scale((1, 1)), True),
        (AS_IT_IS, scale(()), "float32 only"),
        (FLOAT_FIRST, scale((), torch.bfloat16), False),
        (FLOAT_FIRST, scale((), torch.float64), False),
        (FLOAT_FIRST, scale((1,), torch.float16), False),
        (FLOAT_FIRST, 0.5, False),
        (FLOAT_FIRST, scale((64,)), False),
        (FLOAT_FIRST, scale((4, 1)), False),
    ],
)
def test_a_static_scale_is_one_float32_that_makes_the_quotient_float32(
    dtype: torch.dtype, scaled: Any, by: Any, fuses: Any
) -> None:
    def layer(gate: torch.Tensor, up: torch.Tensor, by: Any) -> torch.Tensor:
        made = torch.nn.functional.silu(gate) * up
        return scaled(made, by).clamp(-448, 448).to(FP8)

    gate, up = torch.ones(4, 64, dtype=dtype), torch.ones(4, 64, dtype=dtype)
    options = {"pass_config": {"enable_fusion": True}}
    (graph,) = explain(layer, gate, up, by, options=options).graphs
    expected = dtype is torch.float32 if fuses == "float32 only" else fuses
    assert graph.passes["silu_mul_fp8"] == int(expected)
    assert any(note.startswith(IDLE) for note in graph.notes) is not expected
