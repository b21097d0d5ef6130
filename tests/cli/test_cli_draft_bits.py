"""``--draft-bits``: every command takes it, records of jobs and measurements have it, and none ignores it."""

from __future__ import annotations

import json

import pytest
from specdec.cli.models import ModelOptions, load
from specdec.models.exchanged.packed_weights import is_packed
from support.commands import refused, run
from transformers import LlamaConfig, LlamaForCausalLM

EIGHT = ("--draft-bits", 8)
SHORT = ("--max-new-tokens", 6)
SMALL = ("--method", "model", "-k", 2, "--rule", "token", "--batch-size", 1, "--repeats", 1, "--temperature", 0)


@pytest.fixture(scope="module")
def wide(pair, tmp_path_factory):
    """A pair on the disk, whose rows are whole blocks: options as ``folders`` has them."""
    folder = tmp_path_factory.mktemp("wide")
    for name, model in zip(("target", "draft"), pair, strict=False):
        model.save_pretrained(folder / name)
        pair[2].save_pretrained(folder / name)
    return ("--target", folder / "target", "--draft", folder / "draft")


def packed(model) -> bool:
    return any(is_packed(module) for module in model.modules())


def test_which_models_are_packed(wide):
    """The embedded pair, two folders, and a draft whose tokenizer is another one."""
    of_folders = {"target": str(wide[1]), "draft": str(wide[3])}
    for at, drafters in (({}, ["model"]), (of_folders, ["model"]), (of_folders, ["universal"])):
        for bits in (None, 8):
            loaded = load(ModelOptions(**at, draft_bits=bits), drafters)
            assert not packed(loaded.target) and packed(loaded.draft) == (bits == 8)


def test_a_text_and_a_job(tmp_path):
    whole = run("generate", "import os", *SHORT, "--drafter", "none").stdout
    assert run("generate", "import os", *SHORT, *EIGHT).stdout == whole
    file, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    file.write_text("import os\n")
    job = ("generate", "--batch-file", file, "--output", output, *SHORT)
    run(*job, *EIGHT)
    assert "nothing to do" in run(*job, *EIGHT).stderr
    assert "draft_bits" in refused(*job)  # other drafts make other texts of the same distribution


def test_measurements_have_it(tmp_path):
    run("bench", "x = ", *SHORT, *SMALL, *EIGHT, "--output", tmp_path / "out")
    whole = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (whole["settings"]["bits"], whole["settings"]["draft_bits"]) == (None, 8)
    sizes = {name: model["bytes"] / model["parameters"] for name, model in whole["models"].items() if name != "heads"}
    assert sizes["draft"] < 1.2 and sizes["target"] > 3.9


def test_advise(wide):
    quick = ("--seconds", 0.1, *SHORT, "-k", 1, "--batch-size", 2, "--prompt-set", "code", "--json")
    of_draft = [
        json.loads(run("advise", wide[1], wide[3], *quick, *bits).stdout)["tried"][0]["memory"]["draft"]
        for bits in ((), EIGHT)
    ]
    assert 0.2 < of_draft[1] / of_draft[0] < 0.5


def test_the_doctor_says_what_stays(tmp_path):
    """Rows of 48 numbers are no whole blocks."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes)
    LlamaForCausalLM(config).save_pretrained(model := tmp_path / "model")
    told = json.loads(run("doctor", model, "--bits", 8, "--json").stdout)["native_parts"]
    assert told["linear layers"] == "7 of Q8_0, 1 of float32"
    for asked in (("--bits", 8), (model, "--bits", 4)):
        assert "Invalid value for --bits: got" in refused("doctor", *asked)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("generate", "x", "--draft-bits", 4), "--draft-bits: got 4, allowed: 8, or none"),
        (("generate", "x", *EIGHT, "--drafter", "lookup"), "--draft-bits: got 8 with --drafter lookup, allowed: none"),
        (("serve", *EIGHT, "--drafter", "eagle3"), "--draft-bits: got 8 with --drafter eagle3, allowed: none"),
        (("verify", *EIGHT, "--drafter", "suffix"), "--draft-bits: got 8 with --drafter suffix, allowed: none"),
        (("bench", *EIGHT, "--method", "lookup"), "--draft-bits: got 8 with --method lookup, allowed: none"),
    ],
)
def test_what_is_refused(command, told):
    assert f"Invalid value for {told}" in refused(*command)


def test_what_is_no_draft_model_is_named(folders, tmp_path):
    assert "--draft-bits: got 8 without a draft model" in refused("advise", folders[1], "lookup", *EIGHT)
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text("{}")
    assert "DRAFT: got" in (told := refused("advise", folders[1], head, *EIGHT)) and "no --draft-bits" in told
