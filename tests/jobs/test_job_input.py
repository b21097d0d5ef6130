"""The input of a job: what a line may say, how anything else is refused, and that it is a stream."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest
from specdec.cli import models
from specdec.jobs import input as job_input
from specdec.jobs.input import InputError, InputMark, JobFile, read_batch, read_prompt
from specdec.jobs.lines import LineReader, LineSettings, _each_key_once, _Twice
from support.jobs import job_refused, write_prompts


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "without a prompt, allowed: at least one line that is not empty"),
        (b"\n \n", "without a prompt, allowed: at least one line that is not empty"),
        (b'"x"\n\n{"prompt"', "line 3 of 'F': got '{\"prompt\"', allowed: a JSON string or {"),
        (b"7", "line 1 of 'F': got '7', allowed: a JSON string or {"),
        (b"9" * 5000, "line 1 of 'F': got '999"),
        (b"[" * 100_000, "line 1 of 'F': got '[[["),
        (b'"x"\n\xff', "line 2 of 'F', which is not UTF-8 (invalid start byte), allowed: UTF-8"),
        (
            b'{"text": "x"}',
            "line 1 of 'F': keys: got 'text', allowed: id, prompt, messages, max_new_tokens, temperature",
        ),
        (b'{"prompt": "x", "prompt": "y"}', "line 1 of 'F': keys: got 'prompt' twice, allowed: every key once"),
        (b'{"id": 1}', "line 1 of 'F': prompt: got none, allowed: a text"),
        (b'{"prompt": ["x"]}', "line 1 of 'F': prompt: got ['x'], allowed: a text"),
        (b'{"prompt": "\\ud800"}', "line 1 of 'F': prompt: got '\\ud800', allowed: text without lone surrogates"),
        (b'{"prompt": "x", "id": 1.0}', "line 1 of 'F': id: got 1.0, allowed: a string or an integer"),
        (b'{"prompt": "x", "id": true}', "line 1 of 'F': id: got True, allowed: a string or an integer"),
        (b'{"prompt": "x", "id": null}', "line 1 of 'F': id: got None, allowed: a string or an integer"),
        (b'"x"\n\n{"prompt": "y", "id": 0}', "line 3 of 'F': id: got 0, which line 1 has, allowed: every id once"),
        (b'{"prompt": "x", "top_p": 1.5}', "line 1 of 'F': top_p: got 1.5, allowed: 0 to 1 (1 is off)"),
        (b'{"prompt": "x", "top_p": "1"}', "line 1 of 'F': top_p: got '1', allowed: 0 to 1 (1 is off)"),
        (b'{"prompt": "x", "top_k": 2.5}', "line 1 of 'F': top_k: got 2.5, allowed: an integer >= 1, or 0 (off)"),
        (b'{"prompt": "x", "min_p": NaN}', "line 1 of 'F': min_p: got nan, allowed: 0 to 1 (0 is off)"),
        (b'{"prompt": "x", "temperature": true}', "line 1 of 'F': temperature: got True, allowed: 0 (greedy)"),
        (b'{"prompt": "x", "temperature": null}', "line 1 of 'F': temperature: got None, allowed: 0 (greedy)"),
        (b'{"prompt": "x", "temperature": 0, "top_k": 5}', "line 1 of 'F': top_k: got 5 with temperature 0, allowed:"),
        (b'{"prompt": "x", "presence_penalty": 1e9}', "line 1 of 'F': presence_penalty: got 1000000000.0, allowed: -1"),
        (b'{"prompt": "x", "max_new_tokens": -1}', "line 1 of 'F': max_new_tokens: got -1, allowed: an integer >= 0"),
        (b'{"prompt": "x", "max_new_tokens": 2.0}', "line 1 of 'F': max_new_tokens: got 2.0, allowed: an integer"),
        (b'{"prompt": "x", "min_new_tokens": 99}', "line 1 of 'F': min_new_tokens: got 99, allowed: an integer from 0"),
        (b'{"prompt": "x", "seed": 0.5}', "line 1 of 'F': seed: got 0.5, allowed: a signed 64-bit integer"),
        (b'{"prompt": "x", "seed": 9223372036854775808}', "line 1 of 'F': seed: got 9223372036854775808, allowed: a"),
        (b'{"prompt": "x", "stop": ""}', "line 1 of 'F': stop: got ('',), allowed: a string or several, none of them"),
        (b'{"prompt": "x", "stop": ["a", 5]}', "line 1 of 'F': stop: got ['a', 5], allowed: a string or several"),
        (b'{"prompt": "x", "logit_bias": [5]}', "line 1 of 'F': logit_bias: got [5], allowed: an object of ids and"),
        (b'{"prompt": "x", "logit_bias": {"a": 5}}', "line 1 of 'F': logit_bias: got id 'a', allowed: ids as strings"),
        (b'{"prompt": "x", "logit_bias": {"1": 1, "1": 2}}', "line 1 of 'F': keys: got '1' twice"),
        (b'{"prompt": "x", "logit_bias": {"01": 1}}', "line 1 of 'F': logit_bias: got id '01', allowed: ids as"),
        (b'{"prompt": "x", "logit_bias": {"4096": 1}}', "line 1 of 'F': logit_bias: got id 4096, allowed: ids from 0"),
        (b'{"prompt": "x", "logit_bias": {"7": "1"}}', "line 1 of 'F': logit_bias: got '1' for id 7, allowed: "),
        (b'{"prompt": "x", "banned_tokens": [4096]}', "line 1 of 'F': banned_tokens: got id 4096, allowed: ids from 0"),
        (b'{"prompt": "x", "banned_tokens": 7}', "line 1 of 'F': banned_tokens: got 7, allowed: a list of ids"),
        (b'{"prompt": "x", "banned_tokens": null}', "line 1 of 'F': banned_tokens: got None, allowed: a list of ids"),
    ],
)
def test_lines_that_are_refused(tmp_path, content, message):
    file = tmp_path / "F.jsonl"
    file.write_bytes(content)
    with pytest.raises(InputError) as caught:
        JobFile(LineReader(file, LineSettings(max_new_tokens=9, temperature=0.7), 4096)).check()
    assert message in str(caught.value).replace(str(file), "F")


def test_errors_come_before_models(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("loaded"))
    file = write_prompts(tmp_path / "p.jsonl", [*["x"] * 50, {"prompt": "y", "top_p": 2, "temperature": 1}])
    told = job_refused(file, tmp_path / "out.jsonl")
    assert told == f"Invalid value for --batch-file: line 51 of '{file}': top_p: got 2, allowed: 0 to 1 (1 is off)"
    assert list(tmp_path.iterdir()) == [file]
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "pipe.jsonl', allowed: a regular file" in job_refused(tmp_path / "pipe.jsonl", tmp_path / "out.jsonl")
    assert "allowed: another file" in job_refused(file, file)
    assert file.read_text().startswith('"x"\n')


def test_what_a_line_may_leave_open(tmp_path):
    """Ids that look alike are two; null switches off where the library has None for it."""
    given = [{"id": "1", "prompt": "a"}, "b", {"prompt": "c", "id": -5, "top_k": None, "stop": None}]
    given += [{"prompt": "d", "logit_bias": None, "stop": []}, {"prompt": "e", "logit_bias": {"3": -float("inf")}}]
    file = JobFile(
        LineReader(
            write_prompts(tmp_path / "p.jsonl", given),
            LineSettings(temperature=1.0, top_k=5, stop=("x",), logit_bias={1: 2.0}, seed=2**63 - 5),
            4096,
        )
    )
    assert file.check() == {"1", 1, -5, 3, 4}
    lines = list(file.lines())
    assert [line.settings.params.top_k for line in lines] == [5, 5, None, 5, 5]
    assert [line.settings.stop for line in lines] == [("x",), ("x",), (), (), ("x",)]
    assert [line.settings.logit_bias for line in lines[2:]] == [{1: 2.0}, None, {3: -float("inf")}]
    assert [line.settings.seed for line in lines] == list(range(2**63 - 5, 2**63))


def test_seeds_end_where_integers_do(tmp_path):
    file = JobFile(LineReader(write_prompts(tmp_path / "p.jsonl", ["a", "b"]), LineSettings(seed=2**63 - 1), 4096))
    with pytest.raises(InputError, match=f"line 2 of .*: seed: got {2**63}, allowed"):
        file.check()


def test_lines_may_be_added_but_not_changed(tmp_path):
    path = tmp_path / "p.jsonl"

    def mark(*lines: object, earlier: InputMark | None = None) -> InputMark:
        file = JobFile(LineReader(write_prompts(path, lines), LineSettings(), 4096))
        file.check(earlier)
        return file.mark

    first = mark("a", "b")
    assert mark("a", "b", "c", earlier=first).prompts == 3
    for other in (("a", "x", "c"), ("b", "a"), ("a",), ("a", {"prompt": "b"})):
        with pytest.raises(InputError, match="whose first 2 prompts are not those that the job began with"):
            mark(*other, earlier=first)


def test_a_file_that_changes_while_it_is_read(tmp_path):
    path = write_prompts(tmp_path / "p.jsonl", ["aaaa", "bbbb"])
    file = JobFile(LineReader(path, LineSettings(), 4096))
    file.check()
    path.write_text(path.read_text() + '"cccc"\n')
    assert len(list(file.lines())) == 2  # what is added is for the next run
    path.write_text(path.read_text().replace("bbbb", "bxbb"))
    with pytest.raises(InputError, match="which changed while the job ran"):
        list(file.lines())
    other = write_prompts(tmp_path / "other.jsonl", ["c", "d"])
    file = JobFile(LineReader(path, LineSettings(), 4096))
    file.check()
    os.replace(other, path)
    assert [line.prompt for line in file.lines()] == ["aaaa", "bxbb", "cccc"]


def test_the_file_is_a_stream(tmp_path):
    """8 MB of prompts pass through less than one."""
    path = tmp_path / "p.jsonl"
    with path.open("w") as opened:
        for i in range(200):
            opened.write(json.dumps({"id": i, "prompt": "x" * 40_000}) + "\n")
    file = JobFile(LineReader(path, LineSettings(), 4096))
    tracemalloc.start()
    try:
        assert len(file.check()) == sum(1 for _ in file.lines()) == 200
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_keys_are_looked_up_once():
    """However many there are: a megabyte of them took minutes when each was compared with all before."""
    comparisons = []

    class Key(str):
        def __eq__(self, other):
            comparisons.append(other)
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    keys = [Key(i) for i in range(3000)]
    with pytest.raises(_Twice, match="2999"):
        _each_key_once([(key, None) for key in (*keys, Key(2999))])
    assert len(comparisons) < 3 * len(keys)


def test_long_names_are_shortened(tmp_path):
    for line in ({"prompt": "x", "k" * 100_000: 1}, {"prompt": "x", "logit_bias": {"k" * 100_000: 1}}):
        with pytest.raises(InputError) as caught:
            JobFile(LineReader(write_prompts(tmp_path / "p.jsonl", [line]), LineSettings(), 4096)).check()
        assert "kkk..., allowed: " in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("end", ("", "\n", "\r\n"))
def test_lines_have_a_maximum_length(tmp_path, monkeypatch, end):
    monkeypatch.setattr(job_input, "LONGEST", 50)
    path = tmp_path / "p.jsonl"
    for extra in (0, 1):
        path.write_text('"x"\n"' + "é" * (48 + extra) + '"' + end, newline="")
        for read in (
            lambda: JobFile(LineReader(path, LineSettings(), 4096)).check(),
            lambda: read_batch(LineReader(path, LineSettings(), 4096)),
        ):
            if extra == 0:
                assert len(read()) == 2
                continue
            with pytest.raises(InputError, match="line 2 of '.*p.jsonl': got a longer line, allowed: 50 characters"):
                read()


def test_no_more_is_read_than_a_line_may_have(monkeypatch):
    """Of a device that never ends."""
    monkeypatch.setattr(job_input, "LONGEST", 100_000)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="line 1 of '/dev/zero': got a longer line"):
            read_batch(LineReader(Path("/dev/zero"), LineSettings(), 4096))
        with pytest.raises(InputError, match="got '/dev/zero', which is longer, allowed: 100000 characters"):
            read_prompt(Path("/dev/zero"))
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_a_file_that_is_one_prompt(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\r \xc3\xa9\n")
    assert read_prompt(path) == "a\r\nb\r é\n"
    for content, message in ((b"", "which is empty"), (b"a\n\xff", "which is not UTF-8 (invalid start byte)")):
        path.write_bytes(content)
        with pytest.raises(InputError) as caught:
            read_prompt(path)
        assert f"got '{path}', {message}, allowed: " in str(caught.value)
    with pytest.raises(InputError, match="got '.*' .Is a directory., allowed: a file that can be read"):
        read_prompt(tmp_path)


def test_messages_are_rendered_as_they_are_read(tmp_path, pair, monkeypatch):
    """By the template of the tokenizer, which is loaded for them alone; what is wrong with them is told by the line."""
    monkeypatch.setattr(pair[2], "chat_template", "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    loads = []

    def tokenizer():
        loads.append(1)
        return pair[2]

    said = {"messages": [{"role": "user", "content": "hi"}], "id": "b", "seed": 3}
    file = JobFile(
        LineReader(write_prompts(tmp_path / "p.jsonl", ["[x]", said]), LineSettings(), 4096, tokenizer=tokenizer)
    )
    file.check()
    plain, chat = file.lines()
    assert (chat.prompt, chat.chat, chat.id, chat.settings.seed) == ("[user]hi", True, "b", 3)
    assert (plain.prompt, plain.chat) == ("[x]", False) and len(loads) == 2
    assert chat.tokens(pair[2]) == pair[2]("[user]hi", add_special_tokens=False).input_ids
    for wrong, message in (
        ({"messages": []}, "messages: got [], allowed: a list of"),
        ({"messages": [{"role": "user"}]}, "messages: got {'role': 'user'} as message 0, allowed: a list of"),
        ({**said, "prompt": "x"}, "prompt / messages: got both, allowed: one of the two"),
    ):
        path = write_prompts(tmp_path / "p.jsonl", ["x", wrong])
        with pytest.raises(InputError) as caught:
            JobFile(LineReader(path, LineSettings(), 4096, tokenizer=tokenizer)).check()
        assert str(caught.value).startswith(f"line 2 of '{path}': {message}")


def test_standard_input_that_is_closed(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    for read in (lambda path: read_batch(LineReader(path, LineSettings(), 4096)), read_prompt):
        with pytest.raises(InputError, match="got standard input, which is closed, allowed"):
            read(Path("-"))


def test_a_tokenizer_that_cannot_be_loaded_is_no_fault_of_the_file(tmp_path):
    def tokenizer():
        raise OSError("target: cannot load a tokenizer")

    path = write_prompts(tmp_path / "p.jsonl", [{"messages": [{"role": "user", "content": "x"}]}])
    for read in (
        JobFile(LineReader(path, LineSettings(), 4096, tokenizer=tokenizer)).check,
        lambda: read_batch(LineReader(path, LineSettings(), 4096, tokenizer=tokenizer)),
    ):
        with pytest.raises(OSError, match="^target: cannot load a tokenizer$"):
            read()
