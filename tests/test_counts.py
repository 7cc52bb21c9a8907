"""Counts that follow from the toy model by hand, in all five modes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import toy
from toy import (
    FULL,
    FULL_AND_PIECEWISE,
    FULL_DECODE_ONLY,
    MODES,
    NONE,
    PIECEWISE,
    VARIANTS,
    WIDTH,
    Twin,
    compiled,
    counts,
    rows,
    toy_model,
)

from compile_backend import stats

NUM_LAYERS = 3
MIXED = {
    NONE: NONE,
    PIECEWISE: PIECEWISE,
    FULL: FULL,
    FULL_DECODE_ONLY: NONE,
    FULL_AND_PIECEWISE: PIECEWISE,
}
"""What a batch that is not uniform decode runs at."""
DECODE = {**MIXED, FULL_DECODE_ONLY: FULL, FULL_AND_PIECEWISE: FULL}

NUM_CAPTURED = {NONE: 0, PIECEWISE: NUM_LAYERS + 1, FULL: 1}
"""Graphs that one key takes, by the mode that it runs at."""


def expected(mode: toy.CUDAGraphMode, per_key: int) -> dict[toy.CUDAGraphMode, int]:
    return {mode: per_key * NUM_CAPTURED[mode]} if NUM_CAPTURED[mode] else {}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_each_key_warms_up_once_is_captured_once_and_replays(mode, variant):
    both = Twin(toy_model(variant, NUM_LAYERS), cudagraph_mode=mode.name, dynamic=True)
    for _ in range(4):
        both(rows(8))
    report, ran_at = both.stats, MIXED[mode]
    assert (report.pieces, report.eager_sections) == (NUM_LAYERS + 1, NUM_LAYERS)
    assert counts(report, "steps") == {ran_at: 4}
    assert counts(report, "warm_ups") == expected(ran_at, 1)
    assert counts(report, "captures") == expected(ran_at, 1)
    assert counts(report, "replays") == expected(ran_at, 3)


class Decoder(torch.nn.Module):
    """The toy model behind an embedding, called with token ids `[num_reqs, query_len]`."""

    def __init__(self, query_len: int) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(rows(16, seed=0), requires_grad=False)
        self.model = toy_model("attn_out", NUM_LAYERS)
        self.query_len = query_len

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(torch.nn.functional.embedding(ids.flatten(), self.table))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("query_len", [1, 3])
def test_uniform_decode_batches_take_full_graphs(mode, query_len):
    both = Twin(
        Decoder(query_len),
        cudagraph_mode=mode.name,
        num_speculative_tokens=query_len - 1,
        cudagraph_capture_sizes=[6, 12],
    )
    for _ in range(3):
        both(torch.randint(0, 16, (6 // query_len, query_len)))
    report, ran_at = both.stats, DECODE[mode]
    assert counts(report, "steps") == {ran_at: 3}
    assert counts(report, "captures") == expected(ran_at, 1)
    assert counts(report, "replays") == expected(ran_at, 2)
    both(torch.randint(0, 16, (2, 6)))
    assert both.stats.total("steps", MIXED[mode]) >= 1


def test_several_sizes_are_captured_once_each():
    both = Twin(toy_model("attn_new", NUM_LAYERS), cudagraph_mode="PIECEWISE", dynamic=True)
    sizes = (8, 4, 2, 4, 8, 2, 4, 2, 8)
    for n in sizes:
        both(rows(n))
    report = both.stats
    for (mode, key), row in report.by_key.items():
        assert mode is PIECEWISE
        assert row.captures == row.warm_ups == NUM_LAYERS + 1, key
        assert row.replays == 2 * (NUM_LAYERS + 1)
    assert report.graphs == 1


def test_lazily_n_sizes_called_twice_are_n_captures():
    both = Twin(lambda x: torch.relu(x) * 2, cudagraph_mode="FULL", dynamic=True)
    sizes = (2, 4, 8, 16, 24)
    for n in sizes * 2:
        both(rows(n))
    assert both.stats.total("captures") == len(sizes)


def test_captures_never_exceed_the_capture_sizes():
    both = Twin(
        lambda x: torch.relu(x) * 2,
        cudagraph_mode="FULL",
        dynamic=True,
        cudagraph_capture_sizes=[2, 4, 8],
    )
    generator = torch.Generator().manual_seed(0)
    for n in torch.randint(2, 30, (200,), generator=generator).tolist():
        both(rows(n))
    assert both.stats.total("captures") == 3
    assert len({key for mode, key in both.stats.by_key if mode is FULL}) == 3


@pytest.mark.parametrize("names", [False, True], ids=["unnamed", "named"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_twelve_equal_layers_take_at_most_three_compiles(variant, names):
    both = Twin(toy_model(variant, 12, names=names), cudagraph_mode="PIECEWISE")
    both(rows(4))
    assert both.stats.pieces == 13
    assert both.stats.compiles <= 3


def test_replays_of_the_whole_run_no_piece():
    both = Twin(toy_model("attn_out", NUM_LAYERS), cudagraph_mode="FULL")
    for _ in range(4):
        both(rows(8))
    for counted in ("warm_ups", "captures", "replays", "eager"):
        assert both.stats.total(counted, PIECEWISE) == 0


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_ops_run_once_a_call(mode, variant):
    """Warm-up, capture and replay included: state changes exactly as often as called."""
    run = compiled(
        toy_model(variant, NUM_LAYERS, names=True), cudagraph_mode=mode, cudagraph_num_of_warmups=2
    )
    toy.calls.clear()
    with torch.no_grad():
        for n in range(1, 6):
            run(rows(8))
            assert toy.calls == Counter({f"layers.{i}": n for i in range(NUM_LAYERS)})


def test_more_warm_ups_put_the_capture_off():
    both = Twin(
        toy_model("attn_state", NUM_LAYERS), cudagraph_mode="FULL", cudagraph_num_of_warmups=3
    )
    for _ in range(6):
        both(rows(8))
    assert counts(both.stats, "warm_ups") == {FULL: 3}
    assert counts(both.stats, "captures") == {FULL: 1}
    assert counts(both.stats, "replays") == {FULL: 3}


def test_rebound_weights_are_captured_again_once_for_each_key():
    both = Twin(toy_model("attn_new", NUM_LAYERS), cudagraph_mode="FULL", dynamic=True)
    for new in (False, True):
        if new:
            for model in (both.model, both.eager):
                model.head.weight.data = torch.ones(WIDTH, WIDTH)
        for n in (8, 4, 8, 4, 8, 4):
            both(rows(n))
    assert both.stats.total("captures") == 4


def test_layers_compiled_one_by_one_keep_their_own_graphs():
    model = toy_model("attn_new", 4)
    for i, layer in enumerate(model.layers):
        model.layers[i] = compiled(layer, cudagraph_mode="FULL")
    with torch.no_grad():
        for _ in range(5):
            model(rows(8))
    assert sum(stats(layer).total("captures") for layer in model.layers) == 4
