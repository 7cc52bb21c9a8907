"""A graph of Dynamo's as bytes, and back in another process.

A graph is worth nothing without what it says of its values: sizes, of which some are symbols,
strides, and which values share memory. All of it is written down and made anew, with the symbols
and what is known of them. Data of tensors is not written, so a graph that holds any is refused.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from compile_backend.cache import NotStorableError
from compile_backend.torch_internals.graphs import fake_mode_of
from compile_backend.torch_internals.stored_sizes import StoredSizes, restore_sizes, stored_sizes
from compile_backend.torch_internals.stored_values import (
    ValueReader,
    ValueWriter,
    plain_attributes,
)

_MARK = "stored by cudagraph-modes"

_MODE_SETTINGS = ("allow_fallback_kernels", "allow_non_fake_inputs", "static_shapes")


@dataclass(frozen=True, slots=True)
class _Input:
    """What is known of an input of a graph besides its value."""

    source: Any
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredGraph:
    """A graph, ready to be written down.

    Attributes:
        nodes: the graph without values, by torch's own means.
        values: of each node, by name.
        inputs: by name.
        sizes: what is known of symbols; None without any.
        mode: settings of the fake-tensor mode.
    """

    nodes: bytes
    values: dict[str, Any]
    inputs: dict[str, _Input]
    sizes: StoredSizes | None
    mode: dict[str, Any]


def is_stored(graph_module: torch.fx.GraphModule) -> bool:
    """Whether a graph was read from bytes; then it is all that the function does."""
    return _MARK in graph_module.meta


def stored(graph_module: torch.fx.GraphModule) -> StoredGraph:
    """Write a graph down.

    Raises:
        NotStorableError: something in it means nothing in another process.
    """
    from torch.fx._graph_pickler import GraphPickler, Options

    mode = fake_mode_of(graph_module)
    if mode is None or mode.shape_env is None:
        raise NotStorableError("has a graph without tensors")
    writer = ValueWriter()
    bare = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    output = bare.graph_copy(graph_module.graph, copies)
    if output is not None:
        bare.output(output)
    for node in bare.nodes:
        node.meta = {}
    values, inputs = {}, {}
    for node in graph_module.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            raise NotStorableError(f"has a graph that holds an object ({node.target})")
        if node.op == "output":
            continue
        copy = copies[node]
        copy.name = node.name
        if "example_value" in node.meta:
            values[node.name] = writer.value(node.meta["example_value"], node.name)
        if node.op == "placeholder":
            inputs[node.name] = _input(node)
    sizes = stored_sizes(mode.shape_env)
    settings = {name: getattr(mode, name) for name in _MODE_SETTINGS if hasattr(mode, name)}
    try:
        nodes = GraphPickler.dumps(torch.fx.GraphModule({}, bare), Options(ops_filter=None))
    except Exception as error:
        raise NotStorableError(f"has a graph that cannot be written down ({error})") from error
    return StoredGraph(nodes, values, inputs, sizes, settings)


def revived(graph: StoredGraph) -> torch.fx.GraphModule:
    """The graph again; whatever is wrong with it may raise anything."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    for name, value in graph.mode.items():
        setattr(mode, name, value)
    restore_sizes(env, graph.sizes)
    module = GraphPickler.loads(graph.nodes, mode)
    assert isinstance(module, torch.fx.GraphModule)
    reader = ValueReader(mode)
    with env.suppress_guards():
        for node in module.graph.nodes:
            if node.name in graph.values:
                node.meta["example_value"] = reader.value(graph.values[node.name])
    for node in module.graph.nodes:
        if node.op == "placeholder":
            known = graph.inputs[node.name]
            node.meta["grapharg"] = types.SimpleNamespace(source=known.source)
            node.meta["tensor_dict"] = dict(known.attributes)
            node._dynamo_source = known.source
    reason = types.SimpleNamespace(graph_break=False, reason="stored")
    object.__setattr__(module, "compile_subgraph_reason", reason)
    module.meta[_MARK] = True
    return module


def shape_env_of_graph(graph_module: torch.fx.GraphModule) -> Any:
    """Where what is known of a graph's sizes is kept."""
    mode = fake_mode_of(graph_module)
    assert mode is not None
    return mode.shape_env


def _input(node: torch.fx.Node) -> _Input:
    argument = node.meta.get("grapharg")
    source = getattr(argument, "source", None)
    if source is None or getattr(argument, "pass_arg_as_tensor", False):
        raise NotStorableError(f"has an input that comes from nowhere ({node.name})")
    described = node.meta.get("tensor_dict") or {}
    kept = {name: value for name, value in described.items() if name.startswith("_dynamo")}
    return _Input(source, plain_attributes(kept))
