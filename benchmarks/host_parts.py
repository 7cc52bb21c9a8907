"""Where the host's time of a FULL step through the runner goes, part by part.

Each part is timed where it runs, in real decode steps on an idle device: what one part pushes out
of the processor's caches, the next one pays for. Its floor is what it takes alone.

    python benchmarks/host_parts.py --shape 0.6B --attention flash_attn_3
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

from compile_backend import known_steps
from compile_backend.bench.by_hand import captured_by_hand
from compile_backend.bench.paged_batches import decode
from compile_backend.bench.paged_ways import (
    make_runner,
    on_paged_cache,
    run_at,
    step_outside_a_runner,
)
from compile_backend.bench.rounds import Clock
from compile_backend.bench.shapes import SHAPES, make_model
from compile_backend.graph_engine import CudaGraph
from compile_backend.known_steps import KnownFull, KnownSteps
from compile_backend.runner import GraphModelRunner
from compile_backend.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from compile_backend.bench.paged_batches import Work

# What is timed: the owner, the name, and whose time it is a part of.
PARTS: tuple[tuple[Any, str, str], ...] = (
    (GraphModelRunner, "run", ""),
    (Weights, "have_moved", "run"),
    (KnownSteps, "prepare", "run"),
    (KnownFull, "run", "GraphModelRunner.run"),
    (CudaGraph, "replay", "KnownFull.run"),
    (known_steps, "handed_out", "KnownFull.run"),
)


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """The function, which adds how long each call took, us."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **kwargs)
        spent.append((time.perf_counter() - start) * 1e6)
        return result

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("tiny", "0.6B", "8B"), default="0.6B")
    parser.add_argument("--attention", default="flash_attn_3")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    shape, device = SHAPES[arguments.shape], torch.device("cuda", 0)
    clock = Clock(device)
    with torch.no_grad():
        paged = on_paged_cache(make_model(shape, device), shape, arguments.attention)
        runner = make_runner(
            paged.module,
            paged,
            "FULL_DECODE_ONLY",
            options={},
            sizes=shape.decodes,
            max_num_seqs=max(shape.decodes),
            max_num_tokens=max(shape.decodes),
        )
        runner.capture(progress=False)
        works = [decode(shape, number) for number in shape.decodes]
        outside = [
            step_outside_a_runner(paged.module, paged, work, for_graph=True) for work in works
        ]
        by_hand = [captured_by_hand(one.step, one.plan) for one in outside]
        print("| part | " + " | ".join(work.name for work in works) + " |")
        print("|---|" + "---|" * len(works))
        bare: list[list[float]] = [[] for _ in works]
        whole: list[list[float]] = [[] for _ in works]
        for _ in range(10):
            for work, graph, bares, steps in zip(works, by_hand, bare, whole, strict=True):
                ways = {"bare": graph, "whole": run_at(runner, work)}
                times = clock.host_us(ways, 30)
                bares.extend(times["bare"])
                steps.extend(times["whole"])
        show("replay of a graph captured by hand", bare)
        show("whole step", whole)
        originals = [getattr(owner, name) for owner, name, _ in PARTS]
        spent: list[list[list[float]]] = [[] for _ in PARTS]
        for work in works:
            for (owner, name, _), original, rows in zip(PARTS, originals, spent, strict=True):
                rows.append([])
                setattr(owner, name, timed(original, rows[-1]))
            clock.host_us({"whole": run_at(runner, work)}, arguments.steps)
        for (owner, name, inside), rows in zip(PARTS, spent, strict=True):
            calls = len(rows[0]) // arguments.steps
            label = f"{owner.__name__.rpartition('.')[2]}.{name}"
            label += f" x {calls}" if calls > 1 else ""
            show(f"{label} (in {inside})" if inside else label, rows)
        for (owner, name, _), original in zip(PARTS, originals, strict=True):
            setattr(owner, name, original)
        floors = [alone(runner, work, arguments.steps) for work in works]
        for label in floors[0]:
            show(f"floor: {label}, in a loop", [floor[label] for floor in floors])


def alone(runner: GraphModelRunner, work: Work, num_steps: int) -> dict[str, list[float]]:
    """The parts by themselves, again and again: what they take on warm caches, us."""
    run_at(runner, work)()
    torch.cuda.synchronize()
    known = runner._captured.known
    step = known.prepare(work.batch, None)
    ways = {
        "Weights.have_moved": runner._weights.have_moved,
        "KnownSteps.prepare": lambda: known.prepare(work.batch, None),
        "known_steps.handed_out": lambda: known_steps.handed_out(step.outputs),
    }
    spent: dict[str, list[float]] = {}
    for label, way in ways.items():
        call = timed(way, spent.setdefault(label, []))
        for _ in range(num_steps):
            call()
    return spent


def show(label: str, rows: list[list[float]]) -> None:
    print(f"| {label} | " + " | ".join(f"{statistics.median(row):.1f}" for row in rows) + " |")


if __name__ == "__main__":
    main()
