"""Private names around FX graphs: targets, fake values, where inputs come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch.utils import _pytree

if TYPE_CHECKING:
    from collections.abc import Callable

# Nested tuples, lists and dicts of tensors.
tree_map: Callable[..., Any] = _pytree.tree_map
tree_leaves: Callable[..., list[Any]] = _pytree.tree_leaves

# What Dynamo writes into graphs for `with torch.autocast(...)` and `torch.no_grad()`.
enter_autocast: Callable[..., Any] = torch.amp.autocast_mode._enter_autocast
leave_autocast: Callable[..., Any] = torch.amp.autocast_mode._exit_autocast
set_grad_enabled: Callable[..., Any] = torch._C._set_grad_enabled


def is_op_overload(target: object) -> bool:
    """Whether `target` is one overload of an op, such as `torch.ops.aten.add.Tensor`."""
    return isinstance(target, torch._ops.OpOverload)


def is_op_packet(target: object) -> bool:
    """Whether `target` is an op with all its overloads, such as `torch.ops.aten.add`."""
    return isinstance(target, torch._ops.OpOverloadPacket)


def is_higher_order_op(target: object) -> bool:
    """Whether `target` is an op that takes functions, such as `flex_attention`."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def is_name_of_higher_order_op(name: str) -> bool:
    """Whether an op that takes functions has this name."""
    import torch._higher_order_ops  # registers those of torch

    return is_higher_order_op(getattr(torch.ops.higher_order, name, None))


def op_schema(target: object) -> Any | None:
    """The schema of an op overload, or of the first overload of a packet; else None."""
    if is_op_overload(target):
        return target._schema  # type: ignore[attr-defined]
    if is_op_packet(target):
        overload = target.overloads()[0]  # type: ignore[attr-defined]
        return getattr(target, overload)._schema
    return None


def is_fake_tensor(value: object) -> bool:
    """Whether `value` is a tensor without data, as graphs carry them."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def fake_mode_of(graph_module: torch.fx.GraphModule) -> Any | None:
    """The fake-tensor mode of the values that a Dynamo graph carries."""
    for node in graph_module.graph.nodes:
        value = node.meta.get("example_value")
        if is_fake_tensor(value):
            return value.fake_mode
    return None


def storage_id(value: object) -> int | None:
    """An identity of the memory behind a (fake) tensor; None where there is none."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    try:
        return int(value.untyped_storage()._cdata)
    except NotImplementedError:  # wrappers, such as those that function transforms leave
        return None


class StorageReference:
    """The memory of a tensor, without keeping it.

    Args:
        tensor: one with memory of its own.

    Attributes:
        address: where the memory starts.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        storage = tensor.untyped_storage()
        self.address = storage.data_ptr()
        self._reference: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def is_alive(self) -> bool:
        """Whether some tensor still has this memory."""
        return not self._reference.expired()


def is_static_address(node: torch.fx.Node, value: object) -> bool:
    """Whether a graph input was marked by `torch._dynamo.mark_static_address`.

    Dynamo marks parameters and buffers so, too.
    """
    described = node.meta.get("tensor_dict") or {}
    return (
        "_dynamo_static_input_type" in described
        or getattr(value, "_dynamo_static_input_type", None) is not None
    )


def _source_of(node: torch.fx.Node) -> Any:
    """Where a graph input comes from; copies of a graph have it in their metadata only."""
    source = getattr(node, "_dynamo_source", None)
    return source or getattr(node.meta.get("grapharg"), "source", None)


def input_source_name(node: torch.fx.Node) -> str:
    """How the user would write this graph input, such as `L['self'].lm_head.weight`."""
    name = getattr(_source_of(node), "name", None)
    try:
        name = name() if callable(name) else name
    except NotImplementedError:
        name = None
    return str(name) if name else node.name


def fix_numbers_of_modules(graph: torch.fx.Graph) -> None:
    """Have Dynamo trace again with the float attributes of modules as constants, guarded.

    With dynamic shapes Dynamo hands floats over as tensors on the CPU and reads them back in the
    graph. An epsilon or a dropout rate would so put host work into every piece, which no CUDA
    graph can hold. Floats that callers pass stay free.

    Raises:
        TensorifyScalarRestartAnalysis: for Dynamo, which starts over. Not raised a second time.
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState

    symbols = [
        node.meta["example_value"].item_memo.node._expr.name
        for node in graph.nodes
        if is_number_input(node) and _belongs_to_module(node)
    ]
    symbols = [symbol for symbol in symbols if not TensorifyState.should_specialize(symbol)]
    for symbol in symbols:
        TensorifyState.specialize(symbol)
    if symbols:
        raise TensorifyScalarRestartAnalysis


def is_number_input(node: torch.fx.Node) -> bool:
    """Whether a graph input is a Python float that Dynamo hands over as a tensor on the CPU."""
    memo = getattr(node.meta.get("example_value"), "item_memo", None)
    return (
        node.op == "placeholder"
        and isinstance(memo, torch.SymFloat)
        and hasattr(memo.node._expr, "name")
        and all(user.target == "item" for user in node.users)
    )


def _belongs_to_module(node: torch.fx.Node) -> bool:
    source = _source_of(node)
    kind = getattr(source, "guard_source", None)
    return "NN_MODULE" in str(kind() if callable(kind) else kind)


def names_of_wrapped(tensor: torch.Tensor) -> list[str]:
    """The attributes that hold a tensor's data, for a subclass that only wraps others."""
    wrapper: Any = tensor
    if not torch.utils._python_dispatch.is_traceable_wrapper_subclass(wrapper):
        return []
    names = wrapper.__tensor_flatten__()[0]
    # Distributed tensors name their mesh, too.
    return [name for name in names if isinstance(getattr(wrapper, name), torch.Tensor)]


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that hold the data: itself, or what it wraps."""
    names = names_of_wrapped(tensor)
    if not names:
        return [tensor]
    return [part for name in names for part in parts_of(getattr(tensor, name))]
