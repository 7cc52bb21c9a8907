"""Views on both sides of a cut, of which one is written: compilers see them as what they are."""

from __future__ import annotations

import pytest
import torch
import toy
from toy import WIDTH, Twin, rows

from compile_backend.op_names import SplittingOps
from compile_backend.pipeline import prepare_for_split
from compile_backend.split import split_graph

attn_new = torch.ops.toy.attn_new
OPS = SplittingOps(("toy::attn_new",))


def view_written(x: torch.Tensor) -> torch.Tensor:
    a = x * 2
    v = a.view(-1)
    b = attn_new(a)
    v.add_(1)
    return a + b


def base_written(t: torch.Tensor) -> torch.Tensor:
    a = t * 2
    v = a.view(-1)
    b = attn_new(a)
    a.add_(1)
    return v + b.view(-1)


def two_that_overlap(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a = x * 2
    v, w = a[1:], a[:2]
    b = attn_new(a)
    v.add_(1)
    w.mul_(3)
    return a + b, v, w


def over_two_cuts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a = x * 2
    v = a.t()
    b = attn_new(a)
    v.add_(1)
    c = attn_new(a)
    a.mul_(2)
    return a + b + c, v


def of_an_input(x: torch.Tensor) -> torch.Tensor:
    v = x[1:]
    b = attn_new(x)
    v.add_(1)
    return x + b


def one_of_several_parts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a = x * 2
    left, right = a.chunk(2, dim=1)
    b = attn_new(a)
    right.add_(1)
    return left * 2, a + b, right


FUNCTIONS = [
    view_written,
    base_written,
    two_that_overlap,
    over_two_cuts,
    of_an_input,
    one_of_several_parts,
]


@pytest.mark.parametrize(
    ("function", "dynamic"),
    [*((each, True) for each in FUNCTIONS), (view_written, False), (of_an_input, False)],
)
def test_what_is_written_is_seen_through_every_view(function, dynamic):
    torch._dynamo.reset()
    both = Twin(function, cudagraph_mode="PIECEWISE", piece_compiler="inductor", dynamic=dynamic)
    for num_tokens in (4, 4, 4, 6, 6):
        both(rows(num_tokens))


@pytest.mark.parametrize(
    "function", [view_written, base_written, two_that_overlap, one_of_several_parts]
)
def test_a_piece_takes_what_views_show(function):
    graph = toy.dynamo_graph(function, rows(4))
    prepare_for_split(graph)
    split = split_graph(graph, OPS)
    last = split.sections[-1]
    assert last.is_piece
    assert sorted(last.inputs) == ["a", "b"]
    assert set(split.sections[0].outputs) - {"a"} <= set(split.outputs)


WAYS_TO_VIEW = {
    "ravel": lambda a: a.ravel(),
    "diagonal": lambda a: a.diagonal(),
    "swapdims": lambda a: a.swapdims(0, 1),
    "moveaxis": lambda a: torch.moveaxis(a, 0, 1),
    "unfold": lambda a: a.unfold(1, 2, 2),
    "broadcast_to": lambda a: torch.broadcast_to(a, a.shape),
    "tensor_split": lambda a: a.tensor_split(2, dim=1)[1],
    "hsplit": lambda a: a.hsplit(2)[0],
    "by keyword": lambda a: torch.transpose(dim0=0, dim1=1, input=a),
    "transposed attribute": lambda a: a.mT,
    "unflatten": lambda a: a.unflatten(1, (2, -1)),
}


@pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated:FutureWarning")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("way", WAYS_TO_VIEW.values(), ids=WAYS_TO_VIEW)
def test_whichever_way_a_view_is_made(way, dynamic, caplog):
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = x * 2
        v = way(a)
        b = attn_new(a)
        v.add_(1)
        return a + b, v

    torch._dynamo.reset()
    both = Twin(function, cudagraph_mode="PIECEWISE", piece_compiler="inductor", dynamic=dynamic)
    for num_tokens in (4, 4, 4, 6, 6):
        both(rows(num_tokens))
    assert "runs op by op" not in caplog.text


def test_views_that_nobody_writes_to_cross_a_cut():
    def function(x: torch.Tensor) -> torch.Tensor:
        a = x * 2
        v = a.view(-1)
        return attn_new(a).view(-1) + v + a.sum()

    graph = toy.dynamo_graph(function, rows(4))
    prepare_for_split(graph)
    split = split_graph(graph, OPS)
    assert "v" in split.sections[-1].inputs


def test_a_tensor_whose_layout_changes_is_left_alone():
    """What a view of it shows depends on when it is made."""

    def function(x: torch.Tensor) -> torch.Tensor:
        a = x * 2
        v = a.view(-1)
        b = attn_new(a)
        a.t_()
        v.add_(1)
        return v + b.view(-1)

    torch._dynamo.reset()
    both = Twin(function, cudagraph_mode="PIECEWISE", piece_compiler="eager")
    for _ in range(4):
        both(rows(WIDTH))


# --- memory that is shared in other ways --------------------------------------------------------


def written_behind(a: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    b = attn_new(a * 1)
    v.add_(1)
    return a + b


def written_before(a: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    v.add_(1)
    a.mul_(2)
    return a + attn_new(a * 1), v * 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("view", [lambda a: a[1], lambda a: a[1:], lambda a: a.view(-1)])
@pytest.mark.parametrize("function", [written_behind, written_before])
def test_inputs_that_are_views_of_each_other(function, view, dynamic):
    torch._dynamo.reset()
    options = toy.toy_options(cudagraph_mode="PIECEWISE", piece_compiler="inductor")
    run = torch.compile(function, backend="cudagraph_modes", dynamic=dynamic, options=options)
    with torch.no_grad():
        for _ in range(3):
            a = rows(4)
            twin = a.clone()
            found, expected = run(a, view(a)), function(twin, view(twin))
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(a, twin)


def under_two_names(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a = x * 2
    v, w = a.to(torch.float32), a.float()
    b = attn_new(a)
    v.add_(1)
    return a + b, v, w


def test_what_no_compiler_keeps_track_of_runs_op_by_op(caplog):
    torch._dynamo.reset()
    both = Twin(
        under_two_names, cudagraph_mode="PIECEWISE", piece_compiler="inductor", dynamic=True
    )
    for num_tokens in (4, 4, 4, 6, 6):
        both(rows(num_tokens))
    reason = "runs op by op: it writes to memory that several of its inputs share"
    assert sum(reason in message for message in caplog.messages) == 1
