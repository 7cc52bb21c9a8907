"""Small random programs give what eager gives, in every mode, on every call.

A program is a list of steps over values `[n, WIDTH]`: layers, every kind of op that stands for
attention, splits, shape reads, in-place writes, views. Its inputs are written to, expanded, share
memory, are empty, have no dimension; its outputs overlap. Compared are results, what became of the
inputs, and the persistent state, call by call at several sizes.
"""

from __future__ import annotations

import copy
import os
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from toy import MODES, WIDTH, compiled, rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from compile_backend.config import CUDAGraphMode

SIZES = (4, 8)
attention = torch.ops.toy


@dataclass(frozen=True)
class Program:
    """What one example runs.

    Attributes:
        steps: (kind, value, other value).
        outputs: (kind, value).
        inputs: how the second input relates to the first.
    """

    steps: tuple[tuple[str, int, int], ...]
    outputs: tuple[tuple[str, int], ...]
    inputs: str


class Model(torch.nn.Module):
    """Runs a program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.register_buffer("state", torch.zeros(WIDTH))
        self.register_buffer("table", torch.randn(4, WIDTH, generator=generator))

    def forward(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        expanded: torch.Tensor,
        ids: torch.Tensor,
        scalar: torch.Tensor,
        empty: torch.Tensor,
        number: int,
    ) -> list[Any]:
        extra = {"expanded": expanded, "ids": ids, "scalar": scalar, "number": number}
        values = [x, y]
        for kind, first, second in self.program.steps:
            a, b = values[first % len(values)], values[second % len(values)]
            made = STEP_KINDS[kind](self, a, b, extra)
            if made is not None:
                values.append(made)
        outputs: list[Any] = []
        for kind, index in self.program.outputs:
            value = values[index % len(values)]
            outputs.append(OUTPUT_KINDS[kind](value, y, empty))
        return outputs


def attention_out(a: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(a)
    attention.attn_out(a, out)
    return out


def attention_pair(a: torch.Tensor) -> torch.Tensor:
    mean, largest = attention.attn_pair(a)
    return mean - largest.unsqueeze(-1)


def of_left_half(a: torch.Tensor) -> torch.Tensor:
    left, right = torch.split(a, WIDTH // 2, dim=-1)
    return torch.cat((right, attention.attn_new(left)), -1)


def reshaped(a: torch.Tensor) -> torch.Tensor:
    n = a.shape[0]
    return attention.attn_new(a).reshape(-1).view(n, WIDTH) + n


def nothing(*_: torch.Tensor) -> None:
    """For steps that only write."""


STEP_KINDS: dict[str, Callable[[Model, torch.Tensor, torch.Tensor, dict[str, Any]], Any]] = {
    "linear": lambda model, a, b, extra: torch.relu(a @ model.weight),
    "attn_new": lambda model, a, b, extra: attention.attn_new(a, "layers.0"),
    "attn_out": lambda model, a, b, extra: attention_out(a),
    "attn_pair": lambda model, a, b, extra: attention_pair(a),
    "attn_view": lambda model, a, b, extra: attention.attn_view(a).flatten(1) + 1,
    "attn_state": lambda model, a, b, extra: attention.attn_state(a, model.state) * 0.5,
    "add": lambda model, a, b, extra: a + b,
    "write": lambda model, a, b, extra: nothing(a.mul_(0.5)),
    "write_part": lambda model, a, b, extra: nothing(a[1:].add_(1)),
    "shift": lambda model, a, b, extra: nothing(a[1:].copy_(a[:-1] * 2)),
    "split": lambda model, a, b, extra: of_left_half(a),
    "chunk": lambda model, a, b, extra: torch.cat(tuple(reversed(a.chunk(3, -1))), -1) * 2,
    "shape": lambda model, a, b, extra: reshaped(a),
    "transposed": lambda model, a, b, extra: a.t().contiguous().t(),
    "lookup": lambda model, a, b, extra: a + model.table[extra["ids"]],
    "scale": lambda model, a, b, extra: a * extra["scalar"] + extra["number"],
    "plus expanded": lambda model, a, b, extra: a + extra["expanded"],
    # Values that share memory.
    "view": lambda model, a, b, extra: a.view_as(b) if a.is_contiguous() else a,
    "attn_alias": lambda model, a, b, extra: attention.attn_view(a).flatten(1),
    # Values with stride 0.
    "expand": lambda model, a, b, extra: a.sum(0, keepdim=True).expand(a.shape[0], WIDTH),
}

OUTPUT_KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]] = {
    "value": lambda value, y, empty: value,
    "more": lambda value, y, empty: value + 1,
    "sum": lambda value, y, empty: value.sum(),
    "size": lambda value, y, empty: value.shape[0],
    "none": lambda value, y, empty: None,
    "empty": lambda value, y, empty: empty + 1,
    "input": lambda value, y, empty: y[: y.shape[0] // 2],
    # Values that share memory.
    "rows": lambda value, y, empty: value[1:],
    "columns": lambda value, y, empty: value.t(),
}

STEPS = tuple(kind for kind in STEP_KINDS if kind not in ("view", "attn_alias", "expand"))
READING_STEPS = tuple(kind for kind in STEPS if kind not in ("write", "write_part", "shift"))
OUTPUTS = tuple(kind for kind in OUTPUT_KINDS if kind not in ("rows", "columns"))
INPUTS = ("separate", "separate", "same", "overlapping", "columns")


def programs(steps: tuple[str, ...], outputs: tuple[str, ...]) -> st.SearchStrategy[Program]:
    index = st.integers(0, 5)
    return st.builds(
        Program,
        st.lists(st.tuples(st.sampled_from(steps), index, index), min_size=1, max_size=7).map(
            tuple
        ),
        st.lists(st.tuples(st.sampled_from(outputs), index), min_size=1, max_size=3).map(tuple),
        st.sampled_from(INPUTS),
    )


def arguments(program: Program, n: int, seed: int) -> tuple[Any, ...]:
    """Fresh random inputs of `n` rows."""
    generator = torch.Generator().manual_seed(seed)
    x = rows(n, seed=2 * seed)
    y = {
        "separate": lambda: rows(n, seed=2 * seed + 1),
        "same": lambda: x,
        "overlapping": lambda: rows(n + 1, seed=2 * seed)[1:],
        "columns": lambda: rows(n, 2 * WIDTH, seed=seed)[:, WIDTH:],
    }[program.inputs]()
    if program.inputs == "overlapping":
        base = rows(n + 1, seed=2 * seed)
        x, y = base[:-1], base[1:]
    return (
        x,
        y,
        rows(1, seed=seed).expand(n, WIDTH),
        torch.randint(0, 4, (n,), generator=generator),
        torch.tensor(0.5 + seed % 3),
        torch.empty(0, 3),
        3,
    )


def check(
    program: Program, mode: CUDAGraphMode, sizes: list[int], dynamic: bool | None, **options: Any
) -> None:
    """Run a program eagerly and compiled at several sizes and compare what can be seen.

    Results are written to, which shows what shares memory with them.
    """
    torch._dynamo.reset()
    model = Model(program)
    eager = copy.deepcopy(model)
    options = {"cudagraph_mode": mode.name, "cudagraph_capture_sizes": SIZES, **options}
    run = compiled(model, dynamic=dynamic, **options)
    earlier: list[tuple[Any, Any]] = []
    with torch.no_grad():
        for seed, n in enumerate(sizes):
            args, eager_args = arguments(program, n, seed), arguments(program, n, seed)
            actual, expected = run(*args), eager(*eager_args)
            torch.testing.assert_close(actual, expected, equal_nan=True)
            torch.testing.assert_close(args, eager_args, equal_nan=True)
            torch.testing.assert_close(model.state, eager.state)
            for mine, theirs in zip(actual, expected, strict=True):
                if torch.is_tensor(mine) and mine.is_floating_point() and 0 not in mine.stride():
                    mine.add_(1)
                    theirs.add_(1)
            torch.testing.assert_close((actual, args), (expected, eager_args), equal_nan=True)
            if options.get("cudagraph_clone_outputs", True):
                for kept, before in earlier:
                    torch.testing.assert_close(kept, before, equal_nan=True)
                earlier.append((actual, copy.deepcopy(actual)))


def made_anew(share: float) -> Callable[[torch.fx.Graph], None]:
    """A pass of a user's that writes some calls once more and tells no value of them."""

    def rewritten(graph: torch.fx.Graph) -> None:
        chosen = random.Random(0)
        for node in list(graph.nodes):
            if node.op in ("call_function", "call_method") and chosen.random() < share:
                with graph.inserting_before(node):
                    copied = graph.node_copy(node, lambda source: source)
                copied.meta = {}
                node.replace_all_uses_with(copied)
                graph.erase_node(node)

    return rewritten


# Every example compiles. For a search, ask for more of them: RANDOM_GRAPHS=500 pytest ...
_asked = os.environ.get("RANDOM_GRAPHS")
PROFILE = settings(
    max_examples=int(_asked or 15),
    deadline=None,
    derandomize=True,
    database=None,
    phases=tuple(Phase) if _asked else (Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
MODES_OF_INTEREST = st.sampled_from([mode for mode in MODES if mode.value != 0])


@PROFILE
@given(
    program=programs(STEPS, OUTPUTS),
    mode=MODES_OF_INTEREST,
    sizes=st.lists(st.sampled_from((4, 4, 8, 5)), min_size=3, max_size=6),
    dynamic=st.sampled_from((None, True)),
    copies=st.booleans(),
    clones=st.booleans(),
)
def test_random_programs_equal_eager(program, mode, sizes, dynamic, copies, clones):
    check(
        program,
        mode,
        sizes,
        dynamic,
        cudagraph_copy_inputs=copies,
        cudagraph_clone_outputs=clones,
    )


@PROFILE
@given(
    program=programs((*STEPS, "view", "attn_alias"), (*OUTPUTS, "rows", "columns")),
    mode=MODES_OF_INTEREST,
)
def test_random_programs_whose_values_share_memory_equal_eager(program, mode):
    check(program, mode, [8, 8, 8, 8], None)


@PROFILE
@given(
    program=programs((*READING_STEPS, "expand"), OUTPUTS),
    mode=MODES_OF_INTEREST,
)
def test_random_programs_with_expanded_values_equal_eager(program, mode):
    check(program, mode, [8, 8, 8], None)


@PROFILE
@given(
    program=programs((*STEPS, "view", "attn_alias"), (*OUTPUTS, "rows", "columns")),
    mode=MODES_OF_INTEREST,
    dynamic=st.sampled_from((None, True)),
    share=st.sampled_from((0.3, 1.0)),
)
def test_passes_that_keep_what_graphs_do_are_never_refused(program, mode, dynamic, share):
    passes = {"made_anew": made_anew(share)}
    check(program, mode, [8, 8, 8], dynamic, inductor_passes=passes)
