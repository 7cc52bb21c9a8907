"""Graphs that exchange tensors between processes let go of a group before it ends.

NCCL waits for them, without an end, where a process ends its groups while it keeps its graphs.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from compile_backend.errors import CaptureError
from compile_backend.graph_engine import CudaEngine, CudaGraph
from compile_backend.torch_internals.process_groups import exchanges, let_go_with_groups

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")


class Captured:
    """What torch's class does that is asked here."""

    is_there = True

    def reset(self) -> None:
        self.is_there = False

    def replay(self) -> None:
        assert self.is_there


@pytest.fixture
def alone(tmp_path: Path):
    """Groups of this process only."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def graph_of(*groups: dist.ProcessGroup) -> tuple[CudaGraph, Captured]:
    """A graph in whose capture tensors were exchanged in these groups."""
    before = exchanges(CPU)
    for group in groups:
        dist.all_reduce(torch.ones(2), group=group)
    captured = Captured()
    graph = CudaGraph(captured, torch.ones(2), 0)
    let_go_with_groups(graph, before, exchanges(CPU))
    return graph, captured


def test_without_groups_nothing_was_exchanged():
    assert exchanges(CPU) == {}


@pytest.mark.usefixtures("alone")
def test_what_a_group_exchanged_is_counted():
    other = dist.new_group([0])
    assert sorted(exchanges(CPU).values()) == [0, 0]
    dist.all_reduce(torch.ones(2), group=other)
    assert exchanges(CPU)[other.group_name] == 1
    assert sorted(exchanges(CPU).values()) == [0, 1]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("end", ["destroy", "abort"])
def test_a_graph_lets_go_before_its_group_ends(end, monkeypatch):
    order = []
    graph, captured = graph_of(dist.group.WORLD)
    monkeypatch.setattr(captured, "reset", lambda: order.append(dist.is_initialized()))
    _plain, untouched = graph_of()
    outputs = graph.outputs
    if end == "destroy":
        dist.destroy_process_group()
    else:
        dist.group.WORLD.abort()
    assert order == [True]
    assert graph.outputs is outputs
    with pytest.raises(CaptureError, match=r"process group '0'.*was shut down.*reset"):
        graph.replay()
    assert untouched.is_there


@pytest.mark.usefixtures("alone")
def test_a_graph_outlives_other_groups():
    other = dist.new_group([0])
    _graph, captured = graph_of(dist.group.WORLD)
    _both, captured_both = graph_of(dist.group.WORLD, other)
    dist.destroy_process_group(other)
    assert captured.is_there
    assert not captured_both.is_there
    dist.destroy_process_group()
    assert not captured.is_there


@pytest.mark.usefixtures("alone")
def test_graphs_are_not_kept_for_their_groups():
    graph, captured = graph_of(dist.group.WORLD)
    alive = weakref.ref(graph)
    del graph
    gc.collect()
    assert alive() is None
    dist.destroy_process_group()
    assert captured.is_there  # it was nobody's to let go


@pytest.mark.gpu
def test_a_captured_exchange_ends_with_its_group(tmp_path):
    device = torch.device("cuda", torch.cuda.current_device())
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    try:
        engine = CudaEngine(device)
        x = torch.ones(4, device=device)

        def exchange(x: torch.Tensor) -> torch.Tensor:
            doubled = x * 2
            dist.all_reduce(doubled)
            return doubled

        graphs = []
        for call in (exchange, lambda x: x * 3):
            _, trial = engine.warm_up(call, (x,))
            graphs.append(engine.capture(call, (x,), trial))
            graphs[-1].replay()
        torch.cuda.synchronize()
        assert graphs[0].outputs.tolist() == [2] * 4
    finally:
        dist.destroy_process_group()
    with pytest.raises(CaptureError, match="was shut down"):
        graphs[0].replay()
    x.fill_(5)
    graphs[1].replay()
    torch.cuda.synchronize()
    assert graphs[1].outputs.tolist() == [15] * 4
