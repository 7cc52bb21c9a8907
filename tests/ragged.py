"""Ragged batches on a paged cache, and the attention that all backends are held against.

A batch is drawn as numbers (`Ragged`), laid out in pages whose every unused entry is NaN
(`Paged`), and specified by dense attention in float64 that knows no pages (`Paged.check`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from hypothesis import strategies as st

from compile_backend.attention.builder import AttentionBatch, AttentionMetadataBuilder
from compile_backend.attention.kv_cache import LayerCache
from compile_backend.attention.layer import AttentionLayer
from compile_backend.attention.spec import AttentionSpec, CacheFormat
from compile_backend.batch import BatchDescriptor
from compile_backend.batch_loader import BatchLoader
from compile_backend.runner_batch import Batch
from compile_backend.step_inputs import StepInputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compile_backend.attention.backend import AttentionBackend
    from compile_backend.attention.metadata import StepAttention

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
LAYER = "0"


@dataclass(frozen=True, kw_only=True)
class Ragged:
    """One batch of one layer, as numbers.

    Attributes:
        query_lens: tokens that each request adds.
        contexts: tokens that each had before.
        num_heads: of the queries.
        num_kv_heads: of keys and values.
        head_size: elements of a head.
        block_size: tokens of a page.
        window: how many tokens a query sees; None: all.
        soft_cap: of the scores.
        num_shared_blocks: leading pages that requests share, as far as their contexts reach.
        num_padding_reqs: added to the batch.
        num_padding_tokens: added to the batch.
        dtype: of the queries.
        cache_dtype: of the cache; that of the queries if None.
        max_model_len: most tokens of a request; somewhat more than the longest has if None.
        seed: of contents, and of the places of the pages.
    """

    query_lens: tuple[int, ...]
    contexts: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 8
    block_size: int = 4
    window: int | None = None
    soft_cap: float | None = None
    num_shared_blocks: int = 0
    num_padding_reqs: int = 0
    num_padding_tokens: int = 0
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    max_model_len: int | None = None
    seed: int = 0

    @property
    def spec(self) -> AttentionSpec:
        """What the layer computes; the scale is none that a kernel would take by itself."""
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            scale=0.7 * self.head_size**-0.5,
            sliding_window=self.window,
            soft_cap=self.soft_cap,
        )

    @property
    def cache_format(self) -> CacheFormat:
        """How the cache is stored."""
        return CacheFormat(
            block_size=self.block_size,
            dtype=self.cache_dtype or self.dtype,
            max_model_len=self.max_model_len or max(self.seq_lens) + self.block_size + 1,
        )

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Tokens of each request, those added included."""
        return tuple(q + c for q, c in zip(self.query_lens, self.contexts, strict=True))


@st.composite
def ragged(
    draw: st.DrawFn, *, max_query_len: int = 7, max_context: int = 40, uniform: bool = False
) -> Ragged:
    """Any batch: prompts, chunks and decodes, padded or not."""
    num_reqs = draw(st.integers(1, 4))
    query_lens = st.one_of(st.just(1), st.integers(1, max_query_len))
    num_kv_heads = draw(st.sampled_from([1, 2]))
    lens = [draw(query_lens)] * num_reqs if uniform else None
    return Ragged(
        query_lens=tuple(lens or [draw(query_lens) for _ in range(num_reqs)]),
        contexts=tuple(
            draw(st.one_of(st.just(0), st.integers(0, max_context))) for _ in range(num_reqs)
        ),
        num_heads=num_kv_heads * draw(st.sampled_from([1, 2, 4])),
        num_kv_heads=num_kv_heads,
        block_size=draw(st.sampled_from([1, 4, 16])),
        window=draw(st.sampled_from([None, 1, 3, 17])),
        soft_cap=draw(st.sampled_from([None, 0.5, 20.0])),
        num_shared_blocks=draw(st.integers(0, 3)),
        num_padding_reqs=draw(st.integers(0, 3)),
        num_padding_tokens=draw(st.integers(0, 5)),
        seed=draw(st.integers(0, 999)),
    )


class Paged:
    """A batch in pages, where all that must not be read is NaN.

    Args:
        case: the batch.
        backend: the class to be held against the reference.
    """

    def __init__(self, case: Ragged, backend: type[AttentionBackend]) -> None:
        self.case = case
        self._random = torch.Generator().manual_seed(case.seed)
        is_fp8 = case.cache_format.dtype.itemsize == 1
        self.scales = (0.03, 0.05) if is_fp8 else (1.0, 1.0)
        self.num_blocks, self.tables = self._blocks()
        self.histories = self._histories()
        num_tokens = sum(case.query_lens) + case.num_padding_tokens
        self.query = self._normal(num_tokens, case.num_heads, case.head_size)
        self.query[sum(case.query_lens) :] = torch.nan
        self.new = tuple(self._new_rows(history, num_tokens) for history in self.histories)
        self.cache = LayerCache(
            *(self._pages(history) for history in self.histories), *self.scales
        )
        self.expected_cache = self._expected_cache()
        made = backend(case.spec, case.cache_format, CPU)
        layer = AttentionLayer(LAYER, made, self.cache)
        self.builder = AttentionMetadataBuilder({LAYER: layer}, case.cache_format, self.num_blocks)

    @cached_property
    def batch(self) -> AttentionBatch:
        """What an engine says of the batch; columns beyond a request's length name block 0."""
        table = np.full((len(self.tables), max(map(len, self.tables))), -1, np.int32)
        for row, blocks in zip(table, self.tables, strict=True):
            row[: len(blocks)] = blocks
        return AttentionBatch(seq_lens=np.array(self.case.seq_lens), block_table=table)

    def padded(self) -> tuple[int, int]:
        """Tokens and requests with padding."""
        case = self.case
        return (
            sum(case.query_lens) + case.num_padding_tokens,
            len(case.query_lens) + case.num_padding_reqs,
        )

    def step(self, *, in_graph: bool, uniform: bool = False) -> StepAttention:
        """The metadata of the batch."""
        return attention_step(
            self.builder,
            self.batch,
            self.case.query_lens,
            self.padded(),
            in_graph=in_graph,
            uniform=uniform,
        )

    def run(self, step: StepAttention) -> torch.Tensor:
        """What the backend writes to an output full of NaN."""
        output = torch.full_like(self.query, torch.nan)
        backend = step.layers[LAYER].backend
        backend.forward(
            self.query, *self.new, output, self.cache, step.metadata, step.prepared.get(backend)
        )
        return output

    def check(self, output: torch.Tensor) -> None:
        """The output is the reference's, and the cache holds the new tokens and no more."""
        for held, expected in zip(self.cache_tensors, self.expected_cache, strict=True):
            assert torch.equal(bits(held), bits(expected))
        end = 0
        for request, query_len in enumerate(self.case.query_lens):
            start, end = end, end + query_len
            keys, values = (history[request] for history in self.histories)
            expected, error = dense(self.query[start:end], keys, values, self.case.spec)
            off = (output[start:end].double() - expected).abs().amax()
            assert off <= error, (request, float(off), float(error))

    @property
    def cache_tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values."""
        return self.cache.keys, self.cache.values

    def slots(self, request: int, start: int, end: int) -> list[int]:
        """Where tokens of a request lie, counted by hand."""
        size = self.case.block_size
        return [self.tables[request][i // size] * size + i % size for i in range(start, end)]

    def _blocks(self) -> tuple[int, list[list[int]]]:
        """Tables of blocks in random order; block 0 belongs to nobody."""
        size = self.case.block_size
        lengths = [-(-seq_len // size) for seq_len in self.case.seq_lens]
        # Only whole blocks of the context can be shared, as nothing is written to those.
        full = [context // size for context in self.case.contexts]
        num_shared = [min(self.case.num_shared_blocks, blocks, full[0]) for blocks in full]
        num_blocks = 2 + sum(lengths)
        order = (1 + torch.randperm(num_blocks - 1, generator=self._random)).tolist()
        tables: list[list[int]] = []
        for length, shared in zip(lengths, num_shared, strict=True):
            prefix = tables[0][:shared] if tables else []
            tables.append([*prefix, *(order.pop() for _ in range(length - len(prefix)))])
        return num_blocks, tables

    def _histories(self) -> list[list[torch.Tensor]]:
        """Keys, then values, of all tokens of each request, as the cache stores them."""
        case, both = self.case, []
        for scale in self.scales:
            rows: list[torch.Tensor] = []
            for request, seq_len in enumerate(case.seq_lens):
                history = self._normal(seq_len, case.num_kv_heads, case.head_size)
                for column, block in enumerate(self.tables[request]):
                    if request and block in self.tables[0]:
                        part = slice(column * case.block_size, (column + 1) * case.block_size)
                        history[part] = rows[0][part]
                rows.append(stored(history, case.cache_format.dtype, scale).double() * scale)
            both.append(rows)
        return both

    def _new_rows(self, history: list[torch.Tensor], num_tokens: int) -> torch.Tensor:
        """What the step adds, request after request; padding is NaN."""
        case = self.case
        new = [rows[context:] for rows, context in zip(history, case.contexts, strict=True)]
        rows = torch.full(
            (num_tokens, case.num_kv_heads, case.head_size), torch.nan, dtype=case.dtype
        )
        rows[: sum(case.query_lens)] = torch.cat(new).to(case.dtype)
        return rows

    def _pages(self, history: list[torch.Tensor]) -> torch.Tensor:
        """The cache before the step."""
        return self._filled(history, self.case.contexts)

    def _expected_cache(self) -> tuple[torch.Tensor, ...]:
        """The cache after the step."""
        return tuple(self._filled(each, self.case.seq_lens) for each in self.histories)

    def _filled(self, history: list[torch.Tensor], ends: Sequence[int]) -> torch.Tensor:
        case, dtype = self.case, self.case.cache_format.dtype
        scale = self.scales[0 if history is self.histories[0] else 1]
        shape = (self.num_blocks * case.block_size, case.num_kv_heads, case.head_size)
        pages = torch.full(shape, torch.nan).to(dtype)
        for request, (rows, end) in enumerate(zip(history, ends, strict=True)):
            if end:
                bits(pages)[self.slots(request, 0, end)] = bits(stored(rows[:end], dtype, scale))
        return pages.view(self.num_blocks, case.block_size, *shape[1:])

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random).to(self.case.dtype)


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification: the last `len(query)` of `len(keys)` tokens attend, in float64.

    Returns:
        The result, and the scores before any cap, `[num_heads, len(query), len(keys)]`.
    """
    group = spec.num_heads // spec.num_kv_heads
    keys, values = (each.double().repeat_interleave(group, 1) for each in (keys, values))
    plain = torch.einsum("qhd,khd->hqk", query.double(), keys) * spec.scale
    scores = plain
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    places = torch.arange(len(keys), device=query.device)
    distance = places[len(keys) - len(query) :, None] - places
    is_seen = distance >= 0
    if spec.sliding_window is not None:
        is_seen &= distance < spec.sliding_window
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values), plain


def dense(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `attend` says, and how far a result in the query's dtype may be off."""
    expected, _ = attend(query, keys, values, spec)
    group = spec.num_heads // spec.num_kv_heads
    keys = keys.double().repeat_interleave(group, 1)
    # Sums are in float32. Queries and keys may each be scaled, and scores be kept, in the dtype.
    single, eps = torch.finfo(torch.float32).eps, torch.finfo(query.dtype).eps
    absolute = torch.einsum("qhd,khd->hqk", query.double().abs(), keys.abs()) * spec.scale
    of_score = (spec.head_size * single + 2 * eps) * absolute.amax()
    of_score += 4 * single * (spec.soft_cap or 0)
    # An error of a score is a relative one of its weight, and again of the sum of weights.
    relative = 2 * torch.expm1(of_score) + len(keys) * single + 2 * eps
    return expected, relative * values.double().abs().amax()


def attention_step(
    builder: AttentionMetadataBuilder,
    batch: AttentionBatch,
    query_lens: Sequence[int],
    padded: tuple[int, int] | None = None,
    *,
    in_graph: bool = False,
    uniform: bool = False,
) -> StepAttention:
    """The metadata of a batch, filled as a runner fills it.

    Args:
        builder: of the model.
        batch: for the builder.
        query_lens: tokens that each request adds.
        padded: tokens and requests with padding; as many as there are if None.
        in_graph: for a full graph, where the host knows the worst case only.
        uniform: of that graph's key.
    """
    lens = np.array(query_lens, np.int32)
    num_tokens, num_reqs = padded or (int(lens.sum()), len(lens))
    inputs = StepInputs(builder.input_spec, CPU, max_num_tokens=num_tokens, max_num_reqs=num_reqs)
    layout = inputs.layout(num_tokens, num_reqs)
    for array in layout.arrays.values():
        array[...] = 12345  # of an earlier step
    loader = BatchLoader(inputs, (), builder)
    loader.load(layout, Batch(query_lens=lens, inputs={}, attention=batch), lens, int(lens.sum()))
    if in_graph:
        key = BatchDescriptor(num_tokens, num_reqs, uniform)
        return builder.build_for_graph(layout.tensors, key)
    return builder.build(batch, lens, layout.tensors)


def refill(step: StepAttention, other: StepAttention) -> StepAttention:
    """The step of a graph whose tensors now hold another batch of its key, as at a replay."""
    for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
        getattr(step.metadata, name).copy_(getattr(other.metadata, name))
    return step


def stored(rows: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Rows as a cache keeps them."""
    return (rows / scale).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view as integers, so that NaN equals itself."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(widths[tensor.element_size()])
