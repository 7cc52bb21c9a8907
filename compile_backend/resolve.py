"""The mode asked for is lowered to what can be captured, one rule at a time.

Pure functions on facts: this file refuses to know models and graphs, and does not log. Logs, docs
and tests read the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compile_backend.config import CUDAGraphMode
from compile_backend.errors import ConfigError
from compile_backend.support import AttentionCGSupport

if TYPE_CHECKING:
    from collections.abc import Callable

_NONE = CUDAGraphMode.NONE
_PIECEWISE = CUDAGraphMode.PIECEWISE
_FULL = CUDAGraphMode.FULL
_FULL_DECODE_ONLY = CUDAGraphMode.FULL_DECODE_ONLY
_FULL_AND_PIECEWISE = CUDAGraphMode.FULL_AND_PIECEWISE


@dataclass(frozen=True, slots=True)
class Facts:
    """What the rules look at.

    Attributes:
        support: the weakest support level of the model's attention.
        piecewise: whether something really is split out, so that there are pieces.
        query_len: tokens of each request in a uniform decode batch.
        uncapturable: why some piece cannot be captured; None where all can.
    """

    support: AttentionCGSupport
    piecewise: bool
    query_len: int
    uncapturable: str | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """When a mode cannot be had, and what it becomes.

    Attributes:
        reason: why, as a clause.
        applies: whether the rule fires for a mode.
        lowered: the mode to go on with.
        detail: what the reason is in this case; None where it says all.
    """

    reason: str
    applies: Callable[[CUDAGraphMode, Facts], bool]
    lowered: Callable[[CUDAGraphMode, Facts], CUDAGraphMode]
    detail: Callable[[Facts], str | None] = lambda _facts: None


@dataclass(frozen=True, slots=True)
class Downgrade:
    """One rule that fired."""

    before: CUDAGraphMode
    after: CUDAGraphMode
    reason: str
    detail: str | None = None

    def __str__(self) -> str:
        return f"{self.before.name} becomes {self.after.name}: {self.why}"

    @property
    def why(self) -> str:
        """The reason with its detail."""
        return self.reason if self.detail is None else f"{self.reason}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Resolution:
    """The mode to run at, and every step that led there from the mode asked for."""

    mode: CUDAGraphMode
    downgrades: tuple[Downgrade, ...]


def _pieces_or_none(_mode: CUDAGraphMode, facts: Facts) -> CUDAGraphMode:
    return _PIECEWISE if facts.piecewise else _NONE


# NONE needs no row: nothing can be taken from it, and no row applies to it.
RULES = (
    Rule(
        reason="a full graph holds every piece, and there is one that no graph can hold",
        applies=lambda mode, facts: mode.decode_mode() is _FULL and facts.uncapturable is not None,
        lowered=_pieces_or_none,
        detail=lambda facts: facts.uncapturable,
    ),
    Rule(
        reason="nothing is split out, so there are no pieces to capture",
        applies=lambda mode, facts: mode is _PIECEWISE and not facts.piecewise,
        lowered=lambda _mode, _facts: _NONE,
    ),
    Rule(
        reason="nothing is split out, so mixed batches can only be captured as a whole",
        applies=lambda mode, facts: mode is _FULL_AND_PIECEWISE and not facts.piecewise,
        lowered=lambda _mode, _facts: _FULL,
    ),
    Rule(
        reason="full graphs of mixed batches need attention support ALWAYS",
        applies=lambda mode, facts: (
            mode.mixed_mode() is _FULL and facts.support < AttentionCGSupport.ALWAYS
        ),
        lowered=lambda _mode, facts: _FULL_AND_PIECEWISE if facts.piecewise else _FULL_DECODE_ONLY,
    ),
    Rule(
        reason="full graphs need attention that can be captured, and its support is NEVER",
        applies=lambda mode, facts: (
            mode.decode_mode() is _FULL and facts.support is AttentionCGSupport.NEVER
        ),
        lowered=_pieces_or_none,
    ),
    Rule(
        reason="full graphs of decode batches with more than one token per request need "
        "attention support UNIFORM_BATCH",
        applies=lambda mode, facts: (
            mode.decode_mode() is _FULL
            and facts.query_len > 1
            and facts.support < AttentionCGSupport.UNIFORM_BATCH
        ),
        lowered=_pieces_or_none,
    ),
)


def resolve_cudagraph_mode(
    requested: CUDAGraphMode | str,
    support: AttentionCGSupport | str,
    *,
    piecewise: bool,
    uniform_decode_query_len: int = 1,
    uncapturable: str | None = None,
    strict: bool = False,
) -> Resolution:
    """The strongest mode at or below the one requested that can be captured.

    Args:
        requested: the mode asked for, or its name.
        support: the weakest support level of all attention in the model, or its name.
        piecewise: whether something really is split out.
        uniform_decode_query_len: tokens of each request in a uniform decode batch.
        uncapturable: why some piece cannot be captured; None where all can.
        strict: raise instead of lowering the mode.

    Raises:
        ConfigError: `strict`, and the mode cannot be had; or there is no such mode or level.
    """
    requested = CUDAGraphMode.parse(requested, option="requested")
    support = AttentionCGSupport.parse(support, option="support")
    facts = Facts(support, piecewise, uniform_decode_query_len, uncapturable)
    mode, downgrades = requested, []
    for rule in RULES:
        if rule.applies(mode, facts):
            lowered, detail = rule.lowered(mode, facts), rule.detail(facts)
            downgrades.append(Downgrade(mode, lowered, rule.reason, detail))
            mode = lowered
    if strict and downgrades:
        reasons = ", and ".join(downgrade.why for downgrade in downgrades)
        raise ConfigError(
            "cudagraph_mode", requested, f"cannot be had: {reasons}", f"use {mode.name}"
        )
    return Resolution(mode, tuple(downgrades))


def default_mode(*, piecewise: bool, pooling: bool) -> CUDAGraphMode:
    """The mode of a model whose user asked for none.

    Args:
        piecewise: whether something is split out.
        pooling: whether the model pools instead of decoding.
    """
    if not piecewise:
        return _NONE
    return _PIECEWISE if pooling else _FULL_AND_PIECEWISE
