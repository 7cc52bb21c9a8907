"""What Dynamo made of a call besides the graph, as plain data that other processes can use.

New code that calls the graph, and guards: what each looks at, and how. Not what they compare with;
that is made anew from live objects, see `stored_entry`.
"""

from __future__ import annotations

import builtins
import functools
import marshal
import sys
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from compile_backend.cache import NotStorableError
from compile_backend.torch_internals.stored_sizes import Assumptions

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class StoredGuard:
    """One guard: what it looks at, and how."""

    source: Any
    kind: str
    args: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredCode:
    """What Dynamo made of a frame, besides the graph.

    Attributes:
        bytecode: that calls the graph, marshalled.
        graph_name: what it calls the graph.
        imports: names of modules that Dynamo put into the globals, by the name there.
        modules: names of those that it calls otherwise in each process, by the name there.
        builtins_name: what it calls the builtins there, among these.
        guards: all of them.
        shape_guards: those of sizes, as code.
        layouts: sizes and strides of inputs that are fixed.
        key_order: dicts whose order is guarded.
        aliases: which inputs are the same, or overlap.
        assumptions: what guards of sizes hold.
    """

    bytecode: bytes
    graph_name: str
    imports: dict[str, str]
    modules: dict[str, str]
    builtins_name: str | None
    guards: list[StoredGuard]
    shape_guards: Any
    layouts: dict[Any, Any]
    key_order: set[Any]
    aliases: list[Any]
    assumptions: Assumptions


@dataclass(frozen=True, slots=True)
class Traced:
    """What Dynamo did with a frame.

    Attributes:
        stored: what it made.
        codes: of all functions that it went through.
    """

    stored: StoredCode
    codes: list[types.CodeType]


def traced_by(output: Any, out_code: types.CodeType, guards: Any) -> Traced:
    """What Dynamo made of a call, as others can use it.

    Args:
        output: of Dynamo, while it makes guards.
        out_code: the new code.
        guards: all of them.

    Raises:
        NotStorableError: something in it means nothing in another process.
    """
    state = output.dump_guards_state()
    if (
        state.torch_function_mode_stack
        or state.functorch_layers
        or state.dual_level not in (-1, 0)
    ):
        raise NotStorableError("was traced inside of a mode or a transform of torch's")
    imports = dict(output.import_sources)
    modules = _modules(output, imports)
    graph_name = _graph_name(out_code, output, {*imports, *modules}, guards)
    to_numbers = torch.utils._pytree.tree_map
    from torch._dynamo.guards import convert_int_to_concrete_values

    stored = StoredCode(
        bytecode=_marshalled(out_code),
        graph_name=graph_name,
        imports=imports,
        modules=modules,
        builtins_name=state.name_of_builtins_dict_key_in_fglobals,
        guards=[_stored_guard(guard) for guard in guards],
        shape_guards=_shape_guards(output),
        layouts=to_numbers(convert_int_to_concrete_values, state.input_source_to_sizes_strides),
        key_order=set(state.guard_on_key_order),
        aliases=list(state._aotautograd_guards),
        assumptions=Assumptions.of(output.shape_env),
    )
    return Traced(stored, list(dict.fromkeys(output.tracing_context.traced_code)))


def _marshalled(code: types.CodeType) -> bytes:
    try:
        return marshal.dumps(code)
    except ValueError as error:
        raise NotStorableError("has code with constants that are objects") from error


def _modules(output: Any, imports: Mapping[str, str]) -> dict[str, str]:
    """The modules that this trace put into the globals under names of its own."""
    found = {}
    for name in _installed(output):
        value = output.global_scope.get(name)
        module_name = getattr(value, "__name__", "")
        if value is vars(builtins):
            found[name] = "builtins"
        elif isinstance(value, types.ModuleType) and sys.modules.get(module_name) is value:
            found[name] = module_name
    return {name: module_name for name, module_name in found.items() if name not in imports}


def _installed(output: Any) -> list[str]:
    """Names of globals that only this trace made."""
    return [hook.name for hook in output.cleanups if hasattr(hook, "name")]


def _graph_name(
    code: types.CodeType, output: Any, known: Container[str], guards: Sequence[Any]
) -> str:
    """The one other global that the code needs and only this trace made."""
    unknown = [name for name in _installed(output) if name not in known]
    needed = [name for name in code.co_names if name in unknown]
    if len(needed) != 1 or not needed[0].startswith("__compiled_fn"):
        raise NotStorableError(f"has code that needs objects of this process ({needed})")
    if any(isinstance(constant, types.CodeType) for constant in code.co_consts):
        raise NotStorableError("has code that makes functions")
    for guard in guards:
        text = source_name(guard.originating_source)
        if any(name in text for name in unknown):
            raise NotStorableError(f"has a guard on an object of this process ({text})")
    return str(needed[0])


def _stored_guard(guard: Any) -> StoredGuard:
    from torch._dynamo.guards import GuardBuilder

    make: Any = guard.create_fn
    args: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    if isinstance(make, functools.partial):
        make, args, keywords = make.func, make.args, dict(make.keywords)
    name = getattr(make, "__name__", "")
    if getattr(GuardBuilder, name, None) is not make or name in _NOT_UNDERSTOOD:
        raise NotStorableError(f"has a guard of an uncommon kind ({name or make})")
    if name == "TENSOR_MATCH":  # compares with what is there when it is made
        args, keywords = (), {}
    return StoredGuard(guard.originating_source, name, args, keywords)


_NOT_UNDERSTOOD = ("FSDP_TRAINING_STATE", "TORCH_FUNCTION_MODE_STACK")


def _shape_guards(output: Any) -> Any:
    """The guards of sizes as code, as torch's own package of a compiled function has them."""
    from torch._dynamo import config
    from torch._dynamo.guards import ShapeCodeParts

    tracked = output.shape_env.tracked_fakes or []
    languages = ("python", "verbose_python", "cpp")
    use_cpp = config.enable_cpp_symbolic_shape_guards
    made = output.shape_env.produce_guards_verbose(
        [item.fake for item in tracked],
        [item.source for item in tracked],
        input_contexts=[item.symbolic_context for item in tracked],
        equalities_inputs=None,
        source_ref=source_name,
        ignore_static=True,
        langs=languages if use_cpp else languages[:2],
    )
    cpp = made[2] if use_cpp else None
    sources = [] if cpp is None else list(cpp.source_to_symbol)
    return ShapeCodeParts(made[0], made[1], cpp, cpp is None, sources)


def source_name(source: Any) -> str:
    """A source as Python code."""
    name = source.name
    return str(name() if callable(name) else name)
