"""The capture of a runner's plan: all warm-ups first, then the graphs, the largest first."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from compile_backend.capture_session import CaptureKeys
from compile_backend.context import enter_capture_session
from compile_backend.progress import capture_progress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from compile_backend.batch import BatchDescriptor
    from compile_backend.config import CUDAGraphMode
    from compile_backend.graph_engine import GraphEngine
    from compile_backend.runner_report import CaptureMeter


def capture_keys(
    plan: Sequence[tuple[CUDAGraphMode, Sequence[BatchDescriptor]]],
    warm_up: Callable[[CUDAGraphMode, BatchDescriptor], None],
    engine: GraphEngine,
    meter: CaptureMeter,
    *,
    progress: bool,
) -> float:
    """Warm up and capture keys.

    Args:
        plan: the modes and their keys.
        warm_up: runs a key's step eagerly; whoever will hold its graph remembers it.
        engine: captures.
        meter: measures each capture.
        progress: show how far it is.

    Returns:
        Seconds of the warm-ups.
    """
    session = CaptureKeys()
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
                    warm_up(mode, key)
        warm_up_s = time.perf_counter() - start
        with enter_capture_session(None):
            session.run(advance.capture)
    return warm_up_s
