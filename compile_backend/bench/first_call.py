"""One process of the start-up benchmark: makes a model, runs its first step, tells what it took.

python -m compile_backend.bench.first_call '{"shape": "tiny", "way": "static", ...}'
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from compile_backend.backend import CudagraphModesBackend, cudagraph_modes, stats
from compile_backend.bench.paged_batches import decode
from compile_backend.bench.paged_ways import on_paged_cache, runner_of_all_sizes
from compile_backend.bench.request import OURS, PAGED, STATIC
from compile_backend.bench.rounds import Clock
from compile_backend.bench.shapes import SHAPES, make_model
from compile_backend.bench.static_steps import StaticSteps, compiled_for

if TYPE_CHECKING:
    from compile_backend.bench.shapes import Shape


def main(text: str) -> None:
    """Run one process.

    Args:
        text: JSON: `shape`, `device`, `path`, `variant` of torch or `ours`, `mode`, `options`,
            `attention`; `layers` for another depth than the shape's.
    """
    asked = json.loads(text)
    shape = SHAPES[asked["shape"]]
    if "layers" in asked:
        shape = shape.with_layers(asked["layers"])
    with torch.no_grad():
        start = time.perf_counter()
        model = make_model(shape, torch.device(asked["device"]))
        model_s = time.perf_counter() - start
        told = {STATIC: _static, PAGED: _paged}[asked["path"]](model, shape, asked)
    sys.stdout.write(json.dumps({"model_s": model_s, **told}) + "\n")


def _static(model: Any, shape: Shape, asked: dict[str, Any]) -> dict[str, Any]:
    backend_s = _seconds_of_backend()
    is_ours = asked["variant"] == OURS
    name = asked["mode"] if is_ours else asked["variant"]
    made: list[Any] = []

    def compile_and_run(**inputs: Any) -> Any:
        made.append(compiled_for(model, name, asked["options"]))
        return made[-1](**inputs)

    first_s = Clock(model.device).seconds(StaticSteps(model, shape).step(compile_and_run))
    (compiled,) = made
    of_ours = {"backend_s": sum(backend_s), **_counts(compiled)} if is_ours else {}
    return {"first_call_s": first_s, **of_ours}


def _paged(model: Any, shape: Shape, asked: dict[str, Any]) -> dict[str, Any]:
    backend_s, options = _seconds_of_backend(), asked["options"]
    paged = on_paged_cache(model, shape, asked["attention"])
    made: list[Any] = []

    def compile_and_capture() -> None:
        compiled = torch.compile(paged.module, backend=cudagraph_modes, options=options)
        runner = runner_of_all_sizes(compiled, paged, asked["mode"], shape, options=options)
        runner.capture(progress=False)
        runner.run(decode(shape, 1).batch)
        made.extend((compiled, runner))

    first_s = Clock(model.device).seconds(compile_and_capture)
    compiled, runner = made
    capture_s = sum(runner.report().capture_s.values())
    counts = {"backend_s": sum(backend_s), **_counts(compiled)}
    return {"first_call_s": first_s, **counts, "capture_s": capture_s}


def _seconds_of_backend() -> list[float]:
    """Seconds of each call of this backend from now on: what of a first call is not Dynamo's."""
    seconds: list[float] = []
    original = CudagraphModesBackend.__call__

    def timed(backend: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(backend, *args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    CudagraphModesBackend.__call__ = timed  # type: ignore[method-assign, assignment]
    return seconds


def _counts(compiled: Any) -> dict[str, Any]:
    report = stats(compiled)
    return {
        "compiles": report.compiles,
        "compile_s": report.compile_s,
        "loads": report.loads,
        "load_s": report.load_s,
    }


if __name__ == "__main__":
    main(sys.argv[1])
