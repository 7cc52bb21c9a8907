"""Between two parts of the suite nothing stays of the first."""

from __future__ import annotations

import gc

import torch


def forget_compiled(device: torch.device) -> None:
    """Drop what was compiled, with its graphs, and give free memory of a device back."""
    torch.compiler.reset()
    give_memory_back(device)


def give_memory_back(device: torch.device) -> None:
    """Free what nobody holds, for others on the device, too."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
