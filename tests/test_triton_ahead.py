"""Kernels of attention are compiled together, at the first batch, for all that a runner runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import paged_toy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from compile_backend.attention import triton_kept
from compile_backend.attention.backend import AttentionBackend
from compile_backend.attention.metadata import BatchLimits
from compile_backend.attention.spec import AttentionSpec
from compile_backend.attention.triton_kept import KeptKernel
from compile_backend.attention.triton_plan import LaunchPlan, plan_launch, plans_within

if TYPE_CHECKING:
    from pathlib import Path


def attending(plan: LaunchPlan) -> tuple[Any, ...]:
    """What of a plan the kernel that attends is compiled for."""
    form = (plan.block_rows, plan.is_whole, plan.num_splits > 1, plan.tile)
    return (*form, plan.num_warps, plan.num_stages, plan.fp8_registers)


def finishing(plan: LaunchPlan) -> int:
    """And the one behind it."""
    return plan.num_splits


@pytest.mark.parametrize("element_bytes", [2, 4])
@given(
    num_kv_heads=st.sampled_from([1, 2, 3, 8, 20, 32, 64]),
    group=st.sampled_from([1, 2, 3, 4, 7, 8, 71]),
    head_size=st.sampled_from([64, 80, 128, 192, 256]),
    window=st.sampled_from([None, 100, 1000]),
    largest=st.tuples(st.integers(1, 300), st.integers(1, 3000), st.integers(1, 9000)),
    parts=st.lists(
        st.tuples(*[st.floats(0, 1, width=16)] * 3), min_size=1, max_size=30, unique=True
    ),
    num_sms=st.sampled_from([1, 84, 108, 132]),
)
@settings(deadline=None, max_examples=200)
def test_every_batch_within_limits_has_its_kernels(
    element_bytes: int,
    num_kv_heads: int,
    group: int,
    head_size: int,
    window: int | None,
    largest: tuple[int, int, int],
    parts: list[tuple[float, float, float]],
    num_sms: int,
) -> None:
    spec = AttentionSpec(
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        scale=0.1,
        sliding_window=window,
    )
    num_reqs, query_len, seq_len = largest
    num_tokens = max(num_reqs, query_len)
    limits = BatchLimits(
        num_tokens=num_tokens, num_reqs=num_reqs, query_len=query_len, seq_len=seq_len
    )
    plans = plans_within(spec, limits, element_bytes, num_sms)
    compiled = {attending(plan) for plan in plans}, {finishing(plan) for plan in plans}
    for reqs, queries, keys in parts:
        max_query_len = 1 + round(queries * (query_len - 1))
        facts = SimpleNamespace(
            num_reqs=1 + round(reqs * (num_reqs - 1)),
            max_query_len=max_query_len,
            max_seq_len=1 + round(keys * (seq_len - 1)),
        )
        for total in (max_query_len, num_tokens):
            batch: Any = SimpleNamespace(num_tokens=total, **vars(facts))
            plan = plan_launch(spec, batch, element_bytes, num_sms)
            assert attending(plan) in compiled[0]
            assert finishing(plan) in compiled[1]


def test_prompts_a_little_longer_than_a_power_of_two_split_their_keys() -> None:
    spec = AttentionSpec(num_heads=32, num_kv_heads=32, head_size=128, scale=0.1)
    limits = BatchLimits(num_tokens=2048, num_reqs=256, query_len=2048, seq_len=4096)
    compiled = {attending(plan) for plan in plans_within(spec, limits, 2, 132)}
    for query_len in range(1, 600):
        batch: Any = SimpleNamespace(
            num_tokens=query_len, num_reqs=1, max_query_len=query_len, max_seq_len=4096
        )
        assert attending(plan_launch(spec, batch, 2, 132)) in compiled


def test_a_usual_model_needs_few_kernels() -> None:
    spec = AttentionSpec(num_heads=16, num_kv_heads=8, head_size=128, scale=0.1)
    limits = BatchLimits(num_tokens=2048, num_reqs=256, query_len=2048, seq_len=4096)
    plans = plans_within(spec, limits, 2, 132)
    assert len({attending(plan) for plan in plans}) <= 10
    assert len(plans) <= 24
    assert {finishing(plan) for plan in plans} <= {1, 2, 4, 8, 16, 32, 64}


# --- with Triton's compiler, for a device that is not there -----------------------------------

SERVES = """
import json, sys, threading
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

loaded, launched = [], []

class Utils:
    def load_binary(self, name, kernel, shared, device):
        loaded.append(name)
        return object(), len(loaded), 0, 0, 1024
    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}

class Launcher:
    def __init__(self, source, metadata):
        self.name = metadata.name
    def __call__(self, *arguments):
        launched.append(self.name)

class Driver:
    utils, launcher_cls = Utils(), Launcher
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

driver.set_active(Driver())

from compile_backend.attention import triton_attention, triton_kept, triton_launch
from compile_backend.attention.kv_cache import LayerCache
from compile_backend.attention.metadata import AttentionMetadata, BatchLimits
from compile_backend.attention.spec import AttentionSpec, CacheFormat

triton_kept.packing_of = lambda made: None  # there is no driver to launch past Triton
compiled, compile_one = [], triton.compiler.compile

def noted(*args, **named):
    compiled.append(threading.current_thread() is threading.main_thread())
    if sys.argv[1] == "failing" and not compiled[-1]:
        raise OSError("No space left on device")
    return compile_one(*args, **named)

def no_thread(self):
    raise RuntimeError("can't start new thread")

if sys.argv[1] == "threadless":
    threading.Thread.start = no_thread

triton.compiler.compile = noted
spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=64, scale=0.125)
format = CacheFormat(block_size=16, dtype=torch.bfloat16, max_model_len=4096)
backend = triton_attention.TritonAttention(spec, format, torch.device("cpu"))
backend._num_sms = 132
is_fp8 = backend._writes_fp8 = sys.argv[1] == "fp8"
if sys.argv[1] != "nothing":
    backend.expect(BatchLimits(num_tokens=256, num_reqs=16, query_len=256, seq_len=4096))
cache = LayerCache(*(torch.zeros(8, 16, 2, 64, dtype=torch.bfloat16) for _ in range(2)), 1.0, 1.0)

def attend(num_reqs, query_len, seq_len):
    num_tokens = num_reqs * query_len
    packed = torch.zeros(num_tokens, 8, 64, dtype=torch.bfloat16)
    query, key, value = packed.split((4, 2, 2), 1)
    metadata = AttentionMetadata(
        num_tokens=num_tokens,
        num_reqs=num_reqs,
        query_start_loc=torch.zeros(num_reqs + 1, dtype=torch.int32),
        seq_lens=torch.zeros(num_reqs, dtype=torch.int32),
        block_table=torch.zeros(num_reqs, 256, dtype=torch.int32),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
        max_query_len=query_len,
        max_seq_len=seq_len,
    )
    output = torch.empty(num_tokens, 4, 64, dtype=torch.float8_e4m3fn if is_fp8 else query.dtype)
    given = (cache, metadata, backend.prepare(metadata))
    if is_fp8:
        scale = torch.ones(1)
        backend.forward_fp8(query, key, value, output, scale, *given, multiplies=False)
    else:
        backend.attend(query, output, *given)

attend(16, 16, 4096)
first = {"compiled": len(compiled), "here": sum(compiled), "loaded": len(loaded)}
for batch in ((1, 1, 4096), (16, 1, 4096), (1, 1, 16), (4, 8, 64), (1, 256, 4096), (1, 100, 100),
              (2, 16, 200), (16, 1, 3000), (3, 5, 77), (1, 17, 4000), (16, 16, 1000)):
    for _ in range(2):
        attend(*batch)
later = len(compiled) - first["compiled"]
json.dump({**first, "later": later, "launches": len(launched)}, sys.stdout)
"""


def serve(expected: str, cache_dir: Path) -> dict[str, int]:
    result = subprocess.run(
        [sys.executable, "-c", SERVES, expected],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache_dir)},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, int] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("output", ["fp8", "expected"])
def test_nothing_is_compiled_after_the_first_batch(output: str, tmp_path: Path) -> None:
    ahead = serve(output, tmp_path / "triton")
    num_stores = int(output == "fp8")  # attention stores keys and values by itself then
    assert ahead["compiled"] > 5
    assert ahead["here"] == num_stores  # the others in threads
    assert ahead["loaded"] == ahead["compiled"]
    assert ahead["later"] == 0
    if output == "fp8":
        return
    one_by_one = serve("nothing", tmp_path / "other")
    assert one_by_one["later"] > 0
    assert one_by_one["compiled"] == one_by_one["here"] <= 2
    assert one_by_one["launches"] == ahead["launches"]


@pytest.mark.parametrize("how", ["failing", "threadless"])
def test_what_cannot_be_compiled_ahead_is_compiled_when_it_is_launched(
    how: str, tmp_path: Path
) -> None:
    found = serve(how, tmp_path / "triton")
    assert found["here"] > 0
    assert found["later"] > 0
    assert found["launches"] > 20


# --- what is left out ---------------------------------------------------------------------------


class Made:
    """A kernel that cannot be loaded, or that can."""

    def __init__(self, *, fails: bool) -> None:
        self.fails, self.num_loads = fails, 0

    @property
    def run(self) -> None:
        self.num_loads += 1
        if self.fails:
            raise RuntimeError("out of resource: shared memory")


def test_what_cannot_be_loaded_is_left_to_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=False))
    monkeypatch.setattr(triton_kept.triton, "knobs", knobs)
    made = [Made(fails=True), Made(fails=False)]
    kernel = KeptKernel(SimpleNamespace())
    assert triton_kept.together([(kernel, lambda one=one: one) for one in (*made, *made)]) == 2
    assert [each.num_loads for each in made] == [1, 1]


def test_one_by_one_where_triton_has_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_one() -> None:
        raise AssertionError("nothing is to be compiled")

    kernel = KeptKernel(SimpleNamespace())
    assert triton_kept.together([(kernel, compile_one)]) == 0  # interpreted
    knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=False))
    monkeypatch.setattr(triton_kept.triton, "knobs", knobs)
    monkeypatch.delattr(triton_kept.triton, "AsyncCompileMode")
    assert triton_kept.together([(kernel, compile_one)]) == 0


# --- who is told --------------------------------------------------------------------------------


def test_a_runner_tells_backends_what_it_will_run(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[BatchLimits] = []
    monkeypatch.setattr(AttentionBackend, "expect", lambda _, limits: told.append(limits))
    with torch.no_grad():
        loop = paged_toy.make_loop("PIECEWISE", sizes=(4, 16))
    (limits,) = set(told)
    parts = loop.runner._capture._parts
    assert limits.num_tokens >= max(16, parts.max_num_batched_tokens)
    assert limits.num_reqs == parts.dispatcher.max_num_seqs
    assert limits.query_len == limits.num_tokens
    assert limits.seq_len == parts.loader.builder.max_query_len
