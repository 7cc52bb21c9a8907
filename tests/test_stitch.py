"""Stitched code runs sections in order, frees values early, and shares buffers safely."""

import itertools
import weakref

import pytest
import torch
from toy import SPLITTING_OPS, VARIANTS, dynamo_graph, rows, toy_model

from compile_backend.op_names import SplittingOps
from compile_backend.pipeline import prepare_for_split
from compile_backend.split import Constant, Section, SplitGraph, split_graph
from compile_backend.stitch import buffer_slots, stitch
from compile_backend.torch_internals.graphs import storage_id

NO_CODE = torch.fx.GraphModule({}, torch.fx.Graph())


def section(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Section:
    return Section(name, True, NO_CODE, inputs, outputs, ())


def chain(*sections: Section, inputs: tuple[str, ...], outputs: tuple[object, ...]) -> SplitGraph:
    return SplitGraph(inputs, sections, outputs, {})


def test_sections_run_in_order_on_named_values():
    split = chain(
        section("one", ("x", "y"), ("a", "b")),
        section("two", ("b", "x"), ("c",)),
        inputs=("x", "y"),
        outputs=("c", "a", Constant(None), "a", "x", Constant("text")),
    )
    ran = []

    def one(x, y):
        ran.append("one")
        return x + y, x - y

    def two(b, x):
        ran.append("two")
        return (b * x,)

    assert stitch(split, {"one": one, "two": two})((5, 3)) == (10, 8, None, 8, 5, "text")
    assert ran == ["one", "two"]


def test_a_runner_may_take_its_inputs_as_one_list():
    split = chain(section("one", ("x",), ("a",)), inputs=("x",), outputs=("a",))

    def clears(inputs):
        (x,) = inputs
        inputs.clear()
        return [x * 2]

    assert stitch(split, {"one": clears}, takes_list=frozenset({"one"}))((4,)) == (8,)


def test_nothing_in_and_nothing_out():
    split = chain(section("one", (), ()), inputs=(), outputs=())
    assert stitch(split, {"one": lambda: ()})(()) == ()


def test_values_are_freed_after_their_last_reader():
    class Value:
        pass

    made = []
    alive_in_last = []

    def make(*_):
        value = Value()
        made.append(weakref.ref(value))
        return (value,)

    def last(*_):
        alive_in_last.extend(ref() is not None for ref in made)
        return (1,)

    split = chain(
        section("one", (), ("a",)),
        section("two", ("a",), ("b",)),
        section("three", (), ("c",)),
        section("four", ("b",), ("d",)),
        inputs=(),
        outputs=("d",),
    )
    runners = {"one": make, "two": make, "three": make, "four": last}
    assert stitch(split, runners)(()) == (1,)
    # The unread value is gone, the argument is still held by its reader's caller.
    assert alive_in_last == [False, True, False]


def toy_split(variant: str) -> SplitGraph:
    graph = dynamo_graph(toy_model(variant, 4), rows(4))
    prepare_for_split(graph)
    return split_graph(graph, SplittingOps(SPLITTING_OPS))


@pytest.mark.parametrize("variant", VARIANTS)
def test_values_alive_together_never_share_a_buffer(variant):
    split = toy_split(variant)
    slots = buffer_slots(split)
    made = {name: i for i, part in enumerate(split.sections) for name in part.outputs}
    memory = {name: storage_id(split.values[name]) for name in made}
    end = {
        name: max(
            [i for i, part in enumerate(split.sections) for n in part.inputs if same(n)]
            + [len(split.sections) for n in split.outputs if isinstance(n, str) and same(n)],
            default=made[name],
        )
        for name in made
        for same in [
            lambda n, name=name: (
                n == name
                or (memory[name] is not None and storage_id(split.values[n]) == memory[name])
            )
        ]
    }
    for one, other in itertools.combinations(made, 2):
        if made[one] <= end[other] and made[other] <= end[one]:
            assert slots[one] != slots[other], (one, other)


def test_a_chain_of_layers_needs_few_buffers():
    assert len(set(buffer_slots(toy_split("attn_new")).values())) <= 2
