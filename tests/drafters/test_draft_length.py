"""K that adapts: what is chosen, that it depends on a sequence's own drafts alone, and that no text depends on it."""

from __future__ import annotations

import itertools

import pytest
import torch
from specdec import AdaptiveDrafts, SpeculativeDecoder
from specdec.drafters.draft_length import PATIENCE, PROBE, AdaptiveLengths, best_length, step_costs
from specdec.drafters.model import ModelDrafter, ModelDraftSession
from specdec.loop import batch
from specdec.models.cached_model import CachedModel
from support.models import generate, prompts, tiny_model, tunable_pair

from specdec_kernels import SamplingParams

CHEAP = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8]
DEAR = [1.0, 1.6, 2.2, 2.8, 3.4, 4.0, 4.6, 5.2, 5.8]


def rate(alpha: float, k: int, costs: list[float]) -> float:
    return sum(alpha**i for i in range(k + 1)) / costs[k]


@pytest.mark.parametrize("costs", [CHEAP, DEAR])
def test_the_best_length_is_the_best(costs):
    for alpha in torch.linspace(0, 1, 21).tolist():
        best = best_length([alpha], costs)
        assert all(rate(alpha, best, costs) >= rate(alpha, k, costs) for k in range(len(costs)))
    assert best_length([0.0], costs) == 0 and best_length([1.0], CHEAP) == 8
    assert best_length([0.55], DEAR) == 0  # the first draft costs 0.6 of a step, and emits 0.55 tokens


def decode(lengths: AdaptiveLengths, alpha: float, steps: int) -> list[int]:
    """The K of each step of a sequence whose drafts are accepted with this probability."""
    generator, chosen = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        k = lengths.next([0], [])[0]
        passed = (torch.rand(k, generator=generator) < alpha).tolist()
        accepted = len(list(itertools.takewhile(bool, passed)))
        lengths.record(0, min(accepted + 1, k), accepted)
        chosen.append(k)
    return chosen


def test_lengths_follow_acceptance():
    assert max(decode(AdaptiveLengths(CHEAP, 1), 1.0, 30)[-20:]) == 8
    middle = decode(AdaptiveLengths(CHEAP, 1), 0.7, 200)
    assert 3 <= sum(middle) / 200 <= 7 and min(middle[5:]) >= 1
    lengths = AdaptiveLengths(DEAR, 1)
    assert sum(decode(lengths, 0.0, 300)) < 10 < sum(decode(lengths, 1.0, 300))  # and back again


def test_drafts_that_do_not_pay_are_tried_ever_more_rarely():
    chosen = decode(AdaptiveLengths(DEAR, 1), 0.0, 16 * PATIENCE)
    probes = [i for i, k in enumerate(chosen) if k and i > 5]
    assert [chosen[i] for i in probes] == [PROBE] * len(probes)
    gaps = [b - a for a, b in itertools.pairwise(probes)]
    assert len(gaps) >= 2 and all(b >= 1.9 * a for a, b in itertools.pairwise(gaps))


def test_costs():
    assert step_costs(4, lambda k: 0.2 * k, lambda tokens: 1.0 + 0.1 * tokens) == [1.0, 1.27, 1.55, 1.82, 2.09]
    assert step_costs(1, lambda k: 0.5, lambda tokens: 1.0) == [1.0, 1.5]
    noisy = step_costs(3, lambda k: 0.0, lambda tokens: 2.0 - 0.1 * tokens)
    assert noisy == [1.0] * 4  # a longer step is not cheaper


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_drafts": 0}, "max_drafts: got 0, allowed: an integer >= 1"),
        ({"max_drafts": True}, "max_drafts: got True"),
        ({"max_drafts": 2, "costs": [1, 2]}, r"costs: got \[1, 2\], allowed: 3 numbers > 0 that do not fall"),
        ({"max_drafts": 1, "costs": [2, 1]}, "costs"),
        ({"max_drafts": 1, "costs": [0, 1]}, "costs"),
        ({"max_drafts": 1, "costs": [1, float("inf")]}, "costs"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveDrafts(**arguments)


def speed(costs: list[float], alphas: list[float], fixed: int | None = None) -> float:
    """Tokens per time of a batch whose rows decode 100 steps together, K fixed or chosen."""
    lengths, generator = AdaptiveLengths(costs, len(alphas)), torch.Generator().manual_seed(0)
    rows, tokens, time = [*range(len(alphas))], 0, 0.0
    for passed in torch.rand(100, len(alphas), len(costs), generator=generator):
        chosen = lengths.next(rows, []) if fixed is None else dict.fromkeys(rows, fixed)
        for row, k in chosen.items():
            accepted = len(list(itertools.takewhile(bool, (passed[row, :k] < alphas[row]).tolist())))
            lengths.record(row, min(accepted + 1, k), accepted)
            tokens += accepted + 1
        time += costs[max(chosen.values())]
    return tokens / time


@pytest.mark.parametrize("alphas", [[0.8] * 16, [0.6, 0.95] * 8, [0.05] * 16], ids=["alike", "mixed", "bad"])
def test_a_wide_batch_is_as_fast_as_with_the_best_fixed_length(alphas):
    """All rows pay for the row with the most drafts. If each chose for itself, rows that stopped would gain nothing,
    and rows with a lucky estimate would make all others wait: at these costs less than plain decoding."""
    dear = [1.0, 1.47, 1.73, 1.99, 2.25, 2.51, 2.77, 3.03, 3.29]
    best = max(speed(dear, alphas, k) for k in range(len(dear)))
    assert speed(dear, alphas) >= 0.95 * best >= 0.95 * speed(dear, alphas, 0)


def test_rows_together_consider_the_others():
    """A row that would draft 8 tokens alone does not where 15 others have to wait for them; and where others want a
    wide step anyway, drafting as many costs it nothing."""

    def tried() -> AdaptiveLengths:
        lengths = AdaptiveLengths(DEAR, 17)
        for row in range(17):
            for _ in range(20):
                lengths.record(row, 8, 8 if row in (0, 16) else 0)
        return lengths

    nobody = dict.fromkeys(range(1, 16), 0)
    assert tried().next([0], []) == {0: 8}
    assert tried().next([*range(16)], []) == tried().next([0], [*range(1, 16)]) == {0: 0} | nobody
    assert tried().next([1], [16]) == {1: 8, 16: 8}


def test_a_new_sequence_ends_a_pause_only_where_much_is_expected_of_it():
    lengths = AdaptiveLengths(DEAR, 16)
    rows = [*range(16)]
    while any(lengths.next(rows, []).values()):
        for row in rows:
            lengths.record(row, 1, 0)
    lengths.begin(0)
    assert not any(lengths.next(rows, []).values())
    for row in rows:
        lengths.begin(row)
    assert {*lengths.next(rows, []).values()} == {PROBE}


# ---- in the loop -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quality", ["good", "bad"])
@pytest.mark.parametrize("costs", [CHEAP, DEAR], ids=["cheap", "dear"])
def test_texts_depend_on_no_k(quality, costs):
    """Greedy, and coupled: the draft's cache misses the tokens of steps that asked for none, and catches up."""
    target, draft = tunable_pair(0.3)
    draft = draft if quality == "good" else tiny_model("llama", seed=99)
    ragged, adaptive = prompts(3, 1, 9), AdaptiveDrafts(costs=costs)
    more = {"max_new_tokens": 100, "seed": [4, 5, 6]}
    for arguments in (more, {**more, "params": SamplingParams(0.8), "rule": "coupled"}):
        result = generate(target, draft, ragged, adaptive, **arguments)
        assert result.tokens == generate(target, None, ragged, 0, **arguments).tokens
        drafted = [s.drafted for s in result.sequence_stats]
        assert min(drafted) > 0 and result.step_costs == costs
        if quality == "bad":
            assert max(drafted) < 60  # of 100 steps


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3", "bloom"])
def test_the_draft_catches_up(kind):
    """The target as its own draft: everything is accepted, after whatever gaps, as both know the same text."""
    model = tiny_model(kind)

    class Gaps:
        """Other K in every step and for every sequence, and often none."""

        def __init__(self, *_):
            self.turn = 0

        def next(self, together: list[int], alone: list[int]) -> dict[int, int]:
            self.turn += 1
            return {row: (0, 0, 3, 1, 0, 5, 0, 0, 0, 2)[(self.turn + row) % 10] for row in together + alone}

        def record(self, *_) -> None:
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "AdaptiveLengths", Gaps)
        adaptive = AdaptiveDrafts(max_drafts=5, costs=[1.0] * 6)
        for params in (None, SamplingParams(1.0)):
            result = generate(model, model, prompts(3, 1, 9), adaptive, max_new_tokens=90, params=params)
            assert result.stats.drafted > 30 and result.stats.alpha > 0.999


def test_a_sequences_text_does_not_depend_on_its_neighbours_k():
    """Rule ``token``: K shapes the text, and K is the sequence's own."""
    target, draft = tunable_pair(0.3)
    ragged, adaptive = prompts(4, 3, 9), AdaptiveDrafts(costs=CHEAP)
    arguments = {"max_new_tokens": 60, "params": SamplingParams(1.0)}
    together = generate(target, draft, ragged, adaptive, seed=[1, 2, 3, 4], **arguments)
    for b, prompt in enumerate(ragged):
        assert generate(target, draft, [prompt], adaptive, seed=b + 1, **arguments).tokens[0] == together.tokens[b]


def test_greedy_neighbours_change_no_sampled_text():
    """Greedy rows choose K with regard to all rows, sampled ones only for themselves."""
    target, draft = tunable_pair(0.3)
    ragged, adaptive = prompts(4, 3, 9), AdaptiveDrafts(costs=CHEAP)
    arguments = {"max_new_tokens": 60, "seed": [1, 2, 3, 4]}
    mixed = SamplingParams(torch.tensor([0.0, 1.0, 0.0, 1.0]))
    together = generate(target, draft, ragged, adaptive, params=mixed, **arguments).tokens
    sampled = generate(target, draft, ragged, adaptive, params=SamplingParams(1.0), **arguments).tokens
    greedy = generate(target, None, ragged, 0, **arguments).tokens
    assert together == [greedy[0], sampled[1], greedy[2], sampled[3]]


def test_costs_are_measured_once_for_a_batch_size():
    target, draft = tunable_pair(0.3)
    decoder = SpeculativeDecoder(target, draft, AdaptiveDrafts(max_drafts=3))
    arguments = {"max_new_tokens": 20, "params": SamplingParams(1.0), "eos_token_id": []}
    first, second = (decoder.generate(prompts(2, 3, 5), **arguments) for _ in range(2))
    assert first.tokens == second.tokens and first.step_costs == second.step_costs
    assert len(first.step_costs) == 4 and first.step_costs[0] == 1.0
    assert first.stats.seconds["measuring"] > 0 == second.stats.seconds["measuring"]
    assert first.stats.target_forwards == max(s.steps for s in first.sequence_stats)  # what is measured is no step
    same = SpeculativeDecoder(target, draft, AdaptiveDrafts(max_drafts=3, costs=first.step_costs))
    assert same.generate(prompts(2, 3, 5), **arguments).tokens == first.tokens
    assert generate(target, draft, prompts(2, 3, 5), 3, max_new_tokens=5).step_costs is None


# ---- drafts that stop where the draft is not sure ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "threshold"), [(None, 0.15), (SamplingParams(1.0), 0.03)], ids=["greedy", "sampled"]
)
def test_an_unsure_draft_is_the_last_of_its_step(params, threshold, monkeypatch):
    """Every draft but a step's last is at least that likely, and a step that is not full ends with one that is not."""
    target, draft = tunable_pair(0.3)
    seen = []

    def spy(self, step):
        drafts = plain(self, step)
        for b, tokens in enumerate(drafts.tokens.tolist()):
            made = list(itertools.takewhile(lambda t: t >= 0, tokens))[: step.allowed[b]]
            ids = torch.tensor([[*step.texts[b], *made]])
            distribution = draft(ids).logits[0, -len(made) - 1 : -1].softmax(-1)
            seen.append(([distribution[i, t].item() for i, t in enumerate(made)], step.allowed[b]))
        return drafts

    plain = ModelDraftSession.draft
    monkeypatch.setattr(ModelDraftSession, "draft", spy)
    decoder = SpeculativeDecoder(target, draft, 6, confidence=threshold)
    result = decoder.generate(prompts(2, 4, 9), max_new_tokens=60, params=params, eos_token_id=[])
    assert all(q >= threshold - 1e-4 for likely, _ in seen for q in likely[:-1])
    short = [(likely, allowed) for likely, allowed in seen if likely and len(likely) < allowed]
    assert len(short) > 5 and all(likely[-1] < threshold + 1e-4 for likely, _ in short)
    assert any(len(likely) > 2 for likely, _ in seen)
    assert result.stats.drafted == sum(len(likely) for likely, _ in seen)
    if params is None:
        assert result.tokens == generate(target, None, prompts(2, 4, 9), 0, max_new_tokens=60).tokens


def test_confidence_saves_draft_forwards():
    target, draft = tunable_pair(1.0)
    arguments = {"max_new_tokens": 60, "eos_token_id": []}
    all_drafts, sure_ones = (
        SpeculativeDecoder(target, draft, 6, confidence=c).generate(prompts(1, 4, 9), **arguments).stats
        for c in (0.0, 0.9)
    )
    assert sure_ones.draft_forwards < all_drafts.draft_forwards / 2 and sure_ones.alpha >= all_drafts.alpha
    assert ModelDrafter(CachedModel(draft)).confidence == 0.0
