"""No garbage collection while this backend compiles; everywhere else they are as they were."""

from __future__ import annotations

import gc
import os
import threading
from typing import TYPE_CHECKING, Any

import paged_toy
import pytest
import torch
import torch.fx
from torch._dynamo.callback import (
    CallbackTrigger,
    CompilationCallbackHandler,
    callback_handler,
)
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


def test_a_runner_compiles_and_captures_with_one_collection() -> None:
    """Also where it traces nothing, since a trace of another process serves."""
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    with torch.no_grad():
        loop = paged_toy.make_loop("FULL_AND_PIECEWISE", sizes=(2, 8))
        gc.collect()
        gc.callbacks.append(note)
        try:
            loop.runner.capture(progress=False)
            during = list(generations)
        finally:
            gc.callbacks.remove(note)
    assert gc.isenabled()
    assert during == [2]


# --- where Dynamo does not come to the end ------------------------------------------------------


def test_a_backward_in_another_thread_may_end_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo counts it, and tells of the end of all only once."""
    compile_graph = cudagraph_modes._compile
    began, is_over = threading.Event(), threading.Event()

    def backward() -> None:
        with callback_handler.install_callbacks(CallbackTrigger.LAZY_BACKWARD, "0/0"):
            began.set()
            is_over.wait()

    thread = threading.Thread(target=backward)

    def noted(*args: Any) -> Any:
        thread.start()
        began.wait()
        return compile_graph(*args)

    with monkeypatch.context() as patch:
        patch.setattr(cudagraph_modes, "_compile", noted)
        compiled()(rows(4))
    is_over.set()
    thread.join()
    assert gc.isenabled()
    torch._dynamo.reset()
    compiled()(rows(4))
    assert gc.isenabled()


def test_callbacks_that_are_cleared_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `torch._dynamo.reset` does before it finds that it must not."""
    compile_graph = cudagraph_modes._compile

    def clears(*args: Any) -> Any:
        callback_handler.start_callbacks.clear()
        callback_handler.end_callbacks.clear()
        return compile_graph(*args)

    with monkeypatch.context() as patch:
        patch.setattr(cudagraph_modes, "_compile", clears)
        compiled()(rows(4))
    assert gc.isenabled()
    torch._dynamo.reset()
    seen = seen_by(monkeypatch)
    compiled()(rows(4))
    assert seen == [False]


def test_an_error_of_anothers_callback() -> None:
    handler = CompilationCallbackHandler()  # another one: torch's own never gets over such errors

    def fails(_: object) -> None:
        raise ValueError("not mine")

    handler.register_end_callback(fails)
    with pytest.MonkeyPatch.context() as patch:
        for module in (torch._dynamo, torch._dynamo.callback):
            patch.setattr(module, "callback_handler", handler)
        with pytest.raises(Exception, match="not mine"):
            compiled()(rows(4))
    assert gc.isenabled()


def test_two_who_wait_for_one_collection() -> None:
    switch, num_callbacks = CollectorSwitch(), len(gc.callbacks)
    for _ in range(2):
        switch.begin()
        switch.off()
        switch.end_after_next()
    assert not gc.isenabled()
    gc.collect(0)
    assert gc.isenabled()
    assert len(gc.callbacks) == num_callbacks


@pytest.mark.parametrize("was_on", [False, True])
def test_a_forked_process_has_it_as_it_was(was_on: bool) -> None:
    switch = CollectorSwitch()
    switch.begin()
    (gc.enable if was_on else gc.disable)()
    try:
        switch.off()
        child = os.fork()
        if not child:
            os._exit(int(gc.isenabled()))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == was_on
        assert not gc.isenabled()
        switch.end()
        assert gc.isenabled() is was_on
    finally:
        gc.enable()
