"""Inside `capture()` calls are warm-ups; at its end every key met is captured, running nothing."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
import toy
from toy import FULL, NONE, PIECEWISE, VARIANTS, Twin, compiled, counts, rows, toy_model

from compile_backend import BatchDescriptor, capture, get_forward_context, set_forward_context
from compile_backend import reset as drop_graphs
from compile_backend.reference_engine import ReferenceEngine

MODES = pytest.mark.parametrize("mode", [PIECEWISE, FULL], ids=lambda mode: mode.name)
NUM_LAYERS = 2
PER_KEY = {PIECEWISE: NUM_LAYERS + 1, FULL: 1}


def ahead(variant: str, mode: toy.CUDAGraphMode, **options: object) -> Twin:
    model = toy_model(variant, NUM_LAYERS)
    options = {"cudagraph_capture": "ahead", "dynamic": True, **options}
    return Twin(model, cudagraph_mode=mode.name, **options)


@pytest.mark.parametrize(
    ("mode", "variant"),
    [
        pytest.param(mode, variant, id=f"{mode.name}-{variant}")
        for mode in (PIECEWISE, FULL)
        for variant in VARIANTS
    ],
)
def test_keys_met_are_captured_and_replayed_from_then_on(mode, variant):
    both = ahead(variant, mode)
    with capture():
        for n in (16, 8, 4, 2):
            both(rows(n))
        assert both.stats.total("captures") == 0
    captured = {mode: 4 * PER_KEY[mode]}
    assert counts(both.stats, "captures") == captured
    assert counts(both.stats, "replays") == {}
    for n in (4, 16, 2, 8, 4):
        both(rows(n))
    assert counts(both.stats, "captures") == captured
    assert counts(both.stats, "replays") == {mode: 5 * PER_KEY[mode]}


@MODES
def test_capturing_runs_nothing(mode):
    both = Twin(toy_model("attn_state", NUM_LAYERS, names=True), cudagraph_mode=mode.name)
    with capture():
        both(rows(8))
        before = dict(toy.calls)
    assert dict(toy.calls) == before
    for _ in range(2):
        both(rows(8))


@MODES
def test_several_calls_of_a_key_are_several_warm_ups(mode):
    both = ahead("attn_state", mode)
    with capture():
        for _ in range(3):
            both(rows(8))
    assert counts(both.stats, "warm_ups") == {mode: 3 * PER_KEY[mode]}
    assert counts(both.stats, "captures") == {mode: PER_KEY[mode]}
    both(rows(8))


@MODES
def test_an_unseen_key_runs_without_a_graph_and_is_told_once(mode, caplog):
    both = ahead("attn_new", mode)
    with capture():
        both(rows(8))
    for n in (4, 2, 4, 2, 8):
        both(rows(n))
    assert counts(both.stats, "steps") == {NONE: 4, mode: 2}
    assert counts(both.stats, "captures") == {mode: PER_KEY[mode]}
    assert len([r for r in caplog.records if "not captured" in r.message]) == 1


def test_without_a_session_nothing_is_captured_ahead():
    both = ahead("attn_new", FULL)
    for _ in range(3):
        both(rows(8))
    assert counts(both.stats, "steps") == {NONE: 3}


@MODES
def test_a_session_collects_garbage_once(mode, monkeypatch):
    both, collections, collect = ahead("attn_new", mode), [], gc.collect
    with capture():
        for n in (16, 8, 4):
            both(rows(n))
        monkeypatch.setattr(gc, "collect", lambda *args: collections.append(1) or collect(*args))
    assert gc.isenabled()
    assert both.stats.total("captures") == 3 * PER_KEY[mode]
    assert len(collections) == 1


@MODES
def test_a_lazily_capturing_step_collects_garbage_once(mode, monkeypatch):
    both, collections, collect = Twin(toy_model(), cudagraph_mode=mode.name), [], gc.collect
    both(rows(8))
    monkeypatch.setattr(gc, "collect", lambda *args: collections.append(1) or collect(*args))
    for _ in range(3):
        both(rows(8))
    assert len(collections) == 1


def test_the_largest_key_is_captured_first(monkeypatch):
    both, order, original = ahead("attn_new", FULL), [], ReferenceEngine.capture

    def noting(engine, call, args, trial):
        order.append(max(arg.shape[0] for arg in args if torch.is_tensor(arg)))
        return original(engine, call, args, trial)

    monkeypatch.setattr(ReferenceEngine, "capture", noting)
    with capture():
        for n in (16, 64, 32):
            both(rows(n))
    assert order == [64, 32, 16]


@MODES
def test_a_body_that_raises_captures_nothing_then_or_later(mode):
    both = ahead("attn_new", mode)

    def fails() -> None:
        both(rows(8))
        raise KeyError

    with pytest.raises(KeyError), capture():
        fails()
    for _ in range(3):
        both(rows(8))
    assert both.stats.total("captures") == 0
    with capture():
        both(rows(8))
    assert counts(both.stats, "captures") == {mode: PER_KEY[mode]}


@MODES
def test_a_key_that_was_already_warm_is_captured_too(mode):
    both = Twin(toy_model("attn_new", NUM_LAYERS), cudagraph_mode=mode.name)
    both(rows(8))
    with capture():
        both(rows(8))
    assert counts(both.stats, "captures") == {mode: PER_KEY[mode]}


@MODES
def test_a_key_that_has_its_graph_is_not_captured_again(mode):
    both = Twin(toy_model("attn_new", NUM_LAYERS), cudagraph_mode=mode.name)
    for _ in range(3):
        both(rows(8))
    with capture():
        both(rows(8))
    assert counts(both.stats, "captures") == {mode: PER_KEY[mode]}
    both(rows(8))


@pytest.fixture
def metadata():
    """The metadata that `toy::hook` met."""
    met = []
    toy.hooks.append(lambda _: met.append(get_forward_context().attn_metadata))
    yield met
    toy.hooks.clear()


@MODES
def test_a_graph_holds_the_context_of_its_step(mode, metadata):
    run = compiled(lambda x: torch.ops.toy.hook(x * 2) + 1, cudagraph_mode=mode.name)
    step = {"cudagraph_runtime_mode": mode, "batch_descriptor": BatchDescriptor(8, 8)}
    with capture(), set_forward_context("captured", **step):
        run(rows(8))
    for _ in range(2):
        with set_forward_context("replayed", **step):
            run(rows(8))
    frozen = "captured" if mode is FULL else "replayed"
    assert metadata == ["captured", frozen, frozen]


def test_what_cannot_be_captured_is_told_and_the_rest_is(caplog):
    def waits(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.toy.hook(x * 2) + 1

    toy.hooks.append(lambda x: x.shape[0] == 4 and x.sum().item())
    try:
        both = Twin(waits, cudagraph_mode="FULL", dynamic=True)
        with capture():
            for n in (8, 4, 2):
                both(rows(n))
        assert counts(both.stats, "captures") == {FULL: 2}
        assert both.stats.total("failed_captures") == 1
        for n in (8, 4, 2) * 2:
            both(rows(n))
        assert counts(both.stats, "steps")[PIECEWISE] == 2
    finally:
        toy.hooks.clear()
    assert len([r for r in caplog.records if "item" in r.message]) == 1


def test_two_models_are_captured_in_one_session():
    one, other = ahead("attn_new", FULL), ahead("attn_out", PIECEWISE)
    with capture():
        for n in (8, 4):
            one(rows(n))
            other(rows(n))
    for n in (4, 8):
        one(rows(n))
        other(rows(n))
    assert counts(one.stats, "replays") == {FULL: 2}
    assert counts(other.stats, "replays") == {PIECEWISE: 2 * PER_KEY[PIECEWISE]}


def test_a_reset_inside_a_session_is_no_error():
    both = ahead("attn_new", FULL)
    with capture():
        both(rows(8))
        drop_graphs(both.compiled)
    both(rows(8))
    with capture():
        both(rows(8))
    both(rows(8))
    assert both.stats.total("replays") == 1


def test_a_session_says_how_many_keys_it_captured(caplog):
    both = ahead("attn_new", FULL)
    with caplog.at_level(logging.INFO, "compile_backend"), capture():
        both(rows(8))
        both(rows(4))
    assert "captured 2 keys in" in caplog.text
