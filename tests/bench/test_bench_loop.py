"""bench_loop.py: windows, pairs of random weights, and what it reports; here without a GPU."""

from __future__ import annotations

import json
import time
import warnings

import bench_loop
import measure
import pytest
import torch
import tunable_pair
from bench_loop import fastest, judged, tau
from loop_contenders import Cell, Window, contenders
from support.benches import run_main

CPU = torch.device("cpu")
CELL = Cell(1, 512, 4, 2, 3)
SUMMARY = {"median", "q1", "q3", "rounds"}


def test_tau_is_of_one_sequence():
    assert tau([Window(3.0, 5, 2), Window(1.0, 3, 1)], 1) == 8 / 3
    assert tau([Window(3.0, 5, 2), Window(1.0, 3, 1)], 2) == 4 / 3


METHODS = [{"name": n, "tau": t, "alpha": a, "step_seconds": s} for n, t, a, s in (
    ("transformers", 1.0, None, 0.02), ("assisted K=3", 2.5, None, 0.03), ("plain eager", 1.0, None, 0.005),
    ("plain graphs", 1.0, None, 0.007), ("specdec K=3 eager", 3.0, 0.8, 0.03),
    ("specdec K=3 graphs+deferred", 3.0, 0.8, 0.01),
)]  # fmt: skip
ROW = {"methods": METHODS, "forwards": {"graphs": {"c": 0.2, "step": 0.0098, "draft": 0.0009}}}
SPEEDS = {
    "transformers": [50.0, 50.0],
    "assisted K=3": [90.0, 90.0],
    "plain eager": [200.0, 200.0],
    "plain graphs": [150.0, 150.0],
    "specdec K=3 eager": [100.0, 100.0],
    "specdec K=3 graphs+deferred": [300.0, 300.0],
}


def test_the_fastest_is_compared_with_the_fastest_of_others():
    found = judged(ROW, SPEEDS, CELL)
    assert found["fastest"] == "specdec K=3 graphs+deferred" and found["baseline"] == "plain eager"
    assert found["peers"]["assisted"] == "assisted K=3"
    faster = {"assisted K=3 static": [95.0, 95.0], "transformers static": [49.0, 49.0]}
    peers = judged(ROW, SPEEDS | faster, CELL)["peers"]  # transformers' best way, whichever it is
    assert (peers["assisted"], peers["transformers"]) == ("assisted K=3 static", "transformers")
    assert {name: times["median"] for name, times in found["times"].items()} == {
        "baseline": 1.5, "transformers": 6.0, "assisted": pytest.approx(300 / 90)
    }  # fmt: skip
    assert found["outside_models"] == pytest.approx(0.02)  # of a step of 10 ms
    assert found["of_allowed"] == pytest.approx(1.5 / 3.0 * (3 * 0.2 + 1))
    assert judged(ROW, {}, CELL) == {"fastest": None, "baseline": None}
    assert fastest(SPEEDS, "plain", "deferred") is None


def test_a_floor_counts_weights_and_what_is_cached():
    pair = tunable_pair.make_pair_of_two(*tunable_pair.PAIRS["8b+1b"], torch.device("meta"))
    found = bench_loop.floors(pair, Cell(2, 512, 64, 2, 4), {"read": 3e12, "copy": 2.9e12})
    cached = {"target": 2 * 576 * 2 * 32 * 8 * 128 * 2, "draft": 2 * 576 * 2 * 16 * 8 * 64 * 2}
    sizes = {"target": 15_009_849_344 + cached["target"], "draft": 2_471_628_800 + cached["draft"]}
    sizes["step"] = sizes["target"] + 4 * sizes["draft"]
    assert found == {"bytes": sizes, "seconds": {name: size / 3e12 for name, size in sizes.items()}}


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
    methods = contenders(two_tiny(), CELL, ["eager", "graphs"])
    measured, speeds = bench_loop.measure(methods, CELL, CPU, time.perf_counter() - 1, 0.0)
    assert speeds == {} and measured["methods"] == []
    names = {f"{who} {mode}" for who in ("plain", "specdec K=3") for mode in ("eager", "graphs")}
    caches = ("", " static")
    theirs = {f"{who}{cache}" for who in ("transformers", "assisted K=3", "assisted default") for cache in caches}
    assert measured["unavailable"].keys() == theirs | names
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


@pytest.mark.parametrize("alpha, temperature", [(0.6, 1.0), (0.8, 0.0)])
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


def test_the_pair_of_8b_and_1b_costs_what_its_models_cost():
    """Of the shapes of Llama-3.1-8B and Llama-3.2-1B; on no device."""
    pair = tunable_pair.make_pair_of_two(*tunable_pair.PAIRS["8b+1b"], torch.device("meta"))
    read = {}
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        read[name] = model.num_parameters() - model.get_input_embeddings().weight.numel()
    assert read == {"target": 7_504_924_672, "draft": 1_235_814_400}  # a tied embedding is read as the head
    assert pair.cost_ratio == pytest.approx(0.1647, abs=1e-4) and len(pair.differing) == 32 + 16


# ---- The whole


def test_the_loop_reports(tmp_path):
    arguments = ("--quick", "--threads", 1, "-B", "1", "-K", "2", "--modes", "eager,deferred,graphs")
    done = run_main(bench_loop, *arguments, "--json", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "out.json").read_text())
    (row,) = content["rows"]
    assert content["complete"] and content["quick"] and "hidden=128" in content["shapes"][0]
    assert (row["B"], row["context"], row["K"]) == (1, 16, 2)
    by_name = {m["name"]: m for m in row["methods"]}
    ours = [f"{who} {mode}" for mode in ("eager", "deferred") for who in ("plain", "specdec K=2")]
    theirs = ["transformers", "assisted K=2", "assisted default"]
    taken = [f"{name} static" for name in theirs if f"{name} static" not in row["unavailable"]]
    assert [*by_name] == [*theirs, *ours, *taken] and "transformers static" in taken
    assert row["found"]["peers"]["transformers"] in ("transformers", "transformers static")
    for name, m in by_name.items():
        assert m["tokens_per_second"].keys() == SUMMARY and m["tokens_per_second"]["median"] > 0
        assert 1 <= m["tau"] <= 21 and (m["tau"] == 1 or not name.startswith(("plain", "transformers")))
        assert (m["alpha"] is None) == (not name.startswith("specdec"))
    assert row["found"]["baseline"].startswith("plain") and row["found"]["outside_models"] < 1
    assert row["forwards"]["eager"].keys() == {"target", "draft", "step", "c"} and 0 < row["cost_ratio"] < 1
    assert row["floor"]["bytes"]["step"] == row["floor"]["bytes"]["target"] + 2 * row["floor"]["bytes"]["draft"]
    assert all(m["step_seconds"] > 0 and m["tokens"] >= 3 for m in row["methods"])
    refused = {name: why for name, why in row["unavailable"].items() if name.startswith("assisted")}  # before 5.24
    assert row["unavailable"].keys() == {"plain graphs", "specdec K=2 graphs", *refused}
    assert "GPUs" in row["unavailable"]["plain graphs"]
    assert all("Static cache" in why for why in refused.values())


def test_a_draft_in_8_bits_is_measured(tmp_path):
    arguments = ("--quick", "--threads", 1, "-B", "1", "-K", "2", "--modes", "eager", "--no-assisted")
    rows = []
    for bits in ((), ("--draft-bits", 8)):
        done = run_main(bench_loop, *arguments, *bits, "--json", tmp_path / "out.json")
        assert done.exit_code == 0, done.output
        rows += json.loads((tmp_path / "out.json").read_text())["rows"]
    whole, packed = (row["floor"]["bytes"] for row in rows)
    assert "draft_bits" not in rows[0] and rows[1]["draft_bits"] == 8
    assert 0.25 < packed["draft"] / whole["draft"] < 0.35 and packed["target"] == whole["target"]
    assert {"plain eager", "specdec K=2 eager"} <= {m["name"] for m in rows[1]["methods"]}


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

    measured, speeds = bench_loop.measure([Method(n) for n in "abc"], CELL, CPU, float("inf"), 0.0)
    assert order == ["open a", "open b", "open c", "a", "b", "c", "b", "c", "a"]
    assert speeds == {"a": [2.0, 2.0], "c": [2.0, 2.0]} and [m["name"] for m in measured["methods"]] == ["a", "c"]
    assert measured["unavailable"] == {"b": "RuntimeError: out of memory"}


@pytest.mark.parametrize(
    "arguments, named",
    [
        (("--pair", "70b"), "pair"),
        (("--modes", "eager,fast"), "modes"),
        (("--alpha", "1"), "alpha"),
        (("--contexts", "0"), "contexts"),
        (("--device", "tpu"), "device"),
        (("--draft-bits", "4"), "draft-bits"),
    ],
)
def test_a_bad_option_is_named(arguments, named):
    done = run_main(bench_loop, *arguments)
    assert done.exit_code == 2 and named in done.output
