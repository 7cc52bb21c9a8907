"""Models that are measured: sizes with seeded random weights, and one with its real weights.

Nothing here knows how a model is run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from compile_backend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel

BLOCK_SIZE = 16
# Tokens by which a request may still grow.
_ROOM = 8

_SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}
_DENSE_06B: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
_DENSE_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
_EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 24,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model, and the steps that it takes on a paged cache.

    Attributes:
        name: what the user asks for.
        about: the model in a few words.
        config_class: of transformers; None for real weights, which `llm.loading` finds.
        sizes: arguments of that class.
        build: further arguments of making the model.
        decodes: requests of each decode step.
        prefills: tokens of each prompt.
        context: tokens of a decoding request, and the position in a static cache.
        room: tokens that a request may have beyond the longest of these.
        cache_len: positions of a static cache.
        capture_sizes: for capturing all of them; None for the default ladder.
        max_num_seqs: most requests while capturing all sizes.
        runs_on_cpu: whether a CPU runs it in bearable time.
    """

    name: str
    about: str
    config_class: str | None
    sizes: Mapping[str, Any] = field(default_factory=dict)
    build: Mapping[str, Any] = field(default_factory=dict)
    decodes: tuple[int, ...] = (1, 8, 64)
    prefills: tuple[int, ...] = (512, 4096)
    context: int = 600
    room: int = 512
    cache_len: int = 1024
    capture_sizes: tuple[int, ...] | None = None
    max_num_seqs: int = 256
    runs_on_cpu: bool = False

    @property
    def num_layers(self) -> int | None:
        """Layers, where they can be chosen."""
        return self.sizes.get("num_hidden_layers")

    @property
    def blocks_per_request(self) -> int:
        """Blocks that hold one decoding request."""
        return -(-(self.context + _ROOM) // BLOCK_SIZE)

    @property
    def num_blocks(self) -> int:
        """Blocks that hold any of the steps."""
        return max(
            max(self.decodes) * self.blocks_per_request,
            *(-(-num_tokens // BLOCK_SIZE) for num_tokens in self.prefills),
        )

    @property
    def max_num_tokens(self) -> int:
        """Of a step."""
        return max(*self.decodes, *self.prefills)

    @property
    def max_model_len(self) -> int:
        """Tokens of a request, at most."""
        return max(self.context, *self.prefills) + self.room

    def with_layers(self, num_layers: int) -> Shape:
        """The same model with another depth.

        Raises:
            ConfigError: the depth is that of real weights.
        """
        if self.num_layers is None:
            raise ConfigError(
                "--shape",
                self.name,
                "has real weights, so its depth cannot grow",
                "use a shape with random weights for growth",
            )
        return replace(self, sizes={**self.sizes, "num_hidden_layers": num_layers})

    def for_decoding(self, num_reqs: int) -> Shape:
        """The same model for one decode step of so many requests, all with a short context."""
        steps: dict[str, Any] = {"decodes": (num_reqs,), "prefills": (BLOCK_SIZE,)}
        return replace(self, **steps, context=_ROOM, room=_ROOM)


_TINY_STEPS: dict[str, Any] = {
    "decodes": (1, 4),
    "prefills": (16,),
    "context": 12,
    "room": 16,
    "cache_len": 128,
    "capture_sizes": (1, 2, 4, 8),
    "max_num_seqs": 4,
    "runs_on_cpu": True,
}

SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            name="0.6B",
            about="Qwen3, 28 layers, random weights",
            config_class="Qwen3Config",
            sizes=_DENSE_06B,
        ),
        Shape(
            name="llama-0.6B",
            about="Llama of the same sizes, random weights",
            config_class="LlamaConfig",
            sizes=_DENSE_06B,
        ),
        Shape(
            name="8B",
            about="Llama 3.1, 32 layers, random weights",
            config_class="LlamaConfig",
            sizes=_DENSE_8B,
        ),
        Shape(
            name="moe",
            about="Qwen3-MoE, 24 layers, 4 of 32 experts, 2.1B parameters, random weights",
            config_class="Qwen3MoeConfig",
            sizes={**_DENSE_06B, **_EXPERTS},
        ),
        Shape(
            name="smollm2",
            about="SmolLM2-135M-Instruct, 30 layers, real weights",
            config_class=None,
            prefills=(512, 1024),
            runs_on_cpu=True,
        ),
        Shape(
            name="tiny",
            about="Qwen3, 2 layers, random weights, for a CPU",
            config_class="Qwen3Config",
            sizes=_SMALL,
            **_TINY_STEPS,
        ),
        Shape(
            name="tiny-moe",
            about="Qwen3-MoE, 2 layers, 2 of 4 experts, random weights, for a CPU",
            config_class="Qwen3MoeConfig",
            sizes={
                **_SMALL,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "norm_topk_prob": True,
            },
            # On a CPU, what transformers takes of itself asks the host for numbers of tokens.
            build={"experts_implementation": "batched_mm"},
            **_TINY_STEPS,
        ),
    )
}


def make_model(shape: Shape, device: torch.device) -> PreTrainedModel:
    """The model in evaluation mode, bfloat16 on a GPU and float32 on a CPU.

    Raises:
        ConfigError: the package with the real weights is not installed.
    """
    import transformers  # noqa: PLC0415 - optional, and names of shapes must be known without it

    from compile_backend.llm.loading import DEMO_NAME, load_model  # noqa: PLC0415

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if shape.config_class is None:
        transformers.utils.logging.disable_progress_bar()  # it would be drawn over our own
        return load_model(DEMO_NAME, dtype=dtype, device=device).model
    torch.manual_seed(0)
    config = getattr(transformers, shape.config_class)(**shape.sizes)
    with device:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
                config, **shape.build
            )
        finally:
            torch.set_default_dtype(before)
    return model.requires_grad_(requires_grad=False).eval()
