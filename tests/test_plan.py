"""A plan tells in words what of the user's options came to nothing, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy import compiled, dynamo_call, rows

from compile_backend.config import CompilationConfig
from compile_backend.context import set_forward_context
from compile_backend.errors import ConfigError
from compile_backend.plan import GraphPlan, plan_graph
from compile_backend.support import AttentionCGSupport, default_splitting_ops

FUNCTIONAL = "torch.nn.functional.scaled_dot_product_attention"


def attend(x: torch.Tensor) -> torch.Tensor:
    """A builtin and an op of a library."""
    q = x.view(1, 1, *x.shape)
    y = torch.nn.functional.scaled_dot_product_attention(q * 2, q, q)
    return torch.ops.toy.attn_new(y.view_as(x) + 1) + 1


def plan_of(function: Any, *args: Any, dynamic: bool | None = None, **options: Any) -> GraphPlan:
    graph, inputs = dynamo_call(function, *args, dynamic=dynamic)
    return plan_graph(graph, inputs, CompilationConfig.from_options(options))


# --- names that nothing has -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({}, []),
        ({"splitting_ops": []}, []),
        ({"splitting_ops": ["toy::attn_new"]}, []),
        ({"splitting_ops": ["toy::attn_knew"]}, ["toy::attn_knew; it runs without CUDA graphs"]),
        ({"splitting_ops": ["toy::*", "my_*", "a.b"]}, ["called my_*, a.b; check the spelling"]),
        (
            {"splitting_ops": ["toy::attn_knew"], "cudagraph_mode": "NONE"},
            ["called toy::attn_knew; check the spelling"],
        ),
        ({"attention_support": {FUNCTIONAL: "ALWAYS"}}, []),
        ({"attention_support": {"torch.*": "ALWAYS"}}, []),
        (
            {"attention_support": {"toy::attn_new": "ALWAYS"}},
            ["attention_support: nothing that splits"],
        ),
        (
            {"attention_support": {"toy::attn_new": "ALWAYS"}, "splitting_ops": ["toy::attn_new"]},
            [],
        ),
        (
            {"attention_support": {"flash_attn_2": "UNIFORM_BATCH", FUNCTIONAL: "NEVER"}},
            ["this graph is called flash_attn_2; check"],
        ),
    ],
    ids=str,
)
def test_names_that_stand_for_nothing_are_noted(options, texts):
    notes = [n for n in plan_of(attend, rows(4), **options).notes if "called" in n]
    assert len(notes) == len(texts)
    assert all(text in note for text, note in zip(texts, notes, strict=True))


def test_a_level_declared_for_a_function_holds_by_whatever_name_graphs_give_it():
    plan = plan_of(attend, rows(4), attention_support={FUNCTIONAL: "NEVER"})
    assert list(plan.support.values()) == [AttentionCGSupport.NEVER]


def test_a_default_without_graphs_is_told():
    """As with attention written in plain ops; a mode that was asked for is nobody's surprise."""
    (note,) = plan_of(lambda x: x * 2, rows(4)).notes
    assert "a graph runs without CUDA graphs" in note
    assert "set cudagraph_mode='FULL'" in note
    for mode in ("NONE", "FULL"):
        assert not plan_of(lambda x: x * 2, rows(4), cudagraph_mode=mode).notes
    with set_forward_context():
        assert not plan_of(lambda x: x * 2, rows(4)).notes
    assert plan_of(attend, rows(4)).notes == ()


def test_the_default_list_notes_nothing():
    assert plan_of(lambda x: x * 2, rows(4), cudagraph_mode="FULL").notes == ()
    options = {"splitting_ops": default_splitting_ops(), "cudagraph_mode": "FULL"}
    (note,) = plan_of(lambda x: x * 2, rows(4), **options).notes
    assert "nothing in this graph is called" in note


def test_known_ops_are_not_missed_where_another_one_splits():
    names = [*default_splitting_ops(), "my::attention"]
    (note,) = plan_of(attend, rows(4), splitting_ops=names).notes
    assert "is called my::attention; check" in note


def test_they_are_told_once(caplog):
    run = compiled(lambda x: x * 2, dynamic=False, splitting_ops=["toy::attn_knew"])
    for n in (4, 5, 6):
        run(rows(n))
    told = [r.message for r in caplog.records if "nothing in this graph" in r.message]
    assert told == [message for message in told if "toy::attn_knew" in message]
    assert len(told) == 1


# --- why something cannot be captured ---------------------------------------------------------


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize(
    ("function", "argument", "name", "piece"),
    [
        (lambda x, s: torch.ops.toy.attn_new(x * s) + 1, 0.5, "s", "piece_0"),
        (lambda x, s: torch.ops.toy.attn_new(x * 2) * s**0.5, 0.5, "s", "piece_2"),
        (
            lambda x, config: torch.ops.toy.attn_new(x * 2) * config["scale"][0],
            {"scale": [0.25]},
            "config['scale'][0]",
            "piece_2",
        ),
    ],
    ids=["before attention", "computed from", "within a dict"],
)
def test_a_float_that_changes_is_told_by_its_name(mode, function, argument, name, piece):
    options = {
        "splitting_ops": ["toy::attn_new"],
        "attention_support": {"toy::attn_new": "ALWAYS"},
        "cudagraph_mode": mode,
    }
    plan = plan_of(function, rows(4), argument, dynamic=True, **options)
    reasons = [*map(str, plan.resolution.downgrades), *plan.notes]
    (reason,) = [text for text in reasons if f"{piece} takes the Python float `{name}`" in text]
    assert "which may change from call to call; pass it as a tensor" in reason
    assert list(plan.uncapturable) == [piece]
    assert not any(word in " ".join(reasons) for word in ("depends on data", "support"))


def test_all_pieces_that_no_graph_can_hold_are_counted():
    plan = plan_of(
        lambda x, s: torch.ops.toy.attn_new(x * s) * s,
        rows(4),
        0.5,
        dynamic=True,
        splitting_ops=["toy::attn_new"],
        cudagraph_mode="FULL",
    )
    assert "; 1 other piece cannot be captured either" in str(plan.resolution.downgrades[0])


def test_strict_says_which_piece_and_why():
    options = {"cudagraph_mode": "FULL", "strict": True}
    with pytest.raises(ConfigError, match="piece_0 takes the Python float `s`"):
        plan_of(lambda x, s: x * s, rows(4), 0.5, dynamic=True, **options)


def test_a_number_read_from_data_is_told_as_that():
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        plan = plan_of(lambda x: x * x.sum().item(), rows(4), cudagraph_mode="FULL")
    assert "piece_0 has a size or number that depends on data" in str(plan.resolution.downgrades)
