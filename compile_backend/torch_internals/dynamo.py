"""Private names of Dynamo: who called the backend, what it traced, how errors reach the user."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


def calling_compile() -> object | None:
    """The `torch.compile` call on whose behalf a backend is running, from the stack.

    Dynamo hands a backend no identity of its caller, yet `stats(compiled)` must find what was
    compiled for `compiled`.
    """
    frame = _frame_of_compile()
    return None if frame is None else frame.f_locals["self"]


def options_at_lookup() -> object:
    """The options of the `torch.compile` call that looks a backend up right now; else None."""
    frame = _frame_of_compile()
    return None if frame is None else frame.f_locals.get("options")


def _frame_of_compile() -> FrameType | None:
    """The innermost frame of a `torch.compile` call's object."""
    return next(
        (
            frame
            for frame in frames()
            if type(frame.f_locals.get("self")).__name__ == "_TorchCompileWrapper"
        ),
        None,
    )


def frames() -> Iterator[FrameType]:
    """Whoever calls, from the inside out."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def compile_behind(compiled: object) -> object | None:
    """The `torch.compile` call that made `compiled` (a module or a function)."""
    for callback in callbacks_of(compiled):
        if type(callback).__name__ == "_TorchCompileWrapper":
            return callback
    return None


def callbacks_of(compiled: object) -> Iterator[object]:
    """What Dynamo calls for a compiled module or function, from the outside in."""
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
    yield from inwards(callback)


def inwards(callback: object) -> Iterator[object]:
    """What Dynamo calls, and all that this wraps; the last is the backend's, or stands for it."""
    while callback is not None:
        yield callback
        callback = getattr(callback, "_torchdynamo_orig_backend", None)


def backend_of(compile_call: object) -> object | None:
    """The backend object that a `torch.compile` call uses."""
    return getattr(compile_call, "compiler_fn", None)


def backend_name(compiled: object) -> str | None:
    """What the backend of a compiled module or function is called; None if it is not compiled."""
    *_, callback = (None, *callbacks_of(compiled))  # the last is that of the backend
    if callback is None:
        return None
    backend = getattr(callback, "compiler_name", None) or callback
    if isinstance(backend, str):
        return backend
    name = getattr(backend, "__name__", None) or getattr(type(backend), "compiler_name", None)
    return name if isinstance(name, str) else type(backend).__name__


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


def ends_at_a_graph_break(graph_module: torch.fx.GraphModule) -> bool:
    """Whether Dynamo ended this graph before the end of the function."""
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    return reason is None or bool(reason.graph_break)


def is_part_of_a_function() -> bool:
    """Whether Python that is not traced calls what is being traced, so that both run each time.

    To be asked while the backend runs. That is what a graph break before the first op leaves, and
    a function that Dynamo does not trace but for what it calls.
    """
    between: list[str] = []  # modules of the frames outside of the tracing
    for frame in frames():
        module = frame.f_globals.get("__name__", "")
        if frame.f_code.co_name == "compile_wrapper" and module == "torch._dynamo.eval_frame":
            return any(name not in _CALLS_ONLY for name in between)
        if module in _TRACING:
            between.clear()
        elif has_forward_hooks(frame.f_locals.get("self")):
            between.append("hooks")
        else:
            between.append(module)
    return True


def python_around(compiled: object) -> bool:
    """Whether Python that no graph holds runs around a compiled module in each of its calls.

    Those are hooks of the module itself (Dynamo traces those of all modules in it), a `__call__`
    of its class, and what somebody put in place of its `forward`.
    """
    if not isinstance(compiled, torch.nn.Module):
        return False
    original = getattr(compiled, "_orig_mod", None)
    if original is None:  # compiled in place
        is_usual = type(compiled).__call__ is torch.nn.Module.__call__
    else:
        is_usual = hasattr(compiled.forward, "_torchdynamo_orig_callable")
    return not is_usual or has_forward_hooks(compiled) or has_forward_hooks(original)


def has_forward_hooks(module: object) -> bool:
    """Whether hooks run around a module's `forward`, its own or those of all modules."""
    if not isinstance(module, torch.nn.Module):
        return False
    tables = (vars(module), global_module_hooks())
    return any(table.get(name) for table in tables for name in _FORWARD_HOOKS)


def global_module_hooks() -> dict[str, Any]:
    """Hooks that are called for modules of all kinds."""
    module = sys.modules["torch.nn.modules.module"]
    return {name: hooks for name, hooks in vars(module).items() if name.startswith("_global_")}


_FORWARD_HOOKS = tuple(
    f"{whose}_forward_{when}hooks" for whose in ("", "_global") for when in ("", "pre_")
)
_TRACING = ("torch._dynamo.convert_frame", "compile_backend.torch_internals.tracing")
_CALLS_ONLY = (
    "torch.nn.modules.module",
    "torch.fx.graph_module",
    "torch.utils._contextlib",  # `no_grad` and its like
)


def autocast_is_on() -> bool:
    """Whether torch picks other types for ops than they are given."""
    return bool(torch._C._is_any_autocast_enabled())


def leaves_something_behind() -> bool:
    """Whether the Python that is being traced stores anything but in tensors, as far as is known.

    To be asked while the backend runs: Dynamo, whose frames are searched, does the storing after
    each call of the graph.
    """
    for frame in frames():
        side_effects = getattr(frame.f_locals.get("self"), "side_effects", None)
        if side_effects is not None:
            return bool(side_effects.tensor_hooks) or any(
                side_effects.is_modified(item)
                and not type(item.mutation_type).__name__.endswith("New")  # not seen outside
                and not _stores_what_is_there(side_effects, item)
                for item in side_effects.id_to_variable.values()
            )
    return True


def _stores_what_is_there(side_effects: Any, item: Any) -> bool:
    """Whether all that is stored in an object are constants that it holds already."""
    stores = side_effects.store_attr_mutations.get(item)
    try:
        owner = getattr(item, "value", None)
        constants = {name: stored.as_python_constant() for name, stored in (stores or {}).items()}
    except NotImplementedError:  # is no constant, or holds what is none, as a size that changes
        return False
    if not stores or owner is None:
        return False
    for name, constant in constants.items():
        held = getattr(owner, name, _NOTHING)
        if type(constant) is not type(held) or constant != held:
            return False
    return True


_NOTHING = object()
