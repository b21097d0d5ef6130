"""Jobs on the embedded pair: the texts of the library, also of a job that was killed twenty times."""

from __future__ import annotations

import json

import pytest
from specdec.cli import models
from support import killed_jobs
from support.commands import rows
from support.jobs import finished, job_refused, write_prompts


@pytest.fixture
def loaded(monkeypatch, pair) -> None:
    monkeypatch.setattr(models, "load", lambda *_: models.Models(*pair, None))


def test_a_job_on_the_embedded_pair(loaded, tmp_path):
    """A prompt that is too long fails, without the others. Results are those without --output, but for times."""
    texts = ["def read(self):", "x " * 70, "import os\n"]
    file, short = write_prompts(tmp_path / "p.jsonl", texts), ("--max-new-tokens", 5)
    options = ("--rows", 2, "--max-length", 64, *short)
    lines = [json.loads(line) for line in finished(file, tmp_path / "out.jsonl", *options, exit_code=3)]
    assert [(line["id"], line["finish_reason"]) for line in lines] == [(0, "length"), (1, "failed"), (2, "length")]
    assert "prompt: got 71 tokens with max_new_tokens=5, allowed: 64 tokens together" in lines[1]["error"]
    for line in (lines[0], lines[2]):
        alone = rows(texts[line["id"]], *short, "-k", 4)[0]
        for key in ("text", "token_ids", "produced_by", "finish_reason", "status"):
            assert line[key] == alone[key]
        assert line["stats"]["emitted"] == 5 and set(line["produced_by"]) <= {"accepted", "recovered", "bonus"}
        assert list(line) == list(alone) and line["stats"].items() <= alone["stats"].items()


def test_a_line_that_asks_for_too_much_fails_alone_and_says_so(loaded, tmp_path):
    """In ``status``, too, by which programs choose what to train on."""
    prompts = [{"prompt": "import os", "max_new_tokens": most} for most in (10**9, 10**30, 3)]
    file = write_prompts(tmp_path / "p.jsonl", prompts)
    lines = [json.loads(line) for line in finished(file, tmp_path / "out.jsonl", exit_code=3)]
    told = {line["id"]: (line["finish_reason"], line["status"], line.get("error", "")) for line in lines}
    for i in (0, 1):
        assert told[i][:2] == ("failed", "ERROR") and f"max_new_tokens={prompts[i]['max_new_tokens']}" in told[i][2]
    assert told[2] == ("length", "OK", "")


def test_a_budget_in_bytes(loaded, tmp_path):
    """Too small for two rows of what is asked for; and enough for rows of fewer tokens than one prompt needs."""
    file = write_prompts(tmp_path / "p.jsonl", ["x", "y " * 90])
    told = job_refused(file, tmp_path / "out.jsonl", "--rows", 2, "--max-length", 64, "--cache-bytes", "100kB")
    assert told.startswith("Invalid value for --") and "100000" in told
    assert list(tmp_path.iterdir()) == [file]
    options = ("--rows", 2, "--cache-bytes", "2.5MB", "--max-new-tokens", 1)
    ends = [json.loads(line)["finish_reason"] for line in finished(file, tmp_path / "out.jsonl", *options, exit_code=3)]
    assert ends == ["length", "failed"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", killed_jobs.SETTINGS)
def test_a_job_that_is_killed_twenty_times(loaded, tmp_path, name):
    prompts = killed_jobs.write_prompts(tmp_path / "prompts.jsonl", 60)
    killed = killed_jobs.kill_and_resume(tmp_path, prompts, 20, 0, *killed_jobs.SETTINGS[name])
    assert killed.same and len(killed.lines) == 20
    assert 0 < killed.lines[-1] < 60 and len({*killed.lines}) > 5
