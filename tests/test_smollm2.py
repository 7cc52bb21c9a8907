"""A real language model with its real weights: in every mode it writes what eager writes."""

from collections.abc import Callable

import pytest
import torch
from every_mode import EveryMode, check_what_ran

import compile_backend
from compile_backend.config import CUDAGraphMode
from compile_backend.llm.generate import encode_prompt, greedy_generate
from compile_backend.llm.loading import LoadedModel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("one_core"),
]

# Equally many tokens, so that both prompts are read by one compiled graph.
PROMPTS = ("Name three colours of the rainbow.", "What do plants need to grow?")
NUM_NEW_TOKENS = 24
CACHE_LEN = 128


@pytest.fixture(scope="module")
def eager_tokens(loaded: LoadedModel) -> list[tuple[int, ...]]:
    return generated(loaded, loaded.model)


def generated(loaded: LoadedModel, model_call: Callable[..., object]) -> list[tuple[int, ...]]:
    """The tokens after each prompt."""
    return [
        greedy_generate(
            model_call, loaded, prompt, max_new_tokens=NUM_NEW_TOKENS, cache_len=CACHE_LEN
        ).token_ids
        for prompt in PROMPTS
    ]


def prompt_len(loaded: LoadedModel) -> int:
    (num_tokens,) = {len(encode_prompt(loaded, prompt)) for prompt in PROMPTS}
    return num_tokens


def is_decode() -> list[bool]:
    """Of each call of `generated`, whether it is a decode step."""
    return [False, *[True] * (NUM_NEW_TOKENS - 1)] * len(PROMPTS)


def test_the_texts_are_long_enough_to_tell_something(
    eager_tokens: list[tuple[int, ...]], loaded: LoadedModel
) -> None:
    assert loaded.model.dtype is torch.float32
    assert [len(token_ids) for token_ids in eager_tokens] == [NUM_NEW_TOKENS] * len(PROMPTS)
    assert all(len(set(token_ids)) > NUM_NEW_TOKENS // 2 for token_ids in eager_tokens)
    assert len(set(eager_tokens)) == len(PROMPTS)


def test_tokens_equal_those_of_eager_in_every_mode(
    loaded: LoadedModel, eager_tokens: list[tuple[int, ...]]
) -> None:
    options = {"piece_compiler": "eager", "cudagraph_capture_sizes": (1, prompt_len(loaded))}
    compiled = EveryMode(loaded.model, dynamic=None, options=options)
    for mode in CUDAGraphMode:
        assert generated(loaded, compiled.in_mode(mode)) == eager_tokens, mode
        check_what_ran(compiled.stats(mode), mode, is_decode())


def test_tokens_equal_those_of_eager_with_inductor(
    loaded: LoadedModel, eager_tokens: list[tuple[int, ...]]
) -> None:
    mode = CUDAGraphMode.FULL_AND_PIECEWISE
    options = {
        "cudagraph_mode": mode.name,
        "cudagraph_capture_sizes": [1, prompt_len(loaded)],
    }
    compiled = torch.compile(loaded.model, backend="cudagraph_modes", options=options)
    assert generated(loaded, compiled) == eager_tokens
    report = compile_backend.stats(compiled)
    check_what_ran(report, mode, is_decode())
    # Equal layers are compiled once.
    assert report.compiles <= 4 * report.graphs < report.pieces
