"""What Dynamo does with the calls of a compiled function: watched, and done without it.

Dynamo hands the frame of a call to a converter, which gives back new code and guards. Here a
converter is put before that one, for one `torch.compile` call: it shows what Dynamo makes, or
gives back what was made in another process. Then the function has an entry like any other: guards
are checked where Dynamo always does, and what they do not hold for is traced.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any

from compile_backend.cache import NotStorableError
from compile_backend.torch_internals.dynamo import callbacks_of
from compile_backend.torch_internals.stored_entry import Frame
from compile_backend.torch_internals.traced_code import traced_by

if TYPE_CHECKING:
    from collections.abc import Callable

    from compile_backend.torch_internals.traced_code import Traced


@functools.cache
def missing_names() -> str | None:
    """What this release of torch does not have that is needed here; None if it has all."""
    needed = (
        ("torch._dynamo.convert_frame", "CatchErrorsWrapper ConvertFrame get_compile_id"),
        ("torch._dynamo.convert_frame", "orig_code_map output_codes GlobalStateGuard"),
        ("torch._dynamo.guards", "CheckFunctionManager GuardBuilder ShapeCodeParts"),
        ("torch._dynamo.guards", "convert_int_to_concrete_values SYMPY_INTERP _get_closure_vars"),
        ("torch._dynamo.output_graph", "OutputGraphCommon OutputGraphGuardsState"),
        ("torch._dynamo.types", "GuardedCode wrap_guarded_code"),
        (
            "torch._dynamo.utils",
            "CleanupHook CleanupManager get_metrics_context chromium_event_timed",
        ),
        ("torch._guards", "Guard GuardsSet ShapeGuard SLoc TracingContext CompileContext"),
        ("torch.fx._graph_pickler", "GraphPickler Options"),
    )
    for module_name, names in needed:
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            return module_name
        for name in names.split():
            if not hasattr(module, name):
                return f"{module_name}.{name}"
    return None


class Watcher:
    """Told of each call that is to be traced for one `torch.compile` call."""

    def replacement(self, frame: Frame) -> Callable[[Any], Any | None] | None:
        """What may be used for a call instead of tracing it, given Dynamo's state of it."""
        raise NotImplementedError

    def traced(self, traced: Traced | NotStorableError) -> None:
        """Dynamo traced the call, and made this of it."""
        raise NotImplementedError

    def done(self) -> None:
        """The call is traced, or cannot be."""
        raise NotImplementedError


def watch(compiled: object, watcher: Watcher) -> None:
    """Have a watcher told of what is traced for a compiled function from now on.

    Nothing is done where that is not possible, as where the user chooses guards.
    """
    for callback in callbacks_of(compiled):
        hooks: Any = getattr(callback, "hooks", None)
        if type(callback).__name__ == "CatchErrorsWrapper" and hooks is not None:
            is_chosen = hooks.guard_filter_fn is not None or hooks.guard_export_fn is not None
            outer: Any = callback
            inner = outer._torchdynamo_orig_backend
            if not is_chosen and not isinstance(inner, _Converter):
                outer._torchdynamo_orig_backend = _Converter(inner, watcher)
            return


class _Converter:
    """Stands before Dynamo's own converter, which calls it for one call at a time."""

    def __init__(self, inner: Any, watcher: Watcher) -> None:
        self._torchdynamo_orig_backend = inner
        self._watcher = watcher

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._torchdynamo_orig_backend, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies are not watched."""
        return _itself, (self._torchdynamo_orig_backend,)

    def __call__(self, frame: Any, entry: Any, hooks: Any, frame_state: Any, skip: int = 0) -> Any:
        seen = Frame(frame.f_code, dict(frame.f_locals), frame.f_globals, dict(frame.f_builtins))
        use = self._watcher.replacement(seen)
        found = use(frame_state) if use is not None else None
        if found is not None:
            return found
        hooks = dataclasses.replace(hooks, guard_export_fn=self._keep)
        inner = self._torchdynamo_orig_backend
        try:
            return inner(frame, entry, hooks, frame_state, skip=skip + 1)
        finally:
            self._watcher.done()

    def _keep(self, guards: Any) -> None:
        """Called when guards are made, and nothing of the trace is gone yet."""
        scope = sys._getframe(1).f_locals
        try:
            self._watcher.traced(traced_by(scope["output"], scope["out_code"], guards))
        except NotStorableError as reason:
            self._watcher.traced(reason)
        except Exception as error:  # noqa: BLE001 - nobody but the next process has a use for it
            self._watcher.traced(NotStorableError(f"cannot be written down ({error!r})"))


def _itself(converter: Any) -> Any:
    return converter
