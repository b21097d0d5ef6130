"""Grammars end the process in which they are tried, and no other; what they cost, and who waits for whom."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from multiprocessing import spawn
from pathlib import Path

import numpy as np
import pytest
import torch
from specdec.sampling.grammar import GrammarCompiler, check_source
from specdec.sampling.grammar_masks import GrammarMasks
from specdec.sampling.grammar_source import GrammarSource
from support.hostile_grammars import HOSTILE, chain_of_references, chain_of_rules, patterns, random_source

regex = GrammarSource.regex
SECONDS = 60.0  # that anything may take


@pytest.fixture(scope="module")
def compiler(pair) -> GrammarCompiler:
    tokenizer = pair[2]
    made = GrammarCompiler(tokenizer, len(tokenizer), [0])
    made.compile(regex("warm"))
    return made


def child_of(compiler: GrammarCompiler) -> int:
    process = compiler._trials._process
    assert process is not None
    return process._child.pid


@pytest.mark.parametrize("name", HOSTILE)
def test_what_ends_or_fills_a_process_is_refused_and_costs_this_one_nothing(compiler, name):
    make, words = HOSTILE[name]
    source, before, resident = make(), time.process_time(), _resident_bytes()
    for _ in range(2):  # a second time it is known
        with pytest.raises(ValueError, match=f"^field: llguidance cannot hold it: .*({words})"):
            compiler.compile(source, "field")
    assert time.process_time() - before < 1 and _resident_bytes() - resident < 4 << 20
    assert compiler.compile(regex("warm")).source == regex("warm")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_check_without_a_vocabulary_survives_them_too_and_leaves_limits_to_the_compiler(name):
    make, words = HOSTILE[name]
    try:
        check_source(make(), "field")
    except ValueError as error:
        assert "deep" not in str(error) and "takes more" not in str(error)


def test_quick_grammars_do_not_wait_for_slow_ones(compiler):
    slow = [compiler.trial(patterns(24, f"q{i}")) for i in range(4)]
    time.sleep(0.5)
    for i in range(3):
        compiler.compile(regex(f"quick{i}"))
    assert sum(not each.done() for each in slow) >= 2
    for each in slow:
        each.cancel()


def test_what_nobody_waits_for_any_more_is_given_up(compiler):
    mine, other, source = *(compiler.trial(patterns(24, "c")) for _ in range(2)), patterns(24, "c")
    mine.cancel()
    assert not other.cancelled() and compiler.trial(source).cancel() and other.cancel()
    _until(lambda: not _children_of(child_of(compiler)))


def test_equal_ones_are_tried_once(compiler):
    first, second = (compiler.trial(patterns(24, "e")) for _ in range(2))
    assert len(compiler._trials._jobs) == 1
    assert first.result(SECONDS) is second.result(SECONDS) is compiler.trial(patterns(24, "e")).result(0)


def test_a_process_that_was_killed_is_started_again_for_those_who_wait(compiler):
    waiting = [compiler.trial(regex(f"killed{i}")) for i in range(3)]
    os.kill(child_of(compiler), signal.SIGKILL)
    assert all(each.result(SECONDS).words == "" for each in waiting)
    open_files = len(os.listdir("/proc/self/fd"))
    for i in range(3):
        os.kill(child_of(compiler), signal.SIGKILL)
        assert compiler.compile(regex(f"again{i}"))
    _until(lambda: len(os.listdir("/proc/self/fd")) <= open_files)


def test_a_fork_has_a_process_of_its_own(compiler):
    mine, waiting = child_of(compiler), compiler.trial(patterns(24, "f"))
    if (pid := os.fork()) == 0:
        try:
            compiler.compile(regex("in a fork"))
            os._exit(int(child_of(compiler) == mine))
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0 and child_of(compiler) == mine
    assert "takes more" in waiting.result(SECONDS).words


def test_an_application_that_has_python_in_itself_is_not_started_again(pair, monkeypatch):
    for settings in ({"executable": None}, {"frozen": True}):
        with monkeypatch.context() as patch:
            for name, value in settings.items():
                patch.setattr(sys, name, value, raising=False)
            if "executable" in settings:
                patch.setattr(spawn, "_python_exe", None)
            made = GrammarCompiler(pair[2], len(pair[2]), [0])
            with pytest.raises(ValueError, match=r"^field: .*multiprocessing.set_executable"):
                made.compile(regex("frozen"), "field")


def test_the_current_folder_may_be_gone(pair, monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    gone.rmdir()
    assert GrammarCompiler(pair[2], len(pair[2]), [0]).compile(regex("gone")).source == regex("gone")


def test_it_ends_with_its_compiler(pair):
    tokenizer = pair[2]
    made = GrammarCompiler(tokenizer, len(tokenizer), [0])
    made.compile(regex("a"))
    pid = child_of(made)
    del made
    gc.collect()
    _until(lambda: not Path(f"/proc/{pid}").exists())


BUSY = """
import sys
from specdec.sampling.grammar_trials import GrammarTrials
from support.hostile_grammars import patterns
trials = GrammarTrials(None)
trials.submit(patterns(2).for_library()).result()
print(trials._process._child.pid, flush=True)
trials.submit(patterns(24).for_library())
sys.stdin.read()
"""


def test_it_ends_with_its_process_however_that_ends():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    busy = subprocess.Popen([sys.executable, "-c", BUSY], env=environment, **pipes)
    assert busy.stdout is not None
    pid = int(busy.stdout.readline())
    busy.kill()
    busy.communicate()
    _until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])


CHAINS = {
    "references": chain_of_references,
    "rules": lambda depth: chain_of_rules(depth, "a"),
    "terminals": lambda depth: chain_of_rules(depth, "A"),
    "groups": lambda depth: regex("(x" * depth + ")*" * depth),
    "options": lambda depth: regex("(x" * depth + "|y)" * depth),
    "intersections": lambda depth: GrammarSource.lark(
        "start: T\nT: " + " & ".join(f"/x*y{{0,{i}}}/" for i in range(depth))
    ),
}


def test_depth_that_is_taken_is_taken_while_decoding_too(compiler):
    """The deepest of each kind that compiles, decoded on this process's threads and those of the library."""
    deepest = {}
    for name, make in CHAINS.items():
        taken, refused = 1, 4000
        while refused - taken > 20:
            depth = (taken + refused) // 2
            try:
                compiler.compile(make(depth))
                taken = depth
            except ValueError:
                refused = depth
        _decode(compiler.compile(make(taken)), 0, 300)
        deepest[name] = taken
    assert min(deepest.values()) > 60, deepest


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.nightly)])
def test_random_grammars_are_refused_or_decode(compiler, count):
    seen: Counter[str] = Counter()
    for seed in range(count):
        try:
            grammar = compiler.compile(random_source(seed))
        except ValueError as error:
            seen["refused" if "cannot hold" in str(error) else "text"] += 1
            continue
        seen["compiled"] += 1
        _decode(grammar, seed, 40)
    assert seen["compiled"] > count // 5 and seen["refused"] > count // 20, seen


def _decode(grammar, seed: int, tokens: int) -> None:
    """Random tokens, and no end where there is another one."""
    masks, chance = GrammarMasks(grammar.vocab_size, torch.device("cpu")), np.random.default_rng(seed)
    masks.begin(0, grammar)
    for _ in range(tokens):
        mask = masks.after(masks.send(torch.zeros(1, 0, dtype=torch.int64)))[0, 0].numpy()
        if masks.failures:
            return
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: grammar.vocab_size])
        if not len(allowed := allowed[allowed != 0]):
            return
        masks.follow(0, [int(chance.choice(allowed))])
        masks.forced(0)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _until(true) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
