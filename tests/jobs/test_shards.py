"""Jobs in several parts: each part has its prompts, and together they are the job in one."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import time

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from specdec.cli import models
from specdec.jobs.shard import WHOLE, Shard
from support import ROOT, killed_jobs
from support.commands import invoke, refused
from support.jobs import PROMPTS, finished, job, job_refused, use_fake, write_prompts

COUNT = 3
EXAMPLES = ROOT / "examples"


@pytest.fixture
def fake(monkeypatch, pair):
    return use_fake(monkeypatch, pair)


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path / "prompts.jsonl", PROMPTS)


@pytest.fixture(scope="module")
def three(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    with pytest.MonkeyPatch.context() as context:
        use_fake(context, pair)
        prompts = write_prompts(folder / "prompts.jsonl", PROMPTS)
        (folder / "parts").mkdir()
        for i in range(COUNT):
            finished(prompts, folder / "parts" / f"{i}.jsonl", "--shard", f"{i}/{COUNT}", "--temperature", 1)
        finished(prompts, folder / "whole.jsonl", "--temperature", 1)
    return folder


@pytest.fixture
def parts(fake, three, tmp_path):
    """The outputs of all shards; beside the folder their input."""
    shutil.copytree(three, tmp_path, dirs_exist_ok=True)
    return tmp_path / "parts"


def merged(folder, output, exit_code: int = 0) -> bytes:
    result = invoke("merge", folder, output)
    assert result.exit_code == exit_code, result.output
    assert f"results in {str(output)!r}" in " ".join(result.stderr.split())
    return output.read_bytes()


@given(st.integers(1, 9), st.integers(0, 40))
def test_every_prompt_is_in_one_shard(count, prompts):
    shards = [Shard(i, count) for i in range(count)]
    for prompt in range(prompts):
        assert sum(shard.has(prompt) for shard in shards) == 1
    assert [shard.size(prompts) for shard in shards] == [sum(map(shard.has, range(prompts))) for shard in shards]
    assert all(Shard.parse(str(shard)) == shard for shard in shards)
    assert WHOLE.size(prompts) == prompts


@pytest.mark.parametrize("text", ["", "3", "3/3", "-1/3", "1/0", "0/0", "1/3/3", "1 /3", "a/b", "1.0/3", "²/3"])
def test_what_is_no_shard(fake, prompts, tmp_path, text):
    told = job_refused(prompts, tmp_path / "out.jsonl", "--shard", text)
    assert f"--shard: got {text!r}, allowed: i/n, a number from 0" in told
    assert "without --output" in refused("generate", "--batch-file", prompts, "--shard", "0/2")


def test_together_they_are_the_job_in_one(parts, tmp_path):
    for i in range(COUNT):
        rows = [json.loads(line) for line in (parts / f"{i}.jsonl").read_bytes().splitlines()]
        assert sorted(row["prompt"] for row in rows) == list(range(i, len(PROMPTS), COUNT))
    whole = sorted(
        (tmp_path / "whole.jsonl").read_bytes().splitlines(True), key=lambda line: json.loads(line)["prompt"]
    )
    assert merged(parts, tmp_path / "all.jsonl") == b"".join(whole)
    settings = [(tmp_path / f"{name}.jsonl.settings.json").read_bytes() for name in ("all", "whole")]
    assert settings[0] == settings[1]
    single = tmp_path / "single"
    single.mkdir()
    for end in ("", ".settings.json"):
        shutil.copy(tmp_path / f"whole.jsonl{end}", single)
    assert merged(single, tmp_path / "sorted.jsonl") == b"".join(whole)


def test_the_merged_job_goes_on_without_shards(parts, fake, tmp_path):
    before = merged(parts, tmp_path / "all.jsonl")
    grown = write_prompts(tmp_path / "prompts.jsonl", [*PROMPTS, "one more"])
    made = len(fake.made)
    finished(grown, tmp_path / "all.jsonl", "--temperature", 1)
    assert (tmp_path / "all.jsonl").read_bytes().startswith(before)
    assert [len(scheduler.requests) for scheduler in fake.made[made:]] == [1]


def test_a_shard_that_was_stopped_goes_on(parts, tmp_path):
    path = parts / "1.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    told = refused("merge", parts, tmp_path / "all.jsonl")
    assert "shard 1/3 with" in told and "of its 4 results, allowed: whole ones" in told
    assert not (tmp_path / "all.jsonl").exists() and not (tmp_path / "all.jsonl.settings.json").exists()
    other = job_refused(tmp_path / "prompts.jsonl", path, "--shard", "2/3", "--temperature", 1)
    assert 'shard: "1/3" then, "2/3" now' in other
    finished(tmp_path / "prompts.jsonl", path, "--shard", "1/3", "--temperature", 1)
    assert sorted(path.read_bytes().splitlines()) == sorted(whole.splitlines())
    merged(parts, tmp_path / "all.jsonl")


def test_more_shards_than_prompts(fake, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl", PROMPTS[:2])
    (folder := tmp_path / "parts").mkdir()
    for i in range(4):
        assert job(prompts, folder / f"{i}.jsonl", "--shard", f"{i}/4").exit_code == 0
    assert sorted(path.name for path in folder.glob("*.jsonl")) == ["0.jsonl", "1.jsonl"]
    assert merged(folder, tmp_path / "all.jsonl").count(b"\n") == 2


def test_failed_prompts_are_told(fake, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl", ["x", ""])
    (folder := tmp_path / "parts").mkdir()
    finished(prompts, folder / "0.jsonl", "--shard", "0/2")
    finished(prompts, folder / "1.jsonl", "--shard", "1/2", exit_code=3)
    assert merged(folder, tmp_path / "all.jsonl", exit_code=3).count(b"\n") == 2


def lose_a_file(parts):
    (parts / "2.jsonl").unlink()


def lose_a_shard(parts):
    lose_a_file(parts)
    (parts / "2.jsonl.settings.json").unlink()


def lose_settings(parts):
    for path in parts.glob("*.settings.json"):
        path.unlink()


def mix_another_job(parts):
    finished(parts.parent / "prompts.jsonl", parts / "more.jsonl", "--shard", "2/3", "--temperature", 0.5)


def repeat_a_shard(parts):
    for end in ("", ".settings.json"):
        shutil.copy(parts / f"1.jsonl{end}", parts / f"again.jsonl{end}")


def mix_another_count(parts):
    finished(parts.parent / "prompts.jsonl", parts / "more.jsonl", "--shard", "1/2", "--temperature", 1)


def grow_the_input(parts):
    lose_a_shard(parts)
    write_prompts(parts.parent / "prompts.jsonl", [*PROMPTS, "one more"])
    finished(parts.parent / "prompts.jsonl", parts / "2.jsonl", "--shard", "2/3", "--temperature", 1)


def add_a_line(parts):
    """Of another shard."""
    lines = (parts / "0.jsonl").read_bytes().splitlines(True)
    (parts / "1.jsonl").write_bytes((parts / "1.jsonl").read_bytes() + lines[0])


def repeat_a_line(parts):
    lines = (parts / "0.jsonl").read_bytes().splitlines(True)
    (parts / "0.jsonl").write_bytes(b"".join([*lines[1:], lines[1]]))


def rename_a_line(parts):
    """The id of another prompt."""
    rows = [json.loads(line) for line in (parts / "0.jsonl").read_bytes().splitlines()]
    rows[0]["id"] = rows[1]["id"]
    write_prompts(parts / "0.jsonl", rows)


def number_beyond(parts):
    rows = [json.loads(line) for line in (parts / "0.jsonl").read_bytes().splitlines()]
    rows[0]["prompt"] = 12
    write_prompts(parts / "0.jsonl", rows)


def spoil_a_line(parts):
    (parts / "0.jsonl").write_bytes(b"{}\n" + (parts / "0.jsonl").read_bytes())


def spoil_the_shard(parts):
    path = parts / "0.jsonl.settings.json"
    path.write_text(path.read_text().replace('"0/3"', '"3/3"'))


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lose_a_file, "shard 2/3 with 0 of its 4 results"),
        (lose_a_shard, "without shard 2/3, allowed: all shards' outputs"),
        (lose_settings, "allowed: a folder with the outputs of a job's shards"),
        (mix_another_job, "do not belong together (temperature: 1.0 then, 0.5 now"),
        (repeat_a_shard, "do not belong together (both shard 1/3)"),
        (mix_another_count, "do not belong together (shards 1/2 and 0/3)"),
        (grow_the_input, "do not belong together (another input, or one that grew in between)"),
        (add_a_line, "line 5 of"),
        (repeat_a_line, "again, allowed: each once"),
        (rename_a_line, "again, allowed: each once"),
        (number_beyond, "got prompt 12, allowed: those of shard 0/3 of 12 prompts"),
        (spoil_a_line, "line 1 of"),
        (spoil_the_shard, "shard: got '3/3'"),
    ],
)  # fmt: skip
def test_what_is_not_merged(parts, tmp_path, harm, told):
    harm(parts)
    before = {path.name: path.read_bytes() for path in parts.iterdir()}
    assert told in refused("merge", parts, tmp_path / "all.jsonl")
    assert not list(tmp_path.glob("*all.jsonl*"))
    assert {path.name: path.read_bytes() for path in parts.iterdir()} == before


def test_nothing_is_written_over(parts, tmp_path):
    for name in ("all.jsonl", "all.jsonl.settings.json"):
        (tmp_path / name).write_text("mine")
        assert "which exists, allowed: a new file" in refused("merge", parts, tmp_path / "all.jsonl")
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()
    assert "in no folder" in refused("merge", parts, tmp_path / "nowhere" / "all.jsonl")


def test_other_rounding_is_told(parts, tmp_path):
    path = parts / "1.jsonl.settings.json"
    settings = json.loads(path.read_text())
    settings["rounding"]["rows"] = 5
    path.write_text(json.dumps(settings))
    result = invoke("merge", parts, tmp_path / "all.jsonl")
    assert result.exit_code == 0 and "rows: null then, 5 now: near-ties" in " ".join(result.stderr.split())


def test_a_full_disk_leaves_nothing(parts, tmp_path):
    """It takes the first bytes alone."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[0][1]))
    try:
        result = invoke("merge", parts, tmp_path / "all.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[0])
        signal.signal(signal.SIGXFSZ, before[1])
    assert result.exit_code == 4 and "cannot write to" in result.stderr
    assert not list(tmp_path.glob("*all.jsonl*"))


# ---- on machines


def on_slurm(folder, i: int) -> list[str]:
    """The arguments that a task of the array gives specdec."""
    specdec = folder / "specdec"
    specdec.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    specdec.chmod(0o755)
    script = ["bash", EXAMPLES / "slurm_array.sh", "prompts.jsonl", "results", "TARGET"]
    task = {"SLURM_ARRAY_TASK_ID": str(i), "SLURM_ARRAY_TASK_COUNT": "4"}
    environment = {**os.environ, **task, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def on_kubernetes(folder, i: int) -> list[str]:
    job = yaml.safe_load((EXAMPLES / "kubernetes_job.yaml").read_text())
    kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
    assert job["spec"]["completions"] == 4
    (container,) = job["spec"]["template"]["spec"]["containers"]
    texts = [*container["command"][1:], *container["args"]]
    return [text.replace("$(JOB_COMPLETION_INDEX)", str(i)).replace("/data/", "") for text in texts]


@pytest.mark.parametrize("arguments", [on_slurm, on_kubernetes])
def test_examples_of_clusters(fake, prompts, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    monkeypatch.setattr("specdec.cli.models.ModelOptions.vocab_size", 4096)
    monkeypatch.setattr("specdec.jobs.manifest.fingerprint", lambda path: path)
    for i in range(4):
        told = invoke(*arguments(tmp_path, i))
        assert told.exit_code == 0, told.output
    assert merged(tmp_path / "results", tmp_path / "all.jsonl").count(b"\n") == len(PROMPTS)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["greedy", "coupled"])
def test_four_processes_of_which_one_is_killed(monkeypatch, pair, tmp_path, name):
    """The file is the one of a process alone."""
    monkeypatch.setattr(models, "load", lambda *_: models.Models(*pair, None))
    prompts = killed_jobs.write_prompts(tmp_path / "prompts.jsonl", 200)
    for folder in ("parts", "whole"):
        (tmp_path / folder).mkdir()

    def start(i):
        options = ("--shard", f"{i}/4", *killed_jobs.SETTINGS[name])
        return killed_jobs.start(prompts, tmp_path / "parts" / f"{i}.jsonl", *options)

    processes = [start(i) for i in range(4)]
    while not 0 < killed_jobs.number_of_lines(tmp_path / "parts" / "2.jsonl") < 50:
        time.sleep(0.002)
    os.kill(processes[2], signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(processes[2], 0)[1]) == -signal.SIGKILL
    assert "allowed: " in refused("merge", tmp_path / "parts", tmp_path / "all.jsonl")
    processes[2] = start(2)
    assert [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes] == [0] * 4
    killed_jobs.run_to_the_end(prompts, tmp_path / "whole" / "whole.jsonl", *killed_jobs.SETTINGS[name])
    alone = merged(tmp_path / "whole", tmp_path / "alone.jsonl")
    assert merged(tmp_path / "parts", tmp_path / "all.jsonl") == alone and alone.count(b"\n") == 200
