"""Cut a Dynamo graph at its splitting ops into pieces and eager sections.

A *piece* is what a compiler gets and a CUDA graph can hold; an *eager section* is one or more
splitting ops that run between two pieces. Only tensors and integers cross a cut, original order
is kept, and no piece is left that merely allocates or views. The split knows nothing of modes,
compilers or graphs.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from compile_backend.op_names import SplittingOps, op_name
from compile_backend.split_regions import Region, RegionWriter, region_of_nodes
from compile_backend.split_views import ALLOCATIONS, call_name, is_trivial, views_again
from compile_backend.torch_internals.graphs import is_number_input
from compile_backend.torch_internals.narrowing import is_one_of, unbound_symbols

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Constant:
    """A graph output that is no value of the graph."""

    value: Any


@dataclass(frozen=True, slots=True)
class Computed:
    """A graph output that is a number, computed from the graph's sizes alone.

    Attributes:
        module: takes the inputs in order, returns a tuple of the number.
        inputs: names of the sizes it is computed from.
        value: the symbolic number.
    """

    module: torch.fx.GraphModule
    inputs: tuple[str, ...]
    value: Any


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the graph that runs as one.

    Attributes:
        name: unique in its graph: `piece_0`, `eager_1`, ...
        is_piece: whether it is compiled and captured; else it is an eager section.
        module: takes the inputs in order, returns a tuple of the outputs.
        inputs: names of the values it reads.
        outputs: names of the values that later sections or the caller read.
        ops: names of the splitting ops in it; empty for a piece.
    """

    name: str
    is_piece: bool
    module: torch.fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    ops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SplitGraph:
    """A graph as straight-line sections over named values.

    Attributes:
        inputs: names of the graph's inputs, in call order.
        sections: in the order they run.
        outputs: names of the values it returns, or what it returns otherwise.
        values: the fake tensor or integer that stands for each named value.
    """

    inputs: tuple[str, ...]
    sections: tuple[Section, ...]
    outputs: tuple[str | Constant | Computed, ...]
    values: Mapping[str, Any]

    @property
    def pieces(self) -> tuple[Section, ...]:
        """The sections that are compiled."""
        return tuple(section for section in self.sections if section.is_piece)

    @property
    def eager_sections(self) -> tuple[Section, ...]:
        """The sections that run the splitting ops."""
        return tuple(section for section in self.sections if not section.is_piece)


def split_graph(
    graph_module: torch.fx.GraphModule, splitting_ops: SplittingOps, *, keep_grad_mode: bool = True
) -> SplitGraph:
    """Cut `graph_module` at `splitting_ops`.

    Args:
        graph_module: a Dynamo graph whose sizes and tuples were taken apart; not changed.
        splitting_ops: where to cut.
        keep_grad_mode: whether sections switch gradients as the graph does; inference runs
            without gradients throughout.
    """
    graph = graph_module.graph
    placement = _place_nodes(graph, splitting_ops.cuts)
    groups = _ordered_groups(graph, placement)
    returned = _returned(graph)
    again = [views_again(nodes) if is_piece else frozenset() for is_piece, nodes in groups]
    readers = _readers(groups, again, returned)
    regions = region_of_nodes(graph, keep_grad_mode=keep_grad_mode)
    sizes = {
        node: node.meta.get("example_value") for node in graph.nodes if node.op == "placeholder"
    }
    sections = []
    for index, (is_piece, nodes) in enumerate(groups):
        writer = _SectionWriter(graph_module, regions, again[index])
        for node in nodes:
            writer.add(node)
        if is_piece:
            writer.take_sizes(sizes)
        outputs = tuple(node for node in nodes if readers.get(node, -1) > index)
        name = f"{'piece' if is_piece else 'eager'}_{index}"
        ops = tuple(str(op_name(node)) for node in nodes if splitting_ops.cuts(node))
        sections.append(writer.section(name, is_piece=is_piece, outputs=outputs, ops=ops))
    return SplitGraph(
        inputs=tuple(node.name for node in graph.nodes if node.op == "placeholder"),
        sections=tuple(sections),
        outputs=tuple(_output(graph_module, item) for item in returned),
        values={node.name: node.meta.get("example_value") for node in graph.nodes},
    )


# --- which section each node belongs to ------------------------------------------------------


def _place_nodes(
    graph: torch.fx.Graph, cuts: Callable[[torch.fx.Node], bool]
) -> dict[torch.fx.Node, int]:
    """A section number for each node that runs: even for pieces, odd for eager sections.

    Left out are nodes that every reader gets a copy of: attributes, and integers that are
    computed from the graph's own sizes.
    """
    placement: dict[torch.fx.Node, int] = {}
    current = 0
    for node in graph.nodes:
        if not _runs_once(node):
            continue
        producers = [placement[arg] for arg in node.all_input_nodes if arg in placement]
        if _follows_producer(node) and producers:
            placement[node] = max(producers)
        elif cuts(node):
            current += 1 - current % 2
            placement[node] = current
        else:
            current += current % 2
            placement[node] = current
    _dissolve_trivial_pieces(placement, current)
    return placement


def _runs_once(node: torch.fx.Node) -> bool:
    return node.op.startswith("call_") and not is_copied_scalar(node) and Region.of(node) is None


def is_copied_scalar(node: torch.fx.Node) -> bool:
    """Whether a node computes a number from the graph's own sizes and numbers alone."""
    value = node.meta.get("example_value")
    if not isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return False
    if node.target == "item":  # a caller's number, read where it is needed
        return all(is_number_input(arg) for arg in node.all_input_nodes)
    if node.op != "call_function" or node.kwargs:
        return False
    return all(
        is_copied_scalar(arg)
        or (
            arg.op == "placeholder" and not isinstance(arg.meta.get("example_value"), torch.Tensor)
        )
        for arg in node.all_input_nodes
    )


def _follows_producer(node: torch.fx.Node) -> bool:
    """Element picks of a multi-output op and sizes of a tensor stay with what made them."""
    value = node.meta.get("example_value")
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return True
    return node.target is operator.getitem and not isinstance(
        node.args[0].meta.get("example_value"),  # type: ignore[union-attr]
        torch.Tensor,
    )


def _dissolve_trivial_pieces(placement: dict[torch.fx.Node, int], last: int) -> None:
    """Move nodes out of pieces that only allocate and view.

    Each goes to the piece before, where its inputs allow, else into the eager section before (or,
    at the very start, after).
    """
    members: dict[int, list[torch.fx.Node]] = {}
    for node, number in placement.items():
        members.setdefault(number, []).append(node)
    earlier_piece: int | None = None
    for number in range(0, last + 1, 2):
        nodes = members.get(number, [])
        if not nodes or not all(is_trivial(node) for node in nodes) or last == 0:
            earlier_piece = number if nodes else earlier_piece
            continue
        for node in nodes:
            needed = max((placement[a] for a in node.all_input_nodes if a in placement), default=0)
            if earlier_piece is not None and needed <= earlier_piece:
                placement[node] = earlier_piece
            else:
                placement[node] = max(number - 1, 1)


def unwritten_outputs(section: Section) -> frozenset[int]:
    """Positions of a section's outputs that it allocates without writing them."""
    output = next(node for node in reversed(section.module.graph.nodes) if node.op == "output")
    nodes: Any = output.args[0]
    return frozenset(i for i, node in enumerate(nodes) if call_name(node) in ALLOCATIONS)


def _ordered_groups(
    graph: torch.fx.Graph, placement: dict[torch.fx.Node, int]
) -> list[tuple[bool, list[torch.fx.Node]]]:
    """The non-empty sections in order; eager sections that became neighbours are one."""
    members: dict[int, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if node in placement:
            members.setdefault(placement[node], []).append(node)
    groups: list[tuple[bool, list[torch.fx.Node]]] = []
    for number in sorted(members):
        is_piece = number % 2 == 0
        if groups and not is_piece and not groups[-1][0]:
            groups[-1][1].extend(members[number])
        else:
            groups.append((is_piece, members[number]))
    return groups


# --- what crosses the cuts -------------------------------------------------------------------


def _returned(graph: torch.fx.Graph) -> tuple[Any, ...]:
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    returned = output.args[0]
    return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)


def _output(graph_module: torch.fx.GraphModule, item: Any) -> str | Constant | Computed:
    if not isinstance(item, torch.fx.Node):
        return Constant(item)
    if not is_copied_scalar(item):
        return str(item.name)
    writer = _SectionWriter(graph_module, {})
    writer.add(item)
    section = writer.section("computed", is_piece=False, outputs=(item,), ops=())
    return Computed(section.module, section.inputs, item.meta.get("example_value"))


def _readers(
    groups: list[tuple[bool, list[torch.fx.Node]]],
    again: Sequence[frozenset[torch.fx.Node]],
    returned: Iterable[Any],
) -> dict[torch.fx.Node, int]:
    """The last section that reads each node; past the end for what the graph returns."""
    readers: dict[torch.fx.Node, int] = {}

    def read(node: torch.fx.Node, index: int) -> None:
        is_again = index < len(again) and node in again[index]
        if not is_again:
            readers[node] = max(index, readers.get(node, -1))
        if is_again or is_copied_scalar(node):
            for arg in node.all_input_nodes:
                read(arg, index)

    for index, (_, nodes) in enumerate(groups):
        for node in nodes:
            for arg in node.all_input_nodes:
                read(arg, index)
    for item in returned:
        if isinstance(item, torch.fx.Node):
            read(item, len(groups))
    return readers


class _SectionWriter:
    """Writes one section as a graph of its own."""

    def __init__(
        self,
        graph_module: torch.fx.GraphModule,
        regions: Mapping[torch.fx.Node, Region],
        again: frozenset[torch.fx.Node] = frozenset(),
    ) -> None:
        self._graph_module = graph_module
        self._again = again
        self._graph = torch.fx.Graph()
        self._copies: dict[torch.fx.Node, torch.fx.Node] = {}
        self._inputs: list[torch.fx.Node] = []
        self._last_placeholder: torch.fx.Node | None = None
        self._body = RegionWriter(self._graph, regions)

    def add(self, node: torch.fx.Node) -> None:
        for arg in node.all_input_nodes:
            self._provide(arg)
        self._body.enter(node)
        self._copies[node] = self._graph.node_copy(node, self._copies.__getitem__)

    def _provide(self, node: torch.fx.Node) -> None:
        if node in self._copies:
            return
        if node.op == "get_attr":
            self._copies[node] = self._graph.node_copy(node)
        elif is_copied_scalar(node) or node in self._again:
            for arg in node.all_input_nodes:
                self._provide(arg)
            self._copies[node] = self._graph.node_copy(node, self._copies.__getitem__)
        else:
            self._copies[node] = self._placeholder(node)
            self._inputs.append(node)

    def _placeholder(self, node: torch.fx.Node) -> torch.fx.Node:
        """An input named after the value; inputs stand before all else, in order of first use."""
        last = self._last_placeholder
        place = (
            self._graph.inserting_after(last)
            if last is not None
            else self._graph.inserting_before(next(iter(self._graph.nodes), None))
        )
        with place:
            # With a name: to find one out of a long target takes longer than all the rest.
            copy = self._graph.create_node("placeholder", node.name, name=node.name)
        copy.meta = dict(node.meta)
        self._last_placeholder = copy
        return copy

    def take_sizes(self, graph_inputs: Mapping[torch.fx.Node, Any]) -> None:
        """Take every free size as an input that the others only hold a multiple or a sum of.

        A compiler works sizes out from the inputs, and cannot undo arithmetic.
        """
        missing = unbound_symbols(node.meta.get("example_value") for node in self._inputs)
        for node, value in graph_inputs.items():
            if isinstance(value, torch.SymInt) and is_one_of(value, missing):
                self._provide(node)

    def section(
        self,
        name: str,
        *,
        is_piece: bool,
        outputs: tuple[torch.fx.Node, ...],
        ops: tuple[str, ...],
    ) -> Section:
        self._body.close()
        self._graph.output(tuple(self._copies[node] for node in outputs))
        return Section(
            name=name,
            is_piece=is_piece,
            module=torch.fx.GraphModule(self._graph_module, self._graph, class_name=name),
            inputs=tuple(node.name for node in self._inputs),
            outputs=tuple(node.name for node in outputs),
            ops=ops,
        )
