"""Products with what ranks exchange around them: ops of `cudagraph_modes`, and what they mean.

Each op's eager reference here is its specification, and is what runs on the CPU. On CUDA the ops
are those of `torch.ops.symm_mem`, which multiply one part of the rows while another one is copied
between ranks, by memory that these share. Those know no free sizes, hence ops of our own: Dynamo's
graphs have them.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_LIBRARY = torch.library.Library("cudagraph_modes", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "linear_reduce_scatter(Tensor x, Tensor weight, int num_ranks, str group) -> Tensor"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "all_gather_linear(Tensor share, Tensor[] weights, bool returns_rows, int num_ranks, "
    "str group) -> Tensor[]"
)

LINEAR_REDUCE_SCATTER: Any = torch.ops.cudagraph_modes.linear_reduce_scatter.default
ALL_GATHER_LINEAR: Any = torch.ops.cudagraph_modes.all_gather_linear.default


def linear_reduce_scatter(
    x: torch.Tensor, weight: torch.Tensor, num_ranks: int, group: str
) -> torch.Tensor:
    """This rank's rows of the sum over ranks of `linear(x, weight)`.

    Args:
        x: `[rows, in]`, where `num_ranks` divides `rows`.
        weight: `[out, in]`, of the same dtype.
        num_ranks: in the group.
        group: its name.

    Returns:
        `[rows / num_ranks, out]`.
    """
    exchange: Any = torch.ops._c10d_functional
    made = torch.nn.functional.linear(x, weight)
    started = exchange.reduce_scatter_tensor(made, "sum", num_ranks, group)
    share: torch.Tensor = exchange.wait_tensor(started)
    return share


def all_gather_linear(
    share: torch.Tensor,
    weights: Sequence[torch.Tensor],
    returns_rows: bool,  # noqa: FBT001 - the order of the schema
    num_ranks: int,
    group: str,
) -> list[torch.Tensor]:
    """`[rows?, linear(rows, weight) for each weight]` of the rows of all ranks.

    Args:
        share: `[rows of each rank, in]`.
        weights: `[out, in]` each, of the same dtype.
        returns_rows: whether the rows themselves come first.
        num_ranks: in the group.
        group: its name.

    Returns:
        Tensors of `[num_ranks * rows of each rank, ...]`, one rank after the other.
    """
    exchange: Any = torch.ops._c10d_functional
    started = exchange.all_gather_into_tensor(share.contiguous(), num_ranks, group)
    rows = exchange.wait_tensor(started)
    made = [torch.nn.functional.linear(rows, weight) for weight in weights]
    return [rows, *made] if returns_rows else made


@functools.cache
def _of_torch() -> Any:
    """The ops of torch, which are there once their module is imported."""
    importlib.import_module("torch.distributed._symmetric_memory")
    return torch.ops.symm_mem


def _linear_reduce_scatter_on_cuda(
    x: torch.Tensor,
    weight: torch.Tensor,
    num_ranks: int,  # noqa: ARG001 - the group knows
    group: str,
) -> torch.Tensor:
    share: torch.Tensor = _of_torch().fused_matmul_reduce_scatter(x, weight.t(), "sum", 0, group)
    return share


def _all_gather_linear_on_cuda(
    share: torch.Tensor,
    weights: Sequence[torch.Tensor],
    returns_rows: bool,  # noqa: FBT001 - the order of the schema
    num_ranks: int,  # noqa: ARG001 - the group knows
    group: str,
) -> list[torch.Tensor]:
    columns = [weight.t() for weight in weights]
    rows, made = _of_torch().fused_all_gather_matmul(
        share.contiguous(), columns, 0, group, return_A=returns_rows
    )
    return [rows, *made] if returns_rows else list(made)


for _name, _reference, _on_cuda in (
    ("linear_reduce_scatter", linear_reduce_scatter, _linear_reduce_scatter_on_cuda),
    ("all_gather_linear", all_gather_linear, _all_gather_linear_on_cuda),
):
    _LIBRARY.impl(_name, _reference, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _on_cuda, "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"cudagraph_modes::{_name}", _reference, lib=_LIBRARY)
