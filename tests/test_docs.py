"""The tables of README and docs say what the code says."""

import json
import re
import tomllib
from dataclasses import MISSING, fields
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

import compile_backend
from compile_backend.attention import flash_attn3, flashinfer
from compile_backend.attention.builder import AttentionBatch
from compile_backend.attention.registry import BACKENDS
from compile_backend.config import (
    CompilationConfig,
    CUDAGraphMode,
    PassConfig,
)
from compile_backend.pipeline import passes_at_first, passes_before_split, passes_of_flags
from compile_backend.resolve import RULES, resolve_cudagraph_mode
from compile_backend.runner_batch import Batch
from compile_backend.step_inputs import Dim
from compile_backend.support import KNOWN_BACKENDS, AttentionCGSupport, support_level

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
OPTIONS = (ROOT / "docs" / "options.md").read_text()
HOW_IT_WORKS = (ROOT / "docs" / "how-it-works.md").read_text()
RUNNER = (ROOT / "docs" / "runner.md").read_text()
ATTENTION = (ROOT / "docs" / "attention-backends.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


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
    for mode, level, piecewise, query_len, uncapturable in product(
        CUDAGraphMode, AttentionCGSupport, (True, False), (1, 2), (None, "piece_0")
    ):
        resolution = resolve_cudagraph_mode(
            mode,
            level,
            piecewise=piecewise,
            uniform_decode_query_len=query_len,
            uncapturable=uncapturable,
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
    if isinstance(value, (dict, MappingProxyType)):
        return json.dumps(dict(value)).replace("true", "True")
    return str(value)


def test_docs_name_each_pass() -> None:
    row = next(row for row in _rows(OPTIONS, "option") if row[0] == "pass_config")
    assert re.findall(r"enable_\w+", row[2]) == [flag.name for flag in fields(PassConfig)]


def test_how_it_works_has_a_row_for_each_pass() -> None:
    asked = [(each.name, flag) for flag, passes in passes_of_flags().items() for each in passes]
    always = [(each.name, "") for each in (*passes_at_first(), *passes_before_split())]
    assert [tuple(row[:2]) for row in _rows(HOW_IT_WORKS, "pass")] == [*asked, *always]


def test_readme_has_a_row_for_each_public_name() -> None:
    rows = [row[0] for row in _rows(README, "name")]
    assert sorted(rows) == sorted({*compile_backend.__all__, "explain"})


# --- runner.md ---


def test_runner_page_has_a_row_for_each_mode() -> None:
    """Prompts, whole or in chunks, are mixed batches, too."""
    assert _rows(RUNNER, "mode") == [
        [mode.name, mode.mixed_mode().name, mode.mixed_mode().name, mode.decode_mode().name]
        for mode in CUDAGraphMode
    ]


def test_runner_page_has_a_row_for_each_size_that_changes() -> None:
    assert [row[0] for row in _rows(RUNNER, "Dim")] == [dim.name for dim in Dim]


@pytest.mark.parametrize(
    ("kind", "heading"), [(Batch, "field"), (AttentionBatch, "field of AttentionBatch")]
)
def test_runner_page_has_a_row_for_each_field_of_a_batch(kind: Any, heading: str) -> None:
    assert [row[0] for row in _rows(RUNNER, heading)] == [each.name for each in fields(kind)]


# --- attention-backends.md ---


def test_backends_page_has_a_row_for_each_backend_with_its_level() -> None:
    """In the order in which `auto` looks."""
    rows = _rows(ATTENTION, "backend")
    assert [row[:2] for row in rows] == [
        [row.name, support_level(row.name).name] for row in BACKENDS
    ]


def test_backends_page_says_what_is_not_built_and_what_that_needs() -> None:
    found = {row[0]: row[2] for row in _rows(ATTENTION, "backend") if row[3] == "not built here"}
    assert found == {row.name: row.needs for row in BACKENDS if row.needs}


def test_backends_page_has_a_row_for_each_level() -> None:
    named = [row[0].partition(",")[0] for row in _rows(ATTENTION, "level")]
    assert named == [level.name for level in AttentionCGSupport]


@pytest.mark.parametrize("module", [flash_attn3, flashinfer], ids=lambda module: module.__name__)
def test_packages_of_kernels_are_extras_at_the_release_that_was_checked(module: Any) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = {flash_attn3: "flash-attn-3", flashinfer: "flashinfer"}[module]
    wanted = [line.partition(";")[0] for line in project["optional-dependencies"][extra]]
    assert module.REQUIREMENT in wanted
    row = {flash_attn3: "flash_attn_3", flashinfer: "flashinfer"}[module]
    needs = {row[0]: row[2] for row in _rows(ATTENTION, "backend")}[row]
    assert module.REQUIREMENT in needs
    assert f"pip install '.[{extra}]'" in README
    line = next(line for line in ATTENTION.splitlines() if f"pip install '.[{extra}]'" in line)
    for requirement in wanted:
        assert requirement in line


# --- links ---


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings]
            assert anchor in anchors, target
