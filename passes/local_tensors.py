"""Distributed tensors become what each rank holds of them, and the exchange between ranks.

Tensor parallelism by `parallelize_module`, and that of transformers, wrap a rank's tensors for a
linear layer and unwrap what it gives. A wrapper can neither cross a cut of the graph nor be read
by a CUDA graph, and what it does between ranks is hidden in it.

Before::

    d = DTensor.from_local(x, mesh, (Shard(-1),))
    y = linear(d, weight)                  # weight is a DTensor, Shard(1); y is a sum in parts
    out = y.redistribute(placements=(Replicate(),)).to_local()

After::

    y = linear(x, weight.to_local())
    out = wait_tensor(all_reduce(y, "sum", group))
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from passes.building import call_function, call_method
from passes.collectives import Ranks, all_columns, sum_over_ranks
from passes.matching import called
from passes.reading import only_reads

if TYPE_CHECKING:
    from collections.abc import Mapping

_REPLICATE = "replicate"
_SUM = "sum"


class LocalTensorsPass:
    """Numerics-preserving: each rank computes what it did inside of the wrappers, bit for bit.

    It knows column- and row-wise linear layers, row-wise embeddings, and outputs gathered from
    columns, over one group. A graph in which a wrapper does anything else is left as it is, and so
    is one for gradients.
    """

    name = "local_tensors"

    def __call__(self, graph: torch.fx.Graph) -> int:
        """Rewrite `graph` in place; return the number of calls that were unwrapped."""
        wrapped = [node for node in graph.nodes if _is_wrapped_call(node)]
        if not wrapped or any(node.meta["example_value"].requires_grad for node in wrapped):
            return 0
        before = frozenset(graph.nodes)
        held: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in wrapped:
            with graph.inserting_before(node):
                made = _unwrapped(graph, node, held)
            if made is None:
                _erase(graph, [new for new in graph.nodes if new not in before])
                return 0
            held[node] = made
        for node in wrapped:
            for user in list(node.users):
                if user not in held:
                    user.replace_all_uses_with(held[node])
                    graph.erase_node(user)
        served = list({source: None for node in wrapped for source in node.all_input_nodes})
        _erase(graph, wrapped)
        _erase_unread([node for node in served if node not in held])
        return len(wrapped)

    def uuid(self) -> str:
        """Identifies this version of the rewrite."""
        return "local_tensors-1"


def _is_wrapped_call(node: torch.fx.Node) -> bool:
    return node.op.startswith("call_") and _is_wrapper(node.meta.get("example_value"))


def _is_wrapper(value: Any) -> bool:
    """Whether a value is a `DTensor`; whoever has none need not import them."""
    kind = type(value)
    return kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed.tensor")


def _erase(graph: torch.fx.Graph, nodes: list[torch.fx.Node]) -> None:
    for node in reversed(nodes):
        graph.erase_node(node)


def _erase_unread(nodes: list[torch.fx.Node]) -> None:
    """Leave out what only told the sizes of wrappers, such as tensors without memory."""
    while nodes:
        node = nodes.pop()
        if node.op.startswith("call_") and not node.users and only_reads(node):
            nodes += [source for source in node.all_input_nodes if source not in nodes]
            node.graph.erase_node(node)


def _unwrapped(
    graph: torch.fx.Graph, node: torch.fx.Node, held: Mapping[torch.fx.Node, torch.fx.Node]
) -> torch.fx.Node | None:
    """What this rank holds of a wrapped value, made anew; None where that is not known.

    Args:
        graph: with its insertion point in front of the node.
        node: makes a wrapper.
        held: the same of earlier ones.
    """
    ranks = _ranks_of(node)
    if ranks is None or not all(user in held or _is_known(user) for user in node.users):
        return None
    if _role(node) == "from_local":
        return _given(node)
    name = called(node)
    if name == "linear":
        return _linear(graph, node, held)
    if name == "embedding":
        return _embedding(graph, node, held, ranks)
    return _redistributed(graph, node, held, ranks) if _role(node) == "redistribute" else None


def _is_known(user: torch.fx.Node) -> bool:
    """Whether a reader of a wrapper unwraps it, or makes another one, which is looked at then."""
    return _role(user) == "to_local" or _is_wrapped_call(user)


def _role(node: torch.fx.Node) -> str | None:
    """`from_local`, `redistribute` or `to_local`; None for other calls.

    Releases of torch before 2.12 have these as functions that hold the options themselves.
    """
    if node.op == "call_method":
        return str(node.target) if node.target in ("redistribute", "to_local") else None
    name = str(getattr(node.target, "__qualname__", ""))
    roles = {
        "DTensor.from_local": "from_local",
        "TorchInGraphFunctionVariable._get_handlers.<locals>.handle_from_local.<locals>."
        "fn_with_prim_types": "from_local",
        "TensorVariable.method_redistribute.<locals>.redistribute_fn_with_prim_types": (
            "redistribute"
        ),
        "TensorVariable.method_to_local.<locals>.to_local_fn_with_prim_types": "to_local",
    }
    return roles.get(name)


def _placement(value: Any) -> int | str | None:
    """How the one group of ranks holds a value: the dimension that is cut, or a word."""
    (placement,) = value.placements
    if placement.is_replicate():
        return _REPLICATE
    if placement.is_partial():
        return _SUM if placement.reduce_op == "sum" else None
    is_plain_cut = placement.is_shard() and type(placement).__name__ == "Shard"
    return int(placement.dim) % value.dim() if is_plain_cut else None


def _ranks_of(node: torch.fx.Node) -> Ranks | None:
    value = node.meta["example_value"]
    if len(value.placements) != 1:
        return None
    ranks = Ranks.of(value.device_mesh.get_group().group_name)
    # A mesh may name ranks in an order of its own, which collectives do not follow.
    place = value.device_mesh.get_coordinate()
    return ranks if ranks is not None and place is not None and [*place] == [ranks.rank] else None


def _options(node: torch.fx.Node) -> dict[str, Any]:
    """What a call is told by keyword."""
    options = dict(node.kwargs)
    if inspect.isfunction(node.target) and node.target.__closure__:
        options.update(inspect.getclosurevars(node.target).nonlocals.get("kwargs_as_value", {}))
    return options


def _given(node: torch.fx.Node) -> torch.fx.Node | None:
    """What is wrapped, by a call that neither checks nor sends anything."""
    source = node.args[0]
    is_checked = _options(node).get("run_check", False) is not False
    if is_checked or not isinstance(source, torch.fx.Node):
        return None
    return None if _is_wrapper(source.meta.get("example_value")) else source


def _local(
    graph: torch.fx.Graph, node: Any, held: Mapping[torch.fx.Node, torch.fx.Node]
) -> torch.fx.Node | None:
    """What this rank holds of an argument: an earlier result, or a weight."""
    if not isinstance(node, torch.fx.Node) or not _is_wrapper(node.meta.get("example_value")):
        return None
    if node.op == "placeholder":
        return call_method(graph, "to_local", (node,))
    return held.get(node)


def _linear(
    graph: torch.fx.Graph, node: torch.fx.Node, held: Mapping[torch.fx.Node, torch.fx.Node]
) -> torch.fx.Node | None:
    given: list[Any] = [*node.args, None]
    source, weight, bias = given[:3]
    arguments = [_local(graph, argument, held) for argument in (source, weight)]
    if node.kwargs or None in arguments:
        return None
    value, last = node.meta["example_value"], source.meta["example_value"].dim() - 1
    ways = [_placement(argument.meta["example_value"]) for argument in (source, weight)]
    ways.append(_placement(value))
    if ways == [last, 1, _SUM]:
        if bias is not None:  # every rank would add it
            return None
    elif ways not in ([_REPLICATE, 0, last], [_REPLICATE, _REPLICATE, _REPLICATE]):
        return None
    elif bias is not None:
        local = _local(graph, bias, held)
        if local is None or _placement(bias.meta["example_value"]) != ways[1]:
            return None
        bias = local
    made = graph.call_function(torch.nn.functional.linear, (*arguments, bias))
    made.meta["example_value"] = value.to_local()
    return made


def _embedding(
    graph: torch.fx.Graph,
    node: torch.fx.Node,
    held: Mapping[torch.fx.Node, torch.fx.Node],
    ranks: Ranks,
) -> torch.fx.Node | None:
    """Rows of a table of which each rank has a part: those of other parts are 0."""
    source, table, *others = node.args
    ids, rows = _local(graph, source, held), _local(graph, table, held)
    if ids is None or rows is None or node.kwargs or others[1:2] not in ([], [None]):
        return None
    assert isinstance(source, torch.fx.Node)
    assert isinstance(table, torch.fx.Node)
    whole = table.meta["example_value"]
    ways = [_placement(value.meta["example_value"]) for value in (source, table, node)]
    num_rows, remainder = divmod(int(whole.shape[0]), ranks.size)
    if ways != [_REPLICATE, 0, _SUM] or remainder:
        return None
    shifted = call_function(graph, torch.sub, (ids, ranks.rank * num_rows))
    below = call_function(graph, torch.lt, (shifted, 0))
    above = call_function(graph, torch.ge, (shifted, num_rows))
    elsewhere = call_function(graph, torch.logical_or, (below, above))
    legal = call_method(graph, "masked_fill", (shifted, elsewhere, 0))
    found = call_function(graph, torch.nn.functional.embedding, (legal, rows))
    whole_rows = call_method(graph, "unsqueeze", (elsewhere, -1))
    return call_method(graph, "masked_fill", (found, whole_rows, 0.0))


def _redistributed(
    graph: torch.fx.Graph,
    node: torch.fx.Node,
    held: Mapping[torch.fx.Node, torch.fx.Node],
    ranks: Ranks,
) -> torch.fx.Node | None:
    source = node.args[0]
    local = held.get(source) if isinstance(source, torch.fx.Node) else None
    options = _options(node)
    in_another_dtype = any(options.get(f"{way}_dtype") for way in ("forward", "backward"))
    if local is None or in_another_dtype:
        return None
    assert isinstance(source, torch.fx.Node)
    before, after = source.meta["example_value"], node.meta["example_value"]
    was, is_now = _placement(before), _placement(after)
    if was is None or is_now is None or before.device_mesh.ndim != 1:
        return None
    if was == is_now:
        return local
    if is_now != _REPLICATE:
        return None
    if was == _SUM:
        return sum_over_ranks(graph, local, ranks)
    is_even = statically_known_true(before.shape[-1] % ranks.size == 0)
    return all_columns(graph, local, ranks) if is_even and was == before.dim() - 1 else None
