"""Adapters of peft, where it is installed: those that are active act; those outside the modules are refused."""

from __future__ import annotations

import copy
import importlib.util
import json
import shutil

import pytest
import torch
from huggingface_hub import constants
from specdec import SpeculativeDecoder, load_model
from specdec.jobs.manifest import read_vocab_size
from support.models import generate, prompts, tunable_pair
from transformers import AutoModelForCausalLM

from specdec_kernels import SamplingParams

NEW = 20


def lora(dropout: float = 0.0):
    return pytest.importorskip("peft").LoraConfig(target_modules=["q_proj", "up_proj"], r=4, lora_dropout=dropout)


def adapted(config=None, seed: int = 1):
    """The target of a pair with an adapter that says something."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(copy.deepcopy(tunable_pair(0.3)[0]), config or lora())
    return stirred(model, seed).eval()


def stirred(model, seed: int):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in ("lora_", "ia3_", "hada_", "vera_lambda")):
                weight.normal_(std=0.3, generator=generator)
    return model


def greedy(model, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()


OTHERS = [pytest.param(kind, marks=pytest.mark.nightly) for kind in ("dora", "ia3", "loha", "vera")]


@pytest.mark.parametrize("kind", ["lora", *OTHERS])
def test_adapters_inside_the_modules_act(kind):
    peft = pytest.importorskip("peft")
    target, draft = tunable_pair(0.3)
    config = {
        "lora": lora,
        "dora": lambda: peft.LoraConfig(target_modules=["q_proj"], r=4, use_dora=True),
        "ia3": lambda: peft.IA3Config(target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "loha": lambda: peft.LoHaConfig(target_modules=["q_proj"], r=4),
        "vera": lambda: peft.VeraConfig(target_modules=["q_proj"], r=4),
    }[kind]()
    model, ragged = adapted(config), prompts(3, 2, 20)
    result = generate(model, draft, ragged, max_new_tokens=NEW)
    assert result.tokens == [greedy(model, p) for p in ragged] != [greedy(target, p) for p in ragged]
    assert result.stats.drafted > result.stats.accepted > 0
    sampling = {"params": SamplingParams(0.8), "rule": "coupled", "max_new_tokens": NEW}
    assert generate(model, model, ragged, **sampling).tokens == generate(model, None, ragged, 0, **sampling).tokens


def test_adapters_may_be_changed_between_calls():
    target, draft = tunable_pair(0.3)
    model, ragged = adapted(), prompts(2, 2, 20)
    model.add_adapter("other", lora())
    stirred(model, 2).eval()
    decoder, texts = SpeculativeDecoder(model, draft), []
    for name in ("default", "other", "default"):
        model.set_adapter(name)
        texts.append(decoder.generate(ragged, max_new_tokens=NEW, eos_token_id=[]).tokens)
        assert texts[-1] == [greedy(model, p) for p in ragged]
    with model.disable_adapter():
        plain = decoder.generate(ragged, max_new_tokens=NEW, eos_token_id=[]).tokens
    assert plain == [greedy(target, p) for p in ragged]
    assert texts[0] == texts[2] != texts[1] and plain not in texts


def test_an_adapted_draft():
    target, _ = tunable_pair(0.3)
    ragged = prompts(3, 2, 20)
    result = generate(target, adapted(), ragged, max_new_tokens=NEW, d2t=range(101))
    assert result.tokens == [greedy(target, p) for p in ragged]
    assert result.stats.drafted > result.stats.accepted > 0


def test_adapters_of_transformers():
    model = copy.deepcopy(tunable_pair(0.3)[0])
    model.add_adapter(lora(dropout=0.5))
    with pytest.raises(ValueError, match="target: Linear is in training mode"):
        SpeculativeDecoder(model, None, 0)
    stirred(model, 1).eval()
    ragged = prompts(2, 2, 20)
    assert generate(model, tunable_pair(0.3)[1], ragged, max_new_tokens=NEW).tokens == [
        greedy(model, p) for p in ragged
    ]
    assert generate(adapted(), None, ragged, 0, max_new_tokens=NEW).tokens == [greedy(model, p) for p in ragged]


def test_what_acts_outside_the_modules_is_refused():
    peft = pytest.importorskip("peft")
    task = {"task_type": "CAUSAL_LM"}
    for config, given in (
        (peft.PromptTuningConfig(num_virtual_tokens=3, **task), "PROMPT_TUNING"),
        (peft.PrefixTuningConfig(num_virtual_tokens=3, **task), "PREFIX_TUNING"),
        (peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1, **task), "ADAPTION_PROMPT"),
        (peft.LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[3, 4], **task), "activated LoRA"),
    ):
        with pytest.raises(ValueError, match=f"target: got a {given} adapter, allowed: adapters that act inside"):
            SpeculativeDecoder(adapted(config), None, 0)


def test_wrappers_that_do_more_than_their_modules_are_found(monkeypatch):
    model = adapted()
    forward = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, ids: forward(self, ids.flip(0, 1)))
    with pytest.raises(ValueError, match="draft: model type 'llama' .* differ from a full forward"):
        SpeculativeDecoder(tunable_pair(0.3)[0], model)


@pytest.fixture
def folders(tmp_path):
    """A base model, an adapter that names it, and the model with this adapter."""
    peft = pytest.importorskip("peft")
    tunable_pair(0.3)[0].save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(load_model(tmp_path / "base"), lora())
    stirred(model, 1).eval().save_pretrained(tmp_path / "adapter")
    return tmp_path / "base", tmp_path / "adapter", model


def test_folders_of_adapters(folders):
    base, adapter, model = folders
    ragged, (_, draft) = prompts(2, 2, 20), tunable_pair(0.3)
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    config["base_model_name_or_path"] = "somebody/elses-model"  # is not looked at
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    loaded = load_model(base, adapter=adapter)
    assert not loaded.training
    texts = generate(loaded, draft, ragged, max_new_tokens=NEW).tokens
    assert texts == [greedy(model, p) for p in ragged]
    from safetensors.torch import load_file, save_file

    file = adapter / "adapter_model.safetensors"
    weights = load_file(file)
    del weights[min(weights)]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(OSError, match="adapter: the weights in .* lack 1 tensors"):
        load_model(base, adapter=adapter)
    file.write_bytes(b"cut off")
    with pytest.raises(OSError, match="adapter: cannot load "):
        load_model(base, adapter=adapter)


def test_an_adapter_in_the_place_of_a_model_is_refused(folders, monkeypatch):
    """It names a model that the caller did not name."""
    base, adapter, _ = folders
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    told = f"target: got an adapter, '{adapter}', allowed: the model that it belongs to (its adapter_config.json says "
    told += f"'{base}'), with this as the adapter"
    for load in (lambda: load_model(adapter, name="target"), lambda: read_vocab_size("target", str(adapter))):
        with pytest.raises((ValueError, OSError), match="adapter_config.json says") as refused:
            load()
        assert told in str(refused.value)
    # The same on the hub, where transformers looks for it.
    monkeypatch.setattr("specdec.models.load.location._answered", {constants.ENDPOINT})
    found = adapter / "adapter_config.json"
    monkeypatch.setattr("specdec.models.load.adapters.find_adapter_config_file", lambda _: found)
    with pytest.raises(ValueError, match="path: got an adapter, 'somebody/adapter', allowed: "):
        load_model("somebody/adapter")


def test_pickled_adapters_are_never_read(folders, monkeypatch):
    """transformers reads adapter_model.bin where there is no adapter_model.safetensors, whatever else is."""
    base, adapter, model = folders
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("unpickled"))
    file = adapter / "adapter_model.safetensors"
    torch.save({}, adapter / "adapter_model.bin")
    load_model(base, adapter=adapter)
    file.rename(adapter / "other.safetensors")
    with pytest.raises(OSError, match=r"adapter: the folder .* has no adapter_model\.safetensors"):
        load_model(base, adapter=adapter)
    # A folder with a model and an adapter is named as a whole; the same holds for its adapter.
    for name in ("adapter_config.json", "adapter_model.bin"):
        shutil.copy(adapter / name, base)
    with pytest.raises(OSError, match=r"path: the folder .* has no adapter_model\.safetensors"):
        load_model(base)
    shutil.copy(adapter / "other.safetensors", base / "adapter_model.safetensors")
    prompt = [5, 6, 7]
    assert greedy(load_model(base), prompt) == greedy(model, prompt)
    with pytest.raises(OSError, match="adapter: there is no folder 'somebody/adapter'"):
        load_model(base, adapter="somebody/adapter")


def test_folders_of_adapters_without_peft(folders, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OSError, match="adapter: cannot load .*: it is an adapter, which takes peft"):
        load_model(folders[0], adapter=folders[1])
