"""One step's batch, as attention sees it.

Tensors stay at their addresses for as long as a graph reads them; numbers of the host hold for
every batch that may replay the graph. Who fills the tensors is somebody else's business. Nothing
here changes once it is made; it is not frozen since it is made in every step, which takes three
times as long for a frozen class.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt
    import torch

    from compile_backend.attention.backend import AttentionBackend
    from compile_backend.attention.layer import AttentionLayer


class HostLengths:
    """The true lengths of a step, on the host; a step inside a graph has none.

    Args:
        query_lens: tokens that each request adds, `[num_reqs]` int32, padding left out.
        seq_lens: tokens of each request with those added, likewise, of any integers.
        block_table: `[num_reqs, columns]`, likewise; entries beyond a request's length may be
            anything.

    Attributes:
        query_lens: as given.
    """

    __slots__ = ("_block_table", "_seq_lens", "query_lens")

    def __init__(self, query_lens: npt.NDArray[np.int32], seq_lens: Any, block_table: Any) -> None:
        self.query_lens = query_lens
        self._seq_lens = seq_lens
        self._block_table = block_table

    @property
    def seq_lens(self) -> npt.NDArray[np.int32]:
        """As given, in int32: turned into that once, as only some backends look, others often."""
        self._seq_lens = lens = _in_int32(self._seq_lens)
        return lens

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """Likewise."""
        self._block_table = table = _in_int32(self._block_table)
        return table


def _in_int32(numbers: Any) -> npt.NDArray[np.int32]:
    """Integers of any kind; those that nobody reads may be too large, and come out as others."""
    return np.asarray(numbers).astype(np.int32, copy=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """How large batches get.

    Attributes:
        num_tokens: of all requests together.
        num_reqs: in one batch.
        query_len: tokens that one request adds, in the worst case that a graph is captured for.
        seq_len: tokens of one request, those of the step included.
    """

    num_tokens: int
    num_reqs: int
    query_len: int
    seq_len: int


@dataclass(slots=True, kw_only=True, eq=False)
class AttentionMetadata:
    """A padded batch of requests, flattened to tokens.

    The tokens of request `r` are rows `query_start_loc[r]:query_start_loc[r + 1]`, the last ones
    of its `seq_lens[r]` tokens. Padding requests have no tokens and length 0. Padding tokens come
    after `query_start_loc[num_reqs]`, with slot -1: their rows of keys and values may hold
    anything, are never written to the cache, and their rows of the output need not be written.

    Attributes:
        num_tokens: rows of query, key, value and output.
        num_reqs: rows of the block table.
        query_start_loc: `[num_reqs + 1]` int32, ascending from 0.
        seq_lens: `[num_reqs]` int32.
        block_table: `[num_reqs, max_blocks_per_req]` int32; block `b` of a request holds its
            tokens `b * block_size` and on. Entries beyond its length may be any valid block.
        slot_mapping: `[num_tokens]` int64; `block * block_size + offset` of each token, or -1.
        max_query_len: no request adds more tokens.
        max_seq_len: no request is longer.
        uniform_query_len: tokens of every request that is no padding, if all are alike; else 0.
        host: the true lengths; None where the step may be part of a graph.
    """

    num_tokens: int
    num_reqs: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int
    uniform_query_len: int = 0
    host: HostLengths | None = None


@dataclass(slots=True, eq=False)
class StepAttention:
    """What the forward context holds for the attention ops of one step.

    Attributes:
        layers: every layer by name.
        metadata: the batch.
        prepared: what each backend made of the batch before the step.
    """

    layers: Mapping[str, AttentionLayer]
    metadata: AttentionMetadata
    prepared: Mapping[AttentionBackend, Any] = field(default_factory=dict)
