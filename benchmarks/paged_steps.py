"""Wall and host time of a model's steps on a paged cache: every mode, every attention backend.

A Hugging Face model with random bf16 weights decodes batches and prefills prompts through
`GraphModelRunner`, beside a graph of the same compiled model that was captured by hand. It is
compiled once: neither modes nor attention backends change what is compiled.

    python benchmarks/paged_steps.py --shape 0.6B --out benchmarks/results/paged_steps_0.6B
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from printed import Printed, command

from compile_backend.bench.paged_batches import decode
from compile_backend.bench.paged_steps import PagedBench
from compile_backend.bench.paged_ways import make_runner, on_paged_cache
from compile_backend.bench.request import BY_HAND, OURS, PAGED, BenchRequest
from compile_backend.bench.results import Results, about
from compile_backend.bench.shapes import SHAPES, make_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("tiny", "0.6B", "8B", "moe"), default="0.6B")
    parser.add_argument("--attention", default="triton,flash_attn_3,flashinfer,flex_attention")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--capture", action="store_true", help="time the capture of all sizes")
    parser.add_argument("--profile", action="store_true", help="name the kernels of one step")
    parser.add_argument("--options", type=json.loads, default={}, help="of this backend, as JSON")
    parser.add_argument("--out", type=Path, help="writes OUT.json and OUT.md")
    arguments = parser.parse_args()
    request = BenchRequest(
        shape=SHAPES[arguments.shape],
        device=torch.device("cuda", 0),
        variants=(BY_HAND, OURS),
        modes=("NONE", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL"),
        paths=(PAGED,),
        attention=tuple(arguments.attention.split(",")),
        num_rounds=arguments.rounds,
        num_steps=arguments.steps,
        has_captures=arguments.capture,
        options=arguments.options,
    )
    results = Results(about=about(command(), arguments.shape, request.device))
    with torch.no_grad():
        model = make_model(request.shape, request.device)
        bench = PagedBench(model, request, Printed(), results.failures)
        results.paged, results.captures = bench.results()
        results.stats = bench.stats()
        if arguments.profile:
            # Last: launches are slower for good once the profiler was there.
            results.notes += kernels_of_a_step(model, request)
    print(results.markdown())
    if arguments.out is not None:
        results.write(arguments.out)


def kernels_of_a_step(model: PreTrainedModel, request: BenchRequest) -> list[str]:
    """The kernels that fill a decode step at batch 1, the longest first, as a Markdown list."""
    shape = request.shape
    paged = on_paged_cache(model, shape, request.attention[0])
    compiled = torch.compile(
        paged.module, backend="cudagraph_modes", options=dict(request.options)
    )
    sizes = sorted(shape.decodes)
    runner = make_runner(
        compiled,
        paged,
        "FULL_AND_PIECEWISE",
        options=request.options,
        sizes=sizes,
        max_num_seqs=sizes[-1],
        max_num_tokens=sizes[-1],
    )
    runner.capture(progress=False)
    work = decode(shape, 1)
    for _ in range(5):
        runner.run(work.batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            runner.run(work.batch)
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda e: e.device_time_total, reverse=True)
    return [
        "Kernels of one decode step at batch 1:",
        "",
        *(
            f"- {event.device_time_total / 10:.1f} us, {event.count / 10:.0f} x {event.key[:110]}"
            for event in events[:14]
        ),
    ]


if __name__ == "__main__":
    main()
