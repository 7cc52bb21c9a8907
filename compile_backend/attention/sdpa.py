"""Attention by `torch.nn.functional.scaled_dot_product_attention`: the reference, and for CPUs.

Where the host knows the lengths, each request attends to its own blocks. Inside a graph only the
device knows them: there every token gathers as many blocks as its request may ever have, and a
mask leaves the right ones. That is slow and takes no lengths from the host, so that it can be
captured for every batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere

from compile_backend.attention.backend import AttentionBackend
from compile_backend.errors import ConfigError
from compile_backend.support import AttentionCGSupport

if TYPE_CHECKING:
    from compile_backend.attention.kv_cache import LayerCache
    from compile_backend.attention.metadata import AttentionMetadata, HostLengths
    from compile_backend.attention.spec import AttentionSpec, CacheFormat

# Tokens that gather their blocks at once.
_CHUNK = 64


class SdpaAttention(AttentionBackend):
    """The reference for all other backends; numerics are those of the queries' dtype."""

    name: ClassVar[str] = "sdpa"
    support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    @classmethod
    def unsupported(cls, spec: AttentionSpec, cache: CacheFormat) -> Exception | None:
        """Caches of anything but floats."""
        del spec
        if cache.dtype.is_floating_point:
            return None
        return ConfigError(
            "cache_dtype",
            cache.dtype,
            "holds no floats",
            "use the dtype of the model, or torch.float8_e4m3fn",
        )

    def attend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        prepared: Any,
    ) -> None:
        """See `AttentionBackend.attend`."""
        del prepared
        if metadata.host is not None:
            self._by_request(query, output, cache, metadata.host)
        else:
            self._by_token(query, output, cache, metadata)

    def _by_request(
        self, query: torch.Tensor, output: torch.Tensor, cache: LayerCache, host: HostLengths
    ) -> None:
        end = 0
        for index, (query_len, seq_len) in enumerate(
            zip(host.query_lens.tolist(), host.seq_lens.tolist(), strict=True)
        ):
            start, end = end, end + query_len
            num_blocks = -(-seq_len // self.cache.block_size)
            blocks = torch.from_numpy(host.block_table[index, :num_blocks]).to(query.device)
            keys, values = self._gather(cache, blocks[None].long(), query.dtype)
            positions = torch.arange(seq_len - query_len, seq_len, device=query.device)
            mask = self._mask(positions[:, None], keys.shape[1])
            output[start:end] = self._attend(
                query[None, start:end], keys[:, :seq_len], values[:, :seq_len], mask[..., :seq_len]
            )[0]

    def _by_token(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
    ) -> None:
        ends = metadata.query_start_loc[1:].long()
        tokens = torch.arange(metadata.num_tokens, device=query.device)
        requests = torch.searchsorted(ends, tokens, right=True).clamp(max=metadata.num_reqs - 1)
        is_padding = tokens >= ends[-1]
        positions = metadata.seq_lens[requests] - (ends[requests] - tokens)
        positions = torch.where(is_padding, 0, positions)
        num_blocks = -(-metadata.max_seq_len // self.cache.block_size)
        blocks = metadata.block_table[requests, :num_blocks].long()
        for start in range(0, metadata.num_tokens, _CHUNK):
            chunk = slice(start, start + _CHUNK)
            keys, values = self._gather(cache, blocks[chunk], query.dtype)
            mask = self._mask(positions[chunk, None], keys.shape[1])[:, None]
            # What lies beyond a request's length may be anything, and 0 times NaN is NaN.
            is_seen = mask[:, 0, :, None, None]
            result = self._attend(
                query[chunk, None],
                torch.where(is_seen, keys, 0),
                torch.where(is_seen, values, 0),
                mask[:, None],
            )[:, 0]
            output[chunk] = torch.where(is_padding[chunk, None, None], 0, result)

    def _gather(
        self, cache: LayerCache, blocks: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some blocks, each `[rows, tokens, num_kv_heads, head_size]`."""
        shape = (len(blocks), -1, *cache.keys.shape[2:])
        keys = _read(cache.keys, blocks, cache.key_scale, dtype)
        values = _read(cache.values, blocks, cache.value_scale, dtype)
        return keys.reshape(shape), values.reshape(shape)

    def _mask(self, positions: torch.Tensor, num_keys: int) -> torch.Tensor:
        """Which keys each position sees, `[*positions, num_keys]`."""
        distance = positions - torch.arange(num_keys, device=positions.device)
        mask = distance >= 0
        if self.spec.sliding_window is not None:
            mask &= distance < self.spec.sliding_window
        return mask

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attention of `query` `[rows, tokens, heads, size]`; `mask` has rows, tokens, keys."""
        query, keys, values = (item.transpose(1, 2) for item in (query, keys, values))
        if self.spec.soft_cap is None:
            result = F.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, scale=self.spec.scale, enable_gqa=True
            )
            return result.transpose(1, 2)
        group = self.spec.num_heads // self.spec.num_kv_heads
        keys, values = (item.repeat_interleave(group, 1).float() for item in (keys, values))
        scores = query.float() @ keys.transpose(-1, -2) * self.spec.scale
        scores = self.spec.soft_cap * torch.tanh(scores / self.spec.soft_cap)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return (weights @ values).to(query.dtype).transpose(1, 2)


def _read(
    cache: torch.Tensor, blocks: torch.Tensor, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    if cache.dtype.itemsize > 1:
        return cache[blocks].to(dtype)
    return (cache.view(torch.uint8)[blocks].view(cache.dtype).float() * scale).to(dtype)
