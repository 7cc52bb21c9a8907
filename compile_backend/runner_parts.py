"""What a runner is made of: its arguments, checked, and what is built from them at once.

Nothing is compiled or captured here, and no step is run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from compile_backend.asked_names import check_asked
from compile_backend.backend import cudagraph_modes
from compile_backend.batch_loader import BatchLoader
from compile_backend.config import CompilationConfig, at_least
from compile_backend.dispatch import CudagraphDispatcher
from compile_backend.model_steps import ModelSteps
from compile_backend.once import WarnOnce
from compile_backend.output_cut import OutputCut
from compile_backend.runner_arguments import (
    check_builder,
    check_device,
    check_input_spec,
    check_limits,
    check_model,
    check_output_shape,
    check_ranks,
    found_device,
)
from compile_backend.runner_mode import mode_asked
from compile_backend.sizes import capture_sizes
from compile_backend.stats import GraphStats
from compile_backend.step_inputs import Dim, InputSpec, StepInputs
from compile_backend.torch_internals.dynamo import mark_step_input
from compile_backend.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from compile_backend.backend import CompiledFacts
    from compile_backend.config import CUDAGraphMode
    from compile_backend.distributed import RankAgreement
    from compile_backend.graph_engine import GraphEngine
    from compile_backend.runner_batch import MetadataBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerParts:
    """What the parts of one runner work with.

    Attributes:
        model: as it was given.
        config: of the runner.
        compiled: what is known of the compiled model; None if it is not compiled.
        asked: the mode asked for, or the default.
        dispatcher: has no keys yet.
        ranks: see `GraphModelRunner`.
        output_shape: likewise.
        max_num_batched_tokens: likewise.
        largest_size: the largest capture size of batches of any kind.
        limits: what all ranks must have in common, since each step has one size.
        loader: brings batches to where the model reads them.
        model_steps: runs steps through the model.
        cut: takes the padding off outputs.
        engine: captures and replays.
        weights: of the model.
        warn_once: of the runner.
        warn_once_of_model: shared with the compiled model, for what both of them notice.
        stats: counts of the runner.
    """

    model: Callable[..., Any]
    config: CompilationConfig
    compiled: CompiledFacts | None
    asked: CUDAGraphMode
    dispatcher: CudagraphDispatcher
    ranks: RankAgreement | None
    output_shape: tuple[int | Dim, ...]
    max_num_batched_tokens: int
    largest_size: int
    limits: Mapping[str, Any]
    loader: BatchLoader
    model_steps: ModelSteps
    cut: OutputCut
    engine: GraphEngine
    weights: Weights
    warn_once: WarnOnce
    warn_once_of_model: WarnOnce
    stats: GraphStats


def runner_parts(
    model: Callable[..., Any],
    config: CompilationConfig | Mapping[str, Any] | None,
    *,
    input_spec: Sequence[InputSpec],
    max_num_seqs: int,
    max_num_batched_tokens: int,
    uniform_decode_query_len: int | None,
    metadata_builder: MetadataBuilder | None,
    output_shape: Sequence[int | Dim],
    max_loras: int,
    ranks: RankAgreement | None,
    device: torch.device | str,
) -> RunnerParts:
    """Check the arguments of a `GraphModelRunner`, and build from them.

    Raises:
        ConfigError: see there.
    """
    check_model(model)
    check_input_spec(input_spec)
    check_builder(metadata_builder)
    check_output_shape(output_shape)
    check_ranks(ranks)
    found = found_device(device)
    if not isinstance(config, CompilationConfig):
        config = CompilationConfig.from_options(config)
    check_asked(config)
    compiled = cudagraph_modes.facts(model)
    asked = mode_asked(config, compiled)
    query_len = uniform_decode_query_len
    dispatcher = CudagraphDispatcher(
        config,
        max_num_seqs=max_num_seqs,
        uniform_decode_query_len=config.uniform_decode_query_len
        if query_len is None
        else query_len,
        max_loras=max_loras,
    )
    max_num_seqs, query_len = dispatcher.max_num_seqs, dispatcher.uniform_decode_query_len
    max_num_batched_tokens = at_least(1)("max_num_batched_tokens", max_num_batched_tokens)
    check_limits(max_num_seqs, max_num_batched_tokens, query_len)
    builder_specs = metadata_builder.input_spec if metadata_builder is not None else ()
    sizes = capture_sizes(config, max_num_seqs=max_num_seqs, query_len=query_len)
    with torch.inference_mode(False):
        inputs = StepInputs(
            (*input_spec, *builder_specs),
            found,
            max_num_tokens=max(max_num_batched_tokens, *sizes.mixed, *sizes.uniform),
            max_num_reqs=max_num_seqs,
            on_new=None if compiled is None else _marked,
        )
    loader = BatchLoader(inputs, input_spec, metadata_builder)
    engine = cudagraph_modes.new_engine(inputs.device)
    module = _module_of(model)
    check_device(module, inputs.device)
    return RunnerParts(
        model=model,
        config=config,
        compiled=compiled,
        asked=asked,
        dispatcher=dispatcher,
        ranks=ranks,
        output_shape=tuple(output_shape),
        max_num_batched_tokens=max_num_batched_tokens,
        largest_size=sizes.mixed[-1],
        limits={
            "cudagraph_mode": asked.name,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "uniform_decode_query_len": query_len,
            "max_loras": max_loras,
            "cudagraph_specialize_lora": config.cudagraph_specialize_lora,
            "pass_config": config.pass_config,  # decides what ranks exchange, and when
            # Last: they follow from others, and the first that differs is told.
            "cudagraph_capture_sizes": (sizes.mixed, sizes.uniform),
        },
        loader=loader,
        model_steps=ModelSteps(model, loader, max_num_seqs),
        cut=OutputCut(output_shape),
        engine=engine,
        weights=Weights(module),
        warn_once=WarnOnce(),
        warn_once_of_model=WarnOnce() if compiled is None else compiled.warn_once,
        stats=GraphStats(),
    )


def _marked(tensor: torch.Tensor, spec: InputSpec) -> None:
    mark_step_input(tensor, spec.axis)


def _module_of(model: Callable[..., Any]) -> torch.nn.Module | None:
    """The module whose weights graphs read; None for a plain function."""
    owner = getattr(model, "__self__", model)
    return owner if isinstance(owner, torch.nn.Module) else None  # a compiled module is one too
