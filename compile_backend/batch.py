"""The description of a batch, which is also the key of a graph.

This file refuses to know which graphs exist: a dispatcher decides that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from compile_backend.config import CUDAGraphMode


class BatchDescriptor(NamedTuple):
    """What a batch looks like, as far as graphs care.

    Attributes:
        num_tokens: tokens of all requests together.
        num_reqs: requests.
        uniform: whether every request has the same query length.
        has_lora: whether some request uses an adapter.
        num_active_loras: distinct adapters in use; 0 with `has_lora` says that nobody counted.
        extra: whatever else selects a graph, such as a flag that changes the control flow.
    """

    num_tokens: int
    num_reqs: int
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0
    extra: tuple[Any, ...] = ()

    def relaxed(self) -> BatchDescriptor:
        """The part that graphs of pieces depend on, which hold no attention.

        Requests are not told apart there: `num_reqs` is the most that the tokens can make up,
        and `uniform` is False.
        """
        return self._replace(num_reqs=self.num_tokens, uniform=False)


def graph_key(mode: CUDAGraphMode, descriptor: BatchDescriptor) -> BatchDescriptor:
    """The one form in which graphs of a mode are stored and looked up."""
    return descriptor.relaxed() if mode is CUDAGraphMode.PIECEWISE else descriptor


RUNNER = "runner"


def of_runner(number: int) -> tuple[tuple[str, int], ...]:
    """What keys of pieces have in `extra` that belong to one of several runners of a model.

    Args:
        number: of the runner; the keys of the first are those of everybody else.
    """
    return ((RUNNER, number),) if number else ()


def runner_of(key: BatchDescriptor) -> int:
    """The number of the runner that a key of pieces belongs to."""
    return next((item[1] for item in key.extra if _is_mark(item)), 0)


def _is_mark(item: object) -> bool:
    return isinstance(item, tuple) and len(item) == 2 and item[0] == RUNNER
