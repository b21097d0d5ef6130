"""GGUF files as folders: the same logits, tokenizer and ends; and what is not read is refused by name."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from specdec import load_model
from specdec.models.load.gguf import convert as module
from specdec.models.load.gguf.convert import convert_gguf
from specdec.models.load.loading import load_tokenizer, read_config
from support.gguf_files import MODELS, TOKENS, TURN, write_gguf
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize("kind", MODELS)
def test_the_folder_computes_what_the_file_says(kind, tmp_path):
    model = write_gguf(tmp_path / "model.gguf", kind)
    convert_gguf(tmp_path / "model.gguf", tmp_path / "model")
    made = load_model(tmp_path / "model")
    assert made.config.model_type == kind and made.dtype == torch.float32
    made.set_attn_implementation("eager")
    ids = torch.arange(40)[None] + 3  # several windows long
    with torch.inference_mode():
        torch.testing.assert_close(made(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "stored"), [("llama", "Q8_0"), ("phi3", "Q5_0"), ("llama, wide", "Q6_K")])
def test_packed_weights_are_exact_in_float32(kind, stored, tmp_path):
    model = write_gguf(tmp_path / "model.gguf", kind, stored=stored)
    assert stored in convert_gguf(tmp_path / "model.gguf", tmp_path / "model").packed
    for name, made in load_model(tmp_path / "model").state_dict().items():
        assert torch.equal(made, model.state_dict()[name]), name
    convert_gguf(tmp_path / "model.gguf", tmp_path / "half", "bfloat16")
    assert read_config("path", tmp_path / "half").dtype == torch.bfloat16
    assert torch.equal(load_model(tmp_path / "half", "bfloat16").lm_head.weight, model.lm_head.weight.bfloat16())


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_it_is_what_transformers_loads(kind, tmp_path):
    write_gguf(tmp_path / "model.gguf", kind, stored="Q8_0")
    convert_gguf(tmp_path / "model.gguf", tmp_path / "model")
    made, theirs = (
        load_model(tmp_path / "model"),
        AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf"),
    )
    assert made.state_dict().keys() == theirs.state_dict().keys()
    for name, weight in theirs.state_dict().items():
        assert torch.equal(made.state_dict()[name], weight), name
    of_both = {
        "rope_parameters",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
    }
    for entry in of_both & theirs.config.to_dict().keys():
        assert getattr(made.config, entry) == getattr(theirs.config, entry), entry


def test_tokenizer_template_and_ends(tmp_path):
    write_gguf(tmp_path / "model.gguf")
    convert_gguf(tmp_path / "model.gguf", tmp_path / "model")
    tokenizer, config = load_tokenizer("target", tmp_path / "model"), load_model(tmp_path / "model").generation_config
    assert len(tokenizer) == len(TOKENS)
    assert tokenizer.convert_ids_to_tokens(tokenizer("in 12").input_ids) == ["<s>", "in", "Ġ", "1", "2"]
    said = tokenizer.apply_chat_template([{"role": "user", "content": "so"}], tokenize=False)
    assert said == f"so{TURN}"
    # A file says which token ends a text; that a turn ends is to be seen in the template alone.
    assert config.eos_token_id == [1, TOKENS.index(TURN)] and config.bos_token_id == 0
    write_gguf(tmp_path / "base.gguf", metadata={"tokenizer.chat_template": None})
    convert_gguf(tmp_path / "base.gguf", tmp_path / "base")
    assert load_model(tmp_path / "base").generation_config.eos_token_id == 1


@pytest.mark.parametrize(
    ("kind", "metadata", "tensors", "said"),
    [
        ("llama", {"split.count": 3}, {}, "one of 3 files"),
        ("llama", {"general.architecture": "mamba"}, {}, "architecture 'mamba'"),
        ("llama", {"expert_count": 8}, {}, "says llama.expert_count, which is not read"),
        ("llama", {"attention.sliding_window": 8}, {}, "llama.attention.sliding_window, which is not read"),
        ("gemma2", {"attention.value_length": 8}, {}, "gemma2.attention.value_length is 8, transformers has 16"),
        ("llama", {"rope.dimension_count": 8, "attention.key_length": 16}, {}, "rope.dimension_count is 8, .* has 16"),
        ("llama", {"tokenizer.ggml.pre": "new"}, {}, r"tokenizer.ggml.pre new"),
        (
            "llama",
            {},
            {"blk.1.attn_q.bias": np.ones(64, np.float32)},
            "1 tensors that its model has not, .* 'blk.1.attn_q.bias'",
        ),
        ("llama", {}, {"rope_freqs.weight": np.full(8, 3, np.float32)}, "other factors"),
        ("llama", {"feed_forward_length": 32}, {}, r"'blk.0.ffn_gate.weight' is \[64, 32\], the model's \[32, 32\]"),
        ("llama", {"tokenizer.ggml.tokens": None}, {}, "has no vocabulary"),
        ("phi3", {"final_logit_softcapping": 30.0}, {}, "says phi3.final_logit_softcapping, which is not read"),
        ("llama", {"attention.head_count": None}, {}, "it does not say llama.attention.head_count, which is needed"),
        ("llama", {"attention.head_count": [4, 4]}, {}, r"llama.attention.head_count is \[4, 4\], and has to be"),
    ],
)
def test_what_is_not_read_is_refused(kind, metadata, tensors, said, tmp_path):
    write_gguf(tmp_path / "model.gguf", kind, metadata, tensors)
    with pytest.raises(ValueError, match=f"path: got .*model.gguf.*{said}.*allowed: "):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_file_that_lacks_a_tensor_is_refused(tmp_path):
    write_gguf(tmp_path / "model.gguf", without=("blk.1.ffn_up.weight",))
    with pytest.raises(ValueError, match="lacks 1 tensors, the first is that of 'model.layers.1.mlp.up_proj.weight'"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "model")


def test_no_file(tmp_path, monkeypatch):
    with pytest.raises(OSError, match="path: there is no file"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "model")
    (tmp_path / "model.gguf").write_bytes(b"GGML" + bytes(60))
    with pytest.raises(OSError, match="path: cannot read .*model.gguf' as a GGUF file"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "model")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OSError, match=r"path: a GGUF file takes gguf.*pip install 'specdec-kernels\[gguf\]'"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "model")


def test_a_folder_is_replaced_only_if_asked_and_whole(tmp_path, monkeypatch):
    write_gguf(tmp_path / "model.gguf")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "letters.txt").write_text("mine")
    for overwrite, said in ((False, "which is not empty"), (True, "something else than a model")):
        with pytest.raises(ValueError, match=f"folder: got .*{said}"):
            convert_gguf(tmp_path / "model.gguf", folder, overwrite=overwrite)
    (folder / "config.json").write_text("{}")

    def full(*_, **__):
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="folder: cannot write .*No space left"):
        patch.setattr(module.PreTrainedModel, "save_pretrained", full)
        convert_gguf(tmp_path / "model.gguf", folder, overwrite=True)
    assert (folder / "letters.txt").exists() and {p.name for p in tmp_path.iterdir()} == {"model", "model.gguf"}
    (tmp_path / ".model.part").mkdir()  # of a run that was killed
    convert_gguf(tmp_path / "model.gguf", folder, overwrite=True)
    assert {p.name for p in tmp_path.iterdir()} == {"model", "model.gguf"} and not (folder / "letters.txt").exists()
    assert (folder / "model.safetensors").exists()
