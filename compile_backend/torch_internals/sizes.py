"""Private names around symbolic sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.fx

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def free_symbols_of(value: Any) -> frozenset[Any]:
    """The sympy symbols in a size, or in the sizes of a tensor."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    return frozenset(free_symbols(value))


def data_dependent_symbols(value: Any) -> frozenset[Any]:
    """The symbols in a size, or in those of a tensor, that no guard may look at."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return frozenset(free_unbacked_symbols(value))


def surely_differ(one: Any, other: Any) -> bool:
    """Whether two sizes are not equal in every call, as far as they can be told at all.

    What the data decides cannot. No guard is made.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if data_dependent_symbols(one) or data_dependent_symbols(other):
        return False
    return not statically_known_true(one == other)


def sizes_are_allowed(shape_env: Any, sizes: Mapping[Any, int]) -> bool:
    """Whether code compiled under `shape_env` also serves these sizes.

    Args:
        shape_env: holds every assumption that was made on the way.
        sizes: a number for each sympy symbol.
    """
    for symbol, size in sizes.items():
        bounds = shape_env.var_to_range.get(symbol)
        if bounds is not None and not bounds.lower <= size <= bounds.upper:
            return False
    return not any(guard.expr.xreplace(dict(sizes)) == False for guard in shape_env.guards)  # noqa: E712


def shape_env_of(values: Iterable[Any]) -> Any | None:
    """The `ShapeEnv` in which the sizes of a graph's values live; None where all are fixed."""
    for value in values:
        if isinstance(value, torch.SymInt):
            return value.node.shape_env
    return None


def with_dynamic_sizes(tensor: torch.Tensor, axes: Iterable[int]) -> torch.Tensor:
    """An alias for which Dynamo compiles with these sizes left open, save those of 0 and 1."""
    import torch._dynamo

    alias = tensor.detach()
    torch._dynamo.maybe_mark_dynamic(alias, list(axes))
    return alias
