"""``specdec distill``: a draft that becomes better, in a folder that loads, and what is refused before it begins."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from specdec import SpeculativeDecoder, load_embedded_pair
from specdec.cli.models import EMBEDDED
from specdec.cli.options import MachineOptions
from specdec.cli.own_texts import OwnTexts, fast_dtype
from specdec.line_file import WriteError
from specdec.models.load.loading import load_model
from specdec.training.distill import distill, read_loss, read_text
from specdec.training.model_card import Card
from specdec.training.settings import DistillSettings
from specdec.training.starts import cut
from specdec.training.texts import Corpus
from specdec.training.trainer import RUN, Watch, log_of
from support.commands import invoke, refused
from support.short_training import shorten

SHORT = DistillSettings(
    steps=6, rate=1e-3, warm_up=2, every=3, batch_size=2, length=32, at_once=2, prompt=8, judged=4, new=8
)
CODE = "def read(self, size=-1):\n    '''Read and return up to size bytes.'''\n    return self.buffer[:size]\n\n\n"


@pytest.fixture(scope="module")
def models():
    target, draft, tokenizer = load_embedded_pair()
    return cut(target, 2).eval(), draft, tokenizer  # a small target, so that this is fast


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    texts = [CODE.replace("read", f"read{i}") for i in range(40)]
    return Corpus(texts[:32], texts[32:], duplicates=3, known=2)


def run(models, corpus, folder, settings=SHORT, **more):
    target, draft, tokenizer = models
    return distill(target, copy.deepcopy(draft), tokenizer, corpus, settings, folder, **more)


def test_a_draft_that_is_better_in_a_folder_that_loads(models, corpus, tmp_path):
    told = []
    settings = dataclasses.replace(SHORT, steps=30, rate=3e-3, every=10)
    card = Card("a target", "a draft", "own lines", "CC0", "specdec distill")
    done = run(models, corpus, tmp_path / "out", settings, card=card, watch=Watch(lambda *how: told.append(how)))
    assert done.steps == 30 and done.best_step > 0
    assert sum(w.alpha for w in done.after) > sum(w.alpha for w in done.before) + 0.1
    assert told[-1][:2] == (30, 30) and "best so far: alpha" in told[-1][2]
    load_model(tmp_path / "out", "bfloat16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    files = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "tokenizer.json", RUN} <= files
    assert {p.name for p in (tmp_path / "out" / RUN).iterdir()} == {"log.jsonl", "result.json"}
    assert json.loads((tmp_path / "out" / RUN / "result.json").read_text()) == done.to_dict()
    assert [row["step"] for row in log_of(tmp_path / "out")] == [0, 10, 20, 30]
    page = (tmp_path / "out" / "README.md").read_text()
    for said in (
        "# A draft for a target",
        "own lines",
        "licence: CC0",
        "3 duplicates and 2 texts",
        "`specdec distill`",
    ):
        assert said in page
    assert f"| 1 | {done.before[1].alpha:.3f} | {done.after[1].alpha:.3f} |" in page


def test_a_folder_with_a_model_is_not_written_to(models, corpus, tmp_path):
    assert run(models, corpus, tmp_path / "out")
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")}
    with pytest.raises(ValueError, match="^output: got .*which has a model, allowed: a folder without one"):
        run(models, corpus, tmp_path / "out")
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")} == stamps


def test_killed_and_resumed_the_saved_weights_are_the_same_bytes(models, corpus, tmp_path):
    class Killed(Exception):
        pass

    def kill(done, total, what):
        if done == 4:
            raise Killed

    run(models, corpus, tmp_path / "whole")
    with pytest.raises(Killed):
        run(models, corpus, tmp_path / "cut", watch=Watch(kill))
    assert not (tmp_path / "cut" / "model.safetensors").exists()
    run(models, corpus, tmp_path / "cut")
    name = "model.safetensors"
    assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_stopped_it_is_not_done(models, corpus, tmp_path):
    assert run(models, corpus, tmp_path / "out", watch=Watch(stopped=lambda: True)) is None
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_another_target_does_not_go_on(models, corpus, tmp_path):
    target, *rest = models
    run(models, corpus, tmp_path / "out", watch=Watch(stopped=lambda: True))
    with pytest.raises(ValueError, match="^output: got a training with other settings .target"):
        run((cut(target, 1).eval(), *rest), corpus, tmp_path / "out")


def test_adapters_are_merged(models, corpus, tmp_path):
    pytest.importorskip("peft")
    settings = dataclasses.replace(SHORT, lora=4, output_dtype="float32")
    done = run(models, corpus, tmp_path / "out", settings)
    assert done.steps == 6
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert not any("lora" in name for name in file.keys())
    before, after = dict(models[1].named_parameters()), dict(load_model(tmp_path / "out").named_parameters())
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert not torch.equal(before["model.layers.0.mlp.up_proj.weight"], after["model.layers.0.mlp.up_proj.weight"])


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"length": 8}, "length: got 8, allowed: at least 9: a text that is written, or judged by"),
        ({"cache_logits": 4096}, "cache_logits: got 4096, allowed: below 4096"),
        ({"cache_logits": 4, "text": {"target": 1.0}}, "cache_logits: got 4 without text from the data"),
        ({"output_dtype": "int8"}, "output_dtype: got 'int8'"),
        ({"temperature": -1.0}, "temperature: got -1.0"),
        ({"steps": 0}, "steps: got 0"),
        ({"rate": float("nan")}, "rate: got nan"),
        ({"precision": "fp8"}, "precision: got 'fp8', allowed: no or bf16"),
        ({"judged": 0}, "judged: got 0"),
        ({"length": 5000}, "data: got .* tokens, allowed: at least"),
    ],
)
def test_wrong_settings_are_refused(models, corpus, tmp_path, changed, told):
    with pytest.raises(ValueError, match=f"^{told}"):
        run(models, corpus, tmp_path / "out", dataclasses.replace(SHORT, **changed))


def test_texts_without_tokens_are_refused(models, tmp_path):
    with pytest.raises(ValueError, match="^data: got 0 tokens"):
        run(models, Corpus([], ["x" * 100], 0, 0), tmp_path / "out")
    with pytest.raises(ValueError, match="^held_out: got 0 tokens, allowed: at least 8"):
        run(models, Corpus([CODE] * 32, [], 0, 0), tmp_path / "out")


def test_mixtures():
    assert read_loss("total_variation") == {"total_variation": 1.0}
    assert read_text("target:1,data:1") == {"target": 0.5, "data": 0.5}
    with pytest.raises(ValueError, match="^text: got 'web'"):
        read_text("web")


# ---- the command


@pytest.fixture
def data(tmp_path, monkeypatch):
    shorten(monkeypatch)
    path = tmp_path / "code.jsonl"
    path.write_text("".join(json.dumps({"text": CODE.replace("read", f"read{i}")}) + "\n" for i in range(60)))
    (tmp_path / "held.txt").write_text(CODE * 3)
    return path


QUICK = ("--steps", 2, "--every", 1, "--batch-size", 1, "--length", 40, "--judged", 2, "--warm-up", 1)


def test_the_command(data, tmp_path):
    given = ("distill", "--data", data, "--output", tmp_path / "out", "--held-out", tmp_path / "held.txt")
    done = invoke(*given, *QUICK, "--licence", "PSF-2.0", "--source", "some code", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["steps"] == 2 and [w["temperature"] for w in told["after"]] == [0.0, 1.0]
    page = (tmp_path / "out" / "README.md").read_text()
    assert "# A draft for the embedded target" in page and "some code; licence: PSF-2.0" in page
    draft = load_model(tmp_path / "out", "float32")
    target, _, tokenizer = load_embedded_pair()
    given = tokenizer(["def read"]).input_ids
    found = SpeculativeDecoder(target, draft, 2).generate(given, max_new_tokens=6)
    assert found.tokens == SpeculativeDecoder(target, None, 0).generate(given, max_new_tokens=6).tokens


def test_results_of_a_job_are_learned_from(tmp_path, monkeypatch):
    """As ``specdec generate`` writes them, with the file of their prompts."""
    shorten(monkeypatch)
    file, results = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"def f{i}(self):", "seed": i}) + "\n" for i in range(4)))
    assert invoke("generate", "--batch-file", file, "--output", results, "--max-new-tokens", 60).exit_code == 0
    (tmp_path / "held.txt").write_text(CODE * 3)
    given = ("distill", "--data", results, "--output", tmp_path / "out", "--held-out", tmp_path / "held.txt", *QUICK)
    assert "the text of prompt" in refused(*given)
    done = invoke(*given, "--prompts", file, "--cache-logits", 64)
    assert "the 64 tokens that are cached have " in done.stderr
    assert done.exit_code == 0 and " 4 texts; " in (tmp_path / "out" / "README.md").read_text(), done.output


def test_a_cut_draft_and_a_picture(data, tmp_path):
    given = ("distill", "--data", data, "--output", tmp_path / "out", "--held-out", tmp_path / "held.txt")
    done = invoke(*given, *QUICK, "--layers", 1, "--intermediate", 64, "--vocabulary", 1000)
    assert done.exit_code == 0, done.output
    assert "alpha" in done.stdout and "1000 tokens: " in done.stderr and "of the held-out text" in done.stderr
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["intermediate_size"]) == (1, 64)
    assert config["draft_vocab_size"] == 1000
    pytest.importorskip("matplotlib")
    assert (tmp_path / "out" / "curves.svg").read_text().count("<svg") == 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--draft", "x", "--layers", 1), "--draft / --layers"),
        (("--intermediate", 8), "--intermediate"),
        (("--loss", "kl"), "--loss"),
        (("--text", "web"), "--text"),
        (("--steps", 0), "--steps"),
        (("--lora", -1), "--lora"),
        (("--layers", 99), "--layers"),
        (("--data", "none.jsonl"), "--data"),
    ],
)
def test_wrong_options_are_refused(data, tmp_path, given, told):
    assert told in refused("distill", "--data", data, "--output", tmp_path / "out", *QUICK, *given)


def test_a_draft_that_drafts_nothing_yet_is_told(data, tmp_path):
    given = ("distill", "--data", data, "--output", tmp_path / "out", "--held-out", tmp_path / "held.txt")
    (tmp_path / "config.json").write_text((EMBEDDED / "draft" / "config.json").read_text())
    done = invoke(*given, *QUICK, "--config", tmp_path / "config.json", "--rate", 1e-9)
    assert done.exit_code == 0 and "it drafts nothing yet" in done.stderr, done.output
    assert "--steps" in done.stderr and "specdec generate" not in done.stderr


# ---- with a target alone


@pytest.fixture
def alone(tmp_path, monkeypatch) -> Path:
    """A target of two layers that chats, and texts that are few and short."""
    target, _, tokenizer = load_embedded_pair()
    cut(target, 2).save_pretrained(tmp_path / "target")
    tokenizer.chat_template = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "target")
    shorten(monkeypatch)
    return tmp_path / "target"


def test_a_target_alone_is_enough(alone, tmp_path):
    given = ("distill", alone, "--output", tmp_path / "out", "--minutes", 0.001, "--judged", 8, "--length", 64)
    done = invoke(*given)
    assert done.exit_code == 0, done.output
    said = " ".join(done.stderr.split())
    assert "the target writes what is learned from: 16 texts of up to 24 tokens" in said
    assert "all 16 prompts have results" in said and "steps of" in said
    assert f"--target {alone} --draft {tmp_path / 'out'}" in said
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_hidden_layers"] == 1 and config["draft_vocab_size"] < 4096
    page = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(page.split("---")[1])
    assert front["base_model"] == "target" and front["pipeline_tag"] == "text-generation"
    assert {"license", "library_name", "tags"} <= {*front} and "speculative-decoding" in front["tags"]
    assert str(tmp_path) not in page and "1 data" not in page
    rows = [json.loads(line) for line in (tmp_path / "out" / RUN / "prompts.jsonl").read_text().splitlines()]
    assert {row["temperature"] for row in rows} == {0.0, 1.0} and "messages" in rows[0]
    assert load_model(tmp_path / "out").config.draft_vocab_size == config["draft_vocab_size"]


def test_with_texts_that_are_there_it_goes_on(alone, tmp_path):
    given = ("distill", alone, "--output", tmp_path / "out", "--judged", 8, "--length", 64)
    texts = tmp_path / "out" / RUN / "texts.jsonl"
    assert "allowed" in refused(*given, "--minutes", 0)
    assert not texts.exists()
    OwnTexts(str(alone), fast_dtype(MachineOptions()), texts.parent, 0.001).write()
    whole = texts.read_bytes()
    texts.write_bytes(b"".join(whole.splitlines(keepends=True)[:9]))
    done = invoke(*given, "--steps", 1, "--every", 1, "--minutes", 0.001)
    assert done.exit_code == 0 and "9 of 16 prompts have results: going on" in done.stderr, done.output
    assert len(texts.read_text().splitlines()) == 16
    assert json.loads((tmp_path / "out" / RUN / "result.json").read_text())["steps"] == 1


def test_minutes_say_how_many_steps(models, corpus, tmp_path):
    said = []
    settings = dataclasses.replace(SHORT, steps=10_000, minutes=1e-9, every=1)
    done = run(models, corpus, tmp_path / "out", settings, watch=Watch(say=said.append))
    assert done.steps == 1 and "1 steps of" in said[-1]
    settings = dataclasses.replace(SHORT, steps=3, minutes=1000.0)
    assert run(models, corpus, tmp_path / "other", settings).steps == 3


@pytest.mark.parametrize("writes", ["checkpoint", pytest.param("log", marks=pytest.mark.nightly)])
def test_a_full_disk_is_told_in_a_line(data, tmp_path, monkeypatch, writes):
    def full(*_):
        raise WriteError("cannot write to 'x': No space left on device") if writes == "log" else OSError(28, "No space")

    place = (
        "specdec.line_file.LineFile.append" if writes == "log" else "specdec.training.trainer_checkpoint.write_whole"
    )
    monkeypatch.setattr(place, full)
    given = ("distill", "--data", data, "--output", tmp_path / "out", "--held-out", tmp_path / "held.txt")
    done = invoke(*given, *QUICK)
    assert done.exit_code == 1 and "stopped: " in done.stderr and "No space" in done.stderr
    assert "the same command goes on" in " ".join(done.stderr.split())
