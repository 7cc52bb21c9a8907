"""The reference backend against dense attention in float64, by the host's lengths or without."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ragged import CPU, FP8, Paged, Ragged, attention_step, bits, ragged, refill

from compile_backend.attention.kv_cache import LayerCache, store
from compile_backend.attention.sdpa import SdpaAttention

LONG = Ragged(
    query_lens=(70, 1, 33),
    contexts=(3, 90, 0),
    num_padding_reqs=2,
    num_padding_tokens=40,
    num_heads=2,
    num_kv_heads=1,
)
"""More tokens than gather their blocks at once."""

SHARED = Ragged(
    query_lens=(1, 3, 1, 2), contexts=(12, 9, 4, 17), num_shared_blocks=2, num_padding_tokens=1
)

in_steps = settings(
    max_examples=40, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)

where = pytest.mark.parametrize("in_graph", [False, True], ids=["by request", "by token"])


pytestmark = pytest.mark.usefixtures("without_gradients")


def check(case: Ragged, *, in_graph: bool, uniform: bool = False) -> None:
    paged = Paged(case, SdpaAttention)
    step = paged.step(in_graph=in_graph, uniform=uniform)
    assert (step.metadata.host is None) is in_graph
    paged.check(paged.run(step))


@where
@in_steps
@given(case=ragged())
@example(case=LONG)
@example(case=SHARED)
def test_any_batch(case: Ragged, in_graph: bool) -> None:
    check(case, in_graph=in_graph)


@in_steps
@given(case=ragged(max_query_len=3, uniform=True))
def test_uniform_batches_inside_a_graph(case: Ragged) -> None:
    num_tokens = case.query_lens[0] * case.num_padding_reqs
    check(replace(case, num_padding_tokens=num_tokens), in_graph=True, uniform=True)


@where
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_16_bit_queries(dtype: torch.dtype, soft_cap: float | None, in_graph: bool) -> None:
    check(replace(SHARED, dtype=dtype, soft_cap=soft_cap), in_graph=in_graph)


@where
@in_steps
@given(case=ragged(max_context=20))
def test_8_bit_caches(case: Ragged, in_graph: bool) -> None:
    check(replace(case, cache_dtype=FP8), in_graph=in_graph)


@in_steps
@given(first=ragged(), second=ragged())
@example(first=LONG, second=replace(SHARED, num_heads=2, num_kv_heads=1))
def test_a_graphs_metadata_serves_every_batch_of_its_key(first: Ragged, second: Ragged) -> None:
    """What is captured with one batch in its tensors is replayed with another."""
    layer = {
        name: getattr(first, name)
        for name in ("num_heads", "num_kv_heads", "block_size", "window", "soft_cap")
    }
    cases = (first, replace(second, **layer))
    num_tokens = max(sum(case.query_lens) for case in cases)
    num_reqs = max(len(case.query_lens) for case in cases)
    captured, replayed = (
        Paged(
            replace(
                case,
                num_padding_tokens=num_tokens - sum(case.query_lens),
                num_padding_reqs=num_reqs - len(case.query_lens),
                max_model_len=max(*first.seq_lens, *second.seq_lens) + 3,
            ),
            SdpaAttention,
        )
        for case in cases
    )
    step = captured.step(in_graph=True)
    captured.check(captured.run(step))
    refill(step, replayed.step(in_graph=True))
    replayed.check(replayed.run(step))


@where
def test_a_batch_for_captures_writes_nothing(in_graph: bool) -> None:
    paged = Paged(replace(SHARED, num_padding_tokens=0), SdpaAttention)
    before = [bits(each).clone() for each in paged.cache_tensors]
    lens = np.array(SHARED.query_lens, np.int32)
    batch = paged.builder.capture_batch(lens)
    paged.run(attention_step(paged.builder, batch, lens, in_graph=in_graph))
    for held, expected in zip(paged.cache_tensors, before, strict=True):
        assert torch.equal(bits(held), expected)


def test_the_reference_sees_a_wrong_page() -> None:
    """The check itself: one token read from another place, and one written there."""
    paged = Paged(SHARED, SdpaAttention)
    step = paged.step(in_graph=True)
    wrong = step.metadata.block_table.clone()
    wrong[1, 0], wrong[1, 2] = wrong[1, 2], wrong[1, 0]
    step = replace(step, metadata=replace(step.metadata, block_table=wrong))
    output = paged.run(step)
    with pytest.raises(AssertionError):
        paged.check(output)
    paged.check(paged.run(paged.step(in_graph=True)))
    bits(paged.cache.values)[0, 0, 0, 0] += 1
    with pytest.raises(AssertionError):
        paged.check(output)


# --- storing ----------------------------------------------------------------------------------


@st.composite
def slot_mappings(draw: st.DrawFn) -> list[int]:
    """Different slots of 12, some tokens left out."""
    slots = draw(st.permutations(range(12)))[: draw(st.integers(0, 6))]
    return [slot if draw(st.booleans()) else -1 for slot in slots]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, FP8], ids=str
)
@given(slots=slot_mappings(), seed=st.integers(0, 99))
@settings(deadline=None, database=None, max_examples=30)
def test_only_named_slots_are_written(slots: list[int], seed: int, dtype: torch.dtype) -> None:
    """Bit for bit, whatever the other slots hold; what is left out may be NaN."""
    random = torch.Generator().manual_seed(seed)
    caches = [
        torch.randint(0, 256, (3, 4, 2, 8 * dtype.itemsize), dtype=torch.uint8, generator=random)
        for _ in range(2)
    ]
    caches = [each.view(dtype) for each in caches]
    expected = [bits(each).clone().flatten(0, 1) for each in caches]
    scales = (0.5, 4.0) if dtype is FP8 else (1.0, 1.0)
    row_dtype = torch.float32 if dtype is FP8 else dtype
    new = []
    for each, scale in zip(expected, scales, strict=True):
        rows = torch.randn(len(slots), 2, 8, generator=random, dtype=torch.float64).to(row_dtype)
        for row, slot in zip(rows, slots, strict=True):
            if slot < 0:
                row.fill_(torch.nan)
            else:
                each[slot] = bits((row / scale).to(dtype))
        new.append(rows)
    store(*new, LayerCache(*caches, *scales), torch.tensor(slots, dtype=torch.int64))
    for held, wanted in zip(caches, expected, strict=True):
        assert torch.equal(bits(held).flatten(0, 1), wanted)


def test_8_bit_caches_cut_to_their_range() -> None:
    cache = LayerCache(*(torch.zeros(1, 2, 1, 2).to(FP8) for _ in range(2)), 0.5, 2.0)
    rows = torch.tensor([[[1e6, -1e6]], [[224.0, 3.0]]])
    store(rows, rows, cache, torch.tensor([1, 0]))
    assert cache.keys.float().flatten().tolist() == [448.0, 6.0, 448.0, -448.0]
    assert cache.values.float().flatten().tolist() == [112.0, 1.5, 448.0, -448.0]


def test_storing_reads_nothing_on_the_host() -> None:
    """A meta tensor has no values: whoever asks for one fails."""
    meta = torch.device("meta")
    rows = torch.empty(5, 2, 8, device=meta)
    cache = LayerCache(*(torch.empty(3, 4, 2, 8, device=meta) for _ in range(2)))
    store(rows, rows, cache, torch.empty(5, dtype=torch.int64, device=meta))


def test_attention_inside_a_graph_reads_nothing_on_the_host() -> None:
    paged = Paged(LONG, SdpaAttention)
    step = paged.step(in_graph=True)
    meta = torch.device("meta")
    metadata = replace(
        step.metadata,
        **{
            name: getattr(step.metadata, name).to(meta)
            for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
        },
    )
    query, key, value = (each.to(meta) for each in (paged.query, *paged.new))
    cache = LayerCache(*(each.to(meta) for each in paged.cache_tensors))
    backend = SdpaAttention(LONG.spec, LONG.cache_format, CPU)
    backend.forward(query, key, value, torch.empty_like(query), cache, metadata, None)
