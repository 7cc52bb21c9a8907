"""Each pass: what it changes, what it must leave alone, and equal results before and after."""

import operator

import pytest
import torch
from torch import nn

from compile_backend.pipeline import passes_before_split
from passes.additive_mask import AdditiveMaskPass
from passes.constant_tensors import ConstantTensorsPass
from passes.decompose_sizes import DecomposeSizesPass

sdpa = nn.functional.scaled_dot_product_attention


pytestmark = pytest.mark.usefixtures("without_gradients")


def rewritten(function, graph_pass, *args, dynamic=True):
    """Number of places changed, the rewritten graph, and results that equal eager's."""
    seen = {}

    def backend(graph_module, example_inputs):
        seen["changed"] = graph_pass(graph_module.graph)
        graph_module.graph.lint()
        graph_module.recompile()
        seen["graph"] = graph_module.graph
        return graph_module.forward

    results = torch.compile(function, backend=backend, dynamic=dynamic)(*args)
    torch.testing.assert_close(results, function(*args), rtol=0, atol=0)
    return seen["changed"], seen["graph"]


def calls(graph, target):
    return [node for node in graph.nodes if node.target is target]


def test_pass_names_and_identities_are_distinct():
    passes = passes_before_split()
    assert len({graph_pass.name for graph_pass in passes}) == len(passes)
    assert len({graph_pass.uuid() for graph_pass in passes}) == len(passes)


class TestDecomposeSizes:
    def test_a_whole_size_becomes_integers(self):
        def saved_shape(x):
            size = x.size()
            return torch.relu(x).reshape(-1).view(size)

        _, graph = rewritten(saved_shape, DecomposeSizesPass(), torch.randn(6, 4))
        assert not any(
            isinstance(node.meta.get("example_value"), torch.Size) for node in graph.nodes
        )

    def test_a_tuple_used_whole_becomes_its_elements(self):
        """Dynamo takes tuples apart itself; opaque functions and other front ends do not."""
        value = torch.randn(6, 4)
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        parts = graph.call_function(torch.chunk, (x, 2), {"dim": 1})
        whole = graph.call_function(torch.cat, (parts,))
        second = graph.call_function(operator.getitem, (parts, 1))
        graph.output((whole, second))
        for node, meta in ((x, value), (parts, torch.chunk(value, 2, 1)), (second, value[:, 2:])):
            node.meta["example_value"] = meta
        before = torch.fx.GraphModule(nn.Module(), graph)(value)
        assert DecomposeSizesPass()(graph) == 1
        graph.lint()
        assert all(user.target is operator.getitem for user in parts.users)
        after = torch.fx.GraphModule(nn.Module(), graph)(value)
        torch.testing.assert_close(after, before, rtol=0, atol=0)

    def test_graph_without_sizes_and_tuples_is_left_alone(self):
        changed, _ = rewritten(lambda x: torch.relu(x) + 1, DecomposeSizesPass(), torch.ones(3))
        assert changed == 0

    @pytest.mark.parametrize("rows", [2, 5])
    def test_slices_and_negative_picks_of_a_size(self, rows):
        def picks(x):
            size = x.shape
            return x.reshape(*size[:-1], size[-1] // 2, 2) + size[-2]

        rewritten(picks, DecomposeSizesPass(), torch.randn(rows, 4))


class TestAdditiveMask:
    def qkv(self, dtype=torch.float32):
        return [torch.randn(1, 2, 5, 8, dtype=dtype) for _ in range(3)]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_one_conversion_serves_all_layers(self, dtype):
        def layers(q, k, v, allowed):
            mask = allowed.logical_or(allowed)
            q = sdpa(q, k, v, attn_mask=mask)
            q = sdpa(q, k, v, mask)
            return sdpa(q, k, v, attn_mask=mask, scale=0.3)

        allowed = torch.ones(5, 5, dtype=torch.bool).tril()
        changed, graph = rewritten(layers, AdditiveMaskPass(), *self.qkv(dtype), allowed)
        assert changed == 3
        assert len(calls(graph, torch.masked_fill)) == 1

    def test_a_mask_that_is_an_input_is_converted_behind_all_inputs(self):
        def layer(allowed, q, k, v):
            return sdpa(q, k, v, attn_mask=allowed)

        changed, _ = rewritten(
            layer, AdditiveMaskPass(), torch.ones(5, 5, dtype=torch.bool).tril(), *self.qkv()
        )
        assert changed == 1

    def test_rows_with_nothing_allowed_give_what_they_gave(self):
        allowed = torch.ones(5, 5, dtype=torch.bool).tril()
        allowed[2] = False

        def layer(q, k, v, allowed):
            return sdpa(q, k, v, attn_mask=allowed).nan_to_num(7.0)

        assert rewritten(layer, AdditiveMaskPass(), *self.qkv(), allowed)[0] == 1

    def test_masks_of_two_dtypes_are_two_conversions(self):
        def layers(q, k, v, allowed):
            half = [t.to(torch.bfloat16) for t in (q, k, v)]
            return sdpa(q, k, v, attn_mask=allowed), sdpa(*half, attn_mask=allowed)

        allowed = torch.ones(5, 5, dtype=torch.bool).tril()
        changed, graph = rewritten(layers, AdditiveMaskPass(), *self.qkv(), allowed)
        assert changed == 2
        assert len(calls(graph, torch.masked_fill)) == 2

    @pytest.mark.parametrize("kind", ["additive", "causal", "none"])
    def test_near_misses_are_left_alone(self, kind):
        mask = torch.zeros(5, 5)

        def layer(q, k, v, mask):
            if kind == "additive":
                return sdpa(q, k, v, attn_mask=mask)
            return sdpa(q, k, v, is_causal=kind == "causal") + mask.sum()

        assert rewritten(layer, AdditiveMaskPass(), *self.qkv(), mask)[0] == 0


class TestConstantTensors:
    @pytest.mark.parametrize(
        ("number", "kwargs"), [(0.5, {}), (3, {}), (True, {}), (2, {"dtype": torch.float64})]
    )
    def test_a_scalar_is_filled(self, number, kwargs):
        def function(x):
            return torch.where(x > 0, torch.tensor(number, **kwargs), x)

        changed, graph = rewritten(function, ConstantTensorsPass(), torch.randn(4), dynamic=False)
        assert changed == 1
        assert not calls(graph, torch.tensor)

    def test_lists_are_left_alone(self):
        changed, _ = rewritten(
            lambda x: x + torch.tensor([1.0, 2.0]), ConstantTensorsPass(), torch.randn(2)
        )
        assert changed == 0

    def test_an_empty_list_is_allocated(self):
        changed, graph = rewritten(
            lambda x: torch.cat((torch.tensor([]), x)), ConstantTensorsPass(), torch.randn(2)
        )
        assert changed == 1
        assert not calls(graph, torch.tensor)

    @staticmethod
    def moved(write: bool) -> tuple[int, torch.fx.Graph]:
        """A constant made on the CPU and moved, possibly after somebody wrote to it."""
        graph = torch.fx.Graph()
        constant = graph.call_function(torch.tensor, (4,))
        constant.meta["example_value"] = torch.tensor(4)
        if write:
            graph.call_method("add_", (constant, 1)).meta["example_value"] = constant.meta[
                "example_value"
            ]
        there = graph.call_method("to", (constant, torch.device("meta")))
        there.meta["example_value"] = torch.tensor(4, device="meta")
        graph.output((there,))
        return ConstantTensorsPass()(graph), graph

    def test_a_constant_that_moves_is_filled_where_it_goes(self):
        changed, graph = self.moved(write=False)
        (filled,) = calls(graph, torch.full)
        assert changed == 2
        assert filled.args == ((), 4)
        assert filled.kwargs == {"dtype": torch.int64, "device": torch.device("meta")}

    def test_a_constant_that_is_written_before_it_moves_is_left_alone(self):
        _, graph = self.moved(write=True)
        assert len([node for node in graph.nodes if node.target == "to"]) == 1
