"""Values that a graph carries, as plain data, and back: tensors without data, and sizes.

Which of them share memory is kept, and so are symbols in their sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from compile_backend.cache import NotStorableError
from compile_backend.torch_internals.graphs import is_fake_tensor, names_of_wrapped, storage_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor without data; sizes are numbers or symbolic expressions."""

    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    storage: int
    num_bytes: Any
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Size:
    """A symbolic number."""

    expression: Any
    hint: Any


@dataclass(frozen=True, slots=True)
class _Shape:
    """A `torch.Size`, which takes nothing but numbers."""

    sizes: tuple[Any, ...]


@dataclass(slots=True)
class ValueWriter:
    """Writes values down; which of them share memory counts."""

    storages: dict[int, int] = field(default_factory=dict)

    def value(self, value: Any, name: str) -> Any:
        """A value as plain data.

        Raises:
            NotStorableError: it is of a kind that has no such form.
        """
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        if isinstance(value, torch.SymInt):
            return _size(value)
        if type(value) is torch.Size:
            return _Shape(tuple(map(_number, value)))
        if type(value) in (tuple, list):
            return type(value)(self.value(item, name) for item in value)
        if value is None or type(value) in _PLAIN:
            return value
        raise NotStorableError(f"has a graph with a {type(value).__name__} ({name})")

    def _tensor(self, value: torch.Tensor, name: str) -> _Tensor:
        memory = storage_id(value)
        is_odd = (
            *(not is_fake_tensor(value), value.is_inference(), value.is_conj(), value.is_neg()),
            *(memory is None, names_of_wrapped(value), value.is_quantized),
        )
        memos = ("item_memo", "nonzero_memo", "unique_memo", "unique_consecutive_memo", "constant")
        if any(is_odd) or any(getattr(value, memo, None) is not None for memo in memos):
            raise NotStorableError(f"has a graph with a tensor of an uncommon kind ({name})")
        assert memory is not None
        attributes = {
            key: kept
            for key, kept in vars(value).items()
            if key == "_is_param" or key.startswith("_dynamo")
        }
        return _Tensor(
            tuple(map(_number, value.shape)),
            tuple(map(_number, value.stride())),
            _number(value.storage_offset()),
            value.dtype,
            value.device,
            value.requires_grad,
            self.storages.setdefault(memory, len(self.storages)),
            _number(value.untyped_storage().nbytes()),
            plain_attributes(attributes),
        )


def _size(value: torch.SymInt) -> _Size:
    hint = value.node._hint
    return _Size(value.node._expr, hint if type(hint) is int else None)


def _number(value: Any) -> Any:
    return _size(value) if isinstance(value, torch.SymInt) else int(value)


_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def plain_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of an input, if they are plain.

    Raises:
        NotStorableError: they are not.
    """
    for name, value in attributes.items():
        items = value if isinstance(value, (set, frozenset, tuple, list)) else (value,)
        if any(item is not None and type(item) not in _PLAIN for item in items):
            raise NotStorableError(f"has an input with an attribute {name}")
    return dict(attributes)


class ValueReader:
    """Makes values again."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._first: dict[int, torch.Tensor] = {}
        self._alike: dict[Any, torch.Tensor] = {}

    def value(self, value: Any) -> Any:
        """What was written down."""
        if isinstance(value, _Tensor):
            return self._tensor(value)
        if isinstance(value, _Size):
            return self._number(value)
        if type(value) in (tuple, list):
            return type(value)(self.value(item) for item in value)
        if isinstance(value, _Shape):
            return torch.Size(self._numbers(value.sizes))
        return value

    def _number(self, value: Any) -> Any:
        if not isinstance(value, _Size):
            return value
        from torch.fx.experimental.sym_node import SymNode

        node = SymNode(value.expression, self._mode.shape_env, int, value.hint)
        return torch.SymInt(node)  # type: ignore[no-untyped-call]

    def _tensor(self, value: _Tensor) -> torch.Tensor:
        from torch._subclasses.fake_tensor import FakeTensor

        with torch.no_grad():
            meta = self._without_data(value)
        if value.requires_grad:
            meta.requires_grad_()
        made = FakeTensor(self._mode, meta, value.device)
        for name, attribute in value.attributes.items():
            setattr(made, name, attribute)
        return made

    def _without_data(self, value: _Tensor) -> torch.Tensor:
        first = self._first.get(value.storage)
        if first is not None and first.dtype == value.dtype:
            size, stride = self._numbers(value.size), self._numbers(value.stride)
            return first.as_strided(size, stride, self._number(value.offset))
        layout = (value.size, value.stride, value.offset, value.dtype, value.num_bytes)
        alike = self._alike.get(layout)
        if first is None and alike is not None:
            # Far cheaper than working out anew what follows of symbols.
            made = _with_memory_of_its_own(alike)
        else:
            base = first
            if base is None:
                size = self._number(value.num_bytes)
                base = torch.empty(size, dtype=torch.uint8, device="meta")
            made = torch.empty(0, dtype=value.dtype, device="meta")
            offset, size = self._number(value.offset), self._numbers(value.size)
            made.set_(base.untyped_storage(), offset, size, self._numbers(value.stride))
            self._alike.setdefault(layout, made)
        self._first.setdefault(value.storage, made)
        return made

    def _numbers(self, values: Sequence[Any]) -> list[Any]:
        return [self._number(value) for value in values]


def _with_memory_of_its_own(tensor: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch._lazy_clone(tensor)
    return made
