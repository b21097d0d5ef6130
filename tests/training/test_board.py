"""The log of a training, as TensorBoard reads it."""

from __future__ import annotations

import importlib.util
import json

import pytest
from specdec.training.curves import FOLDER, board, scalars
from specdec.training.trainer import RUN, log_of
from support.commands import invoke, refused

CODE = "def read(path):\n    with open(path) as file:\n        return file.read()\n\n\n"
QUICK = ("--steps", 2, "--every", 1, "--batch-size", 1, "--length", 40, "--judged", 2, "--warm-up", 1)
FOUND = {"temperature": 0.5, "alpha": 0.75, "tau": 2.5}
ROW = {"step": 3, "loss": 0.25, "seconds": 1.0, "tokens": 9, "held_out": [FOUND]}


@pytest.fixture
def given(tmp_path):
    (tmp_path / "code.jsonl").write_text("".join(json.dumps({"text": f"# {i}\n{CODE}"}) + "\n" for i in range(60)))
    (tmp_path / "held.txt").write_text(CODE * 3)
    texts = ("--data", tmp_path / "code.jsonl", "--held-out", tmp_path / "held.txt")
    return (*texts, "--output", tmp_path / "out", "--tensorboard", *QUICK)


def read(folder) -> dict[str, list[tuple[int, float]]]:
    """The curves in a folder, as TensorBoard shows them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_numbers_of_a_line():
    assert scalars(ROW) == {"loss/mean": 0.25, "alpha/temperature_0.5": 0.75, "tau/temperature_0.5": 2.5}
    found = scalars({**ROW, "loss": None, "hits": [0.5, 0.25], "training_hits": [0.75]})
    assert {*found} == {"alpha/temperature_0.5", "tau/temperature_0.5", "hits/depth_1", "hits/depth_2",
                        "training_hits/depth_1"}  # fmt: skip
    assert (found["hits/depth_1"], found["hits/depth_2"]) == (0.5, 0.25)


def test_lines_that_come_again_take_the_place_of_those_before(tmp_path):
    pytest.importorskip("tensorboard")
    for steps, loss in (((1, 2, 3), 1.0), ((2, 3), 0.5)):  # the second time from the checkpoint of step 1 on
        with board(tmp_path) as logged:
            for step in steps:
                logged({**ROW, "step": step, "loss": loss})
    assert read(tmp_path / RUN / FOLDER)["loss/mean"] == [(1, 1.0), (2, 0.5), (3, 0.5)]


@pytest.mark.nightly
@pytest.mark.parametrize("command", ["distill", "train-heads"])
def test_the_commands_write_what_the_log_has(given, tmp_path, command):
    pytest.importorskip("tensorboard")
    kind = ("--kind", "medusa", "--depth", 1, "--judged", 1) if command == "train-heads" else ()
    done = invoke(command, *given, *kind)
    assert done.exit_code in (0, 1), done.output  # 1: a head that hardly drafts after two steps
    curves, rows = read(tmp_path / "out" / RUN / FOLDER), log_of(tmp_path / "out")
    assert len(rows) == 3
    for name in {name for row in rows for name in scalars(row)}:
        written = [(row["step"], scalars(row)[name]) for row in rows if name in scalars(row)]
        assert curves.pop(name) == [(step, pytest.approx(value)) for step, value in written]
    assert not curves


def test_without_tensorboard_it_is_refused(given, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "tensorboard" else found(name, *rest)
    )
    assert "--tensorboard: got True without it" in refused("distill", *given)
    assert not (tmp_path / "out" / "config.json").exists()
