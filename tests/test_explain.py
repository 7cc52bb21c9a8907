"""What `explain` tells, on models whose pieces, cuts and keys are known by hand."""

import json
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import compile_backend
from compile_backend.batch import BatchDescriptor
from compile_backend.config import CUDAGraphMode
from compile_backend.errors import ConfigError
from compile_backend.explain import explain
from compile_backend.reports import compact_sizes
from compile_backend.support import AttentionCGSupport

SDPA = "torch._C._nn.scaled_dot_product_attention"
NUM_LAYERS = 12
WIDTH = 8


class Model(torch.nn.Module):
    """12 layers: pieces before the first, between two, and after the last attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, 3 * WIDTH) for _ in range(NUM_LAYERS)
        )
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            query, key, value = layer(x * self.scale).chunk(3, dim=-1)
            x = x + scaled_dot_product_attention(query, key, value)
        return x if shift is None else x + shift


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch.compiler.reset()


def _x(num_tokens: int = 4) -> torch.Tensor:
    return torch.randn(num_tokens, WIDTH)


def test_pieces_cuts_and_distinct_compiles() -> None:
    (graph,) = explain(Model(), _x()).graphs
    assert graph.num_pieces == NUM_LAYERS + 1
    assert graph.num_compiles == 3
    assert [len(piece.names) for piece in graph.pieces] == [1, NUM_LAYERS - 1, 1]
    assert all(piece.uncapturable is None for piece in graph.pieces)
    assert graph.num_eager_sections == NUM_LAYERS
    assert [cut.ops for cut in graph.cuts] == [(SDPA,)]
    assert graph.support == {SDPA: AttentionCGSupport.ALWAYS}


def test_inputs_are_counted_and_named_as_the_model_names_them() -> None:
    (graph,) = explain(Model(), _x(), shift=torch.ones(WIDTH)).graphs
    assert graph.inputs == {
        "parameter": 2 * NUM_LAYERS,
        "buffer or marked static": 1,
        "caller's tensor": 2,
    }
    assert set(graph.caller_inputs) == {"x", "shift"}
    (graph,) = explain(lambda *tensors: tensors[0] + tensors[1], _x(), _x()).graphs
    assert graph.caller_inputs == ("tensors[0]", "tensors[1]")


def test_mode_is_lowered_with_reasons() -> None:
    options = {"cudagraph_mode": "FULL", "attention_support": {SDPA: "UNIFORM_BATCH"}}
    (graph,) = explain(Model(), _x(), options=options).graphs
    assert graph.mode_asked is CUDAGraphMode.FULL
    assert graph.mode_resolved is CUDAGraphMode.FULL_AND_PIECEWISE
    assert [downgrade.after for downgrade in graph.downgrades] == [graph.mode_resolved]
    printed = " ".join(str(explain(Model(), _x(), options=options)).split())
    assert "full graphs of mixed batches need attention support ALWAYS" in printed


def test_fixed_sizes_have_the_graphs_of_one_key() -> None:
    (graph,) = explain(Model(), _x(4)).graphs
    assert not graph.has_free_sizes
    assert graph.call == BatchDescriptor(4, 4)
    assert graph.call_mode is CUDAGraphMode.PIECEWISE
    assert graph.num_graphs == NUM_LAYERS + 1
    (graph,) = explain(Model(), _x(5)).graphs
    assert graph.call_mode is CUDAGraphMode.NONE
    assert graph.num_graphs == 0


def test_free_sizes_have_the_graphs_of_all_keys() -> None:
    options = {"cudagraph_capture_sizes": (2, 4, 16), "max_num_seqs": 4}
    (graph,) = explain(Model(), _x(16), options=options, dynamic=True).graphs
    assert graph.has_free_sizes
    assert {(keys.mode.name, keys.uniform): keys.num_tokens for keys in graph.keys} == {
        ("PIECEWISE", False): (2, 4, 16),
        ("FULL", True): (2, 4),
    }
    assert graph.num_graphs == 3 * (NUM_LAYERS + 1) + 2


def test_a_graph_without_attention_has_one_piece() -> None:
    told = explain(lambda x: x.relu() + 1, _x(), options={"cudagraph_mode": "PIECEWISE"})
    (graph,) = told.graphs
    assert (graph.num_pieces, graph.num_eager_sections) == (1, 0)
    assert graph.mode_resolved is CUDAGraphMode.NONE
    assert graph.keys == ()
    assert told.num_graphs == 0
    assert any("nothing was split out" in note for note in graph.notes)


def test_graph_breaks_make_several_graphs() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x.relu()
        torch._dynamo.graph_break()
        return x + 1

    told = explain(broken, _x(), options={"cudagraph_mode": "FULL"})
    assert len(told.graphs) == 2
    assert told.num_graphs == sum(graph.num_graphs for graph in told.graphs) == 2
    assert "Graph 2" in str(told)


def test_nothing_to_compile() -> None:
    told = explain(lambda x: 3, _x())
    assert told.graphs == ()
    assert "no graph" in str(told)


def test_nothing_is_compiled_and_nothing_remembered() -> None:
    """Neither sizes seen nor cache entries carry over, to later explanations or compiles."""
    model = Model()
    for num_tokens in range(2, 14):
        (graph,) = explain(model, _x(num_tokens)).graphs
        assert not graph.has_free_sizes
    options = {"cudagraph_mode": "PIECEWISE", "piece_compiler": "eager"}
    compiled = torch.compile(model, backend="cudagraph_modes", options=options)
    x = _x()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        torch.testing.assert_close(compiled(x), model(x))
    report = compile_backend.stats(compiled)
    assert (report.graphs, report.total("captures")) == (1, NUM_LAYERS + 1)


def test_a_compiled_model_is_explained_as_what_it_was_made_from() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(x, x, x).relu()

    for original in (Model(), function):
        called = []

        def backend(gm: Any, _inputs: Any, called: list[int] = called) -> Any:
            called.append(1)
            return gm.forward

        told = explain(torch.compile(original, backend=backend), _x())
        assert not called
        assert told.as_dict() == explain(original, _x()).as_dict()


def test_explained_is_what_then_happens() -> None:
    model, x = Model(), _x()
    options = {"piece_compiler": "eager"}
    told = explain(model, x, options=options)
    compiled = torch.compile(model, backend="cudagraph_modes", options=options)
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
    report = compile_backend.stats(compiled)
    assert told.num_pieces == report.pieces
    assert told.num_compiles == report.compiles
    assert told.num_graphs == report.total("captures")
    assert (told.graphs[0].mode_resolved.name,) == report.mode_resolved


def test_gradients_are_left_as_they_were() -> None:
    model = Model()
    explain(model, _x())
    assert torch.is_grad_enabled()
    assert all(parameter.requires_grad for parameter in model.parameters())
    (graph,) = explain(model, _x()).graphs
    assert graph.mode_resolved is CUDAGraphMode.FULL_AND_PIECEWISE


def test_json() -> None:
    told = json.loads(json.dumps(explain(Model(), _x()).as_dict()))
    (graph,) = told["graphs"]
    assert graph["mode_resolved"] == "FULL_AND_PIECEWISE"
    assert graph["support"] == {SDPA: "ALWAYS"}
    assert graph["call"]["num_tokens"] == 4
    assert told["num_graphs"] == NUM_LAYERS + 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cudagraph_mod": "FULL"}, "did you mean cudagraph_mode"),
        ({"cache_dir": ""}, "must name a directory"),
        (
            {"cudagraph_mode": "FULL", "strict": True, "attention_support": {SDPA: "NEVER"}},
            "use PIECEWISE",
        ),
        ({"splitting_ops": ["no function.name"]}, "splitting_ops"),
    ],
)
def test_wrong_options_raise(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        explain(Model(), _x(), options=options)


def test_an_error_of_the_model_is_its_own() -> None:
    with pytest.raises(Exception, match=r"shape|size|multiply"):
        explain(Model(), torch.ones(2, WIDTH + 1))


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((), ""),
        ((3,), "3"),
        ((1, 2, 4), "1, 2, 4"),
        ((1, 2, 3, 4), "1-4"),
        ((1, 2, 4, 8, 16, 24, 32, 48, 64), "1, 2, 4, 8-32 by 8, 48, 64"),
        ((5, 1, 9, 13, 13), "1-13 by 4"),
    ],
)
def test_compact_sizes(sizes: tuple[int, ...], text: str) -> None:
    assert compact_sizes(sizes) == text
