"""The description of a batch, which is also the key of a graph, and what no batch can be.

This file refuses to know which graphs exist: a dispatcher decides that. Descriptors are made
unchecked, in every step; whoever is given one checks it.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from compile_backend.config import CUDAGraphMode
from compile_backend.errors import ConfigError


class BatchDescriptor(NamedTuple):
    """What a batch looks like, as far as graphs care.

    Attributes:
        num_tokens: tokens of all requests together.
        num_reqs: requests.
        uniform: whether every request has the same query length.
        has_lora: whether some request uses an adapter.
        num_active_loras: distinct adapters in use; 0 with `has_lora` says that nobody counted.
        extra: whatever else selects a graph, such as a flag that changes the control flow.
    """

    num_tokens: int
    num_reqs: int
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0
    extra: tuple[Any, ...] = ()

    def relaxed(self) -> BatchDescriptor:
        """The part that graphs of pieces depend on, which hold no attention.

        Requests are not told apart there: `num_reqs` is the most that the tokens can make up,
        and `uniform` is False.
        """
        return self._replace(num_reqs=self.num_tokens, uniform=False)


def checked(descriptor: Any, option: str = "descriptor") -> BatchDescriptor:
    """A descriptor of what a batch can be, in Python's own numbers.

    Args:
        descriptor: a `BatchDescriptor`.
        option: what the user set to it.

    Raises:
        ConfigError: a field is of another type, or contradicts the others.
    """
    is_descriptor = isinstance(descriptor, BatchDescriptor)
    if not is_descriptor:
        fix = "pass BatchDescriptor(num_tokens=..., num_reqs=...)"
        raise ConfigError(option, descriptor, "is no BatchDescriptor", fix)
    num_tokens, num_reqs, uniform, has_lora, num_loras, extra = descriptor
    # In every step of an engine that dispatches on its own: one expression, without any calls.
    if not (
        type(num_tokens) is type(num_reqs) is type(num_loras) is int
        and type(uniform) is type(has_lora) is bool
        and type(extra) is tuple
    ):
        return checked(_in_own_types(descriptor))
    is_uneven = uniform and num_reqs and num_tokens % num_reqs
    if is_uneven or not 0 <= num_reqs <= num_tokens or num_loras < 0:
        raise _contradiction(descriptor)
    if extra:
        _check_extra(extra)
    own: BatchDescriptor = descriptor
    return own


def flag(name: str, value: object, *, others: str = "") -> bool:
    """A bool, numpy's included, as Python's own.

    Args:
        name: of what was set.
        value: to this.
        others: what else it may be, for the message.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(name, value, "is no bool", f"use True or False{others}")
    return bool(value)


def _in_own_types(descriptor: Any) -> BatchDescriptor:
    num_tokens, num_reqs, uniform, has_lora, num_loras, extra = descriptor
    if not isinstance(extra, tuple):
        raise ConfigError("extra", extra, "is no tuple", "use a tuple of hashable values")
    return BatchDescriptor(
        num_tokens=_count("num_tokens", num_tokens),
        num_reqs=_count("num_reqs", num_reqs),
        num_active_loras=_count("num_active_loras", num_loras),
        uniform=flag("uniform", uniform),
        has_lora=flag("has_lora", has_lora),
        extra=tuple(extra),
    )


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(name, value, "is no integer", "use 0 or more")
    return int(value)


def _contradiction(descriptor: BatchDescriptor) -> ConfigError:
    num_tokens, num_reqs, uniform, _, num_loras, _ = descriptor
    for name, value in (("num_tokens", num_tokens), ("num_reqs", num_reqs)):
        if value < 0:
            return ConfigError(name, value, "is too small", "use 0 or more")
    if num_reqs > num_tokens:
        problem = f"is more than num_tokens={num_tokens}, and every request has at least one token"
        return ConfigError("num_reqs", num_reqs, problem, "give 0 <= num_reqs <= num_tokens")
    if num_loras < 0:
        return ConfigError("num_active_loras", num_loras, "is too small", "use 0 or more")
    problem = (
        f"contradicts num_tokens={num_tokens} and num_reqs={num_reqs}, since requests of one "
        "length have a multiple of their number"
    )
    return ConfigError("uniform", uniform, problem, "use False, or the tokens of all requests")


def _check_extra(extra: tuple[Any, ...]) -> None:
    try:
        hash(extra)
    except TypeError:
        problem = "cannot be part of a key"
        raise ConfigError("extra", extra, problem, "use a tuple of hashable values") from None


def graph_key(mode: CUDAGraphMode, descriptor: BatchDescriptor) -> BatchDescriptor:
    """The one form in which graphs of a mode are stored and looked up."""
    return descriptor.relaxed() if mode is CUDAGraphMode.PIECEWISE else descriptor


RUNNER = "runner"


def of_runner(number: int) -> tuple[tuple[str, int], ...]:
    """What keys of pieces have in `extra` that belong to one of the runners of a model.

    Args:
        number: of the runner, from 1 on; 0 for nobody's.
    """
    return ((RUNNER, number),) if number else ()


def runner_of(key: BatchDescriptor) -> int:
    """The number of the runner that a key of pieces belongs to; 0 if it is no runner's."""
    return next((item[1] for item in key.extra if _is_mark(item)), 0)


def _is_mark(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and item[0] == RUNNER
