"""The residual of a model between its sums over ranks: where it is added to, and what reads it.

It goes from layer to layer, and norms give each next layer what it reads. Only where nobody else
reads the residual may each rank keep a share of its rows. What then becomes of it is not known
here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.fx.experimental.symbolic_shapes import statically_known_true

from passes.collectives import Exchange, reduced_over_ranks
from passes.matching import FLOATS, called, is_alike, is_contiguous, tensor_of, total
from passes.rms_norm_fp8 import norm_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch.fx

    from passes.reading import Memory


@dataclass(frozen=True, slots=True)
class RowNorm:
    """What is computed of each row by itself.

    Attributes:
        result: what others read.
        nodes: that make it, the result included, in order.
    """

    result: torch.fx.Node
    nodes: tuple[torch.fx.Node, ...]


@dataclass(frozen=True, slots=True)
class Site:
    """A sum over ranks, added to the residual.

    Attributes:
        reduced: the sum over ranks.
        stream: what goes on to the next layer, the residual included.
        residual: what is added; None where the sum starts the stream.
        norms: of the stream.
        others: whoever else reads the stream, except for the next sum.
    """

    reduced: Exchange
    stream: torch.fx.Node
    residual: torch.fx.Node | None
    norms: tuple[RowNorm, ...]
    others: frozenset[torch.fx.Node]


def chains_of(graph: torch.fx.Graph, memory: Memory) -> list[list[Site]]:
    """The sites of each residual that may be kept in shares, in the order of the graph.

    Args:
        graph: in which sums over ranks are functional.
        memory: what the graph does with its values.
    """
    return _chains(_sites(graph, memory))


def _sites(graph: torch.fx.Graph, memory: Memory) -> list[Site]:
    """All sums over ranks that could come in shares, in order."""
    reduced = [found for node in graph.nodes if (found := reduced_over_ranks(node)) is not None]
    norms = _norms(graph) if reduced else {}
    sites = [_site(found, norms) for found in reduced if found.ranks.size > 1]
    return [site for site in sites if _is_sound(site, memory)]


def _norms(graph: torch.fx.Graph) -> dict[torch.fx.Node, list[RowNorm]]:
    """The norms of a graph by what they read, of which nobody else reads the inside."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    found: dict[torch.fx.Node, list[RowNorm]] = {}
    for node in graph.nodes:
        norm = norm_of(node)
        if norm is not None:
            source, nodes = norm.source, norm.nodes
        elif called(node) in ("rms_norm", "layer_norm") and _is_of_rows(node):
            source, nodes = node.args[0], frozenset({node})
        else:
            continue
        if all(nodes.issuperset(inner.users) for inner in nodes - {node}):
            inside = tuple(sorted(nodes, key=order.__getitem__))
            found.setdefault(source, []).append(RowNorm(node, inside))
    return found


def _is_of_rows(node: torch.fx.Node) -> bool:
    """Whether a norm of torch is one over the last dimension."""
    source = node.args[0] if node.args else None
    shape = node.args[1] if len(node.args) > 1 else node.kwargs.get("normalized_shape")
    value = tensor_of(source)
    if value is None or not isinstance(shape, (tuple, list)) or len(shape) != 1:
        return False
    return is_contiguous(node) and is_contiguous(source)  # type: ignore[arg-type]


def _site(reduced: Exchange, norms: dict[torch.fx.Node, list[RowNorm]]) -> Site:
    stream, residual = reduced.result, None
    users = list(stream.users)
    terms = total(users[0]) if len(users) == 1 else None
    if terms is not None and terms[0] is not terms[1]:
        first, second = terms
        other = second if first is stream else first
        if _are_alike(users[0], stream, other):
            stream, residual = users[0], other
    held = tuple(norms.get(stream, ()))
    inside = {node for norm in held for node in norm.nodes}
    return Site(reduced, stream, residual, held, frozenset(stream.users) - inside)


def _are_alike(*nodes: Any) -> bool:
    values = [tensor_of(node) for node in nodes]
    first = values[0]
    return first is not None and all(
        value is not None and is_alike(value, first) for value in values
    )


def _is_sound(site: Site, memory: Memory) -> bool:
    """Whether the values of a site may be made in another way."""
    inside = [node for norm in site.norms for node in norm.nodes]
    nodes = [site.reduced.source, *site.reduced.nodes, site.stream, *inside]
    if site.residual is not None:
        nodes.append(site.residual)
    values = [node.meta.get("example_value") for node in nodes]
    value = tensor_of(site.stream)
    if value is None or value.dim() < 2 or value.dtype not in FLOATS:
        return False
    width: Any = value.shape[-1]
    if not isinstance(width, int) or not is_contiguous(site.stream):
        return False
    if any(statically_known_true(size == 0) for size in value.shape):
        return False
    is_trained = any(getattr(one, "requires_grad", False) for one in values)
    return not is_trained and not any(memory.may_be_written(node) for node in nodes)


def _chains(sites: Iterable[Site]) -> list[list[Site]]:
    """Sites by the stream that goes through them, without those that would gain nothing.

    Only the last one of a chain may have readers besides the next sum and its norms: there all
    ranks put the stream itself together, in place of what its norms give.
    """
    chains: list[list[Site]] = []
    for site in sites:
        last = chains[-1][-1] if chains else None
        goes_on = (
            last is not None
            and last.stream is site.residual
            and last.reduced.ranks == site.reduced.ranks
            and last.others == {site.stream}
        )
        if goes_on:
            chains[-1].append(site)
        else:
            chains.append([site])
    return [chain for chain in chains if any(site.norms for site in in_shares(chain))]


def in_shares(chain: Sequence[Site]) -> Sequence[Site]:
    """The sites of a chain whose norms are computed in shares."""
    return chain[:-1] if chain[-1].others else chain
