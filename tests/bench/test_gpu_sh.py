"""bench/gpu.sh without a GPU: what it would run, what it packs, and that it goes on after failures and timeouts. The
interpreter, the GPU and its tools are stand-ins that write down what they are called with."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

import pytest
from support import ROOT

PARTS = {
    "A": ["smoke", "test-cuda", "test-triton", "fuzz-cuda", "fuzz-triton", "memcheck", "synccheck", "racecheck"],
    "B": ["goals", "products", "ncu-latency", "ncu-token", "step"],
    "C": ["decode-1", "decode-8-bits", "decode-32"],
}
BESIDE = PARTS["A"][1:]  # at the same time
MOST_SECONDS, MOST_BYTES = 9 * 60, 16 << 20
# Fails at a step whose command has $FAILS in it, sleeps at $SLEEPS, writes its JSON, and a module if it is to build.
PYTHON = """#!/bin/bash
echo "$*$(compgen -G "$OUT/*.tar.gz" >/dev/null && echo ' PACKED')" >>"$CALLS"
case "$*" in *version_info*|*is_available*|*"import xdist"*) [[ "$*" != *missing* ]] && exit 0; exit ${LOADS:-1};; esac
[[ "$*" == *setup.py* ]] && touch specdec_kernels/_C.fake.so
echo "the step says something"
while (($#)); do [[ $1 == --json ]] && { echo '{}' >"$2"; [[ $2 == *$HUGE* ]] && truncate -s 40M "$2.huge"; }
  args+=" $1"; shift; done
[[ -n $SLEEPS && $args == *$SLEEPS* ]] && sleep 30
[[ -n $FAILS && $args == *$FAILS* ]] && exit 3
exit 0
"""
NVIDIA_SMI = (
    '#!/bin/bash\ncase "$*" in *name*) echo "NVIDIA H100 80GB HBM3";; *compute_cap*) echo 9.0;; *) echo smi;; esac\n'
)
SANITIZER = '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift 2; done\nexec "$@"\n'
NCU = """#!/bin/bash
[[ $1 == --import ]] && { echo "table of $2"; exit; }
[[ -n $REFUSES ]] && { echo "==ERROR== $REFUSES - no permission to read counters"; exit 1; }
while (($#)); do [[ $1 == -o ]] && echo report >"$2.ncu-rep"; [[ $1 == */python ]] && exec "$@"; shift; done
"""


class Done(NamedTuple):
    code: int
    output: str
    steps: dict[str, list[str]]  # name: code, seconds, why
    files: dict[str, int]  # of the tar: their sizes
    calls: list[str]


@pytest.fixture
def run(tmp_path: Path):
    """Runs a copy of the script in a repository of its own."""
    repository, tools, out = (tmp_path / name for name in ("repository", "tools", "out"))
    for folder in (repository / "bench", repository / "csrc", repository / "specdec_kernels", tools):
        folder.mkdir(parents=True)
    (repository / "setup.py").touch()
    (repository / "bench/gpu.sh").write_text((ROOT / "bench/gpu.sh").read_text())
    stand_ins = {"python": PYTHON, "nvidia-smi": NVIDIA_SMI, "compute-sanitizer": SANITIZER, "ncu": NCU}
    for name, text in stand_ins.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)

    def start(*arguments: str, without: tuple[str, ...] = (), **environment: str) -> Done:
        for name in without:
            (tools / name).unlink()
        calls = tmp_path / "calls"
        calls.write_text("")
        env = os.environ | {"PATH": f"{tools}:/usr/bin:/bin", "CUDA_HOME": "/nonexistent", "PYTHON": "python"}
        env |= {"OUT": str(out), "CALLS": str(calls), "FAILS": "", "SLEEPS": "", "REFUSES": "", "HUGE": "no such file"}
        command = ["bash", repository / "bench/gpu.sh", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=env | environment, capture_output=True, text=True, timeout=60)
        steps, files = {}, {}
        for path in out.glob("?.csv"):
            steps = {name: rest for name, *rest in csv.reader(path.read_text().splitlines())}
        for path in out.glob("?.tar.gz"):
            with tarfile.open(path) as tar:
                files = {member.name.removeprefix("./"): member.size for member in tar}
            assert path.stat().st_size < MOST_BYTES
        if out.exists():
            assert len(list(out.iterdir())) <= 2  # few files come back from a machine that is lent
        return Done(done.returncode, done.stdout + done.stderr, steps, files, calls.read_text().splitlines())

    return start


def limits(output: str) -> dict[str, int]:
    return {name: int(seconds) for name, seconds in re.findall(r"^== (\S+) \(at most (\d+) s\)", output, re.MULTILINE)}


@pytest.mark.parametrize("part", PARTS)
def test_the_steps_of_a_part_fit_into_its_time(run, part):
    """With a build, as each part may find a fresh machine. A dry run writes nothing."""
    done = run(part, "--dry-run")
    found = limits(done.output)
    assert done.code == 0 and [*found] == ["build", *PARTS[part]] and not done.steps and not done.files
    at_once = max((seconds for name, seconds in found.items() if name in BESIDE), default=0)
    assert at_once + sum(seconds for name, seconds in found.items() if name not in BESIDE) <= MOST_SECONDS
    assert "TORCH_CUDA_ARCH_LIST=9.0a " in done.output  # and for nothing else


@pytest.mark.parametrize("part", PARTS)
def test_a_part_packs_what_its_steps_wrote(run, part):
    done = run(part)
    assert done.code == 0, done.output
    assert {name: code for name, (code, *_) in done.steps.items()} == dict.fromkeys(["build", *PARTS[part]], "0")
    folder = f"nvidia-h100-80gb-hbm3/{part}"
    files = {name.removeprefix(f"{folder}/") for name in done.files if name.startswith(f"{folder}/")}
    assert len(files) == len(done.files)
    assert files >= {"environment.txt", "steps.csv", *(f"{name}.log" for name in ("build", *PARTS[part]))}
    with_json = [n for n in PARTS[part] if not n.startswith(("ncu", "test")) and not n.endswith("check")]
    assert {n for n in files if n.endswith(".json")} == {f"{n}.json" for n in with_json}
    if part == "B":
        assert files >= {f"ncu-{goal}.{kind}" for goal in ("latency", "token") for kind in ("ncu-rep", "source.csv")}
    of_steps = [call.endswith(" PACKED") for call in programs(done.calls)]
    assert not of_steps[0] and all(of_steps[1:])  # whatever ends the script, what there was is packed
    tried = run(part, "--rehearse").calls  # the same programs, on a CPU and with tiny sizes
    started = [sorted(c.split(" --")[0] for c in programs(calls)) for calls in (tried, done.calls)]
    assert started[0] == started[1]
    assert not any("cuda" in call.split("--json")[0] for call in tried if "bench" in call)


def programs(calls: list[str]) -> list[str]:
    """What steps called."""
    return [call for call in calls if re.match(r"setup\.py|bench/|-m (tests|pytest)", call)]


def test_a_large_file_stays_behind(run):
    done = run("C", HUGE="decode-1")
    assert done.code == 0 and any("decode-1.json" in f for f in done.files) and not any("huge" in f for f in done.files)


def test_what_is_asked_for_runs_alone(run):
    done = run("A", "--step", "smoke", "--step", "memcheck", LOADS="0")
    assert done.code == 0 and [*done.steps] == ["smoke", "memcheck"]
    assert any("tests.fuzz.sanitize --device cuda" in call for call in done.calls)
    assert not any("setup.py" in call for call in done.calls)  # what loads is not built again
    assert [*run("A", "--step", "smoke").steps] == ["build", "smoke"]


def test_a_failure_is_reported_and_the_next_step_runs(run):
    done = run("A", FAILS="tests.fuzz --device")
    assert done.code == 1 and "not ok: fuzz-cuda" in done.output and {*done.steps} == {"build", *PARTS["A"]}
    assert {name for name, (code, *_) in done.steps.items() if code != "0"} == {"fuzz-cuda", "fuzz-triton"}
    assert done.steps["fuzz-cuda"][0] == "3" and "the step says something" in done.output


def test_kernels_that_do_not_compile_leave_the_rest(run):
    done = run("B", FAILS="setup.py")
    assert [*done.steps] == ["build", "build-without-cuda", *PARTS["B"]]
    assert "not ok: build\nnot ok: build-without-cuda" in done.output


def test_time_that_is_up_stops_a_step_and_the_others_do_not_begin(run):
    done = run("C", "--minutes", "0.05", SLEEPS="-B 1 ")
    assert done.code == 1 and done.steps["build"][0] == "0"
    assert done.steps["decode-1"][0] == "124" and "stopped after" in done.steps["decode-1"][2]
    assert [done.steps[name][0] for name in ("decode-8-bits", "decode-32")] == ["124"] * 2
    assert "no time was left" in done.steps["decode-32"][2] and not any("8,32" in c for c in done.calls)
    assert any(name.endswith("decode-1.json") for name in done.files)


def test_a_profiler_without_permission_is_skipped(run):
    done = run("B", "--step", "ncu-latency", "--step", "ncu-token", LOADS="0", REFUSES="ERR_NVGPUCTRPERM")
    assert done.code == 0 and done.steps["ncu-token"][::2] == ["skipped", "ERR_NVGPUCTRPERM"]


@pytest.mark.parametrize(
    "part, tool, steps",
    [
        ("A", "compute-sanitizer", {"memcheck", "synccheck", "racecheck"}),
        ("B", "ncu", {"ncu-latency", "ncu-token"}),
    ],
)
def test_tools_that_are_missing_are_skipped(run, part, tool, steps):
    done = run(part, without=(tool,))
    skipped = {name: why for name, (code, _, why) in done.steps.items() if code == "skipped"}
    assert done.code == 0 and skipped == dict.fromkeys(steps, f"{tool} is not there")


@pytest.mark.parametrize(
    "arguments, environment, named",
    [
        ((), {}, "no part"),
        (("D",), {}, "'D'"),
        (("A", "--minutes", "0"), {}, "--minutes"),
        (("A", "--step", "deploy"), {}, "deploy"),
        (("A",), {"PYTHON": "no-such-python"}, "PYTHON"),
    ],
)
def test_what_is_wrong_is_named(run, arguments, environment, named):
    done = run(*arguments, **environment)
    assert done.code == 2 and named in done.output


def test_every_program_is_there():
    """As the script is, with the interpreter of the tests."""
    for part in PARTS:
        command = ["bash", ROOT / "bench/gpu.sh", part, "--dry-run"]
        environment = os.environ | {"PYTHON": sys.executable}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        for name in re.findall(r"bench/\w+\.py", done.stdout):
            assert (ROOT / name).exists(), name
