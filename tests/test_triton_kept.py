"""Kept kernels are launched with the very arguments, and only where Triton would choose them."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from compile_backend.attention import triton_kept
from compile_backend.attention.triton_kept import KeptKernel


class Kernel:
    """Stands for a kernel of Triton's: writes down each way of launching it."""

    def __init__(self) -> None:
        self.bound: list[Any] = []
        self.run: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> Any:
            self.bound.append((grid, args, options))
            number = len(self.bound)
            return SimpleNamespace(
                function=f"f{number}",
                packed_metadata=f"m{number}",
                run=lambda *given: self.run.append(given),
            )

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: "stream")
    monkeypatch.setattr(triton_kept, "driver", SimpleNamespace(active=active))
    return Kernel()


def kept(kernel: Kernel) -> KeptKernel:
    made = KeptKernel(kernel)
    made._is_compiled = True  # the interpreter is on where there is no GPU
    return made


def test_the_second_launch_is_past_the_binder(kernel):
    launcher = kept(kernel)
    first, second = torch.zeros(8), torch.ones(8)
    for tensor, grid in ((first, (1, 2)), (second, (3, 4))):
        launcher.launch(grid, (tensor,), (16, 0.5), (True, 64), num_warps=4)
    assert kernel.bound == [((1, 2), (first, 16, 0.5, True, 64), {"num_warps": 4})]
    ((*head, tensor, sixteen, half, flag, size),) = kernel.run
    assert head == [3, 4, 1, "stream", "f1", "m1", None, None, None]
    assert tensor == second.data_ptr()
    assert (sixteen, half, flag, size) == (16, 0.5, True, 64)


@pytest.mark.parametrize(
    "other",
    [
        {"tensors": (torch.zeros(8, dtype=torch.float16),)},
        {"numbers": (1,)},
        {"constants": (32,)},
        {"num_warps": 8},
    ],
    ids=lambda other: next(iter(other)),
)
def test_other_facts_are_another_kernel(kernel, other):
    launcher = kept(kernel)
    usual = {"tensors": (torch.zeros(8),), "numbers": (16,), "constants": (64,), "num_warps": 4}
    for facts in (usual, {**usual, **other}, usual):
        launcher.launch((1, 1), **facts)
    assert len(kernel.bound) == 2
    assert len(kernel.run) == 1


def test_pointers_that_are_not_aligned_are_left_to_triton(kernel):
    launcher = kept(kernel)
    shifted = torch.zeros(9)[1:]
    for tensor in (torch.zeros(8), shifted, shifted):
        launcher.launch((1, 1), (tensor,), (), (), num_warps=4)
    assert len(kernel.bound) == 3
    assert not kernel.run


def test_profilers_see_every_launch(kernel, monkeypatch):
    launcher = kept(kernel)
    told = SimpleNamespace(calls=[print])
    hooks = SimpleNamespace(launch_enter_hook=told, launch_exit_hook=None)
    launcher.launch((1, 1), (torch.zeros(8),), (), (), num_warps=4)
    monkeypatch.setattr(triton_kept, "_HOOKS", hooks)
    launcher.launch((1, 1), (torch.zeros(8),), (), (), num_warps=4)
    assert len(kernel.bound) == 2
    assert not kernel.run


def test_what_is_kept_is_limited(kernel, monkeypatch):
    monkeypatch.setattr(triton_kept, "_MOST_KEPT", 3)
    launcher = kept(kernel)
    for number in range(10):
        launcher.launch((1, 1), (torch.zeros(8),), (number,), (), num_warps=4)
    assert len(launcher._kept) <= 3


# --- the same tensors again -------------------------------------------------------------------


def launched(launcher: KeptKernel, tensors: Any, facts: Any = "facts") -> None:
    """Launches with a slot, until the compiled kernel is kept and its launch is known."""
    for _ in range(2):
        launcher.launch(
            (1, 2), tensors, (7,), (64,), slot="slot", facts=facts, num_fresh=1, num_warps=4
        )


def test_a_launch_is_repeated_with_the_very_tensors(kernel):
    launcher = kept(kernel)
    fresh, static = torch.zeros(8), torch.ones(8)
    launched(launcher, (fresh, static))
    other = torch.zeros(8)
    assert launcher.repeat("slot", (static,), "facts", (other,))
    first, second = kernel.run
    assert second == (*first[:9], other.data_ptr(), *first[10:])
    assert first[9:] == (fresh.data_ptr(), static.data_ptr(), 7, 64)


@pytest.mark.parametrize(
    "change", ["slot", "facts", "tensor", "memory", "hooked", "device", "gone"]
)
def test_another_launch_is_not_repeated(kernel, monkeypatch, change):
    launcher = kept(kernel)
    fresh, static = torch.zeros(8), torch.ones(8)
    launched(launcher, (fresh, static))
    slot, facts, tensor = "slot", "facts", static
    if change == "slot":
        slot = "other"
    elif change == "facts":
        facts = "other"
    elif change == "tensor":
        tensor = static.view(8)
    elif change == "memory":
        static.data = torch.ones(8)
    elif change == "hooked":
        hooks = SimpleNamespace(launch_enter_hook=print, launch_exit_hook=None)
        monkeypatch.setattr(triton_kept, "_HOOKS", hooks)
    elif change == "device":
        monkeypatch.setattr(triton_kept.driver.active, "get_current_device", lambda: 1)
    else:
        del static, tensor
        tensor = torch.ones(8)
    num_launches = len(kernel.run)
    assert not launcher.repeat(slot, (tensor,), facts, (fresh,))
    assert len(kernel.run) == num_launches


def test_launches_keep_no_tensor_alive(kernel):
    launcher = kept(kernel)
    tensors = [torch.zeros(8), torch.ones(8)]
    launched(launcher, tuple(tensors))
    gone: list[str] = []
    weakref.finalize(tensors[1], gone.append, "gone")
    tensors.clear()
    kernel.bound.clear()
    assert gone == ["gone"]
