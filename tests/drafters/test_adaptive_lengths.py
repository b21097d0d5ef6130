"""The K that is chosen for a batch, in simulations: as fast as the best K for the true acceptance, and never slower
than plain decoding by more than trials may cost.

The costs are those of a step with K drafts in units of a plain step. ``H100`` is a roofline: one of 80 billion bfloat16
parameters that verifies for a draft of 2 billion, over 3.35 TB/s and 800 TFLOP/s (dense, and as much as matrix products
reach), and 30 microseconds that each of the forwards takes whatever it does.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from specdec.drafters.adaptive_lengths import (
    HOLD,
    LOOK_AROUND,
    REST,
    SHARE,
    TRIAL,
    Learned,
    OwnLengths,
    SharedLength,
    learned,
)
from specdec.loop.draft_length import AdaptiveDrafts, Remaining, RowResult
from support.simulated_batch import Run, simulate

FLAT = [1.0, *(1.04 + 0.04 * k for k in range(1, 9))]  # memory-bound: drafts are nearly free
CHEAP = [1 + 0.1 * k for k in range(9)]
MEASURED = [1.0, 1.47, 1.73, 1.99, 2.25, 2.51, 2.77, 3.03, 3.29]  # the embedded pair on two cores, 16 rows
DEAR = [1.0, 1.6, 2.2, 2.8, 3.4, 4.0, 4.6, 5.2, 5.8]
COSTS = {"flat": FLAT, "cheap": CHEAP, "measured": MEASURED, "dear": DEAR}
GRAPH_WIDTHS = (0, 1, 2, 4, 8)


def h100(rows: int, target: float = 80e9, draft: float = 2e9) -> list[float]:
    def forward(parameters: float, tokens: int) -> float:
        return 30e-6 + max(2 * parameters / 3.35e12, 2 * parameters * tokens / 800e12)

    seconds = [forward(target, rows * (k + 1)) + k * forward(draft, rows) for k in range(9)]
    return [s / seconds[0] for s in seconds]


def of_the_best(costs, alpha, rows: int, steps: int = 1500, runs: int = 2, **more) -> float:
    """The speed, relative to an oracle's that knows the probabilities, and chooses K by them in each step."""
    ours = [simulate(costs, alpha, rows, steps, seed=seed, **more).speed for seed in range(runs)]
    best = [simulate(costs, alpha, rows, steps, seed=seed, oracle=True, **more).speed for seed in range(runs)]
    return statistics.mean(ours) / statistics.mean(best)


ALPHAS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95)


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize(("rows", "steps"), [(1, 3000), pytest.param(8, 1500, marks=pytest.mark.nightly)])
def test_it_is_as_fast_as_the_best_k_for_the_true_acceptance(costs, rows, steps):
    """One row is the hardest: one step tests one first draft."""
    found = [of_the_best(COSTS[costs], lambda *_, a=a: a, rows, steps, runs=2) for a in ALPHAS]
    assert min(found) >= 0.96 and statistics.mean(found) >= 0.98, found


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("rows", [1, pytest.param(8, marks=pytest.mark.nightly)])
def test_it_follows_acceptance_that_switches(costs, rows):
    assert of_the_best(COSTS[costs], lambda row, step: (0.85, 0.1)[step // 1000 % 2], rows, 3000) >= 0.97


@pytest.mark.parametrize("costs", COSTS)
def test_rows_that_differ(costs):
    """Half of them are accepted, half are not: the best K is that of the sum."""
    assert of_the_best(COSTS[costs], lambda row, step: (0.9, 0.2)[row % 2], 8) >= 0.97


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.55])
@pytest.mark.parametrize("rows", [1, pytest.param(8, marks=pytest.mark.nightly)])
def test_it_is_never_slower_than_plain_decoding_by_more_than_trials_cost(alpha, rows):
    """Also with texts that end, and a drafter that has to read what it missed."""
    for seed in range(3):
        ours = simulate(DEAR, lambda *_: alpha, rows, 3000, seed=seed, catch_up=0.02, text=100).speed
        assert ours >= (1 - 2 * SHARE) * rows * 0.99


@pytest.mark.parametrize("costs", COSTS)
def test_learned_times_are_as_good_as_given_ones(costs):
    more = {"noise": 0.05, "text": 200, "catch_up": 0.01}
    for alpha in (0.1, 0.8):
        given, found = (
            [
                simulate(COSTS[costs], lambda *_, a=alpha: a, 4, 2000, seed=i, learned=known, **more).speed
                for i, known in enumerate((new(), new()))
            ]
            for new in (lambda: None, lambda: Learned(range(9)))
        )
        assert statistics.mean(found) >= 0.97 * statistics.mean(given), alpha


def test_on_a_gpu_drafts_end_where_the_batch_is_bound_by_arithmetic():
    """Verification is free while the weights are read anyway. From some batch on it is not, and then no drafts pay."""
    found = []
    for rows in (1, 8, 32, 64, 128, 256, 512):
        costs, few = h100(rows), learned(AdaptiveDrafts(costs=h100(rows)), few=True)
        run = simulate(costs, lambda *_: 0.7, min(rows, 32), 400, learned=few, widths=GRAPH_WIDTHS)
        found.append(run.chosen.most_common(1)[0][0])
        assert {*run.chosen} <= {*GRAPH_WIDTHS}
        oracle = simulate(costs, lambda *_: 0.7, min(rows, 32), 400, oracle=True, widths=GRAPH_WIDTHS)
        assert run.speed >= 0.97 * oracle.speed, rows
    assert found == sorted(found, reverse=True) and found[0] >= 4 and found[4:] == [1, 0, 0]


def soon(lengths: SharedLength, rows: Sequence[int], live: int, remaining: Remaining | None = None) -> int:
    """The K after some steps, in which K may grow, and is kept for some."""
    return [lengths.next(rows, live, remaining)[rows[0]] for _ in range(2 * HOLD)][-1]


def test_k_is_chosen_for_the_batch():
    """Fifteen rows whose drafts are rejected do not wait for one whose drafts are accepted."""
    lengths = SharedLength(Learned(range(9), DEAR), 16)
    for _ in range(60):
        lengths.record(8, [RowResult(row, 8, 8 if row == 0 else 0, 1, False) for row in range(16)])
    assert soon(lengths, [0], 1) == 8
    assert 0 in {lengths.next([*range(16)], 16)[3] for _ in range(HOLD + 1)}


def test_rows_without_drafts_wait_too():
    lengths = SharedLength(Learned(range(9), DEAR), 16)
    for _ in range(60):
        lengths.record(8, [RowResult(0, 8, 8, 9, False)])
    assert soon(lengths, [0], 1) == 8
    assert 0 in {lengths.next([0], 16)[0] for _ in range(HOLD + 1)}


def capped(costs: Sequence[float], caps: dict[int, int], learned: Learned | None = None) -> list[int]:
    """The K of 300 steps of two rows of whose drafts all are accepted, but none after the rows' caps."""
    lengths, chosen = SharedLength(learned or Learned(range(9), costs), 2), []
    for _ in range(300):
        k = lengths.next([0, 1], 2, caps=caps)[0]
        own = [min(k, caps.get(row, k)) for row in range(2)]
        chosen.append(max(own))
        lengths.took(max(own), costs[max(own)])
        lengths.record(max(own), [RowResult(row, n, n, n + 1, False) for row, n in enumerate(own)])
    return chosen


def test_rows_that_may_draft_few_tokens_win_few():
    """A draft that comes after all rows' caps only costs, and one after a row's cap wins nothing there."""
    steep = [1.0, 1.5, 2.5, *(2.75 + 0.25 * k for k in range(6))]
    for costs, caps, best in ((CHEAP, {}, 8), (CHEAP, {0: 2, 1: 3}, 3), (CHEAP, {0: 2}, 8), (steep, {0: 2, 1: 1}, 1)):
        assert capped(costs, caps)[40:].count(best) > 200, (costs, caps)
    assert set(capped([1.0, *[3.5] * 8], {0: 2, 1: 2})[40:]) <= {0, 1, 2}
    assert capped([1.0, *[3.5] * 8], {0: 2, 1: 2}).count(0) > 250  # three tokens in the time of 3.5


@pytest.mark.parametrize("cap", (1, 2, 5))
def test_times_are_learned_as_far_as_rows_may_draft(cap):
    """Whether drafts pay is known although none of the rows can ever draft as many as are timed first."""
    for costs, pays in (([1.0, *[20.0] * 8], False), (CHEAP, True)):
        known = Learned(range(9))
        chosen = capped(costs, {0: cap, 1: cap}, known)
        assert max(chosen) <= cap and known.times.missing is not None and known.times.missing_to(cap) is None
        assert (chosen[40:].count(cap) > 200) if pays else (chosen[40:].count(0) > 240)
    assert capped(CHEAP, {}, known)[40:].count(8) > 200 and known.times.missing is None


def test_a_verdict_holds_for_some_steps():
    """Drafts win tokens a second, so trials would cost nothing, but row 0 ends last, and its drafts are rejected."""
    lengths, rows, chosen = SharedLength(Learned(range(3), [1.0, 1.5, 2.4]), 16), range(16), []
    for _ in range(8 * REST):
        k = lengths.next(rows, 16, Remaining(dict.fromkeys(rows, 40)))[0]
        lengths.record(k, [RowResult(row, k, k if row else 0, 1 + (k if row else 0), False) for row in rows])
        chosen.append(k)
    drafted = sum(k > 0 for k in chosen)
    assert 3 * TRIAL <= drafted <= 9 * TRIAL
    last = "".join(map(str, chosen[REST:])).strip("0").split("0" * REST)
    assert {*(part.strip("0") for part in last)} == {"1" * TRIAL}


def test_the_first_step_after_a_pause_is_not_timed():
    lengths = SharedLength(Learned(range(9)), 1)
    simulate(MEASURED, lambda *_: 0.0, 1, 1500, lengths=lengths)
    while not lengths.next([0], 1)[0]:
        lengths.took(0, 1.0)
        lengths.record(0, [RowResult(0, 0, 0, 1, False)])
    before = lengths.learned.times.of(1)
    lengths.took(0, 1.0)  # the plain step before is reported late
    lengths.took(1, 2.0)
    assert lengths.learned.times.of(1) == before
    lengths.took(1, 2.0)
    assert lengths.learned.times.of(1) > before


def test_what_seems_better_by_chance_is_not_chosen():
    def chosen(alpha: float) -> int:
        lengths = SharedLength(Learned(range(2), [1.0, 1.5]), 1)
        lengths.rows.common.record(1, np.array([1e6]), np.array([1e6 * alpha]))
        return min(lengths.next([0], 1)[0] for _ in range(HOLD + 1))

    assert chosen(0.53) == 0 and chosen(0.56) == 1  # 1.53 and 1.56 tokens in the time of 1.5


def test_a_row_that_is_behind_decides():
    """Its own drafts are rejected, so that the others' only make it wait."""
    lengths = SharedLength(Learned(range(9), MEASURED), 4)
    for _ in range(80):
        lengths.record(8, [RowResult(row, 8, 0 if row == 0 else 8, 1 if row == 0 else 9, False) for row in range(4)])
        lengths.next([*range(4)], 4)
    even, behind = (Remaining({0: first, 1: 100, 2: 100, 3: 100}) for first in (10, 100))
    assert soon(lengths, range(4), 4, even) > 0
    assert 0 in [lengths.next([*range(4)], 4, behind)[0] for _ in range(HOLD + 1)]
    assert soon(lengths, [1, 2, 3], 4, even) > 0  # row 0 does not draft
    assert 0 in [lengths.next([1, 2, 3], 4, behind)[1] for _ in range(HOLD + 1)]


def test_sequences_that_wait_are_like_those_in_rows():
    """Row 0 ends soon. The first one that waits begins in it and is expected to be like it."""
    for accepted, waiting, pays in ((8, [1000], True), (0, [1000], False), (8, [1000, 1000], False)):
        lengths = SharedLength(Learned(range(9), MEASURED), 2)
        for _ in range(80):
            both = (0, accepted), (1, 8 - accepted)
            lengths.record(8, [RowResult(row, 8, n, n + 1, False) for row, n in both])
            lengths.next([0, 1], 2)
        remaining = Remaining({0: 10, 1: 40}, waiting)
        assert (0 not in {lengths.next([0, 1], 2, remaining)[0] for _ in range(HOLD + 1)}) == pays


def test_a_result_is_not_given_to_the_next_sequence():
    lengths = SharedLength(Learned(range(9), CHEAP), 2)
    for _ in range(60):
        lengths.next([0, 1], 2)
        lengths.record(8, [RowResult(0, 8, 0, 1, False), RowResult(1, 8, 8, 9, False)])
    lengths.begin(0)
    for _ in range(HOLD + 1):
        lengths.next([0, 1], 2)
    common = lengths.rows.common.by_position()
    assert lengths.rows.reached([0])[0] == pytest.approx(common.cumprod())


def test_k_doubles_at_most():
    lengths, chosen = SharedLength(Learned(range(9), FLAT), 1), []
    for _ in range(6):
        chosen.append(lengths.next([0], 1)[0])
        lengths.record(chosen[-1], [RowResult(0, chosen[-1], chosen[-1], chosen[-1] + 1, False)])
    assert chosen == [2, 4, 8, 8, 8, 8]


def trials(run: Run) -> int:
    return sum(run.chosen.values()) - run.chosen[0]


def test_trials_are_rare_where_they_are_dear():
    cheap, dear = (simulate(c, lambda *_: 0.0, 1, 4000) for c in (CHEAP, DEAR))
    assert 0 < trials(dear) < trials(cheap) < 1000
    missed = simulate(CHEAP, lambda *_: 0.0, 1, 4000, catch_up=0.1)
    assert 0 < trials(missed) < trials(cheap) / 3  # what the drafter has to read is part of a trial's price


@pytest.mark.parametrize("rows", [1, 4])
def test_a_trial_that_goes_well_ends_the_pause(rows):
    """Whatever was learned of drafts that were rejected for long."""
    for seed in range(3):
        lengths = SharedLength(Learned(range(9), MEASURED), rows)
        simulate(MEASURED, lambda *_: 0.0, rows, 1500, seed=seed, lengths=lengths)
        after = simulate(MEASURED, lambda *_: 0.95, rows, 400, seed=seed, lengths=lengths)
        assert after.chosen[0] < 100


def test_a_trial_begins_without_prejudice():
    lengths = SharedLength(Learned(range(9), MEASURED), 1)
    simulate(MEASURED, lambda *_: 0.0, 1, 1500, lengths=lengths)
    while not lengths.next([0], 1)[0]:
        lengths.record(0, [RowResult(0, 0, 0, 1, False)])
    assert lengths.rows.common.by_position()[0] > 0.5


def test_other_widths_are_looked_at_now_and_then():
    run = simulate(CHEAP, lambda *_: 0.8, 4, 20 * HOLD * LOOK_AROUND, learned=Learned(range(9)), noise=0.02)
    assert 8 <= run.chosen[0] <= 20  # some of the first steps, and every third look


@pytest.mark.parametrize(("prompt", "drafts"), [(100, True), (3000, False)])
def test_prompts_that_the_drafter_has_to_read_count(prompt, drafts):
    """Drafts win eight plain steps in each text. Reading its prompt takes one, or thirty."""
    run = simulate(CHEAP, lambda *_: 0.6, 4, 2000, learned=Learned(range(9)), text=20, catch_up=0.01 / 4, prompt=prompt)
    assert (run.chosen[0] < 200) if drafts else (run.chosen[0] > 1700)


def test_what_was_missed_in_a_pause_is_no_prompt():
    lengths = SharedLength(Learned(range(9), MEASURED), 1)
    simulate(MEASURED, lambda *_: 0.0, 1, 1500, lengths=lengths)
    lengths.begin(0)
    while not lengths.next([0], 1)[0]:
        lengths.record(0, [RowResult(0, 0, 0, 1, False)])
    before = lengths.learned.balance
    lengths.caught_up(3.0)
    assert lengths.learned.balance < before and lengths.learned.reading() == 0
    lengths.took(1, 1.0)
    lengths.begin(0)
    lengths.caught_up(3.0)
    assert lengths.learned.reading() > 0


def test_a_sequence_alone_does_not_depend_on_others():
    drafts = AdaptiveDrafts(costs=CHEAP, alone=True)

    def chosen(company: list[int]) -> list[int]:
        lengths, found = OwnLengths(lambda: learned(drafts, few=False), 4), []
        for step in range(200):
            rows = [0, *company] if step % 3 else [0]
            k = lengths.next(rows, len(rows))
            found.append(k[0])
            results = [RowResult(r, k[r], min(k[r], (step * 7 + r) % 4), 1, False) for r in rows]
            lengths.record(max(k.values()), [r._replace(emitted=r.accepted + 1) for r in results])
        return found

    assert chosen([]) == chosen([1, 2, 3]) and len({*chosen([])}) > 2


def test_a_sequence_alone_does_not_depend_on_the_one_before():
    lengths = OwnLengths(lambda: learned(AdaptiveDrafts(costs=CHEAP, alone=True), few=False), 1)
    first = lengths.next([0], 1)
    for _ in range(30):
        lengths.record(8, [RowResult(0, 8, 8, 9, False)])
        lengths.next([0], 1)
    assert lengths.next([0], 1)[0] == 8
    lengths.begin(0)
    assert lengths.next([0], 1) == first
