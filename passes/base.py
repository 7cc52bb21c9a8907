"""What a graph pass is. One signature for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch.fx


class GraphPass(Protocol):
    """A rewrite of one FX graph in place.

    One that cannot be had everywhere says in an attribute `hindrance` why it left places alone.
    """

    @property
    def name(self) -> str:
        """The pass's name in logs and reports."""

    def __call__(self, graph: torch.fx.Graph) -> int:
        """Rewrite `graph` in place; return the number of places changed."""

    def uuid(self) -> str:
        """Changes whenever the rewrite changes, so that cached artefacts are not reused."""
