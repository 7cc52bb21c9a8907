"""Steps that call the model itself: at PIECEWISE its pieces replay, at NONE nothing does.

Nothing here chooses a mode or a key, and nobody here knows full graphs.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from compile_backend.batch import of_runner
from compile_backend.config import CUDAGraphMode
from compile_backend.context import ForwardContext, SetBy, enter_forward_context

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt
    import torch

    from compile_backend.batch import BatchDescriptor
    from compile_backend.batch_loader import BatchLoader
    from compile_backend.piecewise_steps import PiecewiseSteps
    from compile_backend.runner_batch import Batch


class ModelSteps:
    """The steps of one runner that go through its model.

    Args:
        model: called with the inputs by name.
        loader: brings batches to where the model reads them.
        max_num_seqs: most requests of a batch.

    Attributes:
        number: of the runner, among those of the model; pieces are captured for each.
    """

    def __init__(self, model: Callable[..., Any], loader: BatchLoader, max_num_seqs: int) -> None:
        self._model = model
        self._loader = loader
        self._max_num_seqs = max_num_seqs
        self.number = 0

    def run(
        self,
        mode: CUDAGraphMode,
        key: BatchDescriptor,
        batch: Batch,
        query_lens: npt.NDArray[np.int32],
        num_tokens: int,
        pieces: PiecewiseSteps | None = None,
    ) -> Any:
        """Run one step.

        Args:
            mode: PIECEWISE or NONE.
            key: of the step; at NONE it has more tokens than the batch where ranks agreed on that.
            batch: without padding.
            query_lens: of the batch, `[num_reqs]`.
            num_tokens: of the batch.
            pieces: at PIECEWISE, repeats the step past Dynamo where it can; None if nothing does.

        Returns:
            What the model returns, with the padding of the key.
        """
        has_graphs = mode is CUDAGraphMode.PIECEWISE
        is_padded = has_graphs or key.num_tokens != num_tokens
        sizes = self.padded(key) if is_padded else (key.num_tokens, len(query_lens))
        layout = self._loader.inputs.layout(*sizes, keep=has_graphs)
        self._loader.write(layout, batch, query_lens, num_tokens)
        if pieces is None or not pieces.sends_inputs(key):
            self._loader.inputs.send(layout)
        metadata = None
        if self._loader.builder is not None:
            metadata = self._loader.builder.build(batch.attention, query_lens, layout.tensors)
        if pieces is not None:
            outputs = pieces.repeat(key, metadata)
            if outputs is not None:
                return outputs
            self._loader.inputs.send(layout)  # no graph may have done so
        arguments = self._loader.arguments(layout)
        call = functools.partial(self.call, *arguments)
        own = key._replace(extra=(*key.extra, *of_runner(self.number))) if has_graphs else key
        with enter_forward_context(ForwardContext(metadata, mode, own), SetBy.USER):
            return call() if pieces is None else pieces.learn(key, call, arguments)

    def padded(self, key: BatchDescriptor) -> tuple[int, int]:
        """Tokens and requests of what pieces run on."""
        return key.num_tokens, min(key.num_tokens, self._max_num_seqs)

    def send(self, key: BatchDescriptor) -> None:
        """Bring the inputs of a key of pieces, written before, to the device; graphs hold that."""
        self._loader.inputs.send(self._loader.inputs.layout(*self.padded(key)))

    def call(self, *arguments: torch.Tensor) -> Any:
        """Call the model with its inputs, in the order of their specs."""
        names = (spec.name for spec in self._loader.specs)
        return self._model(**dict(zip(names, arguments, strict=True)))
