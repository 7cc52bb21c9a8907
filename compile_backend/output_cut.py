"""What the caller of a padded step gets: the rows of its own batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compile_backend.step_inputs import Dim
from compile_backend.torch_internals import tree_map

if TYPE_CHECKING:
    from collections.abc import Sequence


class OutputCut:
    """Cuts every tensor of a model's outputs in the dimension that is padded.

    Args:
        output_shape: the leading sizes of each tensor; the first `Dim` is cut.
    """

    def __init__(self, output_shape: Sequence[int | Dim]) -> None:
        self._axis, self._dim = 0, None
        for axis, size in reversed(list(enumerate(output_shape))):
            if isinstance(size, Dim):
                self._axis, self._dim = axis, size

    def __call__(self, outputs: Any, num_tokens: int, num_reqs: int) -> Any:
        """The rows of a batch, as views.

        Args:
            outputs: padded.
            num_tokens: of the batch.
            num_reqs: of the batch.
        """
        if self._dim is None:
            return outputs
        size = self._dim.of(num_tokens, num_reqs)
        if isinstance(outputs, torch.Tensor):
            return outputs.narrow(self._axis, 0, size)
        return tree_map(
            lambda item: (
                item.narrow(self._axis, 0, size) if isinstance(item, torch.Tensor) else item
            ),
            outputs,
        )


class KeptCuts:
    """The cuts of one graph's outputs, which stay where they are: each is made once.

    Args:
        cut: makes them.
    """

    def __init__(self, cut: OutputCut) -> None:
        self._cut = cut
        self._outputs: Any = None
        self._made: dict[tuple[int, int], Any] = {}

    def of(self, outputs: Any, num_tokens: int, num_reqs: int) -> Any:
        """Like `OutputCut`; outputs of a new graph are cut anew."""
        if outputs is not self._outputs:
            self._outputs, self._made = outputs, {}
        made = self._made.get((num_tokens, num_reqs))
        if made is None:
            made = self._made[num_tokens, num_reqs] = self._cut(outputs, num_tokens, num_reqs)
        return made
