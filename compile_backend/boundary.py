"""Static addresses for what is not captured: inputs of callers, results of eager sections.

A graph reads and writes the addresses it was captured with. Whatever comes from elsewhere is
brought to memory that stays. Buffers know sizes and bytes; they know no modes and no sections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from compile_backend.layout import memory_of, owners_of_memory

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


class SharedBuffer:
    """Memory in which tensors of several sizes take turns.

    Tensors made for different keys overlap, since only one key runs at a time. When a larger one
    is asked for, new memory is taken; tensors made before keep the old. Each device has memory of
    its own: a value on the host among those of a GPU stays there.
    """

    def __init__(self) -> None:
        self._memory: dict[torch.device, torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Size of the memory that new tensors are made in."""
        return sum(memory.numel() for memory in self._memory.values())

    def like(self, tensor: torch.Tensor, growth: int = 1) -> torch.Tensor:
        """A tensor with the layout of `tensor` at the start of the memory.

        Args:
            tensor: gives size, stride, dtype and device.
            growth: how many times larger a tensor may be asked for later.
        """
        needed, device = memory_of(tensor).numel() * tensor.element_size(), tensor.device
        memory = self._memory.get(device)
        # Inference tensors could not be written outside of inference mode.
        with torch.inference_mode(False):
            if memory is None or memory.numel() < needed:
                memory = torch.zeros(needed * growth, dtype=torch.uint8, device=device)
                self._memory[device] = memory
            start = memory[:needed].view(tensor.dtype)
            return start.as_strided(tensor.size(), tensor.stride())


@dataclass(slots=True)
class _Copied:
    """Results that are copied to static addresses in every step.

    Attributes:
        members: positions of results in one memory; most often just one.
        target: the static memory, with the layout of the first member, or of all their memory.
        start: where the memory of the members starts, in elements; None to copy just the result.
        layouts: size, stride and offset of each member, to notice a change.
    """

    members: tuple[int, ...]
    target: torch.Tensor
    start: int | None
    layouts: tuple[Any, ...]

    def bring(self, results: Sequence[Any]) -> None:
        first = results[self.members[0]]
        if self.start is None:
            self.target.copy_(first)
        elif len(self.members) == 1:
            self.target.copy_(memory_of(first))
        else:
            self.target.copy_(first.as_strided(self.target.size(), (1,), self.start))

    def pinned(self, results: Sequence[Any]) -> list[torch.Tensor]:
        if self.start is None:
            return [self.target]
        return [
            self.target.as_strided(
                results[i].size(), results[i].stride(), results[i].storage_offset() - self.start
            )
            for i in self.members
        ]


@dataclass(slots=True)
class _View:
    """A result in the memory of an argument: as static as that one, and handed on as it is."""

    position: int
    argument: int
    offset: int
    address: int

    def of(self, args: Sequence[Any], like: torch.Tensor) -> torch.Tensor:
        owner: torch.Tensor = args[self.argument]
        return owner.as_strided(like.size(), like.stride(), owner.storage_offset() + self.offset)


@dataclass(slots=True)
class _Key:
    """One key's results: what is copied, what is handed on, and all of them as pinned."""

    copied: list[_Copied]
    views: list[_View]
    pinned: list[Any]
    last: list[Any]


class Pins:
    """Brings the results of one section to addresses that stay, for each key.

    Args:
        buffers: one for each result of the section; None for a result that no graph reads.
        may_view: for each result, whether it may lie in the memory of an argument.
    """

    def __init__(self, buffers: Sequence[SharedBuffer | None], may_view: Sequence[bool]) -> None:
        self._buffers = buffers
        self._may_view = may_view
        self._keys: dict[Hashable, _Key] = {}

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
        held = self._keys.get(key)
        has_moved = False
        if held is None or any(
            _layouts(copied.members, results) != copied.layouts for copied in held.copied
        ):
            has_moved = held is not None
            held = self._keys[key] = self._make(results, args, growth)
        pinned = list(results)
        for copied in held.copied:
            copied.bring(results)
            for position in copied.members:
                pinned[position] = held.pinned[position]
        for view in held.views:
            address = results[view.position].data_ptr()
            if address != view.address:
                view.address = address
                has_moved = True
        held.last = pinned
        return pinned, has_moved

    def without_running(self, key: Hashable, args: Sequence[Any]) -> Sequence[Any]:
        """The static results of an earlier step, views taken anew from `args`."""
        held = self._keys[key]
        results = list(held.last)
        for view in held.views:
            results[view.position] = view.of(args, results[view.position])
            view.address = results[view.position].data_ptr()
        return results

    def plain_copies(self, key: Hashable) -> list[tuple[int, torch.Tensor]] | None:
        """Positions and static targets of a key's results, where copying them is all there is.

        None for results in one memory or in that of an argument: there `pin` has to look.
        """
        held = self._keys.get(key)
        if held is None or held.views or any(item.start is not None for item in held.copied):
            return None
        return [(item.members[0], item.target) for item in held.copied]

    def forget(self, key: Hashable) -> None:
        """Forget one key; none of its graphs is left."""
        self._keys.pop(key, None)

    def reset(self) -> None:
        """Forget every key."""
        self._keys.clear()

    def _make(self, results: Sequence[Any], args: Sequence[Any], growth: int) -> _Key:
        owners = owners_of_memory(args)
        views: list[_View] = []
        together: dict[Any, list[int]] = {}
        for position, result in enumerate(results):
            if not isinstance(result, torch.Tensor) or self._buffers[position] is None:
                continue
            memory = result.untyped_storage().data_ptr()
            owner = owners.get(memory) if self._may_view[position] else None
            if owner is not None and result.dtype == args[owner].dtype:
                offset = result.storage_offset() - args[owner].storage_offset()
                views.append(_View(position, owner, offset, result.data_ptr()))
            elif result.numel():
                together.setdefault((memory, result.dtype), []).append(position)
            else:
                together[position] = [position]
        copied = [self._copied(members, results, growth) for members in together.values()]
        pinned = list(results)
        for item in copied:
            for position, target in zip(item.members, item.pinned(results), strict=True):
                pinned[position] = target
        return _Key(copied, views, pinned, pinned)

    def _copied(self, members: list[int], results: Sequence[Any], growth: int) -> _Copied:
        first = results[members[0]]
        buffer = self._buffers[members[0]]
        assert buffer is not None
        layouts = _layouts(members, results)
        if len(members) == 1 and 0 not in first.stride():
            return _Copied((members[0],), buffer.like(first, growth), None, layouts)
        start = min(results[i].storage_offset() for i in members)
        end = max(results[i].storage_offset() + memory_of(results[i]).numel() for i in members)
        whole = first.as_strided((end - start,), (1,), start)
        return _Copied(tuple(members), buffer.like(whole, growth), start, layouts)


def _layouts(members: Sequence[int], results: Sequence[Any]) -> tuple[Any, ...]:
    """What must be the same in every step; offsets only count among members."""
    if len(members) == 1:
        return (results[members[0]].size(), results[members[0]].stride())
    return tuple(
        [(results[i].size(), results[i].stride(), results[i].storage_offset()) for i in members]
    )
