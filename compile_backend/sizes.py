"""The numbers of tokens that graphs are captured for, and how a batch is padded to them.

Those that pieces are compiled for are here, too. This file refuses to know modes and graphs:
sizes are integers here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compile_backend.config import (
    ALL_CAPTURE_SIZES,
    MAX_TOKENS,
    CompilationConfig,
    too_many_tokens,
)
from compile_backend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_DEFAULT_MAXIMUM = 512


@dataclass(frozen=True, slots=True)
class CaptureSizes:
    """Capture sizes in tokens, ascending.

    Attributes:
        mixed: for batches of any kind.
        uniform: for uniform decode batches; multiples of the query length.
    """

    mixed: tuple[int, ...]
    uniform: tuple[int, ...]


class PaddingTable:
    """Answers by one look-up which size a number of tokens is padded to."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self.sizes = tuple(sorted(sizes))
        self._padded: list[int | None] = [None]
        for size in self.sizes:
            self._padded += [size] * (size + 1 - len(self._padded))

    def padded(self, num_tokens: int) -> int | None:
        """The smallest size that fits; None for 0 tokens and above the largest size."""
        return self._padded[num_tokens] if 0 <= num_tokens < len(self._padded) else None


def default_ladder(maximum: int) -> tuple[int, ...]:
    """1, 2, 4, then every 8 below 256, then every 16; ends with the maximum itself."""
    steps = (1, 2, 4, *range(8, 256, 8), *range(256, maximum, 16))
    return (*(size for size in steps if size < maximum), maximum)


def capture_sizes(config: CompilationConfig, *, max_num_seqs: int, query_len: int) -> CaptureSizes:
    """The sizes to capture, for batches of any kind and for uniform decode batches.

    Explicit sizes are taken as they are for batches of any kind. Uniform sizes follow from those
    by rounding up to whole requests. They reach up to `max_num_seqs` requests, and never above
    an explicit maximum; the default maximum binds them only where a request has one token, since
    a few guesses per request would otherwise push large decode batches out of all graphs.

    Args:
        config: explicit sizes, or an explicit maximum, or neither.
        max_num_seqs: most requests in a batch.
        query_len: tokens of each request in a uniform decode batch.

    Raises:
        ConfigError: the largest uniform decode batch has too many tokens to make graphs for.
    """
    explicit = config.cudagraph_capture_sizes
    mixed = explicit or _default_sizes(
        config.max_cudagraph_capture_size, max_num_seqs=max_num_seqs, query_len=query_len
    )
    is_bound = explicit or config.max_cudagraph_capture_size is not None or query_len == 1
    most_reqs = min(mixed[-1] // query_len, max_num_seqs) if is_bound else max_num_seqs
    if most_reqs * query_len > MAX_TOKENS:
        what = f"with {query_len} tokens for each request makes a decode batch that"
        raise too_many_tokens("max_num_seqs", max_num_seqs, what)
    return CaptureSizes(mixed, _uniform_sizes(mixed, most_reqs, query_len))


def _default_sizes(maximum: int | None, *, max_num_seqs: int, query_len: int) -> tuple[int, ...]:
    largest_decode = max_num_seqs * query_len
    cap = maximum or min(_DEFAULT_MAXIMUM, 2 * largest_decode)
    limits = {limit for limit in (max_num_seqs, largest_decode) if limit <= cap}
    return tuple(sorted(limits.union(default_ladder(cap))))


def _uniform_sizes(mixed: tuple[int, ...], most_reqs: int, query_len: int) -> tuple[int, ...]:
    if most_reqs == 0:
        return ()
    num_reqs = {min(-(-size // query_len), most_reqs) for size in mixed}
    beyond = {n for n in default_ladder(most_reqs) if n * query_len > mixed[-1]}
    return tuple(n * query_len for n in sorted(num_reqs | beyond))


@dataclass(frozen=True, slots=True, order=True)
class TokenRange:
    """Numbers of tokens that code is compiled for.

    Attributes:
        first: the lowest of them.
        last: the highest; the same for code of one size.
        is_listed: whether the size is one of `compile_sizes`.
    """

    first: int
    last: int
    is_listed: bool = False

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def ranges_between(endpoints: Sequence[int]) -> tuple[TokenRange, ...]:
    """The ranges that end at each endpoint, the first one from 1 on; none above the last."""
    starts = (1, *(endpoint + 1 for endpoint in endpoints))
    return tuple(TokenRange(*ends) for ends in zip(starts, endpoints, strict=False))


def listed_sizes(compile_sizes: Sequence[int | str], captured: Iterable[int]) -> tuple[int, ...]:
    """The numbers that `compile_sizes` means, ascending.

    Args:
        compile_sizes: integers, and maybe the name that stands for all capture sizes.
        captured: the sizes that graphs are captured for.
    """
    numbers = {size for size in compile_sizes if not isinstance(size, str)}
    return tuple(
        sorted(numbers.union(captured) if ALL_CAPTURE_SIZES in compile_sizes else numbers)
    )


def check_compile_sizes(config: CompilationConfig, table: PaddingTable) -> None:
    """Refuse sizes to compile for that no batch has, since padding changes them.

    Sizes above all that are captured stay: such batches run as they are.

    Raises:
        ConfigError: names the first such size, what it is padded to, and the sizes that stay.
    """
    for size in config.compile_sizes:
        padded = None if isinstance(size, str) else table.padded(size)
        if padded not in (size, None):
            raise ConfigError(
                "compile_sizes",
                config.compile_sizes,
                f"holds {size}, which is padded to {padded}",
                f"use sizes among {table.sizes}, or above {table.sizes[-1]}",
            )
