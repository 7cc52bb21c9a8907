"""The tables of README and docs say what the code says."""

import re
from dataclasses import MISSING, fields
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import compile_backend
from compile_backend.config import (
    CompilationConfig,
    CUDAGraphMode,
    PassConfig,
    unavailable,
)
from compile_backend.resolve import RULES, resolve_cudagraph_mode
from compile_backend.support import KNOWN_BACKENDS, AttentionCGSupport

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
OPTIONS = (ROOT / "docs" / "options.md").read_text()
HOW_IT_WORKS = (ROOT / "docs" / "how-it-works.md").read_text()


def _rows(text: str, first_heading: str) -> list[list[str]]:
    """The cells of every table whose first column has this heading."""
    rows, is_wanted = [], False
    for line in text.splitlines():
        if not line.startswith("|"):
            is_wanted = False
            continue
        cells = [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
        if cells[0] == first_heading:
            is_wanted = True
        elif is_wanted and not set(cells[0]) <= set("-: "):
            rows.append(cells)
    return rows


def test_readme_has_a_row_for_each_mode() -> None:
    expected = []
    for mode in CUDAGraphMode:
        kept_at = [
            level
            for level in AttentionCGSupport
            if not resolve_cudagraph_mode(mode, level, piecewise=True).downgrades
        ]
        expected.append(
            [mode.name, mode.decode_mode().name, mode.mixed_mode().name, min(kept_at).name]
        )
    assert _rows(README, "cudagraph_mode") == expected


def test_modes_with_decode_graphs_only_need_more_for_speculation() -> None:
    """What the README says below its table."""
    for mode in (CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE):
        for level in AttentionCGSupport:
            resolution = resolve_cudagraph_mode(
                mode, level, piecewise=True, uniform_decode_query_len=3
            )
            assert bool(resolution.downgrades) == (level < AttentionCGSupport.UNIFORM_BATCH)


def test_docs_have_a_row_for_each_rule() -> None:
    assert _rows(HOW_IT_WORKS, "reason") == [_rule_row(rule.reason) for rule in RULES]


def _rule_row(reason: str) -> list[str]:
    """What a rule does in any situation that can be."""
    found: dict[bool, dict[CUDAGraphMode, CUDAGraphMode]] = {True: {}, False: {}}
    for mode, level, piecewise, query_len in product(
        CUDAGraphMode, AttentionCGSupport, (True, False), (1, 2)
    ):
        resolution = resolve_cudagraph_mode(
            mode, level, piecewise=piecewise, uniform_decode_query_len=query_len
        )
        for downgrade in resolution.downgrades:
            if downgrade.reason == reason:
                found[piecewise][downgrade.before] = downgrade.after
    lowered = [mode for mode in CUDAGraphMode if mode in found[True] or mode in found[False]]
    results = [
        ", ".join(dict.fromkeys(after.name for after in found[piecewise].values())) or "-"
        for piecewise in (True, False)
    ]
    return [reason, ", ".join(mode.name for mode in lowered), *results]


def test_docs_have_a_row_for_each_backend() -> None:
    expected = [[row.pattern, row.level.name] for row in KNOWN_BACKENDS]
    assert _rows(OPTIONS, "backend") == expected


def test_docs_have_a_row_for_each_option_with_its_default() -> None:
    rows = {row[0]: row[1] for row in _rows(OPTIONS, "option")}
    assert rows == {option.name: _default(option) for option in fields(CompilationConfig)}


def _default(option: Any) -> str:
    value = option.default if option.default is not MISSING else option.default_factory()
    if value == PassConfig():
        return "all off"
    if isinstance(value, str):
        return f'"{value}"'
    return str(dict(value) if isinstance(value, MappingProxyType) else value)


def test_docs_name_each_pass() -> None:
    row = next(row for row in _rows(OPTIONS, "option") if row[0] == "pass_config")
    assert re.findall(r"enable_\w+", row[2]) == [flag.name for flag in fields(PassConfig)]


def test_docs_say_what_is_not_available() -> None:
    asking: dict[str, Any] = {
        "use_inductor_graph_partition": True,
        "pass_config": {"enable_noop": True},
        "inductor_passes": {"mine": len},
        "compile_sizes": (1,),
        "compile_ranges_endpoints": (1,),
        "cache_dir": "somewhere",
    }
    refused = [error.option for error in unavailable(CompilationConfig.from_options(asking))]
    section = OPTIONS.partition("## Not available yet")[2]
    assert [row[0] for row in _rows(section, "option")] == refused
    line = re.search(r"\*\*Not available yet\*\*.*?\n\n", README, re.DOTALL)
    assert line is not None
    assert re.findall(r"`(\w+)`", line[0]) == refused


def test_readme_has_a_row_for_each_public_name() -> None:
    rows = [row[0] for row in _rows(README, "name")]
    assert sorted(rows) == sorted({*compile_backend.__all__, "explain"})
