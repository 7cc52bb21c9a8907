"""Batches for a paged cache: requests that all decode, or one prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from compile_backend.attention.builder import AttentionBatch
from compile_backend.bench.shapes import BLOCK_SIZE
from compile_backend.runner_batch import Batch

if TYPE_CHECKING:
    import numpy.typing as npt

    from compile_backend.bench.shapes import Shape


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of step.

    Attributes:
        name: as tables show it.
        batch: what the runner is given.
        is_decode: whether every request brings one token.
    """

    name: str
    batch: Batch
    is_decode: bool

    @property
    def num_tokens(self) -> int:
        """Of all requests."""
        return int(np.sum(self.batch.query_lens))

    @property
    def query_lens(self) -> npt.NDArray[np.int32]:
        """Tokens of each request."""
        return np.asarray(self.batch.query_lens, np.int32)


def all_works(shape: Shape) -> list[Work]:
    """Every step of a shape."""
    decodes = [decode(shape, num_reqs) for num_reqs in shape.decodes]
    return [*decodes, *(prefill(num_tokens) for num_tokens in shape.prefills)]


def decode(shape: Shape, num_reqs: int) -> Work:
    """Every request has the shape's context and adds one token."""
    width = shape.blocks_per_request
    table = np.arange(num_reqs * width, dtype=np.int32).reshape(num_reqs, width)
    batch = Batch(
        query_lens=np.ones(num_reqs, np.int32),
        inputs={
            "input_ids": np.ones((1, num_reqs), np.int64),
            "position_ids": np.full((1, num_reqs), shape.context),
            "logits_indices": np.arange(num_reqs),
        },
        attention=AttentionBatch(
            seq_lens=np.full(num_reqs, shape.context + 1, np.int32), block_table=table
        ),
    )
    return Work(f"decode {num_reqs}", batch, is_decode=True)


def prefill(num_tokens: int) -> Work:
    """One prompt of so many tokens."""
    table = np.arange(-(-num_tokens // BLOCK_SIZE), dtype=np.int32)[None]
    batch = Batch(
        query_lens=np.array([num_tokens], np.int32),
        inputs={
            "input_ids": np.ones((1, num_tokens), np.int64),
            "position_ids": np.arange(num_tokens)[None],
            "logits_indices": np.array([num_tokens - 1]),
        },
        attention=AttentionBatch(seq_lens=np.array([num_tokens], np.int32), block_table=table),
    )
    return Work(f"prefill {num_tokens}", batch, is_decode=False)
