"""What two real processes do together; a script that `test_two_ranks` runs once for all its tests.

Its argument is a file for both to meet at. Each check returns facts that JSON can hold, and rank 0
prints those of all checks as its last line.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from every_mode import EveryMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from compile_backend.config import CUDAGraphMode
from compile_backend.distributed import RankAgreement
from compile_backend.errors import ConfigError
from compile_backend.runner import GraphModelRunner
from compile_backend.runner_batch import Batch
from compile_backend.step_inputs import Dim, InputSpec

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import tensor_parallel

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
    """Hard case F2: how far the pass is from the pass off, by mode and size; what was replayed."""
    torch.manual_seed(0)
    model = tensor_parallel.LlamaForCausalLM(tensor_parallel.CONFIG).eval()
    parallelize_module(model, init_device_mesh("cpu", (2,)), tensor_parallel.PLAN)
    model.requires_grad_(requires_grad=False)
    logits: dict[str, list[torch.Tensor]] = {}
    facts: dict[str, Any] = {}
    for is_on in (False, True):
        torch.compiler.reset()
        every = EveryMode(
            model,
            dynamic=True,
            options={
                "piece_compiler": "eager",
                "cudagraph_capture_sizes": tensor_parallel.SIZES,
                "pass_config": {"enable_sequence_parallelism": is_on},
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
            facts[f"{mode.name} {'on' if is_on else 'off'}"] = {
                "graphs": report.graphs,
                "replays": report.total("replays"),
                "unwrapped": report.passes["local_tensors"],
                "in_shares": report.passes.get("sequence_parallelism"),
            }
    facts["distances"] = {at: float((on - off).abs().max()) for at, (off, on) in logits.items()}
    return facts


def everywhere(fact: Any) -> list[Any]:
    facts = [None, None]
    dist.all_gather_object(facts, fact)
    return facts


def main() -> None:
    torch.set_num_threads(1)
    facts = {"example": example()}
    # Not at the port of the example, which the other rank may still hold.
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
    for check in (agreement, refused, sequence_parallelism):
        facts[check.__name__] = check()
    dist.destroy_process_group()
    if rank == 0:
        sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
