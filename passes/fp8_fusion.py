"""One op for a value and its quantisations: what both fusions share.

A value is fused only if nobody but quantisations of one recipe reads it: then it is never written
to memory at all. Several equal quantisations, one in front of each linear layer, become one.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from passes.building import call_function, call_method, refresh
from passes.fp8_quantisation import PER_TENSOR, STATIC, Quantisation, quantisations
from passes.matching import is_contiguous, keeps_rows, new_sizes
from passes.reading import Memory, memory_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Found = Mapping[torch.fx.Node, Sequence[Quantisation]]


@dataclass(frozen=True, slots=True)
class Group:
    """A value and all that reads it.

    Attributes:
        made: the nodes that make the value, itself included, none of which anyone else reads.
        quantised: each quantisation, with the changes of shape before it, in order.
    """

    made: frozenset[torch.fx.Node]
    quantised: tuple[tuple[Quantisation, tuple[torch.fx.Node, ...]], ...]

    @property
    def first(self) -> Quantisation:
        """Any of the quantisations: their recipes are equal."""
        return self.quantised[0][0]

    @property
    def scales(self) -> list[torch.fx.Node]:
        """The static scales, each once."""
        if self.first.kind != STATIC:
            return []
        return list(dict.fromkeys(one.scale for one, _ in self.quantised))

    @property
    def results(self) -> list[torch.fx.Node]:
        """The nodes that others read."""
        results = [one.result for one, _ in self.quantised]
        if self.first.kind != STATIC:
            results += [one.scale for one, _ in self.quantised]
        return list(dict.fromkeys(results))

    @property
    def nodes(self) -> frozenset[torch.fx.Node]:
        """All nodes that the op stands for, results included."""
        inner = (node for one, views in self.quantised for node in (*one.inner, *views))
        return self.made | frozenset(inner) | frozenset(self.results)


def fuse_each(
    graph: torch.fx.Graph, fuse_at: Callable[[torch.fx.Node, Found, Memory], set[int | None]]
) -> int:
    """Try every node; return how many were fused.

    Args:
        graph: to rewrite.
        fuse_at: given a node, all quantisations of the graph and its memory: fuses what the node
            gives, and returns what `fuse` does; an empty set where it fuses nothing.
    """
    found, memory = quantisations(graph), Memory.of(graph)
    stale: set[int | None] = set()
    fused = 0
    for node in list(graph.nodes):
        done = fuse_at(node, found, memory)
        stale |= done
        fused += bool(done)
    refresh(graph, stale)
    return fused


def group_of(
    value: torch.fx.Node,
    made: frozenset[torch.fx.Node],
    found: Found,
    memory: Memory,
) -> Group | None:
    """The group of a value; None where it may not be fused.

    Args:
        value: what is quantised.
        made: the nodes that make it, itself included.
        found: all quantisations of the graph.
        memory: of the graph.
    """
    quantised = tuple(_reached(value, (), found))
    if not quantised or len({one.recipe for one, _ in quantised}) > 1 or not is_contiguous(value):
        return None
    group = Group(made, quantised)
    nodes, results = group.nodes, frozenset(group.results)
    is_closed = all(nodes.issuperset(node.users) for node in nodes - results)
    needs_grad = any(
        getattr(node.meta.get("example_value"), "requires_grad", False) for node in nodes
    )
    is_written = any(memory.may_be_written(node) for node in nodes)
    return group if is_closed and not needs_grad and not is_written else None


def _reached(
    node: torch.fx.Node,
    views: tuple[torch.fx.Node, ...],
    found: Found,
) -> list[tuple[Quantisation, tuple[torch.fx.Node, ...]]]:
    """The quantisations of a node and of what only has another shape."""
    reached = [(one, views) for one in found.get(node, ())]
    for user in node.users:
        if keeps_rows(user) is node:
            reached += _reached(user, (*views, user), found)
    return reached


def place_of(
    group: Group,
    needed: Sequence[torch.fx.Node],
    memory: Memory,
    summed: torch.fx.Node | None = None,
) -> torch.fx.Node | None:
    """The node in front of which the op of a group can stand; None where there is no such place.

    That is the first to read what the op gives, if all that the op reads is there by then.

    Args:
        group: what the op stands for.
        needed: what it reads, besides scales and sizes.
        memory: of the graph.
        summed: the sum, if the op makes that, too.
    """
    order = {node: number for number, node in enumerate(group.first.result.graph.nodes)}
    given = group.results if summed is None else [summed, *group.results]
    readers = {user for node in given for user in node.users} - group.nodes
    if not readers:
        return None
    before = min(readers, key=order.__getitem__)
    reads = [*needed, *group.scales]
    if any(memory.may_be_written(node) for node in reads):
        return None
    sizes = [
        size
        for _, views in group.quantised
        for view in views
        for size in new_sizes(view)
        if isinstance(size, torch.fx.Node)
    ]
    return before if all(order[node] < order[before] for node in (*reads, *sizes)) else None


def fuse(
    group: Group,
    op: Any,
    args: Sequence[Any],
    before: torch.fx.Node,
    summed: torch.fx.Node | None = None,
) -> set[int | None]:
    """Put one op in the place of a group.

    Args:
        group: what it stands for.
        op: gives `[sum?, quantised..., scale?]`.
        args: of the op.
        before: the node in front of which the op goes.
        summed: whose place the sum takes.

    Returns:
        Identities of memory that is no more, for `refresh`.
    """
    graph = before.graph
    stale: set[int | None] = set()
    with graph.inserting_before(before):
        made = call_function(graph, op, args)
        count = len(made.meta["example_value"])
        parts = [call_function(graph, operator.getitem, (made, index)) for index in range(count)]
        replaced: list[tuple[torch.fx.Node, torch.fx.Node]] = []
        if summed is not None:
            replaced.append((summed, parts.pop(0)))
        is_static = group.first.kind == STATIC
        scales = group.scales
        for one, views in group.quantised:
            part = parts[scales.index(one.scale)] if is_static else parts[0]
            replaced.append((one.result, _viewed(graph, part, views)))
            if not is_static:
                row = 1 if one.kind != PER_TENSOR else None
                scale = parts[1] if row is None else _viewed(graph, parts[1], views, row)
                replaced.append((one.scale, scale))
    for old, new in dict(replaced).items():
        stale.add(memory_of(old))
        old.replace_all_uses_with(new)
    for node in reversed(list(graph.nodes)):
        if (node in group.nodes or node is summed) and not node.users:
            graph.erase_node(node)
    return stale


def _viewed(
    graph: torch.fx.Graph,
    node: torch.fx.Node,
    views: Sequence[torch.fx.Node],
    row: int | None = None,
) -> torch.fx.Node:
    """The same changes of shape, of a value whose rows have size `row` where that is given."""
    for view in views:
        sizes = new_sizes(view)
        last = sizes[-1] if row is None else row
        node = call_method(graph, "reshape", (node, *sizes[:-1], last))
    return node
