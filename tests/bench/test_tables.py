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
import figures_real
import pytest
import tables
from results import BY_NAME, FOLDER, Missing, Results, digests
from support import ROOT
from support.bench_results import TWO_KINDS, cell, played, results
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
    """A folder with results in which transformers' assisted generation has three different rounds. Those of the real
    model have two kinds of prompts, with the second of which drafts are slower, and sampled texts."""
    assisted = cell("model", 2) | {"id": "assisted", "method": "assisted", "rule": None}
    best = METHODS[3]["rounds"][0]["tokens_per_second"]
    assisted["rounds"] = [{"tokens_per_second": best / ratio} for ratio in (1.0, 1.5, 4.0)]
    result(tmp_path, "bench", **results([*METHODS, assisted]))
    plain = [played(c, *3 * [(1.0, 1.0)]) for c in METHODS[:2]]
    drafts = [played(c, *3 * [(0.5, 1.25)]) for c in METHODS[2:]]
    warm = [cell(name, k, 1.0) for name, k in (("transformers", None), ("plain", None), ("model", 4))]
    of_model = {"target": {"name": "real_models/Some-Model", "parameters": 9, "layers": 1}}
    whole = results([*plain, *drafts, assisted, *warm], prompts=TWO_KINDS, models=of_model)
    result(tmp_path, "smollm2", **whole)
    return tmp_path


def test_lines_of_the_readme_are_the_fastest_method_beside_the_others(measured):
    text = figures_pages.readme(Results(measured))
    assert text.startswith("![Tokens a second: greedy") and text.count("Not measured yet") == 4
    texts = "one text at a time (2 prompts of 2 kinds, up to 64 new tokens each; 3 rounds)"
    on = "Example CPU, 2 threads (avx2); `smollm2`, commit ffffffffff, 2026-01-02 |"
    first = f"| Some-Model in float32 without a draft, greedy, {texts}, draft model, K = 4: 228 tokens/s |"
    assert f"{first} transformers' `generate`: 80.0 tokens/s | 2.85 (2.85 to 2.85) | {on}" in text
    assert f"| the same | plain decoding by specdec: 100 tokens/s | 2.28 (2.28 to 2.28) | {on}" in text
    peer = "transformers' assisted generation by prompt lookup"
    assert f"| the same | {peer}: 193 tokens/s | 1.50 (1.25 to 2.75) | {on}" in text
    assert "| the same at temperature 1, draft model, K = 4: 188 tokens/s | transformers' `generate`: 80.0" in text
    said = " ".join(text.split())
    assert "†" not in text and said.endswith("torch 2.13.0, transformers 5.23.0, Python 3.11.7.")
    content = json.loads((measured / "smollm2.json").read_text())
    result(measured, "smollm2", stale=True, **{k: v for k, v in content.items() if k not in (*STAMP, "sources")})
    text = figures_pages.readme(Results(measured))
    assert "2.28 (2.28 to 2.28) † |" in text and " ".join(text.split()).endswith(figures.STALE)


def test_kinds_of_prompts_have_a_table_and_those_that_lose_are_named(measured):
    text = figures_decoding.bench("smollm2")(Results(measured))
    assert "| code | 2.00 | 1.00 |" in text
    said = " ".join(text.split())
    assert "Some-Model in float32: 2 prompts" in said
    assert "by specdec: greedy, one sequence at a time: draft model, K = 4 with story (0.800). Verdicts" in said


GREEDY = {"dtype": "bfloat16", "texts": 60, "tokens": 1900, "compared": 1200, "bugs": 0}


def test_greedy_texts_are_counted_beside_those_of_the_peer(tmp_path):
    rows = [
        GREEDY | {"method": name, "as_transformers": n, "as_own_plain": own, "near_ties": 60 - n}
        for name, n, own in (("transformers", 60, 60), ("suffix, K = 4", 50, 55), ("suffix, K adapts", 48, 51))
    ]
    content = {"target": "Some-Model", "new_tokens": 32, "prompts": 60}
    text = figures_real.greedy_texts(result(tmp_path, "greedy_texts", rows=rows, **content))
    assert "| bfloat16 | suffix, K adapts | 48 of 60, once in 100 tokens | 51 of 60 | 0 |" in text
    said = " ".join(figures_pages.readme(Results(tmp_path)).split())
    assert "(and transformers'): 51 of 60 (48) in bfloat16; the others leave it at near-ties" in said
    rows[0]["bugs"] = 2
    shown = result(tmp_path, "greedy_texts", rows=rows, **content)
    assert "(48) in bfloat16; 2 differences are bugs" in figures_real.greedy_in_short(shown)


def test_each_drafter_is_exact_or_not(tmp_path):
    about = {"check": "greedy", "texts": 16, "near_ties": 0, "bugs": 0, "tau": 1.5}
    test = {"kind": "ranks", "detectable": 0.44, "passed": True}
    texts = [about | {"drafter": name} for name in ("none", "lookup", "suffix", "early-exit")]
    texts += [about | {"drafter": "lookup", "check": "coupled", "near_ties": 3}]
    tested = [{"drafter": name, "samples": 512, "tests": [test, test]} for name in ("none", "lookup")]
    tested += [{"drafter": "suffix", "samples": 512, "tests": [test, test | {"passed": False}]}]
    content = {"texts": texts, "distributions": tested, "never_accepted": ["early-exit"]}
    text = figures_real.verified("verify.smollm2")(result(tmp_path, "verify.smollm2", **content))
    assert "| lookup | 16 | 16, 3 near-ties | 2 of 2 passed | 1.50 | yes |" in text
    assert "| suffix | 16 | 0 | 1 of 2 passed | 1.50 | no: 1 bugs |" in text
    assert "| 1.50 | not known: no draft was accepted |" in text and "factor 1 +- 0.440" in " ".join(text.split())


def test_the_table_has_each_method_at_its_fastest_k(measured):
    text = figures_decoding.bench("bench")(Results(measured))
    assert "| draft model, K = 4 | 228 (217 to 240) | 2.28 (2.17 to 2.40) | 2.85 (2.71 to 2.99) | 0.80 | 3.36 |" in text
    assert "K = 1" not in text and SOURCE in " ".join(text.split())
    assert "K = 1" in figures_decoding.bench("bench", every_k=True)(Results(measured))
    said = " ".join(text.split())
    assert "Greedy, one sequence at a time:" in text and "model token k=4 t=0 b=1 is the fastest" in said


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
    assert [file.name for file in files] == ["speed.svg", "speed_by_kind.svg"] == list(figures_decoding.PICTURES)
    text = files[0].read_text()
    assert text.startswith("<?xml") and tool.digest(measured) in text
    shown = re.findall(r"\]\(docs/(\S+)\)", figures_decoding.images(Results(measured)))
    assert shown == list(figures_decoding.PICTURES)


def test_without_a_result_no_picture_is_shown_or_drawn(tool, tmp_path):
    with pytest.raises(Missing):
        tool.draw(tmp_path, tmp_path)
    text = figures_pages.readme(Results(tmp_path))
    assert "![" not in text and "`python bench/regenerate.py smollm2`" in text


def test_the_pictures_of_the_docs_are_those_of_the_present_result(tool):
    """If this fails: python tools/bench_pictures.py. Where there is no result, the README shows none."""
    if not (FOLDER / f"{figures_decoding.PICTURED}.json").exists():
        assert "docs/speed" not in readme()
        return
    assert all(tool.digest(FOLDER) in (ROOT / "docs" / name).read_text() for name in figures_decoding.PICTURES)
