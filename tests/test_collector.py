"""No garbage collection while this backend compiles; everywhere else they are as they were."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.fx
from toy import rows, toy_options

from compile_backend.backend import cudagraph_modes
from compile_backend.collector import COLLECTOR, CollectorSwitch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    assert gc.isenabled()
    yield
    was_on = gc.isenabled()
    gc.enable()
    torch._dynamo.reset()
    assert was_on


def seen_by(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the collector is on, at each call of the backend."""
    seen: list[bool] = []
    compile_graph = cudagraph_modes._compile

    def noted(*args: Any) -> Any:
        seen.append(gc.isenabled())
        return compile_graph(*args)

    monkeypatch.setattr(cudagraph_modes, "_compile", noted)
    return seen


def compiled(call: Callable[..., Any] = double, **options: Any) -> Any:
    options = toy_options(cudagraph_mode="FULL", **options)
    return torch.compile(call, backend="cudagraph_modes", options=options)


@pytest.mark.parametrize("is_reset", [False, True])
def test_it_is_off_while_a_call_is_compiled(
    is_reset: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = seen_by(monkeypatch)
    for size in (4, 5):
        if is_reset:
            torch._dynamo.reset()
        compiled(lambda x, k=size: x * k)(rows(size))
        assert gc.isenabled()
    assert seen == [False, False]


def test_it_is_off_while_dynamo_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[bool] = []
    trace = torch._dynamo.symbolic_convert.InstructionTranslator.run

    def noted(self: Any) -> Any:
        traced.append(gc.isenabled())
        return trace(self)

    monkeypatch.setattr(torch._dynamo.symbolic_convert.InstructionTranslator, "run", noted)
    compiled()(rows(4))
    assert traced == [False]


def test_it_is_on_again_after_the_collection_that_dynamo_asks_for() -> None:
    seen: list[tuple[str, int, bool]] = []

    def note(phase: str, info: dict[str, int]) -> None:
        seen.append((phase, info["generation"], gc.isenabled()))

    call, num_callbacks = compiled(), len(gc.callbacks)
    gc.callbacks.append(note)
    try:
        call(rows(4))
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()
    assert len(gc.callbacks) == num_callbacks
    off = [event[:2] for event in seen if not event[2]]
    assert off[0] == ("start", 1)  # and none before it, however many objects there were


def test_it_is_on_again_where_dynamo_collects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = seen_by(monkeypatch)
    with torch._dynamo.config.patch(run_gc_after_compile=False):
        compiled()(rows(4))
    assert gc.isenabled()
    assert seen == [False]


def test_one_that_was_off_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = seen_by(monkeypatch)
    gc.disable()
    try:
        compiled()(rows(4))
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert seen == [False]


def test_it_is_on_again_where_compilation_fails() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        return x @ x  # sizes do not fit

    with pytest.raises(RuntimeError):
        compiled(fails)(torch.zeros(3, 4))
    assert gc.isenabled()
    with pytest.raises(ValueError, match="no_such_option"):
        compiled(no_such_option=1)(rows(4))
    assert gc.isenabled()


def test_other_backends_are_left_alone() -> None:
    seen: list[bool] = []

    def other(graph_module: torch.fx.GraphModule, _: Any) -> Any:
        seen.append(gc.isenabled())
        return graph_module.forward

    compiled()(rows(4))
    torch.compile(lambda x: x + 1, backend=other)(rows(4))
    assert seen == [True]


def test_a_call_that_is_refused_by_dynamos_limit_leaves_it_on() -> None:
    with torch._dynamo.config.patch(recompile_limit=1):
        calls = [compiled() for _ in range(2)]
        for call in calls:
            call(rows(4))
            assert gc.isenabled()


def test_the_last_of_several_switches_it_on_again() -> None:
    switch = CollectorSwitch()
    switch.begin()
    switch.begin()
    switch.off()
    switch.off()
    switch.end()
    assert not gc.isenabled()
    switch.end()
    assert gc.isenabled()
    switch.begin()
    switch.end()
    assert gc.isenabled()


def test_threads_that_compile_together_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = seen_by(monkeypatch)
    errors: list[BaseException] = []

    def compiles(factor: int) -> None:
        try:
            call = compiled(lambda x: x * factor)
            x = rows(4)
            torch.testing.assert_close(call(x), x * factor)
        except BaseException as error:  # noqa: BLE001 - told of below
            errors.append(error)

    threads = [threading.Thread(target=compiles, args=(factor,)) for factor in (2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(seen) == len(threads)
    assert gc.isenabled()
    assert COLLECTOR._depth == 0
