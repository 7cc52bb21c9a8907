"""What traced code names outside of itself: found in its bytecode, and compared between processes.

A global may be a function that somebody replaced, or a number that somebody changed. For each
function that Dynamo went through, every global that its code can name is described, through
modules as far as the names lead. This module knows nothing of arguments and of graphs.
"""

from __future__ import annotations

import builtins
import dis
import functools
import importlib
import itertools
import os
import sys
import sysconfig
import types
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from compile_backend.cache import NotStorableError
from compile_backend.description import Description, code_digest
from compile_backend.torch_internals.stored_entry import (
    Frame,
    UnsuitableError,
    guarded_sources,
    value_of,
)
from compile_backend.torch_internals.traced_code import source_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from compile_backend.torch_internals.traced_code import Traced

_Chain = tuple[str, ...]
_ABSENT = "absent"
_IMPORT, _DEFINITION = "import ", "def "


@dataclass(frozen=True, slots=True)
class TracedGlobals:
    """What traced code names, and what that was where it was traced.

    Attributes:
        chains: by module: a global, or what is imported, and attributes of it.
        sources: what guards look at.
        digests: of all that these stand for up to each of them, in order.
    """

    chains: tuple[tuple[str, tuple[_Chain, ...]], ...]
    sources: tuple[Any, ...]
    digests: tuple[str, ...]

    @classmethod
    def of(cls, traced: Traced, frame: Frame, arguments: Description) -> TracedGlobals:
        """Describe what a trace depends on besides its arguments.

        Args:
            traced: the trace.
            frame: the call.
            arguments: of the call, described.

        Raises:
            NotStorableError: it depends on what cannot be described.
        """
        sources = tuple(guarded_sources(traced.stored))
        codes, fakes = traced.codes, set(arguments.fakes)
        while True:
            chains = _chains_in(codes)
            outside = arguments.further()
            digests = tuple(digest for _, digest in _described(outside, chains, sources, frame))
            fakes |= outside.fakes
            if fakes.issubset(codes):
                break
            codes = [*codes, *fakes.difference(codes)]
        _check_known(codes, arguments, outside)
        for guard in traced.stored.guards:
            value = _value(guard.source, frame)
            if arguments.has_left_open(value) or outside.has_left_open(value):
                name = source_name(guard.source)
                raise NotStorableError(f"depends on {name}, a {type(value).__qualname__}")
        return cls(chains, sources, digests)

    def check_same(
        self, frame: Frame, arguments: Description, installed: Mapping[str, Any]
    ) -> None:
        """Refuse if a name stands for something else than it did where the code was traced.

        Args:
            frame: the call.
            arguments: of the call, described.
            installed: further globals of the function.

        Raises:
            UnsuitableError: it does.
        """
        frame = replace(frame, global_scope={**frame.global_scope, **installed})
        try:
            live = _described(arguments.further(), self.chains, self.sources, frame)
            for (name, digest), known in zip(live, self.digests, strict=True):
                if digest != known:
                    raise UnsuitableError(f"{name} is not what it was")
        except ImportError as error:
            raise UnsuitableError(str(error)) from error


# --- what code names ---


def _chains_in(codes: Sequence[types.CodeType]) -> tuple[tuple[str, tuple[_Chain, ...]], ...]:
    modules = {
        file: name
        for name, module in sorted(sys.modules.items())
        if isinstance(file := getattr(module, "__file__", None), str)
    }
    found: dict[str, dict[_Chain, None]] = {}
    for code in codes:
        chains = list(_names_in(code))
        name = modules.get(code.co_filename)
        if name is None and _is_of_python(code):
            name = code.co_filename.removeprefix("<frozen ").rstrip(">")
        if chains and name is None:
            raise NotStorableError(f"goes through code of no module ({code.co_filename})")
        if name is not None:
            chains.append((f"{_DEFINITION}{code.co_qualname}",))
            found.setdefault(name, {}).update(dict.fromkeys(chains))
    return tuple((name, tuple(sorted(chains))) for name, chains in sorted(found.items()))


def _names_in(code: types.CodeType) -> Iterator[_Chain]:
    chain: list[str] = []
    imported = ""
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _BETWEEN]
    for index, instruction in enumerate(instructions):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain.append(instruction.argval)
            continue
        if chain:
            yield tuple(chain)
        chain = []
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain = [instruction.argval]
        elif instruction.opname == "IMPORT_NAME":
            level = instructions[index - 2].argval
            imported = f"{_IMPORT}{'.' * level}{instruction.argval}"
            chain = [imported]
        elif instruction.opname == "IMPORT_FROM":
            yield (imported, instruction.argval)
    if chain:
        yield tuple(chain)


_BETWEEN = frozenset({"CACHE", "PRECALL", "PUSH_NULL", "EXTENDED_ARG"})


def _is_of_python(code: types.CodeType) -> bool:
    name = code.co_filename
    return name.startswith("<frozen ") or (
        name.startswith(_python_directory()) and f"{os.sep}site-packages{os.sep}" not in name
    )


@functools.cache
def _python_directory() -> str:
    return sysconfig.get_paths()["stdlib"] + os.sep


# --- what that stands for ---


def _described(
    description: Description,
    chains: tuple[tuple[str, tuple[_Chain, ...]], ...],
    sources: tuple[Any, ...],
    frame: Frame,
) -> Iterator[tuple[str, str]]:
    """Describe one after the other, and give the digests of all so far."""
    for module_name, of_module in chains:
        scope = vars(importlib.import_module(module_name))
        for chain in of_module:
            name = ".".join((module_name, *chain))
            description.add(name, _found(scope, chain))
            yield name, description.digest()[:16]
    for source in sources:
        value = _value(source, frame)
        description.add("guarded", "builtins" if value is vars(builtins) else value)
        yield source_name(source), description.digest()[:16]


def _value(source: Any, frame: Frame) -> object:
    try:
        return value_of(source, frame)
    except Exception:  # noqa: BLE001 - a guard may say that there is none
        return _ABSENT


def _found(scope: Mapping[str, Any], chain: _Chain) -> object:
    """What a chain of names stands for, as far as it goes through modules."""
    first, *rest = chain
    if first.startswith(_DEFINITION):
        return _defined(scope, first.removeprefix(_DEFINITION).split("."))
    if first.startswith(_IMPORT):
        value = _imported(first.removeprefix(_IMPORT), scope.get("__package__"))
    else:
        value = scope.get(first, getattr(builtins, first, _ABSENT))
    for name in rest:
        if not isinstance(value, types.ModuleType):
            break
        value = getattr(value, name, _ABSENT)
    return value


def _defined(scope: Mapping[str, Any], names: Sequence[str]) -> object:
    """The function of a qualified name, as far as that leads."""
    value: object = _ABSENT
    for name in names:
        value = scope.get(name, _ABSENT)
        scope = vars(value) if isinstance(value, type) else {}
    return value


def _imported(name: str, package: str | None) -> object:
    try:
        return importlib.import_module(name, package)
    except (ImportError, TypeError, ValueError):
        return _ABSENT


# --- what is not known for sure ---


def _check_known(
    codes: Sequence[types.CodeType], arguments: Description, outside: Description
) -> None:
    """Refuse if traced code was met nowhere, or names what could not be described.

    Raises:
        NotStorableError: so it is.
    """
    known = arguments.codes | outside.codes
    for code in codes:
        if code_digest(code) not in known and not _is_of_python(code):
            raise NotStorableError(f"goes through code that nothing refers to ({code.co_name})")
    named = {name for code in codes for name in _all_names(code)}
    for name in sorted(named & _OF_ONE_PROCESS):
        raise NotStorableError(f"goes through code that names {name}")
    unordered = {**arguments.unordered, **outside.unordered}
    for name in _ONLY_LOOKED_IN:
        unordered.pop(name, None)
    for code in codes:
        _check_order(code, unordered)
    for name, what in (*arguments.open.items(), *outside.open.items()):
        if name in named:
            raise NotStorableError(f"may depend on {what}")


# What differs from process to process, or what descriptions leave out.
_OF_ONE_PROCESS = frozenset({"hash", "id", "__annotations__", "get_type_hints", "__doc__"})


# A set of torch's own modules, in which it looks up names.
_ONLY_LOOKED_IN = ("_non_persistent_buffers_set",)
_METHODS_WITHOUT_ORDER = frozenset({"add", "discard", "remove", "__contains__"})


def _check_order(code: types.CodeType, unordered: Mapping[str, str]) -> None:
    """Refuse code that may go through a set, whose order differs from process to process.

    Args:
        code: may look for something in a set, add to it and take from it.
        unordered: what sets there are, by name; besides those that are constants of the code.

    Raises:
        NotStorableError: it does something else with one.
    """
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _BETWEEN]
    for instruction, following in itertools.pairwise(instructions):
        what = instruction.argval
        if isinstance(what, types.CodeType):
            _check_order(what, unordered)
            continue
        names = what if isinstance(what, tuple) else (what,)
        is_load = instruction.opname.startswith("LOAD_")
        is_constant = isinstance(what, frozenset) and len(what) > 1
        is_set = is_constant or any(isinstance(n, str) and n in unordered for n in names)
        is_harmless = following.opname == "CONTAINS_OP" or (
            following.opname in ("LOAD_ATTR", "LOAD_METHOD")
            and following.argval in _METHODS_WITHOUT_ORDER
        )
        if is_load and is_set and not is_harmless:
            told = "a constant set" if is_constant else f"the set {what}"
            raise NotStorableError(f"may depend on the order of {told} ({code.co_qualname})")


def _all_names(code: types.CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_freevars, *code.co_varnames)
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _all_names(constant)
