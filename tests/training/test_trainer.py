"""Trainings that are stopped, killed, out of space or without a number: what is kept, and how they go on."""

from __future__ import annotations

import copy
import errno
import json
import random

import pytest
import torch
from safetensors.torch import load_file
from specdec.training import trainer, trainer_checkpoint
from specdec.training.cached_logits import CachedLogits
from specdec.training.held_out import Worth, write
from specdec.training.lessons import Lessons, Packed
from specdec.training.settings import DistillSettings
from specdec.training.trainer import BEST, CHECKPOINT, LOG, Diverged, Trainer, Watch
from support.models import prompts, tunable_pair

STEPS = 12
SOURCES = {"data": 0.4, "target": 0.3, "draft": 0.3}
LOSS = {"total_variation": 0.7, "forward_kl": 0.2, "data": 0.1}


class Killed(Exception):
    pass


def made(folder, settings: DistillSettings | None = None, sources=SOURCES, cache: int = 0, **asked) -> Trainer:
    target, draft = tunable_pair(0.4)
    draft = copy.deepcopy(draft)
    given = Packed([t for p in prompts(60, 10, 10) for t in [p]], 16, 2, 0)
    lessons = Lessons(given, target, draft, DistillSettings(text=sources, batch_size=2, at_once=4, prompt=4))
    settings = settings or DistillSettings(loss=LOSS, steps=STEPS, warm_up=3, every=4, num_drafts=2)
    folder.mkdir(exist_ok=True)
    cached = None
    if cache:
        cached = CachedLogits(folder / "logits", target, given.blocks, cache)
        cached.fill(2, lambda done, total: None)
    written = write(target, prompts(2, 4, 6), 8, 0)
    return Trainer(target, draft, lessons, written, settings, folder, asked, cached)


def weights(of: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in of.draft.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A training that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = made(folder)
    assert done.run(Watch())
    return folder, weights(done), [json.loads(line) for line in (folder / LOG).read_text().splitlines()]


def test_it_learns_and_writes_what_it_learned(whole):
    folder, found, log = whole
    assert [row["step"] for row in log] == [0, 4, 8, 12] and log[0]["loss"] is None
    assert all(row["loss"] > 0 and row["held_out"][0]["temperature"] == 0 for row in log[1:])
    start = dict(tunable_pair(0.4)[1].named_parameters())
    assert all(not torch.equal(found[name], start[name]) for name in found)


def test_killed_at_random_moments_it_ends_with_the_same_weights(whole, tmp_path):
    """Also between the checkpoint and the line of the log, and while a checkpoint is written."""
    _, found, log = whole
    kills = sorted(random.Random(3).sample(range(1, STEPS), 5))

    def killed(done, total, what):
        if kills and done >= kills[0]:
            kills.pop(0)
            raise Killed

    tries = 0
    while True:
        tries += 1
        training = made(tmp_path / "run")
        try:
            if training.run(Watch(killed)):
                break
        except Killed:
            (tmp_path / "run" / f".{CHECKPOINT}.part").write_bytes(b"half")
    assert tries > 3 and not kills
    assert same(weights(training), found)
    again = [json.loads(line) for line in (tmp_path / "run" / LOG).read_text().splitlines()]
    assert [(r["step"], r["held_out"]) for r in again] == [(r["step"], r["held_out"]) for r in log]


def test_stopped_after_a_step_it_goes_on_from_there(whole, tmp_path):
    asked = []

    def stopped():
        asked.append(1)
        return len(asked) == 7

    first = made(tmp_path / "run")
    assert not first.run(Watch(stopped=stopped)) and first.progress.step == 6
    second = made(tmp_path / "run")
    assert second.progress.step == 6 and second.run(Watch())
    assert same(weights(second), whole[1])


def test_the_best_weights_are_kept(tmp_path, monkeypatch):
    marks = iter([0.2, 0.9, 0.5, 0.4])  # of steps 0, 4, 8 and 12
    monkeypatch.setattr(
        trainer, "worth", lambda *_: [Worth(t, alpha, 1.0) for alpha in [next(marks)] for t in (0.0, 1.0)]
    )
    training, kept = made(tmp_path / "run"), {}
    training.run(Watch(lambda done, total, what: kept.setdefault(done, weights(training))))
    assert training.progress.best_step == 4
    training.take_best()
    assert same(weights(training), kept[4]) and not same(kept[4], kept[12])


def test_a_loss_that_is_no_number_ends_it_and_the_checkpoint_stays(tmp_path, monkeypatch):
    training, real = made(tmp_path / "run"), trainer.loss_of
    calls = []

    def broken(*args):
        calls.append(1)
        return real(*args) * (float("nan") if len(calls) == 6 else 1.0)

    monkeypatch.setattr(trainer, "loss_of", broken)
    with pytest.raises(
        Diverged, match="^loss: got nan in step 6, .*the checkpoint of step 4 is as it was, and a smaller"
    ):
        training.run(Watch())
    assert all(p.isfinite().all() for p in training.draft.parameters())
    again = made(tmp_path / "run")
    assert again.progress.step == 4


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    training, real = made(tmp_path / "run"), trainer_checkpoint.write_whole
    calls = []

    def full(path, content):
        calls.append(path)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, content)

    monkeypatch.setattr(trainer_checkpoint, "write_whole", full)
    with pytest.raises(OSError, match="No space left"):
        training.run(Watch())
    monkeypatch.undo()
    again = made(tmp_path / "run")
    assert again.progress.step == 4 and again.run(Watch())


def test_other_settings_do_not_go_on(tmp_path):
    made(tmp_path / "run", data="a").run(Watch(stopped=lambda: True))
    with pytest.raises(ValueError, match='^output: got a training with other settings .data: "a" then, "b" now'):
        made(tmp_path / "run", data="b")
    (tmp_path / "run" / CHECKPOINT).write_bytes(b"nothing")
    with pytest.raises(ValueError, match="^output: got .*allowed: a checkpoint of this training"):
        made(tmp_path / "run", data="a")


def test_the_log_of_lost_steps_is_cut(whole, tmp_path):
    first = made(tmp_path / "run")
    first.run(Watch(stopped=lambda: first.progress.step == 4))
    log = tmp_path / "run" / LOG
    log.write_text(log.read_text() + '{"step": 8, "loss": 1}\n' * 100 + '{"step": 12, "lo')
    assert made(tmp_path / "run").run(Watch())
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [0, 4, 8, 12]


def test_cached_distributions_are_those_of_the_target(tmp_path):
    """All but one token, so nothing is left out."""
    settings = DistillSettings(loss=LOSS, steps=4, warm_up=3, every=4)
    online, cached = made(tmp_path / "a", settings, {"data": 1.0}), made(tmp_path / "b", settings, {"data": 1.0}, 100)
    for training in (online, cached):
        training.run(Watch())
    for mine, theirs in zip(weights(online).values(), weights(cached).values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=2e-4)
    coarse = made(tmp_path / "c", settings, {"data": 1.0}, 2)
    coarse.run(Watch())
    assert not same(weights(online), weights(coarse))


def test_a_cache_goes_on_where_it_was_killed_and_knows_its_data(tmp_path):
    target, other = tunable_pair(0.4)
    blocks = torch.tensor(prompts(130, 8, 8))
    cached = CachedLogits(tmp_path / "c", target, blocks, 5)
    assert cached.shards == 3
    told = []

    def killed(done, total):
        told.append((done, total))
        if done == 2:
            raise Killed

    with pytest.raises(Killed):
        cached.fill(16, killed)
    stamps = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "c").iterdir()}
    again = CachedLogits(tmp_path / "c", target, blocks, 5)
    again.fill(16, lambda done, total: None)
    assert told == [(0, 3), (1, 3), (2, 3)] and len([*(tmp_path / "c").iterdir()]) == 3
    assert all((tmp_path / "c" / name).stat().st_mtime_ns == at for name, at in stamps.items())
    with torch.inference_mode():
        logits = target(blocks[[70, 3]][:, :-1], use_cache=False).logits
    wanted = trainer.Wanted.of(logits, 5)
    found = again.of(torch.tensor([70, 3]))
    torch.testing.assert_close(found.log_p, wanted.log_p, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.ids, wanted.ids)
    with torch.inference_mode():
        best = target(blocks[:64, :-1], use_cache=False).logits.softmax(-1).topk(5).values.sum(-1)
    assert again.covered == pytest.approx(best.mean().item(), abs=1e-4)
    for wrong in ((other, blocks, 5), (target, blocks + 1, 5), (target, blocks, 6)):
        with pytest.raises(ValueError, match="^cache_logits: got .*of another target, data or number"):
            CachedLogits(tmp_path / "c", *wrong).fill(16, lambda done, total: None)
    (tmp_path / "c" / "000001.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match="^cache_logits: got .*000001.*allowed: a whole shard"):
        again.fill(16, lambda done, total: None)


def test_gradient_checkpointing_and_bfloat16_learn_alike(tmp_path):
    settings = {"loss": {"forward_kl": 1.0}, "steps": 4, "every": 4, "num_drafts": 2, "warm_up": 1}
    found = {}
    for name, more in {"plain": {}, "again": {"gradient_checkpointing": True}, "bf16": {"precision": "bf16"}}.items():
        training = made(tmp_path / name, DistillSettings(**settings, **more), {"data": 1.0})
        training.run(Watch())
        found[name] = weights(training)
    assert same(found["plain"], found["again"])
    assert not same(found["plain"], found["bf16"])
    for mine, theirs in zip(found["plain"].values(), found["bf16"].values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=8e-3)  # four steps of Adam are 4e-3 at most, each way


def test_files_of_a_run(whole):
    folder, found, _ = whole
    assert {p.name for p in folder.iterdir()} == {CHECKPOINT, BEST, LOG}
    assert load_file(folder / BEST).keys() == found.keys()
