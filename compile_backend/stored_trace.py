"""What Dynamo traced, kept for later processes, and used there instead of tracing.

A trace holds for a call if all that it was made from is the same: the function and its arguments
with everything that they refer to, the code that it went through, the globals which that code
names, releases and settings. All of it is described, by the process that traces and by the one
that would rather not; see `description` and `traced_globals`. What cannot be described is not
stored, and what is not the same is traced. Being too strict costs time; when in doubt, refuse.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import platform
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from compile_backend.cache import NotStorableError
from compile_backend.description import Description
from compile_backend.torch_internals.compile_settings import compile_settings, tracing_settings
from compile_backend.torch_internals.dynamo import global_module_hooks
from compile_backend.torch_internals.source_pickler import read, written
from compile_backend.torch_internals.stored_entry import Frame, entry, installed_globals
from compile_backend.torch_internals.stored_graph import StoredGraph, revived, stored
from compile_backend.torch_internals.traced_code import StoredCode, Traced
from compile_backend.torch_internals.tracing import (
    Watcher,
    missing_names,
    watch,
)
from compile_backend.traced_globals import TracedGlobals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from compile_backend.cache import ArtefactCache
    from compile_backend.config import CompilationConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Record:
    """One trace, as it is kept.

    Attributes:
        code: what Dynamo made, besides the graph.
        graph: the graph.
        outside: what it depends on besides the arguments.
    """

    code: StoredCode
    graph: StoredGraph
    outside: TracedGlobals


@dataclass(slots=True)
class _Call:
    """A call that Dynamo traces.

    Attributes:
        key: what a trace of it is found by.
        frame: the call itself.
        arguments: what it was given, described.
        graph: what the backend got for it last, or why that cannot be kept.
        traced: what Dynamo made of it, likewise.
    """

    key: str
    frame: Frame
    arguments: Description
    graph: StoredGraph | NotStorableError | None = None
    traced: Traced | NotStorableError | None = None


class StoredTraces(Watcher):
    """Finds traces of a compiled function's calls, or keeps them.

    Args:
        config: of the compiled function.
        cache: where traces are.
        backend: gives what compiles graphs, also those that no Dynamo hands to it.
        graphs: what the backend made of graphs until now; another list once all is forgotten.
    """

    def __init__(
        self,
        config: CompilationConfig,
        cache: ArtefactCache,
        backend: Callable[[], Callable[..., Any]],
        graphs: Callable[[], list[Any]],
    ) -> None:
        self._config = config
        self._cache = cache
        self._backend = backend
        self._graphs = graphs
        self._call: _Call | None = None
        # What Dynamo makes of a call depends on those before.
        self._history: list[str] = []
        self._graphs_of_history = graphs()
        self._is_in_parts = False

    def graph(self, graph_module: torch.fx.GraphModule, *, is_whole: bool) -> None:
        """The backend got this graph, and has not rewritten it yet."""
        if self._call is None:
            return
        if not is_whole:
            self._is_in_parts = True
            self._call.graph = NotStorableError("is traced in parts, or leaves something behind")
            return
        try:
            self._call.graph = stored(graph_module)
        except NotStorableError as reason:
            self._call.graph = reason
        except Exception as error:  # noqa: BLE001 - nobody but the next process has a use for it
            self._call.graph = NotStorableError(f"cannot be written down ({error!r})")

    def replacement(self, frame: Frame) -> Callable[[Any], Any | None] | None:
        """See `Watcher`."""
        self._call = None
        if self._graphs_of_history is not self._graphs():
            self._history, self._graphs_of_history = [], self._graphs()
            self._is_in_parts = False
        if self._is_in_parts:
            return None
        arguments = Description()
        try:
            key = _key(frame, self._config, self._history, arguments)
        except Exception as reason:  # noqa: BLE001 - it can be traced
            self._history.append("unknown")
            self._tell_not_stored(reason)
            return None
        self._history.append(key)
        return functools.partial(self._loaded, _Call(key, frame, arguments))

    def traced(self, traced: Traced | NotStorableError) -> None:
        """See `Watcher`."""
        if self._call is not None:
            self._call.traced = traced

    def _loaded(self, call: _Call, frame_state: Any) -> Any | None:
        start, graphs = time.perf_counter(), self._graphs()
        num_graphs = len(graphs)
        for path, payload in self._cache.find(call.key):
            try:
                record = read(zlib.decompress(payload))
                if not isinstance(record, _Record):
                    raise TypeError(type(record).__name__)  # noqa: TRY301 - damaged, like others
            except Exception as error:  # noqa: BLE001 - whatever is wrong with it
                self._cache.discard(path, f"{type(error).__name__}: {error}")
                continue
            try:
                found = self._entry(record, call, frame_state)
            except Exception as reason:  # noqa: BLE001 - whatever is wrong, it can be traced
                del graphs[num_graphs:]
                logger.info("a stored trace is of no use here: %s", reason)
                continue
            logger.info("a stored trace was used, %.1f s", time.perf_counter() - start)
            return found
        self._call = call
        return None

    def _entry(self, record: _Record, call: _Call, frame_state: Any) -> Any:
        installed = installed_globals(record.code, call.frame)
        record.outside.check_same(call.frame, call.arguments, installed)
        module = revived(record.graph)
        return entry(record.code, call.frame, module, self._backend(), frame_state)

    def done(self) -> None:
        """See `Watcher`: store what a call was traced to."""
        call, self._call = self._call, None
        if call is None or call.traced is None:
            return
        start = time.perf_counter()
        try:
            record = _record(call)
            payload = zlib.compress(written(record, record.code.modules), level=1)
        except Exception as reason:  # noqa: BLE001 - nobody but the next process has a use for it
            self._tell_not_stored(reason)
            return
        variant = hashlib.sha256(repr(record.outside.digests).encode()).hexdigest()[:16]
        if self._cache.keep(call.key, variant, payload, _label(call, record)):
            took = time.perf_counter() - start
            logger.info("a trace is stored, %d bytes, %.1f s", len(payload), took)

    def _tell_not_stored(self, reason: Exception) -> None:
        logger.info("the function is traced in every process: it %s", reason)


def _record(call: _Call) -> _Record:
    for found in (call.traced, call.graph):
        if isinstance(found, NotStorableError):
            raise found
    traced, graph = call.traced, call.graph
    if not isinstance(traced, Traced) or not isinstance(graph, StoredGraph):
        raise NotStorableError("has no graph")
    outside = TracedGlobals.of(traced, call.frame, call.arguments)
    return _Record(traced.stored, graph, outside)


def _label(call: _Call, record: _Record) -> dict[str, Any]:
    """What a trace is, for people."""
    owner = call.frame.local_scope.get("self")
    name = call.frame.code.co_name if owner is None else type(owner).__name__
    return {"model": name, "piece": "trace", "ops": len(record.graph.values)}


def watch_traces(compiled: object, traces: StoredTraces) -> None:
    """From now on use stored traces for calls of a compiled function, and store new ones."""
    absent = missing_names()
    if absent is None:
        watch(compiled, traces)
    else:
        logger.info("traces are not stored: this release of torch has no %s", absent)


# --- what a call is, before it is traced ---


def _key(
    frame: Frame, config: CompilationConfig, history: Sequence[str], arguments: Description
) -> str:
    """What a trace is found by: all that is known before the call is traced.

    Raises:
        NotStorableError: a setting means nothing in another process.
    """
    with torch.inference_mode(False):
        arguments.add("code", frame.code)
        for name, value in frame.local_scope.items():
            arguments.add(name, value)
    arguments.add("options", config)
    arguments.add("hooks", global_module_hooks())
    settings = (
        *(*history, _own_sources(), platform.python_version(), sys.implementation.cache_tag),
        *(*compile_settings({}), *tracing_settings()),
    )
    text = repr(("trace", frame.code.co_filename, *settings, arguments.digest()))
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _own_sources() -> str:
    """The code of this package, which makes plans of graphs, and stores them."""
    directory = Path(__file__).parent
    files = sorted((*directory.rglob("*.py"), *directory.with_name("passes").rglob("*.py")))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
