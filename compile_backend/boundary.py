"""Static addresses for what is not captured: inputs of callers, results of eager sections.

A graph reads and writes the addresses it was captured with. Whatever comes from elsewhere is
brought to memory that stays. Buffers know sizes and bytes; they know no modes and no sections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


class SharedBuffer:
    """Memory in which tensors of several sizes take turns.

    Tensors made for different keys overlap, since only one key runs at a time. When a larger one
    is asked for, new memory is taken; tensors made before keep the old.

    Args:
        device: where the memory is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the memory that new tensors are made in."""
        return 0 if self._memory is None else self._memory.numel()

    def like(self, tensor: torch.Tensor, growth: int = 1) -> torch.Tensor:
        """A tensor with the layout of `tensor` at the start of the memory.

        Args:
            tensor: gives size, stride and dtype.
            growth: how many times larger a tensor may be asked for later.
        """
        extent = 1 + sum(
            (size - 1) * stride
            for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
        )
        needed = extent * tensor.element_size() if tensor.numel() else 0
        if self._memory is None or self.num_bytes < needed:
            # Inference tensors could not be written outside of inference mode.
            with torch.inference_mode(False):
                self._memory = torch.zeros(needed * growth, dtype=torch.uint8, device=self._device)
        with torch.inference_mode(False):
            start = self._memory[:needed].view(tensor.dtype)
            return start.as_strided(tensor.size(), tensor.stride())


@dataclass(slots=True)
class _Copied:
    """A result that is copied to its static address in every step."""

    target: torch.Tensor


@dataclass(slots=True)
class _View:
    """A result in the memory of an argument: as static as that one, and handed on as it is."""

    argument: int
    offset: int
    address: int
    moves: int = 0

    def of(self, args: Sequence[Any], like: torch.Tensor) -> torch.Tensor:
        owner: torch.Tensor = args[self.argument]
        return owner.as_strided(like.size(), like.stride(), owner.storage_offset() + self.offset)


class Pins:
    """Brings the results of one section to addresses that stay, for each key.

    Args:
        buffers: one for each result of the section.
        may_view: for each result, whether it may lie in the memory of an argument.
    """

    def __init__(self, buffers: Sequence[SharedBuffer], may_view: Sequence[bool]) -> None:
        self._buffers = buffers
        self._may_view = may_view
        self._pins: dict[Hashable, list[Any]] = {}
        self._last: dict[Hashable, list[Any]] = {}

    def pin(
        self, key: Hashable, results: Sequence[Any], args: Sequence[Any], growth: int = 1
    ) -> tuple[Sequence[Any], bool]:
        """The results at their static addresses, and whether one of those has changed.

        Args:
            key: whose graphs read the results.
            results: what the section returned.
            args: what it was called with, all at static addresses.
            growth: how many times larger results may be at other keys.
        """
        pins = self._pins.get(key)
        if pins is None:
            pins = self._pins[key] = self._make(results, args, growth)
        pinned = list(results)
        has_moved = False
        for index, pin in enumerate(pins):
            if type(pin) is _Copied:
                pin.target.copy_(results[index])
                pinned[index] = pin.target
            elif type(pin) is _View and results[index].data_ptr() != pin.address:
                pinned[index] = self._moved_view(pins, index, results[index], growth)
                has_moved = True
        self._last[key] = pinned
        return pinned, has_moved

    def without_running(self, key: Hashable, args: Sequence[Any]) -> Sequence[Any]:
        """The static results of an earlier step, views taken anew from `args`."""
        return [
            pin.of(args, last) if isinstance(pin, _View) else last
            for pin, last in zip(self._pins[key], self._last[key], strict=True)
        ]

    def reset(self) -> None:
        """Forget every key."""
        self._pins.clear()
        self._last.clear()

    def _make(self, results: Sequence[Any], args: Sequence[Any], growth: int) -> list[Any]:
        owners = {
            arg.untyped_storage().data_ptr(): index
            for index, arg in enumerate(args)
            if isinstance(arg, torch.Tensor) and arg.numel()
        }
        pins: list[Any] = []
        for index, result in enumerate(results):
            if not isinstance(result, torch.Tensor):
                pins.append(None)
                continue
            owner = owners.get(result.untyped_storage().data_ptr())
            if owner is not None and self._may_view[index] and result.dtype == args[owner].dtype:
                offset = result.storage_offset() - args[owner].storage_offset()
                pins.append(_View(owner, offset, result.data_ptr()))
            else:
                pins.append(_Copied(self._buffers[index].like(result, growth)))
        return pins

    def _moved_view(
        self, pins: list[Any], index: int, result: torch.Tensor, growth: int
    ) -> torch.Tensor:
        """A view that keeps moving is copied from then on."""
        view: _View = pins[index]
        view.address = result.data_ptr()
        view.moves += 1
        if view.moves <= _TOLERATED_MOVES:
            return result
        pins[index] = _Copied(self._buffers[index].like(result, growth))
        copied: torch.Tensor = pins[index].target.copy_(result)
        return copied


# From the warm-up's address to the captured one, and once more when weights were rebound.
_TOLERATED_MOVES = 2
