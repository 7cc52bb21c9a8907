"""Explanations as a page: everything is on it, and it needs nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from toy import rows, toy_model

from compile_backend import explain
from compile_backend.cli import _write_page, main
from compile_backend.errors import ConfigError
from compile_backend.explain_html import as_page, drawing
from compile_backend.explanation import Explanation

OPTIONS: dict[str, Any] = {"splitting_ops": ["toy::*"], "cudagraph_capture_sizes": [1, 2, 4]}
FP8 = torch.float8_e4m3fn
_OPEN = frozenset({"meta", "br"})


class _Balanced(HTMLParser):
    """Fails where a tag is closed that was not opened last."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert not any(name in ("src", "href") for name, _ in attrs)
        if tag not in _OPEN:
            self.opened.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        """A tag that is closed as it is opened, as in SVG."""

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter() if element.text]


def test_sections_cuts_and_sizes_are_drawn_in_order() -> None:
    told = explain(toy_model("attn_out", 3), rows(4), options=OPTIONS)
    (graph,) = told.graphs
    said = texts(drawing(graph))
    names = [text.partition(":")[0].partition(",")[0] for text in said]
    drawn = [name for name in names if re.fullmatch(r"(piece|eager)_\d+", name)]
    assert drawn == [section.name for section in graph.sections]
    assert sum("cut by toy::attn_out" in text for text in said) == 3
    assert any("one of 3 equal ones" in text for text in said)
    assert any("1, 2, 4" in text for text in said)
    num_sizes = sum(len(keys.num_tokens) for keys in graph.keys)
    rectangles = re.findall("<rect", drawing(graph))
    assert len(rectangles) == len(graph.sections) + num_sizes


def test_what_fusions_made_is_marked_and_the_graphs_differ() -> None:
    def layer(gate: torch.Tensor, up: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        made = torch.nn.functional.silu(gate) * up
        return (made.float() / scale).clamp(-448, 448).to(FP8).float()

    inputs = (torch.ones(4, 64), torch.ones(4, 64), torch.tensor(0.1))
    for flags, expected in (({}, 0), ({"enable_fusion": True}, 1)):
        (graph,) = explain(layer, *inputs, options={"pass_config": flags}).graphs
        marks = [text for text in texts(drawing(graph)) if text.startswith("fused: ")]
        assert marks == ["fused: silu_mul_static_fp8"] * expected
        assert "silu_mul_static_fp8" not in graph.code_before
        assert ("silu_mul_static_fp8" in graph.code_after) == bool(expected)


def test_a_page_is_balanced_escaped_and_loads_nothing() -> None:
    told = explain(toy_model("attn_out", 2), rows(4), options=OPTIONS)
    page = as_page({"a <b> & c": told, "again": told})
    parser = _Balanced()
    parser.feed(page)
    assert not parser.opened
    assert page.count("<svg") == 2
    assert "a &lt;b&gt; &amp; c" in page
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}


class _Read(HTMLParser):
    """The text of the title and of the headings."""

    def __init__(self) -> None:
        super().__init__()
        self.said: dict[str, str] = {"title": "", "h1": ""}
        self.tag = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tag = tag

    def handle_endtag(self, tag: str) -> None:
        self.tag = ""

    def handle_data(self, data: str) -> None:
        if self.tag in self.said:
            self.said[self.tag] += data


@given(st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), min_size=1))
@example("</title><script>alert(1)</script>")
@example('"quoted" & <b>bold</b> &amp;')
def test_any_title_reads_as_it_was_given(title: str) -> None:
    assume(title.strip())
    reader = _Read()
    reader.feed(as_page({title: Explanation(())}))
    reader.close()
    assert reader.said == {"title": title, "h1": title}


@pytest.mark.parametrize(
    ("explanations", "problem"),
    [
        ({}, "explanations={} must map titles to explanations; use {'a title': explain"),
        (Explanation(()), "must map titles to explanations"),
        ([("a", Explanation(()))], "must map titles to explanations"),
        ({3: Explanation(())}, "explanations=[3] has the title 3; use {'a title': explain"),
        ({None: Explanation(())}, "has the title None"),
        ({"": Explanation(())}, "has the title ''"),
        ({" ": Explanation(())}, "has the title ' '"),
        ({"a": "told"}, "explanations=['a'] has str at 'a', which is no Explanation"),
    ],
    ids=str,
)
def test_what_is_no_titled_explanation_is_refused(explanations: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        as_page(explanations)


def test_a_page_with_a_name_of_a_file_that_is_no_text_is_written(tmp_path: Path) -> None:
    _write_page(tmp_path / "page.html", as_page({"model\udcff": Explanation(())}))
    assert "model\\udcff" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_lowered_mode_and_its_reason_are_told() -> None:
    options = {**OPTIONS, "cudagraph_mode": "FULL", "attention_support": {"toy::*": "NEVER"}}
    told = explain(toy_model("attn_out", 2), rows(4), options=options)
    (graph,) = told.graphs
    page = as_page({"call": told})
    assert f"FULL was asked for, {graph.mode_resolved.name} it is" in page
    assert graph.downgrades


@pytest.mark.parametrize(
    ("name", "problem"),
    [("missing/page.html", "is in no directory that exists"), ("", "is a directory")],
)
def test_the_command_refuses_what_cannot_be_a_file(
    name: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--model", "demo", "--html", str(tmp_path / name)]) == 2
    assert problem in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_told() -> None:
    with pytest.raises(ConfigError, match="'/dev/full' cannot be written: No space left"):
        _write_page(Path("/dev/full"), "page")
