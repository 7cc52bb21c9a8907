"""Every private name of torch, and what differs between its releases.

A new torch release may break this file and no other. Names are looked up inside functions so that
importing the package starts neither Dynamo nor Inductor. Differences are detected by signature
or attribute, never by version.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch.utils import _pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import FrameType


# Nested tuples, lists and dicts of tensors.
tree_map: Callable[..., Any] = _pytree.tree_map
tree_leaves: Callable[..., list[Any]] = _pytree.tree_leaves

# What Dynamo writes into graphs for `with torch.autocast(...)` and `torch.no_grad()`.
enter_autocast: Callable[..., Any] = torch.amp.autocast_mode._enter_autocast
leave_autocast: Callable[..., Any] = torch.amp.autocast_mode._exit_autocast
set_grad_enabled: Callable[..., Any] = torch._C._set_grad_enabled


def is_op_overload(target: object) -> bool:
    """Whether `target` is one overload of an op, such as `torch.ops.aten.add.Tensor`."""
    return isinstance(target, torch._ops.OpOverload)


def is_op_packet(target: object) -> bool:
    """Whether `target` is an op with all its overloads, such as `torch.ops.aten.add`."""
    return isinstance(target, torch._ops.OpOverloadPacket)


def is_higher_order_op(target: object) -> bool:
    """Whether `target` is an op that takes functions, such as `flex_attention`."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def op_schema(target: object) -> Any | None:
    """The schema of an op overload, or of the first overload of a packet; else None."""
    if is_op_overload(target):
        return target._schema  # type: ignore[attr-defined]
    if is_op_packet(target):
        overload = target.overloads()[0]  # type: ignore[attr-defined]
        return getattr(target, overload)._schema
    return None


def is_fake_tensor(value: object) -> bool:
    """Whether `value` is a tensor without data, as graphs carry them."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def fake_mode_of(graph_module: torch.fx.GraphModule) -> Any | None:
    """The fake-tensor mode of the values that a Dynamo graph carries."""
    for node in graph_module.graph.nodes:
        value = node.meta.get("example_value")
        if is_fake_tensor(value):
            return value.fake_mode
    return None


def storage_id(value: object) -> int | None:
    """An identity of the memory behind a (fake) tensor; None where there is none."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    try:
        return int(value.untyped_storage()._cdata)
    except NotImplementedError:  # wrappers, such as those that function transforms leave
        return None


def is_static_address(node: torch.fx.Node, value: object) -> bool:
    """Whether a graph input was marked by `torch._dynamo.mark_static_address`.

    Dynamo marks parameters and buffers so, too.
    """
    described = node.meta.get("tensor_dict") or {}
    return (
        "_dynamo_static_input_type" in described
        or getattr(value, "_dynamo_static_input_type", None) is not None
    )


def _source_of(node: torch.fx.Node) -> Any:
    """Where a graph input comes from; copies of a graph have it in their metadata only."""
    source = getattr(node, "_dynamo_source", None)
    return source or getattr(node.meta.get("grapharg"), "source", None)


def input_source_name(node: torch.fx.Node) -> str:
    """How the user would write this graph input, such as `L['self'].lm_head.weight`."""
    name = getattr(_source_of(node), "name", None)
    try:
        name = name() if callable(name) else name
    except NotImplementedError:
        name = None
    return str(name) if name else node.name


def fix_numbers_of_modules(graph: torch.fx.Graph) -> None:
    """Have Dynamo trace again with the float attributes of modules as constants, guarded.

    With dynamic shapes Dynamo hands floats over as tensors on the CPU and reads them back in the
    graph. An epsilon or a dropout rate would so put host work into every piece, which no CUDA
    graph can hold. Floats that callers pass stay free.

    Raises:
        TensorifyScalarRestartAnalysis: for Dynamo, which starts over. Not raised a second time.
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState

    symbols = [
        node.meta["example_value"].item_memo.node._expr.name
        for node in graph.nodes
        if is_number_input(node) and _belongs_to_module(node)
    ]
    symbols = [symbol for symbol in symbols if not TensorifyState.should_specialize(symbol)]
    for symbol in symbols:
        TensorifyState.specialize(symbol)
    if symbols:
        raise TensorifyScalarRestartAnalysis


def is_number_input(node: torch.fx.Node) -> bool:
    """Whether a graph input is a Python float that Dynamo hands over as a tensor on the CPU."""
    memo = getattr(node.meta.get("example_value"), "item_memo", None)
    return (
        node.op == "placeholder"
        and isinstance(memo, torch.SymFloat)
        and hasattr(memo.node._expr, "name")
        and all(user.target == "item" for user in node.users)
    )


def _belongs_to_module(node: torch.fx.Node) -> bool:
    source = _source_of(node)
    kind = getattr(source, "guard_source", None)
    return "NN_MODULE" in str(kind() if callable(kind) else kind)


# --- who called the backend ------------------------------------------------------------------


def calling_compile() -> object | None:
    """The `torch.compile` call on whose behalf a backend is running, from the stack.

    Dynamo hands a backend no identity of its caller, yet `stats(compiled)` must find what was
    compiled for `compiled`.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if type(owner).__name__ == "_TorchCompileWrapper":
            return owner
        frame = frame.f_back
    return None


def compile_behind(compiled: object) -> object | None:
    """The `torch.compile` call that made `compiled` (a module or a function)."""
    compiled = getattr(compiled, "_compiled_call_impl", None) or compiled  # module.compile()
    context = getattr(compiled, "dynamo_ctx", None)
    callback = getattr(context, "callback", None)
    if callback is None:
        for cell in getattr(compiled, "__closure__", None) or ():
            with contextlib.suppress(ValueError):
                found = cell.cell_contents
                candidate = getattr(found, "callback", found)
                if hasattr(candidate, "_torchdynamo_orig_backend"):
                    callback = candidate
                    break
    while callback is not None and type(callback).__name__ != "_TorchCompileWrapper":
        callback = getattr(callback, "_torchdynamo_orig_backend", None)
    return callback


def backend_of(compile_call: object) -> object | None:
    """The backend object that a `torch.compile` call uses."""
    return getattr(compile_call, "compiler_fn", None)


def size_1_like_any_other() -> contextlib.AbstractContextManager[None]:
    """Compile code for changing sizes that holds for 1 too, unless the code asks for 1 itself.

    Dynamo would otherwise compile every model once more for batches of one token.
    """
    from torch.fx.experimental import _config

    patched: contextlib.AbstractContextManager[None] = _config.patch(  # type: ignore[attr-defined]
        backed_size_oblivious=True
    )
    return patched


def mark_step_input(tensor: torch.Tensor, axis: int) -> None:
    """Tell Dynamo that a tensor stays at its address, and that one of its sizes changes.

    A size of 1 is left alone: Dynamo refuses to take it for one that changes.
    """
    import torch._dynamo

    torch._dynamo.mark_static_address(tensor, guard=False)
    if tensor.shape[axis] > 1:
        # A function that a break of the graph left behind may have no use for the size.
        torch._dynamo.maybe_mark_dynamic(tensor, axis)


def reaching_the_user(error: Exception) -> Exception:
    """The same error in a form that Dynamo lets through.

    Dynamo wraps whatever a backend raises, except errors of its own kind whose traceback it
    shortens.
    """
    from torch._dynamo.exc import ShortenTraceback

    kind = type(error)

    def initialise(self: Any, *_: Any, **__: Any) -> None:
        ShortenTraceback.__init__(self, str(error), first_useful_frame=None)
        self.__dict__.update(error.__dict__)

    members = {"__init__": initialise, "__str__": kind.__str__, "__module__": kind.__module__}
    made: Exception = type(kind.__name__, (kind, ShortenTraceback), members)()
    return made.with_traceback(error.__traceback__)


# --- Inductor --------------------------------------------------------------------------------


@dataclass(frozen=True)
class InductorArtefact:
    """One graph compiled by Inductor.

    Attributes:
        call: takes the inputs as one list, which it may clear, and returns the outputs.
        mutated_inputs: positions of the inputs that it writes to.
        is_direct: `call` is Inductor's own code with none of AOTAutograd's wrappers around it.
    """

    call: Callable[[list[Any]], Sequence[Any]]
    mutated_inputs: tuple[int, ...]
    is_direct: bool


def compile_with_inductor(
    graph_module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    fake_mode: Any,
    config_patches: Mapping[str, Any],
) -> InductorArtefact:
    """Compile one graph, and strip the wrappers that inference does not need.

    AOTAutograd wraps Inductor's code to regenerate views, apply mutations and track autograd. For
    most pieces that does nothing, yet costs 20 us and more a call, several times over in a step.
    Where its own description of the graph says that nothing is left to do, the code inside is
    called directly.

    Args:
        graph_module: a graph that returns a tuple; owned by the compiler from here on.
        inputs: fake tensors and `SymInt`s, all of `fake_mode`.
        fake_mode: the mode in whose `ShapeEnv` the sizes live.
        config_patches: Inductor settings for this graph only.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    seen: list[tuple[Any, Any, int]] = []

    def recording_compile(inner: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        code = compile_fx_inner(inner, *args, **kwargs)
        num_inputs = len([node for node in inner.graph.nodes if node.op == "placeholder"])
        context = TracingContext.try_get()
        seen.append((code, context.fw_metadata if context else None, num_inputs))
        return code

    with (
        tracing(TracingContext(fake_mode)),
        torch._functorch.config.patch({"enable_autograd_cache": False}),
    ):
        wrapped = compile_fx(
            graph_module,
            list(inputs),
            inner_compile=recording_compile,
            config_patches=dict(config_patches),
        )
        metadata = TracingContext.get().fw_metadata
    mutated = tuple(
        index
        for index, info in enumerate(metadata.input_info if metadata is not None else ())
        if info.mutates_data
    )
    if len(seen) == 1 and _nothing_left_to_do(seen[0][1], seen[0][2], len(inputs)):
        return InductorArtefact(_direct(seen[0][0]), mutated, is_direct=True)
    return InductorArtefact(_spread(wrapped), mutated, is_direct=False)


def _nothing_left_to_do(metadata: Any, num_inner_inputs: int, num_inputs: int) -> bool:
    """Whether AOTAutograd's wrappers would hand inputs and outputs straight through."""
    from torch._functorch._aot_autograd.schemas import OutputType, PlainTensorMeta

    if metadata is None or num_inner_inputs != num_inputs:
        return False
    writes = any(info.mutates_data or info.mutates_metadata for info in metadata.input_info)
    fresh = (OutputType.non_alias, OutputType.unsafe_view_alias)
    aliases = any(info.output_type not in fresh for info in metadata.output_info)
    return (
        not (writes and aliases)
        and metadata.num_mutated_inp_runtime_indices == 0
        and metadata.num_intermediate_bases == 0
        and not metadata.tokens
        and metadata.num_graphsafe_rng_states == 0
        and metadata.grad_enabled_mutation is None
        and not any(info.requires_grad for info in metadata.output_info)
        and all(
            isinstance(meta, (int, PlainTensorMeta)) or type(meta).__name__ == "OpaqueMeta"
            for meta in metadata.subclass_inp_meta
        )
    )


def _direct(code: Any) -> Callable[[list[Any]], Sequence[Any]]:
    """Inductor's own code: through its object once (that call also ends autotuning), then bare."""

    class _FirstCall:
        call: Callable[[list[Any]], Sequence[Any]]

        def __init__(self) -> None:
            self.call = self._first

        def _first(self, inputs: list[Any]) -> Sequence[Any]:
            outputs: Sequence[Any] = code(inputs)
            self.call = getattr(code, "current_callable", None) or code
            return outputs

    first = _FirstCall()
    return lambda inputs: first.call(inputs)  # noqa: PLW0108 - `call` changes after the first


def _spread(wrapped: Any) -> Callable[[list[Any]], Sequence[Any]]:
    return lambda inputs: wrapped(*inputs)


# --- CUDA graphs -----------------------------------------------------------------------------


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


# --- symbolic sizes --------------------------------------------------------------------------


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


def free_symbols_of(value: Any) -> frozenset[Any]:
    """The sympy symbols in a size, or in the sizes of a tensor."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    return frozenset(free_symbols(value))


def data_dependent_symbols(value: Any) -> frozenset[Any]:
    """The symbols in a size, or in those of a tensor, that no guard may look at."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return frozenset(free_unbacked_symbols(value))


def sizes_are_allowed(shape_env: Any, sizes: Mapping[Any, int]) -> bool:
    """Whether code compiled under `shape_env` also serves these sizes.

    Args:
        shape_env: holds every assumption that was made on the way.
        sizes: a number for each sympy symbol.
    """
    for symbol, size in sizes.items():
        bounds = shape_env.var_to_range.get(symbol)
        if bounds is not None and not bounds.lower <= size <= bounds.upper:
            return False
    return not any(guard.expr.xreplace(dict(sizes)) == False for guard in shape_env.guards)  # noqa: E712


def shape_env_of(values: Iterable[Any]) -> Any | None:
    """The `ShapeEnv` in which the sizes of a graph's values live; None where all are fixed."""
    for value in values:
        if isinstance(value, torch.SymInt):
            return value.node.shape_env
    return None


def with_dynamic_sizes(tensor: torch.Tensor, axes: Iterable[int]) -> torch.Tensor:
    """An alias for which Dynamo compiles with these sizes left open, save those of 0 and 1."""
    import torch._dynamo

    alias = tensor.detach()
    torch._dynamo.maybe_mark_dynamic(alias, list(axes))
    return alias
