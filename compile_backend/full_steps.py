"""Steps that are one graph: captured for their key, and replayed without the model's Python.

A replay copies inputs, looks whether weights are where they were, and replays. It asks nobody
which key to take.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from compile_backend.compiled_graph import MAX_SHAPES_PER_SIZE
from compile_backend.config import CUDAGraphMode
from compile_backend.context import (
    ForwardContext,
    SetBy,
    current_capture_session,
    enter_forward_context,
)
from compile_backend.errors import CaptureError
from compile_backend.wrapper import CUDAGraphWrapper

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from compile_backend.batch import BatchDescriptor
    from compile_backend.batch_loader import BatchLoader
    from compile_backend.config import CompilationConfig
    from compile_backend.graph_engine import GraphEngine
    from compile_backend.once import WarnOnce
    from compile_backend.output_cut import OutputCut
    from compile_backend.runner_batch import Batch
    from compile_backend.stats import GraphStats
    from compile_backend.step_inputs import Layout
    from compile_backend.weights import Weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _FullStep:
    """What a key's graph reads: its inputs, and its metadata."""

    layout: Layout
    arguments: tuple[torch.Tensor, ...]
    context: ForwardContext


class FullSteps:
    """The full graphs of a runner.

    Args:
        call: the model, called with its inputs in order.
        loader: fills the inputs.
        engine: captures and replays.
        config: warm-ups, `strict` and `debug`.
        stats: where to count.
        weights: that the graphs read.
        cut: what callers get of the outputs.
        warn_once: of the runner.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        loader: BatchLoader,
        engine: GraphEngine,
        config: CompilationConfig,
        stats: GraphStats,
        weights: Weights,
        cut: OutputCut,
        warn_once: WarnOnce,
    ) -> None:
        self._loader = loader
        self._engine = engine
        self._strict = config.strict
        self._weights = weights
        self._cut = cut
        self._warn_once = warn_once
        self._steps: dict[BatchDescriptor, _FullStep] = {}
        self._wrapper = CUDAGraphWrapper(
            call,
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
        if self._wrapper.failure(key) is not None:
            return False
        if key in self._steps or not key.extra:
            return True
        alike = sum(bool(held.extra) and held[:2] == key[:2] for held in self._steps)
        if alike < MAX_SHAPES_PER_SIZE:
            return True
        # A flag that is new in every step would otherwise capture for ever and never replay.
        self._warn_once(
            logger,
            "shapes",
            "batches of %d tokens came with too many values of extra; further ones run without "
            "full graphs (told once)",
            key.num_tokens,
        )
        return False

    def warm_up(self, key: BatchDescriptor) -> None:
        """Run a key's step eagerly on a legal batch, and put its capture on the list."""
        step = self._step(key)
        with enter_forward_context(step.context, SetBy.RUNNER):
            self._wrapper(*step.arguments)
        session = current_capture_session()
        assert session is not None, "the keys of a plan are captured together"
        session.add(
            (id(self), key),
            (key.num_tokens, CUDAGraphMode.FULL.value),
            lambda: self._capture(key),
            self._engine.session,
        )

    def run(
        self,
        key: BatchDescriptor,
        batch: Batch,
        query_lens: npt.NDArray[np.int32],
        num_tokens: int,
    ) -> Any:
        """One step at a key; its results are cut to the batch, and valid until the next step."""
        step = self._step(key)
        self._loader.load(step.layout, batch, query_lens, num_tokens)
        builder = self._loader.builder
        if builder is not None and builder.plans_every_step:
            builder.build_for_graph(step.layout.tensors, key, batch.attention, query_lens)
        if self._weights.have_moved():
            self._drop()
        graph = self._wrapper.replay_held(key)
        if graph is not None:
            outputs = graph.outputs
        else:
            context = enter_forward_context(step.context, SetBy.RUNNER)
            no_grad = torch.no_grad()
            with torch.inference_mode(False), no_grad, context, self._engine.session():
                outputs = self._wrapper(*step.arguments)
        return self._cut(outputs, num_tokens, len(query_lens))

    def _step(self, key: BatchDescriptor) -> _FullStep:
        step = self._steps.get(key)
        if step is None:
            layout = self._loader.inputs.layout(key.num_tokens, key.num_reqs)
            builder = self._loader.builder
            # Whoever prepares for the graph may read the tensors: not those of another key's step.
            batch = self._loader.capture_batch(key.num_tokens, key.num_reqs)
            self._loader.load(layout, batch, batch.query_lens, int(batch.query_lens.sum()))
            metadata = None if builder is None else builder.build_for_graph(layout.tensors, key)
            context = ForwardContext(metadata, CUDAGraphMode.FULL, key)
            arguments = self._loader.arguments(layout)
            step = self._steps[key] = _FullStep(layout, arguments, context)
        return step

    def _capture(self, key: BatchDescriptor) -> None:
        step = self._steps[key]
        with enter_forward_context(step.context, SetBy.RUNNER):
            try:
                self._wrapper.capture(key, step.arguments)
            except CaptureError as error:
                if self._strict:
                    raise
                logger.warning("%s; it runs at a lower mode from now on", error)

    def _drop(self) -> None:
        self._warn_once(
            logger,
            "moved",
            "a weight is at another address than when the graphs were captured (told once); each "
            "is captured again at its next step. Call recapture() to do so at once",
        )
        for key in self._steps:
            self._wrapper.drop(key)
        self._weights.note()
