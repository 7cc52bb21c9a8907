"""Pieces compiled for some numbers of tokens: what is compiled, what runs, and what it assumes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch._inductor.custom_graph_pass import CustomGraphPass
from toy import (
    FULL,
    NONE,
    PIECEWISE,
    WIDTH,
    Twin,
    compiled,
    counts,
    dynamo_graph,
    rows,
    toy_model,
)

from compile_backend import BatchDescriptor, explain, set_forward_context, stats
from compile_backend.cache import SIZE_VARIABLE, ArtefactCache
from compile_backend.errors import ConfigError
from compile_backend.once import WarnOnce
from compile_backend.op_names import SplittingOps
from compile_backend.piece_compiler import PieceCompiler
from compile_backend.pipeline import prepare_for_split
from compile_backend.runner import GraphModelRunner
from compile_backend.runner_batch import Batch
from compile_backend.sizes import TokenRange
from compile_backend.specialise import Specialisations, TokenDimension, choosing
from compile_backend.split import split_graph
from compile_backend.step_inputs import Dim, InputSpec

W = rows(WIDTH, seed=0).double() / 4


def function(x: torch.Tensor, w: torch.Tensor = W) -> torch.Tensor:
    """Two equal pieces of one product each, which no C++ is compiled for."""
    return torch.ops.toy.attn_new(x @ w) @ w


class Transposing(CustomGraphPass):
    """Marks what is compiled under it: products are those with the transposed weight."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
            x, w = node.args
            with graph.inserting_before(node):
                turned = graph.call_function(torch.ops.aten.permute.default, (w, [1, 0]))
            turned.meta["val"] = w.meta["val"].permute(1, 0)
            node.args = (x, turned)

    def uuid(self) -> str:
        return "transposing"


class Seen(CustomGraphPass):
    """Notes the sizes of what is compiled under it."""

    def __init__(self) -> None:
        self.num_rows: list[int | str] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        (product,) = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
        size = product.meta["val"].shape[0]
        if isinstance(size, int):
            self.num_rows.append(size)
        else:
            bounds = size.node.shape_env.bound_sympy(size.node.expr)
            self.num_rows.append(f"{bounds.lower}..{bounds.upper}")

    def uuid(self) -> str:
        return f"seen {id(self)}"


def inputs_of(piece: Any) -> list[Any]:
    return [n.meta["example_value"] for n in piece.module.graph.find_nodes(op="placeholder")]


MARKED = {"post_grad_custom_post_pass": Transposing()}


def tokens(num_tokens: int) -> torch.Tensor:
    """Rows of which only the number is free."""
    x = rows(num_tokens).double()
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


def specialised(run: Any = function, **options: Any) -> Any:
    options = {"cudagraph_capture_sizes": [2, 4, 8], "disable_cache": True, **options}
    return compiled(run, piece_compiler="inductor", **options)


def is_marked(run: Any, x: torch.Tensor) -> bool:
    """Whether a call of `function` ran the marked code; it ran one or the other."""
    with torch.no_grad():
        result = run(x)
    marked = torch.allclose(result, function(x, W.t()))
    assert marked != torch.allclose(result, function(x))
    return marked


# --- what a call takes ------------------------------------------------------------------------


@given(
    st.sets(st.integers(1, 40)),
    st.sets(st.integers(1, 40)).map(sorted),
    st.integers(1, 3),
    st.integers(0, 45),
)
def test_the_very_size_goes_before_its_range_and_that_before_all_sizes(listed, ends, scale, size):
    ranges = list(zip((1, *(end + 1 for end in ends)), ends, strict=False))
    special = [(n, n, lambda _, n=n: [n]) for n in sorted(listed)]
    special += [(*each, lambda _, each=each: [each]) for each in ranges]
    dimension = TokenDimension("s", position=1, axis=None, scale=scale, num_tokens=1)
    call = choosing(dimension, lambda _: ["all"], special)
    fitting = [each for each in ranges if each[0] <= size <= each[1]]
    expected = size if size in listed else fitting[0] if fitting else "all"
    for _ in range(2):
        assert call([None, size * scale]) == [expected]


def test_the_size_of_a_tensor_tells_as_well():
    dimension = TokenDimension("s", position=0, axis=1, scale=1, num_tokens=1)
    call = choosing(dimension, lambda _: ["all"], [(4, 4, lambda _: [4])])
    assert [call([rows(2, n)]) for n in (3, 4)] == [["all"], [4]]


def test_without_ranges_the_code_for_all_sizes_is_called_directly():
    def call(inputs: Any) -> Any:
        return inputs

    assert choosing(TokenDimension("s", 0, None, 1, 1), call, []) is call
    assert Specialisations().dimension_in(torch.fx.GraphModule({}, torch.fx.Graph())) is None


# --- what is compiled -------------------------------------------------------------------------


def test_each_distinct_piece_is_compiled_once_for_each_range_that_can_occur():
    seen = Seen()
    run = specialised(
        compile_sizes=[2, 8, 100],
        compile_ranges_endpoints=[1, 2, 16, 64],
        inductor_compile_config={"post_grad_custom_post_pass": seen},
    )
    run(tokens(5))
    report = stats(run)
    # The range 1 is no size of this graph, and the range 2 is compiled by itself.
    assert seen.num_rows == ["2..int_oo", 2, 8, 100, "3..16", "17..64"]
    assert (report.pieces, report.compiles, report.loads) == (2, 6, 0)


def test_every_capture_size_is_one_word():
    seen = Seen()
    run = specialised(
        compile_sizes=["cudagraph_capture_sizes", 9],
        inductor_compile_config={"post_grad_custom_post_pass": seen},
    )
    run(tokens(5))
    assert seen.num_rows == ["2..int_oo", 2, 4, 8, 9]


def test_every_capture_size_is_none_where_nothing_is_captured():
    run = specialised(compile_sizes=["cudagraph_capture_sizes"], cudagraph_mode="NONE")
    run(tokens(5))
    assert stats(run).compiles == 1


def test_pieces_that_do_not_depend_on_the_number_of_tokens_are_compiled_once():
    def run(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        hidden = x @ W
        mixed = torch.ops.toy.attn_new(other @ W)
        return hidden @ torch.ops.toy.attn_new(mixed @ W)

    both = Twin(run, compile_with=specialised, compile_sizes=[4], compile_ranges_endpoints=[16])
    for n in (5, 4, 30):
        both(tokens(n), W)
    # The first and the last of three pieces see how many tokens there are.
    assert (both.stats.graphs, both.stats.pieces, both.stats.compiles) == (1, 3, 2 * 3 + 1)


def test_a_graph_of_one_size_is_compiled_once_and_takes_the_settings_of_its_size():
    run = specialised(
        compile_sizes=[1, 4], cudagraph_capture_sizes=[1, 4], compile_sizes_config=MARKED
    )
    assert not is_marked(run, rows(3).double())
    assert stats(run).compiles == 1
    assert is_marked(run, rows(1).double())
    assert stats(run).compiles == 2


def test_settings_of_sizes_reach_the_compiler():
    run = specialised(compile_sizes=[4], compile_sizes_config={"no_such_setting": 1})
    with pytest.raises(Exception, match="no_such_setting"):
        run(tokens(5))


def test_autotuned_sizes_compute_the_same():
    both = Twin(
        function,
        compile_with=specialised,
        compile_sizes=[4],
        compile_sizes_config={"max_autotune": True},
    )
    for n in (5, 4, 4, 4):
        both(tokens(n))


# --- what runs --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
def test_calls_and_captures_take_the_code_of_their_size(mode):
    run = specialised(compile_sizes=[4], compile_sizes_config=MARKED, cudagraph_mode=mode)
    for n in (5, 4, 8, 4, 4, 4, 8, 8):  # runs, warms up, is captured, replays
        assert is_marked(run, tokens(n)) == (n == 4)
    report = stats(run)
    assert report.graphs == 1
    if mode != "NONE":
        at, per_key = {"PIECEWISE": (PIECEWISE, 2), "FULL": (FULL, 1)}[mode]
        assert counts(report, "captures") == {at: 2 * per_key}


def test_a_padded_call_takes_the_code_of_what_it_is_padded_to():
    def independent(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.toy.tally(x @ W) @ W

    run = specialised(
        independent,
        compile_sizes=[4],
        compile_sizes_config=MARKED,
        cudagraph_mode="FULL",
        cudagraph_pad_inputs=True,
    )
    with torch.no_grad():
        for n, w in ((7, W), (3, W.t()), (3, W.t()), (3, W.t())):
            x = tokens(n)
            torch.testing.assert_close(run(x), (x @ w + 1) @ w)
    assert stats(run).total("padding") == 1 + 3


def test_a_runner_pads_to_the_code_of_its_keys():
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.toy.tally(x @ W) @ W

    options = {
        "cudagraph_mode": "PIECEWISE",
        "cudagraph_capture_sizes": [2, 4, 8],
        "compile_sizes": [4],
        "compile_sizes_config": MARKED,
        "splitting_ops": ["toy::tally"],
        "disable_cache": True,
    }
    runner = GraphModelRunner(
        torch.compile(Model().eval(), backend="cudagraph_modes", options=options),
        options,
        input_spec=[InputSpec("x", (Dim.NUM_TOKENS, WIDTH), torch.float64)],
        output_shape=(Dim.NUM_TOKENS,),
        max_num_seqs=8,
        max_num_batched_tokens=16,
        device="cpu",
    )
    runner.capture(progress=False)
    for n in (2, 3, 4, 5, 8, 9):
        x, w = rows(n).double(), W.t() if n in (3, 4) else W
        result = runner.run(Batch(query_lens=[n], inputs={"x": x}))
        torch.testing.assert_close(result, (x @ w + 1) @ w)


def test_an_engine_tells_how_many_tokens_there_are():
    seen = Seen()
    run = specialised(
        compile_sizes=[8],
        compile_sizes_config=MARKED,
        inductor_compile_config={"post_grad_custom_pre_pass": seen},
    )
    for num_reqs in (3, 4, 2):
        with set_forward_context(batch_descriptor=BatchDescriptor(2 * num_reqs, num_reqs)):
            assert is_marked(run, tokens(num_reqs)) == (num_reqs == 4)
    assert seen.num_rows == ["2..int_oo", 4]


# --- what is right, and what is assumed -------------------------------------------------------

ENDS = st.sets(st.integers(1, 20), max_size=3).map(sorted)


@given(st.sets(st.integers(1, 20), max_size=2).map(sorted), ENDS, st.integers(2, 25))
@example([2, 20], [1, 2, 19], 2)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
def test_results_are_those_of_eager_at_and_around_every_end_without_recompiling(
    listed, ends, first
):
    torch._dynamo.reset()
    run = specialised(compile_sizes=listed, compile_ranges_endpoints=ends, cudagraph_mode="NONE")
    around = {first, *(n + step for n in (*listed, *ends) for step in (-1, 0, 1))}
    sizes = [first, *sorted(n for n in around if n >= 2)]
    # Two products of WIDTH terms each, and a mean of as many rows between them.
    for n in sizes:
        x = tokens(n)
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=n != first):
            error = (run(x) - function(x)).abs().max().item()
        bound = (2 * WIDTH + n) * torch.finfo(torch.float64).eps
        bound *= (x.abs() @ W.abs() @ W.abs()).max().item()
        assert error <= bound
    assert stats(run).graphs == 1


def test_kernels_writes_views_and_sizes_are_right_in_every_range():
    def run(x: torch.Tensor, y: torch.Tensor) -> Any:
        x[1:].mul_(2)
        z = torch.ops.toy.attn_new(x.sin()) + x.shape[0]
        y.add_(z.sum(0))
        return z, y.view(-1), x, 3 * x.shape[0]

    both = Twin(
        run,
        compile_with=specialised,
        cudagraph_mode="PIECEWISE",
        compile_sizes=[4],
        compile_ranges_endpoints=[6],
    )
    for n in (5, 4, 4, 4, 3, 6, 7, 8, 8, 8, 30):
        both(tokens(n), tokens(n))
    assert both.stats.graphs == 1
    assert both.stats.compiles == 2 * 3


def test_dimensions_marked_with_bounds_keep_them():
    seen = Seen()
    run = specialised(
        compile_sizes=[3, 100],
        compile_ranges_endpoints=[8],
        cudagraph_mode="NONE",
        inductor_compile_config={"post_grad_custom_post_pass": seen},
    )
    x = rows(10 + 2).double()
    torch._dynamo.mark_dynamic(x, 0, min=4, max=64)
    with torch.no_grad():
        torch.testing.assert_close(run(x), function(x))
    assert seen.num_rows == ["4..64", "4..8"]


def test_no_rows_and_one_row_run_as_ever():
    both = Twin(
        function, compile_with=specialised, compile_sizes=[2], compile_ranges_endpoints=[1, 4]
    )
    for n in (5, 1, 0, 2, 1, 0, 3):
        both(tokens(n))


def test_further_sizes_stay_free():
    def run(x: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
        return torch.ops.toy.attn_new(x @ W)[picked] @ W

    both = Twin(
        run,
        compile_with=specialised,
        dynamic=True,
        compile_sizes=[4],
        compile_ranges_endpoints=[6],
        cudagraph_mode="PIECEWISE",
    )
    for n in (5, 4, 6, 9):
        for num_picked in (3, 7, 2):
            both(tokens(n), torch.randint(0, n, (num_picked,)))
    assert (both.stats.graphs, both.stats.compiles) == (1, 6)


def test_requests_of_several_tokens_count_by_their_tokens():
    seen = Seen()
    table = rows(16, seed=1).double()

    def run(ids: torch.Tensor, table: torch.Tensor = table) -> torch.Tensor:
        x = torch.nn.functional.embedding(ids.flatten(), table)
        return torch.ops.toy.attn_new(x @ W) @ W

    both = Twin(
        run,
        compile_with=specialised,
        num_speculative_tokens=2,
        cudagraph_capture_sizes=[6, 12],
        compile_sizes=["cudagraph_capture_sizes", 15, 16],
        compile_ranges_endpoints=[5, 11, 30],
        inductor_compile_config={"post_grad_custom_post_pass": seen},
    )
    for num_reqs in (3, 2, 4, 5, 6, 10, 11):
        ids = torch.randint(0, 16, (num_reqs, 3))
        torch._dynamo.maybe_mark_dynamic(ids, 0)
        both(ids)
    # 16 tokens are no whole requests, 1 to 5 no more than one, and 6 to 11 are 6 and 9.
    ranges = ("6..int_oo", 6, 12, 15, "6..9", "12..30")
    assert seen.num_rows == [rows for rows in ranges for _ in range(2)]  # by piece
    assert both.stats.graphs == 1


class Asking(CustomGraphPass):
    """Assumes something of the number of rows of all but the first graph that it sees."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.num_graphs += 1
        (product,) = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
        if self.num_graphs > 1:
            assert bool(product.meta["val"].shape[0] > 3)

    def uuid(self) -> str:
        return "asking"


def test_code_that_would_not_hold_for_all_of_its_range_is_not_taken(caplog):
    run = specialised(
        compile_ranges_endpoints=[16],
        cudagraph_mode="NONE",
        inductor_compile_config={"post_grad_custom_post_pass": Asking()},
    )
    with caplog.at_level(logging.WARNING), torch.no_grad():
        for n in (20, 9, 3, 2):
            x = tokens(n)
            torch.testing.assert_close(run(x), function(x))
    assert "piece_0 runs as compiled for all sizes at 2-16 tokens" in caplog.text
    assert (stats(run).graphs, stats(run).compiles) == (1, 2)


@pytest.mark.parametrize("size", [2, 4])
def test_a_piece_that_is_told_the_number_of_tokens_has_code_for_some(caplog, size):
    """Its views ask for that number, which is an integer among the inputs of the second piece."""

    def viewing(x: torch.Tensor, w: torch.Tensor = W) -> torch.Tensor:
        num_tokens = x.shape[0]
        heads = torch.ops.toy.attn_new((x @ w).view(num_tokens, 2, WIDTH // 2))
        return heads.reshape(num_tokens, -1) @ w

    run = specialised(
        viewing, compile_sizes=[size], compile_sizes_config=MARKED, cudagraph_mode="NONE"
    )
    with caplog.at_level(logging.WARNING), torch.no_grad():
        for n, w in ((6, W), (size, W.t()), (6, W)):
            x = tokens(n)
            torch.testing.assert_close(run(x), viewing(x, w))
    assert "runs as compiled for all sizes" not in caplog.text
    assert (stats(run).graphs, stats(run).compiles) == (1, 4)


# --- what cannot be ---------------------------------------------------------------------------


def test_a_size_that_padding_changes_is_refused_with_those_that_stay():
    run = specialised(compile_sizes=[3], cudagraph_mode="PIECEWISE")
    with pytest.raises(
        ConfigError, match=r"holds 3, which is padded to 4; use sizes among \(2, 4"
    ):
        run(tokens(5))
    with pytest.raises(ConfigError, match="padded to 4"):
        explain(
            function,
            tokens(5),
            options={
                "compile_sizes": [3],
                "cudagraph_capture_sizes": [2, 4, 8],
                "splitting_ops": ["toy::attn_new"],
            },
        )


@pytest.mark.parametrize(
    ("mode", "size"), [("NONE", 3), ("FULL_DECODE_ONLY", 3), ("FULL_AND_PIECEWISE", 9)]
)
def test_sizes_of_batches_that_run_without_a_graph_may_be_listed(mode, size):
    run = specialised(compile_sizes=[size], compile_sizes_config=MARKED, cudagraph_mode=mode)
    assert [is_marked(run, tokens(n)) for n in (5, size)] == [False, True]
    assert counts(stats(run), "steps") == {NONE: 2}


def needing_gradients() -> Any:
    weight = torch.nn.Parameter(W.clone())
    return lambda x: x @ weight


@pytest.mark.parametrize(
    ("run", "options", "reason"),
    [
        (function, {"piece_compiler": "eager"}, "pieces are not compiled"),
        (needing_gradients(), {}, "needs gradients"),
        (function, {"describe_batch": lambda _: BatchDescriptor(1, 1)}, "one free size"),
        (lambda x: (W @ W, x @ W), {}, "one free size"),
    ],
    ids=["eager", "gradients", "described otherwise", "fixed"],
)
def test_sizes_that_cannot_be_compiled_for_are_told(run, options, reason, caplog):
    options = {"piece_compiler": "inductor", "cudagraph_mode": "NONE", **options}
    call = compiled(run, compile_sizes=[4], disable_cache=True, **options)
    with caplog.at_level(logging.WARNING):
        call(tokens(5))
    assert "compile_ranges_endpoints do nothing: " in caplog.text
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("run", "args", "reason"),
    [
        (
            lambda x: torch.ops.toy.attn_new(x @ W)[x.sum(1) > 0] @ W,
            [tokens(5)],
            "has a size that only the data tells",
        ),
        (
            lambda x, y: torch.ops.toy.attn_new(x @ W + y) @ W,
            [*rows(5, 2 * WIDTH).double().split(WIDTH, dim=1)],
            "takes a tensor that shares memory with another input",
        ),
    ],
    ids=["data", "memory"],
)
def test_pieces_that_cannot_be_made_for_other_sizes_are_told(run, args, reason, caplog):
    for tensor in args:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    with (
        caplog.at_level(logging.WARNING),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        torch.no_grad(),
    ):
        call = specialised(run, compile_sizes=[4], cudagraph_mode="NONE")
        torch.testing.assert_close(call(*args), run(*args))
    assert f"is compiled for all sizes at once: it {reason}" in caplog.text


# --- on disk ----------------------------------------------------------------------------------


def test_artefacts_are_kept_by_the_sizes_that_they_are_for(tmp_path, monkeypatch):
    monkeypatch.setenv(SIZE_VARIABLE, "100")

    def compiles_and_loads(**options: Any) -> tuple[int, int]:
        torch._dynamo.reset()
        both = Twin(
            function,
            compile_with=specialised,
            disable_cache=False,
            cache_dir=str(tmp_path),
            **options,
        )
        for n in (5, 4, 2, 16, 17):
            both(tokens(n))
        return both.stats.compiles, both.stats.loads

    assert compiles_and_loads() == (1, 0)
    assert compiles_and_loads(compile_sizes=[4], compile_ranges_endpoints=[16]) == (2, 1)
    assert compiles_and_loads(compile_sizes=[4], compile_ranges_endpoints=[16]) == (0, 3)
    assert compiles_and_loads(compile_ranges_endpoints=[8, 16]) == (2, 1)
    tuned = {"compile_sizes_config": {"max_autotune": True}}
    assert compiles_and_loads(compile_sizes=[4], compile_ranges_endpoints=[16], **tuned) == (1, 2)


def test_artefacts_are_kept_by_which_size_is_narrowed(tmp_path):
    """One piece with two free sizes, of which one graph counts tokens by one, one by the other."""
    x = rows(6, 5).double()
    graph = dynamo_graph(lambda x: torch.mm(x, x.t()) * 2, x, dynamic=True)
    prepare_for_split(graph)
    (piece,) = split_graph(graph, SplittingOps(())).pieces
    sizes = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    symbols = {size.node.hint: size.node.expr for size in sizes if isinstance(size, torch.SymInt)}
    for num_rows, num_columns in ((6, 5), (5, 6)):  # listed is the number of rows, of columns
        compiler = PieceCompiler(
            "inductor",
            {},
            ArtefactCache(tmp_path, 2**20, WarnOnce()),
            Specialisations((TokenRange(6, 6, is_listed=True),), symbols[num_rows]),
        )
        with torch.no_grad():
            call = compiler.compile(piece).call
            for shape in ((6, 5), (num_rows, num_columns), (6, 6), (3, 7), (6, 9), (9, 6)):
                given = rows(*shape).double()
                free = {symbols[6]: shape[0], symbols[5]: shape[1]}
                values = [
                    free[value.node.expr] if isinstance(value, torch.SymInt) else given
                    for value in inputs_of(piece)
                ]
                torch.testing.assert_close(call(values)[0], given @ given.t() * 2)
        assert compiler.counts.compiles == (2 if num_rows == 6 else 1)


# --- explain ----------------------------------------------------------------------------------


def test_explain_tells_what_stats_will_count():
    options = {
        "cudagraph_capture_sizes": [2, 4, 8],
        "compile_sizes": [4, 100],
        "compile_ranges_endpoints": [1, 16],
        "splitting_ops": ["toy::attn_new"],
        "disable_cache": True,
    }
    told = explain(function, tokens(5), options=options)
    (piece,) = told.graphs[0].pieces
    assert piece.compiled_for == (
        TokenRange(4, 4, is_listed=True),
        TokenRange(100, 100, is_listed=True),
        TokenRange(2, 16),
    )
    assert "any, 4, 100, 2-16" in str(told)
    run = torch.compile(function, backend="cudagraph_modes", options=options)
    run(tokens(5))
    assert stats(run).compiles == told.num_compiles == 4


def test_explain_tells_why_a_piece_is_not_specialised():
    left, right = rows(5, 2 * WIDTH).split(WIDTH, dim=1)
    torch._dynamo.maybe_mark_dynamic(left, 0)
    torch._dynamo.maybe_mark_dynamic(right, 0)
    told = explain(torch.add, left, right, options={"compile_sizes": [4]})
    (piece,) = told.graphs[0].pieces
    assert piece.compiled_for == ()
    assert "shares memory" in str(piece.unspecialised)


def test_a_model_of_equal_layers_is_compiled_for_each_size_once():
    both = Twin(
        toy_model("attn_new", 6),
        compile_with=specialised,
        compile_sizes=[4],
        compile_ranges_endpoints=[16],
        cudagraph_mode="PIECEWISE",
        dynamic=True,
    )
    for n in (5, 4, 4, 4, 16, 17):
        both(rows(n))
    assert (both.stats.pieces, both.stats.compiles, both.stats.graphs) == (7, 2 * 3, 1)
    assert both.stats.total("captures", PIECEWISE) == 7
