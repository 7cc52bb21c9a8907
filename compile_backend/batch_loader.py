"""A batch on its way to the addresses that graphs read: the model's inputs, and attention's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from compile_backend import shortcuts
from compile_backend.errors import shown
from compile_backend.runner_batch import Batch, spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch

    from compile_backend.runner_batch import MetadataBuilder
    from compile_backend.step_inputs import InputSpec, Layout, StepInputs


class BatchLoader:
    """Fills layouts with batches.

    Args:
        inputs: the memory; its specs are those of the model, then those of the builder.
        specs: of the model's inputs.
        builder: of the attention metadata; None without attention.

    Attributes:
        names: of the model's inputs.
        is_plain: whether all inputs of the last batch were plain arrays of integers.
    """

    def __init__(
        self, inputs: StepInputs, specs: Sequence[InputSpec], builder: MetadataBuilder | None
    ) -> None:
        self.inputs = inputs
        self.specs = tuple(specs)
        self.builder = builder
        self.names = frozenset(spec.name for spec in specs)
        self.is_plain = False

    def load(
        self, layout: Layout, batch: Batch, query_lens: npt.NDArray[np.int32], num_tokens: int
    ) -> None:
        """Bring a batch to a layout's addresses, padding included; see `write`."""
        self.write(layout, batch, query_lens, num_tokens)
        self.inputs.send(layout)

    def write(
        self, layout: Layout, batch: Batch, query_lens: npt.NDArray[np.int32], num_tokens: int
    ) -> None:
        """Write a batch to a layout's memory on the host, padding included.

        Args:
            layout: of the padded batch.
            batch: without padding.
            query_lens: `[num_reqs]`.
            num_tokens: their sum.

        Raises:
            ValueError: an input is missing, unknown or of another shape, or attention finds the
                batch contradictory.
        """
        inputs, specs, values = self.inputs, self.specs, batch.inputs
        num_reqs = len(query_lens)
        inputs.begin()
        is_refill, inputs.held = inputs.held is layout, None
        done = shortcuts.put_inputs(layout.rows, len(specs), values, num_tokens, num_reqs)
        self.is_plain = done == len(specs) == len(values)
        if not self.is_plain:
            if not isinstance(values, Mapping):
                raise ValueError(
                    f"the batch has inputs {shown(values)}; give a mapping from the names "
                    f"{sorted(self.names)}"
                )
            if values.keys() != self.names:
                raise ValueError(
                    f"the batch has inputs {sorted(values)}, but input_spec names "
                    f"{sorted(self.names)}"
                )
            for spec in specs[done:]:
                size = spec.dim.of(num_tokens, num_reqs)
                limit = None if spec.indexes is None else spec.indexes.of(num_tokens, num_reqs)
                inputs.put(layout.places[spec.name], values[spec.name], size, limit)
        if self.builder is not None:
            self.builder.fill(batch.attention, query_lens, layout.arrays, is_refill=is_refill)
        inputs.held = layout

    def arguments(self, layout: Layout) -> tuple[torch.Tensor, ...]:
        """The model's inputs in a layout, in the order of their specs."""
        return tuple(layout.tensors[spec.name] for spec in self.specs)

    def capture_batch(self, num_tokens: int, num_reqs: int) -> Batch:
        """A legal batch that changes nothing; its inputs hold the padding value.

        Args:
            num_tokens: of the batch; fewer where no request may be as long as that takes.
            num_reqs: of the batch.
        """
        if self.builder is not None:
            num_tokens = min(num_tokens, num_reqs * self.builder.max_query_len)
        query_lens = spread(num_tokens, num_reqs)
        inputs = {
            spec.name: np.full(spec.sizes(num_tokens, num_reqs), spec.pad) for spec in self.specs
        }
        attention = None if self.builder is None else self.builder.capture_batch(query_lens)
        return Batch(query_lens=query_lens, inputs=inputs, attention=attention)
