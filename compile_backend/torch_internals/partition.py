"""Private names of Inductor's graph partition: its settings, and who runs in a partition's place.

Inductor has a hook for wrappers of partitions, but that is one for the whole process, is asked for
whatever is compiled or loaded meanwhile, and is no part of any cache's key. Nothing here touches
it: partitions are taken from the code that Inductor made, and put into a runner of their own.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


class PartitionError(RuntimeError):
    """What Inductor made cannot be taken apart, as the rest of a sentence."""


def are_made_on(device_type: str) -> bool:
    """Whether Inductor makes partitions of a device's code: not of the CPU's."""
    return device_type != "cpu"


def partition_settings(ops: Sequence[str]) -> dict[str, Any]:
    """Inductor settings for code in partitions.

    Partitions are made only for graphs that are to be captured, so Inductor is told that this one
    is. Whoever compiles keeps it from capturing: see `without_graphs_of_its_own`.

    Args:
        ops: where to part, as `ns::op` or `ns::op.overload`.
    """
    return {
        "graph_partition": True,
        "custom_should_partition_ops": list(ops),
        "triton.cudagraphs": True,
    }


def without_graphs_of_its_own(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of Inductor's inner compile by which it captures nothing."""
    from torch._inductor.utils import BoxedBool

    return {**kwargs, "cudagraphs": BoxedBool(False)}


@dataclass(frozen=True, slots=True)
class PartitionFunction:
    """One partition.

    Attributes:
        call: takes its arguments as one list, which it clears, and returns its outputs.
        elements: for positions of arguments of which only some elements are read, which.
        unwritten: positions of outputs that it only allocates.
        does_work: whether it does more than allocate and view.
    """

    call: Callable[[list[Any]], Sequence[Any]]
    elements: Mapping[int, tuple[int, ...]]
    unwritten: frozenset[int]
    does_work: bool


class Partitions:
    """The partitions of one graph that Inductor compiled.

    Args:
        code: Inductor's object.

    Attributes:
        functions: the partitions.
        between: the text of what calls them.
        names: what the module of that text holds.

    Raises:
        PartitionError: it has none, or another form than is known.
    """

    def __init__(self, code: Any) -> None:
        runner = getattr(code, "compiled_fn_runner", None)
        calls = list(getattr(runner, "partitions", ()))
        tree = ast.parse(getattr(code, "source_code", ""))
        written = {
            item.name: item
            for item in tree.body
            if isinstance(item, ast.FunctionDef) and re.fullmatch(r"partition_\d+", item.name)
        }
        between = [
            method
            for item in tree.body
            if isinstance(item, ast.ClassDef) and item.name == "Runner"
            for method in item.body
            if isinstance(method, ast.FunctionDef) and method.name == "call"
        ]
        if not calls or len(between) != 1:
            raise PartitionError("Inductor made no partitions")
        if [getattr(call, "__name__", "") for call in calls] != list(written):
            raise PartitionError("somebody else wraps the partitions of Inductor in this process")
        self._code = code
        self.between = between[0]
        self.names: Mapping[str, Any] = getattr(getattr(runner, "call", None), "__globals__", {})
        self._within = list(written.values())
        self.functions = tuple(
            _described(call, text) for call, text in zip(calls, self._within, strict=True)
        )

    def calls_between(self, ops: Sequence[str]) -> int:
        """How many calls of these ops run between partitions."""
        return sum(_is_call_of(name, ops) for name in _called_in(self.between))

    def calls_within(self, ops: Sequence[str]) -> int:
        """How many calls of these ops are inside of partitions."""
        names = (name for text in self._within for name in _called_in(text))
        return sum(_is_call_of(name, ops) for name in names)

    def divert(
        self,
        instead: Sequence[Callable[[list[Any]], Sequence[Any]]],
        is_diverted: Callable[[], bool],
        planned: Callable[[list[Any]], Callable[[Any, list[Any]], Sequence[Any]] | None],
    ) -> None:
        """From now on, run others in the place of partitions in some calls of the graph.

        Args:
            instead: one for each partition, called as the partition is.
            is_diverted: asked once at the start of each call.
            planned: asked for what to run in the place of such a call, on an object that holds
                the partitions themselves, and on the list of inputs; None to run the others.
        """
        from torch._inductor.output_code import maybe_realign_inputs
        from torch._inductor.utils import BoxedBool

        code = self._code
        make_runner = type(code.compiled_fn_runner)
        plain = make_runner([function.call for function in self.functions])
        diverted = make_runner(list(instead))

        def call(args: list[Any]) -> Sequence[Any]:
            if not is_diverted():
                as_made: Sequence[Any] = plain.call(args)
                return as_made
            step = planned(args)
            outputs: Sequence[Any] = diverted.call(args) if step is None else step(plain, args)
            return outputs

        code.compiled_fn_runner = plain
        code.current_callable = call
        maybe_realign_inputs(BoxedBool(False), code, code.inputs_to_check, code.mutated_input_idxs)


# --- what the text of a partition tells --------------------------------------------------------

_NO_WORK = re.compile(
    r"args\.clear|empty_strided\w*|reinterpret_tensor|assert_\w+|get_raw_\w*stream"
    r"|torch\.cuda\.(_DeviceGuard|set_device)"
)


def _described(call: Any, text: ast.FunctionDef) -> PartitionFunction:
    names = _argument_names(text)
    found = {position: _elements_read(text, name) for position, name in enumerate(names)}
    return PartitionFunction(
        call=call,
        elements={position: read for position, read in found.items() if read},
        unwritten=frozenset(_unwritten(text)),
        does_work=not all(_NO_WORK.fullmatch(name) for name in _called_in(text)),
    )


def _argument_names(text: ast.FunctionDef) -> list[str]:
    for statement in text.body:
        match statement:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Name(id="args")):
                return [target.id for target in targets if isinstance(target, ast.Name)]
    return []


def _elements_read(text: ast.FunctionDef, name: str) -> tuple[int, ...] | None:
    """Which elements of an argument are read; None where it is read as a whole."""
    read = [
        node.slice.value
        for node in ast.walk(text)
        if isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id == name
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, int)
    ]
    return tuple(sorted(set(read))) if len(read) == _num_reads(text, name) else None


def _num_reads(text: ast.FunctionDef, name: str) -> int:
    return sum(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
        for node in ast.walk(text)
    )


def _unwritten(text: ast.FunctionDef) -> Iterator[int]:
    allocated = {
        target.id
        for node in ast.walk(text)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).startswith("empty_strided")
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(text):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            for position, item in enumerate(node.value.elts):
                is_name = isinstance(item, ast.Name) and item.id in allocated
                if is_name and _num_reads(text, ast.unparse(item)) == 1:
                    yield position


def _called_in(text: ast.FunctionDef) -> Iterable[str]:
    return (ast.unparse(node.func) for node in ast.walk(text) if isinstance(node, ast.Call))


def _is_call_of(name: str, ops: Sequence[str]) -> bool:
    """Whether `torch.ops.ns.op.overload` is one of the ops, given as to Inductor."""
    spelled = tuple(f"torch.ops.{op.replace('::', '.', 1)}." for op in ops)
    return f"{name}.".startswith(spelled)
