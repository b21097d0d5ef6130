"""``specdec generate --output``: what comes out, in which order whatever, and what is told."""

from __future__ import annotations

import errno
import json
import os
import signal
from contextlib import contextmanager

import pytest
from specdec import line_file
from specdec.cli import models
from specdec.cli.options import read_bytes
from specdec.jobs.result_line import KEYS
from support.commands import refused, rows
from support.jobs import PROMPTS, FakeScheduler, finished, job, job_refused, use_fake, write_prompts


@pytest.fixture
def fake(monkeypatch, pair) -> type[FakeScheduler]:
    return use_fake(monkeypatch, pair)


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path / "prompts.jsonl", PROMPTS)


# ---- results


def test_a_result_is_a_function_of_its_line(fake, prompts, tmp_path, monkeypatch):
    """In whatever order results end, and beside whatever others."""
    first = finished(prompts, tmp_path / "a.jsonl", "--temperature", 1)
    assert len(first) == len(PROMPTS)
    monkeypatch.setattr(fake, "order", 1)
    assert finished(prompts, tmp_path / "b.jsonl", "--temperature", 1, "--rows", 3) == first
    assert (tmp_path / "a.jsonl").read_bytes() != (tmp_path / "b.jsonl").read_bytes()
    assert fake.made[-1].rows == 3 and fake.made[-1].closed
    row = json.loads(first[0])
    assert tuple(row) == KEYS and PROMPTS[row["prompt"]]["id"] == row["id"]
    assert (row["finish_reason"], row["status"], row["produced_by"]) == ("length", "OK", ["recovered"] * 6)
    assert row["stats"]["emitted"] == 6 and row["stats"]["drafted_by_position"] == [6, 6]
    assert "seconds" not in row["stats"] and "draft_forwards" not in row["stats"]


def test_what_a_request_is_made_of(fake, tmp_path, monkeypatch):
    """Defaults from the command line; a line's own settings instead; seeds by the place in the file."""
    monkeypatch.setattr(models.Models, "tail", [4090])
    own = {"max_new_tokens": 3, "temperature": 0.5, "top_k": 0, "seed": -7, "stop": "end", "min_new_tokens": 1}
    own |= {"logit_bias": {"5": -1.5}, "banned_tokens": [8]}
    file = write_prompts(tmp_path / "p.jsonl", ["x", {"prompt": "y", **own}, {"prompt": "z", "temperature": 0}])
    options = ("--max-new-tokens", 9, "--temperature", 0.8, "--top-k", 40, "--repetition-penalty", 1.2, "--seed", 100)
    options += ("--logit-bias", "6=2", "--ban", 9, "--stop", "a", "--stop", "b", "--min-new-tokens", 2)
    finished(file, tmp_path / "out.jsonl", *options, "--rule", "block", "--cache-bytes", "2GiB", "--prefill-chunk", 64)
    assert fake.made[0].options == {"rule": "block", "cache_bytes": 2**31, "prefill_chunk": 64}
    assert fake.made[0].decoder.num_drafts == 4
    first, second, third = sorted(fake.made[0].requests, key=lambda request: request.id.prompt)
    assert [r.id.id for r in (first, second, third)] == [0, 1, 2]
    assert (first.max_new_tokens, first.min_new_tokens, first.seed) == (9, 2, 100)
    assert (first.logit_bias, first.banned_tokens, first.stop.strings) == ({6: 2.0}, [9, 4090], ("a", "b"))
    assert (second.max_new_tokens, second.min_new_tokens, second.seed) == (3, 1, -7)
    assert (second.logit_bias, second.banned_tokens, second.stop.strings) == ({5: -1.5}, [8, 4090], ("end",))
    assert (third.seed, third.stop) == (102, first.stop)
    assert (first.params.temperature, first.params.top_k, first.params.repetition_penalty) == (0.8, 40, 1.2)
    assert (second.params.temperature, second.params.top_k, second.params.repetition_penalty) == (0.5, 0, 1.2)
    assert (third.params.temperature, third.params.top_k, third.params.repetition_penalty) == (0, None, 1.2)


def test_texts_end_after_stop_strings(fake, tmp_path):
    """The token that completes one may have more."""
    lines = finished(write_prompts(tmp_path / "p.jsonl", ["x"]), tmp_path / "a.jsonl")
    text = json.loads(lines[0])["text"]
    stop = text[1:4]
    file = write_prompts(tmp_path / "p.jsonl", [{"prompt": "x", "stop": [stop, "never so"]}])
    row = json.loads(finished(file, tmp_path / "b.jsonl")[0])
    assert row["text"] == text[: text.index(stop) + 3] != text and len(row["token_ids"]) == 6


def test_text_files(fake, tmp_path):
    """As without --output: lines end at \\n, \\r\\n and \\r, blank ones do not count."""
    file = tmp_path / "p.txt"
    file.write_bytes("\ufeffa {\r\n\r\n \n\x0cb\rc ".encode())
    finished(file, tmp_path / "out.jsonl", "--seed", 5)
    told = {r.id.prompt: (r.id.id, r.seed) for r in fake.made[0].requests}
    assert told == {"a {": (0, 5), "\x0cb": (1, 6), "c ": (2, 7)}
    plain = rows("--batch-file", file, "--max-new-tokens", 1)
    assert len(plain) == len(told)


def test_a_prompt_that_fails_fails_alone(fake, tmp_path):
    file = write_prompts(tmp_path / "p.jsonl", ["x", {"prompt": "", "id": "none"}, "y"])
    output = tmp_path / "out.jsonl"
    lines = finished(file, output, exit_code=3)
    (failed,) = (row for row in map(json.loads, lines) if row["finish_reason"] == "failed")
    assert tuple(failed) == (*KEYS, "error") and failed["id"] == "none" and "no token" in failed["error"]
    result = job(file, output)
    assert result.exit_code == 3 and "nothing to do" in result.stderr


# ---- once more, and interrupted


def test_a_finished_job_does_nothing_again(fake, prompts, tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl"
    finished(prompts, output)
    before = output.read_bytes(), (tmp_path / "out.jsonl.settings.json").read_bytes()
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("loaded"))
    result = job(prompts, output)
    assert result.exit_code == 0 and result.stdout == ""
    assert "all 12 prompts have results in" in result.stderr and "nothing to do" in result.stderr
    assert before == (output.read_bytes(), (tmp_path / "out.jsonl.settings.json").read_bytes())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.settings.json", "prompts.jsonl"]


@pytest.mark.parametrize("number, exit_code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_between_two_results(fake, prompts, tmp_path, monkeypatch, number, exit_code):
    """Also one that comes while a line is being written: it is written to its end."""
    whole = finished(prompts, tmp_path / "whole.jsonl")
    pwrite, writes = os.pwrite, []

    def interrupted(file: int, data: bytes, at: int) -> int:
        writes.append(at)
        if len(writes) == 5:
            os.kill(os.getpid(), number)
            return pwrite(file, data[:7], at)
        return pwrite(file, data, at)

    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as context:
        context.setattr(os, "pwrite", interrupted)
        result = job(prompts, tmp_path / "out.jsonl")
    assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    assert result.exit_code == exit_code and result.stdout == ""
    assert f"stopped by {number.name}" in result.stderr
    assert "5 results are written; the same command goes on from there" in result.stderr
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == 5
    result = job(prompts, tmp_path / "out.jsonl")
    assert result.exit_code == 0 and "5 of 12 prompts have results: going on" in result.stderr
    assert sorted((tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)) == whole


def test_a_signal_while_decoding(fake, prompts, tmp_path, monkeypatch):
    run = FakeScheduler.run

    def interrupted(self, requests):
        for number, outcome in enumerate(run(self, requests)):
            if number == 3:
                os.kill(os.getpid(), signal.SIGINT)
                pytest.fail("went on")
            yield outcome

    monkeypatch.setattr(FakeScheduler, "run", interrupted)
    assert job(prompts, tmp_path / "out.jsonl").exit_code == 130
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == 3 and fake.made[-1].closed


def test_a_full_disk(fake, prompts, tmp_path, monkeypatch):
    whole = finished(prompts, tmp_path / "whole.jsonl")
    output, pwrite, room = tmp_path / "out.jsonl", os.pwrite, 1500

    def full(file: int, data: bytes, at: int) -> int:
        if at >= room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(file, data[: room - at], at)

    with monkeypatch.context() as context:
        context.setattr(os, "pwrite", full)
        result = job(prompts, output)
    assert result.exit_code == 4 and result.stdout == ""
    assert f"cannot write to '{output}': No space left on device" in result.stderr
    kept = output.read_bytes()
    assert len(kept) < room and kept.endswith(b"\n")
    assert f"{len(kept.splitlines())} results are written" in result.stderr
    assert finished(prompts, output) == whole and output.read_bytes().startswith(kept)

    def lost(file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(line_file, "SYNC_SECONDS", -1)
    failing = tmp_path / "failing.jsonl"
    with monkeypatch.context() as context:
        context.setattr(FakeScheduler, "close", lambda self: None)
        fsync, calls = os.fsync, []
        # The settings are synchronised first: file and folder.
        context.setattr(os, "fsync", lambda file: fsync(file) if calls.append(file) or len(calls) < 5 else lost(file))
        result = job(prompts, failing)
    assert result.exit_code == 4 and "Input/output error" in result.stderr and failing.exists()
    assert finished(prompts, failing) == whole


# ---- what is told


def test_what_is_told_in_the_end(fake, prompts, tmp_path):
    told = job(prompts, tmp_path / "a.jsonl").stderr.splitlines()
    assert told[-1].startswith("all 12 prompts have results in ") and "12 length; 72 tokens, tau 1.00" in told[-1]
    assert "acceptance rate 0.00, rows busy 75%" in told[-1]
    quiet = job(prompts, tmp_path / "b.jsonl", "--no-progress").stderr.splitlines()
    assert len(quiet) == 1 and quiet[0].startswith("all 12 prompts")


def test_progress_of_a_job(fake, prompts, tmp_path, monkeypatch):
    """Also of one that goes on: what it has is done, and not by this process."""
    calls = []

    @contextmanager
    def spy(first, asked):
        yield lambda *call: calls.append(call)

    whole = finished(prompts, tmp_path / "whole.jsonl")
    output = tmp_path / "out.jsonl"
    monkeypatch.setattr("specdec.cli.job.progress", spy)
    finished(prompts, output)
    assert [call[:2] for call in calls] == [(i, 12) for i in range(13)]
    assert "tokens/s, acceptance rate 0.00, rows busy 75%" in calls[-1][2]
    output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:5]))
    calls.clear()
    assert finished(prompts, output) == whole
    assert [call[0] for call in calls] == list(range(5, 13)) and calls[0][2].startswith("0.0 tokens/s")


def test_results_are_printed_as_well(fake, prompts, tmp_path):
    """With --json, those that this run makes."""
    output = tmp_path / "out.jsonl"
    assert job(prompts, output, "--json").stdout.encode() == output.read_bytes()
    kept, made = output.read_bytes()[:1500], output.read_bytes()
    output.write_bytes(kept)
    assert job(prompts, output, "--json").stdout.encode() == output.read_bytes()[kept.rfind(b"\n") + 1 :]
    assert sorted(output.read_bytes().splitlines()) == sorted(made.splitlines())
    assert job(prompts, output, "--json").stdout == ""


def test_a_drafter_that_fails_is_told(fake, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(FakeScheduler, "drafter_error", "ZeroDivisionError: 4")
    result = job(prompts, tmp_path / "out.jsonl")
    told = "Warning: the drafter failed, and tokens came from the target alone: ZeroDivisionError: 4\n"
    assert result.exit_code == 0 and told in result.stderr


# ---- options


@pytest.mark.parametrize(
    "args, message",
    [
        (("x", "--rows", 3), "--rows: got --rows without --output, allowed: both, or neither"),
        (("x", "--cache-bytes", "1GB"), "--cache-bytes: got --cache-bytes without --output"),
        (("x", "--no-progress"), "--no-progress: got --no-progress without --output"),
        (("x", "--output", "o.jsonl"), "--output: got --output with PROMPT, allowed: --output with --batch-file"),
    ],
)
def test_options_of_a_job_without_one(args, message):
    assert message in refused("generate", *args)


@pytest.mark.parametrize(
    "args, message",
    [
        (("--top-log-probs", 21), "--top-log-probs: got 21, allowed: None (off), or 0 to 20"),
        (("-v",), "--verbose: got --verbose with --output"),
        (("--profile", "t.json"), "--profile: got --profile with --output"),
        (("--num-return-sequences", 2), "--num-return-sequences: got 2 with --output, allowed: 1"),
        (("--rows", 0), "--rows: got 0, allowed: an integer >= 1"),
        (("--max-length", 0), "--max-length: got 0, allowed: an integer >= 1"),
        (("--cache-tokens", 5, "--cache-bytes", 5), "--cache-tokens / --cache-bytes: got both, allowed: one of the"),
        (("--cache-bytes", "2GX"), "--cache-bytes: got '2GX', allowed: a number of bytes, or with a unit: 800MB"),
        (("--logit-bias", "5000=1"), "--logit-bias: got id 5000, allowed: ids from 0 to 4095"),
        (("--ban", "-1"), "--ban: got id -1, allowed: ids from 0 to 4095"),
        (("--seed", 2**63), f"--seed: got {2**63}, allowed: a signed 64-bit integer"),
        (("--temperature", -1), "--temperature: got -1.0, allowed: 0 (greedy)"),
        (("--target", "./no", "--drafter", "none"), "--target: there is no folder './no'"),
    ],
)
def test_bad_options_of_a_job(fake, prompts, tmp_path, monkeypatch, args, message):
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("loaded"))
    assert message in job_refused(prompts, tmp_path / "out.jsonl", *args)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    "given, size", [("5", 5), ("2GiB", 2**31), ("1.5 kB", 1500), ("3MB", 3_000_000), ("1TiB", 2**40), ("7B", 7)]
)
def test_sizes(given, size):
    assert read_bytes("--cache-bytes", given) == size
