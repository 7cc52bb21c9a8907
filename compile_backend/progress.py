"""What people see while graphs are captured: mode, size, memory taken, time left."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from compile_backend.config import CUDAGraphMode
from compile_backend.errors import number_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from compile_backend.batch import BatchDescriptor
    from compile_backend.capture_session import Order
    from compile_backend.runner_report import CaptureMeter


class CaptureProgress:
    """Tells what is going on, and has every capture measured.

    Args:
        progress: the bar.
        number: of keys; each is warmed up, then captured.
        meter: measures.
    """

    def __init__(self, progress: Progress, number: int, meter: CaptureMeter) -> None:
        self._progress = progress
        self._meter = meter
        self._task = progress.add_task("warming up", total=2 * number, memory="")

    def warm_up(self, mode: CUDAGraphMode, key: BatchDescriptor) -> None:
        """A key is about to be warmed up."""
        self._tell("warming up", mode, key.num_tokens)

    def capture(self, order: Order, capture: Callable[[], None]) -> None:
        """Capture a key."""
        num_tokens, mode_value = order
        mode = CUDAGraphMode(mode_value)
        self._tell("capturing", mode, num_tokens)
        self._meter.measure((mode, num_tokens), capture)

    def _tell(self, what: str, mode: CUDAGraphMode, num_tokens: int) -> None:
        num_bytes = sum(cost.num_bytes for cost in self._meter.by_size.values())
        memory = f"{num_bytes / 2**20:.0f} MiB"
        self._progress.update(
            self._task,
            advance=1,
            description=f"{what} {mode.name}, {number_of('token', num_tokens)}",
            memory=memory,
        )


@contextlib.contextmanager
def capture_progress(
    number: int, meter: CaptureMeter, *, is_shown: bool
) -> Iterator[CaptureProgress]:
    """A progress bar on the error stream.

    Args:
        number: of keys.
        meter: measures every capture.
        is_shown: whether there is a bar at all.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[memory]}"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not is_shown, transient=True) as progress:
        yield CaptureProgress(progress, number, meter)
