"""What ranks exchange in a graph: every form that is rewritten, and every near miss.

Graphs are looked at here. What they compute is checked by real processes in `test_two_ranks`.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from rank_graphs import (
    WIDTH,
    assumes_nothing,
    exchanged,
    functional_sum,
    inputs_of,
    is_sound,
    layers,
    rms,
    summed,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from toy import dynamo_graph, toy_options

from compile_backend.backend import stats
from compile_backend.explain import explain
from compile_backend.piece_key import structural_key
from compile_backend.weights import Weights
from passes.local_tensors import LocalTensorsPass
from passes.sequence_parallel import SequenceParallelismPass

pytestmark = pytest.mark.usefixtures("other_group", "without_gradients")


# --- wrappers ---------------------------------------------------------------------------------


class Block(nn.Module):
    """An embedding, two linear layers, and a head."""

    def __init__(self, *, bias=False, rows=10):
        super().__init__()
        self.embed = nn.Embedding(rows, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=bias)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, rows, bias=False)
        self.eval().requires_grad_(requires_grad=False)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.down(self.up(x).relu()))


ENDS = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
LAYERS = {"up": ColwiseParallel(), "down": RowwiseParallel()}
IDS = torch.arange(6)[None]


def unwrapped(plan, **kwargs):
    """Places changed in the graph of a sharded block, and the graph."""
    model = parallelize_module(Block(**kwargs), init_device_mesh("cpu", (2,)), plan)
    graph = dynamo_graph(model, IDS, dynamic=True).graph
    changed = LocalTensorsPass()(graph)
    assert is_sound(graph)
    return changed, graph


def wrappers(graph):
    values = [(node, node.meta.get("example_value")) for node in graph.nodes]
    return [node for node, value in values if type(value).__name__ == "DTensor"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("plan", "sent"),
    [
        (LAYERS, {"all_reduce": 1}),
        ({**LAYERS, **ENDS}, {"all_reduce": 2, "all_gather": 1}),
        ({"up": ColwiseParallel(output_layouts=Replicate())}, {"all_gather": 1}),
    ],
    ids=["layers", "all", "gathered"],
)
def test_wrappers_become_what_a_rank_holds(plan, sent, bias):
    changed, graph = unwrapped(plan, bias=bias)
    assert changed == 3 * len(plan)
    assert exchanged(graph) == sent
    assert {node.op for node in wrappers(graph)} == {"placeholder"}
    (output,) = graph.find_nodes(op="output")
    assert output.args[0][0].meta["example_value"].shape[-1] == 10


@pytest.mark.parametrize(
    ("plan", "kwargs"),
    [
        ({**LAYERS, "embed": RowwiseParallel(input_layouts=Replicate())}, {"rows": 11}),
        ({"head": ColwiseParallel(output_layouts=Replicate())}, {"rows": 11}),
        ({**LAYERS, "up": ColwiseParallel(use_local_output=False)}, {}),
        ({**LAYERS, "head": ColwiseParallel(input_layouts=Shard(1))}, {}),
    ],
    ids=["uneven table", "uneven head", "relu of a wrapper", "rows put together"],
)
def test_what_is_not_known_stays_wrapped(plan, kwargs):
    """All of it, even where a part is known."""
    changed, graph = unwrapped(plan, **kwargs)
    assert changed == 0
    assert not exchanged(graph)


def summed_in_a_wrapper(order=(0, 1), placement=None, **options):
    """A function that gives the sum of what each rank wraps, or something close to it."""
    mesh, held = DeviceMesh("cpu", list(order)), (placement or Partial(),)

    def function(x):
        wrapped = DTensor.from_local(x, mesh, held, run_check=False)
        return wrapped.redistribute(placements=(Replicate(),), **options).to_local().relu()

    return function


NOT_A_PLAIN_SUM = {
    "the mean": {"placement": Partial("avg")},
    "the largest": {"placement": Partial("max")},
    "in another dtype": {"forward_dtype": torch.float32},
    "ranks in another order": {"order": (1, 0)},
}


@pytest.mark.parametrize("name", NOT_A_PLAIN_SUM)
def test_what_stays_wrapped_runs_without_graphs_and_says_so(name):
    """A wrapper that was lost would give another dtype, or another reduction."""
    x = torch.linspace(-2, 2, 32, dtype=torch.bfloat16).view(4, 8)
    options = {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [4], "piece_compiler": "eager"}
    for kwargs, is_known in (({}, True), (NOT_A_PLAIN_SUM[name], False)):
        torch.compiler.reset()
        function = summed_in_a_wrapper(**kwargs)
        assert (LocalTensorsPass()(dynamo_graph(function, x).graph) == 2) is is_known
        compiled = torch.compile(function, backend="cudagraph_modes", options=options)
        outputs = [compiled(x) for _ in range(3)]
        expected = function(x)
        assert all(output.dtype is expected.dtype for output in outputs)
        assert all(torch.equal(output, expected) for output in outputs)
        assert stats(compiled).total("replays") == (2 if is_known else 0)
        reasons = explain(function, x, options=options).graphs[0].downgrades
        assert any("only wraps other tensors" in str(reason) for reason in reasons) is not is_known


def test_unwrapped_layers_assume_nothing_of_sizes():
    plan = {**LAYERS, "head": ENDS["head"]}
    assert assumes_nothing(parallelize_module(Block(), init_device_mesh("cpu", (2,)), plan), IDS)


def test_wrappers_that_are_cut_in_other_ways_are_other_pieces():
    """A wrapper has the sizes of the whole, and so tells nothing of what a rank computes."""
    mesh = init_device_mesh("cpu", (2,))
    parts = (torch.ones(4, 8), torch.ones(8, 4), torch.ones(4, 8))
    keys = [
        structural_key(
            dynamo_graph(
                lambda x, w: x + w.to_local().sum(),
                torch.ones(3),
                DTensor.from_local(part, mesh, [Shard(0 if len(part) == 4 else 1)]),
            )
        )
        for part in parts
    ]
    assert keys[0] == keys[2] != keys[1]


def test_weights_inside_of_wrappers_are_looked_after():
    """They are kept in slots, not in the wrapper's dictionary."""
    model = parallelize_module(Block(), init_device_mesh("cpu", (2,)), LAYERS)
    weights = Weights(model)
    model.up.weight.copy_(model.up.weight * 2)
    assert not weights.have_moved()
    model.up.weight._local_tensor = model.up.weight.to_local().clone()
    assert weights.have_moved()
    weights.note()
    assert not weights.have_moved()
    model.down.weight = nn.Parameter(model.down.weight.clone(), requires_grad=False)
    assert weights.have_moved()


def test_a_graph_without_wrappers_is_left_alone():
    graph = dynamo_graph(Block(), IDS).graph
    before = str(graph)
    assert LocalTensorsPass()(graph) == 0
    assert str(graph) == before


# --- sequence parallelism ---------------------------------------------------------------------


def in_shares(function, *args, dynamic=True, **kwargs):
    rows = args[0]
    for dim, size in enumerate(rows.shape[:-1]):
        if dynamic and size > 1:
            torch._dynamo.mark_dynamic(rows, dim)
    graph = dynamo_graph(lambda *inputs: function(*inputs, **kwargs), *args).graph
    changed = SequenceParallelismPass()(graph)
    assert is_sound(graph)
    return changed, graph


FORMS = {
    "as transformers has it": {},
    "a norm of torch": {"norm": lambda x, w: F.rms_norm(x, (WIDTH,), w, 1e-6)},
    "layer_norm": {"norm": lambda x, w: F.layer_norm(x, (WIDTH,), w)},
    "the residual behind": {"add": lambda stream, part: part + stream},
    "a sum of its own": {
        "reduce": lambda x: dist._functional_collectives.all_reduce(x, "sum", "0")
    },
    "no product": {"product": lambda x, w: x.sin()},
    "a bias": {"product": lambda x, w: F.linear(x, w, w[0])},
    "two readers of a norm": {"norm": lambda x, w: (n := rms(x, w)).sin() + n},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_comes_in_shares(form):
    changed, graph = in_shares(layers, *inputs_of(), **FORMS[form])
    assert changed == 2
    assert exchanged(graph) == {"reduce_scatter": 2, "all_gather": 2}


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.bfloat16, (5,)),
        (torch.float16, (1, 5)),
        (torch.float32, (3, 5)),
        (torch.bfloat16, (2, 3, 5)),
    ],
)
def test_dtypes_and_shapes(dtype, shape):
    changed, graph = in_shares(layers, *inputs_of(dtype, shape))
    assert changed == 2
    (output,) = graph.find_nodes(op="output")
    value = output.args[0][0].meta["example_value"]
    assert (value.dtype, value.dim(), value.shape[-1]) == (dtype, len(shape) + 1, WIDTH)


def test_the_residual_stays_in_shares():
    """Rows of three layers are picked once of the residual, and in front of each sum."""
    _, graph = in_shares(layers, *inputs_of(), count=3)
    assert len(graph.find_nodes(op="call_method", target="index_select")) == 4
    adds = [node for node in graph.nodes if node.target is torch.add]
    assert len(adds) == 3
    assert all(node.meta["example_value"].shape[1] != 5 for node in adds)


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_a_product_reads_is_filled_up_not_what_it_gives(dynamic):
    """Nor is a product left that only tells how many rows there are."""
    _, graph = in_shares(layers, *inputs_of(), count=2, dynamic=dynamic)
    products = [node for node in graph.nodes if node.target is F.linear]
    assert len(products) == 2
    assert {node.args[0].target for node in products} == {"index_select"}


@pytest.mark.parametrize("is_weight", [False, True])
def test_what_a_product_reads_may_be_written_behind_it(is_weight):
    """Buffers are used again: the product stays where it was, and is filled up there."""

    def model(x, w, weight):
        buffers = [x.sin(), w.clone()]
        made = F.linear(*buffers)
        buffers[is_weight].zero_()
        return rms(x + summed(made), weight), *buffers

    changed, graph = in_shares(model, *inputs_of())
    assert changed == 1
    (product,) = [node for node in graph.nodes if node.target is F.linear]
    (write,) = graph.find_nodes(op="call_method", target="zero_")
    assert product < write
    assert product.args[0].target == "index_select"


def test_a_product_stays_under_its_autocast():
    def model(x, w, weight):
        with torch.autocast("cpu", torch.bfloat16):
            made = F.linear(x, w)
        return rms(x.to(torch.bfloat16) + functional_sum(made), weight.to(torch.bfloat16))

    graph = dynamo_graph(model, *inputs_of()).graph
    assert SequenceParallelismPass()(graph) == 1
    (product,) = [node for node in graph.nodes if node.target is F.linear]
    (leaves,) = [node for node in graph.nodes if "exit_autocast" in node.name]
    assert product < leaves


def test_numbers_of_rows_that_need_no_filling_are_not_filled_up():
    _, graph = in_shares(layers, *inputs_of(shape=(1, 6)), dynamic=False)
    # The residual's own rows are picked all the same.
    assert len(graph.find_nodes(op="call_method", target="index_select")) == 1
    assert not graph.find_nodes(op="call_method", target="narrow")


def test_shares_assume_nothing_of_sizes():
    """Nor of few rows: where a rank's share is one row, and where some ranks have none."""
    assert assumes_nothing(layers, *inputs_of())


def test_no_rows_are_left_alone():
    """There is no last row that could fill up a share."""
    changed, graph = in_shares(layers, *inputs_of(shape=(1, 0)), dynamic=False)
    assert changed == 0
    assert exchanged(graph) == {"all_reduce": 2}


def test_a_sum_may_start_the_stream():
    def model(x, w, weight):
        return layers(summed(F.linear(x, w)), w, weight)

    changed, graph = in_shares(model, *inputs_of())
    assert changed == 2  # nobody norms the first one before it is needed whole

    def normed_first(x, w, weight):
        stream = summed(F.linear(x, w))
        return rms(stream + summed(F.linear(rms(stream, weight), w)), weight)

    changed, graph = in_shares(normed_first, *inputs_of())
    assert changed == 2
    assert exchanged(graph) == {"reduce_scatter": 2, "all_gather": 2}


def test_a_stream_that_others_read_is_put_together_there():
    """The last sum of the chain then gives the whole stream, and its norm is everyone's."""

    def model(x, w, weight):
        stream = x + summed(F.linear(x, w))
        stream = stream + summed(F.linear(rms(stream, weight), w))
        return rms(stream, weight), stream.view(-1).sin()

    changed, graph = in_shares(model, *inputs_of())
    assert changed == 2
    assert exchanged(graph) == {"reduce_scatter": 2, "all_gather": 2}
    views = graph.find_nodes(op="call_method", target="view")
    for view in views:
        memory = [n.meta["example_value"].untyped_storage()._cdata for n in (view, view.args[0])]
        assert memory[0] == memory[1]


def _read_inside(x, w, weight):
    wide = x.to(torch.float32)
    mean = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(mean + 1e-6)), mean


def _written(x, w, weight):
    stream = x + summed(F.linear(x, w))
    normed = rms(stream, weight)
    stream.add_(1)
    return normed


NEAR_MISSES = {
    "the largest": lambda x, w, n: layers(
        x, w, n, reduce=lambda y: summed(y, op=dist.ReduceOp.MAX)
    ),
    "the mean": lambda x, w, n: layers(x, w, n, reduce=lambda y: summed(y, op=dist.ReduceOp.AVG)),
    "another dtype": lambda x, w, n: layers(x.double(), w.double(), n.double()),
    "the sum widens": lambda x, w, n: layers(
        x, w, n, reduce=lambda y: summed(y.to(torch.bfloat16))
    ),
    "the sum broadcasts": lambda x, w, n: layers(
        x, w, n, count=1, reduce=lambda y: summed(y[:, :1].clone())
    ),
    "somebody reads the sum": lambda x, w, n: layers(
        x, w, n, reduce=lambda y: (s := summed(y)) + s.sin()
    ),
    "somebody reads the stream": lambda x, w, n: layers(
        x, w, n, count=1, norm=lambda s, weight: rms(s, weight) + s
    ),
    "somebody reads inside of the norm": lambda x, w, n: _read_inside(
        x + summed(F.linear(x, w)), w, n
    ),
    "a norm over more": lambda x, w, n: layers(
        x, w, n, norm=lambda s, weight: F.layer_norm(s, s.shape[-2:])
    ),
    "no norm": lambda x, w, n: layers(x, w, n, norm=lambda s, weight: s.relu()),
    "an input is summed in place": lambda x, w, n: rms(x + summed(w), n),
    "the stream is written": _written,
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    changed, graph = in_shares(NEAR_MISSES[name], *inputs_of(shape=(1, WIDTH)), dynamic=False)
    assert changed == 0
    assert not exchanged(graph).keys() & {"reduce_scatter", "all_gather"}
    assert exchanged(graph)["all_reduce"]


def test_groups_are_not_mixed(other_group):
    """The stream of one group ends where another one adds to it."""

    def model(x, w, weight):
        stream = x + summed(F.linear(x, w))
        stream = stream + summed(F.linear(rms(stream, weight), w), other_group)
        return rms(stream, weight)

    changed, graph = in_shares(model, *inputs_of())
    assert changed == 1
    assert exchanged(graph) == {"all_reduce": 1, "reduce_scatter": 1, "all_gather": 1}


def test_nothing_is_done_under_gradients():
    x, w, weight = inputs_of()
    w.requires_grad_()
    seen = []

    def backend(graph_module, _):
        seen.append(SequenceParallelismPass()(graph_module.graph))
        return graph_module.forward

    with torch.enable_grad():
        torch.compile(
            lambda *args: layers(*args, reduce=functional_sum),
            backend=backend,
        )(x, w, weight)
    assert seen == [0]


def test_the_backend_counts_it():
    options = toy_options(pass_config={"enable_sequence_parallelism": True})
    (graph,) = explain(layers, *inputs_of(), options=options).graphs
    assert graph.passes["sequence_parallelism"] == 2
    (graph,) = explain(lambda x: x + 1, torch.ones(3), options=options).graphs
    assert "enable_sequence_parallelism was asked for and changed nothing in this graph" in (
        graph.notes
    )
