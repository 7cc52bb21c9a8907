"""How the attention kernels are launched: tiles, warps and splits, all from facts of the host.

A pure function of the layer and of numbers that hold for every batch of a graph's key: a graph
cannot tune itself while it is captured. `TILES` is the one place to tune. This file refuses to
know Triton and tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compile_backend.attention.metadata import AttentionMetadata, BatchLimits
    from compile_backend.attention.spec import AttentionSpec

MIN_DOT_SIZE = 16
"""Fewest rows, columns and terms of a matrix product on tensor cores."""

MAX_SPLITS = 64
"""More would cost the reduction what they save."""

MAX_KEYS_TO_QUANTISE = 1024
"""How many keys a program with many queries walks over, at most, to quantise by itself."""

PROGRAMS_PER_SM = 2
"""How many programs, at least, keep a multiprocessor's loads in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Sizes of one program, where the layer and the block of queries are within limits.

    Attributes:
        element_bytes: of the queries.
        max_head: largest head, padded to a power of two.
        max_rows: largest block of queries, in tokens times query heads of a group.
        tile: keys of one step of the loop, a multiple of `MIN_DOT_SIZE`.
        num_warps: of the program.
        num_stages: tiles in flight.
        fp8_registers: of a thread, at most, where the kernel quantises; None leaves it to the
            compiler.
    """

    element_bytes: int
    max_head: int
    max_rows: int
    tile: int
    num_warps: int
    num_stages: int
    fp8_registers: int | None = None


# The first row that fits is taken; the last row of each kind of element and head gives the
# largest block of queries.
TILES = (
    # By itself the compiler takes 168 registers to quantise: three programs for two, which 64
    # requests do not fill.
    Tiles(
        element_bytes=2,
        max_head=128,
        max_rows=16,
        tile=128,
        num_warps=4,
        num_stages=3,
        fp8_registers=240,
    ),
    Tiles(element_bytes=2, max_head=128, max_rows=64, tile=64, num_warps=4, num_stages=2),
    Tiles(element_bytes=2, max_head=256, max_rows=16, tile=32, num_warps=4, num_stages=5),
    Tiles(element_bytes=2, max_head=256, max_rows=64, tile=32, num_warps=8, num_stages=3),
    Tiles(element_bytes=2, max_head=256, max_rows=128, tile=32, num_warps=8, num_stages=3),
    Tiles(element_bytes=4, max_head=128, max_rows=16, tile=32, num_warps=8, num_stages=2),
    Tiles(element_bytes=4, max_head=128, max_rows=32, tile=16, num_warps=8, num_stages=2),
    Tiles(element_bytes=4, max_head=256, max_rows=32, tile=16, num_warps=8, num_stages=2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """One launch.

    Attributes:
        num_blocks: blocks of queries, an upper bound.
        block_rows: of a block; tokens times query heads of a group, a power of two.
        is_whole: a request's queries fit in one block.
        num_splits: programs that share the keys of a block, a power of two.
        tile: keys of one step of the loop.
        num_warps: of a program.
        num_stages: tiles in flight.
        quantises: what is to be quantised over keys that are not split is so by the program
            itself, not by a kernel behind it.
        fp8_registers: of `Tiles`.
    """

    num_blocks: int
    block_rows: int
    is_whole: bool
    num_splits: int
    tile: int
    num_warps: int
    num_stages: int
    quantises: bool
    fp8_registers: int | None


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def plan_launch(
    spec: AttentionSpec, metadata: AttentionMetadata | _Batch, element_bytes: int, num_sms: int
) -> LaunchPlan:
    """The launch for every batch whose numbers of the host are those of `metadata`.

    Args:
        spec: of the layer.
        metadata: no tensor of it is read.
        element_bytes: of the queries.
        num_sms: multiprocessors of the device.
    """
    group = spec.num_heads // spec.num_kv_heads
    head = next_power_of_2(spec.head_size)
    rows = max(MIN_DOT_SIZE, next_power_of_2(metadata.max_query_len * group))
    fitting = [t for t in TILES if t.element_bytes == element_bytes and head <= t.max_head]
    tiles = next((t for t in fitting if rows <= t.max_rows), None) or max(
        (t for t in fitting if t.max_head == fitting[0].max_head), key=lambda t: t.max_rows
    )
    block_rows = min(rows, max(tiles.max_rows, next_power_of_2(group)))
    block_queries = block_rows // group
    is_whole = metadata.max_query_len <= block_queries
    num_blocks = metadata.num_reqs
    if not is_whole:
        num_blocks += metadata.num_tokens // block_queries
    num_keys = min(metadata.max_seq_len, _reach(spec, metadata))
    return LaunchPlan(
        num_blocks=num_blocks,
        block_rows=block_rows,
        is_whole=is_whole,
        num_splits=choose_num_splits(
            num_programs=num_blocks * spec.num_kv_heads,
            num_tiles=-(-num_keys // tiles.tile),
            num_sms=num_sms,
        ),
        tile=tiles.tile,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        quantises=block_rows == MIN_DOT_SIZE or num_keys <= MAX_KEYS_TO_QUANTISE,
        fp8_registers=tiles.fp8_registers,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """What `plan_launch` reads of a batch."""

    num_tokens: int
    num_reqs: int
    max_query_len: int
    max_seq_len: int


def plans_within(
    spec: AttentionSpec, limits: BatchLimits, element_bytes: int, num_sms: int
) -> list[LaunchPlan]:
    """A launch for each compiled form of the kernels that a batch within limits may need.

    Blocks of queries depend on the longest query alone. In how many parts keys are split depends
    on everything, so each block is taken with and without splits, and each number of them once.

    Args:
        spec: of the layer.
        limits: of the batches.
        element_bytes: of the queries.
        num_sms: multiprocessors of the device.
    """
    largest_block = max(tiles.max_rows for tiles in TILES)
    lengths = {*range(1, min(limits.query_len, largest_block + 1) + 1), limits.query_len}
    blocks: dict[tuple[int, bool], LaunchPlan] = {}
    for length in sorted(lengths):
        batch = _Batch(num_tokens=length, num_reqs=1, max_query_len=length, max_seq_len=1)
        plan = plan_launch(spec, batch, element_bytes, num_sms)
        blocks.setdefault((plan.block_rows, plan.is_whole), plan)
    most_splits = choose_num_splits(
        num_programs=spec.num_kv_heads,
        num_tiles=-(-limits.seq_len // min(plan.tile for plan in blocks.values())),
        num_sms=num_sms,
    )
    found = [
        replace(plan, num_splits=1, quantises=quantises)
        for plan in blocks.values()
        for quantises in (True, False)
    ]
    if most_splits > 1:
        found += [replace(plan, num_splits=2) for plan in blocks.values()]
        some = found[-1]
        powers = range(2, most_splits.bit_length())
        found += [replace(some, num_splits=1 << power) for power in powers]
    return found


def plan_facts(metadata: AttentionMetadata) -> tuple[int, ...]:
    """Batches with equal ones have equal plans: lengths count in the smallest part of a tile."""
    num_parts = -(-metadata.max_seq_len // MIN_DOT_SIZE)
    return metadata.num_tokens, metadata.num_reqs, metadata.max_query_len, num_parts


def choose_num_splits(*, num_programs: int, num_tiles: int, num_sms: int) -> int:
    """Enough splits to fill the device, none of them without a tile in the longest request.

    Args:
        num_programs: of the launch without splits.
        num_tiles: of keys that the longest request walks over.
        num_sms: multiprocessors of the device.
    """
    wanted = PROGRAMS_PER_SM * num_sms // max(1, num_programs)
    num_splits = min(wanted, num_tiles, MAX_SPLITS)
    return 1 << (num_splits.bit_length() - 1) if num_splits > 1 else 1


def _reach(spec: AttentionSpec, metadata: AttentionMetadata | _Batch) -> int:
    """How many keys the queries of one request see at most."""
    if spec.sliding_window is None:
        return metadata.max_seq_len
    return spec.sliding_window + metadata.max_query_len
