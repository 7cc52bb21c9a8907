"""Steps on a paged cache: through `GraphModelRunner` in every mode, and in graphs made by hand.

The model is compiled once: neither modes nor attention backends change what is compiled.
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

import torch

from compile_backend.backend import cudagraph_modes, reset, stats
from compile_backend.bench.breakable import captured_with_breaks
from compile_backend.bench.by_hand import captured_by_hand
from compile_backend.bench.fresh_start import give_memory_back
from compile_backend.bench.paged_batches import Work, all_works
from compile_backend.bench.paged_ways import (
    capture_figures,
    make_runner,
    on_paged_cache,
    ran_at,
    run_at,
    runner_of_all_sizes,
    step_outside_a_runner,
)
from compile_backend.bench.request import BREAKABLE, BY_HAND, EAGER, OURS, PAGED
from compile_backend.bench.rounds import Clock, Step, measure
from compile_backend.bench.watch import keeping
from compile_backend.config import CUDAGraphMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from compile_backend.attention.huggingface import PagedModel
    from compile_backend.bench.request import BenchRequest
    from compile_backend.bench.watch import Watch
    from compile_backend.runner import GraphModelRunner

NONE, PIECEWISE = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE
_BOTH = CUDAGraphMode.FULL_AND_PIECEWISE.name

# One runner holds the graphs of these; a step of it is capped to get the lower ones.
_HIGHEST: dict[str, CUDAGraphMode | None] = {_BOTH: None, "PIECEWISE": PIECEWISE, "NONE": NONE}


class PagedBench:
    """All ways to run all steps that were asked for, side by side.

    Args:
        model: of the request's shape.
        request: what to measure.
        watch: is told what happens.
        failures: gets what failed, with its error.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        request: BenchRequest,
        watch: Watch,
        failures: dict[str, str],
    ) -> None:
        self._model = model
        self._request = request
        self._watch = watch
        self._failures = failures
        self._compiled: Any = None

    def results(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Measure.

        Returns:
            Wall ms and host us by attention backend, step and way; seconds and bytes of capturing
            all sizes, by mode, with the first of these backends.
        """
        request, rows = self._request, dict[str, Any]()
        captures: dict[str, Any] = {}
        for attention in request.attention:
            with keeping(self._failures, f"paged | {attention}"):
                paged = on_paged_cache(self._model, request.shape, attention)
                rows |= self._rows(paged, attention)
                wants_captures = request.has_captures and request.measures(OURS, PAGED)
                if wants_captures and not captures:
                    captures = self._captures(paged)
            if self._compiled is not None:
                reset(self._compiled)
            gc.collect()
        return rows, captures

    def stats(self) -> dict[str, Any] | None:
        """What `stats` tells of the compiled model."""
        return None if self._compiled is None else stats(self._compiled).as_dict()

    def _runner(self, run: Any, paged: PagedModel, mode: str) -> GraphModelRunner:
        """A runner for the steps of the shape, with everything captured."""
        shape = self._request.shape
        runner = make_runner(
            run,
            paged,
            mode,
            options=self._request.options,
            sizes=sorted({*shape.decodes, *shape.prefills}),
            max_num_seqs=max(shape.decodes),
            max_num_tokens=shape.max_num_tokens,
        )
        with self._watch.phase(f"runner at {mode}"):
            runner.capture(progress=False)
        return runner

    def _rows(self, paged: PagedModel, attention: str) -> dict[str, Any]:
        request, works = self._request, all_works(self._request.shape)
        if self._compiled is None:
            self._compiled = torch.compile(
                paged.module, backend=cudagraph_modes, options=dict(request.options)
            )
        ways: dict[str, Step] = {}
        modes: dict[str, str] = {}
        if request.measures(OURS, PAGED):
            ways |= self._ways_of_runners(paged, works, modes)
        if request.measures(EAGER, PAGED):
            eager = self._runner(paged.module, paged, "NONE")
            ways |= {f"{work.name} | {EAGER}": run_at(eager, work) for work in works}
        ways |= self._ways_by_hand(paged, [work for work in works if work.is_decode], attention)
        total = 2 * request.num_rounds * len(ways)
        with self._watch.bar(f"paged cache, {attention}", total) as advance:
            times = measure(
                ways,
                Clock(self._model.device),
                num_rounds=request.num_rounds,
                num_steps=request.num_steps,
                advance=advance,
            )
        return {
            f"{attention} | {way}": {**times[way].as_dict(), "ran_at": modes.get(way, "")}
            for way in ways
        }

    def _ways_of_runners(
        self, paged: PagedModel, works: Sequence[Work], modes: dict[str, str]
    ) -> dict[str, Step]:
        ways: dict[str, Step] = {}
        shared: GraphModelRunner | None = None
        for mode in self._request.modes:
            if mode not in _HIGHEST:
                runner = self._runner(self._compiled, paged, mode)
            else:
                runner = shared = shared or self._runner(self._compiled, paged, _BOTH)
            for work in works:
                way = f"{work.name} | {mode}"
                ways[way] = run_at(runner, work, _HIGHEST.get(mode))
                modes[way] = ran_at(runner, ways[way])
        return ways

    def _ways_by_hand(
        self, paged: PagedModel, works: Sequence[Work], attention: str
    ) -> dict[str, Step]:
        ways: dict[str, Step] = {}
        for work in works:
            if self._request.measures(BY_HAND, PAGED):
                with keeping(self._failures, f"paged | {attention} | {work.name} | {BY_HAND}"):
                    step, _, plan = step_outside_a_runner(
                        self._compiled, paged, work, for_graph=True
                    )
                    ways[f"{work.name} | graph by hand"] = captured_by_hand(step, plan)
            if self._request.measures(BREAKABLE, PAGED):
                with keeping(self._failures, f"paged | {attention} | {work.name} | {BREAKABLE}"):
                    step, metadata, _ = step_outside_a_runner(
                        paged.module, paged, work, for_graph=False
                    )
                    ways[f"{work.name} | graph with breaks"] = captured_with_breaks(
                        self._model, step, metadata
                    )
        return ways

    def _captures(self, paged: PagedModel) -> dict[str, Any]:
        """Of all sizes, with nothing captured before; by mode asked for, then by mode captured."""
        found: dict[str, Any] = {}
        for mode in (mode for mode in self._request.modes if mode != NONE.name):
            with keeping(self._failures, f"paged | capture of all sizes | {mode}"):
                reset(self._compiled)
                give_memory_back(self._model.device)
                found[mode] = self._capture(paged, mode)
        return found

    def _capture(self, paged: PagedModel, mode: str) -> dict[str, Any]:
        request = self._request
        runner = runner_of_all_sizes(
            self._compiled, paged, mode, request.shape, options=request.options
        )
        start = time.perf_counter()
        with self._watch.phase(f"capture all sizes, {mode}"):
            runner.capture(progress=False)
        return capture_figures(runner, time.perf_counter() - start)
