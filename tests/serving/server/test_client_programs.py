"""Programs of ours that talk with a server: ``specdec chat --url`` and examples/client.py."""

from __future__ import annotations

import re
import runpy
import sys

from specdec import Request, chat_prompt
from specdec.cli import app
from support import ROOT
from typer.testing import CliRunner

from specdec_kernels import SamplingParams


def alone(served, prompt: list[int], new: int, params: SamplingParams, seed: int):
    """What the engine decodes without a server, and its text."""
    (outcome,) = served.scheduler("coupled").run([Request(prompt, new, params, seed)])
    return outcome, served.service.tokenizer.decode(outcome.tokens, skip_special_tokens=True)


def test_a_chat(served):
    arguments = [
        "chat",
        "--url",
        f"{served.url}/v1",
        "--max-new-tokens",
        "12",
        "--temperature",
        "0.7",
        "--seed",
        "3",
        "-v",
    ]
    result = CliRunner().invoke(app, arguments, input="read\n/k 0\nwrite\n")
    assert result.exit_code == 0, result.output
    messages, texts, told = [], [], []
    for seed, said in ((3, "read"), (4, "write")):
        messages.append({"role": "user", "content": said})
        prompt = chat_prompt(served.service.tokenizer, messages)
        outcome, text = alone(served, prompt, 12, SamplingParams(0.7), seed)
        messages.append({"role": "assistant", "content": text})
        texts.append(text)
        told.append(outcome.stats)
    assert result.stdout == "".join(f"{text}\n" for text in texts)
    first, second = re.findall(r"tokens: accepted (\d+), recovered (\d+), bonus (\d+), plain (\d+)\n", result.stderr)
    assert int(first[0]) == told[0].accepted and sum(map(int, first)) == 12 and second == ("0", "0", "0", "12")
    assert f"12 tokens in {told[0].steps} steps, " in result.stderr and "12 tokens in 12 steps, " in result.stderr


def test_the_example(served, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["client.py", f"{served.url}/v1", "key"])
    runpy.run_path(str(ROOT / "examples" / "client.py"), run_name="__main__")
    prompt = "def read(self, size=-1):\n"
    ids = served.service.tokenizer(prompt).input_ids
    outcome, text = alone(served, ids, 48, SamplingParams(0.8, min_p=0.05), 1)
    accepted, drafted = outcome.stats.accepted, outcome.stats.drafted
    counts = f"48 tokens, {accepted} of them drafts; {drafted - accepted} drafts were rejected"
    assert capsys.readouterr().out == f"{prompt}{text}\n--- {counts}\n"
