"""The workflows of .github/ follow GitHub's schema, and what they name exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from support import ROOT

FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WRITTEN = ("build/", "dist/", "wheelhouse/")  # by the steps themselves


def schema_faults(*files: Path) -> str:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *files]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout + done.stderr if done.returncode else ""


def absent(workflow: dict) -> list[str]:
    """What a workflow names and nobody has: files, extras of the package, jobs, artifacts; and actions that are not
    pinned to a major version. YAML 1.1 reads the key ``on`` as True."""
    jobs = workflow["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    wrong = [job["needs"] for job in jobs.values() if "needs" in job and job["needs"] not in jobs]
    for event in workflow[True].values():
        wrong += [path for path in (event or {}).get("paths", ()) if not any(ROOT.glob(path))]
    for word in (word for command in commands for word in shlex.split(command)):
        if "/" in word and not word.startswith(WRITTEN) and not (ROOT / word).is_file():
            wrong.append(word)
        if extra := re.fullmatch(r"\.\[(.+)\]", word):
            wrong += [word for name in extra[1].split(",") if name not in PROJECT["optional-dependencies"]]
    used = [(step["uses"], step.get("with", {}).get("name")) for step in steps if "uses" in step]
    wrong += [action for action, _ in used if not re.fullmatch(r"[\w-]+/[\w-]+@(?:v\d+|release/v\d+)", action)]
    uploaded = {name for action, name in used if action.startswith("actions/upload-artifact@")}
    downloaded = {name for action, name in used if action.startswith("actions/download-artifact@")} - {None}
    return wrong + sorted(downloaded - uploaded)


def test_they_follow_the_schema_of_github():
    assert [file.stem for file in WORKFLOWS] == ["docs", "tests", "wheels"]
    assert schema_faults(*WORKFLOWS) == ""


def test_the_schema_refuses_what_is_wrong(tmp_path):
    wrong = tmp_path / "wrong.yml"
    wrong.write_text((FOLDER / "tests.yml").read_text().replace("runs-on:", "run-on:"))
    assert "run-on" in schema_faults(wrong)


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_what_they_name_exists(file):
    assert absent(yaml.safe_load(file.read_text())) == []


def test_what_does_not_exist_is_found():
    of_wheels = (FOLDER / "wheels.yml").read_text()
    changes = {
        "tools/build_wheel.py --wheel": "tools/absent.py --wheel",
        "csrc/**": "absent/**",
        "needs: kernels": "needs: absent",
        "checkout@v6": "checkout@main",
        "name: source\n          path: dist/*": "name: absent\n          path: dist/*",
        "install build": "install .[absent]",
    }
    found = {old: absent(yaml.safe_load(of_wheels.replace(old, new, 1))) for old, new in changes.items()}
    assert [wrong[0] for wrong in found.values()] == [
        "tools/absent.py", "absent/**", "absent", "actions/checkout@main", "source", ".[absent]",
    ]  # fmt: skip


def test_wheels_are_tested_with_the_oldest_torch_and_the_one_that_they_are_built_with():
    (oldest,) = (found[1] for line in PROJECT["dependencies"] if (found := re.fullmatch(r"torch>=([\d.]+)", line)))
    built_with = re.search(r"^torch==(.+)$", (ROOT / "tools" / "torch-cpu.txt").read_text(), flags=re.MULTILINE)
    matrix = yaml.safe_load((FOLDER / "wheels.yml").read_text())["jobs"]["kernels"]["strategy"]["matrix"]
    assert built_with is not None and matrix["torch"] == [f"{oldest}.0", built_with[1]]


def test_people_and_ci_check_the_same():
    """pre-commit, .ci/run and the workflows call targets of the Makefile, which has what they are."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    (hook,) = (
        hook
        for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
        for hook in repo["hooks"]
    )
    assert hook["entry"] == "make lint" and hook["pass_filenames"] is False
    callers = [ROOT / ".ci" / "run", *WORKFLOWS]
    command = re.compile(r'(?:^ *- run: |")make ([a-z-]+)(?:"|$)', re.MULTILINE)
    called = {target for file in callers for target in command.findall(file.read_text())}
    assert {"lint", "docs"} <= called <= targets == {"test", "test-all", "lint", "docs", "bench"}


def test_ci_removes_only_what_is_its_own():
    """Whoever runs it has an environment and builds."""
    removed = re.findall(r"^ *rm .*$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert removed == ['rm -rf "$clone"'] and "clone=build/ci\n" in (ROOT / ".ci" / "run").read_text()


def test_a_release_has_one_version():
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "specdec_kernels" / "__init__.py").read_text(), re.M)[1]
    newest = re.search(r"^## (\S+) - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert newest is not None and newest.groups() == (citation["version"], citation["date-released"])
    assert version == citation["version"]
