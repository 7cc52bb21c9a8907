"""The Dynamo backend `cudagraph_modes`: plan, compile, wrap, run.

One object owns what all compiled graphs of the process share: an engine for each device, and which
graphs belong to which `torch.compile` call.
"""

from __future__ import annotations

import logging
import time
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from compile_backend.boundary import Pins, SharedBuffer
from compile_backend.compiled_graph import CallRules, CompiledGraph, Programs
from compile_backend.config import CompilationConfig, CUDAGraphMode, unavailable
from compile_backend.dispatch import CudagraphDispatcher
from compile_backend.errors import ConfigError
from compile_backend.graph_engine import CudaEngine, ReferenceEngine
from compile_backend.inputs import InputBuffers
from compile_backend.mutation import mutated_inputs
from compile_backend.once import WarnOnce
from compile_backend.outputs import OutputReturns
from compile_backend.padding import RowPadding
from compile_backend.piece_compiler import PieceCompiler
from compile_backend.piecewise import PieceRunner, UncapturedRunner
from compile_backend.plan import GraphPlan, plan_graph
from compile_backend.split import unwritten_outputs
from compile_backend.stats import GraphStats, Report, added_rows
from compile_backend.stitch import buffer_slots, stitch
from compile_backend.torch_internals import (
    calling_compile,
    compile_behind,
    fix_numbers_of_modules,
    reaching_the_user,
    shape_env_of,
    storage_id,
)
from compile_backend.wrapper import CUDAGraphWrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch.fx

    from compile_backend.batch import BatchDescriptor
    from compile_backend.graph_engine import GraphEngine
    from compile_backend.piece_compiler import CompiledPiece
    from compile_backend.split import Section

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Built:
    """One compiled graph, and what it was built from."""

    plan: GraphPlan
    graph: CompiledGraph
    num_compiles: int
    compile_s: float


@dataclass(slots=True)
class _Compiled:
    """All graphs of one `torch.compile` call."""

    graphs: list[_Built] = field(default_factory=list)
    warn_once: WarnOnce = field(default_factory=WarnOnce)


class CudagraphModesBackend:
    """What `torch.compile(..., backend="cudagraph_modes")` calls for every graph."""

    __name__ = "cudagraph_modes"

    # Dynamo shares what it compiled between `torch.compile` calls whose backends and options are
    # equal. Graphs hold the addresses of one model's weights, so no two calls are.
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return False

    def __deepcopy__(self, memo: object) -> CudagraphModesBackend:
        """A deep copy of a compiled model goes on using this backend."""
        return self

    def __init__(self) -> None:
        self._engines: dict[torch.device, GraphEngine] = {}
        self._compiled: dict[int, tuple[weakref.ref[object], _Compiled]] = {}

    def __call__(
        self,
        graph_module: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Sequence[Any]]:
        """Compile one graph of Dynamo's.

        Raises:
            ConfigError: an option is wrong, or what it asks for is not available.
        """
        try:
            return self._compile(graph_module, example_inputs, mode, options)
        except ConfigError as error:
            raise reaching_the_user(error) from None

    def _compile(
        self,
        graph_module: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        mode: str | None,
        options: Mapping[str, Any] | None,
    ) -> CompiledGraph:
        if mode is not None:
            raise ConfigError(
                "mode",
                mode,
                "is not for this backend",
                'choose by options={"cudagraph_mode": ...} instead',
            )
        config = CompilationConfig.from_options(options)
        for error in unavailable(config):
            raise error
        fix_numbers_of_modules(graph_module.graph)
        compiled = self._compiled_by(calling_compile())
        start = time.perf_counter()
        plan = plan_graph(graph_module, example_inputs, config)
        _tell(plan, compiled.warn_once)
        built = _build(plan, config, self._engine(plan.device, config), compiled.warn_once)
        compiled.graphs.append(built)
        logger.info(
            "%d pieces (%d distinct) and %d eager sections at %s in %.1f s; %d graphs planned",
            len(plan.split.pieces),
            built.num_compiles,
            len(plan.split.eager_sections),
            plan.mode.name,
            time.perf_counter() - start,
            plan.num_graphs,
        )
        return built.graph

    def reset(self) -> None:
        """Forget every compiled graph; called by `torch._dynamo.reset()`."""
        self._compiled.clear()

    def stats(self, compiled: object) -> Report:
        """See `compile_backend.stats`."""
        graphs = self._graphs_of(compiled)
        plans = [built.plan for built in graphs]
        return Report(
            graphs=len(graphs),
            pieces=sum(len(plan.split.pieces) for plan in plans),
            eager_sections=sum(len(plan.split.eager_sections) for plan in plans),
            compiles=sum(built.num_compiles for built in graphs),
            compile_s=sum(built.compile_s for built in graphs),
            capture_s=sum(built.graph.stats.capture_s for built in graphs),
            mode_asked=tuple(dict.fromkeys(plan.asked.name for plan in plans)),
            mode_resolved=tuple(dict.fromkeys(plan.mode.name for plan in plans)),
            downgrades=tuple(
                dict.fromkeys(str(d) for plan in plans for d in plan.resolution.downgrades)
            ),
            by_key=added_rows(built.graph.stats for built in graphs),
        )

    def drop_graphs(self, compiled: object) -> None:
        """See `compile_backend.reset`."""
        for built in self._graphs_of(compiled):
            built.graph.reset()

    def _engine(self, device: torch.device, config: CompilationConfig) -> GraphEngine:
        """The device's engine; one of its own for a graph whose outputs are not copied.

        In a shared memory pool the replay of another graph may overwrite them.
        """
        engine = self._engines.get(device) if config.cudagraph_clone_outputs else None
        if engine is None:
            engine = CudaEngine(device) if device.type == "cuda" else ReferenceEngine(device)
            if config.cudagraph_clone_outputs:
                self._engines[device] = engine
        return engine

    def _compiled_by(self, owner: object | None) -> _Compiled:
        if owner is None:
            return _Compiled()
        known = self._compiled.get(id(owner))
        if known is None or known[0]() is not owner:
            known = (weakref.ref(owner), _Compiled())
            self._compiled[id(owner)] = known
        return known[1]

    def _graphs_of(self, compiled: object) -> list[_Built]:
        owner = compile_behind(compiled)
        if owner is None:
            raise ConfigError(
                "compiled",
                compiled,
                "was not made by torch.compile",
                'pass what torch.compile(..., backend="cudagraph_modes") returned',
            )
        known = self._compiled.get(id(owner))
        return known[1].graphs if known is not None and known[0]() is owner else []


cudagraph_modes = CudagraphModesBackend()


def stats(compiled: object) -> Report:
    """What was compiled and what ran, for one compiled module or function.

    Args:
        compiled: what `torch.compile(..., backend="cudagraph_modes")` returned.

    Raises:
        ConfigError: it is something else.
    """
    return cudagraph_modes.stats(compiled)


def reset(compiled: object) -> None:
    """Drop every CUDA graph of one compiled module or function; later calls capture anew.

    What was compiled stays. To forget that as well, use `torch._dynamo.reset()`.

    Args:
        compiled: what `torch.compile(..., backend="cudagraph_modes")` returned.

    Raises:
        ConfigError: it is something else.
    """
    cudagraph_modes.drop_graphs(compiled)


def _tell(plan: GraphPlan, warn_once: WarnOnce) -> None:
    """Log each lowering of the mode, with its reason, once."""
    for downgrade in plan.resolution.downgrades:
        warn_once(logger, downgrade, "%s", downgrade)
    for note in plan.notes:
        warn_once(logger, note, "%s", note)
    if plan.needs_grad and plan.resolution.mode is not CUDAGraphMode.NONE:
        warn_once(
            logger,
            "gradients",
            "this call needs gradients, so it runs without CUDA graphs; for inference call it "
            "under torch.no_grad() or torch.inference_mode()",
        )
    if plan.device.type not in ("cpu", "cuda"):
        warn_once(logger, "device", "there are no CUDA graphs on %s", plan.device)


# --- from a plan to what runs ----------------------------------------------------------------


def _build(
    plan: GraphPlan, config: CompilationConfig, engine: GraphEngine, warn_once: WarnOnce
) -> _Built:
    inductor_config = dict(config.inductor_compile_config)
    if config.disable_cache:
        inductor_config["force_disable_caches"] = True
    compiler = PieceCompiler(config.piece_compiler, inductor_config)
    pieces = {piece.name: compiler.compile(piece) for piece in plan.split.pieces}
    stats = GraphStats()
    growth = _growth(plan)
    wrappers = _Wrappers(config, engine, stats)
    programs = _programs(plan, pieces, wrappers, growth)
    full = wrappers.make(
        lambda *args: programs.plain(args), CUDAGraphMode.FULL, "the whole graph", is_last=True
    )
    graph = CompiledGraph(
        programs,
        full,
        _call_rules(plan, config),
        InputBuffers(
            plan.inputs,
            plan.device,
            copy_inputs=config.cudagraph_copy_inputs,
            mutated=_mutated_graph_inputs(plan, pieces),
        ),
        OutputReturns(clone=config.cudagraph_clone_outputs),
        engine,
        stats,
        warn_once,
        needs_grad=plan.needs_grad,
        has_graphs=plan.device.type in ("cpu", "cuda"),
        growth=growth,
    )
    return _Built(plan, graph, compiler.num_distinct, compiler.compile_s)


@dataclass(frozen=True, slots=True)
class _Wrappers:
    """Makes the wrappers of one graph."""

    config: CompilationConfig
    engine: GraphEngine
    stats: GraphStats

    def make(
        self,
        runnable: Callable[..., Any],
        mode: CUDAGraphMode,
        name: str,
        *,
        is_last: bool,
        unwritten: frozenset[int] = frozenset(),
    ) -> CUDAGraphWrapper:
        """A wrapper.

        Args:
            runnable: what it wraps.
            mode: at which it acts.
            name: for messages.
            is_last: whether the caller of the graph reads its outputs.
            unwritten: positions of outputs that it only allocates.
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
        )


def _programs(
    plan: GraphPlan,
    pieces: Mapping[str, CompiledPiece],
    wrappers: _Wrappers,
    growth: Callable[[BatchDescriptor], int],
) -> Programs:
    split = plan.split
    plain_calls: dict[str, Callable[..., Any]] = {
        section.name: pieces[section.name].call if section.is_piece else section.module.forward
        for section in split.sections
    }
    plain = stitch(split, plain_calls, takes_list=frozenset(pieces))
    if not split.eager_sections:
        return Programs(plain, None, None, ())
    slots = buffer_slots(split)
    buffers = [SharedBuffer(plan.device) for _ in range(1 + max(slots.values(), default=0))]
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
        uncaptured = UncapturedRunner(call, pins, growth, tuple(later))
        if not section.is_piece or section.name in plan.uncapturable:
            runners[section.name] = uncaptured
            continue
        is_last = any(name in split.outputs for name in section.outputs)
        wrapper = wrappers.make(
            call,
            CUDAGraphMode.PIECEWISE,
            section.name,
            is_last=is_last,
            unwritten=unwritten_outputs(section),
        )
        later.append(wrapper)
        runners[section.name] = PieceRunner(wrapper, uncaptured)
    return Programs(
        plain,
        stitch(split, runners),
        stitch(split, {name: runner.without_running for name, runner in runners.items()}),
        tuple(runners.values()),
    )


def _called_with_arguments(call: Callable[..., Any], section: Section) -> Callable[..., Any]:
    if not section.is_piece:
        return call
    return lambda *args: call(list(args))


def _may_view(plan: GraphPlan, section: Section) -> list[bool]:
    """For each output of a section, whether it lies in the memory of one of its inputs."""
    values = plan.split.values
    memories = {storage_id(values[name]) for name in section.inputs} - {None}
    return [storage_id(values[name]) in memories for name in section.outputs]


def _mutated_graph_inputs(plan: GraphPlan, pieces: Mapping[str, CompiledPiece]) -> frozenset[int]:
    """Positions of the graph's inputs that some section writes to, under whatever name."""
    values = plan.split.values
    written: set[int | None] = set()
    for section in plan.split.sections:
        positions = (
            pieces[section.name].mutated_inputs
            if section.is_piece
            else mutated_inputs(section.module)
        )
        written.update(storage_id(values[section.inputs[i]]) for i in positions)
    return frozenset(
        position
        for position, name in enumerate(plan.split.inputs)
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
