"""Python's garbage collector, switched off for a while by several who may overlap.

There is one in a process. What it frees in the middle of a capture may break that, and while a
model is compiled it looks again and again at millions of objects that all stay until the end.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class CollectorSwitch:
    """Switches the collector off, and on again once the last who wanted it off is done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._was_on: bool | None = None  # None while nobody has switched it off
        self._num_waiting = 0  # of those who end after the next collection
        # A process that is forked meanwhile has nobody in it who would switch it on again.
        os.register_at_fork(after_in_child=self._forked)

    def begin(self) -> None:
        """Somebody may want it off from now on, until `end`."""
        with self._lock:
            self._depth += 1

    def off(self) -> None:
        """Switch it off; whoever calls has begun, and has not ended."""
        with self._lock:
            assert self._depth, "nobody would switch it on again"
            if self._was_on is None:
                self._was_on = gc.isenabled()
                gc.disable()

    def end(self) -> None:
        """Somebody no longer wants it off."""
        with self._lock:
            self._depth -= 1
            if not self._depth:
                if self._was_on:
                    gc.enable()
                self._was_on = None

    @contextlib.contextmanager
    def held_off(self) -> Iterator[None]:
        """Off around the body."""
        self.begin()
        try:
            self.off()
            yield
        finally:
            self.end()

    def end_after_next(self) -> None:
        """Somebody no longer wants it off once it has been told to collect, which comes next.

        Switched on before, it would at once look at the very objects that it is told to look at.
        """
        self._num_waiting += 1
        if self._collected not in gc.callbacks:
            gc.callbacks.append(self._collected)  # the last one: to remove it hides no other

    def end_those_who_wait(self) -> None:
        """The next collection did not come."""
        if self._collected in gc.callbacks:
            gc.callbacks.remove(self._collected)
        waiting, self._num_waiting = self._num_waiting, 0
        for _ in range(waiting):
            self.end()

    def _collected(self, phase: str, _: object) -> None:
        if phase == "stop":
            self.end_those_who_wait()

    def _forked(self) -> None:
        if self._was_on:
            gc.enable()
        self._lock, self._depth, self._was_on = threading.Lock(), 0, None
        self._num_waiting = 0


COLLECTOR = CollectorSwitch()
