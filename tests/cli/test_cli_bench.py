"""``specdec bench``: its options, its folder, and how it ends."""

from __future__ import annotations

import csv
import errno
import json
import os
import signal

import pytest
from specdec.checks import refuse
from specdec.cli.bench_run import BUG, about
from specdec.cli.job import NOT_WRITTEN
from specdec.evaluation.contenders import SpecdecMethod, TransformersMethod
from specdec.jobs.questions import PLACEHOLDER
from support.commands import invoke, refused, run

SMALL = ("--max-new-tokens", 4, "--warm-up", 0, "--method", "model", "-k", 2, "--no-report")
QUICK = (*SMALL, "--repeats", 2, "--temperature", 0, "x = ", "def f(")


@pytest.fixture
def command(tmp_path, folders):
    return (*folders, "--output", tmp_path / "out")


def rounds(tmp_path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "out" / "rounds.jsonl").read_text().splitlines()][1:]


def test_a_run_writes_its_folder(tmp_path, command):
    shown = run("bench", *QUICK, *command, "--log", "--report")
    assert (tmp_path / "out" / "report.html").stat().st_size > 1000
    whole = json.loads((tmp_path / "out" / "results.json").read_text())
    names = ["transformers t=0 b=1", "plain t=0 b=1", "model token k=2 t=0 b=1"]
    assert [cell["id"] for cell in whole["cells"]] == names and whole["greedy"]["equal"] is True
    assert whole["models"]["target"]["vocabulary"] == 4096 and whole["models"]["draft"]["layers"] == 1
    assert [prompt["id"] for prompt in whole["prompts"]] == ["0", "1"] and whole["settings"]["max_new_tokens"] == 4
    assert "resident" in whole["environment"]["memory"]
    with (tmp_path / "out" / "results.csv").open() as file:
        assert [row["id"] for row in csv.DictReader(file)] == names
    assert len((tmp_path / "out" / "log.csv").read_text().splitlines()) == 1 + 3 * 2 * 2
    assert len(rounds(tmp_path)) == 2
    assert "round 2: 1 (other): plain t=0 b=1: 4 tokens in " in shown.stdout
    assert "greedy texts of specdec and transformers equal: yes" in shown.stdout
    assert "2 rounds are too few" in shown.stdout and "2 rounds of 3 ways to decode\n" in shown.stderr


ALONE = [f"{name} k=auto" for name in ("lookup coupled", "suffix coupled", "early-exit coupled")]


@pytest.mark.parametrize("leaves_early", (True, False))
def test_a_target_alone(tmp_path, folders, monkeypatch, leaves_early):
    """With drafters that need no draft; K of those of its text adapts at every temperature."""
    if not leaves_early:
        monkeypatch.setattr("specdec.drafters.early_exit.layers_path", lambda model: refuse("target", "x", "y"))
    small = ("--max-new-tokens", 4, "--warm-up", 0, "--repeats", 1, "--no-report", "x = ", *folders[:2])
    run("bench", *small, "--output", tmp_path / "out")
    ids = [cell["id"] for cell in json.loads((tmp_path / "out" / "results.json").read_text())["cells"]]
    names = ["transformers", "plain", "assisted k=2", "assisted k=auto", *ALONE[: 3 if leaves_early else 2]]
    assert ids == [f"{name} t={t} b=1" for t in (0, 1) for name in names]
    if not leaves_early:
        told = refused("bench", *small, "--method", "early-exit", "--output", tmp_path / "asked")
        assert "target: got x" in told


@pytest.mark.parametrize(
    ("seconds", "words"),
    ((None, ""), (0.2, "will take about 1 s"), (12.6, "will take about 13 s"), (81.0, "will take about 0:01:21")),
)
def test_the_time_that_it_will_take(seconds, words):
    """Nothing is said where nothing is known: without a warm-up."""
    assert about(seconds).strip() == words


def test_the_same_command_goes_on(tmp_path, command):
    run("bench", *SMALL, "--repeats", 1, "--temperature", 0, "x = ", *command)
    (first,) = rounds(tmp_path)
    done = run("bench", *SMALL, "--repeats", 2, "--temperature", 0, "x = ", *command, "--json")
    assert rounds(tmp_path)[0] == first and len(rounds(tmp_path)) == 2
    assert [len(cell["rounds"]) for cell in json.loads(done.stdout)["cells"]] == [2, 2, 2]
    again = run("bench", *SMALL, "--repeats", 2, "--temperature", 0, "x = ", *command)
    assert "nothing to measure" in again.stderr and len(rounds(tmp_path)) == 2
    told = refused("bench", *SMALL, "--temperature", 0, "y = ", *command, "--seed", 3)
    assert "--output: got" in told and "with other settings (seed: 0 then, 3 now; prompts: " in told
    assert len(rounds(tmp_path)) == 2


def fails_in_the_second_round(monkeypatch, fail) -> None:
    genuine, calls = SpecdecMethod.run, []

    def failing(self, prompts, seed):
        calls.append(seed)
        if len(calls) == 6:  # plain and model continue two prompts in the first round
            fail()
        return genuine(self, prompts, seed)

    monkeypatch.setattr(SpecdecMethod, "run", failing)


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
def test_a_signal_keeps_the_rounds_so_far(tmp_path, command, monkeypatch, number):
    with monkeypatch.context() as patch:
        fails_in_the_second_round(patch, lambda: signal.raise_signal(number))
        stopped = invoke("bench", *QUICK, *command)
    assert stopped.exit_code == 128 + number
    assert f"stopped by {number.name}" in stopped.stderr and "1 rounds are in" in stopped.stderr
    whole = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [len(cell["rounds"]) for cell in whole["cells"]] == [1, 1, 1]
    (first,) = rounds(tmp_path)
    assert "1 rounds are in" in run("bench", *QUICK, *command).stderr
    assert rounds(tmp_path)[0] == first and [each["round"] for each in rounds(tmp_path)] == [0, 1]


def test_a_full_disk_keeps_the_rounds_so_far(tmp_path, command, monkeypatch):
    pwrite, lines = os.pwrite, []

    def full(file: int, data: bytes, at: int) -> int:
        lines.append(data)
        if len(lines) > 2:  # the header and the first round
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(file, data, at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        stopped = invoke("bench", *QUICK, *command)
    assert stopped.exit_code == NOT_WRITTEN
    assert "rounds.jsonl': No space left on device" in stopped.stderr and "1 rounds are in" in stopped.stderr
    assert len(json.loads((tmp_path / "out" / "results.json").read_text())["cells"][0]["rounds"]) == 1
    run("bench", *QUICK, *command)
    assert len(rounds(tmp_path)) == 2


def test_a_disk_that_is_full_at_the_end(tmp_path, command, monkeypatch):
    def full(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("specdec.evaluation.bench.folder.write_whole", full)
        stopped = invoke("bench", *QUICK, *command)
    assert stopped.exit_code == NOT_WRITTEN and "results.json': No space left" in stopped.stderr
    assert len(rounds(tmp_path)) == 2 and not (tmp_path / "out" / "results.json").exists()
    run("bench", *QUICK, *command)
    assert (tmp_path / "out" / "results.json").exists()


def test_a_wrong_text_ends_with_1(command, monkeypatch):
    genuine = SpecdecMethod.run

    def wrong(self, prompts, seed):
        done = genuine(self, prompts, seed)
        done.texts[0][0] += 1
        return done

    monkeypatch.setattr(SpecdecMethod, "run", wrong)
    ended = invoke("bench", *QUICK, *command)
    assert ended.exit_code == BUG and "equal: no" in ended.stdout
    assert "bug: model token k=2 t=0 b=1, prompt 0, new token 0" in ended.stdout


def test_a_wrong_text_of_transformers_assistant_is_not_ours(command, monkeypatch):
    genuine = TransformersMethod.run

    def wrong(self, prompts, seed):
        done = genuine(self, prompts, seed)
        if self.name == "assisted":
            done.texts[0][0] += 1
        return done

    monkeypatch.setattr(TransformersMethod, "run", wrong)
    ended = invoke("bench", *QUICK, "--method", "assisted", *command)
    assert ended.exit_code == 0 and "equal: yes" in ended.stdout and "bug: assisted k=2" in ended.stdout


def test_files_of_questions(tmp_path, command):
    file = tmp_path / "question.jsonl"
    questions = [{"question_id": i, "category": "ab"[i % 2], "turns": [f"x{i} = ", "y"]} for i in range(6)]
    file.write_text("".join(json.dumps(each) + "\n" for each in questions))
    settings = ("--batch-file", file, "--category", "b", "--per-category", 2, "--batch-size", 2)
    run("bench", *SMALL, "--repeats", 1, *settings, "--temperature", 1, "--top-k", 5, *command)
    whole = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(prompt["id"], prompt["category"]) for prompt in whole["prompts"]] == [("1", "b"), ("3", "b")]
    (cell,) = [cell for cell in whole["cells"] if cell["method"] == "model"]
    assert cell["id"] == "model token k=2 t=1 b=2 top-k=5"
    assert cell["rounds"][0]["by_prompt"][0][0] == ["1", "3"] and whole["greedy"]["equal"] is None


@pytest.mark.parametrize(
    ("options", "told"),
    (
        (("--method", "quick"), "--method: got 'quick', allowed: transformers, plain, assisted, model, lookup"),
        (("--method", "model", "--method", "model"), "--method: got model, model, allowed: each once"),
        (("-k", "0"), "--num-drafts: got 0, allowed: an integer >= 1, or auto"),
        (("-k", "2", "-k", "2"), "--num-drafts: got 2, 2, allowed: each once"),
        (("--rule", "typical"), "--rule: got 'typical'"),
        (("--temperature", "-1"), "--temperature: got -1.0"),
        (("--temperature", "0", "--top-k", "5", *SMALL), "--top-k: got a filter with temperature 0 alone"),
        (("--top-p", "1.5"), "--top-p: got 1.5"),
        (("--batch-size", "0"), "--batch-size: got 0, allowed: an integer >= 1"),
        (("--repeats", "0"), "--repeats: got 0"),
        (("--warm-up", "-1"), "--warm-up: got -1, allowed: an integer >= 0"),
        (("--minutes", "0"), "--minutes: got 0.0, allowed: a number > 0"),
        (("--category", "sonnets"), "--category: got 'sonnets', allowed: question, list, essay"),
        (("--load-in-8bit", "--load-in-4bit"), "--load-in-8bit / --load-in-4bit: got both"),
        (("x", "--batch-file", __file__), "PROMPT / --batch-file / --prompt-set: got several"),
        (("",), "PROMPT: got an empty prompt"),
        (("--target", "x"), "--draft: "),
        (("--chat", *SMALL, "x"), "--chat: got --chat for a target without a chat template"),
        (("--tree", "4", *SMALL, "x"), "--tree: got 4, allowed: with a --method that proposes trees"),
    ),
)
def test_what_is_refused(tmp_path, options, told):
    if options == ("--target", "x"):
        options, told = ("--target", tmp_path, "--method", "model"), "--target / --draft: got --target without --draft"
    output = ("--output", tmp_path / "out")
    assert refused("bench", *options, *output).startswith(f"Invalid value for {told}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "told"),
    (
        ("\n", "without a prompt, allowed: at least one line that is not empty"),
        ('{"prompt": "x"}\n\n{"prompt": 5}\n', "line 3 of"),
        (json.dumps({"turns": [PLACEHOLDER]}), "line 1 of"),
    ),
)
def test_a_file_that_cannot_be_used(tmp_path, content, told):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    error = refused("bench", "--batch-file", file, "--output", tmp_path / "out")
    assert error.startswith("Invalid value for --batch-file: ") and told in error
    assert not (tmp_path / "out").exists()


def test_a_prompt_that_is_too_long(tmp_path, folders):
    options = ("bench", *SMALL, "--temperature", 0, "--repeats", 1, "x = " * 60, *folders)
    told = refused(*options, "--output", tmp_path / "out")
    assert "PROMPT: got prompt '0' of" in told and "--cut-prompts cuts" in told and not (tmp_path / "out").exists()
    run(*options, "--cut-prompts", "--output", tmp_path / "cut")
    assert json.loads((tmp_path / "cut" / "results.json").read_text())["prompts"][0]["tokens"] == 60


def test_weights_in_8_bits(tmp_path):
    """On a CPU, by ours, of both models of the embedded pair."""
    run("bench", *SMALL, "--repeats", 1, "--temperature", 0, "x = ", "--load-in-8bit", "--output", tmp_path / "out")
    whole = json.loads((tmp_path / "out" / "results.json").read_text())
    assert whole["settings"]["bits"] == 8
    for model in (whole["models"][name] for name in ("target", "draft")):
        assert model["bytes"] < 1.2 * model["parameters"]
    text = run("generate", "x = ", "--load-in-8bit", "--max-new-tokens", 8, "--drafter", "lookup").stdout
    assert text == run("generate", "x = ", "--load-in-8bit", "--max-new-tokens", 8, "--drafter", "none").stdout
    told = refused("bench", "--load-in-4bit", "x", "--output", tmp_path / "four")
    assert "--load-in-8bit / --load-in-4bit: got 4 on a CPU, allowed: 8 or None" in told
