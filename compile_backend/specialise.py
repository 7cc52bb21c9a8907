"""Which code of a piece a call takes, by its number of tokens.

Every piece is compiled for all sizes. One whose token dimension is free may be compiled again, for
one size or for a range of them. This file refuses to know options and compilers: it says where a
piece sees its number of tokens, and picks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compile_backend.torch_internals.narrowing import (
    dimension_of,
    has_symbol,
    why_not_narrowed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch.fx

    from compile_backend.sizes import TokenRange

    Call = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class TokenDimension:
    """Where a piece can see how many tokens there are.

    Attributes:
        symbol: the free size that the number of tokens is a multiple of.
        position: of the input that tells.
        axis: its dimension; None for an input that is an integer.
        scale: what the symbol is multiplied by there.
        num_tokens: what it is multiplied by to give the number of tokens.
    """

    symbol: Any
    position: int
    axis: int | None
    scale: int
    num_tokens: int

    def __str__(self) -> str:
        place = "" if self.axis is None else f", dimension {self.axis}"
        return f"{self.scale} times input {self.position}{place}"

    def values(self, tokens: TokenRange) -> tuple[int, int]:
        """The lowest and the highest value of the symbol for some numbers of tokens."""
        return tokens.first // self.num_tokens, tokens.last // self.num_tokens

    def reading(self, choice: _Choice) -> Call:
        """What calls the code that `choice` has for the size of each call."""
        position, axis = self.position, self.axis
        if axis is None:
            return lambda inputs: choice[inputs[position]](inputs)
        return lambda inputs: choice[inputs[position].size(axis)](inputs)


@dataclass(frozen=True, slots=True)
class Specialisations:
    """For which numbers of tokens the pieces of one graph are compiled by themselves.

    Attributes:
        ranges: of tokens, listed sizes first; only those that can occur in this graph.
        symbol: the free size that the number of tokens is a multiple of; None without ranges.
        factor: the multiple.
        is_listed_size: whether the whole graph is for one number of tokens, which is listed.
    """

    ranges: tuple[TokenRange, ...] = ()
    symbol: Any = None
    factor: int = 1
    is_listed_size: bool = False

    def dimension_in(self, module: torch.fx.GraphModule) -> TokenDimension | str | None:
        """The token dimension of a piece, which is compiled by its size.

        Returns:
            None where the piece does not depend on the number of tokens, and a reason where it
            does but cannot be compiled for some of them.
        """
        if not self.ranges:
            return None
        inputs = [
            node.meta.get("example_value")
            for node in module.graph.nodes
            if node.op == "placeholder"
        ]
        if not has_symbol(inputs, self.symbol):
            return None
        found = dimension_of(inputs, self.symbol)
        if found is None:
            return "has its number of tokens in no dimension of its own"
        return why_not_narrowed(module) or TokenDimension(self.symbol, *found, self.factor)


class _Choice(dict[int, "Call"]):
    """The code to call, by the size of the token dimension; found out once for each size."""

    def __init__(self, general: Call, special: Sequence[tuple[int, int, Call]]) -> None:
        super().__init__()
        self._general = general
        self._special = special

    def __missing__(self, size: int) -> Call:
        fitting = (call for first, last, call in self._special if first <= size <= last)
        found = self[size] = next(fitting, self._general)
        return found


def choosing(
    dimension: TokenDimension, general: Call, special: Iterable[tuple[int, int, Call]]
) -> Call:
    """One callable from several that do the same for different sizes.

    Args:
        dimension: tells them apart.
        general: for all other sizes.
        special: the lowest and highest value of the symbol and the code for these, the first that
            fits is taken.
    """
    scale = dimension.scale
    scaled = [(first * scale, last * scale, call) for first, last, call in special]
    return dimension.reading(_Choice(general, scaled)) if scaled else general
