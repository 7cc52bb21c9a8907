"""Greedy generation for one sequence: one call reads the prompt, then one call per new token.

The loop takes what calls the model as an argument: the model itself or a compiled form of it. It
refuses to know which.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch

from compile_backend.errors import ConfigError, number_of
from compile_backend.llm.loading import LoadedModel


class ModelOutput(Protocol):
    """What a causal model returns, as far as generation looks."""

    @property
    def logits(self) -> torch.Tensor:
        """Logits of `[1, num_tokens, vocab]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What was generated, and how long each call took.

    Attributes:
        token_ids: The new tokens, the one that ended the text included.
        text: The same without special tokens; empty where the model has no tokenizer.
        num_prompt_tokens: Tokens that the prefill read.
        prefill_s: Seconds until the first token was known.
        step_s: Seconds of each decode step, in order; the first ones hold compiling and capturing.
    """

    token_ids: tuple[int, ...]
    text: str
    num_prompt_tokens: int
    prefill_s: float
    step_s: tuple[float, ...]

    @property
    def decode_s(self) -> float:
        """Seconds of all decode steps."""
        return sum(self.step_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the median decode step, so of steady running; 0 without any."""
        return 1 / median(self.step_s) if self.step_s else 0.0


# no_grad and not inference_mode: Dynamo guards on both, and users who call the compiled model on
# their own mostly do so under no_grad; one compile then serves them and this loop.
@torch.no_grad()
def greedy_generate(
    model_call: Callable[..., Any],
    loaded: LoadedModel,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int,
    cache_len: int,
    on_token: Callable[[int], None] | None = None,
) -> Generation:
    """Generate the likeliest token again and again, until the model ends its text.

    The static KV cache and the inputs of a step belong to `loaded` and are the same tensors in
    every call with the same `cache_len`; every decode step has the same shapes.

    Args:
        model_call: `loaded.model`, or a compiled form of it.
        loaded: The model, and the state that its generations share.
        prompt: Text, put into the tokenizer's chat template where it has one, or token ids, taken
            as they are.
        max_new_tokens: Stop after so many tokens.
        cache_len: Positions in the KV cache.
        on_token: Called with each new token's id as soon as it is known.

    Raises:
        ConfigError: The prompt is empty, or the cache or the model is too short for the text.
    """
    prompt_ids = encode_prompt(loaded, prompt)
    _check_lengths(loaded, len(prompt_ids), max_new_tokens, cache_len)
    state = loaded.decode_state(cache_len)
    state.reset()
    end_ids = _end_token_ids(loaded)
    token_ids: list[int] = []
    call_s: list[float] = []

    def run(inputs: dict[str, Any]) -> None:
        started = time.perf_counter()
        output: ModelOutput = model_call(**inputs)
        # Reading the token waits for the device, so the time is that of the whole step.
        token_ids.append(state.accept(output.logits))
        call_s.append(time.perf_counter() - started)
        if on_token is not None:
            on_token(token_ids[-1])

    run(state.prefill_inputs(prompt_ids))
    while token_ids[-1] not in end_ids and len(token_ids) < max_new_tokens:
        run(state.decode_inputs())
    return Generation(
        token_ids=tuple(token_ids),
        text=_decoded(loaded, token_ids),
        num_prompt_tokens=len(prompt_ids),
        prefill_s=call_s[0],
        step_s=tuple(call_s[1:]),
    )


def encode_prompt(loaded: LoadedModel, prompt: str | Sequence[int]) -> tuple[int, ...]:
    """Return a prompt's token ids: text goes through the chat template where there is one.

    Raises:
        ConfigError: Nothing is left to read, there is no tokenizer to read text with, or the
            model does not know a token.
    """
    token_ids = _token_ids(loaded, prompt)
    if not token_ids:
        raise ConfigError("prompt", prompt, "has no tokens", "give at least one")
    num_known = loaded.model.get_input_embeddings().weight.shape[0]
    unknown = [token_id for token_id in token_ids if not 0 <= token_id < num_known]
    if unknown:
        raise ConfigError(
            "prompt",
            prompt,
            f"has the token {unknown[0]}, but {loaded.name} knows those from 0 to {num_known - 1}",
            "give ids of the model's own vocabulary",
        )
    return token_ids


def _token_ids(loaded: LoadedModel, prompt: str | Sequence[int]) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        token_ids = tuple(int(token_id) for token_id in prompt)
    elif loaded.tokenizer is None:
        raise ConfigError(
            "prompt", prompt, f"is text, but {loaded.name} has no tokenizer", "give token ids"
        )
    elif loaded.tokenizer.chat_template:
        token_ids = tuple(
            loaded.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                return_dict=False,
            )
        )
    else:
        token_ids = tuple(loaded.tokenizer(prompt)["input_ids"])
    return token_ids


def _check_lengths(
    loaded: LoadedModel, num_prompt_tokens: int, max_new_tokens: int, cache_len: int
) -> None:
    if max_new_tokens < 1:
        raise ConfigError("max_new_tokens", max_new_tokens, "must be positive", "use 1 or more")
    # The last token is never read.
    num_positions = num_prompt_tokens + max_new_tokens - 1
    needed = f"{num_prompt_tokens} prompt and {number_of('new token', max_new_tokens)}"
    if num_positions > cache_len:
        raise ConfigError(
            "cache_len", cache_len, f"is too short for {needed}", f"use {num_positions} or more"
        )
    limit = getattr(loaded.model.config, "max_position_embeddings", None)
    if limit is not None and num_positions > limit:
        raise ConfigError(
            "max_new_tokens",
            max_new_tokens,
            f"and a prompt of {number_of('token', num_prompt_tokens)} pass the model's {limit} "
            "positions",
            "use fewer new tokens or a shorter prompt",
        )


def _end_token_ids(loaded: LoadedModel) -> frozenset[int]:
    end = loaded.model.generation_config.eos_token_id
    if end is None:
        end = loaded.model.config.eos_token_id
    if end is None:
        return frozenset()
    return frozenset(end if isinstance(end, list | tuple) else [end])


def _decoded(loaded: LoadedModel, token_ids: list[int]) -> str:
    if loaded.tokenizer is None:
        return ""
    text: str = loaded.tokenizer.decode(
        token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text
