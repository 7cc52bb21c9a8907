"""From a runner's parts to its steps: compile, settle the mode, warm up, capture, measure.

What to capture is the dispatcher's to know, and how a graph is held that of `full_steps` and of
the wrappers. No batch of an engine's is seen here.
"""

from __future__ import annotations

import functools
import logging
import weakref
from typing import TYPE_CHECKING

import torch

from compile_backend.backend import cudagraph_modes
from compile_backend.batch import BatchDescriptor
from compile_backend.capture_estimate import SAMPLE, extrapolate
from compile_backend.capture_keys import CapturedKeys, capture_keys, told
from compile_backend.collector import COLLECTOR
from compile_backend.config import CUDAGraphMode
from compile_backend.errors import number_of
from compile_backend.full_steps import FullSteps
from compile_backend.known_steps import KnownSteps
from compile_backend.piecewise_steps import PiecewiseSteps
from compile_backend.runner_checks import check_outputs
from compile_backend.runner_graphs import OfRunner
from compile_backend.runner_mode import NOT_COMPILED, resolve_for_runner
from compile_backend.runner_report import CaptureMeter, graphs_by_mode
from compile_backend.runner_steps import RunnerSteps
from compile_backend.torch_internals.dynamo import python_around, size_1_like_any_other

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from compile_backend.capture_estimate import CaptureEstimate
    from compile_backend.dispatch import Route
    from compile_backend.model_steps import ModelSteps
    from compile_backend.runner_parts import RunnerParts
    from compile_backend.stats import GraphStats

    Plan = Sequence[tuple[CUDAGraphMode, Sequence[BatchDescriptor]]]

logger = logging.getLogger(__name__)

_NONE = CUDAGraphMode.NONE
_FULL = CUDAGraphMode.FULL


def _sending(model_steps: ModelSteps) -> Callable[[BatchDescriptor], None]:
    """How the graphs of a runner's pieces bring its inputs; graphs may outlive the runner."""
    reference = weakref.ref(model_steps)

    def send(key: BatchDescriptor) -> None:
        alive = reference()
        if alive is not None:
            alive.send(key)

    return send


class RunnerCapture:
    """Captures what a runner runs.

    Args:
        parts: of the runner.

    Attributes:
        meter: of the last captures.
    """

    def __init__(self, parts: RunnerParts) -> None:
        self._parts = parts
        self.meter = CaptureMeter(parts.loader.inputs.device)
        self._graphs_before: dict[CUDAGraphMode, int] = {}

    def capture(self, runner: object, *, progress: bool, max_bytes: int | None) -> RunnerSteps:
        """See `GraphModelRunner.capture`.

        Args:
            runner: whose graphs these are, among those of the model's other runners.
            progress: see there.
            max_bytes: likewise.
        """
        with COLLECTOR.held_off():  # but for one collection before the first capture
            return self._capture(runner, progress=progress, max_bytes=max_bytes)

    def _capture(self, runner: object, *, progress: bool, max_bytes: int | None) -> RunnerSteps:
        dispatcher = self._parts.dispatcher
        steps = self._prepare(runner)
        plan = dispatcher.capture_plan()
        _, left_out = self._capture_keys(steps, plan, progress=progress, max_bytes=max_bytes)
        if left_out and max_bytes is not None:
            logger.warning("%s", told(left_out, max_bytes))
        without = {*left_out, *self._held_by_some(steps, plan, left_out)}
        if without:
            dispatcher.initialize_cudagraph_keys(steps.resolution.mode, without=without)
        self._parts.weights.note()
        return steps

    def estimate(self, runner: object) -> CaptureEstimate:
        """See `GraphModelRunner.estimate`.

        Args:
            runner: as for `capture`.
        """
        steps = self._prepare(runner)
        plan = self._parts.dispatcher.capture_plan()
        sample = [(mode, keys[:SAMPLE]) for mode, keys in plan]
        warm_up_s, _ = self._capture_keys(steps, sample, progress=False)
        num_graphs = self.num_graphs()
        if self._parts.compiled is not None:
            cudagraph_modes.drop_graphs(self._parts.model)
        input_bytes = self._parts.loader.inputs.num_bytes
        return extrapolate(plan, self.meter.by_size, num_graphs, warm_up_s, input_bytes)

    def all_stats(self) -> list[GraphStats]:
        """The runner's own counts, then those of each compiled graph."""
        compiled = self._parts.compiled
        return [self._parts.stats, *(compiled.stats() if compiled is not None else ())]

    def num_graphs(self) -> dict[CUDAGraphMode, int]:
        """The graphs of the last captures, by mode."""
        number = self._parts.model_steps.number
        return graphs_by_mode(self.all_stats(), number, self._graphs_before)

    def _prepare(self, runner: object) -> RunnerSteps:
        """Compile, and settle which keys there are."""
        parts = self._parts
        if parts.ranks is not None:
            parts.ranks.check_same(parts.limits)
        with torch.inference_mode(False), torch.no_grad():
            if parts.compiled is not None:
                # Python may write to the inputs after they came; graphs do not bring them then.
                send = None if python_around(parts.model) else _sending(parts.model_steps)
                brings = OfRunner(parts.engine, send, parts.loader.inputs.holds)
                parts.model_steps.number = parts.compiled.number_of(runner, brings)
                cudagraph_modes.store_traces(parts.model)
            expect = getattr(parts.loader.builder, "expect", None)
            if expect is not None:
                num_tokens = max(parts.max_num_batched_tokens, parts.largest_size)
                expect(num_tokens=num_tokens, num_reqs=parts.dispatcher.max_num_seqs)
            self._compile()
            steps = self._settle()
            if parts.ranks is not None:
                parts.ranks.check_same({"cudagraph_mode": steps.resolution.mode.name})
            parts.dispatcher.initialize_cudagraph_keys(steps.resolution.mode)
        return steps

    def _compile(self) -> None:
        """Run the largest batch eagerly: it compiles the model for sizes that change.

        Where that can hold for 1 too, it does. Smaller batches then compile nothing; a model that
        asks for 1 itself is compiled once more at its first batch of that size.
        """
        parts = self._parts
        num_tokens = min(max(2, parts.largest_size), parts.max_num_batched_tokens)
        # Dynamo takes sizes that are equal in the first call for equal in every call.
        num_reqs = min(parts.dispatcher.max_num_seqs, max(1, num_tokens // 2))
        batch = parts.loader.capture_batch(num_tokens, num_reqs)
        num_tokens = int(batch.query_lens.sum())
        key = BatchDescriptor(num_tokens, num_reqs)
        with size_1_like_any_other():
            outputs = parts.model_steps.run(_NONE, key, batch, batch.query_lens, num_tokens)
        check_outputs(outputs, parts.output_shape, num_tokens, num_reqs)

    def _settle(self) -> RunnerSteps:
        parts, warn_once = self._parts, self._parts.warn_once
        query_len = parts.dispatcher.uniform_decode_query_len
        resolution = resolve_for_runner(
            parts.asked,
            parts.config,
            parts.compiled,
            parts.loader.builder,
            uniform_decode_query_len=query_len,
        )
        for downgrade in resolution.downgrades:
            parts.warn_once_of_model(logger, downgrade, "%s", downgrade)
        if parts.compiled is not None and not parts.compiled.graphs:
            warn_once(logger, "not compiled", "the model %s; %s", *NOT_COMPILED)
        full = FullSteps(
            parts.model_steps.call,
            parts.loader,
            parts.engine,
            parts.config,
            parts.stats,
            parts.cut,
            warn_once,
            parts.warn_once_of_model,
        )
        piecewise = None
        if parts.compiled is not None:
            piecewise = PiecewiseSteps(
                parts.model, parts.compiled, parts.weights, parts.loader.builder
            )
        known = KnownSteps(parts.loader, query_len, by_lengths=parts.ranks is None)
        return RunnerSteps(parts, resolution, full, piecewise, known)

    def _capture_keys(
        self, steps: RunnerSteps, plan: Plan, *, progress: bool, max_bytes: int | None = None
    ) -> CapturedKeys:
        parts = self._parts
        self.meter = CaptureMeter(parts.loader.inputs.device)
        self._graphs_before = graphs_by_mode(self.all_stats(), parts.model_steps.number)
        warm_up = functools.partial(self._warm_up, steps)
        return capture_keys(
            plan, warm_up, parts.engine, self.meter, progress=progress, max_bytes=max_bytes
        )

    def _warm_up(self, steps: RunnerSteps, mode: CUDAGraphMode, key: BatchDescriptor) -> None:
        parts = self._parts
        for _ in range(parts.config.cudagraph_num_of_warmups):
            if mode is _FULL:
                num_reqs = key.num_reqs
                outputs = steps.full.warm_up(key)
            else:
                num_reqs = min(key.num_tokens, parts.dispatcher.max_num_seqs)
                batch = parts.loader.capture_batch(key.num_tokens, num_reqs)
                num_tokens = int(batch.query_lens.sum())
                outputs = parts.model_steps.run(mode, key, batch, batch.query_lens, num_tokens)
            # In each size: one that stays the same may be that of some.
            check_outputs(outputs, parts.output_shape, key.num_tokens, num_reqs)

    def _held_by_some(
        self, steps: RunnerSteps, plan: Plan, left_out: Container[Route]
    ) -> set[Route]:
        """What this rank captured and another one did not: nobody may choose it."""
        ranks = self._parts.ranks
        if ranks is None:
            return set()
        routes = [(mode, key) for mode, keys in plan for key in keys]
        held = [
            (mode, key) not in left_out and (mode is not _FULL or steps.full.may_run(key))
            for mode, key in routes
        ]
        missing = [
            route
            for route, is_held in zip(routes, ranks.everywhere(held), strict=True)
            if not is_held
        ]
        for mode, key in missing:
            if (mode, key) not in left_out:
                logger.warning(
                    "%s of %s has no graph on some rank, so it runs at a lower mode on all",
                    mode.name,
                    number_of("token", key.num_tokens),
                )
        return set(missing)
