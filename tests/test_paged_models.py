"""Models of Hugging Face on a paged cache: batched together they write what each writes alone.

The weights are small and random, and large enough that attention, positions, norms and biases all
matter. Numbers may differ by what float32 itself costs the plain model.
"""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from ragged import FP8, attention_step

from compile_backend.attention.builder import AttentionBatch
from compile_backend.attention.huggingface import PagedModel, paged_model
from compile_backend.attention.sdpa import SdpaAttention
from compile_backend.attention.spec import AttentionSpec
from compile_backend.context import set_forward_context
from compile_backend.errors import ConfigError
from compile_backend.support import AttentionCGSupport

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.usefixtures("one_core", "without_gradients")

VOCAB_SIZE = 61
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
WIDE: dict[str, Any] = {"intermediate_size": 48}
GROUPED: dict[str, Any] = {**WIDE, "num_key_value_heads": 2}
HEADS: dict[str, Any] = {**GROUPED, "head_dim": 16}
# The grouped products of experts know no float64.
EXPERTS: dict[str, Any] = {
    **GROUPED,
    "num_local_experts": 3,
    "experts_implementation": "eager",
}
FULL = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=8, scale=8**-0.5)


def spec(**changes: Any) -> AttentionSpec:
    """A layer that is `FULL` but for some numbers."""
    names = AttentionSpec.__dataclass_fields__
    return AttentionSpec(**{**{name: getattr(FULL, name) for name in names}, **changes})


@dataclass(frozen=True)
class Architecture:
    """A model to be made, and its two layers as a reader of its code would write them down."""

    name: str
    sizes: dict[str, Any]
    layers: tuple[AttentionSpec, AttentionSpec]

    @property
    def config(self) -> Any:
        """Small, and the same in every call."""
        return getattr(transformers, f"{self.name}Config")(**COMMON, **self.sizes)

    def make(self) -> PreTrainedModel:
        """The model, the same in every call."""
        torch.manual_seed(0)
        model = getattr(transformers, f"{self.name}ForCausalLM")(self.config)
        model.requires_grad_(requires_grad=False).eval()
        for parameter in model.parameters():
            # Freshly made, norms are all ones, biases zeros, and scores too small to matter.
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
        return model


GEMMA2 = {"scale": 9**-0.5, "head_size": 16, "soft_cap": 1.5}
ARCHITECTURES = {
    "llama": Architecture("Llama", GROUPED, (FULL, FULL)),
    "qwen3": Architecture("Qwen3", HEADS, (spec(head_size=16, scale=0.25),) * 2),
    "mistral": Architecture(
        "Mistral", {**GROUPED, "sliding_window": 5}, (spec(sliding_window=5),) * 2
    ),
    "gemma2": Architecture(
        "Gemma2",
        {**HEADS, "sliding_window": 5, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 9},
        (spec(**GEMMA2, sliding_window=5), spec(**GEMMA2)),
    ),
    "gpt_neox": Architecture("GPTNeoX", WIDE, (spec(num_kv_heads=4),) * 2),
    "opt": Architecture(
        "OPT",
        {"ffn_dim": 48, "word_embed_proj_dim": 32},
        # The queries are scaled before attention.
        (spec(num_kv_heads=4, scale=1.0),) * 2,
    ),
    "phi3": Architecture(
        "Phi3",
        {**GROUPED, "sliding_window": 7, "pad_token_id": 0},
        (spec(sliding_window=7),) * 2,
    ),
    "mixtral": Architecture(
        "Mixtral",
        EXPERTS,
        (FULL, FULL),
    ),
    # These leave their window to the mask.
    "phimoe": Architecture(
        "Phimoe",
        {**EXPERTS, "sliding_window": 6},
        (spec(sliding_window=6),) * 2,
    ),
    "qwen2_moe": Architecture(
        "Qwen2Moe",
        {
            **GROUPED,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "experts_implementation": "eager",
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        (FULL, spec(sliding_window=6)),
    ),
}
architectures = pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)

LENGTHS = (19, 6, 11, 3)
"""Tokens of each request in the end."""

STEPS: tuple[dict[int, int], ...] = (
    {0: 9, 1: 3},  # a chunk of a prompt, and a whole prompt
    {0: 4, 1: 1, 2: 8},  # a further chunk, a decode, a prompt
    {0: 3, 1: 1, 2: 1, 3: 1},
    {2: 1, 0: 1, 3: 1},  # decodes, in another order
    {0: 1, 1: 1, 2: 1, 3: 1},
    {0: 1},
)
"""What each step adds: request to number of tokens."""

PADDED = (16, 5)


@cache
def texts() -> list[torch.Tensor]:
    """The tokens of each request."""
    random = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=random) for length in LENGTHS]


@cache
def plain(name: str) -> tuple[list[torch.Tensor], float]:
    """Logits of the plain model, `[tokens, vocabulary]` for each request; what float32 costs."""
    model = ARCHITECTURES[name].make()
    single = [model(text[None], use_cache=False).logits[0] for text in texts()]
    exact = [model.double()(text[None], use_cache=False).logits[0] for text in texts()]
    cost = max(float((one - other).abs().max()) for one, other in zip(single, exact, strict=True))
    return exact, cost


class Engine:
    """Runs steps of some requests, one block after another in no order, all else NaN."""

    def __init__(self, paged: PagedModel) -> None:
        self.paged = paged
        for layer in paged.builder.layers.values():
            layer.cache.keys.fill_(torch.nan)
            layer.cache.values.fill_(torch.nan)
        random = torch.Generator().manual_seed(2)
        self._free = (1 + torch.randperm(paged.num_blocks - 1, generator=random)).tolist()
        self._blocks: dict[int, list[int]] = {request: [] for request in range(len(LENGTHS))}
        self.lengths = dict.fromkeys(self._blocks, 0)

    def step(self, adds: dict[int, int], *, in_graph: bool) -> torch.Tensor:
        """The logits of each request's last token, in the order of `adds`."""
        ids, positions, last = [], [], []
        for request, query_len in adds.items():
            start = self.lengths[request]
            self.lengths[request] = end = start + query_len
            ids += texts()[request][start:end].tolist()
            positions += range(start, end)
            last.append(len(ids) - 1)
            while len(self._blocks[request]) * self.paged.cache.block_size < end:
                self._blocks[request].append(self._free.pop())
        tables = [self._blocks[request] for request in adds]
        table = np.zeros((len(adds), max(map(len, tables))), np.int32)
        for row, blocks in zip(table, tables, strict=True):
            row[: len(blocks)] = blocks
        batch = AttentionBatch(
            seq_lens=[self.lengths[request] for request in adds], block_table=table
        )
        attention = attention_step(
            self.paged.builder, batch, list(adds.values()), PADDED, in_graph=in_graph
        )
        num_tokens, num_reqs = PADDED
        with set_forward_context(attention):
            logits = self.paged.module(
                padded([ids], num_tokens), padded([positions], num_tokens), padded(last, num_reqs)
            )
        assert logits.shape == (num_reqs, VOCAB_SIZE)
        return logits[: len(adds)]

    def worst(self, expected: list[torch.Tensor], *, in_graph: bool) -> float:
        """How far logits of all steps are off at most."""
        worst = 0.0
        for adds in STEPS:
            logits = self.step(adds, in_graph=in_graph)
            for request, row in zip(adds, logits, strict=True):
                off = (row - expected[request][self.lengths[request] - 1]).abs().max()
                assert torch.isfinite(off), (adds, request)
                worst = max(worst, float(off))
        return worst


def padded(numbers: Any, size: int) -> torch.Tensor:
    tensor = torch.tensor(numbers)
    return torch.nn.functional.pad(tensor, (0, size - tensor.shape[-1]))


# --- numbers ----------------------------------------------------------------------------------


@architectures
@pytest.mark.parametrize("in_graph", [False, True], ids=["by request", "by token"])
def test_requests_batched_together_are_those_run_alone(
    architecture: Architecture, in_graph: bool
) -> None:
    name = next(name for name, each in ARCHITECTURES.items() if each is architecture)
    expected, cost = plain(name)
    engine = Engine(paged_model(architecture.make(), num_blocks=16, block_size=4))
    assert engine.worst(expected, in_graph=in_graph) <= 4 * cost
    assert tuple(engine.lengths.values()) == LENGTHS


@architectures
def test_layers_are_what_the_models_code_says(architecture: Architecture) -> None:
    paged = paged_model(architecture.make(), num_blocks=3)
    layers = paged.builder.layers
    assert tuple(layers) == ("0", "1")
    for layer, expected in zip(layers.values(), architecture.layers, strict=True):
        found = layer.backend.spec
        assert found.scale == pytest.approx(expected.scale, rel=1e-6)
        assert spec(**{name: getattr(found, name) for name in NUMBERS}, scale=1.0) == spec(
            **{name: getattr(expected, name) for name in NUMBERS}, scale=1.0
        )
    is_alike = architecture.layers[0] == architecture.layers[1]
    assert (layers["0"].backend is layers["1"].backend) is is_alike


NUMBERS = ("num_heads", "num_kv_heads", "head_size", "sliding_window", "soft_cap")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"scale": 0.3}),
        ("mistral", {"sliding_window": 6}),
        ("gemma2", {"soft_cap": 1.6}),
        ("gemma2", {"soft_cap": None}),
    ],
    ids=str,
)
def test_another_layer_would_be_noticed(name: str, changes: dict[str, Any]) -> None:
    """The tolerance of the test above is not one that takes anything."""
    expected, cost = plain(name)
    paged = paged_model(ARCHITECTURES[name].make(), num_blocks=16, block_size=4)
    for layer in paged.builder.layers.values():
        own = {each: getattr(layer.backend.spec, each) for each in (*NUMBERS, "scale")}
        layer.backend.spec = AttentionSpec(**{**own, **changes})
    assert Engine(paged).worst(expected, in_graph=False) > 40 * cost


# --- how it is made ---------------------------------------------------------------------------


def test_caches_are_as_asked() -> None:
    model = ARCHITECTURES["llama"].make()
    paged = paged_model(
        model, num_blocks=7, block_size=8, max_model_len=33, cache_dtype=FP8, backend="sdpa"
    )
    assert paged.cache.max_blocks_per_req == 5
    assert paged.num_blocks == 7
    memory = set()
    for layer in paged.builder.layers.values():
        assert type(layer.backend) is SdpaAttention
        for each in (layer.cache.keys, layer.cache.values):
            assert each.shape == (7, 8, 2, 8)
            assert each.dtype is FP8
            memory.add(each.data_ptr())
    assert len(memory) == 4
    assert paged.module.model is model


def test_caches_are_those_of_the_model_by_default() -> None:
    paged = paged_model(ARCHITECTURES["llama"].make().to(torch.bfloat16), num_blocks=2)
    assert paged.cache.dtype is torch.bfloat16
    assert paged.cache.max_model_len == COMMON["max_position_embeddings"]
    assert paged.cache.block_size == 16


def test_a_function_chooses_the_backend_of_each_layer() -> None:
    asked = []

    def choose(name: str, layer: AttentionSpec) -> str:
        asked.append((name, layer.sliding_window))
        return "sdpa" if layer.sliding_window else "flex_attention"

    paged = paged_model(ARCHITECTURES["gemma2"].make(), num_blocks=2, backend=choose)
    assert asked == [("0", 5), ("1", None)]
    assert [each.backend.name for each in paged.builder.layers.values()] == [
        "sdpa",
        "flex_attention",
    ]
    assert paged.builder.support is AttentionCGSupport.ALWAYS


def test_threads_page_models_of_their_own_at_once() -> None:
    models = [ARCHITECTURES["qwen3"].make() for _ in range(4)]
    starts = threading.Barrier(len(models))

    def layers(model: PreTrainedModel) -> list[str]:
        starts.wait()
        return [*paged_model(model, num_blocks=2, backend="sdpa").builder.layers]

    with ThreadPoolExecutor(len(models)) as pool:
        found = [*pool.map(layers, models)]
    assert found == [["0", "1"]] * len(models)


def test_weights_are_left_as_they_are() -> None:
    model = ARCHITECTURES["llama"].make()
    before = copy.deepcopy(model.state_dict())
    addresses = [weight.data_ptr() for weight in model.parameters()]
    paged_model(model, num_blocks=2)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert [weight.data_ptr() for weight in model.parameters()] == addresses


# --- what is refused --------------------------------------------------------------------------


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "attention sinks": (
        "GptOssForCausalLM",
        {**HEADS, "num_local_experts": 2, "num_experts_per_tok": 1},
        "GptOssAttention' has attention sinks.*static cache",
    ),
    "not causal": (
        "BertForMaskedLM",
        WIDE,
        "BertSelfAttention' has attention that is not causal.*static cache",
    ),
    "alibi": ("BloomForCausalLM", {}, "BloomForCausalLM.*attention interface"),
    "chunks": (
        "Llama4ForCausalLM",
        {**HEADS, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 3},
        "Llama4TextAttention' has attention in chunks.*static cache",
    ),
    "convolutions": (
        "Lfm2ForCausalLM",
        {**GROUPED, "layer_types": ["conv", "full_attention"]},
        "Lfm2ForCausalLM' mixes tokens outside of attention.*static cache",
    ),
    "states beside attention": (
        "FalconH1ForCausalLM",
        {**GROUPED, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
        "FalconH1ForCausalLM' mixes tokens outside of attention.*static cache",
    ),
}
CONFIGS = {"Llama4ForCausalLM": "Llama4TextConfig"}


def refused(name: str, sizes: dict[str, Any]) -> PreTrainedModel:
    """A model with random weights."""
    torch.manual_seed(0)
    config_name = CONFIGS.get(name, name.partition("For")[0] + "Config")
    config = getattr(transformers, config_name)(**COMMON, **sizes)
    return getattr(transformers, name)(config).eval()


@pytest.mark.parametrize(("name", "sizes", "text"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_cannot_be_paged_is_refused_and_left_as_it_was(
    name: str, sizes: dict[str, Any], text: str
) -> None:
    model = refused(name, sizes)
    ids = torch.arange(5)[None]
    before = model(input_ids=ids).logits
    with pytest.raises(ConfigError, match=text) as caught:
        paged_model(model, num_blocks=4)
    assert caught.value.option == "model"
    assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize("model", [3, torch.nn.Linear(3, 3)], ids=["number", "layer"])
def test_what_is_no_language_model_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="is no causal language model; use what AutoModel"):
        paged_model(model, num_blocks=2)


def test_a_model_in_training_mode_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    paged_model(ARCHITECTURES["llama"].make().train(), num_blocks=2)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "call model.eval() first" in caplog.text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"backend": "nobody"}, "'nobody' is not known"),
        ({"backend": "flashmla"}, "flashmla.*latent"),
        ({"block_size": 0}, "block_size=0 is too small"),
        ({"max_model_len": 0}, "max_model_len=0 is too small"),
        ({"num_blocks": 0}, "num_blocks=0 is too small"),
        ({"num_blocks": "4"}, "num_blocks='4' must be an integer"),
        ({"cache_dtype": "fp8"}, "cache_dtype='fp8' is no floating-point dtype"),
        ({"backend": 5}, "backend=5 is no attention backend; give a name, a class, or a function"),
        ({"backend": None}, "backend=None is no attention backend"),
        ({"cache_dtype": torch.int32}, "cache_dtype=torch.int32 is no floating-point dtype"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_and_the_model_left_as_it_was(
    options: dict[str, Any], text: str
) -> None:
    model = ARCHITECTURES["llama"].make()
    with pytest.raises(ConfigError, match=text):
        paged_model(model, **{"num_blocks": 2, **options})
    expected, cost = plain("llama")
    assert (model(texts()[0][None]).logits[0] - expected[0]).abs().max() <= cost
