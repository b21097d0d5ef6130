"""A program that talks with a server: examples/client.py."""

from __future__ import annotations

import runpy
import sys

from specdec import Request
from support import ROOT

from specdec_kernels import SamplingParams


def test_the_example(served, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["client.py", f"{served.url}/v1", "key"])
    runpy.run_path(str(ROOT / "examples" / "client.py"), run_name="__main__")
    prompt = "def read(self, size=-1):\n"
    ids = served.service.tokenizer(prompt).input_ids
    (outcome,) = served.scheduler("coupled").run([Request(ids, 48, SamplingParams(0.8, min_p=0.05), 1)])
    text = served.service.tokenizer.decode(outcome.tokens, skip_special_tokens=True)
    accepted, drafted = outcome.stats.accepted, outcome.stats.drafted
    counts = f"48 tokens, {accepted} of them drafts; {drafted - accepted} drafts were rejected"
    assert capsys.readouterr().out == f"{prompt}{text}\n--- {counts}\n"
