"""Log-probabilities in the JSON of the command line: of prompts, of files at once, and of jobs."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from specdec import TokenLogProb
from specdec.cli import models
from specdec.jobs.output import KEYS
from specdec.jobs.result_line import LOG_PROB_KEYS, log_prob_fields
from support.commands import PROMPT, refused, rows
from support.jobs import finished, job_refused, write_prompts

OPTIONS = ("--max-new-tokens", 4, "--temperature", 0.8, "-k", 4)
LINES = (
    {"prompt": PROMPT},
    {"prompt": "x = ", "log_probs": True},
    {"prompt": "import os\n", "top_log_probs": 0},
    {"prompt": "x", "prompt_log_probs": 1, "max_new_tokens": 0},
    {"prompt": PROMPT, "top_log_probs": 3, "prompt_log_probs": 2},
)
WANTED = ((), LOG_PROB_KEYS[:2], LOG_PROB_KEYS[:3], LOG_PROB_KEYS[3:], LOG_PROB_KEYS)


@pytest.fixture
def loaded(monkeypatch, pair) -> None:
    monkeypatch.setattr(models, "load", lambda *_, **__: models.Models(*pair, None))


def test_the_fields_are_those_of_a_full_forward(loaded, pair):
    target, _, tokenizer = pair
    (row,) = rows(PROMPT, *OPTIONS, "--top-log-probs", 3, "--prompt-log-probs", 2)
    assert tuple(row)[-4:] == LOG_PROB_KEYS
    prompt = tokenizer([PROMPT]).input_ids[0]
    with torch.inference_mode():
        exact = target(torch.tensor([prompt + row["token_ids"]])).logits[0, :-1].double().log_softmax(-1)
    assert row["prompt_log_probs"][0] is None
    found = [*row["prompt_log_probs"][1:], *row["top_log_probs"]]
    for i, (each, of_all, token) in enumerate(zip(found, exact, [*prompt[1:], *row["token_ids"]], strict=True)):
        assert list(each) == ["log_prob", "rank", "top"]
        assert each["log_prob"] == pytest.approx(of_all[token].item(), abs=1e-3)
        likely = of_all.topk(2 if i < len(prompt) - 1 else 3)
        assert [value for _, value in each["top"]] == pytest.approx(likely.values.tolist(), abs=1e-3)
        assert each["rank"] == 1 + (of_all > of_all[token]).sum()
    assert [each["log_prob"] for each in row["top_log_probs"]] == row["raw_log_probs"]


def test_each_line_has_what_it_asks_for(loaded, tmp_path):
    """The same in a job as at once; a job goes on beside such lines, and not with other defaults."""
    file, output = write_prompts(tmp_path / "p.jsonl", LINES), tmp_path / "out.jsonl"
    finished(file, output, *OPTIONS, "--rows", 2)
    of_job = {row["id"]: row for row in map(json.loads, output.read_bytes().splitlines())}
    at_once = rows("--batch-file", file, *OPTIONS)
    for i, (row, keys) in enumerate(zip(at_once, WANTED, strict=True)):
        assert tuple(of_job[i]) == (*KEYS, *keys)
        assert tuple(key for key in row if key in LOG_PROB_KEYS) == keys
        assert of_job[i]["token_ids"] == row["token_ids"]
        for key in keys:
            _check_equal(of_job[i][key], row[key])
    whole = output.read_bytes()
    output.write_bytes(whole[:-20])  # killed within its last line
    finished(file, output, *OPTIONS, "--rows", 2)
    assert output.read_bytes() == whole
    assert "top_log_probs: null then, 1 now" in job_refused(file, output, *OPTIONS, "--rows", 2, "--top-log-probs", 1)


def _check_equal(found: list, expected: list) -> None:
    """But for rounding: a job decodes other batches."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, dict):
            assert one["rank"] == other["rank"]
            assert [token for token, _ in one["top"]] == [token for token, _ in other["top"]]
            one, other = one["log_prob"], other["log_prob"]
        assert one == pytest.approx(other, abs=1e-4)


def test_numbers_that_json_has_not():
    likely = TokenLogProb(-math.inf, 9, [(3, -0.5)])
    text = SimpleNamespace(
        log_probs=[-1.0, math.nan], raw_log_probs=None, top_log_probs=[likely], prompt_log_probs=[None, likely]
    )
    found = {"log_prob": -9999.0, "rank": 9, "top": [[3, -0.5]]}
    fields = log_prob_fields(text)
    assert fields == {"log_probs": [-1.0, None], "top_log_probs": [found], "prompt_log_probs": [None, found]}
    json.dumps(fields, allow_nan=False)


@pytest.mark.parametrize(
    "line, message",
    [
        ({"log_probs": 1}, "log_probs: got 1, allowed: True or False"),
        ({"top_log_probs": 21}, "top_log_probs: got 21, allowed: None (off), or 0 to 20"),
        ({"prompt_log_probs": "2"}, "prompt_log_probs: got '2', allowed: an integer >= 0"),
    ],
)
def test_wrong_lines(tmp_path, monkeypatch, line, message):
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("loaded"))
    file = write_prompts(tmp_path / "p.jsonl", [{"prompt": "x", **line}])
    assert f"line 1 of '{file}': {message}" in refused("generate", "--json", "--batch-file", file)


def test_what_is_not_shown_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("loaded"))
    for option, *value in (("--log-probs",), ("--top-log-probs", 0), ("--prompt-log-probs", 0)):
        told = refused("generate", "x", option, *value)
        assert told.startswith(f"Invalid value for {option}: got {option} without --json, allowed: both, or --output")
    assert "--prompt-log-probs: got -1, allowed: " in refused("generate", "--json", "x", "--prompt-log-probs", -1)
    file = write_prompts(tmp_path / "p.jsonl", [{"prompt": "x", "prompt_log_probs": 0}])
    assert "--batch-file: got lines that ask for log-probabilities, without --json" in refused(
        "generate", "--batch-file", file
    )
