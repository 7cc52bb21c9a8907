"""Between attention and dense layers each rank keeps a share of the tokens, instead of all.

Behind a row-wise linear layer all ranks add up their parts, and then each computes the same sum
with the residual and the same norm. A sum of which every rank gets only its rows, and the rows of
all ranks put together where the next layer needs them, send as much as that sum did; what is
between them is done once instead of by everyone, and the residual stays in shares from layer to
layer.

Before::

    h = residual + wait_tensor(all_reduce(linear(x, w), "sum", group))
    n = weight * norm(h)
    q = linear(n, w_q)

After::

    s = wait_tensor(reduce_scatter_tensor(linear(padded(x), w), "sum", 2, group))
    h = residual_share + s                      # [rows / 2, hidden]
    n = weight * norm(h)
    q = linear(wait_tensor(all_gather_into_tensor(n, 2, group))[:rows], w_q)

Rows are filled up to a multiple of the ranks within the graph, whatever their number, so no size
needs code or a graph of its own. What is filled up repeats the last row, and nobody reads it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from passes.building import call_function, call_method, fill_value, refresh
from passes.collectives import all_shares, share_of_sum, take_apart_sums_in_place
from passes.matching import called
from passes.reading import Memory, memory_of
from passes.residual import chains_of, in_shares

if TYPE_CHECKING:
    from collections.abc import Sequence

    from passes.residual import RowNorm, Site


class SequenceParallelismPass:
    """Changes numerics: sums over ranks may have another order, and products other kernels.

    It follows a residual stream from one sum over ranks to the next, through RMSNorm as
    transformers writes it, `rms_norm` and `layer_norm`. Other reductions are left alone, and so
    are sums that something else reads, those under which gradients flow, and those without a norm
    that would get cheaper.
    """

    name = "sequence_parallelism"

    def __call__(self, graph: torch.fx.Graph) -> int:
        """Rewrite `graph` in place; return the number of sums that come in shares."""
        take_apart_sums_in_place(graph)
        memory = Memory.of(graph)
        stale: set[int | None] = set()
        changed = 0
        for chain in chains_of(graph, memory):
            stale |= _rewrite(graph, chain)
            changed += len(chain)
        refresh(graph, stale)
        return changed

    def uuid(self) -> str:
        """Identifies this version of the rewrite."""
        return "sequence_parallelism-1"


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a tensor, and how many of them each rank gets.

    Attributes:
        sizes: of all dimensions but the last one; numbers or nodes.
        number: of rows.
        share: of each rank, filled up; at least 2, since code for 1 row is not that for more.
        num_ranks: ranks.
    """

    sizes: tuple[Any, ...]
    number: Any
    share: Any
    num_ranks: int

    @classmethod
    def of(cls, graph: torch.fx.Graph, node: torch.fx.Node, num_ranks: int) -> _Rows:
        """The rows of a node's value."""
        value = node.meta["example_value"]
        # A product must not be computed to tell how many rows it has.
        asked = node.args[0] if called(node) == "linear" and node.args else node
        sizes = tuple(
            size if isinstance(size, int) else call_method(graph, "size", (asked, dim))
            for dim, size in enumerate(value.shape[:-1])
        )
        number: Any = 1
        for size in sizes:
            number = _computed(graph, operator.mul, number, size)
        share = _computed(graph, operator.add, number, num_ranks - 1)
        share = _computed(graph, operator.floordiv, share, num_ranks)
        share = _computed(graph, torch.sym_max, share, 2)
        return cls(sizes, number, share, num_ranks)

    @property
    def are_even(self) -> bool:
        """Whether it is known that nothing is filled up."""
        return isinstance(self.number, int) and self.number == self.share * self.num_ranks


def _computed(graph: torch.fx.Graph, function: Any, a: Any, b: Any) -> Any:
    """A number, or a node that computes it."""
    if isinstance(a, int) and isinstance(b, int):
        return function(a, b)
    if function is operator.mul and 1 in [one for one in (a, b) if isinstance(one, int)]:
        return b if isinstance(a, int) else a
    return call_function(graph, function, (a, b))


def _rewrite(graph: torch.fx.Graph, chain: Sequence[Site]) -> set[int | None]:
    """Put shares in the place of a chain; returns memory that is no more, for `refresh`."""
    stale: set[int | None] = set()
    kept = in_shares(chain)
    share: torch.fx.Node | None = None
    for site in chain:
        # What a product reads may be written behind it, and autocast may end there.
        with graph.inserting_before(_begin(site)):
            rows = _Rows.of(graph, site.reduced.source, site.reduced.ranks.size)
            filled_up = _filled_up(graph, site.reduced.source, rows)
        with graph.inserting_before(site.stream):
            share = _stream_share(graph, site, rows, filled_up, share)
            if site not in kept:
                whole = _gathered(graph, site, rows, share)
                stale.add(memory_of(site.stream))
                site.stream.replace_all_uses_with(whole)
                break
        for norm in site.norms:
            with graph.inserting_before(norm.result):
                normed = _copied(graph, norm, site.stream, share)
                whole = _gathered(graph, site, rows, normed)
            stale.add(memory_of(norm.result))
            norm.result.replace_all_uses_with(whole)
    unread = {node for site in chain for node in (*site.reduced.nodes, site.stream)}
    unread |= {site.reduced.source for site in chain}
    unread |= {node for site in kept for norm in site.norms for node in norm.nodes}
    for node in reversed(list(graph.nodes)):
        if node in unread and node.op.startswith("call_") and not node.users:
            graph.erase_node(node)
    return stale


def _begin(site: Site) -> torch.fx.Node:
    """Where the term of this rank is made, or its sum is begun if it stays as it is."""
    term, summed = site.reduced.source, site.reduced.result.args[0]
    assert isinstance(summed, torch.fx.Node)
    return term if _is_product(term) else summed


def _is_product(term: torch.fx.Node) -> bool:
    """Whether a term is a product that nobody else reads, which may be made of more rows."""
    return called(term) == "linear" and len(term.users) == 1 and not term.kwargs


def _stream_share(
    graph: torch.fx.Graph,
    site: Site,
    rows: _Rows,
    filled_up: torch.fx.Node,
    residual_share: torch.fx.Node | None,
) -> torch.fx.Node:
    """This rank's rows of the stream behind a site, with as many dimensions as all of it.

    Args:
        graph: with its insertion point.
        site: makes the stream.
        rows: of the stream.
        filled_up: this rank's term.
        residual_share: of the stream before; None where all ranks have all of it, if anything.
    """
    value, ranks = site.stream.meta["example_value"], site.reduced.ranks
    last = int(value.shape[-1])
    ones = (1,) * (value.dim() - 2)
    part = share_of_sum(graph, filled_up, ranks)
    part = call_method(graph, "reshape", (part, (*ones, -1, last)))
    if site.residual is None:
        return part
    if residual_share is None:
        whole = call_method(graph, "reshape", (site.residual, (-1, last)))
        start = _computed(graph, operator.mul, ranks.rank, rows.share)
        end = _computed(graph, operator.mul, ranks.rank + 1, rows.share)
        own = _picked(graph, whole, rows, start, end)
        residual_share = call_method(graph, "reshape", (own, (*ones, -1, last)))
    is_first = site.stream.args[0] is site.reduced.result
    terms = (part, residual_share) if is_first else (residual_share, part)
    return call_function(graph, torch.add, terms)


def _filled_up(graph: torch.fx.Graph, term: torch.fx.Node, rows: _Rows) -> torch.fx.Node:
    """The rows of this rank's term, their number a multiple of the ranks.

    Where a product makes them, its input is filled up, which is no larger where it is cut between
    ranks, and often made by a kernel that writes the rows anyway.
    """
    end = _computed(graph, operator.mul, rows.share, rows.num_ranks)
    last = int(term.meta["example_value"].shape[-1])
    if not _is_product(term):
        flat = call_method(graph, "reshape", (term, (-1, last)))
        return flat if rows.are_even else _picked(graph, flat, rows, 0, end)
    source, *others = term.args
    assert isinstance(source, torch.fx.Node)
    width = source.meta["example_value"].shape[-1]
    flat = call_method(graph, "reshape", (source, (-1, width)))
    if not rows.are_even:
        flat = _picked(graph, flat, rows, 0, end)
    made = graph.call_function(torch.nn.functional.linear, (flat, *others))
    value = term.meta["example_value"]
    made.meta["example_value"] = value.new_empty((flat.meta["example_value"].shape[0], last))
    return made


def _picked(
    graph: torch.fx.Graph, flat: torch.fx.Node, rows: _Rows, start: Any, end: Any
) -> torch.fx.Node:
    """Rows from one number to another, the last one again for those that are not there."""
    device = flat.meta["example_value"].device
    numbers = call_function(graph, torch.arange, (start, end), {"device": device})
    most = _computed(graph, operator.sub, rows.number, 1)
    legal = call_function(graph, torch.clamp, (numbers,), {"max": most})
    return call_method(graph, "index_select", (flat, 0, legal))


def _gathered(
    graph: torch.fx.Graph, site: Site, rows: _Rows, share: torch.fx.Node
) -> torch.fx.Node:
    """The rows of all ranks, in the shape of the stream."""
    last = int(site.stream.meta["example_value"].shape[-1])
    flat = call_method(graph, "reshape", (share, (-1, last)))
    whole = all_shares(graph, flat, site.reduced.ranks)
    if not rows.are_even:
        whole = call_method(graph, "narrow", (whole, 0, 0, rows.number))
    return call_method(graph, "reshape", (whole, (*rows.sizes, last)))


def _copied(
    graph: torch.fx.Graph, norm: RowNorm, stream: torch.fx.Node, share: torch.fx.Node
) -> torch.fx.Node:
    """The same norm of this rank's rows."""
    made = {stream: share}
    for node in norm.nodes:
        copy = graph.node_copy(node, lambda source: made.get(source, source))
        fill_value(copy)
        made[node] = copy
    return made[norm.result]
