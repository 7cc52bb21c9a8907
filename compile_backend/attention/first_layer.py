"""Which layer of a step comes first, for what is computed once a step on the device.

Done in the first layer's `forward`, such work is part of a graph like the layer itself, so that
nothing has to be renewed before a replay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compile_backend.attention.kv_cache import LayerCache


class FirstLayer:
    """Tells the layer that was asked about first from all others, whenever it runs again."""

    __slots__ = ("_address",)

    def __init__(self) -> None:
        self._address: int | None = None

    def is_of(self, cache: LayerCache) -> bool:
        """Whether the layer with this cache is the first.

        Args:
            cache: of the layer; no two layers share one.
        """
        address = cache.keys.data_ptr()
        if self._address is None:
            self._address = address
        return self._address == address
