"""Which results are stale, by the contents of what they measured; and regenerate.py goes on after one that fails."""

from __future__ import annotations

import json

import pytest
import regenerate
import report
import results
import torch
from results import RESULTS, Result, digests, files_of, state
from support import ROOT
from support.benches import run_main

WHOLE = {"complete": True, "dirty": False, "commit": "a" * 40, "instruction_set": "avx512"}


def test_results_name_code_that_exists():
    paths = {path for result in RESULTS for path in result.sources}
    assert not [path for path in paths if not files_of(path, ROOT)]
    assert len({result.name for result in RESULTS}) == len(RESULTS)
    assert {path.stem for path in results.FOLDER.glob("*.json")} <= {result.name for result in RESULTS}


@pytest.fixture
def tree(tmp_path):
    for name in (
        "core/a.h",
        "core/deep/b.h",
        "core/notes.md",
        "core/built.so",
        "core/__pycache__/c.py",
        "x.py",
        "y.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.mark.parametrize(
    "name, changes", [("core/deep/b.h", ["core"]), ("x.py", ["*.py"]), ("core/notes.md", []), ("core/built.so", []),
                      ("core/__pycache__/c.py", []), ("core/new.h", ["core"])],
)  # fmt: skip
def test_a_digest_is_of_the_code_below_a_path(tree, name, changes):
    before = digests(("core", "*.py"), tree)
    assert digests(("core", "*.py"), tree) == before
    (tree / name).write_text("something else")
    after = digests(("core", "*.py"), tree)
    assert [path for path in before if before[path] != after[path]] == changes
    (tree / "core/a.h").rename(tree / "core/z.h")
    assert digests(("core",), tree)["core"] != after["core"]


@pytest.mark.parametrize(
    "content, found",
    [
        ({}, "fresh"),
        ({"sources": {"core": "other", "*.py": None}}, "older than core"),
        ({"sources": {}}, "older than core, *.py"),
        ({"quick": True}, "incomplete"),
        ({"complete": False}, "incomplete"),
        ({"instruction_set": "avx2"}, "made with avx2"),
        (None, "missing"),
    ],
)
def test_fresh_is_whole_and_of_this_code(tree, content, found):
    path, now = tree / "x.json", digests(("core", "*.py"), tree)
    if content is not None:
        sources = {name: digest or now[name] for name, digest in content.get("sources", now).items()}
        path.write_text(json.dumps({**WHOLE, **content, "sources": sources}))
    assert state(Result("x", "bench/x.py --json {json}", ("core", "*.py"), 1, "avx512"), path, tree) == found


def test_a_stamp_says_what_made_a_result(monkeypatch):
    answers = {"status": " M csrc/x.cpp", "rev-parse": "b" * 40}
    monkeypatch.setattr(report, "git", lambda command, *rest: answers[command])
    made = report.stamp(torch.device("cpu"), ["bench/x.py", "a b"])
    assert made["commit"] == "b" * 40 and made["dirty"] is True and made["command"] == "python bench/x.py 'a b'"
    assert made["instruction_set"] in ("baseline", "avx2", "avx512") and made["threads"] == torch.get_num_threads()
    assert made["hardware"]["cpu"] and made["versions"]["torch"] and made["date"]


def test_it_goes_on_after_a_failure_and_makes_nothing_twice(tmp_path, monkeypatch):
    def python(text: str) -> str:
        return "-c '" + text.replace("{", "{{").replace("}", "}}") + "'"

    whole = json.dumps(WHOLE).replace("true", "True").replace("false", "False")
    runs = f'open("{tmp_path}/ran", "a").write("w"); '
    writes = python(f'import json, sys; {runs}json.dump({whole}, open(sys.argv[1], "w"))') + " {json}"
    made = [
        Result("fails", python("raise SystemExit(3)") + " {json}", ("setup.py",), 1),
        Result("printed", python('print("{}")'), ("setup.py",), 1),
        Result("written", writes, ("setup.py",), 1),
        Result("other", writes, ("setup.py",), 1, "avx2"),
    ]
    monkeypatch.setattr(regenerate, "BY_NAME", {result.name: result for result in made})

    def run(*options: str):
        return run_main(regenerate, *options, "--folder", tmp_path / "out")

    first = run()
    assert first.exit_code == 1 and "fails: exit code 3" in first.output
    assert "other: made with avx512" in first.output and "printed:" not in first.output
    printed = json.loads((tmp_path / "out" / "printed.json").read_text())
    assert printed["sources"] == digests(("setup.py",)) and printed["complete"]
    assert (tmp_path / "ran").read_text() == "ww"
    stale = run("--stale")
    assert stale.exit_code == 1 and "missing" in stale.output and "printed" not in stale.output
    assert run("--list").exit_code == 0 == run("written").exit_code and (tmp_path / "ran").read_text() == "ww"
    assert run("written", "--again").exit_code == 0 and (tmp_path / "ran").read_text() == "www"
    unknown = run("speed")
    assert unknown.exit_code == 2 and "'speed'" in unknown.output


def test_without_its_model_a_result_is_left_out_and_by_name_refused(tmp_path, monkeypatch):
    needs = Result("needs", "-c 'raise SystemExit(3)' {json}", (), 1, models=(results.SMOLLM2, results.DRAFT))
    monkeypatch.setattr(regenerate, "BY_NAME", {"needs": needs})
    monkeypatch.setattr(results, "ROOT", tmp_path)
    fetch = "python tools/real_models.py SmolLM2-135M-Instruct"
    said = f"no {results.SMOLLM2}, {results.DRAFT}: {fetch} && specdec distill"
    for names, code in (((), 0), (("needs",), 1)):
        done = run_main(regenerate, *names, "--folder", tmp_path / "out")
        assert done.exit_code == code and f"not made: needs: {said}" in done.output
    for model in needs.models:
        (tmp_path / model).mkdir(parents=True)
    assert "not made: needs: exit code 3" in run_main(regenerate, "--folder", tmp_path / "out").output


def test_what_no_page_cites_is_left_out_and_old_rounds_are_not_used(tmp_path, monkeypatch):
    cells = [{"rounds": [{"times": [1], "seconds": 2}, {"seconds": 3}]}, {"rounds": []}, {"other": 1}]
    script = tmp_path / "prints.py"
    script.write_text(f"import os, sys\nos.mkdir(sys.argv[1])\nprint({json.dumps({'cells': cells, 'samples': [1]})!r})")
    result = Result("x", f"{script} {{folder}}", (), 1, without=("samples", "cells.rounds.times"))
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setattr(regenerate, "ROOT", tmp_path)
    result.folder.mkdir(parents=True)  # of a run that was killed
    assert regenerate.make(result, tmp_path / "x.json") is None and not result.folder.exists()
    made = json.loads((tmp_path / "x.json").read_text())
    assert made["cells"] == [{"rounds": [{"seconds": 2}, {"seconds": 3}]}, {"rounds": []}, {"other": 1}]
    assert "samples" not in made and made["command"].endswith("build/regenerate/x")
