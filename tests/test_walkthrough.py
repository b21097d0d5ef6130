"""examples/walkthrough.ipynb: its cells run one after the other, and draw what the text between them says."""

from __future__ import annotations

import json
import re

import pytest
import specdec
import torch
from support import ROOT

plt = pytest.importorskip("matplotlib.pyplot")
FILE = ROOT / "examples" / "walkthrough.ipynb"
CELLS = json.loads(FILE.read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
FEWER = {"in range(4)": "in range(2)", "max_new_tokens=48": "max_new_tokens=12", "texts=60": "texts=6"}  # for seconds


def test_its_cells_run(pair, monkeypatch, capsys):
    monkeypatch.syspath_prepend(FILE.parent)
    monkeypatch.setattr(specdec, "load_embedded_pair", lambda: pair, raising=False)
    plt.switch_backend("agg")
    names: dict = {}
    with torch.random.fork_rng():
        for number, cell in enumerate(CODE):
            for whole, few in FEWER.items():
                cell = cell.replace(whole, few)
            exec(compile(cell, f"{FILE.name}, cell {number}", "exec"), names)
    printed = capsys.readouterr().out
    tokens, steps, tau = re.search(r"(\d+) tokens in (\d+) steps, tau (\d\.\d\d)", printed).groups()
    assert float(tau) == pytest.approx(int(tokens) / int(steps), abs=0.005) and int(steps) < int(tokens) >= 64
    measured = re.findall(r"^K = (\d): alpha (0\.\d\d), tau (\d\.\d\d), expected", printed, re.MULTILINE)
    assert [int(k) for k, *_ in measured] == [*range(1, 8)]
    assert all(1 < float(tau) <= int(k) + 1 for k, _, tau in measured)
    assert printed.splitlines()[-9].split() == ["text", "by", "the", "target", "from", "scratch", "specdec"]
    assert len(plt.get_fignums()) == 3
    plt.close("all")


def test_it_is_small():
    """What is kept of its outputs are pictures to be seen without running it. Tests run it with fewer texts."""
    assert all("".join(CODE).count(whole) == 1 for whole in FEWER)
    assert FILE.stat().st_size < 200_000
    assert not any("error" == output["output_type"] for cell in CELLS for output in cell.get("outputs", ()))
