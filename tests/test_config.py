"""Every option is checked, copied and put into one form."""

import copy
import dataclasses
import inspect
import pathlib
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_backend.config import CompilationConfig, CUDAGraphMode, PassConfig
from compile_backend.errors import ConfigError
from compile_backend.support import AttentionCGSupport

NONE = CUDAGraphMode.NONE
PIECEWISE = CUDAGraphMode.PIECEWISE
FULL = CUDAGraphMode.FULL
FULL_DECODE_ONLY = CUDAGraphMode.FULL_DECODE_ONLY
FULL_AND_PIECEWISE = CUDAGraphMode.FULL_AND_PIECEWISE


def config(**options: Any) -> CompilationConfig:
    return CompilationConfig.from_options(options)


@pytest.mark.parametrize(
    ("mode", "value", "decode", "mixed", "separate"),
    [
        (NONE, 0, NONE, NONE, False),
        (PIECEWISE, 1, PIECEWISE, PIECEWISE, False),
        (FULL, 2, FULL, FULL, False),
        (FULL_DECODE_ONLY, (2, 0), FULL, NONE, True),
        (FULL_AND_PIECEWISE, (2, 1), FULL, PIECEWISE, True),
    ],
)
def test_modes(mode, value, decode, mixed, separate):
    assert mode.value == value
    assert mode.decode_mode() is decode
    assert mode.mixed_mode() is mixed
    assert mode.separate_routine() is separate
    assert mode.is_valid_runtime_mode() is not separate
    for runtime_mode in (NONE, PIECEWISE, FULL):
        assert mode.has_mode(runtime_mode) is (runtime_mode in {decode, mixed})
    assert mode.has_full_cudagraphs() is (FULL in {decode, mixed})
    assert mode.has_piecewise_cudagraphs() is (PIECEWISE in {decode, mixed})
    assert mode.requires_piecewise_compilation() is mode.has_piecewise_cudagraphs()


@pytest.mark.parametrize("mode", CUDAGraphMode)
def test_modes_are_parsed_in_any_case(mode):
    for written in (mode, mode.name, mode.name.lower(), f" {mode.name.title()} "):
        assert CUDAGraphMode.parse(written) is mode


def test_what_is_no_mode_is_refused_by_the_name_of_its_option():
    with pytest.raises(ConfigError, match=r"^highest_mode='PARTIAL' is not a mode"):
        CUDAGraphMode.parse("PARTIAL", option="highest_mode")


@pytest.mark.parametrize("written", ["PARTIAL", "", 2, None])
def test_what_is_no_mode_is_refused_with_the_names(written):
    with pytest.raises(ConfigError, match="NONE, PIECEWISE, FULL, FULL_DECODE_ONLY, FULL_AND_"):
        CUDAGraphMode.parse(written)


DEFAULTS = {
    "cudagraph_mode": None,
    "cudagraph_capture_sizes": None,
    "max_cudagraph_capture_size": None,
    "cudagraph_capture": "lazy",
    "pooling": False,
    "cudagraph_num_of_warmups": 1,
    "cudagraph_copy_inputs": True,
    "cudagraph_clone_outputs": True,
    "cudagraph_pad_inputs": False,
    "cudagraph_specialize_lora": True,
    "splitting_ops": None,
    "attention_support": None,
    "num_speculative_tokens": 0,
    "max_num_seqs": 256,
    "describe_batch": None,
    "piece_compiler": "inductor",
    "inductor_compile_config": {},
    "compile_sizes": (),
    "compile_sizes_config": {
        "coordinate_descent_tuning": True,
        "combo_kernels": True,
        "benchmark_combo_kernel": True,
    },
    "compile_ranges_endpoints": (),
    "use_inductor_graph_partition": False,
    "pass_config": PassConfig(),
    "inductor_passes": {},
    "cache_dir": None,
    "disable_cache": False,
    "strict": False,
    "debug": "off",
}


def test_defaults():
    given_nothing = CompilationConfig()
    fields = {
        field.name: getattr(given_nothing, field.name)
        for field in dataclasses.fields(CompilationConfig)
    }
    assert fields == DEFAULTS
    assert CompilationConfig.from_options(None) == given_nothing


@pytest.mark.parametrize(
    ("option", "written", "held"),
    [
        ("cudagraph_mode", "full_and_piecewise", FULL_AND_PIECEWISE),
        ("cudagraph_capture_sizes", [1, 2, 4], (1, 2, 4)),
        ("splitting_ops", [], ()),
        ("splitting_ops", ["a::b", "c::d.out"], ("a::b", "c::d.out")),
        ("attention_support", {"a::b": "always"}, {"a::b": AttentionCGSupport.ALWAYS}),
        (
            "attention_support",
            {"a::b": AttentionCGSupport.UNIFORM_BATCH},
            {"a::b": AttentionCGSupport.UNIFORM_BATCH},
        ),
        ("compile_sizes", [1, 8], (1, 8)),
        (
            "compile_sizes",
            ["cudagraph_capture_sizes", 1, 1024],
            (1, 1024, "cudagraph_capture_sizes"),
        ),
        ("pass_config", {"enable_noop": True}, PassConfig(enable_noop=True)),
        ("cache_dir", pathlib.Path("here"), "here"),
        ("inductor_compile_config", {"max_autotune": True}, {"max_autotune": True}),
        ("describe_batch", len, len),
    ],
)
def test_what_may_be_written_in_several_ways_has_one_form(option, written, held):
    assert getattr(config(**{option: written}), option) == held


FLAGS = [field.name for field in dataclasses.fields(CompilationConfig) if field.type == "bool"]


@pytest.mark.parametrize(
    ("option", "value", "problem", "fix"),
    [
        *((flag, 1, "must be a bool", "use True or False") for flag in FLAGS),
        ("cudagraph_mode", "PARTIAL", "is not a mode", "use one of NONE"),
        ("cudagraph_capture_sizes", (8, 4), "must ascend", "use (4, 8)"),
        ("cudagraph_capture_sizes", (4, 4), "must ascend", "use (4,)"),
        ("cudagraph_capture_sizes", (0, 4), "must hold positive integers", "use (4, 8)"),
        ("cudagraph_capture_sizes", (True, 4), "must hold positive integers", "use (4, 8)"),
        ("cudagraph_capture_sizes", 8, "must be a list", "use (4, 8)"),
        ("cudagraph_capture_sizes", "8", "must be a list", "use (4, 8)"),
        ("cudagraph_capture_sizes", (), "is empty", "use cudagraph_mode='NONE'"),
        ("max_cudagraph_capture_size", 0, "is too small", "use 1 or more"),
        ("max_cudagraph_capture_size", True, "must be an integer", "use 1 or more"),
        ("max_cudagraph_capture_size", 10**9, "is more than 1048576", "at or below 1048576"),
        ("cudagraph_capture_sizes", (1, 10**9), "holds 1000000000, which is", "at or below"),
        ("cudagraph_capture_sizes", range(1, 10**9), "holds 999999999 sizes", "use a few"),
        ("cudagraph_capture", "eager", "is no choice", "use one of lazy, ahead"),
        ("debug", "on", "is no choice", "use one of off, addresses, verify"),
        ("piece_compiler", "nvcc", "is no choice", "use one of inductor, eager"),
        ("cudagraph_num_of_warmups", 0, "is too small", "use 1 or more"),
        ("cudagraph_num_of_warmups", 1.0, "must be an integer", "use 1 or more"),
        ("num_speculative_tokens", -1, "is too small", "use 0 or more"),
        ("num_speculative_tokens", 10**9, "is more than 1048576", "at or below 1048576"),
        ("max_num_seqs", 0, "is too small", "use 1 or more"),
        ("max_num_seqs", 10**9, "is more than 1048576", "at or below 1048576"),
        ("splitting_ops", "a::b", "must be a list of names", "use ('a::b',)"),
        ("splitting_ops", [""], "must be a list of names", "use ('my_library::my_op',)"),
        ("splitting_ops", 3, "must be a list of names", "use ('my_library::my_op',)"),
        ("attention_support", {"a::b": "MAYBE"}, "is not a level", "use one of NEVER"),
        ("attention_support", ["a::b"], "must map names", "use {'name': value}"),
        ("describe_batch", 3, "must be callable", "use a function or None"),
        ("describe_batch", lambda: 0, "cannot be called with one", "take one argument"),
        ("describe_batch", lambda a, b: 0, "cannot be called with one", "take one argument"),
        ("inductor_compile_config", {1: 2}, "must map names", "use {'name': value}"),
        ("inductor_passes", [], "must map names", "use {'name': value}"),
        ("inductor_passes", {"mine": 1}, "cannot be called", "use a function of a graph"),
        ("inductor_passes", {"mine": int}, "is a class", "use int(...)"),
        ("inductor_passes", {"mine": "a.b"}, "names no function", 'write "package.module'),
        ("compile_sizes", (8, 4), "must ascend", "use (4, 8)"),
        ("compile_sizes", "all", "must be a list of sizes", "('cudagraph_capture_sizes',)"),
        ("compile_sizes", ("all",), "holds a name of no sizes", "'cudagraph_capture_sizes'"),
        ("compile_sizes_config", {"max_autotune": True}, "compile_sizes names none", "name them"),
        ("compile_ranges_endpoints", (0,), "must hold positive integers", "use (4, 8)"),
        ("pass_config", {"enable_noop": 1}, "must be a bool", "use True or False"),
        ("pass_config", {"enable_nop": True}, "is not an option", "did you mean enable_noop?"),
        ("pass_config", True, "must map names", "use {'name': value}"),
        ("cache_dir", "", "must name a directory", "use a path or None"),
        ("cache_dir", 3, "must name a directory", "use a path or None"),
        ("cache_dir", "a\0b", "holds what no path can", "use a path or None"),
        ("cache_dir", "a\ud800", "holds what no path can", "use a path or None"),
    ],
)
def test_impossible_values_are_refused_with_a_fix(option, value, problem, fix):
    with pytest.raises(ConfigError) as caught:
        config(**{option: value})
    assert problem in caught.value.problem
    assert fix in caught.value.fix


@given(st.text(), st.sampled_from(["MAYBE", 7, 3, 0, None, True]))
def test_a_level_that_is_none_names_its_op(name, level):
    with pytest.raises(ConfigError) as caught:
        config(attention_support={"a::b": "ALWAYS", name: level})
    assert str(caught.value).startswith(f"attention_support[{name!r}]={level!r} is not a level; ")


def test_an_unknown_option_names_the_close_one_and_all():
    with pytest.raises(ConfigError) as caught:
        config(cudagraph_capture_size=[1, 2])
    assert caught.value.option == "cudagraph_capture_size"
    assert "did you mean cudagraph_capture_sizes?" in caught.value.fix
    assert all(name in caught.value.fix for name in DEFAULTS)


@pytest.mark.parametrize(
    ("make", "name", "close"),
    [
        (CompilationConfig, "cudagraph_mod", "cudagraph_mode"),
        (CompilationConfig, "spliting_ops", "splitting_ops"),
        (PassConfig, "enable_nop", "enable_noop"),
        (
            lambda **options: dataclasses.replace(config(), **options),
            "max_num_seq",
            "max_num_seqs",
        ),
    ],
    ids=["config", "another", "passes", "replace"],
)
def test_an_unknown_option_is_answered_however_a_config_is_made(make, name, close):
    with pytest.raises(ConfigError, match=f"{name}=1 is not an option; did you mean {close}"):
        make(**{name: 1})


def test_the_signature_of_a_config_names_its_options():
    assert list(inspect.signature(CompilationConfig).parameters) == list(DEFAULTS)


def test_options_must_be_a_mapping():
    with pytest.raises(ConfigError, match="must be a mapping"):
        CompilationConfig.from_options(["strict"])


@pytest.mark.parametrize("maximum", [4, 16])
def test_a_maximum_that_contradicts_explicit_sizes_is_refused_naming_both(maximum):
    with pytest.raises(ConfigError) as caught:
        config(cudagraph_capture_sizes=(4, 8), max_cudagraph_capture_size=maximum)
    assert f"max_cudagraph_capture_size={maximum}" in str(caught.value)
    assert "cudagraph_capture_sizes=(4, 8)" in str(caught.value)


def test_a_maximum_may_repeat_the_largest_explicit_size():
    config(cudagraph_capture_sizes=(4, 8), max_cudagraph_capture_size=8)


def test_nothing_done_to_the_callers_containers_changes_a_config():
    """Two models may share one list or dict, and one of them may go on to change it."""
    options: dict[str, Any] = {
        "cudagraph_capture_sizes": [1, 2],
        "splitting_ops": ["a::b"],
        "attention_support": {"a::b": "ALWAYS"},
        "inductor_compile_config": {"nested": {"list": [1]}},
        "pass_config": {"enable_noop": True},
    }
    before, untouched = config(**options), config(**copy.deepcopy(options))
    options["cudagraph_capture_sizes"].append(4)
    options["splitting_ops"].append("c::d")
    options["attention_support"]["c::d"] = "NEVER"
    options["inductor_compile_config"]["nested"]["list"].append(2)
    options["pass_config"].clear()
    assert before == untouched


def test_a_config_is_frozen():
    held = config(attention_support={"a::b": "ALWAYS"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        held.strict = True  # type: ignore[misc]
    for mapping in (held.attention_support, held.inductor_compile_config):
        with pytest.raises(TypeError):
            mapping["c::d"] = 1  # type: ignore[index]


def test_two_configs_share_no_default():
    assert (
        CompilationConfig().inductor_compile_config
        is not CompilationConfig().inductor_compile_config
    )


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, dataclasses.replace, lambda held: pickle.loads(pickle.dumps(held))],
)
def test_a_config_can_be_copied_and_sent_to_another_process(duplicate):
    held = config(
        cudagraph_mode="FULL",
        attention_support={"a::b": "ALWAYS"},
        inductor_compile_config={"nested": {"list": [1]}},
        describe_batch=len,
    )
    assert duplicate(held) == held


@given(st.integers(0, 64))
def test_query_length_of_uniform_decode_is_one_plus_the_guesses(guesses):
    held = config(num_speculative_tokens=guesses)
    assert held.uniform_decode_query_len == 1 + guesses


def test_async_tp_needs_sequence_parallelism():
    """In whatever order, and nothing else needs another flag."""
    for flags in ({"enable_async_tp": True}, {"enable_async_tp": True, "enable_fusion": True}):
        with pytest.raises(ConfigError, match="enable_async_tp=True needs enable_sequence_par"):
            config(pass_config=flags)
    for flag in dataclasses.fields(PassConfig):
        if flag.name != "enable_async_tp":
            assert getattr(config(pass_config={flag.name: True}).pass_config, flag.name)
    both = {"enable_async_tp": True, "enable_sequence_parallelism": True}
    assert config(pass_config=both).pass_config.enable_async_tp
