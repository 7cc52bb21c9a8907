"""What to measure, checked before anything slow starts."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from compile_backend.asked_names import check_asked
from compile_backend.attention.registry import AUTO, BACKENDS, lacking
from compile_backend.bench.shapes import SHAPES
from compile_backend.config import CompilationConfig, CUDAGraphMode
from compile_backend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from compile_backend.bench.shapes import Shape

EAGER = "eager"
TORCH_COMPILE = "torch.compile"
REDUCE_OVERHEAD = "reduce-overhead"
BY_HAND = "by-hand"
BREAKABLE = "breakable"
OURS = "ours"

STATIC, PAGED = "static", "paged"
PATHS = (STATIC, PAGED)
MODES = tuple(mode.name for mode in CUDAGraphMode)


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to run a model's steps.

    Attributes:
        about: in a few words.
        paths: where it is measured.
        needs_gpu: whether a CPU has nothing like it.
        package: what must be importable.
        requirement: what installs that.
    """

    about: str
    paths: tuple[str, ...]
    needs_gpu: bool = False
    package: str | None = None
    requirement: str = ""

    def problem(self, device: torch.device) -> tuple[str, str] | None:
        """Why it cannot be measured here, and what to do; None if it can."""
        if self.needs_gpu and device.type != "cuda":
            return "needs a GPU", "leave it out, or run on a machine with one"
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            return (
                f"needs the package {self.requirement}, which is not installed",
                f"run `pip install {self.requirement}`",
            )
        return None


VARIANTS = {
    EAGER: Variant("the model as it is", PATHS),
    TORCH_COMPILE: Variant("torch.compile(model)", (STATIC,)),
    REDUCE_OVERHEAD: Variant(
        'torch.compile(model, mode="reduce-overhead")', (STATIC,), needs_gpu=True
    ),
    BY_HAND: Variant("the compiled step in one CUDA graph", PATHS, needs_gpu=True),
    BREAKABLE: Variant(
        "the eager step in a graph that breaks at attention",
        (PAGED,),
        needs_gpu=True,
        package="breakable_cuda_graphs",
        requirement="breakable-cuda-graphs==0.1.0",
    ),
    OURS: Variant("this backend", PATHS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """What to measure, and how often.

    Attributes:
        shape: the model and its steps.
        device: where it runs.
        variants: names in `VARIANTS`.
        modes: of this backend.
        paths: on a static cache, on a paged one.
        attention: backends of the paged cache.
        options: of this backend, but for the mode.
        num_rounds: all ways are run in each.
        num_steps: of each way in a round.
        has_captures: whether to measure the capture of all sizes.
        has_growth: whether to measure growth against layers and sizes.
        has_start_up: whether to measure start-up, in processes of its own.
        has_fewer_guards: whether to measure what is compiled on the static path with fewer guards
            of Dynamo's, too.

    Raises:
        ConfigError: something of this cannot be.
    """

    shape: Shape
    device: torch.device
    variants: tuple[str, ...] = (EAGER, OURS)
    modes: tuple[str, ...] = MODES
    paths: tuple[str, ...] = PATHS
    attention: tuple[str, ...] = ("auto",)
    options: Mapping[str, Any] = field(default_factory=dict)
    num_rounds: int = 5
    num_steps: int = 20
    has_captures: bool = True
    has_growth: bool = False
    has_start_up: bool = False
    has_fewer_guards: bool = False

    def __post_init__(self) -> None:
        for option, number in (("--rounds", self.num_rounds), ("--steps", self.num_steps)):
            if number < 1:
                raise ConfigError(option, number, "measures nothing", "use 1 or more")
        _check_names("--variants", self.variants, VARIANTS)
        _check_names("--modes", self.modes, MODES)
        _check_names("--paths", self.paths, PATHS)
        _check_names("--attention", self.attention, [AUTO, *(row.name for row in BACKENDS)])
        for name in self.attention if PAGED in self.paths else ():
            missing = lacking(name, self.device)
            if missing is not None:
                raise ConfigError("--attention", name, "cannot run here", missing)
        for name in self.variants:
            problem = VARIANTS[name].problem(self.device)
            if problem is not None:
                raise ConfigError("--variants", name, *problem)
        if self.device.type != "cuda" and not self.shape.runs_on_cpu:
            small = ", ".join(shape.name for shape in SHAPES.values() if shape.runs_on_cpu)
            raise ConfigError(
                "--shape", self.shape.name, "is too large for a CPU", f"use one of {small}"
            )
        if self.has_growth:
            self.shape.with_layers(1)  # refuses depths that are given
        check_asked(self.config)

    @property
    def config(self) -> CompilationConfig:
        """The options, checked."""
        return CompilationConfig.from_options(self.options)

    def measures(self, variant: str, path: str) -> bool:
        """Whether a variant was asked for, and has that path."""
        return variant in self.variants and path in VARIANTS[variant].paths


def default_shape(device: torch.device) -> Shape:
    """What is measured where no shape is asked for."""
    return SHAPES["0.6B" if device.type == "cuda" else "tiny"]


def available_variants(device: torch.device) -> tuple[tuple[str, ...], list[str]]:
    """What is measured where no variants are asked for, and a line for each that is left out."""
    problems = {name: variant.problem(device) for name, variant in VARIANTS.items()}
    left_out = [
        f"{name} is left out: it {problem[0]}; {problem[1]}"
        for name, problem in problems.items()
        if problem is not None
    ]
    return tuple(name for name, problem in problems.items() if problem is None), left_out


def _check_names(
    option: str, names: Sequence[str], known: Sequence[str] | Mapping[str, Any]
) -> None:
    listed = ", ".join(known)
    if not names:
        raise ConfigError(option, names, "names nothing", f"use some of {listed}")
    for name in names:
        if name not in known:
            raise ConfigError(option, name, "is unknown", f"use some of {listed}")
