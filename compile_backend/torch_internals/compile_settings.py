"""What decides how a graph is compiled, besides the graph, as text that all processes agree on."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from compile_backend.cache import NotStorableError
from compile_backend.torch_internals.graphs import is_op_overload
from compile_backend.torch_internals.stored_code import digest

if TYPE_CHECKING:
    from collections.abc import Mapping


def compile_settings(
    config_patches: Mapping[str, Any], *, is_partitioned: bool = False
) -> tuple[str, ...]:
    """All that decides how a graph is compiled, besides the graph: settings, state, releases.

    Args:
        config_patches: Inductor settings for this graph only.
        is_partitioned: whether they are those of `partition_settings`, so that Inductor captures
            nothing.

    Raises:
        NotStorableError: what is compiled under these settings means nothing elsewhere.
    """
    import torch._functorch.config as functorch_config
    import torch._inductor.config as config
    from torch.fx.experimental import _config as shape_config

    with config.patch(dict(config_patches)):
        if config.force_disable_caches:
            raise NotStorableError("is compiled with torch's caches switched off")
        if config.freezing:
            raise NotStorableError("has its weights compiled in")
        if config.triton.cudagraphs and not is_partitioned:
            raise NotStorableError("is captured by Inductor itself")
        inductor = config.save_config_portable(ignore_private_configs=False)
        for name, value in config.get_config_copy().items():
            # Passes of users are left out there.
            if name not in inductor and not _is_plain(value):
                inductor[name] = value
    others: dict[str, Any] = {}
    for module in (functorch_config, shape_config):
        others.update(module.save_config_portable(ignore_private_configs=False))
    settings = (("inductor", inductor), ("torch", others), ("state", _torch_state()))
    return (*_build(), *(f"{name}: {_portable(name, value)}" for name, value in settings))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


def _portable(name: str, value: Any) -> str:
    """A setting as text that is equal in all processes."""
    if isinstance(value, dict):
        items = sorted((str(key), _portable(f"{name}.{key}", each)) for key, each in value.items())
        return repr(items)
    if isinstance(value, (list, tuple)):
        return repr([_portable(name, each) for each in value])
    if isinstance(value, (set, frozenset)):
        return repr(sorted(_portable(name, each) for each in value))
    if _is_plain(value):
        return repr(value)
    identity = getattr(value, "uuid", None)
    found = identity() if callable(identity) and not isinstance(value, type) else None
    if found is None:
        raise NotStorableError(f"is compiled under {name}, which has no uuid()")
    return f"{type(value).__module__}.{type(value).__qualname__} {found!r}"


def _torch_state() -> dict[str, Any]:
    """Switches of torch that tracing or code generation look at."""
    from torch._inductor.utils import _unstable_customized_partition_wrapper

    matmul = torch.backends.cuda.matmul
    state: dict[str, Any] = {
        "code generators": _registered_with_inductor(),
        "is wrapping partitions": _unstable_customized_partition_wrapper.wrapper is not None,
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": [
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        ],
        "default": (torch.get_default_dtype(), str(torch.get_default_device())),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        ),
        "reductions": (
            str(matmul.allow_fp16_reduced_precision_reduction),
            str(matmul.allow_bf16_reduced_precision_reduction),
            str(getattr(matmul, "allow_fp16_accumulation", None)),
        ),
        "precision": [
            str(getattr(owner, "fp32_precision", None))
            for owner in (
                *(torch.backends, matmul, torch.backends.cudnn, torch.backends.mkldnn),
                *(getattr(torch.backends.cudnn, part, None) for part in ("conv", "rnn")),
                *(getattr(torch.backends.mkldnn, part, None) for part in ("matmul", "conv")),
            )
        ],
        "cudnn": (
            torch.backends.cudnn.enabled,
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
        ),
        "mkldnn": torch._C._get_mkldnn_enabled(),
        "sdpa": (
            torch._C._get_flash_sdp_enabled(),
            torch._C._get_mem_efficient_sdp_enabled(),
            torch._C._get_math_sdp_enabled(),
            torch._C._get_cudnn_sdp_enabled(),
        ),
        "triton": sorted(
            item
            for item in os.environ.items()
            if item[0].startswith("TRITON_") and not item[0].endswith(("_DIR", "_HOME", "_PATH"))
        ),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        state["gpu"] = (torch.cuda.current_device(), device.name, device.major, device.minor)
        state["processors"] = device.multi_processor_count
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        state["rank"] = (torch.distributed.get_rank(), torch.distributed.get_world_size())
    return state


def _registered_with_inductor() -> dict[str, Any]:
    """Passes and settings that others gave to Inductor for a whole kind of device."""
    common: Any = sys.modules.get("torch._inductor.codegen.common")
    if common is None:  # imported by whoever registers, and by the first compilation
        return {}
    return {
        f"{name} {kind}": value
        for name in ("custom_backend_passes", "custom_backend_codegen_configs")
        for kind, value in getattr(common, name).items()
        if value is not None
    }


@functools.cache
def _build() -> tuple[str, ...]:
    """The releases of torch, Triton and Python."""
    parts = ("_inductor", "_functorch", "_decomp", "_refs", "_prims", "_higher_order_ops", "fx")
    folders = [Path(torch.__file__).parent / part for part in parts]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        folders.append(Path(triton.origin).parent)
    sizes = sorted(
        f"{os.path.relpath(found, folder)}/{name} {Path(found, name).stat().st_size}"
        for folder in folders
        for found, _, names in os.walk(folder)
        for name in names
        if name.endswith((".py", ".so"))
    )
    return (
        f"torch {torch.__version__} {torch.version.git_version}",
        f"cuda {torch.version.cuda} hip {torch.version.hip}",
        f"sources {digest(repr(sizes))}",
        f"python {sys.version} {platform.machine()}",
    )


def cpu_settings() -> str:
    """What decides how C++ for this machine's CPU is compiled."""
    return f"{torch.backends.cpu.get_cpu_capability()} {_cpu_model()} {torch.get_num_threads()}"


@functools.cache
def _cpu_model() -> str:
    """The kind of CPU with all that it can do."""
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        names = ("model name", "flags", "Features", "CPU part")
        return digest(repr([line for line in first.splitlines() if line.startswith(names)]))
    return platform.processor()


# Namespaces of ops that come with torch.
_OPS_OF_TORCH = frozenset(
    {
        *("aten", "prim", "prims", "rngprims", "inductor", "quantized", "quantized_decomposed"),
        *("_c10d_functional", "_dtensor", "mkldnn", "onednn", "symm_mem"),
    }
)


def _overloads_of(op: Any) -> list[Any]:
    return [op] if is_op_overload(op) else [getattr(op, name) for name in op.overloads()]


def op_digest(op: Any) -> str | None:
    """What is known of an op besides its name; None for those that come with torch.

    Raises:
        NotStorableError: the op is traced through to Python code.
    """
    overloads = _overloads_of(op)
    if overloads[0].namespace in _OPS_OF_TORCH:
        return None
    for overload in overloads:
        if torch._C._dispatch_has_kernel_for_dispatch_key(
            overload.name(), "CompositeImplicitAutograd"
        ):
            raise NotStorableError(f"traces through the op {overload.name()}")
    return repr([(str(overload._schema), _source_of_fake(overload)) for overload in overloads])


def _source_of_fake(overload: Any) -> str:
    """The code that tells an op's results from its arguments, which is traced with."""
    fake = _fake_of(overload)
    try:
        return "" if fake is None else digest(inspect.getsource(fake))
    except (OSError, TypeError):
        return ""


def _fake_of(overload: Any) -> Any | None:
    from torch._library.simple_registry import singleton

    try:
        kernel = singleton.find(f"{overload.namespace}::{overload._opname}").fake_impl.kernel
    except AttributeError:
        return None
    if kernel is None:
        return None
    function: Any = kernel.func
    while getattr(function, "__module__", "") == "torch.library":  # what torch puts around it
        around = inspect.getclosurevars(function).nonlocals
        if not callable(around.get("func")):
            break
        function = around["func"]
    return function


# Keywords of calls of Triton kernels that mean something within a process only.
NUMBERS_OF_KERNELS = frozenset({"kernel_idx", "constant_args_idx"})


def content_of_higher_order_call(node: torch.fx.Node) -> str | None:
    """The source of the Triton kernel that a node calls; None where it calls none.

    Raises:
        NotStorableError: the op cannot be kept.
    """
    op: Any = node.target
    if not op.cacheable():
        raise NotStorableError(f"calls {op.name()}")
    if "kernel_idx" not in node.kwargs:
        return None
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
    from torch._inductor.codegen.wrapper import (
        user_defined_triton_kernel_transitive_closure_source_code,
    )

    kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # type: ignore[arg-type]
    constants = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])  # type: ignore[arg-type]
    configs: list[str] = []
    if hasattr(kernel, "configs"):
        configs = [repr(sorted(map(str, each.all_kwargs().items()))) for each in kernel.configs]
        kernel = kernel.fn
    source = user_defined_triton_kernel_transitive_closure_source_code(kernel)
    return repr((source, _portable("a Triton kernel's constants", constants), configs))


def renamed_size(size: Any, symbols: dict[Any, Any]) -> str:
    """A size as text, its symbols called by the order in which they are first met.

    Args:
        size: an integer or a `SymInt`.
        symbols: their new names; added to.
    """
    if not isinstance(size, torch.SymInt):
        return str(size)
    expression = size.node.expr
    for symbol in sorted(expression.free_symbols, key=str):
        if symbol not in symbols:
            symbols[symbol] = symbol.func(f"s{len(symbols)}", **symbol.assumptions0)
    return str(expression.xreplace(symbols))


def tracing_settings() -> tuple[str, ...]:
    """All that decides how Dynamo traces, besides the function.

    Raises:
        NotStorableError: a setting means nothing elsewhere.
    """
    import torch._dynamo.config as config

    dynamo = config.save_config_portable(ignore_private_configs=False)
    dynamo = {name: value for name, value in dynamo.items() if name not in _FOR_PEOPLE}
    stack = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    if any(stack):
        raise NotStorableError("is called inside of a mode of torch's")
    device = torch.utils._device.CURRENT_DEVICE
    others = (
        device,
        torch.get_num_threads(),
        torch.cuda.is_available(),
        torch.cuda.device_count(),
    )
    return _portable("dynamo", dynamo), str(others)


_FOR_PEOPLE = ("debug_dir_root", "base_dir")


def fakes_of(op: Any) -> list[Any]:
    """The Python functions that tell an op's results from its arguments when it is traced."""
    overloads = _overloads_of(op)
    if overloads[0].namespace in _OPS_OF_TORCH:
        return []
    fakes = (_fake_of(overload) for overload in overloads)
    return [fake for fake in fakes if fake is not None]


def op_sources(op: Any) -> str:
    """What is known of an op besides its name, with the files that its kernels are written in.

    Raises:
        NotStorableError: the op is traced through to Python code, or by a kernel in Python for
            tensors without data, which nobody can look at.
    """
    known = op_digest(op)
    if known is None:
        return ""
    overloads = _overloads_of(op)
    told = "".join(torch._C._dispatch_dump(overload.name()) for overload in overloads)
    if re.search(r"^Meta: registered at \S+\.py:", told, re.MULTILINE) and not fakes_of(op):
        raise NotStorableError(f"traces by a kernel in Python of the op {overloads[0].name()}")
    files = sorted({Path(name) for name in re.findall(r"registered at (\S+\.py):\d+", told)})
    return known + "".join(digest(file.read_text()) for file in files if file.is_file())
