"""Compile each distinct piece once, with Inductor or not at all.

Equal layers of a model give equal pieces. They are found by a structural key, before anything is
traced, and share one artefact. This module knows nothing of modes and graphs.
"""

from __future__ import annotations

import copy
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.fx

from compile_backend.mutation import mutated_inputs
from compile_backend.torch_internals import compile_with_inductor, fake_mode_of, storage_id

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from compile_backend.split import Section

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


class PieceCompiler:
    """Compiles pieces, each distinct one once.

    Args:
        kind: `"inductor"`, or `"eager"` to run pieces as they are.
        inductor_config: Inductor settings for these pieces only.
    """

    def __init__(self, kind: str, inductor_config: Mapping[str, Any]) -> None:
        self._kind = kind
        self._inductor_config = inductor_config
        self._artefacts: dict[Hashable, CompiledPiece] = {}
        self.compile_s = 0.0

    @property
    def num_distinct(self) -> int:
        """How many different pieces were compiled."""
        return len(self._artefacts)

    def compile(self, section: Section) -> CompiledPiece:
        """The compiled form of `section`, shared with every piece that is equal to it."""
        key = structural_key(section.module)
        found = self._artefacts.get(key)
        if found is None:
            start = time.perf_counter()
            found = self._artefacts[key] = self._compile(section)
            self.compile_s += time.perf_counter() - start
            logger.debug("compiled %s in %.2f s", section.name, time.perf_counter() - start)
        return found

    def _compile(self, section: Section) -> CompiledPiece:
        module = section.module
        fake_mode = fake_mode_of(module)
        if self._kind == "eager" or fake_mode is None:
            return CompiledPiece(eager_call(module), mutated_inputs(module))
        inputs = [
            node.meta["example_value"] for node in module.graph.nodes if node.op == "placeholder"
        ]
        owned = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
        artefact = compile_with_inductor(owned, inputs, fake_mode, self._inductor_config)
        if not artefact.is_direct:
            logger.debug("%s keeps AOTAutograd's wrappers", section.name)
        return CompiledPiece(artefact.call, artefact.mutated_inputs)


def eager_call(module: torch.fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """Run a section's graph op by op, without the cost of a module call."""
    forward = module.forward
    return lambda inputs: forward(*inputs)


def structural_key(module: torch.fx.GraphModule) -> Hashable:
    """What makes two pieces equal: ops, constants, wiring, and every property of their inputs.

    Names are left out, so equal layers have equal keys. Sizes count by their symbolic expression,
    and inputs that share memory by which of them do.
    """
    numbers: dict[torch.fx.Node, int] = {}
    storages: dict[int, int] = {}
    described: list[Hashable] = []

    def argument(value: Any) -> Hashable:
        if isinstance(value, torch.fx.Node):
            return ("node", numbers[value])
        if isinstance(value, (tuple, list)):
            return (type(value).__name__, *(argument(item) for item in value))
        if isinstance(value, dict):
            return ("dict", *((key, argument(item)) for key, item in value.items()))
        if isinstance(value, slice):
            return ("slice", argument(value.start), argument(value.stop), argument(value.step))
        if isinstance(value, float):
            return ("float", value.hex())
        return (type(value).__name__, str(value))

    for number, node in enumerate(module.graph.nodes):
        numbers[node] = number
        if node.op == "placeholder":
            described.append(("input", _describe_value(node.meta.get("example_value"), storages)))
        elif node.op == "get_attr":
            described.append(("attribute", id(_attribute(module, str(node.target)))))
        else:
            target = node.target if isinstance(node.target, str) else _identity(node.target)
            described.append((node.op, target, argument(node.args), argument(node.kwargs)))
    return tuple(described)


def _identity(target: Any) -> Hashable:
    return (getattr(target, "__name__", str(target)), id(target))


def _attribute(module: torch.nn.Module, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _describe_value(value: Any, storages: dict[int, int]) -> Hashable:
    if not isinstance(value, torch.Tensor):
        return (type(value).__name__, str(value))
    memory = storage_id(value)
    shared = storages.setdefault(memory, len(storages)) if memory is not None else None
    strides = tuple(map(str, value.stride())) if value.layout is torch.strided else None
    return (
        type(value).__name__,
        tuple(map(str, value.shape)),
        strides,
        str(value.storage_offset()) if strides is not None else None,
        value.dtype,
        value.device,
        value.requires_grad,
        shared,
    )
