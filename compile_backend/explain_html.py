"""An explanation as one HTML page that needs nothing else: each graph drawn, with its texts below.

A drawing has the sections in the order they run, equal pieces in one colour, and beside them what
the modes capture. Everything is taken from the explanation; this file works nothing out.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from itertools import starmap
from typing import TYPE_CHECKING

from compile_backend.errors import ConfigError, number_of
from compile_backend.explanation import Explanation
from compile_backend.reports import compact_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compile_backend.explanation import (
        GraphExplanation,
        KeySizes,
        SectionOutline,
    )

_ROW, _GAP = 30, 6
_LEFT, _WIDTH = 20, 620
_KEYS_LEFT, _KEYS_WIDTH = 700, 440
_CELL, _CELLS_IN_A_ROW = 16, 26
_PIECE_COLOURS = ("#cfe2f3", "#d9ead3", "#fff2cc", "#d9d2e9", "#d0e0e3", "#f4e1d2")
_EAGER_COLOUR, _FUSED_COLOUR, _UNCAPTURED_COLOUR = "#e69138", "#38761d", "#eeeeee"
_MODE_COLOURS = {"FULL": "#3d85c6", "PIECEWISE": "#93c47d"}
_STYLE = """
body { font: 14px system-ui, sans-serif; margin: 2em; color: #222; max-width: 1180px }
table { border-collapse: collapse } td { padding: 2px 12px 2px 0; vertical-align: top }
td:first-child { color: #666 } pre { background: #f6f6f6; padding: 8px; overflow-x: auto }
summary { cursor: pointer; margin: 6px 0 }
"""


def as_page(explanations: Mapping[str, Explanation]) -> str:
    """The page.

    Args:
        explanations: by a title for each.

    Raises:
        ConfigError: they are something else, or a title is no text.
    """
    _check(explanations)
    parts = [
        f"<h1>{escape(title)}</h1>" + "".join(starmap(_graph, enumerate(told.graphs, start=1)))
        for title, told in explanations.items()
    ]
    title = escape(", ".join(explanations))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _check(explanations: object) -> None:
    option, fix = "explanations", "use {'a title': explain(...)}"
    if not isinstance(explanations, Mapping) or not explanations:
        raise ConfigError(option, explanations, "must map titles to explanations", fix)
    for title, told in explanations.items():
        if not isinstance(title, str) or not title.strip():
            raise ConfigError(option, list(explanations), f"has the title {title!r}", fix)
        if not isinstance(told, Explanation):
            problem = f"has {type(told).__name__} at {title!r}, which is no Explanation"
            raise ConfigError(option, list(explanations), problem, fix)


def _graph(number: int, graph: GraphExplanation) -> str:
    sections = [
        _details(f"{section.name}: {_calls_text(section)}", section.code)
        for section in graph.sections
    ]
    return (
        f"<h2>Graph {number}</h2>{_facts(graph)}{drawing(graph)}"
        + _details("The graph as Dynamo made it", graph.code_before)
        + _details("The graph behind the passes", graph.code_after)
        + "".join(sections)
    )


def _facts(graph: GraphExplanation) -> str:
    mode = graph.mode_resolved.name
    if graph.mode_asked is not graph.mode_resolved:
        mode = f"{graph.mode_asked.name} was asked for, {mode} it is"
    rows = {
        "mode": [mode],
        "why": [*map(str, graph.downgrades), *graph.notes],
        "passes": [f"{name}: {number_of('place', n)}" for name, n in graph.passes.items() if n],
        "this call": [f"{graph.call.num_tokens} tokens, runs at {graph.call_mode.name}"],
        "cut by": ["Inductor" if graph.num_partitions else "this backend, before Inductor"],
        "compiles": [str(graph.num_compiles)],
        "graphs planned": [str(graph.num_graphs)],
    }
    lines = (
        f"<tr><td>{escape(name)}</td><td>{'<br>'.join(map(escape, said))}</td></tr>"
        for name, said in rows.items()
        if said
    )
    return f"<table>{''.join(lines)}</table>"


def _details(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


# --- the drawing -----------------------------------------------------------------------------


def drawing(graph: GraphExplanation) -> str:
    """A graph as SVG: its sections from top to bottom, and its keys beside them."""
    shapes = [_text(_LEFT, 18, "sections, in the order they run", bold=True)]
    top = 30
    for index, section in enumerate(graph.sections):
        if index:
            middle = _LEFT + _WIDTH / 2
            shapes.append(_line(middle, top - _GAP, middle, top))
        shapes += _section(graph, section, top)
        top += _ROW + _GAP
    keys, keys_end = _keys(graph.keys)
    shapes += keys
    for line in _legend(graph):
        keys_end += 18
        shapes.append(_text(_KEYS_LEFT, keys_end, line))
    height = max(top, keys_end) + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_KEYS_LEFT + _KEYS_WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="12">{"".join(shapes)}</svg>'
    )


def _legend(graph: GraphExplanation) -> list[str]:
    lines = ["One colour: equal pieces, compiled once. Green labels: what fusions made."]
    if graph.cuts:
        is_held = any(held.mode.name == "FULL" for held in graph.keys)
        inside = ", and inside FULL graphs" if is_held else ""
        lines.append(f"Orange: runs between the graphs of pieces{inside}.")
    lines += [
        f"{op} can be captured: {level.name}"
        for op, level in graph.support.items()
        if any(op in cut.ops for cut in graph.cuts)
    ]
    return lines


def _section(graph: GraphExplanation, section: SectionOutline, top: int) -> list[str]:
    baseline = top + _ROW / 2 + 4
    if not section.is_piece:
        colour, inset = _EAGER_COLOUR, 60
        cut = next((cut for cut in graph.cuts if section.name in cut.names), None)
        ops = () if cut is None else cut.ops
        label = f"{section.name}, cut by {', '.join(ops)}"
    else:
        piece, index = next(
            (piece, index)
            for index, piece in enumerate(graph.pieces)
            if section.name in piece.names
        )
        inset = 0
        colour = _PIECE_COLOURS[index % len(_PIECE_COLOURS)]
        label = f"{section.name}: {number_of('op', piece.num_ops)}"
        if len(piece.names) > 1:
            label += f", one of {len(piece.names)} equal ones"
        if piece.uncapturable is not None:
            colour = _UNCAPTURED_COLOUR
            label += f", no graph: {piece.uncapturable}"
    shapes = [
        _rectangle(_LEFT + inset, top, _WIDTH - 2 * inset, _ROW, colour),
        _text(_LEFT + inset + 10, baseline, _short(label, 90 if not section.num_fused else 58)),
    ]
    if section.num_fused:
        tag = _fused_text(section)
        width = 8 + 6.5 * len(tag)
        left = _LEFT + _WIDTH - inset - width - 8
        shapes.append(_rectangle(left, top + 5, width, _ROW - 10, _FUSED_COLOUR))
        shapes.append(_text(left + 5, baseline, tag, colour="white"))
    return shapes


def _keys(keys: Sequence[KeySizes]) -> tuple[list[str], int]:
    """One cell for each size that gets a graph, mode by mode; and where they end."""
    shapes = [_text(_KEYS_LEFT, 18, "graphs, by mode and number of tokens", bold=True)]
    top = 30
    if not keys:
        shapes.append(_text(_KEYS_LEFT, top + 14, "none"))
        top += 20
    for held in keys:
        batches = "uniform decode batches" if held.uniform else "any batch"
        label = f"{held.mode.name}, {batches}: {compact_sizes(held.num_tokens)}"
        shapes.append(_text(_KEYS_LEFT, top + 14, _short(label, 66)))
        top += 20
        for index in range(len(held.num_tokens)):
            row, column = divmod(index, _CELLS_IN_A_ROW)
            shapes.append(
                _rectangle(
                    _KEYS_LEFT + column * _CELL,
                    top + row * _CELL,
                    _CELL - 3,
                    _CELL - 3,
                    _MODE_COLOURS[held.mode.name],
                )
            )
        top += (1 + (len(held.num_tokens) - 1) // _CELLS_IN_A_ROW) * _CELL + 12
    return shapes, top


def _calls_text(section: SectionOutline) -> str:
    return ", ".join(f"{name} x {count}" for name, count in section.calls.items())


def _fused_text(section: SectionOutline) -> str:
    """The ops that fusions made, which are the first of the calls."""
    names, left = [], section.num_fused
    for name, count in section.calls.items():
        if left <= 0:
            break
        plain = name.rpartition("::")[2].partition(".")[0]
        names.append(f"{plain} x {count}" if count > 1 else plain)
        left -= count
    return "fused: " + ", ".join(names)


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


def _rectangle(left: float, top: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="4" fill="{colour}" '
        'stroke="#999"/>'
    )


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#666"/>'


def _text(left: float, baseline: float, text: str, *, bold: bool = False, colour: str = "") -> str:
    weight = ' font-weight="bold"' if bold else ""
    fill = f' fill="{colour}"' if colour else ""
    return f'<text x="{left}" y="{baseline}"{weight}{fill}>{escape(text)}</text>'
