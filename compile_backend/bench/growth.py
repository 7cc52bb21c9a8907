"""How host time, capture time and memory of a runner grow with layers and with capture sizes.

One of the two changes at a time, and everything else is the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from compile_backend.backend import cudagraph_modes, stats
from compile_backend.bench.figures import power
from compile_backend.bench.fresh_start import forget_compiled
from compile_backend.bench.paged_batches import decode
from compile_backend.bench.paged_ways import (
    capture_figures,
    make_runner,
    on_paged_cache,
    ran_at,
    run_at,
)
from compile_backend.bench.rounds import Clock, measure
from compile_backend.bench.shapes import make_model
from compile_backend.bench.watch import keeping
from compile_backend.config import CUDAGraphMode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from compile_backend.bench.request import BenchRequest
    from compile_backend.bench.shapes import Shape
    from compile_backend.bench.watch import Watch

LAYERS, SIZES = "layers", "sizes"
_MODES = (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)
_BOTH = CUDAGraphMode.FULL_AND_PIECEWISE.name


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthPlan:
    """Where to measure.

    Attributes:
        layers: depths of the model.
        sizes: numbers of capture sizes.
        size_step: between neighbouring sizes; the largest is the same for every number of them,
            and the step that is timed has that many requests.
    """

    layers: tuple[int, ...]
    sizes: tuple[int, ...]
    size_step: int

    @property
    def largest_size(self) -> int:
        """Of all capture sizes."""
        return self.sizes[-1] * self.size_step

    def capture_sizes(self, number: int) -> list[int]:
        """So many sizes, up to the largest."""
        last = self.largest_size
        return list(range(last - (number - 1) * self.size_step, last + 1, self.size_step))


ON_GPU = GrowthPlan(layers=(4, 8, 16, 32, 64), sizes=(1, 2, 4, 8, 16, 32, 64), size_step=8)
ON_CPU = GrowthPlan(layers=(1, 2), sizes=(1, 2, 4), size_step=1)


def growth_results(
    request: BenchRequest, plan: GrowthPlan, watch: Watch, failures: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Measure along both axes.

    Yields:
        A row for each point and mode: the axis, where on it, host us, wall ms, and seconds, bytes
        and graphs of its captures; seconds of compiling and of everything before the first step
        are those of both modes together.
    """
    for axis, points in ((LAYERS, plan.layers), (SIZES, plan.sizes)):
        for at in points:
            rows: list[dict[str, Any]] = []
            with keeping(failures, f"growth | {at} {axis}"), watch.phase(f"{at} {axis}"):
                if axis == LAYERS:
                    shape = request.shape.with_layers(at)
                    sizes: Sequence[int] = shape.decodes
                else:
                    shape, sizes = request.shape, plan.capture_sizes(at)
                rows = _point(request, shape, sizes)
            yield from ({"axis": axis, "at": at, **row} for row in rows)
            forget_compiled(request.device)


def _point(request: BenchRequest, shape: Shape, sizes: Sequence[int]) -> list[dict[str, Any]]:
    # A short context: blocks for hundreds of requests are not what is measured.
    shape = shape.for_decoding(max(sizes))
    paged = on_paged_cache(make_model(shape, request.device), shape, request.attention[0])
    compiled = torch.compile(paged.module, backend=cudagraph_modes, options=dict(request.options))
    runner = make_runner(
        compiled,
        paged,
        _BOTH,
        options=request.options,
        sizes=sizes,
        max_num_seqs=max(sizes),
        max_num_tokens=max(sizes),
    )
    start = time.perf_counter()
    runner.capture(progress=False)
    figures = capture_figures(runner, time.perf_counter() - start)
    work = decode(shape, max(sizes))
    ways = {mode.name: run_at(runner, work, mode) for mode in _MODES}
    modes = {name: ran_at(runner, step) for name, step in ways.items()}
    times = measure(
        ways,
        Clock(request.device),
        num_rounds=request.num_rounds,
        num_steps=request.num_steps,
    )
    return [
        {
            "mode": name,
            "ran_at": modes[name],
            **times[name].as_dict(),
            **captured,
            "compile_s": stats(compiled).compile_s,
            "start_s": figures["whole_s"],
        }
        for name, captured in figures["by_mode"].items()
    ]


def powers(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By which power of layers and sizes each figure grows, from the first point to the last."""
    found = []
    for axis in (LAYERS, SIZES):
        for mode in (mode.name for mode in _MODES):
            line = [row for row in rows if (row["axis"], row["mode"]) == (axis, mode)]
            if not line:
                continue
            xs = [row["at"] for row in line]
            found.append(
                {
                    "axis": axis,
                    "mode": mode,
                    "host_us": power(xs, [row["host_us"]["median"] for row in line]),
                    "seconds": power(xs, [row["seconds"] for row in line]),
                    "bytes": power(xs, [row["bytes"] for row in line]),
                }
            )
    return found
