"""A draft in 8 bits: texts keep the target's distribution, whoever asks for it, and what cannot have them says so."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from specdec import SpeculativeDecoder, load_embedded_pair, load_pair
from specdec.models.exchanged.packed_weights import PackedLinear, is_packed
from specdec.models.load import loading
from support.gguf_files import write_gguf
from support.model_types import model_of

from specdec_kernels import SamplingParams

PROMPT = [5, 9, 200, 31]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of a target and a draft, as they are downloaded."""
    folder = tmp_path_factory.mktemp("pair")
    target, draft, tokenizer = load_embedded_pair()
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def test_the_draft_alone_is_packed(folders):
    for target, draft, _ in (
        load_pair(folders / "target", folders / "draft", draft_bits=8),
        load_embedded_pair(draft_bits=8),
    ):
        assert isinstance(draft.lm_head, PackedLinear) and not any(is_packed(m) for m in target.modules())
    both = load_pair(folders / "target", folders / "draft", bits=8)[:2]
    assert all(isinstance(model.lm_head, PackedLinear) for model in both)


def test_texts_are_the_targets(folders):
    """Greedy ones to the last token; with the rule `coupled` sampled ones, too, since they do not depend on drafts."""
    target, draft, _ = load_pair(folders / "target", folders / "draft", draft_bits=8)
    whole = load_pair(folders / "target", folders / "draft")[1]
    with torch.inference_mode():
        assert not torch.equal(draft(torch.tensor([PROMPT])).logits, whole(torch.tensor([PROMPT])).logits)
    sampled = {"params": SamplingParams(1.0), "seed": 3}
    for settings, rule in (({}, "token"), ({}, "block"), (sampled, "coupled")):
        settings = {"max_new_tokens": 40, "rule": rule, **settings}
        plain = SpeculativeDecoder(target, None, 0).generate([PROMPT], **settings)
        drafted = SpeculativeDecoder(target, draft, 4).generate([PROMPT], **settings)
        assert drafted.tokens == plain.tokens and drafted.stats.accepted > 0


def test_what_is_refused(folders, tmp_path):
    with pytest.raises(ValueError, match="draft_bits: got 4, allowed: 8 or None"):
        load_pair(folders / "target", folders / "draft", draft_bits=4)
    for dtype in ("bfloat16", torch.float64):
        with pytest.raises(
            ValueError, match="dtype: got (bfloat16|float64) with bits on a CPU, allowed: auto or float32"
        ):
            load_pair(folders / "target", folders / "draft", dtype, draft_bits=8)
    file = tmp_path / "draft.gguf"
    write_gguf(file)
    with pytest.raises(ValueError, match="draft_bits: got 8 for a GGUF file, whose weights stay as they are"):
        loading.load_draft(file, "auto", "cpu", None, 8)
    assert not is_packed(loading.load_draft(file, "auto", "cpu", 8, None).lm_head)  # a target's bits are not its own
    model_of("llama").save_pretrained(tmp_path / "quantised")
    config = json.loads((tmp_path / "quantised" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (tmp_path / "quantised" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="draft_bits: got 8 for weights that are quantised already, allowed: None"):
        loading.load_draft(tmp_path / "quantised", "auto", "cpu", None, 8)
    with pytest.raises(OSError, match="draft: "):
        loading.load_draft(tmp_path / "absent", "auto", "cpu", None, 8)
    narrow = copy.deepcopy(model_of("llama").config)
    narrow.hidden_size = narrow.intermediate_size = 24
    narrow.num_attention_heads, narrow.num_key_value_heads, narrow.head_dim = 3, 1, 8
    type(model_of("llama"))(narrow).save_pretrained(tmp_path / "narrow")
    with pytest.raises(ValueError, match="draft_bits: got 8 for weights that are in no rows of whole blocks"):
        loading.load_draft(tmp_path / "narrow", "auto", "cpu", None, 8)


def test_bits_of_the_target_are_the_drafts_on_a_cpu_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(loading, "load_model", lambda *_, bits, **__: asked.append(bits))
    for device, bits, draft_bits in (("cpu", 8, None), ("cuda:0", 8, None), ("cpu", None, None), ("cuda", None, 8)):
        loading.load_draft("x", "auto", device, bits, draft_bits)
    loading.load_draft("x.gguf", "auto", "cpu", 8, None)
    assert asked == [8, None, None, 8, None]
