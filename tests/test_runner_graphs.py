"""What graphs of a runner's pieces do for it: bring its inputs, and write to memory of its own."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from paged_toy import PagedToy, compiled, make_builder, make_loop
from toy import toy_options

from compile_backend import (
    Batch,
    CUDAGraphMode,
    Dim,
    GraphModelRunner,
    InputSpec,
    reference_engine,
    stats,
)
from compile_backend.backend import cudagraph_modes
from compile_backend.batch import BatchDescriptor, of_runner
from compile_backend.context import ForwardContext, SetBy, enter_forward_context
from compile_backend.graph_engine import Sessions
from compile_backend.runner_graphs import OfRunner, RunnerGraphs

if TYPE_CHECKING:
    from collections.abc import Iterator

PIECEWISE = CUDAGraphMode.PIECEWISE
ROWS = InputSpec("x", (Dim.NUM_TOKENS, 3), torch.float32)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Rows(torch.nn.Module):
    """Two pieces around an op that splits, then values of the first and views of the last."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rows `[num_tokens, 3]` to several."""
        first = x * 2
        last = torch.ops.toy.attn_new(first) + 1
        pair = torch.stack([last, last * 10], dim=1)
        return {"first": first, "last": last, "high": pair[:, 1], "low": pair[:, 0]}


def rows(
    called: Any, *, sizes: tuple[int, ...] = (2, 4), device: str = "cpu", mode: str = "PIECEWISE"
) -> GraphModelRunner:
    config = {"cudagraph_mode": mode, "cudagraph_capture_sizes": sizes}
    runner = GraphModelRunner(called, config, input_spec=[ROWS], max_num_seqs=4, device=device)
    runner.capture(progress=False)
    return runner


OPTIONS = toy_options(cudagraph_mode="PIECEWISE", cudagraph_capture_sizes=[2, 4])
COMPILE: dict[str, Any] = {"backend": "cudagraph_modes", "dynamic": True}


def compiled_rows(model: Any = None, **options: Any) -> Any:
    return torch.compile(model or Rows(), options={**OPTIONS, **options}, **COMPILE)


def batch(number: int, value: float) -> Batch:
    x = np.arange(3 * number, dtype=np.float32).reshape(number, 3) + np.float32(value)
    return Batch(query_lens=[1] * number, inputs={"x": x})


def checked(outputs: dict[str, torch.Tensor], of: Batch) -> None:
    with torch.no_grad():
        expected = Rows()(torch.from_numpy(of.inputs["x"]))
    torch.testing.assert_close({name: out.cpu() for name, out in outputs.items()}, expected)


def last_steps(runner: GraphModelRunner) -> list[Any]:
    """What the known steps at PIECEWISE are replayed by."""
    assert runner._captured is not None
    assert runner._captured.piecewise is not None
    return list(runner._captured.piecewise._steps.values())


@pytest.mark.parametrize("device", DEVICES)
def test_only_what_the_last_piece_did_not_make_is_copied(device: str) -> None:
    with torch.no_grad():
        runner = rows(compiled_rows(Rows().to(device)), device=device)
    for value in range(6):
        for number in (2, 1, 4, 3):
            work = batch(number, value)
            checked(runner.run(work), work)
    steps = last_steps(runner)
    assert len(steps) == 2
    for step in steps:
        assert step.sends_inputs
        loan = step.graph._repeated[step.key].loan
        names = step.returned
        copied = {
            name
            for name, slot in names.items()
            if loan.returned[slot.index] is not loan.outputs[slot.index]
        }
        assert copied == {"first"}


@pytest.mark.parametrize("device", DEVICES)
def test_outputs_stay_while_others_use_the_model(device: str) -> None:
    """Plain calls, another runner and further captures, at all sizes."""
    with torch.no_grad():
        called = compiled_rows(Rows().to(device))
        runner, other = rows(called, device=device), rows(called, device=device)
        for value in range(5):
            work = batch(4, value)
            outputs = runner.run(work)
            for number in (1, 2, 4):
                x = torch.full((number, 3), -7.0, device=device)
                called(x)
                other.run(batch(number, -9.0))
            checked(outputs, work)
            if value == 3:
                rows(called, device=device, sizes=(1, 3)).run(batch(3, -8.0))
                checked(outputs, work)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_modes_take_turns(mode: str, device: str) -> None:
    loop = make_loop(mode, device=device)
    first, second = loop.add(range(1, 30)), loop.add(range(5, 34))
    for count in (3, 1, 2, 1, 1, 4, 1, 1):
        loop.step([(first, count), (second, 1)])
        loop.step([(second, count)])
    for count in (1, 2, 2, 1):
        batch = loop.batch([(first, count)])
        loop.runner.run(batch, highest_mode="PIECEWISE")
        loop.step([(first, count)], highest_mode="PIECEWISE")


def test_a_copied_batch_and_one_by_hand_are_the_same() -> None:
    """Lists are no plain arrays: the general code writes them, and the graph brings them."""
    with torch.no_grad():
        runner = rows(compiled_rows())
    for value in range(6):
        work = batch(2, value)
        lists = Batch(query_lens=[1, 1], inputs={"x": work.inputs["x"].tolist()})
        checked(runner.run(lists), work)
        checked(runner.run(work), work)


def test_without_copies_of_outputs() -> None:
    with torch.no_grad():
        runner = rows(compiled_rows(cudagraph_clone_outputs=False))
    for value in range(6):
        for number in (2, 4):
            work = batch(number, value)
            checked(runner.run(work), work)


@pytest.mark.parametrize("register", ["register_forward_pre_hook", "register_forward_hook"])
@pytest.mark.parametrize("whose", ["compiled", "own", "in place", "of a method"])
def test_hooks_of_a_compiled_module_run_in_each_step(register: str, whose: str) -> None:
    calls = []
    with torch.no_grad():
        model = Rows()
        called = compiled_rows(model)
        if whose == "in place":
            model.compile(options=OPTIONS, **COMPILE)
            called = model
        elif whose == "of a method":
            called = torch.compile(model.__call__, options=OPTIONS, **COMPILE)

        def hook(_module: Any, args: Any, kwargs: Any, *_outputs: Any) -> None:
            calls.append(1)
            kwargs["x"].add_(1)

        getattr(called if whose == "compiled" else model, register)(hook, with_kwargs=True)
        runner = rows(called)
        for value in range(6):
            before = len(calls)
            outputs = runner.run(batch(2, value))
            assert len(calls) == before + 1
            if register == "register_forward_pre_hook":
                checked(outputs, batch(2, value + 1))


@pytest.mark.parametrize("again", ["recapture", "capture"])
def test_a_hook_that_comes_or_goes_holds_from_the_next_capture_on(again: str) -> None:
    def add_one(_module: Any, _args: Any, kwargs: Any) -> None:
        kwargs["x"].add_(1)

    with torch.no_grad():
        called = compiled_rows()
        runner = rows(called)
        for hook in (None, add_one, None):
            handle = hook and called.register_forward_pre_hook(hook, with_kwargs=True)
            getattr(runner, again)(progress=False)
            for value in range(4):
                checked(runner.run(batch(2, value)), batch(2, value + (hook is not None)))
            assert [step.sends_inputs for step in last_steps(runner)] == [True] * (hook is None)
            if handle:
                handle.remove()


class Called(Rows):
    def __call__(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        add_five(x)
        return super().__call__(x)


@pytest.mark.parametrize("how", ["a call of its own", "another forward"])
def test_python_around_the_compiled_call_runs_in_each_step(how: str) -> None:
    with torch.no_grad():
        if how == "a call of its own":
            called = Called()
            called.compile(options=OPTIONS, **COMPILE)
        else:
            called = compiled_rows()
            forward = called.forward
            called.forward = lambda x: forward(x.add_(5))
        runner = rows(called)
        for value in range(6):
            checked(runner.run(batch(4, value)), batch(4, value + 5))
    assert not last_steps(runner)


def test_steps_of_a_graph_module_are_known() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    attended = graph.call_function(torch.ops.toy.attn_new.default, (x,))
    graph.output(graph.call_function(torch.add, (attended, 1)))
    with torch.no_grad():
        runner = rows(compiled_rows(torch.fx.GraphModule(torch.nn.Module(), graph)))
        for value in range(3):
            runner.run(batch(2, value))
    assert len(last_steps(runner)) == 1


@torch._dynamo.disable
def add_five(x: torch.Tensor) -> None:
    x.add_(5)


class BeforeABreak(Rows):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        add_five(x)
        return super().forward(x)


class WithoutDynamo(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Rows()

    @torch._dynamo.disable(recursive=False)
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x.add_(5)
        return self.inner(x)


class Decorated(Rows):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", [BeforeABreak, WithoutDynamo])
def test_python_before_the_graph_runs_in_each_step(model: Any, device: str) -> None:
    with torch.no_grad():
        runner = rows(compiled_rows(model().to(device)), device=device)
        for value in range(6):
            checked(runner.run(batch(4, value)), batch(4, value + 5))
    assert not last_steps(runner)


def test_a_function_that_is_decorated_is_one_graph() -> None:
    with torch.no_grad():
        runner = rows(compiled_rows(Decorated()))
        for value in range(3):
            checked(runner.run(batch(4, value)), batch(4, value))
    assert len(last_steps(runner)) == 1


def test_a_capture_is_one_series_of_each_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes before a series, as waiting for the device, comes once and not by size."""
    entered: list[object] = []

    def made() -> Sessions:
        number = object()

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            entered.append(number)
            yield

        return Sessions(around)

    monkeypatch.setattr(reference_engine, "Sessions", made)
    monkeypatch.setattr(cudagraph_modes, "_engines", {})
    with torch.no_grad():
        called = compiled_rows()
        rows(called, sizes=(1, 2, 3, 4))
    assert len(entered) == len(set(entered)) == 2
    assert stats(called).total("captures") == 4 * 2


# --- by itself --------------------------------------------------------------------------------


class Engine:
    """Stands for a runner's."""


def key(number: int) -> BatchDescriptor:
    return BatchDescriptor(2, 1, extra=of_runner(number))


def test_inputs_are_brought_for_keys_of_runners_only() -> None:
    sent: list[BatchDescriptor] = []
    own: Any = Engine()
    graphs = RunnerGraphs({1: OfRunner(own, sent.append, bool), 2: OfRunner(own, None, bool)})
    call = graphs.opened(lambda x: x + 1)
    assert call(1) == 2
    for number in range(4):
        with enter_forward_context(ForwardContext(None, PIECEWISE, key(number)), SetBy.GRAPH):
            assert call(number) == number + 1
        assert graphs.sends(key(number)) == (number == 1)
        assert (graphs.engine_of(key(number)) is own) == (number in (1, 2))
    assert sent == [key(1)]


def test_graphs_keep_no_runner_alive() -> None:
    model = PagedToy()
    called = compiled(model)
    loop = make_loop("PIECEWISE", model, called=called, builder=make_builder(model))
    loop.step([(loop.add([1, 2, 3]), 2)])
    inputs = weakref.ref(loop.runner._parts.loader.inputs)
    del loop
    gc.collect()
    assert inputs() is None
    assert stats(called).graphs == 1
