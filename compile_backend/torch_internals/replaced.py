"""A function of somebody's class replaced for a while, for one thread."""

from __future__ import annotations

import threading
from typing import Any


class Replaced:
    """Around what needs it; meanwhile other threads get what was there, or wait to replace theirs.

    Args:
        owner: the class that has the function, not one that it inherits from.
        name: of the function.
        function: called in its place, with the same arguments.
    """

    _lock = threading.RLock()

    def __init__(self, owner: type, name: str, function: Any) -> None:
        self._owner, self._name, self._function = owner, name, function

    def __enter__(self) -> None:
        self._lock.acquire()
        self._was = vars(self._owner)[self._name]
        otherwise, function = getattr(self._owner, self._name), self._function
        thread = threading.get_ident()

        def chosen(*args: Any, **kwargs: Any) -> Any:
            is_here = threading.get_ident() == thread
            return (function if is_here else otherwise)(*args, **kwargs)

        is_static = isinstance(self._was, staticmethod)
        setattr(self._owner, self._name, staticmethod(chosen) if is_static else chosen)

    def __exit__(self, *_: object) -> None:
        setattr(self._owner, self._name, self._was)
        self._lock.release()
