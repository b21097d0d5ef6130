"""What a difference between two greedy texts is called: a near-tie or a bug."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch
from specdec.evaluation.near_ties import Judge
from support.models import VOCABULARY, prompts, tiny_model

IDS = prompts(1, 9, 9)[0]


def tied(dtype: torch.dtype, factor: float):
    """(model, best token, other): the other's logit is ``factor`` of the best after IDS."""
    model = copy.deepcopy(tiny_model("llama")).to(dtype)
    logits = model(torch.tensor([IDS])).logits[0, -1]
    best = logits.argmax().item()
    assert logits[best] > 0
    other = (best + 1) % VOCABULARY
    with torch.no_grad():
        model.lm_head.weight[other] = model.lm_head.weight[best] * factor
    return model, best, other


@pytest.mark.parametrize(
    "dtype, factor, verdict",
    [
        (torch.float32, 1.0, "near-tie"),
        (torch.float32, 1 - 1e-7, "near-tie"),
        (torch.float32, 1 - 1e-3, "bug"),
        (torch.float32, 0.5, "bug"),
        (torch.bfloat16, 1.0, "near-tie"),
        (torch.bfloat16, 1 - 2**-8, "near-tie"),
        (torch.bfloat16, 0.5, "bug"),
        (torch.float64, 1.0, "near-tie"),
        (torch.float64, 1 - 1e-7, "bug"),
    ],
)
@torch.no_grad()
def test_only_rounding_makes_a_near_tie(dtype, factor, verdict):
    model, best, other = tied(dtype, factor)
    for tokens in ((best, other), (other, best)):
        found = Judge(model).explain(IDS[:-2], [*IDS[-2:], tokens[0], 5], [*IDS[-2:], tokens[1]], ("a", "b"), 7)
        assert (found.verdict, found.tokens, found.position) == (verdict, tokens, 2)
        assert (found.prompt, found.methods, found.bound) == (7, ("a", "b"), 2 * found.rounding)
        assert 0 <= found.gap and found.rounding > 0 and (found.gap <= found.bound) == (verdict == "near-tie")
        wide = torch.float32 if dtype == torch.bfloat16 else torch.float64
        logits = copy.deepcopy(model).to(wide)(torch.tensor([IDS])).logits[0, -1]
        assert found.wide_logits == tuple(logits[t].item() for t in tokens)
        assert f"torch.{found.wide_dtype}" == str(wide) and f"torch.{found.dtype}" == str(dtype)
    assert model.dtype == dtype


def test_equal_texts_have_no_difference():
    assert Judge(tiny_model("llama")).explain(IDS, [1, 2], [1, 2]) is None


@torch.no_grad()
def test_an_early_end_is_a_bug():
    model, best, other = tied(torch.float32, 1.0)
    for texts in (([best], []), ([], [best])):
        found = Judge(model).explain(IDS, *texts)
        assert (found.verdict, found.gap, found.position) == ("bug", None, 0)
        assert found.tokens == tuple(t[0] if t else None for t in texts)
        assert found.logits[texts.index([])] is None


def test_two_tokens_that_tie_below_the_best_are_a_bug():
    model, best, other = tied(torch.float32, 1.0)
    low = model(torch.tensor([IDS])).logits[0, -1].argmin().item()
    with torch.no_grad():
        model.lm_head.weight[(best + 2) % VOCABULARY] = model.lm_head.weight[low]
    assert Judge(model).explain(IDS, [low], [(best + 2) % VOCABULARY]).verdict == "bug"


@torch.no_grad()
def test_tokens_that_are_ruled_out():
    """-inf is no rounding, and a text with such a token is wrong; the report stays valid JSON."""
    model, best, other = tied(torch.float32, 1.0)
    banned = (best + 3) % VOCABULARY

    def ban(_, __, out):
        out.logits[..., banned] = float("-inf")

    model.register_forward_hook(ban)
    assert Judge(model).explain(IDS, [best], [other]).verdict == "near-tie"
    found = Judge(model).explain(IDS, [best], [banned])
    assert (found.verdict, found.gap, found.logits[1]) == ("bug", None, None)
    json.dumps(dataclasses.asdict(found), allow_nan=False)
