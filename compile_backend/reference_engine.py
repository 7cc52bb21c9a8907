"""The reference engine: what CUDA graphs do, with ordinary calls on the CPU.

Capture stores a callable with its tensors and its context; replay reruns it on those and writes
the outputs of the capture. It refuses what CUDA refuses. So what would be garbage on a GPU is a
wrong number here, and a test can see it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from compile_backend.context import ForwardContext, current_forward_context, enter_forward_context
from compile_backend.errors import CaptureError
from compile_backend.graph_engine import Sessions, Trial
from compile_backend.layout import owners_of_memory, unexpanded
from compile_backend.torch_internals.graphs import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class ReferenceGraph:
    """A callable with the tensors, the context and the outputs it was captured with.

    Like a CUDA graph it keeps no parameter alive: whoever replays it does.
    """

    def __init__(
        self,
        engine: ReferenceEngine,
        call: Callable[..., Any],
        args: Sequence[Any],
        outputs: Any,
    ) -> None:
        self._engine = engine
        self._call = call
        self._args = [
            weakref.ref(arg) if isinstance(arg, torch.nn.Parameter) else (lambda arg=arg: arg)
            for arg in args
        ]
        self._context = current_forward_context() or ForwardContext()
        self.outputs = outputs
        self.short: object | None = None

    def replay(self) -> None:
        """Rerun the callable on its own tensors and write its own outputs."""
        args = [arg() for arg in self._args]
        # A CUDA graph runs no Python, so modes of the caller do not reach it.
        as_captured = torch.inference_mode(False)
        with (
            as_captured,
            torch.no_grad(),
            self._engine.running(),
            enter_forward_context(self._context),
        ):
            results = self._call(*args)
        for stored, result in zip(tree_leaves(self.outputs), tree_leaves(results), strict=True):
            if isinstance(stored, torch.Tensor) and stored.numel():
                if stored.shape != result.shape or stored.dtype != result.dtype:
                    raise CaptureError(
                        f"a replay computed {result.dtype} of {tuple(result.shape)}, but "
                        f"{stored.dtype} of {tuple(stored.shape)} was captured: leave autocast, "
                        "or where weights have another shape or dtype, call recapture() or "
                        "reset(compiled)"
                    )
                same = stored.data_ptr() == result.data_ptr() and stored.shape == result.shape
                if not same:
                    unexpanded(stored).copy_(unexpanded(result))


@dataclass(frozen=True, slots=True)
class _NewMemory:
    """Memory that a capture allocates for its outputs."""

    number: int
    num_bytes: int
    device: torch.device
    holds_bools: bool


@dataclass(frozen=True, slots=True)
class _TensorSpec:
    """How to make an output of a capture: where its memory is, and how it lies there.

    Attributes:
        memory: new memory, or the number of the argument whose memory it is.
        offset_bytes: from the start of new memory, or of the argument.
        like: an empty tensor of the output's dtype.
        size: of the output.
        stride: of the output.
    """

    memory: _NewMemory | int
    offset_bytes: int
    like: torch.Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def make(self, args: Sequence[Any], memories: dict[int, torch.Tensor]) -> torch.Tensor:
        start = self.offset_bytes
        if isinstance(self.memory, _NewMemory):
            memory = memories.get(self.memory.number)
            if memory is None:
                memory = torch.full(
                    (self.memory.num_bytes,),
                    1 if self.memory.holds_bools else 255,  # 255s are NaN in every float dtype
                    dtype=torch.uint8,
                    device=self.memory.device,
                )
                memories[self.memory.number] = memory
        else:
            memory = args[self.memory]
            start += memory.storage_offset() * memory.element_size()
        offset = start // self.like.element_size()
        return self.like.new_empty(0).set_(
            memory.untyped_storage(), offset, self.size, self.stride
        )


class ReferenceEngine:
    """What CUDA graphs do, with ordinary calls on the CPU.

    Capture runs nothing: outputs are allocated as the warm-up described them and hold NaN (or the
    largest integer) until the first replay.
    """

    # Of all engines: a graph of one may run inside a replay of another, as on a GPU.
    _running = threading.local()

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.session = Sessions()

    def is_capturing(self) -> bool:
        """Whether the caller runs inside a replay (where CUDA would run no Python at all)."""
        return bool(getattr(self._running, "depth", 0))

    def warm_up(self, call: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Trial]:
        """Run `call(*args)` and notice what a CUDA capture would refuse."""
        with _host_syncs_noticed() as syncs:
            outputs = call(*args)
        refused = f"Tensor.{syncs[0]} makes the host wait for the device" if syncs else None
        with torch.inference_mode(False):
            return outputs, Trial(_described(outputs, args), refused, is_described=True)

    def capture(
        self, call: Callable[..., Any], args: Sequence[Any], trial: Trial
    ) -> ReferenceGraph:
        """Freeze `call(*args)`; see `GraphEngine.capture`."""
        if self.is_capturing():
            raise CaptureError("a capture is already running on this thread")
        if trial.refused is not None:
            raise CaptureError(trial.refused)
        if not trial.is_described:
            raise CaptureError("the callable was not warmed up; run it once before its capture")
        with self.session(), torch.inference_mode(False), torch.no_grad():
            self.session.before_capture()
            memories: dict[int, torch.Tensor] = {}
            outputs = tree_map(
                lambda item: item.make(args, memories) if isinstance(item, _TensorSpec) else item,
                trial.outputs,
                is_leaf=lambda item: isinstance(item, _TensorSpec),
            )
        return ReferenceGraph(self, call, args, outputs)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Marks a replay, so that graph runners inside call through as in a capture."""
        self._running.depth = getattr(self._running, "depth", 0) + 1
        try:
            yield
        finally:
            self._running.depth -= 1

    def keep_weakly(self, outputs: Any) -> Any:
        """`outputs` as they are: the reference has no pool to share."""
        return outputs


def _described(outputs: Any, args: Sequence[Any]) -> Any:
    """`outputs` with a `_TensorSpec` for every tensor; those that share memory go on doing so."""
    owners = owners_of_memory(args)
    tensors = [item for item in tree_leaves(outputs) if isinstance(item, torch.Tensor)]
    bools = {t.untyped_storage().data_ptr() for t in tensors if t.dtype is torch.bool}
    new: dict[int, _NewMemory] = {}

    def describe(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        storage = item.untyped_storage()
        start = int(item.storage_offset()) * item.element_size()
        memory: _NewMemory | int
        if item.numel() and storage.data_ptr() in owners:
            owner = owners[storage.data_ptr()]
            start -= args[owner].storage_offset() * args[owner].element_size()
            memory = owner
        else:
            address = storage.data_ptr() if item.numel() else -len(new) - 1
            fresh = _NewMemory(len(new), storage.nbytes(), item.device, address in bools)
            memory = new.setdefault(address, fresh)
        like = torch.empty(0, dtype=item.dtype, device=item.device)
        return _TensorSpec(memory, start, like, tuple(item.size()), tuple(item.stride()))

    return tree_map(describe, outputs)


_HOST_SYNCS = (
    *("item", "tolist", "numpy", "cpu", "nonzero"),
    *("__bool__", "__int__", "__float__", "__index__"),
)
_PATCHING = threading.RLock()


@contextlib.contextmanager
def _host_syncs_noticed() -> Iterator[list[str]]:
    """Names of the tensor methods that the body called and that wait for a device.

    A compiled piece runs no dispatcher, so modes would not see them; the methods themselves are
    watched, for this thread only.
    """
    noticed: list[str] = []
    thread = threading.get_ident()

    def watched(name: str, method: Any) -> Any:
        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                noticed.append(name)
            return method(tensor, *args, **kwargs)

        return call

    with _PATCHING:
        own = {name: torch.Tensor.__dict__.get(name) for name in _HOST_SYNCS}
        for name in _HOST_SYNCS:
            setattr(torch.Tensor, name, watched(name, getattr(torch.Tensor, name)))
        try:
            yield noticed
        finally:
            for name, method in own.items():
                if method is None:
                    delattr(torch.Tensor, name)
                else:
                    setattr(torch.Tensor, name, method)
