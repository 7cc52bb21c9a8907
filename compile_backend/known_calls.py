"""Plain calls that were replayed before, found by their shapes: nothing is chosen anew for them.

Choosing the mode and key of a call and looking up all that belongs to them takes the host as long
as the replay. It follows from few shapes, so it is kept from one call to the next like it. This
file refuses to know how anything is chosen, loaded or replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from compile_backend.batch import BatchDescriptor
    from compile_backend.graph_engine import StaticGraph
    from compile_backend.inputs import ShortWay
    from compile_backend.outputs import Giving
    from compile_backend.stats import KeyStats

# Whoever passes something new in every call must not fill memory.
_MOST_KNOWN = 4096


@dataclass(frozen=True, slots=True)
class KnownCall:
    """How a call runs at FULL.

    Attributes:
        key: of its graph.
        graph: that holds all of the call.
        stats: where to count.
        way: to fill the graph's inputs, in a hurry; None where there is none.
        giving: what callers get of its outputs.
    """

    key: BatchDescriptor
    graph: StaticGraph
    stats: KeyStats
    way: ShortWay | None
    giving: Giving


class KnownCalls:
    """The calls of one compiled graph, by what their keys follow from."""

    def __init__(self) -> None:
        self._known: dict[Hashable, KnownCall] = {}

    def get(self, shapes: Hashable) -> KnownCall | None:
        """How a call of these shapes runs; None if that is to be found out."""
        return self._known.get(shapes)

    def learn(self, shapes: Hashable, call: KnownCall) -> None:
        """Take note of a call that just ran as `call`."""
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[shapes] = call

    def forget(self) -> None:
        """Know nothing any more, since graphs are dropped."""
        self._known.clear()
