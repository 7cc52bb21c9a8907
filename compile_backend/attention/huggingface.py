"""Hugging Face causal models on a paged cache, unchanged: attention comes in by its interface.

Batches are flattened to one row of tokens; positions come with them, and no mask is made, since
attention finds the requests in the forward context.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from compile_backend.attention.builder import AttentionMetadataBuilder
from compile_backend.attention.kv_cache import LayerCache
from compile_backend.attention.layer import AttentionLayer
from compile_backend.attention.ops import attention
from compile_backend.attention.registry import AUTO, make_backend
from compile_backend.attention.spec import AttentionSpec, CacheFormat
from compile_backend.config import at_least
from compile_backend.errors import ConfigError
from compile_backend.step_inputs import Dim, InputSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping

    from compile_backend.attention.backend import AttentionBackend

    Choice = str | type[AttentionBackend]

logger = logging.getLogger(__name__)

INTERFACE = "cudagraph_modes"
_PROBE = "cudagraph_modes_probe"
_ONE_AT_A_TIME = threading.RLock()  # transformers knows interfaces by name, in all threads

CAUSAL_LM_INPUTS = (
    InputSpec("input_ids", (1, Dim.NUM_TOKENS), torch.int64),
    InputSpec("position_ids", (1, Dim.NUM_TOKENS), torch.int64),
    InputSpec("logits_indices", (Dim.NUM_REQS,), torch.int64, indexes=Dim.NUM_TOKENS),
)
"""What `CausalLM.forward` takes, as a runner's `input_spec`."""

CAUSAL_LM_OUTPUT = (Dim.NUM_REQS,)
"""The leading size of what `CausalLM.forward` returns."""


class CausalLM(torch.nn.Module):
    """A Hugging Face causal model as a function of one flattened batch."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_indices: torch.Tensor
    ) -> torch.Tensor:
        """The logits of some tokens.

        Args:
            input_ids: `[1, num_tokens]` int64, request after request.
            position_ids: `[1, num_tokens]` int64, of each token in its request.
            logits_indices: `[num_reqs]` int64, the row of each request's last token.

        Returns:
            `[num_reqs, vocabulary]`.
        """
        result = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=False,
            logits_to_keep=logits_indices,
        )
        logits: torch.Tensor = result.logits
        return logits[0]


@dataclass(frozen=True, slots=True)
class PagedModel:
    """A model, its caches, and what makes their metadata.

    Attributes:
        module: call it, compile it, or give it to a runner.
        builder: the runner's `metadata_builder`.
        cache: how the caches are stored.
        num_blocks: of each cache; all are the caller's to hand out.
    """

    module: CausalLM
    builder: AttentionMetadataBuilder
    cache: CacheFormat
    num_blocks: int


def paged_model(
    model: torch.nn.Module,
    *,
    num_blocks: int,
    block_size: int = 16,
    max_model_len: int | None = None,
    backend: str | type[AttentionBackend] | Callable[[str, AttentionSpec], Choice] = AUTO,
    cache_dtype: torch.dtype | None = None,
) -> PagedModel:
    """Give a Hugging Face causal model a paged cache.

    The model's attention implementation is changed to this one; its code and weights are not. It
    stays changed, in the model's config too: from here on the model runs where a forward context
    is set, as a runner sets it, and so does another model made of the same config object. Two
    tokens run through it, to learn what each layer computes.

    Args:
        model: from `AutoModelForCausalLM`, on its device and in `eval()`.
        num_blocks: blocks of the cache; each holds `block_size` tokens for all layers.
        block_size: tokens of a block.
        max_model_len: most tokens of a request; the model's own limit if None.
        backend: which attention backend to use: a name, or a class of your own; `auto` takes the
            best one that can run. A function of a layer's name and spec chooses for each layer.
        cache_dtype: of stored keys and values; that of the model if None.

    Raises:
        ConfigError: the model's attention is not of a kind that this can replace, or an argument
            is none of these.
    """
    from transformers import AttentionInterface

    _check_arguments(model, cache_dtype)
    given: object = backend
    if not isinstance(given, str) and not callable(given):
        fix = "give a name, a class, or a function of a layer's name and spec"
        raise ConfigError("backend", given, "is no attention backend", fix)
    num_blocks = at_least(1)("num_blocks", num_blocks)
    block_size = at_least(1)("block_size", block_size)
    if max_model_len is not None:
        max_model_len = at_least(1)("max_model_len", max_model_len)
    device = next(model.parameters()).device
    specs, dtype = _probe(model)
    if max_model_len is None:
        config = model.config.get_text_config()  # type: ignore[union-attr, operator]
        max_model_len = int(config.max_position_embeddings)
    cache = CacheFormat(
        block_size=block_size, dtype=cache_dtype or dtype, max_model_len=max_model_len
    )
    backends: dict[Hashable, AttentionBackend] = {}
    layers = {}
    for name, spec in specs.items():
        chosen = backend if isinstance(backend, str | type) else backend(name, spec)
        if (chosen, spec) not in backends:
            backends[chosen, spec] = make_backend(chosen, spec, cache, device)
        shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_size)
        keys, values = (torch.zeros(shape, dtype=cache.dtype, device=device) for _ in range(2))
        layers[name] = AttentionLayer(name, backends[chosen, spec], LayerCache(keys, values))
    builder = AttentionMetadataBuilder(layers, cache, num_blocks)
    AttentionInterface.register(INTERFACE, attention_interface(attention))
    model.set_attn_implementation(INTERFACE)  # type: ignore[operator]
    return PagedModel(CausalLM(model), builder, cache, num_blocks)


def attention_interface(attend: Callable[..., None]) -> Callable[..., Any]:
    """What transformers calls for attention, around one that writes into a buffer.

    Args:
        attend: called with query, key, value and output, `[num_tokens, heads, head_size]` each,
            and the layer's name.
    """

    def interface(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        # Each is `[1, heads, num_tokens, head_size]`.
        del attention_mask
        query, key, value = (item[0].transpose(0, 1) for item in (query, key, value))
        output = torch.empty(
            (query.shape[0], query.shape[1], value.shape[2]),
            dtype=query.dtype,
            device=query.device,
        )
        attend(query, key, value, output, str(module.layer_idx))
        return output.unsqueeze(0), None

    return interface


def _check_arguments(model: object, cache_dtype: object) -> None:
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "set_attn_implementation"):
        fix = "use what AutoModelForCausalLM of transformers gives"
        raise ConfigError("model", type(model).__name__, "is no causal language model", fix)
    is_float = isinstance(cache_dtype, torch.dtype) and cache_dtype.is_floating_point
    if cache_dtype is not None and not is_float:
        fix = "use torch.bfloat16, torch.float8_e4m3fn, or None for that of the model"
        raise ConfigError("cache_dtype", cache_dtype, "is no floating-point dtype of torch", fix)
    if model.training:
        logger.warning(
            "the model that gets a paged cache is in training mode, so graphs would hold its "
            "dropout; call model.eval() first"
        )


@contextlib.contextmanager
def attention_through(
    model: torch.nn.Module, name: str, interface: Callable[..., Any]
) -> Iterator[None]:
    """Have a model call another attention; a model that is refused still runs as before.

    Other threads that ask for it wait.

    Args:
        model: of transformers.
        name: under which transformers will know the interface.
        interface: what it calls.
    """
    from transformers import AttentionInterface

    set_implementation: Callable[[str], None] = model.set_attn_implementation  # type: ignore[assignment]
    before = str(model.config._attn_implementation)  # type: ignore[union-attr]  # noqa: SLF001
    with _ONE_AT_A_TIME:
        AttentionInterface.register(name, interface)
        set_implementation(name)
        try:
            yield
        finally:
            set_implementation(before)


def _probe(model: torch.nn.Module) -> tuple[Mapping[str, AttentionSpec], torch.dtype]:
    """What each attention layer computes, and in which dtype, from a run of one token."""
    specs: dict[str, AttentionSpec] = {}
    dtypes: list[torch.dtype] = []

    def record(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        del attention_mask
        _check_layer(module, query, value, specs, others)
        if sliding_window is None:
            sliding_window = _window_of_mask(module)
        specs[str(module.layer_idx)] = AttentionSpec(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_size=query.shape[3],
            scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
            sliding_window=sliding_window,
            soft_cap=softcap,
        )
        dtypes.append(value.dtype)
        return torch.zeros_like(query).transpose(1, 2), None

    with attention_through(model, _PROBE, record):
        are_mixed = _mixes_tokens(model)
    if not specs:
        raise ConfigError(
            "model",
            type(model).__name__,
            "called no attention through transformers' attention interface",
            "use a model that supports set_attn_implementation",
        )
    if are_mixed:
        raise _not_covered(model, "mixes tokens outside of attention, as recurrent layers do")
    return specs, dtypes[0]


def _mixes_tokens(model: torch.nn.Module) -> bool:
    """Whether a token that is not a number spreads to the next, with attention left out."""
    tokens = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
    embeddings = model.get_input_embeddings()  # type: ignore[operator]

    def spoil(_module: torch.nn.Module, _args: Any, embedded: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.full_like(embedded[:, :1], torch.nan), embedded[:, 1:]], 1)

    hook = embeddings.register_forward_hook(spoil)
    try:
        with torch.no_grad():
            logits = model(input_ids=tokens, position_ids=tokens, use_cache=False).logits
    finally:
        hook.remove()
    return bool(logits[0, 1].isnan().any())


def _window_of_mask(module: torch.nn.Module) -> int | None:
    """The window of a layer that leaves it to the mask, which is not made here."""
    config = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    window: int | None = getattr(config, "sliding_window", None) or None  # 0 means none, too
    if types is None:
        return window
    return window if types[int(str(module.layer_idx))] == "sliding_attention" else None


def _check_layer(
    module: torch.nn.Module,
    query: torch.Tensor,
    value: torch.Tensor,
    specs: Mapping[str, AttentionSpec],
    others: Mapping[str, Any],
) -> None:
    """Refuse attention that the op does not compute."""
    index = getattr(module, "layer_idx", None)
    problem = None
    if index is None or str(index) in specs:
        problem = "has attention layers without an index of their own"
    elif not getattr(module, "is_causal", True):
        problem = "has attention that is not causal"
    elif query.shape[3] != value.shape[3]:
        problem = "has values of another size than its keys"
    elif others.get("s_aux") is not None:
        problem = "has attention sinks"
    elif _is_chunked(module):
        problem = "has attention in chunks"
    if problem is not None:
        raise _not_covered(module, problem)


def _is_chunked(module: torch.nn.Module) -> bool:
    config = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return getattr(config, "attention_chunk_size", None) is not None
    return bool(types[int(str(module.layer_idx))] == "chunked_attention")


def _not_covered(module: torch.nn.Module, problem: str) -> ConfigError:
    return ConfigError(
        "model",
        type(module).__name__,
        f"{problem}, which paged attention does not cover",
        "run it with its own static cache through torch.compile",
    )
