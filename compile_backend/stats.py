"""Counts and times of what ran. Each compiled graph owns its own; reports add them up."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from compile_backend.batch import BatchDescriptor
from compile_backend.config import CUDAGraphMode
from compile_backend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

Row = tuple[CUDAGraphMode, BatchDescriptor]


@dataclass(slots=True)
class KeyStats:
    """What happened at one (mode, key).

    Attributes:
        steps: calls of the whole graph that ran so.
        warm_ups: eager runs before a capture; of pieces at PIECEWISE, of the whole at FULL.
        captures: graphs captured, likewise.
        failed_captures: captures that failed, likewise.
        replays: graphs replayed, likewise.
        eager: runs of what could not be captured.
        padding: tokens added to reach the key's size.
    """

    steps: int = 0
    warm_ups: int = 0
    captures: int = 0
    failed_captures: int = 0
    replays: int = 0
    eager: int = 0
    padding: int = 0

    def add(self, other: KeyStats) -> None:
        """Add the counts of another."""
        for counted in fields(self):
            name = counted.name
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class GraphStats:
    """What happened to one compiled graph.

    Attributes:
        rows: the counts, by (mode, key).
        capture_s: seconds spent in captures.
    """

    rows: dict[Row, KeyStats] = field(default_factory=dict)
    capture_s: float = 0.0

    def at(self, mode: CUDAGraphMode, key: BatchDescriptor) -> KeyStats:
        """The counts at one (mode, key), to be increased in place."""
        counts = self.rows.get((mode, key))
        if counts is None:
            counts = self.rows[mode, key] = KeyStats()
        return counts


@dataclass(frozen=True, slots=True)
class Report:
    """What `stats(compiled)` tells, over all graphs that Dynamo made of one callable.

    Attributes:
        graphs: compiled graphs; more than one after a graph break or a recompilation.
        pieces: pieces of all graphs, partitions of Inductor's included.
        eager_sections: eager sections of all graphs.
        compiles: distinct pieces that a compiler was run on, once for each range of sizes.
        compile_s: seconds that those compiles took.
        capture_s: seconds spent in captures.
        mode_asked: the modes asked for, or the defaults that were chosen.
        mode_resolved: what each graph's mode was lowered to.
        downgrades: each lowering of a mode with its reason.
        by_key: the counts of each (mode, key).
        loads: likewise, read from the cache instead of compiled.
        load_s: seconds that took.
        unstorable: compiled pieces that the cache cannot hold.
        passes: places that each rewrite changed, over all graphs.
        partitions: how many of the pieces Inductor made itself.
    """

    graphs: int
    pieces: int
    eager_sections: int
    compiles: int
    compile_s: float
    capture_s: float
    mode_asked: tuple[str, ...]
    mode_resolved: tuple[str, ...]
    downgrades: tuple[str, ...]
    by_key: dict[Row, KeyStats]
    loads: int = 0
    load_s: float = 0.0
    unstorable: int = 0
    passes: dict[str, int] = field(default_factory=dict)
    partitions: int = 0

    def total(self, counted: str, mode: CUDAGraphMode | str | None = None) -> int:
        """One count of `KeyStats`, over all keys and, without a mode, all modes.

        Args:
            counted: the name of a field of `KeyStats`.
            mode: only what happened at this mode.

        Raises:
            ConfigError: nothing of that name is counted, or there is no such mode.
        """
        known = [item.name for item in fields(KeyStats)]
        if counted not in known:
            fix = f"use one of {', '.join(known)}"
            raise ConfigError("counted", counted, "is not counted", fix)
        if mode is not None:
            mode = CUDAGraphMode.parse(mode, option="mode")
        return sum(
            getattr(row, counted) for (at, _), row in self.by_key.items() if mode in (None, at)
        )

    def as_dict(self) -> dict[str, Any]:
        """The report as plain types, for JSON."""
        rows = [
            {
                "mode": mode.name,
                "key": key._asdict(),
                **{counted.name: getattr(row, counted.name) for counted in fields(row)},
            }
            for (mode, key), row in self.by_key.items()
        ]
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**plain, "by_key": rows}


def added_rows(all_stats: Iterable[GraphStats]) -> dict[Row, KeyStats]:
    """The counts of several graphs together, in a fixed order of modes and keys."""
    added: dict[Row, KeyStats] = {}
    for stats in all_stats:
        for row, counts in stats.rows.items():
            added.setdefault(row, KeyStats()).add(counts)
    return dict(sorted(added.items(), key=lambda item: (item[0][0].name, str(item[0][1]))))
