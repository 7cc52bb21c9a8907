"""How tensors lie in memory: strided, overlapping, all elements in one, or inside of another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compile_backend.torch_internals.graphs import names_of_wrapped

if TYPE_CHECKING:
    from collections.abc import Sequence


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


def owners_of_memory(args: Sequence[Any]) -> dict[int, int]:
    """Which argument each memory belongs to, the first of them, by the memory's address.

    Tensors that only wrap others own none.
    """
    owners: dict[int, int] = {}
    for index, arg in enumerate(args):
        if isinstance(arg, torch.Tensor) and not names_of_wrapped(arg) and arg.numel():
            owners.setdefault(arg.untyped_storage().data_ptr(), index)
    return owners
