"""What a runner refuses: limits, devices, outputs and batches that contradict each other.

Pure functions: they know neither graphs nor modes.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from compile_backend.errors import ConfigError
from compile_backend.step_inputs import Dim
from compile_backend.torch_internals import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from compile_backend.runner_batch import Batch


_LEAVES = (torch.Tensor, int, float, complex, str, torch.dtype, torch.device, Enum, type(None))


def check_device(module: torch.nn.Module | None, device: torch.device) -> None:
    """Refuse a device that the model is not on.

    Args:
        module: the model; None for a function, of which nothing is known.
        device: the runner's.

    Raises:
        ConfigError: the model has weights, and none of them is there.
    """
    if module is None:
        return
    held = {str(weight.device) for weight in (*module.parameters(), *module.buffers())}
    if held and str(device) not in held:
        raise ConfigError(
            "device",
            str(device),
            f"holds no weight of the model, which is on {', '.join(sorted(held))}",
            "move the model, or give its device",
        )


def check_outputs(
    outputs: Any, output_shape: Sequence[int | Dim], num_tokens: int, num_reqs: int
) -> None:
    """Refuse outputs that a runner would cut at the wrong place, with nobody to notice.

    Args:
        outputs: what the model returned for a batch without padding.
        output_shape: the leading sizes of each tensor in it.
        num_tokens: of the batch.
        num_reqs: of the batch.

    Raises:
        ConfigError: a tensor has other sizes.
    """
    sizes = [
        size.of(num_tokens, num_reqs) if isinstance(size, Dim) else size for size in output_shape
    ]
    for item in tree_leaves(outputs):
        if not isinstance(item, _LEAVES):
            raise ConfigError(
                "model",
                type(item).__name__,
                "is returned, in which nobody can find the tensors",
                "return tensors in tuples, lists or dicts, or register the class with "
                "torch.utils._pytree.register_pytree_node",
            )
        if isinstance(item, torch.Tensor) and list(item.shape[: len(sizes)]) != sizes:
            raise ConfigError(
                "output_shape",
                tuple(str(size) for size in output_shape),
                f"begins with {sizes} for {num_tokens} tokens of {num_reqs} requests, but the "
                f"model returned a tensor of {list(item.shape)}",
                "give the leading sizes of what the model returns, such as (Dim.NUM_REQS,)",
            )


def check_batch(
    batch: Batch,
    query_lens: npt.NDArray[np.int32],
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    has_builder: bool,
) -> int:
    """Refuse a batch that no step can be made of.

    Args:
        batch: of the engine.
        query_lens: of the batch, as an array.
        max_num_seqs: most requests.
        max_num_batched_tokens: most tokens.
        has_builder: whether somebody reads what the batch brings for attention.

    Returns:
        The tokens of the batch.

    Raises:
        ValueError: the batch is too large, contradicts itself, or lacks its attention.
    """
    if query_lens.size and query_lens.dtype.kind not in "iu":
        raise ValueError(f"query_lens hold numbers of {query_lens.dtype}; give integers")
    if query_lens.ndim != 1:
        raise ValueError(
            f"query_lens has shape {query_lens.shape}; give one number for each request"
        )
    num_reqs, num_tokens = len(query_lens), int(np.add.reduce(query_lens))
    if num_reqs > max_num_seqs or num_tokens > max_num_batched_tokens:
        raise ValueError(
            f"a batch of {num_reqs} requests and {num_tokens} tokens is above the limits "
            f"max_num_seqs={max_num_seqs} and max_num_batched_tokens={max_num_batched_tokens}; "
            "split it, or raise them"
        )
    if num_reqs and np.minimum.reduce(query_lens) < 1:
        raise ValueError(
            f"query_lens {query_lens.tolist()} hold a request without tokens; leave it out"
        )
    if has_builder and batch.attention is None:
        raise ValueError(
            "the batch brings no attention, which the runner's metadata_builder reads; give "
            "Batch(attention=...), for AttentionMetadataBuilder an AttentionBatch"
        )
    if batch.attention is not None and not has_builder:
        raise ValueError(
            "the batch brings attention, but the runner has no metadata_builder to read it; give "
            "GraphModelRunner one, or leave it out"
        )
    try:
        hash(batch.extra)
    except TypeError:
        raise ValueError(
            f"extra={batch.extra!r} cannot be part of a key; give a tuple of hashable values"
        ) from None
    return num_tokens
