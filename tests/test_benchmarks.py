"""Benchmarks need a GPU to run; what they import and take apart must be there all the same."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from compile_backend import replay_plan

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(
    path.stem for path in BENCHMARKS.glob("*.py") if "def main" in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_tells_how_it_is_used(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(name).main()
    assert stopped.value.code == 0
    assert f"usage: {name}.py" in capsys.readouterr().out


def test_the_parts_that_are_timed_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    parts = importlib.import_module("host_parts").PARTS
    assert all(callable(getattr(owner, name)) for owner, name, _ in parts)


def test_the_parts_of_a_piecewise_step_are_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    script = importlib.import_module("piecewise_parts")
    asked = "--shape tiny --attention sdpa --device cpu --rounds 1 --steps 1"
    monkeypatch.setattr("sys.argv", ["piecewise_parts.py", *asked.split()])
    monkeypatch.setattr(replay_plan, "stitch", replay_plan.stitch)  # put back afterwards
    script.main()
    *_, row = capsys.readouterr().out.splitlines()
    _, attention, pieces, *cells, _ = (cell.strip() for cell in row.split("|"))
    assert (attention, pieces) == ("sdpa", "3")
    assert len(cells) == len(script.COLUMNS) + 2


def test_settings_of_tensor_parallelism_are_held_against_each_other(tmp_path: Path) -> None:
    """Two ranks on the CPU, where nothing overlaps; logits are sums of float32 products."""
    launched = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    asked = ["--tiny", "--tokens", "8,5", "--rounds", "1", "--steps", "1"]
    asked += ["--out", str(tmp_path / "found")]
    with subprocess.Popen(
        [sys.executable, *launched, str(BENCHMARKS / "tensor_parallel.py"), *asked],
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        try:
            printed, errors = launcher.communicate(timeout=200)
        finally:
            launcher.terminate()  # it ends the ranks
    assert launcher.returncode == 0, errors
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    settings = ("off", "sequence parallelism")
    assert [(row["tokens"], row["mode"], row["setting"]) for row in found["steps"]] == [
        (n, mode, setting)
        for n in (5, 8)
        for mode in ("NONE", "PIECEWISE", "FULL")
        for setting in settings
    ]
    assert all(row["off_unsharded"] < 1e-5 for row in found["steps"])
    assert all(row["is_same_again"] for row in found["steps"])
    assert found["changed"]["sequence parallelism"]["sequence_parallelism"] == 2 * 1 + 1
    (note,) = found["notes"]
    assert note == (
        "The setting 'overlap' is left out: enable_async_tp was asked for and changed nothing in "
        "this graph: its tensors are on cpu, where torch has no such ops."
    )
    table = (tmp_path / "found.md").read_text(encoding="utf-8")
    assert printed.strip() == table.strip()
    assert table.count("| sequence parallelism | ") == 1 + len(found["steps"]) // len(settings)
