"""Benchmarks need a GPU to run; what they import and take apart must be there all the same."""

import importlib
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
    assert "--shape" in capsys.readouterr().out


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
