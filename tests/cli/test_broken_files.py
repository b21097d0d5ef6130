"""A file that is broken in one entry ends a command with one message that names option, entry, value and range."""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path

import pytest
from support.commands import refused

EMBEDDED = Path(str(resources.files("specdec") / "embedded"))
PROMPT = "import os"


def test_a_gguf_file(tmp_path):
    gguf_files = pytest.importorskip("support.gguf_files")
    for key, value in (("rope.dimension_count", 2**40), ("embedding_length", 2**62), ("feed_forward_length", 2**63)):
        gguf_files.write_gguf(tmp_path / "model.gguf", metadata={key: value})
        told = refused("generate", PROMPT, "--target", tmp_path / "model.gguf", "--drafter", "lookup")
        assert "--target: got" in told and f"llama.{key} is {value}, and has to be an integer from 1 to " in told


@pytest.mark.parametrize(
    ("entry", "value", "said"),
    [
        ("num_hidden_layers", 2**62, f"has num_hidden_layers {2**62}, allowed: an integer from 0 to 4096"),
        ("hidden_size", 0, "has hidden_size 0, allowed: an integer from 1 to 16777216"),
        ("model_type", [1], ""),
        ("hidden_act", None, ""),
    ],
)
def test_a_folder(entry, value, said, tmp_path):
    shutil.copytree(EMBEDDED / "target", tmp_path / "model")
    for file in (EMBEDDED / "tokenizer").iterdir():
        shutil.copy(file, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {entry: value}))
    told = refused("generate", PROMPT, "--target", tmp_path / "model", "--drafter", "lookup")
    assert told.startswith("Invalid value for --target: ") and said in told


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "medusa"])
def test_a_head(kind, tmp_path):
    entry, value = {"medusa": ("medusa_num_heads", 2**62)}.get(kind, ("attention_bias", "yes"))
    shutil.copytree(EMBEDDED / "heads" / kind, tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    (tmp_path / "head" / "config.json").write_text(json.dumps(config | {entry: value}))
    told = refused("generate", PROMPT, "--drafter", tmp_path / "head")
    assert told.startswith("Invalid value for --drafter: ") and f"config.json: got {entry} {value!r}, allowed: " in told
