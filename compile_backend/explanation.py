"""What `explain` returns: data, and how people and machines read it.

It is read off plans by others; this file works nothing out.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from compile_backend.batch import BatchDescriptor
from compile_backend.errors import number_of
from compile_backend.reports import as_text, columns, compact_sizes, facts, key_text, stack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

    from compile_backend.config import CUDAGraphMode
    from compile_backend.resolve import Downgrade
    from compile_backend.sizes import TokenRange
    from compile_backend.support import AttentionCGSupport


@dataclass(frozen=True, slots=True, kw_only=True)
class DistinctPiece:
    """Equal pieces of one graph, which are compiled together.

    Attributes:
        names: of the pieces, in the order they run.
        num_ops: calls of ops in each.
        uncapturable: why no graph can hold them; None where one can.
        compiled_for: the numbers of tokens that they are compiled for by themselves, besides for
            all.
        unspecialised: why not, where they could be; None otherwise.
    """

    names: tuple[str, ...]
    num_ops: int
    uncapturable: str | None
    compiled_for: tuple[TokenRange, ...] = ()
    unspecialised: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Splitting ops that run together between two pieces, here or in several places.

    Attributes:
        ops: names of the splitting ops, in the order they run.
        names: of the eager sections that run just these.
    """

    ops: tuple[str, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionOutline:
    """One section, as it runs.

    Attributes:
        name: as in `DistinctPiece` and `Cut`.
        is_piece: whether it is compiled; else it runs eagerly.
        calls: how often each op is called, by name; the fused ones first.
        num_fused: how many of these calls are ops that a fusion made.
        code: what it computes, as FX writes it.
    """

    name: str
    is_piece: bool
    calls: Mapping[str, int]
    num_fused: int
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySizes:
    """Keys of one mode that differ in their number of tokens only.

    Attributes:
        mode: FULL or PIECEWISE.
        uniform: whether they are for uniform decode batches only.
        num_tokens: ascending.
    """

    mode: CUDAGraphMode
    uniform: bool
    num_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphExplanation:
    """What one Dynamo graph becomes.

    Attributes:
        pieces: what is compiled.
        cuts: what runs eagerly in between.
        inputs: how many graph inputs there are of each class.
        caller_inputs: how the user's code writes the tensors that are copied in every step.
        support: the level of each splitting op.
        device: where graphs are captured.
        mode_asked: the mode asked for, or the default.
        mode_resolved: the mode that calls run under.
        downgrades: each lowering of the mode, with its reason.
        notes: further reasons.
        keys: which sizes have graphs.
        call: the batch that the explained call is.
        call_mode: what the explained call would run at.
        has_free_sizes: whether one compiled graph serves calls of several sizes.
        num_graphs: CUDA graphs that this compiled graph holds once every key was met.
        passes: how many places each rewrite of the graph changed, in the order they ran.
        num_partitions: partitions that Inductor is to make, if it keeps the order of ops; 0 where
            the graph is cut before. `stats` tells how many it made.
        sections: pieces and eager sections, in the order they run.
        code_before: the graph as Dynamo made it, as FX writes it.
        code_after: the same behind the passes.
    """

    pieces: tuple[DistinctPiece, ...]
    cuts: tuple[Cut, ...]
    inputs: Mapping[str, int]
    caller_inputs: tuple[str, ...]
    support: Mapping[str, AttentionCGSupport]
    device: str
    mode_asked: CUDAGraphMode
    mode_resolved: CUDAGraphMode
    downgrades: tuple[Downgrade, ...]
    notes: tuple[str, ...]
    keys: tuple[KeySizes, ...]
    call: BatchDescriptor
    call_mode: CUDAGraphMode
    has_free_sizes: bool
    num_graphs: int
    passes: Mapping[str, int]
    num_partitions: int = 0
    sections: tuple[SectionOutline, ...] = ()
    code_before: str = ""
    code_after: str = ""

    @property
    def num_pieces(self) -> int:
        """Pieces, equal ones counted each."""
        return sum(len(piece.names) for piece in self.pieces)

    @property
    def num_compiles(self) -> int:
        """Times that a compiler is run: on each distinct piece, and again for each range.

        Just once where Inductor parts the graph.
        """
        if self.num_partitions:
            return 1
        return sum(1 + len(piece.compiled_for) for piece in self.pieces)

    @property
    def num_eager_sections(self) -> int:
        """Eager sections between the pieces."""
        return sum(len(cut.names) for cut in self.cuts)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the backend would do with a call; printed, it is a report.

    Attributes:
        graphs: one for each graph that Dynamo makes; more than one after a graph break.
    """

    graphs: tuple[GraphExplanation, ...]

    @property
    def num_pieces(self) -> int:
        """Pieces of all graphs."""
        return sum(graph.num_pieces for graph in self.graphs)

    @property
    def num_compiles(self) -> int:
        """Times that a compiler is run, over all graphs."""
        return sum(graph.num_compiles for graph in self.graphs)

    @property
    def num_graphs(self) -> int:
        """CUDA graphs that will exist once every key was met."""
        return sum(graph.num_graphs for graph in self.graphs)

    def as_dict(self) -> dict[str, Any]:
        """The explanation as plain types, for JSON."""
        plain: dict[str, Any] = _plain(self)
        return {**plain, "num_graphs": self.num_graphs}

    def __rich__(self) -> RenderableType:
        """Tables for a terminal."""
        numbered = enumerate(self.graphs, start=1)
        parts = [part for number, graph in numbered for part in _tables(graph, number)]
        return stack(parts or ["Dynamo makes no graph of this call: nothing would be compiled."])

    def __str__(self) -> str:
        return as_text(self.__rich__())


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, BatchDescriptor):
        return {name: _plain(entry) for name, entry in value._asdict().items()}
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _tables(graph: GraphExplanation, number: int) -> list[RenderableType]:
    sizes = "free" if graph.has_free_sizes else "fixed: calls of other sizes are compiled anew"
    summary = {
        "mode asked": graph.mode_asked.name,
        "mode resolved": graph.mode_resolved.name,
        "reasons": (*map(str, graph.downgrades), *graph.notes),
        "device": graph.device,
        "passes": [f"{name}: {changed}" for name, changed in graph.passes.items()],
        "split by": (
            f"Inductor, into {number_of('partition', graph.num_partitions)} if it keeps the order"
            if graph.num_partitions
            else "this backend, before Inductor compiles"
        ),
        "pieces": f"{graph.num_pieces}, {len(graph.pieces)} of them distinct",
        "compiles": graph.num_compiles,
        "eager sections": graph.num_eager_sections,
        "inputs": [f"{kind}: {count}" for kind, count in graph.inputs.items()],
        "caller's tensors": graph.caller_inputs,
        "sizes": sizes,
        "this call": f"{key_text(graph.call)}: runs at {graph.call_mode.name}",
        "keys": [_sizes_text(keys) for keys in graph.keys],
        "graphs planned": graph.num_graphs,
    }
    pieces = columns(
        "Pieces",
        ("first", "equal ones", "ops", "can be captured", "compiled for tokens"),
        (
            (
                piece.names[0],
                len(piece.names),
                piece.num_ops,
                f"no: {piece.uncapturable}" if piece.uncapturable else "yes",
                _compiled_for(piece),
            )
            for piece in graph.pieces
        ),
    )
    cuts = columns(
        "Eager sections",
        ("cut by", "support", "sections"),
        (
            (
                "\n".join(cut.ops),
                "\n".join(graph.support[op].name for op in cut.ops),
                len(cut.names),
            )
            for cut in graph.cuts
        ),
    )
    tables: list[RenderableType] = [facts(f"Graph {number}", summary), pieces]
    return [*tables, cuts] if graph.cuts else tables


def _compiled_for(piece: DistinctPiece) -> str:
    if piece.unspecialised is not None:
        return f"any; it {piece.unspecialised}"
    return ", ".join(("any", *map(str, piece.compiled_for)))


def _sizes_text(keys: KeySizes) -> str:
    batches = "uniform decode" if keys.uniform else "any batch"
    return f"{keys.mode.name}, {batches}: {compact_sizes(keys.num_tokens)}"
