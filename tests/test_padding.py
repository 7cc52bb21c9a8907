"""A plain call grows to the next capture size and is cut back; nothing else about it changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy import (
    FULL,
    FULL_AND_PIECEWISE,
    NONE,
    PIECEWISE,
    WIDTH,
    Twin,
    compiled,
    counts,
    rows,
    toy_model,
)

attn_new = torch.ops.toy.attn_new


def padded(function: Any, mode: Any = FULL, **options: Any) -> Twin:
    options = {"cudagraph_capture_sizes": [4, 8], "dynamic": True, **options}
    return Twin(function, cudagraph_mode=mode.name, cudagraph_pad_inputs=True, **options)


@pytest.mark.parametrize("mode", [PIECEWISE, FULL])
def test_sizes_between_captures_are_padded_and_counted(mode):
    both = padded(lambda x: attn_new(x * 2) + 1, mode)
    for _ in range(3):
        for n in (8, 5, 3, 7, 4):
            assert both(rows(n)).shape == (n, WIDTH)
    report = both.stats
    assert counts(report, "steps") == {mode: 15}
    assert report.total("padding") == 3 * (3 + 1 + 1)
    assert {key.num_tokens for _, key in report.by_key} == {4, 8}
    assert report.total("captures") == 2 * (2 if mode is PIECEWISE else 1)


def test_a_size_that_the_model_returns_is_the_callers():
    both = padded(lambda x: (attn_new(x * 2) + 1, x.shape[0]))
    for _ in range(3):
        for n in (8, 5, 3):
            assert both(rows(n))[1] == n


def test_a_number_computed_from_the_size_is_the_callers():
    both = padded(lambda x: (attn_new(x * 2) + 1, x.shape[0] * 2 + 1))
    for _ in range(3):
        for n in (8, 5, 3):
            assert both(rows(n))[1] == 2 * n + 1


def test_nothing_is_padded_above_the_largest_size_or_below_one(caplog):
    both = padded(lambda x: attn_new(x * 2) + 1)
    for n in (0, 9, 0, 9):
        both(rows(n))
    assert counts(both.stats, "steps") == {NONE: 4}
    assert len([r for r in caplog.records if "no capture size" in r.message]) == 1


def test_rows_written_by_the_model_are_shown_and_no_others():
    def function(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return attn_new(x) + 1

    both = padded(function)
    for _ in range(3):
        for n in (8, 5, 3):
            both(rows(n))
    assert both.stats.total("padding") > 0


def test_no_row_beyond_the_real_ones_changes_in_a_cache_written_by_slot():
    class Cached(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(16, WIDTH))

        def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            x = x * 2
            torch.ops.toy.cache_write(x, self.cache, slots - 1)
            return attn_new(x) + 1

    # Zero is the skip value here, as padding fills with zeros.
    both = padded(Cached(), PIECEWISE)
    for n in (8, 8, 5, 5, 3, 8, 6):
        both(rows(n), torch.randperm(16)[:n] + 1)
    assert both.stats.total("padding") > 0


def test_inputs_whose_sizes_dynamo_holds_apart_are_padded_together_or_not_at_all():
    def function(x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        x = x * 2
        torch.ops.toy.cache_write(x, cache, slots)
        return attn_new(x) + 1

    both = padded(function, PIECEWISE, dynamic=None)
    for n in (8, 5, 6):
        x, slots = rows(n), torch.randperm(16)[:n]
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(slots, 0)
        both(x, slots, torch.zeros(16, WIDTH))


@pytest.mark.parametrize("variant", ["attn_out", "attn_pair", "attn_view"])
def test_replays_at_a_padded_size_equal_eager_at_the_true_one(variant):
    both = padded(toy_model(variant), PIECEWISE)
    for n in (8, 7, 6, 5, 7, 8):
        both(rows(n))


def test_token_ids_are_padded_to_whole_requests():
    table = rows(10)

    def function(ids: torch.Tensor) -> torch.Tensor:
        return attn_new(torch.nn.functional.embedding(ids, table).flatten(1)) + 1

    both = padded(function, FULL_AND_PIECEWISE)
    for _ in range(3):
        for n in (3, 4, 7):
            both(torch.randint(0, 10, (n, 1)))
    assert counts(both.stats, "steps") == {FULL: 9}
    assert all(key.uniform for _, key in both.stats.by_key)


def test_bools_and_ints_are_padded():
    def function(x: torch.Tensor, mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return attn_new(x * mask.unsqueeze(-1)) + ids.unsqueeze(-1)

    both = padded(function)
    for _ in range(3):
        for n in (8, 5):
            both(rows(n), rows(n)[:, 0] > 0, torch.arange(n))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: attn_new(x[1:]) + 1, "dimension 0 does not count its rows"),
        (lambda x: (attn_new(x * 2) + 1).t(), "dimension 0 does not count its rows"),
        (lambda x: (attn_new(x * 2) + 1, x[:, 1:]), "an output is a view of an input"),
    ],
    ids=["fewer rows", "rows elsewhere", "view"],
)
def test_what_cannot_be_padded_runs_without_a_graph_and_says_why(function, reason, caplog):
    both = padded(function)
    for _ in range(2):
        both(rows(5))
    assert counts(both.stats, "steps") == {NONE: 2}
    assert len([r for r in caplog.records if reason in r.message]) == 1


def test_fixed_sizes_cannot_be_padded_and_say_what_to_do(caplog):
    both = padded(lambda x: attn_new(x * 2) + 1, dynamic=False)
    both(rows(5))
    assert "compile with dynamic=True" in caplog.text


@pytest.mark.parametrize("dynamic", [True, None, False])
@pytest.mark.parametrize("shape", [(1, WIDTH), (1, 5)], ids=["one token", "one request"])
def test_one_row_is_told_to_be_compiled_by_itself(dynamic, shape, caplog):
    table = rows(10)

    def function(ids: torch.Tensor) -> torch.Tensor:
        embedded = torch.nn.functional.embedding(ids, table).flatten(0, 1) if shape[1] < 6 else ids
        return attn_new(embedded * 2) + 1

    both = padded(function, dynamic=dynamic, cudagraph_capture_sizes=[4, 8])
    for _ in range(2):
        both(torch.randint(0, 10, shape) if shape[1] < 6 else rows(1))
    (why, remedy) = (r.message for r in caplog.records if "told once" in r.message)
    assert "with 1 row is compiled for 1 row only, also with dynamic=True; add its number" in why
    assert remedy.endswith("add it to cudagraph_capture_sizes")
    assert "dynamic=True" not in remedy
    assert "1 tokens" not in caplog.text


@pytest.mark.parametrize(
    ("make", "says", "says_not"),
    [
        (lambda: rows(1), "a call of 1 token runs", "cudagraph_pad_inputs"),
        (lambda: rows(1), "padding is no help, since 1 row is", "or set"),
        (lambda: rows(5), "or set cudagraph_pad_inputs=True and compile with dynamic", "no help"),
        (lambda: rows(9), "a call of 9 tokens runs", "pad"),
    ],
    ids=["grammar", "one row", "between two sizes", "above the largest"],
)
def test_padding_is_advised_only_where_it_would_help(make, says, says_not, caplog):
    run = compiled(
        lambda x: attn_new(x * 2) + 1, cudagraph_mode="FULL", cudagraph_capture_sizes=[4, 8]
    )
    for _ in range(3):
        run(make())
    (told,) = (r.message for r in caplog.records if "no capture size" in r.message)
    assert says in told
    assert says_not not in told


def function_of_two(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return attn_new(x * 2) + y.sum()


def test_each_reason_for_not_padding_a_call_is_the_true_one(caplog):
    both = padded(function_of_two)
    fixed = rows(5)
    torch._dynamo.mark_static(fixed, 0)
    both(rows(7), fixed)
    both(rows(5), fixed)
    assert "an input whose size is fixed has as many rows" in caplog.text

    def in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return attn_new(y * 2) + x

    base = rows(6)
    padded(in_place)(base[1:], base[:-1])
    assert "a tensor that is written shares memory with another input" in caplog.text

    both = padded(lambda x: attn_new(x * 2) + 1 if x.shape[0] < 7 else attn_new(x * 3) - 1)
    both(rows(5))
    assert "was compiled for sizes that the next capture size is not among" in caplog.text
    ids = torch.randint(0, 10, (3, 2))
    both = padded(lambda x: torch.ops.toy.attn_new(x.float() * 2) + 1, cudagraph_capture_sizes=[7])
    both(ids)
    assert "the next capture size makes no whole rows" in caplog.text
    padded(lambda x: x * 2)(torch.tensor(1.0))


def test_an_input_of_another_layout_keeps_it():
    both = padded(lambda x: attn_new(x * 2) + x.sum(0), piece_compiler="inductor")
    for n in (5, 8, 6, 8, 5):
        both(rows(WIDTH, n).t())


def test_an_expanded_input_beside_a_written_one():
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return attn_new(x) + y

    both = padded(function)
    for n in (8, 5):
        both(rows(n), rows(n, 1).expand(n, WIDTH))


def test_inputs_that_overlap_and_are_written_are_not_padded():
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return attn_new(y * 2) + x

    both = padded(function)
    for n in (8, 5):
        both(rows(n), rows(n))
    base = rows(6)
    both(base[1:], base[:-1])


def test_padding_does_not_cross_what_dynamo_assumed():
    def function(x: torch.Tensor) -> torch.Tensor:
        return attn_new(x * 2) + 1 if x.shape[0] > 6 else attn_new(x * 3) - 1

    both = padded(function)
    for _ in range(3):
        for n in (8, 7, 5, 3, 6):
            both(rows(n))
