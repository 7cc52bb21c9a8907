"""What the partitions of one graph share in its PIECEWISE steps: memory, and whose it is.

Who runs, captures or replays a partition is not known here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compile_backend.boundary import SharedBuffer
from compile_backend.partition_origins import Origins, tensors_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from compile_backend.batch import BatchDescriptor
    from compile_backend.partition_origins import Origin

    Growth = Callable[[BatchDescriptor], int]


class StepMemory:
    """The memory of one graph's steps.

    Args:
        device: where graphs are captured.
        growth: how many times larger tensors may be at other keys, by key.
        is_captured: whether the partition of an index has a graph for a key.

    Attributes:
        device: as given, and so is `growth`.
        inputs: of the step that runs.
        known: whose memory is whose in it; None as long as nobody asked.
    """

    def __init__(
        self,
        device: torch.device,
        growth: Growth,
        is_captured: Callable[[int, BatchDescriptor], bool],
    ) -> None:
        self.device = device
        self.growth = growth
        self.inputs: Sequence[Any] = ()
        self.known: Origins | None = None
        self._is_captured = is_captured
        self._slots: list[SharedBuffer] = []

    def origins(self) -> Origins:
        """Whose memory is whose in the step that runs."""
        if self.known is None:
            self.known = Origins(tensors_of(self.inputs))
        return self.known

    def look(self, index: int) -> None:
        """Note, in a step that warms up, what is alive when a partition starts."""
        if self.known is not None:
            self.known.look(index)

    def stays(self, key: BatchDescriptor, origin: Origin) -> bool:
        """Whether what comes from there is at the same address in each step."""
        return origin.partition is None or self._is_captured(origin.partition, key)

    def slot(self, number: int) -> SharedBuffer:
        """Memory that partitions take turns with: for arguments that nobody reads after one."""
        while len(self._slots) <= number:
            self._slots.append(SharedBuffer())
        return self._slots[number]

    def forget_slots(self) -> None:
        """Give that memory back; graphs that read it are dropped, too."""
        self._slots.clear()
