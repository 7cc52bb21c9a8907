"""Failures that users of such systems have met, each as the smallest model that shows it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import toy
from toy import FULL, NONE, PIECEWISE, VARIANTS, WIDTH, Twin, compiled, counts, rows, toy_model

from compile_backend import CaptureError, stats
from compile_backend.config import CompilationConfig
from compile_backend.plan import plan_graph
from compile_backend.reference_engine import ReferenceGraph

attn_new = torch.ops.toy.attn_new
GRAPH_MODES = pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])


# --- splitting, with a real compiler ----------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_through_inductor(variant):
    both = Twin(
        toy_model(variant, names=True),
        cudagraph_mode="PIECEWISE",
        piece_compiler="inductor",
        dynamic=True,
    )
    for n in (8, 5, 8, 8):
        both(rows(n))
    assert both.stats.total("replays") > 0


@GRAPH_MODES
def test_a_piece_that_writes_over_what_it_reads_shifted(mode):
    """A compiler that fuses the read and the write of one tensor reads rows it has written."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = attn_new(x * 1)
        y.copy_(torch.roll(y, 1, 0) * 2 + y.flip(0))
        x.copy_(torch.roll(x, 1, 0) + y)
        return attn_new(y) + y

    both = Twin(function, cudagraph_mode=mode, piece_compiler="inductor")
    for _ in range(3):
        both(rows(4))


def test_a_saved_shape_and_split_values_through_inductor():
    def function(x: torch.Tensor) -> torch.Tensor:
        saved = x.shape
        left, right = torch.split(x * 2, WIDTH // 2, -1)
        y = attn_new(left)
        z = attn_new(y + right)
        return torch.cat((z, y), -1).view(saved) + saved[0]

    both = Twin(function, cudagraph_mode="PIECEWISE", piece_compiler="inductor", dynamic=True)
    for n in (8, 4, 8, 4, 5):
        both(rows(n))


def test_a_slice_of_a_cache_is_written_in_place_through_inductor():
    class Cached(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(3, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.ops.toy.attn_state(torch.relu(x), self.cache[1])
            self.cache[2].add_(x.sum(0))
            return torch.ops.toy.attn_state(x * 2, self.cache[2]) + self.cache[1]

    model = Cached()
    address = model.cache.data_ptr()
    both = Twin(model, cudagraph_mode="PIECEWISE", piece_compiler="inductor")
    for _ in range(4):
        both(rows(4))
    assert model.cache.data_ptr() == address


def test_a_value_whose_shape_changes_in_place():
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.unsqueeze_(0)
        z = attn_new(y[0])
        y.squeeze_(0)
        return z + y

    both = Twin(function, cudagraph_mode="PIECEWISE", piece_compiler="inductor")
    for _ in range(3):
        both(rows(4))


def test_a_mask_that_is_written_between_two_attention_calls():
    def function(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q = x.view(1, 1, *x.shape)
        mask = mask.clone()
        mask[:, 0] = False
        y = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        mask[:, 1] = False
        return torch.nn.functional.scaled_dot_product_attention(y + 1, q, q, attn_mask=mask)

    both = Twin(function, splitting_ops=None, attention_support=None)
    for _ in range(3):
        both(rows(4), torch.ones(4, 4, dtype=torch.bool))


# --- sizes ------------------------------------------------------------------------------------


def dynamic_rows(how: str, n: int) -> torch.Tensor:
    x = rows(n)
    if how == "marked":
        torch._dynamo.maybe_mark_dynamic(x, 0)
    elif how == "unbacked":
        torch._dynamo.decorators.mark_unbacked(x, 0)
    return x


@GRAPH_MODES
@pytest.mark.parametrize("how", ["automatic", "marked", "unbacked", "dynamic", "static"])
def test_sizes_one_and_more_under_every_kind_of_dynamic_shape(mode, how):
    both = Twin(
        toy_model(),
        cudagraph_mode=mode,
        dynamic={"dynamic": True, "static": False}.get(how),
        cudagraph_capture_sizes=[1, 2, 4],
    )
    for n in (1, 2, 4, 1) * 3:
        both(dynamic_rows(how, n))


def test_unbacked_sizes_of_inputs_are_captured():
    run = compiled(toy_model(), cudagraph_mode="FULL", cudagraph_capture_sizes=[2, 4])
    with torch.no_grad():
        for n in (2, 4, 2, 4):
            run(dynamic_rows("unbacked", n))
    assert counts(stats(run), "replays") == {FULL: 2}


def test_fixed_sizes_recompile_and_stay_right():
    both = Twin(toy_model(), cudagraph_mode="FULL", dynamic=False, cudagraph_capture_sizes=[4, 7])
    for n in (4, 7, 4, 7, 4, 7):
        both(rows(n))
    assert both.stats.graphs == 2
    assert counts(both.stats, "replays") == {FULL: 4}


def test_a_first_call_with_one_row_then_five():
    both = Twin(toy_model(), cudagraph_mode="PIECEWISE", cudagraph_capture_sizes=[1, 5])
    for n in (1, 5, 1, 5, 1, 5):
        both(rows(n))
    assert both.stats.total("replays") > 0


@GRAPH_MODES
def test_a_model_that_branches_on_its_size(mode):
    def function(x: torch.Tensor) -> torch.Tensor:
        return attn_new(x * 2) + 1 if x.shape[0] > 8 else attn_new(x * 3) - 1

    both = Twin(function, cudagraph_mode=mode, dynamic=True)
    for n in (4, 16, 4, 16, 8, 24):
        both(rows(n))


def test_no_token_and_one_above_the_maximum():
    both = Twin(toy_model(), cudagraph_mode="FULL", cudagraph_capture_sizes=[4], dynamic=True)
    for n in (0, 5, 0, 5, 4, 4):
        both(rows(n))
    assert counts(both.stats, "steps") == {NONE: 4, FULL: 2}


@pytest.mark.parametrize("maximum", [42, 257, 300])
def test_the_maximum_is_captured(maximum):
    both = Twin(
        lambda x: attn_new(x * 2) + 1, cudagraph_mode="FULL", max_cudagraph_capture_size=maximum
    )
    for _ in range(2):
        both(rows(maximum))
    assert counts(both.stats, "captures") == {FULL: 1}


@pytest.mark.parametrize("num_reqs", [9, 10, 11, 12])
def test_batches_up_to_the_number_of_requests_have_a_graph(num_reqs):
    table = rows(16, 6)

    def function(ids: torch.Tensor) -> torch.Tensor:
        return attn_new(torch.nn.functional.embedding(ids.flatten(), table)) + 1

    both = Twin(
        function,
        cudagraph_mode="FULL_DECODE_ONLY",
        max_num_seqs=12,
        cudagraph_pad_inputs=True,
        dynamic=True,
    )
    for _ in range(2):
        both(torch.randint(0, 16, (num_reqs, 1)))
    assert counts(both.stats, "captures") == {FULL: 1}


def test_a_size_that_is_returned_is_the_calls_own():
    both = Twin(lambda x: (attn_new(x * 2), x.shape[0]), cudagraph_mode="FULL", dynamic=True)
    for n in (8, 4, 2, 4, 8, 2):
        assert both(rows(n))[1] == n


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
def test_a_number_computed_from_a_size_is_returned(mode):
    both = Twin(lambda x: (attn_new(x * 2), x.shape[0] * 2), cudagraph_mode=mode, dynamic=True)
    for n in (8, 4, 8, 4):
        assert both(rows(n))[1] == 2 * n


# --- modes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "resolved"),
    [("PIECEWISE", "NONE"), ("FULL_AND_PIECEWISE", "FULL"), ("FULL", "FULL"), (None, "NONE")],
)
def test_nothing_split_out_lowers_the_mode_and_names_what_was_searched(asked, resolved, caplog):
    both = Twin(
        lambda x: torch.relu(x) * 2,
        cudagraph_mode=asked,
        splitting_ops=["my_library::attention", "toy::attn_new"],
    )
    for _ in range(3):
        both(rows(4))
    assert both.stats.mode_resolved == (resolved,)
    if asked in ("PIECEWISE", "FULL_AND_PIECEWISE"):
        assert "my_library::attention" in caplog.text
        assert len([r for r in caplog.records if "my_library" in r.message]) == 1


def test_the_default_mode_is_both_where_something_is_split_and_none_elsewhere():
    found = []
    for function in (lambda x: attn_new(x * 2), lambda x: x * 2):
        run = compiled(function)
        run(rows(4))
        found.append(stats(run).mode_resolved)
    assert found == [("FULL_AND_PIECEWISE",), ("NONE",)]


@pytest.mark.parametrize(
    ("levels", "resolved"),
    [
        ({"toy::attn_new": "ALWAYS", "toy::tally": "ALWAYS"}, "FULL"),
        ({"toy::attn_new": "ALWAYS", "toy::tally": "UNIFORM_BATCH"}, "FULL_AND_PIECEWISE"),
        ({"toy::attn_new": "ALWAYS"}, "PIECEWISE"),
        ({}, "PIECEWISE"),
    ],
    ids=["both", "one weaker", "one undeclared", "none declared"],
)
def test_the_weakest_attention_decides(levels, resolved):
    both = Twin(
        lambda x: torch.ops.toy.tally(attn_new(x * 2) + 1) + 1,
        cudagraph_mode="FULL",
        attention_support=levels,
    )
    for _ in range(3):
        both(rows(4))
    assert both.stats.mode_resolved == (resolved,)


def test_what_a_graph_froze_is_noticed_by_verify():
    """An op that reads a new Python list in every step, and was declared capturable."""
    lengths, replaying = [1.0], []

    def frozen(x: torch.Tensor) -> None:
        if replaying:
            x.mul_(0)  # the list of the capture, not of this step

    original = ReferenceGraph.replay

    def replay(graph: ReferenceGraph) -> None:
        replaying.append(True)
        try:
            original(graph)
        finally:
            replaying.clear()

    toy.hooks.append(frozen)
    try:
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(ReferenceGraph, "replay", replay)
            run = compiled(
                lambda x: torch.ops.toy.hook(x * lengths[0]) + 1,
                cudagraph_mode="FULL",
                debug="verify",
            )
            run(rows(4))
            with pytest.raises(CaptureError, match=r"verify: the whole graph replayed at FULL"):
                run(rows(4))
    finally:
        toy.hooks.clear()


@GRAPH_MODES
@pytest.mark.parametrize("variant", ["attn_out", "attn_pair", "attn_view", "attn_state"])
def test_verify_passes_what_is_right(mode, variant):
    both = Twin(toy_model(variant), cudagraph_mode=mode, debug="verify")
    for n in range(6):
        torch.full((4, WIDTH), float(n))  # memory that a later allocation may get
        both(rows(4))


@GRAPH_MODES
def test_addresses_pass_what_is_right(mode):
    both = Twin(toy_model("attn_out"), cudagraph_mode=mode, debug="addresses")
    for _ in range(4):
        both(rows(4))
    for model in (both.model, both.eager):
        model.head.weight.data = rows(WIDTH, seed=0)
    for _ in range(3):
        both(rows(4))


def test_a_python_flag_that_changes_the_control_flow():
    class Flagged(torch.nn.Module):
        flag = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return attn_new(x * 2) + 1 if self.flag else attn_new(x * 3) - 1

    both = Twin(Flagged(), cudagraph_mode="FULL")
    for flag in (False, True) * 3:
        both.model.flag = both.eager.flag = flag
        both(rows(4))
    assert counts(both.stats, "captures") == {FULL: 2}


# --- capture and replay -----------------------------------------------------------------------


def test_a_fresh_result_of_attention_is_read_where_the_next_piece_expects_it():
    """The results of attention are kept, so that none of them can lie where another lay."""
    kept: list[torch.Tensor] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.ops.toy.hook(x * 2) + 1
        return x

    toy.hooks.append(lambda x: kept.append(torch.empty_like(x)))
    try:
        run = compiled(function, cudagraph_mode="PIECEWISE")
        for _ in range(5):
            x = rows(4)
            torch.testing.assert_close(run(x), ((x * 2 + 1) * 2 + 1) * 2 + 1)
    finally:
        toy.hooks.clear()


def test_an_op_whose_workspace_grows_with_the_size():
    workspace = [torch.empty(0)]

    def grow(x: torch.Tensor) -> None:
        if workspace[0].numel() < x.numel():
            workspace[0] = torch.empty(x.numel())
        workspace[0][: x.numel()].copy_(x.flatten())

    toy.hooks.append(grow)
    try:
        both = Twin(lambda x: torch.ops.toy.hook(x * 2) + 1, cudagraph_mode="FULL", dynamic=True)
        for n in (2, 4, 8, 16, 2, 8, 16, 4, 2):
            both(rows(n))
    finally:
        toy.hooks.clear()
    assert both.stats.total("replays") > 0


@pytest.mark.parametrize("backend", ["cudagraph_modes", "inductor"])
@GRAPH_MODES
def test_a_compiled_helper_inside_the_model_makes_no_graph_inside_a_graph(mode, backend, caplog):
    def helper(x: torch.Tensor) -> torch.Tensor:
        return attn_new(x * 3) + 1

    inner = (
        compiled(helper, cudagraph_mode="FULL")
        if backend == "cudagraph_modes"
        else torch.compile(helper, mode="reduce-overhead")
    )
    met: list[torch.Tensor] = []
    toy.hooks.append(lambda x: met.append(inner(x)))
    try:
        run = compiled(lambda x: torch.ops.toy.hook(x * 2) + 1, cudagraph_mode=mode)
        for _ in range(4):
            x = rows(4)
            torch.testing.assert_close(run(x), x * 2 + 1)
            torch.testing.assert_close(met[-1], helper(x * 2))
    finally:
        toy.hooks.clear()
    assert counts(stats(run), "captures") == {FULL: 1} if mode == "FULL" else {PIECEWISE: 2}
    if backend == "cudagraph_modes":
        assert stats(inner).total("captures") == 0
        assert len([r for r in caplog.records if "inside another" in r.message]) == 1


def test_a_compiled_helper_that_dynamo_inlines():
    inner = compiled(lambda x: attn_new(x * 3) + 1, cudagraph_mode="FULL")
    both = Twin(lambda x: inner(torch.ops.toy.tally(x * 2)) + 1, cudagraph_mode="FULL")
    for _ in range(4):
        both(rows(4))


# --- counts told beforehand -------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [True, False], ids=["free", "fixed"])
@pytest.mark.parametrize(
    ("mode", "num_free", "num_fixed"),
    [
        ("NONE", 0, 0),
        ("PIECEWISE", 3 * 4, 4),
        ("FULL", 3, 1),
        ("FULL_DECODE_ONLY", 3, 0),
        ("FULL_AND_PIECEWISE", 3 + 3 * 4, 4),
    ],
)
def test_the_number_of_graphs_is_known_before_any_is_captured(
    mode, num_free, num_fixed, dynamic, caplog
):
    """Three sizes and four pieces; a graph of fixed sizes serves the size that it was made for."""
    num_graphs = num_free if dynamic else num_fixed
    options = toy.toy_options(cudagraph_mode=mode, cudagraph_capture_sizes=[2, 4, 8])
    model = toy_model(num_layers=3)
    graph, example_inputs = toy.dynamo_call(model, rows(4), dynamic=dynamic)
    with torch.no_grad():
        plan = plan_graph(graph, example_inputs, CompilationConfig.from_options(options))
    assert plan.num_graphs == num_graphs
    with caplog.at_level(logging.INFO, "compile_backend"), torch.no_grad():
        compiled(model, dynamic=dynamic, **options)(rows(4))
    assert f"{num_graphs} graphs planned" in caplog.text


def test_pieces_without_work_are_not_planned():
    options = toy.toy_options(cudagraph_mode="PIECEWISE", cudagraph_capture_sizes=[4])
    graph, example_inputs = toy.dynamo_call(lambda x: (attn_new(x),), rows(4))
    with torch.no_grad():
        plan = plan_graph(graph, example_inputs, CompilationConfig.from_options(options))
    assert plan.num_graphs == 0


@pytest.mark.parametrize("changed", ["constant", "closure", "option"])
def test_a_change_recompiles(changed):
    def scaled(factor: float) -> Any:
        return lambda x: attn_new(x * factor) * factor

    if changed == "constant":
        functions = [lambda x: attn_new(x * 2.0) * 2.0, lambda x: attn_new(x * 3.0) * 3.0]
    else:
        functions = [scaled(2.0), scaled(3.0 if changed == "closure" else 2.0)]
    sizes = [[4], [8]] if changed == "option" else [[4], [4]]
    for function, capture_sizes in zip(functions, sizes, strict=True):
        both = Twin(function, cudagraph_mode="FULL", cudagraph_capture_sizes=capture_sizes)
        for _ in range(2):
            both(rows(4))
        assert both.stats.compiles > 0
        if changed != "closure":
            assert both.stats.total("captures") == (1 if capture_sizes == [4] else 0)
