"""Compile each distinct piece once, and once for each range of sizes, with Inductor or not at all.

Equal layers of a model give equal pieces. They are found by a structural key, before anything is
traced, and share their artefacts. What another process compiled is read from disk. All of it is
done before the first call, so that no capture ever compiles. This module knows nothing of modes
and graphs.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from compile_backend.mutation import mutated_inputs
from compile_backend.piece_artefacts import PieceArtefacts, PieceSource, inputs_of
from compile_backend.piece_key import structural_key
from compile_backend.specialise import Specialisations, TokenDimension, choosing
from compile_backend.torch_internals.graphs import fake_mode_of, storage_id
from compile_backend.torch_internals.narrowing import CannotOccurError, narrowed_inputs
from compile_backend.torch_internals.partition import partition_settings
from compile_backend.torch_internals.sizes import free_symbols_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from compile_backend.cache import ArtefactCache
    from compile_backend.piece_artefacts import CompileCounts
    from compile_backend.sizes import TokenRange
    from compile_backend.specialise import Call
    from compile_backend.split import Section

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
        self._artefacts = PieceArtefacts(cache, pass_uuids)
        self._specialisations = specialisations or Specialisations()
        self._is_partitioned = partition_ops is not None
        if partition_ops is not None:
            inductor_config = {**inductor_config, **partition_settings(partition_ops)}
        self._configs = {False: inductor_config, True: {**inductor_config, **(sizes_config or {})}}
        self._pieces: dict[Hashable, CompiledPiece] = {}

    @property
    def counts(self) -> CompileCounts:
        """What became of the pieces until now."""
        return self._artefacts.counts

    def compile(self, section: Section) -> CompiledPiece:
        """The compiled form of `section`, shared with every piece that is equal to it."""
        (piece,) = self.compile_all([section]).values()
        return piece

    def compile_all(self, sections: Sequence[Section]) -> dict[str, CompiledPiece]:
        """The compiled forms of some sections by name: as `compile`, but together."""
        keys = {each.name: self._key(each) for each in sections}
        new: dict[Hashable, Section] = {}
        for section in sections:
            if keys[section.name] not in self._pieces:
                new.setdefault(keys[section.name], section)
        self._pieces.update(zip(new, self._compile(list(new.values())), strict=True))
        return {name: self._pieces[key] for name, key in keys.items()}

    @staticmethod
    def _key(section: Section) -> Hashable:
        return structural_key(section.module), _is_joined(section.module)

    def _compile(self, sections: Sequence[Section]) -> list[CompiledPiece]:
        made: dict[str, CompiledPiece] = {}
        for section in sections:
            start = time.perf_counter()
            if self._runs_op_by_op(section):
                module = section.module
                made[section.name] = CompiledPiece(eager_call(module), mutated_inputs(module))
                self.counts.compiles += 1
                self.counts.compile_s += time.perf_counter() - start
        compiled = [section for section in sections if section.name not in made]
        # First, so that what they assume of Dynamo's sizes is known to all others.
        is_listed = self._specialisations.is_listed_size
        generals = self._artefacts.of(
            [
                self._source(each, is_listed=is_listed, is_partitioned=self._is_partitioned)
                for each in compiled
            ]
        )
        dimensions = [self._specialisations.dimension_in(s.module) for s in compiled]
        special = self._special(
            [
                (section, dimension)
                for section, dimension in zip(compiled, dimensions, strict=True)
                if isinstance(dimension, TokenDimension)
            ]
        )
        for section, general, dimension in zip(compiled, generals, dimensions, strict=True):
            call = general.call
            if isinstance(dimension, str):
                logger.warning(
                    "%s is compiled for all sizes at once: it %s", section.name, dimension
                )
            elif dimension is not None:
                call = choosing(dimension, call, special[section.name])
            code = general.code if call is general.call else None
            made[section.name] = CompiledPiece(call, general.mutated_inputs, code)
        return [made[section.name] for section in sections]

    def _runs_op_by_op(self, section: Section) -> bool:
        if self._kind == "eager":
            return True
        if _is_joined(section.module):
            logger.warning(
                "%s runs op by op: it writes to memory that several of its inputs share, and what "
                "a compiler makes of that holds for other inputs",
                section.name,
            )
            return True
        return fake_mode_of(section.module) is None

    def _source(self, section: Section, *, is_listed: bool, **narrowed: Any) -> PieceSource:
        return PieceSource(
            section=section,
            inductor_config=self._configs[is_listed],
            is_listed=is_listed,
            **narrowed,
        )

    def _special(
        self, pieces: Sequence[tuple[Section, TokenDimension]]
    ) -> dict[str, list[tuple[int, int, Call]]]:
        """The code of each piece for each range: the values of its symbol, and what to call."""
        found: dict[str, list[tuple[int, int, Call]]] = {piece.name: [] for piece, _ in pieces}
        for tokens in self._specialisations.ranges:
            sources = [
                source
                for section, dimension in pieces
                if (source := self._narrowed(section, dimension, tokens)) is not None
            ]
            for source, artefact in zip(sources, self._artefacts.of(sources), strict=True):
                inputs = source.inputs
                assert inputs is not None
                assumed = inputs.assumed()
                if assumed:
                    logger.warning(
                        "%s runs as compiled for all sizes at %s tokens: its code for these would "
                        "hold only where %s",
                        source.section.name,
                        tokens,
                        " and ".join(assumed),
                    )
                else:
                    found[source.section.name].append((inputs.first, inputs.last, artefact.call))
        return found

    def _narrowed(
        self, section: Section, dimension: TokenDimension, tokens: TokenRange
    ) -> PieceSource | None:
        """A piece for one range; None for one that never occurs."""
        try:
            inputs = narrowed_inputs(
                inputs_of(section),
                fake_mode_of(section.module),
                dimension.symbol,
                *dimension.values(tokens),
            )
        except CannotOccurError:
            logger.debug("%s is never run for %s tokens", section.name, tokens)
            return None
        return self._source(
            section,
            is_listed=tokens.is_listed,
            tokens=tokens,
            inputs=inputs,
            sizes=f"{dimension}: {inputs.first} to {inputs.last}",
        )


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


def eager_call(module: torch.fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """Run a section's graph op by op, without the cost of a module call."""
    forward = module.forward
    return lambda inputs: forward(*inputs)
