"""The benchmark suite on a CPU: what it runs, in which order, and what its results look like.

No figure is asserted: those of a CPU mean nothing.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import logging
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from rich.markdown import Markdown

from compile_backend.bench import first_call, plots
from compile_backend.bench.breakable import captured_with_breaks
from compile_backend.bench.by_hand import captured_by_hand
from compile_backend.bench.figures import cell, power, spread
from compile_backend.bench.growth import ON_CPU, ON_GPU, GrowthPlan, growth_results, powers
from compile_backend.bench.paged_batches import all_works, decode
from compile_backend.bench.paged_ways import on_paged_cache, step_outside_a_runner
from compile_backend.bench.request import (
    EAGER,
    MODES,
    OURS,
    PATHS,
    REDUCE_OVERHEAD,
    STATIC,
    TORCH_COMPILE,
    VARIANTS,
    BenchRequest,
    available_variants,
    default_shape,
)
from compile_backend.bench.results import Results, about
from compile_backend.bench.rounds import Clock, measure
from compile_backend.bench.shapes import BLOCK_SIZE, SHAPES, Shape, make_model
from compile_backend.bench.start_up import start_up_results
from compile_backend.bench.static_steps import FEWER_GUARDS, StaticBench, compiled_for
from compile_backend.bench.suite import CPU_NOTE, run_suite
from compile_backend.bench.watch import Silent, keeping
from compile_backend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("one_core")

PAGE = (Path(__file__).parent.parent / "docs" / "benchmarks.md").read_text(encoding="utf-8")
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
TINY = SHAPES["tiny"]
QUICK = {"piece_compiler": "eager"}


def request(**changes: Any) -> BenchRequest:
    asked = {"shape": TINY, "device": CPU, "options": QUICK, "num_rounds": 2, "num_steps": 2}
    return BenchRequest(**{**asked, **changes})


# --- figures and rounds ---


def test_spread_and_its_cell() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}
    assert cell(spread([3.0, 1.0, 2.0]), 1) == "2.0 (1.0..3.0)"


@pytest.mark.parametrize(
    ("ys", "expected"),
    [([2.0, 3.0, 8.0], 1.0), ([5.0, 5.0, 5.0], 0.0), ([1.0, 2.0, 16.0], 2.0), ([0.0, 1, 2], None)],
)
def test_power_of_growth(ys: list[float], expected: float | None) -> None:
    found = power([4, 8, 16], ys)
    assert found is None if expected is None else found == pytest.approx(expected)


def test_no_power_from_one_point() -> None:
    assert power([4], [1.0]) is None


@pytest.mark.parametrize(("in_a_row", "host"), [(False, "abab.."), (True, "aabbaabb..")])
def test_ways_are_interleaved(in_a_row: bool, host: str) -> None:
    """By rounds for the wall time, by steps for the host time; rewound before each half."""
    calls: list[str] = []
    ways = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = measure(
        ways,
        Clock(CPU),
        num_rounds=2,
        num_steps=2,
        in_a_row=in_a_row,
        before=lambda: calls.append("<"),
        advance=lambda: calls.append("."),
    )
    assert "".join(calls) == f"<aa.bb.<{host}" * 2
    assert all(len(each.wall_ms) == len(each.host_us) == 2 for each in times.values())


def test_a_failure_is_kept_and_the_rest_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    failures: dict[str, str] = {}
    with keeping(failures, "this"):
        raise RuntimeError("out of luck")
    assert failures == {"this": "RuntimeError: out of luck"}
    assert "this failed: RuntimeError: out of luck" in caplog.text


def test_what_cannot_be_asked_for_is_no_failure() -> None:
    with pytest.raises(ConfigError), keeping({}, "this"):
        raise ConfigError("strict", True, "is not met", "leave it out")


# --- what is asked for ---


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_rounds": 0}, "--rounds=0 measures nothing; use 1 or more"),
        ({"num_steps": 0}, "--steps=0 measures nothing"),
        ({"variants": ("eagre",)}, "--variants='eagre' is unknown; use some of eager, torch"),
        ({"variants": ()}, r"--variants=\(\) names nothing"),
        ({"modes": ("HALF",)}, "--modes='HALF' is unknown; use some of NONE, PIECEWISE"),
        ({"paths": ("dynamic",)}, "--paths='dynamic' is unknown; use some of static, paged"),
        ({"variants": ("by-hand",)}, "--variants='by-hand' needs a GPU"),
        ({"shape": SHAPES["8B"]}, "--shape='8B' is too large for a CPU; use one of smollm2, tiny"),
        (
            {"shape": SHAPES["smollm2"], "has_growth": True},
            "--shape='smollm2' has real weights, so its depth cannot grow",
        ),
        ({"options": {"cudagraph_mod": 1}}, "did you mean cudagraph_mode"),
    ],
)
def test_requests_that_cannot_be(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        request(**changes)


def test_what_is_left_out_is_told() -> None:
    names, left_out = available_variants(CPU)
    assert names == ("eager", "torch.compile", "ours")
    assert len(left_out) == len(VARIANTS) - len(names)
    assert left_out[0].startswith("reduce-overhead is left out: it needs a GPU; ")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    names, left_out = available_variants(GPU)
    assert "breakable" not in names
    assert "run `pip install breakable-cuda-graphs==0.1.0`" in left_out[0]


def test_shape_without_a_choice() -> None:
    assert default_shape(CPU).name == "tiny"
    assert default_shape(GPU).name == "0.6B"


# --- shapes and batches ---


@pytest.mark.parametrize(
    ("name", "expected"), [("0.6B", 0.6e9), ("llama-0.6B", 0.6e9), ("8B", 8.0e9), ("moe", 2.1e9)]
)
def test_shapes_are_as_large_as_they_say(name: str, expected: float) -> None:
    model = make_model(SHAPES[name], torch.device("meta"))
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
def test_steps_fit_the_cache(shape: Shape) -> None:
    assert len(all_works(shape)) == len(shape.decodes) + len(shape.prefills)
    for work in all_works(shape):
        attention = work.batch.attention
        table, longest = attention.block_table, attention.seq_lens.max()
        assert len(np.unique(table)) == table.size
        assert table.max() < shape.num_blocks
        assert table.shape[1] * BLOCK_SIZE >= longest
        assert longest <= shape.max_model_len
        assert work.num_tokens <= shape.max_num_tokens


def test_a_shape_with_other_layers() -> None:
    assert TINY.with_layers(7).num_layers == 7
    assert TINY.num_layers == 2


@pytest.mark.parametrize("plan", [ON_CPU, ON_GPU], ids=["cpu", "gpu"])
def test_growth_keeps_the_largest_size(plan: GrowthPlan) -> None:
    for number in plan.sizes:
        sizes = plan.capture_sizes(number)
        assert len(sizes) == number
        assert sizes[-1] == plan.largest_size
        assert sizes[0] > 0


# --- the suite ---


@pytest.fixture(scope="module")
def results() -> Results:
    """Both paths in all modes."""
    torch.compiler.reset()
    return run_suite(request(modes=MODES), Silent(), command="bench", notes=["a note"])


def check_times(row: dict[str, Any]) -> None:
    for name in ("wall_ms", "host_us"):
        assert 0 < row[name]["min"] <= row[name]["median"] <= row[name]["max"]


def test_nothing_fails(results: Results) -> None:
    assert results.failures == {}


def test_static_results(results: Results) -> None:
    decode_mode = dict.fromkeys(MODES, "FULL") | {"NONE": "NONE", "PIECEWISE": "PIECEWISE"}
    assert {name: row["ran_at"] for name, row in results.static.items()} == {
        EAGER: "",
        **decode_mode,
    }
    for row in results.static.values():
        check_times(row)
        assert row["max_error_to_eager"] < 1e-4
        assert "first_call_s" not in row


def test_paged_results(results: Results) -> None:
    ran_at = {tuple(name.split(" | ")): row["ran_at"] for name, row in results.paged.items()}
    expected = {}
    for step in ("decode 1", "decode 4", "prefill 16"):
        is_decode = step.startswith("decode")
        expected |= {
            ("auto", step, EAGER): "",
            ("auto", step, "NONE"): "NONE",
            ("auto", step, "PIECEWISE"): "PIECEWISE",
            ("auto", step, "FULL"): "FULL",
            ("auto", step, "FULL_DECODE_ONLY"): "FULL" if is_decode else "NONE",
            ("auto", step, "FULL_AND_PIECEWISE"): "FULL" if is_decode else "PIECEWISE",
        }
    assert ran_at == expected
    for row in results.paged.values():
        check_times(row)


def test_captures_of_all_sizes(results: Results) -> None:
    """Four sizes, three of which a decode batch can have; three pieces."""
    graphs = {
        asked: {mode: row["graphs"] for mode, row in figures["by_mode"].items()}
        for asked, figures in results.captures.items()
    }
    assert graphs == {
        "PIECEWISE": {"PIECEWISE": 12},
        "FULL": {"FULL": 4},
        "FULL_DECODE_ONLY": {"FULL": 3},
        "FULL_AND_PIECEWISE": {"PIECEWISE": 12, "FULL": 3},
    }


def test_results_are_written(results: Results, tmp_path: Path) -> None:
    written = results.write(tmp_path / "new" / "tiny")
    assert [path.name for path in written] == ["tiny.json", "tiny.md"]
    told = json.loads(written[0].read_text())
    assert set(told) == {item.name for item in dataclasses.fields(Results)}
    assert told["about"]["command"] == "bench"
    assert told["about"]["gpu"] == "none"
    assert told["about"]["torch"] == torch.__version__
    assert told["notes"] == [CPU_NOTE, "a note"]
    assert told["static"].keys() == results.static.keys()
    text = written[1].read_text()
    assert text == results.markdown()
    for line in (
        "command: bench  ",
        "shape: tiny  ",
        CPU_NOTE,
        "| auto | decode 4 | FULL | FULL |",
    ):
        assert line in text
    assert len(Markdown(text).parsed) > 0
    for block in text.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({row.count("|") for row in rows}) <= 1


def test_first_calls_are_told_where_they_are_cold() -> None:
    entered: list[str] = []

    class Cold:
        def __enter__(self) -> None:
            entered.append("in")

        def __exit__(self, *_: object) -> None:
            entered.append("out")

    asked = request(modes=("FULL",), paths=(STATIC,), variants=(OURS,), num_rounds=1)
    with torch.no_grad():
        bench = StaticBench(make_model(TINY, CPU), asked, Silent(), {}, Cold)
        rows = bench.results()
    assert list(rows) == ["FULL"]
    assert rows["FULL"]["first_call_s"] > 0
    assert entered == ["in", "out"]


def test_growth() -> None:
    plan = GrowthPlan(layers=(1, 2), sizes=(1, 2), size_step=2)
    failures: dict[str, str] = {}
    with torch.no_grad():
        asked = request(num_rounds=1, num_steps=1)
        rows = list(growth_results(asked, plan, Silent(), failures))
    assert failures == {}
    graphs = {(row["axis"], row["at"], row["mode"]): row["graphs"] for row in rows}
    assert graphs == {
        ("layers", 1, "PIECEWISE"): 4,
        ("layers", 1, "FULL"): 2,
        ("layers", 2, "PIECEWISE"): 6,
        ("layers", 2, "FULL"): 2,
        ("sizes", 1, "PIECEWISE"): 3,
        ("sizes", 1, "FULL"): 1,
        ("sizes", 2, "PIECEWISE"): 6,
        ("sizes", 2, "FULL"): 2,
    }
    for row in rows:
        check_times(row)
        assert row["ran_at"] == row["mode"]
    assert [(row["axis"], row["mode"]) for row in powers(rows)] == [
        ("layers", "FULL"),
        ("layers", "PIECEWISE"),
        ("sizes", "FULL"),
        ("sizes", "PIECEWISE"),
    ]
    told = Results(about=about("bench", "tiny", CPU), growth=rows, growth_powers=powers(rows))
    assert "| 1 layer | FULL | FULL |" in told.markdown()


@pytest.mark.parametrize("path", PATHS)
def test_one_process_of_start_up(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {
        "shape": "tiny",
        "device": "cpu",
        "path": path,
        "variant": OURS,
        "mode": "FULL",
        "attention": "auto",
        "options": QUICK,
    }
    first_call.main(json.dumps(asked))
    told = json.loads(capsys.readouterr().out)
    assert told["first_call_s"] > 0
    assert (told["compiles"], told["loads"]) == (3, 0)


@pytest.mark.slow
def test_start_up_is_measured_twice() -> None:
    failures: dict[str, str] = {}
    asked = request(modes=("FULL",), paths=(STATIC,), variants=(OURS,))
    found = start_up_results(asked, Silent(), failures)
    assert failures == {}
    assert list(found) == ["FULL"]
    assert list(found["FULL"]) == ["cold", "warm"]
    for told in found["FULL"].values():
        assert told["process_s"] > told["first_call_s"] > 0
    results = Results(about=about("bench", "tiny", CPU), start_up=found)
    assert "| FULL | cold |" in results.markdown()


def test_start_up_that_fails_is_told() -> None:
    failures: dict[str, str] = {}
    options = {"strict": True, "attention_support": {"cudagraph_modes::attention": "NEVER"}}
    asked = request(modes=("FULL",), paths=("paged",), variants=(OURS,), options=options)
    assert start_up_results(asked, Silent(), failures) == {}
    (error,) = failures.values()
    assert "cannot be had" in error


@pytest.mark.parametrize("name", ["flash_attn_3", "flashinfer", "flashmla"])
def test_attention_that_cannot_run_here_is_refused_before_anything_runs(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--attention='{name}' cannot run here; it needs "):
        request(attention=("sdpa", name))
    request(attention=("auto", name), paths=("static",))


def test_attention_that_nobody_knows_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="--attention='no such' is unknown; use some of auto, "):
        request(attention=("no such",))


# --- plots ---


def plotted(results: Results) -> Results:
    growth = [
        {
            "axis": axis,
            "at": at,
            "mode": "FULL",
            "host_us": spread([1.0]),
            "seconds": 1.0,
            "bytes": 2**20,
        }
        for axis in ("layers", "sizes")
        for at in (1, 2)
    ]
    return dataclasses.replace(results, growth=growth)


def test_plots(results: Results, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = plots.draw(plotted(results), tmp_path / "tiny")
    assert [path.name for path in drawn] == [
        "tiny-static.png",
        "tiny-paged.png",
        "tiny-layers.png",
        "tiny-sizes.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_without_matplotlib_a_line_tells_how_to_get_plots(
    results: Results,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert plots.draw(results, tmp_path / "tiny") == []
    assert caplog.messages == [plots.NOT_INSTALLED]
    assert "pip install 'cudagraph-modes[bench]'" in plots.NOT_INSTALLED


# --- graphs made without this backend ---


class RecordingPackage(types.ModuleType):
    """`breakable_cuda_graphs` as far as it is used, for a CPU: eager calls are kept, no more."""

    def __init__(self) -> None:
        super().__init__("breakable_cuda_graphs")
        self.capturing: Any = None
        package = self

        class BreakableCUDAGraph:
            def __init__(self) -> None:
                self.breaks: list[Callable[[], None]] = []

            def replay(self) -> None:
                for each in self.breaks:
                    each()

        class breakable_graph:
            def __init__(self, graph: BreakableCUDAGraph) -> None:
                self.graph = graph

            def __enter__(self) -> None:
                package.capturing = self.graph

            def __exit__(self, *_: object) -> None:
                package.last, package.capturing = package.capturing, None

        self.BreakableCUDAGraph = BreakableCUDAGraph
        self.breakable_graph = breakable_graph
        self.last: Any = None

    def no_graph(self, function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            function(*args)
            if self.capturing is not None:
                self.capturing.breaks.append(lambda: function(*args))

        return call


def test_a_graph_breaks_at_each_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    package = RecordingPackage()
    monkeypatch.setitem(sys.modules, package.__name__, package)
    with torch.no_grad():
        model = make_model(TINY, CPU)
        paged = on_paged_cache(model, TINY, "auto")
        before = model.config._attn_implementation
        step, metadata, _ = step_outside_a_runner(
            paged.module, paged, decode(TINY, 4), for_graph=False
        )
        expected = step()
        replay = captured_with_breaks(model, step, metadata)
        torch.testing.assert_close(replay(), expected)
    assert len(package.last.breaks) == TINY.num_layers
    assert model.config._attn_implementation == before


@pytest.mark.gpu
def test_a_graph_by_hand_replays_the_step() -> None:
    with torch.no_grad():
        paged = on_paged_cache(make_model(TINY, GPU), TINY, "auto")
        step, _, _ = step_outside_a_runner(paged.module, paged, decode(TINY, 4), for_graph=True)
        expected = step()
        torch.testing.assert_close(captured_by_hand(step)(), expected)


def test_fewer_guards_are_a_way_of_their_own() -> None:
    torch.compiler.reset()
    asked = request(modes=("FULL",), paths=(STATIC,), variants=(OURS,), has_fewer_guards=True)
    failures: dict[str, str] = {}
    with torch.no_grad():
        rows = StaticBench(make_model(TINY, CPU), asked, Silent(), failures).results()
    assert failures == {}
    assert list(rows) == ["FULL", "FULL, fewer guards"]
    for row in rows.values():
        check_times(row)
        assert row["max_error_to_eager"] < 1e-4
        assert row["ran_at"] == "FULL"
        assert row["stats"]["graphs"] == 1


def test_dynamo_takes_no_way_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves what was compiled with equal options, whatever guards were to be checked."""
    given: list[dict[str, Any]] = []

    def note(model: Any, *, options: dict[str, Any] | None, backend: str = "inductor") -> Any:
        of_inductor = {**(options or {})}
        of_inductor.pop("guard_filter_fn", None)
        given.append(of_inductor)
        return model

    monkeypatch.setattr(torch, "compile", note)
    for name in (TORCH_COMPILE, REDUCE_OVERHEAD):
        for behind in ("", FEWER_GUARDS):
            compiled_for(torch.nn.Linear(1, 1), name + behind, {})
    assert all(one != other for one, other in itertools.combinations(given, 2))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own, of a warm-up
def test_all_variants_on_a_gpu() -> None:
    variants, _ = available_variants(GPU)
    results = run_suite(request(device=GPU, variants=variants), Silent(), command="bench")
    assert results.failures == {}
    assert results.notes == []
    assert {"graph by hand, whole", "graph by hand, pieces"} <= set(results.static)
    for row in (*results.static.values(), *results.paged.values()):
        check_times(row)


# --- the page about it ---


def cells(heading: str) -> list[list[str]]:
    """The first two cells of each row of the table that begins so."""
    lines = PAGE.partition(f"\n| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.split("|")[1:3]] for line in lines]


def test_page_has_a_row_for_each_shape() -> None:
    assert cells("shape") == [[shape.name, shape.about] for shape in SHAPES.values()]


def test_page_has_a_row_for_each_variant() -> None:
    told = [[name, variant.about] for name, variant in VARIANTS.items()]
    assert [[name, text.replace("`", "")] for name, text in cells("variant")] == told
