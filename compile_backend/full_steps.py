"""Steps that are one graph: captured for their key, and replayed without the model's Python.

A step writes its inputs to the host's block and replays; the graph itself begins with the copy to
the device. Nobody here chooses the key, or looks after the weights.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from compile_backend.compiled_graph import MAX_SHAPES_PER_SIZE
from compile_backend.config import CUDAGraphMode
from compile_backend.context import (
    ForwardContext,
    SetBy,
    current_capture_session,
    enter_forward_context,
    get_forward_context,
)
from compile_backend.errors import CaptureError, number_of
from compile_backend.known_steps import KnownFull
from compile_backend.once import MOVED
from compile_backend.output_cut import handed_out
from compile_backend.wrapper import CUDAGraphWrapper

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from compile_backend.batch import BatchDescriptor
    from compile_backend.batch_loader import BatchLoader
    from compile_backend.config import CompilationConfig
    from compile_backend.graph_engine import GraphEngine, StaticGraph
    from compile_backend.once import WarnOnce
    from compile_backend.output_cut import OutputCut
    from compile_backend.runner_batch import Batch
    from compile_backend.stats import GraphStats, KeyStats
    from compile_backend.step_inputs import Layout

logger = logging.getLogger(__name__)


# How many cuts of one graph's outputs are kept, a few hundred bytes each.
_MOST_CUTS = 256


@dataclass(slots=True)
class _FullStep:
    """What a key's graph reads, and the graph.

    Attributes:
        layout: its inputs.
        arguments: those of the model.
        context: what its attention reads.
        stats: the counts of its key.
        graph: what to replay; None while a call must look.
        cuts: its outputs without padding, by tokens and requests.
    """

    layout: Layout
    arguments: tuple[torch.Tensor, ...]
    context: ForwardContext
    stats: KeyStats
    graph: StaticGraph | None = None
    cuts: dict[tuple[int, int], Any] = field(default_factory=dict)


class FullSteps:
    """The full graphs of a runner.

    Args:
        call: the model, called with its inputs in order.
        loader: fills the inputs.
        engine: captures and replays.
        config: warm-ups, `strict` and `debug`.
        stats: where to count.
        cut: what callers get of the outputs.
        warn_once: of the runner.
        warn_once_of_model: shared with the compiled model, which notices moved weights, too.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        loader: BatchLoader,
        engine: GraphEngine,
        config: CompilationConfig,
        stats: GraphStats,
        cut: OutputCut,
        warn_once: WarnOnce,
        warn_once_of_model: WarnOnce,
    ) -> None:
        self._call = call
        self._loader = loader
        self._engine = engine
        self._strict = config.strict
        self._cut = cut
        self._warn_once = warn_once
        self._warn_once_of_model = warn_once_of_model
        self._stats = stats
        self._steps: dict[BatchDescriptor, _FullStep] = {}
        self._wrapper = CUDAGraphWrapper(
            self._send_and_call,
            CUDAGraphMode.FULL,
            engine=engine,
            name="the whole model",
            num_warmups=config.cudagraph_num_of_warmups,
            stats=stats,
            keep_outputs=False,
            strict=config.strict,
            check_addresses=config.debug == "addresses",
            verify=config.debug == "verify",
        )

    def may_run(self, key: BatchDescriptor) -> bool:
        """Whether a key has a graph, or may still get one; tells once why others may not."""
        step = self._steps.get(key)
        if step is not None and step.graph is not None:
            return True
        if self._wrapper.failure(key) is not None:
            return False
        if step is not None or not key.extra:
            return True
        alike = sum(bool(held.extra) and held[:2] == key[:2] for held in self._steps)
        if alike < MAX_SHAPES_PER_SIZE:
            return True
        # A flag that is new in every step would otherwise capture for ever and never replay.
        self._warn_once(
            logger,
            "shapes",
            "batches of %s came with too many values of extra; further ones run without full "
            "graphs (told once)",
            number_of("token", key.num_tokens),
        )
        return False

    def warm_up(self, key: BatchDescriptor) -> Any:
        """Run a key's step eagerly on a legal batch, and put its capture on the list.

        Returns:
            What the model returns.
        """
        step = self._step(key)
        with enter_forward_context(step.context, SetBy.RUNNER):
            outputs = self._wrapper(*step.arguments)
        session = current_capture_session()
        assert session is not None, "the keys of a plan are captured together"
        session.add(
            (id(self), key),
            (key.num_tokens, CUDAGraphMode.FULL.value),
            lambda: self._capture(key),
            self._engine.session,
        )
        return outputs

    def run(
        self,
        key: BatchDescriptor,
        batch: Batch,
        query_lens: npt.NDArray[np.int32],
        num_tokens: int,
    ) -> Any:
        """One step at a key; its results are cut to the batch, and valid until the next step."""
        step = self._steps.get(key) or self._step(key)
        self._loader.write(step.layout, batch, query_lens, num_tokens)
        builder = self._loader.builder
        if builder is not None and builder.plans_every_step:
            self._plan(key, step, batch)
        stats, num_reqs = step.stats, len(query_lens)
        if step.graph is None:
            outputs = self._cut(self._run_wrapped(key, step), num_tokens, num_reqs)
        else:
            step.graph.replay()
            stats.replays += 1
            outputs = handed_out(self._cut_held(step, num_tokens, num_reqs))
        stats.steps += 1
        stats.padding += key.num_tokens - num_tokens
        return outputs

    def known(
        self, key: BatchDescriptor, num_tokens: int, num_reqs: int
    ) -> tuple[Layout, KnownFull] | None:
        """The step that just ran, for the next batch like its own; None if there is no graph.

        Args:
            key: of the step.
            num_tokens: of the batch.
            num_reqs: of the batch.
        """
        step = self._steps[key]
        graph, builder = step.graph, self._loader.builder
        if graph is None:
            return None
        plan = None
        if builder is not None and builder.plans_every_step:
            plan = functools.partial(self._plan, key, step)
        outputs = self._cut_held(step, num_tokens, num_reqs)
        padding = key.num_tokens - num_tokens
        return step.layout, KnownFull(graph, outputs, step.stats, padding, plan)

    def _plan(self, key: BatchDescriptor, step: _FullStep, batch: Batch) -> None:
        builder = self._loader.builder
        assert builder is not None
        query_lens = np.asarray(batch.query_lens, np.int32)
        builder.build_for_graph(step.layout.tensors, key, batch.attention, query_lens)

    def _run_wrapped(self, key: BatchDescriptor, step: _FullStep) -> Any:
        context = enter_forward_context(step.context, SetBy.RUNNER)
        with torch.inference_mode(False), torch.no_grad(), context, self._engine.session():
            outputs = self._wrapper(*step.arguments)
        step.graph = self._wrapper.graph_to_replay(key)
        return outputs

    def _cut_held(self, step: _FullStep, num_tokens: int, num_reqs: int) -> Any:
        """What was captured, cut as often before."""
        assert step.graph is not None
        held = step.cuts.get((num_tokens, num_reqs))
        if held is None:
            if len(step.cuts) >= _MOST_CUTS:
                step.cuts.clear()
            held = self._cut(step.graph.outputs, num_tokens, num_reqs)
            step.cuts[num_tokens, num_reqs] = held
        return held

    def _step(self, key: BatchDescriptor) -> _FullStep:
        builder = self._loader.builder
        layout = self._loader.inputs.layout(key.num_tokens, key.num_reqs)
        # Whoever prepares for the graph may read the tensors: not those of another key's step.
        batch = self._loader.capture_batch(key.num_tokens, key.num_reqs)
        self._loader.load(layout, batch, batch.query_lens, int(batch.query_lens.sum()))
        metadata = None if builder is None else builder.build_for_graph(layout.tensors, key)
        context = ForwardContext(metadata, CUDAGraphMode.FULL, key)
        arguments = self._loader.arguments(layout)
        stats = self._stats.at(CUDAGraphMode.FULL, key)
        step = self._steps[key] = _FullStep(layout, arguments, context, stats)
        return step

    def _send_and_call(self, *arguments: torch.Tensor) -> Any:
        """The step as graphs hold it."""
        key = get_forward_context().batch_descriptor
        assert key is not None
        self._loader.inputs.send(self._steps[key].layout)
        return self._call(*arguments)

    def _capture(self, key: BatchDescriptor) -> None:
        step = self._steps[key]
        with enter_forward_context(step.context, SetBy.RUNNER):
            try:
                self._wrapper.capture(key, step.arguments)
            except CaptureError as error:
                if self._strict:
                    raise
                logger.warning("%s; it runs at a lower mode from now on", error)
        step.graph = self._wrapper.graph_to_replay(key)

    def drop(self) -> None:
        """Drop every graph, since a weight is elsewhere; its next step captures it again."""
        if self._steps:
            self._warn_once_of_model(
                logger,
                MOVED,
                "a weight is at another address than when the graphs were captured (told once); "
                "each is captured again at its next step. Call recapture() to do so at once",
            )
        for key, step in self._steps.items():
            self._wrapper.drop(key)
            step.graph = None
            step.cuts.clear()
