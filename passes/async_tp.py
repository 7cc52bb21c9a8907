"""A product and what ranks exchange around it become one op, which does both a part at a time.

While one part of the rows is multiplied, another one is on its way between the ranks. It takes the
exchanges that sequence parallelism leaves in a graph.

Before::

    part = wait_tensor(reduce_scatter_tensor(linear(x, w), "sum", 2, group))
    whole = wait_tensor(all_gather_into_tensor(share, 2, group))
    q, k = linear(whole, w_q), linear(whole, w_k)

After::

    part = linear_reduce_scatter(x, w, 2, group)
    q, k = all_gather_linear(share, [w_q, w_k], False, 2, group)
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from passes.building import call_function, call_method, refresh
from passes.collectives import gathered_from_ranks, scattered_over_ranks
from passes.matching import FLOATS, called, dtype_of, keeps_rows, new_sizes, tensor_of
from passes.ops_async_tp import ALL_GATHER_LINEAR, LINEAR_REDUCE_SCATTER
from passes.reading import Memory, memory_of, only_reads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from passes.collectives import Exchange


class AsyncTPPass:
    """Changes numerics: products of parts of the rows, and sums over ranks, by other kernels.

    It takes `linear` without a bias in front of a sum in shares, and any number of `linear` behind
    the rows of all ranks. Products that something else reads before the sum are left alone, and so
    are those under which gradients flow, those whose weights are made behind the exchange, and
    whatever is written.

    Args:
        why_not: given a device and the name of a group, why its ranks cannot run these ops; None
            where they can. The same on all ranks of the group.
    """

    name = "async_tp"

    def __init__(self, why_not: Callable[[torch.device, str], str | None]) -> None:
        self._why_not = why_not
        self.hindrance: str | None = None

    def __call__(self, graph: torch.fx.Graph) -> int:
        """Rewrite `graph` in place; return the number of products that became part of an op."""
        memory = Memory.of(graph)
        changed = 0
        stale: set[int | None] = set()
        for node in list(graph.nodes):
            scattered = scattered_over_ranks(node)
            if scattered is not None and self._may_change(scattered):
                changed += _fuse_scattered(graph, scattered, memory)
            gathered = gathered_from_ranks(node)
            if gathered is not None and self._may_change(gathered):
                changed += _fuse_gathered(graph, gathered, memory, stale)
        refresh(graph, stale)
        return changed

    def uuid(self) -> str:
        """Identifies this version of the rewrite."""
        return "async_tp-1"

    def _may_change(self, exchange: Exchange) -> bool:
        values = [tensor_of(exchange.source), tensor_of(exchange.result)]
        if any(value is None or value.dim() != 2 or value.requires_grad for value in values):
            return False
        device = exchange.result.meta["example_value"].device
        reason = self._why_not(device, exchange.ranks.group)
        self.hindrance = self.hindrance or reason
        return reason is None


def _is_product(node: torch.fx.Node, memory: Memory) -> bool:
    """Whether a node is a `linear` of floats of one dtype, none of which anybody writes."""
    if any(memory.may_be_written(value) for value in (node, *node.all_input_nodes)):
        return False
    if called(node) != "linear" or node.kwargs:
        return False
    made = tensor_of(node)
    if made is None or made.requires_grad or made.dtype not in FLOATS:
        return False
    return all(dtype_of(operand) is made.dtype for operand in node.args if operand is not None)


def _bias_of(product: torch.fx.Node) -> Any:
    return product.args[2] if len(product.args) > 2 else None


def _fuse_scattered(graph: torch.fx.Graph, scattered: Exchange, memory: Memory) -> int:
    """A product, and the sum of it in shares."""
    product = scattered.source
    is_read = not scattered.nodes.issuperset(product.users)
    if is_read or not _is_product(product, memory) or _bias_of(product) is not None:
        return 0
    source, weight = product.args[:2]
    with graph.inserting_before(scattered.result):
        args = (source, weight, scattered.ranks.size, scattered.ranks.group)
        fused = call_function(graph, LINEAR_REDUCE_SCATTER, args)
    scattered.result.replace_all_uses_with(fused)
    _erase_unread(graph, [product, *scattered.nodes])
    return 1


def _fuse_gathered(
    graph: torch.fx.Graph, gathered: Exchange, memory: Memory, stale: set[int | None]
) -> int:
    """The rows of all ranks, and the products of them.

    Args:
        graph: to be rewritten.
        gathered: the rows.
        memory: what the graph does with its values.
        stale: takes identities of memory that is no more, for `refresh`.
    """
    whole = gathered.result
    views = _views_of_rows(whole)
    products = [
        user
        for user in views[-1].users
        if user.args[:1] == (views[-1],)
        and _is_product(user, memory)
        and _is_there(user.args[1], whole, memory)
    ]
    if not products or memory.may_be_written(gathered.source):
        return 0
    known = {*views, *products}
    is_read = any(user not in known for view in views for user in view.users)
    with graph.inserting_before(whole):
        weights = [product.args[1] for product in products]
        args = (gathered.source, weights, is_read, gathered.ranks.size, gathered.ranks.group)
        fused = call_function(graph, ALL_GATHER_LINEAR, args)
        numbers = range(len(products) + is_read)
        parts = [call_function(graph, operator.getitem, (fused, number)) for number in numbers]
    if is_read:
        stale.add(memory_of(whole))
        whole.replace_all_uses_with(parts.pop(0))
    for product, part in zip(products, parts, strict=True):
        with graph.inserting_before(product):
            result = _in_shape(graph, part, views[1:], product)
        stale.add(memory_of(product))
        product.replace_all_uses_with(result)
    _erase_unread(graph, [*gathered.nodes, *views, *products])
    return len(products)


def _views_of_rows(whole: torch.fx.Node) -> list[torch.fx.Node]:
    """Rows, and what only leaves out the last ones or gives them another shape, in order."""
    views = [whole]
    while len(views[-1].users) == 1:
        (user,) = views[-1].users
        is_cut = user.op == "call_method" and user.target == "narrow" and user.args[1:3] == (0, 0)
        if not is_cut and keeps_rows(user) is not views[-1]:
            break
        views.append(user)
    return views


def _is_there(weight: Any, target: torch.fx.Node, memory: Memory) -> bool:
    """Whether a weight is there in front of a node; it is put there where it can be.

    What a rank holds of a distributed weight is only asked for at its product.
    """
    if not isinstance(weight, torch.fx.Node):
        return False
    if weight < target:
        return True
    inputs = weight.all_input_nodes
    is_of_inputs = all(
        source.op == "placeholder" and not memory.may_be_written(source) for source in inputs
    )
    if not is_of_inputs or not only_reads(weight):
        return False
    target.prepend(weight)
    return True


def _in_shape(
    graph: torch.fx.Graph,
    part: torch.fx.Node,
    views: Sequence[torch.fx.Node],
    product: torch.fx.Node,
) -> torch.fx.Node:
    """The rows of a product in its own shape, at the graph's insertion point."""
    width = product.meta["example_value"].shape[-1]
    for view in views:
        if view.target == "narrow":
            part = call_method(graph, "narrow", (part, *view.args[1:]))
        else:
            part = call_method(graph, "reshape", (part, (*new_sizes(view)[:-1], width)))
    bias = _bias_of(product)
    return part if bias is None else call_function(graph, torch.add, (part, bias))


def _erase_unread(graph: torch.fx.Graph, nodes: Sequence[torch.fx.Node]) -> None:
    unread = set(nodes)
    for node in reversed(list(graph.nodes)):
        if node in unread and not node.users:
            graph.erase_node(node)
