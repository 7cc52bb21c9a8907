"""What one attention layer computes, whoever computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compile_backend.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The mathematics of one layer: causal attention over a request's own tokens.

    Attributes:
        num_heads: heads of the queries.
        num_kv_heads: heads of keys and values; each serves `num_heads / num_kv_heads` queries.
        head_size: elements of a head.
        scale: multiplies the scores.
        sliding_window: how many of the latest tokens a query sees, itself included; None: all.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`; None: left as they are.

    Raises:
        ConfigError: the numbers contradict each other.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "num_kv_heads",
                self.num_kv_heads,
                f"does not divide num_heads={self.num_heads}",
                "give every key-value head the same number of query heads",
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(
                "sliding_window", self.sliding_window, "sees nothing", "use 1 or more, or None"
            )

    @property
    def window_left(self) -> int:
        """How many tokens before its own a query sees, as kernels count them; -1: all."""
        return -1 if self.sliding_window is None else self.sliding_window - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormat:
    """How the paged cache of a layer is stored.

    Attributes:
        block_size: tokens of a block (a page).
        dtype: of the stored keys and values; `float8_e4m3fn` stores them divided by a scale.
        max_model_len: most tokens of one request.
    """

    block_size: int
    dtype: torch.dtype
    max_model_len: int

    def __post_init__(self) -> None:
        for option in ("block_size", "max_model_len"):
            if getattr(self, option) < 1:
                raise ConfigError(option, getattr(self, option), "is too small", "use 1 or more")

    @property
    def max_blocks_per_req(self) -> int:
        """Columns of a block table."""
        return -(-self.max_model_len // self.block_size)
