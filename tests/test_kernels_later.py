"""Kernels are compiled while the next piece is lowered; what is made of them is the same."""

from __future__ import annotations

import itertools
import os
import pickle
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters
from torch._guards import TracingContext, tracing
from torch._inductor import compile_fx
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import FxGraphCache, PyCodeCache
from torch._inductor.exc import InductorError
from torch._inductor.triton_bundler import TritonBundler
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from toy import Twin, rows

from compile_backend.cache import ArtefactCache, cache_directory
from compile_backend.once import WarnOnce
from compile_backend.torch_internals import kernels_later
from compile_backend.torch_internals.kernels_later import KernelsLater

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def of_three_pieces(x: torch.Tensor) -> torch.Tensor:
    x = torch.ops.toy.attn_new(x.sin() * 2)
    x = torch.ops.toy.attn_new((x.cos() + 1).exp())
    return (x * x).tanh() - x


@pytest.fixture(autouse=True)
def in_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inductor compiles elsewhere than in this thread, and finds nothing that was compiled."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("CUDAGRAPH_MODES_CACHE_SIZE_MB", "64")
    torch._dynamo.reset()
    with inductor_config.patch(compile_threads=2, fx_graph_cache=True):
        yield
    torch._dynamo.reset()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What Inductor did: lowered a graph, waited for kernels, wrote to its cache."""
    seen: list[str] = []

    def noted(owner: Any, name: str, event: str) -> None:
        original, is_static = getattr(owner, name), owner is FxGraphCache

        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            seen.append(event)
            return result

        monkeypatch.setattr(owner, name, staticmethod(call) if is_static else call)

    noted(compile_fx, "fx_codegen_and_compile", "lowered")
    noted(AsyncCompile, "wait", "waited")
    noted(FxGraphCache, "_save_graph", "written")
    return seen


def serve(cache_dir: Path, **options: Any) -> Twin:
    twin = Twin(
        of_three_pieces,
        piece_compiler="inductor",
        cache_dir=str(cache_dir),
        cudagraph_mode="PIECEWISE",
        dynamic=True,
        **options,
    )
    for size in (4, 4, 8, 4):
        twin(rows(size))
    return twin


def test_all_pieces_are_lowered_before_any_kernel_is_waited_for(
    tmp_path: Path, events: list[str]
) -> None:
    assert serve(tmp_path / "ours").stats.compiles == 3
    assert events == ["lowered"] * 3 + ["waited", "written"] * 3
    torch._dynamo.reset()
    events.clear()
    twin = serve(tmp_path / "ours")
    assert (twin.stats.compiles, twin.stats.loads) == (0, 3)
    assert "lowered" not in events


def test_each_range_of_sizes_is_compiled_together(tmp_path: Path, events: list[str]) -> None:
    twin = serve(tmp_path / "ours", compile_sizes=[4], cudagraph_capture_sizes=[4, 8])
    num_general, num_special = 3, twin.stats.compiles - 3
    assert num_special == 3
    for num in (num_general, num_special):
        assert events[:num] == ["lowered"] * num
        del events[: 3 * num]
    assert not events


def test_inductors_own_cache_has_them_too(tmp_path: Path) -> None:
    serve(tmp_path / "ours")
    torch._dynamo.reset()
    counters.clear()
    twin = serve(tmp_path / "another")
    assert twin.stats.compiles == 3
    assert counters["inductor"]["fxgraph_cache_hit"] == 3


def test_a_kernel_that_does_not_compile_is_an_error_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Any, __: Any) -> None:
        raise RuntimeError("no such instruction")

    with monkeypatch.context() as patch:
        patch.setattr(AsyncCompile, "wait", fails)
        with pytest.raises(Exception, match="no such instruction"):
            serve(tmp_path / "ours")
    torch._dynamo.reset()
    assert serve(tmp_path / "ours").stats.compiles == 3


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_what_was_compiled_before_a_failure_is_kept(
    kind: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower, calls = compile_fx.fx_codegen_and_compile, itertools.count(1)

    def fails_at_last(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 3:
            raise kind("not now")
        return lower(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(compile_fx, "fx_codegen_and_compile", fails_at_last)
        with pytest.raises(BaseException, match="not now"):
            serve(tmp_path / "ours")
    torch._dynamo.reset()
    before = len(PyCodeCache.modules)
    twin = serve(tmp_path / "ours")
    assert (twin.stats.compiles, twin.stats.loads) == (1, 2)
    assert not any(
        isinstance(value, kernels_later._Kernel)
        for module in PyCodeCache.modules[before:]
        for value in vars(module).values()
    )


def test_a_kernel_that_fails_is_an_error_of_inductors() -> None:
    later, good = KernelsLater(), KernelsLater()
    scope: dict[str, Any] = {"kernel": Broken()}
    with later.put_off():
        AsyncCompile().wait(scope)
    with good.put_off():
        AsyncCompile().wait({"kernel": Future()})
    with pytest.raises(InductorError, match="out of registers"):
        later.finish(Code())
    good.finish(Code())
    assert not TritonBundler._entries


def grows(factor: int) -> Any:
    """A piece that assumes nothing of its size, and one that asks whether 4 divides it."""

    def run(x: torch.Tensor) -> torch.Tensor:
        x = torch.ops.toy.attn_new(x.sin() * factor)
        return torch.nn.functional.avg_pool1d(x.t()[None], 4)

    return run


def test_a_piece_assumes_what_it_does_not_what_later_ones_do(tmp_path: Path) -> None:
    twin = Twin(
        grows(2),
        piece_compiler="inductor",
        cache_dir=str(tmp_path / "ours"),
        dynamic=True,
        cudagraph_mode="NONE",
    )
    twin(rows(5))
    assert twin.stats.compiles == 2
    store = ArtefactCache(cache_directory(str(tmp_path / "ours")), 2**20, WarnOnce())
    keys = {entry.path.name.split("-")[0] for entry in store.entries()}
    payloads = [payload for key in keys for _, payload in store.find(key)]
    assumed = sorted((pickle.loads(each)[0]["assumptions"] for each in payloads), key=len)
    assert len(assumed) == 2
    assert assumed[0] != assumed[1]


# --- alone ------------------------------------------------------------------------------------


class Future(torch._inductor.codecache.CodeCacheFuture):
    """A kernel that is there once it was asked for."""

    def __init__(self) -> None:
        self.num_asked = 0

    def result(self, timeout: float | None = None) -> Any:
        self.num_asked += 1
        return abs


class Broken(Future):
    """A kernel that is never there."""

    def result(self, timeout: float | None = None) -> Any:
        raise ValueError("out of registers")


class Code:
    def set_triton_bundle(self, bundle: Any) -> None:
        self.bundle = bundle


def test_a_kernel_can_be_used_before_it_is_there() -> None:
    later, futures = KernelsLater(), (Future(), Future())
    scope: dict[str, Any] = {"used": futures[0], "unused": futures[1], "other": 3}
    with later.put_off():
        AsyncCompile().wait(scope)
        assert [each.num_asked for each in futures] == [0, 0]
        assert scope["used"](-2) == 2
        assert scope["used"].__name__ == "abs"
    later.finish(Code())
    assert [each.num_asked for each in futures] == [1, 1]
    assert scope == {"used": abs, "unused": abs, "other": 3}


def test_other_threads_wait_as_ever() -> None:
    def wait(scope: dict[str, Any]) -> None:
        with inductor_config.patch(compile_threads=2):  # settings are those of a thread
            AsyncCompile().wait(scope)

    later, scope = KernelsLater(), {"kernel": Future()}
    with later.put_off():
        thread = threading.Thread(target=wait, args=(scope,))
        thread.start()
        thread.join()
        assert scope == {"kernel": abs}
    assert not later._waits


def test_everything_is_as_it_was_afterwards() -> None:
    before = vars(AsyncCompile)["wait"], vars(FxGraphCache)["_save_graph"]
    later = KernelsLater().put_off()
    with pytest.raises(ZeroDivisionError), later:
        _ = 1 // (vars(AsyncCompile)["wait"] is before[0])
    assert (vars(AsyncCompile)["wait"], vars(FxGraphCache)["_save_graph"]) == before


def test_code_in_cpp_is_made_from_its_kernels() -> None:
    scope: dict[str, Any] = {"kernel": Future()}
    with inductor_config.patch(cpp_wrapper=True), KernelsLater().put_off():
        AsyncCompile().wait(scope)
    assert scope == {"kernel": abs}


@pytest.mark.skipif(os.cpu_count() == 1, reason="everything is compiled in this process")
def test_kernels_are_put_off_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    as_inductors = kernels_later._Kernel.as_inductors

    def noted(kernel: Any) -> Any:
        made.append(kernel)
        return as_inductors(kernel)

    monkeypatch.setattr(kernels_later._Kernel, "as_inductors", noted)
    serve(tmp_path / "ours")
    assert len(made) >= 3


def test_what_is_written_later_assumes_what_was_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    written: list[Any] = []

    def write(*given: Any) -> None:
        shape_env: Any = FxGraphCache._get_shape_env()
        guards = shape_env.get_pruned_guards([])
        told = shape_env.produce_guards_expression(placeholders=[], guards=guards)
        written.append((given, told))

    monkeypatch.setattr(FxGraphCache, "_save_graph", staticmethod(write))
    assumed = iter(("s0 > 1", "s0 > 1 and s0 < 9"))
    monkeypatch.setattr(ShapeEnv, "produce_guards_expression", lambda *_, **__: next(assumed))
    given = ("key", "code", [], True, None)
    later = KernelsLater()
    with tracing(TracingContext(mode)):
        with later.put_off():
            FxGraphCache._save_graph(*given)
        assert not written
        later.finish(Code())
        assert written == [(given, "s0 > 1")]
        assert FxGraphCache._get_shape_env() is mode.shape_env
