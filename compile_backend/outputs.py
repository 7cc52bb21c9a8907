"""What a caller gets back from a replay: its own memory, never the graph's.

A graph writes the same output memory in every replay, and other graphs may write there, too.
Callers get copies (or, if they asked for it, the memory itself until the next call), and views of
inputs as views of their own inputs. Whoever is done with them by its next step gets copies in
memory that stays.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from compile_backend import shortcuts
from compile_backend.boundary import SharedBuffer
from compile_backend.layout import memory_of, owners_of_memory
from compile_backend.torch_internals.cuda import copy_all, maker_on

if TYPE_CHECKING:
    from collections.abc import Container, Hashable, Sequence

    from compile_backend.torch_internals.cuda import Maker


@dataclass(frozen=True, slots=True)
class _View:
    """An output in the memory of an input."""

    position: int
    offset: int


@dataclass(frozen=True, slots=True)
class _ShortClone:
    """How the driver clones one tensor.

    Attributes:
        source: the tensor; somebody else keeps it alive.
        make: makes a tensor where the source is.
        layout: of the clones, for `make`.
        copies: from the source to any target; None where torch has to copy.
    """

    source: weakref.ref[torch.Tensor]
    make: Maker
    layout: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
    copies: object | None


class _Clone:
    """Clones an output; by the driver where it is the very tensor of the first time."""

    __slots__ = ("_short",)

    def __init__(self) -> None:
        self._short: _ShortClone | None = None

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        """A clone of the output."""
        short = self._short
        if short is None:
            return self._first(output)
        if short.copies is not None and short.source() is output:
            clone = short.make(*short.layout)
            if shortcuts.copy_to(short.copies, clone.data_ptr()):
                return clone
        return output.clone()  # another tensor, or the device is not the current one

    def _first(self, output: torch.Tensor) -> torch.Tensor:
        clone = output.clone()
        self._short = _ShortClone(
            weakref.ref(output),
            maker_on(clone.device),  # a graph on CUDA may return what is on the host
            (tuple(clone.size()), clone.stride(), clone.dtype),
            shortcuts.copies_of([(clone, output)]),
        )
        return clone


@dataclass(frozen=True, slots=True)
class _Together:
    """Outputs in one memory: copied once, as a whole, and viewed as they were."""

    members: tuple[int, ...]
    start: int
    extent: int

    def whole(self, outputs: Sequence[Any]) -> torch.Tensor:
        """All of the memory, in one dimension."""
        first: torch.Tensor = outputs[self.members[0]]
        return first.as_strided((self.extent,), (1,), self.start)

    def view(self, copy: torch.Tensor, outputs: Sequence[Any], returned: list[Any]) -> None:
        """Put views of a copy of the memory in the places of the outputs."""
        for i in self.members:
            offset = outputs[i].storage_offset() - self.start + copy.storage_offset()
            returned[i] = copy.as_strided(outputs[i].size(), outputs[i].stride(), offset)


@dataclass(frozen=True, slots=True)
class Loan:
    """A key's outputs, and copies of them in memory that stays.

    Attributes:
        outputs: the graph's own, as they were.
        returned: likewise, with copies in place of those that are copied.
        targets: the copies.
        sources: what they are of.
        copies: a short way to fill them; None if there is none.
    """

    outputs: tuple[Any, ...]
    returned: list[Any]
    targets: list[torch.Tensor]
    sources: list[torch.Tensor]
    copies: object | None

    def filled(self, outputs: Sequence[Any]) -> list[Any] | None:
        """What to hand out in a step, until the next one.

        Args:
            outputs: of the step.

        Returns:
            None if these are other tensors than before, as where they are made anew.
        """
        for output, before in zip(outputs, self.outputs, strict=True):
            if output is not before:
                return None
        if self.targets and (self.copies is None or not shortcuts.copy(self.copies)):
            copy_all(self.targets, self.sources)
        return self.returned


@dataclass(frozen=True, slots=True)
class Giving:
    """How the outputs of a key become the caller's.

    Attributes:
        hows: of each output: a clone, a view of an input, or as it is (None).
        together: those that share memory, which are None above.
    """

    hows: tuple[_Clone | _View | None, ...]
    together: tuple[_Together, ...]

    def give(self, outputs: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The caller's outputs.

        Args:
            outputs: in the graph's memory.
            args: what the caller passed.
        """
        returned = []
        for output, how in zip(outputs, self.hows, strict=True):
            if how is None:
                returned.append(output)
            elif isinstance(how, _Clone):
                returned.append(how(output))
            else:
                owner = args[how.position]
                offset = owner.storage_offset() + how.offset
                returned.append(owner.as_strided(output.size(), output.stride(), offset))
        for together in self.together:
            together.view(together.whole(outputs).clone(), outputs, returned)
        return returned


class OutputReturns:
    """Turns a graph's outputs into the caller's.

    Args:
        clone: whether outputs are copied.
    """

    def __init__(self, *, clone: bool) -> None:
        self._clone = clone
        self._givings: dict[Hashable, Giving] = {}
        self._memory: dict[Hashable, dict[int, SharedBuffer]] = {}

    def give(
        self,
        key: Hashable,
        outputs: Sequence[Any],
        static_args: Sequence[Any],
        args: Sequence[Any],
    ) -> list[Any]:
        """The caller's outputs.

        Args:
            key: whose graphs made the outputs.
            outputs: in the graph's memory.
            static_args: what the graph ran on.
            args: what the caller passed.
        """
        return self._giving(key, outputs, static_args).give(outputs, args)

    def settled(self, key: Hashable) -> Giving | None:
        """How a key's outputs are given from the first time on; None before."""
        return self._givings.get(key)

    def lend(
        self,
        key: Hashable,
        outputs: Sequence[Any],
        args: Sequence[Any],
        borrower: Hashable,
        growth: int,
        *,
        as_they_are: Container[int] = (),
    ) -> Loan:
        """Memory for the outputs of steps whose caller is done with them by its next one.

        Args:
            key: whose graphs made the outputs.
            outputs: in the graph's memory.
            args: what the caller passed, and what the graph ran on.
            borrower: whose keys share memory.
            growth: how many times larger outputs may be at other keys.
            as_they_are: positions of outputs that lie in memory of the borrower.
        """
        giving = self._giving(key, outputs, args)
        memory = self._memory.setdefault(borrower, {})
        returned = list(outputs)
        targets, sources = [], []

        def target_of(index: int, source: torch.Tensor) -> torch.Tensor:
            shared = memory.setdefault(index, SharedBuffer())
            target = shared.like(source, growth)
            # Elements in one place cannot be written one by one, their memory can.
            share = 0 in source.stride()
            targets.append(memory_of(target) if share else target)
            sources.append(memory_of(source) if share else source)
            return target

        for index, how in enumerate(giving.hows):
            if isinstance(how, _Clone) and index not in as_they_are:
                returned[index] = target_of(index, outputs[index])
        for together in giving.together:
            if all(index in as_they_are for index in together.members):
                continue
            copy = target_of(together.members[0], together.whole(outputs))
            together.view(copy, outputs, returned)
        copies = shortcuts.copies_of(list(zip(targets, sources, strict=True)))
        return Loan(tuple(outputs), returned, targets, sources, copies)

    def forget(self, borrower: Hashable) -> None:
        """Let go of a borrower's memory; none of its keys comes again."""
        self._memory.pop(borrower, None)

    def reset(self) -> None:
        """Forget every key."""
        self._givings.clear()
        self._memory.clear()

    def _giving(self, key: Hashable, outputs: Sequence[Any], static_args: Sequence[Any]) -> Giving:
        giving = self._givings.get(key)
        if giving is None:
            giving = self._givings[key] = self._settle(outputs, static_args)
        return giving

    def _settle(self, outputs: Sequence[Any], static_args: Sequence[Any]) -> Giving:
        owners = owners_of_memory(static_args)
        hows: list[_Clone | _View | None] = []
        groups: dict[int, list[int]] = {}
        for index, output in enumerate(outputs):
            hows.append(None)
            if not isinstance(output, torch.Tensor) or not output.numel():
                continue
            storage = output.untyped_storage().data_ptr()
            owner = owners.get(storage)
            if owner is not None and static_args[owner].dtype == output.dtype:
                offset = output.storage_offset() - static_args[owner].storage_offset()
                hows[index] = _View(owner, offset)
            elif self._clone:
                hows[index] = _Clone()
                groups.setdefault(storage, []).append(index)
        together = []
        for members in groups.values():
            is_dense = len(members) == 1 and 0 not in outputs[members[0]].stride()
            if not is_dense and len({outputs[i].dtype for i in members}) == 1:
                together.append(_span(members, outputs))
                for index in members:
                    hows[index] = None
        return Giving(tuple(hows), tuple(together))


def _span(members: Sequence[int], outputs: Sequence[Any]) -> _Together:
    start = min(outputs[i].storage_offset() for i in members)
    end = max(outputs[i].storage_offset() + memory_of(outputs[i]).numel() for i in members)
    return _Together(tuple(members), start, end - start)
