"""The capture of a runner's plan: all warm-ups first, then the graphs, the largest first."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from compile_backend.capture_session import CaptureKeys
from compile_backend.context import enter_capture_session
from compile_backend.progress import capture_progress

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from compile_backend.batch import BatchDescriptor
    from compile_backend.config import CUDAGraphMode
    from compile_backend.dispatch import Route
    from compile_backend.graph_engine import GraphEngine
    from compile_backend.runner_report import CaptureMeter


class CapturedKeys(NamedTuple):
    """What became of a plan.

    Attributes:
        warm_up_s: seconds of the warm-ups.
        left_out: modes and keys that are too large, with the bytes that each would take.
    """

    warm_up_s: float
    left_out: dict[Route, int]


def capture_keys(
    plan: Sequence[tuple[CUDAGraphMode, Sequence[BatchDescriptor]]],
    warm_up: Callable[[CUDAGraphMode, BatchDescriptor], None],
    engine: GraphEngine,
    meter: CaptureMeter,
    *,
    progress: bool,
    max_bytes: int | None = None,
) -> CapturedKeys:
    """Warm up and capture keys.

    Args:
        plan: the modes and their keys.
        warm_up: runs a key's step eagerly; whoever will hold its graph remembers it.
        engine: captures.
        meter: measures each capture.
        progress: show how far it is.
        max_bytes: of device memory for all graphs together, as the peaks of the warm-ups tell it;
            see `beyond`.
    """
    session = CaptureKeys()
    peaks: dict[Route, int] = {}
    met: dict[Route, list[Hashable]] = {}
    number = sum(len(keys) for _, keys in plan)
    start = time.perf_counter()
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        capture_progress(number, meter, is_shown=progress) as advance,
    ):
        with enter_capture_session(session), engine.session():
            for mode, keys in plan:
                for key in keys:
                    advance.warm_up(mode, key)
                    if max_bytes is None:
                        warm_up(mode, key)
                        continue
                    known = len(session.keys())
                    peaks[mode, key] = meter.peak(functools.partial(warm_up, mode, key))
                    met[mode, key] = session.keys()[known:]
        warm_up_s = time.perf_counter() - start
        left_out = {} if max_bytes is None else beyond(peaks, max_bytes)
        for left in left_out:
            session.forget(met[left])
        # Of pieces, only the last is captured by this engine: one series for all of them.
        with enter_capture_session(None), engine.session(thorough=True):
            session.run(advance.capture)
    return CapturedKeys(warm_up_s, left_out)


def beyond(peaks: Mapping[Route, int], max_bytes: int) -> dict[Route, int]:
    """The keys whose graphs do not fit into a limit any more, with what each takes.

    Graphs of a mode share a memory pool, so a mode takes what its largest key does. The smallest
    keys are kept first, for they save most; at equal sizes those of FULL.

    Args:
        peaks: memory that a run of each key takes.
        max_bytes: for all modes together.
    """
    largest: dict[CUDAGraphMode, int] = {}
    left_out = {}
    for (mode, key), num_bytes in sorted(
        peaks.items(), key=lambda item: (item[0][1].num_tokens, -item[0][0].value)
    ):
        taken = {**largest, mode: max(num_bytes, largest.get(mode, 0))}
        if sum(taken.values()) > max_bytes:
            left_out[mode, key] = num_bytes
        else:
            largest = taken
    return left_out


def told(left_out: Mapping[Route, int], max_bytes: int) -> str:
    """Which sizes have no graphs since they would take too much memory."""
    sizes: dict[str, set[int]] = {}
    for mode, key in left_out:
        sizes.setdefault(mode.name, set()).add(key.num_tokens)
    rows = (f"{name} of {', '.join(map(str, sorted(sizes[name])))} tokens" for name in sizes)
    return (
        f"without graphs: {'; '.join(rows)}; with all of them, graphs would take more than "
        f"max_bytes={max_bytes} (the largest {max(left_out.values())}); their batches run at "
        "a lower mode; for graphs raise the limit"
    )
