"""Grow a plain call to the next capture size, and cut its outputs back.

Possible only where Dynamo left the number of tokens free: the same compiled code then serves both
sizes. Rows must be independent of each other, which the user vouches for by asking.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compile_backend.inputs import InputClass
from compile_backend.layout import memory_of, unexpanded
from compile_backend.split import Computed
from compile_backend.torch_internals.graphs import storage_id
from compile_backend.torch_internals.sizes import free_symbols_of, sizes_are_allowed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from compile_backend.inputs import GraphInput
    from compile_backend.split import SplitGraph


class RowPadding:
    """Adds rows to the tensors of a call along dimension 0.

    Args:
        split: the graph, for the symbolic sizes of its inputs and outputs.
        inputs: what each input is.
        shape_env: what Dynamo assumed about the sizes.
    """

    def __init__(self, split: SplitGraph, inputs: Sequence[GraphInput], shape_env: Any) -> None:
        self._shape_env = shape_env
        fakes = [split.values[name] for name in split.inputs]
        tensors = [i for i, item in enumerate(inputs) if item.kind is InputClass.CALLER]
        self._fakes = fakes
        self._sizes = {
            i: fakes[i].node.expr
            for i, item in enumerate(inputs)
            if item.kind is InputClass.SIZE and isinstance(fakes[i], torch.SymInt)
        }
        first = next((i for i in tensors if fakes[i].dim()), None)
        rows = fakes[first].shape[0] if first is not None else None
        self._symbol = rows.node.expr if isinstance(rows, torch.SymInt) else None
        self._first = first
        self._padded = [i for i in tensors if self._symbol in free_symbols_of(fakes[i])]
        self._others = [i for i in tensors if i not in self._padded and fakes[i].dim()]
        outputs = [_value(split, output) for output in split.outputs]
        self._outputs = [self._depends(_value(split, output)) for output in split.outputs]
        self.impossible = self._why_impossible([fakes[i] for i in self._padded], outputs, fakes)

    def _depends(self, value: Any) -> Any:
        """True for a tensor with a row per row; the expression of a size that counts rows."""
        if isinstance(value, torch.Tensor):
            return self._symbol in free_symbols_of(value)
        return value.node.expr if isinstance(value, torch.SymInt) else False

    def _why_impossible(
        self, padded: Sequence[Any], outputs: Sequence[Any], inputs: Sequence[Any]
    ) -> str | None:
        if self._symbol is None or not getattr(self._symbol, "is_Symbol", False):
            return _why_fixed(None if self._first is None else inputs[self._first].shape[0])
        for value in (*padded, *outputs):
            if not isinstance(value, torch.Tensor) or self._symbol not in free_symbols_of(value):
                continue
            sizes: list[Any] = list(value.shape)
            first, *others = sizes
            if not isinstance(first, torch.SymInt) or first.node.expr != self._symbol:
                return "a tensor's dimension 0 does not count its rows"
            if any(self._symbol in free_symbols_of(size) for size in others):
                return "a tensor has its rows in another dimension than 0"
        memories = {storage_id(value) for value in inputs if isinstance(value, torch.Tensor)}
        if any(isinstance(out, torch.Tensor) and storage_id(out) in memories for out in outputs):
            return "an output is a view of an input"
        return None

    def refusal(self, args: Sequence[Any], num_tokens: int, padded_tokens: int) -> str | None:
        """Why a call cannot be padded to `padded_tokens`; None where it can."""
        if self.impossible is not None or self._first is None:
            return self.impossible
        actual = args[self._first].shape[0]
        rows, rest = divmod(padded_tokens * actual, num_tokens)
        if rest:
            return "the next capture size makes no whole rows"
        if any(args[i].shape[0] == actual for i in self._others):
            return "an input whose size is fixed has as many rows, which may be the same ones"
        known = {expr: args[i] for i, expr in self._sizes.items()}
        if not sizes_are_allowed(self._shape_env, {**known, self._symbol: rows}):
            return "the code was compiled for sizes that the next capture size is not among"
        return None

    def rows(self, args: Sequence[Any], num_tokens: int, padded_tokens: int) -> int:
        """Rows of a call that pads to `padded_tokens`, where nothing refuses that."""
        assert self._first is not None
        actual: int = args[self._first].shape[0]
        return padded_tokens * actual // num_tokens

    def pad(self, args: Sequence[Any], rows: int) -> list[Any]:
        """The inputs with zero rows added."""
        grown = list(args)
        sizes = {**{expr: args[i] for i, expr in self._sizes.items()}, self._symbol: rows}
        for i in self._padded:
            layout = [
                tuple(_evaluated(number, sizes) for number in numbers)
                for numbers in (self._fakes[i].size(), self._fakes[i].stride())
            ]
            grown[i] = torch.empty_strided(*layout, dtype=args[i].dtype, device=args[i].device)
            memory_of(grown[i]).zero_()
            unexpanded(grown[i][: args[i].shape[0]]).copy_(unexpanded(args[i]))
        for i, expr in self._sizes.items():
            if expr == self._symbol:
                grown[i] = rows
        return grown

    def cut(self, outputs: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The outputs without the rows that padding added.

        Args:
            outputs: of the padded call.
            args: the inputs before padding.
        """
        assert self._first is not None
        rows = args[self._first].shape[0]
        sizes = {**{expr: args[i] for i, expr in self._sizes.items()}, self._symbol: rows}
        kept = []
        for output, depends in zip(outputs, self._outputs, strict=True):
            if depends is True:
                kept.append(output[:rows])
            elif depends is False:
                kept.append(output)
            else:
                kept.append(int(depends.xreplace(sizes)))
        return kept

    def show_writes(
        self, args: Sequence[Any], grown: Sequence[Any], positions: Sequence[int]
    ) -> None:
        """Bring what was written to padded inputs back to the caller's tensors."""
        for i in positions:
            if i in self._padded:
                unexpanded(args[i]).copy_(unexpanded(grown[i][: args[i].shape[0]]))


def _why_fixed(rows: Any) -> str:
    """Why there is no free number of rows.

    Args:
        rows: of the first input that has any; None where none has.
    """
    if rows is None:
        return "no input has rows"
    if isinstance(rows, torch.SymInt):
        return "the number of rows follows from other sizes"
    if rows == 1:
        return (
            "a call with 1 row is compiled for 1 row only, also with dynamic=True; add its number "
            "of tokens to cudagraph_capture_sizes"
        )
    return "the number of rows is fixed; compile with dynamic=True, in code that takes any number"


def _value(split: SplitGraph, output: Any) -> Any:
    if isinstance(output, str):
        return split.values.get(output)
    return output.value if isinstance(output, Computed) else None


def _evaluated(number: Any, sizes: Mapping[Any, int]) -> int:
    """A symbolic size or stride, with numbers for its symbols."""
    if isinstance(number, torch.SymInt):
        return int(number.node.expr.xreplace(dict(sizes)))
    return int(number)
