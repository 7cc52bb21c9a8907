"""Passes that are asked for: which run, what they report, and what the cache makes of them."""

import logging
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from toy import Twin, rows, toy_options

import compile_backend
from compile_backend.cache import SIZE_VARIABLE
from compile_backend.config import CompilationConfig, PassConfig
from compile_backend.errors import ConfigError
from compile_backend.explain import explain
from compile_backend.own_passes import OwnPass
from compile_backend.pipeline import (
    passes_at_first,
    passes_before_split,
    passes_of_flags,
    run_passes,
)

NOOP = {"pass_config": {"enable_noop": True}}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch.compiler.reset()


def idle_layers(x: torch.Tensor) -> torch.Tensor:
    """Two calls around a cut that change nothing."""
    x = torch.ops.toy.attn_new(x.relu().view(x.shape[0], toy.WIDTH) + 1)
    return torch.ops.toy.attn_new((x * 1).relu())


def doubled(graph: torch.fx.Graph) -> int:
    """A pass of one's own: what is added is added twice."""
    found = [node for node in graph.nodes if node.target is operator.add]
    for node in found:
        with graph.inserting_after(node):
            again = graph.call_function(torch.add, (node, 1))
        node.replace_all_uses_with(again)
        again.args = (node, 1)
    return len(found)


def result_of(function: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = toy.compiled(function, **options)(x)
    return result


def report_of(function: Any, **options: Any) -> Any:
    twin = Twin(function, **options)
    twin(rows(4))
    return twin.stats


def test_names_and_identities_are_distinct() -> None:
    of_flags = [each for passes in passes_of_flags().values() for each in passes]
    passes = (*passes_at_first(), *passes_before_split(), *of_flags)
    assert len({graph_pass.name for graph_pass in passes}) == len(passes)
    assert len({graph_pass.uuid() for graph_pass in passes}) == len(passes)


def test_passes_run_in_a_fixed_order_whatever_the_order_asked_for() -> None:
    graph = toy.dynamo_graph(idle_layers, rows(4))
    results = run_passes(graph, PassConfig(enable_noop=True), {"b": doubled, "a": doubled})
    names = [result.name for result in results]
    assert names == [
        "local_tensors",
        "noop",
        "b",
        "a",
        "decompose_sizes",
        "constant_tensors",
        "additive_mask",
        "index_writes",
    ]
    assert [result.asked_by for result in results[:4]] == [
        None,
        "enable_noop",
        "inductor_passes",
        "inductor_passes",
    ]


def test_counts_are_told_by_stats_and_explain() -> None:
    report = report_of(idle_layers, **NOOP)
    assert report.passes["noop"] == 2
    assert report.as_dict()["passes"]["noop"] == 2
    assert "noop" not in report_of(idle_layers).passes
    explained = explain(idle_layers, rows(4), options=toy_options(**NOOP))
    assert explained.graphs[0].passes["noop"] == 2
    assert "noop: 2" in str(explained)
    assert not any("changed nothing" in note for note in explained.graphs[0].notes)


@pytest.mark.parametrize("mode", toy.MODES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_every_mode_gives_what_eager_gives(mode: Any, dynamic: bool) -> None:
    twin = Twin(idle_layers, cudagraph_mode=mode, dynamic=dynamic, **NOOP)
    for _ in range(3):
        twin(rows(4))
        twin(rows(6))
    assert twin.stats.passes["noop"] >= 2


def test_a_pass_that_matched_nothing_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    def busy(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.toy.attn_new(x.relu())

    note = "enable_noop was asked for and changed nothing in this graph"
    with caplog.at_level(logging.WARNING):
        twin = Twin(busy, dynamic=False, **NOOP)
        twin(rows(4))
        twin(rows(5))
    assert [record.getMessage() for record in caplog.records].count(note) == 1
    (graph,) = explain(busy, rows(4), options=toy_options(**NOOP)).graphs
    assert note in graph.notes
    (graph,) = explain(busy, rows(4), options=toy_options(inductor_passes={"it": doubled})).graphs
    assert "inductor_passes: it was asked for and changed nothing in this graph" in graph.notes


def test_graphs_before_and_after_are_logged_for_debugging(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.DEBUG, logger="compile_backend.pipeline"):
        report_of(idle_layers, **NOOP)
    (told,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("noop")]
    before, after = told.split("after:")
    assert before.startswith("noop: 2 places\nbefore:")
    assert "view" in before
    assert "view" not in after


# --- passes of one's own ----------------------------------------------------------------------


@pytest.mark.parametrize("entry", [doubled, f"{__name__}:doubled"])
@pytest.mark.parametrize("mode", toy.MODES)
def test_a_pass_of_ones_own_runs_before_the_split(entry: Any, mode: Any) -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        x = torch.ops.toy.attn_new(x.relu().view(x.shape[0], toy.WIDTH) + 1 + 1)
        return torch.ops.toy.attn_new((x * 1).relu())

    x = rows(4)
    expected = twice(x)
    compiled = toy.compiled(
        idle_layers, dynamic=True, cudagraph_mode=mode, inductor_passes={"doubled": entry}
    )
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), expected)
    report = compile_backend.stats(compiled)
    assert report.passes["doubled"] == 1
    assert report.eager_sections == 2


def test_a_pass_without_a_count_counts_as_one_place_or_none() -> None:
    def counting_not(graph: torch.fx.Graph) -> None:
        doubled(graph)

    for function, changed in ((idle_layers, 1), (torch.ops.toy.attn_new, 0)):
        graph = toy.dynamo_graph(lambda x, f=function: f(x), rows(4))
        results = run_passes(graph, PassConfig(), {"mine": counting_not})
        assert [result.changed for result in results if result.name == "mine"] == [changed]


def failing(graph: torch.fx.Graph) -> int:
    raise ValueError("no such op")


def breaking(graph: torch.fx.Graph) -> int:
    last = list(graph.nodes)[-1].prev
    last.append(next(node for node in graph.nodes if node.target is operator.add))
    return 1


def adding_nonsense(graph: torch.fx.Graph) -> int:
    node = next(node for node in graph.nodes if node.target is operator.add)
    with graph.inserting_after(node):
        graph.call_function(torch.matmul, (node, 1))
    return 1


def taking_more(graph: torch.fx.Graph) -> int:
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.placeholder("more")
    return 1


def without_output(graph: torch.fx.Graph) -> int:
    (output,) = graph.find_nodes(op="output")
    graph.erase_node(output)
    return 1


def _returning(function: Any) -> Any:
    """A pass that has a graph return what `function` makes of the values returned until then."""

    def run(graph: torch.fx.Graph) -> int:
        (output,) = graph.find_nodes(op="output")
        with graph.inserting_before(output):
            output.args = (function(graph, *output.args[0]),)
        return 1

    return run


returning_halves = _returning(lambda graph, x: (graph.call_method("half", (x,)),))
returning_rows = _returning(
    lambda graph, x: (graph.call_function(operator.getitem, (x, slice(0, 2))),)
)
returning_less = _returning(lambda graph, x: ())
returning_more = _returning(lambda graph, x: (x, x))
returning_a_size = _returning(lambda graph, x: (graph.call_method("size", (x, 0)),))
returning_nothing = _returning(lambda graph, x: (None,))
returning_an_equal = _returning(lambda graph, x: (graph.call_method("clone", (x,)),))


class WithoutName:
    """A pass that nothing tells apart, since that fails."""

    def __call__(self, graph: torch.fx.Graph) -> int:
        return 0

    def uuid(self) -> str:
        raise RuntimeError("no name")


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (taking_more, "changed which inputs a graph takes"),
        (without_output, "took its output away"),
        (WithoutName(), "uuid() failed: RuntimeError: no name"),
        (failing, "failed on a graph: ValueError: no such op"),
        (breaking, "failed on a graph"),
        (adding_nonsense, "which cannot be called"),
        (lambda graph: "many", "returned 'many'"),
        (lambda graph: -1, "returned -1"),
        (lambda graph: True, "returned True"),
        ("no.such.module:name", "cannot be found: No module named"),
        (f"{__name__}:nowhere", "cannot be found"),
        (f"{__name__}:NOOP", "which cannot be called"),
        (f"{__name__}:failing", "failed on a graph: ValueError: no such op"),
        ("typing:Any", "names a class"),
        (returning_halves, "return float16 [4, 10] on cpu instead of float32 [4, 10] on cpu as"),
        (returning_rows, "return float32 [2, 10] on cpu instead of float32 [4, 10] on cpu"),
        (returning_less, "has the graph return 0 values instead of 1"),
        (returning_more, "has the graph return 2 values instead of 1"),
        (returning_a_size, "has the graph return int instead of float32 [4, 10] on cpu"),
        (returning_nothing, "has the graph return NoneType instead of float32 [4, 10] on cpu"),
    ],
)
def test_a_pass_that_cannot_be_run_is_an_error(entry: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        result_of(idle_layers, rows(4), inductor_passes={"mine": entry})
    assert caught.value.option == "inductor_passes"
    assert problem in caught.value.problem
    assert "mine" in str(caught.value)


@pytest.mark.parametrize("entry", ["failing", "NOOP", "PassConfig", "nowhere"])
def test_a_pass_by_name_is_told_as_it_was_written(entry: str) -> None:
    written = {"mine": f"{__name__}:{entry}"}
    with pytest.raises(ConfigError) as caught:
        explain(idle_layers, rows(4), options=toy_options(inductor_passes=written))
    assert str(caught.value).startswith(f"inductor_passes={written} ")


def test_sizes_that_are_free_stay_free_and_need_not_be_the_same_objects() -> None:
    """What is returned may be made anew; a size that one call has is not that of all calls."""

    def run(function: Any) -> Any:
        return toy.compiled(idle_layers, dynamic=True, inductor_passes={"mine": function})

    first = slice(0, 4)
    four = _returning(lambda graph, x: (graph.call_function(operator.getitem, (x, first)),))
    x = rows(4)
    with torch.no_grad():
        torch.testing.assert_close(run(returning_an_equal)(x), idle_layers(x))
        with pytest.raises(ConfigError, match=r"return float32 \[.*, 10\] on cpu instead of"):
            run(four)(x)


def test_sizes_that_the_data_decides_are_taken_as_they_come() -> None:
    def found(graph: torch.fx.Graph) -> int:
        (node,) = graph.find_nodes(op="call_method", target="nonzero")
        with graph.inserting_after(node):
            again = graph.call_method("nonzero", node.args)
        node.replace_all_uses_with(again)
        graph.erase_node(node)
        return 1

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.toy.attn_new(x).nonzero()

    x = rows(4)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        result = result_of(function, x, inductor_passes={"mine": found})
    torch.testing.assert_close(result, function(x))


@pytest.mark.parametrize("name", ["", " "])
def test_a_pass_has_a_name(name: str) -> None:
    with pytest.raises(ConfigError, match="has a pass without a name; name it"):
        CompilationConfig(inductor_passes={name: doubled})


def test_a_name_that_is_taken_is_an_error() -> None:
    with pytest.raises(ConfigError, match="has the name of another pass"):
        result_of(idle_layers, rows(4), inductor_passes={"noop": doubled})


class Named:
    """A pass that says which version it is."""

    def __init__(self, version: str | None) -> None:
        self.version = version

    def __call__(self, graph: torch.fx.Graph) -> int:
        return doubled(graph)

    def uuid(self) -> str | None:
        return self.version


def test_what_tells_versions_of_a_pass_apart() -> None:
    assert OwnPass("a", Named("1")).uuid() == OwnPass("a", Named("1")).uuid()
    assert OwnPass("a", Named("1")).uuid() != OwnPass("a", Named("2")).uuid()
    assert OwnPass("a", doubled).uuid() == OwnPass("a", doubled).uuid() is not None
    assert OwnPass("a", doubled).uuid() != OwnPass("a", failing).uuid()
    places = 1
    for nothing_tells in (Named(None), lambda graph: places, lambda graph, n=1: n, print):
        assert OwnPass("a", nothing_tells).uuid() is None


# --- the cache --------------------------------------------------------------------------------


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(SIZE_VARIABLE, "100")
    return str(tmp_path / "cache")


def test_a_pass_that_is_switched_on_or_off_takes_effect_on_a_warm_cache(cache_dir: str) -> None:
    """Hard case K9: with the pass, without it, and with another version of it."""
    options: dict[str, Any] = {"piece_compiler": "inductor", "cache_dir": cache_dir}

    def plus_one(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    x = rows(4)
    for passes, expected, is_new in (
        ({}, x + 1, True),
        ({"mine": Named("1")}, x + 2, True),
        ({}, x + 1, False),
        ({"mine": Named("1")}, x + 2, False),
        ({"mine": Named("2")}, x + 2, True),
    ):
        torch.compiler.reset()
        compiled = toy.compiled(plus_one, dynamic=False, inductor_passes=passes, **options)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), expected)
        report = compile_backend.stats(compiled)
        assert (report.compiles, report.loads) == ((1, 0) if is_new else (0, 1))
        assert report.unstorable == 0


def test_nothing_is_kept_behind_a_pass_that_nothing_tells_from_others(cache_dir: str) -> None:
    for _ in range(2):
        torch.compiler.reset()
        compiled = toy.compiled(
            idle_layers,
            piece_compiler="inductor",
            cache_dir=cache_dir,
            inductor_passes={"mine": Named(None)},
        )
        with torch.no_grad():
            compiled(rows(4))
        report = compile_backend.stats(compiled)
        assert report.loads == 0
        assert report.unstorable == report.compiles > 0
