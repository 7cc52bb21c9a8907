"""Only tensors and integers cross a cut, no piece merely allocates, and order is kept."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from toy import SPLITTING_OPS, VARIANTS, WIDTH, dynamo_graph, rows, toy_model

from compile_backend.errors import ConfigError
from compile_backend.op_names import SplittingOps, normal_name
from compile_backend.pipeline import prepare_for_split
from compile_backend.split import SplitGraph, split_graph
from compile_backend.split_views import is_trivial
from compile_backend.stitch import stitch
from compile_backend.support import default_splitting_ops
from compile_backend.torch_internals.graphs import storage_id

ops = torch.ops.toy


def split_of(
    function: Any,
    *args: Any,
    splitting_ops: tuple[str, ...] = SPLITTING_OPS,
    dynamic: bool | None = None,
) -> SplitGraph:
    graph = dynamo_graph(function, *args, dynamic=dynamic)
    prepare_for_split(graph)
    split = split_graph(graph, SplittingOps(splitting_ops))
    check_borders(split)
    return split


def check_borders(split: SplitGraph) -> None:
    """What holds of every split."""
    known = set(split.inputs)
    for section in split.sections:
        placeholders = [n for n in section.module.graph.nodes if n.op == "placeholder"]
        assert len(placeholders) == len(section.inputs)
        for node, name in zip(placeholders, section.inputs, strict=True):
            value = node.meta["example_value"]
            assert isinstance(value, (torch.Tensor, int, torch.SymInt)), (section.name, name)
            assert name in known, f"{section.name} reads {name} before it is made"
        for name in section.outputs:
            assert isinstance(split.values[name], (torch.Tensor, int, torch.SymInt))
        known.update(section.outputs)
    assert known.issuperset(name for name in split.outputs if isinstance(name, str))
    for one, following in zip(split.sections, split.sections[1:], strict=False):
        assert one.is_piece or following.is_piece, "neighbouring eager sections are one"


def shape_of(split: SplitGraph) -> str:
    """The order of sections: p for a piece, e for an eager section."""
    return "".join("p" if section.is_piece else "e" for section in split.sections)


def run(split: SplitGraph, *args: Any) -> tuple[Any, ...]:
    return stitch(split, {section.name: section.module for section in split.sections})(args)


@pytest.mark.parametrize("variant", VARIANTS)
def test_layers_give_a_piece_each_and_one_more(variant):
    split = split_of(toy_model(variant, 3, names=True), rows(4))
    assert shape_of(split) == "pepepep"
    assert [section.ops for section in split.eager_sections] == [(f"toy::{variant}",)] * 3
    assert len(split.pieces) == 4


def test_names_are_unique_and_tell_the_kind():
    split = split_of(toy_model(), rows(4))
    names = [section.name for section in split.sections]
    assert names == ["piece_0", "eager_1", "piece_2", "eager_3", "piece_4"]


@pytest.mark.parametrize(
    "parted",
    [
        lambda x: torch.split(x, 5, dim=-1),
        lambda x: x.chunk(2, -1),
        lambda x: x.unbind(0)[:2],
        lambda x: torch.split(x, [4, 6], -1)[::-1],
        lambda x: torch.topk(x, 4),
    ],
    ids=["split", "chunk", "unbind", "reversed", "topk"],
)
def test_no_tuple_crosses_a_cut(parted):
    def function(x: torch.Tensor) -> torch.Tensor:
        parts = parted(x * 2)
        y = ops.attn_new(parts[0])
        return y + 1, torch.cat([part.float() for part in parts], -1), parts[1]

    x = rows(4)
    split = split_of(function, x)
    torch.testing.assert_close(list(run(split, x)), list(function(x)))


def test_both_results_of_an_op_stay_with_it():
    split = split_of(toy_model("attn_pair", 1), rows(4))
    (section,) = split.eager_sections
    assert len(section.outputs) == 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_shape_read_before_the_cut_serves_behind_it(dynamic):
    def function(x: torch.Tensor) -> torch.Tensor:
        saved = x.shape
        y = ops.attn_new((x * 2).view(-1, 2))
        z = ops.attn_new(y + 1)
        return (z + 1).view(saved), (z * 2).view(saved[0], -1), saved[0] * 2

    split = split_of(function, rows(4), dynamic=dynamic)
    assert shape_of(split) == "pepep"


def test_an_allocation_between_two_ops_makes_no_piece():
    def function(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        first = torch.empty_like(x)
        ops.attn_out(x, first)
        second = torch.empty_like(first)
        ops.attn_out(first, second)
        third = second.new_empty(second.shape)
        ops.attn_out(second.view(-1).view(second.shape), third)
        return third + 1

    x = rows(4)
    split = split_of(function, x)
    assert shape_of(split) == "pep"
    assert split.eager_sections[0].ops == ("toy::attn_out",) * 3
    torch.testing.assert_close(run(split, x)[0], function(x))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_piece_does_some_work(variant):
    split = split_of(toy_model(variant, 2), rows(4))
    for piece in split.pieces:
        nodes = [node for node in piece.module.graph.nodes if node.op.startswith("call_")]
        assert not all(is_trivial(node) for node in nodes)


def test_a_cache_write_and_its_attention_are_one_section():
    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(16, WIDTH))

        def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = torch.relu(x)
                ops.cache_write(x, self.cache, slots)
                out = torch.empty_like(x)
                ops.attn_out(x, out)
                x = out
            return x + 1

    split = split_of(Layers(), rows(4), torch.arange(4))
    assert shape_of(split) == "pepepep"
    assert split.eager_sections[0].ops == ("toy::cache_write", "toy::attn_out")


def test_an_op_that_writes_a_slice_gets_the_very_memory():
    class Cached(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(4, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ops.attn_state(x * 2, self.cache[2]) + self.cache.sum()

    model = Cached()
    split = split_of(model, rows(4))
    cache = next(n for n in split.inputs if split.values[n].shape == (4, WIDTH) and "cache" in n)
    (section,) = split.eager_sections
    memories = [storage_id(split.values[name]) for name in section.inputs]
    assert storage_id(split.values[cache]) in memories
    written = torch.zeros(4, WIDTH)
    inputs = [written if name == cache else rows(4) for name in split.inputs]
    run(split, *inputs)
    assert written[2].ne(0).all()
    assert written[[0, 1, 3]].eq(0).all()


def test_work_between_two_ops_keeps_its_order_with_writes():
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = ops.attn_new(y)
        y.add_(z)
        w = ops.attn_new(y)
        y.mul_(w)
        return y + w

    x = rows(4)
    torch.testing.assert_close(run(split_of(function, x), x.clone())[0], function(x.clone()))


def test_a_view_moved_before_a_write_still_sees_it():
    def function(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        y = ops.attn_state(x * 2, state)
        view = state.view(2, -1)
        z = ops.attn_state(y, state)
        return z + view.sum()

    args = rows(4), torch.zeros(WIDTH)
    split = split_of(function, *args)
    actual = run(split, args[0], args[1].clone())[0]
    torch.testing.assert_close(actual, function(args[0], args[1].clone()))


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: (ops.attn_new(x),), "e"),
        (lambda x: ops.attn_new(x * 2), "pe"),
        (lambda x: ops.attn_new(x) + 1, "ep"),
        (lambda x: ops.attn_new(ops.attn_new(x)), "e"),
        (lambda x: ops.attn_new(ops.attn_new(x) + 1), "epe"),
        (lambda x: ops.attn_new(x.view(-1)).view(2, -1), "e"),
        (lambda x: x * 2, "p"),
        (lambda x: x.t(), "p"),
    ],
    ids=["alone", "last", "first", "adjacent", "around", "views", "none", "only a view"],
)
def test_ops_at_the_ends_and_side_by_side(function, shape):
    x = rows(4)
    split = split_of(function, x)
    assert shape_of(split) == shape
    expected = function(x)
    torch.testing.assert_close(
        run(split, x), expected if isinstance(expected, tuple) else (expected,)
    )


def test_regions_are_opened_and_closed_within_each_section():
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = ops.attn_new(x @ w)
            z = y @ w
            with torch.autocast("cpu", enabled=False):
                z = ops.attn_new(z.float() @ w)
            u = z @ w
        return u, z @ w

    args = rows(4), rows(WIDTH)
    split = split_of(function, *args)
    for section in split.sections:
        targets = [str(node.target) for node in section.module.graph.nodes]
        assert sum("_enter_autocast" in target for target in targets) == sum(
            "_exit_autocast" in target for target in targets
        )
    actual, expected = run(split, *args), function(*args)
    assert [value.dtype for value in actual] == [value.dtype for value in expected]
    torch.testing.assert_close(list(actual), list(expected))
    assert not torch.is_autocast_enabled("cpu")


# --- which ops cut ----------------------------------------------------------------------------


def python_attention(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(0)


def both(x: torch.Tensor) -> torch.Tensor:
    q = x.view(1, 1, *x.shape)
    y = torch.nn.functional.scaled_dot_product_attention(q * 2, q, q)
    return ops.attn_new(y.view_as(x) + 1) + 1


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("toy::attn_new",), ["toy::attn_new"]),
        (("toy::attn_new.default",), ["toy::attn_new"]),
        (("toy::*",), ["toy::attn_new"]),
        (("toy::attn",), []),
        ((), []),
        (("no_such_library::op", "no.such.function"), []),
        (
            ("torch.nn.functional.scaled_dot_product_attention",),
            ["torch._C._nn.scaled_dot_product_attention"],
        ),
        (default_splitting_ops(), ["torch._C._nn.scaled_dot_product_attention"]),
    ],
    ids=["packet", "overload", "glob", "prefix", "nothing", "unknown", "python", "default"],
)
def test_names_that_cut(names, found):
    split = split_of(both, rows(4), splitting_ops=names)
    assert [name for section in split.eager_sections for name in section.ops] == found


@pytest.mark.parametrize(
    "name",
    ["my op.f", "my_op", "toy:attn_new", "toy::", "::attn_new", "a::b::c", "a::b.c.d", "a..f", ""],
)
def test_a_name_that_can_be_none_is_refused_before_anything_is_split(name):
    with pytest.raises(ConfigError, match=rf"splitting_ops='{re.escape(name)}' .*write `ns::op`"):
        SplittingOps((name,))


@pytest.mark.parametrize(
    "name", ["flex_attention", "toy::attn_new", "aten::mm.default", "a.b", "no_such::op", "my_*"]
)
def test_a_name_of_a_right_form_is_accepted_whether_or_not_something_has_it(name):
    assert SplittingOps((name,)).names == (name,)


def test_names_that_stand_for_nothing_are_told():
    graph = dynamo_graph(both, rows(4)).graph
    functional = "torch.nn.functional.scaled_dot_product_attention"
    names = ("toy::attn_new", "toy::attn_knew", functional, "toy::*", "my_*", "no.function")
    splitting_ops = SplittingOps(names)
    cutting = splitting_ops.cutting(graph)
    assert len(cutting) == 2
    assert splitting_ops.matching_none_of(cutting) == ("toy::attn_knew", "my_*", "no.function")


@pytest.mark.parametrize(
    ("name", "normal"),
    [
        (
            "torch.nn.functional.scaled_dot_product_attention",
            "torch._C._nn.scaled_dot_product_attention",
        ),
        *((name, name) for name in ("toy::*", "aten::mm.out", "flex_attention", "no.function")),
        *((name, name) for name in (".x", "..x", "a..b", "a b.c", "torch.*", "")),
    ],
)
def test_a_function_goes_by_the_name_that_graphs_give_it(name, normal):
    assert normal_name(name) == normal
