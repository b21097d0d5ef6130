"""The pages say what the results say, and figures are computed right."""

from __future__ import annotations

import json
from pathlib import Path

import figures
import figures_decoding
import figures_kernels
import figures_worth
import pytest
import tables
from figures import Missing, Results
from support import ROOT
from support.benches import run_main


@pytest.mark.parametrize("name", tables.PAGES)
def test_a_page_says_what_the_results_say(name):
    """If this fails: python bench/tables.py --write"""
    page = (ROOT / name).read_text(encoding="utf-8")
    assert tables.filled(page, Results(tables.FOLDER)) == page
    assert page.count("<!-- begin: ") == page.count("<!-- end -->") == len(tables.BLOCK.findall(page)) > 0


def test_every_figure_has_a_place():
    pages = "".join((ROOT / name).read_text(encoding="utf-8") for name in tables.PAGES)
    assert {name for _, name, _ in tables.BLOCK.findall(pages)} == {*tables.FIGURES}


@pytest.mark.parametrize(
    "value, shown",
    [(0.03761, "0.0376"), (1.0, "1.00"), (12.345, "12.3"), (99.96, "100"), (1234.5, "1,234"), (0, "0.00")],
)
def test_numbers_have_three_digits(value, shown):
    assert figures.number(value) == shown


def result(folder: Path, name: str, **content: object) -> Results:
    stamp = {"commit": "f" * 40, "dirty": False, "date": "2026-01-02T03:04:05", "instruction_set": "avx2", "threads": 2}
    about = {"complete": True, **stamp, "command": f"python bench/x.py --json {name}.json"}
    (folder / f"{name}.json").write_text(json.dumps(about | content))
    return Results(folder)


def summary(median: float, q1: float, q3: float) -> dict[str, float]:
    return {"median": median, "q1": q1, "q3": q3, "rounds": 5}


STEP = {
    "B": 1, "K": 5, "V": 1000, "drafts": "typical", "cases": {"step": {"alpha": 0.7612}},
    "seconds": {"cpu": summary(2e-3, 1e-3, 3e-3), "cpu+stats": summary(1e-3, 1e-3, 1e-3)},
    "ratios": {"cpu/transformers": summary(0.1, 0.05, 0.2), "cpu/floor_all_rows": summary(2.0, 1.5, 2.5)},
}  # fmt: skip


def test_kernels_times_become_speed_ups_with_their_quartiles_in_order(tmp_path):
    results = result(tmp_path, "speculative_step", rows=[STEP], bandwidth={"read": 3e10})
    lines = figures_kernels.steps("speculative_step")(results).splitlines()
    assert lines[0].split(" | ")[-2:] == ["times as fast as transformers", "times the floor |"]
    row = "| 1000 | 1 | 5 | alpha 0.76 | 2.00 ms | 1.00 ms | 10.0 (5.00 to 20.0) | 2.00 (1.50 to 2.50) |"
    assert lines[2:4] == [row, ""]
    said = " ".join(lines[4:])
    assert (
        "(30 GB/s)" in said and "`bench/results/cpu/speculative_step.json` (commit ffffffffff, 2026-01-02, avx2" in said
    )
    assert said.endswith("`python bench/x.py`")


def test_comparisons_have_quartiles_of_rounds(tmp_path):
    def method(name: str, speeds: list[float], **more: object) -> dict:
        spread = {"tokens_per_second": {"per_round": speeds}}
        rates = {"acceptance_rate": 0.5, "alpha": 0.7, "tau": 3.0, "loop_fraction": 0.036}
        return {"name": name, "tokens_per_second": speeds[1], "spread": spread, **rates, **more}

    methods = [method("plain", [10.0, 20.0, 30.0]), method("specdec", [20.0, 40.0, 60.0], num_drafts=4)]
    ratios = {"specdec/plain": {"per_round": [1.0, 2.0, 3.0]}}
    text = figures_decoding.compare("compare")(
        result(tmp_path, "compare", methods=methods, ratios=ratios, greedy_equal=False)
    )
    assert "| target alone (`generate`) |  | 20.0 (15.0 to 25.0) | 2.00 (1.50 to 2.50) |" in text
    assert "| specdec | 4 | 40.0 (30.0 to 50.0) |  |" in text and "not equal" in text and "3.60 %" in text


def test_rows_have_the_scaling_of_every_method(tmp_path):
    def row(method: str, rows: int, speed: float) -> dict:
        value = summary(speed, speed, speed)
        about = {"part": "rows", "temperature": 0.0, "method": method, "rows": rows, "tokens_per_second": value}
        return about | {"times_plain": value, "times_1_row": value, "prompts": 4 * rows, "new_tokens": 48}

    rows = [row(method, n, n + offset) for offset, method in ((0.5, "plain"), (0.25, "K adapts")) for n in (1, 8)]
    text = figures_decoding.throughput(result(tmp_path, "throughput", rows=rows))
    assert "K adapts: times plain | plain: times 1 row | K adapts: times 1 row |" in text
    assert "| 0 | 8 | 8.50 | 8.25 | 8.25 (8.25 to 8.25) | 8.50 | 8.25 |" in text
    assert "Jobs of 4, 32 prompts, with 48 new tokens each." in text


def test_lengths_are_relative_to_plain(tmp_path):
    def row(drafter: str, fixed: dict[str, float], of_best: float) -> dict:
        about = {"drafter": drafter, "temperature": 0.0, "rows": 8, "times_plain_of_fixed": fixed}
        return about | {"of_plain": 1.25, "of_best": of_best, "plain_again": summary(1.0, 0.9, 1.1)}

    rows = [row("model", {"model, K=1": 1.1, "model, K=4": 1.3}, 0.96), row("lookup", {"lookup, K=4": 0.5}, 1.0)]
    text = figures_decoding.lengths(result(tmp_path, "lengths", rows=rows))
    assert "| drafter | temperature | rows | K = 1 | K = 4 | adaptive K | of the best | plain again |" in text
    assert "| lookup | 0 | 8 |  | 0.500 | 1.25 | 1.00 | 1.00 (0.900 to 1.10) |" in text
    assert "| model | 0 | 8 | 1.10 | 1.30 | 1.25 | 0.960 |" in text and "has 0.960 of the best" in text


def test_heads_have_a_line_for_chain_and_tree(tmp_path):
    def method(name: str, tau: float, equal: int, k: int = 4) -> dict:
        speed, times = summary(10 * tau, 9 * tau, 11 * tau), summary(tau, tau, tau)
        about = {"name": name, "K": k, "tau": tau, "equal_to_plain": equal}
        return about | {"tokens_per_second": speed, "times_plain": times}

    def measured(temperature: float, equal: int) -> dict:
        chain, tree = method("x, chain", 2 + temperature, 8), method("x, tree", 3, equal, 6)
        return {"temperature": temperature, "methods": [method("plain", 1, 8, 0), chain, tree]}

    rows = [measured(0.0, 7), measured(1.0, 0)]
    text = figures_decoding.heads(result(tmp_path, "heads", rows=rows, new_tokens=64, nodes=16))
    assert "| drafter | K | greedy: tau | tokens/s | times plain | temperature 1: tau | tokens/s |" in text
    assert "| x, chain | 4 | 2.00 | 20.0 | 2.00 (2.00 to 2.00) | 3.00 | 30.0 | 3.00 (3.00 to 3.00) |" in text
    assert "| plain |  | 1.00 |" in text and "| x, tree | 6 | 3.00 |" in text
    assert "trees of 16 nodes" in text and "Of the greedy texts, 15 of 16 are" in " ".join(text.split())


def test_advice_stands_beside_what_was_measured(tmp_path):
    row = {
        "pair": "x", "answer": "plain", "K": 2, "predicted": {"tau": 1.5, "speedup": 0.9},
        "measured": {"tau": 1.6, "speedup": summary(1.0, 0.95, 1.05)}, "predicted_over_measured": 0.9,
    }  # fmt: skip
    rows = [row, {"pair": "y", "answer": "threads"}]
    text = figures_decoding.advised(result(tmp_path, "advise", rows=rows, new_tokens=64, rounds=3))
    assert "| x | do not | 2 | 1.50 | 1.60 | 0.90 | 1.00 (0.950 to 1.05) | 0.90 |" in text and "| y | threads |" in text


def test_predicted_times_stand_beside_measured_ones(tmp_path):
    def step(goal: str, gpu: str, total: float) -> dict:
        parts = {"measuring": 2e-6, "later": 1e-6, "total": total, "memory": 2.5e-6, "instructions": 1e-6}
        return {"goal": goal, "gpu": gpu, "seconds": parts}

    steps = [step(goal, gpu, 7e-6) for gpu in ("H100 SXM", "H200 SXM") for goal in ("latency", "few")]
    (tmp_path / "cpu").mkdir()
    results = result(tmp_path / "cpu", "machine_code", rows=[], steps=steps)
    text = figures_kernels.predicted_steps(results)
    assert "| case | H100 SXM | H200 SXM |" in text and "| `few` | 7.00 | 7.00 | 2.50 | 1.00 | 4.00 |" in text
    assert "No GPU has measured" in text
    brought = tmp_path / "nvidia-h100-80gb-hbm3" / "A"
    brought.mkdir(parents=True)
    timed = {"cuda+stats [cold]": summary(8.1e-6, 8e-6, 9e-6)}
    rows = [{"goal": "latency", "drafts": drafts, "seconds": timed} for drafts in ("typical", "all_accepted")]
    about = {"device": "cuda", "quick": False, "hardware": {"gpu": "NVIDIA H100 80GB HBM3"}, "rows": rows}
    (brought / "goals.json").write_text(json.dumps(about))
    text = figures_kernels.predicted_steps(results)
    assert "| `latency` | 7.00, measured 8.10 | 7.00 |" in text and "No GPU" not in text
    names = ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM", "NVIDIA GeForce RTX 5090", "RTX 5090", "NVIDIA B200")
    assert [figures_kernels.model_of(name) for name in names] == ["A100", "A100", "5090", "5090", "B200"]


@pytest.mark.parametrize("content", [{"quick": True}, {"complete": False}])
def test_what_is_not_whole_is_missing(tmp_path, content):
    results = result(tmp_path, "throughput", rows=[], **content)
    with pytest.raises(Missing, match="throughput"):
        results["throughput"]
    told = "Not measured yet: `python bench/regenerate.py throughput`."
    assert tables.text_of("throughput", results) == told
    page = "1 <!-- begin: throughput -->\nold\n<!-- end --> 2"
    assert tables.filled(page, results) == f"1 <!-- begin: throughput -->\n{told}\n<!-- end --> 2"


def test_a_figure_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ValueError, match="'speed', allowed: machine, "):
        tables.filled("<!-- begin: speed -->\n<!-- end -->", Results(tmp_path))


def test_the_command_finds_and_mends_an_old_page(tmp_path, monkeypatch):
    (tmp_path / "page.md").write_text("<!-- begin: memory -->\nold\n<!-- end -->\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "PAGES", ("page.md",))
    found = [run_main(tables, *options, "--folder", tmp_path).exit_code for options in ((), ("--write",), ())]
    assert found == [1, 0, 0] and "regenerate.py throughput" in (tmp_path / "page.md").read_text()


def test_what_a_step_costs_is_tau_over_the_speed_up(tmp_path):
    def method(name: str) -> dict:
        costs = [1.0, 1.2345] if name.endswith("adaptive") else None
        return {
            "name": name,
            "tau": 3.0,
            "alpha": 0.75,
            "drafted": 8,
            "speedup": summary(1.5, 1.4, 1.6),
            "step_costs": costs,
        }

    names = {"model, adaptive", "early exit after 4, adaptive", *(name for _, name, _ in figures_worth.CASES)}
    workloads = dict.fromkeys(workload for workload, _, _ in figures_worth.CASES)
    rows = [{"workload": w, "methods": [method(name) for name in names]} for w in workloads]
    results = result(tmp_path, "drafters", rows=rows)
    first = figures_worth.drafts(results).splitlines()[2]
    assert first == "| embedded pair, its draft model, K = 4 | 0.75 | 3.00 | 2.00 | 1.50 (1.40 to 1.60) |"
    assert "| embedded pair, its draft model | 1.00 | 1.23 |" in figures_worth.step_costs(results)


def test_speed_ups_by_rows_stand_in_the_order_of_rows(tmp_path):
    def row(count: int, temperature: float) -> dict:
        fixed = {"model, K=1": count + temperature, "model, K=4": 9.0}
        of = {"times_plain_of_fixed": fixed, "of_plain": 0.5, "plain_again": summary(1, 1, 1)}
        return {"drafter": "model", "rows": count, "temperature": temperature, **of}

    rows = [row(count, temperature) for count in (16, 1) for temperature in (1.0, 0.0)]
    lines = figures_worth.rows(result(tmp_path, "lengths", rows=rows)).splitlines()
    assert lines[0].endswith("| temperature 1: K = 1 | temperature 1: K = 4 | temperature 1: K adapts |")
    assert lines[2] == "| 1 | 1.00 | 9.00 | 0.500 | 2.00 | 9.00 | 0.500 |" and lines[3].startswith("| 16 | 16.0 |")
    assert "of 5 rounds" in lines[5]
