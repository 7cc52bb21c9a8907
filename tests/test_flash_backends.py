"""FlashAttention 2 and 3 and FlashInfer: what they need, what they refuse, what they plan."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import attend
from torch.nn.attention import varlen

from compile_backend.attention import flash_attn3, flashinfer
from compile_backend.attention.backend import AttentionBackend
from compile_backend.attention.flash_attn2 import (
    PAGED_ARGUMENTS,
    FlashAttention2,
    arguments_lacking,
    lacking_torch,
)
from compile_backend.attention.flash_attn3 import FlashAttention3
from compile_backend.attention.flashinfer import FlashInfer, wants_tensor_cores
from compile_backend.attention.kv_cache import LayerCache
from compile_backend.attention.metadata import AttentionMetadata, HostLengths
from compile_backend.attention.page_plan import plan_pages, query_starts
from compile_backend.attention.requirements import it_needs, lacking_device, lacking_package
from compile_backend.attention.spec import AttentionSpec, CacheFormat
from compile_backend.batch import BatchDescriptor
from compile_backend.errors import ConfigError
from compile_backend.support import KNOWN_BACKENDS, AttentionCGSupport

CPU = torch.device("cpu")
ALL = (FlashAttention3, FlashAttention2, FlashInfer)


def spec_of(
    heads: int = 16,
    kv_heads: int = 8,
    head_size: int = 128,
    window: int | None = None,
    soft_cap: float | None = None,
) -> AttentionSpec:
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        scale=head_size**-0.5,
        sliding_window=window,
        soft_cap=soft_cap,
    )


def cache_of(
    block_size: int = 256, dtype: torch.dtype = torch.bfloat16, max_model_len: int = 1024
) -> CacheFormat:
    return CacheFormat(block_size=block_size, dtype=dtype, max_model_len=max_model_len)


@pytest.mark.parametrize("backend", ALL)
def test_name_and_level_are_those_of_the_table(backend: type[AttentionBackend]) -> None:
    levels = {row.pattern: row.level for row in KNOWN_BACKENDS}
    assert backend.support is levels[backend.name]


@pytest.mark.parametrize(
    ("backend", "capability"),
    [(FlashAttention3, "9.x"), (FlashAttention2, "8.0 or more"), (FlashInfer, "8.0 or more")],
)
def test_missing_on_the_cpu(backend: type[AttentionBackend], capability: str) -> None:
    missing = backend.missing(CPU)
    assert missing is not None
    assert missing.startswith(
        f"it needs a CUDA device of compute capability {capability} (not device='cpu')"
    )


@pytest.mark.parametrize(
    ("backend", "module", "requirement"),
    [
        (FlashAttention3, flash_attn3, "tokenspeed-fa3==3.0.0.post20260810"),
        (FlashInfer, flashinfer, "flashinfer-python==0.6.6"),
    ],
)
def test_missing_names_the_package(
    backend: type[AttentionBackend],
    module: Any,
    requirement: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        module, "lacking_package", lambda _, wanted: lacking_package("no_such_module", wanted)
    )
    missing = backend.missing(CPU)
    assert missing is not None
    assert f"(pip install {requirement})" in missing


def test_a_package_that_does_not_load(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels_for_another_torch.py").write_text("raise OSError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    lacking = lacking_package("kernels_for_another_torch", "kernels==1.0")
    assert lacking == (
        "the package kernels (pip install kernels==1.0): importing kernels_for_another_torch "
        "failed: undefined symbol"
    )


def test_nothing_is_missing() -> None:
    assert lacking_package("numpy", "numpy") is None
    assert it_needs(None, None) is None


@pytest.mark.parametrize(
    ("found", "minimum", "same_major", "will_do"),
    [
        ((9, 0), (9, 0), True, True),
        ((10, 0), (9, 0), True, False),
        ((8, 9), (9, 0), True, False),
        ((10, 0), (8, 0), False, True),
        ((7, 5), (8, 0), False, False),
    ],
)
def test_capability(
    found: tuple[int, int],
    minimum: tuple[int, int],
    same_major: bool,
    will_do: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: found)
    lacking = lacking_device(torch.device("cuda"), minimum=minimum, same_major=same_major)
    assert (lacking is None) is will_do
    if lacking is not None:
        assert f"has {found[0]}.{found[1]}" in lacking


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    lacking = flashinfer.lacking_compiler()
    assert lacking is not None
    assert "nvcc" in lacking
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert flashinfer.lacking_compiler() is None


@dataclass
class Refusal:
    backend: type[AttentionBackend]
    option: str
    spec: AttentionSpec = field(default_factory=spec_of)
    cache: CacheFormat = field(default_factory=cache_of)


@pytest.mark.parametrize(
    "case",
    [
        Refusal(FlashAttention3, "soft_cap", spec=spec_of(soft_cap=30.0)),
        Refusal(FlashAttention3, "cache_dtype", cache=cache_of(dtype=torch.float8_e4m3fn)),
        Refusal(FlashAttention3, "cache_dtype", cache=cache_of(dtype=torch.float32)),
        Refusal(FlashAttention3, "head_size", spec=spec_of(head_size=264)),
        Refusal(FlashAttention3, "head_size", spec=spec_of(head_size=100)),
        Refusal(FlashAttention2, "soft_cap", spec=spec_of(soft_cap=30.0)),
        Refusal(FlashAttention2, "cache_dtype", cache=cache_of(dtype=torch.float32)),
        Refusal(FlashAttention2, "block_size", cache=cache_of(block_size=16)),
        Refusal(FlashAttention2, "head_size", spec=spec_of(head_size=512)),
        Refusal(FlashInfer, "cache_dtype", cache=cache_of(dtype=torch.float32)),
        Refusal(FlashInfer, "head_size", spec=spec_of(head_size=96)),
    ],
    ids=lambda case: f"{case.backend.name}-{case.option}",
)
def test_refusals_name_option_value_and_remedy(case: Refusal) -> None:
    error = case.backend.unsupported(case.spec, case.cache)
    assert isinstance(error, ConfigError)
    assert error.option == case.option
    values = {
        "soft_cap": case.spec.soft_cap,
        "head_size": case.spec.head_size,
        "cache_dtype": case.cache.dtype,
        "block_size": case.cache.block_size,
    }
    assert error.value == values[case.option]
    assert error.fix.startswith("use ")
    with pytest.raises(ConfigError, match=case.option):
        case.backend(case.spec, case.cache, CPU)


@pytest.mark.parametrize(
    ("backend", "spec", "cache"),
    [
        (FlashAttention3, spec_of(), cache_of(block_size=16)),
        (FlashAttention3, spec_of(head_size=80, window=4), cache_of(dtype=torch.float16)),
        (FlashAttention2, spec_of(window=7), cache_of(block_size=512)),
        (FlashInfer, spec_of(soft_cap=30.0, window=7), cache_of(block_size=1)),
        (FlashInfer, spec_of(head_size=64), cache_of(dtype=torch.float8_e4m3fn)),
    ],
)
def test_what_is_supported(
    backend: type[AttentionBackend], spec: AttentionSpec, cache: CacheFormat
) -> None:
    assert backend.unsupported(spec, cache) is None


def attend_of_torch_2_11(
    query: Any, key: Any, *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)
) -> None: ...


def attend_of_torch_2_13(
    out: Any,
    query: Any,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Any = None,
    block_table: Any = None,
) -> None: ...


def test_torch_is_judged_by_arguments() -> None:
    assert arguments_lacking(attend_of_torch_2_13) == ()
    assert lacking_torch(attend_of_torch_2_13) is None
    assert arguments_lacking(attend_of_torch_2_11) == ("seqused_k", "block_table", "enable_gqa")
    assert arguments_lacking(None) == PAGED_ARGUMENTS


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (attend_of_torch_2_11, "it takes no seqused_k, block_table, enable_gqa"),
        (None, "it does not exist"),
    ],
)
def test_which_torch_is_needed(function: Any, what: str) -> None:
    text = lacking_torch(function)
    assert text is not None
    assert f"in torch {torch.__version__} {what}" in text
    assert "torch>=2.13" in text


needs_paged_varlen = pytest.mark.skipif(
    bool(arguments_lacking(getattr(varlen, "varlen_attn_out", None))),
    reason="torch's varlen_attn_out reads no pages",
)


@needs_paged_varlen
@pytest.mark.parametrize("window", [None, 100])
def test_flash_attention_2_calls_torch_as_it_wants(window: int | None) -> None:
    """On meta tensors: torch accepts each argument, and nothing is computed."""
    spec, cache = spec_of(window=window), cache_of()
    backend = FlashAttention2(spec, cache, torch.device("meta"))
    query = torch.empty(4, 16, 128, dtype=torch.bfloat16, device="meta")
    pages = LayerCache(
        *(torch.empty(9, 256, 8, 128, dtype=query.dtype, device="meta") for _ in "kv")
    )
    metadata = AttentionMetadata(
        num_tokens=4,
        num_reqs=4,
        query_start_loc=torch.empty(5, dtype=torch.int32, device="meta"),
        seq_lens=torch.empty(4, dtype=torch.int32, device="meta"),
        block_table=torch.empty(4, 4, dtype=torch.int32, device="meta"),
        slot_mapping=torch.empty(4, dtype=torch.int64, device="meta"),
        max_query_len=1,
        max_seq_len=1024,
    )
    backend.attend(query, torch.empty_like(query), pages, metadata, None)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dtype", "expected"),
    [
        (8, 8, torch.bfloat16, False),
        (16, 8, torch.bfloat16, False),
        (9, 3, torch.bfloat16, False),
        (32, 8, torch.bfloat16, True),
        (40, 8, torch.bfloat16, True),
        (16, 8, torch.float8_e4m3fn, True),
    ],
)
def test_tensor_cores(heads: int, kv_heads: int, dtype: torch.dtype, expected: bool) -> None:
    assert wants_tensor_cores(spec_of(heads, kv_heads), cache_of(dtype=dtype)) is expected


def test_pages_by_hand() -> None:
    plan = plan_pages(
        np.array([1, 16, 17, 33], np.int32),
        np.array([[7, 0, 0], [5, 0, 0], [4, 9, 0], [1, 2, 3]], np.int32),
        block_size=16,
        num_reqs=6,
    )
    assert plan.indptr.tolist() == [0, 1, 2, 4, 7, 8, 9]
    assert plan.indices.tolist() == [7, 5, 4, 9, 1, 2, 3, 0, 0]
    assert plan.last_page_len.tolist() == [1, 16, 1, 1, 1, 1]
    assert {array.dtype.name for array in (plan.indptr, plan.indices, plan.last_page_len)} == {
        "int32"
    }


def test_pages_of_padding_alone() -> None:
    plan = plan_pages(np.zeros(0, np.int32), np.zeros((0, 0), np.int32), 16, num_reqs=3)
    assert plan.indptr.tolist() == [0, 1, 2, 3]
    assert plan.indices.tolist() == [0, 0, 0]
    assert plan.last_page_len.tolist() == [1, 1, 1]


@given(
    lengths=st.lists(st.integers(1, 70), max_size=8),
    block_size=st.sampled_from([1, 3, 16, 64]),
    num_padding=st.integers(0, 3),
    extra_columns=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_pages_cover_each_request(
    lengths: list[int], block_size: int, num_padding: int, extra_columns: int, seed: int
) -> None:
    """Every token is found where the block table says, and padding reads one legal token."""
    columns = -(-max(lengths, default=0) // block_size) + extra_columns
    table = np.random.default_rng(seed).integers(1, 1000, (len(lengths), columns), np.int32)
    plan = plan_pages(np.array(lengths, np.int32), table, block_size, len(lengths) + num_padding)
    assert len(plan.indptr) == len(plan.last_page_len) + 1 == len(lengths) + num_padding + 1
    assert plan.indptr[0] == 0
    assert plan.indptr[-1] == len(plan.indices)
    for request, last in enumerate(plan.last_page_len):
        pages = plan.indices[plan.indptr[request] : plan.indptr[request + 1]].tolist()
        length = (len(pages) - 1) * block_size + last
        if request < len(lengths):
            assert length == lengths[request]
            assert pages == table[request, : len(pages)].tolist()
        else:
            assert (pages, length) == ([0], 1)


@given(lengths=st.lists(st.integers(1, 99), max_size=9))
def test_query_starts(lengths: list[int]) -> None:
    starts = query_starts(np.array(lengths, np.int32))
    assert starts.dtype == np.int32
    assert starts.tolist() == [sum(lengths[:n]) for n in range(len(lengths) + 1)]


class Batch:
    """A batch on the GPU, padded, with its dense reference."""

    def __init__(self, spec: AttentionSpec, fmt: CacheFormat, num_reqs: int, num_tokens: int):
        self.spec, self.fmt = spec, fmt
        self.num_reqs, self.num_tokens = num_reqs, num_tokens
        self.num_blocks = num_reqs * fmt.max_blocks_per_req + 1
        size = (self.num_blocks, fmt.block_size, spec.num_kv_heads, spec.head_size)
        made = {"dtype": fmt.dtype, "device": "cuda"}
        self.cache = LayerCache(torch.randn(size, **made), torch.randn(size, **made))
        rows = (num_tokens, spec.num_kv_heads, spec.head_size)
        self.query = torch.empty(num_tokens, spec.num_heads, spec.head_size, **made)
        self.key, self.value = torch.empty(rows, **made), torch.empty(rows, **made)
        self.output = torch.empty_like(self.query)
        ints = {"dtype": torch.int32, "device": "cuda"}
        self.starts = torch.zeros(num_reqs + 1, **ints)
        self.seq_lens = torch.zeros(num_reqs, **ints)
        self.table = torch.zeros(num_reqs, fmt.max_blocks_per_req, **ints)
        self.slots = torch.full((num_tokens,), -1, dtype=torch.int64, device="cuda")

    def fill(self, query_lens: list[int], seq_lens: list[int]) -> None:
        size, count = self.fmt.block_size, len(query_lens)
        table = np.zeros(self.table.shape, np.int32)
        blocks = np.random.default_rng(0).permutation(self.num_blocks - 1) + 1
        table[:count] = blocks[: count * table.shape[1]].reshape(count, -1)
        starts = np.zeros(self.num_reqs + 1, np.int32)
        starts[1 : count + 1] = np.cumsum(query_lens)
        starts[count:] = sum(query_lens)
        slots = np.full(self.num_tokens, -1)
        for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
            at = np.arange(seq_len - query_len, seq_len)
            slots[starts[request] : starts[request + 1]] = (
                table[request, at // size] * size + at % size
            )
        lens = np.zeros(self.num_reqs, np.int32)
        lens[:count] = seq_lens
        pairs = zip(
            (self.starts, self.seq_lens, self.table, self.slots),
            (starts, lens, table, slots),
            strict=True,
        )
        for tensor, array in pairs:
            tensor.copy_(torch.from_numpy(array))
        for tensor in (self.query, self.key, self.value):
            tensor.normal_()
            tensor[sum(query_lens) :] = float("nan")
        self.host = HostLengths(np.array(query_lens, np.int32), lens[:count], table[:count])

    def metadata(self, *, is_worst_case: bool, uniform_query_len: int = 0) -> AttentionMetadata:
        longest = uniform_query_len or self.num_tokens
        return AttentionMetadata(
            num_tokens=self.num_tokens,
            num_reqs=self.num_reqs,
            query_start_loc=self.starts,
            seq_lens=self.seq_lens,
            block_table=self.table,
            slot_mapping=self.slots,
            max_query_len=longest if is_worst_case else int(self.host.query_lens.max()),
            max_seq_len=self.fmt.max_model_len if is_worst_case else int(self.host.seq_lens.max()),
            uniform_query_len=uniform_query_len,
            host=self.host,
        )

    def reference(self) -> torch.Tensor:
        parts = []
        for request, query_len in enumerate(self.host.query_lens.tolist()):
            start, seq_len = int(self.starts[request]), int(self.host.seq_lens[request])
            new, blocks = slice(start, start + query_len), self.table[request].long()
            keys, values = (
                torch.cat([stored[blocks].flatten(0, 1)[: seq_len - query_len], rows[new]])
                for stored, rows in ((self.cache.keys, self.key), (self.cache.values, self.value))
            )
            parts.append(attend(self.query[new], keys, values, self.spec)[0].float())
        return torch.cat(parts)

    def check(self, expected: torch.Tensor) -> None:
        found = self.output[: len(expected)].float()
        torch.testing.assert_close(found, expected, atol=4e-3, rtol=1.6e-2)
        assert not self.cache.keys.isnan().any()
        assert not self.cache.values.isnan().any()


def made_or_skipped(
    backend: type[AttentionBackend], spec: AttentionSpec, fmt: CacheFormat
) -> AttentionBackend:
    device = torch.device("cuda", torch.cuda.current_device())
    missing = backend.missing(device)
    if missing is not None:
        pytest.skip(missing)
    return backend(spec, fmt, device)


def run(backend: AttentionBackend, batch: Batch, metadata: AttentionMetadata, made: Any) -> None:
    tensors = (batch.query, batch.key, batch.value, batch.output)
    backend.forward(*tensors, batch.cache, metadata, made)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("kv_heads", [8, 4])
@pytest.mark.parametrize("backend_class", ALL)
def test_eager_steps(
    backend_class: type[AttentionBackend], kv_heads: int, window: int | None
) -> None:
    spec, fmt = spec_of(16, kv_heads, window=window), cache_of()
    backend = made_or_skipped(backend_class, spec, fmt)
    for query_lens, seq_lens in (
        ([5, 130, 64], [5, 130, 64]),
        ([1, 37, 100, 1], [600, 90, 512, 1]),
        ([1, 1, 1], [1, 256, 1000]),
    ):
        batch = Batch(spec, fmt, num_reqs=6, num_tokens=200)
        batch.fill(query_lens, seq_lens)
        expected = batch.reference()
        metadata = batch.metadata(is_worst_case=False)
        run(backend, batch, metadata, backend.prepare(metadata))
        batch.check(expected)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [8, 4])
@pytest.mark.parametrize("backend_class", ALL)
def test_one_graph_serves_every_batch_of_its_key(
    backend_class: type[AttentionBackend], kv_heads: int
) -> None:
    spec, fmt = spec_of(16, kv_heads), cache_of()
    backend = made_or_skipped(backend_class, spec, fmt)
    is_mixed = backend.support is AttentionCGSupport.ALWAYS
    num_tokens, uniform = (64, 0) if is_mixed else (8, 1)
    key = BatchDescriptor(num_tokens, 8, uniform=not is_mixed)
    batch = Batch(spec, fmt, num_reqs=8, num_tokens=num_tokens)
    batch.fill([num_tokens // 8] * 8, [num_tokens // 8] * 8)
    metadata = batch.metadata(is_worst_case=True, uniform_query_len=uniform)
    made = backend.prepare_for_graph(metadata, key)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(backend, batch, metadata, made)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(backend, batch, metadata, made)
    batches = [([1] * 8, [600, 1, 1000, 256, 17, 300, 31, 33]), ([1] * 3, [1024, 5, 130])]
    if is_mixed:
        batches.append(([50, 1, 3], [300, 700, 3]))
    for query_lens, seq_lens in batches:
        batch.fill(query_lens, seq_lens)
        expected = batch.reference()
        if backend.plans_every_step:
            metadata = batch.metadata(is_worst_case=True, uniform_query_len=uniform)
            backend.prepare_for_graph(metadata, key)
        graph.replay()
        batch.check(expected)
