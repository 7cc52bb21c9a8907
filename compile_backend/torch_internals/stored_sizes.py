"""What is known of the symbols in a graph's sizes, as plain data, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from compile_backend.cache import NotStorableError

# What is known of symbols; other things that a ShapeEnv holds are caches, or for messages.
_KNOWN = (
    *("settings", "axioms", "backed_var_to_val", "var_to_val", "var_to_range", "var_to_sources"),
    *("source_to_var", "source_to_symbol", "source_name_to_debug_name", "replacements"),
    *("divisible", "val_to_var", "unique_ids", "size_like", "counter"),
)


@dataclass(frozen=True, slots=True)
class StoredSizes:
    """The symbols of a graph: what a new ShapeEnv must know."""

    known: dict[str, Any]
    guards: list[tuple[Any, bool]]


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What is assumed of the sizes of a graph.

    Attributes:
        guards: expressions that are true.
        replacements: symbols, and what they are equal to.
        ranges: the lowest and highest value of each symbol.
    """

    guards: frozenset[Any]
    replacements: frozenset[tuple[Any, Any]]
    ranges: dict[Any, Any]

    @classmethod
    def of(cls, shape_env: Any) -> Assumptions:
        """What is assumed by now."""
        return cls(
            frozenset(guard.expr for guard in shape_env.guards),
            frozenset(shape_env.replacements.items()),
            dict(shape_env.var_to_range),
        )

    def beyond(self, held: Assumptions) -> list[str]:
        """What does not follow from others that hold, as text."""
        from torch.utils._sympy.value_ranges import bound_sympy

        news = [
            str(guard)
            for guard in self.guards - held.guards
            if not bool(bound_sympy(guard, held.ranges).lower)
        ]
        news += [f"{symbol} = {other}" for symbol, other in self.replacements - held.replacements]
        news += [
            f"{symbol} in {known}"
            for symbol, known in self.ranges.items()
            if not (symbol in held.ranges and held.ranges[symbol].issubset(known))
        ]
        return sorted(news)


def stored_sizes(env: Any) -> StoredSizes:
    """What a ShapeEnv knows now.

    Raises:
        NotStorableError: some sizes are known only once the data is.
    """
    if (
        env._translation_validation_enabled
        or env.unbacked_alloc_order
        or env.deferred_runtime_asserts
    ):
        raise NotStorableError("has sizes that only the data tells")
    known = {name: env.__dict__[name] for name in _KNOWN if name in env.__dict__}
    guards = [(guard.expr, guard.size_oblivious) for guard in env.guards]
    return StoredSizes({name: _plain_copy(value) for name, value in known.items()}, guards)


def _plain_copy(value: Any) -> Any:
    return value.copy() if isinstance(value, (dict, set, list)) else value


def restore_sizes(env: Any, sizes: StoredSizes | None) -> None:
    """Tell a new ShapeEnv what another one knew."""
    from torch._guards import ShapeGuard, SLoc
    from torch.fx.experimental.symbolic_shapes import ValueRangesSLoc
    from torch.utils._traceback import CapturedTraceback

    if sizes is None:
        return
    for name, value in sizes.known.items():
        setattr(env, name, _plain_copy(value))
    nowhere = SLoc(None, None)
    env.guards.extend(ShapeGuard(expr, nowhere, oblivious) for expr, oblivious in sizes.guards)
    for symbol in env.var_to_range:
        env.var_to_range_sloc[symbol] = ValueRangesSLoc(nowhere, nowhere)
        env.var_to_stack[symbol] = CapturedTraceback.extract()  # type: ignore[no-untyped-call]
    for symbol in env.replacements:
        env.replacements_slocs[symbol] = nowhere
    env._update_version_counter()
    if env.replacements and hasattr(env, "_replacements_version_counter"):
        env._replacements_version_counter += 1
