"""Host and wall time of one decode step, every way of running it side by side in one process.

A Llama-like model of 0.6B parameters (random bf16 weights, batch 1, static cache of 1024) takes
the same decode step eagerly, through `torch.compile`, `reduce-overhead`, hand-captured graphs, and
through this backend in its modes. Rounds are interleaved, so that drift of the machine hits all.

    python benchmarks/decode_modes.py --out benchmarks/results/decode_modes
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
import torch._inductor.utils
from results_files import about, cell, summary, write
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from compile_backend import stats
from compile_backend.backend import cudagraph_modes

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4},
}
CACHE_LEN = 1024
POSITION = 100
MODES = ("NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE")


def make_model(shape: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        **SHAPES[shape],
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        attn_implementation="sdpa",
    )
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def decode_step(
    run: Callable[..., Any], model: LlamaForCausalLM, caches: list[StaticCache]
) -> Callable[[], torch.Tensor]:
    """One decode step on a cache of its own, which joins `caches`."""
    cache = StaticCache(config=model.config, max_cache_len=CACHE_LEN)
    cache.early_initialization(1, 8, 128, torch.bfloat16, torch.device("cuda"))
    caches.append(cache)
    rewind(caches)
    token = torch.ones(1, 1, dtype=torch.long, device="cuda")
    position = torch.full((1, 1), POSITION, device="cuda")

    def step() -> torch.Tensor:
        logits: torch.Tensor = run(
            token, past_key_values=cache, position_ids=position, use_cache=True
        ).logits
        return logits

    return step


def rewind(caches: list[StaticCache]) -> None:
    """Let every cache go on at `POSITION`; each step of some releases moves it by one."""
    for cache in caches:
        for layer in cache.layers:
            length = getattr(layer, "cumulative_length", None)
            if isinstance(length, torch.Tensor):
                length.fill_(POSITION)


def captured_by_hand(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """A step as one CUDA graph, made with PyTorch alone."""
    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()

    def replay(_inputs: object = step) -> torch.Tensor:  # the graph reads what `step` holds
        graph.replay()
        return logits

    return replay


def wall_ms(step: Callable[[], torch.Tensor], num_steps: int) -> float:
    """Wall time of a step over a run of steps, ms."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / num_steps * 1e3


def host_us(
    steps: dict[str, Callable[[], torch.Tensor]], num_steps: int
) -> dict[str, list[float]]:
    """Host time of every step, us, on an idle device; the ways of running it take turns."""
    rows: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(num_steps):
        for name, step in steps.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            rows[name].append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return rows


def first_call(step: Callable[[], torch.Tensor]) -> float:
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def compiled_variants(
    model: LlamaForCausalLM, cold_s: dict[str, float], caches: list[StaticCache]
) -> tuple[dict[str, Callable[[], torch.Tensor]], dict[str, Any]]:
    """Every compiled way of running the step; fills in how long each first call took."""
    steps: dict[str, Callable[[], torch.Tensor]] = {}
    compiled: dict[str, Any] = {}
    for mode in MODES:
        compiled[mode] = torch.compile(
            model, backend=cudagraph_modes, options={"cudagraph_mode": mode}
        )
    compiled["torch.compile"] = torch.compile(model)
    compiled["reduce-overhead"] = torch.compile(model, mode="reduce-overhead")
    for name, run in compiled.items():
        gc.collect()
        steps[name] = decode_step(run, model, caches)
        with torch._inductor.utils.fresh_cache():
            cold_s[name] = first_call(steps[name])
        for _ in range(3):
            steps[name]()
        print(f"{name}: first call {cold_s[name]:.1f} s", file=sys.stderr, flush=True)
    return steps, compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.6B")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, help="writes OUT.json and OUT.md")
    arguments = parser.parse_args()
    torch._dynamo.config.recompile_limit = 32
    with torch.no_grad():
        warm = torch.compile(lambda x: torch.relu(x @ x) + 1)  # Inductor's own start-up
        warm(torch.ones(64, 64, device="cuda"))
        model = make_model(arguments.shape)
        caches: list[StaticCache] = []
        eager = decode_step(model, model, caches)
        reference = eager().float()
        cold_s: dict[str, float] = {}
        steps, compiled = compiled_variants(model, cold_s, caches)
        steps["graph by hand, whole"] = captured_by_hand(
            decode_step(compiled["torch.compile"], model, caches)
        )
        steps["graph by hand, pieces"] = captured_by_hand(
            decode_step(compiled["NONE"], model, caches)
        )
        steps = {"eager": eager, **steps}
        walls: dict[str, list[float]] = {name: [] for name in steps}
        hosts: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(arguments.rounds):
            rewind(caches)
            for name, step in steps.items():
                walls[name].append(wall_ms(step, arguments.steps))
            rewind(caches)
            for name, times in host_us(steps, arguments.steps).items():
                hosts[name].append(statistics.median(times))
        rewind(caches)
        errors = {
            name: (step().float() - reference).abs().max().item() for name, step in steps.items()
        }
    results = {
        name: {
            "wall_ms": summary(walls[name]),
            "host_us": summary(hosts[name]),
            "first_call_s": cold_s.get(name),
            "max_error_to_eager": errors[name],
        }
        for name in steps
    }
    write_results(results, {mode: stats(compiled[mode]).as_dict() for mode in MODES}, arguments)


def write_results(
    results: dict[str, Any], reports: dict[str, Any], arguments: argparse.Namespace
) -> None:
    lines = ["| variant | wall ms (min..max) | host us (min..max) | first call s |"]
    lines += ["|---|---|---|---|"]
    for name, row in results.items():
        cold = row["first_call_s"]
        lines.append(
            f"| {name} | {cell(row['wall_ms'], 3)} | {cell(row['host_us'], 1)} "
            f"| {f'{cold:.1f}' if cold else ''} |"
        )
    document = {"results": results, "reports": reports}
    write(about(arguments.shape), lines, document, arguments.out)


if __name__ == "__main__":
    main()
