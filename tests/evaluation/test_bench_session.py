"""The rounds of ``specdec bench``: whose turn it is, when they end, and what a folder keeps of them."""

from __future__ import annotations

import errno
import json
import mmap
import os
from pathlib import Path

import pytest
import torch
from specdec.evaluation.bench.folder import ROUNDS, Folder
from specdec.evaluation.bench.grid import BenchCell, Grid, Method
from specdec.evaluation.bench.measure import BenchPrompt, Peak
from specdec.evaluation.bench.result_files import results
from specdec.evaluation.bench.session import BenchSettings, Maker, Session
from specdec.evaluation.contenders import Run, SpecdecMethod
from specdec.evaluation.work_counter import silent
from specdec.line_file import OutputError, WriteError
from support.models import prompts as random_prompts
from support.models import tunable_pair

PROMPTS = [BenchPrompt(str(i), "even" if i % 2 == 0 else "odd", [1, 2, 3 + i]) for i in range(3)]
GRID = Grid((Method("model"),), (0.0, 1.0), num_drafts=(2,))


class Clock:
    """Goes on by what the methods take."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Fake:
    """Takes a second for a text of four tokens, which are the same for all."""

    name, setting = "fake", {"num_drafts": 2}

    def __init__(self, cell: BenchCell, clock: Clock, runs: list):
        self.cell, self._clock, self._runs = cell, clock, runs

    def run(self, prompts, seed):
        self._clock.now += len(prompts)
        self._runs.append((self.cell.id, [*prompts], seed))
        return Run([[7] * 4 for _ in prompts], float(len(prompts)), 4, 0, 0, 0)


def session(grid: Grid = GRID, done=(), **settings) -> tuple[Session, list]:
    clock, runs = Clock(), []
    made = Session(
        tunable_pair(0.3)[0],
        lambda cell: Fake(cell, clock, runs),
        grid,
        PROMPTS,
        BenchSettings(4, **settings),
        done,
        clock,
    )
    return made, runs


def test_rounds_go_over_all_settings():
    """So that a run that ends early has as many of each. Every round has seeds of its own."""
    made, runs = session(repeats=2, seed=5)
    lines = list(made.rounds(silent))
    assert [(line["setting"], line["round"], line["greedy"]) for line in lines] == [
        *(("t=0 b=1", 0, True), ("t=1 b=1", 0, False), ("t=0 b=1", 1, True), ("t=1 b=1", 1, False))
    ]
    assert len(runs) == 4 * 3 * 3 and {seed for *_, seed in runs} == {*range(5, 11)}
    assert all(
        {*line["cells"]} == {cell.id for cell in GRID.all_cells() if line["setting"] in cell.id} for line in lines
    )


def test_warm_up_runs_do_not_count():
    made, runs = session(repeats=1, warm_up=2)
    told = []
    made.warm_up(lambda *call: told.append(call))
    assert len(runs) == 12 and made.seconds == 18.0 and told[-1][:2] == (12, 12)
    made, runs = session(repeats=1, warm_up=0)
    made.warm_up(silent)
    assert runs == [] and made.seconds is None


class Uneven(Fake):
    """Takes as long as the prompt's last token says, and the first run of all ``first`` seconds more."""

    first = 0.0

    def run(self, prompts, seed):
        more = 0.0 if self._runs else self.first
        done = super().run(prompts, seed)
        self._clock.now += more + sum(prompt[-1] for prompt in prompts) - len(prompts)
        return done


@pytest.mark.parametrize(("warm_up", "first"), ((1, 1.0), (2, 20.0)))
@pytest.mark.parametrize(("prompts", "batch"), ((12, 1), (3, 1), (13, 4)))
@pytest.mark.parametrize("limit", (None, 1200.0))
def test_the_estimate_is_near_what_rounds_take(monkeypatch, warm_up, first, prompts, batch, limit):
    """Also where the first prompts are quick ones: their texts are short, or they end early."""
    monkeypatch.setattr(Uneven, "first", first)
    clock, runs = Clock(), []
    questions = [BenchPrompt(str(i), "x", [1, 1 + i]) for i in range(prompts)]
    grid = Grid((Method("model"), Method("lookup")), (0.0, 1.0), (batch,), num_drafts=(2, 4))
    settings = BenchSettings(4, 4, warm_up, seconds_limit=limit)
    target = tunable_pair(0.3)[0]
    made = Session(target, lambda cell: Uneven(cell, clock, runs), grid, questions, settings, clock=clock)
    made.warm_up(silent)
    about, began = made.seconds, clock.now
    assert list(made.rounds(silent)) and 1 / 1.5 < about / (clock.now - began) < 1.5


def test_the_estimate_has_one_round_at_least():
    """The warm-up took longer than the limit."""
    made, _ = session(repeats=2, seconds_limit=1.0)
    made.warm_up(silent)
    assert made.seconds == 9.0 and len(list(made.rounds(silent))) == 1


@pytest.mark.parametrize(("limit", "rounds"), ((1, 1), (26, 2), (27, 3), (100, 4)))
def test_no_round_begins_that_would_end_too_late(limit, rounds):
    """A round takes 9 seconds; one is measured whatever the limit."""
    made, _ = session(repeats=2, seconds_limit=float(limit))
    assert len(list(made.rounds(silent))) == rounds


def test_only_what_is_missing_is_measured():
    done = [("t=0 b=1", 0), ("t=1 b=1", 0), ("t=0 b=1", 1)]
    made, runs = session(repeats=2, done=done)
    assert [(line["setting"], line["round"]) for line in made.rounds(silent)] == [("t=1 b=1", 1)]
    assert made.cells == 3 and len(runs) == 9
    made, _ = session(repeats=1, done=done)
    assert made.units == [] and list(made.rounds(silent)) == []


def real(prompts: list[BenchPrompt], grid: Grid, **settings) -> Session:
    target, draft = tunable_pair(0.3)
    maker = Maker(target, lambda name: draft, draft, 6)
    return Session(target, maker.make, grid, prompts, BenchSettings(6, **settings))


def test_a_real_round():
    grid = Grid((Method("assisted"), Method("model")), (0.0, 1.0), (1, 2), (2, "auto"))
    made = real([BenchPrompt(str(i), "x", p) for i, p in enumerate(random_prompts(3, 2, 9))], grid, repeats=1)
    calls = []
    lines = list(made.rounds(silent, lambda cell, number, batch, run: calls.append((cell.id, len(batch)))))
    assert len(calls) == len(grid.cells(grid.settings()[0])) * 3 * 2 + len(grid.cells(grid.settings()[1])) * 2 * 2
    whole = json.loads(
        json.dumps(results({n: {} for n in ("environment", "models", "settings", "prompts")}, grid, lines))
    )
    assert whole["greedy"] == {"equal": True, "differences": []}
    for cell in whole["cells"]:
        (played,) = cell["rounds"]
        assert played["tokens"] == 18 and played["peak_memory"] > 1 << 20
        drafts = cell["method"] == "model"
        assert (cell["alpha"] is not None and cell["shares"] is not None) or not drafts
        assert not drafts or sum(cell["shares"].values()) == pytest.approx(1)
        assert cell["time_to_first_token"]["median"] > 0


def test_a_wrong_greedy_text_is_found_once(monkeypatch):
    genuine = SpecdecMethod.run

    def wrong(self, prompts, seed):
        done = genuine(self, prompts, seed)
        if self.setting["num_drafts"] == 2:
            done.texts[0][3] += 1
        return done

    monkeypatch.setattr(SpecdecMethod, "run", wrong)
    made = real(PROMPTS[:1], Grid((Method("model"),), num_drafts=(2, 3)), repeats=2)
    first, second = made.rounds(silent)
    (difference,) = first["differences"]
    assert difference["methods"] == ("transformers t=0 b=1", "model token k=2 t=0 b=1")
    assert (difference["prompt_id"], difference["position"], difference["verdict"]) == ("0", 3, "bug")
    assert second["differences"] == []


def test_prompts_that_are_too_long_are_refused_or_cut():
    target, draft = tunable_pair(0.3)
    most = target.config.max_position_embeddings
    long = BenchPrompt("long", "x", [5] * (most - 8) + [1, 2, 3])
    grid = Grid((Method("model"),), num_drafts=(2,))
    made = real([PROMPTS[0], long], grid)
    with pytest.raises(
        ValueError, match=rf"input_ids: got prompt 'long' of {most - 5} tokens, and 6 new ones, allowed"
    ):
        made.fit(cut=False)
    made.fit(cut=True)
    assert made.prompts[0] == PROMPTS[0] and made.prompts[1].tokens == long.tokens[1:]


# ---- memory


def test_the_mark_is_set_back():
    """Pages of the system's own are given back at once; what an allocator does with freed tensors is its own affair."""
    peak, size = Peak(torch.device("cpu")), 1 << 28
    assert "resident during a run" in peak.what
    with mmap.mmap(-1, size) as block:
        block[:: mmap.PAGESIZE] = bytes(size // mmap.PAGESIZE)
        high = peak.read()
    assert peak.read() > high - size // 2  # the system counts in batches of pages
    peak.reset()
    assert 0 < peak.read() < high - size // 2


def test_without_a_mark_that_can_be_set_back(tmp_path):
    """As on macOS: that of the process since it began."""
    peak = Peak(torch.device("cpu"), tmp_path / "none")
    peak.reset()
    assert "since the process began" in peak.what and peak.read() > 1 << 20


# ---- the folder


HEADER = {"grid": {"methods": ["model"], "seed": 0}, "environment": {}}
LINE = {"setting": "t=0 b=1", "round": 0, "greedy": True, "cells": {}, "differences": []}


def begun(path: Path, *lines: dict) -> Folder:
    folder = Folder(path)
    folder.begin(HEADER)
    for each in lines:
        folder.append(each)
    return folder


def test_a_folder_goes_on(tmp_path):
    begun(tmp_path / "out", LINE).close()
    with (tmp_path / "out" / ROUNDS).open("a") as file:
        file.write('{"setting": "t=0')  # the process was killed within a line
    again = Folder(tmp_path / "out")
    assert again.rounds == [LINE] and again.header["grid"] == HEADER["grid"]
    again.begin(HEADER)
    again.append({**LINE, "round": 1})
    again.close()
    assert [each["round"] for each in Folder(tmp_path / "out").rounds] == [0, 1]


def test_another_grid_is_refused_by_name(tmp_path):
    begun(tmp_path / "out", LINE).close()
    folder = Folder(tmp_path / "out")
    with pytest.raises(OutputError, match=r"with other settings \(seed: 0 then, 3 now\), allowed: the same"):
        folder.begin({**HEADER, "grid": {**HEADER["grid"], "seed": 3}})
    folder.close()
    assert Folder(tmp_path / "out").rounds == [LINE]


def test_a_folder_of_nothing_is_removed(tmp_path):
    Folder(tmp_path / "out").close()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "told"),
    (
        (b"x\n", "line 1 of .*got b'x"),
        (b'{"format": "specdec bench rounds 0"}\n', "line 1"),
        (json.dumps({"format": "specdec bench rounds 1", "grid": {}}).encode() + b'\n{"round": 1}\n', "line 2"),
    ),
)
def test_other_files_are_refused(tmp_path, content, told):
    (tmp_path / ROUNDS).write_bytes(content)
    with pytest.raises(OutputError, match=told):
        Folder(tmp_path)
    assert (tmp_path / ROUNDS).read_bytes() == content


def test_one_process_a_folder(tmp_path):
    first = begun(tmp_path)
    with pytest.raises(OutputError, match="another process is writing"):
        Folder(tmp_path)
    first.close()


def test_a_full_disk_keeps_the_rounds_before(tmp_path, monkeypatch):
    folder, pwrite = begun(tmp_path, LINE), os.pwrite

    def full(file: int, data: bytes, at: int) -> int:
        if len(data) > 20:
            return pwrite(file, data[:20], at)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(WriteError, match="No space left on device"):
            folder.append({**LINE, "round": 1})
    folder.close()
    assert Folder(tmp_path).rounds == [LINE]


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    folder = begun(tmp_path)
    folder.write({"results.json": "old"})

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match="results.json': No space left on device"):
        folder.write({"results.json": "new"})
    assert (tmp_path / "results.json").read_text() == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["results.json", ROUNDS]
