"""What callers of a runner get back, and what it refuses since nobody would notice."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from paged_toy import PagedToy, make_loop

from compile_backend import (
    Batch,
    CaptureError,
    ConfigError,
    CUDAGraphMode,
    Dim,
    GraphModelRunner,
    InputSpec,
    stats,
)

ROWS = InputSpec("x", (Dim.NUM_TOKENS, 3), torch.float32)


def runner_of(
    model: Any,
    *specs: InputSpec,
    sizes: tuple[int, ...] = (2, 4),
    output_shape: tuple[Any, ...] = (Dim.NUM_TOKENS,),
    **options: Any,
) -> GraphModelRunner:
    runner = GraphModelRunner(
        model,
        {"cudagraph_capture_sizes": sizes, **options},
        input_spec=specs or (ROWS,),
        max_num_seqs=4,
        max_num_batched_tokens=8,
        output_shape=output_shape,
        device="cpu",
    )
    runner.capture(progress=False)
    return runner


def batch(num_tokens: int, value: float = 1.0, **facts: Any) -> Batch:
    x = torch.full((num_tokens, 3), value)
    return Batch(query_lens=[num_tokens], inputs={"x": x}, **facts)


def test_what_a_caller_does_to_its_outputs_is_gone_in_the_next_step() -> None:
    runner = runner_of(lambda x: {"y": x * 2, "kept": x})
    outputs = runner.run(batch(2))
    outputs["y"] = outputs["y"] + 100
    outputs.pop("kept")
    again = runner.run(batch(2, 5.0))
    assert again["y"].tolist() == [[10.0] * 3] * 2
    assert again["kept"].tolist() == [[5.0] * 3] * 2


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "NONE"])
def test_a_size_that_stays_is_none_that_changes(mode: str) -> None:
    """Where it is that of the largest batch, too; cut with the others it would lose its end."""

    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, torch.arange(4)

    called = model
    if mode == "PIECEWISE":
        options = {"cudagraph_mode": mode, "piece_compiler": "eager"}
        called = torch.compile(model, backend="cudagraph_modes", options=options)
    with pytest.raises(
        ConfigError, match=r"output_shape.*but the model returned a tensor of \[4\]"
    ):
        runner_of(called, cudagraph_mode=mode).run(batch(3))


@pytest.mark.parametrize("output_shape", [(Dim.NUM_TOKENS,), ()])
def test_a_tensor_changed_in_shape_is_whole_in_the_next_step(
    output_shape: tuple[Any, ...],
) -> None:
    runner = runner_of(lambda x: x * 2, output_shape=output_shape)
    runner.run(batch(2)).t_()
    assert runner.run(batch(2, 5.0)).tolist() == [[10.0] * 3] * 2


def test_a_model_that_returns_nothing_runs_once_a_step() -> None:
    calls = torch.zeros((), dtype=torch.int64)
    runner = runner_of(lambda x: calls.add_(1) and None)
    before = int(calls)
    for _ in range(5):
        assert runner.run(batch(2)) is None
    assert int(calls) - before == 5


def test_every_size_that_changes_is_cut() -> None:
    specs = (
        InputSpec("x", (Dim.NUM_TOKENS,), torch.float32),
        InputSpec("r", (Dim.NUM_REQS,), torch.float32),
    )
    runner = runner_of(
        lambda x, r: r[:, None] * x[None],
        *specs,
        output_shape=(Dim.NUM_REQS, Dim.NUM_TOKENS),
    )
    result = runner.run(Batch(query_lens=[1, 2], inputs={"x": [1.0, 2, 3], "r": [1.0, 10]}))
    assert result.tolist() == [[1, 2, 3], [10, 20, 30]]


@dataclass
class Unknown:
    y: torch.Tensor


@pytest.mark.parametrize(
    ("model", "sizes", "output_shape", "message"),
    [
        (lambda x: Unknown(x * 2), (2, 4), (Dim.NUM_TOKENS,), "nobody can find the tensors"),
        (lambda x: x * 2, (1,), (Dim.NUM_REQS,), "begins with"),
        (lambda x: x * 2, (2, 4), (Dim.NUM_REQS,), "begins with"),
    ],
)
def test_outputs_that_would_be_cut_wrongly_are_refused(
    model: Any, sizes: tuple[int, ...], output_shape: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        runner_of(model, sizes=sizes, output_shape=output_shape)


def test_extras_of_any_kind_are_reported_and_bounded(caplog: pytest.LogCaptureFixture) -> None:
    runner = runner_of(lambda x: x * 2)
    for extra in (("a",), (1,), *((n, None) for n in range(30))):
        assert runner.run(batch(2, 3.0, extra=extra)).tolist() == [[6.0] * 3] * 2
    report = runner.report()
    assert "extra ('a',)" in str(report)
    assert report.steps(CUDAGraphMode.FULL) == 16
    assert sum("too many values of extra" in record.message for record in caplog.records) == 1
    with pytest.raises(ValueError, match="cannot be part of a key"):
        runner.run(batch(2, extra=([],)))


def test_steps_without_graphs_make_a_row_for_each_number_of_tokens_only() -> None:
    runner = runner_of(lambda x: x * 2, cudagraph_mode="NONE")
    for lens in ([3], [1, 2], [1, 1, 1], [2]):
        x = torch.ones(sum(lens), 3)
        runner.run(Batch(query_lens=lens, inputs={"x": x}))
    assert sorted(key.num_tokens for _, key in runner.report().by_key) == [2, 3]


def test_decode_sizes_above_the_mixed_ones_fit() -> None:
    runner = GraphModelRunner(
        lambda x: x * 2,
        {"cudagraph_mode": "FULL_DECODE_ONLY"},
        input_spec=(ROWS,),
        max_num_seqs=200,
        max_num_batched_tokens=512,
        uniform_decode_query_len=3,
        device="cpu",
    )
    runner.capture(progress=False)
    assert runner.run(batch(3, 2.0)).tolist() == [[4.0] * 3] * 3


def test_nothing_runs_after_a_capture_that_failed() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        if len(x) == 2:
            raise RuntimeError("broken")
        return x * 2

    runner = GraphModelRunner(
        model,
        {"cudagraph_capture_sizes": [2, 4]},
        input_spec=(ROWS,),
        max_num_seqs=4,
        max_num_batched_tokens=8,
        device="cpu",
    )
    with pytest.raises(RuntimeError, match="broken"):
        runner.capture(progress=False)
    with pytest.raises(CaptureError, match="call capture"):
        runner.run(batch(4))


@pytest.mark.parametrize("around_capture", [False, True])
def test_inference_mode_changes_neither_results_nor_graphs(*, around_capture: bool) -> None:
    toy = PagedToy()
    with torch.inference_mode(around_capture):
        loop = make_loop(model=toy, sizes=[1, 2, 4, 8])
    request = loop.add([1, 2, 3, 4])
    with torch.inference_mode(not around_capture):
        loop.step([(request, 3)])
        loop.step([(request, 1)])
    assert stats(loop.runner.model).graphs == 1
    assert loop.runner.report().num_graphs[CUDAGraphMode.PIECEWISE] == 4 * 3


def test_a_break_of_the_graph_keeps_results_right() -> None:
    class Broken(PagedToy):
        def forward(
            self, tokens: torch.Tensor, positions: torch.Tensor, last: torch.Tensor
        ) -> torch.Tensor:
            torch._dynamo.graph_break()
            return super().forward(tokens, positions, last)

    toy = Broken()
    loop = make_loop(model=toy, sizes=[1, 2, 4, 8])
    request = loop.add([1, 2, 3, 4])
    loop.step([(request, 3)])
    loop.step([(request, 1)])


def test_a_model_that_dynamo_leaves_alone_is_told(caplog: pytest.LogCaptureFixture) -> None:
    toy = PagedToy()
    with caplog.at_level(logging.WARNING), torch.compiler.set_stance("force_eager"):
        loop = make_loop("FULL", toy, sizes=[1, 2, 4, 8])
        request = loop.add([1, 2, 3])
        loop.step([(request, 3)])
    assert sum("was not compiled" in record.message for record in caplog.records) == 1


def test_recapture_sees_a_module_that_was_replaced() -> None:
    toy = PagedToy()
    loop = make_loop("FULL", toy, is_compiled=False, sizes=[1, 2, 4, 8])
    torch.manual_seed(5)
    toy.out[1] = torch.nn.Linear(*toy.out[1].weight.shape)
    loop.runner.recapture(progress=False)
    request = loop.add([1, 2, 3])
    loop.step([(request, 2)])
    with torch.no_grad():
        toy.out[1].weight.data = toy.out[1].weight * -1
    loop.done[request] = 0
    loop.step([(request, 2)])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("seq_lens", [2.7], "seq_lens holds numbers of float64"),
        ("seq_lens", [2**32 + 2], "longer than max_model_len"),
        ("block_table", [[2**32] * 12], "block_table holds"),
        ("block_table", [[0.9] * 12], "block_table holds numbers of float64"),
        ("slot_mapping", [0.5, 1.5], "slot_mapping holds numbers of float64"),
        ("slot_mapping", [0, 2**40], "slot_mapping holds 0 to"),
    ],
)
def test_numbers_of_attention_that_would_lose_something_are_refused(
    field: str, value: Any, message: str
) -> None:
    toy = PagedToy()
    loop = make_loop("FULL", toy, is_compiled=False, sizes=[1, 2, 4, 8])
    request = loop.add([1, 2])
    work = loop.batch([(request, 2)])
    setattr_frozen(work.attention, field, value)
    with pytest.raises(ValueError, match=message):
        loop.runner.run(work)


def setattr_frozen(item: Any, field: str, value: Any) -> None:
    object.__setattr__(item, field, value)


def test_query_lens_are_integers() -> None:
    runner = runner_of(lambda x: x * 2)
    with pytest.raises(ValueError, match="query_lens hold numbers of float64"):
        runner.run(Batch(query_lens=[1.9], inputs={"x": [[1.0] * 3]}))
    with pytest.raises(ValueError, match="above the limits"):
        runner.run(Batch(query_lens=[2**32 + 1], inputs={"x": [[1.0] * 3]}))
