"""Several runners on one compiled model: each has graphs of its own, as long as it lives."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch
from paged_toy import (
    MAX_MODEL_LEN,
    SPEC,
    Loop,
    PagedToy,
    compiled,
    make_builder,
    make_loop,
)

from compile_backend import CUDAGraphMode, stats
from compile_backend.attention.sdpa import SdpaAttention
from compile_backend.attention.spec import CacheFormat
from compile_backend.batch import runner_of

if TYPE_CHECKING:
    import pytest

    from compile_backend.stats import Report

PIECEWISE = CUDAGraphMode.PIECEWISE
CPU = torch.device("cpu")
CACHE = CacheFormat(block_size=4, dtype=torch.float32, max_model_len=MAX_MODEL_LEN)


def loops_on(called: Any, model: PagedToy, number: int = 2, **options: Any) -> list[Loop]:
    """Loops whose runners share a model and its caches; each with blocks of its own."""
    builder = make_builder(model)
    made = []
    for i in range(number):
        loop = make_loop("PIECEWISE", model, called=called, builder=builder, **options)
        loop.used = 16 * i
        made.append(loop)
    return made


def in_turns(loops: list[Loop], num_steps: int) -> None:
    """A prompt and some decodes of each, one after the other."""
    for loop in loops:
        loop.step([(loop.add([1, 2, 3]), 3)])
    for _ in range(num_steps):
        for loop in loops:
            loop.step(loop.grow(0))


def captures(report: Report) -> int:
    return sum(counts.captures for counts in report.by_key.values())


def test_runners_in_turns_keep_their_graphs(caplog: pytest.LogCaptureFixture) -> None:
    model = PagedToy()
    called = compiled(model)
    first, second = loops_on(called, model)
    before = captures(stats(called))
    caplog.clear()
    in_turns([first, second], 6)
    assert captures(stats(called)) == before
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    for loop in (first, second):
        assert loop.ran() == {"PIECEWISE": [1] * 6 + [4]}


def test_each_reports_what_is_its_own() -> None:
    model = PagedToy()
    first, second = loops_on(compiled(model), model, sizes=(2, 4))
    in_turns([first, second], 2)
    in_turns([second], 3)
    for loop, steps in ((first, 2), (second, 5)):
        report = loop.runner.report()
        assert report.num_graphs == {PIECEWISE: 2 * 3}
        decodes = [c for (_, key), c in report.by_key.items() if key.num_tokens == 2]
        (counts,) = decodes
        assert counts.steps == steps
        assert counts.captures == 3
        # Of the pieces, in warm-ups none.
        assert counts.replays == 3 * steps
        assert all(not key.extra for _, key in report.by_key)


def test_a_runner_that_is_gone_leaves_no_graphs() -> None:
    model = PagedToy()
    called = compiled(model)
    first, second, third = loops_on(called, model, 3)
    in_turns([first, second, third], 2)
    gone = weakref.ref(second.runner)
    del second
    gc.collect()
    assert gone() is None
    (fourth,) = loops_on(called, model, 1)
    fourth.used = 48
    before = captures(stats(called))
    in_turns([fourth], 3)
    for loop in (first, third):
        loop.step(loop.grow(0))
    assert captures(stats(called)) == before
    # The fourth has the number of the second; what runs without graphs has none.
    assert {runner_of(key) for _, key in stats(called).by_key} == {0, 1, 2, 3}


def test_a_runner_after_another_is_as_the_first() -> None:
    model = PagedToy()
    called = compiled(model)
    (first,) = loops_on(called, model, 1)
    in_turns([first], 2)
    del first
    (second,) = loops_on(called, model, 1)
    in_turns([second], 2)
    assert {runner_of(key) for _, key in stats(called).by_key} == {0, 1}
    assert second.ran() == {"PIECEWISE": [1, 1, 4]}


def test_recapture_of_one_serves_both() -> None:
    model = PagedToy()
    first, second = loops_on(compiled(model), model)
    in_turns([first, second], 3)
    first.runner.recapture(progress=False)
    for loop in (second, first, second, first):
        loop.step(loop.grow(0))
    assert second.ran() == {"PIECEWISE": [1] * 5 + [4]}


def test_what_failed_for_one_is_tried_again_for_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "compile_backend")  # records would keep the runner alive

    class Syncing(SdpaAttention):
        def store(self, key: Any, value: Any, cache: Any, metadata: Any) -> None:
            metadata.slot_mapping.max().item()
            super().store(key, value, cache, metadata)

    model = PagedToy()
    called = compiled(model)
    reports = []
    for kind in (Syncing, SdpaAttention):
        builder = make_builder(model, backend=lambda _, kind=kind: kind(SPEC, CACHE, CPU))
        loop = make_loop("PIECEWISE", model, called=called, builder=builder)
        in_turns([loop], 4)
        reports.append(loop.runner.report())
        number = loop.runner._parts.model_steps.number
        del loop, builder
        gc.collect()
    assert number == 1
    failed = [sum(row.failed_captures for row in report.by_key.values()) for report in reports]
    assert failed[0] > failed[1] == 0
    assert reports[1].num_graphs == {PIECEWISE: 5 * 3}


def test_a_runner_that_is_made_again_reports_its_graphs() -> None:
    model = PagedToy()
    called = compiled(model)
    reports = []
    for _ in range(2):
        (loop,) = loops_on(called, model, 1, sizes=(2, 4))
        in_turns([loop], 3)
        reports.append(loop.runner.report())
        del loop
        gc.collect()
    first, second = reports
    assert first.num_graphs == second.num_graphs == {PIECEWISE: 2 * 3}
    assert first.by_key == second.by_key


def test_a_runner_keeps_its_number() -> None:
    model = PagedToy()
    called = compiled(model)
    first, second = loops_on(called, model)
    in_turns([first, second], 2)
    del first
    gc.collect()
    second.runner.capture(progress=False)
    assert second.runner._parts.model_steps.number == 2
    second.step(second.grow(0))
