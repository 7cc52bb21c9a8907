"""What a run of the suite found, as JSON for machines and as Markdown for people."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compile_backend.bench.figures import cell
from compile_backend.errors import number_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_PACKAGES = ("cudagraph-modes", "torch", "triton", "transformers", "breakable-cuda-graphs")
_MIB = 2**20


def about(command: str, shape: str, device: torch.device) -> dict[str, str]:
    """How the figures came about, by name.

    Args:
        command: what gives them again.
        shape: the model.
        device: where it ran.
    """
    is_cuda = device.type == "cuda"
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["torch"] = torch.__version__  # with what it was built for
    return {
        "command": command,
        "gpu": torch.cuda.get_device_name(device) if is_cuda else "none",
        "python": platform.python_version(),
        **versions,
        "shape": shape,
    }


@dataclass(slots=True, kw_only=True)
class Results:
    """What was measured; what was not asked for is empty.

    Attributes:
        about: the command and versions.
        static: by way, on a static cache.
        paged: by attention backend, step and way, on a paged cache.
        captures: of all sizes, by mode.
        start_up: by way, cold and warm.
        growth: a row for each point and mode.
        growth_powers: by which power of its axis each figure grows.
        stats: of the compiled model on the paged cache.
        failures: what failed, with its error.
        notes: what readers must know.
    """

    about: dict[str, str]
    static: dict[str, Any] = field(default_factory=dict)
    paged: dict[str, Any] = field(default_factory=dict)
    captures: dict[str, Any] = field(default_factory=dict)
    start_up: dict[str, Any] = field(default_factory=dict)
    growth: list[dict[str, Any]] = field(default_factory=list)
    growth_powers: list[dict[str, Any]] = field(default_factory=list)
    stats: dict[str, Any] | None = None
    failures: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain types, for JSON."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def markdown(self) -> str:
        """All of it as tables, below what it is about."""
        sections = [
            [f"{name}: {value}  " for name, value in self.about.items()],
            list(self.notes),
            _static_lines(self.static),
            _paged_lines(self.paged),
            _capture_lines(self.captures),
            _start_up_lines(self.start_up),
            _growth_lines(self.growth),
            _power_lines(self.growth_powers),
            [f"{name} failed: {error}" for name, error in self.failures.items()],
        ]
        return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"

    def write(self, out: Path) -> list[Path]:
        """Write OUT.json and OUT.md; return both."""
        written = {
            Path(f"{out}.json"): json.dumps(self.as_dict(), indent=1) + "\n",
            Path(f"{out}.md"): self.markdown(),
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        for path, text in written.items():
            path.write_text(text, encoding="utf-8")
        return list(written)


def table(headings: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """A Markdown table."""
    names = list(headings)
    lines = [f"| {' | '.join(map(str, line))} |" for line in (names, *rows)]
    return [lines[0], "|" + "---|" * len(names), *lines[1:]]


def _static_lines(static: Mapping[str, Any]) -> list[str]:
    if not static:
        return []
    rows = [
        (
            name,
            row["ran_at"],
            cell(row["wall_ms"], 3),
            cell(row["host_us"], 1),
            f"{row['first_call_s']:.1f}" if "first_call_s" in row else "",
        )
        for name, row in static.items()
    ]
    return table(
        ("variant", "ran at", "wall ms (min..max)", "host us (min..max)", "first call s"), rows
    )


def _paged_lines(paged: Mapping[str, Any]) -> list[str]:
    if not paged:
        return []
    rows = [
        (*name.split(" | "), row["ran_at"], cell(row["wall_ms"], 3), cell(row["host_us"], 1))
        for name, row in paged.items()
    ]
    headings = ("attention", "step", "mode", "ran at", "wall ms (min..max)", "host us (min..max)")
    return table(headings, rows)


def _capture_lines(captures: Mapping[str, Any]) -> list[str]:
    if not captures:
        return []
    rows = [
        (asked, name, row["graphs"], f"{row['seconds']:.2f}", f"{row['bytes'] / _MIB:.1f}")
        for asked, figures in captures.items()
        for name, row in figures["by_mode"].items()
    ]
    return table(("capture of all sizes", "graphs of", "graphs", "seconds", "MiB"), rows)


def _start_up_lines(start_up: Mapping[str, Any]) -> list[str]:
    if not start_up:
        return []
    rows = [
        (
            name,
            temperature,
            f"{row['first_call_s']:.1f}",
            f"{row['process_s']:.1f}",
            row.get("compiles", ""),
            row.get("loads", ""),
        )
        for name, both in start_up.items()
        for temperature, row in both.items()
    ]
    headings = ("start-up", "caches", "first call s", "process s", "compiles", "loads")
    return table(headings, rows)


def _growth_lines(growth: Iterable[Mapping[str, Any]]) -> list[str]:
    rows = [
        (
            number_of(row["axis"].removesuffix("s"), row["at"]),
            row["mode"],
            row["ran_at"],
            cell(row["host_us"], 1),
            cell(row["wall_ms"], 3),
            row["graphs"],
            f"{row['seconds']:.2f}",
            f"{row['bytes'] / _MIB:.1f}",
            f"{row['compile_s']:.1f}",
            f"{row['start_s']:.1f}",
        )
        for row in growth
    ]
    headings = (
        "growth",
        "mode",
        "ran at",
        "host us (min..max)",
        "wall ms (min..max)",
        "graphs",
        "capture s",
        "MiB",
        "compile s",
        "start s",
    )
    return table(headings, rows) if rows else []


def _power_lines(powers: Iterable[Mapping[str, Any]]) -> list[str]:
    rows = [
        (
            row["axis"],
            row["mode"],
            *(
                "" if row[name] is None else f"{row[name]:.2f}"
                for name in ("host_us", "seconds", "bytes")
            ),
        )
        for row in powers
    ]
    headings = ("grows with the power of", "mode", "host time", "capture time", "memory")
    return table(headings, rows) if rows else []
