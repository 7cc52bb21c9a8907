"""Private names around CUDA graphs: captures, memory without owners, addresses, launches."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def weak_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A CUDA tensor on the same memory that does not keep that memory allocated."""
    storage = tensor.untyped_storage()
    if tensor.numel() == 0 or storage.nbytes() == 0:
        return tensor
    return _tensor_at(storage.data_ptr(), storage.nbytes(), tensor, int(tensor.storage_offset()))


def weak_part(part: torch.Tensor) -> torch.Tensor:
    """A dense part of a CUDA tensor as a tensor that starts its own storage, likewise."""
    return _tensor_at(part.data_ptr(), part.numel() * part.element_size(), part, 0)


def _tensor_at(
    address: int, num_bytes: int, like: torch.Tensor, storage_offset: int
) -> torch.Tensor:
    storage = torch._C._construct_storage_from_data_pointer(address, like.device, num_bytes)
    metadata = {
        "size": like.size(),
        "stride": like.stride(),
        "dtype": like.dtype,
        "device": like.device,
        "storage_offset": storage_offset,
    }
    weak: torch.Tensor = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(
        metadata, storage
    )
    return weak


@contextlib.contextmanager
def cublas_workspaces_apart() -> Iterator[None]:
    """Give the body cuBLAS workspaces of its own.

    A workspace that was allocated outside of a capture may be freed while the graph still uses
    it; one allocated inside must not be handed to code outside.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    try:
        yield
    finally:
        if clear is not None:
            clear()


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture the body into `graph`, while other threads may use the device.

    Raises:
        BrokenCaptureError: the driver broke the capture off. `graph` must then be kept for good,
            and nothing may be captured into `pool` again: `capture_end` failed before it told
            the allocators, which go on asking the graph whether a stream belongs to it.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        yield
    except BaseException as error:
        _end_capture(graph, pool, generator, error)
        raise
    _end_capture(graph, pool, generator, None)


class BrokenCaptureError(RuntimeError):
    """A capture that could not be ended cleanly."""


def _end_capture(
    graph: torch.cuda.CUDAGraph,
    pool: Any,
    generator: torch.Generator,
    error: BaseException | None,
) -> None:
    try:
        with warnings.catch_warnings():
            # A call may do nothing but views. A capture on another stream would not be ours.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            graph.capture_end()
    except RuntimeError as broken:
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        # The old state believes for ever that a capture is running.
        generator.graphsafe_set_state(generator.graphsafe_get_state().clone_state())
        raise BrokenCaptureError(str(error or broken)) from (error or broken)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy many tensors of one dtype at once; one launch instead of one for each."""
    torch._foreach_copy_(list(targets), list(sources))


Maker = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
"""Makes a tensor of a size, strides and a dtype, in memory that holds anything."""


def maker_on(device: torch.device) -> Maker:
    """Makes tensors on the current device of a type, as code of Inductor: past the dispatcher.

    Args:
        device: of that type.
    """

    def make(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device.type)

    found: Maker = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", make)
    return found


@dataclass(frozen=True, slots=True)
class TensorHandles:
    """Tensors as torch's stable C interface knows them, `aoti_torch/c/shim.h`.

    Attributes:
        capsules: each with a handle that whoever takes it must delete, or None. A handle sees new
            memory of its tensor, and keeps the tensor alive.
        functions: addresses of what tells a tensor's address, its dimensions, sizes and strides,
            and of what deletes a handle.
    """

    capsules: list[Any]
    functions: tuple[int, ...]


def tensor_handles(tensors: Sequence[torch.Tensor | None]) -> TensorHandles | None:
    """Handles of tensors; None where this torch gives none.

    Args:
        tensors: with data of their own; None stays None.
    """
    make = getattr(getattr(torch._C, "_aoti", None), "unsafe_alloc_void_ptrs_from_tensors", None)
    functions = _stable_functions(
        "aoti_torch_get_data_ptr",
        "aoti_torch_get_dim",
        "aoti_torch_get_sizes",
        "aoti_torch_get_strides",
        "aoti_torch_delete_tensor_object",
    )
    if make is None or functions is None:
        return None
    made = iter(make([tensor for tensor in tensors if tensor is not None]))
    capsules = [None if item is None else next(made) for item in tensors]
    return TensorHandles(capsules, tuple(functions))


@functools.cache
def data_ptr_function() -> int | None:
    """The address of what tells where a tensor's data is; None where this torch has none."""
    functions = _stable_functions("aoti_torch_get_data_ptr")
    return None if functions is None else functions[0]


@functools.cache
def layout_functions() -> list[int] | None:
    """Addresses of what tells a tensor's data, dimensions, sizes, strides, dtype and offset."""
    names = (
        "get_data_ptr",
        "get_dim",
        "get_sizes",
        "get_strides",
        "get_dtype",
        "get_storage_offset",
    )
    return _stable_functions(*(f"aoti_torch_{name}" for name in names))


def address_in_cpp(tensor: torch.Tensor) -> int:
    """Where the tensor of C++ is that a Python object stands for."""
    address: int = tensor._cdata
    return address


def storage_in_cpp(tensor: torch.Tensor) -> int:
    """Where the storage of C++ is behind a tensor with data of its own; 0 if it does not tell."""
    try:
        address: int = tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError, TypeError, ValueError):  # of a class of its own
        return 0
    return address


@functools.cache
def launch_functions() -> list[int] | None:
    """Addresses of what a bare replay calls; None where this torch or the driver lacks one.

    They tell the current device and a device's current stream, launch an executable graph, and
    tell whether a stream is being captured.
    """
    has_handle = hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec")
    return _current_and("cuGraphLaunch", "cuStreamIsCapturing") if has_handle else None


@functools.cache
def copy_functions() -> list[int] | None:
    """Addresses of what copies and records an event, after those of the current device and stream.

    Copies are between addresses of any memory that the device reaches.
    """
    return _current_and("cuMemcpyAsync", "cuEventRecord")


@functools.cache
def kernel_functions() -> list[int] | None:
    """Addresses of what a bare launch of a kernel calls, likewise."""
    return _current_and("cuLaunchKernel")


def parameter_sizes(function: int) -> list[int] | None:
    """Bytes of each parameter of a loaded kernel; None where the driver does not tell.

    Args:
        function: the driver's handle.
    """
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuFuncGetParamInfo
    except (OSError, AttributeError):
        return None
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while not ask(
        ctypes.c_void_p(function),
        ctypes.c_size_t(len(sizes)),
        ctypes.byref(offset),
        ctypes.byref(size),
    ):
        sizes.append(size.value)
    return sizes


@functools.cache
def event_functions() -> list[int] | None:
    """Addresses of what asks an event whether it is done, and waits for it; None if there is none.

    Both take the handle of an event.
    """
    return _driver_functions("cuEventQuery", "cuEventSynchronize")


def _current_and(*names: str) -> list[int] | None:
    """What tells the current device and its current stream, then functions of the driver."""
    device = _stable_functions("aoti_torch_get_current_device_index")
    stream = _stable_functions("aoti_torch_get_current_cuda_stream", library="libtorch_cuda.so")
    functions = _driver_functions(*names)
    if device is None or stream is None or functions is None:
        return None
    return [*device, *stream, *functions]


def _driver_functions(*names: str) -> list[int] | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return [_address(getattr(driver, name)) for name in names]


@functools.cache
def _stable_functions(*names: str, library: str = "libtorch_cpu.so") -> list[int] | None:
    """Addresses of functions of torch's stable C interface; None unless it has all of them."""
    path = Path(torch.__file__).parent / "lib" / library
    if not path.is_file():
        return None
    loaded = ctypes.CDLL(str(path))
    if not all(hasattr(loaded, name) for name in names):
        return None
    return [_address(getattr(loaded, name)) for name in names]


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def are_at_addresses(
    tensors: list[Any], addresses: list[int | None], positions: list[int]
) -> bool:
    """Whether the tensors at these positions start at these addresses.

    CUDA builds of torch compare hundreds of weights in one call; asking each from Python would
    cost a fifth of the host time of a step.
    """
    compare = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
    if compare is not None:
        equal: bool = compare(tensors, addresses, positions)
        return equal
    return all(tensors[i].data_ptr() == addresses[i] for i in positions)
