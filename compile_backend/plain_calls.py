"""What batch a plain call is: read from its inputs, for users who know nothing of contexts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compile_backend.batch import BatchDescriptor, checked
from compile_backend.errors import ConfigError, number_of, shown
from compile_backend.inputs import InputClass

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

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
            ConfigError: the user's `describe_batch` failed, or returned something else, or a
                descriptor of what no batch can be.
        """
        if self._describe_batch is None:
            return BatchDescriptor(*self._shape(args))
        tensors = tuple([args[i] for i in self._tensors])
        try:
            described: object = self._describe_batch(tensors)
        except Exception as error:
            given, kind = number_of("tensor", len(tensors)), type(error).__name__
            raise ConfigError(
                "describe_batch",
                self._describe_batch,
                f"failed on {given}: {kind}: {error}",
                "repair it: it is given the tuple of the call's tensors",
            ) from error
        try:
            return checked(described)
        except ConfigError as error:
            told = f"{error.option}={shown(error.value)} {error.problem}"
            if not isinstance(described, BatchDescriptor):
                told = error.problem
            problem = f"is what it returned, and {told}"
            raise ConfigError("describe_batch", described, problem, _REMEDY) from None

    def with_sizes(self, descriptor: BatchDescriptor, args: Sequence[Any]) -> BatchDescriptor:
        """The descriptor with every free size of the call that it does not tell.

        Graphs hold one shape only, so calls that differ in any size must differ in their key.
        """
        sizes = tuple([args[i] for i in self._sizes])
        if not sizes or sizes == (descriptor.num_tokens,):
            return descriptor
        return descriptor._replace(extra=(*descriptor.extra, ("sizes", *sizes)))

    def shapes(self, args: Sequence[Any]) -> Hashable | None:
        """What `read` and `with_sizes` tell of a call follows from this; None if from more.

        The graph is compiled for the numbers of dimensions and the dtypes of its tensors.
        """
        if self._describe_batch is not None:
            return None
        first = self._first(args)
        sizes = [args[i] for i in self._sizes]
        return (None if first is None else first.shape, *sizes)

    def num_tokens(self, args: Sequence[Any]) -> Any:
        """The number of tokens of a call, whatever `describe_batch` says of it.

        Args:
            args: of the call; fake ones have a symbolic number, of which nothing is assumed.
        """
        first = self._first(args)
        if first is None:
            return 1
        return first.shape[0] * first.shape[1] if _is_ids(first) else first.shape[0]

    def num_rows(self, args: Sequence[Any]) -> int | None:
        """Dimension 0 of the first tensor that has one, whatever the batch is described as."""
        first = self._first(args)
        return None if first is None else first.shape[0]

    def _shape(self, args: Sequence[Any]) -> tuple[int, int, bool]:
        first = self._first(args)
        if first is None:
            return 1, 1, False
        if _is_ids(first):
            num_reqs, query_len = first.shape
            return num_reqs * query_len, num_reqs, query_len == self._query_len
        return first.shape[0], min(first.shape[0], self._max_num_seqs), False

    def _first(self, args: Sequence[Any]) -> torch.Tensor | None:
        """The first of the caller's tensors that has a dimension."""
        for i in self._tensors:
            if args[i].dim():
                tensor: torch.Tensor = args[i]
                return tensor
        return None


def _is_ids(tensor: torch.Tensor) -> bool:
    """Whether a tensor is `[num_reqs, query_len]`."""
    return tensor.dim() == 2 and tensor.dtype in _INTEGERS


_REMEDY = "return a BatchDescriptor(num_tokens, num_reqs, ...) of integers and bools"
