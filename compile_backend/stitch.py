"""Sections as straight-line code.

The sections of a split graph become one generated function in which values are local variables,
freed after their last use. The same text serves every way of running sections: what differs is
the callables that it is bound to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compile_backend.split import Computed
from compile_backend.torch_internals.graphs import storage_id

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from compile_backend.split import SplitGraph

Program = "Callable[[Sequence[Any]], tuple[Any, ...]]"


def stitch(
    split: SplitGraph,
    runners: Mapping[str, Callable[..., Any]],
    *,
    takes_list: frozenset[str] = frozenset(),
    held: Mapping[str, Sequence[Any]] | None = None,
) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """A function that runs all sections in order.

    Args:
        split: the sections.
        runners: for each section's name, what to call with its inputs; returns its outputs in
            order.
        takes_list: names of sections whose runner takes its inputs as one list.
        held: for the names of sections whose runner takes and returns nothing, the outputs that it
            fills.

    Returns:
        A function from the graph's inputs to the tuple of its outputs.
    """
    local = {name: f"v{number}" for number, name in enumerate(_all_values(split))}
    held = held or {}
    kept = {
        local[name]: value
        for section in split.sections
        if section.name in held
        for name, value in zip(section.outputs, held[section.name], strict=True)
    }
    last_reader = _last_readers(split)
    lines = ["def program(inputs):"]
    if split.inputs:
        lines.append(f"    {_targets(split.inputs, local)} = inputs")
    for number, section in enumerate(split.sections):
        if section.name in held:
            lines.append(f"    {section.name}()")
            continue
        arguments = ", ".join(local[name] for name in section.inputs)
        call = f"[{arguments}]" if section.name in takes_list else arguments
        target = f"{_targets(section.outputs, local)} = " if section.outputs else ""
        lines.append(f"    {target}{section.name}({call})")
        dead = [
            local[name]
            for name in dict.fromkeys((*section.inputs, *section.outputs))
            if last_reader.get(name, -1) <= number and local[name] not in kept
        ]
        if dead:
            lines.append(f"    del {', '.join(dead)}")
    constants: dict[str, Any] = {}
    items = []
    for number, output in enumerate(split.outputs):
        if isinstance(output, str):
            items.append(local[output])
        elif isinstance(output, Computed):
            constants[f"c{number}"] = output.module.forward
            sizes = ", ".join(local[name] for name in output.inputs)
            items.append(f"c{number}({sizes})[0]")
        else:
            constants[f"c{number}"] = output.value
            items.append(f"c{number}")
    lines.append(f"    return ({', '.join(items)}{',' if items else ''})")
    namespace: dict[str, Any] = {**runners, **constants, **kept}
    exec(compile("\n".join(lines), "<stitched sections>", "exec"), namespace)  # noqa: S102
    program: Callable[[Sequence[Any]], tuple[Any, ...]] = namespace["program"]
    return program


def buffer_slots(split: SplitGraph) -> dict[str, int]:
    """A buffer number for every value that a section makes; values alive together never share one.

    A value lives until the last section that reads its memory, by whatever name.
    """
    end_of_memory: dict[int, int] = {}
    last_reader = _last_readers(split)
    for name, reader in last_reader.items():
        memory = storage_id(split.values.get(name))
        if memory is not None:
            end_of_memory[memory] = max(reader, end_of_memory.get(memory, -1))
    slots: dict[str, int] = {}
    free_from: list[int] = []
    for number, section in enumerate(split.sections):
        for name in section.outputs:
            memory = storage_id(split.values.get(name))
            end = last_reader.get(name, number)
            if memory is not None:
                end = max(end, end_of_memory.get(memory, -1))
            slot = next((s for s, free in enumerate(free_from) if free < number), None)
            if slot is None:
                slot = len(free_from)
                free_from.append(-1)
            free_from[slot] = end
            slots[name] = slot
    return slots


def _all_values(split: SplitGraph) -> dict[str, None]:
    names = dict.fromkeys(split.inputs)
    for section in split.sections:
        names.update(dict.fromkeys(section.outputs))
    return names


def _last_readers(split: SplitGraph) -> dict[str, int]:
    """The number of the last section that reads each value; past the end for what is returned."""
    last: dict[str, int] = {}
    for number, section in enumerate(split.sections):
        last.update(dict.fromkeys(section.inputs, number))
    for output in split.outputs:
        returned = output.inputs if isinstance(output, Computed) else (output,)
        last.update((name, len(split.sections)) for name in returned if isinstance(name, str))
    return last


def _targets(names: Sequence[str], local: Mapping[str, str]) -> str:
    return f"({', '.join(local[name] for name in names)},)"
