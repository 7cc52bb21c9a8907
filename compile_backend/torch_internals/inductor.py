"""Private names of Inductor and AOTAutograd: a graph in, code with little around it out."""

from __future__ import annotations

import contextlib
import functools
import pickle
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from compile_backend.cache import NotStorableError
from compile_backend.torch_internals.graphs import names_of_wrapped
from compile_backend.torch_internals.kernels_later import KernelsLater
from compile_backend.torch_internals.partition import without_graphs_of_its_own
from compile_backend.torch_internals.size_one import size_1_like_others
from compile_backend.torch_internals.stored_code import Sizes, digest, packed, revive

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass(frozen=True)
class InductorArtefact:
    """One graph compiled by Inductor.

    Attributes:
        call: takes the inputs as one list, which it may clear, and returns the outputs.
        mutated_inputs: positions of the inputs that it writes to.
        is_direct: `call` is Inductor's own code with none of AOTAutograd's wrappers around it.
        pack: the artefact as bytes for `load_with_inductor`, and which assumptions it holds
            under; raises `NotStorableError`.
        code: Inductor's own object; None where there is not just one.
        finish: waits for the kernels; comes before everything else, and once.
    """

    call: Callable[[list[Any]], Sequence[Any]]
    mutated_inputs: tuple[int, ...]
    is_direct: bool
    pack: Callable[[], tuple[bytes, str]]
    code: Any = None
    finish: Callable[[], None] = lambda: None


def compile_with_inductor(
    graph_module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    fake_mode: Any,
    config_patches: Mapping[str, Any],
    narrowed_to: str = "",
    *,
    is_partitioned: bool = False,
) -> InductorArtefact:
    """Compile one graph, and strip the wrappers that inference does not need.

    AOTAutograd wraps Inductor's code to regenerate views, apply mutations and track autograd. For
    most pieces that does nothing, yet costs 20 us and more a call, several times over in a step.
    Where its own description of the graph says that nothing is left to do, the code inside is
    called directly.

    Kernels go on being compiled behind the call, for as long as until `finish`, so that the next
    graph is lowered meanwhile.

    Args:
        graph_module: a graph that returns a tuple; owned by the compiler from here on.
        inputs: fake tensors and `SymInt`s, all of `fake_mode`.
        fake_mode: the mode in whose `ShapeEnv` the sizes live.
        config_patches: Inductor settings for this graph only.
        narrowed_to: what the sizes are; Inductor's own cache cannot tell ranges apart.
        is_partitioned: whether the settings are those of `partition_settings`.
    """
    start_workers()
    import torch._inductor.config as config
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner

    seen: list[InnerCode] = []
    pending: list[tuple[KernelsLater, Any]] = []

    def recording_compile(inner: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        graph_code, num_inputs = inner.code, _num_placeholders(inner)
        if is_partitioned:
            kwargs = without_graphs_of_its_own(kwargs)
        later = KernelsLater()
        with _kernels_kept(), _cached_apart(narrowed_to), later.put_off():
            code = compile_fx_inner(inner, *args, **kwargs)
        pending.append((later, code))
        is_inference = bool(kwargs.get("is_inference"))
        seen.append(InnerCode(code, _metadata_of_trace(), num_inputs, graph_code, is_inference))
        return code

    sizes = Sizes(inputs, fake_mode)
    wrapped, metadata = _compile_fx(
        graph_module, inputs, fake_mode, config_patches, recording_compile
    )
    mutated = tuple(
        index
        for index, info in enumerate(metadata.input_info if metadata is not None else ())
        if info.mutates_data
    )
    is_direct = (
        len(seen) == 1
        and not any(
            isinstance(value, torch.Tensor) and names_of_wrapped(value) for value in inputs
        )
        and _nothing_left_to_do(seen[0].metadata, seen[0].num_inputs, len(inputs))
    )
    call = _direct(seen[0].code) if is_direct else _spread(wrapped)
    assumptions = sizes.assumptions()  # now: what the next graph assumes is not this one's

    def pack() -> tuple[bytes, str]:
        if len(seen) != 1 or not seen[0].is_inference:
            raise NotStorableError("is compiled for gradients")
        return packed(seen[0], sizes, assumptions, mutated, is_direct=is_direct), assumptions

    def finish() -> None:
        with (
            tracing(TracingContext(fake_mode)),
            config.patch(dict(config_patches)),
            _kernels_kept(),
            _cached_apart(narrowed_to),
        ):
            for later, code in pending:
                later.finish(code)

    code = seen[0].code if len(seen) == 1 else None
    return InductorArtefact(call, mutated, is_direct, pack, code, finish)


def start_workers() -> None:
    """Have Inductor start the processes in which it compiles kernels of a GPU, if it has any.

    They start on their own, and but once; what Inductor's settings and environment say holds. To
    ask for a GPU that nobody uses yet could spoil it for processes that are forked later.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()


def hash_ahead() -> None:
    """Have Triton hash its own files in a thread, once, if a GPU is in use.

    That is half a gigabyte to read. The first key of Inductor's cache and of Triton's own waits
    for it, while hashing leaves Python free for others.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        _start_hashing()


@functools.cache
def _start_hashing() -> None:
    from torch._inductor.runtime.triton_compat import HAS_TRITON, triton_key

    def hashing() -> None:
        with contextlib.suppress(Exception):  # whoever needs the key asks again
            triton_key()

    if HAS_TRITON:
        threading.Thread(target=hashing, name="hash of Triton", daemon=True).start()


@dataclass(frozen=True)
class InnerCode:
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
        size_1_like_others(config_patches),
    ):
        wrapped = compile_fx(
            graph_module,
            list(inputs),
            inner_compile=inner_compile,
            config_patches=dict(config_patches),
        )
        return wrapped, TracingContext.get().fw_metadata


def _cached_apart(narrowed_to: str) -> contextlib.AbstractContextManager[None]:
    """Have Inductor's own cache keep code for these sizes apart from that for others."""
    import torch.compiler.config as config

    if not narrowed_to:
        return contextlib.nullcontext()
    tag = f"{config.cache_key_tag} {narrowed_to}"
    patched: contextlib.AbstractContextManager[None] = config.patch(cache_key_tag=tag)  # type: ignore[attr-defined]
    return patched


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


def load_with_inductor(
    stored: bytes,
    make_graph_module: Callable[[], torch.fx.GraphModule],
    inputs: Sequence[Any],
    fake_mode: Any,
    config_patches: Mapping[str, Any],
) -> InductorArtefact | None:
    """An artefact from bytes that `pack` gave; None where it was made for other sizes.

    Most graphs are not even traced. Only those that keep AOTAutograd's wrappers are, to make the
    wrappers anew around the code.

    Args:
        stored: trusted: to read it is to run it.
        make_graph_module: as for `compile_with_inductor`, if it is needed.
        inputs: likewise.
        fake_mode: likewise.
        config_patches: likewise.
    """
    import torch._inductor.config as config
    from torch._guards import TracingContext, tracing

    record, code_bytes = pickle.loads(stored)  # noqa: S301
    sizes = Sizes(inputs, fake_mode)
    is_direct = record["graph"] is None
    if not is_direct and sizes.names != record["names"]:
        return None
    if not sizes.allow(record["ranges"], record["assumptions"]):
        return None
    code = pickle.loads(code_bytes)  # noqa: S301

    def pack() -> tuple[bytes, str]:
        return stored, record["assumptions"]

    if is_direct:
        with config.patch(dict(config_patches)), tracing(TracingContext(fake_mode)):
            revive(code, (), record["binaries"])
        return InductorArtefact(_direct(code), record["mutated"], True, pack, code)

    def stored_compile(
        inner: torch.fx.GraphModule, given: Sequence[Any], *_: Any, **__: Any
    ) -> Any:
        if digest(inner.code) != record["graph"]:
            raise ValueError("its graph is traced differently")
        revive(code, given, record["binaries"])
        return code

    wrapped, _ = _compile_fx(
        make_graph_module(), inputs, fake_mode, config_patches, stored_compile
    )
    return InductorArtefact(_spread(wrapped), record["mutated"], False, pack, code)
