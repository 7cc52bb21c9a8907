"""Start-up, cold and warm: each way in a process of its own, twice over one new set of caches.

The first process of a way finds nothing that was compiled before, the second all that the first
left on disk. In one process alone, what one way compiled would be there for the next.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_backend.bench.request import (
    OURS,
    PAGED,
    PATHS,
    REDUCE_OVERHEAD,
    STATIC,
    TORCH_COMPILE,
)
from compile_backend.bench.watch import keeping
from compile_backend.cache import SIZE_VARIABLE
from compile_backend.config import CUDAGraphMode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from compile_backend.bench.request import BenchRequest
    from compile_backend.bench.watch import Watch

_TIMEOUT_S = 1800.0
_MOST_OF_AN_ERROR = 400


def start_up_results(
    request: BenchRequest, watch: Watch, failures: dict[str, str]
) -> dict[str, Any]:
    """Measure.

    Returns:
        By way, for `cold` and `warm`: seconds of the process, of making the model and of the first
        call, which for the runner is all of its captures and a step; for this backend also what
        was compiled and loaded.
    """
    found: dict[str, Any] = {}
    for name, asked in _ways(request):
        with keeping(failures, f"start-up | {name}"), tempfile.TemporaryDirectory() as directory:
            told = {}
            for temperature in ("cold", "warm"):
                with watch.phase(f"start {name}, {temperature}"):
                    told[temperature] = first_call(asked, Path(directory))
            found[name] = told
    return found


def _ways(request: BenchRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    asked = {
        "shape": request.shape.name,
        "device": str(request.device),
        "attention": request.attention[0],
        "options": dict(request.options),
    }
    for name in (TORCH_COMPILE, REDUCE_OVERHEAD):
        if request.measures(name, STATIC):
            yield name, {**asked, "path": STATIC, "variant": name}
    if OURS not in request.variants:
        return
    # What is compiled is the same for every mode, so one of them stands for all.
    both = CUDAGraphMode.FULL_AND_PIECEWISE.name
    mode = both if both in request.modes else request.modes[-1]
    for path in PATHS:
        if path in request.paths:
            name = f"{mode}, runner with all captures" if path == PAGED else mode
            yield name, {**asked, "path": path, "variant": OURS, "mode": mode}


def first_call(asked: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Run one process on the caches in a directory.

    Args:
        asked: as for `bench.first_call`.
        directory: of the caches.

    Returns:
        What the process told, and its seconds, `process_s`.

    Raises:
        RuntimeError: it failed, or took too long.
    """
    options = {**asked["options"], "cache_dir": str(directory / "ours")}
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor"),
        "TRITON_CACHE_DIR": str(directory / "triton"),
    }
    environment.pop(SIZE_VARIABLE, None)
    text = json.dumps({**asked, "options": options})
    start = time.perf_counter()
    result = subprocess.run(  # noqa: S603 - this program itself
        [sys.executable, "-m", "compile_backend.bench.first_call", text],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    process_s = time.perf_counter() - start
    if result.returncode:
        raise RuntimeError(result.stderr.strip()[-_MOST_OF_AN_ERROR:])
    told: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return {"process_s": process_s, **told}
