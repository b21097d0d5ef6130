"""Recorded features are the hidden states that transformers returns, of ragged batches and after a rollback."""

from __future__ import annotations

import pytest
import torch
from specdec.models.cache.features import FeatureStore, tapped
from specdec.models.cache.kv_cache import visible_slots
from specdec.models.forward.cached_model import CachedModel
from support.models import TYPES, prompts, tiny_model


@pytest.mark.parametrize("kind", TYPES)
@torch.inference_mode()
def test_features_are_the_hidden_states(kind):
    model = tiny_model(kind, layers=3)
    target, texts = CachedModel(model), prompts(3, 8, 20)
    cache = target.new_cache(3, 64)
    store = FeatureStore((0, 1, 3), lambda states: 2 * states, 3, 64, 96, target.dtype, target.device)
    cache.features = store
    known = [text[:n] for text, n in zip(texts, (3, 6, 5), strict=True)]
    target.extend(cache, [text[:2] for text in known[1:]], [0, 0], 1)  # in chunks, and not from the first row on
    target.extend(cache, known[1:], [2, 2], 1)
    target.extend(cache, known[:1], [0], 0)
    cache.lengths = torch.tensor([3, 6, 5])
    for tokens in ([[7, 7]] * 3, [text[n : n + 2] for text, n in zip(texts, (3, 6, 5), strict=True)]):
        places = cache.lengths[:, None] + torch.arange(2)
        layout = target.layout(places, places, visible_slots(9, 64))
        target(torch.tensor(tokens), cache, layout)
    for row, (text, n) in enumerate(zip(texts, (5, 8, 7), strict=True)):
        states = model(torch.tensor([text[:n]]), output_hidden_states=True).hidden_states
        expected = 2 * torch.cat([states[i][0] for i in (0, 1, 3)], -1)
        torch.testing.assert_close(store.features[row, :n], expected, rtol=1e-3, atol=1e-3)
        assert store.tokens[row, :n].tolist() == text[:n]


def test_a_model_whose_forward_was_replaced_is_refused():
    model = tiny_model("llama", seed=9, layers=3)
    layer = model.model.layers[1]
    layer.forward = layer.forward
    try:
        with pytest.raises(ValueError, match="target: got model type 'llama', whose forward was replaced"):
            tapped(model, (2,))
    finally:
        del layer.forward
