"""Copying tensors whatever their layout: strided, overlapping, or with all elements in one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """All memory between a tensor's first and last element, as one dimension.

    Copying it copies the tensor whatever its layout, also where elements share memory.
    """
    extent = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
    )
    return tensor.as_strided((extent if tensor.numel() else 0,), (1,))


def unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """One element of each dimension along which all are the same memory."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
