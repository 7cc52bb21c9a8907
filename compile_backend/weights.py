"""Whether the weights that a graph reads are still where they were.

A weight may be given other memory or another layout (`weight.data = ...`), be replaced as a whole
(`module.weight = ...`, `load_state_dict(assign=True)`, `module.cpu()`), or come to be where there
was none. All of it is seen, since the modules' own tables are looked at; hundreds of weights take
a few microseconds.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from compile_backend import shortcuts
from compile_backend.torch_internals.cuda import are_at_addresses
from compile_backend.torch_internals.graphs import names_of_wrapped

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
        self._tables: list[Mapping[str, Any]] = []
        self._names: list[str] = []
        # Those that only wrap others, or have no address, and None: they have to be the same
        # objects, and the first to have the same contents, which torch swaps on `module.to(...)`.
        self._wrappers: dict[int, torch.Tensor | None] = {}
        self._contents: list[tuple[torch.Tensor, dict[str, Any]]] = []
        # Those that a wrapper keeps in slots, as distributed tensors do.
        self._slots: list[tuple[torch.Tensor, str, torch.Tensor]] = []
        self._positions: list[int] = []
        self._table_sizes: list[int] = []
        self._addresses: list[int | None] = []
        self._layouts: list[tuple[torch.Size, tuple[int, ...]]] = []
        self._watched: object | None = None
        self.note()

    def note(self) -> None:
        """Take the weights and the addresses of now for those that graphs read."""
        self._tables, self._names, self._wrappers = [], [], {}
        self._contents, self._slots = [], []
        for module in () if self._model is None else self._model.modules():
            for table in (module._parameters, module._buffers):  # noqa: SLF001 - the tables
                for name, tensor in table.items():
                    self._add(table, name, tensor)
        tensors = self.tensors()
        own = [i for i in range(len(tensors)) if i not in self._wrappers]
        self._addresses = [None] * len(tensors)
        for i in own:
            self._addresses[i] = _address_of(tensors[i])
        self._positions = [i for i in own if self._addresses[i] is not None]
        self._wrappers.update((i, tensors[i]) for i in own if self._addresses[i] is None)
        self._layouts = [_layout_of(tensors[i]) for i in self._positions]
        self._table_sizes = [*map(len, self._tables)]
        self._watched = shortcuts.watch(self._tables, self._names, tensors, self._addresses)

    def _add(self, table: Mapping[str, Any], name: str, tensor: torch.Tensor | None) -> None:
        """Look after a tensor, and after those that it only wraps, as quantized weights do."""
        self._tables.append(table)
        self._names.append(name)
        if tensor is None:
            self._wrappers[len(self._names) - 1] = None
            return
        parts, held = names_of_wrapped(tensor), vars(tensor)
        if parts:
            self._wrappers[len(self._names) - 1] = tensor
            self._contents.append((tensor, held))
        for part in parts:
            inner = getattr(tensor, part)
            if part not in held:
                self._slots.append((tensor, part, inner))
            self._add(held if part in held else {part: inner}, part, inner)

    def have_moved(self) -> bool:
        """Whether a weight is elsewhere, lies there in another way, is gone or is new."""
        contents = self._contents
        if contents and any(vars(wrapper) is not held for wrapper, held in contents):
            return True
        slots = self._slots
        if slots and any(getattr(wrapper, part) is not inner for wrapper, part, inner in slots):
            return True
        if self._watched is not None:
            return shortcuts.have_moved(self._watched)
        try:
            tensors = self.tensors()
            return (
                self._table_sizes != [*map(len, self._tables)]
                or any(tensors[i] is not wrapper for i, wrapper in self._wrappers.items())
                or not are_at_addresses(tensors, self._addresses, self._positions)
                or self._layouts != [_layout_of(tensors[i]) for i in self._positions]
            )
        except (KeyError, AttributeError, TypeError, RuntimeError):  # it is gone, or None
            return True

    def tensors(self) -> list[Any]:
        """What the tables hold where weights, or None, were noted."""
        tables: list[Any] = self._tables
        return [*map(operator.getitem, tables, self._names)]


def _layout_of(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    return tensor.size(), tensor.stride()


def _address_of(tensor: torch.Tensor) -> int | None:
    """Where a tensor is; None for one without memory of its own, such as a sparse one."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):
        return None
