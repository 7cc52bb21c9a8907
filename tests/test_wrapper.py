"""A wrapper warms up, captures and replays in its own mode, and calls through in all others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from toy import FULL, MODES, NONE, PIECEWISE

from compile_backend.batch import BatchDescriptor, graph_key
from compile_backend.context import current_forward_context, set_forward_context
from compile_backend.errors import CaptureError, ConfigError
from compile_backend.reference_engine import ReferenceEngine
from compile_backend.stats import GraphStats
from compile_backend.wrapper import CUDAGraphWrapper

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable

    from compile_backend.config import CUDAGraphMode

KEY = BatchDescriptor(4, 4)


class Counted:
    """Doubles its argument and counts its runs."""

    def __init__(self, run: Callable[..., Any] | None = None) -> None:
        self.runs = 0
        self._run = run or (lambda x: x * 2)

    def __call__(self, *args: Any) -> Any:
        self.runs += 1
        return self._run(*args)


def step(
    mode: CUDAGraphMode, key: BatchDescriptor = KEY, metadata: Any = None
) -> contextlib.AbstractContextManager[Any]:
    return set_forward_context(metadata, cudagraph_runtime_mode=mode, batch_descriptor=key)


def wrapped(run: Any, mode: CUDAGraphMode = FULL, **options: Any) -> CUDAGraphWrapper:
    options.setdefault("engine", ReferenceEngine())
    return CUDAGraphWrapper(run, mode, **options)


def counts(stats: GraphStats, mode: CUDAGraphMode = FULL, key: BatchDescriptor = KEY) -> tuple:
    row = stats.at(mode, key)
    return row.warm_ups, row.captures, row.replays


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in (PIECEWISE, FULL)])
def test_only_a_mode_that_captures_can_be_wrapped(mode):
    with pytest.raises(ConfigError, match="captures no graph; use PIECEWISE or FULL"):
        wrapped(Counted(), mode)


def test_a_mode_may_be_given_by_name():
    wrapper = wrapped(Counted(), "full")
    for _ in range(3):
        with step("FULL"):
            wrapper(torch.ones(4))
    assert wrapper.holds(KEY)
    with pytest.raises(ConfigError, match="runtime_mode='HALF' is not a mode"):
        wrapped(Counted(), "HALF")


@pytest.mark.parametrize("mode", [PIECEWISE, FULL])
@pytest.mark.parametrize("num_warmups", [1, 3])
def test_warm_ups_then_a_capture_then_replays(mode, num_warmups):
    run, stats, x = Counted(), GraphStats(), torch.ones(4)
    wrapper = wrapped(run, mode, stats=stats, num_warmups=num_warmups)
    results = []
    for value in range(num_warmups + 3):
        x.fill_(value)
        with step(mode):
            results.append(wrapper(x)[0].item())
    assert results == [2.0 * value for value in range(num_warmups + 3)]
    assert counts(stats, mode, graph_key(mode, KEY)) == (num_warmups, 1, 3)
    assert wrapper.holds(graph_key(mode, KEY))


def test_replays_write_one_memory():
    wrapper, x = wrapped(Counted()), torch.ones(4)
    with step(FULL):
        wrapper(x)
        first, second = wrapper(x), wrapper(x)
    assert first.data_ptr() == second.data_ptr()


@pytest.mark.parametrize(
    ("own", "current"), [(FULL, PIECEWISE), (FULL, NONE), (PIECEWISE, FULL), (PIECEWISE, NONE)]
)
def test_other_modes_call_through(own, current):
    run, stats = Counted(), GraphStats()
    wrapper = wrapped(run, own, stats=stats)
    for _ in range(3):
        with step(current):
            assert wrapper(torch.ones(4))[0] == 2
    assert run.runs == 3
    assert not stats.rows


def test_without_a_context_it_calls_through():
    run = Counted()
    wrapper = wrapped(run)
    for _ in range(3):
        wrapper(torch.ones(4))
    assert run.runs == 3
    assert not wrapper.holds(KEY)


def test_inside_a_capture_it_calls_through():
    engine, x = ReferenceEngine(), torch.ones(4)
    stats = GraphStats()
    inner = wrapped(Counted(), PIECEWISE, engine=engine, stats=stats)

    def outer_run(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + 1

    outer = wrapped(outer_run, FULL, engine=engine)
    for value in (1.0, 2.0, 3.0):
        x.fill_(value)
        with step(FULL):
            assert outer(x)[0] == 2 * value + 1
    assert not stats.rows


def test_each_key_has_its_own_graph():
    stats = GraphStats()
    wrapper = wrapped(Counted(), stats=stats)
    for _ in range(4):
        for n in (8, 4, 2):
            x = torch.ones(n)
            with step(FULL, BatchDescriptor(n, n)):
                assert wrapper(x).shape == (n,)
    for n in (8, 4, 2):
        assert counts(stats, FULL, BatchDescriptor(n, n)) == (1, 1, 3)


def test_graphs_of_pieces_do_not_tell_requests_apart():
    stats, x = GraphStats(), torch.ones(8)
    wrapper = wrapped(Counted(), PIECEWISE, stats=stats)
    for key in (BatchDescriptor(8, 8), BatchDescriptor(8, 2, True), BatchDescriptor(8, 1)):
        with step(PIECEWISE, key):
            wrapper(x)
    assert [row.captures for row in stats.rows.values()] == [1]


def test_a_replay_uses_the_captured_tensors_and_context():
    def run(x: torch.Tensor) -> torch.Tensor:
        context = current_forward_context()
        assert context is not None
        return x * context.attn_metadata

    wrapper, x = wrapped(run), torch.ones(4)
    with step(FULL, metadata=2):
        wrapper(x)
        wrapper(x)
    with step(FULL, metadata=5):
        assert wrapper(torch.full((4,), 100.0))[0] == 2


def test_unwrap_gives_the_callable():
    run = Counted()
    assert wrapped(run).unwrap() is run


def test_reset_forgets_every_key():
    stats, x = GraphStats(), torch.ones(4)
    wrapper = wrapped(Counted(), stats=stats)
    for _ in range(2):
        for _ in range(3):
            with step(FULL):
                wrapper(x)
        wrapper.reset()
        assert not wrapper.holds(KEY)
    assert counts(stats) == (2, 2, 4)


def test_drop_captures_one_key_again_without_a_warm_up():
    stats = GraphStats()
    wrapper = wrapped(Counted(), stats=stats)
    for _ in range(2):
        x = torch.ones(4)
        for _ in range(3):
            with step(FULL):
                assert wrapper(x)[0] == 2
        wrapper.drop(KEY)
    wrapper.drop(BatchDescriptor(7, 7))
    assert counts(stats) == (1, 2, 5)


def syncs(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


def test_a_failed_capture_runs_that_key_eagerly_and_is_told_once(caplog):
    stats, x = GraphStats(), torch.ones(4)
    wrapper = wrapped(syncs, name="syncs", stats=stats)
    for _ in range(4):
        with step(FULL):
            assert wrapper(x)[0] == 4
    row = stats.at(FULL, KEY)
    assert (row.warm_ups, row.failed_captures, row.captures, row.eager) == (1, 1, 0, 3)
    assert wrapper.has_failures
    assert "item" in (wrapper.failure(KEY) or "")
    assert len([r for r in caplog.records if "cannot be captured" in r.message]) == 1
    assert "syncs" in caplog.text


def test_a_failed_capture_leaves_other_keys_alone():
    wrapper = wrapped(lambda x: syncs(x) if x.numel() == 4 else x * 2)
    for _ in range(3):
        for n in (4, 8):
            with step(FULL, BatchDescriptor(n, n)):
                wrapper(torch.ones(n))
    assert wrapper.failure(BatchDescriptor(4, 4))
    assert wrapper.holds(BatchDescriptor(8, 8))


def test_strict_raises_what_could_not_be_captured():
    wrapper, x = wrapped(syncs, strict=True), torch.ones(4)
    with step(FULL):
        wrapper(x)
        with pytest.raises(CaptureError, match=r"FULL for .*num_tokens=4.*item"):
            wrapper(x)


def test_an_error_in_the_warm_up_costs_nothing_but_that_call():
    broken = [True]

    def fails_once(x: torch.Tensor) -> torch.Tensor:
        if broken[0]:
            raise KeyError
        return x * 2

    wrapper, x = wrapped(fails_once), torch.ones(4)
    with step(FULL), pytest.raises(KeyError):
        wrapper(x)
    broken[0] = False
    for _ in range(3):
        with step(FULL):
            assert wrapper(x)[0] == 2
    assert wrapper.holds(KEY)


def test_addresses_are_checked_at_every_replay_if_asked():
    wrapper, x = wrapped(Counted(), name="double", check_addresses=True), torch.ones(4)
    with step(FULL):
        for _ in range(3):
            wrapper(x)
        with pytest.raises(CaptureError, match=r"double was captured .* other addresses"):
            wrapper(torch.ones(4))
        assert wrapper(x)[0] == 2


# --- verify -----------------------------------------------------------------------------------


def test_verify_passes_what_is_right_and_runs_writes_once():
    def run(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1) * 2

    wrapper, x = wrapped(run, verify=True), torch.zeros(4)
    for n in range(1, 6):
        with step(FULL):
            assert wrapper(x)[0] == 2 * n
        assert x[0] == n


def test_verify_notices_what_the_graph_froze():
    numbers, engine, x = [1.0], ReferenceEngine(), torch.ones(4)

    def run(x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 if engine.is_capturing() else numbers[0])

    wrapper = wrapped(run, engine=engine, verify=True, name="frozen")
    with step(FULL):
        wrapper(x)
        wrapper(x)
        numbers[0] = 2.0
        with pytest.raises(CaptureError, match=r"verify: frozen replayed at FULL for .*tensor 0"):
            wrapper(x)


def draws(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x) + torch.randn(4)


def test_verify_runs_eagerly_on_the_random_numbers_of_the_replay():
    results = {}
    for verify in (True, False):
        torch.manual_seed(7)
        wrapper, x = wrapped(draws, verify=verify), torch.ones(4)
        results[verify] = []
        for _ in range(5):
            with step(FULL):
                results[verify].append(wrapper(x).tolist())
        results[verify].append(torch.rand(4).tolist())
    assert results[True] == results[False]
    assert len({tuple(result) for result in results[True]}) == 6


def test_verify_notices_a_wrong_number_beside_random_ones():
    numbers, engine, x = [1.0], ReferenceEngine(), torch.ones(4)

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.rand(4) * (1.0 if engine.is_capturing() else numbers[0]) + x

    wrapper = wrapped(run, engine=engine, verify=True)
    with step(FULL):
        for _ in range(3):
            wrapper(x)
        numbers[0] = 2.0
        with pytest.raises(CaptureError, match="differs from an eager run"):
            wrapper(x)


def test_verify_takes_expanded_arguments():
    wrapper, x = wrapped(Counted(), verify=True), torch.ones(1).expand(4)
    for _ in range(3):
        with step(FULL):
            assert wrapper(x).tolist() == [2.0] * 4
