"""A Hugging Face Llama over several processes, with and without sequence parallelism.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py
    torchrun --nproc-per-node 2 examples/tensor_parallel.py --sequence-parallelism

With a GPU for each process they talk by NCCL, else they are on the CPU and talk by gloo.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM

import compile_backend

SEQUENCE_PARALLELISM = "--sequence-parallelism"
CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
# Column-wise layers give each rank heads and channels of its own; row-wise ones end with a sum
# over the ranks.
PLAN = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "model.layers.*.self_attn.q_proj": ColwiseParallel(),
    "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}
SIZES = (5, 8, 64)


def main(arguments: list[str]) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    try:
        run(device, is_sequence_parallel=SEQUENCE_PARALLELISM in arguments)
    finally:
        dist.destroy_process_group()


@torch.no_grad()
def run(device: torch.device, *, is_sequence_parallel: bool) -> None:
    torch.manual_seed(0)  # the same weights on every rank
    model = LlamaForCausalLM(CONFIG).eval().to(device)
    prompts = {n: torch.randint(128, (1, n)).to(device) for n in SIZES}
    expected = {n: model(ids, use_cache=False).logits for n, ids in prompts.items()}

    parallelize_module(model, init_device_mesh(device.type, (dist.get_world_size(),)), PLAN)
    options = {
        "cudagraph_mode": "PIECEWISE",
        "cudagraph_capture_sizes": SIZES,
        "piece_compiler": "eager",  # quick to start; leave it out to get Inductor's code
        "pass_config": {"enable_sequence_parallelism": is_sequence_parallel},
    }
    compiled = torch.compile(model, backend="cudagraph_modes", dynamic=True, options=options)
    for _ in range(3):  # warm up, capture, replay
        for n, ids in prompts.items():
            logits = compiled(ids, use_cache=False).logits
            torch.testing.assert_close(logits, expected[n], rtol=1e-4, atol=1e-4)

    report = compile_backend.stats(compiled)
    shares = report.passes.get("sequence_parallelism", 0)
    if dist.get_rank() == 0:
        sums = f"{shares} sums over ranks in shares" if shares else "all sums whole"
        print(
            f"{dist.get_world_size()} ranks on {device.type}, {sums}: the logits of "
            f"{', '.join(map(str, SIZES))} tokens are those of the whole model, "
            f"{report.total('replays')} replays"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
