"""What fusions save: steps of a model whose linear layers take 8-bit floats, with and without.

The weights of a seeded random model are quantised per tensor, and what its linear layers are given
by a static scale. Each variant is compiled anew; all of them run in turns.

    python benchmarks/fusions.py --shape 8B --attention triton
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import torch

from compile_backend.backend import stats
from compile_backend.bench.figures import cell, spread
from compile_backend.bench.fp8_linears import replace_linears
from compile_backend.bench.paged_batches import decode, prefill
from compile_backend.bench.paged_ways import make_runner, on_paged_cache, run_at
from compile_backend.bench.rounds import Clock, measure
from compile_backend.bench.shapes import SHAPES, make_model

if TYPE_CHECKING:
    from compile_backend.bench.rounds import Step

VARIANTS: dict[str, dict[str, bool]] = {
    "off": {},
    "enable_fusion": {"enable_noop": True, "enable_fusion": True},
    "enable_attn_fusion": {"enable_attn_fusion": True},
    "both": {"enable_noop": True, "enable_fusion": True, "enable_attn_fusion": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("tiny", "0.6B", "8B"), default="0.6B")
    parser.add_argument("--attention", default="triton")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    device = torch.empty(0, device=arguments.device).device
    largest = max(shape.prefills)
    with torch.no_grad():
        model = make_model(shape, device).to(torch.bfloat16)
        replace_linears(model, "static", input_scale=0.02)
        paged = on_paged_cache(model, shape, arguments.attention)
        works = [*map(decode, [shape] * len(shape.decodes), shape.decodes)]
        works += map(prefill, shape.prefills)
        ways: dict[str, dict[str, Step]] = {work.name: {} for work in works}
        print("| variant | fused |\n|---|---|")
        for name, flags in VARIANTS.items():
            compiled = torch.compile(
                paged.module, backend="cudagraph_modes", options={"pass_config": flags}
            )
            runner = make_runner(
                compiled,
                paged,
                "FULL_AND_PIECEWISE",
                options={},
                sizes=[*shape.decodes, *shape.prefills],
                max_num_seqs=max(shape.decodes),
                max_num_tokens=largest,
            )
            runner.capture(progress=False)
            report: Any = stats(compiled)
            print(f"| {name} | {fused(report.passes, report.graphs)} |", flush=True)
            for work in works:
                ways[work.name][name] = run_at(runner, work)
        print("\n| step | " + " | ".join(f"{name}, wall ms" for name in VARIANTS) + " |")
        print("|---|" + "---|" * len(VARIANTS))
        for work in works:
            for step in ways[work.name].values():
                step()
            times = measure(
                ways[work.name],
                Clock(device),
                num_rounds=arguments.rounds,
                num_steps=arguments.steps,
            )
            cells = [cell(spread(times[name].wall_ms), 3) for name in VARIANTS]
            print(f"| {work.name} | " + " | ".join(cells) + " |", flush=True)


def fused(changed: dict[str, int], num_graphs: int) -> str:
    """How many places of one graph each fusion changed."""
    names = [name for name in changed if name.endswith("_fp8")]
    return ", ".join(f"{name} {changed[name] // num_graphs}" for name in names) or "nothing"


if __name__ == "__main__":
    main()
