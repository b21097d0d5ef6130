"""Loading: what is right loads, and what is missing or broken is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from specdec import load_embedded_pair, load_model, load_pair
from support.models import VOCABULARY, tiny_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast


def save_tokenizer(folder: Path, words: list[str]) -> None:
    model = WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token=words[0]).save_pretrained(folder)


WORDS = ["<unk>", *(f"w{i}" for i in range(1, VOCABULARY))]


@pytest.fixture
def folder(tmp_path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model", WORDS)
    return tmp_path / "model"


def test_load_model(folder):
    model = load_model(folder, dtype="float32")
    assert not model.training
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), tiny_model("llama").parameters(), strict=True))
    assert load_model(str(folder), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_missing_folder(tmp_path):
    with pytest.raises(OSError, match=r"path: there is no folder .*nowhere"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(OSError, match=r"draft: .*nowhere"):
        load_model("./nowhere", name="draft")


@pytest.mark.parametrize("name, missing", [("model.safetensors", r"\*\.safetensors"), ("config.json", r"config\.json")])
def test_missing_file(folder, name, missing):
    (folder / name).unlink()
    with pytest.raises(OSError, match=rf"path: the folder .* has no {missing}"):
        load_model(folder)


def test_pickled_weights_are_not_loaded(folder):
    (folder / "model.safetensors").unlink()
    torch.save(tiny_model("llama").state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"has no \*\.safetensors .*; pytorch_model.bin is a pickle, .* not read"):
        load_model(folder)


def test_all_that_a_folder_lacks_is_named_at_once(tmp_path):
    with pytest.raises(
        OSError, match=r"target: .* has no config.json, no \*.safetensors \(weights\), no tokenizer.json"
    ):
        load_pair(tmp_path, tmp_path)
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"target: the folder .* has no tokenizer.json \(tokenizer\)$"):
        load_pair(tmp_path, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")  # of which transformers says that sentencepiece is missing
    with pytest.raises(OSError, match=r"target: the folder .* has no tokenizer.json \(tokenizer\)$"):
        load_pair(tmp_path, tmp_path)


def test_a_folder_with_a_gguf_file_names_it(tmp_path):
    (tmp_path / "a.gguf").touch()  # as a download from the hub leaves it
    with pytest.raises(OSError, match=r"has no config.json, .* what there is, a.gguf, can be given itself: /.*gguf$"):
        load_model(tmp_path)


@pytest.mark.parametrize("keep", (0, 100, 5000))
def test_truncated_weights(folder, keep):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(OSError, match=r"path: cannot load a model from .*model"):
        load_model(folder)


def test_absent_tensors_are_not_replaced_by_random_ones(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(OSError, match=r"lack 1 tensors, the first is 'model.layers.1.mlp.up_proj.weight'"):
        load_model(folder)


def test_config_that_is_no_model(folder):
    (folder / "config.json").write_text('{"model_type": "nonesuch"}')
    with pytest.raises(ValueError, match=r"path: .* does not hold a causal language model"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(OSError, match=r"path: cannot load"):
        load_model(folder)


def test_dtype_is_checked(folder):
    with pytest.raises(ValueError, match=r"dtype: got 'int3', allowed: auto, float32"):
        load_model(folder, dtype="int3")


def test_pair_with_other_tokenizers_names_the_first_difference(folder, tmp_path):
    target, draft, tokenizer = load_pair(folder, folder)
    assert len(tokenizer) == VOCABULARY and target.config.vocab_size == draft.config.vocab_size
    other = tmp_path / "other"
    tiny_model("llama").save_pretrained(other)
    save_tokenizer(other, [*WORDS[:7], "odd", *WORDS[8:]])
    with pytest.raises(ValueError, match=r"draft: .*first that differs is id 7: 'odd' against the target's 'w7'"):
        load_pair(folder, other)


def test_import_is_light():
    code = "import sys, specdec; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_embedded_pair():
    target, draft, tokenizer = load_embedded_pair()
    assert target.dtype == draft.dtype == torch.float32
    assert target.config.vocab_size == draft.config.vocab_size >= len(tokenizer)
    assert sum(p.numel() for p in draft.parameters()) < sum(p.numel() for p in target.parameters())
