"""Serve a list of prompts: continuous batching with chunked prefill, in an engine's own loop.

Requests of any length share each step. Decodes go first, prompts fill what is left of the token
budget; the runner pads every batch to a captured size and replays its graphs.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from compile_backend import Batch, GraphModelRunner
from compile_backend.attention.builder import AttentionBatch
from compile_backend.attention.huggingface import CAUSAL_LM_INPUTS, CAUSAL_LM_OUTPUT, paged_model

BLOCK_SIZE = 16


@dataclass(eq=False)
class Request:
    """One prompt, the tokens it has so far, and the cache blocks that hold them."""

    tokens: list[int]
    num_new: int
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)


class Server:
    """Owns the cache's blocks and the requests; the runner owns everything on the device."""

    def __init__(
        self,
        model: torch.nn.Module,
        options: dict[str, object],
        *,
        max_num_seqs: int = 8,
        token_budget: int = 64,
        max_model_len: int = 512,
        attention: str = "auto",
    ) -> None:
        num_blocks = max_num_seqs * -(-max_model_len // BLOCK_SIZE)
        paged = paged_model(
            model,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=max_model_len,
            backend=attention,
        )
        compiled = torch.compile(paged.module, backend="cudagraph_modes", options=options)
        self.runner = GraphModelRunner(
            compiled,
            options,
            input_spec=CAUSAL_LM_INPUTS,
            output_shape=CAUSAL_LM_OUTPUT,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=token_budget,
            metadata_builder=paged.builder,
            device=next(model.parameters()).device,
        )
        self.runner.capture()
        self.free = list(range(num_blocks))
        self.max_num_seqs, self.token_budget = max_num_seqs, token_budget

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """The greedy continuation of every prompt; all are served together."""
        requests = [Request(list(prompt), max_new_tokens) for prompt in prompts]
        waiting, running = deque(requests), list[Request]()
        while waiting or running:
            while waiting and len(running) < self.max_num_seqs:
                running.append(waiting.popleft())
            work = self.schedule(running)
            for request, token in zip(work, self.step(work), strict=True):
                request.num_computed += work[request]
                if request.num_computed == len(request.tokens):
                    request.tokens.append(token)
                    request.num_new -= 1
                if not request.num_new:
                    self.free += request.blocks
                    running.remove(request)
        return [request.tokens[len(p) :] for request, p in zip(requests, prompts, strict=True)]

    def schedule(self, running: list[Request]) -> dict[Request, int]:
        """How many tokens each request adds: those nearest to done first, within the budget."""
        budget, work = self.token_budget, {}
        for request in sorted(running, key=lambda r: len(r.tokens) - r.num_computed):
            num_tokens = min(len(request.tokens) - request.num_computed, budget)
            if num_tokens:
                work[request] = num_tokens
                budget -= num_tokens
                total = request.num_computed + num_tokens
                while len(request.blocks) * BLOCK_SIZE < total:
                    request.blocks.append(self.free.pop())
        return work

    def step(self, work: dict[Request, int]) -> list[int]:
        """Run one batch; the most likely next token of each request."""
        spans = [(r, r.num_computed, r.num_computed + count) for r, count in work.items()]
        width = max(len(request.blocks) for request in work)
        batch = Batch(
            query_lens=list(work.values()),
            inputs={
                "input_ids": [[t for r, start, end in spans for t in r.tokens[start:end]]],
                "position_ids": [[p for _, start, end in spans for p in range(start, end)]],
                "logits_indices": np.cumsum(list(work.values())) - 1,
            },
            attention=AttentionBatch(
                seq_lens=[end for _, _, end in spans],
                block_table=[r.blocks + [0] * (width - len(r.blocks)) for r in work],
            ),
        )
        next_tokens: list[int] = self.runner.run(batch).argmax(-1).tolist()
        return next_tokens


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).eval().to(device)
    prompts = [torch.randint(128, (length,)).tolist() for length in (3, 40, 1, 17, 90)]
    expected = [
        model.generate(torch.tensor([prompt], device=device), max_new_tokens=8, do_sample=False)
        for prompt in prompts
    ]
    # Pieces are not compiled here, so that the example is quick; leave the option out to get
    # Inductor's code.
    options = {"cudagraph_mode": "FULL_AND_PIECEWISE", "piece_compiler": "eager"}
    server = Server(model, {**options, "cudagraph_capture_sizes": [1, 2, 4, 8, 32, 64]})
    tokens = server.generate(prompts, max_new_tokens=8)
    for prompt, whole, new in zip(prompts, expected, tokens, strict=True):
        assert whole[0, len(prompt) :].tolist() == new
    print(server.runner.report())
    print(f"{len(prompts)} prompts served together; the tokens are those of model.generate")


if __name__ == "__main__":
    main()
