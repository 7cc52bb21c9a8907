"""Answers one prompt twice, eagerly and compiled, and puts the two side by side.

It shows nothing itself: whoever asks says what a phase looks like while it runs.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from compile_backend.backend import stats
from compile_backend.capture_session import capture
from compile_backend.config import CompilationConfig
from compile_backend.llm.generate import encode_prompt, greedy_generate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from compile_backend.llm.generate import Generation
    from compile_backend.llm.loading import LoadedModel
    from compile_backend.stats import Report

    Phase = Callable[[str], AbstractContextManager[object]]

# Rounded up, so that texts of about the same length share what was compiled for a cache.
_CACHE_LEN_STEP = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One prompt, answered eagerly and compiled.

    Attributes:
        eager: By the model itself.
        compiled: By its compiled form, once every graph it needs was captured.
        first_calls_s: Seconds of the calls before: tracing, compiling, warm-ups and captures.
        stats: What the backend counted, over the first calls and the answer.
    """

    eager: Generation
    compiled: Generation
    first_calls_s: float
    stats: Report

    @property
    def num_equal_tokens(self) -> int:
        """How many tokens the two answers share from the start."""
        pairs = zip(self.eager.token_ids, self.compiled.token_ids, strict=False)
        return next(
            (position for position, (left, right) in enumerate(pairs) if left != right),
            min(len(self.eager.token_ids), len(self.compiled.token_ids)),
        )

    @property
    def is_equal(self) -> bool:
        """Whether both answers are the same tokens."""
        return self.eager.token_ids == self.compiled.token_ids

    @property
    def speedup(self) -> float:
        """Decoding speed of the compiled model over that of the eager one; 0 without steps."""
        eager = self.eager.tokens_per_s
        return self.compiled.tokens_per_s / eager if eager else 0.0


def compare_with_eager(
    loaded: LoadedModel,
    prompt: str | Sequence[int],
    *,
    options: Mapping[str, Any],
    max_new_tokens: int,
    phase: Phase = contextlib.nullcontext,
) -> Comparison:
    """Answer a prompt eagerly and through the backend.

    Args:
        loaded: The model.
        prompt: Text, or token ids.
        options: As for `torch.compile`.
        max_new_tokens: Stop after so many tokens.
        phase: Called with what comes next; the context it returns is open while that runs.

    Raises:
        ConfigError: An option is wrong, or the prompt or the model's length does not do.
    """
    config = CompilationConfig.from_options(options)
    cache_len = cache_len_for(loaded, prompt, max_new_tokens)

    def answer(model_call: Callable[..., Any], num_tokens: int) -> Generation:
        return greedy_generate(
            model_call, loaded, prompt, max_new_tokens=num_tokens, cache_len=cache_len
        )

    with phase("eager run"):
        eager = answer(loaded.model, max_new_tokens)
    # The prompt and a decode step are two graphs for Dynamo, with every size fixed: free ones
    # would make tracing slower than all of compiling.
    compiled_model = torch.compile(
        loaded.model, backend="cudagraph_modes", options=dict(options), dynamic=False
    )
    started = time.perf_counter()
    with phase("compile and capture"), _capturing(config):
        for _ in range(_num_first_answers(config)):
            answer(compiled_model, min(max_new_tokens, 2))
    first_calls_s = time.perf_counter() - started
    with phase("compiled run"):
        compiled = answer(compiled_model, max_new_tokens)
    return Comparison(
        eager=eager, compiled=compiled, first_calls_s=first_calls_s, stats=stats(compiled_model)
    )


def cache_len_for(loaded: LoadedModel, prompt: str | Sequence[int], max_new_tokens: int) -> int:
    """Positions of a KV cache that holds a prompt and its answer."""
    needed = len(encode_prompt(loaded, prompt)) + max_new_tokens
    rounded = -(-needed // _CACHE_LEN_STEP) * _CACHE_LEN_STEP
    limit = getattr(loaded.model.config, "max_position_embeddings", None)
    return rounded if limit is None else max(needed, min(rounded, limit))


def _num_first_answers(config: CompilationConfig) -> int:
    """How often to call with every shape until all is captured."""
    return 1 if config.cudagraph_capture == "ahead" else config.cudagraph_num_of_warmups + 1


def _capturing(config: CompilationConfig) -> AbstractContextManager[None]:
    return capture() if config.cudagraph_capture == "ahead" else contextlib.nullcontext()
