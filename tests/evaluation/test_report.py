"""The report as files: a page that stands alone and makes text of text, pictures of equal bytes, and refusals."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")
from specdec.cli import app
from specdec.evaluation.report import read_results, sections_of, write_report
from specdec.evaluation.report.html_page import html_page
from support.bench_results import cell, grid, results
from typer.testing import CliRunner

SMALL = [cell("transformers", None), cell("plain", None), cell("model", 1), cell("model", 4)]
HOSTILE = "<script>alert(1)</script>\"'&\u202e\x1b\ud800<img src=http://example.com/x>"
SEEN = "<script>alert(1)</script>\"'&U+202EU+001BU+D800<img src=http://example.com/x>"
VOID = {"meta", "source", "img", "link", "br"}


class Page(HTMLParser):
    """What a browser makes of the page: elements in the right order, their attributes, and texts."""

    def __init__(self, html: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "style" not in self._open:
            self.text += data
        if {"td", "th"} & {*self._open}:
            self.tables[-1][-1][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def whole(**changed) -> dict:
    return results(SMALL) | changed


def page_of(content: dict) -> str:
    read = read_results(content)
    return html_page(read, sections_of(read))


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[list[Path], str]:
    """A report of all sections, and its page. Temperature 1 has speed-ups only."""
    cells = grid(temperatures=(0.0,), lengths=(1, 4))
    cells += [cell("model", k, 1.0) | {"tokens_per_second": None} for k in (1, 4)]
    files = write_report(results(cells), tmp_path_factory.mktemp("report"), ["svg"])
    return files, files[0].read_text(encoding="utf-8")


def test_files_have_the_names_of_the_pictures(written):
    files, _ = written
    names = [str(file.relative_to(files[0].parent)) for file in files]
    settings = ("speed-t0-b1", "lengths-t0-b1", "lengths-t1-b1")
    assert names == ["report.html", *(f"plots/{name}.svg" for name in settings)]
    assert not list(files[0].parent.rglob("*.part"))
    assert {ElementTree.parse(file).getroot().tag for file in files[1:]} == {"{http://www.w3.org/2000/svg}svg"}


def test_the_page_stands_alone(written):
    html = written[1]
    parsed = Page(html)
    used = {name for name, _ in parsed.elements}
    assert not used & {"script", "link", "iframe", "object", "embed", "form", "base"}
    addresses = [a["src"] for _, a in parsed.elements if "src" in a]
    assert addresses and all(a.startswith("data:image/svg+xml;base64,") for a in addresses)
    assert not parsed.all("a") and not parsed.all("source")
    assert not [name for _, attributes in parsed.elements for name in attributes if name.startswith("on")]
    style = re.search("<style>(.*?)</style>", html, re.DOTALL)[1]
    assert "url(" not in style and "@import" not in style
    policy = next(a["content"] for a in parsed.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert f"'sha256-{digest}'" in policy and not [a for _, a in parsed.elements if "style" in a]


def test_it_begins_with_the_verdicts_then_says_what_measured_and_ends_with_what_to_doubt(written):
    text = Page(written[1]).text
    order = (
        *("At temperature 0, model token k=4 t=0 b=1 is the fastest.", "Greedy texts are those of plain decoding."),
        *("Example CPU", "2.13.0+cpu", "specdec bench --repeats 3"),
        *("Tokens a second: greedy", "Speed-up against K: greedy", "model token k=1 t=1", "within noise of each other"),
    )
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_every_picture_has_a_text_and_a_table_of_its_numbers(written):
    parsed = Page(written[1])
    assert len(parsed.all("figure")) == len(parsed.all("img")) == 3
    assert all(image["alt"] for image in parsed.all("img"))
    assert [row[0] for row in parsed.tables[0]][:2] == ["method", "draft model, K = 4"]
    assert parsed.tables[0][1][1:4] == ["228 (217 to 240)", "2.28 (2.17 to 2.40)", "2.85 (2.71 to 2.99)"]
    assert len(parsed.tables[-1]) == 1 + 8
    assert {len(row) for row in parsed.tables[-1]} == {14}


def test_text_only_becomes_text():
    cells = [c | {"method": HOSTILE, "id": HOSTILE + str(i)} for i, c in enumerate(SMALL[3:])]
    changed = {
        "models": {"target": {"name": HOSTILE}},
        "environment": {HOSTILE: HOSTILE, "command": HOSTILE},
        "prompts": [{"id": HOSTILE, "category": HOSTILE, "tokens": 1}],
    }
    html = page_of(results(cells, **changed))
    parsed = Page(html)
    assert html.encode() and not parsed.all("script")
    assert {image["src"][:5] for image in parsed.all("img")} == {"data:"}
    assert not [name for _, attributes in parsed.elements for name in attributes if name in ("onerror", "onload")]
    assert parsed.text.count(SEEN) >= 6 and "\u202e" not in html and "\x1b" not in html
    assert not re.search(r"[\ud800-\udfff]", html)


def test_a_name_makes_no_other_folder_and_no_formula():
    cells = [cell("model", k, t) | {"method": "../../a $\\frac{1}$ " + 50 * "x"} for t in (0.0, 1.0) for k in (1, 2)]
    for i, c in enumerate(cells):
        c["id"] = str(i)
    plots = [plot for section in sections_of(read_results(results(cells))) for plot in section.plots]
    assert len(plots) == 4 and all(re.fullmatch("[A-Za-z0-9.-]+", plot.name) for plot in plots)
    assert plots[0].file("svg")
    assert plots[0].table.rows[0][0] == "…" + 39 * "x" + ", K = 2"


def test_what_is_missing_is_said():
    text = Page(page_of({"format": "specdec bench 1"})).text
    for why in (
        "The results have no verdict.",
        "Greedy texts were not compared.",
        "The results do not say what measured them.",
        "No tokens a second: the results have no cells.",
    ):
        assert why in text


def test_a_difference_of_greedy_texts_is_not_hidden():
    text = Page(page_of(results([SMALL[0]], greedy={"equal": False, "differences": [{}, {}]}))).text
    assert "Greedy texts differ from those of plain decoding: 2 differences." in text


@pytest.mark.parametrize("content, named", [
    ({"format": "specdec bench 2"}, "the format 'specdec bench 2'"),
    ({"cells": []}, "the format None"),
    ([], "the format []"),
    (whole(cells=[SMALL[0], SMALL[0]]), "two cells of the same id"),
    (whole(cells=[SMALL[2] | {"tokens_per_second": {"median": "fast"}}]), "(ValueError: could not convert"),
    (whole(cells=[SMALL[2] | {"num_drafts": "many"}]), "other fields (ValueError: "),
    (whole(cells=["plain"]), "other fields (AttributeError: "),
    (whole(cells=[{}]), "other fields (KeyError: 'num_drafts'"),
    (whole(prompts=[1]), "other fields (AttributeError: "),
])  # fmt: skip
def test_other_files_are_refused(content, named, tmp_path):
    with pytest.raises(ValueError, match="^results: got .*" + re.escape(named) + ".*, allowed: "):
        write_report(content, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_picture_is_the_same_bytes_in_every_process(tmp_path):
    plot = sections_of(read_results(results(SMALL)))[1].plots[0]
    code = (
        "import sys\nfrom specdec.evaluation.report import *\n"
        "plot = sections_of(read_results(load_results(sys.argv[1])))[1].plots[0]\n"
        "for form in ('svg', 'png'):\n    sys.stdout.buffer.write(plot.file(form, 'machine'))\n"
        "assert 'torch' not in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    (tmp_path / "results.json").write_text(json.dumps(results(SMALL)))
    (tmp_path / "matplotlibrc").write_text("font.size: 30\nsvg.hashsalt: other\naxes.edgecolor: red\n")
    environment = {**os.environ, "PYTHONHASHSEED": "5", "MATPLOTLIBRC": str(tmp_path), "TZ": "Asia/Tokyo"}
    other = subprocess.run([sys.executable, "-c", code, tmp_path], env=environment, capture_output=True, check=True)
    svg = plot.file("svg", "machine")
    assert other.stdout == svg + plot.file("png", "machine")
    assert b"date" not in svg.lower() and svg.count(b"machine") == 1


def test_the_command_writes_where_it_is_told(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(results(SMALL[:1])))
    printed = run_report(tmp_path, "--format", "none").splitlines()
    assert printed == [str(tmp_path / "report.html")]
    printed = run_report(tmp_path / "results.json", "--output", tmp_path / "x" / "y", "--format", "png").splitlines()
    assert printed[1] == str(tmp_path / "x" / "y" / "plots" / "speed-t0-b1.png")
    assert Path(printed[1]).read_bytes().startswith(b"\x89PNG") and len(printed) == 2


def run_report(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["report", *(str(a) for a in arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_refuses(tmp_path, monkeypatch):
    def error(*arguments: object, code: int = 2) -> str:
        result = CliRunner().invoke(app, ["report", *(str(a) for a in arguments)])
        assert result.exit_code == code and result.stdout == ""
        return " ".join(result.stderr.partition("Error: ")[2].split())

    assert "results.json of `specdec bench`, or its folder" in error(tmp_path)
    (tmp_path / "results.json").write_text("{")
    assert "a readable JSON file" in error(tmp_path)
    (tmp_path / "results.json").write_text(json.dumps(results(SMALL[:1])))
    assert error(tmp_path, "--format", "pdf").startswith("Invalid value for --format: got 'pdf', allowed: png, svg")
    (tmp_path / "file").write_text("")
    assert "cannot be written to" in error(tmp_path, "--output", tmp_path / "file", code=1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'specdec-kernels[bench]'" in error(tmp_path)
