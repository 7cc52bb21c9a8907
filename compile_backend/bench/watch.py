"""What a benchmark tells while it runs, and what it does with a way that fails.

How that looks is up to whoever asked for it.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Protocol

from compile_backend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

logger = logging.getLogger(__name__)

_MOST_OF_AN_ERROR = 600


class Watch(Protocol):
    """Shows what is going on."""

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Something starts, and lasts as long as the context."""

    def bar(self, name: str, total: int) -> AbstractContextManager[Callable[[], object]]:
        """Something that takes so many steps; the context is called after each."""


class Silent:
    """A watch that shows nothing."""

    def phase(self, name: str) -> AbstractContextManager[object]:
        """See `Watch`."""
        del name
        return contextlib.nullcontext()

    def bar(self, name: str, total: int) -> AbstractContextManager[Callable[[], object]]:
        """See `Watch`."""
        del name, total
        return contextlib.nullcontext(lambda: None)


@contextlib.contextmanager
def keeping(failures: dict[str, str], name: str) -> Iterator[None]:
    """Note an error and go on, since the others are measured all the same.

    Raises:
        ConfigError: what was asked for cannot be had; that is not hidden.
    """
    try:
        yield
    except Exception as error:
        cause = getattr(error, "inner_exception", error)  # Dynamo wraps what a backend raises
        if isinstance(cause, ConfigError):
            raise
        failures[name] = f"{type(cause).__name__}: {cause}"[:_MOST_OF_AN_ERROR]
        logger.warning("%s failed: %s", name, failures[name])
