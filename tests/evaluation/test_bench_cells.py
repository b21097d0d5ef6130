"""What ``specdec bench`` measures, and what it makes of the numbers."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from specdec.evaluation.bench.grid import BenchCell, Grid, Method, Setting
from specdec.evaluation.bench.measure import BenchPrompt, measured, quantiles
from specdec.evaluation.bench.result_files import cells_csv, log_csv, results
from specdec.evaluation.bench.verdicts import interval, verdict
from specdec.evaluation.contenders import Arrival, Run
from specdec.stats import Stats

METHODS = tuple(Method(name) for name in ("assisted", "model", "lookup"))


def ids(grid: Grid) -> list[str]:
    return [cell.id for cell in grid.all_cells()]


def test_the_baselines_are_always_there():
    grid = Grid(METHODS, (0.0, 1.0), (1, 4), ("auto",))
    for setting in grid.settings():
        assert [cell.method for cell in grid.cells(setting)][:2] == ["transformers", "plain"]
    assert len({*ids(grid)}) == len(ids(grid)) == 5 + 4 + 5 + 4  # no assisted generation of four texts at a time


def test_defaults_sweep_over_the_draft_model():
    assert ids(Grid(METHODS)) == [
        f"{name} t=0 b=1"
        for name in (
            *("transformers", "plain", "assisted k=2", "assisted k=auto"),
            *(f"model token k={k}" for k in (1, 2, 4, 8, "auto")),
            "lookup token k=auto",
        )
    ]


def test_nothing_is_measured_twice():
    """At temperature 0 there are no filters, and every rule accepts alike."""
    grid = Grid((Method("model"),), (0.0, 0.7), (1,), (2,), ("token", "block"), {"top_k": (5, 9), "top_p": (0.9,)})
    drafting = [name for name in ids(grid) if name.startswith("model")]
    assert drafting == ["model token k=2 t=0 b=1"] + [
        f"model {rule} k=2 t=0.7 b=1 top-k={k} top-p=0.9" for k in (5, 9) for rule in ("token", "block")
    ]


def test_trees_stand_beside_chains():
    grid = Grid((Method("suffix", (None, 8)), Method("tree", (16,))), num_drafts=None, tree_drafts=5)
    assert [name.removesuffix(" t=0 b=1") for name in ids(grid)][2:] == [
        "suffix token k=auto",
        "suffix coupled tree=8 k=5",
        "tree coupled tree=16 k=5",
    ]


# ---- intervals and verdicts


def test_the_interval_is_that_of_the_sign_test():
    assert interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert interval(list(range(5))) == (0, 4) and interval(list(range(8))) == (0, 7)
    # With 9 values P(one at most lies below the median) = 10 / 512 < 0.025; with 8 it is 9 / 256.
    assert interval(list(range(9))) == (1, 7) and interval(list(range(20))) == (5, 14)


@pytest.mark.parametrize("n", (6, 9, 15, 30))
def test_the_interval_has_the_median_as_often_as_it_says(n):
    random.seed(n)
    trials = 2000
    found = (interval([random.lognormvariate(0, 1) for _ in range(n)]) for _ in range(trials))
    hits = sum(low <= 1 <= high for low, high in found)
    assert hits >= 0.95 * trials - 4 * (0.05 * 0.95 * trials) ** 0.5


CELLS = Grid((Method("model"),), num_drafts=(2, 4)).all_cells()
PLAIN, FEW, MANY = (cell.id for cell in CELLS[1:])


def judged(plain: list[float], few: list[float], many: list[float]) -> dict:
    speeds = {CELLS[0].id: plain, PLAIN: plain, FEW: few, MANY: many}
    return verdict(Setting(), CELLS, speeds)


def test_a_winner_wins_in_every_round():
    found = judged([10.0] * 5, [12.0, 11.0, 13.0, 12.0, 12.0], [20.0, 19.0, 18.0, 20.0, 21.0])
    assert found["winner"] == MANY and found["within_noise"] == []
    assert found["words"] == (
        "greedy, one sequence at a time: model token k=4 is the fastest, 2.00 times transformers' generate "
        "(1.80 to 2.10) and 2.00 times plain decoding (1.80 to 2.10)"
    )


def test_what_wins_in_most_rounds_is_within_noise():
    found = judged([10.0] * 5, [15.0, 16.0, 16.0, 16.0, 16.0], [15.1, 15.0, 17.0, 17.0, 17.0])
    assert found["winner"] is None and found["within_noise"] == [MANY, FEW]
    assert "within noise: model token k=4, model token k=2; 1.70 times" in found["words"]


def test_a_small_difference_is_noise_however_often_it_is_seen():
    found = judged([10.0] * 9, [15.0] * 9, [15.2] * 9)
    assert found["winner"] is None and found["within_noise"] == [MANY, FEW]
    assert judged([10.0] * 9, [15.0] * 9, [15.4] * 9)["winner"] == MANY


def test_drafts_that_do_not_pay():
    found = judged([10.0] * 5, [9.9, 10.2, 9.9, 9.9, 10.1], [5.0] * 5)
    assert {*found["within_noise"]} == {CELLS[0].id, PLAIN, FEW}
    assert found["words"].endswith("; whether drafts pay cannot be told")
    found = judged([10.0] * 5, [9.0] * 5, [5.0] * 5)
    assert {*found["within_noise"]} == {CELLS[0].id, PLAIN} and found["words"].endswith("; drafts do not pay here")


def test_four_rounds_name_no_winner():
    found = judged([10.0] * 4, [11.0] * 4, [20.0] * 4)
    assert found["winner"] is None and found["within_noise"][0] == MANY
    assert found["words"].endswith("4 rounds are too few to name the fastest, 5 are enough")


# ---- one round, and results


def run(texts: list[int], seconds: float, at: list[list[tuple[float, int]]], **more) -> Run:
    arrivals = [[Arrival(*each) for each in prompt] for prompt in at]
    return Run([[1] * n for n in texts], seconds, 3, 8, 4, 6, arrivals, **more)


PROMPTS = [BenchPrompt(name, category, [1]) for name, category in (("p", "poem"), ("q", "poem"), ("c", "code"))]


def test_times_of_a_round():
    first = run([6], 3.0, [[(1.0, 2), (1.5, 3), (2.5, 1)]])
    second = run([4], 1.0, [[(0.5, 4)]])
    found = measured([first, second], [[PROMPTS[0]], [PROMPTS[2]]], 77)
    assert (found["seconds"], found["tokens"], found["tokens_per_second"]) == (4.0, 10, 2.5)
    assert found["time_to_first_token"] == [1.0, 0.5] and found["inter_token"] == [0.5, 1.0]
    assert found["time_per_output_token"] == 1.5 / 4  # of the four tokens after the first piece
    assert (found["steps"], found["drafted"], found["accepted"], found["tested"]) == (6, 16, 8, 12)
    assert found["by_prompt"] == [[["p"], 3.0, 6], [["c"], 1.0, 4]] and found["peak_memory"] == 77
    assert found["drafted_by_position"] is None and found["seconds_by_part"] is None and "trouble" not in found


def test_a_text_in_one_piece_has_no_times_between():
    found = measured([run([6, 2, 8], 4.0, [[(1.0, 6)], [(1.0, 2)], [(1.0, 8)]])], [PROMPTS], None)
    assert found["time_per_output_token"] is None and found["inter_token"] == []
    assert found["by_prompt"] == [[["p", "q", "c"], 4.0, 16]]


def test_many_times_are_kept_by_their_quantiles():
    values = [random.random() for _ in range(10_000)]
    kept = quantiles(values, 101)
    assert (kept[0], kept[-1], len(kept)) == (min(values), max(values), 101)
    assert kept[50] == sorted(values)[round(0.5 * 9_999)]


def line(setting: Setting, number: int, cells: list[BenchCell], speed: float, **more) -> dict:
    stats = Stats(
        steps=3, emitted=6, drafted_by_position=[3, 2], tested_by_position=[3, 1], accepted_by_position=[2, 1]
    )
    parts = {"prefill": 9.0, "draft_forwards": 0.1, "target_forwards": 0.6, "kernels": 0.1, "replays": 0.0, "loop": 0.2}

    def one(i: int, cell: BenchCell) -> dict:
        own = {"stats": [stats], "seconds_by_part": parts, "draft_forwards": 5} if cell.ours else {}
        at = [[(0.1, 1), (0.2, 5)]]
        return measured([run([6], 6 / (speed * (1 + i)), at, **own)], [PROMPTS[:1]], 1000 * (1 + number))

    rounds = {cell.id: one(i, cell) for i, cell in enumerate(cells)}
    return {
        **{"setting": setting.name, "round": number, "greedy": True, "cells": rounds, "differences": []},
        **more,
    }


HEADER = {"environment": {"cpu": "x"}, "models": {}, "settings": {}, "prompts": []}


def test_results_are_those_of_the_contract():
    grid = Grid((Method("model"),), num_drafts=(2,))
    (setting,) = grid.settings()
    cells = grid.cells(setting)
    rounds = [line(setting, i, cells, speed) for i, speed in enumerate((10.0, 30.0, 20.0, 20.0, 25.0))]
    whole = json.loads(json.dumps(results(HEADER, grid, rounds)))
    assert list(whole) == [*("format", "environment", "models", "settings", "prompts", "cells", "verdicts", "greedy")]
    transformers, plain, model = whole["cells"]
    assert model["id"] == "model token k=2 t=0 b=1" and model["method"] == "model" and model["num_drafts"] == 2
    speed = model["tokens_per_second"]
    assert (speed["median"], speed["min"], speed["max"]) == pytest.approx((60.0, 30.0, 90.0))
    assert speed["quartiles"] == pytest.approx([60.0, 75.0])
    gain = model["speedup"]["over_plain"]
    assert [gain["median"], *gain["interval"]] == pytest.approx([1.5] * 3)
    assert model["speedup"]["over_transformers"]["median"] == pytest.approx(3.0)
    assert plain["speedup"]["over_plain"]["median"] == 1.0
    assert (model["acceptance_rate"], model["alpha"], model["tau"]) == (4 / 8, 4 / 6, 6 / 3)
    assert model["accepted_by_position"] == [2 / 3, 1 / 2]
    assert model["shares"] == pytest.approx({"draft": 0.1, "target": 0.6, "kernels": 0.1, "loop": 0.2})
    # Two drafts take 0.1 s where the target's forwards take 0.6 s.
    assert model["predicted"]["c"] == pytest.approx(0.1 / 2 / 0.6) and plain["predicted"] is None
    assert model["predicted"]["tau"] == pytest.approx(1 + 2 / 3 + 4 / 9)
    assert model["predicted"]["speedup"] == pytest.approx((1 + 2 / 3 + 4 / 9) / (1 + 0.1 / 0.6))
    assert (
        transformers["predicted"] is None
        and transformers["shares"] is None
        and transformers["accepted_by_position"] is None
    )
    assert model["time_to_first_token"] == {"median": 0.1, "p99": 0.1}
    assert model["peak_memory"] == 5000 and len(model["rounds"]) == 5
    assert whole["greedy"] == {"equal": True, "differences": []}
    assert whole["verdicts"][0]["winner"] == model["id"]
    table = cells_csv(whole).splitlines()
    assert len(table) == 4 and table[0].startswith("id,method,rule,num_drafts,")
    assert table[3].startswith("model token k=2 t=0 b=1,model,token,2,,0.0,1,,,,5,60")
    assert all(row.count(",") == table[0].count(",") for row in table)
    log = log_csv(whole).splitlines()
    assert len(log) == 1 + 3 * 5 and log[1].startswith("0,transformers t=0 b=1,p,") and log[1].endswith(",6")


def test_a_setting_without_rounds_is_left_out():
    grid = Grid((Method("model"),), (0.0, 1.0), num_drafts=(2,))
    first, _ = grid.settings()
    whole = results(HEADER, grid, [line(first, 0, grid.cells(first), 10.0)])
    assert {cell["temperature"] for cell in whole["cells"]} == {0.0} and len(whole["verdicts"]) == 1


@pytest.mark.parametrize("method", ("model token k=2 t=0 b=1", "assisted k=2 t=0 b=1"))
def test_texts_of_transformers_alone_may_differ(method):
    grid = Grid((Method("model"), Method("assisted")), num_drafts=(2,))
    (setting,) = grid.settings()
    difference = {"methods": ["transformers t=0 b=1", method], "verdict": "near-tie"}
    played = [line(setting, i, grid.cells(setting), 10.0, differences=[{**difference}]) for i in range(2)]
    greedy = results(HEADER, grid, played)["greedy"]
    assert greedy == {"equal": method.startswith("assisted"), "differences": [difference]}


def test_ids_are_unique():
    every = Grid(
        (*METHODS, Method("suffix", (None, 4, 8))), (0.0, 0.5, 1.0), (1, 2), (1, "auto"), ("token", "block"),
        {"top_k": (None, 5), "top_p": (0.5, 0.9), "min_p": (None, 0.1)},
    )  # fmt: skip
    assert len({*ids(every)}) == len(ids(every))
    assert all(a != b for a, b in itertools.pairwise(every.settings()))
