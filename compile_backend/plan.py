"""What will be done with a graph, before anything is compiled: the one source for all who ask.

Split, input classes, what can be captured, the resolved mode and the keys. The backend builds from
a plan, `explain` prints it, and neither works anything out anew.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from compile_backend.config import CUDAGraphMode
from compile_backend.context import current_forward_context
from compile_backend.dispatch import CudagraphDispatcher
from compile_backend.errors import ConfigError, number_of
from compile_backend.inputs import GraphInput, InputClass, classify_inputs
from compile_backend.op_names import SplittingOps, normal_name, op_name
from compile_backend.partition_ops import partition_ops
from compile_backend.pipeline import PassResult, idle_passes, run_passes
from compile_backend.plain_calls import BatchReader
from compile_backend.resolve import Resolution, default_mode, resolve_cudagraph_mode
from compile_backend.split import Section, SplitGraph, split_graph
from compile_backend.split_views import is_trivial
from compile_backend.support import (
    AttentionCGSupport,
    default_splitting_ops,
    lowest,
    speaks_of,
    support_level,
)
from compile_backend.token_sizes import plan_specialisations
from compile_backend.torch_internals.graphs import (
    fix_numbers_of_modules,
    is_number_input,
    names_of_wrapped,
)
from compile_backend.torch_internals.partition import are_made_on
from compile_backend.torch_internals.sizes import data_dependent_symbols, free_symbols_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from compile_backend.batch import BatchDescriptor
    from compile_backend.config import CompilationConfig
    from compile_backend.specialise import Specialisations


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """How Inductor is to partition a graph.

    Attributes:
        whole: the graph without a cut: one piece.
        ops: what Inductor is to part at.
        num_calls: calls of these, all of which must run between partitions.
    """

    whole: SplitGraph
    ops: tuple[str, ...]
    num_calls: int


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """How one Dynamo graph will run.

    Attributes:
        split: its sections.
        inputs: what each input is.
        device: where graphs are captured.
        splitting_ops: what was searched for.
        support: level of each splitting op that was found.
        asked: the mode asked for, or the default.
        resolution: what it becomes, and why.
        uncapturable: pieces that no graph can hold, with the reason.
        data_dependent: names of values whose sizes, or which themselves, no graph may freeze.
        notes: further reasons that a person should know, such as why FULL is out.
        needs_grad: whether the call needs gradients, so that nothing is captured.
        dispatcher: the keys, for calls that may not be padded.
        reader: describes plain calls.
        first_call: the batch of the call that this graph was made for.
        specialisations: the numbers of tokens that pieces are compiled for by themselves.
        passes: what each rewrite of the graph did, in the order they ran.
        partition: how Inductor is to part the graph instead; None where it is cut before.
    """

    split: SplitGraph
    inputs: tuple[GraphInput, ...]
    device: torch.device
    splitting_ops: tuple[str, ...]
    support: dict[str, AttentionCGSupport]
    asked: CUDAGraphMode
    resolution: Resolution
    uncapturable: dict[str, str]
    data_dependent: frozenset[str]
    notes: tuple[str, ...]
    needs_grad: bool
    dispatcher: CudagraphDispatcher
    reader: BatchReader
    first_call: BatchDescriptor
    specialisations: Specialisations
    passes: tuple[PassResult, ...]
    partition: PartitionPlan | None = None

    @property
    def mode(self) -> CUDAGraphMode:
        """The mode that calls run under."""
        return CUDAGraphMode.NONE if self.needs_grad else self.resolution.mode

    @property
    def has_free_sizes(self) -> bool:
        """Whether calls of several sizes run this graph."""
        return any(isinstance(value, torch.SymInt) for value in self.split.values.values())

    @property
    def first_mode(self) -> CUDAGraphMode:
        """The mode that the call runs at which this graph was made for."""
        if self.mode is CUDAGraphMode.NONE:
            return CUDAGraphMode.NONE
        return self.dispatcher.dispatch(self.first_call)[0]

    @property
    def num_graphs(self) -> int:
        """Graphs that exist once every key was met that can be."""
        num_pieces = len(self.split.pieces) - len(self.uncapturable)
        if self.mode is CUDAGraphMode.NONE:
            return 0
        if not self.has_free_sizes:
            graphs_of_key = {CUDAGraphMode.FULL: 1, CUDAGraphMode.PIECEWISE: num_pieces}
            return graphs_of_key.get(self.first_mode, 0)
        return len(self.dispatcher.keys(CUDAGraphMode.FULL)) + num_pieces * len(
            self.dispatcher.keys(CUDAGraphMode.PIECEWISE)
        )


def plan_graph(
    graph_module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    config: CompilationConfig,
) -> GraphPlan:
    """Work out how a Dynamo graph will run.

    Args:
        graph_module: rewritten in place, so that it can be cut.
        example_inputs: what it is first called with.
        config: what the user asked for.

    Raises:
        ConfigError: the mode is not supported and `strict` is set, a capture size cannot be, or a
            pass of the user's fails.
    """
    names = config.splitting_ops if config.splitting_ops is not None else default_splitting_ops()
    fix_numbers_of_modules(graph_module.graph)
    passes = run_passes(graph_module, config.pass_config, config.inductor_passes)
    needs_grad = _needs_grad(graph_module.graph, example_inputs)
    splitting_ops = SplittingOps(names)
    split = split_graph(graph_module, splitting_ops, keep_grad_mode=needs_grad)
    device = _device_of(example_inputs, split)
    inputs = classify_inputs(graph_module.graph, example_inputs, device)
    uncuttable = (
        _reshaped_in_place(graph_module.graph)
        or _number_crosses(split)
        or _wrapper_crosses(split, inputs)
    )
    if uncuttable:
        split = split_graph(graph_module, SplittingOps(()), keep_grad_mode=needs_grad)
    support = _support_of(split, config)
    sources = {item.name: _LOCAL.sub(r"\1", item.source) for item in inputs}
    data_dependent = _data_dependent(graph_module.graph)
    uncapturable = {
        piece.name: reason
        for piece in split.pieces
        if (reason := uncuttable or _why_uncapturable(piece, device, data_dependent, sources))
        is not None
    }
    piecewise = bool(split.eager_sections)
    asked = config.cudagraph_mode or default_mode(piecewise=piecewise, pooling=config.pooling)
    query_len = config.uniform_decode_query_len
    resolution = resolve_cudagraph_mode(
        asked,
        lowest(support.values()),
        piecewise=piecewise,
        uniform_decode_query_len=query_len,
        uncapturable=_in_words(uncapturable),
        strict=config.strict,
    )
    notes = _names_in_vain(graph_module.graph, splitting_ops, config)
    if uncapturable and all(step.detail is None for step in resolution.downgrades):
        notes.append(f"no graph can hold every piece: {_in_words(uncapturable)}")
    if resolution.downgrades and not piecewise and not config.splitting_ops:
        notes.append(f"nothing was split out; searched for {_shortened(names)}")
    # A runner has a mode of its own.
    is_by_itself = current_forward_context() is None and not needs_grad
    if is_by_itself and config.cudagraph_mode is None and asked is CUDAGraphMode.NONE:
        why = uncuttable or f"nothing was split out: searched for {_shortened(names, most=3)}"
        notes.append(
            "a graph runs without CUDA graphs (told once), since no cudagraph_mode was asked for "
            f"and the default is NONE where {why}; set cudagraph_mode='FULL' if all of it can be "
            "captured, or name in splitting_ops what cannot"
        )
    dispatcher = CudagraphDispatcher(
        config,
        max_num_seqs=config.max_num_seqs,
        uniform_decode_query_len=query_len,
        pad=False,
    )
    dispatcher.initialize_cudagraph_keys(resolution.mode)
    reader = BatchReader(
        inputs,
        query_len=query_len,
        max_num_seqs=config.max_num_seqs,
        describe_batch=config.describe_batch,
    )
    first_call = reader.read(example_inputs)
    values = [split.values[name] for name in split.inputs]
    specialisations, more_notes = plan_specialisations(
        config, dispatcher, resolution.mode, reader, values, first_call, needs_grad=needs_grad
    )
    notes += [*more_notes, *idle_passes(passes)]
    partition = None
    # Without cuts both ways are the same, and a call that needs gradients has no graphs.
    if config.use_inductor_graph_partition and not needs_grad and (piecewise or uncuttable):
        refusal = uncuttable or _in_words(_without_idle(uncapturable))
        found = partition_ops(support) if refusal is None else f"no graph can hold {refusal}"
        if not are_made_on(device.type):
            notes.append(not_partitioned(config, ON_CPU, "move model and inputs to a GPU, or "))
        elif isinstance(found, str):
            notes.append(not_partitioned(config, found))
        else:
            whole = split_graph(graph_module, SplittingOps(()), keep_grad_mode=False)
            num_calls = sum(len(section.ops) for section in split.eager_sections)
            partition = PartitionPlan(whole, found, num_calls)
    return GraphPlan(
        split=split,
        inputs=inputs,
        device=device,
        splitting_ops=tuple(names),
        support=support,
        asked=asked,
        resolution=resolution,
        uncapturable=uncapturable,
        data_dependent=data_dependent,
        notes=tuple(notes),
        needs_grad=needs_grad,
        dispatcher=dispatcher,
        reader=reader,
        first_call=first_call,
        specialisations=specialisations,
        passes=passes,
        partition=partition,
    )


ON_CPU = "Inductor makes partitions for GPUs only, and this graph runs on the CPU"


def not_partitioned(config: CompilationConfig, reason: str, fix: str = "") -> str:
    """What tells that a graph is cut before although Inductor was asked to part it.

    Args:
        config: what was asked for.
        reason: why that cannot be.
        fix: what else could be done than to leave the option out; ends in "or ".

    Raises:
        ConfigError: `strict` is set.
    """
    option, fix = "use_inductor_graph_partition", f"{fix}leave it out: splitting_ops splits"
    if config.strict:
        problem = f"cannot be had for a graph: {reason}"
        raise ConfigError(option, True, problem, f"{fix}; or leave out strict")
    problem = f"cannot be had for a graph, which is split before instead: {reason}"
    return str(ConfigError(option, True, problem, fix))


def _support_of(split: SplitGraph, config: CompilationConfig) -> dict[str, AttentionCGSupport]:
    """The level of each splitting op that was found, as declared or as known."""
    declared = {normal_name(op): level for op, level in (config.attention_support or {}).items()}
    return {
        name: support_level(name, declared)
        for section in split.eager_sections
        for name in section.ops
    }


def _names_in_vain(
    graph: torch.fx.Graph, splitting_ops: SplittingOps, config: CompilationConfig
) -> list[str]:
    """What the user named that this graph does not have, as notes."""
    notes = []
    cutting = splitting_ops.cutting(graph)
    unmatched = splitting_ops.matching_none_of(cutting) if config.splitting_ops else ()
    if cutting:  # a list for many models holds what this one does not have
        unmatched = tuple(name for name in unmatched if name not in default_splitting_ops())
    if unmatched:
        loses = config.cudagraph_mode is None and not cutting
        notes.append(
            f"splitting_ops: nothing in this graph is called {_shortened(unmatched)}; "
            + ("it runs without CUDA graphs, since no cudagraph_mode is given; " if loses else "")
            + "check the spelling: ns::op, ns::op.overload or package.module.function"
        )
    found = [str(op_name(node)) for node in cutting]
    unread = [
        name
        for name in config.attention_support or ()
        if not any(speaks_of(normal_name(name), op) for op in found)
    ]
    if unread:
        notes.append(
            f"attention_support: nothing that splits this graph is called {_shortened(unread)}; "
            "check the spelling, and name ops of your own in splitting_ops too"
        )
    return notes


_RESHAPING = frozenset(
    {
        *("resize_", "resize_as_", "set_", "as_strided_", "squeeze_", "unsqueeze_"),
        *("t_", "transpose_", "swapaxes_", "swapdims_"),
    }
)


def _reshaped_in_place(graph: torch.fx.Graph) -> str | None:
    """Why a graph can be neither cut nor captured: a value in it changes its shape.

    A Dynamo graph describes such a value as it is in the end, so its shape at a cut is unknown.
    """
    for node in graph.nodes:
        name = (
            node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        )
        if node.op.startswith("call_") and name in _RESHAPING:
            return f"changes a shape in place ({node.name})"
    return None


def _number_crosses(split: SplitGraph) -> str | None:
    """Why a graph cannot be cut: a piece would take a number that only the data tells."""
    numbers = (torch.SymFloat, torch.SymBool)
    for piece in split.pieces:
        for name in piece.inputs:
            if isinstance(split.values[name], numbers):
                return f"reads a number from data that a later piece needs ({name})"
    return None


def _device_of(example_inputs: Sequence[Any], split: SplitGraph) -> torch.device:
    """The first device that is not the CPU, among inputs and then all values."""
    values = (*example_inputs, *split.values.values())
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _wrapper_crosses(split: SplitGraph, inputs: Sequence[GraphInput]) -> str | None:
    """Whether a value has no memory of its own that a graph could read or fill."""
    weights = {item.name for item in inputs if item.kind is not InputClass.CALLER}
    for name, value in split.values.items():
        if name not in weights and isinstance(value, torch.Tensor) and names_of_wrapped(value):
            return f"hands on `{name}`, a {type(value).__name__}, which only wraps other tensors"
    return None


def _needs_grad(graph: torch.fx.Graph, example_inputs: Sequence[Any]) -> bool:
    """Whether somebody could ask for gradients through an output or through a written input."""
    if not torch.is_grad_enabled():
        return False
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    before = zip(placeholders, example_inputs, strict=True)
    newly = [node for node, value in before if not getattr(value, "requires_grad", False)]
    return any(
        getattr(node.meta.get("example_value"), "requires_grad", False)
        for node in (*output.all_input_nodes, *newly)
        if node not in placeholders or node in newly
    )


# How Dynamo writes a local variable.
_LOCAL = re.compile(r"^L\['(\w+)'\]")


def _in_words(uncapturable: Mapping[str, str]) -> str | None:
    """Which pieces no graph can hold, and why not the first of them; None without any."""
    if not uncapturable:
        return None
    name, reason = next(iter(uncapturable.items()))
    num_others = len(uncapturable) - 1
    others = f"; {number_of('other piece', num_others)} cannot be captured either"
    return f"{name} {reason}{others if num_others else ''}"


def _why_uncapturable(
    piece: Section,
    device: torch.device,
    data_dependent: frozenset[str],
    sources: Mapping[str, str],
) -> str | None:
    """Why no graph can hold a piece; None where one can."""
    has_work = False
    constants: set[torch.fx.Node] = set()
    for node in piece.module.graph.nodes:
        value = node.meta.get("example_value")
        if is_number_input(node):
            return (
                f"takes the Python float `{sources.get(node.name, node.name)}`, which may change "
                "from call to call; pass it as a tensor, or keep it as an attribute of the module"
            )
        if node.op.startswith("call_") and constants.issuperset(node.all_input_nodes):
            constants.add(node)
        is_elsewhere = isinstance(value, torch.Tensor) and value.device != device
        if is_elsewhere and not (node in constants and value.dim() == 0):
            return f"works on {value.device} ({node.name})"
        if node.name in data_dependent:
            return f"has a size or number that depends on data ({node.name})"
        has_work = has_work or (node.op.startswith("call_") and not is_trivial(node))
    return None if has_work else _IDLE


_IDLE = "does no work on the device"


def _without_idle(uncapturable: Mapping[str, str]) -> dict[str, str]:
    """The pieces that no graph can hold, without those that need none."""
    return {name: reason for name, reason in uncapturable.items() if reason != _IDLE}


def _data_dependent(graph: torch.fx.Graph) -> frozenset[str]:
    """Names of values whose sizes are known only once the data is, and of numbers read from it.

    A graph would freeze them. Sizes of the graph's inputs are known, by whatever symbol.
    """
    values = {node.name: node.meta.get("example_value") for node in graph.nodes}
    known: set[Any] = set()
    for node in graph.nodes:
        if node.op == "placeholder" and isinstance(values[node.name], _SIZED):
            known |= free_symbols_of(values[node.name])
    return frozenset(
        name
        for name, value in values.items()
        if (isinstance(value, (torch.SymFloat, torch.SymBool)) and free_symbols_of(value) - known)
        or (isinstance(value, _SIZED) and data_dependent_symbols(value) - known)
    )


_SIZED = (torch.Tensor, torch.SymInt)


def _shortened(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(names[:most])
    return f"{shown}, and {len(names) - most} more" if len(names) > most else shown or "no op"
