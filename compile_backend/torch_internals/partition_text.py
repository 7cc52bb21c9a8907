"""What the text of the code between partitions tells, which Inductor wrote.

It is straight-line code that names what it hands on, so its text tells where each argument of a
partition comes from. What is made of that is not known here.
"""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compile_backend.torch_internals.partition import PartitionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

ALIGNMENT = 16
"""Bytes. Inductor copies inputs at other addresses, where it asks for that."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value comes from.

    Attributes:
        partition: that returned it; None for the graph's inputs.
        position: among what that returned, or among the inputs.
    """

    partition: int | None
    position: int


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a partition.

    Attributes:
        name: in the text.
        source: None for what is made in between.
        is_size: whether it follows from sizes of the graph's inputs.
    """

    name: str
    source: Source | None
    is_size: bool


@dataclass(frozen=True, slots=True)
class Line:
    """A line that stays as it is."""

    indent: str
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """The call of a partition, with what is deleted between the list of its arguments and it."""

    indent: str
    index: int
    arguments: tuple[Argument, ...]
    targets: tuple[str, ...]
    dead: tuple[str, ...]


class TextBetween:
    """The code between the partitions of one graph, read.

    Args:
        text: the method that calls the partitions.
        direct: what to call in the place of ops that return nothing.

    Attributes:
        items: lines and calls of partitions, in order.
        ops: what lines call, by the name that they have for it.
        realigned: positions of inputs that are copied unless they are aligned.

    Raises:
        PartitionError: it has another form than is known.
    """

    def __init__(self, text: ast.FunctionDef, direct: Mapping[Any, Callable[..., Any]]) -> None:
        self.items: list[Line | Call] = []
        self.ops: dict[str, Any] = {}
        self.realigned: set[int] = set()
        self._direct = direct
        self._sources: dict[str, Source] = {}
        self._sizes: set[str] = set()
        self._pending: tuple[str, tuple[Argument, ...], list[str]] | None = None
        self._read(text.body, "    ")

    def _read(self, body: Iterable[ast.stmt], indent: str) -> None:
        for statement in body:
            if self._pending is not None:
                self._read_in_call(statement, indent)
                continue
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.List(elts=items)) if (
                    re.fullmatch(r"partition\d+_args", name)
                ):
                    self._pending = (name, tuple(map(self._argument, items)), [])
                case ast.Delete(targets=[ast.Name(id=name)]) if name.startswith("partition"):
                    pass  # the list, which is gone
                case ast.With():
                    self._append(indent, f"with {', '.join(map(ast.unparse, statement.items))}:")
                    self._read(statement.body, indent + "    ")
                case ast.Assign() | ast.Expr() | ast.Delete() | ast.Return() | ast.Pass():
                    self._bind(statement)
                    self._append(indent, ast.unparse(self._with_ops(statement)))
                case _:
                    raise PartitionError(f"Inductor's code has a {type(statement).__name__}")
        if self._pending is not None:
            raise PartitionError("Inductor's code makes arguments that it does not pass")

    def _append(self, indent: str, text: str) -> None:
        self.items.extend(Line(indent, line) for line in text.split("\n"))

    def _read_in_call(self, statement: ast.stmt, indent: str) -> None:
        """Read what follows the list of a partition's arguments: deletions, and the call."""
        assert self._pending is not None
        listed, arguments, dead = self._pending
        match statement:
            case ast.Delete(targets=targets) if all(isinstance(t, ast.Name) for t in targets):
                dead += [ast.unparse(target) for target in targets]
            case ast.Assign(
                targets=[ast.Tuple(elts=targets)],
                value=ast.Call(
                    func=ast.Subscript(
                        value=ast.Attribute(value=ast.Name(id="self"), attr="partitions"),
                        slice=ast.Constant(value=int(index)),
                    ),
                    args=[ast.Name(id=name)],
                ),
            ) if name == listed and all(isinstance(t, ast.Name) for t in targets):
                names = tuple(ast.unparse(target) for target in targets)
                for position, target in enumerate(names):
                    self._sizes.discard(target)
                    self._sources[target] = Source(index, position)
                self.items.append(Call(indent, index, arguments, names, tuple(dead)))
                self._pending = None
            case _:
                raise PartitionError("Inductor's code does not call a partition as is known")

    def _argument(self, item: ast.expr) -> Argument:
        name = ast.unparse(item)
        return Argument(name, self._sources.get(name), name in self._sizes)

    def _bind(self, statement: ast.stmt) -> None:
        """Follow what names stand for."""
        match statement:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Name(id="args")):
                for position, target in enumerate(targets):
                    self._sources[ast.unparse(target)] = Source(None, position)
                return
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                source, is_size = self._source(name, value), self._is_size(value)
            case _:
                name, source, is_size = "", None, False
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                self._sources.pop(node.id, None)
                self._sizes.discard(node.id)
        if source is not None:
            self._sources[name] = source
        if is_size:
            self._sizes.add(name)

    def _source(self, name: str, value: ast.expr) -> Source | None:
        match value:
            case ast.Name(id=other):
                return self._sources.get(other)
            case ast.Call(func=ast.Name(id="copy_if_misaligned"), args=[ast.Name(id=other)]):
                source = self._sources.get(other)
                if other == name and source is not None and source.partition is None:
                    self.realigned.add(source.position)
                    return source
        return None

    def _is_size(self, value: ast.expr) -> bool:
        match value:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="size"), args=[]):
                source = self._sources.get(name)
                return source is not None and source.partition is None
            case ast.Subscript(value=inner, slice=ast.Constant()):
                return self._is_size(inner)
            case ast.Name(id=name):
                return name in self._sizes
        return False

    def _with_ops(self, statement: ast.stmt) -> ast.stmt:
        """The statement with ops looked up already."""
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                path = ast.unparse(node.func)
                op = _op_at(path)
                if op is None:
                    continue
                if isinstance(statement, ast.Expr) and node is statement.value:
                    op = self._direct.get(op, op)
                name = path.replace(".", "_")
                node.func = ast.Name(name, ast.Load())
                self.ops[name] = op
        return statement


def _op_at(path: str) -> Any | None:
    """The op that a text names; None where it names no op."""
    if not re.fullmatch(r"torch\.ops(\.\w+){3}", path):
        return None
    import torch

    return functools.reduce(getattr, path.split(".")[1:], torch)
