"""What a decoding loop keeps at fixed addresses: the KV cache and the inputs of a one-token step.

A captured graph replays on the addresses it was captured with. So the tensors that every step
reads and writes are made once for a model and a cache length, and each new text reuses them. This
file knows how Hugging Face models take a cache, a position and a mask, in every version that is
supported; it does not know what calls the model, nor when to stop.
"""

import inspect
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

# These build a mask as long as what was read so far if they are given none, which would change
# the shapes with every step. All ones over the whole cache mean the same to them.
_MODEL_TYPES_THAT_NEED_A_MASK = frozenset({"biogpt", "bloom", "opt"})


class StaticDecodeState:
    """KV cache and step inputs of one sequence, at addresses that stay for the object's life.

    Every decode step has the same shapes: `[1, 1]` int64 token ids and positions, and a cache of
    `cache_len` positions. Only the length of the prompt changes the shapes of a prefill.
    """

    def __init__(self, model: PreTrainedModel, cache_len: int) -> None:
        self.cache_len = cache_len
        self._accepted = frozenset(inspect.signature(model.forward).parameters)
        # Also for a caller in inference mode: what is allocated there can be written only there.
        with torch.inference_mode(mode=False), torch.no_grad():
            self.cache = _full_length_cache(model.config, cache_len)
            self.input_ids = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
            self.position_ids = torch.zeros_like(self.input_ids)
            self._fixed_inputs = self._inputs_that_never_change(model)
            self._allocate(model)

    def _inputs_that_never_change(self, model: PreTrainedModel) -> dict[str, Any]:
        # Older releases of transformers call it `past_key_values`; newer ones warn at that name.
        inputs: dict[str, Any] = {
            "cache" if "cache" in self._accepted else "past_key_values": self.cache,
            "use_cache": True,
        }
        if "logits_to_keep" in self._accepted:
            inputs["logits_to_keep"] = 1
        if model.config.model_type in _MODEL_TYPES_THAT_NEED_A_MASK:
            inputs["attention_mask"] = torch.ones(
                (1, self.cache_len), dtype=torch.int64, device=model.device
            )
        return inputs

    def _allocate(self, model: PreTrainedModel) -> None:
        """Let the model allocate the cache, uncompiled.

        A layer of the cache allocates its tensors on its first update, and marks them as static
        for Dynamo only outside of a compiled call. The shapes are best taken from the model
        itself: architectures differ in what keys and values look like, layers even within one.
        """
        with torch.compiler.set_stance("force_eager"):
            model(**self._inputs(self.input_ids, self.position_ids))
        self.reset()

    def reset(self) -> None:
        """Forget the sequence; keep every address."""
        self.cache.reset()

    def prefill_inputs(self, token_ids: tuple[int, ...]) -> dict[str, Any]:
        """Arguments of the call that reads a prompt of `[num_tokens]`, for an empty cache."""
        device = self.input_ids.device
        input_ids = torch.tensor([token_ids], dtype=torch.int64, device=device)
        position_ids = torch.arange(len(token_ids), device=device)[None]
        self.position_ids.fill_(len(token_ids) - 1)
        return self._inputs(input_ids, position_ids)

    def decode_inputs(self) -> dict[str, Any]:
        """Arguments of the call that reads the token given to `accept`."""
        return self._inputs(self.input_ids, self.position_ids)

    def accept(self, logits: torch.Tensor) -> int:
        """Make the likeliest token of `[1, num_tokens, vocab]` the next input; return its id."""
        self.input_ids.copy_(logits[:, -1:].argmax(dim=-1))
        self.position_ids.add_(1)
        return int(self.input_ids)

    def _inputs(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> dict[str, Any]:
        inputs = {"input_ids": input_ids, **self._fixed_inputs}
        if "position_ids" in self._accepted:
            inputs["position_ids"] = position_ids
        return inputs


def _full_length_cache(config: PreTrainedConfig, cache_len: int) -> StaticCache:
    """Make a static cache whose sliding-window layers hold all positions, like the others.

    A sliding layer rolls its contents once its window is full and counts positions in a Python
    integer, so its steps differ in shape and code. Held in full, with the window kept by the mask,
    every step is the same step, for the price of some memory.
    """
    cache = StaticCache(config=config, max_cache_len=cache_len)
    for index, layer in enumerate(cache.layers):
        if type(layer) is StaticSlidingWindowLayer:
            cache.layers[index] = StaticLayer(max_cache_len=cache_len)
    return cache
