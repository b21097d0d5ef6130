"""The processes over which a model is divided: who is refused, what rank 0 says, and how everybody ends."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from specdec import load_model
from specdec.models.ranks.channel import Leader, RanksParted, _packed, _received
from specdec.models.ranks.ranks import check_ranks
from support import ROOT
from support.model_types import model_of
from support.models import tiny_model
from support.ranks import FOLLOWS, environment, free_port, start


@pytest.fixture
def launched(monkeypatch):
    """As by torchrun with two processes. None are started, as all here is refused before they meet."""
    for name, value in environment(0, 2, free_port()).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def saved(tmp_path):
    def folder(model):
        model.save_pretrained(tmp_path)
        return tmp_path

    return folder


def test_without_torchrun(saved, monkeypatch):
    path = saved(tiny_model("llama"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="tp: got 2 in one process, allowed: 2 processes: torchrun --nproc-per-node 2"):
        load_model(path, tp=2)


@pytest.mark.parametrize(
    "kind, tp, refusal",
    [
        ("gpt2", 2, "tp: got 2 for model type 'gpt2', for which transformers has no plan, allowed: None"),
        ("llama", 3, "tp: got 3 in 2 processes, allowed: as many processes"),
        ("llama", 1, "tp: got 1, allowed: an integer >= 2"),
    ],
)
def test_models_and_numbers(launched, saved, kind, tp, refusal):
    with pytest.raises(ValueError, match=refusal):
        load_model(saved(tiny_model(kind)), tp=tp)


@pytest.mark.parametrize(
    "case, refusal",
    [
        ("gemma, one key head", "'gemma' with 1 key and value heads, which it does not divide, allowed: None$"),
        ("qwen3_next", "'qwen3_next', allowed: None for recurrent layers"),
        ("bloom", "'bloom', for which transformers has no plan"),
    ],
)
def test_types(launched, saved, case, refusal):
    with pytest.raises(ValueError, match=f"tp: got 2 for model type {refusal}"):
        load_model(saved(model_of(case)), tp=2)


def test_numbers_that_would_do_are_named(saved, monkeypatch):
    for name, value in environment(0, 3, free_port()).items():
        monkeypatch.setenv(name, value)
    refusal = "tp: got 3 for model type 'llama' with 4 attention heads, which it does not divide, allowed: None or 2$"
    with pytest.raises(ValueError, match=refusal):
        load_model(saved(tiny_model("llama")), tp=3)


@pytest.mark.parametrize("name, value", [("adapter", "folder"), ("bits", 8)])
def test_what_does_not_go_with_it(launched, saved, name, value):
    with pytest.raises(ValueError, match=f"{name}: got '{value}' with tp=2, allowed: a folder or hub name alone"):
        load_model(saved(tiny_model("llama")), tp=2, **{name: value})


def test_places(launched, monkeypatch):
    with pytest.raises(ValueError, match="device: got 'cuda:1' with tp=2, allowed: 'cpu' or 'cuda'"):
        check_ranks(2, "cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="tp: got 2 with 1 GPUs"):
        check_ranks(2, "cuda")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="tp: got 2 over several machines, allowed: processes on one machine"):
        check_ranks(2, "cpu")


def test_without_accelerate(launched, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else found(name))
    with pytest.raises(
        ValueError, match=r'tp: got 2 without accelerate, allowed: None, or: pip install "specdec-kernels\[tp\]'
    ):
        check_ranks(2, "cpu")


@pytest.fixture
def ends():
    """Rank 0's end of a channel, and what the other rank reads."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Leader({1: ours}, torch.device("cpu")), theirs


def said(leader, theirs):
    with leader.all_do("nothing"):
        return _received(theirs)


def test_followers_forget_what_rank_0_has_dropped(ends):
    class Thing:
        pass

    leader, theirs = ends
    thing, other = Thing(), Thing()
    numbers = leader.share(thing), leader.share(other)
    assert said(leader, theirs) == {"do": "nothing", "dropped": [], "shapes": []}
    del thing
    gc.collect()
    assert said(leader, theirs)["dropped"] == [numbers[0]]
    assert said(leader, theirs)["dropped"] == []


@pytest.mark.parametrize("word, told", [(b"", "rank 1 ended"), (_packed("OSError: x"), "rank 1 failed: OSError: x")])
def test_a_failure_says_whose_it_is(ends, word, told):
    leader, theirs = ends
    with pytest.raises(RanksParted, match=told):
        with leader.all_do("something"):
            theirs.sendall(word)
            theirs.close()
            raise RuntimeError("Connection closed by peer")
    with pytest.raises(RanksParted, match=told):
        with leader.all_do("more"):
            raise AssertionError("this is never entered")


def test_rank_0_alone_fails(ends):
    leader, theirs = ends
    with pytest.raises(RanksParted, match="rank 0 failed: MemoryError: full") as raised:
        with leader.all_do("something"):
            raise MemoryError("full")
    assert isinstance(raised.value.__cause__, MemoryError)
    _received(theirs)
    with pytest.raises(EOFError):
        _received(theirs)


LEADS = """
import sys
from specdec.models.load import loading
from specdec.models import supported
print(*sys.modules)
from specdec.models.load.load_sharded import join_ranks
import time
leader = join_ranks(2, "cpu")
print("met", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def processes():
    """Rank 0, which waits, and the one that follows it."""
    port = free_port()
    first, second = start(LEADS, 0, 2, port), start(FOLLOWS.format(size=2), 1, 2, port)
    try:
        loaded = first.stdout.readline().split()
        assert first.stdout.readline() == "met\n"
        # Nothing of it is imported before it is asked for.
        rooms = ("ranks.channel", "ranks.follower", "ranks.ranks", "ranks.sharded", "load.load_sharded")
        ours = {f"specdec.models.{name}" for name in rooms}
        assert "specdec.models.load.loading" in loaded and ours.isdisjoint(loaded)
        yield first, second
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


def test_a_follower_ends_when_rank_0_is_killed():
    """It ignores the signals that torchrun and terminals send to all processes, as rank 0 may take its time."""
    with processes() as (first, second):
        time.sleep(0.5)  # the follower begins to follow
        second.send_signal(signal.SIGINT)
        second.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert second.poll() is None
        first.kill()
        assert second.wait(60) == 1  # where rank 0 is not known to be gone it waits for ever
        assert second.stderr.read().endswith("rank 1: rank 0 is gone\n")


@pytest.mark.nightly
def test_the_command():
    """Of the two processes that torchrun starts, one prints the text."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    asked = ["generate", "import os", "--tp", "2", "--device", "cpu", "--json", "--max-new-tokens", "8"]
    run = subprocess.run(
        [*torchrun, "--master-port", str(free_port()), "-m", "specdec", *asked],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 1 and json.loads(run.stdout)["stats"]["emitted"] > 0
