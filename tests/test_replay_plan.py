"""Replay plans give what the sections give, for as long as their graphs hold."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import toy
import transformers
from paged_toy import VOCABULARY, Loop, PagedToy, make_loop
from paged_toy import compiled as compiled_toy
from toy import PIECEWISE, VARIANTS, WIDTH, Twin, rows, toy_model

from compile_backend import Batch, CaptureError, GraphModelRunner, InputSpec, reset
from compile_backend.attention.builder import AttentionBatch
from compile_backend.attention.huggingface import (
    CAUSAL_LM_INPUTS,
    CAUSAL_LM_OUTPUT,
    paged_model,
)
from compile_backend.backend import cudagraph_modes
from compile_backend.build import _only_call
from compile_backend.step_inputs import Dim

TOKENS = Dim.NUM_TOKENS


def plans(call: Any) -> list[Any]:
    """The plans of everything that one `torch.compile` call compiled."""
    facts = cudagraph_modes.facts(call)
    assert facts is not None
    return [plan for built in facts.graphs for plan in built.graph._plans.values()]


@pytest.mark.parametrize("variant", [*VARIANTS, tuple(VARIANTS)], ids=str)
def test_steps_by_plan_equal_eager(variant):
    """`attn_view` returns memory of its input, which has to be looked at in every step."""
    both = Twin(toy_model(variant, 3), cudagraph_mode="PIECEWISE", dynamic=True)
    for _ in range(4):
        for size in (8, 4):
            both(rows(size))
    can_plan = "attn_view" not in variant
    assert [plan.num_replays for plan in plans(both.compiled)] == (
        [len(both.model.layers) + 1] * 2 if can_plan else []
    )
    report = both.stats
    assert report.total("replays", PIECEWISE) == 2 * 3 * (len(both.model.layers) + 1)
    assert report.total("steps", PIECEWISE) == 8


def test_a_plan_ends_with_its_graphs():
    both = Twin(toy_model("attn_new", 2), cudagraph_mode="PIECEWISE")
    for _ in range(3):
        both(rows(8))
    assert len(plans(both.compiled)) == 1
    weight = both.model.layers[1].linear.weight
    weight.data = weight.data.clone()
    both(rows(8))
    assert both.stats.total("captures") == 6
    both(rows(8))
    assert len(plans(both.compiled)) == 1
    with torch.no_grad():
        weight.data = weight.data * 2
        both.eager.layers[1].linear.weight.mul_(2)
    for _ in range(3):
        both(rows(8))
    reset(both.compiled)
    assert not plans(both.compiled)
    for _ in range(4):
        both(rows(8))


def test_written_inputs_are_shown_to_the_caller():
    def function(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return torch.ops.toy.attn_new(x) + 1

    both = Twin(function, cudagraph_mode="PIECEWISE")
    for _ in range(5):
        both(rows(8))
    assert len(plans(both.compiled)) == 1


@pytest.mark.parametrize("debug", ["addresses", "verify"])
def test_checks_of_every_replay_leave_no_plan(debug):
    both = Twin(toy_model("attn_new", 2), cudagraph_mode="PIECEWISE", debug=debug)
    for _ in range(4):
        both(rows(8))
    assert not plans(both.compiled)


def test_a_failed_capture_leaves_no_plan(monkeypatch):
    monkeypatch.setattr(toy, "hooks", [lambda x: x.sum().item()])
    both = Twin(
        lambda x: torch.ops.toy.attn_new(torch.ops.toy.hook(x * 2)) + 1,
        cudagraph_mode="PIECEWISE",
        splitting_ops=["toy::attn_new"],
    )
    for _ in range(5):
        both(rows(8))
    assert both.stats.total("failed_captures") == 1
    assert not plans(both.compiled)


def test_only_ops_of_this_package_are_called_past_the_dispatcher():
    model = PagedToy()
    call = compiled_toy(model, cudagraph_mode="PIECEWISE")
    run_of(call, model)
    (built,) = cudagraph_modes.facts(call).graphs
    assert all(_only_call(section) for section in built.plan.split.eager_sections)
    both = Twin(toy_model("attn_out", 2), cudagraph_mode="PIECEWISE")
    both(rows(4))
    (built,) = cudagraph_modes.facts(both.compiled).graphs
    assert not any(_only_call(section) for section in built.plan.split.eager_sections)


# --- the runner -------------------------------------------------------------------------------


def run_of(call: Any, model: PagedToy, mode: str = "PIECEWISE") -> Loop:
    return make_loop(mode, model, called=call, sizes=[4, 8], limits=(4, 16))


def known_steps(loop: Loop) -> int:
    return len(loop.runner._captured.piecewise._steps)


def prefill_and_decode(loop: Loop, num_steps: int) -> None:
    """Prompts of 3 and 4 tokens, then decoding; each step is compared with the reference."""
    if not loop.tokens:
        requests = [loop.add([1, 2, 3]), loop.add([5, 6, 7, 8])]
        loop.step([(requests[0], 3), (requests[1], 4)])
    for _ in range(num_steps):
        loop.step(loop.grow(0, 1))


def test_known_steps_call_no_model(monkeypatch):
    model = PagedToy()
    loop = run_of(compiled_toy(model), model)
    prefill_and_decode(loop, 1)
    assert known_steps(loop) == 2
    with monkeypatch.context() as patch:
        patch.setattr(loop.runner._parts.model_steps, "call", None)
        prefill_and_decode(loop, 5)
    assert loop.ran() == {"PIECEWISE": [4] * 6 + [8]}
    replays = loop.runner.report().by_key
    assert sum(row.replays for row in replays.values()) == 7 * 3


def test_moved_weights_are_seen_in_known_steps():
    model = PagedToy()
    loop = run_of(compiled_toy(model), model)
    prefill_and_decode(loop, 2)
    assert known_steps(loop) == 2
    for factor in (1, 2):
        model.out[1].weight.data = model.out[1].weight.data * factor
        # The caches hold what other weights made of the tokens so far.
        loop.step([(loop.add([1, 2, 3 + factor]), 3)])
        assert known_steps(loop) == 1  # captured anew, and known again
        loop.step([(loop.add([1, 2, 5 + factor]), 3)])
    captures = sum(row.captures for row in loop.runner.report().by_key.values())
    assert captures == 2 * 3 + 2 * 3


def test_a_move_is_not_lost_between_sizes():
    """One size is served with the new weights before the other one, which was known, is."""
    model = PagedToy()
    loop = run_of(compiled_toy(model), model)
    for _ in range(2):
        loop.step([(loop.add([1, 2, 3]), 3)])
    model.out[0].weight.data = model.out[0].weight.data * 3
    loop.step([(loop.add([1, 2, 3, 4, 5, 6, 7]), 7)])
    for number in range(3):
        loop.step([(loop.add([1, 2, number]), 3)])


def test_a_weight_may_be_deleted():
    model = PagedToy()
    model.unused = torch.nn.Parameter(torch.ones(2))
    loop = run_of(compiled_toy(model), model)
    for number in range(4):
        if number == 2:
            del model.unused
        loop.step([(loop.add([1, 2, number]), 3)])


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_old_weights_are_let_go(mode):
    model = PagedToy()
    loop = run_of(compiled_toy(model), model, mode=mode)
    loop.step([(loop.add([1, 2, 3]), 3)])
    gone: list[str] = []
    weakref.finalize(model.out[0].weight, gone.append, mode)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    for number in range(3):
        loop.step([(loop.add([1, 2, number]), 3)])
    gc.collect()
    assert gone == [mode]


def test_weights_of_another_shape_ask_for_new_graphs():
    """On the reference engine, which describes outputs before it captures."""
    head = torch.nn.Linear(4, 5)
    runner = GraphModelRunner(
        head,
        {"cudagraph_capture_sizes": [2]},
        input_spec=[InputSpec("input", (TOKENS, 4), torch.float32)],
        max_num_seqs=2,
        max_num_batched_tokens=4,
        device="cpu",
    )
    runner.capture(progress=False)
    batch = Batch(query_lens=[2], inputs={"input": torch.ones(2, 4)})
    head.weight, head.bias = (torch.nn.Parameter(torch.ones(1, *rest)) for rest in ((4,), ()))
    with torch.no_grad(), pytest.raises(CaptureError, match="dtype, call recapture"):
        runner.run(batch)
    runner.recapture(progress=False)
    torch.testing.assert_close(runner.run(batch), head(torch.ones(2, 4)).detach())


def test_a_known_step_ends_with_its_plan():
    """Another runner of the same model makes plans on inputs of its own."""
    model = PagedToy()
    call = compiled_toy(model)
    first, second = run_of(call, model), run_of(call, model)
    for loop in (first, second, first, first, second):
        for number in range(4):
            loop.step([(loop.add([1, 2, number]), 3)])


def test_steps_under_autocast_are_not_known():
    model = PagedToy()
    loop = run_of(compiled_toy(model), model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            loop.runner.run(loop.batch([(loop.add([1, 2, 3]), 3)]))
    assert known_steps(loop) == 0


def test_recapture_forgets_known_steps():
    model = PagedToy()
    loop = run_of(compiled_toy(model), model)
    prefill_and_decode(loop, 4)
    assert known_steps(loop) == 2
    loop.runner.recapture(progress=False)
    assert known_steps(loop) == 0
    prefill_and_decode(loop, 2)
    assert known_steps(loop) == 1


class Flag:
    """What a library sets for as long as a model runs."""

    is_up = False


FLAG = Flag()


class Wrapped(torch.nn.Module):
    """A paged toy in Python that may do more."""

    def __init__(self, inner: PagedToy, kind: str) -> None:
        super().__init__()
        self.inner = inner
        self.kind = kind
        self.steps = 0
        self.last_logits: torch.Tensor | None = None
        self.register_buffer("state", torch.zeros(()))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, last: torch.Tensor) -> Any:
        if self.kind == "break":
            positions = positions + 0
            torch._dynamo.graph_break()
        if self.kind == "flag":
            FLAG.is_up = True
        logits = self.inner(tokens, positions, last)
        if self.kind == "flag":
            FLAG.is_up = False
        if self.kind == "nested":
            return {"logits": (logits, None), "twice": logits * 2}
        if self.kind == "counter":
            self.steps += 1
            return logits + self.steps
        if self.kind == "kept":
            self.last_logits = logits
        if self.kind == "rebound":
            self.state = self.state + 1
            return logits + self.state
        if self.kind == "outside":
            torch._dynamo.graph_break()
            return logits * 1
        return logits


@pytest.mark.parametrize(
    ("kind", "is_known"),
    [
        ("plain", True),
        ("nested", True),
        ("flag", True),
        ("break", False),
        ("counter", False),
        ("outside", False),
        ("kept", False),
        ("rebound", False),
    ],
)
def test_only_models_that_are_one_graph_are_known(kind, is_known):
    inner = PagedToy()
    model = Wrapped(inner, kind)
    loop = run_of(compiled_toy(model), inner)
    request = loop.add([1, 2, 3])
    work = [(request, 3)]
    for _ in range(7):
        output = loop.runner.run(loop.batch(work))
        if kind == "nested":
            assert output["logits"][1] is None
            torch.testing.assert_close(output["twice"], output["logits"][0] * 2)
            output["extra"] = "the caller's own"
            output = output["logits"][0]
        loop.done[request] += work[0][1]
        expected = inner.dense(loop.tokens[request][: loop.done[request]])
        expected = expected + (model.steps if kind == "counter" else 0) + model.state
        if kind == "kept":
            torch.testing.assert_close(model.last_logits[:1], output, rtol=0, atol=0)
        torch.testing.assert_close(output[0], expected, rtol=1e-4, atol=1e-4)
        work = loop.grow(request)
    assert output.shape == (1, VOCABULARY)
    assert bool(known_steps(loop)) is is_known


def test_steps_of_hugging_face_models_are_known():
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=31,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    paged = paged_model(model, num_blocks=4, max_model_len=32, backend="sdpa")
    runner = GraphModelRunner(
        compiled_toy(paged.module),
        {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [2]},
        input_spec=CAUSAL_LM_INPUTS,
        output_shape=CAUSAL_LM_OUTPUT,
        max_num_seqs=2,
        max_num_batched_tokens=2,
        metadata_builder=paged.builder,
        device="cpu",
    )
    runner.capture(progress=False)
    inputs = {"input_ids": [[3, 4]], "position_ids": [[4, 5]], "logits_indices": [0, 1]}
    attention = AttentionBatch(seq_lens=[5, 6], block_table=[[0], [1]])
    batch = Batch(query_lens=[1, 1], inputs=inputs, attention=attention)
    first = runner.run(batch)
    torch.testing.assert_close(runner.run(batch), first, rtol=0, atol=0)
    assert len(runner._captured.piecewise._steps) == 1


def test_results_of_known_steps_are_valid_until_the_next_step():
    """They are copies: graphs of other functions share the memory pool of the pieces."""
    assert WIDTH > 1
    model = PagedToy()
    called = compiled_toy(model)
    loop, other = run_of(called, model), run_of(called, model)
    prefill_and_decode(loop, 4)
    prefill_and_decode(other, 4)
    first = loop.step(loop.grow(0, 1))
    kept = first.clone()
    other.step(other.grow(0, 1))
    torch.testing.assert_close(first, kept, rtol=0, atol=0)
    first.zero_()  # as callers may
    other.step(other.grow(0, 1))
    second = loop.step(loop.grow(0, 1))
    assert second.data_ptr() == first.data_ptr()
    assert (second != 0).any()
