"""The steps of a runner once its graphs are captured: count, route, run, and learn.

What is known already is the runner's own to repeat; here is the way of every other batch.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from compile_backend import shortcuts
from compile_backend.batch import BatchDescriptor
from compile_backend.config import CUDAGraphMode
from compile_backend.known_steps import KnownPieces
from compile_backend.runner_batch import Batch
from compile_backend.runner_checks import (
    check_batch,
    check_is_whole,
    check_outputs,
    check_query_lens,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from compile_backend.dispatch import Route
    from compile_backend.full_steps import FullSteps
    from compile_backend.known_steps import KnownSteps
    from compile_backend.piecewise_steps import PiecewiseSteps
    from compile_backend.resolve import Resolution
    from compile_backend.runner_parts import RunnerParts

_NONE = CUDAGraphMode.NONE
_PIECEWISE = CUDAGraphMode.PIECEWISE
_FULL = CUDAGraphMode.FULL


class RunnerSteps:
    """What `capture()` settled, and how batches run by it.

    Args:
        parts: of the runner.
        resolution: the mode, and why.
        full: steps that are one graph.
        piecewise: steps of a compiled model's pieces; None if it is not compiled.
        known: steps that may be repeated.

    Attributes:
        resolution: as given, and so are `full`, `piecewise` and `known`.
    """

    def __init__(
        self,
        parts: RunnerParts,
        resolution: Resolution,
        full: FullSteps,
        piecewise: PiecewiseSteps | None,
        known: KnownSteps,
    ) -> None:
        self.resolution = resolution
        self.full = full
        self.piecewise = piecewise
        self.known = known
        self._loader = parts.loader
        self._builder = parts.loader.builder
        self._model_steps = parts.model_steps
        self._dispatcher = parts.dispatcher
        self._ranks = parts.ranks
        self._cut = parts.cut
        self._output_shape = parts.output_shape
        self._stats = parts.stats
        self._weights = parts.weights
        self._query_len = parts.dispatcher.uniform_decode_query_len
        self._max_num_seqs = parts.dispatcher.max_num_seqs
        self._max_num_batched_tokens = parts.max_num_batched_tokens

    def run(self, batch: Batch, highest_mode: CUDAGraphMode | None) -> Any:
        """Run a step that is not known, and take note of it.

        Args:
            batch: without padding.
            highest_mode: the highest mode that is allowed.
        """
        to_learn = self.known.key_of(batch, highest_mode)
        query_lens = batch.query_lens
        counted = shortcuts.count_tokens(query_lens, self._query_len)
        if counted is None:
            query_lens = check_query_lens(query_lens)
            num_tokens = int(np.add.reduce(query_lens))
            is_uniform = bool((query_lens == self._query_len).all())
        else:
            num_tokens, is_uniform = counted
        query_lens = query_lens.astype(np.int32, copy=False)
        num_reqs = len(query_lens)
        if not num_tokens:
            if self._ranks is not None:
                return self._run_idle(BatchDescriptor(0, 0), highest_mode)
            check_is_whole(batch, self._loader.names, has_builder=self._builder is not None)
        check_batch(
            batch,
            num_tokens,
            num_reqs,
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=self._max_num_batched_tokens,
            has_builder=self._builder is not None,
        )
        if not num_tokens:
            return self._run_nothing(batch, query_lens, highest_mode)
        all_decode = batch.all_decode
        if is_uniform and all_decode is None and self._builder is not None:
            all_decode = self._builder.is_decode(batch.attention, query_lens)
        num_loras = batch.num_active_loras
        descriptor = BatchDescriptor(
            num_tokens, num_reqs, is_uniform, num_loras != 0, num_loras, batch.extra
        )
        mode, key = self._route(
            descriptor, batch, all_decode=all_decode, highest_mode=highest_mode
        )
        outputs = self._run_at(mode, key, batch, query_lens, num_tokens)
        if to_learn is not None:
            self._learn(to_learn, highest_mode, mode, key, num_tokens, num_reqs)
        return outputs

    def forget(self) -> None:
        """Drop what reads weights that are elsewhere now."""
        self.known.forget()
        self.full.drop()
        if self.piecewise is not None:
            self.piecewise.forget()
        self._weights.note()

    def _route(
        self,
        descriptor: BatchDescriptor,
        batch: Batch,
        *,
        all_decode: bool | None,
        highest_mode: CUDAGraphMode | None,
    ) -> Route:
        """Where a batch runs, among what graphs there are."""
        ranks, dispatch = self._ranks, self._dispatcher.dispatch
        if ranks is not None:
            dispatch = functools.partial(ranks.dispatch, self._dispatcher)
        mode, key = dispatch(
            descriptor,
            use_cascade_attn=batch.use_cascade_attn,
            all_decode=all_decode,
            highest_mode=highest_mode,
        )
        if mode is not _FULL or self.full.may_run(key):
            return mode, key
        if ranks is not None:  # others may hold this graph: the size must stay
            return _NONE, key
        return self._dispatcher.dispatch(descriptor, highest_mode=_PIECEWISE)

    def _run_at(
        self,
        mode: CUDAGraphMode,
        key: BatchDescriptor,
        batch: Batch,
        query_lens: npt.NDArray[np.int32],
        num_tokens: int,
    ) -> Any:
        """A step whose way is known; what it returns is cut to the batch."""
        if mode is _FULL:
            return self.full.run(key, batch, query_lens, num_tokens)
        with torch.inference_mode(False), torch.no_grad():
            pieces = self.piecewise if mode is _PIECEWISE else None
            padded = self._model_steps.run(mode, key, batch, query_lens, num_tokens, pieces)
            if mode is _NONE and key.num_tokens == num_tokens:  # no capture has looked at it
                check_outputs(padded, self._output_shape, num_tokens, len(query_lens))
            outputs = self._cut(padded, num_tokens, len(query_lens))
        # At NONE nothing is told apart but the tokens: else every batch would be a row of its own.
        stats = self._stats.at(mode, key.relaxed())
        stats.steps += 1
        stats.padding += key.num_tokens - num_tokens
        return outputs

    def _run_nothing(
        self,
        batch: Batch,
        query_lens: npt.NDArray[np.int32],
        highest_mode: CUDAGraphMode | None,
    ) -> Any:
        """A batch without requests that brings all that others do: it is checked, that is all.

        A token of nobody runs in its place, for the form of what is returned: many a model knows
        no rows of 0, as where a view asks for a size by -1.
        """
        self._loader.write(self._loader.inputs.layout(0, 0, keep=False), batch, query_lens, 0)
        token = BatchDescriptor(1, 1, uniform=True, extra=batch.extra)
        return self._run_idle(token, highest_mode)

    def _run_idle(self, descriptor: BatchDescriptor, highest_mode: CUDAGraphMode | None) -> Any:
        """A step without requests, on a batch that means nothing.

        Args:
            descriptor: what to run as; where ranks agree on that, as the others.
            highest_mode: the highest mode that is allowed.

        Returns:
            What the model returns, without any rows.
        """
        empty = Batch(query_lens=(), inputs={})
        mode, key = self._route(descriptor, empty, all_decode=None, highest_mode=highest_mode)
        num_reqs = key.num_reqs if mode is _FULL else self._model_steps.padded(key)[1]
        batch = self._loader.capture_batch(key.num_tokens, num_reqs)
        num_tokens = int(batch.query_lens.sum())
        outputs = self._run_at(mode, key, batch, batch.query_lens, num_tokens)
        return self._cut(outputs, 0, 0)

    def _learn(
        self,
        to_learn: int,
        highest_mode: CUDAGraphMode | None,
        mode: CUDAGraphMode,
        key: BatchDescriptor,
        num_tokens: int,
        num_reqs: int,
    ) -> None:
        """Take note of the step that just ran, if the next one like it may repeat it."""
        pieces = self.piecewise
        if mode is _FULL:
            full = self.full.known(key, num_tokens, num_reqs)
            if full is not None:
                self.known.learn(to_learn, highest_mode, *full)
        elif mode is _PIECEWISE and pieces is not None and (step := pieces.known(key)):
            inputs, stats = self._loader.inputs, self._stats.at(mode, key.relaxed())
            layout, builder = inputs.layout(*self._model_steps.padded(key)), self._builder
            known = KnownPieces(
                key,
                step,
                inputs,
                layout,
                inputs.sending(layout),
                builder,
                stats,
                self._cut,
                num_tokens,
                num_reqs,
            )
            self.known.learn(to_learn, highest_mode, layout, known)
