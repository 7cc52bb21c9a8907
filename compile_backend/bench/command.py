"""`cudagraph-modes bench`: its arguments, what they ask for, and what is shown of the results."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_backend.bench.request import (
    MODES,
    PATHS,
    VARIANTS,
    BenchRequest,
    available_variants,
    default_shape,
)
from compile_backend.bench.shapes import SHAPES
from compile_backend.config import CUDAGraphMode
from compile_backend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from compile_backend.bench.results import Results
    from compile_backend.bench.watch import Watch

logger = logging.getLogger(__name__)

_MODE = "cudagraph_mode"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that only this command has."""
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        help="the model: "
        + "; ".join(f"{shape.name} is {shape.about}" for shape in SHAPES.values())
        + " (default: 0.6B on a GPU, tiny on a CPU)",
    )
    parser.add_argument(
        "--variants",
        metavar="NAMES",
        help="what to compare, with commas between: "
        + "; ".join(f"{name} is {variant.about}" for name, variant in VARIANTS.items())
        + " (default: all that can run here)",
    )
    parser.add_argument(
        "--modes", metavar="NAMES", help=f"of this backend (default: {','.join(MODES)})"
    )
    parser.add_argument(
        "--paths",
        default=",".join(PATHS),
        metavar="NAMES",
        help="static: torch.compile and a static cache, one request; paged: a runner and a paged "
        "cache, several batches (default: both)",
    )
    parser.add_argument(
        "--attention",
        default="auto",
        metavar="NAMES",
        help="attention backends of the paged cache (default: auto)",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="all variants run in each (default: 5)"
    )
    parser.add_argument(
        "--steps", type=int, default=20, metavar="N", help="of a variant in a round (default: 20)"
    )
    parser.add_argument(
        "--start-up",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure first calls, cold and warm, in processes of their own (default: do)",
    )
    parser.add_argument(
        "--fewer-guards",
        action="store_true",
        help="measure what is compiled on the static path with guards on arguments only, too "
        "(keep_argument_guards_unsafe)",
    )
    parser.add_argument(
        "--growth", action="store_true", help="measure growth against layers and capture sizes"
    )
    parser.add_argument(
        "--out", type=Path, metavar="PATH", help="write PATH.json, PATH.md and plots PATH-*.png"
    )


def request_of(
    parsed: argparse.Namespace, options: Mapping[str, Any], device: torch.device
) -> tuple[BenchRequest, list[str]]:
    """What arguments ask for, and a line for each variant that is left out.

    Args:
        parsed: the arguments.
        options: of the backend; a mode among them stands for `--modes`.
        device: where to measure.

    Raises:
        ConfigError: they ask for what cannot be.
    """
    options = dict(options)
    modes = MODES
    if parsed.modes is not None:
        modes = tuple(_mode(name, "--modes") for name in _names(parsed.modes))
    if _MODE in options:
        if parsed.modes is not None:
            raise ConfigError(
                "--modes", parsed.modes, f"and {_MODE} were both given", "leave one of them out"
            )
        modes = (_mode(str(options.pop(_MODE)), _MODE),)
    variants, left_out = available_variants(device)
    if parsed.variants is not None:
        variants, left_out = _names(parsed.variants), []
    request = BenchRequest(
        shape=default_shape(device) if parsed.shape is None else SHAPES[parsed.shape],
        device=device,
        variants=variants,
        modes=modes,
        paths=_names(parsed.paths),
        attention=_names(parsed.attention),
        options=options,
        num_rounds=parsed.rounds,
        num_steps=parsed.steps,
        has_growth=parsed.growth,
        has_start_up=parsed.start_up,
        has_fewer_guards=parsed.fewer_guards,
    )
    return request, left_out


def run(
    parsed: argparse.Namespace,
    options: Mapping[str, Any],
    device: torch.device,
    watch: Watch,
    command: str,
) -> bool:
    """Measure, show and write.

    Args:
        parsed: the arguments.
        options: of the backend.
        device: where to measure.
        watch: is told what happens.
        command: the whole of it, for the results.

    Returns:
        Whether nothing failed.

    Raises:
        ConfigError: the arguments ask for what cannot be.
    """
    request, left_out = request_of(parsed, options, device)
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "--shape",
            request.shape.name,
            "needs the package transformers, which is not installed",
            "run `pip install 'cudagraph-modes[bench]'`",
        )
    if parsed.out is not None:
        _check_out(parsed.out)
    from compile_backend.bench.suite import CPU_NOTE, run_suite  # noqa: PLC0415 - needs it

    if device.type != "cuda":
        logger.warning("there is no GPU; %s runs on the CPU. %s", request.shape.name, CPU_NOTE)
    for line in left_out:
        logger.info("%s", line)

    def keep(so_far: Results) -> None:
        if parsed.out is not None:
            so_far.write(parsed.out)

    results = run_suite(request, watch, command=command, notes=left_out, keep=keep)
    sys.stdout.write(
        f"{json.dumps(results.as_dict(), indent=2)}\n" if parsed.json else results.markdown()
    )
    if parsed.out is not None:
        _write(results, parsed.out)
    return not results.failures


def _check_out(out: Path) -> None:
    """Make the directory of the results, and refuse one that cannot hold them, before all else."""
    fix = "name a file in a directory that you may write to"
    if not out.name:
        raise ConfigError("--out", str(out), "names no file", fix)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        problem = f"cannot be written: {error.strerror}: {error.filename}"
        raise ConfigError("--out", str(out), problem, fix) from error
    for path in (Path(f"{out}.json"), Path(f"{out}.md")):
        if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
            raise ConfigError("--out", str(out), f"cannot be written, since {path} is there", fix)


def _write(results: Results, out: Path) -> None:
    from compile_backend.bench.plots import draw  # noqa: PLC0415 - comes with the suite

    for path in (*results.write(out), *draw(results, out)):
        logger.info("wrote %s", path)


def _mode(name: str, option: str) -> str:
    return CUDAGraphMode.parse(name, option=option).name


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
