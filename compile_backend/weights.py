"""Whether the weights that a graph reads are still where they were.

A weight may be given other memory (`weight.data = ...`), or be replaced as a whole
(`module.weight = ...`, `load_state_dict(assign=True)`, `module.cpu()`). Both are seen, since the
modules' own tables are looked at; hundreds of weights take a few microseconds.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from compile_backend import shortcuts
from compile_backend.torch_internals.cuda import are_at_addresses

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


class Weights:
    """The parameters and buffers of a model.

    Args:
        model: its submodules are those of the last `note()`.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model = model
        self._tables: list[Mapping[str, torch.Tensor | None]] = []
        self._names: list[str] = []
        self._positions: list[int] = []
        self._addresses: list[int | None] = []
        self._watched: object | None = None
        self.note()

    def note(self) -> None:
        """Take the weights and the addresses of now for those that graphs read."""
        self._tables, self._names = [], []
        for module in () if self._model is None else self._model.modules():
            for table in (module._parameters, module._buffers):  # noqa: SLF001 - the tables
                names = [name for name, tensor in table.items() if tensor is not None]
                self._tables += [table] * len(names)
                self._names += names
        self._positions = list(range(len(self._names)))
        tensors = self.tensors()
        addresses = [tensor.data_ptr() for tensor in tensors]
        self._addresses = [*addresses]
        self._watched = shortcuts.watch(self._tables, self._names, tensors, addresses)

    def have_moved(self) -> bool:
        """Whether a weight is elsewhere, or gone."""
        if self._watched is not None:
            return shortcuts.have_moved(self._watched)
        try:
            return not are_at_addresses(self.tensors(), self._addresses, self._positions)
        except (KeyError, AttributeError, TypeError, RuntimeError):  # it is gone, or None
            return True

    def tensors(self) -> list[torch.Tensor]:
        """What the modules' tables hold where weights were noted."""
        tables: list[Any] = self._tables
        return [*map(operator.getitem, tables, self._names)]
