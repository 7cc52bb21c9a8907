"""One partition of Inductor's in PIECEWISE steps: warmed up, captured, replayed.

Inductor's code hands on tensors as it likes, so every address is looked at before a replay: what
was made anew is copied to memory that stays, and what was to stay but did not is captured again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from compile_backend.boundary import SharedBuffer
from compile_backend.context import current_forward_context
from compile_backend.errors import CaptureError
from compile_backend.layout import memory_of
from compile_backend.partition_calls import PartitionCall, given
from compile_backend.partition_plan import CapturedPartition
from compile_backend.torch_internals.graphs import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compile_backend.batch import BatchDescriptor
    from compile_backend.partition_memory import StepMemory
    from compile_backend.partition_origins import Origin, Origins
    from compile_backend.wrapper import CUDAGraphWrapper


@dataclass(slots=True)
class _Key:
    """What is known of a partition at one key.

    Attributes:
        origins: of each argument; None for what is no tensor, or is made anew in each step.
        targets: memory that stays, for the positions of those that are made anew.
        others: what is no tensor, by position.
        last_needed: for each tensor returned, the last partition before which it must stay.
        captured_at: positions and addresses of arguments that are not copied; None without a
            graph.
    """

    origins: list[Origin | None]
    targets: dict[int, torch.Tensor]
    others: dict[int, Any]
    last_needed: dict[int, int] = field(default_factory=dict)
    captured_at: list[tuple[int, int]] | None = None

    def moved(self, leaves: Sequence[Any]) -> list[int]:
        """Positions of arguments that are not what the graph was captured with."""
        assert self.captured_at is not None
        moved = [p for p, address in self.captured_at if leaves[p].data_ptr() != address]
        return moved + [p for p, value in self.others.items() if leaves[p] != value]

    def with_copies(self, leaves: Sequence[Any]) -> list[Any]:
        """The arguments, with copies of those that are made anew."""
        static = list(leaves)
        for position, target in self.targets.items():
            leaf = leaves[position]
            assert leaf.shape == target.shape, "shapes are those of the key"
            if 0 in target.stride():
                memory_of(target).copy_(memory_of(leaf))
            else:
                target.copy_(leaf)
            static[position] = target
        return static


class PartitionRunner:
    """Runs a partition in PIECEWISE steps: by warm-up, capture or replay.

    Args:
        index: of the partition in its graph.
        called: the partition.
        wrapper: around it.
        memory: of the graph's steps.
    """

    def __init__(
        self, index: int, called: PartitionCall, wrapper: CUDAGraphWrapper, memory: StepMemory
    ) -> None:
        self.index = index
        self._called = called
        self._wrapper = wrapper
        self._memory = memory
        self._keys: dict[BatchDescriptor, _Key] = {}
        self._uncapturable: set[BatchDescriptor] = set()
        self._own: dict[int, SharedBuffer] = {}

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run the partition on arguments as Inductor's code hands them over."""
        key = running_key()
        leaves = self._called.leaves(args)
        args.clear()
        self._memory.look(self.index)
        held = self._keys.get(key)
        if held is not None and held.captured_at is not None:
            moved = held.moved(leaves)
            if not moved:
                static = held.with_copies(leaves)
                return given(self._wrapper(*static), static)
            self.drop(key)
            for position in moved:
                held.origins[position] = None
                if position in held.others:
                    held.others[position] = leaves[position]
        if held is not None and self._wrapper.captures_next(key):
            return self._capture(key, held, leaves)
        return self._warm_up(key, leaves)

    def capture_ahead(self, key: BatchDescriptor, made: dict[int | None, list[Any]]) -> None:
        """Capture the partition of a warmed-up key, and run nothing.

        Args:
            key: of the step.
            made: the tensors of the inputs, and what earlier partitions returned; its own are
                added.

        Raises:
            CaptureError: it cannot be captured.
        """
        held = self._keys.get(key)
        if held is None:
            return
        if self._wrapper.failure(key):
            raise CaptureError(
                f"a partition before cannot be captured: {self._wrapper.failure(key)}"
            )
        static = [
            held.others.get(position, held.targets.get(position))
            if origin is None
            else origin.tensor(made)
            for position, origin in enumerate(held.origins)
        ]
        if any(static[p] is None for p in range(len(static)) if p not in held.others):
            raise CaptureError("a partition before was not captured")
        if held.captured_at is None:
            outputs = self._wrapper.capture(key, static)
            self._note(held, static)
        else:
            outputs = self._wrapper.outputs(key)
        made[self.index] = tree_leaves(given(outputs, static))

    def let_go(
        self, key: BatchDescriptor, made: dict[int | None, list[Any]], started: int
    ) -> None:
        """Drop what the partition returned and no partition after `started` needs."""
        held = self._keys.get(key)
        if held is not None and self.index in made:
            for position, last in held.last_needed.items():
                if last <= started:
                    made[self.index][position] = None

    def learn(self, key: BatchDescriptor, origins: Origins) -> None:
        """Keep until when a step that warmed up needed what the partition returned."""
        held = self._keys.get(key)
        needed = origins.needed_until(self.index)
        if held is not None and needed:
            held.last_needed = needed

    def is_captured(self, key: BatchDescriptor) -> bool:
        """Whether the partition has a graph."""
        held = self._keys.get(key)
        return held is not None and held.captured_at is not None

    def is_ready(self, key: BatchDescriptor) -> bool:
        """Whether the partition has its graph, or will never have one."""
        return key in self._uncapturable or (
            self.is_captured(key) and self._wrapper.graph_to_replay(key) is not None
        )

    def captured(self, key: BatchDescriptor) -> CapturedPartition | None:
        """The partition's graph for a planned step; None without one."""
        held, graph = self._keys.get(key), self._wrapper.graph_to_replay(key)
        if held is None or held.captured_at is None or graph is None:
            return None
        return CapturedPartition(
            graph.replay,
            graph.outputs,
            self._called.places(len(held.origins)),
            dict(held.targets),
            dict(held.others),
            dict(held.captured_at),
            self._wrapper.counts(key),
        )

    def drop(self, key: BatchDescriptor) -> None:
        """Drop the graph of one key; the next step captures it again."""
        self._wrapper.drop(key)
        held = self._keys.get(key)
        if held is not None:
            held.captured_at = None

    def forget(self, key: BatchDescriptor) -> None:
        """Drop all that is known of one key."""
        self._wrapper.forget(key)
        self._keys.pop(key, None)
        self._uncapturable.discard(key)

    def reset(self) -> None:
        """Drop every graph and all static memory."""
        self._wrapper.reset()
        self._memory.forget_slots()
        self._keys.clear()
        self._uncapturable.clear()
        self._own.clear()

    def _warm_up(self, key: BatchDescriptor, leaves: list[Any]) -> Sequence[Any]:
        device = self._memory.device
        if any(
            isinstance(leaf, (tuple, list))
            or (isinstance(leaf, torch.Tensor) and leaf.device != device)
            for leaf in leaves
        ):
            self._uncapturable.add(key)
            return given(self._called(*leaves), leaves)
        origins = self._memory.origins()
        origins.look(self.index)
        found = [origins.of(leaf) for leaf in leaves]
        returned = given(self._wrapper(*leaves), leaves)
        if self._wrapper.failure(key) is not None:
            self._keys.pop(key, None)
            return returned
        tensors = tree_leaves(returned)
        self._keys[key] = _Key(
            origins=found,
            targets=self._targets(key, leaves, found, tensors),
            others={
                position: leaf
                for position, leaf in enumerate(leaves)
                if not isinstance(leaf, torch.Tensor)
            },
        )
        origins.add(self.index, tensors)
        return returned

    def _targets(
        self,
        key: BatchDescriptor,
        leaves: Sequence[Any],
        origins: Sequence[Origin | None],
        returned: Sequence[Any],
    ) -> dict[int, torch.Tensor]:
        """Memory that stays for the tensors that are made anew in each step."""
        escaping = {
            item.untyped_storage().data_ptr()
            for item in returned
            if isinstance(item, torch.Tensor)
        }
        targets: dict[int, torch.Tensor] = {}
        num_slots = 0
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor) or origins[position] is not None:
                continue
            if leaf.untyped_storage().data_ptr() in escaping:
                targets[position] = self._own_memory(key, position, leaf)
            else:
                targets[position] = self._memory.slot(num_slots).like(
                    leaf, self._memory.growth(key)
                )
                num_slots += 1
        return targets

    def _own_memory(self, key: BatchDescriptor, position: int, leaf: torch.Tensor) -> torch.Tensor:
        buffer = self._own.setdefault(position, SharedBuffer())
        return buffer.like(leaf, self._memory.growth(key))

    def _capture(self, key: BatchDescriptor, held: _Key, leaves: list[Any]) -> Sequence[Any]:
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor) or position in held.targets:
                continue
            origin = held.origins[position]
            if origin is None or not self._memory.stays(key, origin):
                held.origins[position] = None
                held.targets[position] = self._own_memory(key, position, leaf)
        static = held.with_copies(leaves)
        outputs = self._wrapper(*static)
        if self._wrapper.failure(key) is None:
            self._note(held, static)
        return given(outputs, static)

    def _note(self, held: _Key, static: Sequence[Any]) -> None:
        """Keep where the arguments were that the graph was captured with."""
        held.captured_at = [
            (position, leaf.data_ptr())
            for position, leaf in enumerate(static)
            if isinstance(leaf, torch.Tensor) and position not in held.targets
        ]


def running_key() -> BatchDescriptor:
    """The key of the PIECEWISE step that runs."""
    context = current_forward_context()
    assert context is not None, "a PIECEWISE step has a context"
    assert context.batch_descriptor is not None, "a PIECEWISE step runs under its key"
    return context.batch_descriptor
