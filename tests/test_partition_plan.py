"""Planned steps of partitions give what partitions give as Inductor made them."""

from __future__ import annotations

import ast
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import PIECEWISE, WIDTH

from compile_backend import BatchDescriptor
from compile_backend.context import ForwardContext, SetBy, enter_forward_context
from compile_backend.partition import partitioned_programs
from compile_backend.reference_engine import ReferenceEngine
from compile_backend.torch_internals.partition import PartitionError, Partitions
from compile_backend.torch_internals.partition_between import Between
from compile_backend.wrapper import CUDAGraphWrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KEY = BatchDescriptor(4, 4)
HEAD = """
def partition_{index}(args):
    {names}, n = args
    args.clear()
    {body}
"""
RUNNER = """
class Runner:
    def __init__(self, partitions):
        self.partitions = partitions

    def call(self, args):
"""


def mixed(n: int, *leaves: torch.Tensor) -> torch.Tensor:
    """A new tensor that depends on every argument, each in its own way."""
    made = torch.zeros(4, WIDTH)
    for i, leaf in enumerate(leaves):
        made += (i + 1) * leaf.mean() + leaf.flatten()[:WIDTH].cumsum(0) / 8
    return made / 2 + n


class Written:
    """A graph that Inductor could have parted, from its text.

    Args:
        partitions: names of the arguments of each, and its body.
        between: lines of what calls them, from its inputs `x`, `w` and `n`, which are the graph's.
    """

    def __init__(
        self,
        partitions: Sequence[tuple[Sequence[str], str]],
        between: Sequence[str],
        **wrapping: Any,
    ) -> None:
        guarded = ["with guard(0):", *(f"    {line}" for line in between)]
        lines = ["x, w, f, n = args", "args.clear()", *guarded]
        source = "".join(
            HEAD.format(index=index, names=", ".join(names), body=body)
            for index, (names, body) in enumerate(partitions)
        )
        source += RUNNER + "\n".join(f"        {line}" for line in lines)
        namespace: dict[str, Any] = {
            "torch": torch,
            "guard": nullcontext,  # of a device
            "mixed": mixed,
            "copy_if_misaligned": lambda value: value,
        }
        exec(source, namespace)
        functions = [namespace[f"partition_{index}"] for index in range(len(partitions))]
        self._code = SimpleNamespace(
            source_code=source,
            compiled_fn_runner=namespace["Runner"](functions),
            inputs_to_check=[],
            mutated_input_idxs=[],
            _defers_input_alignment=False,
        )
        self.plain: Callable[[list[Any]], Sequence[Any]] = namespace["Runner"](functions).call
        self.engine = ReferenceEngine()
        self.wrappers: list[CUDAGraphWrapper] = []
        self._wrapping = wrapping
        self.programs = partitioned_programs(
            lambda args: tuple(self._code.current_callable(list(args))),
            Partitions(self._code),
            torch.device("cpu"),
            self._wrap,
            lambda key: 1,
        )
        self.steps: Any = self.programs.runners[-1]

    def __repr__(self) -> str:
        return self._code.source_code

    def _wrap(self, called: Any, name: str, unwritten: frozenset[int]) -> CUDAGraphWrapper:
        made = CUDAGraphWrapper(
            called, PIECEWISE, engine=self.engine, name=name, strict=True, **self._wrapping
        )
        self.wrappers.append(made)
        return made

    def __call__(self, *args: Any) -> Any:
        context = ForwardContext(None, PIECEWISE, KEY)
        with enter_forward_context(context, SetBy.GRAPH), self.engine.session():
            return self.programs.piecewise(args)

    @property
    def is_planned(self) -> bool:
        return KEY in self.steps._planned

    @property
    def num_replays(self) -> int:
        return sum(
            {id(each.counts(KEY)): each.counts(KEY).replays for each in self.wrappers}.values()
        )


ADD = (("a", "b"), "return (mixed(n, a, b),)")
PASS = (("a", "b"), "return (mixed(n, a, b), b)")


def call(index: int, targets: str, arguments: str, dead: str = "") -> list[str]:
    """Lines that call a partition, as Inductor writes them."""
    listed = f"partition{index}_args"
    return [
        f"{listed} = [{arguments}, n]",
        *([f"del {dead}"] if dead else []),
        f"({targets},) = self.partitions[{index}]({listed})",
        f"del {listed}",
    ]


LINES = [
    *call(0, "y", "x, w"),
    "z = torch.ops.toy.attn_new.default(y, layer='')",
    *call(1, "v, u", "z, y", "z"),
    "return (v, u, w, )",
]


def inputs(step: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(3)] + [2]


def check(written: Written, args: list[Any], step: int) -> None:
    """One step on new values, against the partitions as they are."""
    for held, value in zip(args, inputs(step), strict=True):
        if isinstance(held, torch.Tensor):
            held.copy_(value)
    twin = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    failed: list[type] = []
    results: list[Any] = []
    for run, given_args in ((lambda *a: written.plain(list(a)), twin), (written, args)):
        try:
            results.append(run(*given_args))
        except ValueError as error:
            failed.append(type(error))
    assert len(failed) in (0, 2)
    if not failed:
        expected, actual = results
        torch.testing.assert_close(list(actual), list(expected))
    torch.testing.assert_close(args, twin)


def test_a_step_is_one_function():
    written = Written([ADD, PASS], LINES)
    args = inputs()
    for step in range(6):
        check(written, args, step)
        assert written.is_planned == (step >= 2)
        assert written.num_replays == 2 * step
    (text,) = written.steps._between()._codes
    assert "self.partitions" not in text
    assert [line.strip() for line in text.splitlines()[5:9]] == [
        "(y,) = held_0",
        "z = torch_ops_toy_attn_new_default(y, layer='')",
        "assert z.shape == shape_1_0, 'shapes are those of the key'",
        "copy_1_0(z)",
    ]


def test_inputs_that_move_or_change_are_captured_again():
    written = Written([ADD, PASS], LINES)
    args = inputs()
    for step in range(12):
        if step == 4:
            args[1] = args[1].clone()
        if step == 8:
            args[3] = 5
        check(written, args, step)
        assert written.is_planned == (step not in (0, 1, 4, 8))


def test_another_object_at_the_same_address_is_the_same():
    written = Written([ADD, PASS], LINES)
    args = inputs()
    for step in range(6):
        check(written, [arg[:] if isinstance(arg, torch.Tensor) else arg for arg in args], step)
    assert written.is_planned
    assert written.wrappers[0].counts(KEY).captures == 1


def test_what_is_written_and_handed_on_is_the_copy():
    reused = (("a", "b"), "a.add_(1); return (mixed(n, a, b), a)")
    lines = [*LINES[:4], *call(1, "v, z", "z, y", "z"), "return (v, z, )"]
    written = Written([ADD, reused], lines)
    args = inputs()
    for step in range(5):
        check(written, args, step)
    assert written.is_planned


def test_dropped_and_reset_graphs_end_their_plan():
    written = Written([ADD, PASS], LINES)
    args = inputs()
    for step, stop in enumerate(("drop", "reset")):
        for i in range(4):
            check(written, args, 4 * step + i)
        assert written.is_planned
        for runner in written.programs.runners:
            runner.drop(KEY) if stop == "drop" else runner.reset()
        assert not written.is_planned
    check(written, args, 9)


def test_an_error_midway_leaves_the_plan_usable(monkeypatch):
    lines = [*LINES[:4], "y2 = torch.ops.toy.hook.default(y)", *LINES[4:]]
    written = Written([ADD, PASS], lines)
    args = inputs()

    def fail(x: torch.Tensor) -> None:
        raise ValueError("midway")

    for step in range(8):
        monkeypatch.setattr(toy, "hooks", [fail] if step in (1, 4, 6) else [])
        check(written, args, step)
    assert written.is_planned
    assert written.steps._starting is None


@pytest.mark.parametrize("wrapping", [{"verify": True}, {"check_addresses": True}])
def test_checks_of_every_replay_leave_no_plan(wrapping):
    written = Written([ADD, PASS], LINES, **wrapping)
    args = inputs()
    for step in range(4):
        check(written, args, step)
    assert not written.is_planned


def test_what_an_op_returns_of_its_arguments_is_looked_at_in_each_step():
    written = Written([ADD, PASS], [line.replace("attn_new", "attn_view") for line in LINES])
    args = inputs()
    for step in range(5):
        check(written, args, step)
    assert not written.is_planned
    assert written.num_replays == 2 * 4


def test_a_call_within_a_step_runs_partitions_as_they_are(monkeypatch):
    lines = [*LINES[:4], "y2 = torch.ops.toy.hook.default(y)", *LINES[4:]]
    written = Written([ADD, PASS], lines)
    args = inputs()
    nested = inputs(7)

    def call_again(x: torch.Tensor) -> None:
        toy.hooks.clear()
        within = written._code.current_callable(list(nested))
        torch.testing.assert_close(list(within), list(written.plain(list(nested))))

    for step in range(5):
        monkeypatch.setattr(toy, "hooks", [call_again])
        check(written, args, step)
    assert written.num_replays == 2 * 4


@pytest.mark.parametrize(
    "line",
    [
        "for i in range(3): pass",
        "partition0_args = [x]",
        "partition0_args = [x]\ny = x",
        "partition0_args = [x]\ny = self.partitions[0](partition0_args)",
    ],
)
def test_code_of_another_form_is_not_planned(line):
    body = "\n".join(f"    {part}" for part in line.split("\n"))
    with pytest.raises(PartitionError, match="Inductor's code"):
        Between(ast.parse(f"def call(self, args):\n    x, = args\n{body}").body[0], {}, {})


def test_steps_are_not_planned_where_code_has_another_form(caplog):
    """That is told where steps are to be planned, once; they run as they are."""
    written = Written([ADD, PASS], ["for i in range(1): pass", *LINES])
    args = inputs()
    assert caplog.messages == []
    for step in range(8):
        check(written, args, step)
    assert not written.is_planned
    assert written.num_replays == 2 * 7
    (message,) = caplog.messages
    assert message == (
        "steps of partitions are not planned: PartitionError: Inductor's code has a For"
    )


# --- random programs ---------------------------------------------------------------------------

OPS = {
    "new": "{made} = torch.ops.toy.attn_new.default({a}, layer='')",
    "pair": "{made} = torch.ops.toy.attn_pair.default({a})",
    "out": "torch.ops.toy.attn_out.default({a}, {b}, layer='')",
    "state": "{made} = torch.ops.toy.attn_state.default({a}, w[0])",
    "hook": "{made} = torch.ops.toy.hook.default({a})",
    "alias": "{made} = {a}",
    "view": "{made} = {a}[1:]",
    "align": "x = copy_if_misaligned(x)",
    "again": "x = x * 2",
}
BODIES = {
    "one": "return ({mixed},)",
    "two": "return ({mixed}, {mixed} * 2)",
    "passed": "return ({mixed}, {first})",
    "both": "return ({first}, {mixed})",
}


@st.composite
def graphs(draw: st.DrawFn) -> Written:
    """A graph of up to four partitions, with ops of all kinds between them."""
    names, pairs, whole = ["x", "w", "f"], set(), ["x", "w", "f"]
    partitions: list[tuple[list[str], str]] = []
    lines: list[str] = []
    for number in range(draw(st.integers(1, 4))):
        taken = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
        taken.sort(key=lambda name: (name in pairs, name == "f"))
        read = [f"{name}[0]" if name in pairs else name for name in taken]
        can_pass = taken[0] not in pairs and taken[0] != "f"
        kind = draw(st.sampled_from([*BODIES] if can_pass else ["one", "two"]))
        all_mixed = f"mixed(n, {', '.join(read)})"
        partitions.append((taken, BODIES[kind].format(mixed=all_mixed, first=taken[0])))
        made = [f"p{number}_0"] if kind != "two" else [f"p{number}_0", f"p{number}_1"]
        targets = {"passed": [*made, taken[0]], "both": [taken[0], *made]}.get(kind, made)
        lines += call(number, ", ".join(targets), ", ".join(taken))
        names += made
        whole += made
        for i in range(draw(st.integers(0, 3))):
            op = draw(st.sampled_from([*OPS]))
            plain = [name for name in names if name not in pairs]
            a = draw(st.sampled_from(whole if op in ("out", "state") else plain))
            b = draw(st.sampled_from([name for name in whole if name != a]))
            target = f"v{number}_{i}"
            lines.append(OPS[op].format(made=target, a=a, b=b))
            if "{made}" in OPS[op]:
                names.append(target)
            if op == "pair":
                pairs.add(target)
    returned = [name for name in names if name not in pairs][-4:]
    return Written(partitions, [*lines, f"return ({', '.join(returned)},)"])


EVENTS = st.lists(st.sampled_from(["", "", "", "move", "fail", "fresh"]), min_size=6, max_size=9)


@settings(max_examples=60, deadline=None)
@given(written=graphs(), events=EVENTS)
def test_random_graphs_by_plan_equal_those_as_they_are(written, events):
    args = inputs()

    def fail(x: torch.Tensor) -> None:
        raise ValueError("midway")

    for step, event in enumerate(events):
        if event == "move":
            args[1] = args[1].clone()
            for runner in written.programs.runners:
                runner.drop(KEY)  # as whoever looks after weights does
        if event == "fresh":
            args[2] = args[2].clone()
        toy.hooks[:] = [fail] if event == "fail" else []
        try:
            check(written, args, step)
        finally:
            toy.hooks.clear()
