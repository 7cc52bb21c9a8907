"""The mode asked for becomes the strongest one that can be captured."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_backend.config import CUDAGraphMode
from compile_backend.errors import ConfigError
from compile_backend.resolve import RULES, default_mode, resolve_cudagraph_mode
from compile_backend.support import AttentionCGSupport, lowest

NONE = CUDAGraphMode.NONE
PIECEWISE = CUDAGraphMode.PIECEWISE
FULL = CUDAGraphMode.FULL
FULL_DECODE_ONLY = CUDAGraphMode.FULL_DECODE_ONLY
FULL_AND_PIECEWISE = CUDAGraphMode.FULL_AND_PIECEWISE

NEVER = AttentionCGSupport.NEVER
SINGLE = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
UNIFORM = AttentionCGSupport.UNIFORM_BATCH
ALWAYS = AttentionCGSupport.ALWAYS

UNCAPTURABLE, NO_PIECES, NO_PIECES_BUT_WHOLE, MIXED_FULL, FULL_NEVER, FULL_SPECULATING = RULES

modes = st.sampled_from(CUDAGraphMode)
levels = st.sampled_from(AttentionCGSupport)
query_lens = st.integers(1, 8)


def strength(mode: CUDAGraphMode) -> int:
    """How strong the mode of one batch is; only those of a single batch are numbers."""
    assert mode.is_valid_runtime_mode()
    return int(mode.value)


def can_capture(
    mode: CUDAGraphMode,
    *,
    mixed: bool,
    support: AttentionCGSupport,
    piecewise: bool,
    query_len: int,
) -> bool:
    """The specification: whether batches of one kind can run at a mode of a single batch."""
    if mode is PIECEWISE:
        return piecewise
    if mode is FULL:
        needed = ALWAYS if mixed else SINGLE if query_len == 1 else UNIFORM
        return support >= needed
    return True


@given(modes, levels, st.booleans(), query_lens)
def test_mode_and_level_may_be_given_by_name(mode, level, piecewise, query_len):
    facts = {"piecewise": piecewise, "uniform_decode_query_len": query_len}
    by_name = resolve_cudagraph_mode(mode.name.lower(), level.name, **facts)
    assert by_name == resolve_cudagraph_mode(mode, level, **facts)


@pytest.mark.parametrize("arguments", [("HALF", "ALWAYS"), ("FULL", "HALF")])
def test_what_is_no_mode_or_level_is_refused(arguments):
    option = "requested" if arguments[0] == "HALF" else "support"
    with pytest.raises(ConfigError, match=f"^{option}='HALF' is not a"):
        resolve_cudagraph_mode(*arguments, piecewise=True)


@pytest.mark.parametrize(
    ("requested", "support", "piecewise", "query_len", "mode", "rules"),
    [
        (NONE, NEVER, False, 1, NONE, []),
        (NONE, ALWAYS, True, 1, NONE, []),
        # Nothing is split out.
        (PIECEWISE, ALWAYS, False, 1, NONE, [NO_PIECES]),
        (FULL_AND_PIECEWISE, ALWAYS, False, 1, FULL, [NO_PIECES_BUT_WHOLE]),
        (
            FULL_AND_PIECEWISE,
            UNIFORM,
            False,
            1,
            FULL_DECODE_ONLY,
            [NO_PIECES_BUT_WHOLE, MIXED_FULL],
        ),
        (
            FULL_AND_PIECEWISE,
            NEVER,
            False,
            1,
            NONE,
            [NO_PIECES_BUT_WHOLE, MIXED_FULL, FULL_NEVER],
        ),
        # Mixed batches cannot be captured as a whole.
        (FULL, UNIFORM, True, 4, FULL_AND_PIECEWISE, [MIXED_FULL]),
        (FULL, UNIFORM, False, 4, FULL_DECODE_ONLY, [MIXED_FULL]),
        (FULL, SINGLE, True, 1, FULL_AND_PIECEWISE, [MIXED_FULL]),
        # No batch can be captured as a whole.
        (FULL, NEVER, True, 1, PIECEWISE, [MIXED_FULL, FULL_NEVER]),
        (FULL, NEVER, False, 1, NONE, [MIXED_FULL, FULL_NEVER]),
        (FULL_DECODE_ONLY, NEVER, True, 1, PIECEWISE, [FULL_NEVER]),
        (FULL_DECODE_ONLY, NEVER, False, 1, NONE, [FULL_NEVER]),
        (FULL_AND_PIECEWISE, NEVER, True, 1, PIECEWISE, [FULL_NEVER]),
        # Decode batches with several tokens per request cannot.
        (FULL_AND_PIECEWISE, SINGLE, True, 2, PIECEWISE, [FULL_SPECULATING]),
        (FULL_DECODE_ONLY, SINGLE, False, 2, NONE, [FULL_SPECULATING]),
        (FULL, SINGLE, True, 2, PIECEWISE, [MIXED_FULL, FULL_SPECULATING]),
        # As asked for.
        (PIECEWISE, NEVER, True, 2, PIECEWISE, []),
        (FULL, ALWAYS, False, 4, FULL, []),
        (FULL, ALWAYS, True, 4, FULL, []),
        (FULL_DECODE_ONLY, SINGLE, False, 1, FULL_DECODE_ONLY, []),
        (FULL_AND_PIECEWISE, SINGLE, True, 1, FULL_AND_PIECEWISE, []),
        (FULL_AND_PIECEWISE, UNIFORM, True, 4, FULL_AND_PIECEWISE, []),
    ],
)
def test_rules(requested, support, piecewise, query_len, mode, rules):
    resolution = resolve_cudagraph_mode(
        requested, support, piecewise=piecewise, uniform_decode_query_len=query_len
    )
    assert resolution.mode is mode
    assert [step.reason for step in resolution.downgrades] == [rule.reason for rule in rules]


@pytest.mark.parametrize("mode", CUDAGraphMode)
@pytest.mark.parametrize("level", AttentionCGSupport)
@pytest.mark.parametrize("piecewise", [True, False])
def test_a_piece_that_no_graph_can_hold_rules_out_full_graphs_and_says_which(
    mode, level, piecewise
):
    why = "piece_3 works on cpu"
    resolution = resolve_cudagraph_mode(mode, level, piecewise=piecewise, uncapturable=why)
    assert not resolution.mode.has_full_cudagraphs()
    told = [step for step in resolution.downgrades if step.reason == UNCAPTURABLE.reason]
    assert len(told) == mode.has_full_cudagraphs()
    assert all(str(step).endswith(f"no graph can hold: {why}") for step in told)
    if told:
        assert resolution.downgrades == tuple(told)
        assert resolution.mode is (PIECEWISE if piecewise else NONE)
        with pytest.raises(ConfigError, match=why):
            resolve_cudagraph_mode(mode, level, piecewise=piecewise, uncapturable=why, strict=True)


def test_every_rule_has_its_own_reason():
    assert len({rule.reason for rule in RULES}) == len(RULES)


@given(modes, levels, st.booleans(), query_lens)
def test_resolution_is_idempotent(requested, support, piecewise, query_len):
    once = resolve_cudagraph_mode(
        requested, support, piecewise=piecewise, uniform_decode_query_len=query_len
    )
    twice = resolve_cudagraph_mode(
        once.mode, support, piecewise=piecewise, uniform_decode_query_len=query_len
    )
    assert twice.mode is once.mode
    assert twice.downgrades == ()


@given(modes, levels, st.booleans(), query_lens)
def test_the_result_is_supported_and_asks_for_no_missing_pieces(
    requested, support, piecewise, query_len
):
    mode = resolve_cudagraph_mode(
        requested, support, piecewise=piecewise, uniform_decode_query_len=query_len
    ).mode
    assert piecewise or not mode.has_piecewise_cudagraphs()
    for kind, is_mixed in ((mode.decode_mode(), False), (mode.mixed_mode(), True)):
        assert can_capture(
            kind, mixed=is_mixed, support=support, piecewise=piecewise, query_len=query_len
        )


@given(modes, levels, levels, st.booleans(), st.booleans(), query_lens)
def test_more_support_or_pieces_never_weaken_decode_batches(
    requested, support, other_support, piecewise, other_piecewise, query_len
):
    weak = resolve_cudagraph_mode(
        requested,
        min(support, other_support),
        piecewise=piecewise and other_piecewise,
        uniform_decode_query_len=query_len,
    )
    strong = resolve_cudagraph_mode(
        requested,
        max(support, other_support),
        piecewise=piecewise or other_piecewise,
        uniform_decode_query_len=query_len,
    )
    assert strength(weak.mode.decode_mode()) <= strength(strong.mode.decode_mode())


@given(levels, st.booleans(), query_lens)
def test_none_stays_none(support, piecewise, query_len):
    resolution = resolve_cudagraph_mode(
        NONE, support, piecewise=piecewise, uniform_decode_query_len=query_len
    )
    assert resolution.mode is NONE
    assert resolution.downgrades == ()


@given(modes, levels, st.booleans(), query_lens)
def test_never_none_while_something_supported_was_asked_for(
    requested, support, piecewise, query_len
):
    mode = resolve_cudagraph_mode(
        requested, support, piecewise=piecewise, uniform_decode_query_len=query_len
    ).mode
    asked = ((requested.decode_mode(), False), (requested.mixed_mode(), True))
    has_some = any(
        kind is not NONE
        and can_capture(
            kind, mixed=is_mixed, support=support, piecewise=piecewise, query_len=query_len
        )
        for kind, is_mixed in asked
    )
    assert mode is not NONE or not has_some


@given(modes, levels, st.booleans(), query_lens)
def test_every_change_has_a_reason_and_the_steps_are_a_chain(
    requested, support, piecewise, query_len
):
    resolution = resolve_cudagraph_mode(
        requested, support, piecewise=piecewise, uniform_decode_query_len=query_len
    )
    mode = requested
    for step in resolution.downgrades:
        assert step.before is mode
        assert step.after is not mode
        assert step.reason
        mode = step.after
    assert mode is resolution.mode


@given(modes, levels, st.booleans(), query_lens)
def test_strict_raises_where_the_mode_would_be_lowered(requested, support, piecewise, query_len):
    resolution = resolve_cudagraph_mode(
        requested, support, piecewise=piecewise, uniform_decode_query_len=query_len
    )
    if not resolution.downgrades:
        assert resolution == resolve_cudagraph_mode(
            requested,
            support,
            piecewise=piecewise,
            uniform_decode_query_len=query_len,
            strict=True,
        )
        return
    with pytest.raises(ConfigError) as caught:
        resolve_cudagraph_mode(
            requested,
            support,
            piecewise=piecewise,
            uniform_decode_query_len=query_len,
            strict=True,
        )
    assert all(step.reason in caught.value.problem for step in resolution.downgrades)
    assert caught.value.fix == f"use {resolution.mode.name}"


def test_the_weakest_attention_of_a_hybrid_model_decides():
    support = lowest([ALWAYS, SINGLE, UNIFORM])
    assert resolve_cudagraph_mode(FULL, support, piecewise=True).mode is FULL_AND_PIECEWISE
    support = lowest([ALWAYS, NEVER])
    assert resolve_cudagraph_mode(FULL, support, piecewise=True).mode is PIECEWISE


def test_nothing_split_out_turns_pieces_off_and_captures_the_whole():
    assert resolve_cudagraph_mode(PIECEWISE, ALWAYS, piecewise=False).mode is NONE
    assert resolve_cudagraph_mode(FULL_AND_PIECEWISE, ALWAYS, piecewise=False).mode is FULL


def test_a_step_reads_as_a_sentence():
    (step,) = resolve_cudagraph_mode(PIECEWISE, ALWAYS, piecewise=False).downgrades
    assert str(step) == (
        "PIECEWISE becomes NONE: nothing is split out, so there are no pieces to capture"
    )


def test_a_resolution_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolve_cudagraph_mode(NONE, NEVER, piecewise=False).mode = FULL  # type: ignore[misc]


@pytest.mark.parametrize(
    ("piecewise", "pooling", "mode"),
    [
        (True, False, FULL_AND_PIECEWISE),
        (True, True, PIECEWISE),
        (False, False, NONE),
        (False, True, NONE),
    ],
)
def test_default_mode(piecewise, pooling, mode):
    assert default_mode(piecewise=piecewise, pooling=pooling) is mode
