"""What the caller of a padded step gets: the rows of its own batch, in containers of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compile_backend.step_inputs import Dim
from compile_backend.torch_internals.graphs import tree_map

if TYPE_CHECKING:
    from collections.abc import Sequence


class OutputCut:
    """Cuts every tensor of a model's outputs in the dimensions that are padded.

    Nothing that a graph holds is handed out itself: callers may change what they get.

    Args:
        output_shape: the leading sizes of each tensor; every `Dim` is cut.
    """

    def __init__(self, output_shape: Sequence[int | Dim]) -> None:
        self._dims = [
            (axis, size) for axis, size in enumerate(output_shape) if isinstance(size, Dim)
        ]

    def __call__(self, outputs: Any, num_tokens: int, num_reqs: int) -> Any:
        """The rows of a batch, as views.

        Args:
            outputs: padded.
            num_tokens: of the batch.
            num_reqs: of the batch.
        """

        def cut(item: Any) -> Any:
            if not isinstance(item, torch.Tensor):
                return item
            if not self._dims:
                return item.detach()
            for axis, dim in self._dims:
                item = item.narrow(axis, 0, dim.of(num_tokens, num_reqs))
            return item

        return cut(outputs) if isinstance(outputs, torch.Tensor) else tree_map(cut, outputs)


def handed_out(held: Any) -> Any:
    """What was cut before, once more: new tensors on the same memory, in new containers."""
    return _new_tensor(held) if isinstance(held, torch.Tensor) else tree_map(_new_tensor, held)


def _new_tensor(item: Any) -> Any:
    return item.data if isinstance(item, torch.Tensor) else item  # `detach` asks the dispatcher
