"""Tables for people to read: the one place where reports become text.

It knows how to lay out, and the counts of `stats`; it works nothing out. Whoever has something to
show gives titles, rows and cells.
"""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from compile_backend.errors import number_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import RenderableType

    from compile_backend.batch import BatchDescriptor
    from compile_backend.stats import KeyStats, Report, Row

_TEXT_WIDTH = 100

_COUNTS = ("steps", "warm_ups", "captures", "failed_captures", "replays", "eager", "padding")


def facts(title: str, rows: Mapping[str, object]) -> Table:
    """A table of names and what is said of each; several lines where that is a list."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        lines = value if isinstance(value, list | tuple) else (value,)
        table.add_row(name, "\n".join(escape(str(line)) for line in lines) or "-")
    return table


def columns(title: str, headings: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table with headings; numbers stand to the right."""
    kept = [tuple(row) for row in rows]
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for index, heading in enumerate(headings):
        is_number = bool(kept) and all(isinstance(row[index], int | float) for row in kept)
        table.add_column(heading, justify="right" if is_number else "left", overflow="fold")
    for row in kept:
        table.add_row(*(escape(str(cell)) for cell in row))
    return table


def stack(parts: Iterable[RenderableType]) -> Group:
    """Several tables, one below the other."""
    return Group(*parts)


def as_text(renderable: RenderableType) -> str:
    """What a terminal of fixed width would show, without colours."""
    out = StringIO()
    Console(file=out, width=_TEXT_WIDTH, color_system=None, force_terminal=False).print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


def compact_sizes(sizes: Iterable[int]) -> str:
    """Ascending sizes in short: `1, 2, 4, 8-248 by 8`."""
    left = sorted(set(sizes))
    parts = []
    while left:
        step = left[1] - left[0] if len(left) > 1 else 0
        run = 1
        while run < len(left) and left[run] - left[run - 1] == step:
            run += 1
        # Up to three sizes are shorter to read one by one.
        if run < 4:
            parts.append(str(left.pop(0)))
        else:
            by = f" by {step}" if step > 1 else ""
            parts.append(f"{left[0]}-{left[run - 1]}{by}")
            left = left[run:]
    return ", ".join(parts)


def key_text(key: BatchDescriptor) -> str:
    """A key in short: its tokens, and only what else sets it apart."""
    parts = [number_of("token", key.num_tokens)]
    # As many requests as tokens is also how keys say that requests do not matter.
    if key.num_reqs != key.num_tokens:
        parts[0] += f" of {number_of('request', key.num_reqs)}"
    if key.uniform:
        parts.append("uniform")
    if key.has_lora:
        num_loras = key.num_active_loras
        parts.append(number_of("adapter", num_loras) if num_loras else "some adapters")
    if key.extra:
        parts.append(f"extra {key.extra}")
    return ", ".join(parts)


def stats_facts(report: Report) -> dict[str, object]:
    """What `stats` counted over all keys, as rows for `facts`."""
    steps = [_by_mode(report, "steps", mode) for mode in ("FULL", "PIECEWISE", "NONE")]
    replays = [_by_mode(report, "replays", mode) for mode in ("FULL", "PIECEWISE")]
    rows: dict[str, object] = {
        "mode asked": ", ".join(report.mode_asked),
        "mode resolved": ", ".join(report.mode_resolved),
        "reasons": report.downgrades,
        "compiled graphs": report.graphs,
        "pieces": report.pieces,
        "partitions of Inductor's": report.partitions,
        "eager sections": report.eager_sections,
        "distinct compiles": f"{report.compiles} in {report.compile_s:.1f} s",
        "loads from the cache": f"{report.loads} in {report.load_s:.2f} s",
        "captures": f"{report.total('captures')} in {report.capture_s:.2f} s",
        "graph replays": ", ".join(replays),
        "steps": ", ".join(steps),
    }
    if not report.downgrades:
        del rows["reasons"]
    if not report.partitions:
        del rows["partitions of Inductor's"]
    if not report.loads:
        del rows["loads from the cache"]
    return rows


def _by_mode(report: Report, counted: str, mode_name: str) -> str:
    counts = (
        getattr(row, counted) for (at, _), row in report.by_key.items() if at.name == mode_name
    )
    return f"{sum(counts)} {mode_name}"


def stats_keys(by_key: Mapping[Row, KeyStats]) -> Table:
    """What `stats` counted, a row for each mode and key; counts that are all 0 are left out."""
    counted = [
        name
        for name in _COUNTS
        if name == "steps" or any(getattr(counts, name) for counts in by_key.values())
    ]
    rows = [
        (mode.name, key_text(key), *(getattr(counts, name) for name in counted))
        for (mode, key), counts in by_key.items()
    ]
    return columns("By key", ("mode", "key", *(n.replace("_", " ") for n in counted)), rows)
