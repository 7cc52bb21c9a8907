"""Private names around a graph that is compiled for some of its sizes only.

The sizes of a graph belong to Dynamo: what is assumed of them while it is compiled becomes a guard
of the frame. So a graph that is compiled for one size, or for a range, is given inputs of its own,
whose sizes live in an environment of their own. What is known of Dynamo's sizes is known there,
too; nothing comes back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sympy  # type: ignore[import-untyped]
import torch
import torch.fx

from compile_backend.torch_internals.sizes import data_dependent_symbols, free_symbols_of
from compile_backend.torch_internals.stored_code import Sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


class CannotOccurError(Exception):
    """No call has such sizes, by all that is known of them."""


def symbol_and_factor(size: Any) -> tuple[Any, int] | None:
    """The one symbol of which a size is a multiple, and the multiple; None for any other size.

    No guard is made.
    """
    if not isinstance(size, torch.SymInt):
        return None
    expression = size.node.expr
    if len(expression.free_symbols) != 1:
        return None
    (symbol,) = expression.free_symbols
    factor = expression / symbol
    return (symbol, int(factor)) if factor.is_Integer and factor > 0 else None


def example_of(size: Any) -> int | None:
    """What a size was in the call that was traced; None where only the data tells."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    if data_dependent_symbols(size):
        return None
    hint = size.node.hint
    return None if hint is None else int(hint)


def clipped(size: torch.SymInt, symbol: Any, first: int, last: int) -> tuple[int, int] | None:
    """The values from `first` to `last` that a symbol can have; None if it can have none.

    Args:
        size: any size of the graph.
        symbol: of its environment.
        first: the lowest value asked for.
        last: the highest.
    """
    known = size.node.shape_env.var_to_range[symbol]
    first = int(known.lower) if known.lower > first else first  # ends may be infinite
    last = int(known.upper) if known.upper < last else last
    return (first, last) if first <= last else None


def why_not_narrowed(graph_module: torch.fx.GraphModule) -> str | None:
    """Why a graph cannot be given inputs of other sizes; None where it can."""
    memories: set[int] = set()
    for node in graph_module.graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, (torch.Tensor, torch.SymInt)) and data_dependent_symbols(value):
            return f"has a size that only the data tells ({node.name})"
        if _holds_symbols(node.args) or _holds_symbols(node.kwargs):
            return f"is told a size by its symbol ({node.name})"
        if node.op != "placeholder":
            continue
        if isinstance(value, torch.Tensor):
            problem = _why_not_remade(value)
            if problem is None:
                memory = int(value.untyped_storage()._cdata)
                problem = "shares memory with another input" if memory in memories else None
                memories.add(memory)
            if problem is not None:
                return f"takes a tensor that {problem} ({node.name})"
        elif not isinstance(value, (int, torch.SymInt)):
            return f"takes a {type(value).__name__} ({node.name})"
    return None


def _holds_symbols(arguments: Any) -> bool:
    found: list[Any] = []
    torch.fx.node.map_aggregate(
        arguments, lambda item: found.append(item) if isinstance(item, torch.SymInt) else None
    )
    return bool(found)


def _why_not_remade(value: torch.Tensor) -> str | None:
    from torch._subclasses.fake_tensor import FakeTensor

    if type(value) is not FakeTensor:
        return f"is a {type(value).__name__}"
    if value.layout is not torch.strided or value.is_conj() or value.is_neg():
        return "is not laid out by strides alone"
    if getattr(value, "item_memo", None) is not None:
        return "stands for a Python number"
    return None


@dataclass(frozen=True, slots=True)
class NarrowedInputs:
    """Inputs of a graph for some of its sizes.

    Attributes:
        values: fake tensors, `SymInt`s and integers.
        fake_mode: of the tensors.
        first: the lowest value of the symbol that was narrowed.
        last: the highest.
    """

    values: list[Any]
    fake_mode: Any
    first: int
    last: int
    _num_known: int

    def assumed(self) -> list[str]:
        """What was assumed of the sizes since, and does not follow from what was known.

        Compilers make symbols of integers among the inputs, and then assume that they are what
        they are here: they are so in every call.
        """
        from torch._dynamo.source import ConstantSource

        environment = self.fake_mode.shape_env
        integers = {int(value) for value in self.values if isinstance(value, int)}
        constant = {
            symbol: value
            for symbol, value in environment.backed_var_to_val.items()
            if int(value) in integers
            and isinstance(environment.var_to_sources[symbol][0], ConstantSource)
        }
        guards = [guard.expr for guard in environment.guards[self._num_known :]]
        return [str(guard) for guard in guards if guard.xreplace(constant) != sympy.true]


def narrowed_inputs(
    inputs: Sequence[Any], fake_mode: Any, symbol: Any, first: int, last: int
) -> NarrowedInputs:
    """Inputs for which a symbol has one value, or a range of them.

    Args:
        inputs: fake tensors and `SymInt`s.
        fake_mode: of the inputs.
        symbol: that is narrowed; all others stay as free as they are.
        first: its lowest value.
        last: its highest value.

    Raises:
        CannotOccurError: the symbol has no such value.
    """
    bounds = clipped(
        next(item for item in _all_sizes(inputs) if isinstance(item, torch.SymInt)),
        symbol,
        first,
        last,
    )
    if bounds is None:
        raise CannotOccurError
    first, last = bounds
    sizes = Sizes(inputs, fake_mode)
    symbols = [symint.node.expr for symint in sizes.symints]
    known = sizes.assumptions()
    traced_with = sizes.symints[symbols.index(symbol)].node.hint
    # Inductor tunes for its example; the largest size has most to gain.
    examples = dict.fromkeys(n for n in (last, traced_with, first) if first <= n <= last)
    for example in examples:
        environment, values = _environment(sizes, symbols, {symbol: (first, last, example)})
        arguments = [values[each] for each in symbols]
        if known and not environment.evaluate_guards_expression(known, arguments):
            continue
        num_known = len(environment.guards)
        mode = _fake_mode(environment, fake_mode)
        renewed = _renewing(environment, values)
        return NarrowedInputs(
            [_remade(value, renewed, mode) for value in inputs], mode, first, last, num_known
        )
    raise CannotOccurError


def _all_sizes(inputs: Iterable[Any]) -> Iterable[Any]:
    for value in inputs:
        yield from (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)


def _fake_mode(environment: Any, like: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(shape_env=environment, allow_non_fake_inputs=like.allow_non_fake_inputs)


def _environment(
    sizes: Sizes, symbols: Sequence[Any], narrowed: Mapping[Any, tuple[int, int, int]]
) -> tuple[Any, dict[Any, Any]]:
    """A new environment, and what each symbol is in there: a `SymInt`, or an integer."""
    from torch._dynamo.source import LocalSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    environment = ShapeEnv(duck_shape=False)
    values: dict[Any, Any] = {}
    for number, (symbol, symint) in enumerate(zip(symbols, sizes.symints, strict=True)):
        known = symint.node.shape_env.var_to_range[symbol]
        lowest, highest, example = narrowed.get(
            symbol, (known.lower, known.upper, symint.node.hint)
        )
        if lowest == highest:
            values[symbol] = int(lowest)
            continue
        own = environment.create_symbol(
            example,
            LocalSource(f"size_{number}"),
            dynamic_dim=DimDynamic.DYNAMIC,
            positive=symbol.is_positive,
            do_not_specialize_zero_one=True,
        )
        environment.constrain_symbol_range(own, compiler_min=lowest, compiler_max=highest)
        values[symbol] = environment.create_symintnode(own, hint=example)
    return environment, values


def _renewing(environment: Any, values: Mapping[Any, Any]) -> Callable[[Any], Any]:
    expressions = {
        symbol: value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(value)
        for symbol, value in values.items()
    }

    def renewed(size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        expression = size.node.expr.xreplace(expressions)
        if not expression.free_symbols:
            return int(expression)
        return environment.create_symintnode(expression, hint=None)

    return renewed


def _remade(value: Any, renewed: Callable[[Any], Any], fake_mode: Any) -> Any:
    """An input as it is, but for its sizes."""
    if not isinstance(value, torch.Tensor):
        return renewed(value)
    size = [renewed(n) for n in value.shape]
    stride = [renewed(n) for n in value.stride()]
    offset = renewed(value.storage_offset())
    kind: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
    with fake_mode, torch.inference_mode(value.is_inference()), torch.no_grad():
        if isinstance(offset, int) and offset == 0:
            made = torch.empty_strided(size, stride, **kind)
        else:
            extent = sum(((n - 1) * step for n, step in zip(size, stride, strict=True)), 1)
            made = torch.empty(offset + extent, **kind).as_strided(size, stride, offset)
    if value.requires_grad:
        made.requires_grad_()
    for name in ("_dynamo_static_input_type", "_is_param"):
        if hasattr(value, name):
            setattr(made, name, getattr(value, name))
    return made


def with_inputs(graph_module: torch.fx.GraphModule, inputs: Iterable[Any]) -> torch.fx.GraphModule:
    """The same graph, its values unknown but for its inputs; it is written to."""
    left = iter(inputs)
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            node.meta["example_value"] = next(left)
        else:
            node.meta.pop("example_value", None)
    return graph_module


def dimension_of(inputs: Sequence[Any], symbol: Any) -> tuple[int, int | None, int] | None:
    """Where a symbol can be read off the inputs of a graph; None where it cannot.

    Returns:
        The position of the input, the dimension of it (None for an integer), and the factor by
        which the symbol is multiplied there.
    """
    for position, value in enumerate(inputs):
        found = symbol_and_factor(value)
        if found is not None and found[0] == symbol:
            return position, None, found[1]
    for position, value in enumerate(inputs):
        for axis, size in enumerate(value.shape) if isinstance(value, torch.Tensor) else ():
            found = symbol_and_factor(size)
            if found is not None and found[0] == symbol:
                return position, axis, found[1]
    return None


def unbound_symbols(inputs: Iterable[Any]) -> frozenset[Any]:
    """The symbols in the sizes of a graph's inputs that are no such size by themselves."""
    values = [value for value in inputs if isinstance(value, (torch.Tensor, torch.SymInt))]
    found: set[Any] = set()
    for value in values:
        found |= free_symbols_of(value)
    sizes = [
        size
        for value in values
        for size in (value.shape if isinstance(value, torch.Tensor) else (value,))
    ]
    return frozenset(found - {size.node.expr for size in sizes if isinstance(size, torch.SymInt)})


def is_one_of(size: torch.SymInt, symbols: Iterable[Any]) -> bool:
    """Whether a size is one of these symbols itself."""
    return size.node.expr in symbols


def has_symbol(inputs: Iterable[Any], symbol: Any) -> bool:
    """Whether some size of the inputs depends on a symbol."""
    return any(
        symbol in free_symbols_of(value)
        for value in inputs
        if isinstance(value, (torch.Tensor, torch.SymInt))
    )
