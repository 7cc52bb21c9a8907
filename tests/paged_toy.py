"""A small model on a paged cache, an engine's loop around it, and what it must compute.

The reference recomputes every request from its tokens alone, with dense attention and no cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from torch import nn

from compile_backend.attention.builder import AttentionBatch, AttentionMetadataBuilder
from compile_backend.attention.kv_cache import LayerCache
from compile_backend.attention.layer import AttentionLayer
from compile_backend.attention.ops import attention
from compile_backend.attention.registry import make_backend
from compile_backend.attention.spec import AttentionSpec, CacheFormat
from compile_backend.config import CompilationConfig
from compile_backend.runner import GraphModelRunner
from compile_backend.runner_batch import Batch
from compile_backend.step_inputs import Dim, InputSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from compile_backend.attention.backend import AttentionBackend
    from compile_backend.distributed import RankAgreement

HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY, MAX_MODEL_LEN = 4, 2, 16, 37, 48
BLOCK_SIZE = 4
SIZES = (1, 2, 4, 8, 16)
"""To capture, unless a test says otherwise."""
WIDTH = HEADS * HEAD_SIZE
SPEC = AttentionSpec(
    num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, scale=HEAD_SIZE**-0.5
)
INPUTS = (
    InputSpec("tokens", (Dim.NUM_TOKENS,), torch.int64),
    InputSpec("positions", (Dim.NUM_TOKENS,), torch.int64),
    InputSpec("last", (Dim.NUM_REQS,), torch.int64, indexes=Dim.NUM_TOKENS),
)


class PagedToy(nn.Module):
    """Layers of attention and a linear, with logits for the last token of each request."""

    def __init__(self, num_layers: int = 2, seed: int = 0, prefix: str = "layer") -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.prefix = prefix
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(MAX_MODEL_LEN, WIDTH)
        kv_width = KV_HEADS * HEAD_SIZE
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH + 2 * kv_width) for _ in range(num_layers))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.eval()

    @property
    def layer_names(self) -> list[str]:
        return [f"{self.prefix}.{index}" for index in range(len(self.qkv))]

    def split(self, index: int, x: torch.Tensor) -> list[torch.Tensor]:
        parts = self.qkv[index](x).split((WIDTH, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE), -1)
        return [part.unflatten(-1, (-1, HEAD_SIZE)) for part in parts]

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        x = self.embed(tokens) + self.places(positions)
        for index, name in enumerate(self.layer_names):
            query, key, value = self.split(index, x)
            output = torch.empty(query.shape, dtype=x.dtype, device=x.device)
            attention(query, key, value, output, name)
            x = x + torch.relu(self.out[index](output.flatten(1)))
        return x[last] @ self.embed.weight.t()

    def dense(self, tokens: Sequence[int]) -> torch.Tensor:
        """The logits after the last of some tokens, `[vocabulary]`, without any cache."""
        device = self.embed.weight.device
        ids = torch.tensor(tokens, device=device)
        with torch.no_grad():
            x = self.embed(ids) + self.places(torch.arange(len(tokens), device=device))
            for index in range(len(self.qkv)):
                query, key, value = (part.transpose(0, 1) for part in self.split(index, x))
                mixed = F.scaled_dot_product_attention(
                    query[None], key[None], value[None], is_causal=True, enable_gqa=True
                )
                x = x + torch.relu(self.out[index](mixed[0].transpose(0, 1).flatten(1)))
            return x[-1] @ self.embed.weight.t()


def make_builder(
    model: PagedToy,
    num_blocks: int = 64,
    backend: str | Callable[[int], AttentionBackend] = "sdpa",
) -> AttentionMetadataBuilder:
    """Caches and metadata for a model.

    Args:
        model: whose layers they are.
        num_blocks: of each cache.
        backend: by name, or made for each layer.
    """
    weight = model.embed.weight
    cache = CacheFormat(block_size=BLOCK_SIZE, dtype=weight.dtype, max_model_len=MAX_MODEL_LEN)
    shared = (
        make_backend(backend, SPEC, cache, weight.device) if isinstance(backend, str) else None
    )
    layers = {}
    for index, name in enumerate(model.layer_names):
        shape = (num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
        keys, values = (torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in "kv")
        used = shared or backend(index)  # type: ignore[operator]
        layers[name] = AttentionLayer(name, used, LayerCache(keys, values))
    return AttentionMetadataBuilder(layers, cache, num_blocks)


def compiled(model: nn.Module, **options: Any) -> Any:
    """A model compiled with pieces that run as they are: fast to make, and the same numbers."""
    return torch.compile(
        model, backend="cudagraph_modes", options={"piece_compiler": "eager", **options}
    )


@dataclass
class Loop:
    """An engine's loop: requests with their tokens and blocks, and steps over some of them."""

    model: PagedToy
    runner: GraphModelRunner
    num_blocks: int = 64
    tokens: list[list[int]] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    blocks: list[list[int]] = field(default_factory=list)
    used: int = 0

    def add(self, tokens: Sequence[int]) -> int:
        """A new request; returns its number."""
        width = -(-MAX_MODEL_LEN // BLOCK_SIZE)
        self.blocks.append([(self.used + i) % self.num_blocks for i in range(width)])
        self.used += -(-(len(tokens) + 8) // BLOCK_SIZE)
        self.tokens.append(list(tokens))
        self.done.append(0)
        return len(self.tokens) - 1

    def batch(self, work: Sequence[tuple[int, int]], **facts: Any) -> Batch:
        """A batch of so many tokens of each of some requests."""
        tokens, positions, seq_lens = [], [], []
        for request, count in work:
            start = self.done[request]
            tokens += self.tokens[request][start : start + count]
            positions += range(start, start + count)
            seq_lens.append(start + count)
        lens = [count for _, count in work]
        return Batch(
            query_lens=lens,
            inputs={"tokens": tokens, "positions": positions, "last": np.cumsum(lens) - 1},
            attention=AttentionBatch(
                seq_lens=seq_lens, block_table=[self.blocks[request] for request, _ in work]
            ),
            **facts,
        )

    def step(
        self, work: Sequence[tuple[int, int]], *, highest_mode: Any = None, **facts: Any
    ) -> Any:
        """Run a step and compare every request's logits with the reference."""
        logits = self.runner.run(self.batch(work, **facts), highest_mode=highest_mode)
        assert logits.shape == (len(work), VOCABULARY)
        for row, (request, count) in zip(logits, work, strict=True):
            self.done[request] += count
            expected = self.model.dense(self.tokens[request][: self.done[request]])
            torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-4)
        return logits

    def ran(self) -> dict[str, list[int]]:
        """Sizes of the steps that ran, by mode; each as often as it ran."""
        sizes: dict[str, list[int]] = {}
        for (mode, key), counts in self.runner.report().by_key.items():
            sizes.setdefault(mode.name, []).extend([key.num_tokens] * counts.steps)
        return {mode: sorted(held) for mode, held in sizes.items() if held}

    def grow(self, *requests: int) -> list[tuple[int, int]]:
        """Give requests one more token each, as work for a step."""
        for request in requests:
            self.tokens[request].append((7 * len(self.tokens[request]) + request) % VOCABULARY)
        return [(request, 1) for request in requests]


def make_loop(
    mode: str | None = "FULL_AND_PIECEWISE",
    model: PagedToy | None = None,
    *,
    called: Any = None,
    is_compiled: bool = True,
    compile_options: dict[str, Any] | None = None,
    builder: AttentionMetadataBuilder | None = None,
    backend: Any = "sdpa",
    num_blocks: int = 64,
    sizes: Sequence[int] = SIZES,
    limits: tuple[int, int] = (8, 64),
    query_len: int | None = None,
    device: str = "cpu",
    is_captured: bool = True,
    as_config: bool = False,
    ranks: RankAgreement | None = None,
    **options: Any,
) -> Loop:
    """A loop over a runner.

    Args:
        mode: asked for.
        model: compared with; a new one if None.
        called: what the runner calls; the model if None, compiled if `is_compiled`.
        is_compiled: see `called`.
        compile_options: of `torch.compile`.
        builder: of attention; with `backend` and `num_blocks` if None.
        backend: see `make_builder`.
        num_blocks: likewise.
        sizes: to capture.
        limits: most requests and most tokens of a batch.
        query_len: of uniform decode batches.
        device: where a new model is, and the runner.
        is_captured: whether to capture.
        as_config: whether options are given as a config.
        ranks: of the runner.
        **options: of the runner.
    """
    model = model or PagedToy().to(device)
    if called is None:
        called = compiled(model, **(compile_options or {})) if is_compiled else model
    asked = {"cudagraph_mode": mode, "cudagraph_capture_sizes": list(sizes), **options}
    runner = GraphModelRunner(
        called,
        CompilationConfig.from_options(asked) if as_config else asked,
        input_spec=INPUTS,
        output_shape=(Dim.NUM_REQS,),
        max_num_seqs=limits[0],
        max_num_batched_tokens=limits[1],
        uniform_decode_query_len=query_len,
        metadata_builder=builder or make_builder(model, num_blocks, backend),
        ranks=ranks,
        device=device,
    )
    if is_captured:
        runner.capture(progress=False)
    return Loop(model, runner, num_blocks)
