"""What a runner is given for a step, and what it asks of whoever makes attention metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    import torch

    from compile_backend.batch import BatchDescriptor
    from compile_backend.step_inputs import InputSpec
    from compile_backend.support import AttentionCGSupport


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step's work, without padding.

    Attributes:
        query_lens: tokens that each request adds, each at least 1; `[num_reqs]`.
        inputs: what the model takes, by name; arrays, sequences of numbers, or tensors. What is on
            the device already is copied there.
        attention: what the runner's metadata builder takes.
        all_decode: False says that some request is no decode, whatever its length. None: the
            metadata builder tells.
        num_active_loras: distinct adapters in use.
        use_cascade_attn: attention of this step cannot be captured.
        extra: whatever else selects a graph, such as a flag that changes the control flow.
    """

    query_lens: Any
    inputs: Mapping[str, Any]
    attention: Any = None
    all_decode: bool | None = None
    num_active_loras: int = 0
    use_cascade_attn: bool = False
    extra: tuple[Any, ...] = ()


class MetadataBuilder(Protocol):
    """Makes what attention ops read of a step; see `AttentionMetadataBuilder`.

    One that has a method `expect(*, num_tokens: int, num_reqs: int)` is told by it, before the
    first batch, how large batches get.
    """

    support: AttentionCGSupport
    input_spec: Sequence[InputSpec]
    plans_every_step: bool
    max_query_len: int

    def is_decode(self, batch: Any, query_lens: npt.NDArray[np.int32]) -> bool:
        """Whether every request had tokens before this step."""

    def fill(
        self,
        batch: Any,
        query_lens: npt.NDArray[np.int32],
        host: Mapping[str, npt.NDArray[Any]],
        *,
        is_refill: bool,
    ) -> None:
        """Write a batch into the padded tensors of the host.

        With `is_refill` they hold what the last call wrote to these very tensors, so that what
        nobody reads may stay.
        """

    def build(
        self,
        batch: Any,
        query_lens: npt.NDArray[np.int32],
        tensors: Mapping[str, torch.Tensor],
    ) -> Any:
        """The metadata of a step outside of a full graph."""

    def build_for_graph(
        self,
        tensors: Mapping[str, torch.Tensor],
        key: BatchDescriptor,
        batch: Any = None,
        query_lens: npt.NDArray[np.int32] | None = None,
    ) -> Any:
        """The metadata of a key's full graph."""

    def capture_batch(self, query_lens: npt.NDArray[np.int32]) -> Any:
        """A legal batch that changes nothing, as `fill` takes it."""


@runtime_checkable
class FilledFromArrays(Protocol):
    """A builder that `shortcuts.fill_attention` may stand in for."""

    def held_arrays(self, host: Mapping[str, npt.NDArray[Any]]) -> tuple[Any, ...] | None:
        """What that function holds; None if only `fill` and `is_decode` do what they do."""


def spread(num_tokens: int, num_reqs: int) -> npt.NDArray[np.int32]:
    """Query lengths of some requests that make up a number of tokens, as even as can be."""
    lens = np.full(num_reqs, num_tokens // num_reqs, np.int32)
    lens[: num_tokens % num_reqs] += 1
    return lens
