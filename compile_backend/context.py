"""What the current step is: one ContextVar that every graph runner reads.

It refuses to know who decides the mode; a dispatcher, a runner or the user does. Whoever sets a
context owns the decision, and graph runners trust it. A context is not frozen only since frozen
classes take three times as long to make, which happens in every step.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from compile_backend.batch import checked
from compile_backend.config import CUDAGraphMode
from compile_backend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from compile_backend.batch import BatchDescriptor


class CaptureSession(Protocol):
    """Collects the keys met while it is active, to capture them when it ends."""

    def add(
        self,
        key: Hashable,
        order: tuple[int, int],
        capture: Callable[[], None],
        around: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Remember one key: its place in the order, how to capture it, and what to do around."""


@dataclass(slots=True)
class ForwardContext:
    """Facts about the step that is running.

    Attributes:
        attn_metadata: whatever the attention ops of this step need; opaque here.
        cudagraph_runtime_mode: NONE, PIECEWISE or FULL.
        batch_descriptor: the (padded) batch whose graph is to be replayed.
        extra: further facts for custom ops, by name.
    """

    attn_metadata: Any = None
    cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE
    batch_descriptor: BatchDescriptor | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


class SetBy(Enum):
    """Who set the context of a step, which tells what a compiled function called within may do."""

    NOBODY = "nobody"
    USER = "user"  # decided for every compiled function called within
    PLAIN_CALL = "plain call"  # found no key for itself; what it calls may find one
    RUNNER = "runner"  # holds one graph for the whole step; what it calls belongs to that graph
    GRAPH = "graph"  # holds graphs for this step; what it calls must not run graphs of its own


@dataclass(slots=True)
class _Step:
    """What the ContextVar holds.

    Attributes:
        forward: the step's context.
        session: the capture session around it.
        set_by: who set the context.
    """

    forward: ForwardContext | None = None
    session: CaptureSession | None = None
    set_by: SetBy = SetBy.NOBODY


_NO_STEP = _Step()
_STEP: ContextVar[_Step] = ContextVar("cudagraph_modes_step", default=_NO_STEP)


def get_forward_context() -> ForwardContext:
    """The context of the running step.

    Raises:
        RuntimeError: no step is running.
    """
    context = _STEP.get().forward
    if context is None:
        raise RuntimeError(
            "no forward context is set; call the model inside `set_forward_context(...)`, or "
            "through a compiled model with a CUDA graph mode, which sets one itself"
        )
    return context


def current_forward_context() -> ForwardContext | None:
    """The context of the running step, or None outside of one."""
    return _STEP.get().forward


def context_set_by() -> SetBy:
    """Who set the running step's context."""
    return _STEP.get().set_by


def current_capture_session() -> CaptureSession | None:
    """The capture session that is collecting keys, or None."""
    return _STEP.get().session


@contextlib.contextmanager
def set_forward_context(
    attn_metadata: Any = None,
    *,
    cudagraph_runtime_mode: CUDAGraphMode | str = CUDAGraphMode.NONE,
    batch_descriptor: BatchDescriptor | None = None,
    **extra: Any,
) -> Iterator[ForwardContext]:
    """Run the body as one step with this mode and batch.

    Args:
        attn_metadata: given to attention ops through `get_forward_context()`.
        cudagraph_runtime_mode: the mode that a dispatcher chose for this batch, or its name.
        batch_descriptor: the batch that it returned; needed by every mode but NONE.
        **extra: further facts for custom ops.

    Raises:
        ConfigError: the mode is no runtime mode, a mode other than NONE lacks its batch, or the
            batch is something else, or contradicts itself.
    """
    if not isinstance(cudagraph_runtime_mode, CUDAGraphMode):
        cudagraph_runtime_mode = CUDAGraphMode.parse(
            cudagraph_runtime_mode, option="cudagraph_runtime_mode"
        )
    _check_step(cudagraph_runtime_mode, batch_descriptor)
    if batch_descriptor is not None:
        batch_descriptor = checked(batch_descriptor, "batch_descriptor")
    context = ForwardContext(attn_metadata, cudagraph_runtime_mode, batch_descriptor, extra)
    token = _STEP.set(_Step(context, _STEP.get().session, SetBy.USER))
    try:
        yield context
    finally:
        _STEP.reset(token)


def _check_step(cudagraph_runtime_mode: CUDAGraphMode, batch_descriptor: object) -> None:
    if not cudagraph_runtime_mode.is_valid_runtime_mode():
        raise ConfigError(
            "cudagraph_runtime_mode",
            cudagraph_runtime_mode.name,
            "is not one that a single step can run in",
            "use NONE, PIECEWISE or FULL, as CudagraphDispatcher.dispatch returns them",
        )
    if cudagraph_runtime_mode is not CUDAGraphMode.NONE and batch_descriptor is None:
        raise ConfigError(
            "batch_descriptor",
            None,
            f"is missing for mode {cudagraph_runtime_mode.name}",
            "pass the descriptor that CudagraphDispatcher.dispatch returned with the mode",
        )


def begin_step(context: ForwardContext, set_by: SetBy = SetBy.GRAPH) -> Token[_Step]:
    """Enter a context of a compiled graph: its own step, or a replay of one.

    For a step that is made again and again; others use `enter_forward_context`.

    Returns:
        What `end_step` takes.
    """
    return _STEP.set(_Step(context, _STEP.get().session, set_by))


end_step: Callable[[Token[_Step]], None] = _STEP.reset
"""Leave the step that was begun."""


class enter_forward_context:  # noqa: N801 - is called as a function; generators cost twice as much
    """Run the body under a context of a compiled graph: its own step, or a replay of one."""

    __slots__ = ("_context", "_set_by", "_token")

    def __init__(self, context: ForwardContext, set_by: SetBy = SetBy.GRAPH) -> None:
        self._context = context
        self._set_by = set_by

    def __enter__(self) -> None:
        self._token = begin_step(self._context, self._set_by)

    def __exit__(self, *_error: object) -> None:
        end_step(self._token)


@contextlib.contextmanager
def enter_capture_session(session: CaptureSession | None) -> Iterator[None]:
    """Let the body's calls register their keys with `session`; None hides an outer one."""
    step = _STEP.get()
    token = _STEP.set(_Step(step.forward, session, step.set_by))
    try:
        yield
    finally:
        _STEP.reset(token)
