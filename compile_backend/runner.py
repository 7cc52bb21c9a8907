"""`GraphModelRunner`: a model's steps, as an inference engine's own loop runs them.

Per step: dispatch, pad, fill the inputs, make the metadata, run. What to capture is the
dispatcher's to know, what attention reads the metadata builder's, and how a full graph is held
that of `full_steps`.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from compile_backend import shortcuts
from compile_backend.asked_names import check_asked
from compile_backend.backend import cudagraph_modes
from compile_backend.batch import BatchDescriptor
from compile_backend.batch_loader import BatchLoader
from compile_backend.capture_estimate import SAMPLE, extrapolate
from compile_backend.capture_keys import CapturedKeys, capture_keys, told
from compile_backend.config import CompilationConfig, CUDAGraphMode, at_least
from compile_backend.dispatch import CudagraphDispatcher
from compile_backend.errors import CaptureError, number_of
from compile_backend.full_steps import FullSteps
from compile_backend.known_steps import NOT_RUN, KnownPieces, KnownSteps
from compile_backend.model_steps import ModelSteps
from compile_backend.once import WarnOnce
from compile_backend.output_cut import OutputCut
from compile_backend.piecewise_steps import PiecewiseSteps
from compile_backend.runner_arguments import (
    check_builder,
    check_device,
    check_input_spec,
    check_model,
    check_output_shape,
    check_ranks,
    found_device,
)
from compile_backend.runner_batch import Batch
from compile_backend.runner_checks import (
    check_batch,
    check_is_batch,
    check_memory_limit,
    check_outputs,
    check_query_lens,
)
from compile_backend.runner_mode import NOT_COMPILED, mode_asked, resolve_for_runner
from compile_backend.runner_report import (
    CaptureMeter,
    RunnerReport,
    graphs_by_mode,
    steps_with_graphs,
)
from compile_backend.sizes import capture_sizes
from compile_backend.stats import GraphStats
from compile_backend.step_inputs import Dim, InputSpec, StepInputs
from compile_backend.torch_internals.dynamo import mark_step_input, size_1_like_any_other
from compile_backend.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    import numpy.typing as npt

    from compile_backend.capture_estimate import CaptureEstimate
    from compile_backend.dispatch import Route
    from compile_backend.distributed import RankAgreement
    from compile_backend.resolve import Resolution
    from compile_backend.runner_batch import MetadataBuilder

logger = logging.getLogger(__name__)

_NONE = CUDAGraphMode.NONE
_PIECEWISE = CUDAGraphMode.PIECEWISE
_FULL = CUDAGraphMode.FULL
_HIGHEST = (None, _NONE, _PIECEWISE, _FULL)


@dataclass(frozen=True, slots=True)
class _Captured:
    """What `capture()` settled."""

    resolution: Resolution
    full: FullSteps
    piecewise: PiecewiseSteps | None
    known: KnownSteps


class GraphModelRunner:
    """Captures a model's graphs ahead, then runs every batch at the best mode it can.

    Args:
        model: called with the inputs by name; as it is, or compiled with
            `torch.compile(..., backend="cudagraph_modes")`, which PIECEWISE needs. Each tensor
            that it returns has the sizes of `output_shape` in front.
        config: the mode and the capture sizes; a `CompilationConfig` or its options.
        input_spec: every tensor that the model takes.
        max_num_seqs: most requests of a batch.
        max_num_batched_tokens: most tokens of a batch.
        uniform_decode_query_len: tokens of each request in a uniform decode batch; that of the
            config if None.
        metadata_builder: for attention that reads the forward context; None if there is none.
        output_shape: the leading sizes of what the model returns, `Dim`s and numbers; checked by
            `capture()`.
        max_loras: most adapters in a batch; 0 without adapters.
        ranks: the processes that the model is spread over, which all run each step at one mode
            and one size; `RankAgreement.over(group)`. None for a model in one process.
        device: where the model is.

    Raises:
        ConfigError: an option is wrong, the mode needs pieces and the model is not compiled, or
            the model is on another device.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        config: CompilationConfig | Mapping[str, Any] | None = None,
        *,
        input_spec: Sequence[InputSpec],
        max_num_seqs: int,
        max_num_batched_tokens: int = 8192,
        uniform_decode_query_len: int | None = None,
        metadata_builder: MetadataBuilder | None = None,
        output_shape: Sequence[int | Dim] = (Dim.NUM_TOKENS,),
        max_loras: int = 0,
        ranks: RankAgreement | None = None,
        device: torch.device | str,
    ) -> None:
        check_model(model)
        check_input_spec(input_spec)
        check_builder(metadata_builder)
        check_output_shape(output_shape)
        check_ranks(ranks)
        found = found_device(device)
        self.config = (
            config
            if isinstance(config, CompilationConfig)
            else CompilationConfig.from_options(config)
        )
        check_asked(self.config)
        self.model = model
        self._compiled = cudagraph_modes.facts(model)
        self._asked = mode_asked(self.config, self._compiled)
        self.builder = metadata_builder
        query_len = (
            self.config.uniform_decode_query_len
            if uniform_decode_query_len is None
            else uniform_decode_query_len
        )
        self._ranks = ranks
        self._dispatcher = CudagraphDispatcher(
            self.config,
            max_num_seqs=max_num_seqs,
            uniform_decode_query_len=query_len,
            max_loras=max_loras,
        )
        self._max_num_seqs = max_num_seqs = self._dispatcher.max_num_seqs
        self._query_len = self._dispatcher.uniform_decode_query_len
        self._output_shape = tuple(output_shape)
        self._cut = OutputCut(output_shape)
        max_num_batched_tokens = at_least(1)("max_num_batched_tokens", max_num_batched_tokens)
        self._max_num_batched_tokens = max_num_batched_tokens
        builder_specs = metadata_builder.input_spec if metadata_builder is not None else ()
        sizes = capture_sizes(self.config, max_num_seqs=max_num_seqs, query_len=self._query_len)
        with torch.inference_mode(False):
            inputs = StepInputs(
                (*input_spec, *builder_specs),
                found,
                max_num_tokens=max(max_num_batched_tokens, *sizes.mixed, *sizes.uniform),
                max_num_reqs=max_num_seqs,
                on_new=None if self._compiled is None else _marked,
            )
        self._largest_size = sizes.mixed[-1]
        # What all ranks must have in common, since each step has one size.
        # Sizes follow from others of these, which are told first.
        self._limits = {
            "cudagraph_mode": self._asked.name,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "uniform_decode_query_len": self._query_len,
            "max_loras": max_loras,
            "cudagraph_specialize_lora": self.config.cudagraph_specialize_lora,
            "cudagraph_capture_sizes": (sizes.mixed, sizes.uniform),
        }
        self._loader = BatchLoader(inputs, input_spec, metadata_builder)
        self._model_steps = ModelSteps(model, self._loader, max_num_seqs)
        self._engine = cudagraph_modes.new_engine(inputs.device)
        module = _module_of(model)
        check_device(module, inputs.device)
        self._weights = Weights(module)
        self._warn_once = WarnOnce()
        self._meter = CaptureMeter(self._loader.inputs.device)
        self._stats = GraphStats()
        self._graphs_before: dict[CUDAGraphMode, int] = {}
        self._captured: _Captured | None = None

    def capture(self, *, progress: bool = True, max_bytes: int | None = None) -> None:
        """Warm up and capture every graph of the plan: all warm-ups first, the largest first.

        Args:
            progress: show what is being captured, its size, the memory taken and the time left.
            max_bytes: of device memory for all graphs together. Sizes that would take more have
                none, and a warning tells which; None sets no limit.

        Raises:
            ConfigError: the model returns something else than `output_shape` says; or with
                `strict`, the mode cannot be had; or the ranks have other settings.
        """
        check_memory_limit(max_bytes, self._loader.inputs.device)
        self._captured = None
        if not shortcuts.are_built():
            self._warn_once(logger, "shortcuts", "%s", shortcuts.NOT_BUILT)
        captured = self._prepare()
        plan = self._dispatcher.capture_plan()
        _, left_out = self._capture_keys(captured, plan, progress=progress, max_bytes=max_bytes)
        if left_out and max_bytes is not None:
            logger.warning("%s", told(left_out, max_bytes))
        without = {*left_out, *self._held_by_some(captured, plan, left_out)}
        if without:
            mode = captured.resolution.mode
            self._dispatcher.initialize_cudagraph_keys(mode, without=without)
        self._weights.note()
        self._captured = captured

    def estimate(self) -> CaptureEstimate:
        """What `capture()` would take: seconds, graphs and bytes, by mode.

        The model is compiled, and the two largest keys of each mode are captured and dropped.

        Raises:
            CaptureError: everything is captured already.
            ConfigError: as for `capture`.
        """
        if self._captured is not None:
            raise CaptureError("all graphs are captured; report() tells what they took")
        captured = self._prepare()
        plan = self._dispatcher.capture_plan()
        sample = [(mode, keys[:SAMPLE]) for mode, keys in plan]
        warm_up_s, _ = self._capture_keys(captured, sample, progress=False)
        number = self._model_steps.number
        num_graphs = graphs_by_mode(self._all_stats(), number, self._graphs_before)
        if self._compiled is not None:
            cudagraph_modes.drop_graphs(self.model)
        input_bytes = self._loader.inputs.num_bytes
        return extrapolate(plan, self._meter.by_size, num_graphs, warm_up_s, input_bytes)

    def recapture(self, *, progress: bool = True, max_bytes: int | None = None) -> None:
        """Drop every graph and capture anew, as after new weights or another layout of memory.

        Args:
            progress: as for `capture`.
            max_bytes: as for `capture`; no limit is kept from there.
        """
        check_memory_limit(max_bytes, self._loader.inputs.device)
        self._captured = None
        if self._compiled is not None:
            cudagraph_modes.drop_graphs(self.model)
        self.capture(progress=progress, max_bytes=max_bytes)

    def run(self, batch: Batch, *, highest_mode: CUDAGraphMode | str | None = None) -> Any:
        """Run one step.

        Args:
            batch: without padding; with `ranks`, one without requests runs along with the others.
            highest_mode: never go above this mode, or the one of this name, as when Python hooks
                around attention must run; with `ranks`, none of them does.

        Returns:
            What the model returns, without padding. At FULL and PIECEWISE it is valid until the
            next run.

        Raises:
            CaptureError: `capture()` was not called.
            ConfigError: `highest_mode` is no mode of a single batch.
            ValueError: the batch is no `Batch`, contradictory, or larger than the runner's limits.
        """
        captured = self._captured
        if captured is None:
            raise CaptureError("nothing is captured yet; call capture() before the first run")
        if self._weights.have_moved():
            self._forget(captured)
        if highest_mode not in _HIGHEST:
            highest_mode = CUDAGraphMode.parse_single(highest_mode, option="highest_mode")
        try:
            known = captured.known.prepare(batch, highest_mode)
            if known is not None:
                outputs = known.run(batch)
                if outputs is not NOT_RUN:
                    return outputs
                captured.known.lose(batch, highest_mode)
            to_learn = captured.known.key_of(batch, highest_mode)
            query_lens, num_tokens, is_uniform = self._count(batch.query_lens)
        except AttributeError:
            check_is_batch(batch)
            raise
        num_reqs = len(query_lens)
        if self._ranks is not None and not num_tokens:
            return self._run_idle(captured, highest_mode)
        check_batch(
            batch,
            num_tokens,
            num_reqs,
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=self._max_num_batched_tokens,
            has_builder=self.builder is not None,
        )
        all_decode = batch.all_decode
        if is_uniform and all_decode is None and self.builder is not None:
            all_decode = self.builder.is_decode(batch.attention, query_lens)
        num_loras = batch.num_active_loras
        descriptor = BatchDescriptor(
            num_tokens, num_reqs, is_uniform, num_loras > 0, num_loras, batch.extra
        )
        mode, key = self._route(
            captured, descriptor, batch, all_decode=all_decode, highest_mode=highest_mode
        )
        outputs = self._run_at(captured, mode, key, batch, query_lens, num_tokens)
        if to_learn is not None:
            self._learn(captured, to_learn, highest_mode, mode, key, num_tokens, num_reqs)
        return outputs

    def report(self) -> RunnerReport:
        """What was captured, what it took, and what ran; `print` it."""
        captured = self._captured
        all_stats, by_mode = self._all_stats(), self._meter.by_mode()
        return RunnerReport(
            mode_asked=self._asked.name,
            mode_resolved="" if captured is None else captured.resolution.mode.name,
            downgrades=()
            if captured is None
            else tuple(str(step) for step in captured.resolution.downgrades),
            by_key=steps_with_graphs(self._stats, all_stats[1:], self._model_steps.number),
            capture_s={mode: cost.seconds for mode, cost in by_mode.items()},
            num_bytes={mode: cost.num_bytes for mode, cost in by_mode.items()},
            by_size=dict(self._meter.by_size),
            num_graphs=graphs_by_mode(all_stats, self._model_steps.number, self._graphs_before),
            input_bytes=self._loader.inputs.num_bytes,
        )

    def _all_stats(self) -> list[GraphStats]:
        """The runner's own counts, then those of each compiled graph."""
        return [self._stats, *(self._compiled.stats() if self._compiled is not None else ())]

    # --- before capture ---

    def _prepare(self) -> _Captured:
        """Compile, and settle which keys there are."""
        if self._ranks is not None:
            self._ranks.check_same(self._limits)
        with torch.inference_mode(False), torch.no_grad():
            if self._compiled is not None:
                self._model_steps.number = self._compiled.number_of(self)
                cudagraph_modes.store_traces(self.model)
            self._compile()
            captured = self._settle()
            if self._ranks is not None:
                self._ranks.check_same({"cudagraph_mode": captured.resolution.mode.name})
            self._dispatcher.initialize_cudagraph_keys(captured.resolution.mode)
        return captured

    def _capture_keys(
        self,
        captured: _Captured,
        plan: Sequence[tuple[CUDAGraphMode, Sequence[BatchDescriptor]]],
        *,
        progress: bool,
        max_bytes: int | None = None,
    ) -> CapturedKeys:
        self._meter = CaptureMeter(self._loader.inputs.device)
        self._graphs_before = graphs_by_mode(self._all_stats(), self._model_steps.number)
        warm_up = functools.partial(self._warm_up, captured)
        return capture_keys(
            plan, warm_up, self._engine, self._meter, progress=progress, max_bytes=max_bytes
        )

    def _held_by_some(
        self,
        captured: _Captured,
        plan: Sequence[tuple[CUDAGraphMode, Sequence[BatchDescriptor]]],
        left_out: Container[Route],
    ) -> set[Route]:
        """What this rank captured and another one did not: nobody may choose it."""
        if self._ranks is None:
            return set()
        routes = [(mode, key) for mode, keys in plan for key in keys]
        held = [
            (mode, key) not in left_out and (mode is not _FULL or captured.full.may_run(key))
            for mode, key in routes
        ]
        missing = [
            route
            for route, is_held in zip(routes, self._ranks.everywhere(held), strict=True)
            if not is_held
        ]
        for mode, key in missing:
            if (mode, key) not in left_out:
                logger.warning(
                    "%s of %s has no graph on some rank, so it runs at a lower mode on all",
                    mode.name,
                    number_of("token", key.num_tokens),
                )
        return set(missing)

    def _compile(self) -> None:
        """Run the largest batch eagerly: it compiles the model for sizes that change.

        Where that can hold for 1 too, it does. Smaller batches then compile nothing; a model that
        asks for 1 itself is compiled once more at its first batch of that size.
        """
        num_tokens = min(max(2, self._largest_size), self._max_num_batched_tokens)
        # Dynamo takes sizes that are equal in the first call for equal in every call.
        num_reqs = min(self._max_num_seqs, max(1, num_tokens // 2))
        batch = self._loader.capture_batch(num_tokens, num_reqs)
        num_tokens = int(batch.query_lens.sum())
        key = BatchDescriptor(num_tokens, num_reqs)
        with size_1_like_any_other():
            outputs = self._model_steps.run(_NONE, key, batch, batch.query_lens, num_tokens)
        check_outputs(outputs, self._output_shape, num_tokens, num_reqs)

    def _settle(self) -> _Captured:
        resolution = resolve_for_runner(
            self._asked,
            self.config,
            self._compiled,
            self.builder,
            uniform_decode_query_len=self._query_len,
        )
        for downgrade in resolution.downgrades:
            self._warn_once(logger, downgrade, "%s", downgrade)
        if self._compiled is not None and not self._compiled.graphs:
            self._warn_once(logger, "not compiled", "the model %s; %s", *NOT_COMPILED)
        full = FullSteps(
            self._model_steps.call,
            self._loader,
            self._engine,
            self.config,
            self._stats,
            self._cut,
            self._warn_once,
        )
        piecewise = None
        if self._compiled is not None:
            piecewise = PiecewiseSteps(self._compiled, self._weights)
        known = KnownSteps(self._loader, self._query_len, by_lengths=self._ranks is None)
        return _Captured(resolution, full, piecewise, known)

    def _warm_up(self, captured: _Captured, mode: CUDAGraphMode, key: BatchDescriptor) -> None:
        for _ in range(self.config.cudagraph_num_of_warmups):
            if mode is _FULL:
                captured.full.warm_up(key)
                continue
            num_reqs = min(key.num_tokens, self._max_num_seqs)
            batch = self._loader.capture_batch(key.num_tokens, num_reqs)
            num_tokens = int(batch.query_lens.sum())
            self._model_steps.run(mode, key, batch, batch.query_lens, num_tokens)

    # --- a step ---

    def _count(self, query_lens: Any) -> tuple[npt.NDArray[np.int32], int, bool]:
        """The query lengths, their sum, and whether all are those of uniform decode batches."""
        counted = shortcuts.count_tokens(query_lens, self._query_len)
        if counted is not None:
            return query_lens.astype(np.int32, copy=False), *counted
        lens = check_query_lens(query_lens)
        is_uniform = bool((lens == self._query_len).all())
        return lens.astype(np.int32, copy=False), int(np.add.reduce(lens)), is_uniform

    def _route(
        self,
        captured: _Captured,
        descriptor: BatchDescriptor,
        batch: Batch,
        *,
        all_decode: bool | None,
        highest_mode: CUDAGraphMode | None,
    ) -> Route:
        """Where a batch runs, among what graphs there are."""
        ranks, dispatch = self._ranks, self._dispatcher.dispatch
        if ranks is not None:
            dispatch = functools.partial(ranks.dispatch, self._dispatcher)
        mode, key = dispatch(
            descriptor,
            use_cascade_attn=batch.use_cascade_attn,
            all_decode=all_decode,
            highest_mode=highest_mode,
        )
        if mode is not _FULL or captured.full.may_run(key):
            return mode, key
        if ranks is not None:  # others may hold this graph: the size must stay
            return _NONE, key
        return self._dispatcher.dispatch(descriptor, highest_mode=_PIECEWISE)

    def _run_at(
        self,
        captured: _Captured,
        mode: CUDAGraphMode,
        key: BatchDescriptor,
        batch: Batch,
        query_lens: npt.NDArray[np.int32],
        num_tokens: int,
    ) -> Any:
        """A step whose way is known; what it returns is cut to the batch."""
        if mode is _FULL:
            return captured.full.run(key, batch, query_lens, num_tokens)
        with torch.inference_mode(False), torch.no_grad():
            pieces = captured.piecewise if mode is _PIECEWISE else None
            padded = self._model_steps.run(mode, key, batch, query_lens, num_tokens, pieces)
            outputs = self._cut(padded, num_tokens, len(query_lens))
        # At NONE nothing is told apart but the tokens: else every batch would be a row of its own.
        stats = self._stats.at(mode, key.relaxed())
        stats.steps += 1
        stats.padding += key.num_tokens - num_tokens
        return outputs

    def _run_idle(self, captured: _Captured, highest_mode: CUDAGraphMode | None) -> Any:
        """A step of a rank without requests: as that of the others, on a batch that means nothing.

        Returns:
            What the model returns, without any rows.
        """
        nothing = BatchDescriptor(0, 0)
        empty = Batch(query_lens=(), inputs={})
        mode, key = self._route(
            captured, nothing, empty, all_decode=None, highest_mode=highest_mode
        )
        num_reqs = key.num_reqs if mode is _FULL else self._model_steps.padded(key)[1]
        batch = self._loader.capture_batch(key.num_tokens, num_reqs)
        num_tokens = int(batch.query_lens.sum())
        outputs = self._run_at(captured, mode, key, batch, batch.query_lens, num_tokens)
        return self._cut(outputs, 0, 0)

    def _learn(
        self,
        captured: _Captured,
        to_learn: int,
        highest_mode: CUDAGraphMode | None,
        mode: CUDAGraphMode,
        key: BatchDescriptor,
        num_tokens: int,
        num_reqs: int,
    ) -> None:
        """Take note of the step that just ran, if the next one like it may repeat it."""
        pieces = captured.piecewise
        if mode is _FULL:
            full = captured.full.known(key, num_tokens, num_reqs)
            if full is not None:
                captured.known.learn(to_learn, highest_mode, *full)
        elif mode is _PIECEWISE and pieces is not None and pieces.knows(key):
            inputs, stats = self._loader.inputs, self._stats.at(mode, key.relaxed())
            layout = inputs.layout(*self._model_steps.padded(key))
            step = KnownPieces(
                key, pieces, inputs, layout, self.builder, stats, self._cut, num_tokens, num_reqs
            )
            captured.known.learn(to_learn, highest_mode, layout, step)

    def _forget(self, captured: _Captured) -> None:
        """Drop what reads weights that are elsewhere now."""
        captured.known.forget()
        captured.full.drop()
        if captured.piecewise is not None:
            captured.piecewise.forget()
        self._weights.note()


def _marked(tensor: torch.Tensor, spec: InputSpec) -> None:
    mark_step_input(tensor, spec.axis)


def _module_of(model: Callable[..., Any]) -> torch.nn.Module | None:
    """The module whose weights graphs read; None for a plain function."""
    owner = getattr(model, "__self__", model)
    return owner if isinstance(owner, torch.nn.Module) else None  # a compiled module is one too
