"""Inductor's processes start early where something will be compiled, and not where nothing is."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from toy import rows

from compile_backend import compile_workers
from compile_backend.backend import cudagraph_modes
from compile_backend.torch_internals import inductor

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who started them: here nobody does, a CPU has none."""
    calls: list[str] = []
    monkeypatch.setattr(compile_workers, "start_workers", lambda: calls.append("lookup"))
    monkeypatch.setattr(inductor, "start_workers", lambda: calls.append("piece"))
    return calls


def compiled(tmp_path: Path, **options: Any) -> Any:
    options = {"cudagraph_mode": "FULL", "cache_dir": str(tmp_path / "cache"), **options}
    return torch.compile(lambda x: x * 2 + 1, backend=cudagraph_modes, options=options)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Artefacts are kept, where the options of a test say."""
    monkeypatch.setenv("CUDAGRAPH_MODES_CACHE_SIZE_MB", "64")


@pytest.mark.usefixtures("kept")
def test_a_start_without_artefacts_begins_at_once(tmp_path: Path, started: list[str]) -> None:
    call = compiled(tmp_path)
    assert set(started) == {"lookup"}
    with torch.no_grad():
        call(rows(4))
    assert started[-1] == "piece"


@pytest.mark.usefixtures("kept")
def test_a_start_that_finds_artefacts_waits_for_what_is_missing(
    tmp_path: Path, started: list[str]
) -> None:
    with torch.no_grad():
        compiled(tmp_path)(rows(4))
        started.clear()
        torch._dynamo.reset()
        call = compiled(tmp_path)
        call(rows(4))
        assert not started
        call(rows(4, 3, 2))  # another graph
    assert started == ["piece"]


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"disable_cache": True}, True),
        ({"piece_compiler": "eager"}, False),
        ({"cache_dir": 5}, False),
        ({"cache_dir": "~nobody-of-that-name/x"}, False),
    ],
)
def test_what_options_say(
    tmp_path: Path, started: list[str], options: dict[str, Any], expected: bool
) -> None:
    compiled(tmp_path, **options)
    assert bool(started) is expected


@pytest.mark.parametrize("options", [None, 3, "text", ["cache_dir"]])
def test_options_of_no_kind_are_told_of_elsewhere(options: Any, started: list[str]) -> None:
    compile_workers.start_where_all_is_new(options)
    assert started == ["lookup"]


def test_a_size_that_is_no_number_is_told_of_elsewhere(
    monkeypatch: pytest.MonkeyPatch, started: list[str]
) -> None:
    monkeypatch.setenv("CUDAGRAPH_MODES_CACHE_SIZE_MB", "much")
    compile_workers.start_where_all_is_new({})
    assert not started


LOOKS_UP = """
import sys, torch
from compile_backend import compile_workers
calls = []
compile_workers.start_workers = lambda: calls.append(1)
torch.compile(torch.relu, backend="cudagraph_modes", options={"cache_dir": sys.argv[1]})
print(len(calls))
"""


def test_a_lookup_by_name_starts_them_too(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOOKS_UP, str(tmp_path / "none")]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.split() == ["1"]


def test_who_uses_no_gpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import async_compile

    calls: list[int] = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: calls.append(1))
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda there=there: there)
        inductor.start_workers()
        assert len(calls) == there


def test_what_a_key_of_triton_needs_is_hashed_once_and_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor.runtime import triton_compat

    threads: list[threading.Thread] = []

    def key() -> str:
        threads.append(threading.current_thread())
        raise OSError("gone")  # which is nobody's error here

    monkeypatch.setattr(triton_compat, "triton_key", key)
    monkeypatch.setattr(triton_compat, "HAS_TRITON", True)
    inductor._start_hashing.cache_clear()
    try:
        inductor.hash_ahead()
        assert not threads  # a CPU has no use for it
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        for _ in range(2):
            inductor.hash_ahead()
        for thread in threading.enumerate():
            if thread.name == "hash of Triton":
                thread.join()
    finally:
        inductor._start_hashing.cache_clear()
    (thread,) = threads
    assert thread is not threading.current_thread()


def test_triton_has_the_key_that_is_hashed_ahead() -> None:
    """Its own caches ask for the very function, and it remembers."""
    from torch._inductor.runtime.triton_compat import triton_key
    from triton.runtime import cache

    assert triton_key is cache.triton_key
    assert triton_key() is triton_key()
