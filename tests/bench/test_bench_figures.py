"""The README's pictures and lines of `specdec bench`: from the same result, with its numbers."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import figures_bench
import figures_readme
import pytest
import tables
from figures import Missing, Results
from support import ROOT
from support.bench_results import cell, results

STAMP = {"complete": True, "commit": "f" * 40, "dirty": False, "date": "2026-01-02T03:04:05", "threads": 2}
METHODS = [cell(name, k) for name, k in (("transformers", None), ("plain", None), ("model", 1), ("model", 4))]
NEEDS_MATPLOTLIB = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib")


@pytest.fixture(scope="module")
def tool():
    """tools/bench_pictures.py, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("bench_pictures", ROOT / "tools" / "bench_pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def measured(tmp_path) -> Path:
    """A folder with a result in which transformers' assisted generation has three different rounds."""
    assisted = cell("model", 2) | {"id": "assisted", "method": "assisted", "rule": None}
    best = METHODS[3]["rounds"][0]["tokens_per_second"]
    assisted["rounds"] = [{"tokens_per_second": best / ratio} for ratio in (1.0, 1.5, 4.0)]
    about = {**STAMP, "instruction_set": "avx2", "command": "python -m specdec bench --json --output build/x"}
    (tmp_path / "bench.json").write_text(json.dumps(about | results([*METHODS, assisted])))
    return tmp_path


def test_lines_of_the_readme_are_the_fastest_method_beside_the_others(measured):
    rows = figures_bench.readme_rows(Results(measured))
    assert rows[0][0] == "embedded pair, greedy, draft model, K = 4: 228 tokens/s"
    assert [row[1] for row in rows] == [
        "transformers' `generate`: 80.0 tokens/s",
        "plain decoding by specdec: 100 tokens/s",
        "transformers' assisted generation: 193 tokens/s",
    ]
    assert [row[2] for row in rows] == ["2.85 (2.85 to 2.85)", "2.28 (2.28 to 2.28)", "1.50 (1.25 to 2.75)"]
    text = figures_readme.readme(Results(measured))
    assert text.startswith("![Tokens a second: greedy") and text.count("Not measured yet") == 5
    (measured / "bench.compiled.json").write_text((measured / "bench.json").read_text())
    row = figures_bench.compiled_row(Results(measured))
    assert row[0] == "with `--compile`, draft model, K = 4: 228 tokens/s"
    assert row[1:] == ("the same without drafts: 100 tokens/s", "2.28 (2.28 to 2.28)")


def test_the_table_has_each_method_at_its_fastest_k(measured):
    text = figures_bench.bench(Results(measured))
    assert "| draft model, K = 4 | 228 (217 to 240) | 2.28 (2.17 to 2.40) | 2.85 (2.71 to 2.99) | 0.80 | 3.36 |" in text
    assert "K = 1" not in text and "`python -m specdec bench`" in " ".join(text.split())
    assert "Greedy, one sequence at a time:" in text and "model token k=4 t=0 b=1 is the fastest" in text


@NEEDS_MATPLOTLIB
def test_pictures_are_drawn_from_the_result_that_they_name(measured, tool, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    files = tool.draw(measured, out)
    assert [file.name for file in files] == ["speed.svg", "speedup_by_k.svg"] == list(figures_bench.PICTURES)
    text = files[0].read_text()
    assert text.startswith("<?xml") and tool.digest(measured) in text
    shown = re.findall(r"\]\(docs/(\S+)\)", figures_bench.images(Results(measured)))
    assert shown == list(figures_bench.PICTURES)


def test_without_a_result_no_picture_is_shown_or_drawn(tool, tmp_path):
    with pytest.raises(Missing):
        tool.draw(tmp_path, tmp_path)
    text = figures_readme.readme(Results(tmp_path))
    assert "![" not in text and "`python bench/regenerate.py bench`" in text


def test_the_pictures_of_the_docs_are_those_of_the_present_result(tool):
    """If this fails: python tools/bench_pictures.py"""
    files = [ROOT / "docs" / name for name in figures_bench.PICTURES]
    if not (tables.FOLDER / "bench.json").exists():
        assert not [file for file in files if file.exists()]
        return
    assert all(tool.digest(tables.FOLDER) in file.read_text() for file in files)
