"""Every private name of torch, and what differs between its releases.

A new torch release may break this file and no other. Names are looked up inside functions so that
importing the package starts neither Dynamo nor Inductor. Differences are detected by signature
or attribute, never by version.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import ctypes
import functools
import hashlib
import importlib.util
import inspect
import math
import os
import pickle
import platform
import sys
import tempfile
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch.utils import _pytree

from compile_backend.cache import NotStorableError

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


def is_name_of_higher_order_op(name: str) -> bool:
    """Whether an op that takes functions has this name."""
    import torch._higher_order_ops  # registers those of torch

    return is_higher_order_op(getattr(torch.ops.higher_order, name, None))


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
        pack: the artefact as bytes for `load_with_inductor`, and which assumptions it holds
            under; raises `NotStorableError`.
    """

    call: Callable[[list[Any]], Sequence[Any]]
    mutated_inputs: tuple[int, ...]
    is_direct: bool
    pack: Callable[[], tuple[bytes, str]]


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
    from torch._inductor.compile_fx import compile_fx_inner

    seen: list[_Inner] = []

    def recording_compile(inner: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        graph_code, num_inputs = inner.code, _num_placeholders(inner)
        with _kernels_kept():
            code = compile_fx_inner(inner, *args, **kwargs)
        is_inference = bool(kwargs.get("is_inference"))
        seen.append(_Inner(code, _metadata_of_trace(), num_inputs, graph_code, is_inference))
        return code

    sizes = _Sizes(inputs, fake_mode)
    wrapped, metadata = _compile_fx(
        graph_module, inputs, fake_mode, config_patches, recording_compile
    )
    mutated = tuple(
        index
        for index, info in enumerate(metadata.input_info if metadata is not None else ())
        if info.mutates_data
    )
    is_direct = len(seen) == 1 and _nothing_left_to_do(
        seen[0].metadata, seen[0].num_inputs, len(inputs)
    )
    call = _direct(seen[0].code) if is_direct else _spread(wrapped)

    def pack() -> tuple[bytes, str]:
        if len(seen) != 1 or not seen[0].is_inference:
            raise NotStorableError("is compiled for gradients")
        return _packed(seen[0], sizes, mutated, is_direct=is_direct)

    return InductorArtefact(call, mutated, is_direct, pack)


@dataclass(frozen=True)
class _Inner:
    """What Inductor made of a graph that AOTAutograd traced.

    Attributes:
        code: Inductor's object.
        metadata: AOTAutograd's description of inputs and outputs.
        num_inputs: of the traced graph.
        graph_code: the traced graph as Python.
        is_inference: whether no backward pass belongs to it.
    """

    code: Any
    metadata: Any
    num_inputs: int
    graph_code: str
    is_inference: bool


def _num_placeholders(graph_module: torch.fx.GraphModule) -> int:
    return len([node for node in graph_module.graph.nodes if node.op == "placeholder"])


def _metadata_of_trace() -> Any:
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    return context.fw_metadata if context else None


def _compile_fx(
    graph_module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    fake_mode: Any,
    config_patches: Mapping[str, Any],
    inner_compile: Callable[..., Any],
) -> tuple[Any, Any]:
    """Trace a graph with AOTAutograd and hand it on; the result, and the graph's description."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx

    with (
        tracing(TracingContext(fake_mode)),
        torch._functorch.config.patch({"enable_autograd_cache": False}),
    ):
        wrapped = compile_fx(
            graph_module,
            list(inputs),
            inner_compile=inner_compile,
            config_patches=dict(config_patches),
        )
        return wrapped, TracingContext.get().fw_metadata


def _kernels_kept() -> contextlib.AbstractContextManager[None]:
    """Have Inductor keep its GPU kernels with the code, as it does for its own cache."""
    import torch._inductor.config as config

    if config.fx_graph_cache:
        return contextlib.nullcontext()
    patched: contextlib.AbstractContextManager[None] = torch._functorch.config.patch(
        bundled_autograd_cache=True
    )
    return patched


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


# --- Inductor's code on disk -----------------------------------------------------------------


class _Sizes:
    """The free sizes of a graph's inputs, and what may be assumed of them before it is compiled.

    Attributes:
        symints: one for each symbol, in the order in which they are met.
        names: of the symbols.
        ranges: lowest and highest value of each.
    """

    def __init__(self, inputs: Sequence[Any], fake_mode: Any) -> None:
        symbols = [
            symbol
            for value in inputs
            if isinstance(value, (torch.Tensor, torch.SymInt))
            for symbol in sorted(free_symbols_of(value), key=str)
        ]
        self._shape_env = fake_mode.shape_env
        self.symints = [
            self._shape_env.create_symintnode(symbol, hint=None)
            for symbol in dict.fromkeys(symbols)
        ]
        self.names = [symint.node.expr.name for symint in self.symints]
        self.ranges = [self._range(symint.node.expr) for symint in self.symints]

    def _range(self, symbol: Any) -> tuple[float, float]:
        known = self._shape_env.var_to_range[symbol]
        ends = [float(end) if end.is_finite else None for end in (known.lower, known.upper)]
        lower, upper = ends
        return -math.inf if lower is None else lower, math.inf if upper is None else upper

    def assumptions(self) -> str:
        """All that was assumed of the sizes until now, as an expression."""
        if not self.symints:
            return ""
        guards = self._shape_env.get_pruned_guards(self.symints)
        text = self._shape_env.produce_guards_expression(placeholders=self.symints, guards=guards)
        return text or ""

    def allow(self, ranges: Sequence[tuple[float, float]], assumptions: str) -> bool:
        """Whether code made under these assumptions serves; if so they are made here, too."""
        for (lower, upper), (lowest, highest) in zip(self.ranges, ranges, strict=True):
            if lower < lowest or upper > highest:
                return False
        if not assumptions:
            return True
        evaluate = self._shape_env.evaluate_guards_expression
        hints = [symint.node.hint for symint in self.symints]
        # With hints first: what is asked of symbols is assumed from then on.
        return bool(evaluate(assumptions, hints)) and bool(evaluate(assumptions, self.symints))


def _packed(
    inner: _Inner, sizes: _Sizes, mutated: tuple[int, ...], *, is_direct: bool
) -> tuple[bytes, str]:
    from torch._inductor.output_code import CompiledFxGraph

    code, assumptions = inner.code, sizes.assumptions()
    if type(code) is not CompiledFxGraph:
        raise NotStorableError(f"is compiled to a {type(code).__name__}")
    if code.frozen_param_names or code.torchbind_constants:
        raise NotStorableError("holds weights or objects of this process")
    stripped = copy.copy(code)
    stripped.prepare_for_serialization()
    # For people who read logs only.
    stripped.runnable_graph_str = stripped.inductor_post_grad_graph_str = ""
    stripped._fx_graph_cache_debug_lines = None
    record = {
        "names": sizes.names,
        "ranges": sizes.ranges,
        "assumptions": assumptions,
        "mutated": mutated,
        "graph": None if is_direct else _digest(inner.graph_code),
        "binaries": _cpu_kernels(code),
    }
    try:
        return pickle.dumps((record, _pickled(stripped))), assumptions
    except Exception as error:
        raise NotStorableError(f"cannot be written down ({error})") from error


def _pickled(code: Any) -> bytes:
    bundle = code._triton_bundle
    if bundle and bundle.static_autotuners:
        with contextlib.suppress(Exception):
            return pickle.dumps(code)
        # Launchers that were used cannot be pickled, as those that Inductor's own cache gave.
        # It has them unused; without them, kernels are loaded from the binaries beside them.
        code._triton_bundle = _unused_bundle(code) or replace(bundle, static_autotuners=[])
    return pickle.dumps(code)


def _unused_bundle(code: Any) -> Any:
    """The GPU kernels of a piece of code as Inductor's own cache keeps them, if it does."""
    from torch._inductor.codecache import FxGraphCache

    with contextlib.suppress(Exception):
        kept = Path(FxGraphCache._get_tmp_dir_for_key(code._fx_graph_cache_key))
        for path in kept.iterdir():
            found = pickle.loads(path.read_bytes())  # noqa: S301 - Inductor has just done so
            if found.source_code == code.source_code:
                return found._triton_bundle
    return None


def load_with_inductor(
    packed: bytes,
    make_graph_module: Callable[[], torch.fx.GraphModule],
    inputs: Sequence[Any],
    fake_mode: Any,
    config_patches: Mapping[str, Any],
) -> InductorArtefact | None:
    """An artefact from bytes that `pack` gave; None where it was made for other sizes.

    Most graphs are not even traced. Only those that keep AOTAutograd's wrappers are, to make the
    wrappers anew around the code.

    Args:
        packed: trusted: to read it is to run it.
        make_graph_module: as for `compile_with_inductor`, if it is needed.
        inputs: likewise.
        fake_mode: likewise.
        config_patches: likewise.
    """
    import torch._inductor.config as config
    from torch._guards import TracingContext, tracing

    record, code_bytes = pickle.loads(packed)  # noqa: S301
    sizes = _Sizes(inputs, fake_mode)
    is_direct = record["graph"] is None
    if not is_direct and sizes.names != record["names"]:
        return None
    if not sizes.allow(record["ranges"], record["assumptions"]):
        return None
    code = pickle.loads(code_bytes)  # noqa: S301

    def pack() -> tuple[bytes, str]:
        return packed, record["assumptions"]

    if is_direct:
        with config.patch(dict(config_patches)), tracing(TracingContext(fake_mode)):
            _revive(code, (), record["binaries"])
        return InductorArtefact(_direct(code), record["mutated"], True, pack)

    def stored_compile(
        inner: torch.fx.GraphModule, given: Sequence[Any], *_: Any, **__: Any
    ) -> Any:
        if _digest(inner.code) != record["graph"]:
            raise ValueError("its graph is traced differently")
        _revive(code, given, record["binaries"])
        return code

    wrapped, _ = _compile_fx(
        make_graph_module(), inputs, fake_mode, config_patches, stored_compile
    )
    return InductorArtefact(_spread(wrapped), record["mutated"], False, pack)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _revive(code: Any, inputs: Sequence[Any], binaries: Mapping[str, bytes]) -> None:
    """Make code run that was read from bytes."""
    from torch._inductor.async_compile import CompiledTritonKernels
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex
    from torch._inductor.output_code import CompiledFxGraphConstants
    from torch._inductor.triton_bundler import TritonBundler
    from torch._inductor.utils import BoxedBool

    CompiledTritonKernels.cache_clear()  # type: ignore[no-untyped-call]
    if code._triton_bundle:
        TritonBundler.read_and_emit(code._triton_bundle)
        code._triton_bundle = None
    constants = CompiledFxGraphConstants()
    with _CpuKernels.taken_from(binaries):
        code.after_deserialization(constants)
    settings: Any = {
        "cudagraphs": BoxedBool(False),
        "boxed_forward_device_index": BoxedDeviceIndex(None),
        "is_backward": False,
    }
    code.post_compile(inputs, constants, settings)


def _cpu_kernels(code: Any) -> dict[str, bytes]:
    """The compiled C++ kernels of a piece of code, by what they were compiled from."""
    from torch._inductor.codecache import PyCodeCache

    loaded = [m for m in PyCodeCache.modules if getattr(m, "key", None) == code.cache_key]
    if not loaded or "cpp_pybinding" not in code.source_code:
        return {}
    found: dict[str, bytes] = {}
    for statement in ast.parse(code.source_code).body:
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Attribute(attr="cpp_pybinding"), args=[types, source]),
            ):
                library = getattr(getattr(loaded[-1], name, None), "__self__", None)
                path = getattr(library, "__file__", None)
                if path is not None and Path(path).is_file():
                    made_of = ast.literal_eval(types), ast.literal_eval(source)
                    found[_digest(repr(made_of))] = Path(path).read_bytes()
    return found


class _CpuKernels:
    """C++ kernels that need no compiler: Inductor is handed them while it loads its code."""

    _one_at_a_time = threading.Lock()

    @classmethod
    @contextlib.contextmanager
    def taken_from(cls, binaries: Mapping[str, bytes]) -> Iterator[None]:
        """Load what the body asks Inductor to compile from `binaries`, where it is in there."""
        from torch._inductor.async_compile import AsyncCompile

        if not binaries:
            yield
            return
        compile_anew = AsyncCompile.cpp_pybinding

        def taken(self: Any, types: list[str], source: str) -> Any:
            digest = _digest(repr((types, source)))
            if digest in binaries:
                return cls._load(digest, binaries[digest])
            return compile_anew(self, types, source)

        with cls._one_at_a_time:
            AsyncCompile.cpp_pybinding = taken  # type: ignore[method-assign, assignment]
            try:
                yield
            finally:
                AsyncCompile.cpp_pybinding = compile_anew  # type: ignore[method-assign]

    @staticmethod
    def _load(digest: str, binary: bytes) -> Any:
        from torch._inductor.codecache import CppPythonBindingsCodeCache
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        # Where Inductor keeps its own: it must be a place that code may run from.
        with tempfile.NamedTemporaryFile(dir=cache_dir(), suffix=".so") as file:
            file.write(binary)
            file.flush()
            library = CppPythonBindingsCodeCache._load_library(file.name, digest)
        return getattr(library, CppPythonBindingsCodeCache.entry_function)


# --- what decides how a graph is compiled ----------------------------------------------------


def compile_settings(config_patches: Mapping[str, Any]) -> tuple[str, ...]:
    """All that decides how a graph is compiled, besides the graph: settings, state, releases.

    Args:
        config_patches: Inductor settings for this graph only.

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
        if config.triton.cudagraphs:
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
        f"sources {_digest(repr(sizes))}",
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
        return _digest(repr([line for line in first.splitlines() if line.startswith(names)]))
    return platform.processor()


# Namespaces of ops that come with torch.
_OPS_OF_TORCH = frozenset(
    {
        *("aten", "prim", "prims", "rngprims", "inductor", "quantized", "quantized_decomposed"),
        *("_c10d_functional", "_dtensor", "mkldnn", "onednn", "symm_mem"),
    }
)


def op_digest(op: Any) -> str | None:
    """What is known of an op besides its name; None for those that come with torch.

    Raises:
        NotStorableError: the op is traced through to Python code.
    """
    overloads = [op] if is_op_overload(op) else [getattr(op, name) for name in op.overloads()]
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
    from torch._library.simple_registry import singleton

    name = f"{overload.namespace}::{overload._opname}"
    try:
        kernel = singleton.find(name).fake_impl.kernel
        return "" if kernel is None else _digest(inspect.getsource(kernel.func))
    except (OSError, TypeError, AttributeError):
        return ""


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


@dataclass(frozen=True, slots=True)
class TensorHandles:
    """Tensors as torch's stable C interface knows them, `aoti_torch/c/shim.h`.

    Attributes:
        capsules: each with a handle that whoever takes it must delete. A handle sees new memory
            of its tensor, and keeps the tensor alive.
        get_data_ptr: address of `aoti_torch_get_data_ptr`.
        delete_tensor: address of `aoti_torch_delete_tensor_object`.
    """

    capsules: list[Any]
    get_data_ptr: int
    delete_tensor: int


def tensor_handles(tensors: Sequence[torch.Tensor]) -> TensorHandles | None:
    """Handles of tensors; None where this torch gives none.

    Args:
        tensors: ordinary ones; those that only wrap others have no address of their own.
    """
    make = getattr(getattr(torch._C, "_aoti", None), "unsafe_alloc_void_ptrs_from_tensors", None)
    functions = _stable_functions("aoti_torch_get_data_ptr", "aoti_torch_delete_tensor_object")
    if make is None or functions is None:
        return None
    if any(torch.utils._python_dispatch.is_traceable_wrapper_subclass(item) for item in tensors):
        return None
    return TensorHandles(make(list(tensors)), *functions)


def launch_functions() -> list[int] | None:
    """Addresses of what a bare replay calls; None where this torch or the driver lacks one.

    They tell the current device and a device's current stream, and launch an executable graph.
    """
    from_torch = _stable_functions("aoti_torch_get_current_device_index")
    stream = _stable_functions("aoti_torch_get_current_cuda_stream", library="libtorch_cuda.so")
    has_handle = hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph_exec")
    if from_torch is None or stream is None or not has_handle:
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return [*from_torch, *stream, _address(driver.cuGraphLaunch)]


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


def ends_at_a_graph_break(graph_module: torch.fx.GraphModule) -> bool:
    """Whether Dynamo ended this graph before the end of the function."""
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    return reason is None or bool(reason.graph_break)


# --- symbolic sizes --------------------------------------------------------------------------


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
