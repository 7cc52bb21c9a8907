"""What a compiled Triton kernel takes, as the driver's launch wants it.

Triton's own launcher turns Python objects into parameters at every launch. Those of a launch that
is repeated stay, so they are packed once. A kernel that needs more than a plain launch is left to
Triton.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compile_backend.shortcuts import MOST_PARAMETERS
from compile_backend.torch_internals.cuda import parameter_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

# What Triton passes last: memory that kernels may ask for, and that a plain one does without.
_NUM_SCRATCH = 2


@dataclass(frozen=True, slots=True)
class Packing:
    """How the arguments of one kernel become parameters.

    Attributes:
        positions: of the arguments that are not compiled in.
        cells: 8 bytes for each of them, and for what Triton adds.
        num_threads: of a block.
        shared: bytes of dynamic shared memory.
    """

    positions: tuple[int, ...]
    cells: struct.Struct
    num_threads: int
    shared: int

    def pack(self, values: Sequence[Any]) -> bytes | None:
        """The parameters of a launch; None for a number that no parameter holds.

        Args:
            values: of all arguments, constants included, with addresses for pointers.
        """
        try:
            return self.cells.pack(*[values[i] for i in self.positions], *(0,) * _NUM_SCRATCH)
        except (struct.error, OverflowError):
            return None


def packing_of(kernel: Any) -> Packing | None:
    """How a kernel's arguments become parameters.

    Args:
        kernel: compiled and loaded.

    Returns:
        None if the kernel takes anything but pointers, integers of 32 and 64 bits and floats of
        32, or too many of them, if a launch of it needs more than a grid, a block and shared
        memory, or if the driver finds other parameters in it.
    """
    metadata, source = getattr(kernel, "metadata", None), getattr(kernel, "src", None)
    if metadata is None or source is None or not _is_plain(metadata):
        return None
    types = list(source.signature.values())
    positions = tuple(i for i, kind in enumerate(types) if kind != "constexpr")
    kinds = ["*" if types[i].startswith("*") else types[i] for i in positions]
    kinds += ["*"] * _NUM_SCRATCH
    if len(kinds) > MOST_PARAMETERS or not all(kind in _KINDS for kind in kinds):
        return None
    if parameter_sizes(kernel.function) != [_KINDS[kind][1] for kind in kinds]:
        return None
    cells = struct.Struct("<" + "".join(_KINDS[kind][0] for kind in kinds))
    num_threads = metadata.num_warps * metadata.target.warp_size
    return Packing(positions, cells, num_threads, metadata.shared)


_KINDS = {"*": ("Q", 8), "i32": ("i4x", 4), "i64": ("q", 8), "fp32": ("f4x", 4)}
"""How 8 bytes hold a parameter, and its own size; `*` is any pointer."""


def _is_plain(metadata: Any) -> bool:
    return (
        metadata.num_ctas == 1
        and not metadata.launch_cooperative_grid
        and not metadata.launch_pdl
        and not metadata.global_scratch_size
        and not metadata.profile_scratch_size
    )
