"""Compile each distinct piece once, and once for each range of sizes, with Inductor or not at all.

Equal layers of a model give equal pieces. They are found by a structural key, before anything is
traced, and share their artefacts. What another process compiled is read from disk. All of it is
done before the first call, so that no capture ever compiles. This module knows nothing of modes
and graphs.
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
from compile_backend.specialise import Specialisations, TokenDimension, choosing
from compile_backend.torch_internals.compile_settings import compile_settings
from compile_backend.torch_internals.graphs import fake_mode_of, storage_id
from compile_backend.torch_internals.inductor import compile_with_inductor, load_with_inductor
from compile_backend.torch_internals.narrowing import (
    CannotOccurError,
    NarrowedInputs,
    narrowed_inputs,
    with_inputs,
)
from compile_backend.torch_internals.partition import partition_settings
from compile_backend.torch_internals.sizes import free_symbols_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from compile_backend.cache import ArtefactCache
    from compile_backend.sizes import TokenRange
    from compile_backend.split import Section
    from compile_backend.torch_internals.inductor import InductorArtefact

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompiledPiece:
    """A piece that runs.

    Attributes:
        call: takes the inputs as one list, which it may clear, and returns the outputs in order.
        mutated_inputs: positions of the inputs that it writes to.
        code: Inductor's own object that it calls; None where there is none, or several.
    """

    call: Callable[[list[Any]], Sequence[Any]]
    mutated_inputs: tuple[int, ...]
    code: Any = None


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


class PieceCompiler:
    """Compiles pieces, each distinct one once for all sizes and once for each range.

    Args:
        kind: `"inductor"`, or `"eager"` to run pieces as they are.
        inductor_config: Inductor settings for these pieces only.
        cache: where artefacts are kept for other processes; None for nowhere.
        specialisations: the ranges.
        sizes_config: Inductor settings for listed sizes, on top of the others.
        pass_uuids: what tells the rewrites that the graph went through from others; None for a
            rewrite that nothing tells, after which no piece is kept.
        partition_ops: at which ops Inductor parts each piece; None for no partitions.
    """

    def __init__(
        self,
        kind: str,
        inductor_config: Mapping[str, Any],
        cache: ArtefactCache | None = None,
        specialisations: Specialisations | None = None,
        sizes_config: Mapping[str, Any] | None = None,
        *,
        pass_uuids: Sequence[str | None] = (),
        partition_ops: Sequence[str] | None = None,
    ) -> None:
        self._kind = kind
        self._cache = cache
        self._pass_uuids = tuple(pass_uuids)
        self._specialisations = specialisations or Specialisations()
        self._is_partitioned = partition_ops is not None
        if partition_ops is not None:
            inductor_config = {**inductor_config, **partition_settings(partition_ops)}
        self._configs = {False: inductor_config, True: {**inductor_config, **(sizes_config or {})}}
        self._settings: dict[bool, tuple[str, ...]] = {}
        self._pieces: dict[Hashable, CompiledPiece] = {}
        self.counts = CompileCounts()

    def compile(self, section: Section) -> CompiledPiece:
        """The compiled form of `section`, shared with every piece that is equal to it."""
        is_joined = _is_joined(section.module)
        key = structural_key(section.module), is_joined
        found = self._pieces.get(key)
        if found is None:
            found = self._pieces[key] = self._compile(section, is_joined=is_joined)
        return found

    def _compile(self, section: Section, *, is_joined: bool) -> CompiledPiece:
        module = section.module
        start = time.perf_counter()
        if is_joined and self._kind != "eager":
            logger.warning(
                "%s runs op by op: it writes to memory that several of its inputs share, and what "
                "a compiler makes of that holds for other inputs",
                section.name,
            )
        if self._kind == "eager" or is_joined or fake_mode_of(module) is None:
            piece = CompiledPiece(eager_call(module), mutated_inputs(module))
            self.counts.compiles += 1
            self.counts.compile_s += time.perf_counter() - start
            return piece
        is_listed = self._specialisations.is_listed_size
        # First, so that what it assumes of Dynamo's sizes is known to all others.
        general = self._artefact(
            _Source(
                section=section,
                inductor_config=self._configs[is_listed],
                is_listed=is_listed,
                is_partitioned=self._is_partitioned,
            )
        )
        call = general.call
        dimension = self._specialisations.dimension_in(module)
        if isinstance(dimension, str):
            logger.warning("%s is compiled for all sizes at once: it %s", section.name, dimension)
        elif dimension is not None:
            call = choosing(dimension, call, list(self._special(section, dimension)))
        code = general.code if call is general.call else None
        return CompiledPiece(call, general.mutated_inputs, code)

    def _special(
        self, section: Section, dimension: TokenDimension
    ) -> Iterator[tuple[int, int, Callable[[list[Any]], Sequence[Any]]]]:
        """The piece's code for each range: the values of its symbol, and what to call."""
        for tokens in self._specialisations.ranges:
            try:
                inputs = narrowed_inputs(
                    _inputs_of(section),
                    fake_mode_of(section.module),
                    dimension.symbol,
                    *dimension.values(tokens),
                )
            except CannotOccurError:
                logger.debug("%s is never run for %s tokens", section.name, tokens)
                continue
            source = _Source(
                section=section,
                inductor_config=self._configs[tokens.is_listed],
                is_listed=tokens.is_listed,
                tokens=tokens,
                inputs=inputs,
                sizes=f"{dimension}: {inputs.first} to {inputs.last}",
            )
            artefact = self._artefact(source)
            assumed = inputs.assumed()
            if assumed:
                logger.warning(
                    "%s runs as compiled for all sizes at %s tokens: its code for these would "
                    "hold only where %s",
                    section.name,
                    tokens,
                    " and ".join(assumed),
                )
                continue
            yield inputs.first, inputs.last, artefact.call

    def _artefact(self, source: _Source) -> InductorArtefact:
        start = time.perf_counter()
        artefact, is_loaded = self._loaded_or_compiled(source)
        took = time.perf_counter() - start
        if is_loaded:
            self.counts.loads += 1
            self.counts.load_s += took
        else:
            self.counts.compiles += 1
            self.counts.compile_s += took
        logger.debug("%s %s in %.2f s", "loaded" if is_loaded else "compiled", source.name, took)
        if not artefact.is_direct:
            logger.debug("%s keeps AOTAutograd's wrappers", source.name)
        return artefact

    def _loaded_or_compiled(self, source: _Source) -> tuple[InductorArtefact, bool]:
        cache = self._cache
        if cache is None:
            return source.compile(), False
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
            key = stored_key(source.section.module, settings)
        except NotStorableError as reason:
            self._tell_unstorable(source, reason)
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
                self._tell_unstorable(source, reason)
            else:
                variant = hashlib.sha256(assumptions.encode()).hexdigest()[:16]
                cache.keep(key, variant, packed, source.label)
        return compiled, False

    def _tell_unstorable(self, source: _Source, reason: NotStorableError) -> None:
        self.counts.unstorable += 1
        logger.info("%s is compiled in every process: it %s", source.name, reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
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
            return _inputs_of(self.section), mode, self.inductor_config
        return self.inputs.values, self.inputs.fake_mode, self.inductor_config


def _checked(pass_uuids: Sequence[str | None]) -> Iterator[str]:
    for uuid in pass_uuids:
        if uuid is None:
            raise NotStorableError("went through a pass of inductor_passes that has no uuid()")
        yield uuid


def _is_joined(module: torch.fx.GraphModule) -> bool:
    """Whether a piece writes to memory that several of its inputs share.

    AOTAutograd makes a base for these and takes each for a view of it as they were when traced.
    That they are for inputs of the whole graph, of sizes that stay; what compiled code returns is
    no view to torch, and sizes that change are lost in the offsets of views.
    """
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    values = [node.meta.get("example_value") for node in placeholders]
    memories = [storage_id(v) if isinstance(v, torch.Tensor) else None for v in values]
    written = {memories[i] for i in mutated_inputs(module)}
    joined = {m for m in written if m is not None and memories.count(m) > 1}
    return any(
        memory in joined and ("grapharg" not in node.meta or free_symbols_of(value))
        for node, value, memory in zip(placeholders, values, memories, strict=True)
    )


def _inputs_of(section: Section) -> list[Any]:
    nodes = section.module.graph.nodes
    return [node.meta["example_value"] for node in nodes if node.op == "placeholder"]


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
    names = ("piece_compiler", "piece_key", "specialise")
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
