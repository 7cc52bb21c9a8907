"""Architectures of Hugging Face in every mode: the numbers and the tokens are those of eager.

The weights are small and random, and large enough that attention, positions, norms and biases all
matter. How far numbers may differ is derived in `Tolerance`, from what float32 itself costs.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from every_mode import EveryMode, check_what_ran
from transformers import PreTrainedConfig, PreTrainedModel

import compile_backend
from compile_backend.config import CUDAGraphMode
from compile_backend.llm.generate import greedy_generate
from compile_backend.llm.loading import LoadedModel

VOCAB_SIZE = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    # A text goes on until it is as long as asked for,
    "eos_token_id": None,
    # and does not just repeat its last token.
    "tie_word_embeddings": False,
}
WIDE: dict[str, Any] = {"intermediate_size": 64}
GROUPED: dict[str, Any] = {**WIDE, "num_key_value_heads": 2}
HEADS: dict[str, Any] = {**GROUPED, "head_dim": 16}
# Shorter than the longest texts, so that it hides some of their beginnings.
WINDOW: dict[str, Any] = {"sliding_window": 5}


@dataclass(frozen=True)
class Architecture:
    """A model to be made, and what is known of it.

    Attributes:
        model_class: of transformers.
        config_class: likewise.
        sizes: what the config is made with.
        is_causal: whether it generates.
        is_split: whether its attention is a splitting op, and not written out as matrix products.
    """

    model_class: type[PreTrainedModel]
    config_class: type[PreTrainedConfig]
    sizes: dict[str, Any]
    is_causal: bool = True
    is_split: bool = True

    def make(self, device: torch.device) -> PreTrainedModel:
        """The model, the same in every call."""
        torch.manual_seed(0)
        model = self.model_class(self.config_class(**COMMON, **self.sizes))
        model.requires_grad_(requires_grad=False).eval()
        for parameter in model.parameters():
            # Freshly made, norms are all ones, biases zeros, and scores too small to matter.
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
        return model.to(device)


ARCHITECTURES = {
    "llama": Architecture(transformers.LlamaForCausalLM, transformers.LlamaConfig, GROUPED),
    "qwen3": Architecture(transformers.Qwen3ForCausalLM, transformers.Qwen3Config, HEADS),
    "mistral": Architecture(
        transformers.MistralForCausalLM, transformers.MistralConfig, {**GROUPED, **WINDOW}
    ),
    "gemma": Architecture(transformers.GemmaForCausalLM, transformers.GemmaConfig, HEADS),
    "gemma2": Architecture(
        transformers.Gemma2ForCausalLM,
        transformers.Gemma2Config,
        {**HEADS, **WINDOW, "attn_implementation": "eager"},
        is_split=False,
    ),
    "gpt_neox": Architecture(transformers.GPTNeoXForCausalLM, transformers.GPTNeoXConfig, WIDE),
    "opt": Architecture(
        transformers.OPTForCausalLM,
        transformers.OPTConfig,
        {"ffn_dim": 64, "word_embed_proj_dim": 32},
    ),
    "bert": Architecture(
        transformers.BertForMaskedLM, transformers.BertConfig, WIDE, is_causal=False
    ),
}
CAUSAL = [name for name, architecture in ARCHITECTURES.items() if architecture.is_causal]

# Calls as (requests, tokens of each), by what `dynamic` is. Batch 1 and sizes of one token are
# compiled apart even where sizes are free. Every number of tokens has its graph; where sizes are
# free, two shapes have equally many, so each needs a graph of its own.
SHAPES: dict[bool | None, tuple[tuple[int, int], ...]] = {
    False: ((1, 7), (2, 1)),
    True: ((2, 6), (3, 4), (2, 1)),
    None: ((1, 7), (1, 5), (1, 1)),
}
CAPTURE_SIZES = (1, 2, 5, 7, 12)
# A warm-up, a capture that is replayed at once, a replay; and again, as automatic dynamic shapes
# compile the first shape twice.
NUM_ROUNDS = 5


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    matmul = torch.backends.cuda.matmul
    allowed = matmul.allow_tf32
    matmul.allow_tf32 = False
    yield torch.device(request.param)
    matmul.allow_tf32 = allowed


pytestmark = pytest.mark.usefixtures("one_core", "without_gradients")


class Tolerance:
    """How far the results of a compiled model may be from eager's.

    Both compute the same function in float32, in another order. The rounding error of the eager
    model is known: E, the largest difference from the same model in float64. Another order of the
    same sums has errors of the same size, but of other values, so the compiled model is granted an
    error of 3 E. It is then at most E + 3 E = 4 E away from eager.

    E is taken for each output, over all its elements. What a model computes in float32 even when
    it is float64, as the norms and rotary tables of Hugging Face do, is rounded twice alike and
    adds nothing to E; that is a small part of all roundings.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._exact = copy.deepcopy(model).double()

    def check(self, results: list[torch.Tensor], inputs: dict[str, torch.Tensor]) -> None:
        """Fail unless `results` are what the model computes from `inputs`."""
        eager = results_of(self._model(**inputs))
        exact = results_of(self._exact(**inputs))
        assert len(results) == len(eager)
        for result, wanted, reference in zip(results, eager, exact, strict=True):
            rounding = float((wanted - reference).abs().max())
            # Or a stale or misplaced result might pass.
            assert rounding < 1e-4 * float(wanted.std())
            torch.testing.assert_close(result, wanted, rtol=0.0, atol=4 * rounding)


def results_of(output: Any) -> list[torch.Tensor]:
    """The logits, and all keys and values of a cache."""
    cache = getattr(output, "past_key_values", None)
    layers = cache.layers if cache is not None else ()
    return [output.logits, *(t for layer in layers for t in (layer.keys, layer.values))]


def random_inputs(
    architecture: Architecture, shape: tuple[int, int], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    device = generator.device
    token_ids = torch.randint(VOCAB_SIZE, shape, generator=generator, device=device)
    inputs = {"input_ids": token_ids}
    if not architecture.is_causal:
        # Texts of several lengths, filled up at their ends.
        lengths = torch.randint(1, 1 + shape[1], (shape[0], 1), generator=generator, device=device)
        inputs["attention_mask"] = (torch.arange(shape[1], device=device) < lengths).long()
    return inputs


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        pytest.param(name, dynamic, id=f"{name}-{kind}")
        for kind, dynamic, names in (
            ("static", False, ARCHITECTURES),
            ("dynamic", True, ARCHITECTURES),
            ("automatic", None, ("llama", "gemma2", "bert")),
        )
        for name in names
    ],
)
def test_results_equal_those_of_eager_in_every_mode(
    name: str, dynamic: bool | None, device: torch.device
) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.make(device)
    tolerance = Tolerance(model)
    options = {"piece_compiler": "eager", "cudagraph_capture_sizes": CAPTURE_SIZES}
    compiled = EveryMode(model, dynamic=dynamic, options=options)
    generator = torch.Generator(device).manual_seed(1)
    kept = []
    for _ in range(NUM_ROUNDS):
        for shape in SHAPES[dynamic]:
            for mode in CUDAGraphMode:
                inputs = random_inputs(architecture, shape, generator)
                kept.append((results_of(compiled.in_mode(mode)(**inputs)), inputs))
    # Only now, so that results which a later call overwrote are found.
    for results, inputs in kept:
        tolerance.check(results, inputs)
    is_decode = [num_tokens == 1 for _, num_tokens in SHAPES[dynamic]] * NUM_ROUNDS
    for mode in CUDAGraphMode:
        check_what_ran(compiled.stats(mode), mode, is_decode, is_split=architecture.is_split)


@pytest.mark.parametrize(
    ("name", "mode", "dynamic"),
    [
        ("llama", CUDAGraphMode.FULL_AND_PIECEWISE, False),
        ("qwen3", CUDAGraphMode.PIECEWISE, False),
        ("mistral", CUDAGraphMode.FULL, False),
        ("gemma", CUDAGraphMode.FULL_AND_PIECEWISE, False),
        ("gpt_neox", CUDAGraphMode.FULL, False),
        ("opt", CUDAGraphMode.PIECEWISE, True),
        ("bert", CUDAGraphMode.PIECEWISE, False),
    ],
)
def test_results_of_inductor_equal_those_of_eager(
    name: str, mode: CUDAGraphMode, dynamic: bool, device: torch.device
) -> None:
    architecture = ARCHITECTURES[name]
    model = architecture.make(device)
    tolerance = Tolerance(model)
    options = {"cudagraph_mode": mode.name, "cudagraph_capture_sizes": list(CAPTURE_SIZES)}
    compiled = torch.compile(model, backend="cudagraph_modes", dynamic=dynamic, options=options)
    generator = torch.Generator(device).manual_seed(1)
    shapes = [(2, 6), (3, 4)] * 4 if dynamic else [(1, 7)] * 4
    kept = []
    for shape in shapes:
        inputs = random_inputs(architecture, shape, generator)
        kept.append((results_of(compiled(**inputs)), inputs))
    for results, inputs in kept:
        tolerance.check(results, inputs)
    report = compile_backend.stats(compiled)
    check_what_ran(report, mode, [False] * len(shapes), is_split=architecture.is_split)


@pytest.mark.parametrize("name", CAUSAL)
def test_greedy_tokens_equal_those_of_eager_in_every_mode(name: str, device: torch.device) -> None:
    architecture = ARCHITECTURES[name]
    loaded = LoadedModel(model=architecture.make(device), tokenizer=None, name=name)
    options = {"piece_compiler": "eager", "cudagraph_capture_sizes": (1, 7)}
    compiled = EveryMode(loaded.model, dynamic=None, options=options)
    # Equally long, so that reading them is captured and replayed, too.
    prompts = torch.randint(VOCAB_SIZE, (4, 7), generator=torch.Generator().manual_seed(1))
    num_new_tokens = 6

    def generated(model_call: Callable[..., Any]) -> list[tuple[int, ...]]:
        return [
            greedy_generate(
                model_call, loaded, prompt, max_new_tokens=num_new_tokens, cache_len=16
            ).token_ids
            for prompt in prompts.tolist()
        ]

    expected = generated(loaded.model)
    assert len(set(expected)) == len(prompts)
    assert {len(token_ids) for token_ids in expected} == {num_new_tokens}
    is_decode = [False, *[True] * (num_new_tokens - 1)] * len(prompts)
    for mode in CUDAGraphMode:
        assert generated(compiled.in_mode(mode)) == expected, mode
        check_what_ran(compiled.stats(mode), mode, is_decode, is_split=architecture.is_split)
