"""A runner's steps at PIECEWISE past Dynamo: the compiled graph is called on its old arguments.

Between a runner and its model's one graph lie guards and Python that do the same in every step of
a key. Once such a step ran by a replay plan, what it took is kept: the plan, its arguments, which
stay where they are, and where its outputs are in what the model returns. Models of several graphs,
of graphs with arguments made anew in each step, or with Python that leaves something behind go on
running as they are.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from compile_backend.inputs import InputClass
from compile_backend.torch_internals.dynamo import autocast_is_on, python_around
from compile_backend.torch_internals.graphs import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from compile_backend.backend import CompiledFacts
    from compile_backend.batch import BatchDescriptor
    from compile_backend.build import BuiltGraph
    from compile_backend.compiled_graph import CompiledGraph, Recorder
    from compile_backend.replay_plan import ReplayPlan
    from compile_backend.weights import Weights

# Steps of a key after which nobody looks any more.
_MAX_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class _Output:
    """Stands for one output of the graph in what the model returns."""

    index: int


@dataclass(frozen=True, slots=True)
class PiecewiseStep:
    """What a step of one key takes.

    Attributes:
        graph: that the model calls.
        key: of the graph.
        plan: by which the graph ran; another one is for other arguments.
        args: of the graph.
        returned: what the model returns, with `_Output` in place of tensors.
        holds_copy: whether the plan's first graph brings the inputs to the device.
        builder: of attention's metadata, which is made before; None if there is none.
    """

    graph: CompiledGraph
    key: BatchDescriptor
    plan: ReplayPlan
    args: Sequence[Any]
    returned: Any
    holds_copy: bool
    builder: object

    @property
    def sends_inputs(self) -> bool:
        """Whether `repeat` brings the inputs in time: nothing reads them on the device before."""
        builder = self.builder
        return self.holds_copy and (builder is None or getattr(builder, "builds_on_host", False))

    def repeat(self, metadata: Any) -> Any | None:
        """Another such step, on inputs that are filled; None if it cannot be any more.

        Args:
            metadata: of attention in this step.
        """
        outputs = self.graph.repeat(self.key, self.plan, self.args, metadata)
        if outputs is None:
            return None
        if isinstance(self.returned, _Output):
            return outputs[self.returned.index]
        return tree_map(
            lambda item: outputs[item.index] if isinstance(item, _Output) else item, self.returned
        )


class PiecewiseSteps:
    """The steps at PIECEWISE of a runner.

    Args:
        model: as the runner calls it.
        compiled: the model's graphs.
        builder: of attention's metadata; None if there is none.
        weights: the model's; whoever looks after them calls `forget`.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        compiled: CompiledFacts,
        weights: Weights,
        builder: object = None,
    ) -> None:
        self._compiled = compiled
        self._weights = weights
        self._model = model
        self._builder = builder
        self._steps: dict[BatchDescriptor, PiecewiseStep] = {}
        self._attempts: Counter[BatchDescriptor] = Counter()

    def known(self, key: BatchDescriptor) -> PiecewiseStep | None:
        """The step of a key, which may be repeated until it says otherwise; None if there is none.

        Args:
            key: of the runner.
        """
        return self._steps.get(key)

    def sends_inputs(self, key: BatchDescriptor) -> bool:
        """Whether `repeat` brings the inputs of a key to the device, unless it returns None."""
        step = self._steps.get(key)
        return step is not None and step.sends_inputs

    def repeat(self, key: BatchDescriptor, metadata: Any) -> Any | None:
        """A step of a known key; see `PiecewiseStep.repeat`. None where the model must be called.

        Args:
            key: of the runner.
            metadata: of attention in this step.
        """
        step = self._steps.get(key)
        outputs = None if step is None else step.repeat(metadata)
        if outputs is None:
            self._steps.pop(key, None)
        return outputs

    def forget(self) -> None:
        """Forget every step, since weights are elsewhere."""
        self._steps.clear()
        self._attempts.clear()

    def learn(
        self, key: BatchDescriptor, call: Callable[[], Any], inputs: Sequence[torch.Tensor]
    ) -> Any:
        """Call the model, and keep what the step took if that can be repeated.

        Args:
            key: of the runner.
            call: calls the model.
            inputs: the model's, at addresses that stay.
        """
        graphs = list(self._compiled.graphs)
        if self._attempts[key] >= _MAX_ATTEMPTS or not self._is_usual(graphs):
            return call()
        self._attempts[key] += 1
        known = {id(item) for item in (*self._weights.tensors(), *inputs)}
        seen: list[PiecewiseStep] = []

        def recorder_of(built: BuiltGraph) -> Recorder:
            def record(
                graph_key: BatchDescriptor, plan: ReplayPlan, args: Sequence[Any], outputs: Any
            ) -> None:
                if _stay(built, args, known):
                    holds_copy, own = built.graph.sends_inputs(graph_key), self._builder
                    facts = (built.graph, graph_key, plan, tuple(args), outputs, holds_copy, own)
                    seen.append(PiecewiseStep(*facts))

            return record

        before = self._num_steps()
        for built in graphs:
            built.graph.recorder = recorder_of(built)
        try:
            result = call()
        finally:
            for built in graphs:
                built.graph.recorder = None
        # A model that binds its buffers anew has other arguments in the next step.
        if len(seen) != 1 or self._num_steps() != before + 1 or self._weights.have_moved():
            return result
        (step,) = seen
        returned = _with_slots(result, step.returned)
        if returned is not None:
            self._steps[key] = replace(step, returned=returned)
        return result

    def _is_usual(self, graphs: Sequence[BuiltGraph]) -> bool:
        """Whether a call of the model is nothing but a graph."""
        return (
            all(built.is_whole for built in graphs)
            and not autocast_is_on()
            and not python_around(self._model)
        )

    def _num_steps(self) -> int:
        return sum(row.steps for stats in self._compiled.stats() for row in stats.rows.values())


def _stay(built: BuiltGraph, args: Sequence[Any], known: set[int]) -> bool:
    """Whether a graph's arguments are the same in each step of the key.

    Args:
        built: the graph.
        args: of one step.
        known: identities of weights, and of inputs at addresses that stay.
    """
    return all(
        id(arg) in known
        if item.kind in (InputClass.PARAMETER, InputClass.STATIC)
        else item.kind is InputClass.SIZE and ".size()" in item.source
        for item, arg in zip(built.plan.inputs, args, strict=True)
    )


def _with_slots(result: Any, outputs: Sequence[Any]) -> Any | None:
    """What the model returned, with slots for tensors; None if one is no output of the graph."""
    index = {id(output): i for i, output in enumerate(outputs)}
    leaves = tree_leaves(result)
    if any(leaf is not None and id(leaf) not in index for leaf in leaves):
        return None
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return None
    return tree_map(lambda leaf: None if leaf is None else _Output(index[id(leaf)]), result)
