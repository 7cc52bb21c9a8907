"""What two real processes do together; a script that `test_two_ranks` runs once for all its tests.

Its argument is a file for both to meet at. Each check returns facts that JSON can hold, and rank 0
prints those of all checks as its last line.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from every_mode import EveryMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from compile_backend import pipeline
from compile_backend.attention.builder import AttentionBatch
from compile_backend.attention.huggingface import (
    CAUSAL_LM_INPUTS,
    CAUSAL_LM_OUTPUT,
    paged_model,
)
from compile_backend.config import CUDAGraphMode
from compile_backend.distributed import RankAgreement
from compile_backend.errors import ConfigError
from compile_backend.runner import GraphModelRunner
from compile_backend.runner_batch import Batch
from compile_backend.step_inputs import Dim, InputSpec

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import tensor_parallel

MAX_SECONDS = 220
SETTINGS: dict[str, tuple[str, ...]] = {
    "off": (),
    "in shares": ("enable_sequence_parallelism",),
    "overlapped": ("enable_sequence_parallelism", "enable_async_tp"),
}
RUNTIME_MODES = (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)


def example() -> dict[str, Any]:
    """What the example prints with the pass."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        tensor_parallel.main([tensor_parallel.SEQUENCE_PARALLELISM])
    return {"said": printed.getvalue()}


def agreement() -> dict[str, Any]:
    """Batches of each rank, and where they ran; the step itself needs equal sizes."""
    runner = GraphModelRunner(
        summed_over_ranks,
        {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [2, 4, 8]},
        input_spec=[InputSpec("x", (Dim.NUM_TOKENS, 3), torch.float32)],
        max_num_seqs=8,
        max_num_batched_tokens=32,
        ranks=RankAgreement.over(),
        device="cpu",
    )
    runner.capture(progress=False)
    ran, is_right = [], []
    for lens in (([1, 1], [1, 1]), ([1], [1] * 5), ([1, 1], [9]), ([], [1, 1, 1]), ([4], [])):
        own = lens[dist.get_rank()]
        before = steps(runner)
        x = torch.full((sum(own), 3), 1.0 + dist.get_rank())
        y = runner.run(Batch(query_lens=own, inputs={"x": x}))
        ran += [row for row, count in steps(runner).items() if count > before.get(row, 0)]
        # Rows of padding are 0.
        other = sum(lens[1 - dist.get_rank()])
        expected = x + (torch.arange(sum(own)) < other)[:, None] * (2.0 - dist.get_rank())
        is_right.append(torch.equal(y, expected))
    return {"ran": everywhere(ran), "is_right": everywhere(is_right)}


def summed_over_ranks(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    dist.all_reduce(y)
    return y


def steps(runner: GraphModelRunner) -> dict[str, int]:
    rows = runner.report().by_key.items()
    return {f"{mode.name} of {key.num_tokens}": counts.steps for (mode, key), counts in rows}


def refused() -> dict[str, Any]:
    """Settings of which one differs between the ranks."""
    runner = GraphModelRunner(
        lambda x: x * 2,
        {"cudagraph_capture_sizes": [2, 4]},
        input_spec=[InputSpec("x", (Dim.NUM_TOKENS, 3), torch.float32)],
        max_num_seqs=8 + dist.get_rank(),
        max_num_batched_tokens=32,
        ranks=RankAgreement.over(),
        device="cpu",
    )
    try:
        runner.capture(progress=False)
    except ConfigError as error:
        return {"told": everywhere(str(error))}
    return {"told": everywhere("nothing")}


@torch.no_grad()
def sequence_parallelism() -> dict[str, Any]:
    """Hard case F2: how far passes are from passes off, by mode and size; what was replayed.

    Ops that overlap run as their references here, which their pass is made to believe in.
    """
    model = seeded_llama()
    parallelize_module(model, init_device_mesh("cpu", (2,)), tensor_parallel.PLAN)
    logits: dict[str, list[torch.Tensor]] = {}
    facts: dict[str, Any] = {}
    pipeline.why_not_shared = lambda *_: None
    for setting, flags in SETTINGS.items():
        torch.compiler.reset()
        every = EveryMode(
            model,
            dynamic=True,
            options={
                "piece_compiler": "eager",
                "cudagraph_capture_sizes": tensor_parallel.SIZES,
                "pass_config": dict.fromkeys(flags, True),
            },
        )
        for mode in RUNTIME_MODES:
            call = every.in_mode(mode)
            for n in tensor_parallel.SIZES:
                ids = (7 * torch.arange(n) % 128)[None]
                for _ in range(3):
                    out = call(ids, use_cache=False).logits
                logits.setdefault(f"{mode.name} of {n}", []).append(out)
            report = every.stats(mode)
            facts[f"{mode.name} {setting}"] = {
                "graphs": report.graphs,
                "replays": report.total("replays"),
                "unwrapped": report.passes["local_tensors"],
                "in_shares": report.passes.get("sequence_parallelism"),
                "overlapped": report.passes.get("async_tp"),
            }
    facts["distances"] = {
        f"{at} {setting}": float((on - outputs[0]).abs().max())
        for at, outputs in logits.items()
        for setting, on in zip(SETTINGS, outputs, strict=True)
    }
    return facts


@torch.no_grad()
def paged() -> dict[str, Any]:
    """A runner of a sharded model on a paged cache: a prompt and decodes, and where they ran."""
    torch.compiler.reset()
    model = seeded_llama()
    tokens = list(range(5))
    expected = list(tokens)
    for _ in range(3):
        logits = model(torch.tensor([expected]), use_cache=False).logits
        expected.append(int(logits[0, -1].argmax()))
    sharded = parallelize_module(model, init_device_mesh("cpu", (2,)), tensor_parallel.PLAN)
    paged = paged_model(sharded, num_blocks=8, max_model_len=16)
    options = {
        "cudagraph_capture_sizes": [1, 8],
        "piece_compiler": "eager",
        "pass_config": {"enable_sequence_parallelism": True},
    }
    runner = GraphModelRunner(
        torch.compile(paged.module, backend="cudagraph_modes", options=options),
        options,
        input_spec=CAUSAL_LM_INPUTS,
        output_shape=CAUSAL_LM_OUTPUT,
        metadata_builder=paged.builder,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        ranks=RankAgreement.over(),
        device="cpu",
    )
    runner.capture(progress=False)
    num_new = len(tokens)
    for _ in range(3):
        count = len(tokens)
        logits = runner.run(
            Batch(
                query_lens=[num_new],
                inputs={
                    "input_ids": [tokens[-num_new:]],
                    "position_ids": [list(range(count - num_new, count))],
                    "logits_indices": [num_new - 1],
                },
                attention=AttentionBatch(seq_lens=[count], block_table=[[0, 1]]),
            )
        )
        tokens.append(int(logits.argmax()))
        num_new = 1
    ran = {at: count for at, count in steps(runner).items() if count}
    return {"tokens": everywhere(tokens), "expected": expected, "ran": everywhere(ran)}


def seeded_llama() -> Any:
    torch.manual_seed(0)
    model = tensor_parallel.LlamaForCausalLM(tensor_parallel.CONFIG).eval()
    return model.requires_grad_(requires_grad=False)


def everywhere(fact: Any) -> list[Any]:
    facts = [None, None]
    dist.all_gather_object(facts, fact)
    return facts


def main() -> None:
    # Ends, and tells where it stood, even if nobody is left to end it.
    faulthandler.dump_traceback_later(MAX_SECONDS, exit=True)
    torch.set_num_threads(1)
    facts = {"example": example()}
    # Not by the store of the example, which remembers that group.
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{sys.argv[1]}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    for check in (agreement, refused, sequence_parallelism, paged):
        facts[check.__name__] = check()
    dist.destroy_process_group()
    if rank == 0:
        sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
