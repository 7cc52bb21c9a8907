"""Hard case S7: a write to a part of a big cache copies no part of the cache."""

import math
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from toy import dynamo_call, toy_options

from passes.index_writes import IndexWritesPass

NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE, SIZE = 3, 64, 16, 8
LAYER = NUM_BLOCKS * BLOCK_SIZE * SIZE

_library = torch.library.Library("index_writes", "DEF")
_library.define("store(Tensor x, Tensor(a!) cache, Tensor slots) -> ()")


@torch.library.impl(_library, "store", "CompositeExplicitAutograd")
def _store(x, cache, slots):
    cache.index_copy_(0, slots, x)


torch.library.register_fake("index_writes::store", lambda x, cache, slots: None, lib=_library)


pytestmark = pytest.mark.usefixtures("without_gradients")


def inputs():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, SIZE, generator=generator)
    cache = torch.randn(NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE, SIZE, generator=generator)
    return rows, cache, torch.tensor([3, 0, 1000, -1, 17])


def layers(cache):
    return cache.view(NUM_LAYERS, -1, SIZE)


def _set(target, index, rows):
    target[index] = rows


CHANGED = {
    "a layer": lambda x, cache, slots: _set(cache[1], slots % NUM_BLOCKS, x[:, None]),
    "a layer, as a first index": lambda x, cache, slots: _set(
        cache, (1, slots % NUM_BLOCKS), x[:, None].expand(-1, BLOCK_SIZE, -1)
    ),
    "the last layer": lambda x, cache, slots: _set(cache[-1], (slots % NUM_BLOCKS, slots % 16), x),
    "a block": lambda x, cache, slots: _set(cache[1][2], slots % 16, x),
    "a block by two numbers": lambda x, cache, slots: _set(cache[1, 2], slots % 16, x),
    "slots of a layer": lambda x, cache, slots: _set(cache[2].view(-1, SIZE), slots, x),
    "slots by flatten": lambda x, cache, slots: _set(cache[2].flatten(0, 1), slots, x),
    "index_copy_": lambda x, cache, slots: cache[1, 2].index_copy_(0, slots % 7 + 1, x),
    "index_put_": lambda x, cache, slots: cache[0].index_put_((slots % 5, slots % 16), x),
    "two layers": lambda x, cache, slots: (
        _set(cache[0].view(-1, SIZE), slots, x),
        _set(cache[1].view(-1, SIZE), slots, x * 2),
    ),
}


def wrapped(write):
    def layer(x, cache, slots):
        write(x * 2, cache, slots)
        return x.relu() + cache[1, 0, 0]

    return layer


@pytest.mark.parametrize("case", CHANGED)
@pytest.mark.parametrize("dynamic", [False, True])
def test_writes_by_index_go_to_the_whole_cache(case, dynamic):
    layer = wrapped(CHANGED[case])
    args, mine, expected = inputs(), inputs(), inputs()
    if dynamic:
        for tensor in (args[0], args[2]):
            torch._dynamo.mark_dynamic(tensor, 0)
    graph_module, _ = dynamo_call(layer, *args, dynamic=None if dynamic else False)
    changed = IndexWritesPass()(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    assert changed == (2 if case == "two layers" else 1)
    assert all(
        "example_value" in node.meta for node in graph_module.graph.nodes if node.op[0] == "c"
    )
    result = layer(*expected)
    (actual,) = graph_module(*_in_order(graph_module, mine))
    torch.testing.assert_close(actual, result, rtol=0, atol=0)
    torch.testing.assert_close(list(mine), list(expected), rtol=0, atol=0)


def _in_order(graph_module, args):
    """The arguments as a graph takes them, with sizes for free ones."""
    names = ("x", "cache", "slots")
    ordered = []
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["example_value"]
            is_size = isinstance(value, torch.SymInt)
            found = [arg for arg, name in zip(args, names, strict=True) if name in node.name]
            ordered.append(int(value) if is_size else found[0])
    return ordered


LEFT_ALONE = {
    "the whole": lambda x, cache, slots: _set(cache, (slots % 3, slots % 5, slots % 16), x),
    "a range": lambda x, cache, slots: cache[1, 2, : x.shape[0]].copy_(x),
    "by a mask": lambda x, cache, slots: _set(cache[1, 2], torch.ones(16) > 0, x[0]),
    "one number for all": lambda x, cache, slots: _set(cache[1, 2], slots % 16, 1.0),
    "by int32": lambda x, cache, slots: _set(cache[1, 2], (slots % 16).int(), x),
    "a column": lambda x, cache, slots: cache[1, 2].index_copy_(
        1, slots % 7 + 1, x.new_ones(16, 5)
    ),
    "part of each": lambda x, cache, slots: _set(cache[:, 0], (slots % 3, slots % 16), x),
    "added": lambda x, cache, slots: cache[1, 2].index_put_((slots % 16,), x, accumulate=True),
    "what is no input": lambda x, cache, slots: _set((cache * 2)[1, 2], slots % 16, x),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
def test_other_writes_are_left_alone(case):
    graph_module, _ = dynamo_call(wrapped(LEFT_ALONE[case]), *inputs(), dynamic=False)
    assert IndexWritesPass()(graph_module.graph) == 0


# --- what Inductor makes of it ----------------------------------------------------------------

NO_COPIES = {
    **CHANGED,
    "the whole": LEFT_ALONE["the whole"],
    "a range": LEFT_ALONE["a range"],
    "an op, of a layer": lambda x, cache, slots: torch.ops.index_writes.store(
        x, cache[1].view(-1, SIZE), slots.abs()
    ),
}


def allocated(code):
    """Numbers of elements that generated code allocates, tensor by tensor; free sizes count 1."""
    shapes = re.findall(r"empty_strided\w*\(\(([^()]*)\)", code)
    return [
        math.prod(int(size) for size in shape.split(",") if size.strip().isdigit())
        for shape in shapes
    ]


@pytest.mark.parametrize(
    ("case", "dynamic"),
    [*((case, True) for case in NO_COPIES), ("slots of a layer", False), ("index_put_", False)],
)
def test_compiled_pieces_hold_no_copy_of_the_cache(case, dynamic):
    layer = wrapped(NO_COPIES[case])
    args = inputs()
    if dynamic:
        for tensor in (args[0], args[2]):
            torch._dynamo.mark_dynamic(tensor, 0)
    expected = [arg.clone() for arg in args]
    result = layer(*expected)
    compiled = torch.compile(
        layer,
        backend="cudagraph_modes",
        options=toy_options(piece_compiler="inductor", disable_cache=True),
    )
    actual, codes = run_and_get_code(compiled, *args)
    torch.testing.assert_close(actual, result)
    torch.testing.assert_close(list(args), expected)
    assert codes
    assert max(number for code in codes for number in (0, *allocated(code))) < BLOCK_SIZE * SIZE
    assert not any("clone" in code for code in codes)


def test_copies_of_the_cache_are_noticed():
    """Without the pass, a layer is copied: the check above can fail."""

    def layer(x, cache, slots):
        cache[2].view(-1, SIZE)[slots] = x
        return x.relu()

    with torch._inductor.config.patch(fx_graph_cache=False):
        _, codes = run_and_get_code(torch.compile(layer), *inputs())
    assert max(number for code in codes for number in allocated(code)) >= LAYER
