"""Parameters of kernels are those that the compiled code takes, and launches pass them on."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import struct
import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from compile_backend import shortcuts
from compile_backend.attention import triton_packed
from compile_backend.attention.triton_packed import packing_of

# In a process of its own: where Triton interprets kernels, it compiles none.
COMPILE = r"""
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from compile_backend.attention import triton_packed
from compile_backend.attention.triton_cache import store_kernel
from compile_backend.attention.triton_results import reduce_kernel

def sizes_in(ptx):
    head = ptx[ptx.index(".entry"):]
    widths = re.findall(r"\.param \.(?:[usbf])(32|64)\b", head[: head.index(")\n")])
    return [int(width) // 8 for width in widths]

def told(function, types, constants, one):
    signature = {n: "constexpr" if n in constants else types[n] for n in function.arg_names}
    if one:
        signature[one] = "constexpr"
        constants = {**constants, one: 1}
    places = {(function.arg_names.index(n),): v for n, v in constants.items()}
    source = ASTSource(function, signature, places, {})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    found = sizes_in(made.asm["ptx"])
    triton_packed.parameter_sizes = lambda _: found
    packing = triton_packed.packing_of(
        type("Loaded", (), {"metadata": made.metadata, "src": made.src, "function": 1})
    )
    return None if packing is None else [list(packing.positions), packing.cells.format,
                                         packing.num_threads, packing.shared, found]

strides = {n: "i32" for n in store_kernel.arg_names if n.endswith("_stride")}
store = dict(key="*bf16", value="*bf16", key_cache="*bf16", value_cache="*bf16",
             slot_mapping="*i64", key_scale="fp32", value_scale="fp32") | strides
fixed = dict(NUM_KV_HEADS=8, HEAD_SIZE=128, BLOCK_SIZE=16, BLOCK=1024, LIMIT=0.0)
reduce = dict(partial="*fp32", output="*bf16", query_start_loc="*i32", output_scale="*i32",
              num_reqs="i32", output_token_stride="i64", output_head_stride="i32")
splits = dict(HEAD_SIZE=64, HEAD_PAD=64, NUM_SPLITS=4, RESULT_SIZE=68, ROUNDED=None,
              FP8_MAX=0.0, MULTIPLIES=False, IS_INTERPRETED=False)
found = [told(store_kernel, store, fixed, None), told(reduce_kernel, reduce, splits, "num_reqs")]
json.dump(found, sys.stdout)
"""


def test_the_parameters_are_those_of_the_compiled_code() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    result = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr
    store, reduce = json.loads(result.stdout)
    pointers, floats, strides = 5, 2, 7
    assert store[0] == list(range(pointers + floats + strides))
    assert store[1] == "<" + "Q" * 5 + "f4x" * 2 + "i4x" * 7 + "QQ"
    assert store[4] == [8] * 5 + [4] * 9 + [8] * 2
    assert store[2] == 128
    # One request is compiled in, as every argument of 1 is.
    assert reduce[0] == [0, 1, 2, 3, 5, 6]
    assert reduce[4] == [8, 8, 8, 8, 8, 4, 8, 8]


def kernel(
    monkeypatch: pytest.MonkeyPatch, sizes: Any = (8, 4, 4, 8, 8), types: Any = None, **facts: Any
) -> Any:
    """A kernel of a pointer, an integer, a float and a constant, as Triton tells of it."""
    monkeypatch.setattr(triton_packed, "parameter_sizes", lambda _: list(sizes))
    plain = {
        "num_ctas": 1,
        "launch_cooperative_grid": False,
        "launch_pdl": False,
        "global_scratch_size": 0,
        "profile_scratch_size": 0,
        "num_warps": 4,
        "target": SimpleNamespace(warp_size=32),
        "shared": 512,
    }
    types = types or {"x": "*fp32", "n": "i32", "SIZE": "constexpr", "scale": "fp32"}
    return SimpleNamespace(
        function=77,
        metadata=SimpleNamespace(**{**plain, **facts}),
        src=SimpleNamespace(signature=types),
    )


def test_arguments_are_packed_by_their_types(monkeypatch: pytest.MonkeyPatch) -> None:
    packing = packing_of(kernel(monkeypatch))
    assert packing is not None
    assert (packing.num_threads, packing.shared) == (128, 512)
    packed = packing.pack((2**63 + 8, -3, "compiled in", 0.5))
    assert len(packed) == 5 * 8
    assert struct.unpack("<Qi4xf4xQQ", packed) == (2**63 + 8, -3, 0.5, 0, 0)


@pytest.mark.parametrize(
    "facts",
    [
        {"sizes": [8, 4, 4, 8]},
        {"sizes": [8, 4, 8, 8, 8]},
        {"sizes": []},
        {"types": {"x": "*fp32", "n": "i32", "SIZE": "constexpr", "scale": "fp64"}},
        {"types": {"x": "tensordesc<fp16>", "n": "i32", "SIZE": "constexpr", "scale": "fp32"}},
        {"num_ctas": 2},
        {"launch_pdl": True},
        {"launch_cooperative_grid": True},
        {"global_scratch_size": 16},
        {"profile_scratch_size": 16},
    ],
    ids=str,
)
def test_a_kernel_of_another_kind_is_declined(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]
) -> None:
    assert packing_of(kernel(monkeypatch, **facts)) is None


def test_a_number_that_no_parameter_holds_is_left_to_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packing = packing_of(kernel(monkeypatch))
    assert packing is not None
    assert packing.pack((8, 2**31, "compiled in", 0.5)) is None
    assert packing.pack((8, 1, "compiled in", 1e39)) is None


def test_a_kernel_of_too_many_parameters_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, is_taken in ((62, True), (63, False)):
        types = {f"x{i}": "*fp32" for i in range(number)}
        made = kernel(monkeypatch, sizes=[8] * (number + 2), types=types)
        assert (packing_of(made) is not None) is is_taken


def test_what_is_no_kernel_is_declined() -> None:
    assert packing_of(SimpleNamespace()) is None


# --- launches ---------------------------------------------------------------------------------

POINTER, UNSIGNED = ctypes.c_void_p, ctypes.c_uint


class Driver:
    """Stands for torch and the driver: notes each launch."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.device, self.error = 3, 0
        current = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
        stream = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(POINTER))
        launch = ctypes.CFUNCTYPE(
            ctypes.c_int, POINTER, *[UNSIGNED] * 7, POINTER, ctypes.POINTER(POINTER), POINTER
        )
        self.functions = [current(self._device), stream(self._stream), launch(self._launch)]

    def addresses(self) -> list[int | None]:
        return [ctypes.cast(function, POINTER).value for function in self.functions]

    def _device(self, told: Any) -> int:
        told[0] = self.device
        return 0

    def _stream(self, device: int, told: Any) -> int:
        told[0] = 900 + device
        return 0

    def _launch(self, function: int, *rest: Any) -> int:
        *sizes, stream, params, extra = rest
        assert extra is None
        first = ctypes.cast(params[0], ctypes.POINTER(ctypes.c_uint64))[0]
        second = ctypes.cast(params[1], ctypes.POINTER(ctypes.c_uint64))[0]
        third = ctypes.cast(params[2], ctypes.POINTER(ctypes.c_int32))[0]
        self.launches.append((function, tuple(sizes), stream, first, second, third))
        return self.error


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(shortcuts, "kernel_functions", made.addresses)
    return made


def bound(tensors: tuple[torch.Tensor, ...], facts: Any = ("facts", 1)) -> Any:
    """A launch with one fresh pointer, one that stays and a number."""
    return shortcuts.kernel_of(
        77,
        3,
        (5, 6, 1, 128, 512),
        struct.pack("<QQi4x", 0, tensors[0].data_ptr(), -9),
        1,
        [weakref.ref(tensor) for tensor in tensors],
        [tensor.data_ptr() for tensor in tensors],
        facts,
    )


def test_a_launch_is_repeated_with_what_is_fresh(driver: Driver) -> None:
    held, fresh = torch.zeros(64), torch.ones(64)
    made = bound((held,))
    assert shortcuts.repeat_kernel(made, (held,), ("facts", 1), (fresh,))
    sizes = (5, 6, 1, 128, 1, 1, 512)
    assert driver.launches == [(77, sizes, 903, fresh.data_ptr(), held.data_ptr(), -9)]


def test_nothing_is_launched_for_anything_else(driver: Driver) -> None:
    held, fresh, other = torch.zeros(64), torch.ones(64), torch.zeros(64)
    facts = ("facts", 1)
    made = bound((held,))

    def repeat(*given: Any) -> bool:
        return shortcuts.repeat_kernel(made, *given)

    assert not repeat((other,), facts, (fresh,))
    assert not repeat((held,), ("facts", 2), (fresh,))
    assert not repeat((held, held), facts, (fresh,))
    assert not repeat((held,), facts, ())
    assert not repeat((held,), facts, (fresh[1:],))  # not aligned
    assert not repeat((held,), facts, ("no tensor",))
    assert not shortcuts.repeat_kernel("no kernel", (held,), facts, (fresh,))
    driver.device = 1
    assert not repeat((held,), facts, (fresh,))
    driver.device = 3
    before = held.data
    held.data = torch.zeros(64)
    assert not repeat((held,), facts, (fresh,))
    held.data = before
    assert not driver.launches
    driver.error = 700
    assert not repeat((held,), facts, (fresh,))
    driver.error = 0
    assert repeat((held,), facts, (fresh,))


def test_no_tensor_is_kept_alive(driver: Driver) -> None:
    held = torch.zeros(64)
    made, alive = bound((held,)), weakref.ref(held)
    del held
    gc.collect()
    assert alive() is None
    assert not shortcuts.repeat_kernel(made, (torch.zeros(64),), ("facts", 1), (torch.ones(64),))
    assert not driver.launches


@pytest.mark.parametrize(
    "change",
    [
        {"parameters": b"1234567"},
        {"num_fresh": 4},
        {"num_fresh": -1},
        {"parameters": bytes(8 * 65)},
    ],
    ids=str,
)
def test_what_cannot_be_launched_is_refused(driver: Driver, change: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"parameters": bytes(24), "num_fresh": 1}
    given = {**usual, **change}
    with pytest.raises(ValueError, match="no parameters of one kernel"):
        shortcuts.kernel_of(
            77, 3, (1, 1, 1, 32, 0), given["parameters"], given["num_fresh"], [], [], None
        )
