"""Steps that ran before, repeated for the next batch that goes the same way.

A batch whose lengths alone tell where it runs needs no check, no dispatch and no look-up of its
own once such a batch was run: `shortcuts.prepare` finds the step by its `plain_key`, writes the
batch, and its graphs replay. All other batches are left to the general code. Nobody here looks
after weights, or chooses a key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from compile_backend import shortcuts
from compile_backend.output_cut import handed_out
from compile_backend.runner_batch import FilledFromArrays

if TYPE_CHECKING:
    from collections.abc import Callable

    from compile_backend.batch import BatchDescriptor
    from compile_backend.batch_loader import BatchLoader
    from compile_backend.config import CUDAGraphMode
    from compile_backend.graph_engine import StaticGraph
    from compile_backend.output_cut import OutputCut
    from compile_backend.piecewise_steps import PiecewiseStep
    from compile_backend.runner_batch import Batch, MetadataBuilder
    from compile_backend.shortcuts import Known
    from compile_backend.stats import KeyStats
    from compile_backend.step_inputs import Layout, StepInputs

# A kilobyte each. Batches of mixed lengths come in as many kinds as there are pairs of numbers.
_MOST_KNOWN = 1024


NOT_RUN = object()
"""Returned for a step that has to be run by the general code after all."""


class KnownStep(Protocol):
    """What is left to do once a batch lies in its memory on the host."""

    def run(self, batch: Batch) -> Any:
        """Run; what is returned is valid until the next step. `NOT_RUN` if nothing ran."""


@dataclass(frozen=True, slots=True)
class KnownFull:
    """A step that is one graph, which begins with the copy to the device.

    Attributes:
        graph: to replay.
        outputs: what it returned, without padding.
        stats: the counts of its key.
        padding: tokens that the key has more than the batch.
        plan: what attention does on the host before every replay; None if nothing.
    """

    graph: StaticGraph
    outputs: Any
    stats: KeyStats
    padding: int
    plan: Callable[[Batch], object] | None

    def run(self, batch: Batch) -> Any:
        """See `KnownStep.run`."""
        if self.plan is not None:
            self.plan(batch)
        outputs = handed_out(self.outputs)  # before the launch, which leaves cold caches behind
        self.graph.replay()
        stats = self.stats
        stats.replays += 1
        stats.steps += 1
        stats.padding += self.padding
        return outputs


@dataclass(frozen=True, slots=True)
class KnownPieces:
    """A step that is replayed piece by piece.

    Attributes:
        key: of the runner.
        pieces: repeats its model.
        inputs: the memory.
        layout: of the key, in it.
        sending: a short way to bring it to the device; None if there is none.
        builder: of attention's metadata; None without attention.
        stats: the counts of its key.
        cut: takes the padding off what the model returned.
        num_tokens: of the batch.
        num_reqs: of the batch.
        last: a tensor that the model returned, and what was cut of it.
    """

    key: BatchDescriptor
    pieces: PiecewiseStep
    inputs: StepInputs
    layout: Layout
    sending: object | None
    builder: MetadataBuilder | None
    stats: KeyStats
    cut: OutputCut
    num_tokens: int
    num_reqs: int
    last: list[torch.Tensor] = field(default_factory=list)

    def run(self, batch: Batch) -> Any:
        """See `KnownStep.run`."""
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self.run(batch)
        if not self.pieces.sends_inputs and (
            self.sending is None or not shortcuts.copy(self.sending)
        ):
            self.inputs.send(self.layout)
        metadata = None
        if self.builder is not None:
            query_lens = np.asarray(batch.query_lens, np.int32)
            metadata = self.builder.build(batch.attention, query_lens, self.layout.tensors)
        outputs = self.pieces.repeat(metadata)
        if outputs is None:
            return NOT_RUN
        self.stats.steps += 1
        self.stats.padding += self.key.num_tokens - self.num_tokens
        last = self.last
        if last and last[0] is outputs:
            return last[1].data  # as `handed_out`
        cut = self.cut(outputs, self.num_tokens, self.num_reqs)
        if isinstance(outputs, torch.Tensor):
            last[:] = outputs, cut
            return handed_out(cut)
        return cut


class KnownSteps:
    """The steps that are known, by `plain_key` and the highest mode that was allowed.

    Args:
        loader: knows the memory.
        query_len: of uniform decode batches.
        by_lengths: whether a batch's lengths can tell where it runs; else nothing is ever known.
    """

    def __init__(self, loader: BatchLoader, query_len: int, *, by_lengths: bool = True) -> None:
        self._loader = loader
        self._query_len = query_len
        self._known: dict[CUDAGraphMode | None, dict[int, Known]] = {}
        builder: object = loader.builder
        is_readable = builder is None or isinstance(builder, FilledFromArrays)
        self._can_know = by_lengths and is_readable

    def prepare(self, batch: Batch, highest: CUDAGraphMode | None) -> KnownStep | None:
        """The step to run for a batch, which lies in its memory then; None to do all by hand."""
        known = self._known.get(highest)
        if known is None:
            return None
        step: KnownStep | None = shortcuts.prepare(known, self._query_len, batch)
        return step

    def key_of(self, batch: Batch, highest: CUDAGraphMode | None) -> int | None:
        """Under what to learn the step that a batch will run as; None if there is nothing to.

        Args:
            batch: without padding.
            highest: the highest mode that is allowed.
        """
        if not self._can_know:
            return None
        key = shortcuts.plain_key(batch, self._query_len)
        return None if key in self._known.get(highest, ()) else key

    def learn(
        self,
        key: int,
        highest: CUDAGraphMode | None,
        layout: Layout,
        step: KnownStep,
    ) -> None:
        """Take note of a step that just ran, chosen by nothing but the key and the highest mode.

        Args:
            key: told by `key_of` before the step.
            highest: the highest mode that was allowed.
            layout: the inputs of its key.
            step: for batches like this one.
        """
        inputs = self._loader.inputs
        builder: object = self._loader.builder
        event, can_wait = inputs.until_read()
        if not can_wait or not self._loader.is_plain:
            return
        arrays = None
        if isinstance(builder, FilledFromArrays):
            arrays = builder.held_arrays(layout.arrays)
            if arrays is None:
                return
        known = self._known.setdefault(highest, {})
        if len(known) >= _MOST_KNOWN:
            known.clear()
        num_rows = len(self._loader.specs)
        known[key] = (layout.rows, num_rows, inputs, layout, event, arrays, step)

    def lose(self, batch: Batch, highest: CUDAGraphMode | None) -> None:
        """Forget the step of a batch, which did not run; it may be learned again."""
        key = shortcuts.plain_key(batch, self._query_len)
        if key is not None:
            self._known.get(highest, {}).pop(key, None)

    def forget(self) -> None:
        """Know nothing any more, since graphs are dropped."""
        self._known.clear()
