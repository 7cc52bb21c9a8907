"""Dynamo's limits of how often it compiles a function: told when one is reached.

Behind its limit a function runs as plain Python, and no backend is called to notice. Dynamo asks
for the user's context in each attempt to compile, just before it looks at its limits; what is
asked there looks at them, too.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


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


def watch_limits(told: Callable[[LimitReached], None]) -> None:
    """Have `told` called for each attempt to compile beyond a limit; nothing if it is already.

    What it raises reaches the caller of the compiled function.
    """
    from torch._dynamo import utils

    ask, register = (
        getattr(utils, f"{verb}_hook_for_recompile_user_context", None)
        for verb in ("get", "register")
    )
    if ask is None or register is None:
        return
    if not any(isinstance(hook, _Hook) and hook.told == told for hook in ask() or ()):
        register(_Hook(told))


@dataclass(frozen=True, slots=True)
class _Hook:
    """What Dynamo takes for a description of the user's context: an empty one."""

    told: Callable[[LimitReached], None]

    def __call__(self) -> str:
        from torch._dynamo.utils import get_metrics_context

        # Dynamo refuses to note the context a second time where one compilation is in another.
        metrics = getattr(get_metrics_context(), "_metrics", None)
        if isinstance(metrics, dict):
            metrics.pop("recompile_user_contexts", None)
        reached = _limit_reached()
        if reached is not None:
            self.told(reached)
        return ""


def _limit_reached() -> LimitReached | None:
    from torch._dynamo import cache_size, config

    frame: FrameType | None = sys._getframe(1)
    while frame is not None and "cache_size" not in frame.f_locals:
        frame = frame.f_back
    scope: dict[str, Any] = {} if frame is None else frame.f_locals
    if not {"cache_size", "compile_id", "compiler_fn", "code"} <= scope.keys():
        return None
    is_reached, name = cache_size.exceeds_recompile_limit(scope["cache_size"], scope["compile_id"])
    if not is_reached:
        return None
    compile_call, code = scope["compiler_fn"], scope["code"]
    while (inner := getattr(compile_call, "_torchdynamo_orig_backend", None)) is not None:
        compile_call = inner
    function = f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
    is_raised = bool(scope.get("one_graph") or config.fail_on_recompile_limit_hit)
    option = f"torch._dynamo.config.{name}"
    if name == "recompile_limit" and _is_of_the_call(frame):
        option = "torch.compile(recompile_limit)"
    return LimitReached(compile_call, option, getattr(config, name), function, is_raised)


def _is_of_the_call(frame: FrameType | None) -> bool:
    """Whether a compilation has a limit of its own, which `torch.compile` takes since 2.13."""
    while frame is not None:
        own = getattr(frame.f_locals.get("self"), "_recompile_limit", _NOTHING)
        if own is not _NOTHING:
            return own is not None
        frame = frame.f_back
    return False


_NOTHING = object()
