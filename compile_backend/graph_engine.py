"""Capture and replay behind one interface, and the engine for CUDA.

A captured graph is a callable frozen to its addresses: replay reruns it on the tensors it was
captured with and writes the tensors it returned then. Engines know nothing of modes and keys.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from compile_backend import shortcuts
from compile_backend.collector import COLLECTOR
from compile_backend.errors import CaptureError
from compile_backend.torch_internals.cuda import (
    BrokenCaptureError,
    capturing,
    cublas_workspaces_apart,
    weak_tensor,
)
from compile_backend.torch_internals.graphs import tree_map
from compile_backend.torch_internals.process_groups import exchanges, let_go_with_groups
from compile_backend.torch_internals.symmetric_memory import workspaces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@dataclass(frozen=True, slots=True)
class Trial:
    """What an eager run of the very callable told about capturing it.

    Attributes:
        outputs: what capture returns, described: tensors as `_TensorSpec`. Only the reference
            engine needs it.
        refused: why it cannot be captured, where the run showed that.
        is_described: whether the outputs are.
    """

    outputs: Any = None
    refused: str | None = None
    is_described: bool = False


class StaticGraph(Protocol):
    """A captured callable.

    Attributes:
        outputs: on the memory that every replay writes.
        short: the same as `replay`, for `shortcuts`; None where there is no such way.
    """

    outputs: Any
    short: object | None

    def replay(self) -> None:
        """Run it on the tensors it was captured with; `outputs` then hold the results."""


class GraphEngine(Protocol):
    """Captures callables on one device."""

    device: torch.device

    def is_capturing(self) -> bool:
        """Whether the caller is inside a capture (by any engine) or a replay of the reference."""

    def warm_up(self, call: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Trial]:
        """Run `call(*args)` once, eagerly; return its outputs and what the run told."""

    def capture(self, call: Callable[..., Any], args: Sequence[Any], trial: Trial) -> StaticGraph:
        """Freeze `call(*args)` without running it.

        Args:
            call: returns tensors and constants, nested in any way.
            args: tensors at addresses that stay, and constants.
            trial: from an earlier warm-up of the same callable on inputs of the same shapes.

        Raises:
            CaptureError: it cannot be captured; nothing is left behind.
        """

    def keep_weakly(self, outputs: Any) -> Any:
        """`outputs` on the same memory, but without keeping that memory from later captures."""

    def session(self, *, thorough: bool = False) -> contextlib.AbstractContextManager[None]:
        """Around a series of captures: one garbage collection before, none during.

        Args:
            thorough: collect all garbage, which takes long where much was imported: for a series
                that is nobody's step.
        """


class _Collections:
    """Garbage collections around captures: one before the first, then none.

    What one finds in the middle of a capture may free device memory, which breaks the capture.
    Series of several engines that overlap share one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._is_thorough = self._is_done = False

    @contextlib.contextmanager
    def series(self, *, thorough: bool) -> Iterator[None]:
        """Around a series of captures."""
        with self._lock:
            self._depth += 1
            self._is_thorough |= thorough
            COLLECTOR.begin()
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                COLLECTOR.end()
                if not self._depth:
                    self._is_thorough = self._is_done = False

    def hold_off(self) -> None:
        """Collect and switch the collector off, unless a series that still runs has done so."""
        with self._lock:
            assert self._depth, "captures happen within a series"
            if not self._is_done:
                gc.collect(_ALL if self._is_thorough else _YOUNG)
                self._is_done = True
            COLLECTOR.off()


_YOUNG, _ALL = 1, 2  # generations of objects
_COLLECTIONS = _Collections()


class Sessions:
    """What is done once around a series of captures of an engine.

    It waits for the first capture of the series: a step that captures nothing costs nothing.

    Args:
        around: entered at the first capture, and left after the last.
    """

    def __init__(
        self, around: Callable[[], contextlib.AbstractContextManager[None]] | None = None
    ) -> None:
        self._around = around or contextlib.nullcontext
        self._entered: contextlib.ExitStack | None = None
        self._depth = 0

    @contextlib.contextmanager
    def __call__(self, *, thorough: bool = False) -> Iterator[None]:
        """Around a series of captures; see `GraphEngine.session`."""
        self._depth += 1
        try:
            with _COLLECTIONS.series(thorough=thorough):
                yield
        finally:
            self._depth -= 1
            if not self._depth and self._entered is not None:
                entered, self._entered = self._entered, None
                entered.close()

    def before_capture(self) -> None:
        """Do what comes before the first capture, unless this series has done so."""
        _COLLECTIONS.hold_off()
        if self._entered is None:
            self._entered = contextlib.ExitStack()
            self._entered.enter_context(self._around())


class CudaGraph:
    """A `torch.cuda.CUDAGraph` and what it returned.

    Args:
        graph: captured.
        outputs: of the capture.
        device: the index of its device.
        kept: memory outside of the pool that the graph uses, and that others may let go.
    """

    __slots__ = ("__weakref__", "_device", "_ended", "_graph", "_kept", "outputs", "short")

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        outputs: Any,
        device: int,
        kept: Sequence[torch.Tensor] = (),
    ) -> None:
        self._graph = graph
        self._kept = kept
        self._device = device
        self.short: object | None = None
        self._ended: str | None = None
        self.outputs = outputs

    def replay(self) -> None:
        """See `StaticGraph.replay`.

        Raises:
            CaptureError: a process group that it exchanges through has ended.
        """
        if self.short is None:
            self._first_replay()
        elif not shortcuts.launch(self.short):
            self._graph.replay()

    def _first_replay(self) -> None:
        """Replay by torch, and by the short way from then on if no random numbers are drawn."""
        if self._ended is not None:
            raise CaptureError(
                f"the process group {self._ended!r}, through which this graph exchanges tensors, "
                "was shut down; drop the graph (reset, or the runner's recapture) once there is "
                "another"
            )
        generator = torch.cuda.default_generators[self._device]
        before = generator.get_offset()
        self._graph.replay()
        if generator.get_offset() == before:
            self.short = shortcuts.launch_of(self._graph, self._device)

    def let_go(self, group: str) -> None:
        """Give up what was captured, as the process group of this name ends; outputs stay."""
        self._ended = group
        self.short = None
        self._graph.reset()


class CudaEngine:
    """CUDA graphs of one device: one memory pool, one capture stream, kept for good.

    Args:
        device: a CUDA device with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.session = Sessions(self._around_captures)
        self._lock = threading.Lock()
        self._kept: list[Any] = []
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = self._new_pool()

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured, by whomever."""
        return torch.cuda.is_current_stream_capturing()

    def warm_up(self, call: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Trial]:
        """Run `call(*args)` on the current stream."""
        return call(*args), Trial()

    def capture(
        self,
        call: Callable[..., Any],
        args: Sequence[Any],
        trial: Trial,  # noqa: ARG002 - CUDA needs no description of the outputs
    ) -> CudaGraph:
        """Freeze `call(*args)` into the engine's pool; see `GraphEngine.capture`."""
        if self.is_capturing():
            raise CaptureError("a capture is already running on this stream")
        with self._lock, self.session():
            self.session.before_capture()
            graph = torch.cuda.CUDAGraph()
            exchanged = exchanges(self.device)
            try:
                with self._capturing(graph, self._pool):
                    outputs = call(*args)
            except BrokenCaptureError as error:
                self._kept.append(graph)
                self._pool = self._new_pool()
                raise CaptureError(str(error)) from error
            except Exception as error:
                raise CaptureError(f"{type(error).__name__}: {error}") from error
            made = CudaGraph(graph, outputs, self.device.index, workspaces())
            let_go_with_groups(made, exchanged, exchanges(self.device))
        return made

    def keep_weakly(self, outputs: Any) -> Any:
        """`outputs`, CUDA tensors of this device as views without ownership."""
        return tree_map(
            lambda item: (
                weak_tensor(item)
                if isinstance(item, torch.Tensor) and item.device == self.device
                else item
            ),
            outputs,
        )

    def _new_pool(self) -> Any:
        """A pool that lives on: one whose last graph died cannot be captured into again."""
        pool = torch.cuda.graph_pool_handle()
        keeper = torch.cuda.CUDAGraph()
        with self._capturing(keeper, pool):
            self._kept.append((keeper, torch.zeros(1, device=self.device)))
        return pool

    @contextlib.contextmanager
    def _around_captures(self) -> Iterator[None]:
        """Around a series: between its captures, a wait would be for the driver's own work."""
        with cublas_workspaces_apart():
            torch.cuda.synchronize(self.device)
            yield

    @contextlib.contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
        with torch.cuda.device(self.device):
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream), capturing(graph, pool):
                yield
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
