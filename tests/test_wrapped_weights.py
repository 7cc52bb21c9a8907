"""Weights that only wrap other tensors, as quantized ones do, whose kernels give plain results."""

from __future__ import annotations

import logging
from typing import Any, Self

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from toy import MODES, NONE, WIDTH, Twin, compiled, rows

from compile_backend import stats


class ScaledInt8(torch.Tensor):
    """Rows of int8 with a scale each; a product with it is an ordinary tensor."""

    numbers: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scales: torch.Tensor) -> Self:
        return torch.Tensor._make_wrapper_subclass(
            cls, numbers.shape, dtype=scales.dtype, device=numbers.device
        )

    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        self.numbers, self.scales = numbers, scales

    def __repr__(self) -> str:
        return f"ScaledInt8(shape={tuple(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> ScaledInt8:
        return ScaledInt8(inner["numbers"], inner["scales"])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return ScaledInt8(args[0].numbers, args[0].scales)
        plain = [
            arg.numbers.to(arg.scales.dtype) * arg.scales if isinstance(arg, cls) else arg
            for arg in args
        ]
        return func(*plain, **(kwargs or {}))


class Quantized(torch.nn.Module):
    """Two products with attention between them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name in ("first", "second"):
            numbers = torch.randint(-9, 9, (WIDTH, WIDTH), generator=generator).to(torch.int8)
            weight = ScaledInt8(numbers, torch.full((WIDTH, 1), 0.1))
            setattr(self, name, torch.nn.Parameter(weight, requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.toy.attn_new(x @ self.first) @ self.second


@pytest.mark.parametrize("piece_compiler", ["eager", "inductor"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_what_is_inside_of_a_weight_is_looked_after(mode, piece_compiler):
    model = Quantized()
    run = compiled(model, cudagraph_mode=mode.name, piece_compiler=piece_compiler)

    def check(num_calls: int) -> None:
        for _ in range(num_calls):
            x = rows(4)
            with torch.no_grad():
                torch.testing.assert_close(run(x), model(x))

    check(4)
    captures = stats(run).total("captures")
    assert (captures > 0) is (mode.mixed_mode() is not NONE)
    with torch.no_grad():
        model.first.scales.mul_(2)  # in place: nothing to do
        check(2)
        assert stats(run).total("captures") == captures
        model.second.scales.data = model.second.scales * 3
    check(3)
    assert stats(run).total("captures") == 2 * captures


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_values_that_only_wrap_others_run_without_graphs_and_say_so(mode, caplog):
    """No graph could read or fill them."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = TwoTensor(rows(WIDTH, seed=0), rows(WIDTH, seed=1))
            self.weight = torch.nn.Parameter(weight, requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.toy.attn_new(x @ self.weight) + 1

    model = Model()
    run = compiled(model, cudagraph_mode=mode.name)
    with caplog.at_level(logging.WARNING), torch.no_grad():
        for _ in range(4):
            x = rows(4)
            actual, expected = run(x), model(x)
            torch.testing.assert_close((actual.a, actual.b), (expected.a, expected.b))
    assert stats(run).total("captures") == 0
    assert stats(run).mode_resolved == ("NONE",)
    told = [record.message for record in caplog.records if "only wraps other" in record.message]
    assert len(told) == 1


def test_callers_may_give_such_tensors(caplog):
    both = Twin(lambda x, w: torch.ops.toy.attn_new(x @ w), cudagraph_mode="PIECEWISE")
    weight = Quantized().first
    for _ in range(3):
        with torch.no_grad():
            x = rows(4)
            torch.testing.assert_close(both.compiled(x, weight), both.eager(x, weight))
