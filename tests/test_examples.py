"""Every program of examples/ runs, and prints what it promises."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import kubernetes_validate
import pytest
import specdec
import torch
import typer
import yaml
from scipy.stats import chisquare
from specdec.cli import app
from typer.main import get_command

import specdec_kernels

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# The packages that are tested here, wherever the examples would find others; on a CPU, where texts are repeatable.
PATHS = [str(Path(package.__file__).resolve().parents[1]) for package in (specdec, specdec_kernels)]


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.nightly)], ids=["here", "in its own process"])
def printed(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture) -> Callable[[str], str]:
    """What a program prints. Every day it runs in this process, which has imported all libraries."""

    def run_here(name: str) -> str:
        with torch.random.fork_rng():
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    def run(name: str) -> str:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "OMP_NUM_THREADS": "1"}
        process = subprocess.run([sys.executable, EXAMPLES / name], env=env, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        return process.stdout

    return run if request.param else run_here


def test_generate(printed):
    text = printed("generate.py")
    assert text.startswith("def read(self, size=-1):") and "\nclass Stack:" in text
    summaries = re.findall(r"^--- (\{.*\}) in (\d+) steps: alpha (0\.\d\d), tau (\d\.\d\d)$", text, flags=re.MULTILINE)
    assert len(summaries) == 2
    for counts, steps, _, tau in summaries:
        producers = dict(re.findall(r"'(\w+)': (\d+)", counts))
        assert set(producers) <= {"accepted", "recovered", "bonus"}
        assert sum(map(int, producers.values())) == 48
        assert float(tau) == pytest.approx(48 / int(steps), abs=0.005)


def test_in_transformers(printed):
    text = printed("in_transformers.py")
    assert text.startswith("def read(self):") and "\n---\nimport os" in text
    *_, same, counts = text.splitlines()
    assert same == "the same text as without specdec: True"
    tokens, steps = map(int, re.match(r"(\d+) tokens in (\d+) steps, tau ", counts).groups())
    assert tokens == 64 and steps < 64


def test_serving(printed):
    text = printed("serving.py")
    ends = re.findall(r"^--- request (\d): (\d+) new tokens, finish reason: length\n(.*)$", text, flags=re.MULTILINE)
    starts = ("import os", "def add(a, b):", "class Stack:", "for line in file:", "try:")
    assert sorted(int(number) for number, _, _ in ends) == [0, 1, 2, 3, 4]
    for number, tokens, line in ends:
        assert int(tokens) == 8 * (1 + int(number)) and line.startswith(starts[int(number)])


def test_kernels_alone(printed):
    lines = printed("kernels_alone.py").splitlines()
    assert len(lines) == 3
    for b, line in enumerate(lines):
        accepted, tokens = re.fullmatch(rf"sequence {b}: (\d) of 4 drafts accepted, tokens \[(.*)\]", line).groups()
        tokens = [int(token) for token in tokens.split(", ")]
        emitted = int(accepted) + 1
        assert all(0 <= token < 32000 for token in tokens[:emitted]) and tokens[emitted:] == [-1] * (5 - emitted)


@pytest.mark.nightly  # every day tests/training/test_rollout.py has two trainings that are the same
def test_rollouts(printed, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rollouts.py"])
    head, *lines, last = printed("rollouts.py").splitlines()
    assert last == "the same weights after both trainings: True"
    rows = [line.split() for line in lines]
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4"] and {row[2] for row in rows} == {"True"}
    assert float(rows[-1][1]) > float(rows[0][1])  # it learns
    assert max(float(row[-1]) for row in rows) < 1e-5 and all(float(row[3]) >= 1 for row in rows)


def test_from_scratch(printed):
    head, *lines = printed("from_scratch.py").splitlines()
    assert head.split() == ["text", "by", "the", "target", "from", "scratch", "specdec"] and len(lines) == 8
    exact, *shares = zip(*([float(number) for number in line.split()[-3:]] for line in lines), strict=True)
    assert 0.2 < sum(exact) < 1
    for share in shares:  # of 120 texts; five standard errors
        assert all(abs(a - b) < 5 * (b / 120) ** 0.5 + 0.01 for a, b in zip(share, exact, strict=True))


class Table:
    """A model of which every token's distribution depends on the token before it."""

    def __init__(self, seed: int):
        self.logits_after = 2 * torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))

    def __call__(self, ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits_after[ids])


def test_from_scratch_has_the_distribution_of_its_target():
    """All texts of two tokens, against their probabilities: chi-square."""
    program = runpy.run_path(str(EXAMPLES / "from_scratch.py"))
    target, draft, count = Table(0), Table(1), 3000
    with torch.random.fork_rng():
        torch.manual_seed(0)
        texts = [tuple(program["generate"](target, draft, [0], 2, 2, 1.0)) for _ in range(count)]
    p = target.logits_after.double().softmax(-1)
    exact = {(a, b): float(p[0, a] * p[a, b]) for a in range(4) for b in range(4)}
    found = [texts.count(text) for text in exact]
    likely = [i for i, share in enumerate(exact.values()) if share * count >= 5]
    rest = [i for i in range(16) if i not in likely]
    observed = [found[i] for i in likely] + [sum(found[i] for i in rest)]
    shares = [*exact.values()]
    expected = [count * shares[i] for i in likely] + [count * sum(shares[i] for i in rest)]
    assert chisquare(observed, expected).pvalue > 1e-4
    of_draft = draft.logits_after.double().softmax(-1)  # it would be seen
    other = [count * float(of_draft[0, a] * of_draft[a, b]) for a in range(4) for b in range(4)]
    assert sum((o - e) ** 2 / e for o, e in zip(found, other, strict=True)) > 1000


def test_none_is_left_out():
    # client.py is tested beside the server that it talks with, in serving/server/, and what needs TRL in training/.
    tested = {"generate.py", "in_transformers.py", "serving.py", "kernels_alone.py", "client.py", "from_scratch.py"}
    tested |= {"rollouts.py", "rollouts_in_trl.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_settings_of_containers_and_services_are_options_of_the_server():
    """A variable that is misspelt would be no error."""
    options = {param.name for param in typer.main.get_command(app).commands["serve"].params}
    for name in ("Dockerfile", "specdec.service"):
        used = set(re.findall(r"SPECDEC_SERVE_([A-Z_]+)", (EXAMPLES / name).read_text()))
        assert used and {each.lower() for each in used} <= options, name


def test_services_have_the_time_to_drain():
    from specdec.serving.server.server_settings import ServerSettings

    unit, container = (EXAMPLES / "specdec.service").read_text(), (EXAMPLES / "Dockerfile").read_text()
    for seconds in (
        re.search(r"^TimeoutStopSec=(\d+)$", unit, re.M)[1],
        re.search(r"--stop-timeout (\d+)", container)[1],
    ):
        assert int(seconds) > ServerSettings().drain_seconds + 5


def test_what_the_container_copies_is_there():
    copied = re.findall(r"^COPY (?!--)(.*) \S+$", (EXAMPLES / "Dockerfile").read_text(), flags=re.MULTILINE)
    assert all((EXAMPLES.parent / each).exists() for line in copied for each in line.split()) and len(copied) == 4


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_finds_no_fault_in_the_unit(tmp_path):
    unit = tmp_path / "specdec.service"
    command = "ExecStart=/opt/specdec/bin/specdec serve"
    text = (EXAMPLES / "specdec.service").read_text()
    assert command in text
    unit.write_text(text.replace(command, f"ExecStart={sys.executable}"))
    process = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")


def test_servers_on_kubernetes():
    """The schema holds, and what the container is told the command knows."""
    version = kubernetes_validate.latest_version()
    deployment, service = yaml.safe_load_all((EXAMPLES / "kubernetes_server.yaml").read_text())
    for each in (deployment, service):
        kubernetes_validate.validate(each, version, strict=True)
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = {name for param in get_command(app).commands["serve"].params for name in param.opts}
    given = dict(argument.split("=") for argument in container["args"])
    assert given.keys() <= options and pod["terminationGracePeriodSeconds"] > float(given["--drain-seconds"])
    variables = {f"SPECDEC_SERVE_{name[2:].upper().replace('-', '_')}" for name in options if name.startswith("--")}
    assert {variable["name"] for variable in container["env"]} <= variables
    probes = [container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")]
    assert probes == ["/health", "/health", "/ready"]
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
