"""The whole suite: start-up, the static cache, the paged cache, growth, in this order.

Start-up is first, while no model of this process fills the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compile_backend.bench.fresh_start import forget_compiled
from compile_backend.bench.growth import ON_CPU, ON_GPU, growth_results, powers
from compile_backend.bench.paged_steps import PagedBench
from compile_backend.bench.request import PAGED, STATIC
from compile_backend.bench.results import Results, about
from compile_backend.bench.shapes import make_model
from compile_backend.bench.start_up import start_up_results
from compile_backend.bench.static_steps import StaticBench
from compile_backend.bench.watch import keeping

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from compile_backend.bench.request import BenchRequest
    from compile_backend.bench.watch import Watch

CPU_NOTE = (
    "Measured on a CPU, where there are no CUDA graphs: a replay runs the captured code again. "
    "These figures show that the suite works; they mean nothing for speed."
)

# Each way compiles the same function of the model; torch's limit is 8.
_MAX_COMPILATIONS = 256


def run_suite(
    request: BenchRequest,
    watch: Watch,
    *,
    command: str,
    notes: Sequence[str] = (),
    keep: Callable[[Results], object] = lambda _: None,
) -> Results:
    """Measure all that was asked for.

    Args:
        request: what to measure.
        watch: is told what happens.
        command: what gives the same figures again.
        notes: put on top of the results.
        keep: called with what there is after each part, so that a run that is stopped in the
            middle leaves something.

    Raises:
        ConfigError: an option cannot be had, which only the model told.
    """
    results = Results(about=about(command, request.shape.name, request.device), notes=[*notes])
    if request.device.type != "cuda":
        results.notes.insert(0, CPU_NOTE)
    config: Any = torch.compiler.config
    with torch.no_grad(), config.patch(recompile_limit=_MAX_COMPILATIONS):
        if request.has_start_up:
            results.start_up = start_up_results(request, watch, results.failures)
            keep(results)
        _measure_steps(request, watch, results, keep)
        if request.has_growth:
            plan = ON_GPU if request.device.type == "cuda" else ON_CPU
            for row in growth_results(request, plan, watch, results.failures):
                results.growth.append(row)
                keep(results)
            results.growth_powers = powers(results.growth)
            keep(results)
    return results


def _measure_steps(
    request: BenchRequest, watch: Watch, results: Results, keep: Callable[[Results], object]
) -> None:
    with watch.phase(f"make {request.shape.name}"):
        model = make_model(request.shape, request.device)
    if STATIC in request.paths:
        with keeping(results.failures, STATIC):
            results.static = StaticBench(model, request, watch, results.failures).results()
        forget_compiled(request.device)
        keep(results)
    if PAGED in request.paths:
        bench = PagedBench(model, request, watch, results.failures)
        results.paged, results.captures = bench.results()
        results.stats = bench.stats()
        del bench, model
        forget_compiled(request.device)
        keep(results)
