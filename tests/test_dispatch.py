"""Every batch takes the strongest graph that fits, and every graph has its batches."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_backend.batch import BatchDescriptor, graph_key
from compile_backend.config import CompilationConfig, CUDAGraphMode
from compile_backend.dispatch import CudagraphDispatcher
from compile_backend.errors import CaptureError, ConfigError

NONE = CUDAGraphMode.NONE
PIECEWISE = CUDAGraphMode.PIECEWISE
FULL = CUDAGraphMode.FULL
FULL_DECODE_ONLY = CUDAGraphMode.FULL_DECODE_ONLY
FULL_AND_PIECEWISE = CUDAGraphMode.FULL_AND_PIECEWISE

MODES = list(CUDAGraphMode)
SIZES = [1, 2, 4, 8, 16, 24]


def dispatcher_of(
    mode: CUDAGraphMode,
    *,
    max_num_seqs: int = 256,
    query_len: int = 1,
    max_loras: int = 0,
    pad: bool = True,
    **options: Any,
) -> CudagraphDispatcher:
    dispatcher = CudagraphDispatcher(
        CompilationConfig.from_options(options),
        max_num_seqs=max_num_seqs,
        uniform_decode_query_len=query_len,
        max_loras=max_loras,
        pad=pad,
    )
    dispatcher.initialize_cudagraph_keys(mode)
    return dispatcher


def decode(num_reqs: int, query_len: int = 1, **fields: Any) -> BatchDescriptor:
    return BatchDescriptor(num_reqs * query_len, num_reqs, uniform=True, **fields)


@st.composite
def dispatchers(draw: st.DrawFn) -> tuple[CUDAGraphMode, int, int, int, CudagraphDispatcher]:
    mode = draw(st.sampled_from(MODES))
    max_num_seqs, query_len = draw(st.integers(1, 40)), draw(st.integers(1, 6))
    max_loras = draw(st.integers(0, 5))
    explicit = st.sets(st.integers(1, 96), min_size=1).map(lambda some: sorted({*some, 6}))
    options: dict[str, Any] = draw(
        st.one_of(
            st.just({}),
            st.fixed_dictionaries({"cudagraph_capture_sizes": explicit}),
            st.fixed_dictionaries({"max_cudagraph_capture_size": st.integers(6, 96)}),
        )
    )
    options["cudagraph_specialize_lora"] = draw(st.booleans())
    built = dispatcher_of(
        mode, max_num_seqs=max_num_seqs, query_len=query_len, max_loras=max_loras, **options
    )
    return mode, max_num_seqs, query_len, max_loras, built


@st.composite
def batches(draw: st.DrawFn, query_len: int, max_loras: int) -> BatchDescriptor:
    num_reqs = draw(st.integers(0, 60))
    most = 8 if draw(st.booleans()) else 1
    num_tokens = draw(
        st.one_of(st.just(num_reqs * query_len), st.integers(num_reqs, num_reqs * most))
    )
    count = draw(st.integers(0, max_loras))
    is_uniform = draw(st.booleans()) and num_tokens % max(1, num_reqs) == 0
    return BatchDescriptor(num_tokens, num_reqs, is_uniform, count > 0, count)


def all_keys(dispatcher: CudagraphDispatcher) -> list[tuple[CUDAGraphMode, BatchDescriptor]]:
    return [(mode, key) for mode, keys in dispatcher.capture_plan() for key in keys]


def fits(
    batch: BatchDescriptor, mode: CUDAGraphMode, key: BatchDescriptor, query_len: int
) -> bool:
    """The specification: whether a graph can run a batch."""
    is_decode = batch.uniform and batch.num_tokens == batch.num_reqs * query_len
    return (
        0 < batch.num_tokens <= key.num_tokens
        and batch.num_active_loras <= key.num_active_loras
        and (mode is PIECEWISE or batch.num_reqs <= key.num_reqs)
        and (is_decode or not key.uniform)
    )


# Properties.


@settings(max_examples=200)
@given(st.data(), dispatchers())
def test_a_batch_takes_the_strongest_mode_and_the_smallest_key_that_fits(data, drawn):
    _, max_num_seqs, query_len, max_loras, dispatcher = drawn
    batch = data.draw(batches(query_len, max_loras))
    chosen, key = dispatcher.dispatch(batch)
    fitting = [
        (runtime_mode.value, held)
        for runtime_mode, held in all_keys(dispatcher)
        if fits(batch, runtime_mode, held, query_len)
        and (runtime_mode is PIECEWISE or batch.num_reqs <= max_num_seqs)
    ]
    if not fitting:
        assert (chosen, key) == (NONE, batch)
        return
    strongest = max(value for value, _ in fitting)
    candidates = [held for value, held in fitting if value == strongest]
    loras = min(held.num_active_loras for held in candidates)
    smallest = min(held.num_tokens for held in candidates)
    assert chosen.value == strongest
    assert key in dispatcher.keys(chosen)
    assert (key.num_tokens, key.num_active_loras) == (smallest, loras)


@given(st.data(), dispatchers())
def test_none_is_returned_unpadded(data, drawn):
    _, _, query_len, max_loras, dispatcher = drawn
    batch = data.draw(batches(query_len, max_loras))
    chosen, key = dispatcher.dispatch(batch, highest_mode=NONE)
    assert chosen is NONE
    assert key is batch


@given(st.data(), dispatchers())
def test_dispatch_never_picks_a_mode_that_was_not_resolved(data, drawn):
    mode, _, query_len, max_loras, dispatcher = drawn
    batch = data.draw(batches(query_len, max_loras))
    chosen, _ = dispatcher.dispatch(
        batch,
        use_cascade_attn=data.draw(st.booleans()),
        all_decode=data.draw(st.sampled_from([None, True, False])),
        highest_mode=data.draw(st.sampled_from([None, NONE, PIECEWISE, FULL])),
    )
    assert chosen is NONE or mode.has_mode(chosen)


@given(dispatchers())
def test_every_key_is_reachable_and_is_its_own_normal_form(drawn):
    *_, dispatcher = drawn
    for mode, key in all_keys(dispatcher):
        assert graph_key(mode, key) == key
        assert dispatcher.dispatch(key, highest_mode=mode) == (mode, key)


@given(st.data(), dispatchers())
def test_every_batch_in_range_hits_a_key(data, drawn):
    mode, max_num_seqs, query_len, max_loras, dispatcher = drawn
    keys = [key for _, key in all_keys(dispatcher)]
    uniform = max((key.num_tokens for key in keys if key.uniform), default=0)
    mixed = max((key.num_tokens for key in keys if not key.uniform), default=0)
    count = data.draw(st.integers(0, max_loras))
    lora = {"has_lora": count > 0, "num_active_loras": count}
    if uniform or mixed >= query_len:
        most = max(uniform, mixed) // query_len
        num_reqs = data.draw(st.integers(1, min(most, max_num_seqs)))
        assert dispatcher.dispatch(decode(num_reqs, query_len, **lora))[0] is mode.decode_mode()
    if mixed:
        num_tokens = data.draw(st.integers(1, mixed))
        num_reqs = data.draw(st.integers(1, min(num_tokens, max_num_seqs)))
        batch = BatchDescriptor(num_tokens, num_reqs, **lora)
        assert dispatcher.dispatch(batch)[0] is mode.mixed_mode()


@given(st.data(), dispatchers())
def test_highest_mode_caps_and_a_second_dispatch_of_the_answer_changes_nothing(data, drawn):
    _, _, query_len, max_loras, dispatcher = drawn
    cap = data.draw(st.sampled_from([NONE, PIECEWISE, FULL]))
    chosen, key = dispatcher.dispatch(data.draw(batches(query_len, max_loras)), highest_mode=cap)
    assert chosen.value <= cap.value
    assert dispatcher.dispatch(key, highest_mode=chosen) == (chosen, key)


# Keys.


@pytest.mark.parametrize("mode", MODES)
def test_keys_of_every_mode_without_speculation(mode):
    dispatcher = dispatcher_of(mode, max_num_seqs=2, cudagraph_capture_sizes=[1, 2, 4])
    uniform = {BatchDescriptor(1, 1, uniform=True), BatchDescriptor(2, 2, uniform=True)}
    whole = {BatchDescriptor(1, 1), BatchDescriptor(2, 2), BatchDescriptor(4, 2)}
    pieces = {BatchDescriptor(n, n) for n in (1, 2, 4)}
    expected = {
        NONE: (set(), set()),
        PIECEWISE: (pieces, set()),
        FULL: (set(), whole),
        FULL_DECODE_ONLY: (set(), uniform),
        FULL_AND_PIECEWISE: (pieces, uniform),
    }
    assert (dispatcher.keys(PIECEWISE), dispatcher.keys(FULL)) == expected[mode]
    assert dispatcher.keys(NONE) == frozenset()


@pytest.mark.parametrize("mode", MODES)
def test_speculation_rounds_uniform_keys_and_leaves_the_mixed_ladder_alone(mode):
    dispatcher = dispatcher_of(mode, query_len=4, cudagraph_capture_sizes=SIZES)
    keys = [key for _, key in all_keys(dispatcher)]
    uniform = sorted(key.num_tokens for key in keys if key.uniform)
    mixed = sorted(key.num_tokens for key in keys if not key.uniform)
    assert uniform == ([4, 8, 16, 24] if mode.separate_routine() else [])
    assert mixed == ([] if mode.mixed_mode() is NONE else SIZES)


def test_the_largest_speculating_batch_has_a_uniform_key():
    """32 requests of 17 tokens are more than the default maximum."""
    dispatcher = dispatcher_of(FULL_AND_PIECEWISE, max_num_seqs=32, query_len=17)
    batch = decode(32, 17)
    assert dispatcher.dispatch(batch) == (FULL, batch)


@pytest.mark.parametrize("maximum", [42, 257, 300])
@pytest.mark.parametrize("mode", [PIECEWISE, FULL, FULL_AND_PIECEWISE])
def test_the_maximum_itself_is_captured(mode, maximum):
    dispatcher = dispatcher_of(mode, max_cudagraph_capture_size=maximum)
    chosen, key = dispatcher.dispatch(BatchDescriptor(maximum, 1))
    assert (chosen, key.num_tokens) == (mode.mixed_mode(), maximum)


@pytest.mark.parametrize("mode", [m for m in MODES if m is not NONE])
@pytest.mark.parametrize("num_reqs", [9, 10, 11, 12])
def test_batches_up_to_max_num_seqs_have_a_graph_between_two_steps(mode, num_reqs):
    dispatcher = dispatcher_of(mode, max_num_seqs=12)
    chosen, key = dispatcher.dispatch(decode(num_reqs))
    assert (chosen, key.num_tokens) == (mode.decode_mode(), 12)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_and_one_above_the_maximum_run_without_a_graph(mode):
    dispatcher = dispatcher_of(mode, cudagraph_capture_sizes=SIZES)
    for batch in (BatchDescriptor(0, 0), decode(0), BatchDescriptor(25, 3), decode(25)):
        assert dispatcher.dispatch(batch) == (NONE, batch)


def test_sizes_too_small_for_one_decoding_request_are_refused():
    problem = "is too small for one decoding request of 4 tokens"
    with pytest.raises(ConfigError, match=rf"cudagraph_capture_sizes=\(1, 2\) {problem}; add 4"):
        dispatcher_of(FULL_AND_PIECEWISE, query_len=4, cudagraph_capture_sizes=[1, 2])
    dispatcher_of(PIECEWISE, query_len=4, cudagraph_capture_sizes=[1, 2])
    with pytest.raises(ConfigError, match=f"max_cudagraph_capture_size=3 {problem}; use 4 or"):
        dispatcher_of(FULL_AND_PIECEWISE, query_len=4, max_cudagraph_capture_size=3)
    dispatcher_of(PIECEWISE, query_len=4, max_cudagraph_capture_size=3)


def test_more_guesses_than_requests_leave_decodes_a_size():
    dispatcher = dispatcher_of(FULL_AND_PIECEWISE, query_len=301, max_num_seqs=4)
    for num_reqs in (1, 2, 4):
        batch = BatchDescriptor(301 * num_reqs, num_reqs, uniform=True)
        assert dispatcher.dispatch(batch) == (FULL, batch)


def test_capture_plan_is_largest_first_for_each_mode():
    dispatcher = dispatcher_of(
        FULL_AND_PIECEWISE, query_len=3, max_num_seqs=8, cudagraph_capture_sizes=SIZES
    )
    (pieces_mode, pieces), (full_mode, full) = dispatcher.capture_plan()
    assert (pieces_mode, full_mode) == (PIECEWISE, FULL)
    assert [key.num_tokens for key in pieces] == SIZES[::-1]
    assert [key.num_tokens for key in full] == [24, 18, 9, 6, 3]
    assert dispatcher_of(NONE).capture_plan() == []


def test_keys_are_made_anew_for_another_mode_or_query_length():
    dispatcher = dispatcher_of(FULL, cudagraph_capture_sizes=SIZES)
    dispatcher.initialize_cudagraph_keys(FULL_DECODE_ONLY, 4)
    assert {key.num_tokens for key in dispatcher.keys(FULL)} == {4, 8, 16, 24}
    assert dispatcher.dispatch(decode(2, 4)) == (FULL, decode(2, 4))
    assert dispatcher.dispatch(decode(8))[0] is NONE


def test_a_failed_initialisation_leaves_the_keys_as_they_were():
    dispatcher = dispatcher_of(FULL_DECODE_ONLY, cudagraph_capture_sizes=[1, 2])
    with pytest.raises(ConfigError):
        dispatcher.initialize_cudagraph_keys(FULL_DECODE_ONLY, 4)
    assert dispatcher.dispatch(decode(2)) == (FULL, decode(2))


def test_two_models_with_their_own_query_lengths_do_not_share_keys():
    """A target that verifies three guesses, and a drafter that makes them one by one."""
    target = dispatcher_of(FULL_DECODE_ONLY, query_len=4, cudagraph_capture_sizes=SIZES)
    drafter = dispatcher_of(FULL_DECODE_ONLY, query_len=1, cudagraph_capture_sizes=SIZES)
    assert target.dispatch(decode(2, 4)) == (FULL, decode(2, 4))
    assert drafter.dispatch(decode(2)) == (FULL, decode(2))
    assert target.dispatch(decode(2))[0] is NONE


@pytest.mark.parametrize("mode", MODES)
def test_modes_may_be_given_by_name(mode):
    by_name, by_member = dispatcher_of(mode.name.lower()), dispatcher_of(mode)
    assert all_keys(by_name) == all_keys(by_member)
    assert by_name.keys("full") == by_member.keys(FULL)
    for highest in (NONE, PIECEWISE, FULL):
        route = by_name.dispatch(decode(4), highest_mode=highest.name)
        assert route == by_member.dispatch(decode(4), highest_mode=highest)
    for other in ("HALF", 2, "FULL_DECODE_ONLY", FULL_AND_PIECEWISE):
        with pytest.raises(ConfigError, match=r"highest_mode=.* is no mode of a single batch"):
            by_name.dispatch(decode(4), highest_mode=other)
        with pytest.raises(ConfigError, match=r"mode=.* is no mode of a single batch; use NONE"):
            by_name.keys(other)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("limit", ["max_num_seqs", "query_len", "max_loras"])
def test_limits_that_no_table_can_hold_are_refused_at_once(limit):
    with pytest.raises(ConfigError, match=r"=1000000000 is more than 1048576"):
        dispatcher_of(FULL, **{limit: 10**9})


# Which key.


@pytest.mark.parametrize("num_reqs", range(1, 9))
def test_a_uniform_batch_takes_a_full_key_even_if_a_piecewise_size_is_smaller(num_reqs):
    dispatcher = dispatcher_of(FULL_AND_PIECEWISE, query_len=3, cudagraph_capture_sizes=SIZES)
    num_tokens = 3 * num_reqs
    chosen, key = dispatcher.dispatch(decode(num_reqs, 3))
    smallest = min(size for size in (3, 6, 9, 18, 24) if size >= num_tokens)
    assert (chosen, key) == (FULL, decode(smallest // 3, 3))


@pytest.mark.parametrize("mode", MODES)
def test_a_uniform_batch_takes_a_mixed_full_key_where_there_is_no_uniform_one(mode):
    dispatcher = dispatcher_of(mode, query_len=3, cudagraph_capture_sizes=SIZES)
    chosen, key = dispatcher.dispatch(decode(2, 3))
    assert chosen is mode.decode_mode()
    if mode is FULL:
        assert key == BatchDescriptor(8, 8)


@pytest.mark.parametrize(
    ("batch", "is_decode"),
    [
        (BatchDescriptor(6, 1, uniform=True), True),
        (BatchDescriptor(12, 2, uniform=True), True),
        (BatchDescriptor(7, 1, uniform=True), False),
        (BatchDescriptor(12, 1, uniform=True), False),
        (BatchDescriptor(12, 6, uniform=True), False),
        (BatchDescriptor(42, 6, uniform=True), False),
        (BatchDescriptor(36, 6, uniform=True), True),
        (BatchDescriptor(6, 1, uniform=False), False),
    ],
)
def test_only_full_query_lengths_are_uniform_decode(batch, is_decode):
    """Query length 6: 42 tokens of 6 requests are not 6 x 6, and 7 tokens of one are not 6."""
    dispatcher = dispatcher_of(
        FULL_AND_PIECEWISE, query_len=6, cudagraph_capture_sizes=[6, 12, 36, 48]
    )
    assert dispatcher.dispatch(batch)[0] is (FULL if is_decode else PIECEWISE)


def test_seven_tokens_of_one_request_take_the_next_mixed_size():
    dispatcher = dispatcher_of(FULL_AND_PIECEWISE, query_len=6, cudagraph_capture_sizes=[6, 12])
    batch = BatchDescriptor(7, 1, uniform=True)
    assert dispatcher.dispatch(batch) == (PIECEWISE, BatchDescriptor(12, 12))
    batch = BatchDescriptor(42, 6, uniform=True)
    assert dispatcher.dispatch(batch) == (NONE, batch)


def test_a_prompt_as_long_as_a_decode_step_is_not_decode():
    dispatcher = dispatcher_of(FULL_AND_PIECEWISE, query_len=4, cudagraph_capture_sizes=SIZES)
    batch = decode(1, 4)
    assert dispatcher.dispatch(batch, all_decode=True)[0] is FULL
    assert dispatcher.dispatch(batch, all_decode=False) == (PIECEWISE, BatchDescriptor(4, 4))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batch", [decode(4), BatchDescriptor(4, 2)])
def test_cascade_attention_never_runs_as_one_graph(mode, batch):
    dispatcher = dispatcher_of(mode, cudagraph_capture_sizes=SIZES)
    chosen, _ = dispatcher.dispatch(batch, use_cascade_attn=True)
    assert chosen is (PIECEWISE if mode.has_piecewise_cudagraphs() else NONE)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_with_hooks_around_attention_is_capped_at_piecewise(mode):
    dispatcher = dispatcher_of(mode, cudagraph_capture_sizes=SIZES)
    chosen, _ = dispatcher.dispatch(decode(4), highest_mode=PIECEWISE)
    assert chosen is (PIECEWISE if mode.has_piecewise_cudagraphs() else NONE)


def test_more_requests_than_allowed_never_run_as_one_graph():
    """The buffers of a whole graph hold max_num_seqs requests; pieces do not care."""
    dispatcher = dispatcher_of(FULL_AND_PIECEWISE, max_num_seqs=4, cudagraph_capture_sizes=SIZES)
    assert dispatcher.dispatch(decode(5)) == (PIECEWISE, BatchDescriptor(8, 8))
    dispatcher = dispatcher_of(FULL, max_num_seqs=4, cudagraph_capture_sizes=SIZES)
    assert dispatcher.dispatch(decode(5)) == (NONE, decode(5))


def test_without_padding_only_exact_sizes_have_a_graph():
    dispatcher = dispatcher_of(FULL_AND_PIECEWISE, pad=False, cudagraph_capture_sizes=SIZES)
    assert dispatcher.dispatch(decode(4)) == (FULL, decode(4))
    assert dispatcher.dispatch(BatchDescriptor(4, 1)) == (PIECEWISE, BatchDescriptor(4, 4))
    for batch in (decode(5), BatchDescriptor(5, 1)):
        assert dispatcher.dispatch(batch) == (NONE, batch)


def test_a_flag_that_changes_the_control_flow_is_part_of_the_key():
    dispatcher = dispatcher_of(FULL_AND_PIECEWISE, cudagraph_capture_sizes=SIZES)
    for batch, padded in ((decode(3), decode(4)), (BatchDescriptor(3, 1), BatchDescriptor(4, 4))):
        mode, key = dispatcher.dispatch(batch._replace(extra=("flag",)))
        other_mode, other = dispatcher.dispatch(batch)
        assert mode is other_mode
        assert key == padded._replace(extra=("flag",))
        assert other == padded


def test_the_common_path_returns_an_answer_made_beforehand():
    """Nothing is computed or allocated per step: the answer is the same object each time."""
    dispatcher = dispatcher_of(FULL_AND_PIECEWISE, query_len=3)
    for first, second in (
        (decode(5, 3), decode(5, 3)),
        (decode(5, 3), decode(6, 3)),
        (BatchDescriptor(100, 3), BatchDescriptor(101, 7)),
    ):
        assert dispatcher.dispatch(first) is dispatcher.dispatch(second)


# Adapters.


@pytest.mark.parametrize(
    ("num_active_loras", "taken"), [(0, 0), (1, 1), (2, 2), (3, 4), (4, 4), (5, 6), (6, 6)]
)
def test_a_missing_count_of_adapters_goes_to_the_next_higher(num_active_loras, taken):
    dispatcher = dispatcher_of(FULL, max_loras=6, cudagraph_capture_sizes=SIZES)
    batch = BatchDescriptor(3, 1, False, num_active_loras > 0, num_active_loras)
    assert dispatcher.dispatch(batch) == (FULL, BatchDescriptor(4, 4, False, taken > 0, taken))


def test_without_specialisation_one_family_serves_every_count():
    dispatcher = dispatcher_of(
        FULL, max_loras=6, cudagraph_specialize_lora=False, cudagraph_capture_sizes=SIZES
    )
    assert len(dispatcher.keys(FULL)) == len(SIZES)
    for count in range(7):
        batch = BatchDescriptor(3, 1, False, count > 0, count)
        assert dispatcher.dispatch(batch) == (FULL, BatchDescriptor(4, 4, False, True, 6))


def test_adapters_nobody_counted_take_the_keys_for_most():
    dispatcher = dispatcher_of(FULL, max_loras=6, cudagraph_capture_sizes=SIZES)
    _, key = dispatcher.dispatch(BatchDescriptor(3, 1, has_lora=True))
    assert key.num_active_loras == 6


@pytest.mark.parametrize("max_loras", [0, 2])
def test_more_adapters_than_allowed_run_without_a_graph(max_loras):
    dispatcher = dispatcher_of(FULL, max_loras=max_loras, cudagraph_capture_sizes=SIZES)
    batch = BatchDescriptor(3, 1, False, True, 3)
    assert dispatcher.dispatch(batch) == (NONE, batch)


def test_adapters_without_a_limit_run_without_a_graph():
    batch = BatchDescriptor(3, 1, has_lora=True)
    assert dispatcher_of(FULL, cudagraph_capture_sizes=SIZES).dispatch(batch) == (NONE, batch)


# Misuse.


def test_nothing_can_be_asked_before_there_are_keys():
    dispatcher = CudagraphDispatcher(CompilationConfig(), max_num_seqs=8)
    for ask in (
        lambda: dispatcher.dispatch(decode(1)),
        lambda: dispatcher.dispatch(decode(1), highest_mode=NONE),
        lambda: dispatcher.keys(FULL),
        dispatcher.capture_plan,
    ):
        with pytest.raises(CaptureError, match="initialize_cudagraph_keys"):
            ask()


@pytest.mark.parametrize(
    "batch",
    [
        BatchDescriptor(-1, 0),
        BatchDescriptor(2, 3),
        BatchDescriptor(100, 101),
        BatchDescriptor(2, -1),
        BatchDescriptor(2, 1, num_active_loras=-1),
        BatchDescriptor(3, 4, uniform=True),
        BatchDescriptor(5, 2, uniform=True),
        BatchDescriptor(2.0, 1),
        BatchDescriptor(2, 1, uniform="no"),
        (2, 1),
    ],
)
@pytest.mark.parametrize("highest_mode", [None, PIECEWISE, NONE])
def test_contradictory_batches_are_refused_at_every_mode(batch, highest_mode):
    dispatcher = dispatcher_of(FULL_AND_PIECEWISE, cudagraph_capture_sizes=SIZES)
    with pytest.raises(ConfigError, match=r" is | contradicts "):
        dispatcher.dispatch(batch, highest_mode=highest_mode)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"all_decode": "no"}, "all_decode='no' is no bool; use True or False, or None"),
        ({"all_decode": 0}, "all_decode=0 is no bool; use True or False, or None"),
        ({"use_cascade_attn": "no"}, "use_cascade_attn='no' is no bool; use True or False"),
        ({"use_cascade_attn": None}, "use_cascade_attn=None is no bool; use True or False"),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [decode(2), BatchDescriptor(99, 3)])
def test_flags_that_are_no_bools_are_refused(flags, message, batch):
    dispatcher = dispatcher_of(FULL_AND_PIECEWISE, cudagraph_capture_sizes=SIZES)
    with pytest.raises(ConfigError) as caught:
        dispatcher.dispatch(batch, **flags)
    assert str(caught.value) == message


def test_flags_of_numpy_are_flags():
    dispatcher = dispatcher_of(FULL_AND_PIECEWISE, cudagraph_capture_sizes=SIZES)
    for flags in ({"all_decode": np.bool_(False)}, {"use_cascade_attn": np.bool_(True)}):
        assert dispatcher.dispatch(decode(2), **flags)[0] is PIECEWISE


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_num_seqs", 0), ("uniform_decode_query_len", 0), ("max_loras", -1)],
)
def test_impossible_limits_are_refused(option, value):
    limits = {"max_num_seqs": 8, "uniform_decode_query_len": 1, "max_loras": 0, option: value}
    with pytest.raises(ConfigError, match=f"{option}={value}"):
        CudagraphDispatcher(CompilationConfig(), **limits)
    dispatcher = CudagraphDispatcher(CompilationConfig(), max_num_seqs=8)
    with pytest.raises(ConfigError, match="uniform_decode_query_len=0"):
        dispatcher.initialize_cudagraph_keys(FULL, 0)
