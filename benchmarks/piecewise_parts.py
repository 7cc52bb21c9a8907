"""Host time of a PIECEWISE step: its graphs, its attention calls, and what it takes beyond them.

What one step launches is run once more by itself, in rounds with the step: all of it in the step's
order by a bare loop, which is what the step is held against, and its graphs and its calls alone.
Beyond that are the batch, its way to the device, metadata, and what the caller gets.

    python benchmarks/piecewise_parts.py --shape 0.6B --attention triton,flash_attn_3
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from compile_backend import replay_plan
from compile_backend.bench.figures import cell, spread
from compile_backend.bench.paged_batches import decode
from compile_backend.bench.paged_ways import make_runner, on_paged_cache, run_at
from compile_backend.bench.rounds import Clock, measure
from compile_backend.bench.shapes import SHAPES, make_model
from compile_backend.config import CUDAGraphMode
from compile_backend.context import ForwardContext, SetBy, enter_forward_context

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from compile_backend.bench.rounds import Step, Times
    from compile_backend.runner import GraphModelRunner

PIECEWISE = CUDAGraphMode.PIECEWISE
COLUMNS = (
    ("whole step", "host_us"),
    ("graphs and attention", "host_us"),
    ("graphs alone", "host_us"),
    ("attention alone", "host_us"),
    ("step at FULL", "host_us"),
    ("whole step", "wall_ms"),
    ("step at FULL", "wall_ms"),
)


class Launch(NamedTuple):
    """A replay, or a call between two."""

    is_graph: bool
    call: Callable[..., Any]
    given: list[Any]


@dataclass(frozen=True, slots=True)
class Sections:
    """What a replay plan was made of."""

    split: Any
    calls: Mapping[str, Callable[..., Any]]
    held: Mapping[str, Sequence[Any]]

    def launches(self, inputs: Sequence[Any]) -> list[Launch]:
        """In the step's order, with their arguments in a step on these inputs."""
        values = dict(zip(self.split.inputs, inputs, strict=True))
        found: list[Launch] = []
        for section in self.split.sections:
            call, held = self.calls[section.name], self.held.get(section.name)
            if held is not None:
                values |= zip(section.outputs, held, strict=True)
                found.append(Launch(True, call, []))
            else:
                found.append(Launch(False, call, [values[name] for name in section.inputs]))
        return found


def noting(plans: list[Sections]) -> None:
    """Have each plan written down from now on."""
    stitch = replay_plan.stitch

    def noted(split: Any, calls: Any, *, held: Any) -> Any:
        plans.append(Sections(split, calls, held))
        return stitch(split, calls, held=held)

    replay_plan.stitch = noted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=("tiny", "0.6B", "8B"), default="0.6B")
    parser.add_argument("--attention", default="triton")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    device = torch.empty(0, device=arguments.device).device
    plans: list[Sections] = []
    noting(plans)
    names = [f"{name}, {'host us' if of == 'host_us' else 'wall ms'}" for name, of in COLUMNS]
    names += ["beyond graphs and attention, us a piece", "PIECEWISE : FULL"]
    print("| attention | pieces | " + " | ".join(names) + " |")
    print("|---|---|" + "---|" * len(names))
    with torch.no_grad():
        model, compiled = make_model(shape, device), None
        for attention in arguments.attention.split(","):
            paged = on_paged_cache(model, shape, attention)
            if compiled is None:
                compiled = torch.compile(paged.module, backend="cudagraph_modes")
            runner = make_runner(
                compiled,
                paged,
                "FULL_AND_PIECEWISE",
                options={},
                sizes=[1],
                max_num_seqs=1,
                max_num_tokens=1,
            )
            runner.capture(progress=False)
            work = decode(shape, 1)
            whole = run_at(runner, work, PIECEWISE)
            for _ in range(5):
                whole()
            ways = {"whole step": whole, **parts(runner, plans[-1], work.batch)}
            others = {name: ways.pop(name) for name in ("graphs alone", "attention alone")}
            others["step at FULL"] = run_at(runner, work)
            times: dict[str, Times] = {}
            # Each of the two is measured right after the other and itself, and nothing else.
            for some in (ways, others):
                times |= measure(
                    some,
                    Clock(device),
                    num_rounds=arguments.rounds,
                    num_steps=arguments.steps,
                    in_a_row=True,
                )
            rounds = {(name, of): getattr(times[name], of) for name, of in COLUMNS}
            beyond = [
                (step - launches) / len(plans[-1].held)
                for step, launches in zip(rounds[COLUMNS[0]], rounds[COLUMNS[1]], strict=True)
            ]
            ratios = [
                step / full
                for step, full in zip(rounds[COLUMNS[-2]], rounds[COLUMNS[-1]], strict=True)
            ]
            cells = [cell(spread(rounds[key]), 1 if key[1] == "host_us" else 3) for key in COLUMNS]
            cells += [cell(spread(beyond), 2), cell(spread(ratios), 3)]
            print(f"| {attention} | {len(plans[-1].held)} | " + " | ".join(cells) + " |")


def parts(runner: GraphModelRunner, plan: Sections, batch: Any) -> dict[str, Step]:
    """What a step launches, and its graphs and its attention calls, each by themselves."""
    steps = runner._captured.piecewise._steps
    ((key, step),) = steps.items()
    layout = runner._parts.loader.inputs.layout(1, 1)
    metadata = runner.builder.build(batch.attention, batch.query_lens, layout.tensors)
    launches = plan.launches(step.args)

    def running(chosen: Sequence[Launch]) -> Step:
        calls = [(each.call, each.given) for each in chosen]

        def run() -> None:
            with enter_forward_context(ForwardContext(metadata, PIECEWISE, key), SetBy.USER):
                for call, given in calls:
                    call(*given)

        return run

    return {
        "graphs and attention": running(launches),
        "graphs alone": running([each for each in launches if each.is_graph]),
        "attention alone": running([each for each in launches if not each.is_graph]),
    }


if __name__ == "__main__":
    main()
