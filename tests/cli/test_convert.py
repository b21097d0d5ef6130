"""``specdec convert``, and the commands that are given a GGUF file."""

from __future__ import annotations

import pytest
from support.commands import invoke, refused, run
from support.gguf_files import write_gguf


def test_convert_and_generate(tmp_path):
    write_gguf(tmp_path / "model.gguf", stored="Q8_0")
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
    write_gguf(tmp_path / "model.gguf", metadata={"rope.scaling.type": "longrope", "rope.scaling.factor": 8.0})
    said = refused("convert", tmp_path / "model.gguf", tmp_path / "model")
    assert "Invalid value for FILE: got" in said and "rope.scaling.factor 8.0" in said
    said = refused("generate", "in", "--target", tmp_path / "model.gguf", "--drafter", "lookup")
    assert "Invalid value for --target: got" in said and "rope.scaling.factor 8.0" in said


def test_files_as_target_and_draft(tmp_path):
    """The text of the folder that is made of the file, and every option that would change the weights is refused."""
    for name, stored in (("target", "Q4_1"), ("draft", "Q8_0")):
        write_gguf(tmp_path / f"{name}.gguf", stored=stored)
    run("convert", tmp_path / "target.gguf", tmp_path / "folder")
    how = ("--max-new-tokens", 12, "--device", "cpu")
    pair = run("generate", "in", "--target", tmp_path / "target.gguf", "--draft", tmp_path / "draft.gguf", *how)
    assert pair.stdout == run("generate", "in", "--target", tmp_path / "folder", "--drafter", "none", *how).stdout != ""
    for options, said in (
        (("--dtype", "bfloat16"), "--dtype: got bfloat16"),
        (("--adapter", "x"), "--adapter: got 'x'"),
    ):
        shown = refused("generate", "in", "--target", tmp_path / "target.gguf", "--drafter", "lookup", *options, *how)
        assert said in shown and "specdec convert" in shown


def test_a_job_knows_the_file_again(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "in"}\n')
    paths = {"--target": "model.gguf", "--batch-file": "prompts.jsonl", "--output": "texts.jsonl"}
    job = (*(part for name, path in paths.items() for part in (name, tmp_path / path)), "--drafter", "lookup")
    write_gguf(tmp_path / "model.gguf", stored="Q8_0")
    for _ in range(2):  # the second time it goes on
        run("generate", *job, "--max-new-tokens", 4)
    write_gguf(tmp_path / "model.gguf", stored="Q4_0")
    assert "target" in refused("generate", *job, "--max-new-tokens", 4)


@pytest.mark.parametrize(
    "command",
    [
        *(("generate", "hi", "--target"), ("chat", "--target"), ("serve", "--target"), ("compare", "--target")),
        *(("verify", "--target"), ("bench", "--target"), ("advise",)),
    ],
)
def test_every_command_takes_one(command):
    draft = ("--draft", "other") if command[-1] == "--target" else ()
    shown = invoke(*command, "model.gguf", *draft)
    assert shown.exit_code == 2 and shown.stdout == ""
    assert "there is no file 'model.gguf'" in " ".join(shown.stderr.split())
