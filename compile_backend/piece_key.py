"""What makes two pieces equal: within a process, and between processes.

Both keys describe the same walk over a graph: ops, constants, wiring, and every property of the
inputs. Names of values are left out, so equal layers have equal keys, and nothing is traced. In a
process, functions and constants go by their identity; on disk, by their names and contents, and
what has neither is not kept.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.fx

from compile_backend.cache import NotStorableError
from compile_backend.mutation import written_arguments
from compile_backend.op_names import op_name
from compile_backend.torch_internals.compile_settings import (
    NUMBERS_OF_KERNELS,
    content_of_higher_order_call,
    cpu_settings,
    op_digest,
    renamed_size,
)
from compile_backend.torch_internals.graphs import (
    is_fake_tensor,
    is_higher_order_op,
    is_op_overload,
    is_op_packet,
    is_static_address,
    names_of_wrapped,
    parts_of,
    storage_id,
)
from compile_backend.torch_internals.sizes import data_dependent_symbols

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


def structural_key(module: torch.fx.GraphModule) -> Hashable:
    """What makes two pieces equal in this process.

    Sizes count by their symbolic expression, and inputs that share memory by which of them do.
    """
    return _described(module, _InThisProcess())


def stored_key(module: torch.fx.GraphModule, settings: Sequence[str]) -> str:
    """What makes two pieces equal in all processes, as hexadecimal digits.

    Symbols in sizes count by the order in which they are first met.

    Args:
        module: the piece.
        settings: all else that decides how a piece is compiled.

    Raises:
        NotStorableError: something in the piece means another thing in another process.
    """
    values = [node.meta.get("example_value") for node in module.graph.nodes]
    is_on_cpu = any(isinstance(v, torch.Tensor) and v.device.type == "cpu" for v in values)
    machine = cpu_settings() if is_on_cpu else ""
    text = repr((*settings, machine, _described(module, _InAnyProcess())))
    return hashlib.sha256(text.encode()).hexdigest()


class _Vocabulary(Protocol):
    """How what a graph refers to is called."""

    def target(self, node: torch.fx.Node) -> Hashable: ...

    def keywords(self, node: torch.fx.Node) -> dict[str, Any]: ...

    def attribute(self, value: Any) -> Hashable: ...

    def plain(self, value: Any) -> Hashable: ...

    def input(self, node: torch.fx.Node, storages: dict[int, int]) -> Hashable: ...

    def check(self, node: torch.fx.Node) -> None: ...


def _described(module: torch.fx.GraphModule, words: _Vocabulary) -> tuple[Hashable, ...]:
    numbers: dict[torch.fx.Node, int] = {}
    storages: dict[int, int] = {}
    described: list[Hashable] = []

    def argument(value: Any) -> Hashable:
        if isinstance(value, torch.fx.Node):
            return ("node", numbers[value])
        if isinstance(value, (tuple, list)):
            return (type(value).__name__, *(argument(item) for item in value))
        if isinstance(value, dict):
            return ("dict", *((key, argument(item)) for key, item in value.items()))
        if isinstance(value, slice):
            return ("slice", argument(value.start), argument(value.stop), argument(value.step))
        if isinstance(value, float):
            return ("float", value.hex())
        return words.plain(value)

    for number, node in enumerate(module.graph.nodes):
        numbers[node] = number
        words.check(node)
        if node.op == "placeholder":
            described.append(("input", words.input(node, storages)))
        elif node.op == "get_attr":
            value = _attribute(module, str(node.target))
            described.append(("attribute", words.attribute(value)))
        else:
            target, keywords = words.target(node), words.keywords(node)
            described.append((node.op, target, argument(node.args), argument(keywords)))
    return tuple(described)


def _attribute(module: torch.nn.Module, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _shared(value: torch.Tensor, storages: dict[int, int]) -> int | None:
    memory = storage_id(value)
    return storages.setdefault(memory, len(storages)) if memory is not None else None


def _inside(value: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a tensor only wraps: a distributed one may be cut in several ways."""
    return parts_of(value) if names_of_wrapped(value) else []


class _InThisProcess:
    """Functions and constants by identity, values by how they print."""

    def target(self, node: torch.fx.Node) -> Hashable:
        if isinstance(node.target, str):
            return node.target
        return (getattr(node.target, "__name__", str(node.target)), id(node.target))

    def keywords(self, node: torch.fx.Node) -> dict[str, Any]:
        return node.kwargs

    def attribute(self, value: Any) -> Hashable:
        return id(value)

    def plain(self, value: Any) -> Hashable:
        return (type(value).__name__, str(value))

    def input(self, node: torch.fx.Node, storages: dict[int, int]) -> Hashable:
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor):
            return self.plain(value)
        strides = tuple(map(str, value.stride())) if value.layout is torch.strided else None
        return (
            type(value).__name__,
            tuple(map(str, value.shape)),
            strides,
            str(value.storage_offset()) if strides is not None else None,
            value.dtype,
            value.device,
            value.requires_grad,
            _shared(value, storages),
            *(tuple(map(str, part.shape)) for part in _inside(value)),
        )

    def check(self, node: torch.fx.Node) -> None:
        pass


_PLAIN = (
    *(type(None), bool, int, str, complex, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)

# Their code is that of the releases that a key names. Some of torch's name no module.
_FUNCTIONS_OF = ("torch.", "None._VariableFunctions", "_operator.", "math.", "builtins.")


class _InAnyProcess:
    """Everything by name and content; refuses what has neither."""

    def __init__(self, symbols: dict[Any, Any] | None = None) -> None:
        self._symbols: dict[Any, Any] = {} if symbols is None else symbols

    def target(self, node: torch.fx.Node) -> Hashable:
        target: Any = node.target
        if isinstance(target, str):
            if node.op == "call_module":
                raise NotStorableError(f"calls a module of Python code ({target})")
            return target
        name = op_name(node)
        if is_op_overload(target) or is_op_packet(target):
            return (name, op_digest(target))
        if is_higher_order_op(target):
            return (name, content_of_higher_order_call(node))
        is_named = hasattr(target, "__qualname__") and "<" not in str(name)
        if not is_named or not str(name).startswith(_FUNCTIONS_OF):
            raise NotStorableError(f"calls the Python function {name}")
        return name

    def keywords(self, node: torch.fx.Node) -> dict[str, Any]:
        # Numbers that stand for a Triton kernel and its constants are those of one process.
        return {name: v for name, v in node.kwargs.items() if name not in NUMBERS_OF_KERNELS}

    def attribute(self, value: Any) -> Hashable:
        if isinstance(value, torch.fx.GraphModule):
            return _described(value, _InAnyProcess(self._symbols))
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            raise NotStorableError(f"holds a {type(value).__name__}")
        constant = value.detach().cpu().contiguous()
        contents = constant.reshape(-1).view(torch.uint8).numpy().tobytes()
        return (*self._tensor(value), hashlib.sha256(contents).hexdigest())

    def plain(self, value: Any) -> Hashable:
        if isinstance(value, torch.SymInt):
            return ("SymInt", renamed_size(value, self._symbols))
        if type(value) not in _PLAIN:
            raise NotStorableError(f"is given a {type(value).__name__}")
        return (type(value).__name__, str(value))

    def input(self, node: torch.fx.Node, storages: dict[int, int]) -> Hashable:
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor):
            return self.plain(value)
        if not is_fake_tensor(value) or value.layout is not torch.strided:
            raise NotStorableError(f"takes a {type(value).__name__} ({node.name})")
        facts = (value.requires_grad, value.is_inference(), is_static_address(node, value))
        return (*self._tensor(value), *facts, _shared(value, storages))

    def _tensor(self, value: torch.Tensor) -> tuple[Hashable, ...]:
        layout = (tuple(value.shape), value.stride(), (value.storage_offset(),))
        sizes = tuple(tuple(renamed_size(n, self._symbols) for n in part) for part in layout)
        return (*sizes, str(value.dtype), str(value.device), value.is_conj(), value.is_neg())

    def check(self, node: torch.fx.Node) -> None:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor | torch.SymInt) and data_dependent_symbols(value):
            raise NotStorableError(f"has a size that only the data tells ({node.name})")
        for written in written_arguments(node):
            if written.op == "get_attr":
                raise NotStorableError(f"writes to a constant ({written.name})")
