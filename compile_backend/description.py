"""Live Python objects as text that is equal in all processes, if they are.

What a traced model read from Python is held to be the same in another process only if everything
that can be reached from it is: values, functions by their code, classes by their members, tensors
by all but their data. What has no such text is noted by its name, for whoever must not
depend on it. This module knows nothing of traces.
"""

from __future__ import annotations

import collections
import contextvars
import enum
import functools
import hashlib
import inspect
import logging
import re
import sys
import threading
import types
import typing
import weakref
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from compile_backend.cache import NotStorableError
from compile_backend.torch_internals.compile_settings import fakes_of, op_sources
from compile_backend.torch_internals.graphs import (
    is_fake_tensor,
    is_higher_order_op,
    is_op_overload,
    is_op_packet,
    names_of_wrapped,
    storage_id,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

_PLAIN = (bool, int, str, bytes, complex, type(None), type(Ellipsis), type(NotImplemented), range)
_TORCH_PLAIN = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_BUILTIN = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
)
# What has a state, but none that a computation could depend on.
_STATELESS = (type(threading.Lock()), type(threading.RLock()), logging.Logger, Path)

# What Python itself adds to a class, partly when it is first used.
_OF_EVERY_CLASS = frozenset(
    {
        *("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__"),
        *("__slotnames__", "__firstlineno__", "__static_attributes__", "__parameters__"),
        *("__annotate__", "__annotate_func__", "__annotations_cache__", "__orig_bases__"),
        *("_abc_impl", "__abstractmethods__", "__classdictcell__", "__type_params__"),
    }
)
_HEAP_TYPE = 1 << 9
# Numbers that transformers and torch make of hashes of texts and of addresses; and what a module
# is compiled in place by, from which all that this process compiled can be reached.
_OF_ONE_PROCESS = frozenset(
    {"._original_object_hash", "._torchdynamo_wrapper_id", "._compiled_call_impl"}
)


class Description:
    """Describes objects one after the other; each is described once, and then by its number.

    So that which objects are one and the same is part of the text, too.

    Attributes:
        codes: digests of all code that was met.
        fakes: the code of functions by which ops that were met are traced.
        open: what could not be described, by the name that leads there: whoever reads such a name
            depends on more than the text tells.
        unordered: sets, likewise: their order differs from process to process.
    """

    def __init__(self) -> None:
        self._text = hashlib.sha256()
        self._numbers: dict[int, int] = {}
        self._alive: list[object] = []
        self._storages: dict[int, int] = {}
        self._slots: dict[type, list[str]] = {}
        self._path: list[str] = []
        self.codes: set[str] = set()
        self.fakes: set[types.CodeType] = set()
        self.open: dict[str, str] = {}
        self.unordered: dict[str, str] = {}
        self._open_ids: set[int] = set()

    def further(self) -> Description:
        """A description that starts with nothing, and knows the objects of this one."""
        further = Description()
        further._numbers = dict(self._numbers)
        further._alive = list(self._alive)
        further._storages = dict(self._storages)
        return further

    def digest(self) -> str:
        """All that was described, as hexadecimal digits."""
        return self._text.hexdigest()

    def add(self, name: str, value: object) -> None:
        """Describe an object, and everything that it refers to."""
        self._path = [name]
        self._tell(name)
        self._value(value)

    def has_left_open(self, value: object) -> bool:
        """Whether an object that was met could not be described."""
        return id(value) in self._open_ids

    # --- one object ---

    def _tell(self, *words: object) -> None:
        self._text.update(repr(words).encode(errors="surrogatepass"))

    def _leave_open(self, value: object) -> None:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        self._tell("open", kind)
        self._open_ids.add(id(value))
        self._note(self.open, f"a {kind}")

    def _note(self, names: dict[str, str], what: str) -> None:
        """Whoever reads this depends on more than the text tells."""
        name = next((n for n in reversed(self._path) if n and n[0] != "["), self._path[0])
        names.setdefault(name.rpartition(".")[2], f"{what} ({''.join(self._path)})")

    def _value(self, value: Any) -> None:  # noqa: C901 - a table of kinds
        kind = type(value)
        if kind in _PLAIN or kind in _TORCH_PLAIN:
            self._tell(kind.__name__, str(value) if kind in _TORCH_PLAIN else value)
            return
        if kind is float:
            self._tell("float", value.hex())
            return
        number = self._numbers.get(id(value))
        if number is not None:
            self._tell("again", number)
            return
        self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.CodeType):
            self._tell("code", self._code(value))
        elif isinstance(value, types.ModuleType):
            self._tell("module", value.__name__)
        elif isinstance(value, types.MethodType):
            self._parts("method", ("[func]", value.__func__), ("[self]", value.__self__))
        elif isinstance(value, _BUILTIN):
            self._builtin(value)
        elif is_op_overload(value) or is_op_packet(value) or is_higher_order_op(value):
            self._op(value)
        elif isinstance(value, (staticmethod, classmethod)):
            self._parts(kind.__name__, ("[func]", value.__func__))
        elif isinstance(value, property):
            self._parts("property", ("", value.fget), ("", value.fset), ("", value.fdel))
        elif isinstance(value, functools.partial):
            given = (("", value.func), ("", value.args), ("", value.keywords))
            self._parts("partial", *given)
        elif isinstance(value, functools._lru_cache_wrapper):  # noqa: SLF001 - its only name
            self._parts("cached", ("", value.__wrapped__))
        elif isinstance(value, (types.MappingProxyType, types.SimpleNamespace)):
            inside = value if isinstance(value, types.MappingProxyType) else vars(value)
            self._parts(kind.__name__, ("", dict(inside)))
        elif isinstance(value, (weakref.ref, types.CellType)):
            self._parts(kind.__name__, ("", _content(value)))
        elif isinstance(value, slice):
            self._parts("slice", ("", (value.start, value.stop, value.step)))
        elif isinstance(value, _STATELESS):
            named = value.name if isinstance(value, logging.Logger) else ""
            self._tell(kind.__qualname__, str(value) if isinstance(value, PurePath) else named)
        elif isinstance(value, re.Pattern):
            self._tell("pattern", value.pattern, value.flags)
        elif isinstance(value, contextvars.ContextVar):
            self._parts(f"variable {value.name}", ("", value.get(None)))
        elif isinstance(value, (np.ndarray, np.generic)):
            self._array(np.asarray(value))
        elif isinstance(value, np.dtype):
            self._tell("dtype", str(value))
        elif kind.__module__ == "typing" or isinstance(
            value, (types.GenericAlias, types.UnionType, typing.TypeVar)
        ):
            self._tell("typing", repr(value))
        elif isinstance(value, enum.Enum):
            self._parts("member", ("", kind), ("", value.name), ("", value.value))
        else:
            self._object(value)

    def _parts(self, kind: str, *parts: tuple[str, object]) -> None:
        self._tell(kind, len(parts))
        for name, part in parts:
            self._within(name if not name or name.startswith("[") else f".{name}", part)

    def _within(self, name: str, value: object) -> None:
        self._path.append(name)
        self._tell(name)
        if name in _OF_ONE_PROCESS and value is not None:
            self._leave_open(value)
        else:
            self._value(value)
        self._path.pop()

    def _object(self, value: Any) -> None:
        """An instance of a class that is written in Python."""
        kind = type(value)
        is_empty = kind is object
        hidden = [base for base in kind.__mro__ if not _is_open(base)]
        if (hidden and not is_empty) or type(kind).__module__.startswith("pybind11"):
            self._leave_open(value)
            return
        self._tell("object", is_empty)
        self._within("", kind)
        self._contents(value)
        slots = self._slots.get(kind)
        if slots is None:
            slots = self._slots[kind] = _slots_of(kind)
        attributes = list(getattr(value, "__dict__", {}).items())
        attributes += [(name, getattr(value, name)) for name in slots if hasattr(value, name)]
        self._tell("attributes", len(attributes))
        for name, attribute in attributes:
            self._within(f".{name}", attribute)

    def _contents(self, value: Any) -> None:
        if isinstance(value, dict):
            items = list(dict.items(value))
            self._tell("dict", len(items))
            if isinstance(value, collections.defaultdict):
                self._within(".default_factory", value.default_factory)
            for key, item in items:
                self._within("[key]", key)
                self._within(f"[{key!r}]" if isinstance(key, (str, int)) else "[...]", item)
        elif isinstance(value, (list, tuple, collections.deque)):
            self._tell("items", len(value), getattr(value, "maxlen", None))
            for i, item in enumerate(list.__iter__(value) if isinstance(value, list) else value):
                self._within(f"[{i}]", item)
        elif isinstance(value, (set, frozenset)):
            self._tell("set", len(value), *self._sorted(value))
            if len(value) > 1:
                self._note(self.unordered, "the order of a set")
        elif isinstance(value, (int, str, bytes, float, complex)):
            base = next(
                each for each in (int, str, bytes, float, complex) if isinstance(value, each)
            )
            self._tell("value", base.__repr__(value))

    def _sorted(self, items: Iterable[object]) -> list[str]:
        """Each item by itself: a set has no order."""
        described = []
        for item in items:
            alone = Description()
            alone.add("".join(self._path) + "{}", item)
            self.codes |= alone.codes
            self.open.update(alone.open)
            self.unordered.update(alone.unordered)
            self._open_ids |= alone._open_ids
            self.fakes |= alone.fakes
            described.append(alone.digest())
        return sorted(described)

    # --- kinds of their own ---

    def _tensor(self, value: torch.Tensor) -> None:
        if value.layout is not torch.strided or names_of_wrapped(value) or is_fake_tensor(value):
            self._leave_open(value)
            return
        memory = storage_id(value)
        self._tell(
            "tensor",
            tuple(value.shape),
            value.stride(),
            value.storage_offset(),
            str(value.dtype),
            str(value.device),
            (value.requires_grad, value.is_leaf, value.is_inference()),
            (value.is_conj(), value.is_neg(), value.grad is None),
            None if memory is None else self._storages.setdefault(memory, len(self._storages)),
        )
        self._within("", type(value))
        # Dynamo marks the weights of modules when it traces.
        is_weight = self._path[-2:-1] in (["._parameters"], ["._buffers"])
        unmarked = {"_dynamo_static_input_type"} if is_weight else ()
        attributes = [item for item in vars(value).items() if item[0] not in unmarked]
        self._parts("attributes", *attributes)

    def _array(self, value: np.ndarray[Any, Any]) -> None:
        if value.dtype.hasobject:
            self._leave_open(value)
            return
        self._tell("array", value.shape, str(value.dtype), value.tobytes())

    def _class(self, value: type) -> None:
        self._tell("class", value.__module__, value.__qualname__)
        if not _has_members_in_python(value):
            return
        for base in (*value.__bases__, *({type(value)} - {type})):
            self._within("", base)
        members = [item for item in vars(value).items() if item[0] not in _OF_EVERY_CLASS]
        self._tell("members", len(members))
        for name, member in members:
            if name == "__dataclass_fields__":
                for field in member.values():
                    given = (field.name, field.init, field.default, field.default_factory)
                    self._within(f".{field.name}", given)
            elif not _is_slot(member):
                self._within(f".{name}", member)

    def _function(self, value: types.FunctionType) -> None:
        if "_dynamo_marked_constant" in vars(value):
            # Called while the trace is made, for a result that stays.
            self._leave_open(value)
        self._tell("function", value.__module__, value.__qualname__, self._code(value.__code__))
        code, defaults = value.__code__, value.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        cells = zip(code.co_freevars, value.__closure__ or (), strict=True)
        self._parts(
            "",
            *zip(names, defaults, strict=True),
            *(value.__kwdefaults__ or {}).items(),
            *vars(value).items(),
            *((name, _content(cell)) for name, cell in cells),
        )

    def _code(self, code: types.CodeType) -> str:
        digest = code_digest(code)
        self.codes |= {digest, *_nested(code)}
        return digest

    def _op(self, value: object) -> None:
        self._tell(type(value).__qualname__, str(value))
        if not is_higher_order_op(value):
            try:
                self._tell(op_sources(value))
            except NotStorableError:
                self._leave_open(value)
            for fake in fakes_of(value):
                self._within("[fake]", fake)
                code = getattr(inspect.unwrap(fake), "__code__", None)
                if code is None:
                    self._leave_open(value)
                else:
                    self.fakes.add(code)

    def _builtin(self, value: Any) -> None:
        owner = getattr(value, "__self__", None)
        bound = owner is not None and not isinstance(owner, (types.ModuleType, type))
        bound = bound and not _is_function_of_cpp(owner)
        self._tell("builtin", str(value.__module__) if hasattr(value, "__module__") else "")
        self._tell(value.__qualname__)
        if bound:
            self._within("[self]", owner)


def _is_function_of_cpp(owner: object) -> bool:
    """Whether a builtin's owner is no object, but the C++ function that pybind11 calls for it."""
    kind = type(owner)
    return kind.__module__ == "pybind11_builtins" or kind.__name__ == "PyCapsule"


# --- code ---


def code_digest(code: types.CodeType) -> str:
    """A function's code as hexadecimal digits that leave out where it is written."""
    constants = [_constant(constant) for constant in code.co_consts]
    text = (
        *(code.co_name, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
        *(code.co_flags, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
        *(code.co_code, getattr(code, "co_exceptiontable", b""), constants),
    )
    return hashlib.sha256(repr(text).encode(errors="surrogatepass")).hexdigest()


def _constant(constant: object) -> object:
    if isinstance(constant, types.CodeType):
        return ("code", code_digest(constant))
    if isinstance(constant, frozenset):
        return ("frozenset", sorted(repr(_constant(item)) for item in constant))
    if isinstance(constant, tuple):
        return tuple(_constant(item) for item in constant)
    return (type(constant).__name__, constant)


def _nested(code: types.CodeType) -> Iterable[str]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield code_digest(constant)
            yield from _nested(constant)


# --- classes ---


def _is_open(base: type) -> bool:
    """Whether instances hold nothing but what Python shows of them."""
    if base in _TRANSPARENT:
        return True
    if not base.__flags__ & _HEAP_TYPE:
        return False
    members = vars(base)
    shown = sum(map(_is_slot, members.values())) + sum(n in members for n in _OF_INSTANCES)
    own = base.__basicsize__ - (base.__base__ or object).__basicsize__
    return own <= shown * _POINTER_BYTES


_OF_INSTANCES = ("__dict__", "__weakref__")
_POINTER_BYTES = 8
_TRANSPARENT = frozenset(
    {
        torch.Size,
        *(object, dict, list, tuple, set, frozenset, int, str, bytes, float, complex),
        *(collections.OrderedDict, collections.defaultdict, collections.deque, type),
    }
)


def _has_members_in_python(value: type) -> bool:
    """Whether a class is not one of Python's own, whose release says all about it."""
    if not value.__flags__ & _HEAP_TYPE:
        return False
    root = value.__module__.partition(".")[0]
    return root == "__main__" or root not in sys.stdlib_module_names


def _is_slot(member: object) -> bool:
    return isinstance(member, types.MemberDescriptorType)


def _slots_of(kind: type) -> list[str]:
    return [
        name for base in kind.__mro__ for name, member in vars(base).items() if _is_slot(member)
    ]


def _content(value: Any) -> object:
    if isinstance(value, types.CellType):
        try:
            return value.cell_contents
        except ValueError:
            return _EMPTY
    return value()


_EMPTY = "an empty cell"
