"""``specdec train-heads``: heads that become better, in folders that load, and what is refused before anything runs."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file
from specdec import SpeculativeDecoder, load_embedded_pair, load_head
from specdec.line_file import LineFile
from specdec.models.cache.features import BEFORE_NORM
from specdec.training.head_features import Features
from specdec.training.model_card import Card
from specdec.training.settings import DistillSettings, HeadSettings
from specdec.training.texts import Corpus
from specdec.training.train_heads import train_head
from specdec.training.trainer import CHECKPOINT, RUN, Watch, log_of
from support.commands import invoke, refused
from support.model_types import CASES
from support.short_training import shorten
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen3Config

CODE = "def read(self, size=-1):\n    '''Read and return up to size bytes.'''\n    return self.buffer[:size]\n\n\n"
SHORT = DistillSettings(
    steps=6, rate=3e-3, warm_up=2, every=3, batch_size=2, length=32, at_once=2, prompt=8, judged=2, new=8
)
KINDS = {
    "medusa": HeadSettings("medusa", SHORT, depth=3),
    "eagle3": HeadSettings("eagle3", dataclasses.replace(SHORT, vocabulary=500), 3, layer_ids=(1, 2)),
    "dflash": HeadSettings("dflash", SHORT, 4, layers=1, layer_ids=(1, 2)),
}


class Killed(Exception):
    pass


@pytest.fixture(scope="module")
def models():
    """The embedded draft as a target: trained, and fast."""
    _, draft, tokenizer = load_embedded_pair()
    return draft, tokenizer


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    texts = [CODE.replace("read", f"read{i}") for i in range(40)]
    return Corpus(texts[:32], texts[32:], duplicates=3, known=2)


def run(models, corpus, folder, settings, **more):
    done = train_head(*models, corpus, settings, folder, **more)
    assert all(p.grad is None and p.requires_grad for p in models[0].parameters())
    return done


def changed_run(kind: str, **how) -> HeadSettings:
    return dataclasses.replace(KINDS[kind], run=dataclasses.replace(KINDS[kind].run, **how))


def longer(kind: str) -> HeadSettings:
    """On greedy texts of the target."""
    how = {"text": {"target": 1.0}, "temperature": 0.0, "at_once": 32, "judged": 4, "new": 16}
    return changed_run(kind, steps=40, every=20, **how)


@pytest.mark.parametrize(
    "kind", ["eagle3", pytest.param("medusa", marks=pytest.mark.nightly)]
)  # DFlash takes more steps
def test_a_head_that_is_better_in_a_folder_that_loads(models, corpus, tmp_path, kind):
    told = []
    card = Card("a target", kind, "own lines", "CC0", "specdec train-heads")
    done = run(models, corpus, tmp_path, longer(kind), card=card, watch=Watch(lambda *how: told.append(how)))
    assert done.steps == 40 and done.best_step > 0 and done.hits
    more = {"eagle3": 0.3, "medusa": 0.1}[kind]
    assert sum(w.alpha for w in done.after) > sum(w.alpha for w in done.before) + more
    assert max(w.tau for w in done.after) > 1.3
    assert told[-1][:2] == (40, 40)
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors", "README.md", RUN}
    assert {p.name for p in (tmp_path / RUN).iterdir()} == {"log.jsonl", "result.json"}
    assert json.loads((tmp_path / RUN / "result.json").read_text()) == json.loads(json.dumps(done.to_dict()))
    log = log_of(tmp_path)
    assert [row["step"] for row in log] == [0, 20, 40] and log[-1]["loss"] < log[1]["loss"]
    assert len(log[-1]["training_hits"]) == KINDS[kind].depth and log[-1]["hits"]
    page = (tmp_path / "README.md").read_text()
    for said in (f"# A head ({kind}) for a target", "own lines", "licence: CC0", "3 duplicates", "`specdec train"):
        assert said in page
    assert f"| 0 | {done.after[0].alpha:.3f} |" in page and f"{list(done.states)}" in page
    weights = load_file(tmp_path / "model.safetensors")
    assert {t.dtype for t in weights.values() if t.is_floating_point()} == {torch.bfloat16}
    target, tokenizer = models
    drafter = load_head(tmp_path, target, check=False)
    prompts, texts = [tokenizer("def read7(self")["input_ids"], tokenizer("return")["input_ids"]], {}
    for name, who in (("plain", None), ("head", drafter)):
        texts[name] = SpeculativeDecoder(target, who, 3).generate(prompts, max_new_tokens=24)
    assert texts["plain"].tokens == texts["head"].tokens and texts["head"].stats.accepted > 0


@pytest.mark.parametrize("of", [Qwen2Config, Qwen3Config])
def test_a_head_of_mtp(corpus, tmp_path, of):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = of(vocab_size=4096, num_key_value_heads=1, eos_token_id=None, tie_word_embeddings=False, **sizes)
    target = AutoModelForCausalLM.from_config(config).eval()
    settings = HeadSettings("mtp", SHORT, 2)
    done = train_head(target, load_embedded_pair()[2], corpus, settings, tmp_path)
    assert done.states == (2,) and load_head(tmp_path, target, check=False).head.kind == "mtp"
    with pytest.raises(ValueError, match="^output: got .*, which has a model"):
        train_head(target, load_embedded_pair()[2], corpus, settings, tmp_path)


def test_a_head_of_mtp_for_a_hybrid_target(corpus, tmp_path):
    """It begins as the last layer with attention, and stands beside the target as Qwen has it."""
    target, settings = with_vocabulary("qwen3_5_text", 4096), HeadSettings("mtp", SHORT, 2)
    train_head(target, load_embedded_pair()[2], corpus, settings, tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} < names
    assert json.loads((tmp_path / "config.json").read_text())["mtp_num_hidden_layers"] == 1
    drafter = load_head(tmp_path, target, check=False)
    texts = [SpeculativeDecoder(target, who, 3).generate([[5, 6, 7]], max_new_tokens=20) for who in (None, drafter)]
    assert texts[0].tokens == texts[1].tokens and texts[1].drafter_error is None


def with_vocabulary(case: str, size: int) -> PreTrainedModel:
    model_type, sizes = CASES[case]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**{**sizes, "vocab_size": size})).eval()


@pytest.mark.parametrize(
    ("kind", "changed"),
    [("eagle3", {"text": {"data": 0.5, "target": 0.5}}), pytest.param("dflash", {}, marks=pytest.mark.nightly)],
)
def test_killed_and_resumed_the_files_are_the_same_bytes(models, corpus, tmp_path, kind, changed):
    settings = changed_run(kind, **changed)

    def kill(done, total, what):
        if done == 4 and "alpha" in what:
            raise Killed

    run(models, corpus, tmp_path / "whole", settings)
    with pytest.raises(Killed):
        run(models, corpus, tmp_path / "cut", settings, watch=Watch(kill))
    assert not (tmp_path / "cut" / "model.safetensors").exists() and (tmp_path / "cut" / RUN / CHECKPOINT).exists()
    run(models, corpus, tmp_path / "cut", settings)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_stopped_it_is_not_done_and_others_do_not_go_on(models, corpus, tmp_path):
    assert run(models, corpus, tmp_path, KINDS["medusa"], watch=Watch(stopped=lambda: True)) is None
    assert not (tmp_path / "model.safetensors").exists()
    with pytest.raises(ValueError, match="^output: got a training with other settings .depth: 3 then, 2 now"):
        run(models, corpus, tmp_path, dataclasses.replace(KINDS["medusa"], depth=2))


def test_one_training_a_folder(models, corpus, tmp_path):
    (tmp_path / RUN).mkdir()
    log = LineFile(tmp_path / RUN / "log.jsonl")
    with pytest.raises(ValueError, match="another process is writing"):
        run(models, corpus, tmp_path, KINDS["medusa"])
    log.close()


def test_cached_features_teach_the_same(models, corpus, tmp_path, monkeypatch):
    cached = dataclasses.replace(changed_run("eagle3", output_dtype="float32"), cache_features=True)
    run(models, corpus, tmp_path / "a", dataclasses.replace(cached, cache_features=False))
    monkeypatch.delattr(Features, "lesson")  # so that no step reads the texts again
    run(models, corpus, tmp_path / "b", cached)
    assert [p.name for p in (tmp_path / "b" / RUN / "features").iterdir()] == ["000000.safetensors"]
    mine, theirs = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=2e-4)


def test_the_container_of_speculators(models, corpus, tmp_path):
    done = run(models, corpus, tmp_path, dataclasses.replace(KINDS["eagle3"], format="speculators"))
    told = json.loads((tmp_path / "config.json").read_text())
    assert told["speculators_model_type"] == "eagle3" and told["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert load_file(tmp_path / "model.safetensors")["embed_tokens.weight"].dtype == torch.float32  # the target's
    assert load_head(tmp_path, models[0], check=False).head.states == done.states == (1, BEFORE_NORM)


@pytest.mark.parametrize(
    ("kind", "changed", "told"),
    [
        ("medusa", {"kind": "hydra"}, "kind: got 'hydra', allowed: medusa, eagle3, dflash, dspark, mtp"),
        ("dflash", {"kind": "dspark", "depth": 1}, "depth: got 1 for dspark, allowed: at least 2"),
        ("medusa", {"depth": 0}, "depth: got 0"),
        ("medusa", {"layers": 2}, "layers: got 2 for medusa, allowed: None, or kind dflash or dspark"),
        ("medusa", {"layer_ids": (1,)}, "layer_ids: got .1,. for medusa"),
        ("dflash", {"layers": 0}, "layers: got 0"),
        ("eagle3", {"layer_ids": (1, 9)}, "layer_ids: got .1, 9."),
        ("eagle3", {"layer_ids": None}, "layer_ids: got none"),
        ("medusa", {"format": "speculators"}, "format: got 'speculators' for medusa, allowed: 'published'"),
        ("medusa", {"format": "gguf"}, "format: got 'gguf'"),
        ("medusa", {"depth": 16}, "length: got 32, allowed: at least 33, with depth 16"),
        ("mtp", {"kind": "mtp"}, "target: got model type 'llama' with MTP layers, allowed: .*qwen2"),
    ],
)
def test_wrong_settings_are_refused(models, corpus, tmp_path, kind, changed, told):
    settings = dataclasses.replace(KINDS.get(kind, HeadSettings("mtp", SHORT)), **changed)
    with pytest.raises(ValueError, match=f"^{told}"):
        run(models, corpus, tmp_path, settings)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"cache_logits": 4}, "cache_logits: got 4 for a head"),
        ({"vocabulary": 9}, "vocabulary: got 9 for medusa, allowed: 0, or kind eagle3"),
        ({"lora": 4}, "lora: got 4 for a head"),
        ({"text": {"draft": 1.0}}, "text: got 'draft' for a head, allowed: data or target"),
        ({"loss": {"data": 1.0}}, "loss: got 'data' for a head"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing: got True"),
        ({"steps": 0}, "steps: got 0"),
        ({"length": 12}, "length: got 12, allowed: at least 16"),
        ({"length": 4000}, "length: got 4000, allowed: up to"),
        ({"length": 2000}, "data: got .* tokens, allowed: at least"),
        ({"length": 500, "batch_size": 1}, "held_out: got .* tokens, allowed: at least 500"),
        ({"output_dtype": "int8"}, "output_dtype: got 'int8'"),
    ],
)
def test_wrong_settings_of_the_run_are_refused(models, corpus, tmp_path, changed, told):
    settings = changed_run("medusa", **changed)
    with pytest.raises(ValueError, match=f"^{told}"):
        run(models, corpus, tmp_path, settings)
    with pytest.raises(ValueError, match="^cache_features: got True without text from the data"):
        run(
            models,
            corpus,
            tmp_path,
            dataclasses.replace(changed_run("medusa", text={"target": 1.0}), cache_features=True),
        )


# ---- the command


@pytest.fixture
def data(tmp_path, monkeypatch):
    shorten(monkeypatch)
    path = tmp_path / "code.jsonl"
    path.write_text("".join(json.dumps({"text": CODE.replace("read", f"read{i}")}) + "\n" for i in range(60)))
    (tmp_path / "held.txt").write_text(CODE * 3)
    return path


QUICK = ("--steps", 2, "--every", 2, "--batch-size", 1, "--length", 40, "--judged", 2, "--warm-up", 1)


def test_the_command(models, data, tmp_path):
    """Two steps make no head, and the self-check says so."""
    folder = tmp_path / "target"
    for part in models:
        part.save_pretrained(folder)
    given = ("train-heads", folder, "--data", data, "--output", tmp_path / "out", "--held-out", tmp_path / "held.txt")
    more = ("--licence", "PSF-2.0", "--source", "some code", "--json", "--vocabulary", 300, "--layer-ids", "1,2")
    done = invoke(*given, *QUICK, "--kind", "eagle3", *more)
    told = json.loads(done.stdout)
    assert told["steps"] == 2 and [w["temperature"] for w in told["after"]] == [0.0, 1.0]
    assert done.exit_code == 1 and "the self-check failed" in done.stderr and "rarely accepted" in told["trouble"]
    page = (tmp_path / "out" / "README.md").read_text()
    assert "# A head (eagle3) for target" in page and str(tmp_path) not in page
    assert "some code; licence: PSF-2.0" in page
    drafting = ("--target", folder, "--drafter", tmp_path / "out", "-k", 2)
    text = invoke("generate", "def", "--max-new-tokens", 4, "--json", *drafting)
    assert text.exit_code == 0, text.output


def test_a_target_alone_is_enough(models, tmp_path, monkeypatch):
    """EAGLE-3, from texts that the target writes, with the vocabulary that they use."""
    shorten(monkeypatch, texts=16)
    for part in models:
        part.save_pretrained(tmp_path / "target")
    (tmp_path / "held.txt").write_text(CODE * 3)
    given = ("train-heads", tmp_path / "target", "--output", tmp_path / "out", "--held-out", tmp_path / "held.txt")
    done = invoke(*given, "--minutes", 0.001, "--layer-ids", "1,2", "--length", 40, "--judged", 2)
    assert "all 16 prompts have results" in done.stderr and "it drafts nothing yet" in done.stderr, done.output
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] < 4096


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--kind", "hydra"), "--kind"),
        (("--kind", "mtp"), "model type 'llama'"),
        (("--kind", "eagle3", "--layer-ids", "2,two"), "--layer-ids"),
        (("--kind", "eagle3", "--layer-ids", "2,99"), "--layer-ids"),
        (("--kind", "eagle3", "--vocabulary", 9999), "--vocabulary"),
        (("--kind", "medusa", "--format", "speculators"), "--format"),
        (("--kind", "medusa", "--output-dtype", "int8"), "--output-dtype"),
        (("--kind", "medusa", "--cache-features", "--text", "target"), "--cache-features"),
    ],
)
def test_wrong_options_are_refused(data, tmp_path, given, told):
    held_out = ("--held-out", tmp_path / "held.txt")
    assert told in refused("train-heads", "--data", data, "--output", tmp_path / "out", *held_out, *QUICK, *given)
