"""The benchmarks run and report what bench/README.md says; what they compare with has the right law."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from scipy import stats
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))  # its files are scripts, not a package

import bench_decoding  # noqa: E402
import bench_draft_step  # noqa: E402
import bench_rules  # noqa: E402
import bench_settings  # noqa: E402
import bench_speculative_step  # noqa: E402
import gpu  # noqa: E402
import machine  # noqa: E402
import measure  # noqa: E402
import options  # noqa: E402
import peers  # noqa: E402
import step_inputs  # noqa: E402
import tunable_pair  # noqa: E402
from steps import Run, Step  # noqa: E402

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


def run_main(benchmark, *arguments: str):
    """The command line of a benchmark, in this process."""
    app = typer.Typer()
    app.command()(benchmark.main)
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})


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
        assert row["unavailable"].keys() == {"compile", "flashinfer", "flashinfer+p+q"}
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
        (bench_draft_step, ("-V", "1,"), "vocabularies"),
        (bench_draft_step, ("--dtypes", "float8"), "dtypes"),
        (bench_draft_step, ("--threads", "0"), "--threads"),
        (bench_decoding, ("--preset", "70b"), "preset"),
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


# ---- Peers

P_LOGITS = torch.tensor([[1.0, 0.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.0], [0.0, 2.0, 1.0, -1.0, 0.0, 1.0, -3.0, 0.5]])
Q_LOGITS = torch.tensor([[0.0, 1.0, 1.0, 1.0, -0.5, -1.0, 2.0, 0.0]])


def fits(tokens: torch.Tensor, law: torch.Tensor) -> bool:
    """Chi-square of draws against their law; a right sampler fails at one seed in a thousand."""
    counts = torch.bincount(tokens.flatten(), minlength=law.numel())
    expected = law.double().flatten()
    return stats.chisquare(counts.numpy(), np.asarray(expected / expected.sum()) * tokens.numel()).pvalue > 1e-3


@pytest.mark.parametrize("make", [peers.eager, peers.eager_with_q], ids=["eager", "eager+q"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_eager_peers_emit_the_target_law(make, temperature):
    draws = 40_000
    q = (Q_LOGITS / temperature).softmax(-1).expand(draws, 1, 8)
    torch.manual_seed(0)
    drafts = torch.multinomial(q[0, 0], draws, replacement=True)[:, None]
    draft = q if make is peers.eager_with_q else Q_LOGITS.expand(draws, 1, 8)
    tokens, n = make(temperature)(P_LOGITS.expand(draws, 2, 8), drafts, draft)
    p = (P_LOGITS / temperature).softmax(-1)
    assert ((tokens >= 0).sum(1) == n + 1).all()
    # A text of two tokens: where the draft was rejected, the second is drawn from its law.
    second = torch.multinomial(p[1], draws, replacement=True)
    second = torch.where(n == 1, tokens[:, 1], second)
    assert fits(tokens[:, 0] * 8 + second, p[0][:, None] * p[1])
    assert not fits(drafts, p[0])  # the test can tell p from q
    expected = torch.minimum(p[0], q[0, 0]).sum().item()
    assert abs(n.float().mean().item() - expected) < 5 * (0.25 / draws) ** 0.5


def test_eager_accepts_equal_laws_and_never_what_p_excludes():
    law = torch.rand(64, 4, 16).softmax(-1)
    drafts = law[:, :3].argmax(-1)
    tokens, n = peers.eager_step(law, drafts, law[:, :3])
    assert (n == 3).all() and torch.equal(tokens[:, :3], drafts)
    excluded = law.clone().scatter_(2, torch.nn.functional.pad(drafts, (0, 1))[..., None], 0.0)
    tokens, n = peers.eager_step(excluded, drafts, law[:, :3])
    assert (n == 0).all() and (tokens[:, 0] != drafts[:, 0]).all() and (tokens[:, 1:] == -1).all()


@pytest.mark.parametrize(
    "filters, kept",
    [
        ({}, range(8)),
        ({"top_k": 4}, (0, 3, 4, 6)),
        ({"top_k": 6, "top_p": 0.85, "min_p": 0.25}, (0, 3, 6)),  # top_p drops 1 and 7, min_p 4
    ],
    ids=str,
)
def test_transformers_peer_emits_the_target_law(filters, kept):
    draws, kept = 1500, list(kept)
    q = peers.filtered(Q_LOGITS[None], filters)[0, 0]
    torch.manual_seed(0)
    drafts = torch.multinomial(q.softmax(-1), draws, replacement=True)[:, None]
    step = peers.transformers_step(1.0, filters)
    emitted = step(P_LOGITS.bfloat16().expand(draws, 2, 8), drafts, q.expand(draws, 1, 8))
    tokens = torch.stack([tokens[0, 0] for tokens in emitted])
    assert torch.isin(tokens, torch.tensor(kept)).all()
    assert fits(torch.searchsorted(torch.tensor(kept), tokens), P_LOGITS[0, kept].softmax(-1))


@pytest.mark.parametrize("sample", [bench_draft_step.race, bench_draft_step.multinomial])
def test_draft_peers_draw_from_their_law(sample):
    torch.manual_seed(0)
    tokens, q = sample(Q_LOGITS.expand(40_000, 8))
    law = Q_LOGITS[0].softmax(-1)
    assert fits(tokens, law)
    torch.testing.assert_close(q[0], law)


def test_what_cannot_run_is_unavailable_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", None)  # as if not installed
    for make in (lambda: peers.flashinfer_step(1.0), peers.flashinfer_with_p_q):
        with pytest.raises(ImportError, match="flashinfer"):
            make()

    def fail(i):
        raise ValueError("no such kernel\nmore")

    ready, unavailable = measure.prepare([measure.Method("good", lambda i: i), measure.Method("bad", fail)], CPU, 0)
    assert [m.name for m in ready] == ["good"] and unavailable == {"bad": "ValueError: no such kernel"}


# ---- Measuring


def test_rounds_take_every_method_once_and_every_input_in_turn():
    seen = []
    methods = [measure.Method(n, lambda i, n=n: seen.append((n, i)), calls=3) for n in "ab"]
    samples = measure.interleave(methods, CPU, 0.0, least=4)
    assert seen == [(n, i) for i, order in ((0, "ab"), (1, "ba"), (2, "ab"), (0, "ba")) for n in order]
    assert all(len(s) == 4 for s in samples.values())
    assert measure.ratios([2.0, 6.0, 3.0], [1.0, 2.0, 3.0])["median"] == 2.0
    assert measure.summary([3.0]) == {"median": 3.0, "q1": 3.0, "q3": 3.0, "rounds": 1}


def test_a_graph_is_replayed_in_whole_passes():
    class Graph:
        replays = 0

        def replay(self):
            self.replays += 1

    replay = measure._Replay("ours", print, calls=8, timing="graph", calls_a_sample=8, graph=Graph())
    replay.pace(CPU, 1.0)
    assert replay.key == "ours [graph]" and replay.calls_a_sample == 800
    before = replay.graph.replays
    replay.sample()
    assert replay.graph.replays - before == 100


def test_bytes_of_reached_rows():
    shape = step_inputs.Shape(B=2, K=3, V=10, dtype="bfloat16")
    # Rejected at once, after one draft, never: target rows 1, 2, 4; draft rows 1, 2, 3 (statistics: 1, 1, 0).
    accepted = torch.tensor([0, 1, 3])
    assert shape.bytes_reached_rows(False, accepted) == pytest.approx(2 * 20 * (2 + 4 + 7) / 3)
    assert shape.bytes_reached_rows(True, accepted) == pytest.approx(2 * 20 * (2 + 3 + 4) / 3)


def test_a_floor_is_bytes_over_the_faster_bandwidth_or_a_launch():
    assert machine.floor_seconds(100, {"read": 10.0, "copy": 20.0}) == 5.0
    assert machine.floor_seconds(100, {"read": 10.0, "copy": 5.0, "launch_seconds": 11.0}) == 11.0


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


# ---- gpu.sh


def gpu_sh(*arguments: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    command = ["bash", ROOT / "bench" / "gpu.sh", *arguments]
    env = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def test_dry_run_prints_commands_and_writes_nothing(tmp_path):
    done = gpu_sh("--dry-run", folder=tmp_path, OUT="out", SPECDEC_BENCH_DEVICE="cpu")
    assert done.returncode == 0, done.stderr
    for command in (
        "setup.py",
        "-m pytest",
        *(f"bench_{s}.py" for s in ("speculative_step", "draft_step", "decoding")),
    ):
        assert command in done.stdout
    assert str(tmp_path / "out") in done.stdout  # relative to where the caller stands
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, environment, named",
    [
        (("--stage", "deploy"), {}, "--stage"),
        (("--minutes", "0"), {}, "--minutes"),
        ((), {"SPECDEC_BENCH_DEVICE": "tpu"}, "SPECDEC_BENCH_DEVICE"),
        ((), {"PYTHON": "no-such-python"}, "PYTHON"),
    ],
)
def test_gpu_sh_names_a_bad_option(arguments, environment, named):
    done = gpu_sh(*arguments, **environment)
    assert done.returncode == 2 and named in done.stderr


def test_a_failed_step_is_recorded_and_the_next_runs(tmp_path):
    run = Run(tmp_path / "out", time.monotonic() + 60, dry=False)
    python = (sys.executable, "-c")
    steps = {
        "bad": ([*python, "print('why'); raise SystemExit(3)"], 50),
        "absent": (["no-such-command"], 50),
        "slow": (["bash", "-c", "echo begun; sleep 60"], 7),
        "late": ([*python, ""], 1),
        "good": ([*python, "print('done')"], 50),
    }
    for name, (command, limit) in steps.items():
        run.run(Step(name, command, limit, tmp_path))
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    status = {name: stage["status"] for name, stage in summary["stages"].items()}
    assert status == {
        "bad": "failed",
        "absent": "failed",
        "slow": "timed out",
        "late": "skipped",
        "good": "ok",
    }
    assert "why" in summary["stages"]["bad"]["output_tail"] and "3" in summary["stages"]["bad"]["reason"]
    assert "begun" in summary["stages"]["slow"]["output_tail"]
    assert not summary["ok"] and run.failed == ["absent", "bad", "late", "slow"]


def test_imports_are_followed_through_the_repository():
    needed = gpu.third_party(ROOT / "tests" / "test_parity.py", set())
    assert needed >= {"torch", "pytest", "hypothesis", "scipy", "numpy"}  # scipy by specdec_kernels.testing
    assert "specdec_kernels" not in needed and "transformers" not in needed
    assert gpu.third_party(ROOT / "tests" / "test_cache.py", set()) >= {"transformers"}
    assert not gpu.missing(tuple(gpu.third_party(Path(__file__), set())))
