"""The pages say what the results say, stale numbers are marked, and figures are computed right."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import figures
import figures_decoding
import figures_kernels
import figures_pages
import pytest
import tables
from results import BY_NAME, FOLDER, Missing, Results, digests
from support import ROOT
from support.bench_results import cell, results
from support.benches import run_main

STAMP = {
    "complete": True, "commit": "f" * 40, "dirty": False, "date": "2026-01-02T03:04:05", "threads": 2,
    "instruction_set": "avx2", "hardware": {"cpu": "Example CPU", "cpu_capability": "AVX2"},
    "versions": {"torch": "2.13.0+cpu", "transformers": "5.23.0", "python": "3.11.7"},
}  # fmt: skip
SOURCE = (
    "commit ffffffffff, 2026-01-02, Example CPU, 2 threads (avx2), torch 2.13.0, transformers 5.23.0, Python 3.11.7."
)


@pytest.mark.parametrize("page", tables.pages_with_figures(), ids=lambda page: page.name)
def test_a_page_says_what_the_results_say(page):
    """If this fails: python bench/tables.py --write"""
    text = page.read_text(encoding="utf-8")
    assert tables.filled(text, Results()) == text
    assert text.count("<!-- begin: ") == text.count("<!-- end -->") == len(tables.BLOCK.findall(text)) > 0


def test_every_figure_has_a_place_and_every_result_a_figure():
    pages = "".join(page.read_text(encoding="utf-8") for page in tables.pages_with_figures())
    assert {name for _, name, _ in tables.BLOCK.findall(pages)} == {*tables.FIGURES}
    shown: set[str] = set()

    class Watched(Results):
        def __getitem__(self, name: str) -> dict:
            shown.add(name)
            return super().__getitem__(name)

    for name in tables.FIGURES:
        tables.text_of(name, Watched())
    assert shown == {*BY_NAME}


def test_readme_has_few_rows():
    block = next(text for _, name, text in re.findall(r"(<!-- begin: (\S+) -->)(.*?)<!-- end", readme(), re.DOTALL))
    assert 0 < len([line for line in block.splitlines() if line.startswith("| ")]) - 2 <= 7


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "value, shown",
    [(0.03761, "0.0376"), (1.0, "1.00"), (12.345, "12.3"), (99.96, "100"), (1234.5, "1,234"), (0, "0.00")],
)
def test_numbers_have_three_digits(value, shown):
    assert figures.number(value) == shown


def result(folder: Path, name: str, stale: bool = False, **content: object) -> Results:
    sources = digests(BY_NAME[name].sources) if not stale else {}
    about = {**STAMP, "command": f"python bench/x.py --json {name}.json", "sources": sources}
    (folder / f"{name}.json").write_text(json.dumps(about | content))
    return Results(folder)


def summary(median: float, q1: float | None = None, q3: float | None = None) -> dict[str, float]:
    return {"median": median, "q1": q1 or median, "q3": q3 or median, "rounds": 5}


STEP = {
    "B": 1, "K": 5, "V": 32000, "drafts": "typical", "cases": {"step": {"alpha": 0.7612}},
    "seconds": {"cpu": summary(2e-3, 1e-3, 3e-3), "cpu+stats": summary(1e-3)},
    "ratios": {"cpu/transformers": summary(0.1, 0.05, 0.2), "cpu/floor_all_rows": summary(2.0, 1.5, 2.5)},
}  # fmt: skip


@pytest.mark.parametrize("stale", [False, True])
def test_times_become_speed_ups_and_stale_rows_are_marked(tmp_path, stale):
    shown = result(tmp_path, "speculative_step", stale, rows=[STEP, {**STEP, "V": 999}], bandwidth={"read": 3e10})
    text = figures_kernels.steps("speculative_step")(shown)
    lines, said = text.splitlines(), " ".join(text.split())
    assert lines[0].split(" | ")[-2:] == ["times as fast as transformers", "times the floor |"]
    mark = " †" if stale else ""
    row = f"| 32000{mark} | 1 | 5 | alpha 0.76 | 2.00 ms | 1.00 ms | 10.0 (5.00 to 20.0) | 2.00 (1.50 to 2.50) |"
    assert lines[2:4] == [row, ""] and "(30 GB/s)" in said
    assert f"`bench/results/cpu/speculative_step.json`: `python bench/x.py`, {SOURCE}" in said
    assert said.endswith(figures.STALE) == stale


def test_a_machine_whose_torch_has_other_instructions_says_so():
    other = {**STAMP, "hardware": {"cpu": "Example CPU", "cpu_capability": "AVX512"}}
    assert figures.hardware(other) == "Example CPU, 2 threads (avx2, torch: avx512)"


def test_a_stale_number_that_is_not_marked_is_found(tmp_path, monkeypatch):
    """The page was written when the result was fresh; since then what it measured has changed."""
    page = tmp_path / "page.md"
    page.write_text("<!-- begin: speculative_step -->\n<!-- end -->\n")
    monkeypatch.setattr(tables, "pages_with_figures", lambda: [page])
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    content = {"rows": [STEP], "bandwidth": {"read": 3e10}}
    result(tmp_path, "speculative_step", **content)
    assert run_main(tables, "--write", "--folder", tmp_path).exit_code == 0 and "†" not in page.read_text()
    result(tmp_path, "speculative_step", stale=True, **content)
    found = run_main(tables, "--folder", tmp_path)
    assert found.exit_code == 1 and "page.md: not what the results say" in found.output
    assert run_main(tables, "--write", "--folder", tmp_path).exit_code == 0 and "| 32000 † |" in page.read_text()
    assert run_main(tables, "--folder", tmp_path).exit_code == 0


def test_comparisons_have_quartiles_of_rounds(tmp_path):
    def method(name: str, speeds: list[float], **more: object) -> dict:
        spread = {"tokens_per_second": {"per_round": speeds}}
        rates = {"acceptance_rate": 0.5, "alpha": 0.7, "tau": 3.0, "loop_fraction": 0.036}
        return {"name": name, "tokens_per_second": speeds[1], "spread": spread, **rates, **more}

    methods = [method("plain", [10.0, 20.0, 30.0]), method("specdec", [20.0, 40.0, 60.0], num_drafts=4)]
    ratios = {"specdec/plain": {"per_round": [1.0, 2.0, 3.0]}}
    shown = result(tmp_path, "compare", methods=methods, ratios=ratios, greedy_equal=False)
    text = figures_decoding.compare("compare")(shown)
    assert "| target alone (`generate`) |  | 20.0 (15.0 to 25.0) | 2.00 (1.50 to 2.50) |" in text
    assert "| specdec | 4 | 40.0 (30.0 to 50.0) |  |" in text and "not equal" in text and "3.60 %" in text


def race(rows: int, temperature: float, **times: float) -> dict:
    """A row of bench_lengths.py; ``K_1=1.5``: that is the speed over plain decoding of the draft model's K = 1."""
    names = {f"model, {name.replace('_', '=')}": value for name, value in times.items()}
    names |= {"plain": 1.0, "plain again": 1.01, "never right, auto": 0.5}
    methods = {
        name: {"times_plain": summary(value), "tokens_per_second": summary(100 * value), "step_costs": [1.0, 1.25]}
        for name, value in names.items()
    }
    return {"rows": rows, "temperature": temperature, "prompt_tokens": 32, "new_tokens": [32, 96], "methods": methods}


@pytest.fixture
def lengths(tmp_path) -> Results:
    rows = [race(16, 0.0, K_1=1.5, auto=1.2), race(2, 0.0, K_1=2.5, auto=2.75)]
    return result(tmp_path, "lengths", rows=rows, rule="coupled")


def test_lengths_are_relative_to_plain(lengths):
    text = figures_decoding.lengths(lengths)
    assert "| drafter |  | rows | K = 1 | K adapts | of the best | plain again |" in text
    assert "| model | greedy | 16 | 1.50 | 1.20 | 0.800 | 1.01 (1.01 to 1.01) |" in text
    assert "| never right | greedy | 2 |  | 0.500 | 0.500 |" in text
    said = " ".join(text.split())
    assert "32 tokens of unseen code, 32 to 96 new ones" in said and "At worst it has 0.500 of these" in said


def test_worth_it_has_costs_and_speed_ups_by_rows(lengths):
    lines = figures_pages.worth_rows(lengths).splitlines()
    assert (
        lines[0]
        == "| texts at a time | greedy: K = 1 | greedy: K adapts | greedy, a draft that is never right: K adapts |"
    )
    assert lines[2:4] == ["| 2 | 2.50 | 2.75 | 0.500 |", "| 16 | 1.50 | 1.20 | 0.500 |"]
    assert "| texts at a time | K = 0 | K = 1 |" in (costs := figures_pages.worth_costs(lengths))
    assert "| 16 | 1.00 | 1.25 |" in costs


# ---- specdec bench

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
    result(tmp_path, "bench", **results([*METHODS, assisted]))
    return tmp_path


def test_lines_of_the_readme_are_the_fastest_method_beside_the_others(measured):
    text = figures_pages.readme(Results(measured))
    assert text.startswith("![Tokens a second: greedy") and text.count("Not measured yet") == 4
    texts = "(1 prompts of 1 kinds, 64 new tokens each)"
    on = "Example CPU, 2 threads (avx2); `bench`, commit ffffffffff, 2026-01-02 |"
    first = f"| embedded pair, greedy, one text at a time {texts}, draft model, K = 4: 228 tokens/s |"
    assert f"{first} transformers' `generate`: 80.0 tokens/s | 2.85 (2.85 to 2.85) | {on}" in text
    assert f"| the same | plain decoding by specdec: 100 tokens/s | 2.28 (2.28 to 2.28) | {on}" in text
    assert f"| the same | transformers' assisted generation: 193 tokens/s | 1.50 (1.25 to 2.75) | {on}" in text
    assert "†" not in text and text.endswith("torch 2.13.0, transformers 5.23.0, Python 3.11.7.")
    content = json.loads((measured / "bench.json").read_text())
    result(measured, "bench.compiled", stale=True, **{"cells": content["cells"], **results(content["cells"])})
    text = figures_pages.readme(Results(measured))
    row = "| with `--compile`, draft model, K = 4: 228 tokens/s | the same without drafts: 100 tokens/s |"
    assert f"{row} 2.28 (2.28 to 2.28) † |" in text and text.count("†") == 2 and text.endswith(figures.STALE)


def test_what_is_as_fast_within_noise_is_named(measured):
    content = json.loads((measured / "bench.json").read_text())
    verdict = content["verdicts"][0]
    verdict["within_noise"] = [METHODS[3]["id"], METHODS[2]["id"]]
    (measured / "bench.json").write_text(json.dumps(content))
    assert "228 tokens/s; as fast within noise: draft model, K = 1 |" in figures_pages.readme(Results(measured))


def test_the_table_has_each_method_at_its_fastest_k(measured):
    text = figures_decoding.bench("bench")(Results(measured))
    assert "| draft model, K = 4 | 228 (217 to 240) | 2.28 (2.17 to 2.40) | 2.85 (2.71 to 2.99) | 0.80 | 3.36 |" in text
    assert "K = 1" not in text and SOURCE in " ".join(text.split())
    assert "K = 1" in figures_decoding.bench("bench", every_k=True)(Results(measured))
    assert "Greedy, one sequence at a time:" in text and "model token k=4 t=0 b=1 is the fastest" in text


def test_worth_it_divides_tau_by_what_a_step_costs(measured):
    text = figures_pages.worth_drafts(Results(measured))
    # The time between tokens is 1 / speed here, so tau over the cost of a step is the speed-up.
    assert "| draft model, K = 4 | 0.80 | 3.36 | 1.47 | 2.28 | 2.28 (2.17 to 2.40) |" in text
    assert "transformers" not in text.split("\n\n")[0] and text.count("| draft model") == 2


@NEEDS_MATPLOTLIB
def test_pictures_are_drawn_from_the_result_that_they_name(measured, tool, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    files = tool.draw(measured, out)
    assert [file.name for file in files] == ["speed.svg", "speedup_by_k.svg"] == list(figures_decoding.PICTURES)
    text = files[0].read_text()
    assert text.startswith("<?xml") and tool.digest(measured) in text
    shown = re.findall(r"\]\(docs/(\S+)\)", figures_decoding.images(Results(measured)))
    assert shown == list(figures_decoding.PICTURES)


def test_without_a_result_no_picture_is_shown_or_drawn(tool, tmp_path):
    with pytest.raises(Missing):
        tool.draw(tmp_path, tmp_path)
    text = figures_pages.readme(Results(tmp_path))
    assert "![" not in text and "`python bench/regenerate.py bench`" in text


def test_the_pictures_of_the_docs_are_those_of_the_present_result(tool):
    """If this fails: python tools/bench_pictures.py"""
    assert all(tool.digest(FOLDER) in (ROOT / "docs" / name).read_text() for name in figures_decoding.PICTURES)
