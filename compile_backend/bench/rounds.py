"""Wall and host time of several ways to run a step, interleaved, so that drift hits all alike.

What a step does is not known here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from compile_backend.bench.figures import spread

Step = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Clock:
    """Times work on one device.

    Attributes:
        device: what is waited for; a CPU is never behind.
    """

    device: torch.device

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, step: Step) -> float:
        """Of one call, until its work on the device is done."""
        self.wait()
        start = time.perf_counter()
        step()
        self.wait()
        return time.perf_counter() - start

    def wall_ms(self, step: Step, num_steps: int) -> float:
        """Wall time of a step within a run of steps."""

        def run() -> None:
            for _ in range(num_steps):
                step()

        return self.seconds(run) / num_steps * 1e3

    def host_us(
        self, ways: Mapping[str, Step], num_steps: int, *, in_a_row: bool = False
    ) -> dict[str, list[float]]:
        """Host time of every step on an idle device; the ways take turns at each step.

        Args:
            ways: by name.
            num_steps: of each that are timed.
            in_a_row: whether a step of the same way comes right before each.
        """
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(num_steps):
            for name, step in ways.items():
                if in_a_row:
                    step()
                self.wait()
                start = time.perf_counter()
                step()
                times[name].append((time.perf_counter() - start) * 1e6)
        self.wait()
        return times


@dataclass(frozen=True, slots=True)
class Times:
    """What each round measured.

    Attributes:
        wall_ms: of a step in a run of steps.
        host_us: the median step on an idle device.
    """

    wall_ms: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Median and spread of both."""
        return {"wall_ms": spread(self.wall_ms), "host_us": spread(self.host_us)}


def measure(
    ways: Mapping[str, Step],
    clock: Clock,
    *,
    num_rounds: int,
    num_steps: int,
    in_a_row: bool = False,
    before: Callable[[], object] = lambda: None,
    advance: Callable[[], object] = lambda: None,
) -> dict[str, Times]:
    """Time every way in every round.

    Args:
        ways: by name; warm already.
        clock: of their device.
        num_rounds: how often all of it is done.
        num_steps: of each way, for the wall time and again for the host time.
        in_a_row: whether for the host time a step of the same way comes right before each, as in a
            serving loop; without, it finds what the others left in the processor's caches.
        before: called before each half of a round.
        advance: called after each way and half.
    """
    times = {name: Times() for name in ways}
    for _ in range(num_rounds):
        before()
        for name, step in ways.items():
            times[name].wall_ms.append(clock.wall_ms(step, num_steps))
            advance()
        before()
        for name, values in clock.host_us(ways, num_steps, in_a_row=in_a_row).items():
            times[name].host_us.append(statistics.median(values))
            advance()
    return times
