"""The K that is chosen for a batch, in simulations: nearly as fast as the best K for the true acceptance, and never
slower than plain decoding by more than trials may cost.

Costs are those of a step with K drafts in units of a plain step.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest
from specdec import AdaptiveDrafts
from specdec.loop.draft_length import CHOICE, LOOK_AROUND, PAUSE, SHARE, AdaptiveK, FixedK, RowResult, StepOutcome
from specdec.loop.step_times import TIMED, StepTimes
from support.simulated_batch import adaptive, expected, simulate

FLAT = [1.0, *(1.04 + 0.04 * k for k in range(1, 9))]  # bound by memory: drafts are nearly free
CHEAP = [1 + 0.1 * k for k in range(9)]
MEASURED = [1.0, 1.47, 1.73, 1.99, 2.25, 2.51, 2.77, 3.03, 3.29]  # the embedded pair on two cores, 16 rows
DEAR = [1.0, 1.6, 2.2, 2.8, 3.4, 4.0, 4.6, 5.2, 5.8]
COSTS = {"flat": FLAT, "cheap": CHEAP, "measured": MEASURED, "dear": DEAR}
ALPHAS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95)
ROWS = (1, pytest.param(8, marks=pytest.mark.nightly))


def of_the_best(costs, alpha, rows: int, steps: int = 1500, runs: int = 6, **more) -> float:
    """The speed with times that have to be learned, relative to an oracle's."""
    ours, best = [], []
    for seed in range(runs):
        given = {"steps": steps, "seed": seed, **more}
        ours.append(simulate(costs, alpha, rows, lengths=adaptive(costs), noise=0.05, **given).speed)
        best.append(simulate(costs, alpha, rows, **given).speed)
    return statistics.mean(ours) / statistics.mean(best)


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("rows", ROWS)
def test_it_is_as_fast_as_the_best_k_for_the_true_acceptance(costs, rows):
    """One row is the hardest: one step tests one first draft."""
    found = [of_the_best(COSTS[costs], lambda *_, a=a: a, rows) for a in ALPHAS]
    assert min(found) >= 0.96 and statistics.mean(found) >= 0.975, found


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("rows", ROWS)
def test_it_follows_acceptance_that_switches_and_a_machine_that_slows_down(costs, rows):
    assert of_the_best(COSTS[costs], lambda row, step: (0.85, 0.1)[step // 1000 % 2], rows, 3000) >= 0.95
    slower = {"speed": lambda step: (1, 2)[step // 300 % 2]}
    assert of_the_best(COSTS[costs], lambda *_: 0.6, rows, 1500, **slower) >= 0.95


@pytest.mark.parametrize("costs", COSTS)
def test_rows_that_differ(costs):
    """Half of them are accepted, half are not: the best K is that of the sum."""
    assert of_the_best(COSTS[costs], lambda row, step: (0.9, 0.2)[row % 2], 8) >= 0.97


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5])
@pytest.mark.parametrize("rows", ROWS)
def test_it_is_never_slower_than_plain_decoding_by_more_than_trials_cost(alpha, rows):
    """Also with texts that end, and a drafter that has to read what it missed."""
    for seed in range(3):
        run = simulate(DEAR, lambda *_: alpha, rows, 3000, lengths=adaptive(DEAR, given=True), seed=seed, text=100)
        assert run.speed >= (1 - 2 * SHARE) * rows * 0.99
        learned = simulate(DEAR, lambda *_: alpha, rows, 3000, lengths=adaptive(DEAR), seed=seed, catch_up=0.02)
        assert learned.speed >= (1 - 4 * SHARE) * rows * 0.99  # with the steps that were timed first


@pytest.mark.parametrize("finds", [(8, 0, 0), (2, 0, 1, 0), (0, 0, 0, 0, 0, 0, 0, 8)])
@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.9])
def test_steps_in_which_nothing_is_found_cost_a_plain_step(finds, alpha):
    """They neither make long steps seem cheap, nor the drafts of other steps. Half a plain step a draft is dear."""
    costs = [1 + 0.5 * k for k in range(9)]
    for steps, least in ((200, 0.95), (2000, 0.98)):
        run = [
            simulate(costs, lambda *_: alpha, 1, steps, lengths=adaptive(costs), noise=0.05, finds=finds, seed=seed)
            for seed in range(4)
        ]
        assert statistics.mean(r.speed for r in run) >= least, (steps, [r.speed for r in run])


def test_drafts_that_are_seldom_found_are_paid_for_as_seldom():
    """Eight drafts in every third step win a third, although a step in which all are found takes that of five."""
    costs = [1 + 0.5 * k for k in range(9)]
    run = simulate(costs, lambda *_: 0.95, 1, 2000, lengths=adaptive(costs), noise=0.05, finds=(8, 0, 0))
    assert run.speed >= 0.95 * (2 + expected(0.95, 8)) / (2 + costs[8])


def h100(rows: int, target: float = 80e9, draft: float = 2e9) -> list[float]:
    """A roofline: 80 billion bfloat16 parameters that verify for a draft of 2 billion, over 3.35 TB/s and 800 TFLOP/s,
    and 30 microseconds that each of the forwards takes whatever it does."""

    def forward(parameters: float, tokens: int) -> float:
        return 30e-6 + max(2 * parameters / 3.35e12, 2 * parameters * tokens / 800e12)

    seconds = [forward(target, rows * (k + 1)) + k * forward(draft, rows) for k in range(9)]
    return [s / seconds[0] for s in seconds]


def test_on_a_gpu_drafts_end_where_the_batch_is_bound_by_arithmetic():
    """Verification is free while the weights are read anyway. From some batch on it is not, and then no drafts pay."""
    found, widths = [], (0, 1, 2, 4, 8)
    for rows in (1, 8, 32, 64, 128, 256, 512):
        costs, simulated = h100(rows), min(rows, 32)
        run = simulate(costs, lambda *_: 0.7, simulated, 400, lengths=adaptive(costs, given=True, few=True))
        oracle = simulate(costs, lambda *_: 0.7, simulated, 400, widths=widths)
        assert {*run.chosen} <= {*widths} and run.speed >= 0.97 * oracle.speed, rows
        found.append(run.chosen.most_common(1)[0][0])
    assert found == sorted(found, reverse=True) and found[0] >= 4 and found[-2:] == [0, 0]


def capped(costs: Sequence[float], caps: Sequence[int], lengths: AdaptiveK | None = None) -> list[int]:
    """The K of 300 steps of rows of whose drafts all are accepted, but none after the rows' caps."""
    lengths, chosen = lengths or adaptive(costs, given=True), []
    for _ in range(300):
        k = lengths.choose(len(caps), len(caps), caps)
        own = [min(k, cap) for cap in caps]
        chosen.append(max(own))
        results, width = [RowResult(n, n, n + 1, False) for n in own], max(own)
        lengths.observe(StepOutcome(len(caps), width, width, results, costs[width]))
    return chosen


def test_rows_that_may_draft_few_tokens_win_few():
    """A draft that comes after all rows' caps only costs, and one after a row's cap wins nothing there."""
    steep = [1.0, 1.5, 2.5, *(2.75 + 0.25 * k for k in range(6))]
    for costs, caps, best in ((CHEAP, (8, 8), 8), (CHEAP, (2, 3), 3), (CHEAP, (2, 8), 8), (steep, (2, 1), 1)):
        assert capped(costs, caps)[40:].count(best) > 200, (costs, caps)
    assert capped([1.0, *[3.5] * 8], (2, 2)).count(0) > 250  # three tokens in the time of 3.5


@pytest.mark.parametrize("cap", (1, 2, 5))
def test_times_are_learned_as_far_as_rows_may_draft(cap):
    """Whether drafts pay is known although none of the rows can ever draft as many as are timed first."""
    for costs, pays in (([1.0, *[20.0] * 8], False), (CHEAP, True)):
        lengths = adaptive(costs)
        chosen = capped(costs, (cap, cap), lengths)
        assert max(chosen) <= cap and lengths.costs(2) is None
        assert (chosen[40:].count(cap) > 200) if pays else (chosen[40:].count(0) > 240)
    assert capped(CHEAP, (8, 8), lengths)[40:].count(8) > 200
    assert lengths.costs(2) == pytest.approx(CHEAP, abs=0.011) and lengths.costs(1) is None


def test_each_number_of_rows_has_its_times():
    """Drafts cost little in steps of one row, and as much as a plain step in steps of eight."""
    lengths, few, many = adaptive(CHEAP), [1 + 0.1 * k for k in range(9)], [4 + 4.0 * k for k in range(9)]
    for _ in range(3):
        one = simulate(few, lambda *_: 0.8, 1, 300, lengths=lengths)
        all_rows = simulate(many, lambda *_: 0.8, 8, 300, lengths=lengths)
    assert one.chosen[0] < 60 and all_rows.chosen[0] > 240
    assert lengths.costs(1)[1] == 1.1 and lengths.costs(8)[1] == 2.0


def trials(run) -> int:
    return sum(run.chosen.values()) - run.chosen[0]


def test_trials_are_rare_where_they_are_dear():
    def tried(costs, **more) -> int:
        return trials(simulate(costs, lambda *_: 0.0, 1, 4000, lengths=adaptive(costs), **more))

    cheap, dear, missed = tried(CHEAP), tried(DEAR), tried(CHEAP, catch_up=0.1)
    assert 0 < dear < cheap < 1000
    assert 0 < missed < cheap / 2  # what the drafter has to read is part of a trial's price


@pytest.mark.parametrize("rows", [1, 4])
def test_a_trial_that_goes_well_ends_the_pause(rows):
    """Whatever was learned of drafts that were rejected for long."""
    for seed in range(3):
        lengths = adaptive(MEASURED)
        simulate(MEASURED, lambda *_: 0.0, rows, 1500, seed=seed, lengths=lengths)
        after = simulate(MEASURED, lambda *_: 0.95, rows, 800, seed=seed, lengths=lengths)
        assert after.chosen[0] < PAUSE[1] / 4 and after.chosen[8] > 300


def test_other_widths_are_looked_at_now_and_then():
    run = simulate(CHEAP, lambda *_: 0.8, 4, 20 * CHOICE * LOOK_AROUND, lengths=adaptive(CHEAP), noise=0.02)
    assert {*run.chosen} == {*range(9)} and run.chosen.most_common(1)[0][1] > 0.5 * 20 * CHOICE * LOOK_AROUND


@pytest.mark.parametrize(("prompt", "drafts"), [(100, True), (3000, False)])
def test_prompts_that_the_drafter_has_to_read_count(prompt, drafts):
    """Drafts win eight plain steps in each text. Reading its prompt takes one, or thirty."""
    given = {"text": 20, "catch_up": 0.01 / 4, "prompt": prompt}
    run = simulate(CHEAP, lambda *_: 0.6, 4, 2000, lengths=adaptive(CHEAP), **given)
    assert (run.chosen[0] < 200) if drafts else (run.chosen[0] > 1700)


def test_a_time_that_something_interrupted_hardly_counts():
    times = StepTimes(range(9), None)
    for step in range(3 * (TIMED + 1)):
        width = times.missing(8)
        times.took(width, width, 9.0 if step < 3 else MEASURED[width])  # the first steps of a width warm up
    assert times.missing(8) is None
    before = times.of(1) / times.of(0)
    times.took(1, 1, 100.0)
    assert before < times.of(1) / times.of(0) < 1.07 * before


def test_k_is_fixed_where_texts_depend_on_it():
    lengths = AdaptiveK(AdaptiveDrafts(8, fixed=3), few=False)
    assert lengths.chooses(text_depends=False) and not lengths.chooses(text_depends=True) and lengths.fixed == 3
    assert AdaptiveK(AdaptiveDrafts(2), few=False).fixed == 2
    fixed = FixedK(5)
    assert not fixed.chooses(False) and (fixed.most, fixed.fixed, fixed.adapts) == (5, 5, False)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_drafts": 0}, "max_drafts: got 0"),
        ({"fixed": -1}, "fixed: got -1"),
        ({"fixed": 2.0}, "fixed: got 2.0"),
        ({"max_drafts": 2, "costs": [1, 2]}, "costs: got .*allowed: 3 numbers"),
        ({"max_drafts": 1, "costs": [2, 1]}, "costs: got .*do not fall"),
        ({"max_drafts": 1, "costs": [0, 1]}, "costs: got"),
        ({"max_drafts": 1, "costs": [1, float("inf")]}, "costs: got"),
    ],
)
def test_settings_are_checked(fields, told):
    with pytest.raises(ValueError, match=told):
        AdaptiveDrafts(**fields)
