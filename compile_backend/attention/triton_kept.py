"""Launches of Triton kernels past the binder, for attention outside of a graph.

Triton looks at every argument of every launch to find the compiled kernel that fits, which takes
the host as long as a small kernel takes the device. What it looks at is few facts, so a kernel
that was found for them is kept and launched at once. Where a layer comes with the very tensors of
its last launch, as in a step that is replayed piece by piece, not even the facts are looked at.
This file refuses to know what kernels do.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
from triton.runtime import driver

from compile_backend import shortcuts
from compile_backend.attention.triton_packed import packing_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    import torch

# Facts of one process are few; whoever passes something new at every launch must not fill memory.
_MOST_KEPT = 4096
_MOST_THREADS = 16

_HOOKS = triton.knobs.runtime


def together(compiles: Sequence[tuple[KeptKernel, Callable[[], Any]]]) -> int:
    """Compile kernels at the same time, each in a thread, and load them.

    One that cannot be compiled or loaded is left to its launch, which tries again.

    Args:
        compiles: what calls `KeptKernel.compile`, and returns what that gave.

    Returns:
        How many kernels there are; 0 where Triton compiles no kernels in threads.
    """
    if not hasattr(triton, "AsyncCompileMode") or triton.knobs.runtime.interpret:
        return 0
    # In a context of its own: Triton has one such mode in each, and leaves it on after an error.
    try:
        made = contextvars.Context().run(_compiled, [each for _, each in compiles])
    finally:
        for kernel in {kernel for kernel, _ in compiles}:
            kernel.forget_failures()
    loaded = [each for each in dict.fromkeys(made) if each is not None]
    for each in loaded:
        with contextlib.suppress(Exception):  # such as too little memory on the device
            _ = each.run  # loads it: nothing has to be loaded into a device in a capture
    return len(loaded)


def _compiled(compiles: Sequence[Callable[[], Any]]) -> list[Any]:
    """The kernels; None for those that cannot be compiled."""
    num_threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    with (
        ThreadPoolExecutor(num_threads) as executor,
        triton.AsyncCompileMode(executor, ignore_errors=True),
    ):
        made = [compile_one() for compile_one in compiles]
    return [  # one that was there before is itself
        each.result(ignore_errors=True) if hasattr(each, "finalize_compile") else each
        for each in made
    ]


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launch that may be repeated. Keeps no tensor alive.

    Attributes:
        tensors: its pointers, but for those that are new each time.
        addresses: of them.
        facts: what else it depends on.
        device: of the kernel.
        run: Triton's launcher.
        grid: in three dimensions.
        kernel: what the launcher wants to know of the kernel.
        arguments: after the pointers that are new each time.
        short: the same past Triton's launcher, for `shortcuts.repeat_kernel`; None if there is no
            such way.
    """

    tensors: tuple[weakref.ref[torch.Tensor], ...]
    addresses: tuple[int, ...]
    facts: Hashable
    device: int
    run: Callable[..., None]
    grid: tuple[int, int, int]
    kernel: tuple[Any, ...]
    arguments: tuple[Any, ...]
    short: object | None


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
        self._last: dict[Hashable, _Launch] = {}

    def compile(
        self,
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[float, ...],
        constants: tuple[Any, ...],
        **options: int,
    ) -> Any:
        """Have Triton compile what `launch` with these would run; see `together`."""
        return self._kernel.warmup(*tensors, *numbers, *constants, grid=(1,), **options)

    def forget_failures(self) -> None:
        """Have Triton compile anew what failed in `together`; since 3.7 it would not."""
        for kernels, *_ in getattr(self._kernel, "device_caches", {}).values():
            for key, kernel in list(kernels.items()):
                if hasattr(kernel, "finalize_compile") and kernel.kernel is None:
                    del kernels[key]

    def launch(
        self,
        grid: tuple[int, int],
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[float, ...],
        constants: tuple[Any, ...],
        *,
        slot: Hashable = None,
        facts: Hashable = None,
        num_fresh: int = 0,
        **options: int,
    ) -> None:
        """Launch on the current stream of the current device.

        Args:
            grid: programs.
            tensors: the pointers.
            numbers: passed by value, each always of one type.
            constants: compiled in.
            slot: under which `repeat` finds this launch; None for nowhere.
            facts: what all but the tensors follows from, for `repeat`.
            num_fresh: how many of the first tensors are new each time.
            **options: Triton's, such as `num_warps`.
        """
        # Compiled forms depend on types, on numbers being 1 or multiples of 16, on pointers being
        # aligned to 16 bytes, on constants, options and the device.
        addresses = tuple([tensor.data_ptr() for tensor in tensors])
        bits = 0
        for address in addresses:
            bits |= address
        if bits & 15 or not self._is_compiled or _is_hooked():
            self._kernel[grid](*tensors, *numbers, *constants, **options)
            return
        dtypes = tuple([tensor.dtype for tensor in tensors])
        device = driver.active.get_current_device()
        key = (device, dtypes, numbers, constants, *options.values())
        kept = self._kept.get(key)
        if kept is None:
            _limit(self._kept)
            made = self._kernel[grid](*tensors, *numbers, *constants, **options)
            self._kept[key] = made, packing_of(made)
            return
        compiled, packing = kept
        held = tuple([weakref.ref(tensor) for tensor in tensors[num_fresh:]])
        arguments = (*addresses[num_fresh:], *numbers, *constants)
        short = None
        parameters = None
        if slot is not None and packing is not None:
            parameters = packing.pack((*addresses[:num_fresh], *arguments))
        if packing is not None and parameters is not None:
            short = shortcuts.kernel_of(
                compiled.function,
                device,
                (*grid, 1, packing.num_threads, packing.shared),
                parameters,
                num_fresh,
                held,
                addresses[num_fresh:],
                facts,
            )
        launch = _Launch(
            held,
            addresses[num_fresh:],
            facts,
            device,
            compiled.run,
            (*grid, 1),
            (compiled.function, compiled.packed_metadata, None, None, None),
            arguments,
            short,
        )
        if slot is not None:
            _limit(self._last)
            self._last[slot] = launch
        _run(launch, addresses[:num_fresh])

    def repeat(
        self,
        slot: Hashable,
        tensors: tuple[torch.Tensor, ...],
        facts: Hashable,
        fresh: tuple[torch.Tensor, ...] = (),
    ) -> bool:
        """Launch what was last launched for a slot, if that was with these very tensors.

        Args:
            slot: of `launch`.
            tensors: of `launch`, but for those that are new each time; they are laid out as they
                were, in elements of the same type.
            facts: of `launch`.
            fresh: tensors that are new each time; aligned to 16 bytes.
        """
        last = self._last.get(slot)
        if last is None or _is_hooked():
            return False
        if last.short is not None:
            return shortcuts.repeat_kernel(last.short, tensors, facts, fresh)
        if last.facts != facts:
            return False
        for held, address, tensor in zip(last.tensors, last.addresses, tensors, strict=True):
            if held() is not tensor or tensor.data_ptr() != address:
                return False
        if driver.active.get_current_device() != last.device:
            return False
        _run(last, tuple([tensor.data_ptr() for tensor in fresh]))
        return True


def _run(launch: _Launch, fresh: tuple[int, ...]) -> None:
    stream = driver.active.get_current_stream(launch.device)
    launch.run(*launch.grid, stream, *launch.kernel, *fresh, *launch.arguments)


def _limit(held: dict[Hashable, Any]) -> None:
    if len(held) >= _MOST_KEPT:
        held.clear()


def _is_hooked() -> bool:
    """Whether somebody, such as a profiler, is told of every launch."""
    enter, leave = _HOOKS.launch_enter_hook, _HOOKS.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
