"""What batch a plain call is: read from its inputs, for users who know nothing of contexts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compile_backend.batch import BatchDescriptor
from compile_backend.errors import ConfigError
from compile_backend.inputs import InputClass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from compile_backend.inputs import GraphInput

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class BatchReader:
    """Derives the batch descriptor of a call.

    The first tensor of the caller tells: integers `[num_reqs, query_len]` hold their product of
    tokens, and are uniform when `query_len` is that of decoding; of anything else, dimension 0 is
    the number of tokens. Sizes that this does not settle go into `extra`.

    Args:
        inputs: of the graph.
        query_len: tokens of each request in a uniform decode batch.
        max_num_seqs: most requests in a batch.
        describe_batch: asked instead, with the caller's tensors, where the user gave one.
    """

    def __init__(
        self,
        inputs: Sequence[GraphInput],
        *,
        query_len: int,
        max_num_seqs: int,
        describe_batch: Callable[[Sequence[Any]], BatchDescriptor] | None,
    ) -> None:
        self._tensors = [i for i, item in enumerate(inputs) if item.kind is InputClass.CALLER]
        self._sizes = [i for i, item in enumerate(inputs) if item.kind is InputClass.SIZE]
        self._query_len = query_len
        self._max_num_seqs = max_num_seqs
        self._describe_batch = describe_batch

    def read(self, args: Sequence[Any]) -> BatchDescriptor:
        """The descriptor of one call, before any padding.

        Raises:
            ConfigError: the user's `describe_batch` returned something else.
        """
        if self._describe_batch is None:
            return BatchDescriptor(*self._shape(args))
        described = self._describe_batch(tuple([args[i] for i in self._tensors]))
        if not isinstance(described, BatchDescriptor):
            raise ConfigError(
                "describe_batch",
                described,
                "is not a batch descriptor",
                "return a BatchDescriptor",
            )
        return described

    def with_sizes(self, descriptor: BatchDescriptor, args: Sequence[Any]) -> BatchDescriptor:
        """The descriptor with every free size of the call that it does not tell.

        Graphs hold one shape only, so calls that differ in any size must differ in their key.
        """
        sizes = tuple([args[i] for i in self._sizes])
        if not sizes or sizes == (descriptor.num_tokens,):
            return descriptor
        return descriptor._replace(extra=(*descriptor.extra, ("sizes", *sizes)))

    def _shape(self, args: Sequence[Any]) -> tuple[int, int, bool]:
        for position in self._tensors:
            tensor: torch.Tensor = args[position]
            if tensor.dim() == 2 and tensor.dtype in _INTEGERS:
                num_reqs, query_len = tensor.shape
                return num_reqs * query_len, num_reqs, query_len == self._query_len
            if tensor.dim():
                return tensor.shape[0], min(tensor.shape[0], self._max_num_seqs), False
        return 1, 1, False
