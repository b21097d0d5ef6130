"""Which norms, rotary embeddings and gated layers of a model become our own. A release of transformers that loses one
fails here."""

from __future__ import annotations

import copy

import pytest
import torch
from specdec import SpeculativeDecoder
from specdec.models.exchanged.elementwise import NativeAngles, NativeGated, with_elementwise
from specdec.models.exchanged.linear import with_native_linear
from specdec.models.exchanged.norms import NativeRMSNorm
from specdec.models.forward.cached_model import CachedModel
from support.captured import on_gpu
from support.feeding import feed
from support.model_types import CASES, model_of
from support.models import prompts, tiny_model
from torch import nn

# What has other norms than RMSNorm, and other rotary embeddings, or none.
OTHER_NORMS = {
    "bloom", "cohere", "cohere2", "falcon", "falcon, ALiBi", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "olmo",
    "opt", "phi", "stablelm", "starcoder2",
}  # fmt: skip
OTHER_ROTATION = {
    "bloom", "cohere", "cohere2", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_oss", "gptj", "jamba", "kimi_linear",
    "mamba2", "mpt", "nemotron_h", "opt",
}  # fmt: skip
OTHER_ANGLES = {
    "bloom", "cohere", "cohere2", "gpt2", "gpt_bigcode", "gpt_oss", "gptj", "granitemoehybrid", "jamba", "kimi_linear",
    "mamba2", "mpt", "nemotron_h", "opt", "zamba2",
}  # fmt: skip
GATED = {
    **dict.fromkeys((
        "bamba", "cohere", "cohere2", "glm4_moe", "granite", "jamba", "kimi_linear", "llama",
        "llama, tied", "ministral", "mistral", "olmo", "olmo2", "olmo3", "olmo_hybrid", "qwen2", "qwen2_moe", "qwen3",
        "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "smollm3", "stablelm",
    ), "silu"),
    **dict.fromkeys(("gemma, one key head", "gemma2", "gemma3", "gemma3_text"), "gelu_tanh"),
}  # fmt: skip


def changed(model: nn.Module, fast: nn.Module) -> set[str]:
    """What was exchanged: norms, and modules that rotate."""
    kinds = set()
    for (name, own), (its, other) in zip(model.named_modules(), fast.named_modules(), strict=True):
        assert name == its
        if isinstance(other, NativeRMSNorm):
            kinds.add("norm")
        elif isinstance(other, NativeAngles):
            kinds.add("angles")
        elif isinstance(other, NativeGated):
            kinds.add(other.activation)
        elif type(other) is not type(own):
            kinds.add("rotation")
    return kinds


@pytest.mark.parametrize("case", CASES)
def test_what_is_recognised(case):
    model = model_of(case)
    lacks = {"norm": OTHER_NORMS, "rotation": OTHER_ROTATION, "angles": OTHER_ANGLES}
    if case.startswith("qwen3_5"):
        try:
            model.model.rotary_emb(torch.zeros(1), torch.zeros(1, 2, dtype=torch.int64))
        except IndexError:  # an older transformers, whose angles take three positions of a token
            lacks["angles"] = OTHER_ANGLES | {case}
    before = {name: type(m) for name, m in model.named_modules()}
    found = changed(model, with_elementwise(model))
    assert found == {kind for kind, others in lacks.items() if case not in others} | {GATED.get(case)} - {None}
    assert {name: type(m) for name, m in model.named_modules()} == before


def test_one_name_switches_all_of_it_off(monkeypatch):
    model, text = tiny_model("llama"), prompts(1, 9, 9)
    found = SpeculativeDecoder(model, None, 0).generate(text, max_new_tokens=12).tokens
    assert CachedModel(model).attention.name == "native"
    monkeypatch.setenv("SPECDEC_NATIVE", "0")
    off = CachedModel(model)
    assert off.attention.name == "model" and all(
        type(m).__module__.startswith(("torch", "transformers")) for m in off.forwards.steps.modules()
    )
    assert SpeculativeDecoder(model, None, 0).generate(text, max_new_tokens=12).tokens == found
    monkeypatch.setenv("SPECDEC_NATIVE", "off")
    with pytest.raises(ValueError, match="^SPECDEC_NATIVE: got 'off', allowed: '0' or '1'"):
        SpeculativeDecoder(model, None, 0)


@pytest.mark.parametrize("case", ["llama", "gemma3_text", "qwen3", "olmo2", "gpt_neox"])
def test_they_compute_the_same(case, monkeypatch):
    model, text = model_of(case), prompts(1, 9, 9)
    with torch.inference_mode():
        got = feed(cached := CachedModel(model), cached.new_cache(1, 20), text)
        monkeypatch.setattr("specdec.models.forward.forwards.with_elementwise", lambda model, **more: model)
        torch.testing.assert_close(
            got, feed(cached := CachedModel(model), cached.new_cache(1, 20), text), atol=2e-5, rtol=1e-4
        )


@on_gpu
@pytest.mark.parametrize("case", ["llama", "gemma2", "gemma3_text", "qwen3", "olmo2", "gpt_neox"])
def test_on_a_gpu_they_compute_the_same(case):
    model, text = copy.deepcopy(model_of(case)).to("cuda", torch.bfloat16), torch.tensor(prompts(1, 9, 9)).cuda()
    fast = with_elementwise(model)
    found = changed(model, fast)
    assert "angles" not in found and found >= ({"rotation"} if case == "gpt_neox" else {"rotation", "norm"})
    with torch.inference_mode():
        expected, own = model(text).logits.float(), fast(text).logits.float()
    # Rarely is a number rounded to another neighbour.
    assert (own - expected).abs().max() <= 0.02 * expected.abs().max()


class Centred(nn.Module):
    """Not RMSNorm, but in all that can be seen from outside."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def test_others_stay():
    model = nn.Sequential(Centred(), nn.LayerNorm(8), nn.RMSNorm(8), nn.Linear(8, 8))
    assert with_elementwise(model) is model
    model = copy.deepcopy(tiny_model()).bfloat16()
    assert changed(model, with_elementwise(model)) <= {"rotation", "angles", "silu"}


def test_where_norms_round_numbers_of_half_precision():
    """Llama's before the weights, Gemma's and OLMo 2's after them."""
    for case, first, offset in (("llama", True, 0.0), ("gemma3_text", False, 1.0), ("olmo2", False, 0.0)):
        norm = with_elementwise(model_of(case)).model.norm
        assert (norm.round_first, norm.offset) == (first, offset), case


def test_gradients_and_other_dtypes_are_the_modules():
    model = tiny_model()
    norm = with_elementwise(model).model.norm
    x = torch.randn(2, 3, model.config.hidden_size, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad is not None
    with torch.inference_mode():
        assert norm(x.detach().bfloat16()).dtype == model.model.norm(x.detach().bfloat16()).dtype


def test_without_native_code_nothing_changes(monkeypatch):
    monkeypatch.setattr("specdec.models.exchanged.elementwise.has_native", lambda: False)
    model = tiny_model()
    assert with_elementwise(model) is model


@pytest.mark.parametrize("case", ["llama", "gemma3_text", "glm4"])
def test_on_another_device_nothing_changes(case):
    """The meta device stands for a GPU: what is ours raises there as well."""
    model = copy.deepcopy(model_of(case)).to("meta")
    assert with_elementwise(with_native_linear(model)) is model


def test_parts_that_were_moved_compute_as_the_model_does():
    """As of a model that stores bfloat16 and is moved to a GPU after it was loaded."""
    model = copy.deepcopy(tiny_model())
    moved = with_elementwise(with_native_linear(model)).to("meta")
    assert {"norm", "angles", "silu"} <= changed(model, moved)
    with torch.inference_mode():
        logits = moved(torch.zeros(2, 3, dtype=torch.int64, device="meta")).logits
    assert logits.shape == (2, 3, model.config.vocab_size)


@pytest.mark.parametrize("case", ["llama", "gemma2", "granite", "qwen3", "gpt2", "cohere", "qwen3_5_text"])
def test_numbers_that_are_changed_later_are_seen(case):
    """In modules that were exchanged or copied, and in steps that were recorded: with the next text, as a decoder would
    have it that is made then. Buffers are changed in place."""
    model = model_of(case)
    decoder = SpeculativeDecoder(model, num_drafts=0)

    def logits(of: SpeculativeDecoder) -> torch.Tensor:
        texts = prompts(2, 5, 7)
        found = of.generate(texts, max_new_tokens=6, output_logits=True, eos_token_id=[]).logits
        return torch.cat([own[0] for own in found] + [own[1] for own in found])

    for _ in range(4):
        before = logits(decoder)
    named = [
        (module, name) for module in model.modules() for name, value in vars(module).items() if type(value) is float
    ]
    kinds = {(type(module).__name__, name) for module, name in named}
    different = 0
    for kind in sorted(kinds):
        changed = [(module, name) for module, name in named if (type(module).__name__, name) == kind]
        for module, name in changed:
            setattr(module, name, 3 * getattr(module, name) + 0.1)
        found, expected = logits(decoder), logits(SpeculativeDecoder(model, num_drafts=0))
        torch.testing.assert_close(found, expected, msg=f"{kind}")
        different += not torch.allclose(found, before, atol=1e-4)
        for module, name in changed:
            setattr(module, name, (getattr(module, name) - 0.1) / 3)
    assert different >= 1
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and "original" not in name:
            buffer.mul_(1.5)
    torch.testing.assert_close(logits(decoder), logits(SpeculativeDecoder(model, num_drafts=0)))


def test_names_in_a_configuration_that_are_changed_later_are_seen():
    """Gemma 2 reads the cap of its logits in each forward."""
    model = model_of("gemma2")
    decoder, own = SpeculativeDecoder(model, num_drafts=0), {"max_new_tokens": 4, "output_logits": True}
    for _ in range(3):
        before = decoder.generate([[5, 6]], **own).logits[0]
    model.config.final_logit_softcapping = before.abs().max().item() / 2
    found = decoder.generate([[5, 6]], **own).logits[0][0]
    assert found.abs().max() < before.abs().max() / 2
    torch.testing.assert_close(found, SpeculativeDecoder(model, num_drafts=0).generate([[5, 6]], **own).logits[0][0])
