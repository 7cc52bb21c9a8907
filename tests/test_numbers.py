"""Python floats under dynamic shapes: those of modules are constants, those of callers are not."""

import pytest
import torch
from torch import nn

from compile_backend import CUDAGraphMode, explain, stats

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


class Normed(nn.Module):
    """A norm with an epsilon and attention with a scale, both Python floats of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.eps, self.scale = nn.Linear(16, 16), 1e-5, 0.3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps)
        q = hidden.view(1, 1, -1, 16)
        attended = nn.functional.scaled_dot_product_attention(q, q, q, scale=self.scale)
        return attended.view(-1, 16) * 2


def compiled(function, mode, piece_compiler):
    options = {"cudagraph_mode": mode, "piece_compiler": piece_compiler}
    return torch.compile(function, backend="cudagraph_modes", dynamic=True, options=options)


@pytest.mark.parametrize("piece_compiler", ["eager", "inductor"])
def test_floats_of_modules_keep_no_piece_from_its_graph_and_may_change(piece_compiler):
    model = Normed()
    run = compiled(model, "FULL", piece_compiler)
    with torch.no_grad():
        for _ in range(3):
            for rows in (4, 8):
                x = torch.randn(rows, 16)
                torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
        assert stats(run).mode_resolved == ("FULL",)
        assert stats(run).total("replays", FULL) == 4
        model.eps = 0.5
        for rows in (4, 8):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("piece_compiler", ["eager", "inductor"])
def test_a_float_that_callers_change_is_never_frozen(piece_compiler):
    def function(x, scale):
        return nn.functional.scaled_dot_product_attention(x * scale, x, x) * scale

    run = compiled(function, "PIECEWISE", piece_compiler)
    with torch.no_grad():
        for scale in (0.5, 0.25, 1.5, 0.1, 0.7, 0.9, 0.5):
            x = torch.randn(1, 1, 4, 16)
            torch.testing.assert_close(run(x, scale), function(x, scale), rtol=1e-4, atol=1e-5)
    assert stats(run).graphs == 1


def test_explain_plans_what_the_backend_runs():
    explained = explain(
        Normed(), torch.randn(4, 16), options={"cudagraph_mode": "FULL"}, dynamic=True
    )
    (graph,) = explained.graphs
    assert graph.mode_resolved is FULL
    assert graph.notes == ()
