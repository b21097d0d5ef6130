"""bench_kernels.py: what its groups time and report, and when a goal is reached."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import bench_kernels
import cases
import pytest
import torch
import typer
from support.benches import run_main

CPU = torch.device("cpu")
SUMMARY = {"median", "q1", "q3", "rounds"}
HEADER = {"benchmark", "complete", "command", "date", "device", "threads", "hardware", "versions", "quick", "bandwidth"}
DRAFTS = ("typical", "all_accepted")


def run_quick(group: str, path: Path, *arguments: str) -> list[dict]:
    """The rows, after what all groups report is checked."""
    options = ("--quick", "--threads", "1", "--seconds", "0.01", "--json", path)
    done = run_main(bench_kernels, group, *options, *arguments)
    assert done.exit_code == 0, done.output
    content = json.loads(path.read_text())
    assert content.keys() >= HEADER and content["complete"] and content["group"] == group
    assert content["versions"]["torch"] and content["hardware"]["cores"] >= 1
    assert content["bandwidth"].keys() == {"buffer_bytes", "read", "copy"}
    assert content["backends_left_out"].keys() >= {"reference", "triton"}
    for row in content["rows"]:
        for values in (*row["seconds"].values(), *row["ratios"].values()):
            assert values.keys() == SUMMARY
            assert 0 < values["q1"] <= values["median"] <= values["q3"] and values["rounds"] >= 5
        assert row["calls_a_sample"].keys() == row["seconds"].keys()
    assert not list(path.parent.glob("*.partial"))
    return content["rows"]


def test_steps(tmp_path):
    rows = run_quick("step", tmp_path / "out.json", "-B", "2", "--dtypes", "float32")
    assert [(r["B"], r["drafts"]) for r in rows] == [(2, drafts) for drafts in DRAFTS]
    for row in rows:
        assert row["seconds"].keys() == {"cpu", "cpu+stats", "eager", "eager+q", "transformers"}
        on_gpus = {"flashinfer", "flashinfer+q", "flashinfer+p+q"}
        assert row["unavailable"].keys() == {"compile"} | on_gpus
        assert all("NVIDIA" in row["unavailable"][name] for name in on_gpus)
        assert "compile-seconds" in row["unavailable"]["compile"]
        assert row["launches"].keys() == {"cpu", "cpu+stats"} and "unknown" in row["launches"]["cpu"]
        for ours in ("cpu", "cpu+stats"):
            others = ("eager", "eager+q", "transformers", "floor_all_rows", "floor_reached_rows")
            assert row["ratios"].keys() >= {f"{ours}/{other}" for other in others}
        row_bytes, of_case = 4 * 1000 * row["B"], row["cases"]["step"]
        assert of_case["bytes_read"]["recomputed"]["all_rows"] == (6 + 5) * row_bytes
        assert of_case["bytes_read"]["stats"]["all_rows"] == (6 + 1) * row_bytes
        if row["drafts"] == "all_accepted":
            assert of_case["alpha"] == of_case["acceptance_rate"] == 1
            assert of_case["bytes_read"]["recomputed"]["reached_rows"] == (6 + 5) * row_bytes
            assert of_case["bytes_read"]["stats"]["reached_rows"] == 6 * row_bytes
        else:
            assert 0.5 < of_case["alpha"] < 1


def test_drafts(tmp_path):
    rows = run_quick("draft", tmp_path / "out.json", "-B", "1,2", "--dtypes", "bfloat16")
    assert [r["bytes_read"] for r in rows] == [2000, 4000]
    for row in rows:
        assert row["seconds"].keys() == {"cpu", "eager", "multinomial"}
        assert row["ratios"].keys() == {"cpu/floor", "cpu/eager", "cpu/multinomial"}


def test_settings_are_compared_in_the_same_rounds(tmp_path):
    names = [f"{rule} {filters}" for rule, filters in cases.SETTINGS]
    rows = run_quick("settings", tmp_path / "out.json")
    assert [r["drafts"] for r in rows] == [*DRAFTS]
    for row in rows:
        ours = {f"cpu{s} {n}" for n in names for s in ("", "+stats") if not (s and n.startswith("coupled"))}
        assert row["seconds"].keys() == ours | {f"transformers {n}" for n in names if n.startswith("token")}
        assert row["ratios"].keys() >= {
            *("cpu token top_k+top_p/cpu token none", "cpu+stats token top_k+top_p/cpu+stats token none"),
            *("cpu block none/cpu token none", "cpu+stats block top_k+top_p/cpu+stats token top_k+top_p"),
            *("cpu token top_k+top_p/transformers token top_k+top_p", "cpu coupled none/cpu token none"),
        }
        assert row["unavailable"] == {} and row["cases"].keys() == {*names}
        emitted = [of_case["mean_emitted"] for of_case in row["cases"].values()]
        same = row["drafts"] == "all_accepted"
        assert all((n == row["K"] + 1) == same and 1 <= n <= row["K"] + 1 for n in emitted)


def test_goals(tmp_path):
    names = [case.name for case in cases.GOALS]
    rows = run_quick("goals", tmp_path / "out.json")
    assert [(r["goal"], r["drafts"]) for r in rows] == [(goal, drafts) for goal in names for drafts in DRAFTS]
    for row in rows:
        assert row["seconds"].keys() >= {"cpu+stats", "transformers"}
        assert row["dtype"] == "bfloat16" and row["temperature"] == 0.8
        found = row["reached"]["cpu+stats"]
        # Device times are of GPUs; what is relative can be said here.
        timed = {"seconds", "launches"} if row["goal"] == "latency" else {"seconds"}
        assert {name for name in found if "faster" not in name} == timed
        assert all(found[name] is None for name in (*timed, "3 times faster than flashinfer"))
        faster = 1 / row["ratios"]["cpu+stats/transformers"]["median"] >= 10
        assert found["10 times faster than transformers"] == faster
        of_case = row["cases"][row["goal"]]
        filtered = "filters" in row["unavailable"].get("eager", "")
        assert filtered == (row["goal"] == "filters") == bool(of_case["filters"])
        rows_read = row["K"] + 1 + (row["K"] if of_case["rule"] == "block" else 1)
        assert of_case["bytes_read"]["stats"]["all_rows"] == rows_read * 2 * row["B"] * row["V"]


def test_a_goal_is_reached_by_device_time_and_launches():
    goal = {"seconds": 2.0, "launches": 1}
    case = cases.Case("all", cases.Shape(1, 1, 10, "bfloat16"), goal=goal)
    samples = {"cuda [cold]": [1.0, 2.0, 3.0], "cuda": [9.0]}
    ratios = {
        "cuda [cold]/flashinfer [cold]": {"median": 0.3},
        "cuda/flashinfer": {"median": 0.9},
        "cuda/transformers": {"median": 0.11},
    }

    def reached(kernels: int | None, case=case, name: str = "cuda") -> list[bool | None]:
        mine = bench_kernels.Ours(name, case, name, True, None)
        launched = {name: {"unknown": "why"} if kernels is None else {"kernels": kernels}}
        row = {"ratios": ratios, "launches": launched}
        return [*bench_kernels.reached(mine, samples, row).values()]

    assert reached(1) == [True, True, True, False]
    slow = replace(case, goal={**goal, "seconds": 1.9})
    assert reached(2, slow) == [False, False, True, False]
    assert reached(None, name="triton") == [None] * 4


@pytest.mark.parametrize(
    "arguments, named",
    [
        (("speed",), "group"),
        (("step", "--device", "tpu"), "device"),
        (("step", "-B", "0"), "batches"),
        (("draft", "--dtypes", "float8"), "dtypes"),
        (("goals", "-B", "1"), "batches"),
    ],
)
def test_a_bad_option_is_named(arguments, named):
    done = run_main(bench_kernels, *arguments)
    assert done.exit_code == 2 and named in done.output


def test_without_any_backend_nothing_is_timed(monkeypatch):
    rows = [{"backend": "cpu", "device": "cpu", "available": False, "reason": "not built"}]
    monkeypatch.setattr(bench_kernels, "build_info", lambda: {"backends": rows})
    with pytest.raises(typer.BadParameter, match="device: .*not built"):
        bench_kernels.backends_of(CPU)
