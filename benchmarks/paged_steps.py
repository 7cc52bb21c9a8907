"""Wall and host time of a model's steps on a paged cache: every mode, every attention backend.

A Hugging Face model with random bf16 weights decodes batches and prefills prompts through
`GraphModelRunner`, beside a graph of the same compiled model that was captured by hand. It is
compiled once: neither modes nor attention backends change what is compiled.

    python benchmarks/paged_steps.py --shape 0.6B --out benchmarks/results/paged_steps_0.6B
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch._inductor.utils
import transformers
from results_files import about, cell, summary, write

from compile_backend import BatchDescriptor, CUDAGraphMode, reset, set_forward_context, stats
from compile_backend.attention.builder import AttentionBatch
from compile_backend.attention.huggingface import (
    CAUSAL_LM_INPUTS,
    CAUSAL_LM_OUTPUT,
    PagedModel,
    paged_model,
)
from compile_backend.batch_loader import BatchLoader
from compile_backend.runner import GraphModelRunner
from compile_backend.runner_batch import Batch
from compile_backend.step_inputs import StepInputs
from compile_backend.torch_internals.dynamo import mark_step_input

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_SIZE = 16
CONTEXT = 600
MAX_MODEL_LEN = 4608
DECODES = (1, 8, 64)
PREFILLS = (512, 4096)
NUM_BLOCKS = max(DECODES) * -(-(CONTEXT + 8) // BLOCK_SIZE)

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of step."""

    name: str
    batch: Batch

    @property
    def num_tokens(self) -> int:
        """Of all requests."""
        return int(np.sum(self.batch.query_lens))


def make_model(shape: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if shape == "8B":
        config = transformers.LlamaConfig(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=128256,
            max_position_embeddings=8192,
        )
    else:
        small = shape == "tiny"
        config = transformers.Qwen3Config(
            hidden_size=256 if small else 1024,
            intermediate_size=512 if small else 3072,
            num_hidden_layers=4 if small else 28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=1024 if small else 151936,
            tie_word_embeddings=True,
            max_position_embeddings=8192,
        )
    with torch.device("cuda"):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.AutoModelForCausalLM.from_config(config)
        torch.set_default_dtype(before)
    return model.eval()


def decode(num_reqs: int) -> Work:
    """Every request is at `CONTEXT` tokens and adds one."""
    width = NUM_BLOCKS // max(DECODES)
    table = np.arange(num_reqs * width, dtype=np.int32).reshape(num_reqs, width)
    batch = Batch(
        query_lens=np.ones(num_reqs, np.int32),
        inputs={
            "input_ids": np.ones((1, num_reqs), np.int64),
            "position_ids": np.full((1, num_reqs), CONTEXT),
            "logits_indices": np.arange(num_reqs),
        },
        attention=attention_batch(np.full(num_reqs, CONTEXT + 1, np.int32), table, CONTEXT),
    )
    return Work(f"decode {num_reqs}", batch)


def prefill(num_tokens: int) -> Work:
    """One prompt of so many tokens."""
    table = np.arange(num_tokens // BLOCK_SIZE, dtype=np.int32)[None]
    batch = Batch(
        query_lens=np.array([num_tokens], np.int32),
        inputs={
            "input_ids": np.ones((1, num_tokens), np.int64),
            "position_ids": np.arange(num_tokens)[None],
            "logits_indices": np.array([num_tokens - 1]),
        },
        attention=attention_batch(np.array([num_tokens], np.int32), table, 0),
    )
    return Work(f"prefill {num_tokens}", batch)


def attention_batch(seq_lens: np.ndarray, table: np.ndarray, first: int) -> AttentionBatch:
    positions = [np.arange(first, seq_len) for seq_len in seq_lens]
    slots = [
        row[at // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + at % BLOCK_SIZE
        for row, at in zip(table, positions, strict=True)
    ]
    return AttentionBatch(seq_lens=seq_lens, block_table=table, slot_mapping=np.concatenate(slots))


def make_runner(compiled: Any, paged: PagedModel, mode: str, sizes: Any) -> GraphModelRunner:
    return GraphModelRunner(
        compiled,
        {"cudagraph_mode": mode, **({} if sizes is None else {"cudagraph_capture_sizes": sizes})},
        input_spec=CAUSAL_LM_INPUTS,
        output_shape=CAUSAL_LM_OUTPUT,
        max_num_seqs=max(DECODES) if sizes is not None else 256,
        max_num_batched_tokens=max(PREFILLS),
        metadata_builder=paged.builder,
        device="cuda",
    )


def captured_by_hand(compiled: Any, paged: PagedModel, work: Work) -> Callable[[], torch.Tensor]:
    """The step as one CUDA graph made with PyTorch alone, on inputs of its own."""
    batch, lens = work.batch, work.batch.query_lens
    num_tokens, num_reqs = work.num_tokens, len(lens)
    inputs = StepInputs(
        (*CAUSAL_LM_INPUTS, *paged.builder.input_spec),
        torch.device("cuda", 0),
        max_num_tokens=num_tokens,
        max_num_reqs=num_reqs,
    )
    loader = BatchLoader(inputs, CAUSAL_LM_INPUTS, paged.builder)
    layout = inputs.layout(num_tokens, num_reqs)
    loader.load(layout, batch, lens, num_tokens)
    arguments = {spec.name: layout.tensors[spec.name] for spec in CAUSAL_LM_INPUTS}
    for spec in CAUSAL_LM_INPUTS:
        mark_step_input(arguments[spec.name], spec.axis)
    key = BatchDescriptor(num_tokens, num_reqs, uniform=num_tokens == num_reqs)
    step = paged.builder.build_for_graph(layout.tensors, key, batch.attention, lens)
    with set_forward_context(step):
        for _ in range(2):
            compiled(**arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = compiled(**arguments)

    def replay() -> torch.Tensor:
        assert inputs  # the graph reads them
        graph.replay()
        return logits

    return replay


def host_us(step: Callable[[], Any], num_steps: int) -> list[float]:
    """Host time of each step on an idle device."""
    times = []
    for _ in range(num_steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return times


def measured(step: Callable[[], Any], num_steps: int) -> tuple[float, float]:
    """Wall ms of a step in a run of steps, and host us of a step on an idle device."""
    step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    torch.cuda.synchronize()
    wall_ms = (time.perf_counter() - start) / num_steps * 1e3
    return wall_ms, statistics.median(host_us(step, num_steps))


def backend_rows(
    compiled: Any, paged: PagedModel, name: str, arguments: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Times of all steps at all modes with one attention backend."""
    sizes = sorted((*DECODES, *PREFILLS))
    works = [*map(decode, DECODES), *map(prefill, PREFILLS)]
    both = make_runner(compiled, paged, "FULL_AND_PIECEWISE", sizes)
    both.capture(progress=False)
    ways: dict[str, Callable[[], Any]] = {}
    for work in works:
        for mode in (NONE, PIECEWISE, FULL):
            if mode is not FULL or work.name.startswith("decode"):
                ways[f"{work.name} | {mode.name}"] = run_at(both, work, mode)
    for work in works[: len(DECODES)]:
        ways[f"{work.name} | graph by hand"] = captured_by_hand(compiled, paged, work)
    whole = make_runner(compiled, paged, "FULL", sizes)
    whole.capture(progress=False)
    if whole.report().mode_resolved == "FULL":
        for work in works:
            ways[f"{work.name} | FULL, any batch"] = run_at(whole, work, FULL)
    rows: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(arguments.rounds):
        for way, step in ways.items():
            rows[way].append(measured(step, arguments.steps))
    for way, measures in rows.items():
        wall, host = (statistics.median(values) for values in zip(*measures, strict=True))
        print(f"{name} | {way} | {wall:.3f} ms | {host:.0f} us", flush=True)
    return {
        f"{name} | {way}": {
            "wall_ms": summary([wall for wall, _ in measures]),
            "host_us": summary([host for _, host in measures]),
        }
        for way, measures in rows.items()
    }


def run_at(runner: GraphModelRunner, work: Work, mode: CUDAGraphMode) -> Callable[[], Any]:
    return lambda: runner.run(work.batch, highest_mode=mode)


def capture_of_all_sizes(compiled: Any, paged: PagedModel) -> dict[str, Any]:
    """Seconds and bytes of capturing the default sizes of both kinds."""
    reset(compiled)
    gc.collect()
    torch.cuda.empty_cache()
    runner = make_runner(compiled, paged, "FULL_AND_PIECEWISE", None)
    start = time.perf_counter()
    runner.capture(progress=False)
    whole_s = time.perf_counter() - start
    report = runner.report()
    return {
        "whole_s": whole_s,
        **{
            mode.name: {
                "seconds": report.capture_s[mode],
                "MiB": report.num_bytes[mode] / 2**20,
                "graphs": report.num_graphs.get(mode, 0),
            }
            for mode in report.capture_s
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("tiny", "0.6B", "8B"), default="0.6B")
    parser.add_argument("--attention", default="triton,flash_attn_3,flashinfer,flex_attention")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--capture", action="store_true", help="time the capture of all sizes")
    parser.add_argument("--profile", action="store_true", help="name the kernels of one step")
    parser.add_argument("--out", type=Path, help="writes OUT.json and OUT.md")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    failures: dict[str, str] = {}
    captures: dict[str, Any] = {}
    kernels: list[str] = []
    with torch.no_grad():
        model = make_model(arguments.shape)
        compiled, profiled = None, None
        for name in arguments.attention.split(","):
            try:
                paged = paged_model(
                    model,
                    num_blocks=NUM_BLOCKS,
                    block_size=BLOCK_SIZE,
                    max_model_len=MAX_MODEL_LEN,
                    backend=name,
                )
                if compiled is None:
                    compiled = torch.compile(paged.module, backend="cudagraph_modes")
                start = time.perf_counter()
                results |= backend_rows(compiled, paged, name, arguments)
                print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
                profiled = profiled or paged
                if arguments.capture and not captures:
                    captures[name] = capture_of_all_sizes(compiled, paged)
                    print(captures, flush=True)
            except Exception as error:  # noqa: BLE001 - the others are measured all the same
                failures[name] = f"{type(error).__name__}: {error}"[:600]
                traceback.print_exc()
            if compiled is not None:
                reset(compiled)
            gc.collect()
        if arguments.profile and profiled is not None:
            # Last: launches are slower for good once the profiler was there.
            kernels = kernels_of_a_step(compiled, profiled)
        compiles = stats(compiled).as_dict() if compiled is not None else {}
    write_results(results, failures, captures, kernels, compiles, arguments)


def kernels_of_a_step(compiled: Any, paged: PagedModel) -> list[str]:
    """The kernels that fill a decode step at batch 1, the longest first."""
    runner = make_runner(compiled, paged, "FULL_AND_PIECEWISE", sorted(DECODES))
    runner.capture(progress=False)
    work = decode(1)
    for _ in range(5):
        runner.run(work.batch)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            runner.run(work.batch)
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda e: e.device_time_total, reverse=True)
    return [
        f"{event.device_time_total / 10:.1f} us, {event.count / 10:.0f} x {event.key[:110]}"
        for event in events[:14]
    ]


def write_results(
    results: dict[str, Any],
    failures: dict[str, str],
    captures: dict[str, Any],
    kernels: list[str],
    compiles: dict[str, Any],
    arguments: argparse.Namespace,
) -> None:
    lines = ["| attention | step | mode | wall ms (min..max) | host us (min..max) |"]
    lines += ["|---|---|---|---|---|"]
    lines += [
        f"| {name} | {cell(row['wall_ms'], 3)} | {cell(row['host_us'], 1)} |"
        for name, row in results.items()
    ]
    lines += [f"\n{name} failed: {error}" for name, error in failures.items()]
    lines += [
        f"\nCapture of all default sizes, {name}: {json.dumps(c)}" for name, c in captures.items()
    ]
    if kernels:
        lines += ["", "Kernels of one decode step at batch 1:", ""]
        lines += [f"- {kernel}" for kernel in kernels]
    document = {
        "results": results,
        "failures": failures,
        "captures": captures,
        "kernels": kernels,
        "compiles": compiles,
    }
    write(about(arguments.shape), lines, document, arguments.out)


if __name__ == "__main__":
    main()
