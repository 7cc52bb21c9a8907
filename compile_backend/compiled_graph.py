"""One graph that Dynamo made, as it runs: the outer runner.

Per call: which mode and key, inputs to static addresses, run at FULL, PIECEWISE or NONE, outputs
back to the caller. It decides nothing about modes itself; a dispatcher or the caller does.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from compile_backend import shortcuts
from compile_backend.batch import BatchDescriptor, graph_key, runner_of
from compile_backend.config import CUDAGraphMode
from compile_backend.context import (
    ForwardContext,
    SetBy,
    begin_step,
    context_set_by,
    current_capture_session,
    current_forward_context,
    end_step,
    enter_forward_context,
)
from compile_backend.errors import CaptureError, number_of
from compile_backend.known_calls import KnownCall, KnownCalls
from compile_backend.once import MOVED

if TYPE_CHECKING:
    from compile_backend.dispatch import CudagraphDispatcher
    from compile_backend.graph_engine import GraphEngine
    from compile_backend.inputs import InputBuffers
    from compile_backend.once import WarnOnce
    from compile_backend.outputs import Loan, OutputReturns
    from compile_backend.padding import RowPadding
    from compile_backend.plain_calls import BatchReader
    from compile_backend.replay_plan import ReplayPlan
    from compile_backend.stats import GraphStats, KeyStats
    from compile_backend.wrapper import CUDAGraphWrapper

logger = logging.getLogger(__name__)

_NONE = CUDAGraphMode.NONE
_PIECEWISE = CUDAGraphMode.PIECEWISE
_FULL = CUDAGraphMode.FULL

# One number of tokens may come in several shapes, such as 2 x 4 and 4 x 2. A size that is new in
# every step would otherwise capture for ever and never replay.
MAX_SHAPES_PER_SIZE = 16

# Weights that are elsewhere in every call, as where layers share one compiled function, would
# otherwise capture for ever and hardly replay.
MAX_MOVES_IN_A_ROW = 8

# Steps of a key after which nobody tries to make a replay plan any more: warm-ups come first.
MAX_PLAN_ATTEMPTS = 16


Recorder = Callable[[BatchDescriptor, "ReplayPlan", Sequence[Any], Sequence[Any]], None]


class SectionRunner(Protocol):
    """Runs a part of the graph in PIECEWISE steps."""

    def drop(self, key: BatchDescriptor) -> None:
        """Drop the graph of one key; the next step captures it again."""

    def forget(self, key: BatchDescriptor) -> None:
        """Drop all that is known of one key, which may come again as another runner's."""

    def reset(self) -> None:
        """Drop every graph and all static memory."""


def _never(_: BatchDescriptor) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Programs:
    """The graph, three ways.

    Attributes:
        plain: as compiled, splitting ops as they are.
        piecewise: what lies between splitting ops through its wrappers, with static addresses.
        capture_pieces: captures every piece and runs nothing; None where nothing is split.
        runners: of what holds graphs or static memory in `piecewise`.
        plan: a key's replay plan, if it can have one now.
        sends: whether the first graph of a key brings the inputs of the key's runner.
        own_outputs: positions of the outputs that keys of runners have in memory of the runner.
    """

    plain: Callable[[Sequence[Any]], tuple[Any, ...]]
    piecewise: Callable[[Sequence[Any]], tuple[Any, ...]] | None
    capture_pieces: Callable[[Sequence[Any]], tuple[Any, ...]] | None
    runners: tuple[SectionRunner, ...]
    plan: Callable[[BatchDescriptor], ReplayPlan | None]
    sends: Callable[[BatchDescriptor], bool] = _never
    own_outputs: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class CallRules:
    """How plain calls find their key.

    Attributes:
        reader: describes a call.
        exact: keys for calls as they are.
        padded: keys for calls that may grow; None where they may not.
        padding: grows them.
        sizes: the numbers of tokens that the resolved mode has keys for.
        is_lazy: whether keys are captured when met, outside of `capture()`.
    """

    reader: BatchReader
    exact: CudagraphDispatcher
    padded: CudagraphDispatcher | None
    padding: RowPadding | None
    sizes: frozenset[int]
    is_lazy: bool

    def remedy(self, batch: BatchDescriptor, args: Sequence[Any]) -> str:
        """What gives a graph to a call whose size has none."""
        adding = "add it to cudagraph_capture_sizes"
        # Padding was tried, or has nothing to reach.
        if self.padded is not None or batch.num_tokens > max(self.sizes):
            return adding
        if self.reader.num_rows(args) == 1:
            return f"{adding}; padding is no help, since 1 row is compiled for 1 row only"
        return f"{adding}, or set cudagraph_pad_inputs=True and compile with dynamic=True"


@dataclass(slots=True)
class _Repeated:
    """What a key's steps past Dynamo have in common.

    Attributes:
        plan: of the key.
        stats: where to count.
        loan: of the outputs; None before the first.
    """

    plan: ReplayPlan
    stats: KeyStats
    loan: Loan | None = None


class CompiledGraph:
    """Runs one compiled graph at the mode and key of each call.

    Args:
        programs: the stitched sections.
        full: the wrapper around the plain program.
        rules: for calls without a forward context.
        inputs: static memory for callers' tensors.
        outputs: what callers get back.
        engine: captures and replays.
        stats: counts.
        warn_once: shared by all graphs of one `torch.compile` call.
        needs_grad: whether somebody may ask for gradients; then nothing is captured.
        has_graphs: whether the device has graphs; else every call runs at NONE.
        growth: how many times larger tensors may be at other keys, by key.

    Attributes:
        stats: counts.
        recorder: told of every step of a key with a replay plan: key, plan, arguments, outputs.
    """

    def __init__(
        self,
        programs: Programs,
        full: CUDAGraphWrapper,
        rules: CallRules,
        inputs: InputBuffers,
        outputs: OutputReturns,
        engine: GraphEngine,
        stats: GraphStats,
        warn_once: WarnOnce,
        *,
        needs_grad: bool,
        has_graphs: bool,
        growth: Callable[[BatchDescriptor], int],
    ) -> None:
        self._programs = programs
        self._full = full
        self._rules = rules
        self._inputs = inputs
        self._outputs = outputs
        self._engine = engine
        self._warn_once = warn_once
        self._needs_grad = needs_grad
        self._has_graphs = has_graphs
        self._growth = growth
        self._seen: set[tuple[CUDAGraphMode, BatchDescriptor]] = set()
        self._one_at_a_time = threading.RLock()
        self._captured_ahead: set[tuple[CUDAGraphMode, BatchDescriptor]] = set()
        self._num_shapes: Counter[tuple[CUDAGraphMode, int]] = Counter()
        self._moves_in_a_row: Counter[BatchDescriptor] = Counter()
        self._plans: dict[BatchDescriptor, ReplayPlan] = {}
        self._plan_attempts: Counter[BatchDescriptor] = Counter()
        self._repeated: dict[BatchDescriptor, _Repeated] = {}
        self._known = KnownCalls()
        self.stats = stats
        self.recorder: Recorder | None = None

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Run the graph on the inputs that Dynamo passes."""
        if self._needs_grad:
            return self._without_graph(self._rules.reader.read(args), args)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._without_gradients(args)
        return self._without_gradients(args)

    def _without_gradients(self, args: tuple[Any, ...]) -> Sequence[Any]:
        if not self._has_graphs:
            return self._programs.plain(args)
        context = current_forward_context()
        if context is None or context_set_by() is SetBy.PLAIN_CALL:
            return self._plain_call(args)
        if self._engine.is_capturing():
            return self._programs.plain(args)
        if context_set_by() is SetBy.RUNNER:
            return self._programs.plain(args)
        if context_set_by() is SetBy.GRAPH:
            self._warn_once(
                logger,
                "nested",
                "a function compiled with CUDA graphs was called inside another one's step; it "
                "runs without graphs of its own there",
            )
            return self._programs.plain(args)
        mode, key = context.cudagraph_runtime_mode, context.batch_descriptor
        if mode is _NONE or key is None:
            return self._without_graph(key or self._rules.reader.read(args), args)
        key = self._rules.reader.with_sizes(key, args)
        return self._with_graph(mode, key, args, context)

    def reset(self) -> None:
        """Drop every graph and all static memory."""
        with self._one_at_a_time:
            self._full.reset()
            for runner in self._programs.runners:
                runner.reset()
            self._inputs.reset()
            self._outputs.reset()
            self._seen.clear()
            self._captured_ahead.clear()
            self._num_shapes.clear()
            self._moves_in_a_row.clear()
            self._known.forget()
            self._forget_plans()

    def sends_inputs(self, key: BatchDescriptor) -> bool:
        """Whether steps of a key at PIECEWISE bring the inputs of the key's runner themselves."""
        return self._programs.sends(key)

    def forget_runner(self, number: int) -> None:
        """Drop the graphs of a runner that is gone, and all that was kept for its keys.

        Args:
            number: of the runner.
        """
        with self._one_at_a_time:
            for mode, key in [seen for seen in self._seen if runner_of(seen[1]) == number]:
                self._drop_graphs(key)
                self._full.forget(key)
                for section in self._programs.runners:
                    section.forget(key)
                self._moves_in_a_row.pop(key, None)
                self._inputs.forget(key)
                self._seen.discard((mode, key))
                self._captured_ahead.discard((mode, key))
                self._num_shapes[mode, key.num_tokens] -= 1
                self.stats.rows.pop((mode, key), None)
            self._outputs.forget(number)

    def _plain_call(self, args: tuple[Any, ...]) -> Sequence[Any]:
        rules = self._rules
        shapes = rules.reader.shapes(args)
        known = self._known_call(shapes, args)
        if known is not None:
            return known
        if self._engine.is_capturing():
            return self._programs.plain(args)
        batch = rules.reader.read(args)
        mode, key = rules.exact.dispatch(batch)
        if mode is _NONE:
            if rules.padded is not None:
                padded = self._padded_call(batch, args)
                if padded is not None:
                    return padded
            self._tell_without_graph(batch, args)
            return self._without_graph(batch, args)
        key = rules.reader.with_sizes(key, args)
        with self._one_at_a_time:  # whoever drops graphs forgets what was learned of them
            outputs = self._with_graph(mode, key, args, ForwardContext())
            if mode is _FULL and shapes is not None:
                self._learn(shapes, key)
        return outputs

    def _known_call(self, shapes: Hashable, args: tuple[Any, ...]) -> Sequence[Any] | None:
        """A call like one that was replayed at FULL; None if there is more to look after."""
        with self._one_at_a_time:
            known = self._known.get(shapes)
            if known is None or self._moves_in_a_row:
                return None
            done = shortcuts.NOTHING
            if known.way is not None:
                done = shortcuts.replay_call(*known.way, known.graph.short, args)
            if done == shortcuts.NOTHING and (
                self._engine.is_capturing() or not self._inputs.reload(known.key, args)
            ):
                return None
            if done != shortcuts.LAUNCHED:
                known.graph.replay()
            known.stats.replays += 1
            known.stats.steps += 1
            return known.giving.give(known.graph.outputs, args)

    def _learn(self, shapes: Hashable, key: BatchDescriptor) -> None:
        """Take note of a call that just ran, if it is one replay."""
        key = graph_key(_FULL, key)
        graph, giving = self._full.graph_to_replay(key), self._outputs.settled((_FULL, key))
        if graph is None or giving is None or self._full.failure(key) is not None:
            return
        stats, way = self.stats.at(_FULL, key), self._inputs.short_way(key)
        self._known.learn(shapes, KnownCall(key, graph, stats, way, giving))

    def _padded_call(self, batch: BatchDescriptor, args: Sequence[Any]) -> Sequence[Any] | None:
        """The call at the next capture size; None where it cannot grow."""
        rules = self._rules
        assert rules.padded is not None
        assert rules.padding is not None
        mode, key = rules.padded.dispatch(batch)
        if mode is _NONE:
            return None
        refusal = rules.padding.refusal(args, batch.num_tokens, key.num_tokens)
        if refusal is None and self._inputs.overlaps(None, args):
            refusal = "a tensor that is written shares memory with another input"
        if refusal is not None:
            text = "a call cannot be padded to a capture size (told once): %s"
            self._warn_once(logger, ("padding", refusal), text, refusal)
            return None
        grown = rules.padding.pad(args, rules.padding.rows(args, batch.num_tokens, key.num_tokens))
        key = rules.reader.with_sizes(key, grown)
        outputs = self._with_graph(mode, key, grown, ForwardContext())
        self.stats.at(mode, graph_key(mode, key)).padding += key.num_tokens - batch.num_tokens
        rules.padding.show_writes(args, grown, self._inputs.written_back)
        return rules.padding.cut(outputs, args)

    def _tell_without_graph(self, batch: BatchDescriptor, args: Sequence[Any]) -> None:
        """Say once why a call found no key."""
        if not batch.num_tokens or not self._rules.sizes:
            return
        if batch.num_tokens in self._rules.sizes:
            self._warn_once(
                logger,
                "no decode",
                "a call of %s runs without a CUDA graph since the mode has graphs of that "
                "size for uniform decode batches only (told once)",
                number_of("token", batch.num_tokens),
            )
            return
        remedy = self._rules.remedy(batch, args)
        self._warn_once(
            logger,
            ("no key", remedy),
            "a call of %s runs without a CUDA graph since that is no capture size (told once); %s",
            number_of("token", batch.num_tokens),
            remedy,
        )

    def _without_graph(self, batch: BatchDescriptor, args: Sequence[Any]) -> Sequence[Any]:
        self.stats.at(_NONE, batch).steps += 1
        if context_set_by() is SetBy.USER:
            return self._programs.plain(args)
        with enter_forward_context(ForwardContext(None, _NONE, batch), SetBy.PLAIN_CALL):
            return self._programs.plain(args)

    def _with_graph(
        self,
        mode: CUDAGraphMode,
        key: BatchDescriptor,
        args: Sequence[Any],
        context: ForwardContext,
    ) -> Sequence[Any]:
        with self._one_at_a_time:  # graphs and static memory serve one step at a time
            key = graph_key(mode, key)
            if mode is _FULL and self._full.failure(key) is not None:
                mode, key = _PIECEWISE, graph_key(_PIECEWISE, key)
            if mode is _PIECEWISE and self._programs.piecewise is None:
                return self._without_graph(key, args)
            if not self._may_run(mode, key):
                return self._without_graph(key, args)
            if self._moves_in_a_row and self._moves_in_a_row[key] >= MAX_MOVES_IN_A_ROW:
                return self._without_graph(key, args)
            static_args, has_moved = self._inputs.load(key, args, self._growth(key))
            if has_moved:
                self._drop(key)
            elif self._moves_in_a_row:
                self._moves_in_a_row.pop(key, None)
            if self._inputs.overlaps(key, args):
                self._warn_once(
                    logger,
                    "overlap",
                    "a call of %s runs without a CUDA graph since a tensor that it writes shares "
                    "memory with another input (told once); give each memory of its own",
                    number_of("token", key.num_tokens),
                )
                return self._without_graph(key, args)
            own = ForwardContext(context.attn_metadata, mode, key, context.extra)
            stats = self.stats.at(mode, key)
            try:
                outputs = self._replay(own, static_args, stats)
                if outputs is None:
                    outputs = self._run(own, static_args)
            finally:
                self._inputs.write_back(static_args, args)
            stats.steps += 1
            returned = self._outputs.give((mode, key), outputs, static_args, args)
        if self.recorder is not None and mode is _PIECEWISE and key in self._plans:
            self.recorder(key, self._plans[key], args, returned)
        return returned

    def repeat(
        self, key: BatchDescriptor, plan: ReplayPlan, args: Sequence[Any], metadata: Any
    ) -> Any | None:
        """A step at PIECEWISE on the very arguments of an earlier one, past Dynamo.

        Args:
            key: that the recorder was told.
            plan: likewise.
            args: likewise; whoever calls knows that all are where they were.
            metadata: of attention in this step.

        Returns:
            The outputs, valid until the next step of the same runner; None if the key has another
            plan by now, or none.
        """
        with self._one_at_a_time:
            repeated = self._repeated.get(key)
            if repeated is None or repeated.plan is not plan:
                if self._plans.get(key) is not plan:
                    return None
                repeated = _Repeated(plan, self.stats.at(_PIECEWISE, key))
                self._repeated[key] = repeated
            token = begin_step(ForwardContext(metadata, _PIECEWISE, key))
            try:
                outputs = plan.program(args)
            finally:
                end_step(token)
            repeated.stats.replays += plan.num_replays
            repeated.stats.steps += 1
            row = (_PIECEWISE, key)
            if repeated.loan is None:
                repeated.loan = self._outputs.lend(
                    row,
                    outputs,
                    args,
                    runner_of(key),
                    self._growth(key),
                    as_they_are=self._programs.own_outputs,
                )
            returned = repeated.loan.filled(outputs)
            if returned is None:
                returned = self._outputs.give(row, outputs, args, args)
            return returned

    def _replay(
        self, own: ForwardContext, static_args: Sequence[Any], stats: KeyStats
    ) -> Sequence[Any] | None:
        """Replay what the key holds for the whole step; None where that is not ready."""
        key = own.batch_descriptor
        assert key is not None
        outputs: Sequence[Any]
        if own.cudagraph_runtime_mode is _FULL:
            graph = self._full.graph_to_replay(key)
            if graph is None:
                return None
            graph.replay()
            outputs, num_replays = graph.outputs, 1
        else:
            plan = self._plans.get(key)
            if plan is None:
                return None
            with enter_forward_context(own):
                outputs = plan.program(static_args)
            num_replays = plan.num_replays
        stats.replays += num_replays
        return outputs

    def _run(self, own: ForwardContext, static_args: list[Any]) -> Sequence[Any]:
        """Run the step under its key: warm up, capture or replay, as the wrappers find it."""
        self._remember(own, static_args)
        with enter_forward_context(own), self._engine.session():
            outputs: Sequence[Any]
            if own.cudagraph_runtime_mode is _FULL:
                outputs = self._full(*static_args)
                return outputs
            assert self._programs.piecewise is not None
            outputs = self._programs.piecewise(static_args)
        assert own.batch_descriptor is not None
        self._try_to_plan(own.batch_descriptor)
        return outputs

    def _try_to_plan(self, key: BatchDescriptor) -> None:
        """Make the key's replay plan once every piece holds its graph."""
        if self._plan_attempts[key] >= MAX_PLAN_ATTEMPTS or current_capture_session() is not None:
            return
        self._plan_attempts[key] += 1
        plan = self._programs.plan(key)
        if plan is not None:
            self._plans[key] = plan

    def _forget_plans(self, key: BatchDescriptor | None = None) -> None:
        for held in (self._plans, self._plan_attempts, self._repeated):
            if key is None:
                held.clear()
            else:
                held.pop(key, None)

    def _may_run(self, mode: CUDAGraphMode, key: BatchDescriptor) -> bool:
        """Whether a key has graphs, or may get them now."""
        is_seen = (mode, key) in self._seen
        is_captured = is_seen if self._rules.is_lazy else (mode, key) in self._captured_ahead
        if is_captured or (is_seen and current_capture_session() is not None):
            return True
        if not self._rules.is_lazy and current_capture_session() is None:
            self._warn_once(
                logger,
                "not captured",
                "a call of %s runs without a CUDA graph since its key was not captured "
                "ahead (told once); call the model with that size inside capture()",
                number_of("token", key.num_tokens),
            )
            return False
        if self._num_shapes[mode, key.num_tokens] == MAX_SHAPES_PER_SIZE:
            self._warn_once(
                logger,
                "shapes",
                "calls of %s came in more than %d shapes; further ones run without CUDA "
                "graphs (told once); keep the other sizes fixed, such as that of a mask",
                number_of("token", key.num_tokens),
                MAX_SHAPES_PER_SIZE,
            )
            return False
        return True

    def _remember(self, context: ForwardContext, static_args: list[Any]) -> None:
        """Note a key that is met, for the capture session if there is one."""
        mode, key = context.cudagraph_runtime_mode, context.batch_descriptor
        assert key is not None
        if (mode, key) not in self._seen:
            self._seen.add((mode, key))
            self._num_shapes[mode, key.num_tokens] += 1
        session = current_capture_session()
        if session is not None:
            session.add(
                (id(self), mode, key),
                (key.num_tokens, mode.value),
                lambda: self._capture_ahead(context, static_args),
                self._engine.session,
            )

    def _capture_ahead(self, context: ForwardContext, static_args: list[Any]) -> None:
        mode, key = context.cudagraph_runtime_mode, context.batch_descriptor
        assert key is not None
        if (mode, key) not in self._seen:
            return  # reset since
        self._captured_ahead.add((mode, key))
        with self._engine.session(), enter_forward_context(context):
            try:
                if mode is _FULL:
                    if not self._full.holds(key):
                        self._full.capture(key, static_args)
                elif self._programs.capture_pieces is not None:
                    self._programs.capture_pieces(static_args)
            except CaptureError as error:
                logger.warning("%s; it runs at a lower mode from now on", error)

    def _drop(self, key: BatchDescriptor) -> None:
        """An input that graphs read is elsewhere now: capture them again."""
        self._warn_once(
            logger,
            MOVED,
            "a weight or a static input is at another address than when it was captured (told "
            "once); its graphs are captured again",
        )
        self._drop_graphs(key)
        self._moves_in_a_row[key] += 1
        if self._moves_in_a_row[key] == MAX_MOVES_IN_A_ROW:
            self._warn_once(
                logger,
                "moves",
                "weights or static inputs were elsewhere in each of %d calls of one size; such "
                "calls run without CUDA graphs from now on (told once). Where layers share one "
                "compiled function, compile the whole model, or each layer by itself",
                MAX_MOVES_IN_A_ROW,
            )

    def _drop_graphs(self, key: BatchDescriptor) -> None:
        self._full.drop(key)
        self._known.forget()
        for runner in self._programs.runners:
            runner.drop(key)
        self._outputs.reset()
        self._forget_plans(key)
