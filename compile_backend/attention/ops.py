"""The op that stands for attention in a graph: `cudagraph_modes::attention`.

It takes the output buffer, so that nothing is allocated, and a layer's name, by which it finds the
cache and the kernels in the forward context. The cache is not an argument: no compiler may clone
it. Defined by schema and implementation, since `torch.library.custom_op` costs 30 us a call.
"""

from __future__ import annotations

import torch

from compile_backend.attention.metadata import StepAttention
from compile_backend.context import get_forward_context

_LIBRARY = torch.library.Library("cudagraph_modes", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "attention(Tensor query, Tensor key, Tensor value, Tensor(a!) output, str layer_name) -> ()"
)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    layer_name: str,
) -> None:
    step = get_forward_context().attn_metadata
    if not isinstance(step, StepAttention):
        raise RuntimeError(  # noqa: TRY004 - what is missing is a step, not another type
            f"attention layer {layer_name!r} was called in a step without attention metadata; "
            "run the model through a GraphModelRunner with a metadata_builder, or pass what "
            "AttentionMetadataBuilder.build(...) returns to set_forward_context(...)"
        )
    layer = step.layers.get(layer_name)
    if layer is None:
        raise RuntimeError(
            f"attention layer {layer_name!r} is not one of the metadata builder's, which are "
            f"{', '.join(step.layers)}; give it every layer under the name that the model calls"
        )
    backend = layer.backend
    backend.forward(
        query, key, value, output, layer.cache, step.metadata, step.prepared.get(backend)
    )


def _attention_of_shapes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    layer_name: str,
) -> None:
    """What tracing runs: nothing is returned, and nothing is allocated."""


_LIBRARY.impl("attention", _attention, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("cudagraph_modes::attention", _attention_of_shapes, lib=_LIBRARY)

attention = torch.ops.cudagraph_modes.attention.default

WITHOUT_DISPATCHER = {attention: _attention}
"""What each op does, for those who call it hundreds of times a step; torch's dispatcher costs some
microseconds. No dispatch mode sees such a call."""
