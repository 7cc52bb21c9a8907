"""Time of a step of a model that is spread over the GPUs of one host.

Its sums over ranks are whole, in shares, or in shares that overlap with products. A Llama of 4
layers of an 8B model (random bf16 weights) takes prompts at NONE, PIECEWISE and FULL. Each setting
is compiled by itself; all of them run in turns, in one process for each rank. A round counts as
long as it took the slowest rank.

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py \
        --out benchmarks/results/tensor_parallel

With `--tiny`, or without a GPU for each rank, a small model runs on the CPU. That shows that it
works and means nothing for speed.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from printed import command
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import compile_backend
from compile_backend import BatchDescriptor, CUDAGraphMode
from compile_backend.bench.figures import cell, spread
from compile_backend.bench.results import Results, about, table
from compile_backend.bench.rounds import Clock
from compile_backend.bench.shapes import SHAPES, make_model

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from compile_backend.bench.rounds import Step

SETTINGS = {
    "off": (),
    "sequence parallelism": ("enable_sequence_parallelism",),
    "overlap": ("enable_sequence_parallelism", "enable_async_tp"),
}
# What each flag runs, as `stats` counts it.
PASSES = {
    "enable_sequence_parallelism": "sequence_parallelism",
    "enable_async_tp": "async_tp",
}
MODES = (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
_8B = SHAPES["8B"]
LARGE = replace(
    _8B,
    name="Llama, 4 layers of an 8B model, vocabulary of 32000, bfloat16",
    sizes={**_8B.sizes, "num_hidden_layers": 4, "vocab_size": 32000},
)
TINY = replace(
    _8B,
    name="Llama, a tiny layer, float32",
    sizes={
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
    },
)
# Column-wise layers give each rank heads and channels of its own; row-wise ones end with a sum
# over the ranks.
PLAN = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}
# Variables that choose how ranks exchange; results name those that are set.
SWITCHES = (
    "NCCL_NVLS_ENABLE",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",
    "TORCH_SYMM_MEM_ENABLE_NATIVE_ASYNC_TP",
)
TIMEOUT = timedelta(seconds=60)
WARM_UPS = 3
"""A warm-up, a capture, and a replay."""


@dataclass(kw_only=True)
class SpreadOverRanks(Results):
    """What was found, besides what it is about.

    Attributes:
        changed: by setting, the places that each pass changed.
        steps: a row for each number of tokens, mode and setting.
    """

    changed: dict[str, dict[str, int]] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)

    def markdown(self) -> str:
        """All of it as tables, below what it is about."""
        changed = [
            (setting, *(places.get(name, 0) for name in PASSES.values()))
            for setting, places in self.changed.items()
        ]
        steps = [
            (
                row["tokens"],
                row["mode"],
                row["setting"],
                cell(row["us"], 0),
                f"{row['of_off']['median']:.3f}",
                f"{row['off_unsharded']:.1e}",
                "yes" if row["is_same_again"] else "no",
            )
            for row in self.steps
        ]
        headings = (
            "tokens",
            "mode",
            "setting",
            "us (min..max)",
            "of off",
            "off the unsharded model",
            "same bits again",
        )
        tables = [table(("setting", *PASSES.values()), changed), table(headings, steps)]
        return "\n".join([super().markdown(), *("\n".join([*lines, ""]) for lines in tables)])


@dataclass(frozen=True, slots=True)
class Ranks:
    """What the processes do together.

    Attributes:
        device: of this one.
    """

    device: torch.device

    def largest(self, values: Sequence[float]) -> list[float]:
        """Of each value, the largest that any rank has."""
        found = torch.tensor(values, device=self.device, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return [float(value) for value in found.cpu()]

    def rounds(
        self, ways: Mapping[str, Step], *, num_rounds: int, num_steps: int
    ) -> dict[str, list[float]]:
        """Microseconds of the slowest rank's step, in each round; the ways take turns."""
        clock = Clock(self.device)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(num_rounds):
            for name, step in ways.items():
                dist.barrier()  # all ranks start together
                times[name].append(clock.wall_ms(step, num_steps) * 1e3)
        return {name: self.largest(own) for name, own in times.items()}


class Told(logging.Handler):
    """Warnings of the backend, kept."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one."""
        self.messages.append(record.getMessage())

    def of(self, word: str) -> str:
        """The first one with this word."""
        return next((text for text in self.messages if word in text), "no warning says why")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=sizes, default=(8, 512, 2048), help="of each prompt")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, help="writes OUT.json and OUT.md")
    arguments = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("runs in several processes: start it by torchrun --nproc-per-node 2")
    rank, num_ranks = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    logging.basicConfig(level=logging.ERROR if rank else logging.WARNING)
    if not arguments.tiny and torch.cuda.device_count() >= num_ranks:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=TIMEOUT, device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        run(arguments, device)
    except Exception:  # noqa: BLE001 - told, and the process ends at once
        # Captured exchanges may keep NCCL from ending, and torchrun ends the other ranks only when
        # this one has ended.
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
    dist.destroy_process_group()


def sizes(text: str) -> tuple[int, ...]:
    """`8,512` as numbers."""
    return tuple(sorted({int(size) for size in text.split(",")}))


@torch.no_grad()
def run(arguments: argparse.Namespace, device: torch.device) -> None:
    """Measure, and on the first rank tell."""
    shape = LARGE if device.type == "cuda" else TINY
    model = make_model(shape, device)
    generator = torch.Generator().manual_seed(1)
    prompts = {
        n: torch.randint(model.config.vocab_size, (1, n), generator=generator).to(device)
        for n in arguments.tokens
    }
    expected = {n: model(ids, use_cache=False).logits for n, ids in prompts.items()}
    parallelize_module(model, init_device_mesh(device.type, (dist.get_world_size(),)), PLAN)

    results = SpreadOverRanks(about=about_ranks(shape.name, device))
    compiled = compile_settings(model, prompts, results)
    ranks = Ranks(device)
    for n, ids in prompts.items():
        for mode in MODES:
            say(f"{n} tokens at {mode.name}")
            ways = {name: step_at(mode, ids, way) for name, way in compiled.items()}
            facts = {name: accuracy(step, expected[n], ranks) for name, step in ways.items()}
            times = ranks.rounds(ways, num_rounds=arguments.rounds, num_steps=arguments.steps)
            results.steps += [
                {
                    "tokens": n,
                    "mode": mode.name,
                    "setting": name,
                    "us": spread(us),
                    "of_off": spread([a / b for a, b in zip(us, times["off"], strict=True)]),
                    **facts[name],
                }
                for name, us in times.items()
            ]
    for name, way in compiled.items():
        check_graphs(name, way)
    if dist.get_rank() == 0:
        print(results.markdown())
        if arguments.out is not None:
            results.write(arguments.out)


def about_ranks(shape: str, device: torch.device) -> dict[str, str]:
    """How the figures came about, by name."""
    num_ranks = dist.get_world_size()
    found = about(command(f"torchrun --nproc-per-node {num_ranks}"), shape, device)
    found["ranks"] = f"{num_ranks}, over {'NCCL' if device.type == 'cuda' else 'gloo'}"
    switched = [f"{name}={os.environ[name]}" for name in SWITCHES if name in os.environ]
    return {**found, "environment": " ".join(switched)} if switched else found


def compile_settings(
    model: torch.nn.Module, prompts: Mapping[int, torch.Tensor], results: SpreadOverRanks
) -> dict[str, Any]:
    """One compiled model for each setting that can be had here, warm and with all its graphs."""
    told = Told()
    logging.getLogger("compile_backend").addHandler(told)
    ways = {}
    for setting, flags in SETTINGS.items():
        say(f"compile and capture: {setting}")
        options: dict[str, Any] = {
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "cudagraph_capture_sizes": list(prompts),
            "pass_config": dict.fromkeys(flags, True),
        }
        if model.device.type == "cpu":
            options["piece_compiler"] = "eager"  # quick to start; speed means nothing there
        way = torch.compile(model, backend="cudagraph_modes", dynamic=True, options=options)
        for ids in prompts.values():
            for mode in MODES:
                for _ in range(WARM_UPS):
                    step_at(mode, ids, way)()
        changed = compile_backend.stats(way).passes
        idle = [flag for flag in flags if not changed.get(PASSES[flag])]
        if idle:
            results.notes.append(f"The setting {setting!r} is left out: {told.of(idle[-1])}.")
            say(results.notes[-1])
            continue
        results.changed[setting] = dict(changed)
        check_graphs(setting, way)
        ways[setting] = way
    return ways


def step_at(mode: CUDAGraphMode, ids: torch.Tensor, way: Any) -> Step:
    """A step of one prompt, whose logits it returns."""
    batch = BatchDescriptor(ids.numel(), 1)

    def step() -> torch.Tensor:
        with compile_backend.set_forward_context(
            cudagraph_runtime_mode=mode, batch_descriptor=batch
        ):
            logits: torch.Tensor = way(ids, use_cache=False).logits
            return logits

    return step


def check_graphs(setting: str, way: Any) -> None:
    """Fail where a step does not run what the table says."""
    report = compile_backend.stats(way)
    of_passes = {PASSES[flag] for flag in SETTINGS[setting]}
    wrong = {
        f"{report.graphs} graphs instead of one": report.graphs != 1,
        "; ".join(report.downgrades): report.downgrades,
        "captures failed": report.total("failed_captures"),
        "no full graph was replayed": not report.total("replays", "FULL"),
        "no piece was replayed": not report.total("replays", "PIECEWISE"),
        "another setting's graph": of_passes != {*PASSES.values()} & {*report.passes},
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise RuntimeError(f"{setting}: {what}")


def accuracy(step: Step, expected: torch.Tensor, ranks: Ranks) -> dict[str, Any]:
    """How far logits are from those of the unsharded model, and whether they stay the same."""
    logits = step().clone()  # a graph's next replay overwrites them
    is_other = not torch.equal(step(), logits)
    difference = (logits.double() - expected.double()).norm() / expected.double().norm()
    if not torch.isfinite(difference):
        raise RuntimeError("logits are not finite")
    off_unsharded, changes = ranks.largest([float(difference), float(is_other)])
    return {"off_unsharded": off_unsharded, "is_same_again": not changes}


def say(text: str) -> None:
    """Show what is done, once."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
