"""Several measurements of one thing as figures: the median, and how far they spread."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def cell(figures: Mapping[str, float], digits: int) -> str:
    """A spread as a table shows it: `2.24 (2.23..2.25)`."""
    median, low, high = (f"{figures[name]:.{digits}f}" for name in ("median", "min", "max"))
    return f"{median} ({low}..{high})"


def power(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """The power of x by which y grows from the first point to the last: 1 is linear, 0 constant.

    None where that cannot be told: fewer than two points, or figures that are not positive.
    """
    if len(xs) < 2 or min(xs[0], xs[-1], ys[0], ys[-1]) <= 0 or xs[0] == xs[-1]:
        return None
    return math.log(ys[-1] / ys[0]) / math.log(xs[-1] / xs[0])
