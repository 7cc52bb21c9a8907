"""FULL steps that ran before, repeated for the next batch that goes the same way.

A batch whose lengths alone tell where it runs needs no check, no dispatch and no look-up of its
own once such a batch was run: `shortcuts.prepare` finds the step by its `plain_key`, writes the
batch, and the graph replays. All other batches are left to the general code. Nobody here looks
after weights, or chooses a key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compile_backend import shortcuts
from compile_backend.output_cut import handed_out
from compile_backend.runner_batch import FilledFromArrays

if TYPE_CHECKING:
    from collections.abc import Callable

    from compile_backend.batch_loader import BatchLoader
    from compile_backend.graph_engine import StaticGraph
    from compile_backend.runner_batch import Batch
    from compile_backend.shortcuts import Known
    from compile_backend.stats import KeyStats
    from compile_backend.step_inputs import Layout

# A kilobyte each; batches of mixed lengths come in as many kinds as there are pairs of numbers.
_MOST_KNOWN = 1024


@dataclass(frozen=True, slots=True)
class KnownStep:
    """What is left to do once a batch lies where the graph reads it.

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
        """Replay; what is returned is valid until the next step."""
        if self.plan is not None:
            self.plan(batch)
        self.graph.replay()
        stats = self.stats
        stats.replays += 1
        stats.steps += 1
        stats.padding += self.padding
        return handed_out(self.outputs)


class KnownSteps:
    """The steps that are known, by `plain_key`.

    Args:
        loader: knows the memory.
        query_len: of uniform decode batches.
    """

    def __init__(self, loader: BatchLoader, query_len: int) -> None:
        self._loader = loader
        self._query_len = query_len
        self._known: dict[int, Known] = {}

    def prepare(self, batch: Batch) -> KnownStep | None:
        """The step to run for a batch, which lies in its memory then; None to do all by hand."""
        step: KnownStep | None = shortcuts.prepare(self._known, self._query_len, batch)
        return step

    def learn(self, batch: Batch, layout: Layout, make: Callable[[], KnownStep]) -> None:
        """Take note of a step that a batch just ran as, chosen by nothing but the batch.

        Args:
            batch: of this step.
            layout: the inputs of its key.
            make: the step.
        """
        key = shortcuts.plain_key(batch, self._query_len)
        if key is None or key in self._known:
            return
        inputs = self._loader.inputs
        builder: object = self._loader.builder
        event, can_wait = inputs.until_read()
        arrays = None
        if isinstance(builder, FilledFromArrays):
            arrays = builder.held_arrays(layout.arrays)
        if not can_wait or (builder is not None and arrays is None):
            return
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        num_rows = len(self._loader.specs)
        self._known[key] = (layout.rows, num_rows, inputs, layout, event, arrays, make())

    def forget(self) -> None:
        """Know nothing any more, since graphs are dropped."""
        self._known.clear()
