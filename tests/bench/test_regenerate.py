"""regenerate.py: which results are fresh, and that it goes on after one that fails."""

from __future__ import annotations

import json

import pytest
import regenerate
import report
import torch
from regenerate import RESULTS, Result, state
from support import ROOT
from support.benches import run_main

WHOLE = {"complete": True, "dirty": False, "commit": "a" * 40, "instruction_set": "avx512"}


def test_results_name_code_that_exists():
    paths = {path for result in RESULTS for path in result.times}
    assert not [path for path in paths if not (ROOT / path).exists()]
    assert len({result.name for result in RESULTS}) == len(RESULTS)


@pytest.mark.parametrize(
    "content, changed, found",
    [
        (WHOLE, "", "fresh"),
        (WHOLE, " loop.py | 2 +-\n 1 file changed, 1 insertion(+)", "older than its code: 1 file changed"),
        (WHOLE, None, "its commit aaaaaaaaaa is unknown"),
        (WHOLE | {"dirty": True}, "", "not committed"),
        (WHOLE | {"dirty": None}, "", "not committed"),
        (WHOLE | {"quick": True}, "", "incomplete"),
        (WHOLE | {"complete": False}, "", "incomplete"),
        (WHOLE | {"instruction_set": "avx2"}, "", "made with avx2"),
        (None, "", "missing"),
    ],
)
def test_fresh_is_whole_committed_and_of_this_code(tmp_path, monkeypatch, content, changed, found):
    asked = []
    monkeypatch.setattr(regenerate, "git", lambda *arguments: asked.append(arguments) or changed)
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(json.dumps(content))
    assert found in state(Result("x", "bench/x.py --json {json}", ("csrc", "bench/x.py"), "avx512"), path)
    assert all(arguments[-4:] == ("a" * 40, "--", "csrc", "bench/x.py") for arguments in asked)


def test_a_stamp_says_what_made_a_result(monkeypatch):
    answers = {"status": " M csrc/x.cpp", "rev-parse": "b" * 40}
    monkeypatch.setattr(report, "git", lambda command, *rest: answers[command])
    made = report.stamp(torch.device("cpu"), ["bench/x.py", "a b"])
    assert made["commit"] == "b" * 40 and made["dirty"] is True and made["command"] == "python bench/x.py 'a b'"
    assert made["instruction_set"] in ("baseline", "avx2", "avx512") and made["threads"] == torch.get_num_threads()
    assert made["hardware"]["cpu"] and made["versions"]["torch"] and made["date"]


def program(text: str) -> str:
    return f"-c '{text}'"


def test_it_goes_on_after_a_failure_and_makes_nothing_twice(tmp_path, monkeypatch):
    whole = json.dumps(WHOLE).replace("true", "True").replace("false", "False")
    runs = f'open("{tmp_path}/ran", "a").write("w"); '
    writes = f'import json, sys; {runs}json.dump({whole}, open(sys.argv[1], "w"))'
    monkeypatch.setattr(
        regenerate,
        "RESULTS",
        (
            Result("fails", program("raise SystemExit(3)") + " {json}", ("csrc",)),
            Result("printed", program('print("{{}}")'), ("csrc",)),
            Result("written", program(writes.replace("{", "{{").replace("}", "}}")) + " {json}", ("csrc",)),
            Result("other", program(writes.replace("{", "{{").replace("}", "}}")) + " {json}", ("csrc",), "avx2"),
        ),
    )
    answers = {"status": "", "rev-parse": "c" * 40, "diff": ""}
    for module in (regenerate, report):
        monkeypatch.setattr(module, "git", lambda command, *rest: answers[command])

    def run(*options: str):
        return run_main(regenerate, *options, "--folder", tmp_path / "out")

    first = run()
    assert first.exit_code == 1 and "fails: exit code 3" in first.output
    assert "other: made with avx512" in first.output and "printed:" not in first.output
    assert json.loads((tmp_path / "out" / "printed.json").read_text())["commit"] == "c" * 40
    assert (tmp_path / "ran").read_text() == "ww"
    stale = run("--stale")
    assert stale.exit_code == 1 and "missing" in stale.output and "printed" not in stale.output
    assert run("--list").exit_code == 0 == run("written").exit_code and (tmp_path / "ran").read_text() == "ww"
    assert run("written", "--again").exit_code == 0 and (tmp_path / "ran").read_text() == "www"
    late = run("--minutes", "0")
    assert late.exit_code == 1 and "fails: not begun (--minutes 0)" in late.output
    unknown = run("speed")
    assert unknown.exit_code == 2 and "'speed'" in unknown.output


def test_what_no_page_cites_is_left_out_and_old_rounds_are_not_used(tmp_path, monkeypatch):
    cells = [{"rounds": [{"times": [1], "seconds": 2}, {"seconds": 3}]}, {"rounds": []}, {"other": 1}]
    script = tmp_path / "prints.py"
    script.write_text(f"import os, sys\nos.mkdir(sys.argv[1])\nprint({json.dumps({'cells': cells, 'samples': [1]})!r})")
    result = Result("x", f"{script} {{folder}}", (), without=("samples", "cells.rounds.times"))
    monkeypatch.setattr(regenerate, "ROOT", tmp_path)
    monkeypatch.setattr(regenerate, "git", lambda *arguments: "")
    monkeypatch.setattr(report, "git", lambda command, *rest: "d" * 40 if command == "rev-parse" else "")
    result.folder.mkdir(parents=True)  # of a run that was killed
    assert regenerate.make(result, tmp_path / "x.json") is None and not result.folder.exists()
    made = json.loads((tmp_path / "x.json").read_text())
    assert made["cells"] == [{"rounds": [{"seconds": 2}, {"seconds": 3}]}, {"rounds": []}, {"other": 1}]
    assert "samples" not in made and made["command"].endswith("build/regenerate/x")
