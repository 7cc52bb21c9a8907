"""Figures as pictures, by matplotlib, which is optional."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_backend.bench.growth import LAYERS, SIZES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from matplotlib.axes import Axes

    from compile_backend.bench.results import Results

logger = logging.getLogger(__name__)

NOT_INSTALLED = (
    "no plots are drawn, since matplotlib is not installed; "
    "run `pip install 'cudagraph-modes[bench]'`"
)
_INCHES = (6.0, 4.0)
_FIGURES: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "host us a step": lambda row: float(row["host_us"]["median"]),
    "capture s": lambda row: float(row["seconds"]),
    "graph memory, MiB": lambda row: float(row["bytes"]) / 2**20,
}


def draw(results: Results, out: Path) -> list[Path]:
    """Draw what there is: OUT-static.png, OUT-paged.png, OUT-layers.png, OUT-sizes.png.

    Returns:
        The files; none without matplotlib, which is logged once.
    """
    if importlib.util.find_spec("matplotlib") is None:
        logger.warning(NOT_INSTALLED)
        return []
    drawn = []
    for name in ("static", "paged"):
        rows = getattr(results, name)
        if rows:
            drawn.append(_draw_times(rows, results.about, Path(f"{out}-{name}.png")))
    for axis in (LAYERS, SIZES):
        rows = [row for row in results.growth if row["axis"] == axis]
        if rows:
            drawn.append(_draw_growth(rows, axis, results.about, Path(f"{out}-{axis}.png")))
    return drawn


def _draw_times(rows: Mapping[str, Any], about: Mapping[str, str], path: Path) -> Path:
    """Medians of wall and host time; the lines go from the smallest to the largest."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    names = list(rows)[::-1]
    width, height = _INCHES
    figure = Figure(figsize=(2 * width, max(height, 0.3 * len(names) + 1)), layout="constrained")
    for axes, key, label in zip(
        figure.subplots(1, 2, sharey=True),
        ("wall_ms", "host_us"),
        ("wall ms a step", "host us a step"),
        strict=True,
    ):
        figures = [rows[name][key] for name in names]
        middle = [each["median"] for each in figures]
        below = [each["median"] - each["min"] for each in figures]
        above = [each["max"] - each["median"] for each in figures]
        axes.errorbar(middle, names, xerr=(below, above), fmt="o")
        axes.set_xscale("log")
        axes.set_xlabel(label)
    figure.suptitle(_title(about))
    figure.savefig(path)
    return path


def _draw_growth(
    rows: list[dict[str, Any]], axis: str, about: Mapping[str, str], path: Path
) -> Path:
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional

    width, height = _INCHES
    figure = Figure(figsize=(2 * width, height), layout="constrained")
    panels = figure.subplots(1, len(_FIGURES))
    for axes, (label, figure_of) in zip(panels, _FIGURES.items(), strict=True):
        _draw_line(axes, rows, figure_of)
        axes.set_xlabel("layers" if axis == LAYERS else "capture sizes")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    panels[0].legend()
    figure.suptitle(_title(about))
    figure.savefig(path)
    return path


def _draw_line(
    axes: Axes, rows: list[dict[str, Any]], figure_of: Callable[[Mapping[str, Any]], float]
) -> None:
    for mode in dict.fromkeys(row["mode"] for row in rows):
        line = [row for row in rows if row["mode"] == mode]
        xs, ys = [row["at"] for row in line], [figure_of(row) for row in line]
        axes.plot(xs, ys, marker="o", label=mode)


def _title(about: Mapping[str, str]) -> str:
    where = "CPU: says nothing about speed" if about["gpu"] == "none" else about["gpu"]
    return f"{about['shape']}, {where}, torch {about['torch']}"
