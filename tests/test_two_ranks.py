"""Two real processes: ranks that agree, tensor parallelism, and sequence parallelism in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

SCRIPT = Path(__file__).parent / "two_ranks.py"
SIZES = (5, 8, 64)
MODES = ("NONE", "PIECEWISE", "FULL")
MAX_SECONDS = 240
"""Of both processes, whatever they wait for: less than a test may take."""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all checks found."""
    folder = tmp_path_factory.mktemp("ranks")
    # As torchrun does: a free port that somebody else may take before rank 0 does is none.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    printed = [(folder / f"out{rank}", folder / f"errors{rank}") for rank in range(2)]
    ranks = [_start(rank, folder, store.port, *paths) for rank, paths in enumerate(printed)]
    deadline = time.monotonic() + MAX_SECONDS
    try:
        # Where one fails, the other one may wait for it as long as it likes.
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            if any(rank.poll() for rank in ranks):
                break
            time.sleep(0.05)
        codes = [rank.poll() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [0, 0], "\n".join(errors.read_text() for _, errors in printed)
    found: dict[str, Any] = json.loads(printed[0][0].read_text().splitlines()[-1])
    return found


def _start(rank: int, folder: Path, port: int, out: Path, errors: Path) -> subprocess.Popen[bytes]:
    """One rank, which prints to files: a full pipe that nobody reads yet would stop it."""
    with out.open("wb") as to_out, errors.open("wb") as to_errors:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SCRIPT), str(folder / "meeting")],
            env={
                **os.environ,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "PYTHONPATH": str(SCRIPT.parent.parent),
            },
            stdout=to_out,
            stderr=to_errors,
        )


def test_ranks_with_other_batches_run_at_one_mode_and_size(facts: dict[str, Any]) -> None:
    ran = ["FULL of 2", "FULL of 8", "NONE of 9", "FULL of 4", "NONE of 4"]
    assert facts["agreement"]["ran"] == [ran, ran]
    assert facts["agreement"]["is_right"] == [[True] * 5] * 2


def test_ranks_with_other_limits_are_refused_on_both(facts: dict[str, Any]) -> None:
    assert facts["refused"]["told"] == [
        f"max_num_seqs={limit} differs between the ranks, whose steps would not fit each other; "
        "give every rank the same"
        for limit in (8, 9)
    ]


@pytest.mark.parametrize("mode", MODES)
def test_tensor_parallel_models_run_in_every_mode(facts: dict[str, Any], mode: str) -> None:
    """Wrappers are left out: 7 linear layers and 2 sums for each of 2 layers, and both ends."""
    found = facts["sequence_parallelism"][f"{mode} off"]
    assert found["graphs"] == 1
    # Of three calls of three sizes, the last two replay: 3 pieces each, or all in one.
    assert found["replays"] == {"NONE": 0, "PIECEWISE": 18, "FULL": 6}[mode]
    assert found["unwrapped"] == 2 * 7 * 3 + 2 * 3
    assert found["in_shares"] is None


@pytest.mark.parametrize("setting", ["in shares", "overlapped"])
@pytest.mark.parametrize("mode", MODES)
def test_sequence_parallelism_equals_the_pass_off(
    facts: dict[str, Any], mode: str, setting: str
) -> None:
    """Hard cases F2 and F4: 5 tokens are no multiple of the ranks.

    With two ranks each sum has two terms, so nothing but the kernels of products may differ, which
    see one row more at 5 tokens. Logits here are below 1, sums over at most 128 products in
    float32.
    """
    found = facts["sequence_parallelism"]
    assert found[f"{mode} {setting}"]["in_shares"] == 2 * 2 + 1
    assert found[f"{mode} {setting}"]["graphs"] == 1
    assert found[f"{mode} {setting}"]["replays"] == found[f"{mode} off"]["replays"]
    for size in SIZES:
        assert found["distances"][f"{mode} of {size} {setting}"] < 1e-6


@pytest.mark.parametrize("mode", MODES)
def test_products_overlap_with_what_is_around_them(facts: dict[str, Any], mode: str) -> None:
    """Each of 2 layers has 5 products of gathered rows and 2 of which sums are scattered.

    The head multiplies what is left of the rows by then, by itself.
    """
    found = facts["sequence_parallelism"]
    assert found[f"{mode} overlapped"]["overlapped"] == 2 * (5 + 2)
    assert found[f"{mode} in shares"]["overlapped"] is None


def test_a_sharded_model_runs_on_a_paged_cache(facts: dict[str, Any]) -> None:
    found = facts["paged"]
    assert found["tokens"] == [found["expected"]] * 2
    assert found["ran"] == [{"PIECEWISE of 8": 1, "FULL of 1": 2}] * 2


def test_the_example_says_what_it_found(facts: dict[str, Any]) -> None:
    assert facts["example"]["said"] == (
        "2 ranks on cpu, 5 sums over ranks in shares: the logits of 5, 8, 64 tokens are those of "
        "the whole model, 18 replays\n"
    )
