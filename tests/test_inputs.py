"""Inputs are classed by what they are, and callers' tensors brought to static memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy import FULL, WIDTH, Twin, dynamo_call, rows

from compile_backend.inputs import GraphInput, InputBuffers, InputClass, classify_inputs

CPU = torch.device("cpu")
CALLER, PARAMETER, STATIC, SIZE = (
    InputClass.CALLER,
    InputClass.PARAMETER,
    InputClass.STATIC,
    InputClass.SIZE,
)


def buffers(
    *kinds: InputClass, mutated: tuple[int, ...] = (), copy_inputs: bool = True
) -> InputBuffers:
    inputs = [GraphInput(f"input_{i}", f"input_{i}", kind) for i, kind in enumerate(kinds)]
    return InputBuffers(inputs, copy_inputs=copy_inputs, mutated=frozenset(mutated))


class Classed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(rows(WIDTH))
        self.register_buffer("table", rows(WIDTH))
        self.plain = rows(WIDTH)

    def forward(self, x: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + x @ self.table + x @ self.plain + x @ marked


def test_every_class_of_input_is_told():
    marked = rows(WIDTH)
    torch._dynamo.mark_static_address(marked)
    graph, example_inputs = dynamo_call(Classed(), rows(4), marked, dynamic=True)
    found = classify_inputs(graph.graph, example_inputs, CPU)
    expected = {"weight": PARAMETER, "table": STATIC, "plain": STATIC, "marked": STATIC}
    for name, kind in {**expected, "'x'": CALLER}.items():
        assert {item.kind for item in found if name in item.source} <= {kind, SIZE}, name
    assert {item.kind for item in found} == {CALLER, PARAMETER, STATIC, SIZE}


def test_a_tensor_elsewhere_is_told():
    graph, example_inputs = dynamo_call(lambda x: x + 1, rows(4))
    (found,) = classify_inputs(graph.graph, example_inputs, torch.device("meta"))
    assert found.kind is InputClass.OTHER_DEVICE


def test_callers_tensors_are_copied_to_one_address():
    held = buffers(CALLER, SIZE)
    addresses = set()
    for value in (1.0, 2.0):
        given = torch.full((4,), value)
        (static, size), has_moved = held.load("key", [given, 4])
        assert static.tolist() == [value] * 4
        assert static.data_ptr() != given.data_ptr()
        assert size == 4
        assert not has_moved
        addresses.add(static.data_ptr())
    assert len(addresses) == 1


def test_weights_are_not_copied():
    held, weight, buffer = buffers(PARAMETER, STATIC), torch.ones(4), torch.ones(4)
    static, _ = held.load("key", [weight, buffer])
    assert static[0] is weight
    assert static[1] is buffer
    assert held.num_bytes == 0


@pytest.mark.parametrize("kind", [PARAMETER, STATIC])
def test_a_rebound_weight_is_told_once_for_each_key(kind):
    held, old, new = buffers(kind), torch.ones(4), torch.ones(4) * 2
    for key in ("one", "two"):
        held.load(key, [old])
    for key in ("one", "two"):
        static, has_moved = held.load(key, [new])
        assert has_moved
        assert static[0] is new
        assert not held.load(key, [new])[1]


def test_without_copies_a_moving_input_is_told():
    held = buffers(CALLER, copy_inputs=False)
    first, second = torch.ones(4), torch.ones(4)
    assert held.load("key", [first])[1] is False
    assert held.load("key", [first])[1] is False
    static, has_moved = held.load("key", [second])
    assert has_moved
    assert static[0] is second


@pytest.mark.parametrize(
    "tensor",
    [
        rows(4),
        rows(WIDTH).t(),
        rows(1).expand(4, WIDTH),
        rows(4, 1).expand(4, WIDTH),
        rows(4, 3 * WIDTH)[:, WIDTH : 2 * WIDTH],
        torch.arange(4),
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.ones(4, dtype=torch.bool),
        rows(2, 3, 4)[:, ::2],
        torch.ones(1, 1, 1).expand(2, 3, 4),
    ],
    ids=[
        *("rows", "columns", "one row", "one column", "gap", "ints", "0-d", "empty", "bools"),
        *("steps", "all one"),
    ],
)
def test_layouts_survive(tensor):
    held = buffers(CALLER, mutated=(0,))
    for _ in range(2):
        (static,), _ = held.load("key", [tensor])
        torch.testing.assert_close(static, tensor)
        assert static.stride() == tensor.stride()
        held.write_back([static], [tensor])


def test_several_dtypes_are_copied():
    held = buffers(CALLER, CALLER, CALLER, CALLER)
    given = [rows(4), torch.arange(4), rows(4) * 2, torch.ones(4, dtype=torch.bool)]
    static, _ = held.load("key", given)
    torch.testing.assert_close(static, given)


def test_a_write_is_shown_to_the_caller():
    held, x, y = buffers(CALLER, CALLER, mutated=(1,)), torch.ones(4), torch.ones(4)
    static, _ = held.load("key", [x, y])
    static[0].fill_(9)
    static[1].fill_(5)
    held.write_back(static, [x, y])
    assert x.tolist() == [1.0] * 4
    assert y.tolist() == [5.0] * 4


def test_overlap_with_a_written_tensor_is_told():
    base = torch.ones(5)
    held = buffers(CALLER, CALLER, mutated=(0,))
    assert held.overlaps("key", [base[1:], base[:-1]])
    assert not held.overlaps("key", [torch.ones(4), base[:-1]])
    assert not buffers(CALLER, CALLER).overlaps("key", [base[1:], base[:-1]])


def test_overlap_with_a_written_buffer_is_told():
    cache = torch.ones(8)
    held = buffers(CALLER, STATIC, mutated=(1,))
    for _ in range(2):
        assert held.overlaps("key", [cache[2:], cache])
        assert not held.overlaps("key", [torch.ones(6), cache])
        held.load("key", [torch.ones(6), cache])


def test_reset_forgets_every_key():
    held = buffers(PARAMETER)
    held.load("key", [torch.ones(4)])
    held.reset()
    assert held.load("key", [torch.ones(4)])[1] is False


# --- through the backend ----------------------------------------------------------------------


def twin(function: Any, **options: Any) -> Twin:
    return Twin(function, cudagraph_mode="FULL", **options)


def test_written_inputs_are_shown_exactly_once_on_every_call():
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        z = torch.ops.toy.attn_new(x * 2)
        y[1:].mul_(2)
        return z + y

    for mode in ("PIECEWISE", "FULL"):
        both = twin(function) if mode == "FULL" else Twin(function, cudagraph_mode=mode)
        for _ in range(4):
            both(rows(4), rows(4))


def test_one_tensor_given_twice_and_written():
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return torch.ops.toy.attn_new(y * 2) + x

    both = twin(function)
    for _ in range(3):
        x = rows(4)
        both(x, x)
        both(rows(4), rows(4))


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_inputs_that_overlap_and_are_written_run_without_a_graph(mode, caplog):
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return torch.ops.toy.attn_new(y * 2) + x.sum()

    both = Twin(function, cudagraph_mode=mode, cudagraph_capture_sizes=[4])
    was_told = False
    for overlapping in (False, False, False, True, True, False):
        base = rows(5)
        both(*((base[1:], base[:-1]) if overlapping else (rows(4), rows(4))))
        was_told = was_told or overlapping
        told = sum("shares memory with another input" in text for text in caplog.messages)
        assert told == was_told
    assert both.stats.total("replays") > 0


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_an_input_that_views_a_written_buffer(mode):
    class Cached(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(8, WIDTH))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.cache.add_(y)
            return torch.ops.toy.attn_new(x + 1) + x

    both = Twin(Cached(), cudagraph_mode=mode)
    for _ in range(3):
        both(rows(4), rows(8))
    y = rows(8)
    with torch.no_grad():
        actual = both.compiled(both.model.cache[:4], y)
        expected = both.eager(both.eager.cache[:4], y)
    torch.testing.assert_close(actual, expected)


def test_moving_inputs_without_copies_are_captured_again_and_right():
    both = twin(lambda x: torch.ops.toy.attn_new(x * 2) + 1, cudagraph_copy_inputs=False)
    kept = [rows(4) for _ in range(4)]
    for x in kept:
        both(x)
    assert both.stats.total("captures", FULL) == 3
    for _ in range(3):
        kept[-1].normal_()
        both(kept[-1])
    assert both.stats.total("captures", FULL) == 3


def test_a_tensor_that_is_no_buffer_but_an_attribute_is_written():
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return torch.ops.toy.attn_new(x * self.steps) + 1

    both = twin(Counting())
    for n in range(1, 5):
        both(rows(4))
        assert both.model.steps == both.eager.steps == n
