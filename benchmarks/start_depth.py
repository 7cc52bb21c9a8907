"""What a first call takes, cold and warm, for models of several depths, and what Dynamo has of it.

Each start is a process of its own; the warm one has the caches that the cold one before it found
empty. Pieces that are alike are compiled once, so what does not grow with depth is all but
Dynamo's part.

    python benchmarks/start_depth.py --shape 0.6B --layers 14,28,56 --whole 28
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from compile_backend.backend import CudagraphModesBackend, stats
from compile_backend.bench.paged_batches import decode
from compile_backend.bench.paged_ways import on_paged_cache, runner_of_all_sizes
from compile_backend.bench.rounds import Clock
from compile_backend.bench.shapes import SHAPES, make_model
from compile_backend.bench.static_steps import StaticSteps, compiled_for

WHOLE, STATIC, RUNNER = "torch.compile", "FULL_AND_PIECEWISE", "runner with all captures"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="0.6B")
    parser.add_argument("--layers", default="14,28,56")
    parser.add_argument(
        "--whole", type=int, default=28, help="depth of torch.compile and warm starts"
    )
    parser.add_argument("--attention", default="triton", help="of the runner")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=1, help="of each cold start")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(start(json.loads(arguments.one))))
        return
    print("| way | layers | caches | first call s | outside Dynamo s | process s | compiles |")
    print("|---|---|---|---|---|---|---|")
    depths = [int(depth) for depth in arguments.layers.split(",")]
    ways = [(WHOLE, arguments.whole), (RUNNER, arguments.whole)]
    ways += [(STATIC, depth) for depth in depths]
    ways += [(STATIC, depth) for _ in range(arguments.repeats - 1) for depth in depths]
    for number, (way, layers) in enumerate(ways):
        asked = {**vars(arguments), "way": way, "layers": layers}
        is_first = (way, layers) not in ways[:number]
        is_warm = is_first and way != WHOLE and layers == arguments.whole
        with tempfile.TemporaryDirectory() as directory:
            for temperature in ("cold", "warm") if is_warm else ("cold",):
                told = process(asked, Path(directory))
                cells = (told["first_s"], told["outside_s"], told["process_s"])
                shown = ["" if cell is None else f"{cell:.2f}" for cell in cells]
                row = (way, layers, temperature, *shown, told["compiles"])
                print(f"| {' | '.join(map(str, row))} |", flush=True)


def process(asked: dict[str, Any], directory: Path) -> dict[str, Any]:
    """One start."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor"),
        "TRITON_CACHE_DIR": str(directory / "triton"),
    }
    one = json.dumps({**asked, "cache_dir": str(directory / "ours")})
    begin = time.perf_counter()
    result = subprocess.run(
        [sys.executable, __file__, "--one", one],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise SystemExit(result.stderr)
    process_s = time.perf_counter() - begin
    return {"process_s": process_s, **json.loads(result.stdout.splitlines()[-1])}


def start(asked: dict[str, Any]) -> dict[str, Any]:
    """The first call of this process."""
    shape = SHAPES[asked["shape"]].with_layers(asked["layers"])
    outside = timed_backend()
    with torch.no_grad():
        model = make_model(shape, torch.device(asked["device"]))
        way, options = asked["way"], {"cache_dir": asked["cache_dir"]}
        if way == RUNNER:
            paged = on_paged_cache(model, shape, asked["attention"])
            compiled: Any = torch.compile(paged.module, backend="cudagraph_modes", options=options)
            runner = runner_of_all_sizes(compiled, paged, STATIC, shape, options=options)

            def first() -> None:
                runner.capture(progress=False)
                runner.run(decode(shape, 1).batch)

        else:
            compiled = compiled_for(model, way, options)
            first = StaticSteps(model, shape).step(compiled)
        first_s = Clock(model.device).seconds(first)
    if way == WHOLE:
        return {"first_s": first_s, "outside_s": None, "compiles": ""}
    return {"first_s": first_s, "outside_s": sum(outside), "compiles": stats(compiled).compiles}


def timed_backend() -> list[float]:
    """Seconds of each call of the backend, which Dynamo waits for."""
    seconds: list[float] = []
    original = CudagraphModesBackend.__call__

    def timed(backend: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return original(backend, *args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - begin)

    CudagraphModesBackend.__call__ = timed
    return seconds


if __name__ == "__main__":
    main()
