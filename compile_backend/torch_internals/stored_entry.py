"""An entry of Dynamo's for a call, from what another process traced.

Guards are made from live objects, so they hold at once: whoever asks for an entry has looked
whether these are what they were where the call was traced. From then on guards notice changes as
they always do.
"""

from __future__ import annotations

import functools
import importlib
import marshal
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from compile_backend.torch_internals.graphs import fake_mode_of
from compile_backend.torch_internals.source_pickler import global_name
from compile_backend.torch_internals.stored_graph import shape_env_of_graph
from compile_backend.torch_internals.stored_sizes import Assumptions
from compile_backend.torch_internals.traced_code import source_name

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Sequence

    from compile_backend.torch_internals.traced_code import StoredCode


@dataclass(frozen=True, slots=True)
class Frame:
    """A call that is to be traced.

    Attributes:
        code: of the function.
        local_scope: its arguments and what it closes over.
        global_scope: of its module.
        builtins: as the function sees them.
    """

    code: types.CodeType
    local_scope: dict[str, Any]
    global_scope: dict[str, Any]
    builtins: dict[str, Any]


class UnsuitableError(Exception):
    """Why what another process traced cannot be used for a call."""


def value_of(source: Any, frame: Frame) -> Any:
    """What a source stands for in a call.

    Raises:
        Exception: whatever its evaluation raises.
    """
    given = {"L": frame.local_scope, "G": frame.global_scope}
    return eval(source_name(source), _scope_of_guards(), given)  # noqa: S307


@functools.cache
def _scope_of_guards() -> dict[str, Any]:
    """What the text of a source may name."""
    from torch._dynamo import guards

    known: Any = guards
    return {**known.SYMPY_INTERP, **known._get_closure_vars()}


def guarded_sources(stored: StoredCode) -> list[Any]:
    """What guards look at, each once."""
    named = {}
    for guard in stored.guards:
        try:
            named[source_name(guard.source)] = guard.source
        except NotImplementedError:
            continue
    return list(named.values())


def installed_globals(stored: StoredCode, frame: Frame) -> dict[str, Any]:
    """What a trace has put into the globals of a function, under the very names.

    Raises:
        UnsuitableError: something else is there.
    """
    made: dict[str, Any] = {}
    for alias, name in stored.imports.items():
        made[alias] = importlib.import_module(name)
    for alias, name in stored.modules.items():
        module = importlib.import_module(name)
        made[global_name(name)] = vars(module) if alias == stored.builtins_name else module
    for name, value in made.items():
        if name in frame.global_scope and frame.global_scope[name] is not value:
            raise UnsuitableError(f"{name} stands for something else")
    return made


def entry(
    stored: StoredCode,
    frame: Frame,
    module: torch.fx.GraphModule,
    compile_graph: Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]],
    frame_state: Any,
) -> Any:
    """What Dynamo gives back for a traced frame, without tracing.

    Args:
        stored: what another process traced, of which all that it read is the same here.
        frame: the call.
        module: the graph.
        compile_graph: the backend.
        frame_state: Dynamo's.

    Raises:
        UnsuitableError: it does not hold for this call.
    """
    import torch._dynamo.convert_frame
    from torch._dynamo.types import GuardedCode, wrap_guarded_code
    from torch._dynamo.utils import (
        CleanupHook,
        CleanupManager,
        chromium_event_timed,
        get_metrics_context,
    )
    from torch._guards import CompileContext, TracingContext, compile_context, tracing

    convert_frame: Any = torch._dynamo.convert_frame
    compile_id = convert_frame.get_compile_id(frame_state)
    with (
        compile_context(CompileContext(compile_id)),
        chromium_event_timed("dynamo", reset_event_log_on_exit=True, log_pt2_compile_event=True),
        get_metrics_context(),
        tracing(TracingContext(fake_mode_of(module))),
    ):
        frame.global_scope.update(installed_globals(stored, frame))
        manager = _guards(stored, frame)
        shape_env = shape_env_of_graph(module)
        graph = compile_graph(module, _example_inputs(module, frame))
        more = Assumptions.of(shape_env).beyond(stored.assumptions)
        if more:
            raise UnsuitableError(f"its pieces assume more of sizes ({', '.join(more)})")
        name = f"__compiled_fn_stored_{uuid.uuid4().hex}"
        code = _bytecode(stored, frame, name)
        disabled = torch._dynamo.disable(graph, reason="a graph that is compiled already")  # type: ignore[no-untyped-call]
        hook = CleanupHook.create(frame.global_scope, name, disabled)
        CleanupManager.instance[code] = [hook]
        convert_frame.orig_code_map[code] = frame.code
        convert_frame.output_codes.add(code)
        guarded = GuardedCode(code, manager.guard_manager, compile_id, f"Stored {compile_id}")
        return wrap_guarded_code(guarded)


def _bytecode(stored: StoredCode, frame: Frame, name: str) -> types.CodeType:
    """The code that calls the graph by a name."""
    code: types.CodeType = marshal.loads(stored.bytecode)  # noqa: S302 - of this user, see `cache`
    if (code.co_freevars, code.co_cellvars) != (frame.code.co_freevars, frame.code.co_cellvars):
        raise UnsuitableError("the function closes over other variables")
    renamed = {alias: global_name(module) for alias, module in stored.modules.items()}
    renamed[stored.graph_name] = name
    return code.replace(co_names=tuple(renamed.get(old, old) for old in code.co_names))


def _example_inputs(module: torch.fx.GraphModule, frame: Frame) -> list[Any]:
    examples = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["example_value"]
            if isinstance(value, torch.Tensor):
                value = value_of(node.meta["grapharg"].source, frame)
                _check_alike(value, node)
                for name, mark in node.meta["tensor_dict"].items():
                    if not hasattr(value, name):
                        setattr(value, name, mark)  # as Dynamo does with weights
            examples.append(value)
    return examples


def _check_alike(value: Any, node: torch.fx.Node) -> None:
    """Whether a tensor is what the graph was traced for, in this very size."""
    fake = node.meta["example_value"]
    if not isinstance(value, torch.Tensor):
        raise UnsuitableError(f"{node.name} is a {type(value).__name__}")
    facts = (value.dtype, value.device, value.requires_grad, value.dim())
    if facts != (fake.dtype, fake.device, fake.requires_grad, fake.dim()):
        raise UnsuitableError(f"{node.name} is of another kind")
    for mine, known in zip(
        (*value.shape, *value.stride()), (*fake.shape, *fake.stride()), strict=True
    ):
        hint = known.node.hint if isinstance(known, torch.SymInt) else known
        if mine != hint:
            raise UnsuitableError(f"{node.name} has another size")


def _guards(stored: StoredCode, frame: Frame) -> Any:
    """The guards, on live objects; they hold for this call.

    Raises:
        UnsuitableError: they do not.
    """
    from torch._dynamo.guards import CheckFunctionManager, GuardBuilder
    from torch._dynamo.output_graph import OutputGraphCommon, OutputGraphGuardsState
    from torch._guards import Guard, GuardsSet

    guards = GuardsSet()
    for guard in stored.guards:
        make: Any = getattr(GuardBuilder, guard.kind)
        if guard.args or guard.keywords:
            make = functools.partial(make, *guard.args, **guard.keywords)
        guards.inner.add(Guard(guard.source, make))
    state = OutputGraphGuardsState(
        local_scope=frame.local_scope,
        global_scope=frame.global_scope,
        torch_function_mode_stack=[],
        guard_on_key_order=stored.key_order,
        input_source_to_sizes_strides=stored.layouts,
        dual_level=-1,
        functorch_layers=[],
        current_device=torch.utils._device.CURRENT_DEVICE,
        global_state_guard=torch._C._dynamo.guards.GlobalStateGuard(),
        _guards=guards,
        _aotautograd_guards=stored.aliases,
        name_of_builtins_dict_key_in_fglobals=stored.builtins_name and global_name("builtins"),
    )
    try:
        return CheckFunctionManager(
            frame.code,
            OutputGraphCommon(state),
            shape_code_parts=stored.shape_guards,
            runtime_global_scope=frame.global_scope,
        )
    except Exception as error:
        raise UnsuitableError(f"its guards do not hold ({error})") from error
