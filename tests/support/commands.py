"""Calls the command line in tests."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from specdec.cli import app
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

PROMPT = "def read(self, size=-1):\n"


def invoke(*args: object, color: bool = False):
    # On the CPU even if there is a GPU, since the tests compare with a pair that is on the CPU.
    of_server = args[0] == "bench" and "--url" in args
    without = of_server or args[0] in ("doctor", "simulate", "convert", "merge") or "--device" in args
    device = () if without else ("--device", "cpu")
    return CliRunner().invoke(app, [str(a) for a in (*args, *device)], color=color)


def run(*args: object, color: bool = False):
    result = invoke(*args, color=color)
    assert result.exit_code == 0, result.output
    return result


def rows(*args: object) -> list[dict]:
    return [json.loads(line) for line in run("generate", "--json", *args).stdout.splitlines()]


def refused(*args: object) -> str:
    """The error message of a command that is refused, in one line."""
    result = invoke(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return " ".join(result.stderr.partition("Error: ")[2].split())


def save(folder: Path, seed: int, vocabulary: int = 4096, tokenizer=None) -> Path:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=vocabulary, max_position_embeddings=64, eos_token_id=None, **sizes)
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.weight)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder
