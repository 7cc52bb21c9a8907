"""Steps that are known: the same results, counts and errors as by the general code."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_toy import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    SPEC,
    Loop,
    PagedToy,
    make_builder,
    make_loop,
)

import compile_backend
from compile_backend import CUDAGraphMode, shortcuts
from compile_backend.attention.builder import AttentionBatch, AttentionMetadataBuilder
from compile_backend.attention.sdpa import SdpaAttention
from compile_backend.attention.spec import CacheFormat
from compile_backend.context import current_forward_context, get_forward_context
from compile_backend.errors import ConfigError
from compile_backend.known_steps import _MOST_KNOWN, KnownSteps
from compile_backend.runner import GraphModelRunner
from compile_backend.runner_batch import Batch
from compile_backend.step_inputs import Dim, InputSpec

if TYPE_CHECKING:
    from collections.abc import Callable

PIECEWISE = CUDAGraphMode.PIECEWISE


def in_arrays(batch: Batch) -> Batch:
    """The same batch as an engine would keep it."""
    attention = batch.attention
    return dataclasses.replace(
        batch,
        query_lens=np.asarray(batch.query_lens, np.int32),
        inputs={name: np.asarray(value) for name, value in batch.inputs.items()},
        attention=AttentionBatch(
            seq_lens=np.asarray(attention.seq_lens, np.int32),
            block_table=np.asarray(attention.block_table, np.int32),
            slot_mapping=attention.slot_mapping,
        ),
    )


on_each_device = pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "sdpa"),
        pytest.param("cuda", "triton", marks=pytest.mark.gpu),
        pytest.param("cuda", "sdpa", marks=pytest.mark.gpu),
    ],
)


def step_in_arrays(
    loop: Loop, work: list[tuple[int, int]] | None, *, highest_mode: Any = None
) -> None:
    """A step as an engine would give it, compared with the reference; a decode of all if None."""
    work = work or loop.grow(*range(len(loop.tokens)))
    logits = loop.runner.run(in_arrays(loop.batch(work)), highest_mode=highest_mode)
    for row, (request, count) in zip(logits, work, strict=True):
        loop.done[request] += count
        expected = loop.model.dense(loop.tokens[request][: loop.done[request]])
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)


def known_of(runner: GraphModelRunner) -> KnownSteps:
    captured = runner._captured
    assert captured is not None
    return captured.known


def prepared(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step that may be known: whether it was."""
    told: list[bool] = []
    original = KnownSteps.prepare

    def prepare(self: KnownSteps, batch: Batch, highest: Any) -> Any:
        step = original(self, batch, highest)
        told.append(step is not None)
        return step

    monkeypatch.setattr(KnownSteps, "prepare", prepare)
    return told


@on_each_device
def test_a_step_is_known_from_its_second_batch_on(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str
) -> None:
    told = prepared(monkeypatch)
    loop = make_loop("FULL", is_compiled=False, device=device, backend=backend)
    requests = [loop.add([1, 2, 3]), loop.add([4, 5, 6, 7])]
    for work in ([(requests[0], 3), (requests[1], 4)], *[None] * 4):
        step_in_arrays(loop, work)
    assert told == [False, False, True, True, True]
    assert loop.ran() == {"FULL": [2, 2, 2, 2, 8]}
    (counts,) = [c for (_, key), c in loop.runner.report().by_key.items() if key.num_tokens == 8]
    assert counts.padding == 1


def test_a_prompt_as_long_as_a_decode_is_told_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    told = prepared(monkeypatch)
    loop = make_loop(query_len=2, sizes=(2, 4))
    prompt, other = loop.add([1, 2]), loop.add([3, 4, 5, 6])
    for work in ([(other, 2)], [(other, 2)], [(prompt, 2)]):
        step_in_arrays(loop, work)
    # A prompt of two tokens, a decode of two, and a prompt again.
    assert loop.ran() == {"FULL": [2], "PIECEWISE": [2, 2]}
    assert told == [False, False, True]


def test_outputs_are_tensors_of_their_own() -> None:
    runner = simple_runner(lambda x: {"y": [x + 1], "z": (x, "name", 3)})
    batch = Batch(query_lens=np.array([2]), inputs={"x": np.array([5, 6])})
    first, second = runner.run(batch), runner.run(batch)
    third = runner.run(batch)
    assert second["y"][0] is not third["y"][0] is not first["y"][0]
    assert third["z"][1:] == ("name", 3)
    second["y"][0].resize_(0)
    second.clear()
    assert runner.run(batch)["y"][0].tolist() == [6, 7]


def simple_runner(model: Any, mode: str = "FULL", sizes: tuple[int, ...] = (2, 4)) -> Any:
    runner = GraphModelRunner(
        model,
        {"cudagraph_mode": mode, "cudagraph_capture_sizes": list(sizes)},
        input_spec=(InputSpec("x", (Dim.NUM_TOKENS,), torch.int64, pad=-7),),
        output_shape=(Dim.NUM_TOKENS,),
        max_num_seqs=4,
        max_num_batched_tokens=8,
        device="cpu",
    )
    runner.capture(progress=False)
    return runner


def test_padding_of_a_known_step_is_filled_again() -> None:
    runner = simple_runner(lambda x: x.sum()[None].expand(len(x)), sizes=(4,))
    sums = []
    for numbers in ([1, 2, 3, 4], [5], [6, 7, 8, 9], [6], [6, 7, 8, 9]):
        batch = Batch(query_lens=np.ones(len(numbers), int), inputs={"x": np.array(numbers)})
        sums.append(runner.run(batch)[0].item())
    assert sums == [10, 5 - 21, 30, 6 - 21, 30]
    assert len(known_of(runner)._known[None]) == 2


@pytest.mark.parametrize(
    "facts",
    [
        {"all_decode": True},
        {"all_decode": False},
        {"use_cascade_attn": True},
        {"num_active_loras": 1},
        {"extra": ("flag",)},
    ],
    ids=lambda facts: next(iter(facts)),
)
def test_a_batch_that_asks_for_more_is_left_to_the_general_code(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]
) -> None:
    told = prepared(monkeypatch)
    runner = simple_runner(lambda x: x + 1)
    batch = Batch(query_lens=np.array([1, 1]), inputs={"x": np.array([5, 6])})
    for _ in range(2):
        runner.run(batch)
    for _ in range(2):
        runner.run(dataclasses.replace(batch, **facts))
    runner.run(batch)
    assert told == [False, True, False, False, True]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("all_decode", "no"),
        ("all_decode", 0),
        ("use_cascade_attn", 0),
        ("use_cascade_attn", None),
        ("num_active_loras", False),
        ("num_active_loras", 0.0),
        ("extra", []),
        ("extra", ""),
    ],
)
@pytest.mark.parametrize("form", [list, np.array])
def test_a_field_of_another_type_is_refused_at_first_and_at_known_steps(
    field: str, value: Any, form: Any
) -> None:
    runner = simple_runner(lambda x: x + 1)
    batch = Batch(query_lens=form([1, 1]), inputs={"x": form([5, 6])})
    for _ in range(3):
        with pytest.raises(ConfigError) as caught:
            runner.run(dataclasses.replace(batch, **{field: value}))
        assert (caught.value.option, caught.value.value) == (field, value)
        assert runner.run(batch).tolist() == [6, 7]


def test_a_lower_mode_is_no_known_step() -> None:
    loop = make_loop("FULL_AND_PIECEWISE")
    request = loop.add([1, 2, 3])
    loop.step([(request, 3)])
    for highest in (None, PIECEWISE, None, PIECEWISE, None):
        step_in_arrays(loop, None, highest_mode=highest)
    assert loop.ran() == {"FULL": [1, 1, 1], "PIECEWISE": [1, 1, 4]}


@pytest.mark.parametrize("is_inference", [False, True])
@on_each_device
def test_pieces_are_known_and_right(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str, *, is_inference: bool
) -> None:
    told = prepared(monkeypatch)
    loop = make_loop("PIECEWISE", device=device, backend=backend)
    requests = [loop.add([1, 2, 3]), loop.add([4, 5, 6, 7]), loop.add([8])]
    loop.step([(requests[0], 3), (requests[1], 4), (requests[2], 1)])
    del told[:]
    for _ in range(6):
        with torch.inference_mode(is_inference):
            step_in_arrays(loop, None)
    # The first finds the plan of its key, the second learns it, the third is known.
    assert told == [False] * told.count(False) + [True] * told.count(True)
    assert told.count(True) >= 3
    assert loop.ran() == {"PIECEWISE": [4] * 6 + [8]}


def test_a_step_whose_pieces_changed_is_run_by_the_general_code() -> None:
    loop = make_loop("PIECEWISE")
    request = loop.add([1, 2, 3])
    loop.step([(request, 3)])
    for _ in range(4):
        step_in_arrays(loop, None)
    captured = loop.runner._captured
    assert captured is not None
    ((key, known),) = captured.known._known[None].items()
    compile_backend.reset(loop.runner.model)
    step_in_arrays(loop, None)
    assert key not in captured.known._known[None]
    for _ in range(3):
        step_in_arrays(loop, None)
    assert captured.known._known[None][key] is not known
    assert loop.ran() == {"PIECEWISE": [1] * 8 + [4]}


class Asking(SdpaAttention):
    """Calls somebody before it attends."""

    asked: Callable[[], object] = staticmethod(lambda: None)

    def forward(self, *args: Any) -> None:
        type(self).asked()
        super().forward(*args)


def asking_loop(monkeypatch: pytest.MonkeyPatch, asked: Callable[[], object]) -> Loop:
    """A loop whose steps at PIECEWISE are known, and call `asked` in each layer from now on."""
    cache = CacheFormat(block_size=BLOCK_SIZE, dtype=torch.float32, max_model_len=MAX_MODEL_LEN)
    backend = Asking(SPEC, cache, torch.device("cpu"))
    loop = make_loop("PIECEWISE", backend=lambda _: backend)
    loop.step([(loop.add([1, 2, 3]), 3)])
    for _ in range(4):
        step_in_arrays(loop, None)
    monkeypatch.setattr(Asking, "asked", staticmethod(asked))
    return loop


def test_what_attention_was_told_is_let_go_after_a_known_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[weakref.ref[Any]] = []

    def asked() -> None:
        metadata = get_forward_context().attn_metadata.metadata
        told.extend(map(weakref.ref, (metadata.host.seq_lens, metadata.host.block_table)))
        if len(told) > 4:
            raise KeyError("in the middle")

    loop = asking_loop(monkeypatch, asked)
    step_in_arrays(loop, None)
    with pytest.raises(KeyError, match="in the middle"):
        step_in_arrays(loop, None)
    assert current_forward_context() is None
    gc.collect()
    assert not any(ref() is not None for ref in told)
    monkeypatch.undo()
    step_in_arrays(loop, [(0, 1)])


def test_what_ops_leave_in_the_context_is_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def asked() -> None:
        extra: Any = get_forward_context().extra
        extra["layers"] = extra.get("layers", 0) + 1
        counted.append(extra["layers"])

    loop = asking_loop(monkeypatch, asked)
    for _ in range(3):
        step_in_arrays(loop, None)
    assert counted == [1, 2] * 3


def test_a_known_step_may_run_within_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[Batch] = []
    found: list[Any] = []

    def asked() -> None:
        if batches:
            batch = batches.pop()
            inner = loop.runner.run(batch)[0].clone()
            metadata = get_forward_context().attn_metadata.metadata
            found.append((inner, metadata.host.block_table is batch.attention.block_table))

    loop = asking_loop(monkeypatch, asked)
    for _ in range(2):
        work = loop.grow(0)
        batch = in_arrays(loop.batch(work))
        batches.append(batch)
        outer = loop.runner.run(batch)[0]
        loop.done[0] += 1
        expected = loop.model.dense(loop.tokens[0][: loop.done[0]])
        inner, is_own = found.pop()
        assert is_own
        for logits in (inner, outer):
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert current_forward_context() is None


def test_moved_weights_are_read_by_the_next_step() -> None:
    model = torch.nn.Linear(1, 1, bias=False).requires_grad_(requires_grad=False)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x[:, None].float())

    runner = simple_runner(Model())
    batch = Batch(query_lens=np.array([2]), inputs={"x": np.array([1, 2])})
    for value in (1.0, 3.0, 3.0):
        model.weight.data = torch.full((1, 1), value)
        for _ in range(3):
            assert runner.run(batch).flatten().tolist() == [value, 2 * value]
    assert len(known_of(runner)._known[None]) == 1


def test_kinds_of_batches_are_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _MOST_KNOWN >= 512  # of uniform decodes alone
    monkeypatch.setattr("compile_backend.known_steps._MOST_KNOWN", 3)
    runner = simple_runner(lambda x: x + 1)
    for lens in ([1], [2], [1, 1], [3], [1, 2], [4], [1, 1, 1], [1], [2]):
        for _ in range(2):
            numbers = np.arange(sum(lens))
            batch = Batch(query_lens=np.array(lens), inputs={"x": numbers})
            assert runner.run(batch).tolist() == (numbers + 1).tolist()
            assert len(known_of(runner)._known[None]) <= 3


class Doubling(AttentionMetadataBuilder):
    """Fills something else than it is told."""

    num_fills = 0

    def fill(self, *args: Any, **facts: Any) -> None:
        type(self).num_fills += 1
        super().fill(*args, **facts)


def test_a_builder_that_fills_otherwise_is_asked_in_every_step() -> None:
    model = PagedToy()
    plain = make_builder(model)
    builder = Doubling(plain.layers, plain._cache, 64)
    loop = make_loop("FULL", model, is_compiled=False, builder=builder)
    request = loop.add([1, 2, 3])
    loop.step([(request, 3)])
    Doubling.num_fills = 0
    for _ in range(3):
        step_in_arrays(loop, loop.grow(request))
    assert Doubling.num_fills == 3


@pytest.mark.parametrize("name", ["fill", "is_decode"])
def test_a_builder_whose_method_was_replaced_is_asked_in_every_step(name: str) -> None:
    loop = make_loop("FULL", is_compiled=False)
    builder: Any = loop.runner.builder
    calls = []
    original = getattr(builder, name)

    def replaced(*args: Any, **facts: Any) -> Any:
        calls.append(name)
        return original(*args, **facts)

    setattr(builder, name, replaced)
    request = loop.add([1, 2, 3])
    loop.step([(request, 3)])
    del calls[:]
    for _ in range(3):
        step_in_arrays(loop, loop.grow(request))
    assert calls == [name] * 3


def test_a_step_is_known_by_what_the_batch_was_before_it() -> None:
    """An engine may count its requests up in place as soon as their tokens are stored."""
    advance: list[Any] = []

    class Advancing(SdpaAttention):
        def forward(self, *args: Any) -> None:
            super().forward(*args)
            for lens in advance:
                np.add(lens, 1, out=lens)
            del advance[:]

    cache = CacheFormat(dtype=torch.float32, block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN)
    loop = make_loop(backend=lambda _: Advancing(SPEC, cache, torch.device("cpu")))
    for _ in range(5):  # prompts of one token
        batch = in_arrays(loop.batch([(loop.add([5]), 1)]))
        advance.append(batch.attention.seq_lens)
        loop.runner.run(batch)
    request = loop.add([5, 6, 7])
    loop.step([(request, 3)])
    for _ in range(3):
        step_in_arrays(loop, loop.grow(request))
    assert loop.ran() == {"PIECEWISE": [1] * 5 + [4], "FULL": [1] * 3}


def test_what_is_no_array_of_integers_is_never_known(monkeypatch: pytest.MonkeyPatch) -> None:
    told = prepared(monkeypatch)
    runner = GraphModelRunner(
        lambda x: x * 2,
        {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [2]},
        input_spec=(InputSpec("x", (Dim.NUM_TOKENS,), torch.float32),),
        output_shape=(Dim.NUM_TOKENS,),
        max_num_seqs=2,
        max_num_batched_tokens=2,
        device="cpu",
    )
    runner.capture(progress=False)
    batch = Batch(query_lens=np.array([2]), inputs={"x": np.array([0.5, 1.5])})
    for _ in range(3):
        assert runner.run(batch).tolist() == [1.0, 3.0]
    assert told == [False] * 3
    assert not known_of(runner)._known.get(None)


def test_inputs_that_cannot_be_put_leave_attention_filled() -> None:
    """The next step need not clear a block table that nobody wrote to."""
    loop = make_loop("FULL", is_compiled=False)
    request = loop.add([1, 2, 3])
    loop.step([(request, 3)])
    for _ in range(2):
        step_in_arrays(loop, loop.grow(request))
    inputs = loop.runner._parts.loader.inputs
    held = inputs.held
    assert held is not None
    batch = in_arrays(loop.batch(loop.grow(request)))
    odd_one = dataclasses.replace(batch, inputs={**batch.inputs, "tokens": [1]})
    assert known_of(loop.runner).prepare(odd_one, None) is None
    assert inputs.held is held
    wrong = AttentionBatch(seq_lens=np.array([99]), block_table=batch.attention.block_table)
    contradictory = dataclasses.replace(batch, attention=wrong)
    assert known_of(loop.runner).prepare(contradictory, None) is None
    assert inputs.held is None


def test_a_step_that_cannot_be_repeated_any_more_is_forgotten() -> None:
    loop = make_loop("PIECEWISE")
    request = loop.add([1, 2, 3])
    loop.step([(request, 3)])
    compiled = loop.runner._parts.compiled
    assert compiled is not None
    for _ in range(6):
        for _ in range(4):
            step_in_arrays(loop, None)
        compiled.graphs[0].graph._forget_plans()
    loop.runner.run(in_arrays(loop.batch(loop.grow(request))))
    assert not known_of(loop.runner)._known[None]


def test_numbers_that_run_python_lose_nothing() -> None:
    values = {"x": np.ones(1 << 16, np.int64)}

    held = np.zeros(1 << 16, np.int64)

    class Odd:
        def __index__(self) -> int:
            values.clear()
            return 0

    row: Any = ("x", held, 0, 0, Odd())
    assert shortcuts.put_inputs((row,), 1, values, 1 << 16, 1) == 0


def test_threads_take_turns() -> None:
    """A step waits for the device without Python's lock; what is known may be forgotten then."""
    runner = simple_runner(lambda x: x * 2)
    known = known_of(runner)
    batch = Batch(query_lens=np.array([2]), inputs={"x": np.array([5, 6])})
    runner.run(batch)
    stop = threading.Event()

    def forgetting() -> None:
        while not stop.is_set():
            known.forget()

    thread = threading.Thread(target=forgetting)
    thread.start()
    try:
        for _ in range(300):
            assert runner.run(batch).tolist() == [10, 12]
    finally:
        stop.set()
        thread.join()


# --- against the general code -----------------------------------------------------------------


@st.composite
def odd(draw: Any, batch: Batch) -> Batch:
    """A batch with one thing changed, which may make it wrong."""
    attention = batch.attention
    kind = draw(st.integers(0, 11))
    inputs = dict(batch.inputs)
    lens = batch.query_lens
    if kind == 0:
        inputs["tokens"] = inputs["tokens"].tolist()
    elif kind == 1:
        inputs["tokens"] = inputs["tokens"][:-1]
    elif kind == 2:
        inputs["more"] = inputs["tokens"]
    elif kind == 3:
        inputs["positions"] = inputs["positions"].astype(np.float32)
    elif kind == 4:
        attention = dataclasses.replace(attention, seq_lens=attention.seq_lens + 40)
    elif kind == 5:
        attention = dataclasses.replace(attention, block_table=attention.block_table + 60)
    elif kind == 6:
        attention = dataclasses.replace(attention, seq_lens=attention.seq_lens.tolist())
    elif kind == 7:
        lens = lens.astype(draw(st.sampled_from([np.int64, np.int16, np.float32])))
    elif kind == 8:
        attention = None
    elif kind == 9:
        slots = np.full(int(lens.sum()), draw(st.sampled_from([-1, -2])))
        attention = dataclasses.replace(attention, slot_mapping=slots)
    elif kind == 10:
        inputs = {name: torch.as_tensor(value) for name, value in inputs.items()}
    else:
        lens = np.append(lens, 0)
    return dataclasses.replace(batch, query_lens=lens, inputs=inputs, attention=attention)


def outcome(runner: GraphModelRunner, batch: Batch, highest: Any) -> Any:
    try:
        return runner.run(batch, highest_mode=highest).clone()
    except ValueError as error:
        return str(error)


@settings(max_examples=18, deadline=None, database=None)
@given(data=st.data())
def test_any_steps_are_those_of_the_general_code(data: Any) -> None:
    mode = data.draw(st.sampled_from(["FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]))
    query_len = data.draw(st.sampled_from([1, 2]))
    model = PagedToy()
    loops: list[Loop] = [
        make_loop(
            mode,
            model,
            is_compiled=mode == "FULL_AND_PIECEWISE",
            query_len=query_len,
            sizes=(2, 4, 8),
            limits=(3, 16),
        )
        for _ in range(2)
    ]
    for loop in loops:
        for length in (2, 3, 30):
            loop.add([(5 * i + length) % 37 for i in range(length + 12)])
    for _ in range(data.draw(st.integers(1, 8))):
        work = [
            (request, data.draw(st.sampled_from([query_len, query_len, 1, 3])))
            for request in data.draw(st.sampled_from([[0], [1], [0, 1], [0, 1, 2], [2]]))
        ]
        if any(loops[0].done[r] + n > len(loops[0].tokens[r]) for r, n in work):
            continue
        is_odd = data.draw(st.integers(0, 3)) == 0
        highest = data.draw(st.sampled_from([None, None, None, PIECEWISE]))
        plain = in_arrays(loops[0].batch(work))
        batch = data.draw(odd(plain)) if is_odd else plain
        again = data.draw(st.integers(1, 3))
        for _ in range(again):
            fast = outcome(loops[0].runner, batch, highest)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(shortcuts, "prepare", lambda *_: None)
                general = outcome(loops[1].runner, batch, highest)
            if isinstance(fast, str) or isinstance(general, str):
                assert fast == general
            else:
                torch.testing.assert_close(fast, general, rtol=0, atol=0)
        if not isinstance(fast, str):
            for loop in loops:
                for request, count in work:
                    loop.done[request] += count
        blocks = [loop.runner._parts.loader.inputs._host_bytes for loop in loops]
        if not isinstance(fast, str):
            assert blocks[0].tolist() == blocks[1].tolist()
        reports = [loop.runner.report().by_key for loop in loops]
        assert reports[0] == reports[1]
