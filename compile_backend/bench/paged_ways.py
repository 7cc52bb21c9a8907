"""One way to run one step on a paged cache: through a runner, or outside of one.

What is compared with what is not known here.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from compile_backend.attention.huggingface import (
    CAUSAL_LM_INPUTS,
    CAUSAL_LM_OUTPUT,
    PagedModel,
    paged_model,
)
from compile_backend.batch import BatchDescriptor
from compile_backend.batch_loader import BatchLoader
from compile_backend.bench.shapes import BLOCK_SIZE
from compile_backend.config import CUDAGraphMode
from compile_backend.context import set_forward_context
from compile_backend.runner import GraphModelRunner
from compile_backend.step_inputs import StepInputs
from compile_backend.torch_internals.dynamo import mark_step_input

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from transformers import PreTrainedModel

    from compile_backend.bench.paged_batches import Work
    from compile_backend.bench.rounds import Step
    from compile_backend.bench.shapes import Shape

_AT = (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE)


def on_paged_cache(model: PreTrainedModel, shape: Shape, attention: str) -> PagedModel:
    """The model on a paged cache that holds all steps of its shape."""
    return paged_model(
        model,
        num_blocks=shape.num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=shape.max_model_len,
        backend=attention,
    )


def make_runner(
    run: Callable[..., Any],
    paged: PagedModel,
    mode: str,
    *,
    options: Mapping[str, Any],
    sizes: Sequence[int] | None,
    max_num_seqs: int,
    max_num_tokens: int,
) -> GraphModelRunner:
    """A runner for a model on a paged cache.

    Args:
        run: the model, or a compiled form of it.
        paged: its cache.
        mode: what to capture.
        options: of this backend, but for the mode.
        sizes: to capture; those of the options or the default ladder if None.
        max_num_seqs: most requests of a batch.
        max_num_tokens: most tokens of a batch.
    """
    builder: Any = paged.builder
    captured = {} if sizes is None else {"cudagraph_capture_sizes": list(sizes)}
    return GraphModelRunner(
        run,
        {**options, "cudagraph_mode": mode, **captured},
        input_spec=CAUSAL_LM_INPUTS,
        output_shape=CAUSAL_LM_OUTPUT,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_tokens,
        metadata_builder=builder,
        device=next(paged.module.parameters()).device,
    )


def runner_of_all_sizes(
    run: Callable[..., Any],
    paged: PagedModel,
    mode: str,
    shape: Shape,
    *,
    options: Mapping[str, Any],
) -> GraphModelRunner:
    """A runner with the sizes of the options, or else all those of a shape; see `make_runner`."""
    return make_runner(
        run,
        paged,
        mode,
        options=options,
        sizes=None if "cudagraph_capture_sizes" in options else shape.capture_sizes,
        max_num_seqs=shape.max_num_seqs,
        max_num_tokens=shape.max_num_tokens,
    )


def run_at(runner: GraphModelRunner, work: Work, highest: CUDAGraphMode | None = None) -> Step:
    """A step of a runner, at no higher mode than this."""
    return lambda: runner.run(work.batch, highest_mode=highest)


def ran_at(runner: GraphModelRunner, step: Step) -> str:
    """The mode that a step of a runner runs at, which failed captures may have lowered."""
    before = runner.report()
    step()
    after = runner.report()
    return "".join(mode.name for mode in _AT if after.steps(mode) > before.steps(mode))


class StepOutside(NamedTuple):
    """A step on inputs of its own.

    Attributes:
        step: what to run, or to capture.
        metadata: what it finds in the forward context.
        plan: what attention does on the host before every replay; None if nothing.
    """

    step: Step
    metadata: Any
    plan: Callable[[], object] | None


def step_outside_a_runner(
    run: Callable[..., Any], paged: PagedModel, work: Work, *, for_graph: bool
) -> StepOutside:
    """The step on inputs of its own.

    Args:
        run: the model, or a compiled form of it.
        paged: its cache.
        work: the step.
        for_graph: whether attention is captured, too.
    """
    num_tokens, lens = work.num_tokens, work.query_lens
    builder: Any = paged.builder
    inputs = StepInputs(
        (*CAUSAL_LM_INPUTS, *builder.input_spec),
        next(paged.module.parameters()).device,
        max_num_tokens=num_tokens,
        max_num_reqs=len(lens),
    )
    layout = inputs.layout(num_tokens, len(lens))
    loader = BatchLoader(inputs, CAUSAL_LM_INPUTS, builder)
    loader.load(layout, work.batch, lens, num_tokens)
    arguments = {spec.name: layout.tensors[spec.name] for spec in CAUSAL_LM_INPUTS}
    for spec in CAUSAL_LM_INPUTS:
        mark_step_input(arguments[spec.name], spec.axis)
    key = BatchDescriptor(num_tokens, len(lens), uniform=work.is_decode)
    attention = work.batch.attention
    plan = functools.partial(builder.build_for_graph, layout.tensors, key, attention, lens)
    metadata = plan() if for_graph else builder.build(attention, lens, layout.tensors)

    def step(_inputs: object = inputs) -> Any:  # whose memory a graph reads
        with set_forward_context(metadata):
            return run(**arguments)

    return StepOutside(step, metadata, plan if for_graph and builder.plans_every_step else None)


def capture_figures(runner: GraphModelRunner, whole_s: float) -> dict[str, Any]:
    """What a runner's last capture took: seconds in all, and seconds, bytes and graphs by mode."""
    report = runner.report()
    return {
        "mode_resolved": report.mode_resolved,
        "whole_s": whole_s,
        "by_mode": {
            mode.name: {
                "seconds": seconds,
                "bytes": report.num_bytes.get(mode, 0),
                "graphs": report.num_graphs.get(mode, 0),
            }
            for mode, seconds in report.capture_s.items()
        },
    }
