"""Estimates before capture, and what captures took, size by size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_toy import make_loop

from compile_backend import BatchDescriptor, CaptureError, CUDAGraphMode
from compile_backend.capture_estimate import SAMPLE, extrapolate
from compile_backend.runner_report import CaptureMeter, Cost

PIECEWISE, FULL = CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


def keys(*sizes: int) -> list[BatchDescriptor]:
    return [BatchDescriptor(size, size) for size in sizes]


def test_two_keys_tell_about_the_rest_by_hand() -> None:
    plan = [(FULL, keys(8, 4, 2, 1)), (PIECEWISE, keys(16))]
    sampled = {
        (FULL, 8): Cost(0.5, 1000),
        (FULL, 4): Cost(0.25, 10),
        (PIECEWISE, 16): Cost(2.0, 300),
    }
    estimate = extrapolate(plan, sampled, {FULL: 2, PIECEWISE: 29}, 3.0, 77)
    full, piecewise = estimate.by_mode[FULL], estimate.by_mode[PIECEWISE]
    assert (full.num_keys, full.num_graphs, full.cost) == (4, 4, Cost(1.25, 1030))
    assert (piecewise.num_keys, piecewise.num_graphs, piecewise.cost) == (1, 29, Cost(2.0, 300))
    assert estimate.warm_up_s == 3.0 * 5 / 3
    assert estimate.total == Cost(5.0 + 3.25, 1330)
    assert estimate.input_bytes == 77
    text = str(estimate)
    assert "PIECEWISE" in text
    assert "8.25" in text


@given(sizes=st.lists(st.integers(1, 99), min_size=1, max_size=6, unique=True))
@settings(deadline=None, database=None)
def test_an_estimate_of_equal_captures_is_exact(sizes: list[int]) -> None:
    plan = [(FULL, keys(*sorted(sizes, reverse=True)))]
    sampled = {(FULL, key.num_tokens): Cost(1.0, 10) for key in plan[0][1][:SAMPLE]}
    estimate = extrapolate(plan, sampled, {FULL: len(sampled)}, float(len(sampled)), 0)
    assert estimate.by_mode[FULL].cost == Cost(len(sizes), 10 * len(sizes))
    assert estimate.by_mode[FULL].num_graphs == len(sizes)
    assert estimate.warm_up_s == pytest.approx(len(sizes))


def test_a_plan_without_keys_takes_nothing() -> None:
    estimate = extrapolate([], {}, {}, 0.0, 5)
    assert estimate.total == Cost(0.0, 0)


@pytest.mark.parametrize(
    "mode", [*("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")]
)
def test_a_runner_estimates_what_it_then_captures(mode: str) -> None:
    loop = make_loop(mode, is_captured=False)
    runner = loop.runner
    estimate = runner.estimate()
    with pytest.raises(CaptureError, match="call capture"):
        runner.run(loop.batch([(loop.add([1, 2]), 2)]))
    runner.capture(progress=False)
    report = runner.report()
    assert {at: of.num_graphs for at, of in estimate.by_mode.items()} == report.num_graphs
    assert estimate.input_bytes == report.input_bytes
    for at, of in estimate.by_mode.items():
        assert of.num_keys == sum(mode_of is at for mode_of, _ in report.by_size)
    loop.step([(loop.add([1, 2, 3]), 3)])
    loop.step(loop.grow(1))
    with pytest.raises(CaptureError, match=r"report\(\) tells"):
        runner.estimate()


def test_what_each_size_took_adds_up() -> None:
    report = make_loop("FULL_AND_PIECEWISE").runner.report()
    for mode in (FULL, PIECEWISE):
        costs = [cost for (at, _), cost in report.by_size.items() if at is mode]
        assert len(costs) == 5 if mode is PIECEWISE else costs
        assert report.capture_s[mode] == pytest.approx(sum(cost.seconds for cost in costs))
        assert report.num_bytes[mode] == sum(cost.num_bytes for cost in costs) == 0
    sizes = [num_tokens for at, num_tokens in report.by_size if at is PIECEWISE]
    assert sizes == sorted(sizes, reverse=True)


def test_memory_is_told_by_size_where_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = CaptureMeter(torch.device("cpu"))
    held = [0]
    monkeypatch.setattr(meter, "_reserved", lambda: held[0])

    def capture(num_bytes: int) -> None:
        held[0] += num_bytes

    for size, num_bytes in ((8, 4 * 2**20), (4, 2**20), (4, 2**19)):
        meter.measure((FULL, size), lambda taken=num_bytes: capture(taken))
    assert {size: cost.num_bytes for (_, size), cost in meter.by_size.items()} == {
        8: 4 * 2**20,
        4: 3 * 2**19,
    }
    assert meter.by_mode()[FULL].num_bytes == held[0]
    runner = make_loop("FULL").runner
    runner._capture.meter = meter
    text = str(runner.report())
    assert "Captures, the largest first" in text
    assert "4.0" in text
    assert "1.5" in text


@pytest.mark.gpu
def test_an_estimate_is_near_what_is_captured_on_a_gpu() -> None:
    loop = make_loop("FULL_AND_PIECEWISE", device="cuda", backend="triton", is_captured=False)
    estimate = loop.runner.estimate()
    loop.runner.capture(progress=False)
    report = loop.runner.report()
    assert {at: of.num_graphs for at, of in estimate.by_mode.items()} == report.num_graphs
    assert estimate.total.seconds > 0
