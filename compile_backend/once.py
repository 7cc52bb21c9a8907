"""Tell the same thing once. What was told is owned by whoever compiles, not by the module."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging
    from collections.abc import Hashable

MOVED = "moved"
"""Said of weights that are elsewhere, by a compiled model and by the runner of one."""


class WarnOnce:
    """Logs each warning the first time only, over all graphs of one `torch.compile` call."""

    def __init__(self) -> None:
        self._told: set[Hashable] = set()

    def __call__(
        self, logger: logging.Logger, about: Hashable, message: str, *args: object
    ) -> None:
        """Warn, unless something was said `about` this before."""
        if about not in self._told:
            self._told.add(about)
            logger.warning(message, *args)
