"""Which layers are branches, and what is done with those that are unlike transformers'."""

from __future__ import annotations

import pytest
import torch
from specdec.models.exchanged.branches import branches_of
from support.native_layers import noted_sums, on_a_cpu
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm


@pytest.fixture
def calls(monkeypatch):
    return noted_sums(monkeypatch)


class Layer(nn.Module):
    """A layer that is recognised, but for what subclasses change."""

    kept = 1.0

    def __init__(self):
        super().__init__()
        self.first, self.second = LlamaRMSNorm(8, 1e-5), LlamaRMSNorm(8, 1e-5)
        self.mix, self.feed = nn.Linear(8, 8), nn.Linear(8, 8)

    def between(self, x):
        return x

    def forward(self, hidden_states, mask=None):
        x = self.between(hidden_states + self.mix(self.first(hidden_states)))
        return x + self.feed(self.second(x))


class Clamping(Layer):
    def between(self, x):
        return x.clamp(-6e4, 6e4) if x.dtype == torch.float16 else x


class Dropping(Layer):
    def between(self, x):
        return nn.functional.dropout(x, 0.5, self.training)


class Wide(Layer):
    def between(self, x):
        return x.float()


class InPlace(Layer):
    def forward(self, hidden_states, mask=None):
        hidden_states += self.mix(self.first(hidden_states))
        return hidden_states + self.feed(self.second(hidden_states))


class ByArgument(Layer):
    def forward(self, hidden_states, mask=None):
        return super().forward(hidden_states) if mask is None else hidden_states


class Parallel(Layer):
    def forward(self, hidden_states, mask=None):
        return hidden_states + self.mix(self.first(hidden_states)) + self.feed(self.second(hidden_states))


class Again(Layer):
    def forward(self, hidden_states, mask=None):
        return super().forward(super().forward(hidden_states))


class Scaled(Layer):
    """As Gemma 4's, by 1 while it is tried."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, hidden_states, mask=None):
        return self.scale * super().forward(hidden_states)


class Nothing(Layer):
    def forward(self, hidden_states, mask=None):
        return hidden_states


class Otherwise(Layer):
    def forward(self, x, mask=None):
        return super().forward(x)


@pytest.mark.parametrize("kind", [Clamping, Wide, InPlace, ByArgument, Parallel, Scaled, Nothing, Otherwise])
def test_other_layers_stay(kind):
    assert branches_of(Layer(), ["first", "second"]) is not None
    assert branches_of(kind(), ["first", "second"]) is None


@torch.inference_mode()
def test_a_layer_may_have_more_branches_or_be_unlike_transformers(calls):
    torch.manual_seed(0)
    model = nn.Module()
    model.layers, model.norm = nn.ModuleList([Layer(), Again(), Layer()]), LlamaRMSNorm(8, 1e-5)
    model.eval()
    fast, x = on_a_cpu(model), torch.randn(1, 3, 8)
    assert [len(layer.branches.parts) for layer in fast.layers] == [2, 4, 2]
    expected = found = x
    for own, its in zip(model.layers, fast.layers, strict=True):
        expected, found = own(expected), its(found)
    torch.testing.assert_close(fast.norm(found), model.norm(expected))
    assert len(calls) == 8
    with pytest.raises(TypeError, match="unknown"):
        fast.layers[0](x, unknown=3)


@torch.inference_mode()
def test_what_layers_do_while_they_are_trained_is_their_own(calls):
    torch.manual_seed(0)
    layer, x = Dropping().eval(), torch.randn(1, 64, 8)
    fast = on_a_cpu(nn.ModuleList([layer]))[0]
    torch.testing.assert_close(fast(x), layer(x))
    assert len(calls) == 1
    results = []
    for own in (fast.train(), layer.train()):
        torch.manual_seed(0)
        results.append(own(x))
    torch.testing.assert_close(*results)
    assert len(calls) == 1
