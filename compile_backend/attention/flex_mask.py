"""How a step's tokens are cut into tiles, and which cache slots each tile sees.

A tile is a run of tokens of *one* request, and an element of the batch that `flex_attention` is
called with. So a tile's key-value blocks are blocks of the cache that its request owns, none of
them twice, and no tile pays for another request's context, as it would where a query block held
several requests. The host decides how many tiles there are, from numbers that hold for the key;
which tokens they are is computed on the device, without a word to the host, into tensors that
stay: the operations may be part of a graph. This file refuses to know heads and kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from compile_backend.attention.metadata import AttentionMetadata

MIN_ROWS, MAX_ROWS = 16, 128
"""Rows of a program: `tl.dot` takes 16 or more, and beside keys and values 128 fit."""

MAX_UNIFORM_LEN = 8
"""Longest uniform query that is a tile of its own; each length is compiled separately."""

SPLITS = (16, 4, 1)
"""Into how many parts the context of a tile may be cut; each number is compiled separately."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """The shape of a step, decided on the host.

    Attributes:
        num_tiles: no legal batch of the key needs more.
        tile_len: most tokens of a tile.
        num_splits: parts of a context that are attended to in parallel.
        is_uniform: whether the rows of tiles are the step's rows in their order.
    """

    num_tiles: int
    tile_len: int
    num_splits: int
    is_uniform: bool


def choose_tiling(
    metadata: AttentionMetadata, *, group: int, num_kv_heads: int, num_programs: int
) -> Tiling:
    """Tiles for a step, or for every step of a key.

    A tile is about as high as the average request, between 16 and 128 rows in powers of two; a
    row is a token of a query head. Where tiles alone leave the device idle, contexts are split.

    Args:
        metadata: only its numbers of the host are read.
        group: query heads of a key-value head, which share a tile.
        num_kv_heads: tiles are run once for each.
        num_programs: how many keep the device busy.
    """
    num_tokens, num_reqs = metadata.num_tokens, max(1, metadata.num_reqs)
    uniform_len = metadata.uniform_query_len
    is_uniform = 0 < uniform_len <= MAX_UNIFORM_LEN and num_tokens % uniform_len == 0
    if is_uniform:
        tile_len = uniform_len
        num_tiles = num_tokens // uniform_len
    else:
        rows = next_power_of_2(-(-num_tokens * group // num_reqs))
        tile_len = max(1, min(max(rows, MIN_ROWS), MAX_ROWS) // group)
        num_tiles = min(num_tokens, (num_tokens + num_reqs * (tile_len - 1)) // tile_len)
    room = num_programs // max(1, num_tiles * num_kv_heads)
    num_splits = next((splits for splits in SPLITS if splits <= room), 1)
    return Tiling(num_tiles, tile_len, num_splits, is_uniform)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


class TileMask:
    """What `mask_mod` and the block mask read, at addresses that stay.

    Args:
        tiling: the shape.
        metadata: for its numbers of the host.
        page_size: tokens of a cache block.
        kv_block: slots of a block of the mask, a multiple of `page_size`.
        sliding_window: how many of the latest tokens a query sees; None: all.
        device: of the tensors.

    Attributes:
        positions: `[num_tiles, tile_len]` int32, each row's place in its request; -1: no token.
        table_starts: `[num_tiles]` int32, where the pages of each tile's request start in the
            flat `logical_pages` of `refresh`.
        kv_num_blocks: `[num_tiles, num_splits]` int32.
        kv_indices: `[num_tiles, num_splits, n]` int32, blocks of the mask in the cache. Split `s`
            has every `num_splits`-th block from `s` on, so that splits are alike in length.
        rows_of_tiles: `[num_tiles * tile_len]` int64, the query row of each row of the tiles.
        rows_of_tokens: `[num_tokens]` int64, the other way round; neither is used if uniform.
    """

    def __init__(
        self,
        tiling: Tiling,
        metadata: AttentionMetadata,
        *,
        page_size: int,
        kv_block: int,
        sliding_window: int | None,
        device: torch.device,
    ) -> None:
        self.tiling = tiling
        self._page_size = page_size
        self._pages_per_kv_block = kv_block // page_size
        self._window = sliding_window
        width = metadata.block_table.shape[1]
        if sliding_window is not None:
            width = min(width, (sliding_window + tiling.tile_len - 2) // page_size + 2)
        num_tiles, num_splits = tiling.num_tiles, tiling.num_splits
        self._num_columns = -(-width // num_splits) * num_splits

        def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.positions = buffer(num_tiles, tiling.tile_len)
        self.table_starts = buffer(num_tiles)
        self.kv_num_blocks = buffer(num_tiles, num_splits)
        self.kv_indices = buffer(num_tiles, num_splits, self._num_columns // num_splits)
        self.rows_of_tiles = buffer(num_tiles * tiling.tile_len, dtype=torch.int64)
        self.rows_of_tokens = buffer(metadata.num_tokens, dtype=torch.int64)

    def refresh(self, metadata: AttentionMetadata, logical_pages: torch.Tensor) -> None:
        """Make the tensors those of a step, by operations of the device alone.

        Args:
            metadata: only its tensors are read.
            logical_pages: `[>= num_reqs, num_blocks + 1]` int32, written: which page of a request
                each cache block holds, -1 if none. The last column takes what is void.
        """
        starts = metadata.query_start_loc.long()
        last_req = metadata.num_reqs - 1
        tile_len, device = self.tiling.tile_len, starts.device
        tiles_per_req = (starts.diff() + (tile_len - 1)) // tile_len
        tile_ends = tiles_per_req.cumsum(0)
        first_tiles = tile_ends - tiles_per_req

        tiles = torch.arange(self.tiling.num_tiles, device=device)
        requests = torch.searchsorted(tile_ends, tiles, right=True)
        is_void = requests > last_req
        requests.clamp_(max=last_req)
        ends = starts[1:][requests].masked_fill_(is_void, 0)
        rows = starts[requests] + (tiles - first_tiles[requests]) * tile_len
        rows = rows[:, None] + torch.arange(tile_len, device=device)
        positions = rows + (metadata.seq_lens[requests] - ends)[:, None]
        self.positions.copy_(positions.masked_fill_(rows >= ends[:, None], -1))
        self.table_starts.copy_(requests * logical_pages.shape[1])
        if not self.tiling.is_uniform:
            last_row = max(0, metadata.num_tokens - 1)
            self.rows_of_tiles.copy_(rows.flatten().clamp_(max=last_row))
            tokens = torch.arange(metadata.num_tokens, device=device)
            owners = torch.searchsorted(starts[1:], tokens, right=True).clamp_(max=last_req)
            tokens += (first_tiles * tile_len - starts[:-1])[owners]
            self.rows_of_tokens.copy_(tokens.clamp_(max=rows.numel() - 1))
        self._refresh_blocks(metadata.block_table, requests)
        self._refresh_logical_pages(metadata, logical_pages)

    def _refresh_blocks(self, block_table: torch.Tensor, requests: torch.Tensor) -> None:
        """From the page that the first row of a tile sees first to that of its last row."""
        columns = torch.arange(self._num_columns, device=requests.device)
        num_pages = self.positions.amax(1, keepdim=True) // self._page_size + 1
        if self._window is not None:
            first = (self.positions[:, :1] - (self._window - 1)).clamp_(min=0) // self._page_size
            num_pages = torch.where(num_pages > 0, num_pages - first, 0)
            columns = columns + first
        pages = block_table[requests[:, None], columns.clamp(max=block_table.shape[1] - 1)]
        if self._pages_per_kv_block > 1:
            pages, num_pages = _distinct(pages // self._pages_per_kv_block, num_pages)
        num_splits = self.tiling.num_splits
        splits = torch.arange(num_splits, device=requests.device)
        self.kv_num_blocks.copy_((num_pages + (num_splits - 1) - splits) // num_splits)
        self.kv_indices.copy_(pages.view(len(pages), -1, num_splits).transpose(1, 2))

    def _refresh_logical_pages(
        self, metadata: AttentionMetadata, logical_pages: torch.Tensor
    ) -> None:
        """Where each tile visits only pages of its request, what was there before is not read."""
        logical_pages = logical_pages[: metadata.num_reqs]
        if self._pages_per_kv_block > 1 or not logical_pages.is_cuda:
            logical_pages.fill_(-1)
        table = metadata.block_table
        columns = torch.arange(table.shape[1], dtype=torch.int32, device=table.device)
        is_owned = columns * self._page_size < metadata.seq_lens[:, None]
        target = torch.where(is_owned, table, logical_pages.shape[1] - 1).long()
        logical_pages.scatter_(1, target, columns.expand_as(table))


def _distinct(blocks: torch.Tensor, num_valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `num_valid` `[n, 1]` of each row of `blocks` in order, each once; their number."""
    void = torch.iinfo(blocks.dtype).max
    columns = torch.arange(blocks.shape[1], device=blocks.device)
    blocks = blocks.masked_fill(columns >= num_valid, void).sort(1).values
    is_repeated = blocks[:, 1:] == blocks[:, :-1]
    blocks[:, 1:] = blocks[:, 1:].masked_fill(is_repeated, void)
    blocks = blocks.sort(1).values
    is_void = blocks == void
    num_distinct = blocks.shape[1] - is_void.sum(1, keepdim=True)
    return blocks.masked_fill_(is_void, 0), num_distinct
