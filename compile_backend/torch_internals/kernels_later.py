"""Kernels that are compiled while the next graph is lowered.

Inductor hands kernels to processes of its own, and waits for them as soon as it has loaded the
code that calls them. Between several graphs that wait is idle time, so here it is put off to the
end of all. What comes after it is put off with it: the kernels' binaries are bundled with the
code, and the code is written to Inductor's cache.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from compile_backend.torch_internals.replaced import Replaced

if TYPE_CHECKING:
    from collections.abc import Iterator


class KernelsLater:
    """What Inductor still has to do for the code of one graph."""

    def __init__(self) -> None:
        self._waits: list[tuple[Any, dict[str, Any]]] = []
        self._writes: list[tuple[str, tuple[Any, ...]]] = []
        self._hidden: dict[str, Any] = {}

    @contextlib.contextmanager
    def put_off(self) -> Iterator[None]:
        """Have Inductor go on without its kernels; around the compilation of the graph."""
        import torch._inductor.config as config
        from torch._inductor.async_compile import AsyncCompile, CompiledTritonKernels
        from torch._inductor.codecache import FxGraphCache

        if config.cpp_wrapper:  # its code is made from the kernels
            yield
            return
        CompiledTritonKernels.cache_clear()  # type: ignore[no-untyped-call]
        with (
            Replaced(AsyncCompile, "wait", self._put_wait_off),
            Replaced(FxGraphCache, "_save_graph", self._put_write_off),
        ):
            try:
                yield
            finally:
                self._hide()

    def finish(self, code: Any) -> None:
        """Wait for the kernels, and do what follows; in the tracing context of the graph.

        Args:
            code: what Inductor made of the graph.

        Raises:
            Exception: a kernel does not compile; as Inductor raises it without this.
        """
        from torch._dynamo.exc import ShortenTraceback, SkipFrame
        from torch._inductor.codecache import PyCodeCache
        from torch._inductor.exc import InductorError

        try:
            self._wait(code)
        except (ShortenTraceback, SkipFrame):
            raise
        except Exception as error:  # noqa: BLE001 - as Inductor does
            raise InductorError(error, None).with_traceback(error.__traceback__) from None
        PyCodeCache.modules_no_attr.update(self._hidden)
        self._write()

    def _wait(self, code: Any) -> None:
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.triton_bundler import TritonBundle, TritonBundler

        if not self._waits:
            return
        TritonBundler.begin_compile()
        try:
            for compiler, scope in self._waits:
                scope.update(
                    (name, value.as_inductors())
                    for name, value in list(scope.items())
                    if isinstance(value, _Kernel)
                )
                AsyncCompile.wait(compiler, scope)
            bundle, _ = TritonBundler.collect()
        finally:
            TritonBundler.end_compile()
        before = getattr(code, "_triton_bundle", None) or TritonBundle([], [])
        code.set_triton_bundle(
            TritonBundle(
                [*before.kernel_artifacts, *bundle.kernel_artifacts],
                [*before.static_autotuners, *bundle.static_autotuners],
            )
        )

    def _write(self) -> None:
        from torch._guards import TracingContext
        from torch._inductor.codecache import FxGraphCache

        if not self._writes:
            return
        context: Any = TracingContext.get()
        mode = context.fake_mode
        try:
            for assumed, write in self._writes:
                context.fake_mode = SimpleNamespace(shape_env=_AssumedThen(assumed))
                FxGraphCache._save_graph(*write)
        finally:
            context.fake_mode = mode

    def _hide(self) -> None:
        """Until its kernels are there nobody else may find the code: it is not executed twice."""
        from torch._inductor.codecache import PyCodeCache

        scopes = {id(scope) for _, scope in self._waits}
        for path, module in list(PyCodeCache.modules_no_attr.items()):
            if id(vars(module)) in scopes:
                self._hidden[path] = PyCodeCache.modules_no_attr.pop(path)

    def _put_wait_off(self, compiler: Any, scope: dict[str, Any]) -> None:
        from concurrent.futures import Future

        from torch._inductor.codecache import CodeCacheFuture

        for name, value in list(scope.items()):
            if isinstance(value, (Future, CodeCacheFuture)):
                scope[name] = _Kernel(value)
        self._waits.append((compiler, scope))

    def _put_write_off(self, *write: Any) -> None:
        from torch._inductor.codecache import FxGraphCache

        _, _, inputs, *_ = write
        symints = FxGraphCache._filter_backed_symints(inputs)
        shape_env: Any = FxGraphCache._get_shape_env()
        guards = shape_env.get_pruned_guards(symints)
        assumed = shape_env.produce_guards_expression(placeholders=symints, guards=guards)
        self._writes.append((assumed, write))


class _AssumedThen:
    """Tells what was assumed of sizes when a graph was done: later ones assume more.

    Args:
        assumed: as an expression; None for nothing.
    """

    def __init__(self, assumed: str | None) -> None:
        self._assumed = assumed

    def get_pruned_guards(self, _: Any) -> None:
        """What the other method is then given."""

    def produce_guards_expression(self, **_: Any) -> str | None:
        """The expression."""
        return self._assumed


class _Kernel:
    """Stands for a kernel until it is there; to use it is to wait for it.

    Autotuning runs code of its own before the graph is done.
    """

    def __init__(self, future: Any) -> None:
        self._future = future
        self._made: Any = None

    def _kernel(self) -> Any:
        if self._made is None:
            self._made = self._future.result()
        return self._made

    def as_inductors(self) -> Any:
        """The kernel if anybody has waited for it, else what Inductor waits by."""
        return self._future if self._made is None else self._made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._kernel()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel(), name)
