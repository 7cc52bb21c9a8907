"""flex_attention over the paged cache, against attention written out in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import attend

from compile_backend.attention import flex_tiles
from compile_backend.attention.flex import FlexAttention
from compile_backend.attention.flex_mask import MAX_ROWS, Tiling, choose_tiling
from compile_backend.attention.kv_cache import LayerCache
from compile_backend.attention.metadata import AttentionMetadata
from compile_backend.attention.spec import AttentionSpec, CacheFormat
from compile_backend.batch import BatchDescriptor
from compile_backend.errors import ConfigError

CPU = torch.device("cpu")


@dataclass
class Step:
    """A batch with its cache: two shared blocks first in every table, if `is_shared`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cache: LayerCache
    metadata: AttentionMetadata

    def run(self, backend: FlexAttention, prepared: Any = None) -> torch.Tensor:
        output = torch.full_like(self.query, 7.0)
        prepared = prepared or backend.prepare(self.metadata)
        backend.forward(
            self.query, self.key, self.value, output, self.cache, self.metadata, prepared
        )
        return output


def make_step(
    spec: AttentionSpec,
    form: CacheFormat,
    query_lens: list[int],
    contexts: list[int],
    *,
    padding: int = 0,
    padding_reqs: int = 0,
    is_shared: bool = False,
    is_uniform: bool = False,
    device: torch.device = CPU,
    num_blocks: int = 0,
    seed: int = 0,
) -> Step:
    page = form.block_size
    num_real, num_reqs = len(query_lens), len(query_lens) + padding_reqs
    num_used, num_tokens = sum(query_lens), sum(query_lens) + padding
    columns = form.max_blocks_per_req
    num_blocks = num_blocks or num_reqs * columns + 3
    random = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(device, form.dtype)

    table = torch.randperm(num_blocks, generator=random)[: num_reqs * columns]
    table = table.view(num_reqs, columns).int()
    if is_shared:  # blocks that no token of this step is written to
        whole = min(contexts) // page
        table[:, :whole] = table[0, :whole].clone()
        if num_real > 1 and whole > 1:  # and at other places of another request
            table[1, :whole] = table[0, :whole].flip(0)
    seq_lens = [q + c for q, c in zip(query_lens, contexts, strict=True)] + [0] * padding_reqs
    starts = torch.tensor([0, *query_lens, *[0] * padding_reqs]).cumsum(0)
    slots = torch.full((num_tokens,), -1)
    for req in range(num_real):
        positions = torch.arange(contexts[req], seq_lens[req])
        where = table[req][positions // page].long() * page + positions % page
        slots[starts[req] : starts[req + 1]] = where
        table[req, -(-seq_lens[req] // page) :] = table[req, 0]  # any valid block
    query = noise(num_tokens, spec.num_heads, spec.head_size)
    key, value = (noise(num_tokens, spec.num_kv_heads, spec.head_size) for _ in range(2))
    for item in (query, key, value):
        item[num_used:] = torch.nan
    shape = (num_blocks, page, spec.num_kv_heads, spec.head_size)
    metadata = AttentionMetadata(
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        query_start_loc=starts.int().to(device),
        seq_lens=torch.tensor(seq_lens).int().to(device),
        block_table=table.to(device),
        slot_mapping=slots.to(device),
        max_query_len=num_tokens,
        max_seq_len=form.max_model_len,
        uniform_query_len=query_lens[0] if is_uniform else 0,
    )
    return Step(query, key, value, LayerCache(noise(*shape), noise(*shape)), metadata)


def reference(spec: AttentionSpec, step: Step) -> torch.Tensor:
    """Rows of real tokens, request by request; the cache must hold the step's keys already."""
    rows = []
    starts, page = step.metadata.query_start_loc.tolist(), step.cache.keys.shape[1]
    for req, seq_len in enumerate(step.metadata.seq_lens.tolist()):
        query = step.query[starts[req] : starts[req + 1]]
        places = torch.arange(seq_len, device=query.device)
        slots = step.metadata.block_table[req][places // page].long() * page + places % page
        keys, values = (
            cache.flatten(0, 1)[slots] for cache in (step.cache.keys, step.cache.values)
        )
        rows.append(attend(query, keys, values, spec)[0])
    return torch.cat(rows)


def check(spec: AttentionSpec, step: Step, output: torch.Tensor, tolerance: float) -> None:
    expected = reference(spec, step)
    torch.testing.assert_close(
        output[: len(expected)].double(), expected, atol=tolerance, rtol=tolerance
    )
    assert output.isfinite().all()


def make_spec(num_heads: int = 4, num_kv_heads: int = 2, **changes: Any) -> AttentionSpec:
    settings: dict[str, Any] = {"head_size": 8, "scale": 0.3} | changes
    return AttentionSpec(num_heads=num_heads, num_kv_heads=num_kv_heads, **settings)


def make_format(page: int = 4, dtype: torch.dtype = torch.float64) -> CacheFormat:
    return CacheFormat(block_size=page, dtype=dtype, max_model_len=48)


@st.composite
def cases(draw: st.DrawFn) -> tuple[AttentionSpec, CacheFormat, dict[str, Any], int]:
    num_kv_heads = draw(st.sampled_from([1, 2]))
    spec = make_spec(
        num_kv_heads * draw(st.sampled_from([1, 2, 3])),
        num_kv_heads,
        sliding_window=draw(st.sampled_from([None, 1, 5, 17])),
        soft_cap=draw(st.sampled_from([None, 2.0])),
    )
    form = make_format(draw(st.sampled_from([1, 4, 16, 24])))
    num_reqs = draw(st.integers(1, 4))
    is_uniform = draw(st.booleans())
    lens = st.integers(1, 5) if is_uniform else st.one_of(st.integers(1, 3), st.integers(4, 20))
    query_lens = draw(st.lists(lens, min_size=num_reqs, max_size=num_reqs))
    if is_uniform:
        query_lens = query_lens[:1] * num_reqs
    contexts = draw(st.lists(st.integers(0, 28), min_size=num_reqs, max_size=num_reqs))
    padding_reqs = draw(st.integers(0, 2))
    padding = padding_reqs * query_lens[0] if is_uniform else draw(st.integers(0, 5))
    batch = {
        "query_lens": query_lens,
        "contexts": contexts,
        "padding": padding,
        "padding_reqs": padding_reqs,
        "is_uniform": is_uniform,
        "is_shared": draw(st.booleans()),
        "seed": draw(st.integers(0, 9)),
    }
    return spec, form, batch, draw(st.sampled_from([1, 64, 400]))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_random_batches_match_the_reference(
    case: tuple[AttentionSpec, CacheFormat, dict[str, Any], int],
) -> None:
    spec, form, batch, num_programs = case
    step = make_step(spec, form, **batch)
    backend = FlexAttention(spec, form, CPU)
    backend._num_programs = num_programs  # decides how contexts are split
    before = step.cache.keys.clone(), step.cache.values.clone()
    output = step.run(backend)
    check(spec, step, output, 1e-9)
    slots = step.metadata.slot_mapping
    others = torch.ones(before[0].flatten(0, 1).shape[0], dtype=torch.bool)
    others[slots[slots >= 0]] = False
    for old, new, rows in (
        (before[0], step.cache.keys, step.key),
        (before[1], step.cache.values, step.value),
    ):
        assert torch.equal(old.flatten(0, 1)[others], new.flatten(0, 1)[others])
        assert torch.equal(new.flatten(0, 1)[slots[slots >= 0]], rows[slots >= 0])


@pytest.mark.parametrize(("page", "is_uniform"), [(16, True), (16, False), (4, False)])
def test_a_key_keeps_its_addresses_while_lengths_change(page: int, is_uniform: bool) -> None:
    spec, form = make_spec(sliding_window=9), make_format(page)
    backend = FlexAttention(spec, form, CPU)
    backend._num_programs = 64
    key = BatchDescriptor(num_tokens=8, num_reqs=4, uniform=is_uniform)
    batches = (
        [([2, 2, 2, 2], [0, 30, 7, 11]), ([2, 2], [3, 40]), ([2], [0])]
        if is_uniform
        else [([5, 1, 2], [0, 30, 7]), ([1, 1, 1, 1], [40, 2, 9, 12]), ([8], [25])]
    )
    addresses, caches = set(), []
    for seed, (query_lens, contexts) in enumerate(batches):
        step = make_step(
            spec,
            form,
            query_lens,
            contexts,
            padding=8 - sum(query_lens),
            padding_reqs=4 - len(query_lens),
            is_uniform=is_uniform,
            seed=seed,
            num_blocks=64,
        )
        step.metadata = replace(step.metadata, max_query_len=8)
        caches.append(step.cache)
        step.cache = caches[0]  # as in a graph: the cache of the first layer stays where it is
        prepared = backend.prepare_for_graph(step.metadata, key)
        check(spec, step, step.run(backend, prepared), 1e-9)
        mask = prepared.mask
        tensors = (
            mask.positions,
            mask.table_starts,
            mask.kv_num_blocks,
            mask.kv_indices,
            mask.rows_of_tiles,
            mask.rows_of_tokens,
            prepared.logical_pages,
        )
        addresses.add(tuple((item.data_ptr(), item.shape) for item in tensors))
    assert len(addresses) == 1
    assert not FlexAttention.plans_every_step


def test_the_first_layer_computes_the_mask_of_all() -> None:
    spec, form = make_spec(), make_format(16)
    backend = FlexAttention(spec, form, CPU)
    steps = [make_step(spec, form, [3, 1], [4, 20], seed=seed) for seed in range(2)]
    steps[1].metadata = steps[0].metadata
    prepared = backend.prepare(steps[0].metadata)
    check(spec, steps[0], steps[0].run(backend, prepared), 1e-9)
    indices, version = prepared.mask.kv_indices, prepared.mask.kv_indices._version
    check(spec, steps[1], steps[1].run(backend, prepared), 1e-9)
    assert prepared.mask.kv_indices is indices
    assert indices._version == version
    steps[0].run(backend, prepared)  # the next step begins
    assert indices._version > version


def test_an_empty_step_writes_nothing() -> None:
    spec, form = make_spec(), make_format()
    step = make_step(spec, form, [], [], padding_reqs=2)
    assert step.run(FlexAttention(spec, form, CPU)).shape == (0, 4, 8)


@pytest.mark.parametrize(
    ("num_tokens", "num_reqs", "uniform_len", "expected"),
    [
        (1, 1, 1, Tiling(1, 1, 16, True)),
        (8, 8, 1, Tiling(8, 1, 4, True)),
        (64, 64, 1, Tiling(64, 1, 1, True)),
        (24, 8, 3, Tiling(8, 3, 4, True)),
        (25, 8, 3, Tiling(10, 8, 1, False)),  # padded to no multiple of the length
        (512, 1, 512, Tiling(8, 64, 4, False)),  # one prompt
        (4096, 1, 0, Tiling(64, 64, 1, False)),
        (64, 64, 0, Tiling(64, 8, 1, False)),  # no more tiles than tokens
        (512, 256, 0, Tiling(288, 8, 1, False)),
    ],
)
def test_tiles_follow_the_average_request(
    num_tokens: int, num_reqs: int, uniform_len: int, expected: Tiling
) -> None:
    step = make_step(make_spec(), make_format(), [1], [0])
    metadata = replace(
        step.metadata, num_tokens=num_tokens, num_reqs=num_reqs, uniform_query_len=uniform_len
    )
    assert choose_tiling(metadata, group=2, num_kv_heads=8, num_programs=264) == expected


@pytest.mark.parametrize("page", [1, 16, 24])
def test_compilations_do_not_follow_sizes(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as on CUDA, but run as it is: one graph for all sizes, also of the cache."""
    compiled = torch.compile
    graphs: list[torch.fx.GraphModule] = []

    def backend_of_test(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        del inputs
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        flex_tiles.torch,
        "compile",
        lambda item, **kw: compiled(item, backend=backend_of_test, **kw),
    )
    flex_tiles.tiled_attention.cache_clear()
    form = make_format(page, torch.float32)
    for index, scale in enumerate((0.3, 0.45)):
        spec = make_spec(scale=scale, soft_cap=2.0 + index, sliding_window=20)
        for num_reqs in (7, 5, 8, 6):
            backend = FlexAttention(spec, form, CPU)
            backend._is_cuda = True
            backend._num_programs = 64
            step = make_step(spec, form, [1] * num_reqs, [9] * num_reqs, is_uniform=True)
            check(spec, step, step.run(backend), 1e-5)
        assert len(graphs) == index + 1
        assert f"), {scale}, {{'BACKEND'" in graphs[-1].code
        (call,) = [node for node in graphs[-1].graph.nodes if "flex_attention" in str(node.target)]
        captured = call.args[-1]
        assert captured
        # torch 2.11 cannot lower a size that is computed, such as `num_blocks + 1`.
        assert all(node.op == "placeholder" for node in captured)
    flex_tiles.tiled_attention.cache_clear()


def test_what_it_cannot_do_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cache_dtype=.*use the dtype of the model"):
        FlexAttention(make_spec(), make_format(dtype=torch.float8_e4m3fn), CPU)
    with pytest.raises(ConfigError, match="num_heads=129 are more than"):
        FlexAttention(make_spec(MAX_ROWS + 1, 1), make_format(), CPU)
    spec, form = make_spec(), make_format()
    step = make_step(spec, form, [1], [0])
    huge = torch.empty((1, 1, 1, 1), device="meta").expand(2**24, 4, 32, 8)
    with pytest.raises(ConfigError, match="num_blocks=16777216 makes a cache of more than"):
        FlexAttention(spec, form, CPU)._table(1, LayerCache(huge.contiguous(), huge))
    assert step.metadata.num_reqs == 1
    assert FlexAttention.missing(CPU) is None
    assert "not on xpu" in str(FlexAttention.missing(torch.device("xpu")))


@pytest.mark.gpu
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("query_lens", [[1] * 5, [3] * 4, [70, 1, 1, 9]])
def test_compiled_matches_the_reference(page: int, query_lens: list[int]) -> None:
    device = torch.device("cuda")
    for changes in ({}, {"sliding_window": 20, "soft_cap": 5.0}):
        spec = make_spec(8, 4, head_size=64, scale=0.125, **changes)
        form = CacheFormat(block_size=page, dtype=torch.bfloat16, max_model_len=256)
        contexts = [17 * index for index in range(len(query_lens))]
        is_uniform = len(set(query_lens)) == 1
        step = make_step(
            spec,
            form,
            query_lens,
            contexts,
            padding=query_lens[0],
            padding_reqs=1,
            is_uniform=is_uniform,
            is_shared=True,
            device=device,
        )
        check(spec, step, step.run(FlexAttention(spec, form, device)), 0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("is_uniform", [True, False])
def test_a_graph_follows_the_lengths(is_uniform: bool) -> None:
    device = torch.device("cuda")
    spec = make_spec(8, 4, head_size=64, scale=0.125)
    form = CacheFormat(block_size=16, dtype=torch.bfloat16, max_model_len=256)
    backend = FlexAttention(spec, form, device)
    key = BatchDescriptor(num_tokens=8, num_reqs=4, uniform=is_uniform)

    def step_of(query_lens: list[int], contexts: list[int]) -> Step:
        return make_step(
            spec,
            form,
            query_lens,
            contexts,
            padding=8 - sum(query_lens),
            padding_reqs=4 - len(query_lens),
            is_uniform=is_uniform,
            device=device,
        )

    static = step_of([2] * 4, [0] * 4)
    prepared = backend.prepare_for_graph(static.metadata, key)
    static.run(backend, prepared)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = static.run(backend, prepared)
    batches = [([2, 2, 2, 2], [200, 5, 90, 31]), ([2, 2], [1, 100])]
    if not is_uniform:
        batches += [([1, 5, 1], [30, 7, 200]), ([8], [0])]
    for query_lens, contexts in batches:
        step = step_of(query_lens, contexts)
        for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
            getattr(static.metadata, name).copy_(getattr(step.metadata, name))
        for name in ("query", "key", "value"):
            getattr(static, name).copy_(getattr(step, name))
        graph.replay()
        check(spec, static, output, 0.02)
