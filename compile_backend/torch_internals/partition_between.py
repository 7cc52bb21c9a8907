"""The code that Inductor wrote between the partitions of a graph, made anew with graphs in it.

What it does itself stays as it is; whether a graph may be replayed in the place of a partition is
not decided here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compile_backend.torch_internals.partition_text import Line, TextBetween

if TYPE_CHECKING:
    import ast
    from collections.abc import Callable, Mapping, Sequence
    from types import CodeType

    from compile_backend.torch_internals.partition_text import Call


@dataclass(frozen=True, slots=True)
class Leaf:
    """An argument, by its position, or one of its elements."""

    position: int
    element: int | None = None


@dataclass(frozen=True, slots=True)
class Replay:
    """What is to be done in the place of a partition.

    Attributes:
        replay: fills what is held.
        copies: what to copy before: from where, its shape, and what copies it.
        outputs: what is held, or which argument is handed on.
    """

    replay: Callable[[], object]
    copies: tuple[tuple[Leaf, Any, Callable[[Any], object]], ...]
    outputs: tuple[Any, ...]


class Between:
    """The code between the partitions of one graph.

    Args:
        text: the method that calls the partitions.
        names: what its module holds.
        direct: what to call in the place of ops that return nothing.

    Attributes:
        arguments: of each partition.
        realigned: positions of inputs that are copied unless they are aligned.

    Raises:
        PartitionError: it has another form than is known.
    """

    def __init__(
        self,
        text: ast.FunctionDef,
        names: Mapping[str, Any],
        direct: Mapping[Any, Callable[..., Any]],
    ) -> None:
        read = TextBetween(text, direct)
        self._items = read.items
        self._names = {**names, **read.ops}
        self._codes: dict[str, CodeType] = {}
        self.realigned = frozenset(read.realigned)
        self.arguments = {
            item.index: item.arguments for item in read.items if not isinstance(item, Line)
        }

    def with_replays(self, replays: Mapping[int, Replay]) -> Callable[[Any, list[Any]], Any]:
        """The code with graphs in the place of some partitions, by index.

        Returns:
            A function of an object that holds the others in its `partitions`, and of the list of
            inputs, which it clears.
        """
        values: dict[str, Any] = {}
        lines = ["def call(self, args):"]
        for item in self._items:
            if isinstance(item, Line):
                lines.append(item.indent + item.text)
                continue
            replay = replays.get(item.index)
            body = _plain_call(item) if replay is None else _replay(item, replay, values)
            lines += [item.indent + line for line in body]
        text = "\n".join(lines)
        if text not in self._codes:  # the same for most keys
            self._codes[text] = compile(text, "<between partitions>", "exec")
        namespace = {**self._names, **values}
        exec(self._codes[text], namespace)  # noqa: S102
        made: Callable[[Any, list[Any]], Any] = namespace["call"]
        return made


def _plain_call(call: Call) -> list[str]:
    listed = f"partition{call.index}_args"
    return [
        f"{listed} = [{', '.join(argument.name for argument in call.arguments)}]",
        *_deletions(call.dead),
        f"{_tuple(call.targets)} = self.partitions[{call.index}]({listed})",
        f"del {listed}",
    ]


def _replay(call: Call, replay: Replay, values: dict[str, Any]) -> list[str]:
    def text(leaf: Leaf) -> str:
        name = call.arguments[leaf.position].name
        return name if leaf.element is None else f"{name}[{leaf.element}]"

    number = call.index
    lines = []
    for i, (leaf, shape, copy) in enumerate(replay.copies):
        lines += [
            f"assert {text(leaf)}.shape == shape_{number}_{i}, 'shapes are those of the key'",
            f"copy_{number}_{i}({text(leaf)})",
        ]
        values[f"shape_{number}_{i}"], values[f"copy_{number}_{i}"] = shape, copy
    values[f"replay_{number}"] = replay.replay
    lines.append(f"replay_{number}()")
    if any(isinstance(output, Leaf) for output in replay.outputs):
        items = []
        for i, output in enumerate(replay.outputs):
            if isinstance(output, Leaf):
                items.append(text(output))
            else:
                items.append(f"held_{number}_{i}")
                values[items[-1]] = output
        lines.append(f"{_tuple(call.targets)} = {_tuple(items)}")
    elif call.targets:
        values[f"held_{number}"] = replay.outputs
        lines.append(f"{_tuple(call.targets)} = held_{number}")
    dead = [name for name in call.dead if name not in call.targets]
    return [*lines, *_deletions(dead)]


def _deletions(names: Sequence[str]) -> list[str]:
    return [f"del {', '.join(names)}"] if names else []


def _tuple(names: Sequence[str]) -> str:
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"
