"""The runner under unusual engines: interrupted, shared, misconfigured, and at its very limits."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import threading
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from paged_toy import (
    HEAD_SIZE,
    KV_HEADS,
    MAX_MODEL_LEN,
    SPEC,
    VOCABULARY,
    Loop,
    PagedToy,
    compiled,
    make_builder,
    make_loop,
)

from compile_backend import (
    AttentionCGSupport,
    Batch,
    CUDAGraphMode,
    Dim,
    GraphModelRunner,
    InputSpec,
    stats,
)
from compile_backend.attention.builder import AttentionBatch, AttentionMetadataBuilder
from compile_backend.attention.kv_cache import LayerCache
from compile_backend.attention.layer import AttentionLayer
from compile_backend.attention.sdpa import SdpaAttention
from compile_backend.attention.spec import CacheFormat
from compile_backend.context import get_forward_context

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
MODES = ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
BOTH = "FULL_AND_PIECEWISE"
CPU = torch.device("cpu")
CACHE = CacheFormat(block_size=4, dtype=torch.float32, max_model_len=MAX_MODEL_LEN)
ROWS = (InputSpec("x", (Dim.NUM_TOKENS, 3), torch.float32),)
LINEAR = (InputSpec("input", (Dim.NUM_TOKENS, 3), torch.float32),)

pytestmark = pytest.mark.usefixtures("one_core")


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """Each capture collects garbage: not what was imported, once for all tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def serve(loop: Loop) -> dict[str, list[int]]:
    """Chunks, a mixture and decodes, all checked; then the sizes that ran, by mode."""
    first, second = loop.add(range(1, 10)), loop.add(range(11, 30))
    loop.step([(first, 5)])
    loop.step([(second, 7), (first, 3)])
    loop.step([(first, 1), (second, 1)])
    loop.step([(second, 4)])
    loop.step(loop.grow(first))
    return loop.ran()


SERVED = {
    "NONE": {"NONE": [1, 2, 4, 5, 10]},
    "PIECEWISE": {"PIECEWISE": [1, 2, 4, 8, 16]},
    "FULL": {"FULL": [1, 2, 4, 8, 16]},
    "FULL_DECODE_ONLY": {"FULL": [1, 2], "NONE": [4, 5, 10]},
    BOTH: {"FULL": [1, 2], "PIECEWISE": [4, 8, 16]},
}


def rows_runner(model: Callable[..., Any], mode: str = "FULL", **facts: Any) -> GraphModelRunner:
    """A runner of a function without attention, captured for 2 and 4 rows."""
    runner = GraphModelRunner(
        model,
        {"cudagraph_mode": mode, "cudagraph_capture_sizes": [2, 4]},
        input_spec=facts.pop("input_spec", ROWS),
        max_num_seqs=4,
        max_num_batched_tokens=8,
        device="cpu",
        **facts,
    )
    runner.capture(progress=False)
    return runner


def rows(number: int, value: float = 1.0, **facts: Any) -> Batch:
    return Batch(query_lens=[number], inputs={"x": torch.full((number, 3), value)}, **facts)


# --- capture, more than once and not to its end ---


@pytest.mark.parametrize(("mode", "call"), [("FULL", 1), ("FULL", 9), (BOTH, 3), (BOTH, 17)])
def test_a_capture_that_a_model_interrupts_can_be_made_again(mode: str, call: int) -> None:
    calls = []

    class Failing(SdpaAttention):
        def forward(self, *args: Any) -> None:
            calls.append(len(args[0]))
            if len(calls) == call:
                raise RuntimeError("out of luck")
            super().forward(*args)

    loop = make_loop(mode, backend=lambda _: Failing(SPEC, CACHE, CPU), is_captured=False)
    assert "not yet" in str(loop.runner.report())
    with pytest.raises(RuntimeError, match="out of luck"):
        loop.runner.capture(progress=False)
    assert gc.isenabled()
    assert str(loop.runner.report())
    loop.runner.capture(progress=False)
    assert loop.runner.report().num_graphs == (
        {FULL: 5} if mode == "FULL" else {FULL: 4, PIECEWISE: 15}
    )
    assert serve(loop) == SERVED[mode]


@pytest.mark.parametrize("again", ["capture", "recapture"])
def test_captures_in_the_middle_of_serving_keep_what_caches_hold(again: str) -> None:
    loop = make_loop()
    request = loop.add(range(3, 20))
    loop.step([(request, 6)])
    loop.step([(request, 1)])
    getattr(loop.runner, again)(progress=False)
    loop.step([(request, 1)])
    loop.step([(request, 5)])
    assert loop.ran() == {"FULL": [1, 1], "PIECEWISE": [8, 8]}


def test_weights_bound_anew_between_making_a_runner_and_its_capture() -> None:
    loop = make_loop(is_captured=False)
    state = {name: value * 1.5 for name, value in loop.model.state_dict().items()}
    loop.model.load_state_dict(state, assign=True)
    loop.runner.capture(progress=False)
    assert serve(loop) == SERVED[BOTH]
    report = loop.runner.report()
    assert all(counts.captures in (0, 1, 3) for counts in report.by_key.values())


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_weights_that_are_tied_assigned_or_merged_in_place(mode: str) -> None:
    loop = make_loop(mode)
    model = loop.model
    request = loop.add(range(9))

    def tie() -> None:
        model.out[1].weight = model.out[0].weight

    def move() -> None:
        model.out[0].weight.data = model.out[0].weight * 3

    def merge() -> None:
        model.out[0].weight.add_(torch.randn(64, 1) @ torch.randn(1, 64))

    def assign() -> None:
        state = {name: value * 0.7 for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)

    for change in (lambda: None, tie, move, merge, assign):
        with torch.no_grad():
            change()
        loop.done[request] = 0  # the cache holds what the old weights made
        loop.step([(request, 3)])
        loop.step([(request, 1)])
    assert loop.ran() == {mode: [1] * 5 + [4] * 5}
    if mode == "FULL":  # the reference reads weights anew; a GPU needs the three new captures
        for (_, key), counts in loop.runner.report().by_key.items():
            assert counts.captures == (4 if key.num_tokens in (1, 4) else 1)


# --- options ---


@pytest.mark.parametrize(
    "options",
    [
        {"cudagraph_mode": "NONE"},
        {"cudagraph_mode": "FULL", "max_num_seqs": 1},
        {"cudagraph_capture_sizes": [3, 64], "num_speculative_tokens": 2},
        {"cudagraph_capture": "ahead"},
        {"cudagraph_copy_inputs": False, "cudagraph_clone_outputs": False},
        {"cudagraph_num_of_warmups": 3, "cudagraph_pad_inputs": True},
    ],
    ids="+".join,
)
def test_options_of_torch_compile_do_not_change_what_a_runner_was_told(options: Any) -> None:
    loop = make_loop(compile_options=options)
    assert serve(loop) == SERVED[BOTH]
    assert stats(loop.runner.model).total("captures") == 15
    assert stats(loop.runner.model).total("replays") == 9


@pytest.mark.parametrize(
    ("options", "as_config"),
    [({"debug": "verify"}, False), ({"debug": "addresses"}, True), ({"strict": True}, True)],
)
def test_checks_find_nothing_in_right_steps(options: Any, as_config: bool) -> None:
    loop = make_loop(compile_options=options, as_config=as_config, **options)
    assert serve(loop) == SERVED[BOTH]


def test_verify_finds_attention_that_reads_the_step_from_python() -> None:
    class Stale(SdpaAttention):
        """Its result changes from call to call: what a captured Python number does on a GPU."""

        calls: ClassVar[int] = 0

        def forward(self, query: Any, key: Any, value: Any, output: Any, *rest: Any) -> None:
            super().forward(query, key, value, output, *rest)
            type(self).calls += 1
            output.mul_(self.calls)

    from compile_backend import CaptureError

    loop = make_loop("FULL", backend=lambda _: Stale(SPEC, CACHE, CPU), debug="verify")
    request = loop.add([1, 2])
    with pytest.raises(CaptureError, match="verify: the whole model"):
        loop.runner.run(loop.batch([(request, 1)]))


# --- who runs a step, and when ---


def test_two_runners_of_one_compiled_model_take_turns() -> None:
    model = PagedToy()
    called, builder = compiled(model), make_builder(model)
    loops = [
        make_loop(model=model, called=called, builder=builder, limits=(seqs, 64))
        for seqs in (8, 4)
    ]
    loops[1].used = 24
    requests = [loop.add(range(3 * i, 3 * i + 14)) for i, loop in enumerate(loops)]
    for count in (3, 2, 1, 5, 1):
        for loop, request in zip(loops, requests, strict=True):
            loop.step([(request, count)])
    for loop in loops:
        assert loop.ran() == {"FULL": [1, 1], "PIECEWISE": [2, 4, 8]}


def test_plain_calls_and_a_runner_of_one_compiled_model_take_turns() -> None:
    module = torch.nn.Linear(3, 3)
    called = compiled(module, cudagraph_mode="FULL", cudagraph_capture_sizes=[2, 4])
    runner = rows_runner(called, input_spec=LINEAR)
    for _ in range(3):
        for number in (2, 4, 3):
            x, y = torch.randn(2, number, 3)
            with torch.no_grad():
                kept = called(x)
            ours = runner.run(Batch(query_lens=[number], inputs={"input": y}))
            torch.testing.assert_close(kept, module(x))
            torch.testing.assert_close(ours, module(y))
    assert runner.report().steps(FULL) == 9
    x = torch.randn(2, 3, requires_grad=True)
    called(x).sum().backward()  # plain calls may still be differentiated
    assert x.grad is not None


def test_steps_from_another_thread_than_the_capture() -> None:
    loop = make_loop()
    served: list[dict[str, list[int]]] = []
    thread = threading.Thread(target=lambda: served.append(serve(loop)))
    thread.start()
    thread.join()
    assert served == [SERVED[BOTH]]


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "NONE"])
def test_a_step_that_attention_interrupts_can_be_run_again(mode: str) -> None:
    fail: list[int] = []

    class Failing(SdpaAttention):
        def forward(self, *args: Any) -> None:
            if fail and not fail.pop():
                raise RuntimeError("out of luck")
            super().forward(*args)

    loop = make_loop(mode, backend=lambda _: Failing(SPEC, CACHE, CPU))
    request = loop.add(range(9))
    loop.step([(request, 3)])
    fail.extend([0, 1])  # the second layer
    with pytest.raises(RuntimeError, match="out of luck"):
        loop.runner.run(loop.batch([(request, 2)]))
    loop.step([(request, 2)])
    loop.step([(request, 1)])
    assert sum(map(len, loop.ran().values())) == 3


def test_an_error_at_one_size_names_itself() -> None:
    class NoKernel(SdpaAttention):
        def forward(self, query: Any, *args: Any) -> None:
            if len(query) == 4:
                raise NotImplementedError("no kernel for 4 tokens")
            super().forward(query, *args)

    with pytest.raises(NotImplementedError, match="no kernel for 4 tokens"):
        make_loop(backend=lambda _: NoKernel(SPEC, CACHE, CPU))


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
def test_gradients_are_off_whatever_inputs_and_caller_say(mode: str) -> None:
    module = torch.nn.Linear(3, 3)
    runner = rows_runner(compiled(module), mode, input_spec=LINEAR)
    for number in (2, 3, 7):
        x = torch.randn(number, 3, requires_grad=True)
        with torch.enable_grad():
            result = runner.run(Batch(query_lens=[number], inputs={"input": x}))
        assert not result.requires_grad
        torch.testing.assert_close(result, module(x).detach())


def test_arrays_that_the_engine_overwrites_after_each_step() -> None:
    loop = make_loop()
    requests = loop.add(range(20)), loop.add(range(5, 20))
    reused = np.zeros(2, np.int32), np.zeros(2, np.int32), np.zeros((2, 12), np.int32)
    for counts in ((3, 2), (1, 1), (1, 1), (1, 7), (1, 1), (1, 1)):
        work = list(zip(requests, counts, strict=True))
        batch = loop.batch(work)
        lens, seq_lens, table = reused
        lens[:], seq_lens[:] = batch.query_lens, batch.attention.seq_lens
        table[:] = batch.attention.block_table
        inputs = {name: np.array(value) for name, value in batch.inputs.items()}
        logits = loop.runner.run(
            Batch(
                query_lens=lens,
                inputs=inputs,
                attention=AttentionBatch(seq_lens=seq_lens, block_table=table),
            )
        )
        for array in (*reused, *inputs.values()):
            array[...] = -7
        for row, (request, count) in zip(logits, work, strict=True):
            loop.done[request] += count
            expected = loop.model.dense(loop.tokens[request][: loop.done[request]])
            torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)
    assert loop.ran() == {"FULL": [2, 2, 2, 2], "PIECEWISE": [8, 8]}


def _of_several_types(value: Any) -> Any:
    """A list of numbers that no type of numpy's but floats holds together."""
    array = np.asarray(value)
    if array.ndim == 1:
        types = itertools.cycle((np.uint64, int, np.int16))
        return [as_type(number) for as_type, number in zip(types, array.tolist(), strict=False)]
    return [_of_several_types(row) for row in array]


def _rows_of_several_types(value: Any) -> Any:
    array = np.asarray(value)
    if array.ndim == 1:
        return tuple(_of_several_types(array))
    return [row.astype(np.uint64) if i % 2 else row for i, row in enumerate(array)]


_KINDS: dict[str, Callable[[Any], Any]] = {
    "list": lambda value: np.asarray(value).tolist(),
    "uint8": lambda value: np.asarray(value, np.uint8),
    "int16": lambda value: np.asarray(value, np.int16),
    "int64": lambda value: np.asarray(value, np.int64),
    "torch.int32": lambda value: torch.as_tensor(np.asarray(value)).int(),
    "torch.int64": lambda value: torch.as_tensor(np.asarray(value)).long(),
    "several types": _of_several_types,
    "rows of several types": _rows_of_several_types,
    "objects": lambda value: np.asarray(value, object),
    "strided": lambda value: np.repeat(np.asarray(value), 2, -1)[..., ::2],
}


def test_batches_of_any_kind_of_integers_with_and_without_slots() -> None:
    loop = make_loop()
    requests = loop.add(range(12)), loop.add(range(5, 17))
    steps = 0
    for as_kind in _KINDS.values():
        for has_slots in (False, True):
            batch = loop.batch([(request, 1) for request in requests])
            held = batch.attention
            slots = [
                blocks[(length - 1) // 4] * 4 + (length - 1) % 4
                for length, blocks in zip(held.seq_lens, held.block_table, strict=True)
            ]
            logits = loop.runner.run(
                Batch(
                    query_lens=as_kind(batch.query_lens),
                    inputs={name: as_kind(value) for name, value in batch.inputs.items()},
                    attention=AttentionBatch(
                        seq_lens=as_kind(held.seq_lens),
                        block_table=as_kind(held.block_table),
                        slot_mapping=as_kind(slots) if has_slots else None,
                    ),
                )
            )
            for row, request in zip(logits, requests, strict=True):
                expected = loop.model.dense(loop.tokens[request][: loop.done[request] + 1])
                torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)
        loop.done = [done + 1 for done in loop.done]
        steps += 2
    assert sum(map(len, loop.ran().values())) == steps


# --- state, randomness and what models return ---


class Counting(PagedToy):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("mode", MODES)
def test_state_changes_once_a_step_and_once_a_warm_up(mode: str) -> None:
    loop = make_loop(mode, Counting())
    warm_ups = {"NONE": 0, "FULL_DECODE_ONLY": 4, BOTH: 9}.get(mode, 5)
    assert int(loop.model.steps) == 1 + warm_ups
    serve(loop)
    assert int(loop.model.steps) == 1 + warm_ups + 5
    request = loop.add(range(9))
    for _ in range(3):  # a key outside of the plan: a warm-up, a capture with a replay, a replay
        loop.step([(request, 2)], extra=("other",))
    assert int(loop.model.steps) == 1 + warm_ups + 8


def test_dropout_draws_anew_in_every_replay() -> None:
    module = torch.nn.Dropout().train()
    runner = rows_runner(module, input_spec=LINEAR)
    batch = Batch(query_lens=[4], inputs={"input": torch.ones(4, 3)})
    drawn = {tuple(runner.run(batch).flatten().tolist()) for _ in range(8)}
    assert len(drawn) > 1


class Pair(NamedTuple):
    double: torch.Tensor
    number: int


@pytest.mark.parametrize(
    ("model", "read"),
    [
        (lambda x: (x * 2, None, 7), lambda out: out[0]),
        (lambda x: [{"y": [x * 2]}, "text"], lambda out: out[0]["y"][0]),
        (lambda x: Pair(x * 2, 3), lambda out: out.double),
        (lambda x: (x.mul_(2), x)[1], lambda out: out),
        (lambda x: (x + x).t().t(), lambda out: out),
        (lambda x: (x * 2).expand(2, -1, -1)[1], lambda out: out),
    ],
)
def test_what_models_return_is_cut_and_fresh(model: Any, read: Any) -> None:
    runner = rows_runner(model)
    for number in (1, 2, 3, 4, 7, 1):
        result = read(runner.run(rows(number, float(number))))
        assert torch.equal(result, torch.full((number, 3), 2.0 * number))
    assert runner.report().steps(FULL) == 5


def test_a_kept_clone_outlives_and_an_output_is_overwritten() -> None:
    runner = rows_runner(lambda x: x * 2)
    output = runner.run(rows(2))
    kept = output.clone()
    output.mul_(100)  # the caller's to write until the next step
    again = runner.run(rows(2, 5.0))
    assert torch.equal(kept, torch.full((2, 3), 2.0))
    assert torch.equal(again, torch.full((2, 3), 10.0))
    assert output.data_ptr() == again.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_of_another_dtype(dtype: torch.dtype) -> None:
    loop = make_loop(model=PagedToy().to(dtype))
    request = loop.add(range(9))
    for count in (5, 1, 3):
        logits = loop.runner.run(loop.batch([(request, count)]))
        loop.done[request] += count
        assert logits.dtype is dtype
        expected = loop.model.dense(loop.tokens[request][: loop.done[request]])
        torch.testing.assert_close(logits[0], expected, rtol=1e-2, atol=2e-1)
    assert loop.ran() == {"FULL": [1], "PIECEWISE": [4, 8]}


def test_control_flow_that_depends_on_the_size() -> None:
    class Branching(PagedToy):
        def forward(self, tokens: Any, positions: Any, last: Any) -> Any:
            logits = super().forward(tokens, positions, last)
            return logits if tokens.shape[0] > 8 else logits * 1.0

    assert serve(make_loop(model=Branching())) == SERVED[BOTH]


# --- limits ---


@pytest.mark.parametrize(
    ("limits", "sizes", "expected"),
    [
        ((1, 64), [1, 2, 4], {"FULL": [1, 1], "NONE": [5]}),
        ((1, 1), [1], {"FULL": [1, 1], "PIECEWISE": [1]}),
        ((8, 64), [64], {"FULL": [8, 8], "PIECEWISE": [64]}),
        ((2, 2), [1, 2, 4, 8], {"FULL": [1, 2], "PIECEWISE": [2]}),
        ((8, 8), [16, 32], {"FULL": [8, 8], "PIECEWISE": [16]}),
    ],
)
def test_limits_and_sizes_that_do_not_fit(limits: Any, sizes: list[int], expected: Any) -> None:
    loop = make_loop(limits=limits, sizes=sizes)
    requests = [loop.add(range(i, i + 9)) for i in range(2)]
    loop.step([(requests[0], min(5, limits[1]))])
    loop.step([(requests[0], 1)])
    loop.runner.run(loop.batch([(requests[1], 1)]), highest_mode=NONE)  # a prompt
    loop.done[1] = 1
    loop.step([(request, 1) for request in requests][: min(limits)])
    held = loop.ran()
    held["NONE"].remove(1)
    assert {mode: steps for mode, steps in held.items() if steps} == expected


NOBODY = Batch(
    query_lens=[],
    inputs={"tokens": [], "positions": [], "last": []},
    attention=AttentionBatch(seq_lens=[], block_table=np.zeros((0, 12), np.int32)),
)
"""A batch without requests that brings all that others do."""


@pytest.mark.parametrize("mode", [BOTH, "FULL", "NONE"])
def test_a_batch_of_exactly_the_limits_and_an_empty_one(mode: str) -> None:
    loop = make_loop(mode, limits=(8, 16))
    requests = [loop.add(range(i, i + 9)) for i in range(8)]
    loop.step([(request, 2) for request in requests])
    assert loop.runner.run(NOBODY).shape == (0, VOCABULARY)
    for lacking in ({"inputs": {}}, {"attention": None}, {"inputs": {}, "attention": None}):
        with pytest.raises(ValueError, match=r"has no requests: .*; leave the step out, or"):
            loop.runner.run(dataclasses.replace(NOBODY, **lacking))
    loop.step([(request, 1) for request in requests])
    loop.step([(requests[0], 6), *((request, 1) for request in requests[1:5])])


class Viewed(PagedToy):
    """Asks for a size that nothing tells where there are no rows, as Llama does of its heads."""

    def forward(self, tokens: Any, positions: Any, last: Any) -> Any:
        tokens = tokens.view(tokens.shape[0], -1)[:, 0]
        return super().forward(tokens, positions, last)


@pytest.mark.parametrize("is_array", [False, True])
@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_knows_no_empty_batch_runs_one(
    mode: str, query_len: int, is_array: bool
) -> None:
    loop = make_loop(mode, Viewed(), query_len=query_len, sizes=[1, 2, 3, 4, 8])
    requests = [loop.add(range(i, i + 9)) for i in range(2)]
    loop.step([(request, 3) for request in requests])
    nobody = NOBODY
    if is_array:
        inputs = {name: np.zeros(0, np.int64) for name in NOBODY.inputs}
        lens = np.zeros(0, np.int32)
        attention = dataclasses.replace(NOBODY.attention, seq_lens=lens)
        nobody = Batch(query_lens=lens, inputs=inputs, attention=attention)
    for _ in range(2):
        assert loop.runner.run(nobody).shape == (0, VOCABULARY)
    assert loop.runner.run(nobody, highest_mode=NONE).shape == (0, VOCABULARY)
    lists = dataclasses.replace(nobody.attention, seq_lens=[], block_table=[])
    assert loop.runner.run(dataclasses.replace(nobody, attention=lists)).shape == (0, VOCABULARY)
    other = dataclasses.replace(nobody, extra=("other",))
    assert loop.runner.run(other).shape == (0, VOCABULARY)
    assert stats(loop.runner.model).graphs == 1
    for changes, text in (
        ({"inputs": {**nobody.inputs, "last": [0]}}, r"'last' has shape \(1,\), .* needs \(0,\)"),
        ({"attention": AttentionBatch(seq_lens=[1], block_table=[[0]])}, "needs 0 rows"),
    ):
        with pytest.raises(ValueError, match=text):
            loop.runner.run(dataclasses.replace(nobody, **changes))
    loop.step([(request, 1) for request in requests])
    loop.step([(request, 3) for request in requests])


@pytest.mark.parametrize(
    ("mode", "block_size", "max_model_len", "num_blocks"),
    [
        ("FULL", 5, 13, 9),
        (BOTH, 5, 13, 9),
        ("FULL", 16, 16, 1),
        ("FULL", 4, 48, 12),
        (BOTH, 1, 7, 20),
        (BOTH, 3, 1, 4),
    ],
)
def test_requests_as_long_as_may_be_in_caches_full_of_nan(
    mode: str, block_size: int, max_model_len: int, num_blocks: int
) -> None:
    model = PagedToy()
    cache = CacheFormat(block_size=block_size, dtype=torch.float32, max_model_len=max_model_len)
    backend = SdpaAttention(SPEC, cache, CPU)
    shape = (num_blocks, block_size, KV_HEADS, HEAD_SIZE)
    layers = {
        name: AttentionLayer(
            name, backend, LayerCache(*(torch.full(shape, torch.nan) for _ in "kv"))
        )
        for name in model.layer_names
    }
    builder = AttentionMetadataBuilder(layers, cache, num_blocks)
    loop = make_loop(mode, model, called=model if mode == "FULL" else None, builder=builder)
    width = cache.max_blocks_per_req
    loop.tokens = [[(7 * i + 3) % VOCABULARY for i in range(max_model_len + 1)]]
    loop.done, loop.blocks = [0], [list(range(num_blocks))[::-1][:width]]
    loop.step([(0, max(1, max_model_len - 3))])
    while loop.done[0] < max_model_len:
        loop.step([(0, 1)])
    with pytest.raises(ValueError, match="is longer than max_model_len"):
        loop.step([(0, 1)])


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", BOTH])
def test_requests_that_share_a_prefix_and_one_that_is_forked(mode: str) -> None:
    loop = make_loop(mode)
    prefix = list(range(8))
    origin = loop.add([*prefix, 20, 21])
    loop.step([(origin, 8)])
    others = loop.add([*prefix, 30, 31]), loop.add([*prefix, 33])
    for other in others:  # the two full blocks of the prefix are the first request's
        loop.blocks[other] = loop.blocks[origin][:2] + loop.blocks[other][2:]
        loop.done[other] = 8
    loop.step([(origin, 2), (others[0], 2), (others[1], 1)])
    loop.step(loop.grow(origin, *others))
    fork = len(loop.tokens)
    loop.tokens.append(list(loop.tokens[origin]))
    loop.done.append(loop.done[origin])
    loop.blocks.append([*loop.blocks[origin][:2], 60, *range(50, 59)])
    for layer in loop.runner.builder.layers.values():  # its half-full block is copied
        for part in (layer.cache.keys, layer.cache.values):
            part[60].copy_(part[loop.blocks[origin][2]])
    loop.step(loop.grow(fork, origin, *others))
    loop.step(loop.grow(origin, fork))


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY", BOTH])
def test_guesses_of_which_some_requests_have_fewer(mode: str) -> None:
    loop = make_loop(mode, query_len=3, sizes=[1, 2, 4, 8, 12, 24])
    requests = [loop.add([(5 * i + j) % VOCABULARY for j in range(30)]) for i in range(4)]
    for counts in ((4, 4, 4, 4), (3, 1), (1, 5), (2, 3, 4), (3, 3, 3), (1, 1, 1), (6,), (3,)):
        loop.step(list(zip(requests, counts, strict=False)))
    mixed = [4, 4, 8, 8, 12, 24] if mode != "FULL_DECODE_ONLY" else [3, 4, 6, 6, 9, 16]
    if mode == "FULL":
        assert loop.ran() == {"FULL": [4, 4, 4, 8, 8, 12, 12, 24]}
    else:  # only whole requests of three tokens that are decodes
        other = "NONE" if mode == "FULL_DECODE_ONLY" else "PIECEWISE"
        assert loop.ran() == {"FULL": [3, 9], other: mixed}


@pytest.mark.parametrize("mode", MODES)
def test_a_step_never_goes_above_its_highest_mode(mode: str) -> None:
    loop = make_loop(mode)
    requests = [loop.add(range(i, i + 30)) for i in range(2)]
    asked = CUDAGraphMode[mode]
    pieces = PIECEWISE if asked.mixed_mode() is PIECEWISE else NONE
    decode = {NONE: NONE, PIECEWISE: pieces, FULL: asked.decode_mode()}
    mixed = {NONE: NONE, PIECEWISE: pieces, FULL: asked.mixed_mode()}
    cascade = {NONE: NONE, PIECEWISE: pieces, FULL: pieces}
    for highest in (NONE, PIECEWISE, FULL):
        for counts, is_cascade, expected in (
            ((3, 1), False, mixed),
            ((1, 1), False, decode),
            ((1, 1), True, cascade),
        ):
            before = loop.runner.report()
            loop.step(
                list(zip(requests, counts, strict=True)),
                highest_mode=highest,
                use_cascade_attn=is_cascade,
            )
            after = loop.runner.report()
            moved = [m for m in (NONE, PIECEWISE, FULL) if after.steps(m) > before.steps(m)]
            assert moved == [expected[highest]]


@pytest.mark.parametrize("specialize", [True, False])
def test_adapters_have_keys_of_their_own(specialize: bool) -> None:
    runner = GraphModelRunner(
        lambda x: x * 2,
        {"cudagraph_capture_sizes": [2, 4], "cudagraph_specialize_lora": specialize},
        input_spec=ROWS,
        max_num_seqs=4,
        max_num_batched_tokens=8,
        max_loras=3,
        device="cpu",
    )
    runner.capture(progress=False)
    for count in range(5):
        assert torch.equal(runner.run(rows(2, num_active_loras=count)), torch.full((2, 3), 2.0))
    keys = {
        (mode.name, key.num_active_loras): held.steps
        for (mode, key), held in runner.report().by_key.items()
        if held.steps
    }
    expected = {("FULL", n): 1 for n in range(4)} if specialize else {("FULL", 3): 4}
    assert keys == {**expected, ("NONE", 4): 1}
    with pytest.raises(ValueError, match="num_active_loras=-1 is too small"):
        runner.run(rows(2, num_active_loras=-1))


# --- metadata builders ---


class OwnBuilder:
    """As small as a builder can be; it notes what it is asked."""

    support = AttentionCGSupport.ALWAYS
    plans_every_step = True
    max_query_len = 9
    input_spec = (InputSpec("lens", (Dim.NUM_REQS,), torch.int32),)

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def is_decode(self, batch: Any, query_lens: Any) -> bool:
        return bool((np.asarray(batch) > query_lens).all())

    def fill(self, batch: Any, query_lens: Any, host: Any, *, is_refill: bool) -> None:
        host["lens"][: len(query_lens)] = batch
        host["lens"][len(query_lens) :] = 0

    def build(self, batch: Any, query_lens: Any, tensors: Any) -> Any:
        self.asked.append(("step", list(batch), query_lens.tolist(), tensors["lens"].tolist()))
        return tensors["lens"]

    def build_for_graph(self, tensors: Any, key: Any, batch: Any = None, lens: Any = None) -> Any:
        before = batch is None
        self.asked.append(
            (
                "capture" if before else "replay",
                None if before else list(batch),
                None if before else lens.tolist(),
                tensors["lens"].tolist(),
            )
        )
        return tensors["lens"]

    def capture_batch(self, query_lens: Any) -> Any:
        return query_lens.copy()


def test_a_builder_of_ones_own_plans_before_every_replay_with_true_lengths() -> None:
    builder = OwnBuilder()
    runner = rows_runner(
        lambda x: x * get_forward_context().attn_metadata.sum(), metadata_builder=builder
    )
    at_capture = [item for item in builder.asked if item[0] == "capture"]
    assert [item[3] for item in at_capture] == [[1, 1, 1, 1], [1, 1]]  # legal, the largest first
    del builder.asked[:]
    for lens, seq_lens, padded in (
        ([1, 1], [5, 6], [5, 6]),
        ([3], [3], [3, 0, 0, 0]),
        ([1], [9], [9, 0]),
        ([4, 1], [4, 4], None),
        ([1, 1, 2], [2, 2, 2], [2, 2, 2, 0]),
    ):
        batch = Batch(query_lens=lens, inputs={"x": torch.ones(sum(lens), 3)}, attention=seq_lens)
        assert (runner.run(batch) == sum(seq_lens)).all()
        kind = "step" if padded is None else "replay"
        assert builder.asked == [(kind, seq_lens, lens, padded or seq_lens)]
        del builder.asked[:]


def test_mixed_batches_write_their_own_rows_of_the_cache_only() -> None:
    """A mixed step of 5 tokens at FULL, after larger ones of either kind (P9)."""
    loop = make_loop("FULL")
    requests = [loop.add([(i + j) % VOCABULARY for j in range(9)]) for i in range(5)]
    loop.step([(request, 3) for request in requests])
    loop.step([(request, 1) for request in requests])
    layers = list(loop.runner.builder.layers.values())
    before = [part.clone() for held in layers for part in (held.cache.keys, held.cache.values)]
    loop.step([(requests[1], 4), (requests[3], 1)])
    expected = sorted(
        loop.blocks[request][position // 4] * 4 + position % 4
        for request, positions in ((requests[1], range(4, 8)), (requests[3], range(4, 5)))
        for position in positions
    )
    after = [part for held in layers for part in (held.cache.keys, held.cache.values)]
    for then, now in zip(before, after, strict=True):
        changed = (then != now).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
        assert changed == expected


def test_a_refused_step_leaves_the_cache_and_the_next_step_alone() -> None:
    loop = make_loop()
    requests = [loop.add(range(i, i + 9)) for i in range(2)]
    loop.step([(request, 2) for request in requests])
    batch = loop.batch([(request, 1) for request in requests])
    layers = loop.runner.builder.layers.values()
    before = [layer.cache.keys.clone() for layer in layers]
    for change, message in (
        ({"seq_lens": [3]}, "seq_lens has shape"),
        ({"seq_lens": [3, MAX_MODEL_LEN + 1]}, "longer than max_model_len"),
        ({"seq_lens": [0, 3]}, "none may be below query_lens"),
        ({"block_table": [[0]]}, "block_table has shape"),
        ({"block_table": [[0], [0, 1]]}, "rows of different lengths"),
        ({"block_table": torch.zeros(2, 2, device="meta")}, "block_table cannot be read: "),
        ({"seq_lens": torch.zeros(2, device="meta")}, "seq_lens cannot be read: "),
        ({"block_table": [[-1] * 12] * 2}, "block_table holds -1"),
        ({"block_table": [[64] * 12] * 2}, "the cache has 0 to 63"),
        ({"block_table": [[], []]}, "has 0 columns"),
        ({"slot_mapping": [0]}, "slot_mapping has shape"),
        ({"slot_mapping": [0, 256]}, "slot_mapping holds 0 to 256"),
        ({"slot_mapping": [-2, 0]}, "slot_mapping holds -2"),
    ):
        with pytest.raises(ValueError, match=message):
            loop.runner.run(
                dataclasses.replace(
                    batch, attention=dataclasses.replace(batch.attention, **change)
                )
            )
    assert all(
        torch.equal(layer.cache.keys, keys) for layer, keys in zip(layers, before, strict=True)
    )
    loop.step([(request, 1) for request in requests])
    assert loop.ran() == {"FULL": [2], "PIECEWISE": [4]}
