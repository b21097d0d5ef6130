"""Trees of nodes that are sampled: the distribution of texts, log-probabilities, statistics, and what a chain is."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from specdec import AdaptiveDrafts, GenerationResult, Request, Scheduler, SpeculativeDecoder
from specdec.drafters import Drafts, Step
from specdec.evaluation.verify.chi_square import chi_square
from support.dropped import drops_drafter
from support.models import generate, prompts, tiny_model, toy_model
from support.table_trees import BUSHY, TableTrees, bigrams, forgetful
from transformers import NoRepeatNGramLogitsProcessor

from specdec_kernels import SamplingParams
from specdec_kernels.testing import text_distribution

RULES = ("token", "block", "coupled")
PROMPT = [1, 2]
LENGTH = 5  # of the texts of toy models, in about three steps
PENALTIES = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.3}


@functools.cache
def toy_trees() -> TableTrees:
    return TableTrees(0.7 * bigrams(toy_model(1)) + 0.5 * bigrams(toy_model(2)), BUSHY, barren=3)


@torch.inference_mode()
def texts_of(model, temperature: float) -> dict[tuple[int, ...], float]:
    @functools.cache
    def next_token(text: tuple[int, ...]):
        return (model(torch.tensor([text])).logits[0, -1].double() / temperature).softmax(-1).numpy()

    return text_distribution(next_token, LENGTH, tuple(PROMPT))


def check_texts(rule: str, count: int, biggest: float) -> None:
    """Texts of five tokens in batches of sampled rows, and every eighth row a greedy one. Chi-square of all that is
    within three tokens of each other."""
    model, counts, taken = toy_model(1), Counter(), 0
    greedy = generate(model, None, [PROMPT], 0, max_new_tokens=LENGTH).tokens[0]
    decoder = SpeculativeDecoder(model, toy_trees(), 3, tree=len(BUSHY))
    for first in range(0, count, 20_000):
        size = min(20_000, count - first)
        temperature = torch.where(torch.arange(size) % 8 == 7, 0.0, 1.1)
        result = decoder.generate(
            [PROMPT] * size,
            max_new_tokens=LENGTH,
            params=SamplingParams(temperature),
            seed=list(range(first, first + size)),
            eos_token_id=[],
            rule=rule,
        )
        assert result.drafter_error is None and 1.3 < result.stats.tau < 2.5, result.stats
        assert all(text == greedy for text in result.tokens[7::8])
        counts.update(tuple(text) for i, text in enumerate(result.tokens) if i % 8 != 7)
        taken += size
    distribution = texts_of(model, 1.1)
    for start in range(LENGTH - 2):
        found, expected = Counter(), Counter()
        for own, whole in ((found, counts), (expected, distribution)):
            for text, n in whole.items():
                own[text[start : start + 3]] += n
        result = chi_square(found, expected, level=1e-4)
        assert result.p_value > 1e-4 and result.detectable < biggest, (start, result)


@pytest.mark.parametrize("rule", [*RULES[:2], pytest.param("coupled", marks=pytest.mark.nightly)])
def test_texts_have_the_distribution(rule):
    """Those of ``coupled`` are those of plain decoding, as test_tree_step.py sees every day."""
    check_texts(rule, 3_000, 0.26)


@pytest.mark.nightly
@pytest.mark.parametrize("rule", RULES)
def test_many_texts_have_the_distribution(rule):
    check_texts(rule, 200_000, 0.031)


# ---- a chain is a tree ---------------------------------------------------------------------------------------------


@functools.cache
def tiny_trees(parents: tuple[int, ...], d2t: bool = False) -> TableTrees:
    table, ids = bigrams(forgetful()), torch.arange(0, 101, 2) if d2t else None
    return TableTrees(table[:, ids] if d2t else table, parents, d2t=ids)


def same_scores(a: GenerationResult, b: GenerationResult) -> None:
    for name in ("log_probs", "raw_log_probs"):
        for own, other in zip(getattr(a, name), getattr(b, name), strict=True):
            assert own == pytest.approx(other, abs=1e-4)
    for own, other in zip(a.top_log_probs or (), b.top_log_probs or (), strict=True):
        ranks, ranks_there = ([(x.rank, [t for t, _ in x.top]) for x in each] for each in (own, other))
        assert ranks == ranks_there
    for own, other in zip(a.logits or (), b.logits or (), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        ("token", {"params": PENALTIES, "logit_bias": {7: 1.5}, "logits_processor": [NoRepeatNGramLogitsProcessor(1)]}),
        ("token", {"params": {"min_p": 0.01}, "min_new_tokens": 8, "eos_token_id": list(range(0, 101, 3))}),
        ("block", {"params": {"top_p": 0.9}, "d2t": True}),
        ("coupled", {"params": {"top_k": 20, **PENALTIES}}),
    ],
)
def test_a_chain_is_a_tree(rule, settings):
    """Tokens, where they came from, statistics, log-probabilities, ranks and logits are those of steps with chains. One
    of the rows is greedy."""
    params = SamplingParams(torch.tensor([0.9, 0.0, 1.2, 0.7]), **settings.pop("params"))
    drafter = tiny_trees((-1, 0, 1, 2), settings.pop("d2t", False))
    for more in ({"top_log_probs": 3}, {"output_logits": True, "log_probs": True}):
        chain, tree = (
            SpeculativeDecoder(forgetful(), drafter, 4, tree=nodes).generate(
                prompts(4, 1, 9), max_new_tokens=12, params=params, seed=[5, 6, 7, 8], rule=rule, **settings, **more
            )
            for nodes in (None, 4)
        )
        assert tree.drafter_error is None and tree.stats.accepted > 3
        assert (tree.tokens, tree.produced_by, tree.status) == (chain.tokens, chain.produced_by, chain.status)
        assert tree.sequence_stats == chain.sequence_stats
        same_scores(tree, chain)


def test_log_probs_are_of_the_path():
    """Trees with branches, of whose path most rows are not the first ones: against plain decoding."""
    settings = {
        "max_new_tokens": 16,
        "params": SamplingParams(torch.tensor([0.5, 0.0, 0.9]), top_k=30, repetition_penalty=1.2),
        "seed": [1, 2, 3],
        "rule": "coupled",
        "logits_processor": [NoRepeatNGramLogitsProcessor(2)],
    }
    for more in ({"top_log_probs": 3}, {"output_logits": True, "log_probs": True}):
        plain = SpeculativeDecoder(forgetful(), None, 0).generate(prompts(3, 2, 9), **settings, **more)
        decoder = SpeculativeDecoder(forgetful(), tiny_trees(BUSHY), 3, tree=len(BUSHY))
        tree = decoder.generate(prompts(3, 2, 9), **settings, **more)
        assert tree.tokens == plain.tokens and tree.stats.accepted_by_position[1] > 0
        same_scores(tree, plain)


# ---- faults --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_a_sequence_with_bad_draft_logits_drafts_no_more(rule):
    """The table has no distribution after the tokens from 50 on: children of the root and of nodes further down."""
    drafter, settings = TableTrees(bigrams(forgetful()), BUSHY), {"params": SamplingParams(0.6), "rule": rule}
    drafter.table[50:, 3] = torch.nan
    decoder = SpeculativeDecoder(forgetful(), drafter, 3, tree=len(BUSHY))
    with pytest.warns(RuntimeWarning, match="its draft logits are NaN or infinite .DRAFT_NAN"):
        got = decoder.generate([[1, 2], [3, 60]], max_new_tokens=30, seed=[3, 4], eos_token_id=[], **settings)
    first, second = got.sequence_stats
    assert 0 < first.nodes and sum(first.drafted_by_position[:1]) < first.steps
    assert second.nodes == 0 and got.drafter_error is None and [len(text) for text in got.tokens] == [30, 30]


def test_q_that_does_not_fit_is_refused():
    """By verification: the drafter is dropped, and the step runs again without it."""
    good = {"logits": torch.zeros(2, 3, 101), "tokens": torch.tensor([[1, 2]] * 2), "parents": torch.tensor([-1, 0])}

    class Wrong(TableTrees):
        parts: dict

        def propose(self, step: Step) -> Drafts:
            return Drafts(**{**good, **self.parts})

    for rule, wrong, told in (
        ("token", {"logits": torch.zeros(2, 2, 101)}, "draft_logits: got .*2, 2, 101.*allowed: .*2, 3, 101"),
        ("block", {"logits": torch.zeros(2, 3, 101).long()}, "draft_logits: got .*int64"),
        ("block", {"logits": torch.zeros(2, 3, 60)}, "draft_logits: got .*2, 3, 60"),
        ("block", {"d2t": torch.arange(60)}, "d2t: got .*101"),
        ("coupled", {}, "draft_logits: got a value with rule='walk', allowed: None"),
        ("token", {"status": torch.zeros(2, 2, dtype=torch.int32)}, "status: got .*2, 2.*allowed: .*2, 3"),
        ("token", {"forwards": None}, "forwards: got None"),
    ):
        drafter = Wrong(torch.zeros(1, 1), ())
        drafter.parts = wrong
        decoder = SpeculativeDecoder(tiny_model(), drafter, 2, tree=2)
        with drops_drafter(told):
            got = decoder.generate([[1], [2]], max_new_tokens=3, eos_token_id=[], rule=rule)
        assert got.tokens == generate(tiny_model(), None, [[1], [2]], 0, max_new_tokens=3).tokens


# ---- K that is chosen ----------------------------------------------------------------------------------------------


def test_k_is_the_depth_of_trees():
    """Requests that join others; steps without drafts, and with trees. Costs are given."""
    adaptive = AdaptiveDrafts(3, costs=[1.0, 1.25, 1.4, 1.55])
    decoder = SpeculativeDecoder(forgetful(), tiny_trees(BUSHY), adaptive, tree=len(BUSHY))
    requests = [
        Request(p, 24, SamplingParams(0.7 * (i % 3 > 0)), seed=i, eos_token_id=[])
        for i, p in enumerate(prompts(9, 1, 9))
    ]
    outcomes = sorted(Scheduler(decoder, rows=3, max_length=50).run(requests), key=lambda o: o.number)
    taken = [sum(of_k) for of_k in zip(*(o.stats.steps_by_drafts for o in outcomes), strict=True)]
    assert taken[0] > 10 and sum(taken[1:]) > 10, taken
    for request, outcome in zip(requests, outcomes, strict=True):
        settings = {"max_new_tokens": 24, "params": request.params, "seed": request.seed, "rule": "coupled"}
        assert outcome.tokens == generate(forgetful(), None, [request.prompt], 0, **settings).tokens[0]


def test_step_times_of_trees_are_learned():
    decoder = SpeculativeDecoder(forgetful(), tiny_trees(BUSHY), AdaptiveDrafts(3), tree=len(BUSHY))
    found = decoder.generate(prompts(2, 3, 9), max_new_tokens=80, eos_token_id=[])
    assert found.tokens == generate(forgetful(), None, prompts(2, 3, 9), 0, max_new_tokens=80).tokens
    assert len(found.step_costs) == 4
