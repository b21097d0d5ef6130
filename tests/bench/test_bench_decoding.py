"""bench_decoding.py: windows, what costs allow, goals, pairs, and what it reports; here without a GPU."""

from __future__ import annotations

import json
import time
import warnings

import bench_decoding
import loop_cells
import measure
import pytest
import torch
import tunable_pair
from loop_cells import MODES, Cell, Window, tau
from loop_costs import allowed_speedup, expected_tokens, fastest, goals, judged, of_allowed
from typer.testing import CliRunner

CPU = torch.device("cpu")
CELL = Cell(1, 512, 4, 2, 3)
SUMMARY = {"median", "q1", "q3", "rounds"}


def run(*arguments: object):
    return CliRunner().invoke(bench_decoding.app, [str(a) for a in arguments], env={"COLUMNS": "200"})


def test_tau_is_of_one_sequence():
    assert tau([Window(3.0, 5, 2), Window(1.0, 3, 1)], 1) == 8 / 3
    assert tau([Window(3.0, 5, 2), Window(1.0, 3, 1)], 2) == 4 / 3


def test_what_costs_allow():
    assert expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / 0.2)
    assert expected_tokens(1.0, 4) == 5 and expected_tokens(0.0, 4) == 1
    assert allowed_speedup(0.8, 4, 0.25) == pytest.approx(expected_tokens(0.8, 4) / 2)
    # A loop that costs nothing reaches all that its forwards allow.
    assert of_allowed(3.2 / (4 * 0.25 + 1), 3.2, 4, 0.25) == pytest.approx(1)
    assert of_allowed(1.2, 3.2, 4, 0.25) == pytest.approx(0.75)


def row(c: float = 0.2) -> dict:
    seconds = {"step": {"median": 0.0098}}
    attention = {"seconds": 3e-4, "filled_bytes": 1e9}
    methods = [{"name": n, "tau": t, "alpha": a} for n, t, a in (
        ("transformers", 1.0, None), ("assisted K=3", 2.5, None), ("plain eager", 1.0, None),
        ("plain compiled+graphs", 1.0, None), ("specdec K=3 eager", 3.0, 0.8),
        ("specdec K=3 compiled+graphs+deferred", 3.0, 0.8),
    )]  # fmt: skip
    costs = {"compiled+graphs": {"c": c, "seconds": seconds, "attention": attention}}
    return {"methods": methods, "forwards": costs}


SPEEDS = {
    "transformers": [50.0, 50.0],
    "assisted K=3": [90.0, 90.0],
    "plain eager": [230.0, 230.0],  # faster than compiled, but not what the goals name
    "plain compiled+graphs": [150.0, 150.0],
    "specdec K=3 eager": [100.0, 100.0],
    "specdec K=3 compiled+graphs+deferred": [300.0, 300.0],
}


def test_the_fastest_is_compared_with_compiled_plain():
    found = judged(row(), SPEEDS, CELL, 4e12)
    assert found["fastest"] == {
        "plain": "plain eager",
        "compiled plain": "plain compiled+graphs",
        "specdec": "specdec K=3 compiled+graphs+deferred",
        "assisted": "assisted K=3",
    }
    assert found["baseline"] == "plain compiled+graphs"
    assert {name: times["median"] for name, times in found["times"].items()} == {
        "baseline": 2.0,
        "transformers": 6.0,
        "assisted": pytest.approx(300 / 90),
    }
    assert found["step_seconds"] == pytest.approx(0.01) and found["outside_models"] == pytest.approx(0.02)
    assert found["allowed_speedup"] == pytest.approx(expected_tokens(0.8, 3) / 1.6)
    assert found["of_allowed"] == pytest.approx(2.0 / 3.0 * 1.6)
    assert found["attention_over_filled"] == pytest.approx(1.2)
    assert [*goals(found, SPEEDS).values()] == [True, True, True, True, True, False]


def test_goals_that_are_missed_or_not_measured():
    slow = {**SPEEDS, "plain eager": [219.0] * 2, "specdec K=3 compiled+graphs+deferred": [269.0] * 2}
    missed = goals(judged(row(0.1), slow, CELL, 3.6e12), slow)
    assert [*missed.values()] == [False, False, False, False, False, True]
    # Without compiled plain decoding, its goals are not measured, though the loop is compared with plain.
    without = {n: s for n, s in SPEEDS.items() if "compiled" not in n}
    found = judged(row(), without, CELL, None)
    assert found["baseline"] == "plain eager" and found["times"]["baseline"]["median"] == pytest.approx(100 / 230)
    assert [*goals(found, without).values()] == [True, None, False, None, None, None]
    assert {*goals(judged(row(), {}, CELL, None), {}).values()} == {None}
    assert fastest(SPEEDS, "plain", "deferred") is None


def two_tiny() -> tunable_pair.TunablePair:
    return tunable_pair.named_pair("tiny+tiny", CPU)


# ---- What only a GPU does, with stand-ins


def test_synchronisations_are_counted_and_forbidden(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    steps = iter(range(100))

    def step():
        if modes[-1] == "warn":
            says = "called a synchronizing CUDA operation" if next(steps) % 2 == 0 else "something else"
            warnings.warn(says, UserWarning, 1)

    found = measure.synchronisations(step, 6)
    assert found["a_step"] == 0.5 and found["forbidden"] == "ok" and [*found["where"].values()] == [3]
    assert modes == ["warn", "default", "error", "default"]

    def waits():
        if modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    found = measure.synchronisations(waits, 2)
    assert found["a_step"] == 0 and "called a synchronizing" in found["forbidden"] and modes[-1] == "default"


def test_no_method_begins_when_the_time_is_up():
    methods = loop_cells.contenders(two_tiny(), CELL, ["eager", "graphs"])
    measured, speeds = loop_cells.measure(methods, CELL, CPU, time.perf_counter() - 1, 0.0)
    assert speeds == {} and measured["methods"] == []
    names = {f"{who} {mode}" for who in ("plain", "specdec K=3") for mode in ("eager", "graphs")}
    assert measured["unavailable"].keys() == {"transformers", "assisted K=3", "assisted default"} | names
    assert all("--limit" in why for why in measured["unavailable"].values())


# ---- Pairs


@pytest.fixture(scope="module")
def tiny_pair() -> tunable_pair.TunablePair:
    return tunable_pair.make_pair(tunable_pair.PRESETS["tiny"], CPU)


def test_at_a_vanishing_eps_the_pair_is_one_function(tiny_pair):
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        tiny_pair.set_eps(1.0)
        assert not torch.equal(tiny_pair.target(ids).logits, tiny_pair.draft(ids).logits)
        tiny_pair.set_eps(1e-12)
        assert torch.equal(tiny_pair.target(ids).logits, tiny_pair.draft(ids).logits)


@pytest.mark.parametrize("alpha, temperature", [(0.8, 1.0), (0.6, 1.0), (0.8, 0.0)])
def test_calibration_reaches_its_alpha(tiny_pair, alpha, temperature):
    assert tiny_pair.calibrate(alpha, temperature) == pytest.approx(alpha, abs=0.03)


def test_two_shapes_are_one_function_at_a_vanishing_eps():
    pair = two_tiny()
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        pair.set_eps(1e-12)
        target, draft = (m(ids).logits for m in (pair.target, pair.draft))
        assert torch.allclose(target, draft, atol=1e-4) and 3.5 < target.std() < 4.5
        pair.set_eps(1.0)
        assert not torch.allclose(pair.target(ids).logits, pair.draft(ids).logits, atol=1.0)
    assert pair.calibrate(0.8, 1.0) == pytest.approx(0.8, abs=0.03)
    assert pair.draft.config.hidden_size == 64 and pair.target.config.hidden_size == 128


def test_the_pair_of_the_goals_costs_what_its_models_cost():
    """Of the shapes of Llama-3.1-8B and Llama-3.2-1B; on no device."""
    pair = tunable_pair.make_pair_of_two(*tunable_pair.PAIRS["8b+1b"], torch.device("meta"))
    read = {}
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        read[name] = model.num_parameters() - model.get_input_embeddings().weight.numel()
    assert read == {"target": 7_504_924_672, "draft": 1_235_814_400}  # a tied embedding is read as the head
    assert pair.cost_ratio == pytest.approx(0.1647, abs=1e-4) and len(pair.differing) == 32 + 16


# ---- The whole


@pytest.mark.parametrize(
    ("pair", "sizes"), [("tiny", [1]), pytest.param("tiny+tiny", [2, 3], marks=pytest.mark.nightly)]
)
def test_the_loop_reports(pair, sizes, tmp_path):
    arguments = ("--quick", "--threads", 1, "--pair", pair, "-B", ",".join(map(str, sizes)), "-K", "2,4")
    arguments += ("--modes", "eager,deferred,graphs", "--json", tmp_path / "out.json")
    done = run("loop", *arguments)
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["complete"] and content["quick"] and "hidden=128" in content["shapes"][0]
    assert [(r["B"], r["context"], r["K"]) for r in content["rows"]] == [(b, 16, k) for b in sizes for k in (2, 4)]
    for cell in content["rows"]:
        k = cell["K"]
        ours = [f"{who} {mode}" for mode in ("eager", "deferred") for who in ("plain", f"specdec K={k}")]
        by_name = {m["name"]: m for m in cell["methods"]}
        assisted = [f"assisted K={k}", "assisted default"] if cell["B"] == 1 else []
        assert [*by_name] == ["transformers", *assisted, *ours]
        for name, m in by_name.items():
            assert m["tokens_per_second"].keys() == SUMMARY and m["tokens_per_second"]["median"] > 0
            assert (m["tau"] == 1) == name.startswith(("plain", "transformers")) and m["tau"] <= 21
            assert (m["alpha"] is None) == (not name.startswith("specdec"))
        assert cell["reached"] == {}  # they are of another pair, on a GPU
        assert cell["found"]["baseline"].startswith("plain") and cell["found"]["times"].keys() >= {"transformers"}
        assert cell["forwards"].keys() == {"eager"} and 0 < cell["cost_ratio"] < 1
        costs = cell["forwards"]["eager"]
        forwards = {"target 1", f"target {k + 1}", f"target {k + 1}, short", "draft 1", "draft 2", "step"}
        assert costs["seconds"].keys() == forwards
        assert 0 < costs["c"] and costs["attention"]["filled_bytes"] >= 0
        assert cell["unavailable"].keys() == {"plain graphs", f"specdec K={k} graphs"}
        assert "GPUs" in cell["unavailable"]["plain graphs"]


def test_methods_take_turns_on_a_cpu(monkeypatch):
    """Window by window, each round starting with another."""
    order = []

    class Method:
        scheduler = None

        def __init__(self, name: str):
            self.name = name

        def open(self) -> None:
            order.append(f"open {self.name}")

        def window(self) -> Window:
            order.append(self.name)
            if self.name == "b" and order.count("b") == 2:
                raise RuntimeError("out of memory")
            return Window(1.0, 2, 1)

        def close(self) -> dict[str, object]:
            return {"alpha": None}

    measured, speeds = loop_cells.measure([Method(n) for n in "abc"], CELL, CPU, float("inf"), 0.0)
    assert order == ["open a", "open b", "open c", "a", "b", "c", "b", "c", "a"]
    assert speeds == {"a": [2.0, 2.0], "c": [2.0, 2.0]} and [m["name"] for m in measured["methods"]] == ["a", "c"]
    assert measured["unavailable"] == {"b": "RuntimeError: out of memory"}


def test_modes_have_names():
    assert [*MODES] == [
        *("eager", "deferred", "graphs", "graphs+deferred"),
        *("compiled", "compiled+deferred", "compiled+graphs", "compiled+graphs+deferred"),
    ]


def test_rules_report(tmp_path):
    done = run("rules", "--quick", "--threads", 1, "--json", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["complete"] and content.keys() >= {"texts", "max_new_tokens"}
    rows = [(r["filters"], r["K"], r["rule"]) for r in content["rows"]]
    assert rows == [(f, 2, rule) for f in ("none", "top_k+top_p") for rule in ("token", "block", "coupled")]
    for row in content["rows"]:
        assert 1 <= row["tau"] <= 3 and 0 < row["acceptance_rate"] <= row["alpha"] <= 1


@pytest.mark.nightly
def test_drafters_report(tmp_path):
    done = run("drafters", "--quick", "--pair", "embedded", "--threads", 1, "--json", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["complete"]
    assert [row["workload"] for row in content["rows"]] == ["writing code", "editing code"]
    for row in content["rows"]:
        by_name = {m["name"]: m for m in row["methods"]}
        assert len(by_name) == 10 and by_name["plain"]["speedup"]["median"] == by_name["plain"]["tau"] == 1.0
        for m in by_name.values():
            assert m["tokens_per_second"].keys() == m["of_that"].keys() == SUMMARY
            assert m["efficiency"] == pytest.approx(m["speedup"]["median"] / m["tau"])
            assert m["step_costs"] is None or "adaptive" in m["name"]
        assert by_name["never right, K=4"]["alpha"] == 0 < by_name["never right, K=4"]["drafted"]


@pytest.mark.parametrize(
    "arguments, named",
    [
        (("loop", "--pair", "70b"), "pair"),
        (("loop", "--modes", "eager,fast"), "modes"),
        (("loop", "--alpha", "1"), "alpha"),
        (("loop", "--contexts", "0"), "contexts"),
        (("loop", "--device", "tpu"), "device"),
        (("loop", "-K", "two"), "num-drafts"),
        (("drafters", "--pair", "70b"), "pair"),
        (("drafters", "--alpha", "1"), "alpha"),
    ],
)
def test_a_bad_option_is_named(arguments, named):
    done = run(*arguments)
    assert done.exit_code == 2 and named in done.output
