"""GGUF files as folders: the same logits, tokenizer and ends; and what the loader would ignore is refused by name."""

from __future__ import annotations

import os

import gguf
import numpy as np
import pytest
import torch
from specdec import load_model
from specdec.models import convert_gguf as module
from specdec.models.convert_gguf import convert_gguf
from specdec.models.loading import load_tokenizer, read_config
from support.gguf_files import MODELS, TOKENS, TURN, write_gguf


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


def test_packed_weights_are_exact_in_float32(tmp_path):
    model = write_gguf(tmp_path / "model.gguf", packed=True)
    assert convert_gguf(tmp_path / "model.gguf", tmp_path / "model").packed == ("Q8_0",)
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, made in load_model(tmp_path / "model").state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            continue  # rows are in another order in the file
        weight = model.state_dict()[name].numpy()
        meant = gguf.dequantize(gguf.quantize(weight, kind), kind) if weight.ndim == 2 else weight
        assert np.array_equal(made.numpy(), meant), name
    convert_gguf(tmp_path / "model.gguf", tmp_path / "half", "bfloat16")
    assert read_config("path", tmp_path / "half").dtype == torch.bfloat16


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
        (
            "llama",
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            {},
            "rope.scaling.type yarn, .*factor 4.0",
        ),
        ("gemma3_text", {"rope.scaling.factor": 8.0}, {}, "rope.scaling.factor 8.0"),
        ("llama", {}, {"rope_freqs.weight": np.ones(8, np.float32)}, "tensor rope_freqs.weight"),
        ("phi3", {}, {"rope_factors_long.weight": np.ones(4, np.float32)}, "tensor rope_factors_long.weight"),
        ("llama", {"split.count": 3}, {}, "one of 3 files"),
        ("llama", {"general.architecture": "mamba"}, {}, "architecture 'mamba'"),
        ("llama", {"expert_count": 8}, {}, "ignores llama.expert_count"),
        ("phi3", {"rope.dimension_count": 4}, {}, "phi3.rope.dimension_count is 4, transformers has 8"),
        ("llama", {"tokenizer.ggml.pre": "new"}, {}, r"tokenizer.ggml.pre new"),
        ("llama", {}, {"blk.1.attn_q.bias": np.ones(64, np.float32)}, "ignores 1 tensors, .* 'blk.1.attn_q.bias'"),
    ],
)
def test_what_the_loader_would_ignore_is_refused(kind, metadata, tensors, said, tmp_path):
    write_gguf(tmp_path / "model.gguf", kind, metadata, tensors)
    with pytest.raises(ValueError, match=f"path: got .*model.gguf.*{said}.*allowed: "):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_file_that_lacks_a_tensor_is_refused(tmp_path):
    write_gguf(tmp_path / "model.gguf", without=("blk.1.ffn_up.weight",))
    with pytest.raises(ValueError, match="lacks 1 tensors, the first is 'model.layers.1.mlp.up_proj.weight'"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "model")


def test_scaling_of_the_kind_none_is_none(tmp_path):
    write_gguf(tmp_path / "model.gguf", metadata={"rope.scaling.type": "none"})
    convert_gguf(tmp_path / "model.gguf", tmp_path / "model")


def test_no_file(tmp_path, monkeypatch):
    with pytest.raises(OSError, match="path: there is no file"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "model")
    (tmp_path / "model.gguf").write_bytes(b"GGML" + bytes(60))
    with pytest.raises(OSError, match="path: cannot read .*model.gguf' as a GGUF file"):
        convert_gguf(tmp_path / "model.gguf", tmp_path / "model")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OSError, match=r"takes gguf and accelerate.*pip install 'specdec\[gguf\]'"):
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
