"""One attention layer of a model: what computes it, and its cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compile_backend.attention.backend import AttentionBackend
    from compile_backend.attention.kv_cache import LayerCache


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """A layer; layers that compute the same share one backend.

    Attributes:
        name: as the attention op names it.
        backend: runs it.
        cache: its keys and values.
    """

    name: str
    backend: AttentionBackend
    cache: LayerCache
