"""Rewrites that users bring: found by name, checked, and told apart for the cache.

What they do to a graph is theirs: this file knows neither the graph nor the other passes.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

from compile_backend.errors import ConfigError, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch.fx

OPTION = "inductor_passes"


@dataclass(frozen=True, slots=True)
class OwnPass:
    """A rewrite of a user's, as the pipeline runs it.

    Attributes:
        name: what the user calls it.
        function: takes a graph, rewrites it in place, and returns the number of places changed,
            or None where it does not count.
        written: how the user named it; None for the function itself.
    """

    name: str
    function: Callable[[Any], Any]
    written: str | None = None

    def __call__(self, graph: torch.fx.Graph) -> int:
        """Rewrite `graph` in place; without a count, return 1 if anything looks different.

        Raises:
            ConfigError: it fails, returns something else, or leaves a graph that is not sound.
        """
        before, ends = str(graph), _ends(graph)
        try:
            changed = self.function(graph)
            graph.lint()
        except Exception as error:
            problem = f"failed on a graph: {type(error).__name__}: {error}"
            raise self.error(problem, "repair it or leave it out") from error
        if _ends(graph) != ends:
            problem = "changed which inputs a graph takes, or took its output away"
            raise self.error(problem, "rewrite what is between these")
        if changed is None:
            return int(str(graph) != before)
        if type(changed) is not int or changed < 0:
            problem = f"returned {changed!r}"
            raise self.error(problem, "return the number of places changed, or None")
        return changed

    def uuid(self) -> str | None:
        """What tells this version of the rewrite from others; None where nothing does.

        That is what its own `uuid()` says, else its source, for a function that takes nothing
        from around it by closure or default.

        Raises:
            ConfigError: its own `uuid()` fails.
        """
        of_its_own = getattr(self.function, "uuid", None)
        if callable(of_its_own):
            try:
                said = of_its_own()
            except Exception as error:
                problem = (
                    f"cannot be told apart, its uuid() failed: {type(error).__name__}: {error}"
                )
                raise self.error(problem, "repair it, or return None there") from error
            return None if said is None else f"{self.name}: {said!r}"
        source = _source_of(self.function)
        return None if source is None else f"{self.name}: {source}"

    def error(self, problem: str, fix: str) -> ConfigError:
        """What is wrong with it, in the user's words."""
        entry = self.function if self.written is None else self.written
        return ConfigError(OPTION, {self.name: entry}, problem, fix)


def _ends(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """What the caller of a graph sees of it: its inputs in order, and its output."""
    return [node for node in graph.nodes if node.op in ("placeholder", "output")]


def own_passes(entries: Mapping[str, Any], taken: frozenset[str]) -> tuple[OwnPass, ...]:
    """The passes of `inductor_passes`, in its order.

    Args:
        entries: callables, or `"package.module:function"`, by name.
        taken: names of other passes.

    Raises:
        ConfigError: a name is taken or stands for no callable.
    """
    for name, entry in entries.items():
        if name in taken:
            fix = f"use a name that is none of {', '.join(sorted(taken))}"
            raise ConfigError(OPTION, {name: entry}, "has the name of another pass", fix)
    return tuple(
        OwnPass(name, _found(name, entry), entry if isinstance(entry, str) else None)
        for name, entry in entries.items()
    )


def _found(name: str, entry: Any) -> Any:
    if not isinstance(entry, str):
        return entry
    module_name, _, path = entry.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for attribute in path.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        fix = 'write "package.module:function", of a module that can be imported'
        raise ConfigError(OPTION, {name: entry}, f"cannot be found: {error}", fix) from None
    if isinstance(found, type):
        fix = f"name {path}(...), made once in the module"
        raise ConfigError(OPTION, {name: entry}, "names a class", fix)
    if not callable(found):
        problem = f"names {shown(found)}, which cannot be called"
        raise ConfigError(OPTION, {name: entry}, problem, "name a function of a graph")
    return found


def check_entry(name: str, entry: Any) -> None:
    """Refuse what is neither the name of a function nor can be called with a graph.

    Raises:
        ConfigError: it has no name, is a name of another form or a class, or cannot be called.
    """
    if not name.strip():
        fix = "name it, as in {'my_pass': ...}"
        raise ConfigError(OPTION, {name: entry}, "has a pass without a name", fix)
    if isinstance(entry, str):
        module, separator, function = entry.partition(":")
        parts = [*module.split("."), *function.split(".")]
        if not separator or not all(part.isidentifier() for part in parts):
            fix = 'write "package.module:function"'
            raise ConfigError(OPTION, {name: entry}, "names no function of a module", fix)
        return
    if isinstance(entry, type):
        raise ConfigError(OPTION, {name: entry}, "is a class", f"use {entry.__name__}(...)")
    if not callable(entry):
        fix = 'use a function of a graph, or "package.module:function"'
        raise ConfigError(OPTION, {name: entry}, "cannot be called", fix)


def _source_of(function: Any) -> str | None:
    """The digest of a plain function's name and source; None where these do not tell all."""
    if not isinstance(function, FunctionType):
        return None
    if function.__closure__ or function.__defaults__ or function.__kwdefaults__:
        return None
    try:
        source = inspect.getsource(inspect.getmodule(function) or function)
    except (OSError, TypeError):
        return None
    text = f"{function.__module__}.{function.__qualname__}\n{source}"
    return hashlib.sha256(text.encode()).hexdigest()
