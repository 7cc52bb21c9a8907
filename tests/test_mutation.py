"""What a graph writes to is read from its ops; in doubt it counts as written."""

import pytest
import torch
from toy import dynamo_call, rows

from compile_backend.mutation import mutated_inputs

ops = torch.ops.toy


def written(function, x, y):
    graph, example_inputs = dynamo_call(function, x, y)
    positions = mutated_inputs(graph)
    return "".join(
        name
        for name, tensor in (("x", x), ("y", y))
        if any(example_inputs[i] is tensor for i in positions)
    )


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, y: x + y, ""),
        (lambda x, y: x.add_(y), "x"),
        (lambda x, y: torch.add(x, y, out=x) + y, "x"),
        (lambda x, y: x[1:].mul_(2).sum() + y, "x"),
        (lambda x, y: (x.t().zero_(), y + 1)[1], "x"),
        (lambda x, y: x.copy_(y), "x"),
        (lambda x, y: torch.relu_(x) + y, "x"),
        (lambda x, y: torch.nn.functional.relu(x, inplace=True) + y, "x"),
        (lambda x, y: torch.nn.functional.relu(x) + y, ""),
        (lambda x, y: (x.clone().add_(1), y + 1), ""),
        (lambda x, y: ops.attn_out(x, y) or x + 1, "y"),
        (lambda x, y: ops.attn_new(x) + y, ""),
        (lambda x, y: ops.attn_view(x).add_(1).sum() + y, "x"),
        (lambda x, y: ops.attn_state(x, y[0]), "y"),
        (lambda x, y: torch._foreach_add_([x, y], 1), "xy"),
        (lambda x, y: x.view(-1).index_fill_(0, torch.tensor([1]), 0).sum() + y, "x"),
        (lambda x, y: torch.sum(x, 0) + y.__neg__(), ""),
        (lambda x, y: x.chunk(2)[1].fill_(3).sum() + y, "x"),
    ],
)
def test_written_inputs(function, expected):
    assert written(function, rows(4), rows(4)) == expected


@pytest.mark.parametrize("operator", ["+=", "-=", "*=", "/=", "//=", "%=", "**=", "[]="])
def test_operators_that_write(operator):
    body = "x[0] = y[0]" if operator == "[]=" else f"x {operator} y"
    namespace = {}
    exec(f"def function(x, y):\n    {body}\n    return y + 1", namespace)
    assert written(namespace["function"], rows(4), rows(4)) == "x"


@pytest.mark.parametrize("operator", ["&=", "|=", "^=", "<<=", ">>="])
def test_operators_that_write_integers(operator):
    namespace = {}
    exec(f"def function(x, y):\n    x {operator} y\n    return y + 1", namespace)
    assert written(namespace["function"], torch.arange(4), torch.ones(4).long()) == "x"


def test_what_batch_norm_tracks_counts_as_written():
    def function(x, y):
        return torch.nn.functional.batch_norm(x, y[0], y[1], training=True)

    assert "y" in written(function, rows(4), rows(2).abs())
