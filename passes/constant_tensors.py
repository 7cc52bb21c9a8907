"""Scalar tensors are filled on their device instead of copied to it.

`torch.tensor(0.0, device="cuda")` makes the number in host memory and copies it over, which no
CUDA graph can hold. Masks of sliding-window models are made of such constants.

Before::

    zero = torch.tensor(0.0, dtype=torch.float32, device="cuda")

After::

    zero = torch.full((), 0.0, dtype=torch.float32, device="cuda")
"""

from __future__ import annotations

import torch
import torch.fx


class ConstantTensorsPass:
    """Numerics-preserving: writes the same number into the same kind of tensor."""

    name = "constant_tensors"

    def __call__(self, graph: torch.fx.Graph) -> int:
        """Rewrite `graph` in place; return the number of tensors changed."""
        changed = 0
        for node in graph.nodes:
            value = node.meta.get("example_value")
            if (
                node.target is torch.tensor
                and len(node.args) == 1
                and isinstance(node.args[0], (bool, int, float))
                and set(node.kwargs) <= {"dtype", "device"}
                and isinstance(value, torch.Tensor)
            ):
                node.target = torch.full
                node.args = ((), node.args[0])
                node.kwargs = {"dtype": value.dtype, "device": value.device}
                changed += 1
        return changed

    def uuid(self) -> str:
        """Identifies this version of the rewrite."""
        return "constant_tensors-1"
