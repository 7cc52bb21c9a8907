"""Attention metadata: right by hand, right for every batch, legal before a capture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import CPU, attention_step

from compile_backend.attention.backend import AttentionBackend
from compile_backend.attention.builder import AttentionBatch, AttentionMetadataBuilder
from compile_backend.attention.kv_cache import LayerCache
from compile_backend.attention.layer import AttentionLayer
from compile_backend.attention.ops import attention
from compile_backend.attention.spec import AttentionSpec, CacheFormat
from compile_backend.batch import BatchDescriptor
from compile_backend.context import set_forward_context
from compile_backend.errors import ConfigError
from compile_backend.support import AttentionCGSupport

if TYPE_CHECKING:
    from compile_backend.attention.metadata import StepAttention

SPEC = AttentionSpec(num_heads=2, num_kv_heads=1, head_size=4, scale=0.5)
CACHE = CacheFormat(block_size=4, dtype=torch.float32, max_model_len=14)
NUM_BLOCKS = 9
ALWAYS = AttentionCGSupport.ALWAYS
NAMES = ("query_start_loc", "seq_lens", "slot_mapping", "block_table")


class Recorder(AttentionBackend):
    """Writes down what it is asked, and adds 1 to the queries."""

    name = "recorder"
    support = ALWAYS

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: list[Any] = []

    def prepare(self, metadata):
        self.asked.append(metadata)
        return len(self.asked)

    def forward(self, query, key, value, output, cache, metadata, prepared):
        self.asked.append((key.shape, value.shape, cache, metadata, prepared))
        output.copy_(query + 1)


class Planner(Recorder):
    name = "planner"
    support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    plans_every_step = True

    def prepare_for_graph(self, metadata, key):
        self.asked.append((metadata, key))
        return key


class Undeclared(AttentionBackend):
    name = "undeclared"
    forward = Recorder.forward


def layers(*classes: type[AttentionBackend]) -> dict[str, AttentionLayer]:
    """Two layers for each class, on one backend."""
    made = {}
    for backend in [each(SPEC, CACHE, CPU) for each in classes]:
        for _ in range(2):
            cache = LayerCache(*(torch.zeros(NUM_BLOCKS, 4, 1, 4) for _ in range(2)))
            made[str(len(made))] = AttentionLayer(str(len(made)), backend, cache)
    return made


def builder(*classes: type[AttentionBackend]) -> AttentionMetadataBuilder:
    return AttentionMetadataBuilder(layers(*(classes or (Recorder,))), CACHE, NUM_BLOCKS)


def lens(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


MIXED = AttentionBatch(seq_lens=[3, 9, 5], block_table=[[7, 0, 0], [2, 5, 1], [4, 3, 0]])
"""A prompt, two tokens of a longer request, and a decode."""
MIXED_LENS = (3, 2, 1)


def tensors_of(step: StepAttention) -> dict[str, Any]:
    return {name: getattr(step.metadata, name).tolist() for name in NAMES}


# --- filled by hand ---------------------------------------------------------------------------


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_batch_by_hand(in_graph: bool) -> None:
    step = attention_step(builder(), MIXED, MIXED_LENS, in_graph=in_graph)
    assert tensors_of(step) == {
        "query_start_loc": [0, 3, 5, 6],
        "seq_lens": [3, 9, 5],
        # Tokens 0, 1, 2 of block 7; 7 and 8 of blocks 5 and 1; 4 of block 3.
        "slot_mapping": [28, 29, 30, 23, 4, 12],
        "block_table": [[7, 0, 0, 0], [2, 5, 1, 0], [4, 3, 0, 0]],
    }


@pytest.mark.parametrize("in_graph", [False, True])
def test_a_padded_batch_by_hand(in_graph: bool) -> None:
    """What an earlier step left is written over; padding has no tokens, no length and no slots."""
    step = attention_step(builder(), MIXED, MIXED_LENS, (8, 5), in_graph=in_graph)
    assert tensors_of(step) == {
        "query_start_loc": [0, 3, 5, 6, 6, 6],
        "seq_lens": [3, 9, 5, 0, 0],
        "slot_mapping": [28, 29, 30, 23, 4, 12, -1, -1],
        "block_table": [[7, 0, 0, 0], [2, 5, 1, 0], [4, 3, 0, 0], [0] * 4, [0] * 4],
    }
    assert (step.metadata.num_tokens, step.metadata.num_reqs) == (8, 5)


def test_the_callers_slots_go_before_the_tables() -> None:
    batch = AttentionBatch(seq_lens=[3, 1], block_table=[[1], [2]], slot_mapping=[35, -1, 0, 7])
    assert tensors_of(attention_step(builder(), batch, (3, 1), (5, 2)))["slot_mapping"] == [
        35,
        -1,
        0,
        7,
        -1,
    ]


def test_a_wider_table_than_the_cache_needs_is_cut() -> None:
    batch = AttentionBatch(seq_lens=[14], block_table=[[1, 2, 3, 4, 99, -5]])
    step = attention_step(builder(), batch, (1,))
    assert tensors_of(step)["block_table"] == [[1, 2, 3, 4]]
    assert tensors_of(step)["slot_mapping"] == [4 * 4 + 1]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_entries_beyond_a_request_may_be_anything(dtype: type[Any]) -> None:
    none = np.array(-1).astype(dtype)
    table = np.array([[1, none, 99, none], [2, 3, none, 77]], dtype)
    step = attention_step(builder(), AttentionBatch(seq_lens=[4, 5], block_table=table), (1, 1))
    assert tensors_of(step)["block_table"] == [[1, 0, 0, 0], [2, 3, 0, 0]]


@pytest.mark.parametrize("form", [list, np.int64, torch.tensor])
def test_the_host_has_its_numbers_in_int32_and_turns_them_once(form: Any) -> None:
    numbers = [4, 5], [[1, 1 << 40], [2, 3]]
    seq_lens, table = (np.array(item).tolist() if form is list else form(item) for item in numbers)
    batch = AttentionBatch(seq_lens=seq_lens, block_table=table)
    host = attention_step(builder(), batch, (1, 1)).metadata.host
    assert host is not None
    assert host.seq_lens.dtype == host.block_table.dtype == np.int32
    assert host.seq_lens.tolist() == [4, 5]
    assert host.block_table[:, 0].tolist() == [1, 2]
    assert host.block_table[1, 1] == 3
    assert host.seq_lens is host.seq_lens
    assert host.block_table is host.block_table


def test_a_batch_of_nobody_is_all_padding() -> None:
    batch = AttentionBatch(seq_lens=[], block_table=np.zeros((0, 4), np.int32))
    step = attention_step(builder(), batch, (), (2, 1))
    assert tensors_of(step) == {
        "query_start_loc": [0, 0],
        "seq_lens": [0],
        "slot_mapping": [-1, -1],
        "block_table": [[0] * 4],
    }
    assert (step.metadata.max_query_len, step.metadata.max_seq_len) == (0, 0)


# --- for every batch --------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn) -> tuple[AttentionBatch, list[int], tuple[int, int]]:
    """Requests on random blocks, and a padded size."""
    query_lens = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    seq_lens = [draw(st.integers(each, CACHE.max_model_len)) for each in query_lens]
    blocks = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=4, max_size=4)
    table = [draw(blocks) for _ in query_lens]
    padding = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    as_array = draw(st.booleans())
    return (
        AttentionBatch(
            seq_lens=np.array(seq_lens, np.int64) if as_array else seq_lens,
            block_table=np.array(table, np.int64) if as_array else table,
        ),
        query_lens,
        (sum(query_lens) + padding[0], len(query_lens) + padding[1]),
    )


@given(batches())
@settings(deadline=None, database=None, max_examples=60)
def test_slots_are_where_the_table_says(drawn: Any) -> None:
    batch, query_lens, padded = drawn
    step = attention_step(builder(), batch, query_lens, padded)
    expected = []
    for query_len, seq_len, blocks in zip(
        query_lens, batch.seq_lens, batch.block_table, strict=True
    ):
        own = range(seq_len - query_len, seq_len)
        expected += [blocks[position // 4] * 4 + position % 4 for position in own]
    expected += [-1] * (padded[0] - len(expected))
    assert step.metadata.slot_mapping.tolist() == expected


@given(batches())
@settings(deadline=None, database=None, max_examples=60)
def test_numbers_of_the_host_hold_inside_a_graph_and_out(drawn: Any) -> None:
    batch, query_lens, padded = drawn
    made = builder()
    step = attention_step(made, batch, query_lens, padded).metadata
    assert (step.max_query_len, step.max_seq_len) == (max(query_lens), max(batch.seq_lens))
    assert step.uniform_query_len == (query_lens[0] if len(set(query_lens)) == 1 else 0)
    assert step.host is not None
    assert step.host.query_lens.tolist() == query_lens
    assert step.host.seq_lens.tolist() == list(batch.seq_lens)
    assert step.host.block_table.tolist() == np.asarray(batch.block_table).tolist()
    assert {each.dtype.name for each in (step.host.seq_lens, step.host.block_table)} == {"int32"}
    worst = attention_step(made, batch, query_lens, padded, in_graph=True).metadata
    assert worst.host is None
    assert worst.max_query_len == padded[0] >= step.max_query_len
    assert worst.max_seq_len == CACHE.max_model_len >= step.max_seq_len
    assert worst.uniform_query_len == 0


@given(query_lens=st.lists(st.integers(1, 14), min_size=1, max_size=5))
@settings(deadline=None, database=None, max_examples=60)
def test_a_batch_for_captures_is_legal_and_stores_nothing(query_lens: list[int]) -> None:
    made = builder()
    batch = made.capture_batch(lens(*query_lens))
    step = attention_step(made, batch, query_lens)
    assert set(step.metadata.slot_mapping.tolist()) == {-1}
    assert step.metadata.seq_lens.tolist() == query_lens
    assert not made.is_decode(batch, lens(*query_lens))


# --- inside a graph ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "max_query_len", "uniform"),
    [
        (BatchDescriptor(8, 8, True), 1, 1),
        (BatchDescriptor(8, 4, True), 2, 2),
        (BatchDescriptor(8, 4), 8, 0),
        (BatchDescriptor(8, 8), 8, 0),
        (BatchDescriptor(8, 1, True), 8, 8),
    ],
    ids=str,
)
def test_the_worst_case_of_a_key(key: BatchDescriptor, max_query_len: int, uniform: int) -> None:
    made = builder()
    tensors = {
        "query_start_loc": torch.zeros(key.num_reqs + 1),
        "seq_lens": torch.zeros(key.num_reqs),
        "slot_mapping": torch.zeros(key.num_tokens),
        "block_table": torch.zeros(key.num_reqs, 4),
    }
    metadata = made.build_for_graph(tensors, key).metadata
    assert (metadata.num_tokens, metadata.num_reqs) == (key.num_tokens, key.num_reqs)
    assert metadata.max_query_len == max_query_len
    assert metadata.uniform_query_len == uniform
    for name in NAMES:
        assert getattr(metadata, name) is tensors[name]


def test_who_plans_every_step_is_told_the_true_lengths_and_the_ops_are_not() -> None:
    made = builder(Planner)
    assert made.plans_every_step
    (planner,) = {layer.backend for layer in made.layers.values()}
    key = BatchDescriptor(2, 2, True)
    batch = AttentionBatch(seq_lens=[5, 9], block_table=[[1, 2, 0], [3, 4, 5]])
    tensors = {
        "query_start_loc": torch.tensor([0, 1, 2]),
        "seq_lens": torch.tensor([5, 9]),
        "slot_mapping": torch.tensor([8, 20]),
        "block_table": torch.tensor(batch.block_table),
    }
    before = made.build_for_graph(tensors, key)
    replayed = made.build_for_graph(tensors, key, batch, lens(1, 1))
    (first, first_key), (second, second_key) = planner.asked
    assert first_key is second_key is key
    assert first.host is None
    assert second.host.seq_lens.tolist() == [5, 9]
    assert second.max_seq_len == CACHE.max_model_len
    for step in (before, replayed):
        assert step.metadata.host is None
        assert step.prepared == {planner: key}


def test_who_plans_nothing_for_graphs_prepares_as_ever() -> None:
    made = builder(Recorder)
    assert not made.plans_every_step
    step = attention_step(made, MIXED, MIXED_LENS, in_graph=True)
    (backend,) = step.prepared
    assert step.prepared[backend] == 1
    assert backend.asked[0].host is None


# --- several backends -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "support"),
    [
        ((Recorder,), ALWAYS),
        ((Planner,), Planner.support),
        ((Recorder, Planner), Planner.support),
        ((Planner, Recorder), Planner.support),
        ((Recorder, Undeclared), AttentionCGSupport.NEVER),
    ],
    ids=str,
)
def test_the_weakest_backend_decides(classes: Any, support: AttentionCGSupport) -> None:
    made = builder(*classes)
    assert made.support is support
    assert made.plans_every_step is (Planner in classes)


def test_each_backend_prepares_once_for_all_its_layers() -> None:
    made = builder(Recorder, Recorder, Planner)
    assert len(made.layers) == 6
    step = attention_step(made, MIXED, MIXED_LENS)
    assert len(step.prepared) == 3
    for backend in step.prepared:
        (seen,) = backend.asked
        assert seen is step.metadata


def test_without_layers_there_is_no_metadata() -> None:
    with pytest.raises(ConfigError, match="give every attention layer"):
        AttentionMetadataBuilder({}, CACHE, NUM_BLOCKS)


@pytest.mark.parametrize(
    ("seq_lens", "query_lens", "expected"),
    [([5, 2], (1, 1), True), ([1, 5], (1, 1), False), ([4, 4], (4, 3), False), ([], (), True)],
    ids=str,
)
def test_a_decode_had_tokens_before(seq_lens: Any, query_lens: Any, expected: bool) -> None:
    batch = AttentionBatch(seq_lens=seq_lens, block_table=[[0]] * len(seq_lens))
    assert builder().is_decode(batch, lens(*query_lens)) is expected


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"seq_lens": [3, 15, 5]}, "15 tokens is longer than max_model_len=14"),
        ({"seq_lens": [2, 9, 5]}, r"seq_lens \[2, 9, 5\].*query_lens \[3, 2, 1\]"),
        ({"seq_lens": [3, 13, 5]}, "3 columns, but a request of 13 tokens needs 4 blocks of 4"),
        ({"seq_lens": [9]}, r"seq_lens has shape \(1,\).*3 rows"),
        ({"seq_lens": 9}, r"seq_lens has shape \(\)"),
        ({"seq_lens": [[3], [9], [5]]}, r"seq_lens has shape \(3, 1\)"),
        ({"block_table": [[7, 1, 2]]}, r"block_table has shape \(1, 3\).*3 rows"),
        ({"block_table": [7, 1, 2]}, r"block_table has shape \(3,\)"),
        ({"block_table": [[7] * 3, [2, 9, 1], [4] * 3]}, "block_table holds 1 to 9.*0 to 8"),
        ({"block_table": [[7] * 3, [2, -1, 1], [4] * 3]}, "block_table holds -1 to 7.*0 to 8"),
        ({"slot_mapping": [5]}, r"slot_mapping has shape \(1,\).*6 rows"),
        ({"slot_mapping": [0, 1, 2, 3, 4, 36]}, "slot_mapping holds 0 to 36.*-1 to 35"),
        ({"slot_mapping": [0, 1, 2, 3, 4, -2]}, "slot_mapping holds -2 to 4.*-1 to 35"),
    ],
    ids=str,
)
def test_a_batch_that_contradicts_itself_is_refused(changes: dict[str, Any], text: str) -> None:
    """It would read or write blocks of others, or outside of the cache."""
    batch = AttentionBatch(
        **{"seq_lens": MIXED.seq_lens, "block_table": MIXED.block_table, **changes}
    )
    with pytest.raises(ValueError, match=text):
        attention_step(builder(), batch, MIXED_LENS)


@pytest.mark.parametrize(
    ("option", "value"), [("block_size", 0), ("max_model_len", 0), ("max_model_len", -1)]
)
def test_a_cache_holds_something(option: str, value: int) -> None:
    numbers = {"block_size": 4, "max_model_len": 8, option: value}
    with pytest.raises(ConfigError, match=f"{option}={value} is too small"):
        CacheFormat(dtype=torch.float32, **numbers)


@pytest.mark.parametrize(
    ("max_model_len", "block_size", "blocks"), [(8, 4, 2), (9, 4, 3), (3, 16, 1), (5, 1, 5)]
)
def test_columns_of_a_block_table(max_model_len: int, block_size: int, blocks: int) -> None:
    cache = CacheFormat(block_size=block_size, dtype=torch.float32, max_model_len=max_model_len)
    assert cache.max_blocks_per_req == blocks


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"sliding_window": 0}, "sliding_window"),
    ],
)
def test_a_layer_that_contradicts_itself_is_refused(changes: Any, option: str) -> None:
    numbers = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "scale": 1.0, **changes}
    with pytest.raises(ConfigError) as caught:
        AttentionSpec(**numbers)
    assert caught.value.option == option


# --- the op -----------------------------------------------------------------------------------


def qkvo(num_tokens: int) -> list[torch.Tensor]:
    """Queries, keys, values and an output."""
    heads = (2, 1, 1, 2)
    return [torch.randn(num_tokens, each, 4) for each in heads]


def test_the_op_finds_its_layer_in_the_step() -> None:
    made = builder(Recorder, Planner)
    step = attention_step(made, MIXED, MIXED_LENS)
    args = qkvo(6)
    with set_forward_context(step):
        assert attention(*args, "2") is None
    assert torch.equal(args[3], args[0] + 1)
    first, second = made.layers["0"].backend, made.layers["2"].backend
    assert len(first.asked) == 1
    shape, _, cache, metadata, prepared = second.asked[-1]
    assert shape == (6, 1, 4)
    assert cache is made.layers["2"].cache
    assert metadata is step.metadata
    assert prepared == step.prepared[second]


def test_the_op_says_what_is_missing() -> None:
    with set_forward_context(), pytest.raises(RuntimeError, match=r"'7'.*GraphModelRunner"):
        attention(*qkvo(1), "7")
    with pytest.raises(RuntimeError, match="set_forward_context"):
        attention(*qkvo(1), "7")
    step = attention_step(builder(), MIXED, MIXED_LENS)
    with set_forward_context(step), pytest.raises(RuntimeError, match=r"'7' is not one .* are 0"):
        attention(*qkvo(6), "7")


def test_the_op_keeps_what_its_schema_says() -> None:
    made = builder()
    with set_forward_context(attention_step(made, MIXED, MIXED_LENS)):
        kinds = ("test_schema", "test_faketensor")
        torch.library.opcheck(attention, (*qkvo(6), "0"), test_utils=kinds)
