"""``--batch-file`` without ``--output``: lines have settings of their own, as in a job."""

from __future__ import annotations

import json
import os
import threading

import pytest
from specdec import SpeculativeDecoder
from specdec.cli import app
from support.commands import refused, rows, run
from support.jobs import write_prompts
from typer.testing import CliRunner

OPTIONS = ("--temperature", 0.9, "--max-new-tokens", 10, "--seed", 5)
# A line's own settings, and the options that say the same.
OWN = [
    ({}, ()),
    ({"temperature": 0}, ("--temperature", 0)),
    ({"temperature": 1.5, "top_k": 7, "top_p": 0.9}, ("--temperature", 1.5, "--top-k", 7, "--top-p", 0.9)),
    ({"min_p": 0.2, "repetition_penalty": 1.4}, ("--min-p", 0.2, "--repetition-penalty", 1.4)),
    ({"presence_penalty": 1.1, "frequency_penalty": 0.3}, ("--presence-penalty", 1.1, "--frequency-penalty", 0.3)),
    ({"seed": -77}, ("--seed", -77)),
    ({"logit_bias": {"300": 30.0}}, ("--logit-bias", "300=30")),
    ({"banned_tokens": [12, 13], "min_new_tokens": 9}, ("--ban", 12, "--ban", 13, "--min-new-tokens", 9)),
    ({"max_new_tokens": 3}, ("--max-new-tokens", 3)),
    ({"stop": ["is", "\n"]}, ("--stop", "is", "--stop", "\n")),
    ({"max_new_tokens": 0}, ("--max-new-tokens", 0)),
]


def test_a_line_has_its_own_settings(tmp_path):
    """Each of them does what the option does, and nothing to the other lines."""
    prompt = "def read(self, size"
    lines = [{"id": f"line {i}", "prompt": prompt, **own} for i, (own, _) in enumerate(OWN)]
    found = rows("--batch-file", write_prompts(tmp_path / "p.jsonl", lines), *OPTIONS)
    assert [row["id"] for row in found] == [line["id"] for line in lines]
    for i, (row, (_, options)) in enumerate(zip(found, OWN, strict=True)):
        alone = rows(prompt, *OPTIONS, "--seed", 5 + i, *options)[0]
        assert (row["token_ids"], row["text"]) == (alone["token_ids"], alone["text"]), lines[i]
        assert list(row) == list(alone) and (row["prompt"], row["finish_reason"]) == (i, alone["finish_reason"])
    assert [row["finish_reason"] for row in found[8:]] == ["length", "stop", "length"]
    assert found[6]["token_ids"] == [300] * 10 and len({tuple(row["token_ids"]) for row in found}) > 8


def test_all_lines_are_one_batch(tmp_path, monkeypatch):
    sizes, decode = [], SpeculativeDecoder.decode

    def spy(self, requests, *settings):
        sizes.append([request.max_new_tokens for request in requests])
        return decode(self, requests, *settings)

    monkeypatch.setattr(SpeculativeDecoder, "decode", spy)
    lines = ["a", {"prompt": "b", "max_new_tokens": 4}, {"prompt": "c", "temperature": 1.1}, {"prompt": "d", "seed": 1}]
    shown = run("generate", "--batch-file", write_prompts(tmp_path / "p.jsonl", lines), "--max-new-tokens", 5)
    assert sizes == [[5, 4, 5, 5]]
    assert [line for line in shown.stdout.splitlines() if line.startswith("--- ")] == [
        f"--- {i} of 4 ---" for i in range(1, 5)
    ]
    assert shown.stderr.startswith("19 tokens in ")


def test_texts_of_a_line_have_its_seed_and_the_next_ones(tmp_path):
    file = write_prompts(tmp_path / "p.jsonl", ["x = ", {"prompt": "y", "seed": 40}, "z"])
    found = rows("--batch-file", file, *OPTIONS, "--num-return-sequences", 2)
    seeds = [5, 6, 40, 41, 9, 10]
    for row, seed, prompt in zip(found, seeds, ("x = ", "x = ", "y", "y", "z", "z"), strict=True):
        assert row["token_ids"] == rows(prompt, *OPTIONS, "--seed", seed)[0]["token_ids"]


def test_a_pipe_is_a_file(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("x = \ny\n",))
    writer.start()
    found = rows("--batch-file", pipe, *OPTIONS)
    writer.join()
    assert [row["token_ids"] for row in found] == [
        rows(prompt, *OPTIONS, "--seed", 5 + i)[0]["token_ids"] for i, prompt in enumerate(("x = ", "y"))
    ]


def test_standard_input(tmp_path, pair, monkeypatch):
    """JSON lines as a batch, or one prompt as it stands."""
    monkeypatch.setattr("specdec.models.load.loading.load_embedded_pair", lambda *_, **__: pair)

    def given(content: bytes, *options: object):
        args = ["generate", "--json", *options, *OPTIONS, "--device", "cpu"]
        return CliRunner().invoke(app, [str(a) for a in args], input=content)

    lines = b'"x = "\n{"prompt": "y", "id": "b", "max_new_tokens": 3}\n'
    first, second = map(json.loads, given(lines, "--batch-file", "-").stdout.splitlines())
    assert first["token_ids"] == rows("x = ", *OPTIONS)[0]["token_ids"]
    assert (second["id"], second["prompt"], len(second["token_ids"])) == ("b", 1, 3)
    (row,) = map(json.loads, given(b"def f():\r\n", "--prompt-file", "-").stdout.splitlines())
    assert row["token_ids"] == rows("def f():\r\n", *OPTIONS)[0]["token_ids"]
    for content, options, message in (
        (b'"x"\ntext\n', ("--batch-file", "-"), "line 2 of standard input: got 'text', allowed: a JSON string or {"),
        (b"\n", ("--batch-file", "-"), "got standard input without a prompt, allowed: at least one line"),
        (b"", ("--prompt-file", "-"), "--prompt-file: got standard input, which is empty, allowed: at least one"),
        (b'"x"', ("--batch-file", "-", "--output", tmp_path / "o"), "got standard input, allowed: a regular file"),
    ):
        args = [str(a) for a in ("generate", *options)]
        result = CliRunner().invoke(app, args, input=content)
        assert result.exit_code == 2 and message in " ".join(result.stderr.split()), result.stderr


def test_a_prompt_file(tmp_path, pair, monkeypatch):
    monkeypatch.setattr("specdec.models.load.loading.load_embedded_pair", lambda *_, **__: pair)
    file = tmp_path / "p.txt"
    file.write_text("def f():\n")
    assert run("generate", "--prompt-file", file, *OPTIONS).stdout == run("generate", "def f():\n", *OPTIONS).stdout
    file.write_text("x " * 2100)
    assert "--prompt-file: got a prompt of 2101 tokens" in refused("generate", "--prompt-file", file)
    monkeypatch.setattr("specdec.cli.models.load", lambda *_: pytest.fail("loaded"))
    missing = refused("generate", "--prompt-file", tmp_path / "no")
    assert "Invalid value for --prompt-file: got '" in missing and "(No such file or directory), allowed" in missing


def test_chat_messages(tmp_path, pair, monkeypatch):
    """What the template makes of them is continued, and the answer alone shown; a line with a prompt stays a text.
    Without a template messages are refused before models are loaded."""
    said = [{"role": "user", "content": "x = "}]
    file = write_prompts(tmp_path / "p.jsonl", ["x", {"messages": said, "id": "chat"}])
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>"
    with monkeypatch.context() as context:
        context.setattr(pair[2], "chat_template", template)
        context.setattr("specdec.models.load.loading.load_tokenizer", lambda *_: pair[2])
        context.setattr("specdec.models.load.loading.load_embedded_pair", lambda *_, **__: pair)
        _, row = rows("--batch-file", file, *OPTIONS)
        assert (row["id"], row["prompt"]) == ("chat", 1)
        assert row["token_ids"] == rows("--no-chat", "<user>x = <a>", *OPTIONS, "--seed", 6)[0]["token_ids"]
        shown = run("generate", "--batch-file", file, *OPTIONS).stdout
        assert f"--- 2 of 2 ---\n{row['text']}\n" in shown and shown.startswith("--- 1 of 2 ---\nx")
    monkeypatch.setattr("specdec.cli.models.load", lambda *_: pytest.fail("loaded"))
    for output in ((), ("--output", tmp_path / "out.jsonl")):
        told = refused("generate", "--batch-file", file, *output)
        assert f"line 2 of '{file}': messages: got messages for a tokenizer without a chat template (" in told


@pytest.mark.parametrize(
    "line, message",
    [
        ({"temperatur": 1}, "keys: got 'temperatur', allowed: id, prompt, messages, max_new_tokens"),
        ({"top_p": 3}, "top_p: got 3, allowed: 0 to 1 (1 is off)"),
        ({"temperature": 0, "top_k": 5}, "top_k: got 5 with temperature 0, allowed: a temperature > 0"),
        ({"banned_tokens": [4096]}, "banned_tokens: got id 4096, allowed: ids from 0 to 4095"),
        ({"min_new_tokens": 11}, "min_new_tokens: got 11, allowed: an integer from 0 to max_new_tokens = 10"),
        ({"seed": 2**63}, "seed: got 9223372036854775808, allowed: a signed 64-bit integer"),
    ],
)
def test_a_bad_line_is_named_before_models_are_loaded(tmp_path, monkeypatch, line, message):
    monkeypatch.setattr("specdec.cli.models.load", lambda *_: pytest.fail("loaded"))
    file = write_prompts(tmp_path / "p.jsonl", ["fine", {"prompt": "x", **line}])
    told = refused("generate", "--batch-file", file, *OPTIONS)
    assert told.startswith(f"Invalid value for --batch-file: line 2 of '{file}': {message}")


def test_options_are_named_as_options(tmp_path):
    file = write_prompts(tmp_path / "p.jsonl", ["x"])
    assert "--seed: got 9223372036854775808, allowed" in refused("generate", "--batch-file", file, "--seed", 2**63)
    assert "--ban: got id 4096, allowed: ids from" in refused("generate", "--batch-file", file, "--ban", 4096)


@pytest.mark.parametrize("command", ("compare", "verify"))
@pytest.mark.parametrize("key", ("temperature", "max_new_tokens", "seed", "stop"))
def test_commands_that_decode_all_prompts_alike_refuse_settings(tmp_path, monkeypatch, command, key):
    monkeypatch.setattr("specdec.cli.models.load", lambda *_: pytest.fail("loaded"))
    file = write_prompts(tmp_path / "p.jsonl", [{"id": "a", "prompt": "x"}, {"prompt": "y", key: 1}])
    told = refused(command, "--batch-file", file)
    assert told == (
        f"Invalid value for --batch-file: line 2 of '{file}': keys: got '{key}', "
        "allowed: id, prompt, messages, category; or question_id, category and turns"
    )


def test_compare_reads_the_same_files(tmp_path, folders, monkeypatch):
    monkeypatch.setattr("specdec.evaluation.compare.CANDIDATES", (2,))
    file = write_prompts(tmp_path / "p.jsonl", ["x = ", {"id": "b", "prompt": "y"}])
    quick = ("--max-new-tokens", 4, "--repeats", 1, "-k", 2, "--json", *folders)
    whole = json.loads(run("compare", "--batch-file", file, *quick).stdout)
    assert whole["greedy_equal"] is True
