"""Plain calls that are replayed without being looked at anew: as right as those that are."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fake_driver import Driver
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import FULL, Twin, counts, rows

from compile_backend import shortcuts
from compile_backend.batch import BatchDescriptor
from compile_backend.inputs import GraphInput, InputBuffers, InputClass
from compile_backend.known_calls import KnownCall, KnownCalls
from compile_backend.outputs import Giving
from compile_backend.plain_calls import BatchReader
from compile_backend.reference_engine import ReferenceEngine, ReferenceGraph
from compile_backend.stats import KeyStats

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = torch.device("cpu")
WIDTH = rows(1).shape[1]
needs_shortcuts = pytest.mark.skipif(
    not shortcuts.are_built(), reason="without the C extension every call is looked at anew"
)


class Written(torch.nn.Module):
    """Reads a weight; writes a buffer, and what is given as `state`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(rows(WIDTH, seed=3), requires_grad=False)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.add_(x.sum(0))
        return torch.ops.toy.attn_new(x @ self.weight) + self.seen, x.view(-1)


@contextlib.contextmanager
def by_driver() -> Iterator[list[int]]:
    """Calls are replayed as on a GPU, by what stands for its driver; how much each did is told."""
    done: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        driver = Driver(patch)
        capture, replay_call = ReferenceEngine.capture, shortcuts.replay_call

        def captured(self: ReferenceEngine, *args: Any) -> ReferenceGraph:
            graph = capture(self, *args)
            number = len(driver.launched) + 1
            driver.launched[number] = graph.replay
            executable: Any = SimpleNamespace(raw_cuda_graph_exec=lambda: number)
            graph.short = shortcuts.launch_of(executable, 0)
            return graph

        def noted(*args: Any) -> int:
            done.append(replay_call(*args))
            return done[-1]

        patch.setattr(ReferenceEngine, "capture", captured)
        patch.setattr(shortcuts, "replay_call", noted)
        yield done


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[BatchDescriptor]:
    """What calls were found to be, one by one."""
    found: list[BatchDescriptor] = []
    original = BatchReader.read

    def noted(self: BatchReader, args: Any) -> BatchDescriptor:
        found.append(original(self, args))
        return found[-1]

    monkeypatch.setattr(BatchReader, "read", noted)
    return found


@needs_shortcuts
def test_a_call_is_looked_at_until_it_is_one_replay(read):
    both = Twin(Written(), cudagraph_mode="FULL", cudagraph_num_of_warmups=2)
    both(rows(4))  # is compiled, and warms up
    read.clear()
    for _ in range(7):
        both(rows(4))
    assert len(read) == 2  # another warm-up, and the capture
    assert counts(both.stats, "steps") == {FULL: 8}
    assert counts(both.stats, "replays") == {FULL: 6}
    assert counts(both.stats, "warm_ups") == {FULL: 2}


@needs_shortcuts
def test_each_size_is_known_by_itself(read):
    both = Twin(lambda x: torch.ops.toy.attn_new(x * 2) + 1, dynamic=True, cudagraph_mode="FULL")
    both(rows(4))
    read.clear()
    for num_tokens in (8, 2, *(4, 8, 2) * 4):
        both(rows(num_tokens))
    assert len(read) == 5
    assert counts(both.stats, "replays") == {FULL: 4 * 3}


def test_free_sizes_beside_the_tokens_tell_calls_apart():
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.ops.toy.attn_new(x * 2) + y.sum()

    both = Twin(function, dynamic=True, cudagraph_mode="FULL")
    for _ in range(4):
        for size in (3, 5):
            both(rows(4), rows(size))
    assert counts(both.stats, "captures") == {FULL: 2}


@pytest.mark.parametrize(
    "options",
    [
        {"describe_batch": lambda tensors: BatchDescriptor(tensors[0].shape[0], 1)},
        {"debug": "verify"},
        {"debug": "addresses"},
        {"cudagraph_mode": "PIECEWISE"},
        {"cudagraph_mode": "NONE"},
    ],
    ids=lambda options: "=".join(map(str, next(iter(options.items()))))[:24],
)
def test_other_calls_are_looked_at_each_time(read, options):
    function = lambda x: torch.ops.toy.attn_new(x * 2) + 1  # noqa: E731
    both = Twin(function, **{"cudagraph_mode": "FULL", **options})
    both(rows(4))
    read.clear()
    for _ in range(6):
        both(rows(4))
    assert len(read) == 6


def test_what_callers_are_to_see_is_written_in_every_call():
    def function(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.add_(x)
        return torch.ops.toy.attn_new(state * 2)

    both = Twin(function, cudagraph_mode="FULL")
    for _ in range(6):
        both(rows(4), rows(4))
    assert counts(both.stats, "steps") == {FULL: 6}


def test_results_are_the_callers_own():
    both = Twin(Written(), cudagraph_mode="FULL")
    kept = [(x, both(x)) for x in (rows(4) for _ in range(6))]
    values = [result.clone() for _, (result, _) in kept]
    both(rows(4))
    for (x, (result, view)), value in zip(kept, values, strict=True):
        assert torch.equal(result, value)
        assert view.data_ptr() == x.data_ptr()


def models(both: Twin) -> tuple[Any, Any]:
    return both.model, both.eager


ACTIONS = ("call", "other size", "same memory", "move weight", "move buffer", "overlap", "reset")


@pytest.mark.parametrize("around", [contextlib.nullcontext, by_driver])
@given(actions=st.lists(st.sampled_from(ACTIONS), min_size=4, max_size=14))
@settings(deadline=None, max_examples=40)
def test_whatever_happens_between_calls(around: Any, actions: list[str]) -> None:
    """The twin compares results, arguments and buffers of every call with an eager run."""
    with around():
        calls_with(actions)


def calls_with(actions: list[str]) -> None:
    torch._dynamo.reset()
    both = Twin(Written(), dynamic=True, cudagraph_mode="FULL")
    same = rows(4)
    for _ in range(3):
        both(same)
    for action in actions:
        if action == "other size":
            both(rows(8))
            continue
        if action == "same memory":
            same.normal_()
            both(same)
            continue
        if action == "move weight":
            value = rows(WIDTH)
            for model in models(both):
                model.weight.data = value.clone()
        elif action == "move buffer":
            for model in models(both):
                model.seen = model.seen.clone()
        elif action == "overlap":
            with torch.no_grad():
                for model in models(both):
                    model.seen = torch.ones(4 * WIDTH)[:WIDTH]
                got, expected = (
                    run(model.seen.as_strided((4, WIDTH), (WIDTH, 1)))[0]
                    for run, model in ((both.compiled, both.model), (both.eager, both.eager))
                )
            torch.testing.assert_close(got, expected)
        elif action == "reset":
            torch._dynamo.reset()
        both(rows(4))


@needs_shortcuts
def test_a_known_call_is_copies_and_a_launch(read):
    with by_driver() as done:
        both = Twin(lambda x: torch.ops.toy.attn_new(x * 2) + 1, cudagraph_mode="FULL")
        for _ in range(3):
            both(rows(4))
        done.clear()
        read.clear()
        kept = [(x, both(x)) for x in (rows(4) for _ in range(5))]
    assert done == [shortcuts.LAUNCHED] * 5
    assert not read
    for x, result in kept:
        torch.testing.assert_close(result, both.eager(x))


@needs_shortcuts
def test_inputs_in_memory_that_is_written_are_seen():
    with by_driver() as done:
        both = Twin(Written(), cudagraph_mode="FULL")
        with torch.no_grad():
            for model in models(both):
                model.seen = torch.ones(5, WIDTH)[4]
        for _ in range(3):
            both(rows(4))
        done.clear()
        memories = [model.seen.as_strided((4, WIDTH), (WIDTH, 1), 0) for model in models(both)]
        both(rows(4))
        with torch.no_grad():
            torch.testing.assert_close(both.compiled(memories[0])[0], both.eager(memories[1])[0])
        both(rows(4))
    assert done == [shortcuts.LAUNCHED, shortcuts.NOTHING, shortcuts.LAUNCHED]


@needs_shortcuts
def test_inputs_that_are_not_copied_need_no_copies():
    x = rows(4)
    with by_driver() as done:
        options = {"cudagraph_mode": "FULL", "cudagraph_copy_inputs": False}
        both = Twin(Written(), **options)
        for _ in range(3):
            both(x)
        for _ in range(4):
            x.normal_()
            both(x)
    assert done[-3:] == [shortcuts.LAUNCHED] * 3


@pytest.mark.gpu
@needs_shortcuts
def test_inputs_are_copied_on_a_gpu(read, monkeypatch):
    """By the driver, on whichever stream is current; others in the usual way."""
    copied: list[bool] = []
    original = shortcuts.replay_call

    def noted(*args: Any) -> int:
        copied.append(original(*args) == shortcuts.LAUNCHED)
        return copied[-1]

    monkeypatch.setattr(shortcuts, "replay_call", noted)
    device = torch.device("cuda")

    def function(x: torch.Tensor, ids: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
        return (x @ turned) * 2 + ids[:, None] + x.sum()

    both = Twin(function, cudagraph_mode="FULL")
    stream = torch.cuda.Stream()
    for step in range(8):
        args = (
            torch.randn(4, 8, device=device),
            torch.randint(99, (4,), device=device),
            torch.randn(8, 8, device=device).t(),
        )
        if step % 2:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                both(*args)
            torch.cuda.current_stream().wait_stream(stream)
        else:
            both(*args)
    assert all(copied)
    assert len(copied) >= 6
    assert counts(both.stats, "steps") == {FULL: 8}


# --- the parts --------------------------------------------------------------------------------


def test_what_is_known_is_limited_and_forgotten(monkeypatch):
    monkeypatch.setattr("compile_backend.known_calls._MOST_KNOWN", 3)
    known = KnownCalls()
    graph: Any = object()
    giving = Giving((), ())
    calls = [KnownCall(BatchDescriptor(n, 1), graph, KeyStats(), None, giving) for n in range(10)]
    for n, call in enumerate(calls):
        known.learn((n,), call)
        assert known.get((n,)) is call
    assert sum(known.get((n,)) is not None for n in range(10)) <= 3
    known.forget()
    assert all(known.get((n,)) is None for n in range(10))


def loaded(*tensors: torch.Tensor, mutated: frozenset[int] = frozenset()) -> InputBuffers:
    """A caller's tensors, and a static one behind them."""
    kinds = [*[InputClass.CALLER] * (len(tensors) - 1), InputClass.STATIC]
    inputs = [GraphInput(f"{i}", f"{i}", kind) for i, kind in enumerate(kinds)]
    buffers = InputBuffers(inputs, copy_inputs=True, mutated=mutated)
    buffers.load("key", tensors)
    return buffers


def test_nothing_is_reloaded_that_was_not_loaded():
    tensors = (rows(4), rows(8))
    assert not loaded(*tensors).reload("other", tensors)


@needs_shortcuts
def test_reloading_fills_the_buffers():
    x, static = rows(4), rows(8)
    buffers = loaded(x, static)
    y = rows(4)
    assert buffers.reload("key", (y, static))
    filled, has_moved = buffers.load("key", (y, static))
    assert not has_moved
    y.zero_()
    assert buffers.reload("key", (y, static))
    assert torch.equal(filled[0], y)


@needs_shortcuts
@pytest.mark.parametrize("change", ["other tensor", "other memory", "written for the caller"])
def test_what_must_be_looked_after_is_not_reloaded(change):
    x, static = rows(4), rows(8)
    mutated = frozenset({0} if change == "written for the caller" else ())
    buffers = loaded(x, static, mutated=mutated)
    if change == "other tensor":
        static = static.view(-1).view(8, WIDTH)
    elif change == "other memory":
        static.data = rows(8)
    assert not buffers.reload("key", (x, static))


@needs_shortcuts
def test_overlaps_are_found_again_where_tensors_lie_elsewhere_or_in_another_way():
    static = torch.zeros(64)
    buffers = loaded(torch.ones(2, 4), static, mutated=frozenset({1}))
    first = torch.ones(2, 4)
    assert buffers.reload("key", (first, static))
    assert buffers.reload("key", (first, static))
    assert not buffers.reload("key", (static[:8].view(2, 4), static))
    assert buffers.reload("key", (torch.ones(2, 4), static))
    assert not buffers.reload("key", (static.as_strided((2, 4), (30, 1)), static))
    assert buffers.reload("key", (first, static))
