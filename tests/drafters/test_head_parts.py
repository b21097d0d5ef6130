"""What heads compute by operations of our own: norms, gated layers, rotations, grouped attention, and on a GPU products
beside each other."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from specdec import SpeculativeDecoder, load_embedded_head
from specdec.drafters.heads import blocks
from specdec.drafters.heads.blocks import by_group, by_head, rotated
from specdec.models.exchanged.beside import all_beside
from specdec.models.exchanged.elementwise import NativeGated
from specdec.models.exchanged.merged import is_merged_as_before, with_merged
from specdec.models.exchanged.norms import NativeRMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

PROMPTS = ["import os", "def area(r):\n    return"]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("heads", [2, 4, 8])
@pytest.mark.parametrize("q", [1, 3, 17, 100])  # of 100, the masks would be larger than the keys
def test_attention_by_groups(heads, q):
    queries = numbers(3, q, heads, 8).transpose(1, 2)
    keys, values = (numbers(3, 2, 40, 8, seed=seed)[:, :, :31] for seed in (1, 2))
    mask = torch.rand(3, 1, q, 31, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[..., 0] = True
    torch.testing.assert_close(by_group(queries, keys, values, mask), by_head(queries, keys, values, mask))


def test_groups_copy_keys_of_long_prompts_alone(monkeypatch):
    seen = []
    own = blocks.scaled_dot_product_attention

    def attention(queries, keys, values, mask, **others):
        seen.append((tuple(queries.shape), keys.data_ptr()))
        return own(queries, keys, values, mask, **others)

    monkeypatch.setattr(blocks, "scaled_dot_product_attention", attention)
    keys = numbers(1, 2, 31, 8)
    for q, shape in ((1, (1, 2, 4, 8)), (5, (1, 2, 20, 8)), (100, (1, 8, 100, 8))):
        by_group(numbers(1, 8, q, 8), keys, keys, torch.ones(1, 1, q, 31, dtype=torch.bool))
        assert seen[-1][0] == shape and (seen[-1][1] == keys.data_ptr()) == (q < 100)


def test_rotations():
    x, angles = numbers(2, 5, 3, 16), numbers(2, 5, 8, seed=1)
    rotation = tuple(torch.cat((f(angles), f(angles)), -1) for f in (torch.cos, torch.sin))
    expected, _ = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), *rotation)
    for own in (rotated(x, rotation), torch.inference_mode()(rotated)(x, rotation)):
        torch.testing.assert_close(own, expected)


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_parts_of_heads_are_recognised(pair, kind):
    drafter = load_embedded_head(kind, pair[0])
    before = {name: type(module) for name, module in drafter.head.named_modules()}
    parts = {name: type(module) for name, module in drafter.steps().named_modules()}
    assert {name: type(module) for name, module in drafter.head.named_modules()} == before
    norms = [name for name, own in before.items() if own.__name__ == "LlamaRMSNorm"]
    assert norms and all(issubclass(parts[name], NativeRMSNorm) for name in norms)
    gated = [name for name in parts if name.endswith("mlp")]
    assert gated and all(issubclass(parts[name], NativeGated) for name in gated)


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "dflash"])
def test_merged_heads_draft_the_same(pair, kind, monkeypatch):
    """Each product once for what is called with it, and weights are moved once."""
    target, _, tokenizer = pair
    prompts = tokenizer(PROMPTS).input_ids
    given = {"max_new_tokens": 24, "eos_token_id": []}
    expected = SpeculativeDecoder(target, load_embedded_head(kind, target), 3).generate(prompts, **given)
    monkeypatch.setattr("specdec.drafters.heads.drafter.with_merged", functools.partial(with_merged, device="cpu"))
    drafter = load_embedded_head(kind, target)
    decoder, calls = SpeculativeDecoder(target, drafter, 3), SimpleNamespace(wasted=0, places=set())
    own = drafter.steps

    def steps():
        head = own()
        for beside in all_beside(head):
            calls.places.add(beside.layers[0].weight.data_ptr())

            def compute(x, beside=beside, compute=beside.compute):
                calls.wasted += sum(len(results) for _, results in beside._open.values())
                return compute(x)

            beside.compute = compute
        return head

    monkeypatch.setattr(drafter, "steps", steps)
    for _ in range(2):
        found = decoder.generate(prompts, **given)
        assert found.tokens == expected.tokens and found.stats.accepted == expected.stats.accepted
    merged = all_beside(drafter._steps)
    layers = len(getattr(drafter.head, "layers", ()))
    assert len(merged) == len(calls.places) == 2 * layers and calls.wasted == 0
    assert is_merged_as_before(drafter._steps) and not any(beside._open for beside in merged)


def test_a_head_that_is_trained_between_texts_is_seen(pair, monkeypatch):
    target, _, tokenizer = pair
    monkeypatch.setattr("specdec.drafters.heads.drafter.with_merged", functools.partial(with_merged, device="cpu"))
    drafter = load_embedded_head("eagle3", target)
    decoder, prompts = SpeculativeDecoder(target, drafter, 3), tokenizer(PROMPTS).input_ids
    given = {"max_new_tokens": 24, "eos_token_id": []}
    before = decoder.generate(prompts, **given).stats.accepted
    kept = copy.deepcopy(drafter.head.state_dict())
    with torch.no_grad():
        for parameter in drafter.head.layers.parameters():
            parameter.neg_()
    assert decoder.generate(prompts, **given).stats.accepted < before
    drafter.head.load_state_dict(kept)
    assert decoder.generate(prompts, **given).stats.accepted == before
