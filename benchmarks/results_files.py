"""What every benchmark writes: the command and versions, a table for people, JSON for machines."""

from __future__ import annotations

import json
import platform
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def about(shape: str) -> dict[str, str]:
    """How the figures came about, by name."""
    script = Path(sys.argv[0]).name
    return {
        "command": f"python benchmarks/{script} " + " ".join(sys.argv[1:]),
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "shape": shape,
    }


def summary(values: list[float]) -> dict[str, float]:
    """Median and spread."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def cell(spread: Mapping[str, float], digits: int) -> str:
    """A summary as a table shows it."""
    return (
        f"{spread['median']:.{digits}f} ({spread['min']:.{digits}f}..{spread['max']:.{digits}f})"
    )


def write(
    facts: Mapping[str, str], lines: Iterable[str], document: Mapping[str, Any], out: Path | None
) -> None:
    """Print the table below its facts; write OUT.md and OUT.json where there is an `out`."""
    text = "\n".join([*(f"{key}: {value}  " for key, value in facts.items()), "", *lines]) + "\n"
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{out}.md").write_text(text)
        Path(f"{out}.json").write_text(json.dumps({"about": facts, **document}, indent=1) + "\n")
