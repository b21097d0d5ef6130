"""``specdec convert``, and the commands that are given a GGUF file."""

from __future__ import annotations

import pytest
from support.commands import invoke, refused, run
from support.gguf_files import write_gguf


def test_convert_and_generate(tmp_path):
    write_gguf(tmp_path / "model.gguf", packed=True)
    made = run("convert", tmp_path / "model.gguf", tmp_path / "model")
    assert made.stdout == f"{tmp_path / 'model'}\n" and "llama, float32. Expanded from Q8_0." in made.stderr
    written = run("generate", "in", "--target", tmp_path / "model", "--drafter", "lookup", "--max-new-tokens", 4)
    assert written.stdout
    assert "FOLDER: got" in refused("convert", tmp_path / "model.gguf", tmp_path / "model").replace(
        "Invalid value for ", ""
    )
    run("convert", tmp_path / "model.gguf", tmp_path / "model", "--overwrite", "--dtype", "float16")
    said = refused("convert", tmp_path / "model.gguf", tmp_path / "new", "--dtype", "int8")
    assert "--dtype: got 'int8', allowed: float32, bfloat16, float16" in said


def test_what_is_wrong_with_a_file_names_it(tmp_path):
    write_gguf(tmp_path / "model.gguf", metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
    said = refused("convert", tmp_path / "model.gguf", tmp_path / "model")
    assert "Invalid value for FILE: got" in said and "rope.scaling.factor 8.0" in said


@pytest.mark.parametrize(
    "command",
    [
        *(("generate", "hi", "--target"), ("chat", "--target"), ("serve", "--target"), ("compare", "--target")),
        *(("verify", "--target"), ("bench", "--target"), ("advise",), ("roofline", "--alpha", "0.8", "1B")),
    ],
)
def test_every_command_names_the_one_that_converts(command):
    draft = ("--draft", "other") if command[-1] == "--target" else ()
    shown = invoke(*command, "model.gguf", *draft)
    assert shown.exit_code == 2 and shown.stdout == ""
    assert "specdec convert model.gguf model" in " ".join(shown.stderr.split())
