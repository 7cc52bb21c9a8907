"""Host and wall time of one decode step, every way of running it side by side in one process.

A Llama-like model of 0.6B parameters (random bf16 weights, batch 1, static cache of 1024) takes
the same decode step eagerly, through `torch.compile`, `reduce-overhead`, hand-captured graphs, and
through this backend in its modes. First calls are cold: each compiles on caches of its own.

    python benchmarks/decode_modes.py --out benchmarks/results/decode_modes
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch._inductor.utils
from printed import Printed, command

from compile_backend.bench.request import (
    BY_HAND,
    EAGER,
    OURS,
    REDUCE_OVERHEAD,
    STATIC,
    TORCH_COMPILE,
    BenchRequest,
)
from compile_backend.bench.results import Results, about
from compile_backend.bench.shapes import SHAPES, make_model
from compile_backend.bench.static_steps import StaticBench

MODELS = {"0.6B": "llama-0.6B", "tiny": "tiny"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=MODELS, default="0.6B")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, help="writes OUT.json and OUT.md")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    request = BenchRequest(
        shape=SHAPES[MODELS[arguments.shape]],
        device=device,
        variants=(EAGER, TORCH_COMPILE, REDUCE_OVERHEAD, BY_HAND, OURS),
        modes=("NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"),
        paths=(STATIC,),
        options={"disable_cache": True},
        num_rounds=arguments.rounds,
        num_steps=arguments.steps,
    )
    results = Results(about=about(command(), request.shape.name, device))
    config: Any = torch.compiler.config
    with torch.no_grad(), config.patch(recompile_limit=32):
        warm = torch.compile(lambda x: torch.relu(x @ x) + 1)  # Inductor's own start-up
        warm(torch.ones(64, 64, device=device))
        model = make_model(request.shape, device)
        cold = torch._inductor.utils.fresh_cache
        bench = StaticBench(model, request, Printed(), results.failures, cold)
        results.static = bench.results()
    print(results.markdown())
    if arguments.out is not None:
        results.write(arguments.out)


if __name__ == "__main__":
    main()
