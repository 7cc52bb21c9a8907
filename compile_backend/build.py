"""From a plan to a graph that runs: compile, wrap, stitch.

Everything a compiled graph needs is made here and handed to it; nothing is decided here.
"""

from __future__ import annotations

import functools
import itertools
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.fx

from compile_backend.attention.ops import WITHOUT_DISPATCHER, attention
from compile_backend.boundary import Pins, SharedBuffer
from compile_backend.cache import ArtefactCache, cache_directory, cache_size_bytes
from compile_backend.compiled_graph import CallRules, CompiledGraph, Programs
from compile_backend.config import CUDAGraphMode
from compile_backend.dispatch import CudagraphDispatcher
from compile_backend.errors import number_of
from compile_backend.inputs import InputBuffers
from compile_backend.mutation import mutated_inputs
from compile_backend.outputs import OutputReturns
from compile_backend.padding import RowPadding
from compile_backend.partition import partitioned_programs
from compile_backend.piece_compiler import PieceCompiler
from compile_backend.piecewise import PieceRunner, UncapturedRunner
from compile_backend.plan import not_partitioned
from compile_backend.replay_plan import make_plan
from compile_backend.split import unwritten_outputs
from compile_backend.stats import GraphStats
from compile_backend.stitch import buffer_slots, stitch
from compile_backend.store_ahead import StoreAhead
from compile_backend.torch_internals.graphs import storage_id
from compile_backend.torch_internals.partition import PartitionError, Partitions
from compile_backend.torch_internals.sizes import shape_env_of
from compile_backend.wrapper import CUDAGraphWrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from compile_backend.batch import BatchDescriptor
    from compile_backend.config import CompilationConfig
    from compile_backend.graph_engine import GraphEngine
    from compile_backend.once import WarnOnce
    from compile_backend.piece_artefacts import CompileCounts
    from compile_backend.piece_compiler import CompiledPiece
    from compile_backend.plan import GraphPlan, PartitionPlan
    from compile_backend.runner_graphs import RunnerGraphs
    from compile_backend.split import Section, SplitGraph

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltGraph:
    """One compiled graph, and what it was built from.

    Attributes:
        plan: how it was to run.
        graph: what Dynamo calls.
        counts: which pieces were compiled, and which read from disk.
        is_whole: whether the graph is all that the function does: it neither begins nor ends at a
            graph break, and no Python around it leaves anything behind.
        num_partitions: partitions that Inductor made of it; 0 where it was cut before.
    """

    plan: GraphPlan
    graph: CompiledGraph
    counts: CompileCounts
    is_whole: bool
    num_partitions: int = 0

    @property
    def num_pieces(self) -> int:
        """What lies between the splitting ops: pieces, or Inductor's partitions."""
        return self.num_partitions or len(self.plan.split.pieces)


def build_graph(
    plan: GraphPlan,
    config: CompilationConfig,
    engine: GraphEngine,
    of_runners: RunnerGraphs,
    warn_once: WarnOnce,
    *,
    is_whole: bool,
) -> BuiltGraph:
    """Compile the pieces of a plan, wrap them, and put all together.

    Args:
        plan: how the graph will run.
        config: what the user asked for.
        engine: captures and replays on the plan's device.
        of_runners: what runners bring to the graphs of pieces, now or later.
        warn_once: shared by all graphs of one `torch.compile` call.
        is_whole: see `BuiltGraph`.

    Raises:
        ConfigError: Inductor cannot partition the graph as asked, and `strict` is set.
    """
    stats = GraphStats()
    growth = _growth(plan)
    wrappers = _Wrappers(config, engine, stats, of_runners)
    compiled = _compiled_whole(plan, config, warn_once) or _compiled_pieces(
        plan, config, warn_once
    )
    if compiled.partitions is None:
        programs = _programs(plan, compiled.pieces, wrappers, growth, is_whole=is_whole)
    else:
        programs = partitioned_programs(
            _plain(compiled.split, compiled.pieces),
            compiled.partitions,
            plan.device,
            wrappers.of_partition,
            growth,
        )
    full = wrappers.make(
        lambda *args: programs.plain(args), CUDAGraphMode.FULL, "the whole graph", is_last=True
    )
    graph = CompiledGraph(
        programs,
        full,
        _call_rules(plan, config),
        InputBuffers(
            plan.inputs,
            copy_inputs=config.cudagraph_copy_inputs,
            mutated=_mutated_graph_inputs(compiled),
        ),
        OutputReturns(clone=config.cudagraph_clone_outputs),
        engine,
        stats,
        warn_once,
        needs_grad=plan.needs_grad,
        has_graphs=plan.device.type in ("cpu", "cuda"),
        growth=growth,
    )
    num_partitions = 0 if compiled.partitions is None else len(compiled.partitions.functions)
    return BuiltGraph(plan, graph, compiled.counts, is_whole, num_partitions)


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A graph as it was compiled.

    Attributes:
        split: the sections that it was compiled in.
        pieces: those that were compiled, by name.
        counts: see `BuiltGraph`.
        partitions: those of the only piece, where Inductor parted it.
    """

    split: SplitGraph
    pieces: Mapping[str, CompiledPiece]
    counts: CompileCounts
    partitions: Partitions | None = None


def _compiled_pieces(plan: GraphPlan, config: CompilationConfig, warn_once: WarnOnce) -> _Compiled:
    compiler = _piece_compiler(plan, config, warn_once)
    pieces = compiler.compile_all(plan.split.pieces)
    return _Compiled(plan.split, pieces, compiler.counts)


def _compiled_whole(
    plan: GraphPlan, config: CompilationConfig, warn_once: WarnOnce
) -> _Compiled | None:
    """The graph in one piece, parted by Inductor; None where that cannot be."""
    if plan.partition is None:
        return None
    compiler = _piece_compiler(plan, config, warn_once, plan.partition.ops)
    whole = plan.partition.whole
    try:
        pieces = compiler.compile_all(whole.pieces)
        partitions = _checked_partitions(plan.partition, [each.code for each in pieces.values()])
    except PartitionError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - whatever it is, the pieces may well compile
        reason = f"Inductor cannot compile it whole ({_in_short(error)})"
    else:
        return _Compiled(whole, pieces, compiler.counts, partitions)
    note = not_partitioned(config, reason)
    warn_once(logger, "not partitioned", "%s", note)
    return None


def _in_short(error: Exception) -> str:
    """What went wrong, without the many lines that compilers add."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _checked_partitions(plan: PartitionPlan, codes: Sequence[Any]) -> Partitions:
    """The partitions of a graph's code.

    Raises:
        PartitionError: a splitting op would be captured with them.
    """
    if len(codes) != 1 or codes[0] is None:
        raise PartitionError("Inductor made more than one function of it")
    partitions = Partitions(codes[0])
    if partitions.calls_within(plan.ops):
        raise PartitionError("Inductor put a splitting op into a partition")
    num_calls = partitions.calls_between(plan.ops)
    if num_calls < plan.num_calls:
        raise PartitionError(
            f"{number_of('call', plan.num_calls)} of splitting ops became {num_calls} in the "
            "code of Inductor, which may have taken some apart"
        )
    return partitions


def artefact_cache(config: CompilationConfig, warn_once: WarnOnce) -> ArtefactCache | None:
    """Where artefacts are kept; None for nowhere."""
    max_bytes = 0 if config.disable_cache else cache_size_bytes()
    if not max_bytes:
        return None
    return ArtefactCache(cache_directory(config.cache_dir), max_bytes, warn_once)


def _piece_compiler(
    plan: GraphPlan,
    config: CompilationConfig,
    warn_once: WarnOnce,
    partition_ops: Sequence[str] | None = None,
) -> PieceCompiler:
    settings = dict(config.inductor_compile_config)
    if config.disable_cache:
        settings["force_disable_caches"] = True
    return PieceCompiler(
        config.piece_compiler,
        settings,
        artefact_cache(config, warn_once),
        plan.specialisations,
        config.compile_sizes_config,
        pass_uuids=[result.uuid for result in plan.passes],
        partition_ops=partition_ops,
    )


@dataclass(frozen=True, slots=True)
class _Wrappers:
    """Makes the wrappers of one graph."""

    config: CompilationConfig
    engine: GraphEngine
    stats: GraphStats
    of_runners: RunnerGraphs

    def make(
        self,
        runnable: Callable[..., Any],
        mode: CUDAGraphMode,
        name: str,
        *,
        is_last: bool,
        unwritten: frozenset[int] = frozenset(),
        is_for_runners: bool = False,
    ) -> CUDAGraphWrapper:
        """A wrapper.

        Args:
            runnable: what it wraps.
            mode: at which it acts.
            name: for messages.
            is_last: whether the caller of the graph reads its outputs.
            unwritten: positions of outputs that it only allocates.
            is_for_runners: whether runners have its graphs in memory of their own.
        """
        config = self.config
        return CUDAGraphWrapper(
            runnable,
            mode,
            engine=self.engine,
            name=name,
            num_warmups=config.cudagraph_num_of_warmups,
            stats=self.stats,
            keep_outputs=is_last and not config.cudagraph_clone_outputs,
            strict=config.strict,
            check_addresses=config.debug == "addresses",
            verify=config.debug == "verify",
            unwritten_outputs=unwritten,
            engine_of=self.of_runners.engine_of if is_for_runners else None,
        )

    def of_partition(
        self, runnable: Callable[..., Any], name: str, unwritten: frozenset[int]
    ) -> CUDAGraphWrapper:
        """A wrapper of a partition, each of which may return what the caller reads."""
        return self.make(
            runnable, CUDAGraphMode.PIECEWISE, name, is_last=True, unwritten=unwritten
        )


def _programs(
    plan: GraphPlan,
    pieces: Mapping[str, CompiledPiece],
    wrappers: _Wrappers,
    growth: Callable[[BatchDescriptor], int],
    *,
    is_whole: bool,
) -> Programs:
    split, of_runners = plan.split, wrappers.of_runners
    plain_calls = _plain_calls(split, pieces)
    plain = _plain(split, pieces)
    if not split.eager_sections:
        return Programs(plain, None, None, (), lambda _key: None)
    slots = buffer_slots(split)
    buffers = [SharedBuffer() for _ in range(1 + max(slots.values(), default=0))]
    # Python around the graph may have written to the inputs since they came.
    first = split.sections[0].name if is_whole else ""
    last = split.sections[-1].name if wrappers.config.cudagraph_clone_outputs else ""
    ahead = _stores_ahead(split, of_runners)
    later: list[CUDAGraphWrapper] = []
    runners: dict[str, PieceRunner | UncapturedRunner] = {}
    for section in reversed(split.sections):
        call = _called_with_arguments(plain_calls[section.name], section)
        pins = Pins(
            [
                None if name in plan.data_dependent else buffers[slots[name]]
                for name in section.outputs
            ],
            _may_view(plan, section),
        )
        direct = _direct_call(section, ahead.get(section.name))
        uncaptured = UncapturedRunner(call, pins, growth, tuple(later), direct)
        if not section.is_piece or section.name in plan.uncapturable:
            runners[section.name] = uncaptured
            continue
        is_last = any(name in split.outputs for name in section.outputs)
        if section.name in ahead:
            call = ahead[section.name].after(call)
        wrapper = wrappers.make(
            of_runners.opened(call) if section.name == first else call,
            CUDAGraphMode.PIECEWISE,
            section.name,
            is_last=is_last,
            unwritten=unwritten_outputs(section),
            is_for_runners=section.name == last,
        )
        later.append(wrapper)
        runners[section.name] = PieceRunner(wrapper, uncaptured)
    programs = Programs(
        plain,
        stitch(split, runners),
        stitch(split, {name: runner.without_running for name, runner in runners.items()}),
        tuple(runners.values()),
        functools.partial(make_plan, split, runners),
    )
    if isinstance(runners.get(first), PieceRunner):
        programs = replace(programs, sends=of_runners.sends)
    if isinstance(runners.get(last), PieceRunner):
        programs = replace(programs, own_outputs=_fresh_outputs(plan))
    return programs


def _fresh_outputs(plan: GraphPlan) -> frozenset[int]:
    """Positions of the outputs that the last section makes, in memory of its own."""
    split, section = plan.split, plan.split.sections[-1]
    is_view = _may_view(plan, section)
    fresh = {name for name, view in zip(section.outputs, is_view, strict=True) if not view}
    return frozenset(
        i for i, output in enumerate(split.outputs) if isinstance(output, str) and output in fresh
    )


def _plain_calls(
    split: SplitGraph, pieces: Mapping[str, CompiledPiece]
) -> dict[str, Callable[..., Any]]:
    return {
        section.name: pieces[section.name].call if section.is_piece else section.module.forward
        for section in split.sections
    }


def _plain(
    split: SplitGraph, pieces: Mapping[str, CompiledPiece]
) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """All sections as they are."""
    return stitch(split, _plain_calls(split, pieces), takes_list=frozenset(pieces))


def _stores_ahead(split: SplitGraph, of_runners: RunnerGraphs) -> dict[str, StoreAhead]:
    """By the names of both: pieces that may store for the attention right behind them."""
    ahead: dict[str, StoreAhead] = {}
    for piece, section in itertools.pairwise(split.sections):
        op, constants = _only_call(section) or (None, ())
        if op is not attention or not piece.is_piece:
            continue
        _, key, value, _ = section.inputs
        if key in piece.outputs and value in piece.outputs:
            positions = piece.outputs.index(key), piece.outputs.index(value)
            stores = StoreAhead(constants[0], positions, of_runners)
            ahead |= {piece.name: stores, section.name: stores}
    return ahead


def _direct_call(
    section: Section, ahead: StoreAhead | None
) -> Callable[[BatchDescriptor], Callable[..., Any]] | None:
    """By key, a section that is one op of this package, past torch's dispatcher; else None."""
    found = _only_call(section)
    if found is None:
        return None
    op, constants = found

    def at(key: BatchDescriptor) -> Callable[..., Any]:
        call = (ahead and ahead.attend_only(key)) or WITHOUT_DISPATCHER[op]

        def run(*args: Any) -> tuple[()]:
            call(*args, *constants)
            return ()

        return run

    return at


def _only_call(section: Section) -> tuple[Any, tuple[Any, ...]] | None:
    """The op of this package that is all of a section, and what it takes behind the inputs."""
    nodes = section.module.graph.nodes
    given = tuple(node for node in nodes if node.op == "placeholder")
    calls = [node for node in nodes if node.op not in ("placeholder", "output")]
    if len(calls) != 1 or section.outputs or calls[0].kwargs:
        return None
    op, arguments = calls[0].target, calls[0].args
    constants = arguments[len(given) :]
    if op not in WITHOUT_DISPATCHER or arguments[: len(given)] != given:
        return None
    if any(isinstance(item, torch.fx.Node) for item in constants):
        return None
    return op, constants


def _called_with_arguments(call: Callable[..., Any], section: Section) -> Callable[..., Any]:
    if not section.is_piece:
        return call
    return lambda *args: call(list(args))


def _may_view(plan: GraphPlan, section: Section) -> list[bool]:
    """For each output of a section, whether it lies in the memory of one of its inputs."""
    values = plan.split.values
    memories = {storage_id(values[name]) for name in section.inputs} - {None}
    return [storage_id(values[name]) in memories for name in section.outputs]


def _mutated_graph_inputs(compiled: _Compiled) -> frozenset[int]:
    """Positions of the graph's inputs that some section writes to, under whatever name."""
    split = compiled.split
    values = split.values
    written: set[int | None] = set()
    for section in split.sections:
        positions = (
            compiled.pieces[section.name].mutated_inputs
            if section.is_piece
            else mutated_inputs(section.module)
        )
        written.update(storage_id(values[section.inputs[i]]) for i in positions)
    return frozenset(
        position
        for position, name in enumerate(split.inputs)
        if storage_id(values[name]) in written - {None}
    )


def _call_rules(plan: GraphPlan, config: CompilationConfig) -> CallRules:
    query_len, reader = config.uniform_decode_query_len, plan.reader
    is_lazy = config.cudagraph_capture == "lazy"
    modes = (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
    sizes = frozenset(key.num_tokens for mode in modes for key in plan.dispatcher.keys(mode))
    if not config.cudagraph_pad_inputs:
        return CallRules(reader, plan.dispatcher, None, None, sizes, is_lazy)
    padded = CudagraphDispatcher(
        config, max_num_seqs=config.max_num_seqs, uniform_decode_query_len=query_len
    )
    padded.initialize_cudagraph_keys(plan.resolution.mode)
    padding = RowPadding(plan.split, plan.inputs, shape_env_of(plan.split.values.values()))
    return CallRules(reader, plan.dispatcher, padded, padding, sizes, is_lazy)


def _growth(plan: GraphPlan) -> Callable[[BatchDescriptor], int]:
    """How many times larger than a key's tensors those of the largest key are."""
    if not plan.has_free_sizes:
        return lambda _: 1
    keys = (plan.dispatcher.keys(mode) for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL))
    largest = max((key.num_tokens for held in keys for key in held), default=1)
    return lambda key: max(1, -(-largest // max(1, key.num_tokens)))
