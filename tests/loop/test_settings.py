"""Settings of generate in batches: each for its own sequence; log-probabilities; what of q is kept."""

from __future__ import annotations

import pytest
import torch
from specdec import Producer
from specdec.drafters.model import ModelDraftSession
from support.models import VOCABULARY, GeneratedPenalties, generate, prompts, pruned_draft, tunable_pair
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import (
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec_kernels import SamplingParams

RULES = ("token", "block", "coupled")

# ---- batches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_every_setting_holds_for_its_own_sequence(rule):
    """Greedy and sampled, filtered and free, penalised and biased sequences in one ragged batch, as alone."""
    target, draft = tunable_pair(0.3)
    ragged = prompts(6, 1, 30, seed=5)
    columns = {
        "temperature": [0.7, 1.0, 0.0, 1.3, 0.2, 0.9],
        "top_k": [0, 5, 3, 0, 10, 50],
        "top_p": [1.0, 0.9, 0.5, 0.8, 1.0, 0.95],
        "min_p": [0.0, 0.05, 0.1, 0.0, 0.0, 0.2],
        "repetition_penalty": [1.0, 1.2, 1.5, 1.0, 1.1, 1.0],
        "presence_penalty": [0.0, 0.5, 0.0, 1.0, -0.5, 0.0],
        "frequency_penalty": [0.0, 0.0, 0.3, 0.4, 0.1, 0.0],
    }
    bias = [None, {5: 3.0}, {60: 2.0, 61: -1.0}, {}, {3: float("-inf")}, None]
    banned, shortest = [[], [4], [7, 8], [], [9, 9], [2]], [0, 5, 30, 12, 0, 3]
    per_sequence = {"logit_bias": bias, "banned_tokens": banned, "min_new_tokens": shortest, "seed": [3, 4, 5, 6, 7, 8]}

    def run(order: list[int], num_drafts: int = 4):
        return generate(
            target,
            draft,
            [ragged[b] for b in order],
            num_drafts,
            max_new_tokens=40,
            params=SamplingParams(**{name: torch.tensor([c[b] for b in order]) for name, c in columns.items()}),
            eos_token_id=list(range(0, VOCABULARY, 6)),
            rule=rule,
            log_probs=True,
            **{name: [values[b] for b in order] for name, values in per_sequence.items()},
        )

    alone, together = [run([b]) for b in range(6)], run([4, 2, 0, 1, 5, 3])
    for b, tokens, log_probs in zip([4, 2, 0, 1, 5, 3], together.tokens, together.log_probs, strict=True):
        assert tokens == alone[b].tokens[0]
        assert log_probs == pytest.approx(alone[b].log_probs[0], abs=1e-4)
        assert len(tokens) > shortest[b] and not {*tokens} & {*banned[b]}
    assert {len(t) for t in together.tokens} != {40} and 3 not in together.tokens[0]


def test_ends_wait_inside_accepted_runs():
    """The target as its own draft: ends are drafted and accepted, but none before its time."""
    target, _ = tunable_pair(0.3)
    ragged, ends = prompts(8, 3, 20, seed=9), list(range(0, VOCABULARY, 7))
    for shortest in (0, 1, 4, 5, 6, 13):
        settings = {"max_new_tokens": 20, "eos_token_id": ends, "min_new_tokens": shortest, "seed": list(range(8))}
        result = generate(target, target, ragged, 4, params=SamplingParams(1.5), **settings)
        for tokens, stats in zip(result.tokens, result.sequence_stats, strict=True):
            assert len(tokens) > shortest and not {*tokens[:-1]} & {*ends}
            assert tokens[-1] in ends or len(tokens) == 20
            assert stats.alpha == 1.0
        assert any(s.cut_steps for s in result.sequence_stats)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "settings",
    [
        {"params": SamplingParams(0.9, top_k=8, top_p=0.8, min_p=0.05)},
        {"params": SamplingParams(0.9, repetition_penalty=2.0, presence_penalty=3.0, frequency_penalty=2.0)},
        {"params": SamplingParams(0.9), "logit_bias": {5: 8.0}, "banned_tokens": list(range(20, 90))},
        {"params": SamplingParams(0.9), "logits_processor": [NoRepeatNGramLogitsProcessor(1)]},
    ],
)
def test_the_draft_has_the_distribution_of_the_target(settings, rule):
    """So the target as its own draft is always right, but for rounding."""
    target, _ = tunable_pair(0.3)
    ragged, seeds = prompts(4, 3, 20, seed=7), [1, 2, 3, 4]
    result = generate(target, target, ragged, 4, max_new_tokens=25, rule=rule, seed=seeds, **settings)
    assert result.stats.alpha > 0.98


# ---- log-probabilities -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "with_processor"), [("token", True), ("block", False), ("coupled", True)])
def test_log_probs_are_those_of_a_full_forward(rule, with_processor):
    target, draft = tunable_pair(0.3)
    ragged, ends = prompts(5, 2, 20, seed=4), list(range(0, VOCABULARY, 8))
    filters = {"top_k": 40, "top_p": 0.9, "min_p": 0.02}
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    processors = [NoRepeatNGramLogitsProcessor(1)] if with_processor else None
    result = generate(
        target,
        draft,
        ragged,
        3,
        max_new_tokens=25,
        params=SamplingParams(0.8, **filters, **penalties),
        seed=[1, 2, 3, 4, 5],
        eos_token_id=ends,
        rule=rule,
        logit_bias={6: 1.5},
        logits_processor=processors,
        log_probs=True,
    )
    assert {len(t) for t in result.tokens} != {25}
    for prompt, tokens, mine, raw in zip(ragged, result.tokens, result.log_probs, result.raw_log_probs, strict=True):
        chain = LogitsProcessorList(
            [
                *(processors or ()),
                SequenceBiasLogitsProcessor({(6,): 1.5}),
                RepetitionPenaltyLogitsProcessor(1.2),
                GeneratedPenalties(len(prompt), 0.3, 0.2),
                TemperatureLogitsWarper(0.8),
                *(TopKLogitsWarper(40), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)),
            ]
        )
        with torch.inference_mode():
            rows = target(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        known = [torch.tensor([prompt + tokens[:i]]) for i in range(len(tokens))]
        expected = [
            chain(ids, row[None])[0].log_softmax(-1)[t].item() for ids, row, t in zip(known, rows, tokens, strict=True)
        ]
        assert mine == pytest.approx(expected, abs=2e-4)
        assert raw == pytest.approx(
            rows.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist(), abs=2e-4
        )
    assert generate(target, draft, ragged, max_new_tokens=2).log_probs is None


def test_log_probs_of_greedy_text():
    target, draft = tunable_pair(0.3)
    result = generate(target, draft, prompts(2, 3, 9), max_new_tokens=12, log_probs=True)
    assert result.log_probs == [[0.0] * 12] * 2 and all(-20 < x < 0 for row in result.raw_log_probs for x in row)


# ---- what of q is kept -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, kept",
    [
        ({"params": SamplingParams(1.0)}, True),
        ({"params": SamplingParams(1.0), "rule": "block"}, True),
        ({"params": SamplingParams(1.0), "rule": "coupled"}, False),
        ({"params": SamplingParams(0.0)}, False),
    ],
)
def test_q_is_kept_where_verification_needs_it(monkeypatch, settings, kept):
    seen, propose = [], ModelDraftSession.propose
    monkeypatch.setattr(ModelDraftSession, "propose", lambda *a: seen.append(propose(*a)) or seen[-1])
    generate(*tunable_pair(0.3), prompts(2, 3, 9), 2, max_new_tokens=8, **settings)
    assert seen and {drafts.logits is not None for drafts in seen} == {kept}
    assert {drafts.stats is not None for drafts in seen} == {kept}


@pytest.mark.parametrize(("rule", "temperature"), [("token", 0.8), ("block", 0.8), ("coupled", 0.8), ("token", 0.0)])
def test_a_draft_of_a_part_of_the_vocabulary(rule, temperature):
    target, draft = tunable_pair(0.1)
    d2t = torch.arange(1, VOCABULARY, 2)
    settings = {"max_new_tokens": 30, "params": SamplingParams(temperature, repetition_penalty=1.1), "rule": rule}
    result = generate(target, pruned_draft(draft, d2t), prompts(6, 2, 9), 3, d2t=d2t, seed=list(range(6)), **settings)
    tokens, producers = (sum(rows, []) for rows in (result.tokens, result.produced_by))
    accepted = [t for t, producer in zip(tokens, producers, strict=True) if producer == Producer.ACCEPTED]
    assert all(token % 2 for token in accepted) and any(token % 2 == 0 for token in tokens)
    assert result.stats.alpha > 0.25
    if temperature == 0 or rule == "coupled":
        plain = generate(target, None, prompts(6, 2, 9), 0, seed=list(range(6)), **settings)
        assert result.tokens == plain.tokens


class SeenTexts(LogitsProcessor):
    """Notes how long the texts are that it is asked about."""

    def __init__(self):
        self.lengths = []

    def __call__(self, input_ids, scores):
        self.lengths.append(input_ids.shape[1])
        return scores


def test_processors_see_no_draft_beyond_the_end_of_a_text():
    """Rows are close to their ends in different steps, and have no drafts there, whatever the others draft."""
    target, draft = tunable_pair(1.0)
    seen = [SeenTexts() for _ in range(4)]
    given = {"max_new_tokens": 9, "eos_token_id": [], "logits_processor": [[each] for each in seen]}
    result = generate(target, draft, prompts(4, 5, 5), 4, **given)
    assert len({s.steps for s in result.sequence_stats}) > 1
    # The last token of a text is decided by the text without it.
    assert [max(each.lengths) for each in seen] == [5 + 9 - 1] * 4
