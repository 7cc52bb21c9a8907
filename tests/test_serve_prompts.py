"""A real language model behind an engine's loop: batched tokens are those of one at a time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from compile_backend.config import CUDAGraphMode

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from serve_prompts import Server

if TYPE_CHECKING:
    from compile_backend.llm.loading import LoadedModel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("one_core"),
]

PROMPTS = (
    "Hi",
    "The capital of France is",
    "One, two, three,",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle. " * 3,
    "def fibonacci(n):",
    "Water boils at a temperature of",
    "In the beginning there was a small village at the foot of a mountain, and in it lived "
    "a clock maker whose clocks were always late. " * 5,
    "A",
)
NUM_NEW_TOKENS = 12


@pytest.fixture(scope="module")
def prompts(loaded: LoadedModel) -> list[list[int]]:
    return [loaded.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    """What `model.generate` writes, one prompt after the other, with its own attention."""
    model = loaded.model
    device = next(model.parameters()).device
    model.set_attn_implementation("sdpa")
    return [
        model.generate(
            torch.tensor([prompt], device=device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=device),
            max_new_tokens=NUM_NEW_TOKENS,
            min_new_tokens=NUM_NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


def test_prompts_are_of_very_different_length(prompts: list[list[int]]) -> None:
    lengths = [len(prompt) for prompt in prompts]
    assert min(lengths) <= 2
    assert max(lengths) >= 100


@pytest.mark.parametrize("mode", list(CUDAGraphMode), ids=lambda mode: mode.name)
def test_tokens_of_prompts_served_together_are_those_of_each_alone(
    loaded: LoadedModel, prompts: list[list[int]], expected: list[list[int]], mode: CUDAGraphMode
) -> None:
    torch.compiler.reset()
    is_cpu = next(loaded.model.parameters()).device.type == "cpu"
    options = {
        "cudagraph_mode": mode.name,
        "cudagraph_capture_sizes": [1, 2, 4, 8, 64],
        # What Inductor makes of this model is tested with the static cache.
        "piece_compiler": "eager" if is_cpu else "inductor",
    }
    server = Server(loaded.model, options, token_budget=64, max_model_len=256)
    assert server.generate(prompts, NUM_NEW_TOKENS) == expected
    report = server.runner.report()
    for runtime_mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
        ran = report.steps(runtime_mode) > 0
        assert ran == mode.has_mode(runtime_mode)
