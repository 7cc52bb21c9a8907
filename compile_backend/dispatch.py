"""The only authority on which graphs exist, and which of them a batch takes.

All answers are made when the keys are: a dispatch is a look-up. This file refuses to know graphs,
models and buffers; it neither captures nor pads anything itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compile_backend.batch import BatchDescriptor, checked, flag, graph_key
from compile_backend.config import CUDAGraphMode, number_of_tokens
from compile_backend.errors import CaptureError, ConfigError
from compile_backend.sizes import PaddingTable, capture_sizes

if TYPE_CHECKING:
    from collections.abc import Collection

    from compile_backend.config import CompilationConfig

_NONE = CUDAGraphMode.NONE
_PIECEWISE = CUDAGraphMode.PIECEWISE
_FULL = CUDAGraphMode.FULL
_HIGHEST = (None, _NONE, _PIECEWISE, _FULL)

Route = tuple[CUDAGraphMode, BatchDescriptor]


@dataclass(frozen=True, slots=True)
class _Routes:
    """Where batches with one number of adapters go, by their number of tokens.

    Attributes:
        decode: uniform decode batches.
        mixed: all others.
        piecewise: any batch that must not run as one graph.
    """

    decode: list[Route | None]
    mixed: list[Route | None]
    piecewise: list[Route | None]


class CudagraphDispatcher:
    """Picks FULL over PIECEWISE over NONE for every batch, among the keys of one mode.

    Args:
        config: capture sizes, and whether adapters have keys of their own.
        max_num_seqs: most requests in a batch that runs as one graph.
        uniform_decode_query_len: tokens of each request in a uniform decode batch.
        max_loras: most adapters in a batch; 0 without adapters.
        pad: whether a batch may take a larger key than its own size.

    Raises:
        ConfigError: a limit is out of range.
    """

    def __init__(
        self,
        config: CompilationConfig,
        *,
        max_num_seqs: int,
        uniform_decode_query_len: int = 1,
        max_loras: int = 0,
        pad: bool = True,
    ) -> None:
        self._config = config
        self._max_num_seqs = number_of_tokens(1)("max_num_seqs", max_num_seqs)
        self._query_len = _query_len(uniform_decode_query_len)
        self._max_loras = number_of_tokens(0)("max_loras", max_loras)
        self._pad = pad
        self._keys: dict[CUDAGraphMode, frozenset[BatchDescriptor]] | None = None
        self._routes: list[_Routes] = []
        self._largest = -1

    @property
    def max_num_seqs(self) -> int:
        """Most requests in a batch that runs as one graph."""
        return self._max_num_seqs

    @property
    def uniform_decode_query_len(self) -> int:
        """Tokens of each request in a uniform decode batch."""
        return self._query_len

    def initialize_cudagraph_keys(
        self,
        mode: CUDAGraphMode | str,
        uniform_decode_query_len: int | None = None,
        *,
        without: Collection[Route] = (),
    ) -> None:
        """Make the keys of a resolved mode, in place of any made before.

        Args:
            mode: what the model supports, or its name.
            uniform_decode_query_len: replaces the one given at construction.
            without: modes and keys that are left out; their batches run at what else there is.

        Raises:
            ConfigError: no capture size is large enough for one uniform decode request, or there
                is no such mode.
        """
        mode = CUDAGraphMode.parse(mode)
        query_len = self._query_len
        if uniform_decode_query_len is not None:
            query_len = _query_len(uniform_decode_query_len)
        mixed, uniform = self._sizes(mode, query_len)
        largest = max((*mixed, *uniform), default=0)
        mixed_mode, most_reqs = mode.mixed_mode(), self._max_num_seqs
        keys: dict[CUDAGraphMode, list[BatchDescriptor]] = {_PIECEWISE: [], _FULL: []}
        routes: dict[int, _Routes] = {}
        for num_loras in self._lora_counts():
            lora = (num_loras > 0, num_loras)
            mixed_keys = [
                graph_key(mixed_mode, BatchDescriptor(n, min(n, most_reqs), False, *lora))
                for n in mixed
            ]
            uniform_keys = [BatchDescriptor(n, n // query_len, True, *lora) for n in uniform]
            mixed_keys = [key for key in mixed_keys if (mixed_mode, key) not in without]
            uniform_keys = [key for key in uniform_keys if (_FULL, key) not in without]
            keys[_FULL] += uniform_keys
            if mixed_keys:
                keys[mixed_mode] += mixed_keys
            routes[num_loras] = self._make_routes(
                mixed_mode, mixed_keys, uniform_keys, length=1 + largest
            )
        self._query_len = query_len
        self._keys = {runtime_mode: frozenset(held) for runtime_mode, held in keys.items()}
        self._largest = largest
        self._routes = [
            routes[min(held for held in routes if held >= num_loras)]
            for num_loras in range(self._max_loras + 1)
        ]

    def dispatch(
        self,
        descriptor: BatchDescriptor,
        *,
        use_cascade_attn: bool = False,
        all_decode: bool | None = None,
        highest_mode: CUDAGraphMode | str | None = None,
    ) -> Route:
        """The mode a batch runs at, and the key whose graph it takes.

        A batch that no key fits runs at NONE and comes back as it is: empty ones, those above the
        largest size, and those with more adapters than are allowed for. One with more requests
        than `max_num_seqs` never runs as one graph.

        Args:
            descriptor: the batch before padding.
            use_cascade_attn: the attention of this step cannot be captured.
            all_decode: False says that a request of this batch is no decode, whatever its length.
            highest_mode: never go above this mode of a single batch, or the one of this name.

        Returns:
            The mode, and the key with its padded size and the `extra` of the batch.

        Raises:
            CaptureError: there are no keys yet.
            ConfigError: there is no such mode of a single batch, the batch is contradictory, or
                holds something else than numbers and flags.
        """
        if highest_mode not in _HIGHEST:
            highest_mode = CUDAGraphMode.parse_single(highest_mode, option="highest_mode")
        descriptor = checked(descriptor)
        if use_cascade_attn is not False:
            use_cascade_attn = flag("use_cascade_attn", use_cascade_attn)
        if all_decode is not None:
            all_decode = flag("all_decode", all_decode, others=", or None")
        num_tokens, num_reqs, uniform, has_lora, num_loras, extra = descriptor
        if num_tokens > self._largest or highest_mode is _NONE:
            return self._without_graph(descriptor)
        if has_lora or num_loras:
            num_loras = num_loras or self._max_loras
            if not 0 < num_loras <= self._max_loras:
                return self._without_graph(descriptor)
        routes = self._routes[num_loras]
        if use_cascade_attn or highest_mode is _PIECEWISE or num_reqs > self._max_num_seqs:
            route = routes.piecewise[num_tokens]
        elif uniform and num_tokens == num_reqs * self._query_len and all_decode is not False:
            route = routes.decode[num_tokens]
        else:
            route = routes.mixed[num_tokens]
        if route is None:
            return _NONE, descriptor
        if extra:
            mode, key = route
            return mode, BatchDescriptor(*key[:5], extra)
        return route

    def keys(self, mode: CUDAGraphMode | str) -> frozenset[BatchDescriptor]:
        """The keys of PIECEWISE or FULL; none for NONE.

        Raises:
            CaptureError: there are no keys yet.
            ConfigError: there is no such mode of a single batch.
        """
        mode = CUDAGraphMode.parse_single(mode, option="mode")
        return self._initialized_keys().get(mode, frozenset())

    def capture_plan(self) -> list[tuple[CUDAGraphMode, list[BatchDescriptor]]]:
        """What to capture: the modes that have keys, and their keys, the largest first.

        Raises:
            CaptureError: there are no keys yet.
        """
        return [
            (mode, sorted(keys, reverse=True))
            for mode, keys in self._initialized_keys().items()
            if keys
        ]

    def _initialized_keys(self) -> dict[CUDAGraphMode, frozenset[BatchDescriptor]]:
        if self._keys is None:
            raise CaptureError("no keys yet; call initialize_cudagraph_keys(mode) first")
        return self._keys

    def _without_graph(self, descriptor: BatchDescriptor) -> Route:
        """The batch as it is, at NONE, if there are keys at all."""
        self._initialized_keys()
        return _NONE, descriptor

    def _lora_counts(self) -> list[int]:
        """Numbers of adapters with keys of their own; a batch takes the next higher one."""
        most = self._max_loras
        if not most:
            return [0]
        if not self._config.cudagraph_specialize_lora:
            return [most]
        return [0, *(1 << bit for bit in range(most.bit_length()) if 1 << bit < most), most]

    def _sizes(
        self, mode: CUDAGraphMode, query_len: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sizes with keys of their own: of mixed batches, and of uniform decode batches."""
        sizes = capture_sizes(self._config, max_num_seqs=self._max_num_seqs, query_len=query_len)
        mixed = () if mode.mixed_mode() is _NONE else sizes.mixed
        if not mode.separate_routine():
            return mixed, ()
        if not sizes.uniform:
            too_small = f"is too small for one decoding request of {query_len} tokens"
            otherwise = "fewer guesses (num_speculative_tokens), or cudagraph_mode='PIECEWISE'"
            maximum = self._config.max_cudagraph_capture_size
            if self._config.cudagraph_capture_sizes is None and maximum is not None:
                fix = f"use {query_len} or more, {otherwise}"
                raise ConfigError("max_cudagraph_capture_size", maximum, too_small, fix)
            fix = f"add {query_len}, or use {otherwise}"
            raise ConfigError("cudagraph_capture_sizes", sizes.mixed, too_small, fix)
        return mixed, sizes.uniform

    def _make_routes(
        self,
        mixed_mode: CUDAGraphMode,
        mixed_keys: list[BatchDescriptor],
        uniform_keys: list[BatchDescriptor],
        *,
        length: int,
    ) -> _Routes:
        mixed = self._nearest(mixed_mode, mixed_keys, length)
        decode = self._nearest(_FULL, uniform_keys, length)
        return _Routes(
            decode=[best or other for best, other in zip(decode, mixed, strict=True)],
            mixed=mixed,
            piecewise=mixed if mixed_mode is _PIECEWISE else [None] * length,
        )

    def _nearest(
        self, mode: CUDAGraphMode, keys: list[BatchDescriptor], length: int
    ) -> list[Route | None]:
        """The smallest key that fits, by number of tokens; only exact ones without padding."""
        routes = {key.num_tokens: (mode, key) for key in keys}
        if not self._pad:
            return [routes.get(num_tokens) for num_tokens in range(length)]
        table = PaddingTable(routes)
        sizes = (table.padded(num_tokens) for num_tokens in range(length))
        return [None if size is None else routes[size] for size in sizes]


def _query_len(tokens: int) -> int:
    return number_of_tokens(1)("uniform_decode_query_len", tokens)
