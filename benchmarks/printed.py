"""What the scripts show while they run, and how they name themselves in results."""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Printed:
    """A watch that prints what is done."""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Print it when it starts."""
        print(name, file=sys.stderr, flush=True)
        yield

    @contextlib.contextmanager
    def bar(self, name: str, total: int) -> Iterator[Callable[[], object]]:
        """Print it when it starts."""
        print(f"{name}: {total} measurements", file=sys.stderr, flush=True)
        yield lambda: None


def command(launcher: str = "python") -> str:
    """What gives the same figures again.

    Args:
        launcher: what starts the script.
    """
    return f"{launcher} benchmarks/{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}"
