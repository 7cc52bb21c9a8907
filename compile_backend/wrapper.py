"""One callable and its graphs, a graph per key.

A wrapper reads mode and batch from the forward context and trusts them. It knows nothing of how
they were chosen, of other wrappers, and of where its arguments come from: they must stay at their
addresses for as long as a key is replayed.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from compile_backend.batch import BatchDescriptor, graph_key
from compile_backend.config import CUDAGraphMode
from compile_backend.context import current_capture_session, current_forward_context
from compile_backend.errors import CaptureError, ConfigError
from compile_backend.graph_engine import Trial
from compile_backend.layout import memory_of
from compile_backend.stats import GraphStats, KeyStats
from compile_backend.torch_internals.graphs import parts_of, tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from compile_backend.graph_engine import GraphEngine, StaticGraph

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    """What a wrapper knows of one key."""

    stats: KeyStats
    warm_ups: int = 0
    trial: Trial | None = None
    graph: StaticGraph | None = None
    addresses: tuple[int, ...] = ()
    failure: str | None = None


class CUDAGraphWrapper:
    """Runs a callable eagerly, or captures it and replays the graph, as the context says.

    In its own mode, a key's first calls are eager warm-ups that return their results, the next one
    captures, all later ones replay. In any other mode, outside of a forward context and inside a
    capture it calls straight through.

    Args:
        runnable: called with positional arguments; returns tensors and constants, nested in any
            way. It must do the same device work whenever the key is the same.
        runtime_mode: PIECEWISE or FULL, or the name: the mode of a step in which this wrapper
            acts.
        engine: captures and replays on the device of the arguments.
        name: stands for the callable in messages.
        num_warmups: eager runs before a key is captured.
        stats: where to count; its own counts if None.
        keep_outputs: whether outputs keep their memory; without, a later capture of the same
            engine may reuse it, so whoever calls must be done with them by the next step.
        strict: raise on a failed capture instead of running that key eagerly from then on.
        check_addresses: compare the addresses of all arguments at every replay.
        verify: compare every replay with an eager run.
        unwritten_outputs: positions of outputs that are allocated but not written, so that two
            runs differ in them.
        engine_of: another engine of the device for the captures of some normalised keys; None for
            those of `engine`.

    Raises:
        ConfigError: `runtime_mode` is neither PIECEWISE nor FULL.
    """

    def __init__(
        self,
        runnable: Callable[..., Any],
        runtime_mode: CUDAGraphMode | str,
        *,
        engine: GraphEngine,
        name: str = "",
        num_warmups: int = 1,
        stats: GraphStats | None = None,
        keep_outputs: bool = True,
        strict: bool = False,
        check_addresses: bool = False,
        verify: bool = False,
        unwritten_outputs: frozenset[int] = frozenset(),
        engine_of: Callable[[BatchDescriptor], GraphEngine | None] | None = None,
    ) -> None:
        runtime_mode = CUDAGraphMode.parse(runtime_mode, option="runtime_mode")
        if runtime_mode not in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
            raise ConfigError(
                "runtime_mode", runtime_mode.name, "captures no graph", "use PIECEWISE or FULL"
            )
        self._runnable = runnable
        self._mode = runtime_mode
        self._engine = engine
        self._name = name or getattr(runnable, "__name__", type(runnable).__name__)
        self._num_warmups = num_warmups
        self._stats = stats if stats is not None else GraphStats()
        self._keep_outputs = keep_outputs
        self._strict = strict
        self._check_addresses = check_addresses
        self._verify = verify
        self._unwritten_outputs = unwritten_outputs
        self._engine_of = engine_of
        self._entries: dict[BatchDescriptor, _Entry] = {}
        self.has_failures = False

    def __call__(self, *args: Any) -> Any:
        """Run the callable on `args`, by replay where the context says so.

        Raises:
            CaptureError: with `strict`, when capture fails; with `check_addresses` or `verify`,
                when a replay would be, or was, wrong.
        """
        context = current_forward_context()
        if (
            context is None
            or context.cudagraph_runtime_mode is not self._mode
            or context.batch_descriptor is None
            or self._engine.is_capturing()
        ):
            return self._runnable(*args)
        # Contexts set by a compiled graph carry normal forms: no need to make one.
        entry = self._entries.get(context.batch_descriptor)
        if entry is not None and entry.graph is not None:
            return self._replay(context.batch_descriptor, entry, args)
        key = graph_key(self._mode, context.batch_descriptor)
        entry = self._entry(key)
        if entry.graph is not None:
            return self._replay(key, entry, args)
        return self._run_without_graph(key, entry, args)

    def graph_to_replay(self, key: BatchDescriptor) -> StaticGraph | None:
        """A normalised key's graph; None where each replay must go through a call.

        For whoever makes sure that the arguments are those of the capture. A graph reads no
        context.
        """
        entry = self._entries.get(key)
        is_checked = self._verify or self._check_addresses
        return None if entry is None or is_checked else entry.graph

    def counts(self, key: BatchDescriptor) -> KeyStats:
        """Where the runs of a normalised key are counted."""
        return self._entry(key).stats

    def unwrap(self) -> Callable[..., Any]:
        """The callable itself."""
        return self._runnable

    def reset(self) -> None:
        """Drop every graph and forget every key; later calls start anew."""
        self._entries.clear()

    def holds(self, key: BatchDescriptor) -> bool:
        """Whether a graph exists for a normalised key."""
        entry = self._entries.get(key)
        return entry is not None and entry.graph is not None

    def captures_next(self, key: BatchDescriptor) -> bool:
        """Whether the next call of a normalised key captures it."""
        entry = self._entries.get(key)
        return entry is not None and entry.graph is None and self._is_warm(entry)

    def outputs(self, key: BatchDescriptor) -> Any | None:
        """What replays of a normalised key fill; None without a graph."""
        entry = self._entries.get(key)
        return entry.graph.outputs if entry is not None and entry.graph is not None else None

    def failure(self, key: BatchDescriptor) -> str | None:
        """Why the capture of a normalised key failed; None if it did not."""
        entry = self._entries.get(key)
        return None if entry is None else entry.failure

    def forget(self, key: BatchDescriptor) -> None:
        """Drop all that is known of one key; its next call is the first one."""
        self._entries.pop(key, None)

    def drop(self, key: BatchDescriptor) -> None:
        """Drop one graph; its next call captures again, without another warm-up."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.graph = None

    def capture(self, key: BatchDescriptor, args: Sequence[Any]) -> Any:
        """Capture a warmed-up key without running it; return the tensors a replay will fill.

        Raises:
            CaptureError: it cannot be captured. The key is marked and runs eagerly from then on.
        """
        entry = self._entry(key)
        start = time.perf_counter()
        try:
            own = None if self._engine_of is None else self._engine_of(key)
            engine = own or self._engine
            graph = engine.capture(self._runnable, args, entry.trial or Trial())
        except CaptureError as error:
            entry.failure = str(error)
            self.has_failures = True
            entry.stats.failed_captures += 1
            raise CaptureError(
                f"{self._name} cannot be captured at {self._mode.name} for {key}: {error}"
            ) from error
        # This step's later captures must not take the memory of outputs it still reads.
        outputs = graph.outputs
        if not self._keep_outputs:
            graph.outputs = engine.keep_weakly(outputs)
        entry.graph = graph
        entry.addresses = _addresses(args)
        entry.stats.captures += 1
        self._stats.capture_s += time.perf_counter() - start
        return outputs

    def _entry(self, key: BatchDescriptor) -> _Entry:
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(self._stats.at(self._mode, key))
        return entry

    def _is_warm(self, entry: _Entry) -> bool:
        """Whether a key that has no graph yet is to be captured now."""
        return (
            entry.failure is None
            and entry.warm_ups >= self._num_warmups
            and current_capture_session() is None
        )

    def _run_without_graph(self, key: BatchDescriptor, entry: _Entry, args: Sequence[Any]) -> Any:
        if entry.failure is not None:
            entry.stats.eager += 1
            return self._runnable(*args)
        if not self._is_warm(entry):
            outputs, entry.trial = self._engine.warm_up(self._runnable, args)
            entry.warm_ups += 1
            entry.stats.warm_ups += 1
            return outputs
        try:
            outputs = self.capture(key, args)
        except CaptureError as error:
            if self._strict:
                raise
            logger.warning("%s; it runs eagerly from now on", error)
            entry.stats.eager += 1
            return self._runnable(*args)
        self._replay(key, entry, args)
        return outputs

    def _replay(self, key: BatchDescriptor, entry: _Entry, args: Sequence[Any]) -> Any:
        graph = entry.graph
        assert graph is not None
        if self._check_addresses and _addresses(args) != entry.addresses:
            raise CaptureError(
                f"{self._name} was captured for {key} with inputs at other addresses; pass "
                "tensors that stay where they are, or let the backend copy them "
                "(cudagraph_copy_inputs)"
            )
        expected = self._eager_results(args) if self._verify else None
        graph.replay()
        entry.stats.replays += 1
        if expected is not None:
            self._compare(key, expected, (graph.outputs, args))
        return graph.outputs

    def _eager_results(self, args: Sequence[Any]) -> Any:
        """Outputs and arguments after an eager run, which leaves no trace.

        Arguments are put back as they were, and so are the generators of random numbers: the
        replay that follows draws the very numbers of this run.
        """
        written = [
            memory_of(arg)
            for arg in args
            if isinstance(arg, torch.Tensor) and not isinstance(arg, torch.nn.Parameter)
        ]
        before = [arg.clone() for arg in written]
        device = self._engine.device
        forked = [device] if device.type == "cuda" else []  # that of the CPU always is
        with torch.random.fork_rng(forked, device_type="cuda"):
            results = (self._runnable(*args), tuple(args))
        results = tree_map(
            lambda item: item.clone() if isinstance(item, torch.Tensor) else item, results
        )
        for arg, value in zip(written, before, strict=True):
            arg.copy_(value)
        return results

    def _compare(self, key: BatchDescriptor, expected: Any, actual: Any) -> None:
        pairs = zip(tree_leaves(expected), tree_leaves(actual), strict=True)
        for position, (eager, replayed) in enumerate(pairs):
            if not isinstance(eager, torch.Tensor) or position in self._unwritten_outputs:
                continue
            try:
                torch.testing.assert_close(replayed, eager, equal_nan=True)
            except AssertionError as error:
                raise CaptureError(
                    f"verify: {self._name} replayed at {self._mode.name} for {key} differs from "
                    f"an eager run in tensor {position}: {error}"
                ) from error


def _addresses(args: Sequence[Any]) -> tuple[int, ...]:
    return tuple(
        part.data_ptr() for arg in args if isinstance(arg, torch.Tensor) for part in parts_of(arg)
    )
