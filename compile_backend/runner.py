"""`GraphModelRunner`: a model's steps, as an inference engine's own loop runs them.

Per step: repeat what is known, or else dispatch, pad, fill the inputs, make the metadata, run.
What is captured before is that of `runner_capture`, and how a new kind of batch runs that of
`runner_steps`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from compile_backend import shortcuts
from compile_backend.backend import cudagraph_modes
from compile_backend.config import CompilationConfig, CUDAGraphMode
from compile_backend.errors import CaptureError
from compile_backend.known_steps import NOT_RUN
from compile_backend.runner_capture import RunnerCapture
from compile_backend.runner_checks import check_is_batch, check_memory_limit
from compile_backend.runner_parts import runner_parts
from compile_backend.runner_report import RunnerReport, steps_with_graphs
from compile_backend.step_inputs import Dim, InputSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from compile_backend.capture_estimate import CaptureEstimate
    from compile_backend.distributed import RankAgreement
    from compile_backend.runner_batch import Batch, MetadataBuilder
    from compile_backend.runner_steps import RunnerSteps

logger = logging.getLogger(__name__)

_HIGHEST = (None, CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)


class GraphModelRunner:
    """Captures a model's graphs ahead, then runs every batch at the best mode it can.

    Args:
        model: called with the inputs by name; as it is, or compiled with
            `torch.compile(..., backend="cudagraph_modes")`, which PIECEWISE needs. Each tensor
            that it returns has the sizes of `output_shape` in front.
        config: the mode and the capture sizes; a `CompilationConfig` or its options.
        input_spec: every tensor that the model takes; at least one.
        max_num_seqs: most requests of a batch.
        max_num_batched_tokens: most tokens of a batch; no fewer than requests.
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
        self._parts = parts = runner_parts(
            model,
            config,
            input_spec=input_spec,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            uniform_decode_query_len=uniform_decode_query_len,
            metadata_builder=metadata_builder,
            output_shape=output_shape,
            max_loras=max_loras,
            ranks=ranks,
            device=device,
        )
        self.model = model
        self.config = parts.config
        self.builder = metadata_builder
        self._capture = RunnerCapture(parts)
        self._weights = parts.weights
        self._captured: RunnerSteps | None = None

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
        check_memory_limit(max_bytes, self._parts.loader.inputs.device)
        self._captured = None
        if not shortcuts.are_built():
            self._parts.warn_once(logger, "shortcuts", "%s", shortcuts.NOT_BUILT)
        self._captured = self._capture.capture(self, progress=progress, max_bytes=max_bytes)

    def estimate(self) -> CaptureEstimate:
        """What `capture()` would take: seconds, graphs and bytes, by mode.

        The model is compiled, and the two largest keys of each mode are captured and dropped.

        Raises:
            CaptureError: everything is captured already.
            ConfigError: as for `capture`.
        """
        if self._captured is not None:
            raise CaptureError("all graphs are captured; report() tells what they took")
        return self._capture.estimate(self)

    def recapture(self, *, progress: bool = True, max_bytes: int | None = None) -> None:
        """Drop every graph and capture anew, as after new weights or another layout of memory.

        Args:
            progress: as for `capture`.
            max_bytes: as for `capture`; no limit is kept from there.
        """
        check_memory_limit(max_bytes, self._parts.loader.inputs.device)
        self._captured = None
        if self._parts.compiled is not None:
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
            captured.forget()
        if highest_mode not in _HIGHEST:
            highest_mode = CUDAGraphMode.parse_single(highest_mode, option="highest_mode")
        try:
            known = captured.known.prepare(batch, highest_mode)
            if known is not None:
                outputs = known.run(batch)
                if outputs is not NOT_RUN:
                    return outputs
                captured.known.lose(batch, highest_mode)
            return captured.run(batch, highest_mode)
        except AttributeError:
            check_is_batch(batch)
            raise

    def report(self) -> RunnerReport:
        """What was captured, what it took, and what ran; `print` it."""
        parts, meter = self._parts, self._capture.meter
        resolution = None if self._captured is None else self._captured.resolution
        by_mode, of_graphs = meter.by_mode(), self._capture.all_stats()[1:]
        return RunnerReport(
            mode_asked=parts.asked.name,
            mode_resolved="" if resolution is None else resolution.mode.name,
            downgrades=() if resolution is None else tuple(map(str, resolution.downgrades)),
            by_key=steps_with_graphs(parts.stats, of_graphs, parts.model_steps.number),
            capture_s={mode: cost.seconds for mode, cost in by_mode.items()},
            num_bytes={mode: cost.num_bytes for mode, cost in by_mode.items()},
            by_size=dict(meter.by_size),
            num_graphs=self._capture.num_graphs(),
            input_bytes=parts.loader.inputs.num_bytes,
        )
