"""Compile each distinct piece once, with Inductor or not at all.

Equal layers of a model give equal pieces. They are found by a structural key, before anything is
traced, and share one artefact. What another process compiled is read from disk. This module knows
nothing of modes and graphs.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib.metadata
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from compile_backend.cache import NotStorableError
from compile_backend.mutation import mutated_inputs
from compile_backend.piece_key import stored_key, structural_key
from compile_backend.torch_internals.compile_settings import compile_settings
from compile_backend.torch_internals.graphs import fake_mode_of
from compile_backend.torch_internals.inductor import compile_with_inductor, load_with_inductor

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from compile_backend.cache import ArtefactCache
    from compile_backend.split import Section
    from compile_backend.torch_internals.inductor import InductorArtefact

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompiledPiece:
    """A piece that runs.

    Attributes:
        call: takes the inputs as one list, which it may clear, and returns the outputs in order.
        mutated_inputs: positions of the inputs that it writes to.
    """

    call: Callable[[list[Any]], Sequence[Any]]
    mutated_inputs: tuple[int, ...]


@dataclass(slots=True)
class CompileCounts:
    """What became of the distinct pieces of one graph.

    Attributes:
        compiles: pieces that a compiler was run on.
        compile_s: seconds that took.
        loads: pieces that were read from disk instead.
        load_s: seconds that took.
        unstorable: compiled pieces that cannot be kept on disk.
    """

    compiles: int = 0
    compile_s: float = 0.0
    loads: int = 0
    load_s: float = 0.0
    unstorable: int = 0


class PieceCompiler:
    """Compiles pieces, each distinct one once.

    Args:
        kind: `"inductor"`, or `"eager"` to run pieces as they are.
        inductor_config: Inductor settings for these pieces only.
        cache: where artefacts are kept for other processes; None for nowhere.
    """

    def __init__(
        self, kind: str, inductor_config: Mapping[str, Any], cache: ArtefactCache | None = None
    ) -> None:
        self._kind = kind
        self._inductor_config = inductor_config
        self._cache = cache
        self._artefacts: dict[Hashable, CompiledPiece] = {}
        self._settings: tuple[str, ...] | None = None
        self.counts = CompileCounts()

    def compile(self, section: Section) -> CompiledPiece:
        """The compiled form of `section`, shared with every piece that is equal to it."""
        key = structural_key(section.module)
        found = self._artefacts.get(key)
        if found is None:
            found = self._artefacts[key] = self._compile(section)
        return found

    def _compile(self, section: Section) -> CompiledPiece:
        module = section.module
        start = time.perf_counter()
        if self._kind == "eager" or fake_mode_of(module) is None:
            piece = CompiledPiece(eager_call(module), mutated_inputs(module))
            self.counts.compiles += 1
            self.counts.compile_s += time.perf_counter() - start
            return piece
        source = _Source(section, self._inductor_config)
        artefact, is_loaded = self._loaded_or_compiled(source)
        took = time.perf_counter() - start
        if is_loaded:
            self.counts.loads += 1
            self.counts.load_s += took
        else:
            self.counts.compiles += 1
            self.counts.compile_s += took
        logger.debug("%s %s in %.2f s", "loaded" if is_loaded else "compiled", section.name, took)
        if not artefact.is_direct:
            logger.debug("%s keeps AOTAutograd's wrappers", section.name)
        return CompiledPiece(artefact.call, artefact.mutated_inputs)

    def _loaded_or_compiled(self, source: _Source) -> tuple[InductorArtefact, bool]:
        cache = self._cache
        if cache is None:
            return source.compile(), False
        try:
            if self._settings is None:
                self._settings = compile_settings(self._inductor_config)
            key = stored_key(source.section.module, (*_own_sources(), *self._settings))
        except NotStorableError as reason:
            self._tell_unstorable(source.section, reason)
            return source.compile(), False
        found = _load(cache, key, source)
        if found is not None:
            return found, True
        with cache.lock(key):
            found = _load(cache, key, source)
            if found is not None:
                return found, True
            compiled = source.compile()
            try:
                packed, assumptions = compiled.pack()
            except NotStorableError as reason:
                self._tell_unstorable(source.section, reason)
            else:
                variant = hashlib.sha256(assumptions.encode()).hexdigest()[:16]
                cache.keep(key, variant, packed, source.label)
        return compiled, False

    def _tell_unstorable(self, section: Section, reason: NotStorableError) -> None:
        self.counts.unstorable += 1
        logger.info("%s is compiled in every process: it %s", section.name, reason)


@dataclass(frozen=True, slots=True)
class _Source:
    """A piece before it is compiled.

    Attributes:
        section: the piece.
        inductor_config: Inductor settings for it.
    """

    section: Section
    inductor_config: Mapping[str, Any]

    @property
    def label(self) -> dict[str, Any]:
        """What the piece is, for people."""
        called = [n for n in self.section.module.graph.nodes if n.op.startswith("call_")]
        stacks = [
            node.meta["nn_module_stack"] for node in called if "nn_module_stack" in node.meta
        ]
        outermost = [next(iter(stack.values()))[1] for stack in stacks if stack]
        model = getattr(outermost[0], "__name__", str(outermost[0])) if outermost else ""
        return {"model": model, "piece": self.section.name, "ops": len(called)}

    def compile(self) -> InductorArtefact:
        """Have Inductor compile it."""
        return compile_with_inductor(self._module(), *self._arguments())

    def load(self, packed: bytes) -> InductorArtefact | None:
        """Take what an earlier process compiled; None where that was for other sizes."""
        return load_with_inductor(packed, self._module, *self._arguments())

    def _module(self) -> torch.fx.GraphModule:
        module = self.section.module
        return torch.fx.GraphModule(module, copy.deepcopy(module.graph))

    def _arguments(self) -> tuple[list[Any], Any, Mapping[str, Any]]:
        module = self.section.module
        inputs = [
            node.meta["example_value"] for node in module.graph.nodes if node.op == "placeholder"
        ]
        return inputs, fake_mode_of(module), self.inductor_config


def _load(cache: ArtefactCache, key: str, source: _Source) -> InductorArtefact | None:
    for path, packed in cache.find(key):
        try:
            found = source.load(packed)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, it can be compiled
            cache.discard(path, f"{type(error).__name__}: {error}")
            continue
        if found is not None:
            return found
    return None


@functools.cache
def _own_sources() -> tuple[str, ...]:
    """This package's release, and its code that decides what an artefact is."""
    names = ("piece_compiler", "piece_key")
    files = [Path(__file__).with_name(f"{name}.py") for name in names]
    files += sorted((Path(__file__).parent / "torch_internals").glob("*.py"))
    code = b"".join(file.read_bytes() for file in files)
    try:
        release = importlib.metadata.version("cudagraph-modes")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        release = ""
    return (release, hashlib.sha256(code).hexdigest())


def eager_call(module: torch.fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """Run a section's graph op by op, without the cost of a module call."""
    forward = module.forward
    return lambda inputs: forward(*inputs)
