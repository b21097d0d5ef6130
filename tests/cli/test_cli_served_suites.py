"""``specdec bench --suite --url``: from a file of questions and a server to tables, files and a report."""

from __future__ import annotations

import json

import pytest
import torch
from specdec import Scheduler, SpeculativeDecoder
from specdec.cli import app
from specdec.cli.server_address import API_KEY
from specdec.serving.server.lanes import Lanes
from specdec.serving.server.service import Service
from support.chatml import chatml, serving
from support.commands import invoke, refused, run
from support.completions_server import completions_server, events
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

QUESTIONS = (
    {"question_id": 81, "category": "writing", "turns": ["import os", "again"]},
    {"question_id": "q1", "category": "qa", "turns": ["def f("]},
)
K = 3


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "question.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    return path


@pytest.fixture
def small(file, tmp_path):
    """Of a round, as far as the address."""
    options = ("--max-new-tokens", 9, "--repeats", 1, "--warm-up", 1, "--output", tmp_path / "out")
    return ("bench", "--suite", "spec-bench", file, *options, "--url")


@pytest.fixture
def ours(pair):
    """A server whose draft is its target, so that greedily everything is accepted."""
    tokenizer = chatml(pair[2])
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, eos_token_id=None, **sizes)
    target = LlamaForCausalLM(config).eval()

    def make(drafter: str, rule: str) -> Scheduler:
        return Scheduler(SpeculativeDecoder(target, target, K), rows=1, max_length=500, rule=rule)

    with serving(Service("same", tokenizer, Lanes(make, ["model"], ["coupled"]))) as url:
        yield url


def test_our_own_server(tmp_path, small, ours):
    shown = run(*small, ours)
    whole = json.loads((tmp_path / "out" / "results.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "out" / "answers" / "served.jsonl").read_text().splitlines()]
    assert [line["question_id"] for line in lines] == [81, "q1"] and lines[0]["model_id"] == "same served"
    for choice in (choice for line in lines for choice in line["choices"]):
        # The prompt's forward emits one token without drafts, and two steps the other eight.
        assert choice["new_tokens"] == [9] * len(choice["turns"])
        assert choice["decoding_steps"] == [3] * len(choice["turns"])
    assert whole["rows"][-1]["group"] == "overall" and whole["rows"][-1]["mean_accepted"] == 3.0
    assert whole["rows"][-1]["acceptance_rate"] == 1.0 and whole["settings"]["repeats"] == 1
    words = " ".join(shown.stdout.split())
    for told in ("mt_bench", "MAT", "100 %", "first token", "3.00", f"{ours}/v1, same", "answers/served.jsonl"):
        assert told in words
    again = run(*small, ours, "--repeats", 2, "--json", "--log")
    assert again.stdout.startswith("round 2: 81 (writing): 18 tokens in ")
    assert len((tmp_path / "out" / "rounds.jsonl").read_text().splitlines()) == 1 + 2
    report = CliRunner().invoke(app, ["report", str(tmp_path / "out" / "answers" / "served.jsonl"), "--json"])
    (row,) = [row for row in json.loads(report.stdout)["rows"] if row["group"] == "overall"]
    assert row["mean_accepted"] == 3.0 and row["equal"] == 2
    assert "with other settings (max_new_tokens: " in refused(*small, ours, "--max-new-tokens", 8)


def test_what_is_sent_and_what_is_not_known(small, monkeypatch, tmp_path):
    bodies = []

    def answers(body):
        bodies.append(body)
        if len(body["messages"]) > 1:
            return 400, {"error": "too long"}
        return 200, events({"choices": [{"delta": {"content": "a"}}]}, {"usage": {"completion_tokens": 2}})

    monkeypatch.setenv(API_KEY, "secret")
    with completions_server(answers) as url:
        shown = run(*small, url, "--temperature", 0.5, "--seed", 3, "--model", "mine", "--per-category", 1)
    assert {(body["model"], body["temperature"], body["max_tokens"]) for body in bodies} == {("mine", 0.5, 9)}
    assert "the server tells nothing of drafts" in shown.stdout
    assert "1 questions ended before their last turn, which the server refused: 81" in shown.stdout
    assert "secret" not in shown.output + (tmp_path / "out" / "results.json").read_text()


@pytest.mark.parametrize("command", (("verify",), ("bench", "--suite", "spec-bench")))
def test_the_key_is_read_from_the_environment(command, file, monkeypatch):
    seen = []

    class Seen(Exception):
        pass

    def connect(self, url, key=None, model=None, timeout=0.0):
        seen.append(key)
        raise Seen

    monkeypatch.setattr("specdec.evaluation.server_connection.ServerConnection.__init__", connect)
    monkeypatch.setenv(API_KEY, "secret")
    given = (*command, file) if "--suite" in command else (*command, "--check", "greedy")
    assert isinstance(invoke(*given, "--url", "http://x").exception, Seen) and seen == ["secret"]


@pytest.mark.parametrize(
    ("options", "told"),
    (
        (("--target", "t"), "--target: got it with --url, allowed: none: the server chooses how it decodes. Beside"),
        (("--method", "lookup"), "--method: got it with --url"),
        (("-k", 2), "--num-drafts: got it with --url"),
        (("--top-p", 0.9), "--top-p: got it with --url"),
        (("--batch-size", 1), "--batch-size: got it with --url"),
        (("--minutes", 3), "--minutes: got it with --url"),
        (("--threads", 2), "--threads: got it with --url"),
        (("--device", "cpu"), "--device: got it with --url"),
        (("--cut-prompts",), "--cut-prompts: got it with --url"),
        (("--no-report",), "--report/--no-report: got it with --url"),
        (("--temperature", 0, "--temperature", 1), "--temperature: got 0.0, 1.0 with --url, allowed: one number >= 0"),
        (("--timeout", 0), "--timeout: got 0.0, allowed: a finite number > 0"),
        ((), "--url: http://127.0.0.1:9/v1: URLError"),
    ),
)
def test_what_does_not_go_with_a_server_is_refused(tmp_path, small, options, told):
    assert refused(*small, "http://127.0.0.1:9", *options).startswith(f"Invalid value for {told}")
    assert not (tmp_path / "out").exists()


def test_a_server_needs_a_suite_and_a_name_needs_a_server(small):
    assert "--url: got it without --suite" in refused("bench", "--url", "http://x")
    assert "--model: got it without --url" in refused(*small[:-1], "--model", "m")
    assert "PROMPT: got 0 arguments" in refused("bench", "--suite", "spec-bench", "--url", "http://x")
