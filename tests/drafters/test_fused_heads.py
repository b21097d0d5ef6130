"""Heads through the kernel that stores and attends, in Triton's interpreter: the logits of their formats, in chains and
trees, and texts and acceptance of their own attention."""

from __future__ import annotations

import copy
import functools

import pytest
import test_gemma4_assistant as gemma4
import test_head_formats as formats
import test_mtp as mtp
import torch
from specdec import SpeculativeDecoder, load_embedded_head
from specdec.drafters.heads.fused import with_fused_attention
from specdec.drafters.heads.interface import HeadInput
from specdec.models.cache import kv_layer
from specdec.models.cache.tree import Tree
from specdec.models.exchanged import deferred

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="all tests of heads have it there")
IN = "specdec.drafters.heads.drafter.with_fused_attention"


def shortly(compare, path, plain, new=14, target=None, **more):
    return compare(path, plain, 5, target, **more)


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, bool]]:
    """Of each launch, the number of tokens and whether it stores them."""
    found, real = [], kv_layer.store_and_attend

    def counted(q, k, *rest, **more):
        found.append((q.shape[2], k is not None))
        return real(q, k, *rest, **more)

    for module in (deferred, kv_layer):
        monkeypatch.setattr(module, "store_and_attend", counted)
    for module in (formats, gemma4, mtp):  # in the interpreter a launch takes long
        monkeypatch.setattr(module, "compare", functools.partial(shortly, module.compare))
    monkeypatch.setattr(IN, functools.partial(with_fused_attention, device="cpu"))
    return found


@pytest.mark.parametrize(
    "name", ["biases, another rope", "P-EAGLE of SpecForge", pytest.param("two layers", marks=pytest.mark.nightly)]
)
def test_eagle3(tmp_path, name, calls):
    formats.test_eagle3(tmp_path, name)
    assert calls and all(stores for _, stores in calls)


@pytest.mark.nightly
def test_eagle(tmp_path, calls):
    formats.test_eagle(tmp_path, True)
    assert calls and all(stores for _, stores in calls)


EVERY_DAY = ("mimo",)
LATENT = ("deepseek_v3", "deepseek_v3, two layers")  # make keys of what is stored


@pytest.mark.parametrize(
    "name", [n if n in EVERY_DAY else pytest.param(n, marks=pytest.mark.nightly) for n in mtp.CASES]
)
def test_mtp(tmp_path, name, calls):
    mtp.test_layouts(tmp_path, name)
    assert calls and {stores for _, stores in calls} == {name not in LATENT}


@pytest.mark.parametrize("centroids", [None, pytest.param(5, marks=pytest.mark.nightly)])
def test_gemma4_assistants(tmp_path, centroids, calls):
    gemma4.test_logits_are_transformers(tmp_path, 2, centroids)
    assert calls and not any(stores for _, stores in calls)  # they read the target's


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("of_tree", [False, True], ids=["chain", "tree"])
@torch.inference_mode()
def test_outputs_and_keys_are_those_of_masks(pair, dtype, of_tree, calls):
    """Of rows of several lengths, with padding, after what was read before."""
    head = copy.deepcopy(load_embedded_head("eagle3", pair[0]).head).to(dtype)
    embed = head.target_embedding
    head.target_embedding = lambda tokens: embed(tokens).to(dtype)
    features, tokens = torch.randn(2, 40, head.width).to(dtype), torch.randint(50, (2, 40))
    lengths = torch.tensor([[3], [29]])
    tree, places, valid = None, lengths + torch.arange(5), torch.ones(2, 5, dtype=torch.bool)
    slots = places
    if of_tree:
        whole = Tree.of(torch.tensor([-1, -1, 0, 1]))
        tree, (places, slots) = whole._replace(root=lengths[:, 0]), whole.places(lengths[:, 0], valid, 49)
    else:
        valid[0, :2] = False
        places, slots = places * valid, torch.where(valid, places, 49)
    found = []
    for each in (with_fused_attention(head, "cpu"), head):
        cache = each.new_cache(2, 50)
        known = torch.arange(30).expand(2, -1)
        each.read(HeadInput(features[:, :30], tokens[:, :30], each.layout(known, known, 49)), cache)
        rows = HeadInput(features[:, 30:35], tokens[:, 30:35], each.layout(places, slots, 49, tree))
        found.append((each.run(rows, cache)[valid], *(x[:, :, :49] for x in cache.storage())))
    assert [tokens for tokens, _ in calls] == [5] * head.num_layers
    allowed = {torch.float32: 2e-5, torch.float16: 4e-3}[dtype]
    for own, expected in zip(*found, strict=True):
        assert (own - expected).abs().max() <= allowed * expected.abs().max()


def text_of(pair, kind, num_drafts, **more):
    target, _, tokenizer = pair
    drafter = load_embedded_head(kind, target)
    prompts = tokenizer(["import os", "def area(r):\n    return"]).input_ids
    decoder = SpeculativeDecoder(target, drafter, num_drafts, **more)
    return decoder.generate(prompts, max_new_tokens=8, eos_token_id=[])


@pytest.mark.parametrize("more", [{}, {"tree": 5}], ids=str)
def test_texts_and_acceptance_stay(pair, more, calls, monkeypatch):
    found = text_of(pair, "eagle3", 3, **more)
    assert calls
    monkeypatch.setattr(IN, lambda head: head)
    calls.clear()
    expected = text_of(pair, "eagle3", 3, **more)
    assert not calls and found.tokens == expected.tokens and found.stats.accepted == expected.stats.accepted


def test_what_keeps_its_way(pair, calls, monkeypatch):
    """Heads whose tokens see each other, more tokens than the kernel takes, what is switched off, other devices."""
    head = load_embedded_head("eagle3", pair[0]).head
    assert with_fused_attention(head) is head and not head.fuses
    dflash = load_embedded_head("dflash", pair[0]).head
    assert with_fused_attention(dflash, "cpu") is dflash
    fast = with_fused_attention(head, "cpu")
    assert fast.fuses and not head.fuses and [*fast.parameters()][0] is [*head.parameters()][0]
    with torch.inference_mode():
        few, many = torch.arange(8)[None], torch.arange(9)[None]
        masks = (
            fast.layout(few, few, 20).mask,
            fast.layout(many, many, 20).mask,
            fast.layout(many, many, 20, fed=1).mask,
        )
    assert [mask.dtype for mask in masks] == [torch.int64, torch.bool, torch.int64]
    assert fast.layout(few, few, 20).mask.dtype == torch.bool  # with gradients
    monkeypatch.setenv("SPECDEC_NATIVE", "0")
    assert with_fused_attention(head, "cpu") is head
