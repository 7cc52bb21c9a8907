"""What may be left out of a graph, what must stay, and random programs before and after."""

import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from toy import dynamo_call

from passes.building import call_function, call_method
from passes.noop import NoopPass
from passes.reading import only_reads

pytestmark = pytest.mark.usefixtures("without_gradients")


def left_out(function, *args, dynamic=True):
    """Number of calls left out of Dynamo's graph, which gives what it gave, bit for bit."""
    graph_module, inputs = dynamo_call(function, *args, dynamic=dynamic)
    expected = graph_module(*_copied(inputs))
    changed = NoopPass()(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    torch.testing.assert_close(graph_module(*_copied(inputs)), expected, rtol=0, atol=0)
    return changed


def _copied(inputs):
    return [value.clone() if isinstance(value, torch.Tensor) else int(value) for value in inputs]


x = torch.randn(6, 4)
whole = torch.arange(24).view(6, 4)

IDLE = {
    "view": lambda x: x.view(x.shape[0], 4).relu(),
    "view_as": lambda x: x.view_as(x).relu(),
    "reshape": lambda x: x.reshape(-1, 4).relu(),
    "expand": lambda x: x.expand(x.shape[0], -1).relu(),
    "flatten": lambda x: x.flatten(1).relu(),
    "to": lambda x: x.to(torch.float32).relu(),
    "to the device": lambda x: x.to("cpu").relu(),
    "float": lambda x: x.float().relu(),
    "type_as": lambda x: x.type_as(x).relu(),
    "contiguous": lambda x: x.contiguous().relu(),
    "slice": lambda x: x[:, :].relu(),
    "slice to the end": lambda x: x[0:, :4].relu(),
    "ellipsis": lambda x: x[...].relu(),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5, training=False).relu(),
    "times 1": lambda x: (x * 1).relu(),
    "1 times": lambda x: (1.0 * x).relu(),
    "by 1": lambda x: (x / 1).relu(),
    "minus 0": lambda x: (x - 0).relu(),
    "clone": lambda x: x.clone().relu(),
}


@pytest.mark.parametrize("kind", IDLE)
@pytest.mark.parametrize("dynamic", [False, True])
def test_calls_that_change_nothing_are_left_out(kind, dynamic):
    assert left_out(IDLE[kind], x, dynamic=dynamic) == 1


def test_a_chain_is_left_out_whole():
    def chain(x):
        y = x.view(x.shape[0], 4).to(torch.float32)[:, :]
        return (torch.nn.functional.dropout(y, 0.1, training=False).clone() * 1).relu()

    assert left_out(chain, x) == 6


def test_whole_numbers_have_one_zero():
    assert left_out(lambda x: (x + 0).abs(), whole) == 1
    assert left_out(lambda x: (0 + x).abs(), whole) == 1


NEAR_MISSES = {
    "another shape": lambda x: x.view(4, 6).relu(),
    "transposed": lambda x: x.t().relu(),
    "another dtype": lambda x: x.to(torch.float64).relu(),
    "bits as another dtype": lambda x: x.view(torch.int32).abs(),
    "not contiguous": lambda x: x.t().contiguous().relu(),
    "part of it": lambda x: x[:, 1:].relu(),
    "every second": lambda x: x[::2].relu(),
    "one row": lambda x: x[0].relu(),
    "new dimension": lambda x: x[None].relu(),
    "times 2": lambda x: (x * 2).relu(),
    "1 minus": lambda x: (1 - x).relu(),
    "0 minus": lambda x: (0 - x).relu(),
    "1 by": lambda x: (1 / x).relu(),
    "minus -0.0": lambda x: torch.sub(x, -0.0).relu(),
    "plus 0, which makes -0.0 a 0.0": lambda x: (x + 0).relu(),
    "by 1 makes floats": lambda x: x.int() / 1,
    "times a tensor": lambda x: (x * torch.ones(())).relu(),
    "dropout in training": lambda x: torch.nn.functional.dropout(x * 2, 1.0, training=True),
    "what is returned": lambda x: x.clone(),
    "a view that is returned": lambda x: x.view(6, 4),
    "a view of a copy that is returned": lambda x: x.clone().view(-1),
    "a copy that is written": lambda x: x.clone().add_(1).relu(),
    "a copy whose original is written": lambda x: (x.clone(), x.add_(1))[0].relu(),
    "a copy whose original is written through a view": lambda x: (x.clone(), x[0].add_(1))[
        0
    ].abs(),
    "a view that is written": lambda x: (x.view(6, 4).add_(1), x.relu())[1],
    "a copy of which somebody reads a view": lambda x: x.clone().view(-1).relu(),
}


@pytest.mark.parametrize("kind", NEAR_MISSES)
def test_near_misses_are_left_alone(kind):
    assert left_out(NEAR_MISSES[kind], x, dynamic=False) == 0


def test_sizes_that_are_equal_for_one_call_only_are_not_equal():
    def grow(x, y):
        return x.expand(y.shape[0], 4).relu()

    graph_module, _ = dynamo_call(grow, torch.randn(1, 4), torch.randn(6, 4), dynamic=True)
    assert NoopPass()(graph_module.graph) == 0

    def same(x, y):
        return x.reshape(y.shape[0], 4).relu() + y  # the sum makes both sizes one

    graph_module, _ = dynamo_call(same, x, torch.randn(6, 4), dynamic=True)
    assert NoopPass()(graph_module.graph) == 1


def test_ops_that_say_what_they_write_are_believed():
    graph = torch.fx.Graph()
    a = graph.placeholder("a")
    reads = graph.call_function(torch.ops.aten.add.Tensor, (a, a))
    writes = graph.call_function(torch.ops.aten.add_.Tensor, (a, a))
    packet = graph.call_function(torch.ops.aten.add_, (a, a))
    in_place = graph.call_function(torch.nn.functional.silu, (a, True))
    plain = graph.call_function(torch.nn.functional.silu, (a,))
    found = [only_reads(node) for node in (reads, writes, packet, in_place, plain)]
    assert found == [True, False, False, False, True]


# --- random programs --------------------------------------------------------------------------

_METHODS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    *(("view", (2, 6)), ("view", (3, 4)), ("view", (12,)), ("reshape", (2, 6)), ("t", ())),
    *(("to", (torch.float32,)), ("to", (torch.float64,)), ("contiguous", ()), ("clone", ())),
    *(("relu", ()), ("neg", ()), ("flatten", ()), ("detach", ()), ("expand", (2, 6))),
    *(("add_", (1,)), ("mul_", (2,)), ("zero_", ()), ("t_", ())),
)
_NUMBERS = (0, 1, 1.0, 2, -0.0)
_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.truediv, torch.mul)
_INDICES = (slice(None), (slice(None), slice(0, 6)), 0, Ellipsis, slice(0, 1))

_steps = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.one_of(
            st.sampled_from(_METHODS),
            st.tuples(st.sampled_from(_ARITHMETIC), st.sampled_from(_NUMBERS), st.booleans()),
            st.tuples(st.just(operator.getitem), st.sampled_from(_INDICES)),
            st.tuples(st.just(torch.add), st.integers(0, 30)),
        ),
    ),
    max_size=10,
)


def program(steps, returned):
    """A graph of one input `[2, 6]`: each step takes an earlier value, or is left out."""
    graph = torch.fx.Graph()
    mode = FakeTensorMode()
    given_value = graph.placeholder("x")
    with mode:
        given_value.meta["example_value"] = torch.empty(2, 6)
    values = [given_value]
    for source, step in steps:
        node = values[source % len(values)]
        try:
            if isinstance(step[0], str):
                values.append(call_method(graph, step[0], (node, *step[1])))
            elif step[0] is torch.add:
                values.append(
                    call_function(graph, torch.add, (node, values[step[1] % len(values)]))
                )
            elif step[0] is operator.getitem:
                values.append(call_function(graph, step[0], (node, step[1])))
            else:
                args = (step[1], node) if step[2] else (node, step[1])
                values.append(call_function(graph, step[0], args))
        except (RuntimeError, IndexError, ValueError):
            graph.erase_node(list(graph.nodes)[-1])
    graph.output(tuple(values[index % len(values)] for index in returned))
    return graph


def ran(graph):
    """What a graph gives, what becomes of its input, and who shares memory with whom."""
    given_value = torch.linspace(-1, 1, 12).view(2, 6).clone()
    given_value[0, 0] = -0.0
    results = torch.fx.GraphModule(torch.nn.Module(), graph)(given_value)
    seen = (given_value, *results)
    sharing = [
        [a.untyped_storage()._cdata == b.untyped_storage()._cdata for b in seen] for a in seen
    ]
    layouts = [(t.shape, t.stride(), t.storage_offset(), t.dtype) for t in seen]
    signs = [t.signbit() for t in seen]
    return seen, sharing, layouts, signs


@settings(max_examples=200, deadline=None)
@given(_steps, st.lists(st.integers(0, 30), min_size=1, max_size=4))
def test_random_programs_give_what_they_gave(steps, returned):
    graph = program(steps, returned)
    before = ran(graph)
    NoopPass()(graph)
    graph.lint()
    after = ran(graph)
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(after[3], before[3])
    assert after[1:3] == before[1:3]
    # Whoever splits the graph reads memory off the values.
    for node in graph.nodes:
        assert node.op == "output" or "example_value" in node.meta
