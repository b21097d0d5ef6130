"""TRL's GRPOTrainer with rollouts of ours: the training with drafts is the training without, step by step."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import specdec
import torch
from support import ROOT

pytest.importorskip("trl", reason="TRL is not installed; the nightly part extras/trl has it")

EXAMPLE = ROOT / "examples" / "rollouts_in_trl.py"


def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **settings) -> dict[str, object]:
    """The names of the example after it ran, with other settings of its rollouts."""
    monkeypatch.setattr(specdec, "Rollout", lambda model, make=specdec.Rollout: make(model, **settings), raising=False)
    monkeypatch.chdir(tmp_path)
    try:
        return runpy.run_path(str(EXAMPLE), run_name="__main__")
    finally:
        monkeypatch.undo()


def test_the_example_trains_as_without_drafts(monkeypatch, tmp_path, capsys):
    found = []
    for settings in ({}, {"num_drafts": 0}):
        ran = trained(monkeypatch, tmp_path, **settings)
        history = ran["trainer"].state.log_history
        rewards = [entry["reward"] for entry in history if "reward" in entry]
        taus = [float(tau) for tau in re.findall(r"^step \d+: tau (\d+\.\d\d)$", capsys.readouterr().out, re.MULTILINE)]
        found.append((rewards, taus, [*ran["model"].parameters()]))
    (rewards, taus, weights), (others, plain, same) = found
    assert rewards == others and len(rewards) >= 6
    assert all(map(torch.equal, weights, same))
    assert set(plain) == {1.0} and max(taus) > 1


def test_its_log_probs_are_the_trainers(monkeypatch, tmp_path):
    ran = trained(monkeypatch, tmp_path)
    trainer, model, tokenizer = ran["trainer"], ran["model"], ran["tokenizer"]
    given = ran["rollouts"](["class Stack:\n", "import os"], trainer)
    model.eval()
    for prompt, new, log_probs in zip(given["prompt_ids"], given["completion_ids"], given["logprobs"], strict=True):
        ids = torch.tensor([prompt + new])
        with torch.no_grad():
            logits = model(ids).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
        assert (logits[0].gather(1, ids[0, len(prompt) :, None])[:, 0] - torch.tensor(log_probs)).abs().max() < 1e-5
    assert given["prompt_ids"] == tokenizer(["class Stack:\n", "import os"]).input_ids
