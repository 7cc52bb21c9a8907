"""Constants are filled on the device that needs them instead of copied to it.

`torch.tensor(4, device="cuda")` makes the number in host memory and copies it over, and so does a
constant on the CPU that is moved later. No CUDA graph can hold such a copy. The masks and caches
of sliding-window models are full of them.

Before::

    window = torch.tensor(4)
    window = window.to("cuda")
    nothing = torch.tensor([], device="cuda")

After::

    window = torch.full((), 4, dtype=torch.int64, device="cuda")
    nothing = torch.empty((0,), device="cuda")
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.fx

from passes.reading import Memory


class ConstantTensorsPass:
    """Numerics-preserving: writes the same numbers into the same kinds of tensors."""

    name = "constant_tensors"

    def __call__(self, graph: torch.fx.Graph) -> int:
        """Rewrite `graph` in place; return the number of tensors changed."""
        memory = functools.cache(lambda: Memory.of(graph))  # nothing that is changed writes
        changed = 0
        for node in list(graph.nodes):
            value = node.meta.get("example_value")
            if not isinstance(value, torch.Tensor):
                continue
            if _is_literal(node, value):
                _fill(node, value, node.args[0] if value.dim() == 0 else None)
                changed += 1
            elif _moves_constant(node, value) and not memory().may_be_written(node.args[0]):
                constant = node.args[0]
                _fill(node, value, constant.args[1])
                changed += 1
                if not constant.users:
                    graph.erase_node(constant)
        return changed

    def uuid(self) -> str:
        """Identifies this version of the rewrite."""
        return "constant_tensors-2"


def _is_literal(node: torch.fx.Node, value: torch.Tensor) -> bool:
    """Whether a node is `torch.tensor` of one number, or of nothing."""
    if node.target is not torch.tensor or len(node.args) != 1:
        return False
    if not set(node.kwargs) <= {"dtype", "device"}:
        return False
    number = node.args[0]
    return value.numel() == 0 or (value.dim() == 0 and isinstance(number, (bool, int, float)))


def _moves_constant(node: torch.fx.Node, value: torch.Tensor) -> bool:
    """Whether a node copies a constant scalar to another device."""
    if node.op != "call_method" or node.target not in ("to", "cuda"):
        return False
    constant: Any = node.args[0]
    if constant.target is not torch.full or constant.args[0] != ():
        return False
    if constant.meta["example_value"].device == value.device:
        return False
    return isinstance(constant.args[1], (bool, int, float))


def _fill(node: torch.fx.Node, value: torch.Tensor, number: Any) -> None:
    """Make `node` allocate its own value: filled with `number`, or empty for None."""
    node.op = "call_function"
    node.target = torch.empty if number is None else torch.full
    node.args = (tuple(value.shape),) if number is None else ((), number)
    node.kwargs = {"dtype": value.dtype, "device": value.device}
