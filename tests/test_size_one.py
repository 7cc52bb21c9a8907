"""Models are compiled once for all numbers of tokens, also for 1; others are left alone."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from test_paged_models import ARCHITECTURES

from compile_backend.attention.builder import AttentionBatch
from compile_backend.attention.huggingface import CAUSAL_LM_INPUTS, CAUSAL_LM_OUTPUT, paged_model
from compile_backend.backend import stats
from compile_backend.runner import GraphModelRunner
from compile_backend.runner_batch import Batch
from compile_backend.torch_internals.dynamo import size_1_like_any_other
from compile_backend.torch_internals.size_one import size_1_like_others

BLOCK_SIZE = 4


def prompt(ids: list[int]) -> Batch:
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    return Batch(
        query_lens=[len(ids)],
        inputs={
            "input_ids": np.array([ids]),
            "position_ids": np.arange(len(ids))[None],
            "logits_indices": np.array([len(ids) - 1]),
        },
        attention=AttentionBatch(
            seq_lens=[len(ids)], block_table=np.arange(num_blocks, dtype=np.int32)[None]
        ),
    )


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("name", ["llama"])
@torch.no_grad()
def test_one_compile_holds_for_one_token(name: str, tmp_path: Any) -> None:
    model = ARCHITECTURES[name].make()
    expected = copy.deepcopy(model)
    paged = paged_model(
        model, num_blocks=8, block_size=BLOCK_SIZE, max_model_len=16, backend="sdpa"
    )
    options = {"cache_dir": str(tmp_path)}
    compiled = torch.compile(paged.module, backend="cudagraph_modes", options=options)
    builder: Any = paged.builder
    runner = GraphModelRunner(
        compiled,
        {"cudagraph_capture_sizes": [1, 4]},
        input_spec=CAUSAL_LM_INPUTS,
        output_shape=CAUSAL_LM_OUTPUT,
        max_num_seqs=4,
        max_num_batched_tokens=8,
        metadata_builder=builder,
        device="cpu",
    )
    runner.capture(progress=False)
    for ids in ([7], [3, 1, 4], [2, 7, 1, 8, 2, 8]):
        for mode in ("NONE", "PIECEWISE", "FULL"):
            logits = runner.run(prompt(ids), highest_mode=mode)
            wanted = expected(torch.tensor([ids])).logits[0, -1:]
            torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
    assert stats(compiled).graphs == 1


def strides_of_a_view(guards: list[str]) -> Any:
    """Of what is not contiguous, a size of which may be 1."""
    from torch._dynamo.source import ConstantSource
    from torch._subclasses import fake_impls
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    environment = ShapeEnv()
    symbol = environment.create_symbol(
        5, ConstantSource("n"), DimDynamic.DYNAMIC, do_not_specialize_zero_one=True
    )
    size = environment.create_symintnode(symbol, hint=5)
    found = fake_impls._compute_stride([1, 2, size, 64], [128 * size, 64, 128, 1], [2, size, 64])
    guards += [str(guard.expr) for guard in environment.guards]
    return found


def test_views_assume_nothing_where_that_was_asked_for() -> None:
    guards: list[str] = []
    with size_1_like_any_other():
        with size_1_like_others({}) as holds_for_1:
            assert holds_for_1
            assert strides_of_a_view(guards) == [64, 128, 1]
            assert not guards
        assert strides_of_a_view(guards) == [64, 128, 1]
        assert guards
    with size_1_like_others({}) as holds_for_1:
        assert not holds_for_1
