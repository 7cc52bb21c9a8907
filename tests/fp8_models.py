"""Hugging Face models whose linear layers multiply 8-bit floats, as serving engines' do.

Weights are small and random. Embeddings, norms, experts and the head stay what they are.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
KINDS = ("static", "token", "tensor")
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NUM_LAYERS = 2


class Fp8Linear(torch.nn.Module):
    """A linear layer that quantises what it is given: statically, per token or per tensor.

    Its constants are written out: with `dynamic=True` Dynamo hands global floats over as inputs.
    """

    def __init__(self, linear: torch.nn.Linear, kind: str) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        dims = {"dim": -1, "keepdim": True} if kind == "token" else {}
        scale = weight.abs().amax(**dims) / FP8_MAX
        self.kind = kind
        self.register_buffer("weight", (weight / scale).to(FP8))
        self.register_buffer("weight_scale", scale.t().contiguous() if kind == "token" else scale)
        self.register_buffer("input_scale", torch.tensor(0.01))
        self.dtype = linear.weight.dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self.kind == "static":
            scale = self.input_scale
        elif self.kind == "token":
            scale = (rows.abs().amax(-1, keepdim=True).float() / 448).clamp(min=1e-12)
        else:
            scale = (rows.abs().amax().float() / 448).clamp(min=1e-12)
        quantised = (rows.float() / scale).clamp(-448, 448).to(FP8)
        made = self.multiplied(quantised, scale)
        return made.view(*x.shape[:-1], made.shape[-1])

    def multiplied(self, quantised: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if self.kind == "token" and not HAS_SCALES_OF_ROWS:
            wide = (quantised.float() * scale) @ (self.weight.float() * self.weight_scale.t()).t()
            return wide.to(self.dtype)
        return torch._scaled_mm(
            quantised,
            self.weight.t(),
            scale_a=scale,
            scale_b=self.weight_scale,
            out_dtype=self.dtype,
        )


def _has_scales_of_rows() -> bool:
    """Whether this release multiplies 8-bit floats with a scale for each row on the CPU."""
    rows = torch.zeros(16, 16).to(FP8)
    scales = torch.ones(16, 1)
    try:
        torch._scaled_mm(
            rows, rows.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.bfloat16
        )
    except RuntimeError:
        return False
    return True


HAS_SCALES_OF_ROWS = _has_scales_of_rows()

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
    _replace_linears(model, kind)
    return model


def _replace_linears(module: torch.nn.Module, kind: str) -> None:
    for name, child in module.named_children():
        if isinstance(child, torch.nn.Linear) and name in LINEARS:
            setattr(module, name, Fp8Linear(child, kind))
        else:
            _replace_linears(child, kind)
