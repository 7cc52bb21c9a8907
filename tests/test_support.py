"""Levels are ordered, and every op has one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_backend.errors import ConfigError
from compile_backend.support import (
    KNOWN_BACKENDS,
    KNOWN_OPS,
    AttentionCGSupport,
    default_splitting_ops,
    lowest,
    speaks_of,
    support_level,
)

NEVER = AttentionCGSupport.NEVER
SINGLE = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
UNIFORM = AttentionCGSupport.UNIFORM_BATCH
ALWAYS = AttentionCGSupport.ALWAYS

levels = st.sampled_from(AttentionCGSupport)


@given(levels, levels)
def test_levels_are_ordered_as_their_numbers(one, other):
    assert (one < other) == (one.value < other.value)
    assert (one >= other) == (one.value >= other.value)


@pytest.mark.parametrize("level", AttentionCGSupport)
def test_a_level_is_parsed_from_name_and_member(level):
    for written in (level, level.name, level.name.lower()):
        assert AttentionCGSupport.parse(written) is level


@pytest.mark.parametrize("written", ["SOMETIMES", "3", 3, 0, 4, -1, True, None, 2.0])
def test_what_is_no_level_is_refused_with_the_names(written):
    with pytest.raises(ConfigError, match="ALWAYS"):
        AttentionCGSupport.parse(written)


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("torch._C._nn.scaled_dot_product_attention", ALWAYS),
        ("aten::scaled_dot_product_attention", ALWAYS),
        ("aten::_scaled_dot_product_flash_attention_for_cpu.default", ALWAYS),
        ("aten::_scaled_dot_product_fused_attention_overrideable", ALWAYS),
        ("flex_attention", ALWAYS),
        ("flash_attn::_flash_attn_varlen_forward", UNIFORM),
        ("flash_attn_3::fwd.default", ALWAYS),
        ("torch_attn::_varlen_attn", UNIFORM),
        ("vllm::unified_attention_with_output", NEVER),
        ("vllm::mamba_mixer2", NEVER),
        ("sglang::unified_attention_with_output", NEVER),
        ("flashinfer::rmsnorm", NEVER),
        ("cudagraph_modes::attention", ALWAYS),
        ("cudagraph_modes::attention_fp8", ALWAYS),
        ("aten::mm", NEVER),
        ("flash_attn_2", UNIFORM),
        ("flashinfer", SINGLE),
        ("mamba", SINGLE),
    ],
)
def test_level_of_known_names(name, level):
    assert support_level(name) is level


def test_what_is_declared_of_an_op_holds_for_what_a_pass_puts_in_its_place():
    name = "cudagraph_modes::attention_fp8"
    assert support_level(name, {"cudagraph_modes::attention": SINGLE}) is SINGLE
    assert support_level(name, {"cudagraph_modes::attention": SINGLE, name: UNIFORM}) is UNIFORM
    assert speaks_of("cudagraph_modes::attention", name)
    assert not speaks_of(name, "cudagraph_modes::attention")


def test_an_op_nobody_declared_counts_as_never():
    assert support_level("my_library::attention", {"other::attention": ALWAYS}) is NEVER


def test_declared_levels_go_exact_then_packet_then_glob_then_table():
    declared = {"lib::*": SINGLE, "lib::op": UNIFORM, "lib::op.out": ALWAYS}
    assert support_level("lib::op.out", declared) is ALWAYS
    assert support_level("lib::op.default", declared) is UNIFORM
    assert support_level("lib::op", declared) is UNIFORM
    assert support_level("lib::other.out", declared) is SINGLE
    assert support_level("flash_attn_3::fwd", declared) is ALWAYS
    assert support_level("flash_attn_3::fwd", {"flash_attn_3::*": NEVER}) is NEVER


def test_the_default_overload_may_be_left_out_on_both_sides():
    assert support_level("lib::op", {"lib::op.default": ALWAYS}) is ALWAYS
    assert support_level("lib::op.default", {"lib::op": ALWAYS}) is ALWAYS
    assert support_level("lib::op.out", {"lib::op.default": ALWAYS}) is NEVER


def test_the_longest_glob_counts():
    assert support_level("lib::safe_op", {"lib::*": NEVER, "lib::safe_*": ALWAYS}) is ALWAYS


@given(st.lists(levels))
def test_the_weakest_of_mixed_support_levels_decides(several):
    assert lowest(several) is min(several, default=ALWAYS)


def test_default_splitting_ops_cannot_be_changed_by_one_of_two_models():
    first = default_splitting_ops()
    assert isinstance(first, tuple)
    assert first == default_splitting_ops() == tuple(row.pattern for row in KNOWN_OPS)


def test_every_name_has_one_row():
    patterns = [row.pattern for row in KNOWN_BACKENDS + KNOWN_OPS]
    assert len(patterns) == len(set(patterns))


def test_libraries_with_other_kernels_are_not_split_out_as_a_whole():
    assert not {"flashinfer::*", "aten::*", "vllm::*"} & set(default_splitting_ops())
