"""The passes that run on a Dynamo graph before it is split. The only module that imports them.

What the user asks for sees Dynamo's graph, with distributed tensors taken apart; what makes it fit
to be cut runs behind that.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compile_backend.attention.ops import attention, attention_fp8
from compile_backend.distributed import agreed_hindrance
from compile_backend.errors import number_of
from compile_backend.own_passes import OPTION, OwnPass, own_passes
from compile_backend.returned_values import difference, returned_values
from compile_backend.torch_internals.symmetric_memory import store_of, why_not_shared
from passes.additive_mask import AdditiveMaskPass
from passes.async_tp import AsyncTPPass
from passes.attn_fp8 import AttnQuantFusionPass
from passes.building import fill_value
from passes.constant_tensors import ConstantTensorsPass
from passes.decompose_sizes import DecomposeSizesPass
from passes.index_writes import IndexWritesPass
from passes.local_tensors import LocalTensorsPass
from passes.noop import NoopPass
from passes.ops_fp8 import OPS
from passes.rms_norm_fp8 import RMSNormFp8Pass
from passes.sequence_parallel import SequenceParallelismPass
from passes.silu_mul_fp8 import SiluMulFp8Pass

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    import torch
    import torch.fx

    from compile_backend.config import PassConfig
    from passes.base import GraphPass

logger = logging.getLogger(__name__)

FUSED_OPS = frozenset((attention_fp8, *OPS.values()))
"""The ops that fusions make."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """What one pass did to one graph.

    Attributes:
        name: the pass's.
        asked_by: the option or flag that asked for it; None for those that always run.
        changed: places changed.
        uuid: tells this version of the rewrite from others; None where nothing does.
        hindrance: why places were left alone that the pass is for; None where it does not say.
    """

    name: str
    asked_by: str | None
    changed: int
    uuid: str | None
    hindrance: str | None = None


def passes_at_first() -> tuple[GraphPass, ...]:
    """Those that write a graph in terms that all others know."""
    return (LocalTensorsPass(),)


def passes_before_split() -> tuple[GraphPass, ...]:
    """Those that make a graph fit to be cut and captured, in the order they run."""
    return (
        DecomposeSizesPass(),
        ConstantTensorsPass(),
        AdditiveMaskPass(),
        IndexWritesPass(),
    )


def passes_of_flags() -> dict[str, tuple[GraphPass, ...]]:
    """Those that each flag of `pass_config` asks for, in the order they run."""
    return {
        "enable_noop": (NoopPass(),),
        "enable_sequence_parallelism": (SequenceParallelismPass(),),
        "enable_async_tp": (AsyncTPPass(_why_not_overlapped),),
        "enable_fusion": (RMSNormFp8Pass(), SiluMulFp8Pass()),
        "enable_attn_fusion": (AttnQuantFusionPass(attention, attention_fp8),),
    }


def _why_not_overlapped(device: torch.device, group: str) -> str | None:
    """Why no rank of a group overlaps products and exchanges; None if all do."""
    own = why_not_shared(device, group)
    if device.type != "cuda":  # the device of all, since they exchange tensors on it
        return own
    return agreed_hindrance("enable_async_tp", own, *store_of(group))


def prepare_for_split(graph_module: torch.fx.GraphModule) -> None:
    """Rewrite a Dynamo graph in place, so that only tensors and integers cross its cuts."""
    for graph_pass in passes_before_split():
        graph_pass(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()


def run_passes(
    graph_module: torch.fx.GraphModule, pass_config: PassConfig, own: Mapping[str, Any]
) -> tuple[PassResult, ...]:
    """Rewrite a Dynamo graph in place: as asked, and so that it can be cut.

    Args:
        graph_module: what Dynamo made.
        pass_config: which passes to run.
        own: those of the user, behind these.

    Raises:
        ConfigError: a pass of the user's is none, or fails.
    """
    graph = graph_module.graph
    results = [_run(graph_pass, graph, asked_by=None) for graph_pass in passes_at_first()]
    results += [
        _run(graph_pass, graph, asked_by=flag)
        for flag, passes in passes_of_flags().items()
        if getattr(pass_config, flag)
        for graph_pass in passes
    ]
    for own_pass in checked_passes(own):
        before, returned = frozenset(graph.nodes), returned_values(graph)
        results.append(_run(own_pass, graph, asked_by=OPTION))
        _fill_values(graph, own_pass, before)
        changed = difference(returned, returned_values(graph))
        if changed is not None:
            raise own_pass.error(changed, "keep the number, shapes and types of what it returns")
    results += [_run(graph_pass, graph, asked_by=None) for graph_pass in passes_before_split()]
    graph.lint()
    graph_module.recompile()
    return tuple(results)


def checked_passes(own: Mapping[str, Any]) -> tuple[OwnPass, ...]:
    """The passes of `inductor_passes`.

    Raises:
        ConfigError: one cannot be found, or has the name of another pass.
    """
    of_flags = (graph_pass for passes in passes_of_flags().values() for graph_pass in passes)
    known = (*passes_at_first(), *passes_before_split(), *of_flags)
    taken = frozenset(graph_pass.name for graph_pass in known)
    return own_passes(own, taken)


def is_fused(node: torch.fx.Node) -> bool:
    """Whether a node calls an op that only fusions make."""
    return node.op == "call_function" and node.target in FUSED_OPS


_PAGE = "docs/how-it-works.md, Quantisations that fuse"
_FORMS = {
    "enable_fusion": f"; write quantisations in a form that matches: see {_PAGE}",
    "enable_attn_fusion": "; it takes static scales only, one value for all tokens: leave it out "
    f"for scales per token, else write quantisations in a form that matches: see {_PAGE}",
}


def idle_passes(results: Iterable[PassResult]) -> list[str]:
    """What the user asked for that changed nothing, as notes."""
    changed: dict[str, int] = {}
    hindrances: dict[str, str] = {}
    for result in results:
        if result.asked_by is not None:
            asked = f"{OPTION}: {result.name}" if result.asked_by == OPTION else result.asked_by
            changed[asked] = changed.get(asked, 0) + result.changed
            if result.hindrance is not None:
                hindrances[asked] = f": {result.hindrance}"
    return [
        f"{asked} was asked for and changed nothing in this graph"
        f"{hindrances.get(asked, _FORMS.get(asked, ''))}"
        for asked, count in changed.items()
        if not count
    ]


def _run(
    graph_pass: GraphPass | OwnPass, graph: torch.fx.Graph, *, asked_by: str | None
) -> PassResult:
    is_told = logger.isEnabledFor(logging.DEBUG)
    before = str(graph) if is_told else ""
    changed = graph_pass(graph)
    if is_told and changed:
        places = number_of("place", changed)
        logger.debug("%s: %s\nbefore: %s\nafter: %s", graph_pass.name, places, before, graph)
    hindrance = getattr(graph_pass, "hindrance", None)
    return PassResult(graph_pass.name, asked_by, changed, graph_pass.uuid(), hindrance)


def _fill_values(
    graph: torch.fx.Graph, own_pass: OwnPass, before: frozenset[torch.fx.Node]
) -> None:
    """Give the nodes that a user's pass made the values that splitting goes by."""
    for node in graph.nodes:
        if node in before or "example_value" in node.meta:
            continue
        if node.op not in ("call_function", "call_method"):
            continue
        try:
            fill_value(node)
        except Exception as error:
            problem = f"made {node.name}, which cannot be called: {type(error).__name__}: {error}"
            fix = 'repair it, or give its nodes meta["example_value"]'
            raise own_pass.error(problem, fix) from error
