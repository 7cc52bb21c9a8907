"""What a runner refuses: limits, outputs and batches that contradict each other.

Pure functions: they know neither graphs nor modes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from compile_backend.errors import ConfigError, number_of, shown
from compile_backend.given_numbers import integers_of
from compile_backend.runner_batch import Batch
from compile_backend.step_inputs import Dim
from compile_backend.torch_internals.graphs import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    import numpy.typing as npt


_LEAVES = (torch.Tensor, int, float, complex, str, torch.dtype, torch.device, Enum, type(None))


def check_memory_limit(max_bytes: int | None, device: torch.device) -> None:
    """Refuse a limit that cannot be kept.

    Args:
        max_bytes: of all graphs together; None for no limit.
        device: the runner's.

    Raises:
        ConfigError: it is no number of bytes, or no memory is measured on the device.
    """
    if max_bytes is None:
        return
    if type(max_bytes) is not int or max_bytes < 0:
        raise ConfigError(
            "max_bytes", max_bytes, "is no number of bytes", "use an integer from 0 on"
        )
    if device.type != "cuda":
        raise ConfigError(
            "max_bytes",
            max_bytes,
            f"cannot be kept on {device}, where no memory is measured",
            "leave it out, or lower max_cudagraph_capture_size",
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
                f"begins with {sizes} for {number_of('token', num_tokens)} of "
                f"{number_of('request', num_reqs)}, but the model returned a tensor of "
                f"{list(item.shape)}",
                "give the leading sizes of what the model returns, such as (Dim.NUM_REQS,)",
            )


def check_is_batch(batch: object) -> None:
    """Refuse what lacks the fields of a batch.

    Args:
        batch: what a step was given.

    Raises:
        ValueError: it lacks one.
    """
    if isinstance(batch, type) or not all(hasattr(batch, item.name) for item in fields(Batch)):
        raise ValueError(
            f"the batch is {shown(batch)}; give Batch(query_lens=..., inputs=...), with the "
            "tokens of each request and the model's inputs by name"
        )


def check_query_lens(query_lens: Any) -> npt.NDArray[Any]:
    """The query lengths of a batch as an array of integers.

    Args:
        query_lens: of the batch, as it gives them.

    Raises:
        ValueError: they are no integers of at least 1, one for each request.
    """
    lens = integers_of("query_lens", query_lens, "give one number for each request")
    if lens.size and lens.dtype.kind not in "iu":
        raise ValueError(f"query_lens hold numbers of {lens.dtype}; give integers")
    if lens.ndim != 1:
        raise ValueError(f"query_lens has shape {lens.shape}; give one number for each request")
    if len(lens) and np.minimum.reduce(lens) < 1:
        raise ValueError(f"query_lens {lens.tolist()} hold a request without tokens; leave it out")
    return lens


def check_is_whole(batch: Batch, names: AbstractSet[str], *, has_builder: bool) -> None:
    """Refuse a batch without requests that does not bring all that a batch does.

    Args:
        batch: of the engine, without requests.
        names: of the inputs that each batch brings.
        has_builder: whether somebody reads what the batch brings for attention.

    Raises:
        ValueError: it lacks something.
    """
    brings: Any = batch.inputs
    lacks_inputs = isinstance(brings, Mapping) and bool(names - brings.keys())
    if lacks_inputs or (has_builder and batch.attention is None):
        raise ValueError(
            "the batch has no requests: there is nothing to run; leave the step out, or bring "
            "everything with 0 rows. To run along with other processes, give GraphModelRunner "
            "ranks=RankAgreement.over(group)"
        )


def check_batch(
    batch: Batch,
    num_tokens: int,
    num_reqs: int,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    has_builder: bool,
) -> None:
    """Refuse a batch that no step can be made of.

    Args:
        batch: of the engine.
        num_tokens: of all its requests.
        num_reqs: its requests.
        max_num_seqs: most requests.
        max_num_batched_tokens: most tokens.
        has_builder: whether somebody reads what the batch brings for attention.

    Raises:
        ValueError: the batch is too large, contradicts itself, or lacks its attention.
    """
    if num_reqs > max_num_seqs or num_tokens > max_num_batched_tokens:
        raise ValueError(
            f"a batch of {number_of('request', num_reqs)} and "
            f"{number_of('token', num_tokens)} is above the limits "
            f"max_num_seqs={max_num_seqs} and max_num_batched_tokens={max_num_batched_tokens}; "
            "split it, or raise them"
        )
    if (batch.attention is not None) is not has_builder:
        raise ValueError(
            "the batch brings no attention, which the runner's metadata_builder reads; give "
            "Batch(attention=...), for AttentionMetadataBuilder an AttentionBatch"
            if has_builder
            else "the batch brings attention, but the runner has no metadata_builder to read it; "
            "give GraphModelRunner one, or leave it out"
        )
