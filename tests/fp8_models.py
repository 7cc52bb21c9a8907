"""Hugging Face models whose linear layers multiply 8-bit floats, as serving engines' do.

Weights are small and random. Embeddings, norms, experts and the head stay what they are.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from compile_backend.bench.fp8_linears import replace_linears

NUM_LAYERS = 2


_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**_SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**_SIZES),
    "mixtral": lambda: transformers.MixtralConfig(**_SIZES, num_local_experts=4),
}
ARCHITECTURES = tuple(_CONFIGS)


def wide_model(name: str) -> Any:
    """A model in bfloat16, the same in every call, without 8-bit floats."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(_CONFIGS[name](), dtype=torch.bfloat16)
    model.eval().requires_grad_(requires_grad=False)
    for parameter in model.parameters():  # freshly made, norms are all ones
        parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def fp8_model(name: str, kind: str) -> Any:
    """The same model with 8-bit linear layers."""
    model = wide_model(name)
    replace_linears(model, kind, input_scale=0.01)
    return model
