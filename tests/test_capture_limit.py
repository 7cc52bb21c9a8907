"""Graphs within a limit of device memory: which sizes are left out, and how their batches run."""

from __future__ import annotations

import logging

import pytest
import torch
from every_mode import FULL, PIECEWISE
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_toy import make_loop

from compile_backend import BatchDescriptor, ConfigError, CUDAGraphMode
from compile_backend.capture_keys import beyond
from compile_backend.config import CompilationConfig
from compile_backend.dispatch import CudagraphDispatcher
from compile_backend.runner_report import CaptureMeter


def key(size: int) -> BatchDescriptor:
    return BatchDescriptor(size, size)


def test_the_largest_sizes_are_left_out_first_by_hand() -> None:
    peaks = {
        (PIECEWISE, key(8)): 80,
        (PIECEWISE, key(2)): 20,
        (FULL, key(8)): 90,
        (FULL, key(2)): 10,
    }
    assert beyond(peaks, 170) == {}
    assert beyond(peaks, 169) == {(PIECEWISE, key(8)): 80}
    assert beyond(peaks, 30) == {(PIECEWISE, key(8)): 80, (FULL, key(8)): 90}
    assert beyond(peaks, 29) == {
        (PIECEWISE, key(8)): 80,
        (PIECEWISE, key(2)): 20,
        (FULL, key(8)): 90,
    }
    assert beyond(peaks, 0) == peaks


@given(
    peaks=st.dictionaries(
        st.tuples(st.sampled_from([FULL, PIECEWISE]), st.integers(1, 9).map(key)),
        st.integers(0, 50),
    ),
    max_bytes=st.integers(0, 120),
)
@settings(deadline=None, database=None)
def test_what_is_kept_fits_and_nothing_more_would(peaks: dict, max_bytes: int) -> None:
    left_out = beyond(peaks, max_bytes)
    kept = {name: size for name, size in peaks.items() if name not in left_out}

    def taken(of: dict) -> int:
        return sum(
            max((size for (at, _), size in of.items() if at is mode), default=0)
            for mode in (FULL, PIECEWISE)
        )

    assert taken(kept) <= max_bytes
    for name, size in left_out.items():
        assert size == peaks[name]
        assert taken({**kept, name: size}) > max_bytes


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_batches_without_their_key_take_what_else_there_is(mode: str) -> None:
    sizes = {"cudagraph_capture_sizes": [2, 4, 8]}
    made = CudagraphDispatcher(CompilationConfig(**sizes), max_num_seqs=8)
    made.initialize_cudagraph_keys(mode)
    every = {(at, held) for at, keys in made.capture_plan() for held in keys}
    without = {(at, held) for at, held in every if at is FULL and held.num_tokens == 8}
    made.initialize_cudagraph_keys(mode, without=without)
    assert {(at, held) for at, keys in made.capture_plan() for held in keys} == every - without
    for uniform in (False, True):
        at, held = made.dispatch(BatchDescriptor(7, 7, uniform))
        assert (at, held) not in without
        both = mode == "FULL_AND_PIECEWISE"
        expected = PIECEWISE if both or mode == "PIECEWISE" else CUDAGraphMode.NONE
        assert at is expected
    made.initialize_cudagraph_keys(mode)
    assert {(at, held) for at, keys in made.capture_plan() for held in keys} == every


def test_a_runner_within_a_limit_runs_every_batch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With memory that is made up, as none is measured on a CPU."""
    sizes = []

    def peak(meter: CaptureMeter, run) -> int:
        run()
        sizes.append(run.args)
        return 1000 * run.args[-1].num_tokens

    monkeypatch.setattr(CaptureMeter, "peak", peak)
    monkeypatch.setattr("compile_backend.runner.check_memory_limit", lambda *_: None)
    loop = make_loop("FULL_AND_PIECEWISE", is_captured=False)
    with caplog.at_level(logging.WARNING):
        loop.runner.capture(progress=False, max_bytes=6000)
    kept = {
        mode: [size for at, size in loop.runner.report().by_size if at is mode]
        for mode in (FULL, PIECEWISE)
    }
    most = {mode: max(held, default=0) for mode, held in kept.items()}
    assert most == {FULL: 4, PIECEWISE: 2}
    assert len(sizes) > len(kept[FULL]) + len(kept[PIECEWISE])
    (told,) = (row.getMessage() for row in caplog.records if "max_bytes" in row.getMessage())
    assert "without graphs" in told
    loop.step([(loop.add([1, 2]), 2)])
    for _ in range(3):
        loop.step(loop.grow(0))
    loop.step([(loop.add([*range(8)]), 8)])
    ran = {mode: loop.runner.report().steps(mode) for mode in (*kept, CUDAGraphMode.NONE)}
    assert ran == {FULL: 3, PIECEWISE: 1, CUDAGraphMode.NONE: 1}
    captures = loop.runner.report().num_graphs
    loop.runner.recapture(progress=False)
    assert sum(loop.runner.report().num_graphs.values()) > sum(captures.values())


@pytest.mark.parametrize(
    ("value", "text"),
    [(-1, "no number of bytes"), (1.5, "no number"), (5, "cannot be kept on cpu")],
)
def test_a_limit_that_cannot_be_kept_is_refused(value: object, text: str) -> None:
    loop = make_loop("FULL", is_captured=False)
    with pytest.raises(ConfigError, match=f"max_bytes={value}.*{text}"):
        loop.runner.capture(progress=False, max_bytes=value)
    loop.runner.capture(progress=False)
    for again in (loop.runner.capture, loop.runner.recapture):
        with pytest.raises(ConfigError, match=text):
            again(progress=False, max_bytes=value)
        loop.step([(loop.add([1, 2]), 2)])  # what was captured is still there


@pytest.mark.gpu
def test_graphs_stay_within_a_limit_on_a_gpu() -> None:
    loop = make_loop("FULL", device="cuda", backend="triton", is_captured=False)
    loop.runner.capture(progress=False, max_bytes=0)
    assert not sum(loop.runner.report().num_graphs.values())
    loop.step([(loop.add([1, 2, 3]), 3)])
    loop.runner.recapture(progress=False, max_bytes=1 << 30)
    assert sum(loop.runner.report().num_graphs.values())
    loop.step([(loop.add([1, 2, 3]), 3)])
    torch.cuda.synchronize()
