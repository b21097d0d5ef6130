"""Heads that the library speculators writes, in our loop, against its own forwards."""

from __future__ import annotations

import copy
import functools
from typing import NamedTuple

import pytest
import torch
from specdec import SpeculativeDecoder, load_head
from specdec.drafters.heads.drafter import HeadDraftSession
from support.compare_heads import compare
from support.model_types import model_of
from support.models import DECODER, VOCABULARY, tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from specdec_kernels import SamplingParams

pytest.importorskip("speculators", reason="speculators is not installed; the nightly part extras/speculators does it")

from support.speculators_heads import confidences, draft_logits, write_head  # noqa: E402

V, LAYERS = 16, 8  # of the targets of most: with few tokens, some drafts are accepted
SIZES = {**DECODER, "vocab_size": V}
REDUCED = torch.tensor([0, 2, 3, 5, 8, 9, 11, 14, 15])
TEXTS = [[1, 2, 3, 9, 4], [5, 6], [7, 1, 1, 8, 2, 3, 15], [3] * 11, [10, 11], [4, 12, 13, 0], [14, 0, 14], [2, 9, 9]]


class Case(NamedTuple):
    kind: str
    target: str
    layers: PreTrainedConfig | None  # the head's; None: as the target's
    settings: dict = {}
    reduced: bool = False


def llama(count: int = 1) -> LlamaConfig:
    return LlamaConfig(num_hidden_layers=count, **SIZES)


def qwen3(count: int = 2, **more) -> Qwen3Config:
    return Qwen3Config(num_hidden_layers=count, **SIZES | more)


IDS = {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}
LAST = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4, 7, LAYERS]}
BLOCK = {"aux_hidden_state_layer_ids": [1, 4, 6], "block_size": 5, "mask_token_id": 7}
SELECTOR = {**BLOCK, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
MARKOV = {**BLOCK, "block_size": 4, "markov_rank": 6}
SLIDING = qwen3(layer_types=["sliding_attention", "full_attention"], sliding_window=4, use_sliding_window=True)
CASES = {
    "eagle3": Case("eagle3", "llama", llama(), IDS),
    "eagle3, residual after the norm": Case("eagle3", "llama", llama(), {**LAST, "norm_before_residual": True}, True),
    "eagle3, two layers": Case("eagle3", "llama", qwen3(), {**IDS, "norm_before_fc": True}, True),
    "eagle3, norms": Case("eagle3", "llama", qwen3(1), {**LAST, "fc_norm": True, "norm_output": True}),
    "peagle": Case("peagle", "llama", llama(2), {**IDS, "mask_token_id": 7}),
    "peagle, reduced": Case("peagle", "llama", qwen3(1), {**IDS, "mask_token_id": 7, "norm_before_fc": True}, True),
    "dflash": Case("dflash", "llama", qwen3(), BLOCK),
    "dflash, from the anchor": Case("dflash", "llama", qwen3(), {**BLOCK, "sample_from_anchor": True}, True),
    "dflash, sliding": Case("dflash", "llama", SLIDING, BLOCK),
    "dflash, sliding both ways": Case("dflash", "llama", SLIDING, {**BLOCK, "sliding_window_non_causal": True}, True),
    "dflash of gemma3": Case(
        "dflash", "gemma3", qwen3(vocab_size=VOCABULARY), {**BLOCK, "aux_hidden_state_layer_ids": [0, 1]}
    ),
    "dflash2": Case("dflash2", "llama", qwen3(), SELECTOR),
    "dflash2, all tokens": Case("dflash2", "llama", SLIDING, {**SELECTOR, "conv_kernel_size": 3, "selector_top_k": V}),
    "dflash2, from the anchor": Case(
        "dflash2", "llama", SLIDING, {**SELECTOR, "sample_from_anchor": True, "sliding_window_non_causal": False}
    ),
    "dspark": Case("dspark", "llama", qwen3(), MARKOV),
    "dspark, not from the anchor": Case("dspark", "llama", qwen3(), {**MARKOV, "sample_from_anchor": False}, True),
    "dspark, sure of its output": Case("dspark", "llama", qwen3(), {**MARKOV, "confidence_head_with_markov": False}),
    "mtp of qwen3": Case("mtp", "qwen3", None),
    "mtp of qwen3_next": Case("mtp", "qwen3_next", None),
    "mtp of qwen3_5": Case("mtp", "qwen3_5_text", None),
    "mtp of qwen3_5_moe": Case("mtp", "qwen3_5_moe_text", None),
}
# Heads that walk through their block have no trees here, and hybrid targets read none.
WALKS = ("dflash2", "dspark")
WITH_TREES = [name for name, case in CASES.items() if case.kind not in WALKS and "qwen3_" not in case.target]
# Rounding changes which tokens are candidates.
OF_ALL = [name for name, case in CASES.items() if case.settings.get("selector_top_k", V) == V]


def target_of(kind: str, dtype: torch.dtype) -> PreTrainedModel:
    if kind == "gemma3":  # its embedding has a scale
        return copy.deepcopy(tiny_model(kind)).to(dtype)
    if kind not in ("llama", "qwen3"):
        return copy.deepcopy(model_of(kind)).to(dtype)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config((llama if kind == "llama" else qwen3)(LAYERS)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.35).add_(weight.dim() == 1)  # norms', so that what is before and after them differs
    return model.to(dtype)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Writes a case's head. Returns its folder, its target, and the head as speculators reads it."""

    @functools.cache
    def written(name: str, dtype: torch.dtype = torch.float32):
        case, folder = CASES[name], tmp_path_factory.mktemp("speculators") / "head"
        target = target_of(case.target, dtype)
        layers = copy.deepcopy(target.config if case.layers is None else case.layers)
        reduced = REDUCED if case.reduced else None
        return folder, target, write_head(folder, case.kind, target, layers, reduced, **case.settings)

    return written


@pytest.fixture
def compared(written):
    """Compares what a case's head drafts with its own forward. Returns what ``compare`` does."""

    def compared(name: str, dtype: torch.dtype = torch.float32, **settings) -> list[list[int]]:
        folder, target, head = written(name, dtype)
        plain = functools.partial(draft_logits, head, target)
        if dtype != torch.float32:
            settings["rounded"] = plain
            plain = functools.partial(draft_logits, copy.deepcopy(head).float(), copy.deepcopy(target).float())
        return compare(folder, plain, target=target, texts=TEXTS, **settings)

    return compared


@pytest.mark.parametrize("name", CASES)
def test_sampled(compared, name):
    """Their q, in a batch of texts of other lengths, of which each accepts more or fewer."""
    accepted = compared(name)
    assert len({sum(own) for own in accepted}) > 2


@pytest.mark.parametrize("name", CASES)
def test_greedy(compared, name):
    """Most are rejected."""
    accepted = compared(name, new=24, params=SamplingParams(0.0))
    steps = [count for own in accepted for count in own]
    assert len(steps) / 2 < steps.count(0) < len(steps)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", WITH_TREES)
def test_trees(compared, name, temperature):
    """The children of each node, after the chain of drafts that leads to it."""
    accepted = compared(name, num_drafts=4, tree=20, params=SamplingParams(temperature), rule="token")
    assert sum(count > 0 for own in accepted for count in own) > 3


@pytest.mark.parametrize("name", OF_ALL)
def test_bfloat16(compared, name):
    """They are no further from speculators in float32, with the same rounded weights, than speculators in bfloat16."""
    compared(name, torch.bfloat16)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.kind == "dspark"])
def test_how_sure_heads_are(written, monkeypatch, name):
    """Of each draft, and of those after it that are not verified."""
    folder, target, theirs = written(name)
    steps, sure = [], HeadDraftSession._sure

    def noted(session, drafts, step, found):
        steps.append(([[*text] for text in step.texts], step.allowed, drafts.tokens.tolist(), found))
        return sure(session, drafts, step, found)

    monkeypatch.setattr(HeadDraftSession, "_sure", noted)
    decoder = SpeculativeDecoder(target, load_head(folder, target, check=False, confidence=0.5), 3)
    more = {"params": SamplingParams(1.0), "seed": [*range(len(TEXTS))], "eos_token_id": []}
    stats = decoder.generate(TEXTS, max_new_tokens=14, **more).stats
    compared = 0
    for texts, allowed, tokens, found in steps:
        for text, most, drafts, ours in zip(texts, allowed, tokens, found, strict=True):
            if most:
                with torch.no_grad():
                    expected = confidences(theirs, target, text, drafts[:-1])
                torch.testing.assert_close(ours, expected, rtol=1e-3, atol=2e-3)
                compared += (expected < 0.5).any().item()
    assert compared > 10 and 0 < stats.drafted < 3 * stats.steps
