"""Graphs that Inductor partitions: what runs in them, what is captured, and what falls back.

Inductor parts graphs for GPUs only, so it is told that its nodes run on one.
"""

from __future__ import annotations

import ast
import logging
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import toy
from paged_toy import PagedToy, make_loop
from paged_toy import compiled as compiled_toy
from torch._inductor.utils import _unstable_customized_partition_wrapper
from torch.nn.attention.flex_attention import flex_attention
from toy import FULL, MODES, NONE, PIECEWISE, WIDTH, Twin, counts, rows, toy_model

from compile_backend import BatchDescriptor, ConfigError, capture, explain, plan, reset, stats
from compile_backend.attention.ops import WITHOUT_DISPATCHER
from compile_backend.backend import cudagraph_modes
from compile_backend.cache import SIZE_VARIABLE
from compile_backend.context import ForwardContext, SetBy, enter_forward_context
from compile_backend.partition import partitioned_programs
from compile_backend.partition_ops import partition_ops
from compile_backend.reference_engine import ReferenceEngine
from compile_backend.torch_internals.partition import PartitionError, PartitionFunction, Partitions
from compile_backend.wrapper import CUDAGraphWrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

OPTION = "use_inductor_graph_partition"
TOY = torch.ops.toy


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have Inductor make partitions on the CPU, and keep its own cache of them apart."""
    from torch._inductor.scheduler import BaseSchedulerNode

    monkeypatch.setattr(BaseSchedulerNode, "is_gpu", lambda self: True)
    monkeypatch.setattr(plan, "are_made_on", lambda device_type: True)
    with torch.compiler.config.patch(cache_key_tag="partitions on the CPU"):
        yield


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A directory for artefacts, so that what a test compiles twice takes no time."""
    monkeypatch.setenv(SIZE_VARIABLE, "100")
    return str(tmp_path)


def whole(function: Any, **options: Any) -> Twin:
    """`function` and its eager twin, compiled with Inductor's partitions."""
    defaults: dict[str, Any] = {
        "piece_compiler": "inductor",
        "splitting_ops": ["toy::*"],
        "dynamic": True,
        OPTION: True,
    }
    return Twin(function, **{**defaults, **options})


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings that speak of the option."""
    return [record.getMessage() for record in caplog.records if OPTION in record.getMessage()]


# --- counts and results ------------------------------------------------------------------------


@pytest.mark.parametrize("num_layers", [2, 4])
def test_one_partition_more_than_splitting_ops(num_layers, parts):
    both = whole(toy_model("attn_out", num_layers), cudagraph_mode="PIECEWISE")
    for n in (8, 4) * 4:
        both(rows(n))
    report, pieces = both.stats, num_layers + 1
    assert (report.partitions, report.pieces, report.compiles) == (pieces, pieces, 1)
    assert report.eager_sections == num_layers
    assert counts(report, "warm_ups") == counts(report, "captures") == {PIECEWISE: 2 * pieces}
    assert counts(report, "replays") == {PIECEWISE: 2 * 3 * pieces}
    weight = both.model.layers[1].linear.weight
    with torch.no_grad():
        weight.data = weight.data * 2
        both.eager.layers[1].linear.weight.mul_(2)
    for _ in range(3):
        both(rows(8))
    assert counts(both.stats, "captures") == {PIECEWISE: 3 * pieces}
    reset(both.compiled)
    for _ in range(3):
        both(rows(8))
    assert counts(both.stats, "captures") == {PIECEWISE: 4 * pieces}


def test_every_mode_equals_eager(parts, kept):
    variants = ["attn_new", "attn_pair", "attn_state", "attn_out"]
    for mode in MODES:
        torch._dynamo.reset()
        both = whole(toy_model(variants), cudagraph_mode=mode, cache_dir=kept)
        toy.calls.clear()
        for step in range(8):
            both(rows((8, 4)[step % 2]))
        assert set(toy.calls.values()) == {2 * 8}  # state changes as often as it is called
        assert both.stats.partitions == len(variants) + 1
        expected = {FULL: 6} if mode.has_mode(FULL) and mode.mixed_mode() is FULL else {}
        if mode.mixed_mode() is PIECEWISE:
            expected = {PIECEWISE: 6 * (len(variants) + 1)}
        assert counts(both.stats, "replays") == expected
        graph = cudagraph_modes.facts(both.compiled).graphs[0].graph
        num_planned = 2 if mode.mixed_mode() is PIECEWISE else 0
        assert len(graph._plans) == len(graph._programs.runners[-1]._planned) == num_planned


def across(x: torch.Tensor, state: torch.Tensor | None = None) -> Any:
    """Tensors of all kinds that live across partitions, and an optional input that is written."""
    mean, largest = TOY.attn_pair(x * 2)
    if state is not None:
        state.add_(mean.sum(0))
    other = TOY.attn_new(mean + 1)
    out = torch.empty_like(other)
    TOY.attn_out(other * mean, out)
    again = torch.empty_like(out)
    TOY.attn_out(out, again)
    return again * largest.unsqueeze(-1) + other, other, x, out[1:].t(), None


@pytest.mark.parametrize("has_state", [False, True])
def test_tensors_that_live_across_partitions(has_state, parts, kept):
    for options in (
        {"cudagraph_mode": "PIECEWISE"},
        {"cudagraph_mode": "PIECEWISE", "debug": "verify"},
        {"cudagraph_mode": "PIECEWISE", "debug": "addresses", "cudagraph_clone_outputs": False},
        {"cudagraph_mode": "PIECEWISE", "cudagraph_capture": "ahead"},
    ):
        torch._dynamo.reset()
        both = whole(across, cache_dir=kept, **options)
        args = [(rows(n), *([rows(1)[0]] if has_state else [])) for n in (8, 4) * 4]
        if "cudagraph_capture" in options:
            with capture():
                both(*args[0])
                both(*args[1])
        for each in args:
            both(*each)
        assert both.stats.partitions > 2
        assert both.stats.total("captures") > 0
        assert both.stats.total("failed_captures") == 0
        assert both.stats.total("eager") == 0


def test_captures_ahead_run_no_op(parts):
    both = whole(
        toy_model("attn_state", 2, names=True),
        cudagraph_mode="PIECEWISE",
        cudagraph_capture="ahead",
    )
    toy.calls.clear()
    with capture():
        for n in (8, 4):
            both(rows(n))
    assert set(toy.calls.values()) == {4}
    assert counts(both.stats, "captures") == {PIECEWISE: 6}
    for n in (4, 8, 4):
        both(rows(n))
    assert counts(both.stats, "replays") == {PIECEWISE: 9}
    assert counts(both.stats, "captures") == {PIECEWISE: 6}


def test_a_runner_repeats_steps_past_dynamo(parts):
    model = PagedToy()
    called = compiled_toy(
        model, cudagraph_mode="PIECEWISE", piece_compiler="inductor", **{OPTION: True}
    )
    loop = make_loop("PIECEWISE", model, called=called, sizes=[4, 8], limits=(4, 16))
    requests = [loop.add([1, 2, 3]), loop.add([5, 6, 7, 8])]
    loop.step([(requests[0], 3), (requests[1], 4)])
    for _ in range(4):
        loop.step(loop.grow(0, 1))
    assert stats(called).partitions == 3
    assert len(loop.runner._captured.piecewise._steps) > 0
    (built,) = cudagraph_modes.facts(called).graphs
    steps = built.graph._programs.runners[-1]
    assert len(steps._planned) == 2
    called_directly = steps._between()._names["torch_ops_cudagraph_modes_attention_default"]
    assert called_directly in WITHOUT_DISPATCHER.values()


# --- partitions by themselves ------------------------------------------------------------------

KEY = BatchDescriptor(4, 4)
BY_HAND = "def call(self, args):\n    return by_hand(args)"


class ByHand:
    """A program around partitions that are written here, as Inductor's code calls them."""

    def __init__(
        self, program: Callable[..., Any], *functions: Callable[[list[Any]], Sequence[Any]]
    ) -> None:
        self.engine = ReferenceEngine()
        self.wrappers: list[CUDAGraphWrapper] = []
        self._program = program
        self._plain = functions
        described = [PartitionFunction(each, {}, frozenset(), True) for each in functions]
        self.programs = partitioned_programs(
            self._run,
            SimpleNamespace(
                functions=described,
                divert=self._divert,
                between=ast.parse(BY_HAND).body[0],
                names={},
            ),
            torch.device("cpu"),
            self._wrap,
            lambda key: 1,
        )

    def _divert(self, instead: Any, is_diverted: Any, _planned: Any) -> None:
        self._instead, self._is_diverted = instead, is_diverted

    def _run(self, args: Sequence[Any]) -> tuple[Any, ...]:
        called = self._instead if self._is_diverted() else self._plain
        return self._program(args, *called)

    def _wrap(self, called: Any, name: str, unwritten: frozenset[int]) -> CUDAGraphWrapper:
        self.wrappers.append(CUDAGraphWrapper(called, PIECEWISE, engine=self.engine, name=name))
        return self.wrappers[-1]

    def __call__(self, *args: Any) -> Any:
        context = ForwardContext(None, PIECEWISE, KEY)
        with enter_forward_context(context, SetBy.GRAPH), self.engine.session():
            return self.programs.piecewise(args)


def add_one(args: list[Any]) -> Sequence[Any]:
    """Returns a new tensor, and an argument that is needed later."""
    x, weight = args
    args.clear()
    return x + weight, weight


def test_lists_are_cleared_and_arguments_handed_on():
    weight = torch.ones(3)

    def program(args: Sequence[Any], part: Any) -> tuple[Any, ...]:
        taken = [args[0], weight]
        result, handed = part(taken)
        assert taken == []
        return result, handed

    by_hand = ByHand(program, add_one)
    x = torch.zeros(3)
    for step in range(4):
        x.fill_(step)
        weight = weight.clone()  # a tensor that is made anew, and is no output of the partition
        result, handed = by_hand(x)
        torch.testing.assert_close(result, torch.full((3,), step + 1.0))
        torch.testing.assert_close(handed, torch.ones(3))
    assert by_hand.wrappers[0].holds(KEY)


def test_what_an_op_makes_anew_is_never_read_where_it_was():
    alive: list[torch.Tensor] = []

    def program(args: Sequence[Any], first: Any, second: Any) -> tuple[Any, ...]:
        made, _ = first([args[0], args[1]])
        fresh = made * 2
        alive.append(fresh)  # so that each step has another address
        return tuple(second([fresh, args[1]]))

    by_hand = ByHand(program, add_one, add_one)
    x, weight = torch.zeros(3), torch.ones(3)
    for step in range(5):
        x.fill_(step)
        torch.testing.assert_close(by_hand(x, weight)[0], torch.full((3,), 2 * step + 3.0))
    assert all(wrapper.holds(KEY) for wrapper in by_hand.wrappers)


def test_an_argument_that_was_to_stay_and_moved_is_captured_again():
    by_hand = ByHand(lambda args, part: tuple(part([args[0], args[1]])), add_one)
    x, weight = torch.zeros(3), torch.ones(3)
    for step in range(6):
        x.fill_(step)
        if step >= 3:
            weight = torch.full((3,), float(step))
        expected = x + weight
        torch.testing.assert_close(by_hand(x, weight)[0], expected)
    assert by_hand.wrappers[0]._entries[KEY].stats.captures == 2


def test_a_partition_that_cannot_be_captured_runs_eagerly_between_the_others():
    def syncing(args: list[Any]) -> Sequence[Any]:
        (x,) = args
        args.clear()
        return (x * float(x.sum().item()),)

    def program(args: Sequence[Any], first: Any, second: Any, third: Any) -> tuple[Any, ...]:
        made, _ = first([args[0], args[1]])
        (made,) = second([made])
        return tuple(third([made, args[1]]))

    by_hand = ByHand(program, add_one, syncing, add_one)
    x, weight = torch.zeros(3), torch.ones(3)
    for step in range(5):
        x.fill_(step)
        expected = (x + 1) * float((x + 1).sum()) + 1
        torch.testing.assert_close(by_hand(x, weight)[0], expected)
    assert [wrapper.holds(KEY) for wrapper in by_hand.wrappers] == [True, False, True]
    assert by_hand.programs.plan(KEY) is None


def test_other_threads_and_nested_calls_run_partitions_as_they_are():
    seen: list[Any] = []

    def program(args: Sequence[Any], part: Any) -> tuple[Any, ...]:
        seen.append(part)
        if len(seen) % 3 == 1:
            by_hand._run(args)
            thread = threading.Thread(target=by_hand._run, args=(args,))
            thread.start()
            thread.join()
        return tuple(part([args[0], args[1]]))

    by_hand = ByHand(program, add_one)
    by_hand(torch.zeros(3), torch.ones(3))
    assert seen == [by_hand._instead[0], add_one, add_one]


def test_text_of_partitions_tells_what_is_read_and_written():
    source = """
def partition_0(args):
    buf8, arg6_1, s77 = args
    args.clear()
    buf9 = buf8[0]
    buf10 = buf8[2]
    del buf8
    buf11 = empty_strided_cpu((s77, 10), (10, 1), torch.float32)
    buf12 = empty_strided_cpu((s77, 10), (10, 1), torch.float32)
    kernel(buf9, buf10, arg6_1, buf11)
    return (buf11, buf12, arg6_1, )

def partition_1(args):
    buf11, = args
    args.clear()
    return (reinterpret_tensor(buf11, (10,), (1,), 0), )

class Runner:
    def call(self, args):
        (buf11, buf12, arg6_1) = self.partitions[0](args)
        torch.ops.toy.attn_new.default(buf11, layer='')
        torch.ops.toy.attn_new_other.default(buf11)
"""

    def named(name: str) -> Any:
        return SimpleNamespace(__name__=name)

    functions = [named("partition_0"), named("partition_1")]
    runner = SimpleNamespace(partitions=functions)
    code = SimpleNamespace(source_code=source, compiled_fn_runner=runner)
    found = Partitions(code)
    first, second = found.functions
    assert (first.elements, first.unwritten, first.does_work) == ({0: (0, 2)}, {1}, True)
    assert (second.elements, second.unwritten, second.does_work) == ({}, frozenset(), False)
    assert found.calls_between(["toy::attn_new"]) == 1
    assert found.calls_between(["toy::attn_new.default", "toy::attn_new_other"]) == 2
    assert found.calls_between(["toy::attn_new.out"]) == found.calls_within(["toy::*"]) == 0
    runner.partitions = [named("theirs"), named("partition_1")]
    with pytest.raises(PartitionError, match="somebody else wraps"):
        Partitions(code)
    runner.partitions = []
    with pytest.raises(PartitionError, match="made no partitions"):
        Partitions(code)


def test_names_for_inductor():
    assert partition_ops(["toy::attn_new", "flash_attn::f.default"]) == (
        "toy::attn_new",
        "flash_attn::f.default",
    )
    of_torch = partition_ops(["torch._C._nn.scaled_dot_product_attention"])
    assert "aten::_scaled_dot_product_flash_attention" in of_torch
    assert "'flex_attention' is a higher-order op" in partition_ops(["flex_attention"])
    assert "'my.module.attend' is a function" in partition_ops(["toy::x", "my.module.attend"])


# --- others in the process, and caches ---------------------------------------------------------


@pytest.fixture
def no_hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inductor's hook for the whole process is not used, not even for a moment."""

    class Watched(type(_unstable_customized_partition_wrapper)):
        def __setattr__(self, name: str, value: Any) -> None:
            if name != "__class__":
                raise AssertionError("the hook is for the whole process")
            super().__setattr__(name, value)

    monkeypatch.setattr(_unstable_customized_partition_wrapper, "__class__", Watched)
    yield
    assert _unstable_customized_partition_wrapper.wrapper is None


def plain(x: torch.Tensor) -> torch.Tensor:
    return TOY.attn_new(x.sin() * 3) + 1


def test_what_others_compile_meanwhile_and_afterwards_is_theirs(parts, no_hook):
    theirs = torch.compile(plain)
    results: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: results.append(theirs(torch.ones(8, WIDTH))))
    both = whole(toy_model("attn_new", 2), cudagraph_mode="PIECEWISE")
    thread.start()
    for _ in range(3):
        both(rows(8))
    thread.join()
    with enter_forward_context(ForwardContext(None, PIECEWISE, KEY), SetBy.USER):
        for _ in range(3):
            results.append(theirs(torch.ones(8, WIDTH)))  # noqa: PERF401
        results.append(torch.compile(lambda x: plain(x) * 1)(torch.ones(8, WIDTH)))
    for result in results:
        torch.testing.assert_close(result, plain(torch.ones(8, WIDTH)))
    assert counts(both.stats, "captures") == {PIECEWISE: 3}


def test_equal_models_have_partitions_of_their_own(parts, kept):
    first, second = (
        whole(toy_model("attn_new", 2), cudagraph_mode="PIECEWISE", cache_dir=kept)
        for _ in range(2)
    )
    for _ in range(3):
        first(rows(8))
        second(rows(8))
    assert counts(first.stats, "captures") == counts(second.stats, "captures") == {PIECEWISE: 3}
    assert (first.stats.compiles, second.stats.loads) == (1, 1)


def test_code_for_another_option_or_list_is_not_reused(parts, kept):
    def function(x: torch.Tensor) -> torch.Tensor:
        return TOY.tally(TOY.attn_new(x * 2) + 1) * 3

    def run(**options: Any) -> tuple[int, int, int]:
        torch._dynamo.reset()
        both = whole(function, cudagraph_mode="PIECEWISE", cache_dir=kept, **options)
        for _ in range(3):
            both(rows(8))
        report = both.stats
        assert counts(report, "captures") == {PIECEWISE: report.pieces}
        return report.partitions, report.compiles, report.loads

    assert run(**{OPTION: False})[0] == 0
    assert run() == (3, 1, 0)
    assert run(splitting_ops=["toy::attn_new"]) == (2, 1, 0)
    assert run() == (3, 0, 1)
    assert run(**{OPTION: False}) == (0, 0, 3)


# --- what falls back ---------------------------------------------------------------------------


def attend(x: torch.Tensor) -> torch.Tensor:
    return TOY.tally(x)


def sized_by_data(x: torch.Tensor) -> torch.Tensor:
    chosen = x[torch.ops.aten.nonzero.default(x[:, 0] > 0)[:, 0]]
    return TOY.attn_new(x * 2).sum() + TOY.attn_new(chosen * 2).sum(0)


ATTENTION_OF_TORCH = {"splitting_ops": None, "attention_support": None}
FALL_BACKS = {
    "view": (
        lambda x: TOY.attn_view(x * 2).flatten(1) + 1,
        {},
        "Inductor cannot compile it whole (RuntimeError: Found a custom (non-ATen) operator",
    ),
    "higher-order": (
        lambda x: flex_attention(*(x[None, None] * i for i in (1, 2, 3))) + 1,
        ATTENTION_OF_TORCH,
        "'flex_attention' is a higher-order op",
    ),
    "a lowering": (
        lambda x: torch.ops.aten.relu.default(x * 2) + 1,
        {"splitting_ops": ["aten::relu"], "attention_support": None},
        "1 call of splitting ops became 0 in the code of Inductor",
    ),
}


@pytest.mark.parametrize("name", FALL_BACKS)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_what_cannot_be_partitioned_is_split_before_with_one_warning(name, parts, caplog):
    function, options, reason = FALL_BACKS[name]
    both = whole(function, cudagraph_mode="PIECEWISE", dynamic=False, **options)
    for _ in range(3):
        both(rows(16, 16))
    (message,) = told(caplog)
    assert reason in message
    assert "which is split before instead" in message
    assert both.stats.partitions == 0
    assert both.stats.total("failed_captures") == 0


def test_sizes_that_data_tells_are_left_to_pieces(parts):
    options = {"splitting_ops": ["toy::*"], "cudagraph_mode": "PIECEWISE", OPTION: True}
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        (told_of,) = explain(sized_by_data, rows(16), options=options).graphs
    assert told_of.num_partitions == 0
    assert sum(OPTION in note and "depends on data" in note for note in told_of.notes) == 1


def test_without_a_gpu_there_are_no_partitions(caplog):
    def function(x: torch.Tensor) -> torch.Tensor:
        return TOY.attn_new(x * 7) - 3

    both = whole(function, cudagraph_mode="PIECEWISE")
    for _ in range(3):
        both(rows(8))
    (message,) = told(caplog)
    assert message == (
        f"{OPTION}=True cannot be had for a graph, which is split before instead: {plan.ON_CPU}; "
        "move model and inputs to a GPU, or leave it out: splitting_ops splits"
    )
    assert (both.stats.partitions, both.stats.pieces) == (0, 2)
    text = f"cannot be had for a graph: {plan.ON_CPU}; move model"
    strict = whole(function, cudagraph_mode="PIECEWISE", strict=True)
    with pytest.raises(ConfigError, match=text):
        strict.compiled(rows(8))
    options = {"splitting_ops": ["toy::*"], "attention_support": {"toy::*": "ALWAYS"}}
    with pytest.raises(ConfigError, match=text):
        explain(function, rows(8), options={**options, OPTION: True, "strict": True})


def test_code_without_partitions_is_told_of_where_they_were_to_be(monkeypatch, caplog):
    monkeypatch.setattr(plan, "are_made_on", lambda device_type: True)
    both = whole(lambda x: TOY.attn_new(x * 7) - 3, cudagraph_mode="PIECEWISE")
    for _ in range(3):
        both(rows(8))
    (message,) = told(caplog)
    assert "Inductor made no partitions; leave it out: splitting_ops splits" in message
    assert (both.stats.partitions, both.stats.pieces) == (0, 2)


def test_a_function_as_splitting_op_is_refused_before_anything_is_compiled(parts, caplog):
    name = f"{__name__}.attend"
    options = {"splitting_ops": [name], "attention_support": {name: "ALWAYS"}, OPTION: True}
    torch._dynamo.allow_in_graph(attend)
    explained = explain(lambda x: attend(x * 2) + 1, rows(8), options=options).graphs[0]
    assert explained.num_partitions == 0
    assert any("is a function" in note for note in explained.notes)
    with pytest.raises(ConfigError, match="leave it out: splitting_ops splits"):
        explain(lambda x: attend(x * 2) + 1, rows(8), options={**options, "strict": True})


def test_explain_tells_who_splits(parts):
    options = {"splitting_ops": ["toy::*"], "attention_support": {"toy::*": "ALWAYS"}}
    asked = explain(toy_model("attn_new", 2), rows(8), options={**options, OPTION: True})
    assert (asked.graphs[0].num_partitions, asked.graphs[0].num_compiles) == (3, 1)
    assert "Inductor, into 3 partitions" in str(asked)
    assert "this backend, before Inductor" in str(
        explain(toy_model("attn_new", 2), rows(8), options=options)
    )


def test_explain_tells_that_nothing_is_partitioned_on_the_cpu():
    options = {"splitting_ops": ["toy::*"], "attention_support": {"toy::*": "ALWAYS"}}
    told_of = explain(toy_model("attn_new", 2), rows(8), options={**options, OPTION: True})
    (graph,) = told_of.graphs
    assert (graph.num_partitions, graph.num_compiles) == (0, 2)
    assert "this backend, before Inductor" in str(told_of)
    assert any("runs on the CPU; move model and inputs to a GPU" in note for note in graph.notes)


@pytest.mark.parametrize("strict", [False, True])
def test_a_graph_without_splitting_ops_needs_no_partition(strict, caplog):
    options = {"cudagraph_mode": "FULL", "piece_compiler": "inductor", "strict": strict}
    both = whole(lambda x: x.relu() * 2, **options)
    for _ in range(3):
        both(rows(8))
    assert told(caplog) == []
    assert counts(both.stats, "replays") == {FULL: 2}


@pytest.mark.parametrize(
    "option",
    [
        {"compile_sizes": [4]},
        {"compile_ranges_endpoints": [16]},
        {"piece_compiler": "eager"},
    ],
    ids=lambda option: next(iter(option)),
)
def test_options_that_contradict_it_are_refused(option):
    with pytest.raises(ConfigError, match="leave one of the two out") as caught:
        explain(plain, rows(8), options={**option, OPTION: True})
    assert caught.value.option in option


# --- on a GPU ----------------------------------------------------------------------------------


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    with torch.no_grad():
        yield torch.device("cuda", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_attention_of_torch_by_default_on_a_gpu(mode, cuda):
    linear = torch.nn.Linear(64, 64, dtype=torch.bfloat16, device=cuda)

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            q = linear(x).view(1, -1, 2, 32).transpose(1, 2)
            y = torch.nn.functional.scaled_dot_product_attention(q, q * 2, q, is_causal=True)
            x = x + torch.relu(y.transpose(1, 2).reshape(x.shape))
        return x

    call = torch.compile(
        function,
        backend="cudagraph_modes",
        dynamic=True,
        options={"cudagraph_mode": mode, OPTION: True},
    )
    for n in (48, 24) * 3:
        x = torch.randn(n, 64, dtype=torch.bfloat16, device=cuda)
        torch.testing.assert_close(call(x), function(x), atol=2e-2, rtol=2e-2)
    assert stats(call).partitions == 3
    assert stats(call).total("replays") > 0


@pytest.mark.gpu
@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("capture_when", ["lazy", "ahead"])
def test_several_ops_and_tensors_across_them_on_a_gpu(has_state, capture_when, cuda):
    both = whole(across, cudagraph_mode="PIECEWISE", cudagraph_capture=capture_when)

    def args(n: int) -> list[torch.Tensor]:
        return [rows(n).to(cuda), *([rows(1)[0].to(cuda)] if has_state else [])]

    if capture_when == "ahead":
        with capture():
            for n in (16, 8, 4):
                both(*args(n))
    for n in (16, 8, 4, 8, 16, 4) * 2:
        both(*args(n))
    assert both.stats.partitions > 2
    assert both.stats.total("replays", PIECEWISE) > 0
    assert both.stats.total("failed_captures") == 0


@pytest.mark.gpu
def test_a_size_that_data_tells_is_never_captured_on_a_gpu(cuda, caplog):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        both = whole(sized_by_data, cudagraph_mode="PIECEWISE", dynamic=False)
        for _ in range(4):
            both(rows(16).to(cuda))
    assert "depends on data" in told(caplog)[0]
    assert both.stats.mode_resolved != (NONE.name,)
    assert logging.WARNING in {record.levelno for record in caplog.records}
