"""`explain`: what the backend would do with a call, without compiling or capturing anything.

Dynamo traces the call and every graph is planned, by the plan that the backend itself builds from.
What is told is read off plans; this file decides nothing.
"""

from __future__ import annotations

import inspect
import re
import uuid
from collections import Counter
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from compile_backend.asked_names import check_asked
from compile_backend.config import CompilationConfig, CUDAGraphMode
from compile_backend.explanation import (
    Cut,
    DistinctPiece,
    Explanation,
    GraphExplanation,
    KeySizes,
    SectionOutline,
)
from compile_backend.inputs import InputClass
from compile_backend.op_names import op_name
from compile_backend.piece_key import structural_key
from compile_backend.pipeline import is_fused
from compile_backend.plan import plan_graph
from compile_backend.specialise import TokenDimension

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
    from typing import TypeVar

    from compile_backend.plan import GraphPlan
    from compile_backend.split import Section

    _Key = TypeVar("_Key", bound=Hashable)
    _Value = TypeVar("_Value")


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
        ConfigError: an option is wrong.
    """
    config = CompilationConfig.from_options(options)
    check_asked(config)
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
            before = str(graph_module.graph)
            plan = plan_graph(graph_module, example_inputs, self._config)
            codes = before, str(graph_module.graph)
            self.graphs.append(_explained(plan, self._parameter_names, codes))
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
    plan: GraphPlan, parameter_names: Sequence[str], codes: tuple[str, str]
) -> GraphExplanation:
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
        call=plan.first_call,
        call_mode=plan.first_mode,
        has_free_sizes=plan.has_free_sizes,
        num_graphs=plan.num_graphs,
        passes={result.name: result.changed for result in plan.passes},
        num_partitions=0 if plan.partition is None else len(plan.split.pieces),
        sections=tuple(map(_outline, plan.split.sections)),
        code_before=codes[0],
        code_after=codes[1],
    )


def _outline(section: Section) -> SectionOutline:
    nodes = [node for node in section.module.graph.nodes if node.op.startswith("call_")]
    nodes.sort(key=is_fused, reverse=True)  # the others stay in their order
    names = [name for node in nodes if (name := op_name(node)) is not None]
    return SectionOutline(
        name=section.name,
        is_piece=section.is_piece,
        calls=Counter(names),
        num_fused=sum(map(is_fused, nodes)),
        code=str(section.module.graph),
    )


def _distinct_pieces(plan: GraphPlan) -> tuple[DistinctPiece, ...]:
    equal = _grouped((structural_key(piece.module), piece) for piece in plan.split.pieces)
    return tuple(_distinct_piece(plan, pieces) for pieces in equal.values())


def _distinct_piece(plan: GraphPlan, equal: Sequence[Section]) -> DistinctPiece:
    first = equal[0]
    dimension = plan.specialisations.dimension_in(first.module)
    is_specialised = isinstance(dimension, TokenDimension)
    return DistinctPiece(
        names=tuple(piece.name for piece in equal),
        num_ops=sum(node.op.startswith("call_") for node in first.module.graph.nodes),
        uncapturable=plan.uncapturable.get(first.name),
        compiled_for=plan.specialisations.ranges if is_specialised else (),
        unspecialised=dimension if isinstance(dimension, str) else None,
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
