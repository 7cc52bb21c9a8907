"""From a batch to what attention ops read: declared to a runner, filled after padding.

The builder tells the runner which tensors each step brings, fills them on the host, and makes the
metadata on top of them. It owns no memory itself but what backends prepare for graphs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from compile_backend import shortcuts
from compile_backend.attention.backend import is_on_host, on_host
from compile_backend.attention.metadata import (
    AttentionMetadata,
    BatchLimits,
    HostLengths,
    StepAttention,
)
from compile_backend.errors import ConfigError, number_of, shown
from compile_backend.given_numbers import integers_of
from compile_backend.step_inputs import Dim, InputSpec
from compile_backend.support import AttentionCGSupport, lowest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from compile_backend.attention.layer import AttentionLayer
    from compile_backend.attention.spec import CacheFormat
    from compile_backend.batch import BatchDescriptor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """What attention must know of a batch, as arrays or sequences of integers.

    Attributes:
        seq_lens: `[num_reqs]`; tokens of each request, those of this step included.
        block_table: `[num_reqs, n]`; the cache blocks of each request in order; entries beyond
            its length may be anything.
        slot_mapping: `[num_tokens]`; where each token's key and value go,
            `block * block_size + offset`; -1 stores nothing. None: where the block table says.
    """

    seq_lens: Any
    block_table: Any
    slot_mapping: Any = None


class AttentionMetadataBuilder:
    """Makes the attention metadata of every step of one model.

    Args:
        layers: every attention layer, by name.
        cache: how their caches are stored.
        num_blocks: of each cache.

    Raises:
        ConfigError: there are no layers.

    Attributes:
        support: the weakest level of all backends in use.
        input_spec: the tensors that each step brings for attention.
        plans_every_step: whether a replay needs `build_for_graph` before it.
        max_query_len: no request adds more tokens.
    """

    def __init__(
        self, layers: Mapping[str, AttentionLayer], cache: CacheFormat, num_blocks: int
    ) -> None:
        if not layers:
            raise ConfigError("layers", dict(layers), "is empty", "give every attention layer")
        self.layers = dict(layers)
        self._backends = tuple(dict.fromkeys(layer.backend for layer in layers.values()))
        self.support: AttentionCGSupport = lowest(backend.support for backend in self._backends)
        self.plans_every_step = any(backend.plans_every_step for backend in self._backends)
        self.max_query_len = cache.max_model_len
        self._cache = cache
        self._num_blocks = num_blocks
        self._limits = (cache.max_model_len, num_blocks, cache.block_size)
        self.input_spec = (
            InputSpec("query_start_loc", (Dim.NUM_REQS_PLUS_1,), torch.int32),
            InputSpec("seq_lens", (Dim.NUM_REQS,), torch.int32),
            InputSpec("slot_mapping", (Dim.NUM_TOKENS,), torch.int64, pad=-1),
            InputSpec("block_table", (Dim.NUM_REQS, cache.max_blocks_per_req), torch.int32),
        )

    def expect(self, *, num_tokens: int, num_reqs: int) -> None:
        """Tell backends how large batches get, before the first one.

        Args:
            num_tokens: at most, of all requests together.
            num_reqs: at most, in one batch.
        """
        limits = BatchLimits(
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            query_len=num_tokens,
            seq_len=self._cache.max_model_len,
        )
        for backend in self._backends:
            backend.expect(limits)

    def is_decode(self, batch: AttentionBatch, query_lens: npt.NDArray[np.int32]) -> bool:
        """Whether every request had tokens before this step; a whole prompt had none."""
        try:
            known = shortcuts.all_longer(batch.seq_lens, query_lens)
        except AttributeError:
            raise _no_attention(batch) from None
        if known is not None:
            return known
        seq_lens = _rows("seq_lens", batch.seq_lens, len(query_lens))
        return bool(np.logical_and.reduce(seq_lens > query_lens))

    def fill(
        self,
        batch: AttentionBatch,
        query_lens: npt.NDArray[np.int32],
        host: Mapping[str, npt.NDArray[Any]],
        *,
        is_refill: bool = False,
    ) -> None:
        """Write a batch into the host's tensors, which are padded.

        Args:
            batch: the requests.
            query_lens: `[num_reqs]`.
            host: the tensors of `input_spec` by name.
            is_refill: whether they hold what the last call wrote to them.

        Raises:
            ValueError: the batch is no `AttentionBatch`, contradicts itself, or does not fit the
                cache.
        """
        starts, seq_lens, table, slots = (host[name] for name in _FILLED)
        try:
            given = (query_lens, batch.seq_lens, batch.block_table, batch.slot_mapping)
        except AttributeError:
            raise _no_attention(batch) from None
        held = (starts, seq_lens, table, slots)
        if shortcuts.fill_attention(*given, *held, *self._limits, is_refill):
            return
        num_reqs = len(query_lens)
        starts[0] = 0
        np.cumsum(query_lens, out=starts[1 : num_reqs + 1])
        num_tokens = int(starts[num_reqs])
        own_lens, own_rows = seq_lens[:num_reqs], table[:num_reqs]
        given_lens = _rows("seq_lens", batch.seq_lens, num_reqs)
        blocks = _rows("block_table", batch.block_table, num_reqs, num_dims=2)
        width = min(blocks.shape[1], table.shape[1])
        self._check(query_lens, given_lens, width)
        own_lens[...] = given_lens
        own_rows[...] = 0
        in_use = np.arange(width) < -(-own_lens[:, None] // self._cache.block_size)
        own_blocks = blocks[:, :width][in_use]
        _check_range("block_table", own_blocks, 0, self._num_blocks)
        own_rows[:, :width][in_use] = own_blocks
        own_slots = slots[:num_tokens]
        if batch.slot_mapping is None:
            own_slots[...] = self._slots(query_lens, own_lens, table, starts)
        else:
            given_slots = _rows("slot_mapping", batch.slot_mapping, num_tokens)
            num_slots = self._num_blocks * self._cache.block_size
            _check_range("slot_mapping", given_slots, -1, num_slots)
            own_slots[...] = given_slots
        if num_reqs < len(seq_lens):
            starts[num_reqs + 1 :] = num_tokens
            seq_lens[num_reqs:] = 0
            table[num_reqs:] = 0
        if num_tokens < len(slots):
            slots[num_tokens:] = -1

    def held_arrays(self, host: Mapping[str, npt.NDArray[Any]]) -> tuple[Any, ...] | None:
        """What `shortcuts.fill_attention` holds; None where something else fills.

        That is a subclass, or a builder whose methods were replaced.

        Args:
            host: as for `fill`.
        """
        if type(self) is not AttentionMetadataBuilder or vars(self).keys() & {"fill", "is_decode"}:
            return None
        return (*(host[name] for name in _FILLED), *self._limits)

    @property
    def builds_on_host(self) -> bool:
        """Whether `build` reads none of the tensors, so that they may be filled after it."""
        methods = (self.build, *[backend.prepare for backend in self._backends])
        return all(map(is_on_host, methods))

    @on_host
    def build(
        self,
        batch: AttentionBatch,
        query_lens: npt.NDArray[np.int32],
        tensors: Mapping[str, torch.Tensor],
    ) -> StepAttention:
        """The metadata of a step outside of a full graph; the tensors must hold the batch.

        Args:
            batch: the requests.
            query_lens: `[num_reqs]`.
            tensors: of `input_spec` by name, on the device, padded.
        """
        host = HostLengths(query_lens, batch.seq_lens, batch.block_table)
        longest = shortcuts.lengths(query_lens, batch.seq_lens)
        max_query_len, max_seq_len, uniform_query_len = longest or (
            int(query_lens.max(initial=0)),
            int(host.seq_lens.max(initial=0)),
            _uniform(query_lens),
        )
        # Without calls of its own, since what runs once a step is cold by then.
        metadata = AttentionMetadata(
            num_tokens=tensors["slot_mapping"].size(0),  # `len` of a tensor is Python
            num_reqs=tensors["seq_lens"].size(0),
            query_start_loc=tensors["query_start_loc"],
            seq_lens=tensors["seq_lens"],
            block_table=tensors["block_table"],
            slot_mapping=tensors["slot_mapping"],
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            uniform_query_len=uniform_query_len,
            host=host,
        )
        prepared = {}
        for backend in self._backends:
            prepared[backend] = backend.prepare(metadata)
        return StepAttention(self.layers, metadata, prepared)

    def build_for_graph(
        self,
        tensors: Mapping[str, torch.Tensor],
        key: BatchDescriptor,
        batch: AttentionBatch | None = None,
        query_lens: npt.NDArray[np.int32] | None = None,
    ) -> StepAttention:
        """The metadata of a key's full graph: its numbers hold for every batch of that key.

        Args:
            tensors: of `input_spec` by name, at the addresses that the graph reads.
            key: of the graph.
            batch: at replay, for backends that plan on the host; None before the capture.
            query_lens: `[num_reqs]`, likewise.
        """
        query_len = key.num_tokens // key.num_reqs if key.uniform else 0
        filled: dict[str, Any] = {name: tensors[name] for name in _FILLED}
        metadata = AttentionMetadata(
            num_tokens=tensors["slot_mapping"].size(0),
            num_reqs=tensors["seq_lens"].size(0),
            **filled,
            max_query_len=query_len or key.num_tokens,
            max_seq_len=self._cache.max_model_len,
            uniform_query_len=query_len,
        )
        if batch is not None and query_lens is not None:
            host = HostLengths(query_lens, batch.seq_lens, batch.block_table)
            metadata = replace(metadata, host=host)
        prepared = {
            backend: backend.prepare_for_graph(metadata, key) for backend in self._backends
        }
        return StepAttention(self.layers, replace(metadata, host=None), prepared)

    def capture_batch(self, query_lens: npt.NDArray[np.int32]) -> AttentionBatch:
        """A legal batch that stores nothing: every request is as long as its query.

        Args:
            query_lens: `[num_reqs]`, each at least 1.
        """
        table = np.zeros((len(query_lens), self._cache.max_blocks_per_req), np.int32)
        slots = np.full(int(query_lens.sum()), -1)
        return AttentionBatch(
            seq_lens=np.minimum(query_lens, self._cache.max_model_len),
            block_table=table,
            slot_mapping=slots,
        )

    def _slots(
        self,
        query_lens: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        table: npt.NDArray[np.int32],
        starts: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.int64]:
        """Where the block table puts the last `query_lens` tokens of each request."""
        requests = np.repeat(np.arange(len(query_lens)), query_lens)
        first = (seq_lens - query_lens - starts[: len(query_lens)])[requests]
        positions = first + np.arange(len(requests))
        blocks = table[requests, positions // self._cache.block_size].astype(np.int64)
        slots: npt.NDArray[np.int64] = blocks * self._cache.block_size
        return slots + positions % self._cache.block_size

    def _check(
        self, query_lens: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32], width: int
    ) -> None:
        longest = int(np.maximum.reduce(seq_lens, initial=0))
        if longest > self._cache.max_model_len:
            raise ValueError(
                f"a request of {number_of('token', longest)} is longer than max_model_len="
                f"{self._cache.max_model_len}; end it, or raise max_model_len"
            )
        if np.logical_or.reduce(seq_lens < query_lens):
            raise ValueError(
                f"seq_lens {seq_lens.tolist()} count this step's tokens too, so none may be "
                f"below query_lens {query_lens.tolist()}"
            )
        needed = -(-longest // self._cache.block_size)
        if width < needed:
            raise ValueError(
                f"the block table has {number_of('column', width)}, but a request of "
                f"{number_of('token', longest)} needs {number_of('block', needed)} of "
                f"{self._cache.block_size}; give each request all of its "
                "blocks, also those that this step writes to"
            )


# What a step writes, in the order of `shortcuts.fill_attention`.
_FILLED = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")

_UNSIGNED = {4: np.uint32, 8: np.uint64}


def _no_attention(batch: object) -> ValueError:
    return ValueError(
        f"the batch's attention is {shown(batch)}; give AttentionBatch(seq_lens=..., "
        "block_table=...)"
    )


def _rows(name: str, value: Any, num_rows: int, num_dims: int = 1) -> npt.NDArray[Any]:
    """An array with a row for each request or token; one row must not do for all in silence."""
    array = integers_of(name, value)
    if not num_rows and array.shape == (0,):
        array = array.reshape((0,) * num_dims)  # an empty list has no columns
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{name} holds numbers of {array.dtype}; give integers")
    if array.ndim != num_dims or len(array) != num_rows:
        raise ValueError(
            f"{name} has shape {array.shape}, but this batch needs {num_rows} rows in "
            f"{num_dims} dimension(s)"
        )
    return array


def _check_range(name: str, numbers: npt.NDArray[Any], first: int, end: int) -> None:
    """Refuse what lies outside of the cache: a kernel would read or write there unasked."""
    if not numbers.size:
        return
    if numbers.dtype in (np.int32, np.int64):
        # As unsigned numbers those below the first are the largest: one reduction finds both.
        shifted = numbers - first if first else numbers
        is_inside = np.maximum.reduce(shifted.view(_UNSIGNED[shifted.itemsize]), axis=None) < (
            end - first
        )
    else:
        is_inside = first <= int(numbers.min()) and int(numbers.max()) < end
    if not is_inside:
        raise ValueError(
            f"{name} holds {numbers.min()} to {numbers.max()}, but the cache has {first} to "
            f"{end - 1}"
        )


def _uniform(query_lens: Sequence[int] | npt.NDArray[np.int32]) -> int:
    """The query length that all requests have; else 0."""
    lens = np.asarray(query_lens)
    return int(lens[0]) if len(lens) and (lens == lens[0]).all() else 0
