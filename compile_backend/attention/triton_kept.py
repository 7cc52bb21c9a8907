"""Launches of Triton kernels past the binder, for attention outside of a graph.

Triton looks at every argument of every launch to find the compiled kernel that fits, which takes
the host as long as a small kernel takes the device. What it looks at is few facts, so a kernel
that was found for them is kept and launched at once. This file refuses to know what kernels do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
from triton.runtime import driver

if TYPE_CHECKING:
    from collections.abc import Hashable

    import torch

# Facts of one process are few; whoever passes something new at every launch must not fill memory.
_MOST_KEPT = 4096

_HOOKS = triton.knobs.runtime


class KeptKernel:
    """A Triton kernel whose compiled forms are found by what they depend on.

    Its parameters are pointers first, then numbers, then `tl.constexpr`s.

    Args:
        kernel: made by `triton.jit`.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._is_compiled = not triton.knobs.runtime.interpret
        self._kept: dict[Hashable, Any] = {}

    def launch(
        self,
        grid: tuple[int, int],
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[float, ...],
        constants: tuple[Any, ...],
        **options: int,
    ) -> None:
        """Launch on the current stream of the current device.

        Args:
            grid: programs.
            tensors: the pointers.
            numbers: passed by value, each always of one type.
            constants: compiled in.
            **options: Triton's, such as `num_warps`.
        """
        # Compiled forms depend on types, on numbers being 1 or multiples of 16, on pointers being
        # aligned to 16 bytes, on constants, options and the device.
        arguments = (*tensors, *numbers, *constants)
        addresses = 0
        for tensor in tensors:
            addresses |= tensor.data_ptr()
        if addresses & 15 or not self._is_compiled or _is_hooked():
            self._kernel[grid](*arguments, **options)
            return
        dtypes = tuple([tensor.dtype for tensor in tensors])
        device = driver.active.get_current_device()
        key = (device, dtypes, numbers, constants, *options.values())
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = self._kernel[grid](*arguments, **options)
            return
        stream = driver.active.get_current_stream(device)
        launch = (stream, kept.function, kept.packed_metadata, None, None, None)
        kept.run(*grid, 1, *launch, *arguments)


def _is_hooked() -> bool:
    """Whether somebody, such as a profiler, is told of every launch."""
    enter, leave = _HOOKS.launch_enter_hook, _HOOKS.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
