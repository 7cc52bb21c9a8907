"""What capturing all keys will take, from a sample of them.

Graphs share a memory pool and are captured the largest first: the first one of a mode takes what
all need, and each further one a little more. So two keys of a mode tell about the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compile_backend.reports import as_text, columns
from compile_backend.runner_report import Cost

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from compile_backend.batch import BatchDescriptor
    from compile_backend.config import CUDAGraphMode
    from compile_backend.runner_report import Size

SAMPLE = 2
"""Keys of each mode that are captured for an estimate, the largest ones."""


@dataclass(frozen=True, slots=True)
class ModeEstimate:
    """The captures of one mode.

    Attributes:
        num_keys: sizes that have graphs.
        num_graphs: graphs of all of them; at PIECEWISE, one for each piece and size.
        cost: of capturing them, without warm-ups.
    """

    num_keys: int
    num_graphs: int
    cost: Cost


@dataclass(frozen=True, slots=True)
class CaptureEstimate:
    """What `GraphModelRunner.estimate()` tells; `print` it.

    Attributes:
        by_mode: the captures of each mode.
        warm_up_s: seconds of all warm-ups together.
        input_bytes: device memory of the steps' inputs, which is taken already.
    """

    by_mode: dict[CUDAGraphMode, ModeEstimate]
    warm_up_s: float
    input_bytes: int

    @property
    def total(self) -> Cost:
        """All modes and the warm-ups together."""
        total = Cost(self.warm_up_s, 0)
        for mode in self.by_mode.values():
            total = total.plus(mode.cost)
        return total

    def __str__(self) -> str:
        rows: list[tuple[object, ...]] = [
            (
                mode.name,
                of.num_keys,
                of.num_graphs,
                f"{of.cost.seconds:.2f}",
                f"{of.cost.num_bytes / 2**20:.1f}",
            )
            for mode, of in self.by_mode.items()
        ]
        total = self.total
        rows.append(
            ("with warm-ups", "", "", f"{total.seconds:.2f}", f"{total.num_bytes / 2**20:.1f}")
        )
        return as_text(columns("Estimate", ("mode", "sizes", "graphs", "s", "MiB"), rows))


def extrapolate(
    plan: Sequence[tuple[CUDAGraphMode, Sequence[BatchDescriptor]]],
    sampled: Mapping[Size, Cost],
    num_graphs: Mapping[CUDAGraphMode, int],
    warm_up_s: float,
    input_bytes: int,
) -> CaptureEstimate:
    """All captures of a plan from those of its first keys.

    Args:
        plan: the modes and their keys, the largest first.
        sampled: what the first keys of each mode took.
        num_graphs: graphs that were captured for those.
        warm_up_s: seconds of their warm-ups.
        input_bytes: see `CaptureEstimate`.
    """
    by_mode: dict[CUDAGraphMode, ModeEstimate] = {}
    for mode, keys in plan:
        costs = [cost for (at, _), cost in sampled.items() if at is mode]
        if not costs:
            continue
        first, num_further = costs[0], len(keys) - 1
        further = costs[-1] if len(costs) > 1 else Cost(0.0, 0)
        total = Cost(
            first.seconds + num_further * further.seconds,
            first.num_bytes + num_further * further.num_bytes,
        )
        graphs = round(num_graphs.get(mode, 0) / len(costs) * len(keys))
        by_mode[mode] = ModeEstimate(len(keys), graphs, total)
    num_sampled = sum(min(SAMPLE, len(keys)) for _, keys in plan)
    num_keys = sum(len(keys) for _, keys in plan)
    return CaptureEstimate(by_mode, warm_up_s * num_keys / max(1, num_sampled), input_bytes)
