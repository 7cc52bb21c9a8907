"""One context at a time, set and taken back by whoever decides the mode."""

import threading

import pytest
import torch
from toy import FULL, MODES, NONE, PIECEWISE, compiled, hooks, rows

from compile_backend import BatchDescriptor, get_forward_context, set_forward_context
from compile_backend.context import (
    ForwardContext,
    SetBy,
    begin_step,
    context_set_by,
    current_capture_session,
    current_forward_context,
    end_step,
    enter_capture_session,
    enter_forward_context,
)
from compile_backend.errors import ConfigError

KEY = BatchDescriptor(4, 4)


class NoSession:
    def add(self, key, order, capture):
        raise AssertionError


def test_outside_of_a_step_there_is_none():
    assert current_forward_context() is None
    with pytest.raises(RuntimeError, match=r"no forward context is set; call the model inside"):
        get_forward_context()


def test_a_context_holds_what_was_given():
    with set_forward_context(
        "metadata", cudagraph_runtime_mode=FULL, batch_descriptor=KEY, layers=3
    ) as entered:
        context = get_forward_context()
    assert context is entered
    assert context.attn_metadata == "metadata"
    assert context.cudagraph_runtime_mode is FULL
    assert context.batch_descriptor == KEY
    assert context.extra == {"layers": 3}


def test_defaults_run_without_graphs():
    with set_forward_context():
        assert get_forward_context() == ForwardContext()
        assert get_forward_context().cudagraph_runtime_mode is NONE


def test_contexts_nest_and_are_taken_back_on_error():
    with set_forward_context("outer"):
        with pytest.raises(KeyError, match="inner"), set_forward_context("inner"):
            raise KeyError(get_forward_context().attn_metadata)
        assert get_forward_context().attn_metadata == "outer"
    assert current_forward_context() is None


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.separate_routine()])
def test_a_step_has_one_mode(mode):
    with pytest.raises(ConfigError, match="use NONE, PIECEWISE or FULL"):
        set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=KEY).__enter__()


@pytest.mark.parametrize("mode", [NONE, PIECEWISE, FULL])
def test_a_mode_may_be_given_by_name(mode):
    for name in (mode.name, mode.name.lower()):
        with set_forward_context(cudagraph_runtime_mode=name, batch_descriptor=KEY) as context:
            assert context.cudagraph_runtime_mode is mode


@pytest.mark.parametrize("mode", ["HALF", 2, None])
def test_what_is_no_mode_is_refused(mode):
    with pytest.raises(ConfigError, match=r"^cudagraph_runtime_mode=.* is not a mode; use one"):
        set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=KEY).__enter__()


@pytest.mark.parametrize("batch", [4, (4, 4), "4"])
@pytest.mark.parametrize("mode", [NONE, FULL])
def test_what_is_no_batch_is_refused(mode, batch):
    with pytest.raises(ConfigError, match=r"^batch_descriptor=.* is no BatchDescriptor; pass"):
        set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=batch).__enter__()
    assert current_forward_context() is None


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (BatchDescriptor(3, 4, uniform=True), "num_reqs=4 is more than num_tokens=3"),
        (BatchDescriptor(5, 2, uniform=True), "uniform=True contradicts num_tokens=5"),
        (BatchDescriptor("4", 4), "num_tokens='4' is no integer"),  # type: ignore[arg-type]
    ],
)
@pytest.mark.parametrize("mode", [NONE, FULL])
def test_a_batch_that_cannot_be_is_refused(mode, batch, message):
    with pytest.raises(ConfigError, match=message):
        set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=batch).__enter__()
    assert current_forward_context() is None


@pytest.mark.parametrize("mode", [PIECEWISE, FULL])
def test_a_mode_with_graphs_needs_its_batch(mode):
    with pytest.raises(ConfigError, match=r"batch_descriptor=None is missing for mode"):
        set_forward_context(cudagraph_runtime_mode=mode).__enter__()
    assert current_forward_context() is None


def test_threads_have_their_own():
    seen = []
    with set_forward_context("mine"):
        thread = threading.Thread(target=lambda: seen.append(current_forward_context()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_a_graphs_own_context_is_told_apart():
    assert context_set_by() is SetBy.NOBODY
    with set_forward_context():
        assert context_set_by() is SetBy.USER
        with enter_forward_context(ForwardContext()):
            assert context_set_by() is SetBy.GRAPH
        assert context_set_by() is SetBy.USER


def test_steps_are_begun_within_each_other():
    session, contexts = NoSession(), (ForwardContext("outer"), ForwardContext("inner"))
    with enter_capture_session(session):
        outer, inner = map(begin_step, contexts)
        for context, token in zip(reversed(contexts), (inner, outer), strict=True):
            assert get_forward_context() is context
            assert context_set_by() is SetBy.GRAPH
            assert current_capture_session() is session
            end_step(token)
        assert current_forward_context() is None


def test_a_capture_session_outlives_contexts_set_inside_it():
    session = NoSession()
    with enter_capture_session(session), set_forward_context():
        assert current_capture_session() is session
        with enter_capture_session(None):
            assert current_capture_session() is None
    assert current_capture_session() is None


# --- through the backend ----------------------------------------------------------------------


@pytest.fixture
def seen():
    """The contexts that `toy::hook` met."""
    met = []
    hooks.append(lambda _: met.append(current_forward_context()))
    yield met
    hooks.clear()


def hooked(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.toy.hook(x * 2) + 1


@pytest.mark.parametrize("mode", [NONE, PIECEWISE, FULL])
def test_ops_see_the_metadata_of_their_step(mode, seen):
    run = compiled(hooked, cudagraph_mode="FULL_AND_PIECEWISE")
    for _ in range(4):
        with set_forward_context("m", cudagraph_runtime_mode=mode, batch_descriptor=KEY, layer=1):
            run(rows(4))
    assert {context.attn_metadata for context in seen} == {"m"}
    assert {context.extra["layer"] for context in seen} == {1}


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_a_plain_call_with_a_graph_sets_a_context(mode, seen):
    run = compiled(hooked, cudagraph_mode=mode)
    for _ in range(3):
        run(rows(4))
    assert [context.cudagraph_runtime_mode.name for context in seen] == [mode] * 3
    assert {context.batch_descriptor.num_tokens for context in seen} == {4}
    assert current_forward_context() is None


def test_a_plain_call_without_a_graph_sets_a_context(seen):
    run = compiled(hooked, cudagraph_mode="FULL", cudagraph_capture_sizes=[8])
    run(rows(4))
    assert [context.cudagraph_runtime_mode for context in seen] == [NONE]
