"""How many copied tokens are verified: in simulated texts, which copy for a while and do not for a while, at least as
fast as the best fixed number, and never slower than plain decoding by more than a little."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import Counter

import pytest
from specdec import AdaptiveDrafts, PromptLookupDrafter, Request, Scheduler, SpeculativeDecoder, SuffixDrafter
from specdec.drafters import Copies, Votes
from specdec.drafters.predicted import PredictedDrafter
from specdec.loop.copied_length import LONGEST, LOOK_AROUND, LOOK_AROUND_0, LOOKING, LOOKS, PAUSE, Chances, CopiedK
from specdec.loop.draft_length import AdaptiveK, CopyResult, RowResult, StepOutcome
from support.drafting import Repeats
from support.models import generate, prompts, tiny_model, tunable_pair

from specdec_kernels import SamplingParams

FLAT = [1.0, *(1.04 + 0.04 * k for k in range(1, 9))]
CHEAP = [1 + 0.15 * k for k in range(9)]
DEAR = [1 + 0.5 * k for k in range(9)]
COSTS = {"flat": FLAT, "cheap": CHEAP, "dear": DEAR}


def chance(chances: Chances, matched: int, votes: Votes = Votes.UNKNOWN) -> float:
    """Of a token after so many that match."""
    return next(chances.accepted(matched, 1, votes))


class Text:
    """Half of its new tokens seem to go on as an earlier text, after a match of one or two. One of ten does, for
    ``stretch`` tokens on average."""

    def __init__(self, stretch: float, seed: int):
        self.draw, self.stretch = random.Random(seed), stretch
        self.copying = self.matched = 0

    def found(self, most: int) -> tuple[int, int, int]:
        """How many tokens match, how many follow, and how many of these are right."""
        if self.matched:
            return self.matched, min(2 * self.matched, most), self.copying
        return 0, 0, 0

    def emit(self, count: int) -> None:
        for _ in range(count):
            if self.copying:
                self.copying, self.matched = self.copying - 1, self.matched + 1
                continue
            self.matched = self.draw.choice((0, 0, 1, 2))
            if self.matched and self.draw.random() < 0.2:
                self.copying = int(self.draw.expovariate(1 / self.stretch)) + 1


def learn(lengths: CopiedK, *copy) -> None:
    lengths.observe(StepOutcome(1, 0, 0, [RowResult(0, 0, 0, False, CopyResult(*copy))]))


def took(lengths: CopiedK, rows: int, num_drafts: int, width: int, seconds: float) -> None:
    lengths.observe(StepOutcome(rows, num_drafts, width, [], seconds))


def speed(costs, stretch: float, rows: int, k: int | CopiedK, steps: int = 1500, seed: int = 0, noise: float = 0.05):
    """Tokens in the time of a plain step, and how often each number was verified."""
    texts = [Text(stretch, 100 * seed + row) for row in range(rows)]
    draw, tokens, time, chosen = random.Random(seed), 0, 0.0, Counter()
    for _ in range(steps):
        found = [text.found(len(costs) - 1) for text in texts]
        copies = Copies([[1] * count for _, count, _ in found], [matched for matched, *_ in found])
        longest = max(count for _, count, _ in found)
        width = min(k, longest) if isinstance(k, int) else k.cut(rows, rows, copies)
        assert width <= longest
        seconds = costs[width] * draw.lognormvariate(0, noise)
        for text, (matched, count, right) in zip(texts, found, strict=True):
            emitted = min(width, count, right) + 1
            if not isinstance(k, int):
                learn(k, matched, [1] * count, ([1] * right + [0] * 9)[:emitted])
            text.emit(emitted)
            tokens += emitted
        if not isinstance(k, int):
            took(k, rows, len(costs) - 1, width, seconds)
        time, chosen = time + seconds, chosen + Counter([width])
    return tokens / time, chosen


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("stretch", [1.0, 3.0, 20.0])
@pytest.mark.parametrize("rows", [1, 4])
def test_it_is_as_fast_as_the_best_number(costs, stretch, rows):
    """With times that have to be learned."""
    own = speed(COSTS[costs], stretch, rows, CopiedK(AdaptiveDrafts()))[0]
    fixed = {k: speed(COSTS[costs], stretch, rows, k)[0] for k in CopiedK(AdaptiveDrafts()).widths}
    assert own >= 0.98 * max(fixed.values()), (own, fixed)
    assert own >= 0.99 * fixed[0]


def test_it_is_faster_than_any_fixed_number_where_matches_differ():
    own = statistics.mean(speed(DEAR, 20.0, 1, CopiedK(AdaptiveDrafts()), seed=seed)[0] for seed in range(3))
    fixed = [statistics.mean(speed(DEAR, 20.0, 1, k, seed=seed)[0] for seed in range(3)) for k in (0, 1, 2, 4, 8)]
    assert own >= 1.1 * max(fixed), (own, fixed)


def test_chances_are_those_of_tokens_with_as_many_matching_ones():
    chances = Chances()
    for i in range(400):
        chances.learn(1, [7, 7, 7], [7, 7, 8] if i % 2 else [9])
    assert chance(chances, 1) == pytest.approx(0.5, abs=0.02)  # its second token has two matching ones
    assert chance(chances, 2) > 0.95 and chance(chances, 3) < 0.05
    assert chance(chances, 5) == chance(Chances(), 5)  # nothing was seen of them
    assert chance(Chances(), LONGEST) == chance(Chances(), 10**9)
    chances.learn(LONGEST + 5, [1] * 8, [1] * 8)
    assert chance(chances, 10**9) > chance(Chances(), 10**9)


def test_tokens_that_were_not_verified_teach():
    """A step that verifies nothing emits one token, which tells whether the first copied one was right."""
    chances = Chances()
    for _ in range(50):
        chances.learn(4, [5, 6, 7], [5])
    assert chance(chances, 4) > 0.95 and chance(chances, 5) == chance(Chances(), 5)
    chances.learn(1, [5, 6], [9, 6])  # which is chance
    assert chance(chances, 1) / chance(Chances(), 1) < 0.9 < 0.98 < chance(chances, 2) / chance(Chances(), 2) < 1
    chances.learn(4, [], [5])
    chances.learn(4, [5], [])
    assert chance(chances, 4) > 0.95


def test_votes_have_chances_of_their_own():
    lengths, copies = CopiedK(AdaptiveDrafts(costs=CHEAP)), [[1] * 2]
    for i in range(200):
        learn(lengths, 2, [5], [5] if i % 5 else [6], Votes.ALL)
        learn(lengths, 2, [5], [6] if i % 5 else [5], Votes.FEW)
    assert [lengths.cut(1, 1, Copies(copies, [2], votes)) > 0 for votes in ([Votes.ALL], [Votes.FEW])] == [True, False]
    assert lengths.best(1, 1, Copies(copies, [2])) == lengths.best(1, 1, Copies(copies, [2], [Votes.UNKNOWN]))
    unknown = chance(lengths.chances, 2) / chance(lengths.chances, 7)
    assert unknown == pytest.approx(
        chance(Chances(), 2) / chance(Chances(), 7)
    )  # of those without votes nothing was seen


@pytest.mark.parametrize(
    ("occurred", "followed", "votes"),
    [(0, 0, "UNKNOWN"), (1, 1, "ONCE"), (2, 2, "ALL"), (3, 2, "MOST"), (4, 2, "FEW"), (5, 1, "FEW"), (2, 3, "ALL")],
)
def test_what_votes_say(occurred, followed, votes):
    assert Votes.of(occurred, followed) is Votes[votes]


def test_a_text_that_repeats_less_lowers_all_chances():
    """And one that repeats more does not raise what is known by their matching tokens."""
    chances = Chances()
    for _ in range(300):
        chances.learn(4, [5], [5])
        chances.learn(9, [5], [5])
    usual = chance(chances, 4), chance(chances, 9), chance(chances, 1)
    for _ in range(6):
        chances.learn(4, [5], [6])
    assert chance(chances, 9) < 0.7 * usual[1] and chance(chances, 1) < 0.7 * usual[2]
    for _ in range(60):
        chances.learn(9, [5], [5])
    assert chance(chances, 9) == pytest.approx(usual[1], rel=0.01) and chance(chances, 1) == pytest.approx(
        usual[2], rel=0.01
    )


def test_what_texts_show_is_followed():
    """Copies that were right for long, and then are not."""
    lengths = CopiedK(AdaptiveDrafts(costs=CHEAP))
    copies = Copies([[1] * 8], [6])
    for right, cut in ((True, 8), (False, 0), (True, 8)):
        for _ in range(300):
            learn(lengths, 6, [1] * 8, [1] * 9 if right else [0])
        assert [lengths.cut(1, 1, copies) for _ in range(9)] == [cut] * 9


def test_given_times_are_taken_as_they_are():
    """With those of plain steps for all, everything is verified; if each token takes a step's, nothing is."""
    copies = Copies([[1] * 8], [2])
    for costs, cut in (([1.0] * 9, 8), ([1.0 + k for k in range(9)], 0)):
        lengths = CopiedK(AdaptiveDrafts(costs=costs))
        took(lengths, 1, 8, 8, 100.0)
        found = [lengths.cut(1, 1, copies) for _ in range(LOOK_AROUND - 1)]
        assert found == [cut] * (LOOK_AROUND - 1) and lengths.costs(1) == costs


def test_a_row_wins_no_more_than_it_has():
    """Three rows with nothing pay for the drafts of the fourth."""
    costs = [1 + 0.3 * k for k in range(9)]
    alone, among = Copies([[1] * 8], [20]), Copies([[1] * 8, [], [], []], [20, 0, 0, 0])
    short = Copies([[1] * 2], [20])
    lengths = CopiedK(AdaptiveDrafts(costs=costs))
    for _ in range(30):
        learn(lengths, 20, [1] * 8, [1] * 9)
    assert lengths.cut(1, 1, alone) == 8 and lengths.cut(1, 1, short) == 2
    assert lengths.cut(4, 4, among) == 0
    assert lengths.cut(4, 4, Copies([[1] * 8] * 4, [20] * 4)) == 8
    assert lengths.cut(1, 1, Copies([[]], [0])) == 0


def test_each_token_has_the_chance_of_those_before_it():
    lengths = CopiedK(AdaptiveDrafts(costs=FLAT))
    for _ in range(100):
        learn(lengths, 3, [1, 1, 1], [1, 1, 0])
    assert [lengths.cut(1, 1, Copies([[1] * 8], [matched])) for matched in (3, 5, 6)] == [2, 0, 8]


def test_drafts_that_do_not_pay_are_timed_seldom():
    """Also in the first text of a decoder, which nothing has timed yet."""
    for matched in (1, 4):
        lengths, copies, drafted = CopiedK(AdaptiveDrafts()), Copies([[1] * 8], [matched]), 0
        for _ in range(LOOK_AROUND_0 - 1):
            drafted += (width := lengths.cut(1, 1, copies)) > 0
            took(lengths, 1, 8, width, DEAR[width])
            learn(lengths, matched, [1] * 8, [0])
        assert drafted <= 7


@pytest.mark.parametrize(("costs", "width"), [(FLAT, 8), (CHEAP, 8), ([1 + 2.0 * k for k in range(9)], 0)])
def test_what_a_token_costs_is_learned_where_drafts_are_right(costs, width):
    """From the first step on a long match is verified, whatever it will cost; then its time says whether it pays."""
    lengths, copies, chosen = CopiedK(AdaptiveDrafts()), Copies([[1] * 8], [LONGEST]), []
    for step in range(40):
        chosen.append(lengths.cut(1, 1, copies) if step % 2 else 0)  # every other step finds nothing
        took(lengths, 1, 8, chosen[-1], costs[chosen[-1]])
        learn(lengths, LONGEST, [1] * 8, [1] * 9)
    assert chosen[1] == 8 and {*chosen[21::2]} == {width}
    assert lengths.costs(1)[8] == pytest.approx(costs[8] / costs[0], abs=0.011)
    assert lengths.costs(2) is None


def test_times_of_other_numbers_of_rows_are_a_first_guess():
    lengths, copies = CopiedK(AdaptiveDrafts()), Copies([[1] * 8] * 2, [LONGEST] * 2)
    for width in (0, 8) * 5:
        took(lengths, 1, 8, width, 1 + 2.0 * width)
    assert lengths.cut(2, 2, copies) == 0 and CopiedK(AdaptiveDrafts()).cut(2, 2, copies) == 8
    assert lengths.costs(2) is None


def test_other_widths_are_looked_at_now_and_then():
    lengths, copies = CopiedK(AdaptiveDrafts()), Copies([[1] * 8], [20])
    for _ in range(30):
        learn(lengths, 20, [1] * 8, [1] * 9)
    chosen = Counter()
    for _ in range(20 * LOOK_AROUND):
        width = lengths.cut(1, 1, copies)
        took(lengths, 1, 8, width, FLAT[width])
        chosen[width] += 1
    assert chosen[8] > 0.9 * 20 * LOOK_AROUND and 5 < chosen[4] < 40 and not {3, 5, 6, 7} & chosen.keys()


@pytest.mark.parametrize("look", [0.004, 0.06, 0.9])
def test_looking_in_vain_takes_no_more_than_its_share(look):
    """Each time takes so much of a plain step. It stops for a while only, also where one takes nearly a step."""
    lengths, looked = CopiedK(AdaptiveDrafts()), []
    for step in range(1000):
        if asked := lengths.choose(1, 1, [8]):
            looked.append(step)
        lengths.observe(StepOutcome(1, asked, 0, [], 1.0, looking=look if asked else 0.0))
    pauses = [after - before for before, after in itertools.pairwise(looked)]
    assert asked in (0, 8) and max(pauses) <= PAUSE + 1 and looked[-1] >= 1000 - PAUSE - 1
    assert look * len(looked) <= max(LOOKING + look + 1000 * LOOKS, 1.1 * look * 1000 / PAUSE)
    assert look > LOOKS or len(looked) == 1000
    lengths.observe(StepOutcome(1, 8, 8, [], 1.0, looking=look))  # which had drafts
    assert lengths.choose(1, 1, [8]) == 8


def test_nothing_that_is_timed_counts_where_times_are_given():
    lengths = CopiedK(AdaptiveDrafts(costs=FLAT))
    for _ in range(100):
        lengths.observe(StepOutcome(1, 8, 0, [], 1.0, looking=10.0))
        assert lengths.choose(1, 1, [8]) == 8


def test_nothing_is_chosen_where_texts_depend_on_it():
    lengths = CopiedK(AdaptiveDrafts(8, fixed=3))
    assert not lengths.chooses(text_depends=True) and lengths.fixed == 3
    assert lengths.chooses(text_depends=False) and lengths.choose(1, 1, [8]) == lengths.most == 8


# ---- in the loop ------------------------------------------------------------------------------------------

DRAFTERS = {
    "suffix": SuffixDrafter,
    "lookup": lambda: PromptLookupDrafter(min_ngram=1),
    "predicted": lambda: PredictedDrafter(SuffixDrafter()),
}


def cuts(monkeypatch, choose) -> list[int]:
    """Lets ``choose`` say how many of the longest copy are verified. Returns what it says."""
    chosen = []

    def cut(self, rows: int, live: int, copies: Copies) -> int:
        assert 0 < live <= rows == len(copies.tokens) == len(copies.matched)
        chosen.append(choose(max(map(len, copies.tokens))))
        return chosen[-1]

    monkeypatch.setattr(CopiedK, "cut", cut)
    return chosen


@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_do_not_depend_on_what_is_verified(name, monkeypatch):
    draw = random.Random(0)
    chosen = cuts(monkeypatch, lambda longest: draw.randint(0, longest))
    ids, settings = prompts(3, 5, 20), {"max_new_tokens": 40, "eos_token_id": []}
    for more in ({}, {"params": SamplingParams(0.7), "rule": "coupled", "seed": 3}):
        plain = generate(tiny_model(), None, ids, 0, **settings, **more)
        found = generate(tiny_model(), DRAFTERS[name](), ids, AdaptiveDrafts(costs=FLAT), **settings, **more)
        assert found.tokens == plain.tokens and found.drafter_error is None
        assert 0 < found.stats.accepted < found.stats.drafted
    assert {0, 1, 2} < {*chosen}


def test_only_what_is_verified_counts(monkeypatch):
    chosen = cuts(monkeypatch, lambda longest: min(longest, 3))
    text = prompts(1, 30, 30)[0]
    result = generate(
        tiny_model(),
        SuffixDrafter(),
        [text * 2],
        AdaptiveDrafts(),
        max_new_tokens=42,
        logits_processor=[Repeats(30)],
    )
    assert result.tokens == [(text * 2)[:42]]
    assert result.stats.drafted == result.stats.accepted == sum(chosen) and result.stats.steps == 11
    assert result.stats.steps_by_drafts[3] == 10 and result.stats.steps_by_drafts[1] == 1


@pytest.mark.parametrize("width", [0, 2, 8])
def test_what_texts_show_is_learned_whatever_is_verified(width, monkeypatch):
    cuts(monkeypatch, lambda longest: min(longest, width))
    decoder = SpeculativeDecoder(tiny_model(), SuffixDrafter(), AdaptiveDrafts(costs=FLAT))
    text = prompts(1, 30, 30)[0]
    decoder.generate([text * 2], max_new_tokens=60, logits_processor=[Repeats(30)], eos_token_id=[])
    assert (before := chance(decoder._lengths.chances, LONGEST, Votes.ONCE)) > 0.93
    decoder.generate([text * 2] * 2, max_new_tokens=60, eos_token_id=[])  # which goes on in another way
    assert chance(decoder._lengths.chances, LONGEST, Votes.ONCE) < before - 0.01


def test_a_prediction_is_tried_before_anything_confirms_it():
    model, prompt = tiny_model(), prompts(1, 9, 9)[0]
    plain = generate(model, None, [prompt], 0, max_new_tokens=30, eos_token_id=[]).tokens[0]
    decoder = SpeculativeDecoder(model, PredictedDrafter(), AdaptiveDrafts(costs=FLAT))
    scheduler = Scheduler(decoder, rows=1, max_length=60)
    for steps in (6, 4):  # the last token of the first one is drafted alone, which pays for no recording
        (right,) = scheduler.run([Request(prompt, 30, prediction=plain, eos_token_id=[])])
        assert right.tokens == plain and right.stats.steps == steps
    chances = decoder._lengths.chances
    assert chance(chances, 0) > 0.8 and chance(chances, 9) > 0.9 and chance(chances, LONGEST) > 0.9


def test_where_a_text_depends_on_it_all_is_verified(monkeypatch):
    chosen = cuts(monkeypatch, lambda longest: 0)
    ids, settings = (
        prompts(2, 12, 20),
        {"max_new_tokens": 30, "params": SamplingParams(1.0), "rule": "token", "seed": 1},
    )
    fixed = generate(tiny_model(), SuffixDrafter(), ids, 4, **settings)
    adapts = generate(tiny_model(), SuffixDrafter(), ids, AdaptiveDrafts(fixed=4), **settings)
    assert adapts.tokens == fixed.tokens and adapts.stats.drafted == fixed.stats.drafted > 0 and not chosen
    assert generate(tiny_model(), SuffixDrafter(), ids, 4, max_new_tokens=9).stats.drafted > 0 and not chosen


def test_models_and_trees_choose_before_they_draft():
    target, draft = tunable_pair(0.5, layers=1)
    kinds = {
        CopiedK: ((SuffixDrafter(), None), (PredictedDrafter(), None), (PredictedDrafter(SuffixDrafter()), None)),
        AdaptiveK: ((SuffixDrafter(), 4), (draft, None), (None, None)),
    }
    for kind, cases in kinds.items():
        for drafter, tree in cases:
            if drafter is None:
                decoder = SpeculativeDecoder(target, PredictedDrafter(model_of(target, draft)), AdaptiveDrafts())
            else:
                decoder = SpeculativeDecoder(target, drafter, AdaptiveDrafts(), tree=tree)
            assert type(decoder._lengths) is kind


def model_of(target, draft):
    return SpeculativeDecoder(target, draft).drafter
