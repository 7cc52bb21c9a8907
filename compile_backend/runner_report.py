"""What a runner captured, what that took, and what ran: measured, added up, and as text."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from compile_backend.batch import of_runner, runner_of
from compile_backend.config import CUDAGraphMode
from compile_backend.reports import as_text, columns, facts, stack, stats_keys
from compile_backend.stats import KeyStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from compile_backend.stats import GraphStats, Row


Size = tuple[CUDAGraphMode, int]
"""A mode, and a padded number of tokens."""


class Cost(NamedTuple):
    """What captures took.

    Attributes:
        seconds: of the host.
        num_bytes: of device memory; graphs captured before gave the rest.
    """

    seconds: float
    num_bytes: int

    def plus(self, other: Cost) -> Cost:
        """Both together."""
        return Cost(self.seconds + other.seconds, self.num_bytes + other.num_bytes)


class CaptureMeter:
    """Seconds and device memory that captures took.

    Args:
        device: whose memory is measured; none is on a CPU.

    Attributes:
        by_size: for each mode and size, in the order of capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.by_size: dict[Size, Cost] = {}

    def by_mode(self) -> dict[CUDAGraphMode, Cost]:
        """All sizes of each mode together."""
        costs: dict[CUDAGraphMode, Cost] = {}
        for (mode, _), cost in self.by_size.items():
            costs[mode] = cost.plus(costs.get(mode, Cost(0.0, 0)))
        return costs

    def measure(self, size: Size, capture: Callable[[], None]) -> None:
        """Run a capture."""
        start, before = time.perf_counter(), self._reserved()
        capture()
        cost = Cost(time.perf_counter() - start, self._reserved() - before)
        self.by_size[size] = cost.plus(self.by_size.get(size, Cost(0.0, 0)))

    def peak(self, run: Callable[[], None]) -> int:
        """Device memory that a run takes at its peak, beyond what was allocated before."""
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        return torch.cuda.max_memory_allocated(self._device) - before

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0


@dataclass(frozen=True, slots=True)
class RunnerReport:
    """What `GraphModelRunner.report()` tells.

    Attributes:
        mode_asked: the mode asked for, or the default.
        mode_resolved: what it was lowered to; empty before `capture()`.
        downgrades: each lowering with its reason.
        by_key: the counts of each (mode, key): steps and padding of the runner, captures and
            replays of graphs, of which a step at PIECEWISE has one for each piece.
        capture_s: seconds of capturing, by mode.
        num_bytes: device memory that graphs took, by mode.
        by_size: both, for each mode and padded number of tokens.
        num_graphs: graphs captured since the last `capture()` began, by mode.
        input_bytes: device memory of the steps' inputs.
    """

    mode_asked: str
    mode_resolved: str
    downgrades: tuple[str, ...]
    by_key: dict[Row, KeyStats]
    capture_s: dict[CUDAGraphMode, float]
    num_bytes: dict[CUDAGraphMode, int]
    by_size: dict[Size, Cost]
    num_graphs: dict[CUDAGraphMode, int]
    input_bytes: int

    def steps(self, mode: CUDAGraphMode) -> int:
        """Steps that ran at a mode."""
        return sum(counts.steps for (at, _), counts in self.by_key.items() if at is mode)

    def __str__(self) -> str:
        graphs = [
            f"{mode.name}: {self.num_graphs.get(mode, 0)} graphs in {seconds:.2f} s, "
            f"{self.num_bytes.get(mode, 0) / 2**20:.1f} MiB"
            for mode, seconds in self.capture_s.items()
        ]
        about = {
            "mode asked for": self.mode_asked,
            "mode resolved": self.mode_resolved or "not yet",
            "lowered since": self.downgrades,
            "captured": graphs,
            "inputs of a step": f"{self.input_bytes / 2**20:.1f} MiB",
        }
        parts = [facts("Runner", about), stats_keys(self.by_key)]
        if any(cost.num_bytes for cost in self.by_size.values()):
            parts.append(_sizes(self.by_size))
        return as_text(stack(parts))


def _sizes(by_size: Mapping[Size, Cost]) -> Any:
    rows = [
        (mode.name, num_tokens, f"{cost.seconds * 1e3:.0f}", f"{cost.num_bytes / 2**20:.1f}")
        for (mode, num_tokens), cost in by_size.items()
    ]
    return columns("Captures, the largest first", ("mode", "tokens", "ms", "MiB"), rows)


def graphs_by_mode(
    all_stats: Iterable[GraphStats],
    number: int = 0,
    before: Mapping[CUDAGraphMode, int] | None = None,
) -> dict[CUDAGraphMode, int]:
    """Graphs captured, by mode.

    Args:
        all_stats: the counts of the runner and of the compiled graphs.
        number: of the runner among those of the model.
        before: how many there were at an earlier time; those are left out.
    """
    numbers: dict[CUDAGraphMode, int] = {}
    for stats in all_stats:
        for (mode, key), counts in stats.rows.items():
            if mode is CUDAGraphMode.PIECEWISE and runner_of(key) != number:
                continue
            numbers[mode] = numbers.get(mode, 0) + counts.captures
    for mode, earlier in (before or {}).items():
        numbers[mode] -= earlier
    return {mode: captured for mode, captured in numbers.items() if captured}


def steps_with_graphs(
    own: GraphStats, compiled: Iterable[GraphStats], number: int = 0
) -> dict[Row, KeyStats]:
    """The runner's steps, with what the graphs of pieces did in them.

    Args:
        own: the runner's counts.
        compiled: those of each compiled graph, which count the same steps once more.
        number: of the runner among those of the model.
    """
    rows = {row: KeyStats() for row in own.rows}
    for row, counts in own.rows.items():
        rows[row].add(counts)
    for stats in compiled:
        for (mode, key), counts in stats.rows.items():
            if mode is not CUDAGraphMode.PIECEWISE or runner_of(key) != number:
                continue
            others = of_runner(number)
            extra = tuple(i for i in key.extra if not _is_sizes(i) and i not in others)
            kept = KeyStats()
            kept.add(counts)
            kept.steps = kept.padding = 0
            rows.setdefault((mode, key._replace(extra=extra)), KeyStats()).add(kept)
    return dict(sorted(rows.items(), key=_order))


def _order(item: tuple[Row, KeyStats]) -> tuple[Any, ...]:
    (mode, key), _ = item
    return (mode.name, *key[:5], str(key.extra))


def _is_sizes(item: object) -> bool:
    return isinstance(item, tuple) and item[:1] == ("sizes",)
