"""Keys and values are stored by the piece that makes them, where a graph may hold that.

Attention outside of a graph is a few launches in each layer. The first of them depends on nothing
but slots, which lie in a runner's own memory: so the graph of the piece before attention ends with
it. Nothing comes in between, and nothing else reads the cache there. Kernels and caches are known
to `attention` only, and graphs to their wrappers.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compile_backend.attention.backend import AttentionBackend
from compile_backend.attention.ops import attend, found_layer, store_and_attend
from compile_backend.runner_graphs import running_key
from compile_backend.support import AttentionCGSupport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from compile_backend.batch import BatchDescriptor
    from compile_backend.runner_graphs import RunnerGraphs


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a key's graph stores; it writes there in every replay.

    Attributes:
        slots: that it reads.
        layer: the identity of the layer, with its cache and backend; the runner keeps it alive.
    """

    slots: weakref.ref[torch.Tensor]
    layer: int


class StoreAhead:
    """Moves the store of one attention layer into the piece before.

    Args:
        layer_name: of the layer.
        positions: of its keys and values among the results of the piece.
        of_runners: who captures; only keys of runners have slots at addresses that stay.
    """

    def __init__(
        self, layer_name: str, positions: tuple[int, int], of_runners: RunnerGraphs
    ) -> None:
        self._layer_name = layer_name
        self._positions = positions
        self._of_runners = of_runners
        self._stored: dict[BatchDescriptor, _Stored] = {}

    def after(self, call: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        """The piece, which then stores where that may be a part of its graph."""

        def run(*args: Any) -> Sequence[Any]:
            results = call(*args)
            key = running_key()
            if key is not None:
                self._store(key, results)
            return results

        return run

    def attend_only(self, key: BatchDescriptor) -> Callable[..., None] | None:
        """Attention for steps in which the graph before has stored; None where it does not.

        It takes the arguments of the op, and stores by itself if the step has other slots, or it
        is another layer, as one with another cache or backend.
        """
        stored = self._stored.get(key)
        if stored is None:
            return None
        slots, stored_layer = stored.slots, stored.layer

        def run(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            output: torch.Tensor,
            layer_name: str,
        ) -> None:
            step, layer = found_layer(layer_name)
            if (
                slots() is step.metadata.slot_mapping
                and stored_layer == id(layer)
                and layer.backend.stores_apart
            ):
                attend(step, layer, query, output)
            else:
                store_and_attend(step, layer, query, key, value, output)

        return run

    def _store(self, key: BatchDescriptor, results: Sequence[Any]) -> None:
        self._stored.pop(key, None)
        step, layer = found_layer(self._layer_name)
        backend, slots = layer.backend, step.metadata.slot_mapping
        runner = self._of_runners.of(key)
        if runner is None or not runner.holds(slots):  # elsewhere in the next step
            return
        if not backend.stores_apart or not _may_be_captured(backend):
            return
        rows, values = (results[position] for position in self._positions)
        backend.store(rows, values, layer.cache, step.metadata)
        runner.kept[id(self), key] = layer  # in place of that whose cache its last graph wrote to
        self._stored[key] = _Stored(weakref.ref(slots), id(layer))


def _may_be_captured(backend: AttentionBackend) -> bool:
    """Whether its store may: that of the package, and others where the whole of it may be."""
    is_ours = getattr(backend.store, "__func__", None) is AttentionBackend.store
    return is_ours or backend.support is not AttentionCGSupport.NEVER
