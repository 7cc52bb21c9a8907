"""The pages of a batch as kernels that are planned on the host want them.

How many each request has, which, and how full the last one is: numpy on the true lengths, and
nothing else. This file refuses to know devices and packages of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class PagePlan:
    """The pages of a batch, request after request.

    Attributes:
        indptr: `[num_reqs + 1]` int32; request `r` has pages `indices[indptr[r]:indptr[r + 1]]`.
        indices: `[indptr[-1]]` int32; blocks of the cache.
        last_page_len: `[num_reqs]` int32; tokens in the last page of each, at least 1.
    """

    indptr: npt.NDArray[np.int32]
    indices: npt.NDArray[np.int32]
    last_page_len: npt.NDArray[np.int32]


def plan_pages(
    seq_lens: npt.NDArray[np.int32],
    block_table: npt.NDArray[np.int32],
    block_size: int,
    num_reqs: int,
) -> PagePlan:
    """The pages that requests of these lengths fill.

    Args:
        seq_lens: `[n]`, each at least 1.
        block_table: `[n, columns]`; entries beyond a request's length are ignored.
        block_size: tokens of a page.
        num_reqs: of the plan; those beyond `n` are padding, and read one token of block 0, which
            every cache has.
    """
    num_real = len(seq_lens)
    num_pages = np.ones(num_reqs, np.int32)
    num_pages[:num_real] = -(-seq_lens // block_size)
    indptr = np.zeros(num_reqs + 1, np.int32)
    np.cumsum(num_pages, out=indptr[1:])
    last_page_len = np.ones(num_reqs, np.int32)
    last_page_len[:num_real] = (seq_lens - 1) % block_size + 1
    indices = np.zeros(indptr[-1], np.int32)
    width = int(num_pages[:num_real].max(initial=0))
    is_used = np.arange(width) < num_pages[:num_real, None]
    indices[: indptr[num_real]] = block_table[:, :width][is_used]
    return PagePlan(indptr, indices, last_page_len)


def query_starts(query_lens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Where each request's rows begin, and after them where the last one's end."""
    starts = np.zeros(len(query_lens) + 1, np.int32)
    np.cumsum(query_lens, out=starts[1:])
    return starts
