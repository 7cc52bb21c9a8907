"""Products that become part of what ranks exchange around them: every form, and every near miss.

Graphs are looked at here. What they compute is checked by real processes in `test_two_ranks`.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from rank_graphs import (
    RANK,
    WIDTH,
    assumes_nothing,
    exchanged,
    inputs_of,
    is_sound,
    layers,
    rms,
    summed,
)
from toy import dynamo_graph, toy_options

import compile_backend.pipeline
from compile_backend.explain import explain
from compile_backend.torch_internals.symmetric_memory import (
    has_ops,
    store_of,
    why_not_shared,
    workspaces,
)
from passes.async_tp import AsyncTPPass
from passes.ops_async_tp import ALL_GATHER_LINEAR, LINEAR_REDUCE_SCATTER
from passes.sequence_parallel import SequenceParallelismPass

BOTH = {"enable_sequence_parallelism": True, "enable_async_tp": True}


pytestmark = pytest.mark.usefixtures("other_group", "without_gradients")


def overlapped(function, *args, dynamic=True, in_shares=True):
    """Products that were taken, and the graph."""
    if dynamic:
        torch._dynamo.mark_dynamic(args[0], 1)
    graph = dynamo_graph(function, *args).graph
    assert not in_shares or SequenceParallelismPass()(graph)
    changed = AsyncTPPass(lambda device, group: None)(graph)
    assert is_sound(graph)
    return changed, graph


def calls(graph, op):
    return [node for node in graph.nodes if node.target is op]


def before(x, w, weight):
    """The norm of a layer in front of others, in shares."""
    return rms(x + summed(F.linear(x, w)), weight)


FORMS = {
    "one product": (lambda n, w: F.linear(n, w).relu(), [1], [False]),
    "several": (lambda n, w: F.linear(n, w) * F.linear(n, w[:3]).sum(), [2], [False]),
    "a bias": (lambda n, w: F.linear(n, w, w[0]), [1], [False]),
    "rows that others read": (lambda n, w: F.linear(n, w) + n, [1], [True]),
    "the rows themselves": (lambda n, w: (F.linear(n, w), n), [1], [True]),
    "another shape": (lambda n, w: F.linear(n.view(-1, WIDTH), w), [1], [False]),
    "no product": (lambda n, w: n.relu(), [], []),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, dynamic):
    after, weights, returns_rows = FORMS[form]
    changed, graph = overlapped(
        lambda x, w, weight: after(before(x, w, weight), w), *inputs_of(), dynamic=dynamic
    )
    gathers = calls(graph, ALL_GATHER_LINEAR)
    assert len(calls(graph, LINEAR_REDUCE_SCATTER)) == 1
    assert [len(gather.args[1]) for gather in gathers] == weights
    assert [gather.args[2] for gather in gathers] == returns_rows
    assert changed == 1 + sum(weights)
    assert exchanged(graph)["all_gather"] == len(gathers) or not gathers
    assert not calls(graph, F.linear)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_all_layers(dtype):
    """The one product of a layer goes with the sum behind it, not with the rows in front of it."""
    changed, graph = overlapped(lambda *args: layers(*args, count=3), *inputs_of(dtype))
    assert changed == 3
    assert len(calls(graph, LINEAR_REDUCE_SCATTER)) == 3
    (output,) = graph.find_nodes(op="output")
    value = output.args[0][0].meta["example_value"]
    assert (value.dtype, value.shape[-1]) == (dtype, WIDTH)


def test_weights_that_come_later_are_put_in_front():
    def model(x, w, weight):
        normed = before(x, w, weight)
        return F.linear(normed, w.view(WIDTH, WIDTH)) * F.linear(normed, w.t())

    changed, graph = overlapped(model, *inputs_of())
    assert changed == 3
    assert len(calls(graph, ALL_GATHER_LINEAR)[0].args[1]) == 2


def scattered(x, w, weight, *, op="sum", product=F.linear):
    made = product(x.view(-1, WIDTH), w)
    return dist._functional_collectives.reduce_scatter_tensor(made, op, 0, "0")


def gathered(x, w, weight, *, product=F.linear):
    rows = x.view(-1, WIDTH)
    return product(dist._functional_collectives.all_gather_tensor(rows, 0, "0"), w)


def _read_product(x, w):
    made = F.linear(x, w)
    return dist._functional_collectives.reduce_scatter_tensor(made, "sum", 0, "0"), made


def _written_later(n, w):
    made = F.linear(n, w)
    made.add_(1)
    return made


def _written_weight(n, w):
    w.mul_(2)
    return F.linear(n, w)


def _written_share(x, w, weight):
    share = x.sin().view(-1, WIDTH)
    started = torch.ops._c10d_functional.all_gather_into_tensor(share, 2, "0")
    share.zero_()
    return F.linear(torch.ops._c10d_functional.wait_tensor(started), w), share


NEAR_MISSES = {
    "a share is written": _written_share,
    "a bias in front of the sum": lambda *args: scattered(
        *args, product=lambda x, w: F.linear(x, w, w[0])
    ),
    "the mean": lambda *args: scattered(*args, op="avg"),
    "no product": lambda *args: scattered(*args, product=lambda x, w: x.sin()),
    "somebody reads the product": lambda x, w, _: _read_product(x.view(-1, WIDTH), w),
    "a product of doubles": lambda x, w, n: gathered(x.double(), w.double(), n),
    "rows times themselves": lambda *args: gathered(
        *args, product=lambda x, w: F.linear(x, x + w[0])
    ),
    "what a product gives is written": lambda *args: gathered(*args, product=_written_later),
    "a weight is written": lambda *args: gathered(*args, product=_written_weight),
    "rows are written": lambda *args: gathered(*args, product=lambda x, w: F.linear(x.add_(1), w)),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    changed, graph = overlapped(
        NEAR_MISSES[name], *inputs_of(shape=(1, 4)), dynamic=False, in_shares=False
    )
    assert changed == 0
    assert not calls(graph, ALL_GATHER_LINEAR)
    assert not calls(graph, LINEAR_REDUCE_SCATTER)
    assert sum(exchanged(graph).values()) == 1


def test_functional_collectives_of_a_model_are_taken():
    for model in (scattered, gathered):
        changed, _ = overlapped(model, *inputs_of(shape=(1, 4)), dynamic=False, in_shares=False)
        assert changed == 1


def test_it_assumes_nothing_of_sizes(monkeypatch):
    monkeypatch.setattr(compile_backend.pipeline, "why_not_shared", lambda *_: None)
    assert assumes_nothing(layers, *inputs_of(), flags=tuple(BOTH))


# --- where it cannot be had -------------------------------------------------------------------


def test_a_cpu_keeps_the_exchanges_and_says_why():
    options = toy_options(pass_config=BOTH)
    (graph,) = explain(layers, *inputs_of(), options=options).graphs
    assert graph.passes["sequence_parallelism"] == 2
    assert graph.passes["async_tp"] == 0
    assert (
        "enable_async_tp was asked for and changed nothing in this graph: its tensors are on cpu, "
        "where torch has no such ops"
    ) in graph.notes


def test_counts_and_no_hindrance_where_it_can_be_had(monkeypatch):
    monkeypatch.setattr(compile_backend.pipeline, "why_not_shared", lambda *_: None)
    options = toy_options(pass_config=BOTH)
    (graph,) = explain(layers, *inputs_of(), options=options).graphs
    assert graph.passes["async_tp"] == 2
    assert not any("async_tp" in note for note in graph.notes)
    (graph,) = explain(lambda x: x + 1, torch.ones(3), options=options).graphs
    assert "enable_async_tp was asked for and changed nothing in this graph" in graph.notes


HOSTS = {
    "two ranks of a host": ("2", True, None),
    "ranks of two hosts": ("1", True, "several hosts"),
    "nobody says": ("", True, "LOCAL_WORLD_SIZE"),
    "no number": ("two", True, "LOCAL_WORLD_SIZE"),
    "no hosts": ("0", True, "LOCAL_WORLD_SIZE"),
    "far apart": ("2", False, "cannot read each other's memory"),
}


@pytest.mark.parametrize("name", HOSTS)
def test_reasons(name, monkeypatch):
    on_a_host, is_near, expected = HOSTS[name]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", on_a_host)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: is_near)
    reason = why_not_shared(torch.device("cuda", 0), dist.group.WORLD.group_name)
    assert reason is None if expected is None else expected in reason


@pytest.mark.parametrize("other", ["nothing", "too far (rank 0)"])
def test_on_gpus_a_rank_overlaps_only_if_all_do(other, monkeypatch):
    store = dist.HashStore()
    store.set("enable_async_tp on 0", other)
    named = dist.group.WORLD.group_name
    assert store_of(named)[1:] == (RANK, 2)
    monkeypatch.setattr(compile_backend.pipeline, "why_not_shared", lambda *_: None)
    monkeypatch.setattr(compile_backend.pipeline, "store_of", lambda _: (store, RANK, 2))
    (graph_pass,) = compile_backend.pipeline.passes_of_flags()["enable_async_tp"]
    found = graph_pass._why_not(torch.device("cuda", 0), named)
    assert found == (None if other == "nothing" else other)
    assert graph_pass._why_not(torch.device("cpu"), named) is None  # asks nobody


def test_torch_has_the_ops_and_names_its_workspaces(monkeypatch):
    """Graphs keep the memory that they exchange data by, of which torch keeps the last only."""
    assert has_ops()
    assert workspaces() == ()
    held = torch.distributed._symmetric_memory._group_name_to_workspace_tensor
    first = torch.ones(2)
    monkeypatch.setitem(held, "0", first)
    monkeypatch.setitem(held, "1", None)
    (found,) = workspaces()
    assert found is first
