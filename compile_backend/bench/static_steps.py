"""The decode step of one sequence on a static cache, through `torch.compile` and without it.

Every way has a cache of its own, so that none sees what another wrote.
"""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any

import torch

from compile_backend.backend import cudagraph_modes, stats
from compile_backend.bench.by_hand import captured_by_hand
from compile_backend.bench.request import (
    BY_HAND,
    EAGER,
    OURS,
    REDUCE_OVERHEAD,
    STATIC,
    TORCH_COMPILE,
)
from compile_backend.bench.rounds import Clock, Step, measure
from compile_backend.bench.watch import keeping
from compile_backend.capture_session import capture
from compile_backend.guards import keep_argument_guards_unsafe
from compile_backend.llm.static_cache import StaticDecodeState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from transformers import PreTrainedModel

    from compile_backend.bench.request import BenchRequest
    from compile_backend.bench.shapes import Shape
    from compile_backend.bench.watch import Watch
    from compile_backend.config import CompilationConfig

    Cold = Callable[[], AbstractContextManager[object]]

BY_HAND_WHOLE = "graph by hand, whole"
BY_HAND_PIECES = "graph by hand, pieces"

FEWER_GUARDS = ", fewer guards"
"""Ends the name of a way of which Dynamo checks the guards on arguments only."""

_OF_TORCH: dict[str, dict[str, Any]] = {
    TORCH_COMPILE: {},
    REDUCE_OVERHEAD: {"triton.cudagraphs": True},  # what the mode of that name stands for
}
_FEWEST_FIRST_CALLS = 4


class StaticSteps:
    """Ways to run one decode step.

    Args:
        model: runs on its device.
        shape: tells the length of the cache and the position of the step.
    """

    def __init__(self, model: PreTrainedModel, shape: Shape) -> None:
        self._model = model
        self._cache_len = shape.cache_len
        self._position = min(shape.context, shape.cache_len - 1)
        self._states: list[StaticDecodeState] = []

    def step(self, run: Callable[..., Any]) -> Step:
        """One decode step by `run`, which is the model or a compiled form of it."""
        state = StaticDecodeState(self._model, self._cache_len)
        self._states.append(state)
        self.rewind()
        inputs = state.decode_inputs()

        def step() -> torch.Tensor:
            logits: torch.Tensor = run(**inputs).logits
            return logits

        return step

    def rewind(self) -> None:
        """Let every cache go on at the same position; steps of some releases move it by one."""
        for state in self._states:
            state.position_ids.fill_(self._position)
            for layer in state.cache.layers:
                length = getattr(layer, "cumulative_length", None)
                if isinstance(length, torch.Tensor):
                    length.fill_(self._position)


def compiled_for(
    model: PreTrainedModel, name: str, options: Mapping[str, Any]
) -> Callable[..., Any]:
    """The model, compiled by torch alone or for a mode of this backend.

    Args:
        model: is left as it is.
        name: `torch.compile`, `reduce-overhead` or a mode, maybe with `FEWER_GUARDS` behind it.
        options: of this backend, but for the mode.
    """
    base = name.removesuffix(FEWER_GUARDS)
    guards = {} if base == name else {"guard_filter_fn": keep_argument_guards_unsafe}
    compiled: Callable[..., Any]
    if base in _OF_TORCH:
        # Dynamo takes what it has compiled with all guards, unless some option is another one.
        own = {"triton.cudagraph_trees": True} if guards else {}  # the default
        compiled = torch.compile(model, options={**_OF_TORCH[base], **own, **guards} or None)
    else:
        all_options = {**options, **guards, "cudagraph_mode": base}
        compiled = torch.compile(model, backend=cudagraph_modes, options=all_options)
    return compiled


def first_calls(step: Step, clock: Clock, config: CompilationConfig) -> float:
    """Seconds of the first call; as many follow as it takes until all is captured."""
    is_ahead = config.cudagraph_capture == "ahead"
    with capture() if is_ahead else contextlib.nullcontext():
        first_s = clock.seconds(step)
    for _ in range(max(_FEWEST_FIRST_CALLS, config.cudagraph_num_of_warmups + 1)):
        step()
    return first_s


class StaticBench:
    """All ways to run the decode step that were asked for, side by side.

    Args:
        model: of the request's shape.
        request: what to measure.
        watch: is told what happens.
        failures: gets the ways that failed, with their errors.
        cold: a context in which nothing is found that was compiled before. First calls run in it
            and are reported where there is one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        request: BenchRequest,
        watch: Watch,
        failures: dict[str, str],
        cold: Cold | None = None,
    ) -> None:
        self._model = model
        self._request = request
        self._watch = watch
        self._failures = failures
        self._cold = cold
        self._clock = Clock(model.device)
        self._steps = StaticSteps(model, request.shape)
        self._ways: dict[str, Step] = {}
        self._compiled: dict[str, Callable[..., Any]] = {}
        self._first_s: dict[str, float] = {}

    def results(self) -> dict[str, Any]:
        """Measure.

        Returns:
            By way: wall ms, host us, the largest difference of a logit to the eager run's, for
            modes the mode that a step ran at and what `stats` told, and with `cold` the seconds
            of the first call.
        """
        request, steps = self._request, self._steps
        eager = steps.step(self._model)
        reference = eager().float()
        if request.measures(EAGER, STATIC):
            self._ways[EAGER] = eager
        self._compile()
        if request.measures(BY_HAND, STATIC):
            self._capture_by_hand(BY_HAND_WHOLE, TORCH_COMPILE)
            self._capture_by_hand(BY_HAND_PIECES, "NONE")
        total = 2 * request.num_rounds * len(self._ways)
        with self._watch.bar("static cache", total) as advance:
            times = measure(
                self._ways,
                self._clock,
                num_rounds=request.num_rounds,
                num_steps=request.num_steps,
                before=steps.rewind,
                advance=advance,
            )
        steps.rewind()
        results = {name: times[name].as_dict() for name in self._ways}
        for name, step in self._ways.items():
            steps_before = self._steps_by_mode(name)
            error = (step().float() - reference).abs().max().item()
            results[name]["max_error_to_eager"] = error
            results[name]["ran_at"] = _increased(steps_before, self._steps_by_mode(name))
            if self._cold is not None and name in self._first_s:
                results[name]["first_call_s"] = self._first_s[name]
            if self._is_ours(name):
                results[name]["stats"] = stats(self._compiled[name]).as_dict()
        return results

    def _steps_by_mode(self, name: str) -> dict[str, int]:
        """Steps so far of a mode's way; empty for others."""
        if not self._is_ours(name):
            return {}
        report = stats(self._compiled[name])
        return {mode: report.total("steps", mode) for mode in ("FULL", "PIECEWISE", "NONE")}

    def _is_ours(self, name: str) -> bool:
        return name.removesuffix(FEWER_GUARDS) in self._request.modes

    def _compile(self) -> None:
        request = self._request
        names = [name for name in _OF_TORCH if request.measures(name, STATIC)]
        if request.measures(OURS, STATIC):
            names = [*request.modes, *names]
        if request.has_fewer_guards:
            names += [f"{name}{FEWER_GUARDS}" for name in names]
        for name in names:
            with keeping(self._failures, f"static | {name}"):
                self._ways[name] = self._compiled_way(name)

    def _compiled_way(self, name: str) -> Step:
        gc.collect()
        with self._watch.phase(f"compile {name}"):
            compiled = compiled_for(self._model, name, self._request.options)
            step = self._steps.step(compiled)
            with self._cold() if self._cold is not None else contextlib.nullcontext():
                self._first_s[name] = first_calls(step, self._clock, self._request.config)
        self._compiled[name] = compiled
        return step

    def _capture_by_hand(self, name: str, source: str) -> None:
        with keeping(self._failures, f"static | {name}"):
            if source not in self._compiled:
                self._compiled_way(source)
            self._ways[name] = captured_by_hand(self._steps.step(self._compiled[source]))


def _increased(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    return "".join(name for name in after if after[name] > before[name])
