"""Stored code calls what Inductor's code calls."""

from __future__ import annotations

import torch
from torch._inductor import lowering  # noqa: F401 - fills the table
from torch._inductor.select_algorithm import extern_kernels as inductors

from compile_backend.torch_internals.extern_kernels import (
    OF_TORCH,
    extern_kernels,
    quick_to_import,
)

HEAD = "import torch\n"
IMPORT = "from torch._inductor.select_algorithm import extern_kernels\n"


def test_what_inductor_calls_is_what_is_called():
    for name, kernel in vars(inductors).items():
        assert getattr(extern_kernels, name) is kernel


def test_torchs_own_are_in_inductors_table():
    for name in OF_TORCH:
        assert getattr(inductors, name) is getattr(torch, name)


def test_code_takes_them_from_here():
    code = "def call(a, b):\n    # torch.ops.prims.mul\n    return extern_kernels.mm(a, b)\n"
    source = quick_to_import(HEAD + IMPORT + code)
    namespace = {}
    exec(source, namespace)
    assert namespace["extern_kernels"] is extern_kernels
    a = torch.randn(3, 3)
    assert torch.equal(namespace["call"](a, a), a @ a)
    assert len(source.splitlines()) == len((HEAD + IMPORT + code).splitlines())


def test_other_code_stays_as_it_is():
    for text in (HEAD, HEAD + IMPORT + "torch.ops.prims.inductor_seed(0)\n"):
        assert quick_to_import(text) == text
