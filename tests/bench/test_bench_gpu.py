"""bench/gpu.sh: stages, their steps and limits, and what is recorded of them; here without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import found
import gpu
import gpu_stages
import pytest
import sanitize_steps
import torch
from steps import Run, Step
from support import ROOT


def gpu_sh(*arguments: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    command = ["bash", ROOT / "bench" / "gpu.sh", *arguments]
    env = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_dry_run_prints_commands_and_writes_nothing(tmp_path, device):
    """All stages, also where what they need is missing."""
    environment = {"SPECDEC_BENCH_DEVICE": device, "TORCH_CUDA_ARCH_LIST": "9.0a"}
    done = gpu_sh("--dry-run", "--minutes", "20", folder=tmp_path, OUT="out", **environment)
    assert done.returncode == 0, done.stderr
    stems = ("goals", "speculative_step", "draft_step", "settings", "decoding", "decoding_goals", "throughput")
    commands = ["setup.py", "TORCH_CUDA_ARCH_LIST=9.0a", "-m pytest", "compare_backends.py"]
    commands += [f"bench_{stem}.py --device {device}" for stem in stems]
    if device == "cuda":
        commands += [f"--tool {tool}" for tool in gpu_stages.SANITIZERS] + ["sanitize_steps.py", "flashinfer_peer.py"]
        commands += ["--backends cuda,cpu", "--backends triton", "NO_CUDA_MEMORY_CACHING=1"]
    for command in commands:
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
    needed = found.third_party(ROOT / "tests" / "test_parity.py", set())
    assert needed >= {"torch", "pytest", "hypothesis", "scipy", "numpy"}  # scipy by specdec_kernels.testing
    assert "specdec_kernels" not in needed and "transformers" not in needed
    assert found.third_party(ROOT / "tests" / "test_cache.py", set()) >= {"transformers"}
    assert not found.missing(tuple(found.third_party(Path(__file__), set())))


# ---- Stages, as if a GPU and everything else were there


class Recorder(Run):
    """Notes steps instead of running them; some fail."""

    def __init__(self, folder: Path, fail: str = ""):
        super().__init__(folder, time.monotonic() + 500, dry=False)
        self.fail, self.steps = fail, []

    def run(self, step: Step) -> bool:
        self.steps.append(step)
        done = not (self.fail and step.name == self.fail)
        self.note(step.name, "ok" if done else "failed")
        return done


@pytest.fixture
def everything(monkeypatch):
    monkeypatch.setattr(gpu_stages, "missing", lambda modules: [])
    monkeypatch.setattr(gpu_stages, "cuda_tool", lambda name: f"/cuda/bin/{name}")


ON_GPU, ON_CPU = gpu_stages.Machine("cuda", None), gpu_stages.Machine("cpu", None)


def names_of(steps: list[Step]) -> list[str]:
    return [step.name for step in steps]


def test_stages_on_a_gpu(everything, tmp_path):
    run = Recorder(tmp_path)
    gpu_stages.compare(run, ON_GPU, 200.0)
    gpu_stages.sanitize(run, ON_GPU, 240.0)
    compared, sanitized = run.steps[:2], run.steps[2:]
    assert names_of(compared) == ["compare cuda", "compare triton"]
    assert sum(step.limit for step in compared) == pytest.approx(200)
    for step in compared:  # they end themselves, so that what they found is complete
        assert float(step.command[step.command.index("--seconds") + 1]) < step.limit
    assert names_of(sanitized) == [f"sanitize {tool}" for tool in gpu_stages.SANITIZERS]
    assert all(step.command[0] == "/cuda/bin/compute-sanitizer" for step in sanitized)
    assert all(step.environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} for step in sanitized)
    assert all("--error-exitcode" in step.command for step in sanitized)
    run.steps.clear()
    gpu_stages.bench(run, ON_GPU, 300.0)
    stems = ("goals", "settings", "draft_step", "decoding", "speculative_step")
    assert names_of(run.steps) == ["bench flashinfer", *(f"bench {stem}.cuda" for stem in stems)]
    assert all(not step.environment for step in run.steps) and run.failed == []
    run.steps.clear()
    gpu_stages.decode(run, ON_GPU, 300.0)
    gpu_stages.serve(run, ON_GPU, 300.0)
    assert names_of(run.steps) == ["decode decoding_goals.cuda", "serve throughput.cuda", "serve decoding_goals.cuda"]
    results = [step.command[step.command.index("--json") + 1] for step in run.steps]
    assert len({*results}) == 3 and run.failed == []  # none overwrites another's
    for step in (run.steps[0], run.steps[2]):  # no method begins so late that its cell would not be written
        limit = float(step.command[step.command.index("--limit") + 1])
        assert step.limit - limit == pytest.approx(gpu_stages.COMPILING, abs=1)


def test_a_stage_leaves_the_time_of_those_after_it(everything, tmp_path):
    run = Recorder(tmp_path)
    for stage in (gpu_stages.bench, gpu_stages.serve):
        run.steps.clear()
        stage(run, ON_GPU, 200.0)
        assert max(step.limit for step in run.steps) <= 200 + 1


def test_few_seconds_are_for_few_sanitizers(everything, tmp_path):
    """Each tool that runs has time for more than its start; the others are left out, by name."""
    run = Recorder(tmp_path)
    gpu_stages.sanitize(run, ON_GPU, 100.0)
    assert names_of(run.steps) == ["sanitize memcheck", "sanitize racecheck"]
    stages = run.record["stages"]
    assert {name for name in stages if stages[name]["status"] == "left out"} == {
        "sanitize synccheck",
        "sanitize initcheck",
    }
    assert "100 s" in stages["sanitize initcheck"]["reason"] and run.failed == []


def test_flashinfer_that_does_not_compile_is_left_out_of_the_benchmarks(everything, tmp_path):
    run = Recorder(tmp_path, fail="bench flashinfer")
    gpu_stages.bench(run, ON_GPU, 300.0)
    assert all(step.environment == {"SPECDEC_BENCH_WITHOUT": "flashinfer"} for step in run.steps[1:])
    assert run.failed == ["bench flashinfer"]


def test_what_a_stage_lacks_is_said(monkeypatch, tmp_path):
    """No step is run; on a GPU that is not fine, on a CPU a stage for GPUs is left out."""
    run, no_gpu = Recorder(tmp_path), gpu_stages.Machine("cuda", "torch cannot use it")
    for stage in ("compare", "sanitize", "bench", "decode", "serve"):
        getattr(gpu_stages, stage)(run, no_gpu, 100.0)
        assert "torch cannot use it" in run.record["stages"][stage]["reason"]
    monkeypatch.setattr(gpu_stages, "missing", lambda modules: ["typer"])
    for stage in ("test", "compare", "bench", "decode", "serve"):
        getattr(gpu_stages, stage)(run, ON_GPU, 100.0)
        assert "typer" in run.record["stages"][stage]["reason"]
    monkeypatch.setattr(gpu_stages, "missing", lambda modules: [])
    monkeypatch.setattr(gpu_stages, "cuda_tool", lambda name: None)
    gpu_stages.sanitize(run, ON_GPU, 100.0)
    assert "compute-sanitizer" in run.record["stages"]["sanitize"]["reason"]
    assert run.steps == [] and set(run.failed) == {*gpu.STAGES} - {"build"} and not run.record["ok"]
    run = Recorder(tmp_path)
    gpu_stages.sanitize(run, ON_CPU, 100.0)
    assert run.record["stages"]["sanitize"]["status"] == "left out" and run.failed == [] and run.record["ok"]


def test_what_was_compared_is_in_the_summary(everything, tmp_path):
    rows = [{"backend": "cpu", "cases": 7, "near_ties": 0, "counts": {}}]
    content, result = json.dumps({"rows": rows, "disagreement": None}), tmp_path / "compare.cpu.json"
    result.write_text(content)  # of an earlier call, which says nothing of this one
    run = Recorder(tmp_path, fail="compare cpu")
    gpu_stages.compare(run, ON_CPU, 100.0)
    assert "compared" not in run.record and not result.exists()

    class Writes(Recorder):
        def run(self, step: Step) -> bool:
            result.write_text(content)
            return super().run(step)

    run = Writes(tmp_path)
    gpu_stages.compare(run, ON_CPU, 100.0)
    assert run.record["compared"] == {"cpu": {"cpu": {"cases": 7, "near_ties": 0}, "disagreement": None}}


@pytest.mark.parametrize("stages", [gpu.STAGES, ("build", "test"), ("build", "compare", "sanitize"), ("bench",)])
def test_stages_share_the_time(stages):
    left = 100.0
    for stage in stages:
        if stage != "build":
            share = gpu.share_of(stage, list(stages))
            assert share > 0.1 and (share == 1) == (stage == stages[-1])
            left -= left * share
    assert left == 0


def test_earlier_stages_of_the_day_stay(tmp_path):
    stages = {name: {"status": "ok"} for name in ("check", "build", "test", "compare cuda", "bench goals.cuda")}
    more = {"ptxas": [1], "tests": {"tests": 5}, "compared": {"cuda": {}}}
    (tmp_path / "summary.json").write_text(json.dumps({"stages": stages, **more}))
    record = gpu.record(tmp_path, "cpu", ["build", "test"])
    assert record["stages"].keys() == {"compare cuda", "bench goals.cuda"}
    assert record["ptxas"] == [1] and record["compared"] == {"cuda": {}} and "tests" not in record
    assert gpu.record(tmp_path / "none", "cpu", ["build"])["stages"] == {}


def test_a_step_has_its_environment_and_leaves_a_log(tmp_path):
    run = Run(tmp_path / "out", time.monotonic() + 60, dry=False)
    command = [sys.executable, "-c", "import os; print(os.environ['SPECDEC_WORD'], 'x' * 9000)"]
    assert run.run(Step("print", command, 50, tmp_path, {"SPECDEC_WORD": "begun"}, tmp_path / "log.txt"))
    assert (tmp_path / "log.txt").read_text().startswith("begun x")
    assert len(run.record["stages"]["print"]["output_tail"]) == 4000


# ---- What compute-sanitizer watches


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_sanitized_steps_run(backend, capsys):
    """Also on fibers, which see what a sanitizer would."""
    device = "cuda" if backend == "cuda" and torch.cuda.is_available() else "cpu"
    sanitize_steps.main(device=device, backend=backend, seconds=1.0 if backend == "cpu" else 4.0)
    done = int(capsys.readouterr().out.split()[1])
    assert done >= 10


def test_sanitized_steps_have_every_rule_form_and_distribution():
    makers = sanitize_steps.cases()
    early = [m.args[1:] for m in makers[:60] if m.func is sanitize_steps.made]
    assert {rule for _, rule, _, _ in early} == {"token", "block", "coupled"}
    assert {form for _, _, form, _ in early} == set(sanitize_steps.FORMS)
    assert {distribution for *_, distribution in early} == set(sanitize_steps.DISTRIBUTIONS) and {
        s for s, *_ in early
    } == set(sanitize_steps.SHAPES)
    many = [m for m in makers[:60] if m.func is sanitize_steps.many_rows]
    assert [m.args for m in many] == [("token",), ("block",), ("coupled",)]
    assert many[0]().draft_logits is not None and many[2]().draft_logits is None
