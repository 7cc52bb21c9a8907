"""The Triton kernels against dense attention in float64: in the interpreter, or on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ragged import attend, bits

from compile_backend.attention.kv_cache import LayerCache, store
from compile_backend.attention.metadata import AttentionMetadata
from compile_backend.attention.spec import AttentionSpec, CacheFormat
from compile_backend.attention.triton_attention import TritonAttention
from compile_backend.attention.triton_plan import (
    MIN_DOT_SIZE,
    TILES,
    LaunchPlan,
    choose_num_splits,
    plan_facts,
    plan_launch,
)
from compile_backend.errors import ConfigError

CPU = torch.device("cpu")
needs_interpreter = pytest.mark.skipif(
    TritonAttention.missing(CPU) is not None, reason="kernels are compiled for a GPU here"
)
in_python = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class Case:
    """One batch: `(query_len, context_len)` of each request, and a layer."""

    lengths: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    block_size: int = 4
    window: int | None = None
    soft_cap: float | None = None
    num_splits: int | None = None
    num_padding_tokens: int = 0
    slack: int = 0
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    seed: int = 0

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            scale=self.head_size**-0.5,
            sliding_window=self.window,
            soft_cap=self.soft_cap,
        )


@dataclass(frozen=True)
class Batch:
    metadata: AttentionMetadata
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    cache: LayerCache
    backend: TritonAttention


def make_batch(case: Case, device: torch.device) -> Batch:
    """NaN is in everything that must not be read: padding rows, unused blocks and slots."""
    torch.manual_seed(case.seed)
    num_reqs, size = len(case.lengths), case.block_size
    query_lens = torch.tensor([query for query, _ in case.lengths])
    seq_lens = torch.tensor([query + context for query, context in case.lengths])
    columns = int(seq_lens.max() + case.slack) // size + 2
    table = 1 + torch.randperm(num_reqs * columns).view(num_reqs, columns)
    positions = torch.arange(columns * size)
    is_used = positions < seq_lens[:, None]
    places = table[:, positions // size] * size + positions % size
    is_new = is_used & (positions >= (seq_lens - query_lens)[:, None])
    padding = torch.full((case.num_padding_tokens,), -1)
    # Columns past a request's length name block 0, which holds NaN.
    table = torch.where(is_used.view(num_reqs, columns, size).any(2), table, 0)
    num_tokens = int(query_lens.sum()) + case.num_padding_tokens
    cache_dtype = case.cache_dtype or case.dtype
    scale = 1.0 if cache_dtype is not FP8 else 0.03
    shape = (1 + num_reqs * columns, size, case.num_kv_heads, case.head_size)
    caches = []
    for _ in range(2):
        values = torch.full(shape, float("nan")).view(-1, *shape[2:])
        values[places[is_used & ~is_new]] = torch.randn(shape).view(values.shape)[
            places[is_used & ~is_new]
        ] * (1.0 / scale)
        caches.append(values.view(shape).clamp(-448, 448).to(cache_dtype).to(device))
    heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads)
    packed = torch.randn(num_tokens, sum(heads), case.head_size)
    packed[num_tokens - case.num_padding_tokens :] = float("nan")
    query, key, value = packed.to(device, case.dtype).split(heads, 1)
    starts = torch.cat([torch.zeros(1), query_lens.cumsum(0)])
    return Batch(
        AttentionMetadata(
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            query_start_loc=starts.to(device, torch.int32),
            seq_lens=seq_lens.to(device, torch.int32),
            block_table=table.to(device, torch.int32),
            slot_mapping=torch.cat([places[is_new], padding]).to(device),
            max_query_len=int(query_lens.max()) + case.slack,
            max_seq_len=int(seq_lens.max()) + case.slack,
        ),
        (query, key, value),
        LayerCache(caches[0], caches[1], scale, scale),
        TritonAttention(
            case.spec,
            CacheFormat(block_size=size, dtype=cache_dtype, max_model_len=columns * size),
            device,
        ),
    )


def check(case: Case, device: torch.device = CPU) -> None:
    batch = make_batch(case, device)
    metadata, cache = batch.metadata, batch.cache
    query, key, value = batch.qkv
    expected_cache = replace(
        cache, keys=cache.keys.clone().cpu(), values=cache.values.clone().cpu()
    )
    plan = batch.backend.prepare(metadata)
    if case.num_splits is not None:
        plan = replace(plan, num_splits=case.num_splits)
    output = torch.full_like(query, 7.0)
    batch.backend.forward(query, key, value, output, cache, metadata, plan)

    store(key.cpu(), value.cpu(), expected_cache, metadata.slot_mapping.cpu())
    assert torch.equal(bits(cache.keys.cpu()), bits(expected_cache.keys))
    assert torch.equal(bits(cache.values.cpu()), bits(expected_cache.values))
    num_real = metadata.num_tokens - case.num_padding_tokens
    assert torch.equal(output[num_real:], torch.full_like(output[num_real:], 7.0))
    start = 0
    for row, (query_len, context) in enumerate(case.lengths):
        if not query_len:
            continue
        positions = torch.arange(query_len + context, device=device)
        blocks = metadata.block_table[row, positions // case.block_size].long()
        offsets = positions % case.block_size
        keys = cache.keys.double()[blocks, offsets] * cache.key_scale
        values = cache.values.double()[blocks, offsets] * cache.value_scale
        rows = slice(start, start + query_len)
        expected, scores = attend(query[rows], keys, values, case.spec)
        largest = scores.abs().max()
        # The weights and the output are rounded to the dtype. An error of a score, a sum of
        # head_size products in float32, is a relative error of its weight; so is one of their sum.
        single = torch.finfo(torch.float32).eps
        relative = 2 * torch.finfo(case.dtype).eps + 2 * single * case.head_size * (largest + 1)
        error = (output[rows].double() - expected).abs().max()
        assert error <= relative * values.abs().max(), (row, float(error))
        start += query_len


@st.composite
def cases(draw: st.DrawFn, *, max_query_len: int) -> Case:
    group = draw(st.sampled_from([1, 2, 4, 7]))
    num_kv_heads = draw(st.sampled_from([1, 2]))
    query_lens = st.integers(1, max_query_len)
    request = st.one_of(
        st.just((0, 0)),
        st.tuples(st.one_of(st.just(1), query_lens), st.integers(0, 70)),
    )
    lengths = draw(
        st.lists(request, min_size=1, max_size=3).filter(lambda all_: any(q for q, _ in all_))
    )
    return Case(
        # Padding requests come last, as a padded batch has them.
        lengths=tuple(sorted(lengths, key=lambda pair: pair[0] == 0)),
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_size=draw(st.sampled_from([16, 24])),
        block_size=draw(st.sampled_from([1, 4, 16])),
        window=draw(st.sampled_from([None, 1, 13, 70])),
        soft_cap=draw(st.sampled_from([None, 2.0, 30.0])),
        num_splits=draw(st.sampled_from([None, 1, 2, 4])),
        num_padding_tokens=draw(st.integers(0, 3)),
        slack=draw(st.sampled_from([0, 5, 100])),
        dtype=draw(st.sampled_from([torch.float32, torch.float16])),
        seed=draw(st.integers(0, 99)),
    )


@needs_interpreter
@in_python
@given(cases(max_query_len=24))
def test_mixed_batches(case: Case) -> None:
    check(case)


@needs_interpreter
@in_python
@given(cases(max_query_len=3))
def test_short_queries(case: Case) -> None:
    check(replace(case, slack=min(case.slack, 5)))


@needs_interpreter
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 192, 256])
def test_head_sizes(head_size: int, num_splits: int) -> None:
    check(Case(lengths=((1, 70), (2, 0), (0, 0)), head_size=head_size, num_splits=num_splits))


@needs_interpreter
def test_more_splits_than_keys() -> None:
    check(Case(lengths=((1, 2), (1, 150)), num_splits=16))


@needs_interpreter
def test_more_requests_than_one_search_reads() -> None:
    check(Case(lengths=((9, 0), *[(0, 0)] * 260, (3, 2)), num_heads=2, num_kv_heads=1, slack=99))


@needs_interpreter
def test_every_place_of_a_query_in_a_tile() -> None:
    """The keys that need no mask end where the first query of a block stands."""
    lengths = ((40, 3), *((2, context) for context in range(18)))
    check(Case(lengths=lengths, num_heads=2, num_kv_heads=1, num_splits=1))


@needs_interpreter
def test_a_group_larger_than_a_block_of_queries() -> None:
    check(Case(lengths=((3, 5),), num_heads=40, num_kv_heads=1))


@needs_interpreter
def test_a_batch_of_padding_writes_nothing() -> None:
    batch = make_batch(Case(lengths=((0, 0), (0, 0)), num_padding_tokens=2), CPU)
    query, key, value = batch.qkv
    before = batch.cache.keys.clone()
    output = torch.full_like(query, 7.0)
    plan = replace(batch.backend.prepare(replace(batch.metadata, max_query_len=1)), num_splits=2)
    batch.backend.forward(query, key, value, output, batch.cache, batch.metadata, plan)
    assert torch.equal(output, torch.full_like(output, 7.0))
    assert torch.equal(bits(batch.cache.keys), bits(before))


@needs_interpreter
def test_a_cache_with_heads_before_slots() -> None:
    """Strides are read, not assumed."""
    batch = make_batch(Case(lengths=((3, 9), (1, 5))), CPU)
    query, key, value = batch.qkv
    turned = LayerCache(
        *(
            each.transpose(1, 2).contiguous().transpose(1, 2)
            for each in (batch.cache.keys, batch.cache.values)
        )
    )
    outputs = []
    for cache in (batch.cache, turned):
        outputs.append(torch.empty_like(query))
        plan = batch.backend.prepare(batch.metadata)
        batch.backend.forward(query, key, value, outputs[-1], cache, batch.metadata, plan)
    assert torch.equal(*outputs)
    assert torch.equal(bits(turned.keys), bits(batch.cache.keys))


def on_the_host(
    num_tokens: int, num_reqs: int, max_query_len: int, max_seq_len: int
) -> AttentionMetadata:
    """The numbers that a plan is made from, without tensors."""
    nothing = torch.empty(0)
    return AttentionMetadata(
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        query_start_loc=nothing,
        seq_lens=nothing,
        block_table=nothing,
        slot_mapping=nothing,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
    )


@pytest.mark.parametrize("element_bytes", [2, 4])
@given(
    lengths=st.lists(st.integers(0, 700), min_size=1, max_size=40).filter(any),
    group=st.sampled_from([1, 2, 4, 7, 8, 71]),
    head_size=st.sampled_from([8, 64, 80, 128, 192, 256]),
    window=st.sampled_from([None, 100]),
    slack=st.integers(0, 50),
)
@settings(deadline=None)
def test_a_plan_covers_every_query(
    element_bytes: int, lengths: list[int], group: int, head_size: int, window: int, slack: int
) -> None:
    spec = replace(
        Case(lengths=(), num_heads=group, num_kv_heads=1, window=window).spec, head_size=head_size
    )
    metadata = on_the_host(sum(lengths) + slack, len(lengths), max(lengths) + slack, 4096)
    plan = plan_launch(spec, metadata, element_bytes, 132)
    queries = plan.block_rows // group
    assert queries >= 1
    assert plan.block_rows >= 16
    if plan.is_whole:
        assert plan.num_blocks == len(lengths)
        assert max(lengths) <= queries
        return
    start = 0
    taken = -1
    for row, length in enumerate(lengths):
        first = start // queries + row
        assert first > taken or not length
        taken = max(taken, first + -(-length // queries) - 1)
        start += length
    assert taken < plan.num_blocks


@pytest.mark.parametrize(
    ("num_programs", "num_tiles", "expected"),
    [(8, 64, 32), (64, 64, 4), (512, 64, 1), (8, 3, 2), (1, 1000, 64), (8, 1, 1), (0, 0, 1)],
)
def test_splits_fill_the_device(num_programs: int, num_tiles: int, expected: int) -> None:
    found = choose_num_splits(num_programs=num_programs, num_tiles=num_tiles, num_sms=132)
    assert found == expected


@pytest.mark.parametrize(
    ("query_len", "seq_len", "window", "expected"),
    [
        (1, 8192, None, True),
        (8, 8192, None, True),
        (9, 8192, None, False),
        (512, 1024, None, True),
        (512, 1025, None, False),
        (512, 4096, 512, True),
        (512, 4096, 513, False),
    ],
)
def test_programs_quantise_where_the_way_over_the_keys_is_short(
    query_len: int, seq_len: int, window: int | None, expected: bool
) -> None:
    """Or where the block of queries is the smallest: 8 tokens of 2 heads each."""
    metadata = on_the_host(query_len, 1, query_len, seq_len)
    spec = Case(lengths=(), num_heads=4, num_kv_heads=2, window=window).spec
    assert plan_launch(spec, metadata, 2, 132).quantises is expected


@pytest.mark.parametrize("element_bytes", [2, 4])
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 2100)), min_size=2, max_size=8, unique=True
    ),
    window=st.sampled_from([None, 100, 1000]),
    num_reqs=st.integers(1, 3),
)
@settings(deadline=None)
def test_batches_with_equal_facts_have_equal_plans(
    element_bytes: int, lengths: list[tuple[int, int]], window: int | None, num_reqs: int
) -> None:
    spec = Case(lengths=(), num_heads=4, num_kv_heads=2, window=window).spec
    found: dict[tuple[int, ...], LaunchPlan] = {}
    for query_len, seq_len in lengths:
        for more in range(20):
            metadata = on_the_host(query_len * num_reqs, num_reqs, query_len, seq_len + more)
            plan = plan_launch(spec, metadata, element_bytes, 132)
            assert found.setdefault(plan_facts(metadata), plan) == plan


def test_equal_plans_of_a_layer_are_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compile_backend.attention.triton_attention._MOST_PLANS", 40)
    batch = make_batch(Case(lengths=((1, 20), (1, 3))), CPU)
    plans = [
        batch.backend.prepare(replace(batch.metadata, max_seq_len=length))
        for length in (17, 18, 33, 49, 640, 17)
    ]
    assert len({id(plan) for plan in plans}) == len(set(plans)) == 1  # one SM: never split
    for length in range(1, 16 * 100, 16):
        batch.backend.prepare(replace(batch.metadata, max_seq_len=length))
    assert len(batch.backend._plans) <= 40


def test_larger_blocks_come_later_in_the_table() -> None:
    assert all(row.tile % MIN_DOT_SIZE == 0 for row in TILES)
    keys = [(row.element_bytes, row.max_head, row.max_rows) for row in TILES]
    assert keys == sorted(keys)


@pytest.mark.parametrize(
    ("changes", "cache_dtype", "option"),
    [
        ({"head_size": 288}, torch.float16, "head_size"),
        ({"num_heads": 129, "num_kv_heads": 1}, torch.float16, "num_kv_heads"),
        ({"scale": 0.0}, torch.float16, "scale"),
        ({}, torch.int8, "cache_dtype"),
    ],
)
def test_what_it_refuses(changes: dict[str, int], cache_dtype: torch.dtype, option: str) -> None:
    spec = replace(Case(lengths=()).spec, **changes)
    cache = CacheFormat(block_size=16, dtype=cache_dtype, max_model_len=64)
    with pytest.raises(ConfigError) as caught:
        TritonAttention(spec, cache, CPU)
    assert caught.value.option == option


@needs_interpreter
def test_the_interpreter_refuses_8_bit_caches() -> None:
    cache = CacheFormat(block_size=16, dtype=FP8, max_model_len=64)
    with pytest.raises(ConfigError, match="interpreter"):
        TritonAttention(Case(lengths=()).spec, cache, CPU)


GPU_LENGTHS = {
    "decode": ((1, 4095), (1, 599), (1, 0), (1, 16), (0, 0)),
    "speculative": ((4, 4000), (4, 1), (4, 63), (0, 0)),
    "prefill": ((512, 0), (1000, 0)),
    "chunked": ((300, 3000), (17, 0), (64, 64)),
    "mixed": ((1, 4000), (200, 100), (1, 0), (33, 1000), (1, 31), (0, 0)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(16, 8), (32, 8)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, FP8),
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", GPU_LENGTHS.values(), ids=GPU_LENGTHS)
def test_on_a_gpu(
    lengths: tuple[tuple[int, int], ...],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    heads: tuple[int, int],
) -> None:
    check(
        Case(
            lengths=lengths,
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_size=128,
            block_size=16,
            num_padding_tokens=5,
            dtype=dtype,
            cache_dtype=cache_dtype,
        ),
        torch.device("cuda"),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("head_size", [64, 80, 96, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_odd_layers_on_a_gpu(head_size: int, dtype: torch.dtype) -> None:
    for window, soft_cap, block_size in ((None, None, 1), (128, 30.0, 64)):
        check(
            Case(
                lengths=GPU_LENGTHS["mixed"],
                num_heads=7,
                num_kv_heads=1,
                head_size=head_size,
                block_size=block_size,
                window=window,
                soft_cap=soft_cap,
                dtype=dtype,
            ),
            torch.device("cuda"),
        )
