"""The Dynamo backend `cudagraph_modes`: plan, compile, wrap, run.

One object owns what all compiled graphs of the process share: an engine for each device, and which
graphs belong to which `torch.compile` call.
"""

from __future__ import annotations

import gc
import logging
import time
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from compile_backend.asked_names import check_asked
from compile_backend.build import BuiltGraph, artefact_cache, build_graph
from compile_backend.collector import COLLECTOR
from compile_backend.compile_workers import start_where_all_is_new
from compile_backend.config import CompilationConfig, CUDAGraphMode
from compile_backend.errors import ConfigError
from compile_backend.graph_engine import CudaEngine
from compile_backend.once import WarnOnce
from compile_backend.plan import GraphPlan, plan_graph
from compile_backend.reference_engine import ReferenceEngine
from compile_backend.runner_graphs import RunnerGraphs
from compile_backend.stats import Report, added_rows
from compile_backend.stored_trace import StoredTraces, watch_traces
from compile_backend.support import lowest
from compile_backend.torch_internals.compile_attempts import (
    DuringCompilation,
    LimitReached,
    watch_attempts,
)
from compile_backend.torch_internals.dynamo import (
    backend_name,
    backend_of,
    calling_compile,
    compile_behind,
    ends_at_a_graph_break,
    is_part_of_a_function,
    leaves_something_behind,
    options_at_lookup,
    reaching_the_user,
)
from compile_backend.torch_internals.stored_graph import is_stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch
    import torch.fx

    from compile_backend.compiled_graph import CompiledGraph
    from compile_backend.graph_engine import GraphEngine
    from compile_backend.runner_graphs import OfRunner
    from compile_backend.stats import GraphStats
    from compile_backend.support import AttentionCGSupport

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Compiled:
    """All graphs of one `torch.compile` call."""

    graphs: list[BuiltGraph] = field(default_factory=list)
    runners: list[weakref.ref[object]] = field(default_factory=list)
    of_runners: RunnerGraphs = field(default_factory=RunnerGraphs)
    warn_once: WarnOnce = field(default_factory=WarnOnce)


@dataclass(frozen=True, slots=True)
class CompiledFacts:
    """What a runner asks of the graphs that Dynamo made of one callable, now or later."""

    graphs: list[BuiltGraph]
    runners: list[weakref.ref[object]]
    of_runners: RunnerGraphs
    warn_once: WarnOnce

    def number_of(self, runner: object, brings: OfRunner) -> int:
        """The number of a runner among those of this callable, from 1 on.

        Each has inputs, and so graphs of pieces, of its own. Those of a runner that is gone are
        dropped once another one takes its number.

        Args:
            runner: that captures.
            brings: to its graphs, which are dropped where it brought something else before.
        """
        held = [reference() for reference in self.runners]
        if not any(runner is one for one in held) and None not in held and held:
            del held
            gc.collect()  # a runner is part of cycles
            held = [reference() for reference in self.runners]
        of_runners = self.of_runners.runners
        places = [place for place, one in enumerate(held) if one is runner]
        places += [place for place, one in enumerate(held) if one is None]
        place = next(iter(places), len(held))
        number = place + 1
        was = of_runners.get(number)
        if was is not None and (was.send is None) == (brings.send is None):
            return number  # else its graphs are of the other kind
        for built in self.graphs:
            built.graph.forget_runner(number)
        of_runners[number] = brings
        gone = weakref.ref(runner, lambda _: of_runners.pop(number, None))
        self.runners[place : place + 1] = [gone]
        return number

    def num_eager_sections(self) -> int:
        """Sections between pieces, over all graphs."""
        return sum(len(built.plan.split.eager_sections) for built in self.graphs)

    def support(self) -> AttentionCGSupport:
        """The weakest level of all splitting ops found."""
        return lowest(level for built in self.graphs for level in built.plan.support.values())

    def stats(self) -> list[GraphStats]:
        """The counts of each graph."""
        return [built.graph.stats for built in self.graphs]


class CudagraphModesBackend:
    """What `torch.compile(..., backend="cudagraph_modes")` calls for every graph."""

    # Dynamo shares what it compiled between `torch.compile` calls whose backends and options are
    # equal. Graphs hold the addresses of one model's weights, so no two calls are.
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return False

    def __deepcopy__(self, memo: object) -> CudagraphModesBackend:
        """A deep copy of a compiled model goes on using this backend."""
        return self

    def __reduce__(self) -> str | tuple[Any, ...]:
        """A pickled model uses the backend of the process that reads it: graphs stay behind."""
        return "cudagraph_modes" if self is cudagraph_modes else (type(self), ())

    def __init__(self) -> None:
        self._engines: dict[torch.device, GraphEngine] = {}
        self._compiled: dict[int, tuple[weakref.ref[object], _Compiled]] = {}
        self._traces: dict[int, tuple[weakref.ref[object], StoredTraces]] = {}
        self._without_collections = DuringCompilation(self._collector_off, self._collector_on)

    @property
    def __name__(self) -> str:
        """What `torch.compile` asks for where it is given this object instead of its name."""
        self._looked_up()
        return "cudagraph_modes"

    @property
    def _tags(self) -> tuple[str, ...]:
        """What Dynamo notes on a backend when one is first asked for by name."""
        return ()

    @_tags.setter
    def _tags(self, _: tuple[str, ...]) -> None:
        self._looked_up()

    def _looked_up(self) -> None:
        # The first call that uses this backend may be one that Dynamo will not compile.
        watch_attempts(self._limit_reached, self._attempt_begins)
        start_where_all_is_new(options_at_lookup())

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
        watch_attempts(self._limit_reached, self._attempt_begins)
        try:
            return self._compile(graph_module, example_inputs, mode, options)
        except ConfigError as error:
            raise reaching_the_user(error) from None
        finally:
            self._without_collections.end_if_forgotten()

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
        check_asked(config)
        owner = calling_compile()
        compiled = self._compiled_by(owner)
        is_whole = is_stored(graph_module) or not (
            ends_at_a_graph_break(graph_module)
            or is_part_of_a_function()
            or leaves_something_behind()
        )
        traces = self._traces_of(owner)
        if traces is not None:
            traces.graph(graph_module, is_whole=is_whole)
        start = time.perf_counter()
        plan = plan_graph(graph_module, example_inputs, config)
        _tell(plan, compiled.warn_once)
        built = build_graph(
            plan,
            config,
            self._engine(plan.device, config),
            compiled.of_runners,
            compiled.warn_once,
            is_whole=is_whole,
        )
        compiled.graphs.append(built)
        logger.info(
            "%d %s (%d compiled, %d loaded) and %d eager sections at %s in %.1f s; "
            "%d graphs planned",
            built.num_pieces,
            "partitions" if built.num_partitions else "pieces",
            built.counts.compiles,
            built.counts.loads,
            len(plan.split.eager_sections),
            plan.mode.name,
            time.perf_counter() - start,
            plan.num_graphs,
        )
        return built.graph

    @staticmethod
    def _collector_off() -> None:
        COLLECTOR.end_those_who_wait()
        COLLECTOR.begin()
        COLLECTOR.off()

    @staticmethod
    def _collector_on(collects_next: bool) -> None:  # noqa: FBT001 - a callback
        if collects_next:
            COLLECTOR.end_after_next()
        else:
            COLLECTOR.end()

    def _attempt_begins(self, compile_call: object) -> None:
        if backend_of(compile_call) is self:
            self._without_collections.expect()

    def _limit_reached(self, reached: LimitReached) -> None:
        owner: Any = reached.compile_call
        if backend_of(owner) is not self:
            return
        option, more = reached.option, 8 * reached.limit
        written = f"{option[:-1]}={more})" if option.endswith(")") else f"{option} = {more}"
        error = ConfigError(
            option,
            reached.limit,
            f"is reached: Dynamo compiled {reached.function} that often, for models of one class "
            "or for calls that differ, and runs it from now on without this backend",
            f"raise it before the first call, as by {written}; what is refused by now needs "
            "torch.compiler.reset() besides",
        )
        if CompilationConfig.from_options(owner.kwargs.get("options")).strict:
            raise reaching_the_user(error)
        if not reached.is_raised:
            self._compiled_by(owner).warn_once(logger, (option, reached.function), "%s", error)

    def reset(self) -> None:
        """Forget every compiled graph; called by `torch._dynamo.reset()`."""
        self._compiled.clear()

    def stats(self, compiled: object) -> Report:
        """See `compile_backend.stats`."""
        graphs = self._known(compiled).graphs
        plans = [built.plan for built in graphs]
        return Report(
            graphs=len(graphs),
            pieces=sum(built.num_pieces for built in graphs),
            eager_sections=sum(len(plan.split.eager_sections) for plan in plans),
            compiles=sum(built.counts.compiles for built in graphs),
            compile_s=sum(built.counts.compile_s for built in graphs),
            capture_s=sum(built.graph.stats.capture_s for built in graphs),
            mode_asked=tuple(dict.fromkeys(plan.asked.name for plan in plans)),
            mode_resolved=tuple(dict.fromkeys(plan.mode.name for plan in plans)),
            downgrades=tuple(
                dict.fromkeys(str(d) for plan in plans for d in plan.resolution.downgrades)
            ),
            by_key=added_rows(built.graph.stats for built in graphs),
            loads=sum(built.counts.loads for built in graphs),
            load_s=sum(built.counts.load_s for built in graphs),
            unstorable=sum(built.counts.unstorable for built in graphs),
            passes=_places_changed(plans),
            partitions=sum(built.num_partitions for built in graphs),
        )

    def drop_graphs(self, compiled: object) -> None:
        """See `compile_backend.reset`."""
        compiled_by = self._known(compiled)
        for built in compiled_by.graphs:
            built.graph.reset()
        compiled_by.of_runners.graphs_are_gone()

    def facts(self, compiled: object) -> CompiledFacts | None:
        """What is known of a compiled module or function; None if it is not compiled by this."""
        owner = compile_behind(compiled)
        if owner is None or backend_of(owner) is not self:
            return None
        compiled_by = self._compiled_by(owner)
        return CompiledFacts(
            compiled_by.graphs,
            compiled_by.runners,
            compiled_by.of_runners,
            compiled_by.warn_once,
        )

    def store_traces(self, compiled: object) -> None:
        """From now on, what is traced for a callable may come from another process.

        Otherwise it is kept for others. Nothing happens where something is traced already, the
        callable is not compiled by this backend, or its options turn the cache off.
        """
        owner: Any = compile_behind(compiled)
        if owner is None or backend_of(owner) is not self or self._traces_of(owner) is not None:
            return
        compiled_by = self._compiled_by(owner)
        config = CompilationConfig.from_options(owner.kwargs.get("options"))
        cache = artefact_cache(config, compiled_by.warn_once)
        if cache is None or compiled_by.graphs:
            return
        reference = weakref.ref(owner)
        traces = StoredTraces(
            config,
            cache,
            lambda: _alive(reference),
            lambda: self._compiled_by(_alive(reference)).graphs,
        )
        self._traces[id(owner)] = (reference, traces)
        watch_traces(compiled, traces)

    def _traces_of(self, owner: object | None) -> StoredTraces | None:
        reference, traces = self._traces.get(id(owner), (None, None))
        return traces if reference is not None and reference() is owner else None

    def new_engine(self, device: torch.device) -> GraphEngine:
        """An engine with a memory pool of its own."""
        return CudaEngine(device) if device.type == "cuda" else ReferenceEngine(device)

    def _engine(self, device: torch.device, config: CompilationConfig) -> GraphEngine:
        """The device's engine; one of its own for a graph whose outputs are not copied.

        In a shared memory pool the replay of another graph may overwrite them.
        """
        engine = self._engines.get(device) if config.cudagraph_clone_outputs else None
        if engine is None:
            engine = self.new_engine(device)
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

    def _known(self, compiled: object) -> _Compiled:
        owner = compile_behind(compiled)
        known = self._compiled.get(id(owner))
        if known is not None and known[0]() is owner:
            return known[1]
        if owner is not None and isinstance(backend_of(owner), CudagraphModesBackend):
            return _Compiled()
        other = backend_name(compiled)
        by = "torch.compile" if other is None else f"this backend, but by {other!r}"
        fix = 'pass what torch.compile(..., backend="cudagraph_modes") returned'
        raise ConfigError("compiled", compiled, f"was not compiled by {by}", fix)


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


def _alive(reference: weakref.ref[Any]) -> Any:
    """A `torch.compile` call whose functions are being called."""
    owner = reference()
    assert owner is not None
    return owner


def _places_changed(plans: Iterable[GraphPlan]) -> dict[str, int]:
    """By pass, in the order they run."""
    changed: dict[str, int] = {}
    for plan in plans:
        for result in plan.passes:
            changed[result.name] = changed.get(result.name, 0) + result.changed
    return changed


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
