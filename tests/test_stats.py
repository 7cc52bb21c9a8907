"""Reports add up what each graph counted, and are plain enough for JSON."""

import copy
import dataclasses
import json

import pytest
import torch
from toy import FULL, NONE, PIECEWISE, Twin, compiled, counts, rows, toy_model, toy_options

from compile_backend import BatchDescriptor, ConfigError, reset, stats
from compile_backend.stats import GraphStats, KeyStats, Report, added_rows

KEY = BatchDescriptor(4, 4)


def test_rows_are_made_once_and_increased_in_place():
    counted = GraphStats()
    counted.at(FULL, KEY).replays += 1
    counted.at(FULL, KEY).replays += 1
    assert counted.rows == {(FULL, KEY): KeyStats(replays=2)}


def test_rows_of_several_graphs_are_added():
    one, other = GraphStats(), GraphStats()
    one.at(FULL, KEY).captures = 2
    other.at(FULL, KEY).captures = 3
    other.at(NONE, KEY).steps = 1
    added = added_rows([one, other])
    assert added == {(FULL, KEY): KeyStats(captures=5), (NONE, KEY): KeyStats(steps=1)}
    assert one.rows[FULL, KEY].captures == 2


def test_a_report_tells_what_was_compiled_and_what_ran():
    both = Twin(toy_model(), cudagraph_mode="PIECEWISE")
    for _ in range(4):
        both(rows(4))
    report = both.stats
    assert (report.graphs, report.pieces, report.eager_sections) == (1, 3, 2)
    assert report.mode_asked == report.mode_resolved == ("PIECEWISE",)
    assert report.downgrades == ()
    assert counts(report, "steps") == {PIECEWISE: 4}
    assert report.total("captures") == 3
    assert report.compile_s > 0
    assert report.capture_s > 0


def test_a_report_is_plain_enough_for_json():
    both = Twin(toy_model(), cudagraph_mode="FULL")
    for _ in range(3):
        both(rows(4))
    plain = json.loads(json.dumps(both.stats.as_dict()))
    (row,) = plain["by_key"]
    assert row["mode"] == "FULL"
    assert row["key"]["num_tokens"] == 4
    assert row["replays"] == 2


@pytest.mark.parametrize("by_key", [{}, {(FULL, KEY): KeyStats(steps=2)}], ids=["none", "some"])
@pytest.mark.parametrize("counted", ["nope", "add", "step"])
def test_what_is_not_counted_is_answered_with_what_is(by_key, counted):
    report = Report(1, 1, 0, 1, 0.0, 0.0, (), (), (), by_key)
    with pytest.raises(ConfigError, match=f"counted='{counted}' is not counted") as caught:
        report.total(counted)
    assert all(item.name in caught.value.fix for item in dataclasses.fields(KeyStats))


def test_totals_take_a_mode_by_name_and_refuse_another():
    report = Report(1, 1, 0, 1, 0.0, 0.0, (), (), (), {(FULL, KEY): KeyStats(steps=2)})
    assert (report.total("steps", "FULL"), report.total("steps", "piecewise")) == (2, 0)
    with pytest.raises(ConfigError, match="mode='HALF' is not a mode"):
        report.total("steps", "HALF")


def test_each_lowering_of_the_mode_is_reported_with_its_reason():
    both = Twin(toy_model(), cudagraph_mode="FULL", attention_support=None)
    both(rows(4))
    assert both.stats.mode_asked == ("FULL",)
    assert both.stats.mode_resolved == ("PIECEWISE",)
    assert len(both.stats.downgrades) == 2
    assert "support" in both.stats.downgrades[0]


def test_a_function_has_a_report():
    run = compiled(lambda x: torch.ops.toy.attn_new(x * 2) + 1)
    run(rows(4))
    assert stats(run).graphs == 1


def test_a_decorated_method_has_a_report():
    class Serving:
        @torch.compile(backend="cudagraph_modes", options=toy_options())
        def forward(self, x):
            return torch.ops.toy.attn_new(x * 2) + 1

    serving = Serving()
    serving.forward(rows(4))
    assert stats(serving.forward).graphs == 1


def test_all_graphs_of_a_broken_function_are_reported():
    def broken(x):
        x = torch.ops.toy.attn_new(x * 2) + 1
        torch._dynamo.graph_break()
        return torch.ops.toy.attn_new(x * 3) + 1

    both = Twin(broken, cudagraph_mode="FULL")
    for _ in range(3):
        both(rows(4))
    assert both.stats.graphs == 2
    assert counts(both.stats, "captures") == {FULL: 2}


def test_a_compiled_module_inside_a_model_has_a_report():
    model = toy_model()
    model.layers[1] = compiled(model.layers[1], cudagraph_mode="FULL")
    with torch.no_grad():
        for _ in range(3):
            model(rows(4))
    assert stats(model.layers[1]).total("replays") == 2


def test_a_module_compiled_in_place_has_a_report():
    model = toy_model()
    model.compile(backend="cudagraph_modes", options=toy_options())
    with torch.no_grad():
        model(rows(4))
    assert stats(model).graphs == 1


def test_calls_that_need_gradients_are_counted():
    run = compiled(lambda x: (x * 2).sum(), cudagraph_mode="FULL")
    for _ in range(2):
        run(rows(4).requires_grad_())
    assert counts(stats(run), "steps") == {NONE: 2}


@pytest.mark.parametrize("other", [toy_model(), lambda x: x, None, 3])
def test_what_was_not_compiled_has_no_report(other):
    with pytest.raises(ConfigError, match=r"was not compiled by torch.compile; pass what"):
        stats(other)


def test_a_model_that_was_not_compiled_is_named_by_its_class():
    with pytest.raises(
        ConfigError, match=r"^compiled=<ToyModel> was not compiled by torch.compile"
    ):
        stats(toy_model())


def _own_backend(graph, _):
    return graph.forward


@pytest.mark.parametrize(
    ("backend", "name"),
    [("eager", "eager"), ("inductor", "inductor"), (_own_backend, "_own_backend")],
)
@pytest.mark.parametrize("ask", [stats, reset])
def test_what_another_backend_compiled_is_named_with_it(ask, backend, name):
    run = torch.compile(lambda x: x + 1, backend=backend)
    text = f"was not compiled by this backend, but by '{name}'; pass what torch"
    with pytest.raises(ConfigError, match=text):
        ask(run)
    module = toy_model()
    module.compile(backend=backend)
    with pytest.raises(ConfigError, match=f"^compiled=<.*> {text}"):
        ask(module)


def test_what_was_not_called_yet_has_an_empty_report():
    assert stats(compiled(lambda x: x + 1)).graphs == 0


def test_two_equal_models_have_their_own_reports():
    models = [compiled(toy_model(), cudagraph_mode="FULL") for _ in range(2)]
    with torch.no_grad():
        for model in models:
            for _ in range(3):
                model(rows(4))
    assert [stats(model).total("replays") for model in models] == [2, 2]


def test_a_deep_copy_of_a_compiled_model_has_its_own_weights():
    first = compiled(toy_model(), cudagraph_mode="FULL")
    x = rows(4)
    with torch.no_grad():
        for _ in range(3):
            first(x)
        second = copy.deepcopy(first)
        second.head.weight.zero_()
        for _ in range(3):
            torch.testing.assert_close(second(x), second.head.bias.expand(4, -1))
            torch.testing.assert_close(first(x), first._orig_mod(x))
