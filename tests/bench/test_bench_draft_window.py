"""bench_draft_window.py: what it reports."""

from __future__ import annotations

import json

import bench_draft_window
from specdec.cli.models import EMBEDDED
from support.benches import run_main


def test_what_it_times(tmp_path):
    done = run_main(bench_draft_window, "--quick", "--json", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "out.json").read_text())
    whole, windowed, *others = content["rows"]
    assert content["complete"] and len(others) == 2 and (whole["context"], whole["window"]) == (64, None)
    assert windowed["window"] == 16 and windowed["MiB"] < whole["MiB"] and windowed["move"]["median"] > 0
    assert windowed["whole/window"]["median"] > 0


def test_what_it_counts(pair, monkeypatch, tmp_path):
    monkeypatch.setattr(bench_draft_window, "load_model", lambda folder: pair[0])
    monkeypatch.setattr(bench_draft_window, "load_tokenizer", lambda name, folder: pair[2])
    (text := tmp_path / "text.py").write_text("import os\n" * 40)
    asked = ("--model", EMBEDDED, "--text", text, "--prompt", 60, "--new", 8, "--windows", "16")
    done = run_main(bench_draft_window, *asked, "--json", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["temperature"], row["window"]) for row in rows] == [(0, None), (0, 16), (1, None), (1, 16)]
    assert rows[0]["alpha"] == 1 and all(1 <= row["tau"] <= 5 for row in rows)
