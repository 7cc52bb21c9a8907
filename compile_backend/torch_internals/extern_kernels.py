"""What Inductor's code calls for products and the like, without what Inductor needs to compile.

Its own table of these is filled as all of its lowerings are imported, which takes more than half a
second: as much as the rest of loading stored code. Code in the store takes them from here. Most
are torch's own functions; for the others Inductor's table is there, and is imported then.
"""

from __future__ import annotations

from typing import Any

import torch

_INDUCTORS = "from torch._inductor.select_algorithm import extern_kernels\n"
_OURS = f"from {__name__} import extern_kernels\n"
# Ops that are not there without Inductor's lowerings may be among them.
_OTHER_OPS = ("inductor_ops.", "torch.ops.prims.")

OF_TORCH = frozenset({"_int_mm", "_scaled_mm", "addmm", "baddbmm", "bmm", "convolution", "mm"})


class _ExternKernels:
    """Inductor's functions by its names for them, each looked up once."""

    def __getattr__(self, name: str) -> Any:
        if name in OF_TORCH:
            found = getattr(torch, name)
        else:
            from torch._inductor import lowering  # noqa: F401 - fills the table
            from torch._inductor.select_algorithm import extern_kernels as inductors

            found = getattr(inductors, name)
        setattr(self, name, found)
        return found


extern_kernels = _ExternKernels()


def quick_to_import(source: str) -> str:
    """Inductor's code, taking what it calls from here; as it is, where that may not do.

    Args:
        source: of a module that Inductor wrote.
    """
    head, found, code = source.partition(_INDUCTORS)
    lines = [line for line in code.splitlines() if not line.lstrip().startswith("#")]
    if not found or any(name in line for line in lines for name in _OTHER_OPS):
        return source
    return head + _OURS + code
