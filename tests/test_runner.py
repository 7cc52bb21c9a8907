"""The runner: what runs at which mode, right results at every padding, and what it refuses."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_toy import (
    INPUTS,
    MAX_MODEL_LEN,
    SIZES,
    SPEC,
    Loop,
    PagedToy,
    make_builder,
    make_loop,
)

from compile_backend import AttentionCGSupport, CaptureError, ConfigError, CUDAGraphMode, stats
from compile_backend.attention.builder import AttentionMetadataBuilder
from compile_backend.attention.sdpa import SdpaAttention
from compile_backend.attention.spec import CacheFormat
from compile_backend.runner import GraphModelRunner
from compile_backend.runner_batch import Batch
from compile_backend.step_inputs import Dim, InputSpec

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
MODES = ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]


# prefill of 5, prefill of 11, mixed of 1 + 3, decode of 3, decode of 2, too large a prefill
EXPECTED = {
    "NONE": {"NONE": [2, 3, 4, 5, 11, 20]},
    "PIECEWISE": {"PIECEWISE": [2, 4, 4, 8, 16], "NONE": [20]},
    "FULL": {"FULL": [2, 4, 4, 8, 16], "NONE": [20]},
    "FULL_DECODE_ONLY": {"FULL": [2, 4], "NONE": [4, 5, 11, 20]},
    "FULL_AND_PIECEWISE": {"FULL": [2, 4], "PIECEWISE": [4, 8, 16], "NONE": [20]},
}


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "sdpa"),
        pytest.param("cuda", "sdpa", marks=pytest.mark.gpu),
        pytest.param("cuda", "triton", marks=pytest.mark.gpu),
        pytest.param("cuda", "flex_attention", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_runs_what_it_says_and_is_right(mode: str, device: str, backend: str) -> None:
    loop = make_loop(mode, device=device, backend=backend)
    first, second, third = loop.add(range(1, 6)), loop.add(range(11, 22)), loop.add([3, 1, 2])
    long = loop.add([(5 * i) % 37 for i in range(20)])
    loop.step([(first, 5)])
    loop.step([(second, 11)])
    loop.step([*loop.grow(first), (third, 3)])
    loop.step(loop.grow(first, second, third))
    loop.step(loop.grow(second, first))
    loop.step([(long, 20)])
    assert loop.ran() == EXPECTED[mode]
    # Captured ahead, each key once: later steps only replay.
    for (_, key), counts in loop.runner.report().by_key.items():
        per_key = 3 if (counts.captures and mode != "FULL" and not key.uniform) else 1
        assert counts.captures in (0, per_key)
        assert counts.warm_ups == counts.captures


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY"])
def test_full_needs_no_compile(mode: str) -> None:
    loop = make_loop(mode, is_compiled=False)
    request = loop.add([1, 2, 3])
    loop.step([(request, 3)])
    for _ in range(3):
        loop.step(loop.grow(request))
    assert loop.runner.report().steps(FULL) == (4 if mode == "FULL" else 3)


def test_a_model_that_was_never_compiled_defaults_to_full() -> None:
    assert make_loop(None, is_compiled=False).runner.report().mode_resolved == "FULL"


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_pieces_of_a_model_that_was_never_compiled_are_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match=r"not compiled with this backend; pass torch\.compile"):
        make_loop(mode, is_compiled=False)


def test_one_compile_serves_every_size_and_both_kinds_of_graphs() -> None:
    loop = make_loop("FULL_AND_PIECEWISE")
    report = stats(loop.runner.model)
    assert report.graphs == 1
    assert report.compiles == 3
    numbers = loop.runner.report().num_graphs
    assert numbers == {FULL: 4, PIECEWISE: 3 * len(SIZES)}


@pytest.mark.parametrize("mode", MODES)
def test_uniform_batches_of_several_tokens(mode: str) -> None:
    loop = make_loop(mode, query_len=3, sizes=[1, 2, 4, 8, 12])
    requests = [loop.add([i, i + 1, i + 2, 5, 6, 7, 8, 9, 10, 11]) for i in range(3)]
    loop.step([(request, 4) for request in requests])
    loop.step([(request, 3) for request in requests])
    loop.step([(request, 3) for request in requests[:2]])
    ran = loop.ran()
    if mode in ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"):
        assert ran["FULL"] == [6, 9]  # whole requests only
        assert len(ran["NONE" if mode == "FULL_DECODE_ONLY" else "PIECEWISE"]) == 1


def test_every_key_is_warmed_up_as_often_as_asked() -> None:
    loop = make_loop("FULL_AND_PIECEWISE", cudagraph_num_of_warmups=3)
    for (_, key), counts in loop.runner.report().by_key.items():
        pieces = 1 if key.uniform else 3
        assert (counts.warm_ups, counts.captures) == (3 * pieces, pieces)


def test_a_prompt_as_long_as_a_decode_is_no_decode() -> None:
    loop = make_loop("FULL_DECODE_ONLY", query_len=3, sizes=[3, 6, 12])
    prompt = loop.add([1, 2, 3, 4, 5, 6])
    loop.step([(prompt, 3)])
    assert loop.ran() == {"NONE": [3]}
    loop.step([(prompt, 3)])
    assert loop.ran() == {"NONE": [3], "FULL": [3]}


def test_the_engine_may_say_that_a_batch_is_no_decode() -> None:
    loop = make_loop("FULL_DECODE_ONLY")
    request = loop.add([1, 2, 3])
    loop.step([(request, 2)])
    loop.step([(request, 1)], all_decode=False)
    assert loop.ran() == {"NONE": [1, 2]}


class Uniform(SdpaAttention):
    support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH


class SingleToken(SdpaAttention):
    support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class Undeclared(SdpaAttention):
    support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER


@pytest.mark.parametrize(
    ("kinds", "query_len", "resolved"),
    [
        ((Uniform, Uniform), 3, "FULL_AND_PIECEWISE"),
        ((SdpaAttention, Uniform), 1, "FULL_AND_PIECEWISE"),
        ((SingleToken, SdpaAttention), 1, "FULL_AND_PIECEWISE"),
        ((SingleToken, Uniform), 3, "PIECEWISE"),
        ((SdpaAttention, Undeclared), 1, "PIECEWISE"),
    ],
)
def test_the_weakest_attention_decides(
    kinds: tuple[type[SdpaAttention], ...],
    query_len: int,
    resolved: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = CacheFormat(block_size=4, dtype=torch.float32, max_model_len=MAX_MODEL_LEN)
    with caplog.at_level(logging.WARNING):
        loop = make_loop(
            "FULL",
            query_len=query_len,
            sizes=[3, 6],
            backend=lambda index: kinds[index](SPEC, cache, torch.device("cpu")),
        )
    report = loop.runner.report()
    assert report.mode_resolved == resolved
    assert sum("full graphs" in record.message for record in caplog.records) == len(
        report.downgrades
    )
    request = loop.add([1, 2, 3, 4])
    loop.step([(request, 4)])


def test_strict_raises_instead_of_lowering() -> None:
    cache = CacheFormat(block_size=4, dtype=torch.float32, max_model_len=MAX_MODEL_LEN)
    with pytest.raises(ConfigError, match="cannot be had"):
        make_loop(
            "FULL",
            strict=True,
            backend=lambda _: Undeclared(SPEC, cache, torch.device("cpu")),
        )


@pytest.mark.parametrize("mode", MODES)
def test_padding_after_a_larger_step_changes_no_other_row(mode: str) -> None:
    """A step of 5 after one of 8: the skip values of the first must not linger."""
    loop = make_loop(mode)
    requests = [loop.add([i + 1, i + 2]) for i in range(8)]
    loop.step([(request, 1) for request in requests])
    layers = loop.runner.builder.layers.values()
    before = [(layer.cache.keys.clone(), layer.cache.values.clone()) for layer in layers]
    loop.step([(request, 1) for request in requests[:5]])
    written = [slot for request in requests[:5] for slot in [loop.blocks[request][0] * 4 + 1]]
    for layer, (keys, values) in zip(layers, before, strict=True):
        for now, then in ((layer.cache.keys, keys), (layer.cache.values, values)):
            changed = (now != then).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
            assert sorted(changed) == sorted(written)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_sequence_of_batches_is_right(data: st.DataObject) -> None:
    """Replay at a padded size equals the reference at the true size, the cache included."""
    loop = _shared_loop()
    loop.tokens, loop.done, loop.blocks, loop.used = [], [], [], 0
    for _ in range(data.draw(st.integers(1, 5), label="steps")):
        if len(loop.tokens) < 4 and data.draw(st.booleans(), label="new"):
            loop.add(data.draw(st.lists(st.integers(0, 36), min_size=1, max_size=9)))
        work = []
        for request, tokens in enumerate(loop.tokens):
            left = len(tokens) - loop.done[request]
            count = data.draw(st.integers(0, left), label=f"tokens of {request}") if left else 0
            if count:
                work.append((request, count))
            elif not left and len(tokens) < 20:
                work += loop.grow(request)
        if work:
            loop.step(work)


_LOOPS: list[Loop] = []


def _shared_loop() -> Loop:
    """One captured model for all examples."""
    if not _LOOPS:
        _LOOPS.append(make_loop("FULL_AND_PIECEWISE", num_blocks=64))
    return _LOOPS[0]


def test_limits_that_are_no_capture_size() -> None:
    loop = make_loop("FULL_AND_PIECEWISE", sizes=[4, 16], limits=(8, 13))
    request = loop.add(range(13))
    loop.step([(request, 13)])
    assert loop.ran() == {"PIECEWISE": [16]}
    too_long = loop.add(range(14))
    with pytest.raises(ValueError, match="14 tokens is above the limits"):
        loop.step([(too_long, 14)])


def test_a_cache_with_fewer_rows_than_the_largest_size() -> None:
    loop = make_loop("FULL", sizes=[4, 16, 32], num_blocks=3)
    request = loop.add([1, 2, 3, 4, 5])
    loop.step([(request, 5)])
    assert loop.ran() == {"FULL": [16]}


def test_sizes_that_no_batch_of_legal_requests_can_fill() -> None:
    loop = make_loop("FULL", sizes=[8, 500], limits=(8, 500))  # 8 requests of at most 48 tokens
    request = loop.add(range(9))
    loop.step([(request, 9)])
    assert loop.ran() == {"FULL": [500]}


def test_captures_are_made_from_legal_lengths() -> None:
    seen: list[tuple[list[int], list[int], int]] = []

    class Watching(SdpaAttention):
        def forward(self, query: Any, *args: Any) -> None:
            metadata = args[4]
            lens = metadata.query_start_loc.diff().tolist()
            seen.append((lens, metadata.seq_lens.tolist(), metadata.max_query_len))
            super().forward(query, *args)

    cache = CacheFormat(block_size=4, dtype=torch.float32, max_model_len=MAX_MODEL_LEN)
    make_loop("FULL", sizes=[3, 16], backend=lambda _: Watching(SPEC, cache, torch.device("cpu")))
    assert seen
    for lens, seq_lens, longest in seen:
        assert min(lens) >= 1
        assert all(s >= n for n, s in zip(lens, seq_lens, strict=True))
        assert longest >= max(lens)


def test_workspaces_that_grow_in_warm_ups_are_whole_before_the_first_capture() -> None:
    events: list[tuple[str, int]] = []

    class Growing(SdpaAttention):
        workspace: ClassVar[torch.Tensor] = torch.empty(0)

        def forward(self, query: Any, *args: Any) -> None:
            if len(query) > len(self.workspace):
                type(self).workspace = torch.empty(len(query))
                events.append(("grow", len(query)))
            super().forward(query, *args)

    cache = CacheFormat(block_size=4, dtype=torch.float32, max_model_len=MAX_MODEL_LEN)
    backend = Growing(SPEC, cache, torch.device("cpu"))
    loop = make_loop("FULL_AND_PIECEWISE", backend=lambda _: backend)
    largest = Growing.workspace.data_ptr()
    request = loop.add(range(9))
    loop.step([(request, 9)])
    assert Growing.workspace.data_ptr() == largest
    assert events[-1] == ("grow", 16)


def test_python_around_attention_runs_when_full_is_not_allowed() -> None:
    calls = []

    class Hooked(SdpaAttention):
        def forward(self, *args: Any) -> None:
            calls.append(len(args[0]))
            super().forward(*args)

    cache = CacheFormat(block_size=4, dtype=torch.float32, max_model_len=MAX_MODEL_LEN)
    backend = Hooked(SPEC, cache, torch.device("cpu"))
    loop = make_loop("FULL_AND_PIECEWISE", backend=lambda _: backend)
    request = loop.add([1, 2, 3])
    loop.step([(request, 2)])
    calls.clear()
    loop.step([(request, 1)], highest_mode=PIECEWISE)
    assert calls == [1, 1]
    assert loop.ran()["PIECEWISE"] == [1, 2]


def test_two_runners_with_query_lengths_of_their_own() -> None:
    target = make_loop("FULL_AND_PIECEWISE", query_len=4)
    drafter = make_loop("FULL", PagedToy(seed=3))
    long, short = target.add(range(12)), drafter.add(range(6))
    target.step([(long, 4)])
    drafter.step([(short, 4)])
    kept = target.step([(long, 4)]).clone()
    drafter.step([(short, 1)])
    again = target.step([(long, 4)])
    drafter.step([(short, 1)])
    assert not torch.equal(kept, again)
    for loop, steps in ((target, 2), (drafter, 3)):
        assert loop.runner.report().steps(FULL) == steps


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_weights_bound_anew_are_seen(
    mode: str, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    loop = make_loop(mode, device=device)
    request = loop.add([1, 2, 3, 4, 5])
    loop.step([(request, 2)])
    loop.step([(request, 1)])
    changes = [
        lambda weight: weight.copy_(weight * 0.5),
        lambda weight: setattr(weight, "data", weight * 2.5),
        lambda weight: setattr(
            loop.model.out[1], "weight", torch.nn.Parameter(-weight.detach().clone())
        ),
    ]
    for change in changes:
        with torch.no_grad():
            change(loop.model.out[1].weight)
        loop.done[request] = 0  # the cache holds what the old weights made
        loop.step([(request, 2)])
        loop.step([(request, 1)])
    told = [record for record in caplog.records if "another address" in record.message]
    assert len(told) == 1  # by the runner, and not again by the compiled graph at PIECEWISE


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_a_lower_mode_is_told_once_by_model_and_runner(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"attention_support": {"cudagraph_modes::attention": "NEVER"}}
    loop = make_loop(mode, compile_options={"cudagraph_mode": mode, **options}, **options)
    told = [record.message for record in caplog.records if " becomes " in record.message]
    assert len(told) == len(set(told)) >= 1
    assert loop.runner.report().mode_resolved == "PIECEWISE"


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_inputs_that_are_on_the_device_stay_there(mode: str) -> None:
    loop = make_loop(mode, device="cuda", backend="triton")
    requests = [loop.add([i, 5, 7, 9]) for i in range(3)]
    loop.step([(request, 2) for request in requests])
    for _ in range(2):
        batch = loop.batch([(request, 1) for request in requests])
        inputs = {name: torch.as_tensor(value).cuda() for name, value in batch.inputs.items()}
        logits = loop.runner.run(dataclasses.replace(batch, inputs=inputs))
        for row, request in zip(logits, requests, strict=True):
            loop.done[request] += 1
            expected = loop.model.dense(loop.tokens[request][: loop.done[request]])
            torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_memory_and_seconds_are_reported_by_mode() -> None:
    report = make_loop("FULL_AND_PIECEWISE", device="cuda", backend="triton").runner.report()
    assert set(report.num_bytes) == {FULL, PIECEWISE}
    assert all(seconds > 0 for seconds in report.capture_s.values())
    assert report.num_bytes[FULL] + report.num_bytes[PIECEWISE] > 0


def test_recapture_starts_anew() -> None:
    loop = make_loop("FULL_AND_PIECEWISE")
    request = loop.add([1, 2, 3])
    loop.step([(request, 2)])
    before = loop.runner.report().num_graphs
    loop.runner.recapture(progress=False)
    after = loop.runner.report().num_graphs
    assert after == before
    loop.step([(request, 1)])


def test_a_step_that_cannot_be_captured_runs_at_a_lower_mode(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Syncing(SdpaAttention):
        def forward(self, query: Any, *args: Any) -> None:
            if len(query) == 4:
                assert query[0, 0, 0].item() is not None
            super().forward(query, *args)

    cache = CacheFormat(block_size=4, dtype=torch.float32, max_model_len=MAX_MODEL_LEN)
    backend = Syncing(SPEC, cache, torch.device("cpu"))
    loop = make_loop("FULL_AND_PIECEWISE", backend=lambda _: backend)
    requests = [loop.add([i, 2, 3]) for i in range(4)]
    for _ in range(2):
        loop.step([(request, 1) for request in requests])
    loop.step([(request, 1) for request in requests[:2]])
    assert loop.ran() == {"PIECEWISE": [4, 4], "FULL": [2]}
    assert sum("cannot be captured" in record.message for record in caplog.records) == 1


# --- what it refuses ---


def test_run_before_capture_is_refused() -> None:
    runner = GraphModelRunner(
        lambda x: x,
        input_spec=[InputSpec("x", (Dim.NUM_TOKENS,), torch.float32)],
        max_num_seqs=1,
        device="cpu",
    )
    with pytest.raises(CaptureError, match="call capture"):
        runner.run(Batch(query_lens=[1], inputs={"x": [1.0]}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_lens": [1, 0]}, "a request without tokens"),
        ({"query_lens": [1] * 9}, "above the limits"),
        ({"query_lens": 1}, "one number for each request"),
        ({"query_lens": [1.0]}, "query_lens hold numbers of float64; give integers"),
        ({"query_lens": [True]}, "query_lens hold numbers of bool; give integers"),
        ({"query_lens": [np.uint64(1), 1.0]}, "query_lens hold numbers of float64; give integers"),
        ({"query_lens": [np.uint64(1), 1, True]}, "hold numbers of float64; give integers"),
        ({"query_lens": [np.uint64(1), 0]}, r"query_lens \[1, 0\] hold a request without tokens"),
        ({"query_lens": [2**64]}, "query_lens holds 18446744073709551616 to .*; change the num"),
        ({"query_lens": [np.uint64(2**63), -1]}, "query_lens holds -1 to 9223372036854775808"),
        ({"query_lens": [[1], [1, 2]]}, "query_lens has rows of different lengths; give one"),
        ({"query_lens": torch.ones(1, device="meta")}, "query_lens cannot be read: .*; give num"),
        (
            {"inputs": {"tokens": [[1], [1, 2]], "positions": [0], "last": [0]}},
            "input 'tokens' has rows of different lengths; fill the shorter ones up",
        ),
        (
            {"inputs": {"tokens": torch.ones(1, device="meta"), "positions": [0], "last": [0]}},
            "input 'tokens' is a tensor on the device meta, which holds no numbers",
        ),
        ({"query_lens": [[1]]}, "one number for each request"),
        ({"attention": None}, "brings no attention"),
        ({"inputs": {"tokens": [1]}}, "input_spec names"),
        ({"inputs": [1]}, r"the batch has inputs \[1\]; give a mapping from the names"),
        ({"inputs": None}, "the batch has inputs None; give a mapping from the names"),
        ({"attention": {"seq_lens": [1]}}, r"attention is \{'seq_lens': \[1\]\}; give AttentionB"),
        ({"attention": [1], "all_decode": True}, r"attention is \[1\]; give AttentionBatch\("),
        ({"num_active_loras": "1"}, "num_active_loras='1' is no integer"),
        ({"all_decode": "no"}, "all_decode='no' is no bool; use True or False, or None"),
        ({"use_cascade_attn": "no"}, "use_cascade_attn='no' is no bool; use True or False"),
        ({"extra": "flag"}, "extra='flag' is no tuple; use a tuple of hashable values"),
        ({"inputs": {"tokens": [1, 2], "positions": [0], "last": [0]}}, "'tokens' has shape"),
    ],
)
def test_contradictory_batches_are_refused_and_lose_nothing(
    change: dict[str, Any], message: str
) -> None:
    loop = _shared_loop()
    loop.tokens, loop.done, loop.blocks, loop.used = [], [], [], 0
    request = loop.add([1, 2, 3])
    loop.step([(request, 2)])
    batch = loop.batch([(request, 1)])
    fields = {name: getattr(batch, name) for name in ("query_lens", "inputs", "attention")}
    with pytest.raises(ValueError, match=message):
        loop.runner.run(Batch(**{**fields, **change}))
    loop.step([(request, 1)])


@pytest.mark.parametrize("last", [-1, 1, 7])
@pytest.mark.parametrize("lens", [[1], np.array([1])], ids=["list", "array"])
@pytest.mark.parametrize("form", [list, np.array, torch.tensor])
def test_an_index_of_a_row_of_padding_is_refused(last: int, form: Any, lens: Any) -> None:
    """At the first step of its kind and at a known one, whatever the numbers come in."""
    loop = _shared_loop()
    loop.tokens, loop.done, loop.blocks, loop.used = [], [], [], 0
    request = loop.add([1, 2, 3, 4])
    for _ in range(2):
        batch = loop.batch([(request, 1)])
        arrays = {name: np.asarray(value) for name, value in batch.inputs.items()}
        inputs = {**arrays, "last": form([last])}
        wrong = dataclasses.replace(batch, query_lens=lens, inputs=inputs)
        text = rf"'last' holds {last} to {last}, which are to be indices below num_tokens=1"
        with pytest.raises(ValueError, match=text):
            loop.runner.run(wrong)
        loop.runner.run(dataclasses.replace(batch, query_lens=np.array([1]), inputs=arrays))
        loop.done[request] += 1


def test_attention_that_nobody_reads_is_refused() -> None:
    runner = GraphModelRunner(
        lambda x: x,
        {"cudagraph_capture_sizes": [1]},
        input_spec=[InputSpec("x", (Dim.NUM_TOKENS,), torch.float32)],
        max_num_seqs=1,
        device="cpu",
    )
    runner.capture(progress=False)
    with pytest.raises(ValueError, match="no metadata_builder to read it"):
        runner.run(Batch(query_lens=[1], inputs={"x": [1.0]}, attention=object()))


@pytest.mark.parametrize("mode", MODES[:3])
def test_the_highest_mode_is_taken_by_name(mode: str) -> None:
    loop = make_loop("FULL")
    request = loop.add([1, 2])
    loop.step([(request, 1)], highest_mode=f" {mode.lower()}")
    assert set(loop.ran()) == {"FULL" if mode == "FULL" else "NONE"}


@pytest.mark.parametrize("mode", ["SOME", 2, "FULL_DECODE_ONLY", CUDAGraphMode.FULL_AND_PIECEWISE])
def test_a_mode_that_no_single_batch_has_is_refused(mode: Any) -> None:
    loop = _shared_loop()
    loop.tokens, loop.done, loop.blocks, loop.used = [], [], [], 0
    request = loop.add([1, 2])
    with pytest.raises(ConfigError, match="is no mode of a single batch; use NONE, P"):
        loop.step([(request, 1)], highest_mode=mode)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((Dim.NUM_TOKENS,), r"begins with \[16\] for 16 tokens of 8 requests"),
        ((1, Dim.NUM_REQS), r"returned a tensor of \[8, 37\]"),
    ],
)
@pytest.mark.parametrize("mode", ["NONE", "FULL"])
def test_outputs_of_another_shape_than_was_said_are_refused(
    mode: str, shape: Any, text: str
) -> None:
    """The runner would return rows of padding as if they were the batch's."""
    model = PagedToy()
    runner = GraphModelRunner(
        model,
        {"cudagraph_mode": mode, "cudagraph_capture_sizes": SIZES},
        input_spec=INPUTS,
        output_shape=shape,
        max_num_seqs=8,
        metadata_builder=make_builder(model),
        device="cpu",
    )
    with pytest.raises(ConfigError, match=text):
        runner.capture(progress=False)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"device": "meta"}, "device='meta' holds no numbers"),
        ({"device": "gpu"}, "device='gpu' cannot be used: .*; use the model's"),
        ({"device": ""}, "device='' cannot be used: .*; use the model's"),
        ({"device": None}, "device=None is no device; use the model's"),
        ({"device": 0}, "device=0 is no device; use the model's"),
        ({"model": 3}, "model=3 cannot be called; pass a module"),
        ({"model": None}, "model=None cannot be called; pass a module"),
        ({"config": 3}, "options=3 must be a mapping"),
        ({"input_spec": None}, r"input_spec=None must be a list of InputSpec; use \["),
        ({"input_spec": "tokens"}, "input_spec='tokens' must be a list of InputSpec"),
        ({"input_spec": INPUTS[0]}, "must be a list of InputSpec"),
        ({"input_spec": {"tokens": INPUTS[0]}}, "must be a list of InputSpec"),
        ({"input_spec": ["tokens"]}, "holds str, which is no InputSpec"),
        ({"input_spec": [*INPUTS, None]}, "holds NoneType, which is no InputSpec"),
        ({"input_spec": ()}, r"input_spec=\(\) is empty, and nothing else tells the model"),
        ({"input_spec": []}, r"input_spec=\[\] is empty, and nothing else tells the model"),
        (
            {"max_num_seqs": 8, "max_num_batched_tokens": 7},
            "max_num_batched_tokens=7 is below max_num_seqs=8, .*; use 8 or more, or lower max_",
        ),
        ({"max_num_seqs": 8193}, "max_num_batched_tokens=8192 is below max_num_seqs=8193"),
        (
            {"max_num_batched_tokens": 8, "uniform_decode_query_len": 9},
            r"max_num_batched_tokens=8 is below uniform_decode_query_len=9, .*; use 9 or more",
        ),
        (
            {"max_num_batched_tokens": 8, "config": {"num_speculative_tokens": 8}},
            "max_num_batched_tokens=8 is below uniform_decode_query_len=9",
        ),
        ({"output_shape": Dim.NUM_REQS}, "output_shape=NUM_REQS must be a tuple of sizes"),
        ({"output_shape": "num_reqs"}, "output_shape='num_reqs' must be a tuple of sizes"),
        ({"output_shape": None}, "output_shape=None must be a tuple of sizes"),
        ({"output_shape": ("num_reqs",)}, "holds 'num_reqs', which is neither a Dim nor"),
        ({"output_shape": (-1,)}, "holds -1, which is neither a Dim nor"),
        ({"output_shape": (True,)}, "holds True, which is neither a Dim nor"),
        ({"metadata_builder": "sdpa"}, "is no MetadataBuilder: it has no support, input_spec"),
        (
            {"metadata_builder": AttentionMetadataBuilder},
            r"use AttentionMetadataBuilder\(\.\.\.\)",
        ),
        ({"ranks": 2}, "ranks=2 is no RankAgreement"),
    ],
)
def test_what_a_runner_cannot_be_made_of_is_refused(changes: Any, text: str) -> None:
    facts = {"model": PagedToy(), "input_spec": INPUTS, "max_num_seqs": 2, "device": "cpu"}
    with pytest.raises(ConfigError, match=text):
        GraphModelRunner(**{**facts, **changes})


def test_a_device_that_holds_no_weight_of_the_model_is_refused() -> None:
    model = PagedToy().to("meta")
    with pytest.raises(ConfigError, match="holds no weight of the model, which is on meta"):
        GraphModelRunner(model, input_spec=INPUTS, max_num_seqs=2, device="cpu")


def test_a_builder_that_lacks_something_or_has_no_level_is_refused() -> None:
    builder = make_builder(PagedToy())
    builder.support = "ALWAYS"  # type: ignore[assignment]
    facts = {"input_spec": INPUTS, "max_num_seqs": 2, "device": "cpu"}
    with pytest.raises(ConfigError, match=r"support='ALWAYS' is no level of support; use one of"):
        GraphModelRunner(PagedToy(), metadata_builder=builder, **facts)
    del builder.support
    with pytest.raises(ConfigError, match="is no MetadataBuilder: it has no support; use an"):
        GraphModelRunner(PagedToy(), metadata_builder=builder, **facts)


LIMITS = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "uniform_decode_query_len": 1,
    "max_loras": 0,
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("value", ["8", 8.0, True, None, [8], -1, 0])
def test_limits_are_numbers_from_the_least_on(limit: str, value: Any) -> None:
    facts: dict[str, Any] = {"input_spec": INPUTS, "max_num_seqs": 2, "device": "cpu"}
    facts |= {limit: value}
    least = LIMITS[limit]
    if (value is None and limit == "uniform_decode_query_len") or value == least == 0:
        GraphModelRunner(PagedToy(), **facts)
        return
    problem = "is too small" if type(value) is int else "must be an integer"
    with pytest.raises(ConfigError) as caught:
        GraphModelRunner(PagedToy(), **facts)
    assert str(caught.value) == f"{limit}={value!r} {problem}; use {least} or more"


def test_limits_of_numpy_are_as_good() -> None:
    limits = dict.fromkeys(LIMITS, np.int64(2))
    GraphModelRunner(PagedToy(), input_spec=INPUTS, device="cpu", **limits)


@pytest.mark.parametrize("batch", [3, None, {"query_lens": [1]}, [1, 2]])
def test_what_is_no_batch_is_refused(batch: Any) -> None:
    loop = _shared_loop()
    request = loop.add([1, 2, 3])
    loop.step([(request, 1)])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"the batch is .*; give Batch\(query_lens=\.\.\."):
            loop.runner.run(batch)
    loop.step([(request, 1)])


def test_who_prepares_for_a_graph_finds_a_legal_batch_in_its_tensors() -> None:
    seen: list[int] = []

    class Reading(SdpaAttention):
        def prepare_for_graph(self, metadata: Any, key: Any) -> None:
            lens, seq_lens = metadata.query_start_loc.diff(), metadata.seq_lens
            assert metadata.query_start_loc[0] == 0
            assert (lens >= 1).all()
            assert int(lens.sum()) == key.num_tokens
            assert (seq_lens >= lens).all()
            assert (seq_lens <= MAX_MODEL_LEN).all()
            assert (metadata.slot_mapping == -1).all()
            seen.append(key.num_tokens)

    cache = CacheFormat(block_size=4, dtype=torch.float32, max_model_len=MAX_MODEL_LEN)
    loop = make_loop("FULL", backend=lambda _: Reading(SPEC, cache, torch.device("cpu")))
    request = loop.add(range(9))
    loop.step([(request, 7)])
    loop.step([(request, 1)], extra=("a key that is not in the plan",))
    loop.step([(request, 1)])
    assert sorted(set(seen)) == list(SIZES)


def test_models_without_attention_need_no_builder() -> None:
    model = torch.nn.Linear(3, 2)
    runner = GraphModelRunner(
        lambda x: {"y": model(x), "n": 7},
        {"cudagraph_capture_sizes": [2, 4]},
        input_spec=[InputSpec("x", (Dim.NUM_TOKENS, 3), torch.float32)],
        max_num_seqs=4,
        max_num_batched_tokens=8,
        device="cpu",
    )
    runner.capture(progress=False)
    for size in (1, 2, 3, 4, 7):
        x = torch.randn(size, 3)
        result = runner.run(Batch(query_lens=[size], inputs={"x": x}))
        assert result["n"] == 7
        torch.testing.assert_close(result["y"], model(x))
    assert runner.report().steps(FULL) == 4


def test_the_report_reads_as_a_table() -> None:
    loop = make_loop("FULL_DECODE_ONLY")
    request = loop.add([1, 2])
    loop.step([(request, 1)])
    loop.step([(request, 1)])
    text = str(loop.runner.report())
    assert "FULL_DECODE_ONLY" in text
    assert "FULL: 4 graphs" in text
    assert "1 token, uniform" in text


def test_outputs_of_token_models_are_cut_to_the_tokens() -> None:
    runner = GraphModelRunner(
        lambda x: x.unsqueeze(0) * 2,
        {"cudagraph_capture_sizes": [4]},
        input_spec=[InputSpec("x", (Dim.NUM_TOKENS,), torch.bfloat16, pad=1)],
        max_num_seqs=4,
        max_num_batched_tokens=4,
        output_shape=(1, Dim.NUM_TOKENS),
        device="cpu",
    )
    runner.capture(progress=False)
    result = runner.run(Batch(query_lens=np.array([2, 1]), inputs={"x": [1.0, 2.0, 3.0]}))
    assert result.tolist() == [[2.0, 4.0, 6.0]]
