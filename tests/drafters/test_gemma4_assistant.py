"""Gemma 4's assistants in the loop, against transformers' own, which is called as its candidate generator does."""

from __future__ import annotations

import functools
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from specdec import AdaptiveDrafts, Request, Scheduler, SpeculativeDecoder, load_head
from specdec.models.cache.kv_cache import cache_argument
from support.compare_heads import compare
from support.heads import write
from support.models import COMMON, POSITIONS, WINDOW, prompts, tiny_model
from transformers.models import gemma4_assistant as gemma4

from specdec_kernels import SamplingParams

SIZES = {
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": WINDOW,
    "max_position_embeddings": POSITIONS,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    **COMMON,
    "vocab_size": 105,  # a multiple of five centroids
}
MIXED = ["sliding_attention", "full_attention"]


@functools.cache
def target(shared: int = 2):
    """With layers that share keys and values it has embeddings of its own for every layer, as published ones do."""
    torch.manual_seed(0)
    sizes = SIZES | ({"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 105} if shared else {})
    config = transformers.Gemma4TextConfig(
        num_hidden_layers=4, layer_types=2 * MIXED, hidden_size=32, num_kv_shared_layers=shared,
        initializer_range=0.3, **sizes,
    )  # fmt: skip
    return transformers.Gemma4ForCausalLM(config).eval()


def assistant(folder, centroids: int | None = None, **changed):
    """(transformers' assistant, its folder), with random weights."""
    torch.manual_seed(1)
    text = {"model_type": "gemma4_text", "num_hidden_layers": 2, "layer_types": MIXED, "hidden_size": 20, **SIZES}
    text |= {"num_kv_shared_layers": 2, "initializer_range": 0.3, **changed}
    more = {} if centroids is None else {"num_centroids": centroids, "centroid_intermediate_top_k": 2}
    config = gemma4.Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=32, use_ordered_embeddings=centroids is not None, **more
    )
    with pytest.MonkeyPatch.context() as patch:  # without it, transformers 5.23.0 cannot make any assistant
        modes = property(lambda self: ["reuse"] * self.num_hidden_layers)
        patch.setattr(transformers.Gemma4TextConfig, "kv_sharing_modes", modes, raising=False)
        model = gemma4.Gemma4AssistantForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "norm" in name or "scalar" in name:
                tensor.add_(0.3 * torch.randn(tensor.shape))
            elif name.endswith("token_ordering"):
                tensor.copy_(torch.randperm(len(tensor)))
    tensors = {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}
    return model, write(folder, config.to_dict(), tensors)


@pytest.mark.parametrize("shared, centroids", ((0, None), (2, None), (2, 5)))
def test_logits_are_transformers(tmp_path, shared, centroids):
    whole = target(shared)
    model, folder = assistant(tmp_path, centroids)
    last = {kind: i for i, kind in enumerate(whole.config.layer_types[: 4 - shared])}

    @torch.no_grad()
    def logits(hidden, text, drafts):
        cache = transformers.DynamicCache()  # without windows, so that it keeps all keys
        whole(torch.tensor([text[:-1]]), **{cache_argument(whole): cache})
        keys = {kind: (cache.layers[i].keys, cache.layers[i].values) for kind, i in last.items()}
        state, rows = hidden[-1][None, len(text) - 2 : len(text) - 1], []
        for token in [text[-1], *drafts]:
            both = torch.cat((whole.get_input_embeddings()(torch.tensor([[token]])), state), -1)
            place = torch.tensor([[len(text) - 1]])
            out = model(inputs_embeds=both, position_ids=place, shared_kv_states=keys)
            state, found = out.last_hidden_state, out.logits[0, 0]
            # With centroids, transformers gives the other tokens a number below all logits.
            rows.append(found if centroids is None else found.masked_fill(found == found.min(), -torch.inf))
        return torch.stack(rows)

    compare(folder, logits, target=whole, new=24)


def test_texts_are_the_targets(tmp_path):
    """Greedy and coupled ones, in a scheduler whose rows are used again, and the self-check runs."""
    whole, (_, folder) = target(), assistant(tmp_path)
    head = load_head(folder, whole)
    assert len(head.report.acceptance) == 4
    for params in (SamplingParams(0.0), SamplingParams(1.0)):
        settings = {"params": params, "seed": 5, "max_new_tokens": 12}

        def texts(drafter, settings=settings):
            scheduler = Scheduler(SpeculativeDecoder(whole, drafter, 3), rows=2, max_length=40, rule="coupled")
            asked = [Request(prompt, id=i, **settings) for i, prompt in enumerate(prompts(4, 1, 12))]
            found = {o.request.id: o.tokens for o in scheduler.run(asked)}
            assert scheduler.drafter_error is None
            return found

        assert texts(head) == texts(None)


def test_steps_have_fewer_rows_than_the_batch(tmp_path):
    """Of the target's keys, a draft reads those of the step's rows."""
    whole, (_, folder) = target(), assistant(tmp_path)
    head, settings = load_head(folder, whole, check=False), {"params": SamplingParams(0.0), "max_new_tokens": 12}
    scheduler = Scheduler(SpeculativeDecoder(whole, head, AdaptiveDrafts(3, costs=[1.0] * 4)), rows=3, max_length=40)
    for _ in scheduler.run([Request(p, **settings) for p in prompts(2, 5, 9)]):
        assert scheduler.batch.rows.count == 2 and scheduler.drafter_error is None


def test_what_is_refused(tmp_path):
    def refused(error, target=None, centroids=None, change=lambda config, tensors: None, **changed):
        _, folder = assistant(tmp_path / str(len(error)), centroids, **changed)
        config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        change(config, tensors)
        with pytest.raises(ValueError, match=error):
            load_head(write(folder, config, tensors), whole if target is None else target, check=False)

    whole = target()
    refused("target: got model type 'llama' for a Gemma 4 assistant", tiny_model("llama"))
    refused("backbone_hidden_size 9, allowed: 32", change=lambda c, t: c.update(backbone_hidden_size=9))
    refused("got 1 key heads of 8 numbers in layers with sliding_attention, allowed: 2 key", num_key_value_heads=1)
    name = "post_projection.weight"
    refused(rf"{name}: got shape \[31, 20\], allowed: \[32, 20\]", change=lambda c, t: t.update({name: t[name][1:]}))
    lost = "layers.1.self_attn.q_proj.weight"
    refused(f"{lost}: got no such tensor", change=lambda c, t: t.pop(f"model.{lost}"))
    order = "masked_embedding.token_ordering"
    refused(f"{order}: got 104 ids", None, 5, lambda c, t: t.update({order: t[order][1:]}))
