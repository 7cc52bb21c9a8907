"""Dynamo's attempts to compile a function: told of each, and of the limits of how many there are.

Behind its limit a function runs as plain Python, and no backend is called to notice. Dynamo asks
for the user's context in each attempt to compile, just before it looks at its limits; what is
asked there looks at them, too.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compile_backend.torch_internals.dynamo import frames, inwards

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class LimitReached:
    """A call that Dynamo will not compile.

    Attributes:
        compile_call: the `torch.compile` call, or whatever else stands behind the function.
        option: that sets the limit, as one writes it.
        limit: its value.
        function: what would be compiled, with its place.
        is_raised: whether Dynamo itself raises an error for it.
    """

    compile_call: object
    option: str
    limit: int
    function: str
    is_raised: bool


def watch_attempts(
    limited: Callable[[LimitReached], None], begins: Callable[[object], None]
) -> None:
    """Be told of each attempt to compile from now on; nothing if one is already.

    What is raised there reaches the caller of the compiled function.

    Args:
        limited: called where Dynamo will not compile.
        begins: called else, with the `torch.compile` call or what stands in its place.
    """
    from torch._dynamo import utils

    ask, register = (
        getattr(utils, f"{verb}_hook_for_recompile_user_context", None)
        for verb in ("get", "register")
    )
    if ask is None or register is None:
        return
    hook = _Hook(limited, begins)
    if hook not in (ask() or ()):
        register(hook)


@dataclass(frozen=True, slots=True)
class _Hook:
    """What Dynamo takes for a description of the user's context: an empty one."""

    limited: Callable[[LimitReached], None]
    begins: Callable[[object], None]

    def __call__(self) -> str:
        from torch._dynamo.utils import get_metrics_context

        # Dynamo refuses to note the context a second time where one compilation is in another.
        metrics = getattr(get_metrics_context(), "_metrics", None)
        if isinstance(metrics, dict):
            metrics.pop("recompile_user_contexts", None)
        scopes = (frame.f_locals for frame in frames())
        scope = next((scope for scope in scopes if "cache_size" in scope), {})
        if {"cache_size", "compile_id", "compiler_fn", "code"} <= scope.keys():
            *_, compile_call = inwards(scope["compiler_fn"])
            reached = _limit_reached(compile_call, scope)
            if reached is None:
                self.begins(compile_call)
            else:
                self.limited(reached)
        return ""


def _limit_reached(compile_call: object, scope: dict[str, Any]) -> LimitReached | None:
    from torch._dynamo import cache_size, config

    is_reached, name = cache_size.exceeds_recompile_limit(scope["cache_size"], scope["compile_id"])
    if not is_reached:
        return None
    code = scope["code"]
    function = f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
    is_raised = bool(scope.get("one_graph") or config.fail_on_recompile_limit_hit)
    option = f"torch._dynamo.config.{name}"
    if name == "recompile_limit" and _is_of_the_call():
        option = "torch.compile(recompile_limit)"
    return LimitReached(compile_call, option, getattr(config, name), function, is_raised)


def _is_of_the_call() -> bool:
    """Whether a compilation has a limit of its own, which `torch.compile` takes since 2.13."""
    for frame in frames():
        own = getattr(frame.f_locals.get("self"), "_recompile_limit", _NOTHING)
        if own is not _NOTHING:
            return own is not None
    return False


_NOTHING = object()


class DuringCompilation:
    """Has something begin when a compilation starts that was announced, and end with it.

    Args:
        begin: called at the start, in the thread that compiles.
        end: called at the end, once for each `begin`, also where the compilation fails; with
            whether Dynamo has garbage collected as the very next thing.
    """

    def __init__(self, begin: Callable[[], None], end: Callable[[bool], None]) -> None:
        self._begin, self._end = begin, end
        self._expected: set[int] = set()
        self._thread: int | None = None  # that began; None while nothing has

    def expect(self) -> None:
        """The next compilation that this thread starts is meant."""
        from torch._dynamo.callback import callback_handler

        self.end_if_forgotten()
        if self._ended not in callback_handler.end_callbacks:  # `reset` forgets it
            callback_handler.start_callbacks.append(self._started)
            callback_handler.end_callbacks.insert(0, self._ended)  # what others raise comes later
        self._expected.add(threading.get_ident())

    def end_if_forgotten(self) -> None:
        """End what Dynamo will not: it was reset in the middle of the compilation."""
        from torch._dynamo.callback import callback_handler

        if self._thread is not None and self._ended not in callback_handler.end_callbacks:
            self._thread = None
            self._end(False)

    # Dynamo calls these for the outermost of compilations that overlap, under a lock. The one that
    # ends last may be another than that which started, such as a backward's in another thread.

    def _started(self, _: object) -> None:
        is_meant = threading.get_ident() in self._expected
        self._expected.clear()
        if is_meant:
            self._thread = threading.get_ident()
            self._begin()

    def _ended(self, told: Any) -> None:
        from torch._dynamo import config
        from torch._dynamo.callback import CallbackTrigger

        thread, self._thread = self._thread, None
        self._expected.clear()
        if thread is not None:
            self._end(
                thread == threading.get_ident()
                and told.callback_trigger is CallbackTrigger.DYNAMO
                and bool(getattr(config, "run_gc_after_compile", False))
            )
