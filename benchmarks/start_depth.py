"""What a first call takes, cold and warm, for models of several depths, and what Dynamo has of it.

Each start is a process of its own, timed from `torch.compile` to the end of the first call; the
warm one has the caches that the cold one before it found empty. Pieces that are alike are compiled
once, so what does not grow with depth is all but Dynamo's part.

    python benchmarks/start_depth.py --shape 0.6B --layers 28 --whole 28 --repeats 3
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from compile_backend.bench.request import OURS, PAGED, STATIC, TORCH_COMPILE
from compile_backend.bench.start_up import first_call

MODE = "FULL_AND_PIECEWISE"
RUNNER = "runner with all captures"
WAYS = {
    TORCH_COMPILE: {"path": STATIC, "variant": TORCH_COMPILE},
    RUNNER: {"path": PAGED, "variant": OURS, "mode": MODE},
    MODE: {"path": STATIC, "variant": OURS, "mode": MODE},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="0.6B")
    parser.add_argument("--layers", default="14,28,56")
    parser.add_argument(
        "--whole", type=int, default=28, help="depth of torch.compile and warm starts"
    )
    parser.add_argument("--attention", default="triton", help="of the runner")
    parser.add_argument(
        "--runner", action=argparse.BooleanOptionalAction, default=True, help="measure it, too"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--repeats", type=int, default=1, help="of cold starts without a runner, in turns"
    )
    arguments = parser.parse_args()
    print("| way | layers | caches | first call s | outside Dynamo s | process s | compiles |")
    print("|---|---|---|---|---|---|---|")
    depths = [int(depth) for depth in arguments.layers.split(",")]
    of_round = [(TORCH_COMPILE, arguments.whole), *((MODE, depth) for depth in depths)]
    starts = of_round * arguments.repeats
    if arguments.runner:
        starts.append((RUNNER, arguments.whole))
    found: dict[tuple[str, int], list[float]] = {}
    for way, layers in starts:
        asked = {**vars(arguments), **WAYS[way], "layers": layers, "options": {}}
        is_first = (way, layers) not in found
        is_warm = is_first and way != TORCH_COMPILE and layers == arguments.whole
        with tempfile.TemporaryDirectory() as directory:
            for temperature in ("cold", "warm") if is_warm else ("cold",):
                told = first_call(asked, Path(directory))
                if temperature == "cold":
                    found.setdefault((way, layers), []).append(told["first_call_s"])
                row = (way, layers, temperature, *cells(told), told.get("compiles", ""))
                print(f"| {' | '.join(map(str, row))} |", flush=True)
    whole = found[of_round[0]]
    for depth in depths:
        ratios = [own / other for own, other in zip(found[MODE, depth], whole, strict=True)]
        print(
            f"cold, {MODE} of {depth} layers / {TORCH_COMPILE} of {arguments.whole}, by round: "
            f"{median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
        )


def cells(told: dict[str, Any]) -> list[str]:
    """Seconds of the first call, of it outside of Dynamo if that is known, and of the process."""
    seconds = (told["first_call_s"], told.get("backend_s"), told["process_s"])
    return ["" if each is None else f"{each:.2f}" for each in seconds]


if __name__ == "__main__":
    main()
