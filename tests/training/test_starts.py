"""Drafts before they learn: layers of the target, or new ones."""

from __future__ import annotations

import json

import pytest
import torch
from specdec import SpeculativeDecoder, load_model
from specdec.training.starts import cut, fresh
from support.gguf_files import write_gguf
from support.models import VOCABULARY, prompts, tiny_model


def logits(model, tokens):
    with torch.inference_mode():
        return model(tokens, use_cache=False).logits


TOKENS = torch.tensor(prompts(2, 9, 9))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gpt2", "bloom"])
def test_all_layers_are_the_target(kind):
    target = tiny_model(kind, layers=4)
    torch.testing.assert_close(logits(cut(target, 4).eval(), TOKENS), logits(target, TOKENS), rtol=1e-4, atol=1e-4)
    draft = cut(target, 2).eval()
    assert draft.config.num_hidden_layers == 2
    found = SpeculativeDecoder(target, draft, 3).generate(TOKENS.tolist(), max_new_tokens=12, eos_token_id=[])
    assert (
        found.tokens
        == SpeculativeDecoder(target, None, 0).generate(TOKENS.tolist(), max_new_tokens=12, eos_token_id=[]).tokens
    )
    assert found.drafter_error is None


def test_packed_layers_are_expanded(tmp_path):
    written = write_gguf(tmp_path / "model.gguf", "qwen3", stored="Q8_0")
    packed, plain = (cut(model, 1).state_dict() for model in (load_model(tmp_path / "model.gguf"), written))
    assert packed.keys() == plain.keys() and all(torch.equal(packed[name], plain[name]) for name in plain)
    assert {tensor.dtype for tensor in packed.values()} == {torch.float32}


@pytest.mark.parametrize(("count", "kept"), [(1, [0]), (2, [0, 3]), (3, [0, 2, 3]), (4, [0, 1, 2, 3])])
def test_layers_are_evenly_spread(count, kept):
    target = tiny_model(layers=4)
    draft = cut(target, count)
    for mine, theirs in zip(draft.model.layers, (target.model.layers[i] for i in kept), strict=True):
        assert torch.equal(mine.mlp.up_proj.weight, theirs.mlp.up_proj.weight)
    draft.model.layers[0].mlp.up_proj.weight.data.zero_()
    assert target.model.layers[0].mlp.up_proj.weight.abs().sum() > 0  # its own weights


def test_kinds_of_layers_go_along():
    draft = cut(tiny_model("gemma3", layers=4), 2)
    types = tiny_model("gemma3", layers=4).config.layer_types
    assert draft.config.layer_types == [types[0], types[3]]


def test_narrower_mlps_keep_the_largest_neurons():
    target = tiny_model()
    wide = target.config.intermediate_size
    whole = cut(target, 2, wide).eval()
    torch.testing.assert_close(logits(whole, TOKENS), logits(target, TOKENS), rtol=1e-4, atol=1e-4)
    with torch.no_grad():  # neurons that do nothing
        for layer in whole.model.layers:
            layer.mlp.down_proj.weight[:, ::3] = 0
    draft = cut(whole, 2, wide - wide // 3).eval()
    assert draft.config.intermediate_size == wide - wide // 3 == draft.model.layers[0].mlp.up_proj.out_features
    torch.testing.assert_close(logits(draft, TOKENS), logits(whole, TOKENS), rtol=1e-4, atol=1e-4)


def test_what_cannot_be_cut_is_refused():
    for layers in (0, 3):
        with pytest.raises(ValueError, match=f"^layers: got {layers}, allowed: (from 1 to 2|an integer >= 1)"):
            cut(tiny_model(), layers)
    with pytest.raises(ValueError, match="^intermediate: got 49, allowed: from 1 to 48"):
        cut(tiny_model(), 1, 49)
    with pytest.raises(ValueError, match="^intermediate: got 8 for a model whose intermediate_size is None"):
        cut(tiny_model("gpt2"), 1, 8)


def test_a_new_model_has_the_seeds_weights(tmp_path):
    target = tiny_model()
    target.config.to_json_file(tmp_path / "config.json")
    one, same, other = (fresh(target, tmp_path / "config.json", seed) for seed in (0, 0, 1))
    assert torch.equal(one.lm_head.weight, same.lm_head.weight) and one.lm_head.weight.dtype == torch.float32
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    config = {**json.loads((tmp_path / "config.json").read_text()), "vocab_size": 50}
    (tmp_path / "small.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"^config: got a vocabulary of 50, allowed: {VOCABULARY}, the target's"):
        fresh(target, tmp_path / "small.json", 0)
    with pytest.raises(ValueError, match="^config: got .*none.json"):
        fresh(target, tmp_path / "none.json", 0)
