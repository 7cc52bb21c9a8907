"""`explain`: what the backend would do with a call, without compiling or capturing anything.

Dynamo traces the call and every graph is planned, by the plan that the backend itself builds from.
What is told here is read off plans; this file decides nothing.
"""

from __future__ import annotations

import inspect
import re
import uuid
from collections import Counter
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from compile_backend.batch import BatchDescriptor
from compile_backend.config import CompilationConfig, CUDAGraphMode, unavailable
from compile_backend.inputs import InputClass
from compile_backend.piece_compiler import structural_key
from compile_backend.plain_calls import BatchReader
from compile_backend.plan import plan_graph
from compile_backend.reports import as_text, columns, compact_sizes, facts, key_text, stack

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
    from typing import TypeVar

    from rich.console import RenderableType

    from compile_backend.plan import GraphPlan
    from compile_backend.resolve import Downgrade
    from compile_backend.split import Section
    from compile_backend.support import AttentionCGSupport

    _Key = TypeVar("_Key", bound=Hashable)
    _Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class DistinctPiece:
    """Equal pieces of one graph, which are compiled once.

    Attributes:
        names: of the pieces, in the order they run.
        num_ops: calls of ops in each.
        uncapturable: why no graph can hold them; None where one can.
    """

    names: tuple[str, ...]
    num_ops: int
    uncapturable: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Splitting ops that run together between two pieces, here or in several places.

    Attributes:
        ops: names of the splitting ops, in the order they run.
        names: of the eager sections that run just these.
    """

    ops: tuple[str, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySizes:
    """Keys of one mode that differ in their number of tokens only.

    Attributes:
        mode: FULL or PIECEWISE.
        uniform: whether they are for uniform decode batches only.
        num_tokens: ascending.
    """

    mode: CUDAGraphMode
    uniform: bool
    num_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphExplanation:
    """What one Dynamo graph becomes.

    Attributes:
        pieces: what is compiled.
        cuts: what runs eagerly in between.
        inputs: how many graph inputs there are of each class.
        caller_inputs: how the user's code writes the tensors that are copied in every step.
        support: the level of each splitting op.
        device: where graphs are captured.
        mode_asked: the mode asked for, or the default.
        mode_resolved: the mode that calls run under.
        downgrades: each lowering of the mode, with its reason.
        notes: further reasons.
        keys: which sizes have graphs.
        call: the batch that the explained call is.
        call_mode: what the explained call would run at.
        has_free_sizes: whether one compiled graph serves calls of several sizes.
        num_graphs: CUDA graphs that this compiled graph holds once every key was met.
    """

    pieces: tuple[DistinctPiece, ...]
    cuts: tuple[Cut, ...]
    inputs: Mapping[str, int]
    caller_inputs: tuple[str, ...]
    support: Mapping[str, AttentionCGSupport]
    device: str
    mode_asked: CUDAGraphMode
    mode_resolved: CUDAGraphMode
    downgrades: tuple[Downgrade, ...]
    notes: tuple[str, ...]
    keys: tuple[KeySizes, ...]
    call: BatchDescriptor
    call_mode: CUDAGraphMode
    has_free_sizes: bool
    num_graphs: int

    @property
    def num_pieces(self) -> int:
        """Pieces, equal ones counted each."""
        return sum(len(piece.names) for piece in self.pieces)

    @property
    def num_compiles(self) -> int:
        """Pieces that a compiler is run on."""
        return len(self.pieces)

    @property
    def num_eager_sections(self) -> int:
        """Eager sections between the pieces."""
        return sum(len(cut.names) for cut in self.cuts)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the backend would do with a call; printed, it is a report.

    Attributes:
        graphs: one for each graph that Dynamo makes; more than one after a graph break.
    """

    graphs: tuple[GraphExplanation, ...]

    @property
    def num_pieces(self) -> int:
        """Pieces of all graphs."""
        return sum(graph.num_pieces for graph in self.graphs)

    @property
    def num_compiles(self) -> int:
        """Distinct pieces of all graphs."""
        return sum(graph.num_compiles for graph in self.graphs)

    @property
    def num_graphs(self) -> int:
        """CUDA graphs that will exist once every key was met."""
        return sum(graph.num_graphs for graph in self.graphs)

    def as_dict(self) -> dict[str, Any]:
        """The explanation as plain types, for JSON."""
        plain: dict[str, Any] = _plain(self)
        return {**plain, "num_graphs": self.num_graphs}

    def __rich__(self) -> RenderableType:
        """Tables for a terminal."""
        numbered = enumerate(self.graphs, start=1)
        parts = [part for number, graph in numbered for part in _tables(graph, number)]
        return stack(parts or ["Dynamo makes no graph of this call: nothing would be compiled."])

    def __str__(self) -> str:
        return as_text(self.__rich__())


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> Explanation:
    """What `torch.compile(model, backend="cudagraph_modes")` would do with a call.

    The call runs once, eagerly and without gradients: state that the model changes does change.
    Nothing is compiled and nothing captured, and `model` itself is left as it is.

    Args:
        model: a module or function; a compiled one is explained as what it was made from.
        *inputs: positional arguments of the call.
        options: as for `torch.compile`.
        dynamic: as for `torch.compile`: whether sizes are free.
        **kwargs: keyword arguments of the call.

    Raises:
        ConfigError: an option is wrong, or what it asks for is not available.
    """
    config = CompilationConfig.from_options(options)
    for error in unavailable(config):
        raise error
    original = _uncompiled(model)
    planner = _Planner(config, _parameter_names(original, inputs))

    def call(*args: Any, **named: Any) -> Any:
        return original(*args, **named)

    compiled = torch.compile(_with_code_of_its_own(call), backend=planner, dynamic=dynamic)
    try:
        with torch.no_grad():
            compiled(*inputs, **kwargs)
    except Exception:
        # Dynamo wraps whatever a backend raises into an error of its own.
        if planner.error is not None:
            raise planner.error from None
        raise
    return Explanation(tuple(planner.graphs))


class _Planner:
    """A Dynamo backend that plans each graph and runs it eagerly."""

    def __init__(self, config: CompilationConfig, parameter_names: Sequence[str]) -> None:
        self._config = config
        self._parameter_names = parameter_names
        self.graphs: list[GraphExplanation] = []
        self.error: Exception | None = None

    def __call__(
        self, graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        try:
            plan = plan_graph(graph_module, example_inputs, self._config)
            self.graphs.append(
                _explained(plan, example_inputs, self._config, self._parameter_names)
            )
        except Exception as error:
            self.error = error
            raise
        return graph_module.forward


def _uncompiled(model: Callable[..., Any]) -> Callable[..., Any]:
    for name in ("_orig_mod", "_torchdynamo_orig_callable"):
        model = getattr(model, name, model)
    return model


def _parameter_names(model: Callable[..., Any], inputs: Sequence[Any]) -> list[str]:
    """How the model's code names its positional arguments."""
    called = model.forward if isinstance(model, torch.nn.Module) else model
    try:
        bound = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return []
    names: list[str] = []
    for parameter in bound:
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{i}]" for i in range(len(inputs) - len(names))]
        elif parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            names.append(parameter.name)
    return names


def _with_code_of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object that nobody else has, under a name nobody else has.

    Dynamo keeps what it compiled, and which sizes it has seen, by code object and by name. Kept
    apart, explaining a model neither counts against the model's recompilations nor makes later
    explanations see sizes as free.
    """
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=f"explained_{uuid.uuid4().hex}")
    return FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)


# --- from a plan to an explanation -----------------------------------------------------------


def _explained(
    plan: GraphPlan,
    example_inputs: Sequence[Any],
    config: CompilationConfig,
    parameter_names: Sequence[str],
) -> GraphExplanation:
    reader = BatchReader(
        plan.inputs,
        query_len=config.uniform_decode_query_len,
        max_num_seqs=config.max_num_seqs,
        describe_batch=config.describe_batch,
    )
    call = reader.read(example_inputs)
    call_mode, _ = plan.dispatcher.dispatch(call)
    if plan.mode is CUDAGraphMode.NONE:
        call_mode = CUDAGraphMode.NONE
    has_free_sizes = any(isinstance(value, torch.SymInt) for value in plan.split.values.values())
    return GraphExplanation(
        pieces=_distinct_pieces(plan),
        cuts=_cuts(plan.split.eager_sections),
        inputs=Counter(item.kind.value for item in plan.inputs),
        caller_inputs=tuple(
            _as_written(item.source, parameter_names)
            for item in plan.inputs
            if item.kind is InputClass.CALLER
        ),
        support=plan.support,
        device=str(plan.device),
        mode_asked=plan.asked,
        mode_resolved=plan.mode,
        downgrades=plan.resolution.downgrades,
        notes=plan.notes,
        keys=_key_sizes(plan),
        call=call,
        call_mode=call_mode,
        has_free_sizes=has_free_sizes,
        num_graphs=plan.num_graphs if has_free_sizes else _num_graphs_at(plan, call_mode),
    )


def _num_graphs_at(plan: GraphPlan, mode: CUDAGraphMode) -> int:
    """CUDA graphs of one key: where all sizes are fixed, no other key is ever met."""
    if mode is CUDAGraphMode.PIECEWISE:
        return len(plan.split.pieces) - len(plan.uncapturable)
    return 1 if mode is CUDAGraphMode.FULL else 0


def _distinct_pieces(plan: GraphPlan) -> tuple[DistinctPiece, ...]:
    equal = _grouped((structural_key(piece.module), piece) for piece in plan.split.pieces)
    return tuple(
        DistinctPiece(
            names=tuple(piece.name for piece in pieces),
            num_ops=sum(node.op.startswith("call_") for node in pieces[0].module.graph.nodes),
            uncapturable=plan.uncapturable.get(pieces[0].name),
        )
        for pieces in equal.values()
    )


def _cuts(eager_sections: Iterable[Section]) -> tuple[Cut, ...]:
    equal = _grouped((section.ops, section) for section in eager_sections)
    return tuple(
        Cut(ops=ops, names=tuple(section.name for section in sections))
        for ops, sections in equal.items()
    )


def _grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    groups: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def _key_sizes(plan: GraphPlan) -> tuple[KeySizes, ...]:
    if plan.mode is CUDAGraphMode.NONE:
        return ()
    held = [(mode, key) for mode, keys in plan.dispatcher.capture_plan() for key in keys]
    groups = _grouped(((mode, key.uniform), key.num_tokens) for mode, key in held)
    return tuple(
        KeySizes(mode=mode, uniform=uniform, num_tokens=tuple(sorted(set(sizes))))
        for (mode, uniform), sizes in groups.items()
    )


_FROM_ARGS = re.compile(r"^L\['args'\]\[(\d+)\]")
_FROM_NAMED = re.compile(r"^L\['named'\]\['(\w+)'\]")


def _as_written(source: str, parameter_names: Sequence[str]) -> str:
    """A graph input as the model's own code would write it."""

    def parameter(match: re.Match[str]) -> str:
        position = int(match[1])
        known = position < len(parameter_names)
        return parameter_names[position] if known else f"args[{position}]"

    return _FROM_NAMED.sub(r"\1", _FROM_ARGS.sub(parameter, source))


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, BatchDescriptor):
        return {name: _plain(entry) for name, entry in value._asdict().items()}
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


# --- from an explanation to tables -----------------------------------------------------------


def _tables(graph: GraphExplanation, number: int) -> list[RenderableType]:
    sizes = "free" if graph.has_free_sizes else "fixed: calls of other sizes are compiled anew"
    summary = {
        "mode asked": graph.mode_asked.name,
        "mode resolved": graph.mode_resolved.name,
        "reasons": (*map(str, graph.downgrades), *graph.notes),
        "device": graph.device,
        "pieces": f"{graph.num_pieces}, {graph.num_compiles} of them distinct",
        "eager sections": graph.num_eager_sections,
        "inputs": [f"{kind}: {count}" for kind, count in graph.inputs.items()],
        "caller's tensors": graph.caller_inputs,
        "sizes": sizes,
        "this call": f"{key_text(graph.call)}: runs at {graph.call_mode.name}",
        "keys": [_sizes_text(keys) for keys in graph.keys],
        "graphs planned": graph.num_graphs,
    }
    pieces = columns(
        "Pieces",
        ("first", "equal ones", "ops", "can be captured"),
        (
            (piece.names[0], len(piece.names), piece.num_ops, f"no: {piece.uncapturable}")
            if piece.uncapturable
            else (piece.names[0], len(piece.names), piece.num_ops, "yes")
            for piece in graph.pieces
        ),
    )
    cuts = columns(
        "Eager sections",
        ("cut by", "support", "sections"),
        (
            (
                "\n".join(cut.ops),
                "\n".join(graph.support[op].name for op in cut.ops),
                len(cut.names),
            )
            for cut in graph.cuts
        ),
    )
    tables: list[RenderableType] = [facts(f"Graph {number}", summary), pieces]
    return [*tables, cuts] if graph.cuts else tables


def _sizes_text(keys: KeySizes) -> str:
    batches = "uniform decode" if keys.uniform else "any batch"
    return f"{keys.mode.name}, {batches}: {compact_sizes(keys.num_tokens)}"
