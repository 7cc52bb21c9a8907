"""Linear layers that multiply 8-bit floats, as serving engines have them, in the place of others.

Embeddings, norms, experts and the head of a model stay what they are.
"""

from __future__ import annotations

import functools

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
KINDS = ("static", "token", "tensor")
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Fp8Linear(torch.nn.Module):
    """A linear layer that quantises what it is given: statically, per token or per tensor.

    Its constants are written out: with `dynamic=True` Dynamo hands global floats over as inputs.

    Args:
        linear: whose weights are quantised.
        kind: one of `KINDS`.
        input_scale: of what it is given, where that is static.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    input_scale: torch.Tensor

    def __init__(self, linear: torch.nn.Linear, kind: str, input_scale: float) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        largest = weight.abs().amax(-1, keepdim=True) if kind == "token" else weight.abs().amax()
        scale = largest / FP8_MAX
        self.kind = kind
        self.register_buffer("weight", (weight / scale).to(FP8))
        self.register_buffer("weight_scale", scale.t().contiguous() if kind == "token" else scale)
        self.register_buffer("input_scale", torch.tensor(input_scale, device=weight.device))
        self.dtype = linear.weight.dtype
        self.has_row_scales = has_row_scales(weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in]` to `[..., out]`, in the dtype of the model."""
        rows = x.reshape(-1, x.shape[-1])
        if self.kind == "static":
            scale = self.input_scale
        elif self.kind == "token":
            scale = (rows.abs().amax(-1, keepdim=True).float() / 448).clamp(min=1e-12)
        else:
            scale = (rows.abs().amax().float() / 448).clamp(min=1e-12)
        quantised = (rows.float() / scale).clamp(-448, 448).to(FP8)
        made = self._multiplied(quantised, scale)
        return made.view(*x.shape[:-1], made.shape[-1])

    def _multiplied(self, quantised: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if self.kind == "token" and not self.has_row_scales:
            wide = (quantised.float() * scale) @ (self.weight.float() * self.weight_scale.t()).t()
            return wide.to(self.dtype)
        made: torch.Tensor = torch._scaled_mm(  # noqa: SLF001 - its only name
            quantised,
            self.weight.t(),
            scale_a=scale,
            scale_b=self.weight_scale,
            out_dtype=self.dtype,
        )
        return made


@functools.cache
def has_row_scales(device: torch.device) -> bool:
    """Whether this release multiplies 8-bit floats with a scale for each row on a device."""
    rows = torch.zeros(16, 16, device=device).to(FP8)
    scales = torch.ones(16, 1, device=device)
    try:
        torch._scaled_mm(  # noqa: SLF001
            rows, rows.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.bfloat16
        )
    except RuntimeError:
        return False
    return True


def replace_linears(module: torch.nn.Module, kind: str, input_scale: float) -> None:
    """Replace those of attention and MLP, in place; arguments as for `Fp8Linear`."""
    for name, child in module.named_children():
        if isinstance(child, torch.nn.Linear) and name in LINEARS:
            setattr(module, name, Fp8Linear(child, kind, input_scale))
        else:
            replace_linears(child, kind, input_scale)
