"""What ranks exchange within a graph: functional collectives, read and made.

They are ops of torch that give a tensor which `wait_tensor` makes usable. Dynamo writes them for
tensor parallelism, and every compiler of pieces knows them.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.fx

from passes.building import call_function, call_method, fill_value
from passes.matching import is_contiguous
from passes.reading import memory_of, only_reads

if TYPE_CHECKING:
    from collections.abc import Sequence

_OPS = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a process group, seen from one of them.

    Attributes:
        group: its name.
        size: how many there are.
        rank: this one.
    """

    group: str
    size: int
    rank: int

    @classmethod
    def of(cls, group: Any) -> Ranks | None:
        """Those of the group of a name; None if this process knows none, or is not in it."""
        if not isinstance(group, str) or not dist.is_available():
            return None
        by_name: Any = dist.distributed_c10d
        try:
            found = by_name._resolve_process_group(group)
        except (RuntimeError, ValueError):
            return None
        rank = found.rank()
        return cls(group, found.size(), rank) if rank >= 0 else None


@dataclass(frozen=True, slots=True)
class Exchange:
    """What ranks exchange at one place of a graph.

    Attributes:
        source: what this rank gives.
        result: what it gets.
        ranks: that take part.
        nodes: that do it, the result included.
    """

    source: torch.fx.Node
    result: torch.fx.Node
    ranks: Ranks
    nodes: frozenset[torch.fx.Node]


def reduced_over_ranks(node: torch.fx.Node) -> Exchange | None:
    """The sum over ranks whose value a node is; None for all else, other reductions included."""
    return _exchange(node, "all_reduce", 3)


def scattered_over_ranks(node: torch.fx.Node) -> Exchange | None:
    """The sum over ranks of which a node is this rank's rows; None for all else."""
    return _exchange(node, "reduce_scatter_tensor", 4)


def gathered_from_ranks(node: torch.fx.Node) -> Exchange | None:
    """The rows of all ranks, if a node is those; None for all else."""
    return _exchange(node, "all_gather_into_tensor", 3)


def _exchange(node: torch.fx.Node, name: str, count: int) -> Exchange | None:
    started = _arguments(node, "wait_tensor", 1)
    if started is None or not isinstance(started[0], torch.fx.Node):
        return None
    sent = _arguments(started[0], name, count)
    if sent is None or not isinstance(sent[0], torch.fx.Node):
        return None
    if name != "all_gather_into_tensor" and sent[1] != "sum":
        return None
    ranks = Ranks.of(sent[-1])
    if ranks is None or set(started[0].users) != {node}:
        return None
    if name != "all_reduce" and sent[-2] != ranks.size:
        return None
    return Exchange(sent[0], node, ranks, frozenset({node, started[0]}))


def take_apart_sums_in_place(graph: torch.fx.Graph) -> None:
    """Have later readers of `torch.distributed.all_reduce(x)` read the sum itself, not `x`.

    Dynamo writes such a call as a functional sum that is copied to `x`. Where `x` is a value of
    its own, which nobody else writes, the copy is left out.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    for copy in graph.find_nodes(op="call_method", target="copy_"):
        target, result = copy.args if len(copy.args) == 2 and not copy.kwargs else (None, None)
        if not isinstance(target, torch.fx.Node) or not isinstance(result, torch.fx.Node):
            continue
        reduced = reduced_over_ranks(result)
        if reduced is None or reduced.source is not target or set(result.users) != {copy}:
            continue
        memory = memory_of(target)
        holders = [node for node in graph.nodes if memory_of(node) == memory]
        views = [node for node in holders if node not in (target, copy)]
        is_own = target.op != "placeholder" and all(order[v] > order[copy] for v in views)
        writers = {user for node in holders for user in node.users if not only_reads(user)}
        if memory is None or not is_own or writers != {copy}:
            continue
        for user in [user for user in target.users if order[user] > order[copy]]:
            user.replace_input_with(target, result)
        copy.replace_all_uses_with(result)
        graph.erase_node(copy)
        for view in views:
            fill_value(view)


def sum_over_ranks(graph: torch.fx.Graph, term: torch.fx.Node, ranks: Ranks) -> torch.fx.Node:
    """The sum of each rank's tensor, at the graph's insertion point."""
    return _waited(graph, _OPS.all_reduce.default, (term, "sum", ranks.group))


def share_of_sum(graph: torch.fx.Graph, term: torch.fx.Node, ranks: Ranks) -> torch.fx.Node:
    """This rank's share of the rows of that sum; their number is a multiple of the ranks'."""
    args = (term, "sum", ranks.size, ranks.group)
    return _waited(graph, _OPS.reduce_scatter_tensor.default, args)


def all_shares(graph: torch.fx.Graph, share: torch.fx.Node, ranks: Ranks) -> torch.fx.Node:
    """The rows of all ranks, one rank after the other; each has as many."""
    args = (share, ranks.size, ranks.group)
    return _waited(graph, _OPS.all_gather_into_tensor.default, args)


def all_columns(graph: torch.fx.Graph, columns: torch.fx.Node, ranks: Ranks) -> torch.fx.Node:
    """The last dimension of all ranks, one rank after the other; each has as much of it.

    To reshape them would be to ask whether there is one row only, which no graph may depend on.
    """
    rows = columns if is_contiguous(columns) else call_method(graph, "contiguous", (columns,))
    gathered = all_shares(graph, rows, ranks)
    apart = call_method(graph, "unflatten", (gathered, 0, (ranks.size, -1)))
    parts = [call_function(graph, operator.getitem, (apart, rank)) for rank in range(ranks.size)]
    return call_function(graph, torch.cat, (parts, -1))


def _waited(graph: torch.fx.Graph, op: Any, args: Sequence[Any]) -> torch.fx.Node:
    started = call_function(graph, op, args)
    return call_function(graph, _OPS.wait_tensor.default, (started,))


def _arguments(node: torch.fx.Node, name: str, count: int) -> tuple[Any, ...] | None:
    """The arguments of a call of a functional collective, given by position."""
    packet = getattr(_OPS, name)
    if node.op != "call_function" or node.target not in (packet, packet.default):
        return None
    return tuple(node.args) if len(node.args) == count and not node.kwargs else None
