"""`capture()`: capture ahead of serving, all warm-ups first, then the largest key first."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

from compile_backend.context import enter_capture_session

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator
    from contextlib import AbstractContextManager

logger = logging.getLogger(__name__)

Order = tuple[int, int]
"""Number of tokens, then the value of the mode."""


class CaptureKeys:
    """The keys met, and how to capture each."""

    def __init__(self) -> None:
        self._captures: dict[Hashable, tuple[Order, Callable[[], None]]] = {}
        self._around: set[Callable[..., AbstractContextManager[None]]] = set()

    def add(
        self,
        key: Hashable,
        order: Order,
        capture: Callable[[], None],
        around: Callable[..., AbstractContextManager[None]],
    ) -> None:
        """Remember one key; the highest order is captured first.

        Args:
            key: what the capture is for.
            order: of the key.
            capture: captures it.
            around: the session of the engine that will.
        """
        self._captures.setdefault(key, (order, capture))
        self._around.add(around)

    def keys(self) -> list[Hashable]:
        """Those met so far, in order."""
        return list(self._captures)

    def forget(self, keys: Iterable[Hashable]) -> None:
        """Capture these neither now nor later."""
        for key in keys:
            del self._captures[key]

    def run(self, capture_one: Callable[[Order, Callable[[], None]], None] | None = None) -> int:
        """Capture every key, the highest order first.

        Args:
            capture_one: given a key's order and its capture, runs it; to show or measure it.

        Returns:
            How many there were.
        """
        ordered = sorted(self._captures.values(), key=lambda item: item[0], reverse=True)
        with contextlib.ExitStack() as stack:
            for around in self._around:
                stack.enter_context(around(thorough=True))
            for order, capture in ordered:
                if capture_one is None:
                    capture()
                else:
                    capture_one(order, capture)
        return len(ordered)


@contextlib.contextmanager
def capture() -> Iterator[None]:
    """Capture, at the end of the body, every key that calls inside it met.

    Each call inside runs once, eagerly, returns its result, and is the warm-up of its key. Nothing
    is run again for the capture itself, so state changes once a call, as always::

        compiled = torch.compile(model, backend="cudagraph_modes", dynamic=True)
        with capture():
            for size in (8, 4, 2, 1):
                compiled(inputs_of(size))

    With `dynamic=True`, one compiled graph serves all sizes. Without, torch compiles the first
    size by itself, then all others, and what was captured of the first is of no use any more.

    With the option `cudagraph_capture="ahead"` this is the only place where graphs are captured.
    If the body raises, nothing is captured.
    """
    session = CaptureKeys()
    start = time.perf_counter()
    with enter_capture_session(session):
        yield
    with enter_capture_session(None):
        number = session.run()
    logger.info("captured %d keys in %.2f s", number, time.perf_counter() - start)
