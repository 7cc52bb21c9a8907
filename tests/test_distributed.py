"""Ranks end in one mode and one size: the rule itself, and a runner beside ranks that are played.

What real processes do is in `test_two_ranks`.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_toy import VOCABULARY, make_loop

from compile_backend.batch import BatchDescriptor
from compile_backend.config import CompilationConfig, CUDAGraphMode
from compile_backend.dispatch import CudagraphDispatcher
from compile_backend.distributed import RankAgreement, agreed_hindrance
from compile_backend.errors import ConfigError
from compile_backend.runner import GraphModelRunner
from compile_backend.runner_batch import Batch
from compile_backend.step_inputs import Dim, InputSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from compile_backend.dispatch import Route

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
RUNTIME_MODES = (NONE, PIECEWISE, FULL)


def on_ranks(num_ranks: int, act: Callable[[int, RankAgreement], Any]) -> list[Any]:
    """What `act` returns on each rank; a thread stands for a process."""
    sent: list[Sequence[int]] = [()] * num_ranks
    barrier = threading.Barrier(num_ranks, timeout=60)

    def run(rank: int) -> Any:
        def least(numbers: Sequence[int]) -> list[int]:
            sent[rank] = numbers
            barrier.wait()
            result = [min(column) for column in zip(*sent, strict=True)]
            barrier.wait()
            return result

        return act(rank, RankAgreement(least))

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))


class Peer:
    """Stands for one more rank, which says what it is told to, and else agrees with everything."""

    def __init__(self) -> None:
        self.proposals: list[tuple[CUDAGraphMode, int]] = []

    def __call__(self, numbers: Sequence[int]) -> list[int]:
        if len(numbers) != 2 or not self.proposals:
            return list(numbers)
        mode, num_tokens = self.proposals.pop(0)
        return [min(numbers[0], mode.value), min(numbers[1], -num_tokens)]


# --- the rule ---------------------------------------------------------------------------------


@st.composite
def steps(draw: st.DrawFn) -> tuple[CudagraphDispatcher, list[dict[str, Any]]]:
    """A dispatcher that all ranks have, and what each brings to one step."""
    query_len, max_num_seqs = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    dispatcher = CudagraphDispatcher(
        CompilationConfig(
            cudagraph_capture_sizes=tuple(sorted({4, *draw(st.sets(st.integers(1, 40)))}))
        ),
        max_num_seqs=max_num_seqs,
        uniform_decode_query_len=query_len,
    )
    dispatcher.initialize_cudagraph_keys(draw(st.sampled_from(list(CUDAGraphMode))))

    def batch() -> BatchDescriptor:
        num_reqs = draw(st.integers(0, max_num_seqs))
        if draw(st.booleans()):
            return BatchDescriptor(num_reqs * query_len, num_reqs, uniform=True)
        return BatchDescriptor(num_reqs + draw(st.integers(0, 40)) * bool(num_reqs), num_reqs)

    asked = [
        {
            "descriptor": batch(),
            "use_cascade_attn": draw(st.booleans()) and draw(st.booleans()),
            "all_decode": draw(st.sampled_from([None, None, False])),
            "highest_mode": draw(st.sampled_from([None, None, None, *RUNTIME_MODES])),
        }
        for _ in range(draw(st.integers(1, 3)))
    ]
    return dispatcher, asked


@settings(max_examples=150, deadline=None)
@given(steps())
def test_all_ranks_end_in_one_mode_and_size(
    step: tuple[CudagraphDispatcher, list[dict[str, Any]]],
) -> None:
    """Hard case D12, and no rank goes above what it would do alone."""
    dispatcher, asked = step
    routes: list[Route] = on_ranks(
        len(asked), lambda rank, ranks: ranks.dispatch(dispatcher, **asked[rank])
    )
    assert len({(mode, key.num_tokens) for mode, key in routes}) == 1
    most = max(1, *(facts["descriptor"].num_tokens for facts in asked))
    alone = [dispatcher.dispatch(**facts) for facts in asked if facts["descriptor"].num_tokens]
    for mode, key in routes:
        assert key.num_tokens >= most
        assert mode.value <= min((route[0].value for route in alone), default=FULL.value)
        assert mode is NONE or key in dispatcher.keys(mode)
    if all(route == alone[0] for route in alone) and len(alone) == len(asked):
        # Whoever agrees from the start loses nothing.
        assert routes[0][0] is alone[0][0]


@pytest.mark.parametrize("mode", RUNTIME_MODES)
def test_lowest_mode_and_largest_size_win(mode: CUDAGraphMode) -> None:
    proposals = [(FULL, 3), (mode, 40), (FULL, 7)]
    agreed = on_ranks(3, lambda rank, ranks: ranks.agree(*proposals[rank]))
    assert agreed == [(mode, 40)] * 3


def test_modes_are_taken_by_name() -> None:
    dispatcher = CudagraphDispatcher(CompilationConfig(), max_num_seqs=4)
    dispatcher.initialize_cudagraph_keys("FULL_AND_PIECEWISE")
    one = BatchDescriptor(1, 1, uniform=True)
    routes = on_ranks(
        2,
        lambda rank, ranks: ranks.dispatch(
            dispatcher, one, highest_mode="piecewise" if rank else None
        ),
    )
    assert [mode for mode, _ in routes] == [PIECEWISE, PIECEWISE]


def test_settings_that_differ_are_refused_on_every_rank() -> None:
    def check(rank: int, ranks: RankAgreement) -> str:
        ranks.check_same({"max_num_seqs": 8, "cudagraph_mode": "FULL"})
        with pytest.raises(ConfigError) as caught:
            ranks.check_same({"max_num_seqs": 8, "max_loras": rank})
        return str(caught.value)

    told = on_ranks(2, check)
    assert told[1] == (
        "max_loras=1 differs between the ranks, whose steps would not fit each other; "
        "give every rank the same"
    )
    assert told[0].startswith("max_loras=0 differs")


def test_facts_hold_where_they_hold_on_all_ranks() -> None:
    facts = [[True, True, False], [True, False, False]]
    held = on_ranks(2, lambda rank, ranks: ranks.everywhere(facts[rank]))
    assert held == [[True, False, False]] * 2


# --- what is decided where no step runs -------------------------------------------------------


def hindrances(
    asking: Sequence[str | None],
    *,
    absent: int = 0,
    delays: Sequence[float] = (),
    wait_s: float = 60,
) -> tuple[dist.Store, list[str | None]]:
    """What ranks are told that ask at once or late, with others beside them that never do."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=wait_s))

    def ask(rank: int, own: str | None, delay_s: float) -> str | None:
        time.sleep(delay_s)
        return agreed_hindrance("speed", own, store, rank, len(asking) + absent)

    with ThreadPoolExecutor(len(asking)) as pool:
        numbers, padded = range(len(asking)), itertools.chain(delays, itertools.repeat(0.0))
        return store, list(pool.map(ask, numbers, asking, padded))


@pytest.mark.parametrize("facts", list(itertools.product([None, "too far"], repeat=3)), ids=str)
def test_nobody_has_what_one_rank_cannot(facts: tuple[str | None, ...]) -> None:
    _, told = hindrances(facts)
    first = next((rank for rank, fact in enumerate(facts) if fact is not None), None)
    assert told == [None if first is None else f"too far (rank {first})"] * 3


def test_a_rank_that_never_asks_is_waited_for_in_vain() -> None:
    store, told = hindrances([None, None], absent=1, wait_s=0.2)
    expected = "rank 2 did not tell in time whether it can"
    assert told == [expected] * 2
    assert agreed_hindrance("speed", None, store, 2, 3) == expected  # too late for everyone


@settings(max_examples=20, deadline=None)
@given(delays=st.lists(st.sampled_from([0.0, 0.015, 0.02, 0.025]), min_size=3, max_size=3))
def test_ranks_are_told_the_same_however_late_they_are(delays: list[float]) -> None:
    _, told = hindrances([None] * 3, delays=delays, wait_s=0.02)
    assert len(set(told)) == 1


def test_what_all_have_cannot_be_taken_back_by_one() -> None:
    store, told = hindrances([None, None])
    assert told == [None, None]
    assert agreed_hindrance("speed", None, store, 1, 2) is None
    with pytest.raises(ConfigError, match=r"speed=True cannot be had here any more.*: moved"):
        agreed_hindrance("speed", "moved", store, 0, 2)


# --- a runner among ranks ---------------------------------------------------------------------


@pytest.mark.parametrize("ranks", ["gloo", 2, RankAgreement])
def test_a_runner_refuses_what_is_no_agreement(ranks: Any) -> None:
    with pytest.raises(ConfigError, match=r"is no RankAgreement; use RankAgreement\.over"):
        make_loop(ranks=ranks)


@pytest.mark.parametrize("group", ["gloo", 0, [0, 1], object(), RankAgreement])
def test_what_is_no_process_group_is_refused(group: Any) -> None:
    with pytest.raises(ConfigError, match=r"group=.* is no process group .*new_group returned"):
        RankAgreement.over(group)


def test_an_agreement_is_made_of_something_to_call() -> None:
    with pytest.raises(ConfigError, match=r"least=3 cannot be called; use RankAgreement\.over"):
        RankAgreement(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "num_tokens", "text"),
    [
        ("SOME", 1, "mode='SOME' is no mode of a single batch; use NONE, PIECEWISE or FULL"),
        (2, 1, "mode=2 is no mode of a single batch"),
        (CUDAGraphMode.FULL_DECODE_ONLY, 1, "mode=FULL_DECODE_ONLY is no mode of a single batch"),
        (FULL, -1, "num_tokens=-1 is too small; use 0 or more"),
        (FULL, 1.0, "num_tokens=1.0 must be an integer"),
        (FULL, "1", "num_tokens='1' must be an integer"),
    ],
)
def test_what_ranks_cannot_agree_on_is_refused(mode: Any, num_tokens: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        RankAgreement(list).agree(mode, num_tokens)


def test_ranks_agree_on_modes_by_name() -> None:
    agreed = on_ranks(2, lambda rank, ranks: ranks.agree("full" if rank else "Piecewise", rank))
    assert agreed == [(PIECEWISE, 1)] * 2


def test_a_process_group_must_exist() -> None:
    with pytest.raises(ConfigError, match=r"not initialised; call .*init_process_group first"):
        RankAgreement.over()


# --- a runner ---------------------------------------------------------------------------------


def test_a_runner_follows_the_other_ranks() -> None:
    """Right results at the mode and the size that another rank asks for."""
    peer = Peer()
    loop = make_loop("FULL_AND_PIECEWISE", sizes=(2, 4, 8), ranks=RankAgreement(peer))
    first, second = loop.add([1, 2, 3]), loop.add([4, 5])
    loop.step([(first, 3)])  # alone
    peer.proposals = [(PIECEWISE, 7), (FULL, 3), (PIECEWISE, 2), (NONE, 20), (NONE, 1)]
    loop.step([(second, 2)])  # another rank has a prompt of 7 tokens
    loop.step(loop.grow(first))  # and now 3 decodes
    loop.step(loop.grow(first, second))  # and now another prompt, of 2
    loop.step(loop.grow(first))  # one that is too large for all graphs
    loop.step(loop.grow(first, second))  # one that must run without, though it is small
    assert loop.ran() == {"FULL": [4], "PIECEWISE": [2, 4, 8], "NONE": [2, 20]}
    assert not peer.proposals


def test_a_rank_without_requests_runs_along() -> None:
    """At every mode, and without a trace in the caches of requests that wait."""
    peer = Peer()
    loop = make_loop("FULL_AND_PIECEWISE", sizes=(1, 4, 8), ranks=RankAgreement(peer))
    request = loop.add([1, 2, 3])
    loop.step([(request, 3)])
    peer.proposals = [(FULL, 3), (PIECEWISE, 5), (NONE, 50)]
    for _ in range(3):
        logits = loop.runner.run(Batch(query_lens=[], inputs={}))
        assert logits.shape == (0, VOCABULARY)
    assert loop.ran() == {"FULL": [4], "PIECEWISE": [4, 8], "NONE": [50]}
    logits = loop.runner.run(Batch(query_lens=(), inputs={}))  # nobody has any
    assert logits.shape == (0, VOCABULARY)
    assert loop.ran()["FULL"] == [1, 4]
    for _ in range(3):
        loop.step(loop.grow(request))


def test_no_step_is_known_by_its_lengths_where_others_decide() -> None:
    peer = Peer()
    loop = make_loop("FULL", is_compiled=False, ranks=RankAgreement(peer))
    request = loop.add([1, 2, 3])
    loop.step([(request, 3)])
    for num_tokens in (1, 6, 1, 12):
        peer.proposals = [(FULL, num_tokens)]
        loop.step(loop.grow(request))
    assert loop.ran() == {"FULL": [1, 1, 4, 8, 16]}


def test_highest_mode_of_one_rank_holds_for_all() -> None:
    peer = Peer()
    loop = make_loop("FULL", is_compiled=False, ranks=RankAgreement(peer))
    request = loop.add([1, 2, 3])
    peer.proposals = [(FULL, 4)]
    loop.step([(request, 3)], highest_mode=NONE)
    assert loop.ran() == {"NONE": [4]}


def test_what_one_rank_could_not_capture_runs_at_a_lower_mode_on_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def least(numbers: Sequence[int]) -> list[int]:
        answer = list(numbers)
        if len(numbers) == 6:  # one for each key: pieces of 4, 2 and 1 tokens, then full graphs
            assert answer == [1] * 6
            answer[3] = 0
        return answer

    with caplog.at_level(logging.WARNING):
        loop = make_loop(sizes=[1, 2, 4], limits=(8, 16), ranks=RankAgreement(least))
    assert [record.getMessage() for record in caplog.records] == [
        "FULL of 4 tokens has no graph on some rank, so it runs at a lower mode on all"
    ]
    requests = [loop.add([i, i + 1]) for i in range(4)]
    loop.step([(requests[0], 2), (requests[1], 2)])
    loop.step([(requests[2], 2), (requests[3], 2)])
    loop.step(loop.grow(*requests))
    loop.step(loop.grow(*requests[:2]))
    assert loop.ran() == {"FULL": [2], "PIECEWISE": [4, 4, 4]}


OPTIONS: dict[str, tuple[Any, Any]] = {
    "cudagraph_mode": ("FULL", "FULL_DECODE_ONLY"),
    "cudagraph_capture_sizes": ((2, 4), (2, 8)),
    "cudagraph_specialize_lora": (True, False),
    "pass_config": ({}, {"enable_sequence_parallelism": True}),
}
LIMITS = {
    "max_num_seqs": (8, 4),
    "max_num_batched_tokens": (8, 16),
    "uniform_decode_query_len": (1, 2),
    "max_loras": (0, 2),
}


@pytest.mark.parametrize("setting", [*OPTIONS, *LIMITS])
def test_ranks_with_other_limits_are_refused(setting: str) -> None:
    """By the name of what was set, not of what follows from it."""

    def capture(rank: int, ranks: RankAgreement) -> str:
        chosen = {name: values[rank if name == setting else 0] for name, values in OPTIONS.items()}
        if setting in LIMITS:  # a ladder, which follows from the limits
            del chosen["cudagraph_capture_sizes"]
        limits = {name: values[rank if name == setting else 0] for name, values in LIMITS.items()}
        runner = GraphModelRunner(
            lambda x: x,
            chosen,
            input_spec=[InputSpec("x", (Dim.NUM_TOKENS,), torch.float32)],
            ranks=ranks,
            device="cpu",
            **limits,
        )
        with pytest.raises(ConfigError) as caught:
            runner.capture(progress=False)
        return str(caught.value)

    told = on_ranks(2, capture)
    assert all(text.startswith(f"{setting}=") and "differs between" in text for text in told)
    assert told[0] != told[1]
