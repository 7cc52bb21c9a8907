"""One contract for both engines: capture freezes a callable to its addresses and its context."""

from __future__ import annotations

import gc
import importlib
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from toy import PIECEWISE

from compile_backend.batch import BatchDescriptor
from compile_backend.context import current_forward_context, set_forward_context
from compile_backend.errors import CaptureError
from compile_backend.graph_engine import CudaEngine, GraphEngine, StaticGraph
from compile_backend.reference_engine import ReferenceEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@pytest.fixture(params=["reference", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> GraphEngine:
    if request.param == "cuda":
        return CudaEngine(torch.device("cuda", torch.cuda.current_device()))
    return ReferenceEngine()


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def captured(
    engine: GraphEngine, call: Callable[..., Any], args: Sequence[Any]
) -> tuple[Any, StaticGraph]:
    """What the warm-up returned, and the graph."""
    outputs, trial = engine.warm_up(call, args)
    return outputs, engine.capture(call, args, trial)


def ones(engine: GraphEngine, *shape: int) -> torch.Tensor:
    return torch.ones(*(shape or (4,)), device=engine.device)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_warm_up_runs_once_and_returns_the_results(engine):
    state = ones(engine)
    outputs, _ = engine.warm_up(lambda x: x.add_(1), (state,))
    assert outputs.tolist() == [2.0] * 4
    assert state.tolist() == [2.0] * 4


def test_a_capture_runs_nothing(engine):
    state = ones(engine)
    _, graph = captured(engine, lambda x: x.add_(1), (state,))
    assert state.tolist() == [2.0] * 4
    graph.replay()
    assert state.tolist() == [3.0] * 4


def test_a_replay_reads_the_captured_tensors_and_writes_the_captured_outputs(engine):
    x = ones(engine)
    _, graph = captured(engine, double, (x,))
    address = graph.outputs.data_ptr()
    for value in (3.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert graph.outputs.data_ptr() == address
        assert graph.outputs.tolist() == [2 * value] * 4


def test_a_replay_does_not_see_a_tensor_that_took_the_place_of_a_captured_one(engine):
    holder = {"x": ones(engine)}
    _, graph = captured(engine, double, (holder["x"],))
    holder["x"] = ones(engine) * 10
    graph.replay()
    assert graph.outputs.tolist() == [2.0] * 4


def test_a_replay_sees_the_context_of_its_capture(engine):
    scale = ones(engine)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        context = current_forward_context()
        assert context is not None
        return x * context.attn_metadata

    x, key = ones(engine), BatchDescriptor(4, 4)
    three, hundred = scale * 3, scale * 100  # a graph keeps neither alive
    with set_forward_context(three, cudagraph_runtime_mode=PIECEWISE, batch_descriptor=key):
        _, graph = captured(engine, scaled, (x,))
    with set_forward_context(hundred):
        graph.replay()
    assert graph.outputs.tolist() == [3.0] * 4
    graph.replay()
    assert graph.outputs.tolist() == [3.0] * 4


def test_nothing_is_left_of_the_captured_context_after_a_replay(engine):
    with set_forward_context("captured"):
        _, graph = captured(engine, double, (ones(engine),))
    with set_forward_context("current"):
        graph.replay()
        context = current_forward_context()
    assert context is not None
    assert context.attn_metadata == "current"


def test_outputs_keep_their_structure_and_constants(engine):
    x = ones(engine)

    def nested(x: torch.Tensor) -> Any:
        return {"pair": (x + 1, [x - 1]), "none": None, "size": x.shape[0]}

    _, graph = captured(engine, nested, (x,))
    graph.replay()
    (more, [less]), none, size = (graph.outputs[name] for name in ("pair", "none", "size"))
    assert more.tolist() == [2.0] * 4
    assert less.tolist() == [0.0] * 4
    assert none is None
    assert size == 4


def test_outputs_keep_dtype_size_and_stride(engine):
    x = ones(engine, 4, 6)

    def several(x: torch.Tensor) -> Any:
        return (x + 1).t(), x > 0, x.sum(), (x * 2).to(torch.int32), x.new_empty(0, 3)

    eager, graph = captured(engine, several, (x,))
    graph.replay()
    for actual, expected in zip(graph.outputs, eager, strict=True):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert actual.stride() == expected.stride()
        torch.testing.assert_close(actual, expected)


def test_an_output_that_views_an_argument_stays_one(engine):
    x = ones(engine, 4, 6)
    _, graph = captured(engine, lambda x: x[1:].t(), (x,))
    x.fill_(7)
    graph.replay()
    assert graph.outputs.data_ptr() == x[1:].data_ptr()
    torch.testing.assert_close(graph.outputs, x[1:].t())


def test_an_output_that_is_an_argument_is_that_argument(engine):
    x = ones(engine)
    _, graph = captured(engine, lambda x: x.mul_(2), (x,))
    graph.replay()
    assert graph.outputs.data_ptr() == x.data_ptr()
    assert x.tolist() == [4.0] * 4


def test_an_output_may_view_an_argument_as_another_dtype(engine):
    x = ones(engine)
    _, graph = captured(engine, lambda x: x.view(torch.int32), (x,))
    graph.replay()
    torch.testing.assert_close(graph.outputs, x.view(torch.int32))


def test_an_output_may_be_expanded(engine):
    x = ones(engine, 1, 4)
    _, graph = captured(engine, lambda x: (x * 2).expand(3, 4), (x,))
    x.fill_(5)
    graph.replay()
    torch.testing.assert_close(graph.outputs, torch.full_like(graph.outputs, 10.0))


def test_outputs_that_share_memory_still_do(engine):
    x = ones(engine, 4, 6)

    def halves(x: torch.Tensor) -> Any:
        y = x * 2
        return y[:, :3], y[:, 3:], y

    _, graph = captured(engine, halves, (x,))
    graph.replay()
    left, right, whole = graph.outputs
    whole.fill_(9)
    assert left.eq(9).all()
    assert right.eq(9).all()


def test_a_callable_that_returns_nothing_can_be_captured(engine):
    x = ones(engine)

    def write(x: torch.Tensor) -> None:
        x.add_(1)

    _, graph = captured(engine, write, (x,))
    graph.replay()
    assert graph.outputs is None
    assert x.tolist() == [3.0] * 4


def test_a_view_at_another_offset_of_its_argument_is_captured_there(engine):
    memory = ones(engine, 2, 6)
    memory[1].fill_(3)

    def tail(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x[2:]

    _, trial = engine.warm_up(tail, (memory[0],))
    graph = engine.capture(tail, (memory[1],), trial)
    graph.replay()
    assert graph.outputs.tolist() == [4.0] * 4
    assert graph.outputs.data_ptr() == memory[1, 2:].data_ptr()


@pytest.mark.parametrize(
    "sync",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.sum() > 0),
        lambda x: int(x.sum()),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
    ],
    ids=["item", "tolist", "bool", "int", "cpu", "nonzero"],
)
def test_waiting_for_the_device_cannot_be_captured(engine, sync):
    def waits(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        sync(y)
        return y

    _, trial = engine.warm_up(waits, (ones(engine),))
    with pytest.raises(CaptureError):
        engine.capture(waits, (ones(engine),), trial)


def test_a_later_capture_works_after_a_failed_one_and_so_do_random_numbers(engine):
    x = ones(engine, 64)

    def waits(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    _, trial = engine.warm_up(waits, (x,))
    for _ in range(2):
        with pytest.raises(CaptureError):
            engine.capture(waits, (x,), trial)
    assert not engine.is_capturing()
    assert torch.rand(64, device=engine.device).unique().numel() > 1
    _, graph = captured(engine, lambda x: x + torch.rand_like(x), (x,))
    graph.replay()
    first = graph.outputs.clone()
    graph.replay()
    assert not torch.equal(first, graph.outputs)


def test_an_error_in_the_callable_is_not_left_half_captured(engine):
    broken = [True]

    def fails(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if broken[0]:
            raise KeyError("broken")
        return y

    x = ones(engine)
    with pytest.raises(KeyError):
        engine.warm_up(fails, (x,))
    broken[0] = False
    _, graph = captured(engine, fails, (x,))
    graph.replay()
    assert graph.outputs.tolist() == [2.0] * 4


def test_a_capture_inside_a_capture_is_refused(engine):
    x = ones(engine)
    _, trial = engine.warm_up(double, (x,))
    refused: list[str] = []

    def nested(x: torch.Tensor) -> torch.Tensor:
        if engine.is_capturing():
            try:
                engine.capture(double, (x,), trial)
            except CaptureError as error:
                refused.append(str(error))
        return x * 2

    _, graph = captured(engine, nested, (x,))
    graph.replay()
    assert refused
    assert "already running" in refused[0]
    assert graph.outputs.tolist() == [2.0] * 4


def test_no_capture_is_running_outside_of_one(engine):
    assert not engine.is_capturing()
    captured(engine, double, (ones(engine),))[1].replay()
    assert not engine.is_capturing()


def test_several_graphs_keep_their_own_results(engine):
    inputs = [ones(engine, n) * n for n in (8, 4, 2)]
    graphs = [captured(engine, double, (x,))[1] for x in inputs]
    for index in (1, 0, 2, 0, 1):
        graphs[index].replay()
        torch.testing.assert_close(graphs[index].outputs, inputs[index] * 2)


def test_graphs_captured_under_inference_mode_are_replayed_outside_of_it(engine):
    with torch.inference_mode():
        x = torch.ones(4, device=engine.device)
        _, graph = captured(engine, double, (x,))
    graph.replay()
    assert graph.outputs.tolist() == [2.0] * 4
    with torch.inference_mode():
        graph.replay()
    assert graph.outputs.tolist() == [2.0] * 4


def test_weak_outputs_hold_the_same_values(engine):
    x = ones(engine)
    _, graph = captured(engine, lambda x: (x * 2, None, 3), (x,))
    strong = graph.outputs
    weak = engine.keep_weakly(strong)
    graph.replay()
    assert weak[0].data_ptr() == strong[0].data_ptr()
    assert weak[0].tolist() == [2.0] * 4
    assert weak[1:] == (None, 3)


# --- one garbage collection for a series of captures ------------------------------------------


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The generation up to which each collection looked."""
    counted: list[int] = []
    collect = gc.collect

    def counting(generation: int = 2) -> int:
        counted.append(generation)
        return collect(generation)

    monkeypatch.setattr(gc, "collect", counting)
    return counted


def test_a_session_collects_once_and_holds_the_collector_off(engine, collections):
    x = ones(engine)
    trials = [engine.warm_up(double, (x,))[1] for _ in range(3)]
    assert gc.isenabled()
    with engine.session():
        for trial in trials:
            engine.capture(double, (x,), trial)
            assert not gc.isenabled()
        with engine.session():
            engine.capture(double, (x,), trials[0])
        assert not gc.isenabled()
    assert gc.isenabled()
    assert len(collections) == 1


def test_only_a_thorough_session_looks_at_old_objects(engine, collections):
    x = ones(engine)
    _, trial = engine.warm_up(double, (x,))
    engine.capture(double, (x,), trial)
    with engine.session():
        engine.capture(double, (x,), trial)
    with engine.session(thorough=True), engine.session():
        engine.capture(double, (x,), trial)
    engine.capture(double, (x,), trial)
    assert collections == [1, 1, 2, 1]


def test_a_session_that_captures_nothing_collects_nothing(engine, collections):
    with engine.session():
        assert gc.isenabled()
    assert not collections


def test_the_collector_is_restored_on_error(engine, collections):
    x = ones(engine)
    _, trial = engine.warm_up(double, (x,))

    def fails() -> None:
        engine.capture(double, (x,), trial)
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError), engine.session():
            fails()
        assert gc.isenabled()
    assert len(collections) == 2


def test_series_of_two_engines_share_one_collection(engine, collections):
    other = type(engine)(engine.device)
    x = ones(engine)
    trials = [one.warm_up(double, (x,))[1] for one in (engine, other)]
    with engine.session():
        with other.session():
            engine.capture(double, (x,), trials[0])
            other.capture(double, (x,), trials[1])
        assert not gc.isenabled()  # the series of the first goes on
        engine.capture(double, (x,), trials[0])
    assert gc.isenabled()
    assert len(collections) == 1


def test_a_collector_that_was_off_stays_off(engine):
    gc.disable()
    try:
        captured(engine, double, (ones(engine),))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_failed_capture_restores_the_collector(engine):
    def waits(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    _, trial = engine.warm_up(waits, (ones(engine),))
    with pytest.raises(CaptureError):
        engine.capture(waits, (ones(engine),), trial)
    assert gc.isenabled()


# --- the reference only -----------------------------------------------------------------------


def test_a_reference_capture_holds_no_result_before_its_first_replay():
    engine = ReferenceEngine()
    _, graph = captured(engine, lambda x: (x * 2, x > 0, x.long()), (torch.ones(4),))
    floats, _, integers = graph.outputs
    assert floats.isnan().all()
    assert integers.ne(1).all()


def test_a_reference_capture_needs_a_warm_up():
    engine = ReferenceEngine()
    _, trial = engine.warm_up(double, (torch.ones(4),))
    with pytest.raises(CaptureError, match="warmed up"):
        engine.capture(double, (torch.ones(4),), type(trial)())


def test_tensor_methods_are_as_before_after_a_warm_up():
    before = dict(torch.Tensor.__dict__)
    engine = ReferenceEngine()
    engine.warm_up(double, (torch.ones(4),))
    with pytest.raises(KeyError):
        engine.warm_up(lambda: {}["missing"], ())
    assert dict(torch.Tensor.__dict__) == before


def test_what_other_threads_wait_for_does_not_spoil_a_warm_up():
    engine = ReferenceEngine()
    inside, done = threading.Event(), threading.Event()

    def elsewhere() -> None:
        inside.wait(10)
        torch.ones(1).item()
        done.set()

    def slow(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert done.wait(10)
        return x * 2

    thread = threading.Thread(target=elsewhere)
    thread.start()
    _, trial = engine.warm_up(slow, (torch.ones(4),))
    thread.join()
    assert trial.refused is None


@pytest.mark.gpu
def test_a_cuda_graph_keeps_the_workspaces_by_which_ranks_exchange(monkeypatch):
    """torch lets one go when it takes a larger one."""
    engine = CudaEngine(torch.device("cuda", torch.cuda.current_device()))
    name = "torch.distributed._symmetric_memory"
    held = importlib.import_module(name)._group_name_to_workspace_tensor
    workspace = torch.ones(2, device=engine.device)
    monkeypatch.setitem(held, "a group", workspace)
    _, graph = captured(engine, lambda x: x * 2, [torch.ones(2, device=engine.device)])
    held["a group"] = None
    alive = weakref.ref(workspace)
    del workspace
    assert alive() is not None
    del graph
    gc.collect()
    assert alive() is None
