"""``specdec bench --suite`` and ``specdec report`` on answer files: from questions to tables."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from specdec.cli.bench_run import BUG
from specdec.evaluation.contenders import SpecdecMethod
from support.chatml import chatml
from support.commands import invoke, refused, run
from test_cli_bench import rounds
from typer.testing import CliRunner

QUESTIONS = (
    {"question_id": 81, "category": "writing", "turns": ["import os", "again"], "reference": []},
    {"question_id": 101, "category": "coding", "turns": ["x = "]},
    {"question_id": "q1", "category": "qa", "sub_category": "facts", "turns": ["def f("]},
)
QUICK = ("--max-new-tokens", 4, "--repeats", 2, "--warm-up", 1, "--method", "model", "-k", 2, "--no-report")
NAMES = ("transformers t=0 b=1", "plain t=0 b=1", "model token k=2 t=0 b=1")


def written(folder: Path) -> Path:
    path = folder / "question.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    return path


@pytest.fixture
def file(tmp_path) -> Path:
    return written(tmp_path)


@pytest.fixture
def small(file, tmp_path) -> tuple[object, ...]:
    """Of the embedded pair, whose texts have more than one token a step."""
    return ("bench", "--suite", "spec-bench", file, *QUICK, "--output", tmp_path / "out")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(its folder, what was said) of one run of ``small``'s."""
    folder = tmp_path_factory.mktemp("measured")
    return folder, run("bench", "--suite", "spec-bench", written(folder), *QUICK, "--output", folder / "out")


def answer_files(folder: Path) -> list[Path]:
    names = ("transformers-t=0-b=1", "plain-t=0-b=1", "model-token-k=2-t=0-b=1")
    return [folder / "out" / "answers" / f"{name}.jsonl" for name in names]


def report(*arguments: object) -> str:
    result = CliRunner().invoke(_app(), ["report", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def _app():
    from specdec.cli import app

    return app


def test_a_suite_from_its_file_to_its_tables(measured):
    folder, shown = measured
    whole = json.loads((folder / "out" / "results.json").read_text())
    assert "no chat template: prompts are Vicuna's conversation" in shown.stderr
    assert whole["settings"]["max_new_tokens"] == 4 and [c["temperature"] for c in whole["cells"]] == [0.0] * 3
    suite = whole["suite"]
    assert suite["name"] == "spec-bench" and suite["questions"][2]["sub_category"] == "facts"
    (table,) = suite["tables"]
    assert [(row["group"], row["method"]) for row in table["rows"]] == [
        (group, name) for group in ("mt_bench", "qa", "overall") for name in NAMES
    ]
    assert whole["greedy"]["equal"] is True and table["rows"][-1]["equal"] == 3
    for words in ("mt_bench 2", "3 of 3", "FastChat", "MAT: mean accepted", "answers/ (for specdec report)"):
        assert words in " ".join(shown.stdout.split())
    # Four calls a round: question 81 has two turns. What was said stands in the answer files alone.
    assert len((folder / "out" / "log.csv").read_text().splitlines()) == 1 + 3 * 2 * 4
    assert "talks" not in whole["cells"][0]["rounds"][0]
    for path in answer_files(folder):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["question_id"] for line in lines] == [81, 101, "q1"]
        for given in (given for line in lines for given in line["choices"]):
            assert len(given["accept_lengths"]) == sum(given["decoding_steps"])
            assert sum(given["accept_lengths"]) == sum(given["new_tokens"]) == 4 * len(given["turns"])
    (of_model,) = [row for row in table["rows"] if row["method"] == NAMES[2] and row["group"] == "overall"]
    assert of_model["mean_accepted"] == whole["cells"][2]["tau"] > 1


def test_the_report_of_answer_files(measured):
    folder, _ = measured
    theirs, plain, ours = answer_files(folder)
    made = json.loads(report(ours, plain, "--baseline", plain, "--json"))
    (table,) = json.loads((folder / "out" / "results.json").read_text())["suite"]["tables"]
    rows = {(row["group"], row["method"]): row for row in table["rows"]}
    for row in made["rows"]:  # as the benchmark itself counted
        own = rows[row["group"], {ours.stem: NAMES[2], plain.stem: NAMES[1]}[row["method"]]]
        assert row["mean_accepted"] == own["mean_accepted"] and row["equal"] == row["questions"]
        assert row["speedup"]["over_baseline"] == own["speedup"]["over_plain"]
    shown = report(theirs, ours)
    assert f"times {theirs}" in shown and "times baseline" in shown and shown.count(ours.stem) == 3


def test_a_suite_goes_on_where_it_was(tmp_path, small, file):
    run(*small, "--repeats", 1)
    (first,) = rounds(tmp_path)
    run(*small)
    assert rounds(tmp_path)[0] == first and len(rounds(tmp_path)) == 2
    assert all(len(json.loads(line)["choices"]) == 2 for line in answer_files(tmp_path)[1].read_text().splitlines())
    file.write_text(file.read_text().replace("again", "once more"))  # a later turn, whose prompt nobody knows before
    assert "with other settings (prompts: " in refused(*small)


def test_speed_bench_by_the_chat_template(tmp_path, file, pair, folders):
    target = shutil.copytree(folders[1], tmp_path / "target")
    chatml(pair[2], "{% for m in messages %}{{ m.content }}{% endfor %}").save_pretrained(target)
    options = ("--suite", "speed-bench", file, *QUICK[:-4], "lookup", "--no-report", "--output", tmp_path / "out")
    shown = run("bench", "--target", target, *options, "--temperature", 0.7)
    suite = json.loads((tmp_path / "out" / "results.json").read_text())["suite"]
    assert suite["prompts"] == "the tokenizer's chat template" and "Vicuna" not in shown.stderr
    (table,) = suite["tables"]
    assert [*dict.fromkeys(row["group"] for row in table["rows"])] == ["writing", "coding", "qa", "overall"]
    assert {row["equal"] for row in table["rows"]} == {None}


def test_a_wrong_later_turn_ends_with_1(small, monkeypatch):
    genuine = SpecdecMethod.run

    def wrong(self, prompts, seed):
        done = genuine(self, prompts, seed)
        if "again" in tokenizer.decode(prompts[0]):
            done.texts[0][0] += 1
        return done

    from specdec import load_embedded_pair

    tokenizer = load_embedded_pair()[2]
    monkeypatch.setattr(SpecdecMethod, "run", wrong)
    ended = invoke(*small, "--repeats", 1)
    assert ended.exit_code == BUG and "bug: plain t=0 b=1, prompt 81, turn 2, new token 0" in ended.stdout


@pytest.mark.parametrize(
    ("options", "told"),
    (
        (("--suite", "mt-bench", "FILE"), "--suite: got 'mt-bench', allowed: spec-bench, speed-bench"),
        (("--suite", "spec-bench"), "PROMPT: got 0 arguments with --suite spec-bench, allowed: one, the file"),
        (("--suite", "spec-bench", "a", "b"), "PROMPT: got 2 arguments with --suite"),
        (("--suite", "spec-bench", "none.jsonl"), "PROMPT: got 'none.jsonl' (No such file"),
        (("--suite", "spec-bench", "FILE", "--batch-size", 2), "--batch-size: got 2 with --suite, allowed: 1"),
        (("--suite", "spec-bench", "FILE", "--prompt-set", "code"), "--prompt-set: got --prompt-set with --suite"),
        (("--suite", "spec-bench", "--batch-file", "FILE"), "--batch-file: got --batch-file with --suite"),
        (("--suite", "spec-bench", "FILE", "--no-chat"), "--chat: got --chat or --no-chat with --suite"),
        (("--suite", "spec-bench", "FILE", "--category", "poems"), "--category: got 'poems', allowed: writing, coding"),
        (("--suite", "speed-bench", "FILE"), "--suite: got speed-bench for a target without a chat template"),
    ),
)
def test_what_a_suite_cannot_have_is_refused(tmp_path, file, options, told):
    given = [file if option == "FILE" else option for option in options]
    assert refused("bench", *given, "--output", tmp_path / "out").startswith(f"Invalid value for {told}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "told"),
    (
        ({"prompt": "x"}, "turns: got None, allowed: a list of texts, one at least"),
        ({"question_id": 1, "category": "qa", "turns": ["x", ""]}, "turns: got '', allowed: a text"),
    ),
)
def test_a_question_without_turns_is_refused(tmp_path, file, line, told):
    file.write_text(json.dumps(line))
    error = refused("bench", "--suite", "spec-bench", file, "--output", tmp_path / "out")
    assert f"line 1 of {str(file)!r}: {told}" in error


def test_a_conversation_that_does_not_fit(tmp_path, file, folders):
    """Of 100 positions, Vicuna's system message leaves few."""
    target = shutil.copytree(folders[1], tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 100}))
    options = ("bench", "--suite", "spec-bench", file, *QUICK[:-4], "lookup", "--no-report", "--target", target)
    file.write_text(json.dumps({"question_id": 7, "category": "qa", "turns": ["x = " * 40]}))
    told = refused(*options, "--output", tmp_path / "out")
    assert "PROMPT: got question '7', whose first prompt has" in told and "--cut-prompts cuts" in told
    shown = run(*options, "--cut-prompts", "--output", tmp_path / "cut")
    assert "no position was left" not in shown.stdout
    told = refused(*options, "--cut-prompts", "--max-new-tokens", 100, "--output", tmp_path / "out")
    assert "--max-new-tokens: got 100, which leave no position for a prompt, allowed: at most 99" in told
    file.write_text(json.dumps({"question_id": 7, "category": "qa", "turns": ["x", "x = " * 20]}))
    shown = run(*options, "--output", tmp_path / "ended")
    assert "1 questions ended before their last turn: 7; no position was left" in shown.stdout


def test_what_a_report_cannot_have_is_refused(tmp_path, small):
    def told(*arguments: object) -> str:
        result = CliRunner().invoke(_app(), ["report", *map(str, arguments)])
        assert result.exit_code == 2 and result.stdout == ""
        return " ".join(result.stderr.partition("Error: ")[2].split())

    answers = tmp_path / "a.jsonl"
    answers.write_text("{}\n")
    assert "FOLDER|FILE: got question_id None in line 1 of" in told(answers)
    assert told(answers, "--output", tmp_path).startswith("Invalid value for --output: got --output with answer files")
    assert told(tmp_path, "--json").startswith("Invalid value for --json: got --json with results of specdec bench")
    assert "allowed: one folder or results.json, or only answer files" in told(tmp_path, answers)
