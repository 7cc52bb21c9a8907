"""Private names around memory that the ranks of one host share: who can, and what graphs read."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

_MODULE = "torch.distributed._symmetric_memory"


def why_not_shared(device: torch.device, group: str) -> str | None:
    """Why the ranks of a group cannot run the fused ops of `torch.ops.symm_mem`; None if they can.

    That is what can be told before they run: other GPUs of a host may still be out of reach.

    It asks no other rank. All ranks that one launcher started on equal machines get the same
    answer, but for those that see other GPUs: what holds for all is `agreed_hindrance`'s to tell.

    Args:
        device: of the tensors.
        group: the name of a process group.
    """
    if device.type != "cuda":
        return f"its tensors are on {device.type}, where torch has no such ops"
    if not has_ops():
        return "this torch has no fused ops in torch.ops.symm_mem"
    on_a_host = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not on_a_host.isdecimal() or not int(on_a_host):
        return "LOCAL_WORLD_SIZE, which torchrun sets, does not tell which ranks share a host"
    by_name: Any = dist.distributed_c10d
    ranks = dist.get_process_group_ranks(by_name._resolve_process_group(group))
    if len({rank // int(on_a_host) for rank in ranks}) > 1:
        return "its ranks are on several hosts"
    devices = range(torch.cuda.device_count())
    if not all(
        torch.cuda.can_device_access_peer(*pair) for pair in itertools.permutations(devices, 2)
    ):
        return "the GPUs of this host cannot read each other's memory"
    return None


def store_of(group: str) -> tuple[Any, int, int]:
    """What the ranks of a group tell each other without an exchange, this rank, and how many.

    Args:
        group: the name of a process group.
    """
    by_name: Any = dist.distributed_c10d
    found = by_name._resolve_process_group(group)
    return found.get_group_store(), found.rank(), found.size()


def has_ops() -> bool:
    """Whether torch has the fused ops; they are there once their module is imported."""
    try:
        importlib.import_module(_MODULE)
    except ImportError:
        return False
    names = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
    return all(hasattr(torch.ops.symm_mem, name) for name in names)


def workspaces() -> tuple[torch.Tensor, ...]:
    """The memory by which ranks exchange data in the fused ops, as of now.

    torch has one for each group, lets it go when an op needs a larger one, and knows nothing of
    captured graphs that go on using it.
    """
    module = sys.modules.get(_MODULE)
    held = getattr(module, "_group_name_to_workspace_tensor", {})
    return tuple(tensor for tensor in held.values() if tensor is not None)
