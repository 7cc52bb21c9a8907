"""Artefacts of pieces: read from disk where another process made them, else made by Inductor.

Several are made together: the kernels of one go on being compiled while the next is lowered.
"""

from __future__ import annotations

import contextlib
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
from compile_backend.piece_key import stored_key
from compile_backend.torch_internals.compile_settings import compile_settings
from compile_backend.torch_internals.graphs import fake_mode_of
from compile_backend.torch_internals.inductor import compile_with_inductor, load_with_inductor
from compile_backend.torch_internals.narrowing import with_inputs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from compile_backend.cache import ArtefactCache
    from compile_backend.sizes import TokenRange
    from compile_backend.split import Section
    from compile_backend.torch_internals.inductor import InductorArtefact
    from compile_backend.torch_internals.narrowing import NarrowedInputs

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class CompileCounts:
    """What became of the distinct pieces of one graph, each counted once for each range of sizes.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSource:
    """A piece before it is compiled.

    Attributes:
        section: the piece.
        inductor_config: Inductor settings for it.
        is_listed: whether it is for one size that is compiled by itself.
        is_partitioned: whether Inductor parts it.
        tokens: the numbers of tokens that it is compiled for; None for all.
        inputs: its inputs for these; None for those that it has.
        sizes: which size is narrowed and to what, as text that tells ranges apart.
    """

    section: Section
    inductor_config: Mapping[str, Any]
    is_listed: bool
    is_partitioned: bool = False
    tokens: TokenRange | None = None
    inputs: NarrowedInputs | None = None
    sizes: str = ""

    @property
    def name(self) -> str:
        """What the piece is called in messages."""
        return f"{self.section.name}{'' if self.tokens is None else f' for {self.tokens} tokens'}"

    @property
    def label(self) -> dict[str, Any]:
        """What the piece is, for people."""
        called = [n for n in self.section.module.graph.nodes if n.op.startswith("call_")]
        stacks = [
            node.meta["nn_module_stack"] for node in called if "nn_module_stack" in node.meta
        ]
        outermost = [next(iter(stack.values()))[1] for stack in stacks if stack]
        model = getattr(outermost[0], "__name__", str(outermost[0])) if outermost else ""
        tokens = {} if self.tokens is None else {"tokens": str(self.tokens)}
        return {"model": model, "piece": self.section.name, "ops": len(called), **tokens}

    def compile(self) -> InductorArtefact:
        """Have Inductor compile it."""
        return compile_with_inductor(
            self._module(), *self._arguments(), self.sizes, is_partitioned=self.is_partitioned
        )

    def load(self, packed: bytes) -> InductorArtefact | None:
        """Take what an earlier process compiled; None where that was for other sizes."""
        return load_with_inductor(packed, self._module, *self._arguments())

    def _module(self) -> torch.fx.GraphModule:
        module = self.section.module
        copied = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
        return copied if self.inputs is None else with_inputs(copied, self.inputs.values)

    def _arguments(self) -> tuple[list[Any], Any, Mapping[str, Any]]:
        if self.inputs is None:
            mode = fake_mode_of(self.section.module)
            return inputs_of(self.section), mode, self.inductor_config
        return self.inputs.values, self.inputs.fake_mode, self.inductor_config


class PieceArtefacts:
    """Gets artefacts, and counts where they came from.

    Args:
        cache: where they are kept for other processes; None for nowhere.
        pass_uuids: what tells the rewrites that the graph went through from others; None for a
            rewrite that nothing tells, after which no piece is kept.
    """

    def __init__(self, cache: ArtefactCache | None, pass_uuids: Sequence[str | None]) -> None:
        self._cache = cache
        self._pass_uuids = tuple(pass_uuids)
        self._settings: dict[bool, tuple[str, ...]] = {}
        self.counts = CompileCounts()

    def of(self, sources: Sequence[PieceSource]) -> list[InductorArtefact]:
        """The artefacts of some pieces, compiled together as far as they have to be."""
        keys = [self._key(source) for source in sources]
        found = [self._loaded(*each) for each in zip(sources, keys, strict=True)]
        missing = [position for position, artefact in enumerate(found) if artefact is None]
        # One of those with equal keys is made; without a key each is by itself.
        first = {keys[position] or position: position for position in reversed(missing)}
        wanted = [key for key in first if isinstance(key, str)]
        cache = self._cache
        locked = cache.lock(*wanted) if cache and wanted else contextlib.nullcontext()
        with locked:
            for position in first.values():
                found[position] = self._loaded(sources[position], keys[position])
            to_make = [position for position in sorted(first.values()) if found[position] is None]
            made = self._made(
                [sources[each] for each in to_make], [keys[each] for each in to_make]
            )
            for position, artefact in zip(to_make, made, strict=True):
                found[position] = artefact
        # What is left has the key of another that was just made.
        return [
            self.of([source])[0] if artefact is None else artefact
            for source, artefact in zip(sources, found, strict=True)
        ]

    def _key(self, source: PieceSource) -> str | None:
        """What a piece is kept under; None for one that is not."""
        if self._cache is None:
            return None
        try:
            if source.is_listed not in self._settings:
                self._settings[source.is_listed] = compile_settings(
                    source.inductor_config, is_partitioned=source.is_partitioned
                )
            settings = (
                *_own_sources(),
                *self._settings[source.is_listed],
                source.sizes,
                *_checked(self._pass_uuids),
            )
            return stored_key(source.section.module, settings)
        except NotStorableError as reason:
            self._tell_unstorable(source, reason)
            return None

    def _loaded(self, source: PieceSource, key: str | None) -> InductorArtefact | None:
        if self._cache is None or key is None:
            return None
        start = time.perf_counter()
        found = _load(self._cache, key, source)
        if found is not None:
            took = time.perf_counter() - start
            self.counts.loads += 1
            self.counts.load_s += took
            _tell("loaded", source, found, took)
        return found

    def _made(
        self, sources: Sequence[PieceSource], keys: Sequence[str | None]
    ) -> list[InductorArtefact]:
        """Compile pieces, and keep them; where one fails, those before it all the same."""
        made: list[InductorArtefact] = []
        start = time.perf_counter()
        try:
            for source in sources:
                lowering = time.perf_counter()
                made.append(source.compile())
                _tell("compiled", source, made[-1], time.perf_counter() - lowering)
        except BaseException:
            with contextlib.suppress(Exception):
                self._finish(sources, keys, made, start)
            raise
        self._finish(sources, keys, made, start)
        return made

    def _finish(
        self,
        sources: Sequence[PieceSource],
        keys: Sequence[str | None],
        made: Sequence[InductorArtefact],
        start: float,
    ) -> None:
        errors: list[Exception] = []
        waiting = time.perf_counter()
        for source, key, artefact in zip(sources, keys, made, strict=False):
            try:
                artefact.finish()
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)
                continue
            self.counts.compiles += 1
            if key is not None:
                self._keep(source, key, artefact)
        if made:
            logger.debug("waited %.2f s for their kernels", time.perf_counter() - waiting)
            self.counts.compile_s += time.perf_counter() - start
        if errors:
            raise errors[0]

    def _keep(self, source: PieceSource, key: str, artefact: InductorArtefact) -> None:
        assert self._cache is not None
        try:
            packed, assumptions = artefact.pack()
        except NotStorableError as reason:
            self._tell_unstorable(source, reason)
        else:
            variant = hashlib.sha256(assumptions.encode()).hexdigest()[:16]
            self._cache.keep(key, variant, packed, source.label)

    def _tell_unstorable(self, source: PieceSource, reason: NotStorableError) -> None:
        self.counts.unstorable += 1
        logger.info("%s is compiled in every process: it %s", source.name, reason)


def _tell(verb: str, source: PieceSource, artefact: InductorArtefact, took: float) -> None:
    logger.debug("%s %s in %.2f s", verb, source.name, took)
    if not artefact.is_direct:
        logger.debug("%s keeps AOTAutograd's wrappers", source.name)


def _checked(pass_uuids: Sequence[str | None]) -> Iterator[str]:
    for uuid in pass_uuids:
        if uuid is None:
            raise NotStorableError("went through a pass of inductor_passes that has no uuid()")
        yield uuid


def inputs_of(section: Section) -> list[Any]:
    """What stands for the inputs of a section while it is compiled."""
    nodes = section.module.graph.nodes
    return [node.meta["example_value"] for node in nodes if node.op == "placeholder"]


def _load(cache: ArtefactCache, key: str, source: PieceSource) -> InductorArtefact | None:
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
    names = ("piece_artefacts", "piece_compiler", "piece_key", "specialise")
    files = [Path(__file__).with_name(f"{name}.py") for name in names]
    files += sorted((Path(__file__).parent / "torch_internals").glob("*.py"))
    code = b"".join(file.read_bytes() for file in files)
    try:
        release = importlib.metadata.version("cudagraph-modes")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        release = ""
    return (release, hashlib.sha256(code).hexdigest())
