"""The output of a job: resumed wherever it was cut, and refused where it is not what the job wrote."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from specdec.checks import differences
from specdec.cli import models
from specdec.jobs.input import InputMark, JobFile
from specdec.jobs.lines import LineReader, LineSettings
from specdec.jobs.manifest import fingerprint, make_settings, write_settings
from specdec.jobs.output import Results
from specdec.jobs.run import RequestMaker, decode_lines, write_results
from specdec.jobs.signals import Signals
from specdec.line_file import OutputError, WriteError
from specdec.sampling.grammar import GrammarCompiler
from support.jobs import PROMPTS, FakeScheduler, finished, job, job_refused, use_fake, write_prompts


@pytest.fixture
def fake(monkeypatch, pair) -> type[FakeScheduler]:
    return use_fake(monkeypatch, pair)


@pytest.fixture(scope="module")
def first_run(pair, tmp_path_factory) -> Path:
    """The folder of a job that has ended. Not to be changed."""
    folder = tmp_path_factory.mktemp("job")
    with pytest.MonkeyPatch.context() as context:
        use_fake(context, pair)
        prompts = write_prompts(folder / "prompts.jsonl", PROMPTS)
        finished(prompts, folder / "out.jsonl", "--temperature", 0.9)
    return folder


@pytest.fixture
def done(fake, first_run, tmp_path) -> tuple[Path, Path, bytes]:
    """A job that has ended: input, output, and what is in it."""
    shutil.copytree(first_run, tmp_path, dirs_exist_ok=True)
    output = tmp_path / "out.jsonl"
    return tmp_path / "prompts.jsonl", output, output.read_bytes()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.floats(0, 1), order=st.integers(1, 5))
@example(cut=0.0, order=1)
@example(cut=1.0, order=1)
def test_wherever_it_was_cut_it_ends_the_same(fake, done, pair, cut, order):
    """By the parts of the command, without the command, which takes its time."""
    prompts, output, whole = done
    kept = whole[: round(cut * len(whole))]
    output.write_bytes(kept)
    fake.order = order
    results = Results(output)
    before = json.loads(output.with_name("out.jsonl.settings.json").read_text())
    file = JobFile(LineReader(prompts, LineSettings(temperature=0.9), 4096))
    file.check(InputMark(**before["input"]))
    results.begin(before)
    with Signals() as signals:
        scheduler, make = FakeScheduler(None, rows=3), RequestMaker(pair[2], [], GrammarCompiler)
        left = (line for line in file.lines() if line.id not in results.done)
        write_results(decode_lines(scheduler, left, pair[2], make), results, signals, lambda row: None)
    results.close()
    file.close()
    assert sorted(output.read_bytes().splitlines()) == sorted(whole.splitlines())
    assert output.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])


def test_just_before_and_after_the_end_of_a_line(fake, done):
    prompts, output, whole = done
    for cut in (whole.index(b"\n"), whole.index(b"\n") + 1):
        output.write_bytes(whole[:cut])
        requests = len(PROMPTS) - whole[:cut].count(b"\n")
        assert finished(prompts, output, "--temperature", 0.9) == sorted(whole.splitlines(keepends=True))
        assert len(fake.made[-1].requests) == requests  # what is there is not made again


@pytest.mark.parametrize("line, part", [(1, 0), (1, 9), (5, 60), (12, 1)])
def test_killed_while_writing(fake, done, tmp_path, line, part):
    """A process of its own, which is gone when it has written a part of a line: all lines before are there."""
    prompts, _, whole = done
    output, writes = tmp_path / "killed.jsonl", []
    child = os.fork()
    if child == 0:
        pwrite = os.pwrite

        def killed(file: int, data: bytes, at: int) -> int:
            writes.append(at)
            if len(writes) < line:
                return pwrite(file, data, at)
            pwrite(file, data[:part], at)
            os.kill(os.getpid(), signal.SIGKILL)

        os.pwrite = killed
        job(prompts, output, "--temperature", 0.9)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = output.read_bytes()
    assert left.count(b"\n") == line - 1 and len(left) - left.rfind(b"\n") - 1 == part
    assert finished(prompts, output, "--temperature", 0.9) == sorted(whole.splitlines(keepends=True))
    assert output.read_bytes().startswith(left[: left.rfind(b"\n") + 1])


def test_ids_are_told_apart_by_type(fake, tmp_path):
    prompts = write_prompts(tmp_path / "p.jsonl", [{"id": "1", "prompt": "a"}, {"id": 1, "prompt": "b"}])
    output = tmp_path / "out.jsonl"
    whole = finished(prompts, output)
    output.write_bytes(whole[0])
    assert finished(prompts, output) == whole and len(whole) == 2


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda lines: [*lines[:2], b"garbage\n", *lines[2:]],
            "line 3 of 'O': got b'garbage\\n', allowed: a result: an",
        ),
        (lambda lines: [b"\n", *lines], "line 1 of 'O': got b'\\n', allowed: a result"),
        (lambda lines: [lines[0][:40] + b"\n", *lines[1:]], "line 1 of 'O': got b'{\"id\""),
        (lambda lines: [*lines, b"\0" * 30 + b"\n"], "line 13 of 'O': got b'\\x00"),
        (lambda lines: [*lines[:4], lines[1]], "line 5 of 'O': got id "),
        (lambda lines: [lines[0].replace(b'"text"', b'"tex"')], "line 1 of 'O': got b'{\"id\""),
        (lambda lines: [lines[0].replace(b'"stats": {', b'"stats": {"x": ')], "line 1 of 'O': got b'{\"id\""),
        (lambda lines: [lines[0].replace(b'"steps": 6', b'"steps": "6"')], "line 1 of 'O': got a wrong stats, allowed"),
        (lambda lines: [lines[0].replace(b'"status": "OK"', b'"status": 0')], "line 1 of 'O': got a wrong status"),
        (lambda lines: [lines[0].replace(b'{"id": "p', b'{"id": "q')], "line 1 of 'O': got a result for id 'q"),
    ],
)
def test_what_the_job_did_not_write(done, monkeypatch, change, message):
    monkeypatch.setattr(models, "load", lambda *_: pytest.fail("loaded"))
    prompts, output, whole = done
    changed = b"".join(change(whole.splitlines(keepends=True)))
    output.write_bytes(changed)
    told = job_refused(prompts, output, "--temperature", 0.9)
    assert told.startswith("Invalid value for --output: ") and message in told.replace(str(output), "O")
    assert output.read_bytes() == changed


@pytest.mark.parametrize(
    "options, difference",
    [
        ((), "temperature: 0.9 then, 0.0 now"),
        (("--temperature", 0.9, "--rule", "block"), 'rule: "token" then, "block" now'),
        (("--temperature", 0.9, "-k", 3), "num_drafts: 4 then, 3 now"),
        (("--temperature", 0.9, "-k", "auto"), 'num_drafts: 4 then, "auto" now'),
        (("--temperature", 0.9, "--seed", 1), "seed: 0 then, 1 now"),
        (("--temperature", 0.9, "--max-new-tokens", 5), "max_new_tokens: 128 then, 5 now"),
        (("--temperature", 0.9, "--stop", "x"), 'stop: [] then, ["x"] now'),
        (("--temperature", 0.9, "--logit-bias", "5=1"), 'logit_bias: null then, {"5": 1.0} now'),
        (("--temperature", 0.9, "--drafter", "lookup"), 'drafter: "model" then, "lookup" now; draft: "'),
        (("--temperature", 0.9, "--dtype", "bfloat16"), 'dtype: null then, "bfloat16" now'),
        (("--temperature", 0.9, "--max-length", 99), "max_length: null then, 99 now"),
    ],
)
def test_other_settings(done, options, difference):
    prompts, output, whole = done
    told = job_refused(prompts, output, *options)
    assert f"whose results were made with other settings ({difference}" in told
    assert "allowed: the same settings, or another file" in told and output.read_bytes() == whole


def test_another_version_and_other_rounding(done, monkeypatch):
    prompts, output, whole = done
    output.write_bytes(whole[:-5])
    result = job(prompts, output, "--temperature", 0.9, "--rows", 3)
    assert result.exit_code == 0 and "Warning: rows: null then, 3 now: near-ties may go" in result.stderr
    monkeypatch.setattr("specdec_kernels.__version__", "9.9")
    assert 'specdec: "0.1.0" then, "9.9" now' in job_refused(prompts, output, "--temperature", 0.9)


def test_an_output_without_results_binds_to_nothing(done):
    prompts, output, _ = done
    output.write_bytes(b'{"id": "p0"' + b" " * 100_000)
    assert len(finished(prompts, output, "--temperature", 0.5)) == len(PROMPTS)
    assert output.stat().st_size < 100_000


def test_other_inputs(done):
    prompts, output, whole = done
    write_prompts(prompts, [*PROMPTS[:-1], {"id": "p11", "prompt": "other"}])
    assert "whose first 12 prompts are not those that the job began with" in job_refused(
        prompts, output, "--temperature", 0.9
    )
    write_prompts(prompts, [*PROMPTS, "more"])
    lines = finished(prompts, output, "--temperature", 0.9)
    assert output.read_bytes().startswith(whole) and len(lines) == 13


def test_settings_that_one_of_two_lacks_differ():
    assert differences({"a": 1, "b": 2}, {"a": 1, "c": 3}) == ["b: 2 then, null now", "c: null then, 3 now"]


def test_settings_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl"
    write_settings(output, {"a": 1})
    monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError("no room")))
    with pytest.raises(OSError, match="no room"):
        write_settings(output, {"a": 2})
    (only,) = tmp_path.iterdir()
    assert json.loads(only.read_text()) == {"a": 1}


def test_an_adapter_is_a_setting(tmp_path):
    """Another adapter on the same target is another job."""
    (tmp_path / "target").mkdir()
    adapters = [tmp_path / name for name in ("first", "second")]
    for rank, folder in enumerate(adapters):
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    with_each = [
        models.ModelOptions(target=str(tmp_path / "target"), adapter=adapter).paths("none")
        for adapter in (*map(str, adapters), None)
    ]
    prints = [make_settings({}, LineSettings(), paths, {}, InputMark(0, ""))["settings"] for paths in with_each]
    assert len(differences(prints[0], prints[1])) == 1 and len(differences(prints[0], prints[2])) == 1


def test_all_lines_are_on_the_disk_when_a_job_ends(fake, tmp_path, monkeypatch):
    calls = []
    for name in ("append", "sync"):
        real = getattr(Results, name)
        monkeypatch.setattr(Results, name, lambda *a, name=name, real=real: calls.append(name) or real(*a))
    finished(write_prompts(tmp_path / "prompts.jsonl", PROMPTS), tmp_path / "out.jsonl", "--temperature", 0.9)
    assert calls.count("append") == len(PROMPTS) and calls[-1] == "sync"


def test_every_result_is_of_a_prompt(done):
    _, output, _ = done
    results = Results(output)
    ids = set(results.done)
    results.check_ids(ids | {"more"})
    last = json.loads(output.read_text().splitlines()[-1])["id"]
    with pytest.raises(OutputError, match=f"line 12 of .*: got a result for id {last!r}, allowed: ids of the input"):
        results.check_ids(ids - {last})
    results.close()


def test_settings_that_are_missing_or_broken(done):
    prompts, output, whole = done
    kept = output.with_name("out.jsonl.settings.json")
    good = kept.read_text()
    for broken in (
        "",
        "[]",
        "{}",
        good.replace('"input"', '"inputs"'),
        good.replace('"prompts": 12', '"prompts": "12"'),
    ):
        kept.write_text(broken)
        assert "out.jsonl.settings.json', which holds no settings of a job" in job_refused(prompts, output)
    kept.unlink()
    for content in (whole, b"something else"):
        output.write_bytes(content)
        told = job_refused(prompts, output, "--temperature", 0.9)
        assert "which has no 'out.jsonl.settings.json' beside it, allowed: a new file, or results of" in told
        assert output.read_bytes() == content


def test_one_job_a_file(done):
    prompts, output, _ = done
    running = Results(output)
    assert "out.jsonl', which another process is writing, allowed: one job a file" in job_refused(prompts, output)
    running.close()
    assert job(prompts, output, "--temperature", 0.9).exit_code == 0


def test_files_that_are_none(done, tmp_path):
    prompts, _, _ = done
    for output, message in (
        (tmp_path, "', a folder, allowed: a file in a folder that can be written to"),
        (tmp_path / "no" / "out.jsonl", "', in no folder, allowed: a file in a folder"),
        ("/dev/full", "got '/dev/full', which is no regular file, allowed: a file"),
        ("/proc/out.jsonl", "got '/proc/out.jsonl' ("),
    ):
        assert message in job_refused(prompts, output)


@pytest.mark.parametrize("name", ("out.jsonl", "out.jsonl.settings.json", ".out.jsonl.settings.json.part"))
@pytest.mark.parametrize("dangling", (False, True))
def test_symbolic_links_are_not_followed(done, tmp_path, name, dangling):
    """Neither for a job that goes on nor for a new one: what they point to is not read, made or changed."""
    prompts, output, whole = done
    path, other = output.with_name(name), tmp_path / "other"
    if not dangling:
        other.write_bytes(whole if name == "out.jsonl" else b"precious")
        if path.exists():
            shutil.copy(path, other)
    content = None if dangling else other.read_bytes()
    path.unlink(missing_ok=True)
    path.symlink_to(other)
    told = job_refused(prompts, output, "--temperature", 0.9, "--rows", 3)  # with other settings to be written
    assert f"--output: got '{path}' (a symbolic link, which is not followed), allowed: " in told
    assert path.is_symlink() and (not other.exists() if dangling else other.read_bytes() == content)


def test_what_a_killed_process_left_is_replaced(done, tmp_path):
    """Also where the same file has another name."""
    prompts, output, _ = done
    part = output.with_name(".out.jsonl.settings.json.part")
    part.write_text("half")
    os.link(part, tmp_path / "other")
    assert job(prompts, output, "--temperature", 0.9, "--rows", 3).exit_code == 0
    assert not part.exists() and (tmp_path / "other").read_text() == "half"
    assert json.loads(output.with_name("out.jsonl.settings.json").read_text())["rounding"]["rows"] == 3


ROW = {
    **{
        "id": 1,
        "prompt": 0,
        "text": "x",
        "token_ids": [5],
        "produced_by": ["bonus"],
        "finish_reason": "eos",
        "status": "OK",
    },
    "stats": {
        **{"steps": 1, "cut_steps": 0, "emitted": 1},
        **{"drafted_by_position": [], "tested_by_position": [], "accepted_by_position": []},
    },
}
SETTINGS = {"settings": {}, "rounding": {}, "models": {}, "input": {"prompts": 1, "digest": ""}, "costs": None}


@contextmanager
def files_up_to(size: int):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_file_that_may_not_grow(tmp_path):
    """A limit of the system: the first write is short, the next one fails."""
    results = Results(tmp_path / "out.jsonl")
    results.begin(SETTINGS)
    line = len(json.dumps(ROW)) + 1
    with files_up_to(2 * line + 5):
        results.append(ROW)
        results.append({**ROW, "id": 2})
        with pytest.raises(WriteError, match="out.jsonl': File too large"):
            results.append({**ROW, "id": 3})
    assert os.path.getsize(tmp_path / "out.jsonl") == 2 * line
    results.append({**ROW, "id": 3})
    results.close()
    results = Results(tmp_path / "out.jsonl")
    assert {*results.done} == {1, 2, 3} and results.totals.emitted == 3
    results.close()


def test_a_line_is_in_the_file_when_append_returns(tmp_path):
    """Where a process that is killed right after it would leave it."""
    results = Results(tmp_path / "out.jsonl")
    results.begin(SETTINGS)
    for i in range(3):
        results.append({**ROW, "id": i})
        assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == i + 1
    results.close()


def test_settings_are_there_before_the_first_result(done, monkeypatch, tmp_path):
    """Killed anywhere in between, the output is empty or has its settings."""
    prompts, *_ = done
    output, pwrite = tmp_path / "new.jsonl", os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda *a: pwrite(*a) if output.with_name("new.jsonl.settings.json").exists() else 1 / 0
    )
    assert len(finished(prompts, output)) == len(PROMPTS)


# ---- what a model is


def test_fingerprints(folders, tmp_path, monkeypatch):
    target, draft = folders[1], folders[3]
    first = fingerprint(str(target))
    assert first == fingerprint(str(shutil.copytree(target, tmp_path / "copy")))
    assert first != fingerprint(str(draft))  # the same shapes, other weights

    def changed(name: str, change) -> str:
        folder = tmp_path / f"{name}.{change.__name__}"
        shutil.copytree(target, folder)
        (folder / name).write_bytes(change((folder / name).read_bytes()))
        return fingerprint(str(folder))

    def first_weight(data: bytes) -> bytes:
        begin = 8 + int.from_bytes(data[:8], "little")
        return data[:begin] + b"\1\1" + data[begin + 2 :]

    def last_weight(data: bytes) -> bytes:
        return data[:-2] + b"\1\1"

    def space(data: bytes) -> bytes:
        return data + b" "

    prints = [changed("model.safetensors", first_weight), changed("model.safetensors", last_weight)]
    prints += [changed(name, space) for name in ("config.json", "generation_config.json", "tokenizer.json")]
    assert len({first, *prints}) == 6
    (tmp_path / "copy" / "chat_template.jinja").write_text("{{ messages }}")
    assert first != fingerprint(str(tmp_path / "copy"))

    class Config:
        _commit_hash = "abc"

    monkeypatch.setattr("specdec.models.load.location._answered", {constants.ENDPOINT})
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, **__: Config)
    assert fingerprint("some/model") == "some/model abc"
