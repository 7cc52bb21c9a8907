"""How far attention can be captured: the levels, and those of known backends and ops.

A level says for which batches an attention kernel may be part of a CUDA graph. This file refuses
to know graphs, modes and torch: ops are names here, in one normal form:

- ``ns::op`` and ``ns::op.overload`` for ops of the dispatcher,
- a qualified name for a builtin or a Python function (`torch.nn.functional.softmax`),
- the plain name of a higher-order op (`flex_attention`).

A pattern is such a name, or a glob over them (`flash_attn::*`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from functools import total_ordering
from typing import TYPE_CHECKING

from compile_backend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@total_ordering
class AttentionCGSupport(Enum):
    """For which batches attention can be captured in a full CUDA graph; ordered by ``<``."""

    NEVER = 0
    """Never: the op reads what a graph would freeze, or nobody declared it."""
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    """Batches of decoding requests with one token each."""
    UNIFORM_BATCH = 2
    """Batches whose requests all have the same query length."""
    ALWAYS = 3
    """Every batch, prefill and decode mixed."""

    def __lt__(self, other: AttentionCGSupport) -> bool:
        return self.value < other.value

    @classmethod
    def parse(
        cls, value: str | AttentionCGSupport, *, option: str = "attention_support"
    ) -> AttentionCGSupport:
        """The level that a name (in any case) or a member means; numbers only order the levels.

        Args:
            value: a name or a member.
            option: what the user set to it.

        Raises:
            ConfigError: it means none.
        """
        for level in cls:
            if value is level:
                return level
            if isinstance(value, str) and value.strip().upper() == level.name:
                return level
        names = ", ".join(level.name for level in cls)
        raise ConfigError(option, value, "is not a level", f"use one of {names}")


@dataclass(frozen=True, slots=True)
class SupportRow:
    """One line of a table of levels: the names it speaks of, and their level."""

    pattern: str
    level: AttentionCGSupport


_NEVER = AttentionCGSupport.NEVER
_SINGLE_TOKEN = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
_UNIFORM = AttentionCGSupport.UNIFORM_BATCH
_ALWAYS = AttentionCGSupport.ALWAYS

KNOWN_BACKENDS = (
    # Version 2 could be captured for mixed batches too, but then without its faster decode path.
    SupportRow("flash_attn_2", _UNIFORM),
    SupportRow("flash_attn_3", _ALWAYS),
    SupportRow("triton", _ALWAYS),
    SupportRow("flashinfer", _SINGLE_TOKEN),
    SupportRow("flashinfer_trtllm", _UNIFORM),
    SupportRow("flashmla", _UNIFORM),
    SupportRow("flashinfer_mla", _UNIFORM),
    SupportRow("flashinfer_mla_sparse", _UNIFORM),
    SupportRow("aiter_flash_attn", _UNIFORM),
    SupportRow("aiter_mla", _SINGLE_TOKEN),
    SupportRow("cutlass_mla", _SINGLE_TOKEN),
    SupportRow("mamba", _SINGLE_TOKEN),
    SupportRow("sdpa", _ALWAYS),
)
"""Attention backends by name."""

KNOWN_OPS = (
    # Shapes are fixed by the key of a graph, and nothing else reaches these kernels.
    SupportRow("torch._C._nn.scaled_dot_product_attention", _ALWAYS),
    SupportRow("torch.nn.functional.scaled_dot_product_attention", _ALWAYS),
    SupportRow("torch.nn.functional.multi_head_attention_forward", _ALWAYS),
    SupportRow("flex_attention", _ALWAYS),
    SupportRow("aten::scaled_dot_product_attention", _ALWAYS),
    SupportRow("aten::_scaled_dot_product_attention_math", _ALWAYS),
    SupportRow("aten::_scaled_dot_product_flash_attention", _ALWAYS),
    SupportRow("aten::_scaled_dot_product_flash_attention_for_cpu", _ALWAYS),
    SupportRow("aten::_scaled_dot_product_efficient_attention", _ALWAYS),
    SupportRow("aten::_scaled_dot_product_cudnn_attention", _ALWAYS),
    SupportRow("aten::_scaled_dot_product_fused_attention_overrideable", _ALWAYS),
    # Lengths come in tensors, but the longest query is a number that a graph freezes.
    SupportRow("aten::_flash_attention_forward", _UNIFORM),
    SupportRow("aten::_efficient_attention_forward", _UNIFORM),
    SupportRow("aten::_cudnn_attention_forward", _UNIFORM),
    SupportRow("torch_attn::_varlen_attn", _UNIFORM),
    SupportRow("torch_attn::_varlen_attn_out", _UNIFORM),
    SupportRow("flash_attn::*", _UNIFORM),
    SupportRow("flash_attn_3::*", _ALWAYS),
    # Their metadata is made by a builder, which knows the backends in use; runners ask that.
    SupportRow("cudagraph_modes::attention", _ALWAYS),
    SupportRow("cudagraph_modes::attention_fp8", _ALWAYS),
    # What the rest computes depends on plans and metadata that an engine makes on the host, out of
    # the graph's sight. Only who makes them can declare a level.
    SupportRow("flashinfer::*_run", _NEVER),
    SupportRow("flashinfer::xqa_*", _NEVER),
    SupportRow("flashinfer::gdn_prefill", _NEVER),
    SupportRow("vllm::unified_attention*", _NEVER),
    SupportRow("vllm::unified_mla_attention*", _NEVER),
    SupportRow("vllm::unified_*kv_cache_update", _NEVER),
    SupportRow("vllm::*sparse_attn_indexer", _NEVER),
    SupportRow("vllm::deepseek_v4_attention", _NEVER),
    SupportRow("vllm::*mamba_mixer*", _NEVER),
    SupportRow("vllm::short_conv", _NEVER),
    SupportRow("vllm::linear_attention", _NEVER),
    SupportRow("vllm::kda_attention", _NEVER),
    SupportRow("vllm::*gdn_*", _NEVER),
    SupportRow("sglang::unified_attention*", _NEVER),
    SupportRow("sglang::unified_linear_attention*", _NEVER),
    SupportRow("sglang::gdn_with_output", _NEVER),
)
"""Ops that a graph is split at unless told otherwise."""

STANDS_FOR = {"cudagraph_modes::attention_fp8": "cudagraph_modes::attention"}
"""Ops that passes put in the place of others. Who names the others means these, too."""

_KNOWN_LEVELS = {row.pattern: row.level for row in KNOWN_BACKENDS + KNOWN_OPS}


def default_splitting_ops() -> tuple[str, ...]:
    """Patterns of all known attention ops."""
    return tuple(row.pattern for row in KNOWN_OPS)


def support_level(
    op_name: str, declared: Mapping[str, AttentionCGSupport] | None = None
) -> AttentionCGSupport:
    """The level of an op or backend: as declared, else as known, else NEVER.

    An exact name goes before the packet's name, that before globs; of several globs the longest
    counts, being the most specific.

    Args:
        op_name: an op in normal form, or the name of a backend.
        declared: levels by pattern, which go before the tables.
    """
    names = _names(op_name)
    for levels in (declared or {}, _KNOWN_LEVELS):
        for name in names:
            if name in levels:
                return levels[name]
        globs = [glob for glob in levels if speaks_of(glob, op_name)]
        if globs:
            return levels[max(globs, key=len)]
    return AttentionCGSupport.NEVER


def speaks_of(pattern: str, op_name: str) -> bool:
    """Whether a pattern stands for an op, or for a backend, among others."""
    return any(name == pattern or fnmatchcase(name, pattern) for name in _names(op_name))


def _names(op_name: str) -> tuple[str, ...]:
    """What an op may be called, narrowest first: ``ns::op.default`` is also ``ns::op``.

    Last comes what the op stands for.
    """
    namespace, separator, op = op_name.partition("::")
    if not separator:
        return (op_name,)
    packet, _, overload = op.partition(".")
    name = f"{namespace}::{packet}"
    before = (STANDS_FOR[name],) if name in STANDS_FOR else ()
    return f"{name}.{overload or 'default'}", name, *before


def lowest(levels: Iterable[AttentionCGSupport]) -> AttentionCGSupport:
    """The weakest of the levels, which decides for a whole model; ALWAYS if there is none."""
    return min(levels, default=AttentionCGSupport.ALWAYS)
