"""One compile for each distinct piece: equal layers share, anything that differs does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy import SPLITTING_OPS, VARIANTS, WIDTH, dynamo_graph, rows, toy_model

from compile_backend.op_names import SplittingOps
from compile_backend.piece_compiler import PieceCompiler
from compile_backend.piece_key import structural_key
from compile_backend.pipeline import prepare_for_split
from compile_backend.split import Section, split_graph


def pieces_of(function: Any, *args: Any, dynamic: bool | None = None) -> tuple[Section, ...]:
    graph = dynamo_graph(function, *args, dynamic=dynamic)
    prepare_for_split(graph)
    return split_graph(graph, SplittingOps(SPLITTING_OPS)).pieces


def key_of(function: Any, *args: Any, dynamic: bool | None = None) -> Any:
    (piece,) = pieces_of(function, *args, dynamic=dynamic)
    return structural_key(piece.module)


@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_layers_are_compiled_once(variant):
    pieces = pieces_of(toy_model(variant, 12, names=True), rows(4))
    compiler = PieceCompiler("eager", {})
    for piece in pieces:
        compiler.compile(piece)
    assert len(pieces) == 13
    assert compiler.counts.compiles <= 3


def scaled_by(factor: Any) -> Any:
    return lambda x: x * factor


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x * 2, lambda x: x * 3),
        (lambda x: x * 2, lambda x: x * 2.0),
        (lambda x: torch.cos(x) * 1, lambda x: torch.sin(x) * 1),
        (scaled_by(2.0), scaled_by(2.0000000000000004)),
        (lambda x: x.sum(0), lambda x: x.sum(1)),
        (lambda x: x[1:], lambda x: x[:1]),
        (lambda x: x.to(torch.float64), lambda x: x.to(torch.float16)),
        (lambda x: x - x.t(), lambda x: x.t() - x),
        (lambda x: (x + 1, x + 2), lambda x: (x + 2, x + 1)),
        (lambda x: torch.full_like(x, 1), lambda x: torch.full_like(x, True)),
    ],
    ids=[
        *("constant", "type of constant", "op", "closure value", "dimension", "slice", "dtype"),
        *("order of arguments", "order of outputs", "bool for int"),
    ],
)
def test_what_computes_something_else_has_another_key(one, other):
    x = rows(WIDTH)
    assert key_of(one, x) != key_of(other, x)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (rows(4), rows(5)),
        (rows(4), rows(4).double()),
        (rows(WIDTH), rows(WIDTH).t()),
        (rows(4), rows(4, 2 * WIDTH)[:, :WIDTH]),
        (rows(4), rows(4).requires_grad_()),
    ],
    ids=["size", "dtype", "stride", "gap", "gradient"],
)
def test_other_inputs_have_another_key(one, other):
    assert key_of(torch.relu, one) != key_of(torch.relu, other)


def test_inputs_in_one_memory_have_another_key():
    memory = rows(4, 2 * WIDTH)
    left, right = memory[:, :WIDTH], memory[:, WIDTH:]
    apart = rows(4, 2 * WIDTH)[:, WIDTH:]
    assert key_of(torch.add, left, right) != key_of(torch.add, left, apart)


def test_names_of_values_do_not_count():
    def first(x: torch.Tensor) -> torch.Tensor:
        some = x + 1
        return some * 2

    def second(renamed: torch.Tensor) -> torch.Tensor:
        other = renamed + 1
        return other * 2

    assert key_of(first, rows(4)) == key_of(second, rows(4))


@pytest.mark.parametrize("kind", ["eager", "inductor"])
def test_compiled_pieces_compute_what_they_should_and_tell_what_they_write(kind):
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        y.add_(x.sum(0))
        return x * 2 + y, y + 1

    args = rows(4), rows(4)
    (piece,) = pieces_of(function, *args)
    with torch.no_grad():
        compiled = PieceCompiler(kind, {}).compile(piece)
    assert compiled.mutated_inputs == (piece.inputs.index("l_y_"),)
    given = {"l_x_": args[0].clone(), "l_y_": args[1].clone()}
    expected = function(*(tensor.clone() for tensor in args))
    with torch.no_grad():
        actual = compiled.call([given[name] for name in piece.inputs])
    torch.testing.assert_close(tuple(actual), expected)
    torch.testing.assert_close(given["l_y_"], args[1] + args[0].sum(0))


def test_inductor_settings_reach_the_compiler():
    (piece,) = pieces_of(lambda x: torch.sin(x) * 2, rows(4))
    with pytest.raises(Exception, match="no_such_setting"), torch.no_grad():
        PieceCompiler("inductor", {"no_such_setting": 1}).compile(piece)


def test_one_piece_serves_every_size_where_sizes_are_free():
    (piece,) = pieces_of(lambda x: torch.relu(x) * x.shape[0], rows(4), dynamic=True)
    with torch.no_grad():
        compiled = PieceCompiler("inductor", {}).compile(piece)
        for n in (2, 4, 7):
            x = rows(n)
            args = {"l_x_": x}
            given = [args.get(name, n) for name in piece.inputs]
            torch.testing.assert_close(compiled.call(given)[0], torch.relu(x) * n)


def test_a_piece_whose_inputs_only_hold_multiples_of_a_size_takes_the_size_itself():
    table = rows(16, seed=0)

    def function(ids: torch.Tensor) -> Any:
        return torch.ops.toy.attn_new(table[ids.flatten()]) * 2

    ids = torch.randint(0, 16, (4, 3))
    torch._dynamo.maybe_mark_dynamic(ids, 0)
    _, last = pieces_of(function, ids)
    assert len(last.inputs) == 2
    with torch.no_grad():
        compiled = PieceCompiler("inductor", {}).compile(last)
        for n in (2, 5):
            x = rows(3 * n)
            given = [n if name.startswith("s") else x for name in last.inputs]
            torch.testing.assert_close(compiled.call(given)[0], x * 2)
