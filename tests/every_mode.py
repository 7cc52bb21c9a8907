"""One compiled model that runs in each of the five modes, for tests of real models.

Most of the time of such tests is Dynamo's tracing, which knows nothing of modes. So Dynamo traces
once, and what it traced goes to one backend for each mode.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from compile_backend.backend import CudagraphModesBackend
from compile_backend.config import CUDAGraphMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from compile_backend.stats import Report

NONE = CUDAGraphMode.NONE
PIECEWISE = CUDAGraphMode.PIECEWISE
FULL = CUDAGraphMode.FULL


class EveryMode:
    """A model, compiled for every mode.

    Args:
        model: to be compiled.
        dynamic: as for `torch.compile`.
        options: of the backend, but for the mode.
    """

    def __init__(
        self, model: torch.nn.Module, *, dynamic: bool | None, options: Mapping[str, Any]
    ) -> None:
        self._options = options
        self._backends = {mode: CudagraphModesBackend() for mode in CUDAGraphMode}
        self._mode = NONE
        self._compiled = torch.compile(model, backend=self._compile, dynamic=dynamic)

    def in_mode(self, mode: CUDAGraphMode) -> Callable[..., Any]:
        """The compiled model, running in one mode."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._mode = mode
            return self._compiled(*args, **kwargs)

        return call

    def stats(self, mode: CUDAGraphMode) -> Report:
        """What `compile_backend.stats` tells of one mode."""
        return self._backends[mode].stats(self._compiled)

    def _compile(
        self, graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        graphs = {
            mode: backend(
                torch.fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph)),
                example_inputs,
                options={"cudagraph_mode": mode, **self._options},
            )
            for mode, backend in self._backends.items()
        }

        def call(*args: Any) -> Any:
            graph = graphs[self._mode]
            return graph(*args)

        return call


def check_what_ran(
    report: Report, mode: CUDAGraphMode, is_decode: Iterable[bool], *, is_split: bool = True
) -> None:
    """Fail unless each call ran at the mode it should, with every repetition a replay.

    Args:
        report: of one compiled model, whose graphs all have as many pieces.
        mode: asked for.
        is_decode: of each call, whether it was a uniform decode batch of a captured size.
        is_split: whether the model holds a splitting op.
    """
    expected = _without_pieces(mode) if not is_split else mode
    assert report.mode_asked == (mode.name,)
    assert report.mode_resolved == (expected.name,)
    modes = [expected.decode_mode() if decode else expected.mixed_mode() for decode in is_decode]
    for runtime_mode in (NONE, PIECEWISE, FULL):
        steps = modes.count(runtime_mode)
        assert report.total("steps", runtime_mode) == steps, runtime_mode
        replays = report.total("replays", runtime_mode)
        if runtime_mode is NONE:
            assert replays == 0
            continue
        num_runs = steps * (report.pieces // report.graphs if runtime_mode is PIECEWISE else 1)
        assert replays == num_runs - report.total("warm_ups", runtime_mode), runtime_mode
        # At least half of what runs in a graph is replayed; else nothing much was tested.
        assert replays * 2 >= num_runs, runtime_mode
    assert report.total("failed_captures") == 0
    assert report.total("eager") == 0


def _without_pieces(mode: CUDAGraphMode) -> CUDAGraphMode:
    lowered = {CUDAGraphMode.PIECEWISE: NONE, CUDAGraphMode.FULL_AND_PIECEWISE: FULL}
    return lowered.get(mode, mode)
