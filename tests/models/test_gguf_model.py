"""A GGUF file as a model: its blocks compute, to the last bit, what the numbers compute that they stand for."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from specdec import PromptLookupDrafter, SpeculativeDecoder, load_model, load_pair
from specdec.models.exchanged.packed_weights import PackedLinear, is_packed, num_parameters
from specdec.models.load.gguf import model as model_module
from specdec.models.load.gguf.convert import convert_gguf
from specdec.models.load.loading import load_tokenizer, read_config
from specdec.models.supported import cached_model
from specdec_layers import Packing
from support.gguf_files import MODELS, OF_SPM, TOKENS, TURN, write_gguf
from support.models import prompts
from torch import nn
from transformers import AutoTokenizer

PACKED = [(kind, "Q8_0") for kind in MODELS] + [("llama, wide", kind) for kind in ("Q4_0", "Q4_1", "Q4_K", "Q6_K")]
FLOATS = [("llama", "F32"), ("gemma3_text", "F16"), ("qwen3", "BF16"), ("gemma2", "F16")]


def logits_of(model, ids) -> list[torch.Tensor]:
    """Of prompts, in parts."""
    cached, found = cached_model(model, "target"), list[torch.Tensor]()
    with torch.inference_mode():
        cached.prefill(cached.new_cache(len(ids), 64), ids, lambda i, start, own, to=found: to.append(own))
    return found


@pytest.mark.parametrize(("kind", "stored"), PACKED + FLOATS)
def test_it_is_the_model_of_the_numbers_it_stands_for(kind, stored, tmp_path):
    written = write_gguf(tmp_path / "model.gguf", kind, stored=stored)
    model = load_model(tmp_path / "model.gguf")
    assert model.dtype == torch.float32 and not model.training and not any(p.requires_grad for p in model.parameters())
    ids = prompts(2, 5, 30, seed=3)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        fed = torch.arange(40)[None] + 3  # several windows long
        torch.testing.assert_close(model(fed).logits, written(fed).logits, atol=2e-3, rtol=1e-3)
        for own, its in zip(logits_of(model, ids), logits_of(written, ids), strict=True):
            if any(map(is_packed, model.modules())):
                torch.testing.assert_close(own, its, atol=2e-3, rtol=1e-3)
            else:
                assert torch.equal(own, its)
        assert num_parameters(model) == sum(p.numel() for p in written.parameters())
        wide = copy.deepcopy(model).double()  # as checks of near-ties compare
        torch.testing.assert_close(wide(fed).logits, copy.deepcopy(written).double()(fed).logits)


@pytest.mark.parametrize(("kind", "stored"), [("llama, wide", "Q4_K"), ("qwen3", "Q8_0"), ("llama", "BF16")])
def test_weights_stay_as_the_file_stores_them(kind, stored, tmp_path):
    written = write_gguf(tmp_path / "model.gguf", kind, stored=stored)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load_model(tmp_path / "model.gguf")
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    if stored == "BF16":
        assert {m.weight.dtype for m in layers} == {torch.bfloat16}
    else:
        assert all(is_packed(m) for m in layers) and {m.packing for m in layers} >= {Packing[stored]}
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == written.config.tie_word_embeddings
    mapped = model.model.layers[0].mlp.up_proj.weight.untyped_storage().nbytes()
    assert (mapped == (tmp_path / "model.gguf").stat().st_size) == (stored == "BF16")  # and not copied
    if stored != "BF16":
        with pytest.raises(ValueError, match="model: its weights are packed.* the folder that specdec convert writes"):
            model.save_pretrained(tmp_path / "folder")


@pytest.mark.parametrize("stored", ["Q5_0", "Q5_K", "IQ4_NL"])
def test_other_types_are_expanded_and_said_to_be(stored, tmp_path):
    kind = "llama, wide" if stored.endswith("K") else "llama"
    written = write_gguf(tmp_path / "model.gguf", kind, stored=stored)
    with pytest.warns(
        RuntimeWarning, match=rf"draft: weights of {stored} .*model.gguf' are expanded .* [0-9.]+ [KM]iB"
    ):
        model = load_model(tmp_path / "model.gguf", name="draft")
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    ids = prompts(1, 5, 9, seed=3)
    model.set_attn_implementation("eager")
    for own, its in zip(logits_of(model, ids), logits_of(written, ids), strict=True):
        torch.testing.assert_close(own, its, atol=2e-3, rtol=1e-3)  # the head's weights are packed, as Q8_0


def test_a_type_that_gguf_cannot_expand(tmp_path, monkeypatch):
    write_gguf(tmp_path / "model.gguf", stored="Q5_0")

    def missing(*_):
        raise NotImplementedError

    monkeypatch.setattr("gguf.dequantize", missing)
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(ValueError, match="tensor '.*' is of type Q5_0, which gguf cannot"),
    ):
        load_model(tmp_path / "model.gguf")


def test_without_native_code_all_of_it_is_float32(tmp_path, monkeypatch):
    written = write_gguf(tmp_path / "model.gguf", stored="Q8_0")
    monkeypatch.setattr(model_module, "has_native", lambda: False)
    with pytest.warns(RuntimeWarning, match="Q8_0 .* expanded to float32, which takes .*, without native code"):
        model = load_model(tmp_path / "model.gguf")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with torch.inference_mode():
        ids = torch.arange(9)[None]
        torch.testing.assert_close(model(ids).logits, written(ids).logits, atol=1e-4, rtol=1e-4)


def test_a_pair_of_files_decodes(tmp_path):
    """Speculative greedy text is plain text, whatever the draft; and that of the folder that is made of the file."""
    write_gguf(tmp_path / "target.gguf", stored="Q4_1")
    write_gguf(tmp_path / "draft.gguf", "qwen2", stored="Q8_0")
    target, draft, tokenizer = load_pair(tmp_path / "target.gguf", tmp_path / "draft.gguf")
    assert isinstance(target.model.layers[0].mlp.up_proj, PackedLinear) and len(tokenizer) == len(TOKENS)
    convert_gguf(tmp_path / "target.gguf", tmp_path / "folder")
    folder, ids = load_model(tmp_path / "folder"), prompts(3, 4, 9, seed=1)
    texts = [
        SpeculativeDecoder(model, drafter, k).generate(ids, max_new_tokens=24, eos_token_id=[]).tokens
        for model, drafter, k in (
            (target, None, 0),
            (target, draft, 3),
            (target, PromptLookupDrafter(), 5),
            (folder, None, 0),
        )
    ]
    assert texts[0] == texts[1] == texts[2] == texts[3]
    eight, draft, _ = load_pair(tmp_path / "folder", tmp_path / "target.gguf", bits=8)  # of the folder's weights alone
    assert eight.lm_head.packing == Packing.Q8_0 and draft.lm_head.packing == Packing.Q4_1


def test_configuration_and_ends(tmp_path):
    write_gguf(tmp_path / "model.gguf", stored="Q8_0")
    model, config = load_model(tmp_path / "model.gguf"), read_config("target", tmp_path / "model.gguf")
    assert model.config.to_dict() == config.to_dict() | {"architectures": model.config.architectures}
    assert model.generation_config.eos_token_id == [1, TOKENS.index(TURN)] and model.generation_config.bos_token_id == 0
    assert config.name_or_path == str(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("kind", "metadata"),
    [
        ("llama", {"tokenizer.ggml.pre": "gpt-2"}),
        ("qwen2", {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.add_bos_token": False}),
        ("llama", OF_SPM),
        ("phi3", {}),
        ("gemma2", {}),
        ("gemma3_text", {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}),
    ],
)
def test_the_tokenizer_is_transformers_own(kind, metadata, tmp_path):
    write_gguf(tmp_path / "model.gguf", kind, metadata)
    ours = load_tokenizer("target", tmp_path / "model.gguf")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in ("in 12 so", " so  in", f"in{TURN}so", "ä\n1", ""):
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours(text, add_special_tokens=False).input_ids == ids
        assert ours.decode(ids) == theirs.decode(ids)
        # An older transformers does not read whether texts begin and end with a token.
        first = [ours.bos_token_id] if metadata.get("tokenizer.ggml.add_bos_token") is not False else []
        last = [ours.eos_token_id] if metadata.get("tokenizer.ggml.add_eos_token", False) else []
        assert ours(text).input_ids == [*first, *ids, *last]
    assert (ours.bos_token, ours.eos_token) == ("<s>", "</s>") and len(ours) == len(TOKENS) == len(ours.get_vocab())
    special = ours("<s>in</s>", add_special_tokens=False).input_ids
    assert special[0] == ours.bos_token_id and special[-1] == ours.eos_token_id
    assert ours.name_or_path == str(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"dtype": "bfloat16"}, "dtype: got bfloat16 for a GGUF file"),
        ({"device": "meta"}, "device: "),
        ({"adapter": "folder"}, "adapter: got 'folder' for a GGUF file"),
        ({"bits": 8}, "bits: got 8 for a GGUF file"),
    ],
)
def test_what_is_asked_beside_it_is_refused(given, said, tmp_path):
    write_gguf(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match=said) as refused:
        load_model(tmp_path / "model.gguf", **given)
    assert "device" in given or f"specdec convert {tmp_path}/model.gguf {tmp_path}/model" in str(refused.value)


def test_no_file(tmp_path, monkeypatch):
    for load in (
        lambda p: load_model(p, name="draft"),
        lambda p: load_tokenizer("draft", p),
        lambda p: read_config("draft", p),
    ):
        with pytest.raises(OSError, match="draft: there is no file '.*model.gguf'"):
            load(tmp_path / "model.gguf")
    with (
        monkeypatch.context() as patch,
        pytest.raises(OSError, match=r"draft: .*pip install 'specdec-kernels\[gguf\]'"),
    ):
        patch.setattr("importlib.util.find_spec", lambda name: None)
        load_model(tmp_path / "model.gguf", name="draft")


def test_what_a_file_does_not_say(tmp_path):
    """llama.cpp's defaults, which are not those of every configuration; and a token that is not there is none."""
    left_out = {"attention.head_count_kv": None, "rope.freq_base": None, "tokenizer.ggml.padding_token_id": 2**32 - 1}
    with pytest.raises(ValueError, match=r"'blk.0.attn_k.weight' is \[16, 32\], the model's \[32, 32\]"):
        write_gguf(tmp_path / "model.gguf", "qwen2", left_out)
        load_model(tmp_path / "model.gguf")
    config = read_config("path", tmp_path / "model.gguf")
    assert config.num_key_value_heads == config.num_attention_heads
    assert config.pad_token_id is None and load_tokenizer("path", tmp_path / "model.gguf").pad_token is None
    write_gguf(tmp_path / "model.gguf", "gemma3_text", {"rope.freq_base": None})
    assert read_config("path", tmp_path / "model.gguf").rope_parameters["full_attention"]["rope_theta"] == 10000
