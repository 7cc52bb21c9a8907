"""Every backend that has a level has a row; what cannot run here says what it needs."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from ragged import CPU

from compile_backend.attention import registry
from compile_backend.attention.backend import AttentionBackend
from compile_backend.attention.builder import AttentionMetadataBuilder
from compile_backend.attention.huggingface import paged_model
from compile_backend.attention.kv_cache import LayerCache
from compile_backend.attention.layer import AttentionLayer
from compile_backend.attention.registry import AUTO, BACKENDS, BackendRow, make_backend
from compile_backend.attention.sdpa import SdpaAttention
from compile_backend.attention.spec import AttentionSpec, CacheFormat
from compile_backend.errors import ConfigError
from compile_backend.support import KNOWN_BACKENDS, AttentionCGSupport, support_level

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=64, scale=0.125)
CACHE = CacheFormat(block_size=16, dtype=torch.bfloat16, max_model_len=64)
CUDA = torch.device("cuda")
BUILT = [row for row in BACKENDS if row.module]
ELSEWHERE = [row for row in BACKENDS if not row.module]
names = pytest.mark.parametrize("row", BACKENDS, ids=lambda row: row.name)
built = pytest.mark.parametrize("row", BUILT, ids=lambda row: row.name)
elsewhere = pytest.mark.parametrize("row", ELSEWHERE, ids=lambda row: row.name)


def make(name: str, device: torch.device = CPU) -> AttentionBackend:
    return make_backend(name, SPEC, CACHE, device)


# --- the rows ---------------------------------------------------------------------------------


def test_rows_are_those_of_the_table_of_levels() -> None:
    """flex_attention has its level as an op, where it is found by the same name."""
    known = {row.pattern for row in KNOWN_BACKENDS}
    assert {row.name for row in BACKENDS} == known | {"flex_attention"}


def test_each_name_has_one_row_and_none_is_auto() -> None:
    found = [row.name for row in BACKENDS]
    assert len(found) == len(set(found))
    assert AUTO not in found


@names
def test_a_row_has_a_class_or_says_what_it_needs(row: BackendRow) -> None:
    assert bool(row.module) == bool(row.class_name) != bool(row.needs)


@built
def test_a_class_declares_the_level_of_the_table(row: BackendRow) -> None:
    backend = row.load()
    assert issubclass(backend, AttentionBackend)
    assert backend.name == row.name
    assert "support" in vars(backend), "inherited, so not declared"
    assert backend.support is support_level(row.name)


def test_who_declares_nothing_is_never_captured() -> None:
    class Silent(AttentionBackend):
        name = "silent"
        forward = SdpaAttention.forward

    assert Silent(SPEC, CACHE, CPU).support is AttentionCGSupport.NEVER
    assert support_level("silent") is AttentionCGSupport.NEVER


# --- asked for by name ------------------------------------------------------------------------


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'flash_attn' is not known") as caught:
        make("flash_attn")
    offered = caught.value.fix.removeprefix("use one of ").split(", ")
    assert offered == [AUTO, *(row.name for row in BACKENDS)]


@elsewhere
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_what_is_not_built_says_what_it_needs(row: BackendRow, device: torch.device) -> None:
    with pytest.raises(ConfigError, match=re.escape(row.needs)) as caught:
        make(row.name, device)
    for other in BUILT:
        assert other.name in caught.value.fix


NEEDS = {
    "flash_attn_3": "compute capability 9",
    "triton": "CUDA",
    "flash_attn_2": "compute capability 8",
    "flashinfer": "CUDA",
}


@pytest.mark.parametrize("name", NEEDS)
def test_on_a_cpu_kernels_of_gpus_say_what_they_need(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=NEEDS[name]) as caught:
        make(name)
    assert caught.value.option == "backend"
    assert caught.value.value == name


@built
def test_what_a_layer_lacks_is_told_before_anything_is_made(
    row: BackendRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = ConfigError("head_size", 7, "is odd", "use 8")
    backend = row.load()
    monkeypatch.setattr(backend, "missing", classmethod(lambda cls, device: None))
    monkeypatch.setattr(backend, "unsupported", classmethod(lambda cls, spec, cache: reason))
    with pytest.raises(ConfigError) as caught:
        make(row.name)
    assert caught.value is reason
    with pytest.raises(ConfigError, match="head_size"):
        AttentionBackend.__init__(object.__new__(backend), SPEC, CACHE, CPU)


@built
@pytest.mark.parametrize("change", [{"dtype": torch.int8}, {"dtype": torch.int32}], ids=str)
def test_a_cache_that_cannot_be_is_named_as_the_argument_that_users_pass(
    row: BackendRow, change: dict[str, Any]
) -> None:
    error = row.load().unsupported(SPEC, replace(CACHE, **change))
    assert isinstance(error, ConfigError)
    assert error.option == "cache_dtype"
    assert error.option in inspect.signature(paged_model).parameters


@pytest.mark.parametrize("name", ["flash_attn", "flashmla", "auto"])
def test_a_backend_that_cannot_be_is_named_as_the_argument_that_users_pass(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(name, torch.device("meta"))
    assert caught.value.option == "backend"
    assert all("backend" in inspect.signature(f).parameters for f in (make_backend, paged_model))


# --- auto -------------------------------------------------------------------------------------


def let_run(monkeypatch: pytest.MonkeyPatch, *unable: str, lacking: str = "machine") -> None:
    """Let every backend but some say that it can run; those lack a machine, or the layer."""
    for row in BUILT:
        answers = {"machine": None, "layer": None}
        if row.name in unable:
            answers[lacking] = ConfigError("x", 1, "cannot be", "use 2")
        machine, layer = answers["machine"], answers["layer"]
        backend = row.load()
        monkeypatch.setattr(
            backend, "missing", classmethod(lambda cls, device, text=machine: text and str(text))
        )
        monkeypatch.setattr(
            backend, "unsupported", classmethod(lambda cls, spec, cache, error=layer: error)
        )


def test_auto_on_a_cpu_is_sdpa() -> None:
    assert type(make(AUTO)) is SdpaAttention


def test_auto_on_a_cpu_is_sdpa_even_where_others_could_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_run(monkeypatch)
    assert type(make(AUTO)) is SdpaAttention


@pytest.mark.parametrize("lacking", ["machine", "layer"])
def test_auto_on_a_gpu_is_the_first_that_can_run(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of the rows; sdpa comes last, so that there always is one."""
    unable: list[str] = []
    for row in BUILT:
        let_run(monkeypatch, *unable, lacking=lacking)
        assert registry._class_of(AUTO, SPEC, CACHE, CUDA) is row.load()
        unable.append(row.name)
    assert unable[-1] == "sdpa"


def test_auto_on_a_device_without_a_backend_names_it() -> None:
    with pytest.raises(ConfigError, match=r"backend='auto' .*meta"):
        make(AUTO, torch.device("meta"))


def test_auto_looks_into_no_package_of_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking a package of kernels imports it, which takes seconds and may fail."""
    for row in BUILT:
        if "cpu" not in row.auto_on:
            monkeypatch.setattr(
                row.load(), "missing", classmethod(lambda cls, device: pytest.fail(cls.name))
            )
    assert type(make(AUTO)) is SdpaAttention


# --- a class of the user's own ----------------------------------------------------------------


class Mine(SdpaAttention):
    name = "mine"


class Nameless(AttentionBackend):
    forward = SdpaAttention.forward

    @classmethod
    def missing(cls, device: torch.device) -> str | None:
        return None if device.type == "cpu" else "it needs a CPU"

    @classmethod
    def unsupported(cls, spec: AttentionSpec, cache: CacheFormat) -> Exception | None:
        if cache.block_size < 16:
            return ConfigError("block_size", cache.block_size, "is too small", "use 16")
        return None


@pytest.mark.parametrize("backend", [Mine, Nameless])
def test_a_class_is_taken_as_it_is(backend: type[AttentionBackend]) -> None:
    made = make_backend(backend, SPEC, CACHE, CPU)
    assert type(made) is backend
    assert (made.spec, made.cache, made.device) == (SPEC, CACHE, CPU)


def test_a_class_says_what_it_lacks_like_a_named_one() -> None:
    with pytest.raises(ConfigError, match=r"'Nameless' cannot run here; it needs a CPU"):
        make_backend(Nameless, SPEC, CACHE, CUDA)
    with pytest.raises(ConfigError, match="block_size=8 is too small"):
        make_backend(Nameless, SPEC, replace(CACHE, block_size=8), CPU)


def test_a_class_that_is_no_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="'dict' is no attention backend; use a subclass"):
        make_backend(dict, SPEC, CACHE, CPU)  # type: ignore[arg-type]


def test_a_paged_model_takes_a_class_for_all_layers_or_for_some() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for backend, expected in (
        (Mine, ["mine", "mine", "mine"]),
        (lambda name, spec: Mine if name == "1" else "auto", ["sdpa", "mine", "sdpa"]),
    ):
        layers = paged_model(model, num_blocks=2, backend=backend).builder.layers.values()
        assert [layer.backend.name for layer in layers] == expected
        assert len({layer.backend for layer in layers}) == len(set(expected))


# --- mixed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", BUILT, ids=lambda row: row.name)
@pytest.mark.parametrize("second", BUILT, ids=lambda row: row.name)
def test_of_two_backends_the_weaker_decides(first: BackendRow, second: BackendRow) -> None:
    layers = {}
    for name, row in {"0": first, "1": second}.items():
        backend = object.__new__(row.load())  # levels are of the class: nothing has to run
        cache = LayerCache(*(torch.zeros(1, 16, 2, 64) for _ in range(2)))
        layers[name] = AttentionLayer(name, backend, cache)
    builder = AttentionMetadataBuilder(layers, CACHE, 1)
    assert builder.support is min(support_level(first.name), support_level(second.name))
