"""The ops that stand for attention in a graph: `cudagraph_modes::attention` and `attention_fp8`.

They take the output buffer, so that nothing is allocated, and a layer's name, by which they find
the cache and the kernels in the forward context. The cache is not an argument: no compiler may
clone it. Defined by schema and implementation, since `torch.library.custom_op` costs 30 us a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compile_backend.attention.metadata import StepAttention
from compile_backend.context import get_forward_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from compile_backend.attention.layer import AttentionLayer

_LIBRARY = torch.library.Library("cudagraph_modes", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "attention(Tensor query, Tensor key, Tensor value, Tensor(a!) output, str layer_name) -> ()"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "attention_fp8(Tensor query, Tensor key, Tensor value, Tensor(a!) output, Tensor scale, "
    "str layer_name, bool multiplies=False) -> ()"
)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    layer_name: str,
) -> None:
    step, layer = found_layer(layer_name)
    store_and_attend(step, layer, query, key, value, output)


def store_and_attend(
    step: StepAttention,
    layer: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """What the op does, for a layer that was found; see `AttentionBackend.forward`."""
    backend = layer.backend
    backend.forward(
        query, key, value, output, layer.cache, step.metadata, step.prepared.get(backend)
    )


def attend(
    step: StepAttention, layer: AttentionLayer, query: torch.Tensor, output: torch.Tensor
) -> None:
    """The same where keys and values are stored; see `AttentionBackend.attend`."""
    backend = layer.backend
    backend.attend(query, output, layer.cache, step.metadata, step.prepared.get(backend))


def _attention_fp8(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    scale: torch.Tensor,
    layer_name: str,
    multiplies: bool = False,  # noqa: FBT001 - the order of the schema
) -> None:
    step, layer = found_layer(layer_name)
    backend = layer.backend
    backend.forward_fp8(
        query,
        key,
        value,
        output,
        scale,
        layer.cache,
        step.metadata,
        step.prepared.get(backend),
        multiplies=multiplies,
    )


def found_layer(layer_name: str) -> tuple[StepAttention, AttentionLayer]:
    """The running step, and the layer of that name in it.

    Raises:
        RuntimeError: the step has no attention, or no such layer.
    """
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
    return step, layer


def _nothing(*_args: object) -> None:
    """What tracing runs: nothing is returned, and nothing is allocated."""


for _name, _function in (("attention", _attention), ("attention_fp8", _attention_fp8)):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"cudagraph_modes::{_name}", _nothing, lib=_LIBRARY)

attention = torch.ops.cudagraph_modes.attention.default
attention_fp8 = torch.ops.cudagraph_modes.attention_fp8.default
"""The same into `torch.float8_e4m3fn`, by a float32 scale of one element."""

WITHOUT_DISPATCHER: dict[Any, Callable[..., None]] = {
    attention: _attention,
    attention_fp8: _attention_fp8,
}
"""What each op does, for those who call it hundreds of times a step; torch's dispatcher costs some
microseconds. No dispatch mode sees such a call."""
