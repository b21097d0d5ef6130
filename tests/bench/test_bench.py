"""The benchmarks run and report what bench/README.md says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import bench_decoding
import bench_draft_step
import bench_drafters
import bench_goals
import bench_rules
import bench_settings
import bench_speculative_step
import options
import pytest
import torch
import tunable_pair
from support import ROOT
from support.benches import run_main

CPU = torch.device("cpu")


SUMMARY = {"median", "q1", "q3", "rounds"}
HEADER = {
    "benchmark",
    "complete",
    "command",
    "date",
    "device",
    "threads",
    "hardware",
    "versions",
    "quick",
    "rows",
}
STEP_ROW = {
    *("B", "V", "dtype", "input_sets", "inputs_exceed_cache", "calls_a_sample"),
    *("bytes_read", "floor_seconds", "seconds", "ratios", "unavailable"),
}


def run_quick(benchmark, path: Path, *arguments: str) -> dict:
    done = run_main(benchmark, "--quick", "--threads", "1", "--json", path, *arguments)
    assert done.exit_code == 0, done.output
    content = json.loads(path.read_text())
    assert content.keys() >= HEADER
    assert content["complete"] and content["quick"] and content["threads"] == 1
    assert content["versions"]["torch"] and content["hardware"]["cores"] >= 1
    return content


def check_step_rows(content: dict) -> None:
    assert content.keys() >= {"bandwidth", "temperature", "backends_left_out"}
    assert content["bandwidth"].keys() == {"buffer_bytes", "read", "copy"}
    assert content["backends_left_out"].keys() >= {"reference", "triton"}
    for row in content["rows"]:
        assert row.keys() >= STEP_ROW
        for values in (*row["seconds"].values(), *row["ratios"].values()):
            assert values.keys() == SUMMARY
            assert 0 < values["q1"] <= values["median"] <= values["q3"] and values["rounds"] >= 5
        assert row["calls_a_sample"].keys() == row["seconds"].keys()
        assert "compile-seconds" in row["unavailable"]["compile"]


def test_speculative_step_reports(tmp_path):
    arguments = ("-B", "1,2", "-K", "3", "-V", "1000", "--dtypes", "float32", "--seconds", "0.01")
    content = run_quick(bench_speculative_step, tmp_path / "deep" / "out.json", *arguments)
    check_step_rows(content)
    assert [(r["B"], r["drafts"]) for r in content["rows"]] == [
        *((1, "typical"), (1, "all_accepted"), (2, "typical"), (2, "all_accepted"))
    ]
    for row in content["rows"]:
        assert row["seconds"].keys() == {"cpu", "cpu+stats", "eager", "eager+q", "transformers"}
        on_gpus = {"flashinfer", "flashinfer+q", "flashinfer+p+q", "vllm+q"}
        assert row["unavailable"].keys() == {"compile"} | on_gpus
        assert all("NVIDIA" in row["unavailable"][name] for name in on_gpus)
        assert row["launches"].keys() == {"cpu", "cpu+stats"} and "unknown" in row["launches"]["cpu"]
        for ours in ("cpu", "cpu+stats"):
            others = ("eager", "eager+q", "transformers", "floor_all_rows", "floor_reached_rows")
            assert row["ratios"].keys() >= {f"{ours}/{other}" for other in others}
        row_bytes = 4 * 1000 * row["B"]
        assert row["bytes_read"]["recomputed"]["all_rows"] == (4 + 3) * row_bytes
        assert row["bytes_read"]["stats"]["all_rows"] == (4 + 1) * row_bytes
        if row["drafts"] == "all_accepted":
            assert row["alpha"] == row["acceptance_rate"] == 1
            assert row["bytes_read"]["recomputed"]["reached_rows"] == (4 + 3) * row_bytes
            assert row["bytes_read"]["stats"]["reached_rows"] == 4 * row_bytes
        else:
            assert 0.5 < row["alpha"] < 1
    assert not list(tmp_path.rglob("*.partial"))


def test_draft_step_reports(tmp_path):
    arguments = ("-B", "1,2", "-V", "1000", "--dtypes", "bfloat16", "--seconds", "0.01")
    content = run_quick(bench_draft_step, tmp_path / "out.json", *arguments)
    check_step_rows(content)
    assert [r["bytes_read"] for r in content["rows"]] == [2000, 4000]
    for row in content["rows"]:
        assert row["seconds"].keys() == {"cpu", "eager", "multinomial"}
        assert row["ratios"].keys() == {"cpu/floor", "cpu/eager", "cpu/multinomial"}


def test_settings_reports(tmp_path):
    arguments = ("--settings", "none,top_k+top_p", "--seconds", "0.01")
    content = run_quick(bench_settings, tmp_path / "out.json", *arguments)
    assert [r["drafts"] for r in content["rows"]] == ["typical", "all_accepted"]
    names = ("none", "top_k+top_p")
    ours = {f"{rule} {n}{s}" for rule in ("token", "block") for n in names for s in ("", "+stats")}
    coupled = {f"coupled {n}" for n in names}
    for row in content["rows"]:
        assert row["seconds"].keys() == ours | coupled | {f"transformers {n}" for n in names}
        assert row["ratios"].keys() >= {
            *("token top_k+top_p/token none", "token top_k+top_p+stats/token none+stats"),
            *("block none/token none", "block top_k+top_p+stats/token top_k+top_p+stats"),
            *("token top_k+top_p/transformers top_k+top_p", "coupled none/transformers none"),
        }
        assert row["unavailable"] == {}
        emitted = row["mean_emitted"]
        assert emitted.keys() == {f"{rule} {n}" for rule in ("token", "block", "coupled") for n in names}
        same = row["drafts"] == "all_accepted"
        assert all((n == row["K"] + 1) == same and 1 <= n <= row["K"] + 1 for n in emitted.values())


def test_goals_reports(tmp_path):
    content = run_quick(bench_goals, tmp_path / "out.json", "--goals", "latency,block,filters,many")
    assert content["temperature"] == 0.8 and content["bandwidth"].keys() >= {"read", "copy"}
    assert [(r["goal"], r["drafts"]) for r in content["rows"]] == [
        (goal, drafts) for goal in ("latency", "block", "filters", "many") for drafts in ("typical", "all_accepted")
    ]
    for row in content["rows"]:
        assert row["seconds"].keys() >= {"cpu", "transformers"} and row["dtype"] == "bfloat16"
        assert row["ratios"].keys() >= {"cpu/floor_all_rows", "cpu/floor_reached_rows", "cpu/transformers"}
        reached = row["reached"]["cpu"]
        # Device times are of GPUs; what is relative can be said here.
        timed = {"latency": {"seconds", "launches"}, "many": {"bandwidth"}}.get(row["goal"], {"seconds"})
        assert {name for name in reached if "faster" not in name} == timed
        assert all(reached[name] is None for name in (*timed, "3 times faster than flashinfer"))
        faster = 1 / row["ratios"]["cpu/transformers"]["median"] >= 10
        assert reached["10 times faster than transformers"] == faster
        filtered = "filters" in row["unavailable"].get("eager", "")
        assert filtered == (row["goal"] == "filters") == bool(row["filters"])
        row_bytes = 2 * row["B"] * row["V"]
        rows_read = row["K"] + 1 + (row["K"] if row["rule"] == "block" else 1)
        assert row["bytes_read"]["all_rows"] == rows_read * row_bytes


def test_rules_reports(tmp_path):
    arguments = ("-K", "2", "--texts", "1", "--max-new-tokens", "8", "--rounds", "1", "--threads", "1")
    done = run_main(bench_rules, "--json", tmp_path / "out.json", *arguments)
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "out.json").read_text())
    assert content.keys() >= HEADER - {"quick"} | {"texts", "max_new_tokens"} and content["complete"]
    rows = [(r["filters"], r["K"], r["rule"]) for r in content["rows"]]
    assert rows == [(f, 2, rule) for f in ("none", "top_k+top_p") for rule in ("token", "block", "coupled")]
    for row in content["rows"]:
        assert 1 <= row["tau"] <= 3 and 0 < row["acceptance_rate"] <= row["alpha"] <= 1
        assert row["tokens_per_second"].keys() == SUMMARY


def test_decoding_reports(tmp_path):
    arguments = ("-B", "1,2", "-K", "2", "--new-tokens", "6", "--prompt-tokens", "4", "--rounds", "1")
    content = run_quick(bench_decoding, tmp_path / "out.json", *arguments, "--eps", "0.1")
    alone, batch = content["rows"]
    names = [m["name"] for m in alone["methods"]]
    assert names == ["plain", "assisted K=2", "assisted default", "specdec K=2"]
    assert [m["name"] for m in batch["methods"]] == ["plain", "specdec K=2"]
    assert alone["ratios"].keys() >= {"specdec K=2/plain", "specdec K=2/assisted K=2", "assisted K=2/plain"}
    for row in content["rows"]:
        workload = {"B", "prompt_tokens", "new_tokens", "temperature"}
        assert row.keys() >= {"preset", "shape", "eps", "expected_alpha", "cost_ratio", *workload}
        assert row["unavailable"] == {} and row["eps"] == 0.1 and 0 < row["cost_ratio"] < 1
        for m in row["methods"]:
            assert m["tokens_per_second"].keys() == m["seconds"].keys() == SUMMARY
            assert (m["alpha"] is None) == (not m["name"].startswith("specdec"))
            assert 1 <= m["tau"] <= (21 if m["name"] == "assisted default" else 3)


@pytest.mark.nightly
def test_drafters_report(tmp_path):
    arguments = ("--pair", "embedded", "--prompts", "1", "--new-tokens", "5", "--rounds", "1", "--threads", "1")
    done = run_main(bench_drafters, "--json", tmp_path / "out.json", *arguments)
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "out.json").read_text())
    assert content.keys() >= HEADER - {"quick"} | {"prompts", "new_tokens"} and content["complete"]
    assert [row["workload"] for row in content["rows"]] == ["writing code", "editing code"]
    for row in content["rows"]:
        by_name = {m["name"]: m for m in row["methods"]}
        assert len(by_name) == 10 and by_name["plain"]["speedup"]["median"] == by_name["plain"]["tau"] == 1.0
        for m in by_name.values():
            assert m["tokens_per_second"].keys() == m["of_that"].keys() == SUMMARY
            assert m["efficiency"] == pytest.approx(m["speedup"]["median"] / m["tau"])
            assert (m["step_costs"] is not None) == ("adaptive" in m["name"])
        assert by_name["never right, K=4"]["alpha"] == 0 < by_name["never right, K=4"]["drafted"]


# ---- Options


@pytest.mark.parametrize(
    "benchmark, arguments, named",
    [
        (bench_speculative_step, ("--device", "tpu"), "device"),
        (bench_speculative_step, ("-B", "0"), "batches"),
        (bench_speculative_step, ("-K", "two"), "num-drafts"),
        (bench_speculative_step, ("--temperature", "0"), "temperature"),
        (bench_speculative_step, ("--backends", "cpu,cublas"), "backends"),
        (bench_speculative_step, ("--seconds", "-1"), "--seconds"),
        (bench_settings, ("--settings", "top_a"), "settings"),
        (bench_rules, ("-K", "two"), "num-drafts"),
        (bench_goals, ("--goals", "token,speed"), "goals"),
        (bench_draft_step, ("-V", "1,"), "vocabularies"),
        (bench_draft_step, ("--dtypes", "float8"), "dtypes"),
        (bench_draft_step, ("--threads", "0"), "--threads"),
        (bench_decoding, ("--preset", "70b"), "preset"),
        (bench_drafters, ("--pair", "70b"), "pair"),
        (bench_drafters, ("--alpha", "1"), "alpha"),
        (bench_decoding, ("--alpha", "1.5"), "alpha"),
        (bench_decoding, ("--eps", "0"), "eps"),
        (bench_decoding, ("--temperature", "-1"), "temperature"),
        (bench_decoding, ("--new-tokens", "0"), "--new-tokens"),
    ],
)
def test_a_bad_option_is_named(benchmark, arguments, named):
    done = run_main(benchmark, *arguments)
    assert done.exit_code == 2
    assert named in done.output


def test_the_script_alone_names_a_bad_option():
    command = [sys.executable, ROOT / "bench" / "bench_draft_step.py", "--batches", "none"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "batches" in done.stderr, done.stderr


def test_a_backend_that_was_asked_for_is_never_left_out(monkeypatch):
    rows = [{"backend": "cpu", "device": "cpu", "available": False, "reason": "not built"}]
    monkeypatch.setattr(options, "build_info", lambda: {"backends": rows})
    for asked in ("cpu", None):
        with pytest.raises(ValueError, match="backends: .*not built"):
            options.read_backends(CPU, asked)


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
    with pytest.raises(ValueError, match="eps"):
        tiny_pair.set_eps(0.0)


@pytest.mark.parametrize("alpha, temperature", [(0.8, 1.0), (0.6, 1.0), (0.8, 0.0)])
def test_calibration_reaches_its_alpha(tiny_pair, alpha, temperature):
    assert tiny_pair.calibrate(alpha, temperature) == pytest.approx(alpha, abs=0.03)
