"""``specdec generate`` chooses K from saved times of steps: sampled texts are a function of the file and the seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from specdec import SpeculativeDecoder
from specdec.cli import saved
from support.commands import PROMPT, invoke, refused, rows

SAMPLED = ("--max-new-tokens", 40, "--temperature", 0.8, "--seed", 3)


def drafted(row: dict) -> list[int]:
    """K of the steps, apart from those that the text's end cut short."""
    return [k for k, count in enumerate(row["stats"]["steps_by_drafts"]) if count]


def test_the_embedded_pair_comes_with_times():
    """Each call measures other times."""
    (first,) = rows(PROMPT, *SAMPLED)
    (second,) = rows(PROMPT, *SAMPLED, "-k", "auto")
    assert first["text"] == second["text"] and first["stats"]["steps_by_drafts"] == second["stats"]["steps_by_drafts"]
    assert len(drafted(first)) > 2
    fixed = rows(PROMPT, *SAMPLED, "-k", 4)[0]
    assert set(drafted(fixed)) <= {0, 1, 2, 3, 4} and fixed["text"] != first["text"]


def test_the_users_own_times_come_first(pair):
    (first,) = rows(PROMPT, *SAMPLED)
    path = saved.own_file()
    path.parent.mkdir(parents=True)
    decoder = SpeculativeDecoder(*pair[:2])
    decoder.save_costs(path, {1: {k: 1.0 + 30 * (k > 1) for k in range(9)}})  # only one draft is cheap
    (other,) = rows(PROMPT, *SAMPLED)
    assert max(drafted(other)) == 1 and max(drafted(first)) > 1
    path.write_text("{}")
    assert "--costs: got " in refused("generate", PROMPT, *SAMPLED)
    assert invoke("generate", PROMPT, *SAMPLED, "-k", 4).exit_code == 0  # which reads no file


@pytest.mark.nightly
@pytest.mark.parametrize("rule", ["token", "block"])
def test_two_processes_write_the_same_text(tmp_path, rule):
    command = [sys.executable, "-m", "specdec", "generate", PROMPT, "--json", "--rule", rule, *map(str, SAMPLED)]
    found = []
    for threads in ("1", "2"):
        environment = {"OMP_NUM_THREADS": threads, "XDG_CACHE_HOME": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert found[0]["text"] == found[1]["text"]
    assert found[0]["stats"]["steps_by_drafts"] == found[1]["stats"]["steps_by_drafts"]
