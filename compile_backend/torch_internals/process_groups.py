"""Private names around groups of processes: what a graph exchanges through them, and their end.

NCCL keeps what a captured exchange needs until the graph is gone, and a group that is shut down
waits for that without an end. Compiled code keeps its graphs for as long as the process lives, so
they have to let go first.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

_LOCK = threading.Lock()
_GRAPHS: defaultdict[str, weakref.WeakSet[Exchanging]] = defaultdict(weakref.WeakSet)
_HOOK = "_lets_go_of_graphs"


class Exchanging(Protocol):
    """A graph that holds exchanges."""

    def let_go(self, group: str) -> None:
        """Give up what was captured: the group of this name ends."""


def exchanges(device: torch.device) -> dict[str, int]:
    """How often each group exchanged tensors of a device so far, captured calls among them.

    Args:
        device: of the tensors.

    Returns:
        By name; empty where there are no groups.
    """
    if not dist.is_available() or not dist.is_initialized():
        return {}
    counts = {}
    groups: Any = dist.distributed_c10d
    for group in list(groups._world.pg_map):
        try:
            backend = group._get_backend(device)
            counts[group.group_name] = backend._get_sequence_number_for_group()
        except (AttributeError, RuntimeError):  # it has none for such tensors, or none that counts
            continue
    return counts


def let_go_with_groups(
    graph: Exchanging, before: Mapping[str, int], after: Mapping[str, int]
) -> None:
    """Let a graph go before a group ends that it exchanges through.

    Args:
        graph: is not kept alive.
        before: `exchanges` before its capture.
        after: the same behind it.
    """
    names = [name for name, count in after.items() if before.get(name) != count]
    if names:
        with _LOCK:
            _install()
            for name in names:
                _GRAPHS[name].add(graph)


def _install() -> None:
    """Have every group tell before it shuts down, or is aborted."""
    groups: Any = dist.ProcessGroup
    for name in ("shutdown", "abort"):
        end = getattr(groups, name)
        if not hasattr(end, _HOOK):
            setattr(groups, name, _after_graphs(end))


def _after_graphs(end: Callable[[Any], object]) -> Callable[[Any], object]:
    def end_after_graphs(group: Any) -> object:
        with _LOCK:
            graphs = list(_GRAPHS.pop(group.group_name, ()))
        for graph in graphs:
            graph.let_go(group.group_name)
        return end(group)

    setattr(end_after_graphs, _HOOK, True)
    return end_after_graphs
