"""Step times that are learned from steps: in which order, how they are joined, and what does not disturb them."""

from __future__ import annotations

import random

import pytest
from specdec.drafters.step_times import SAMPLES, UNCOUNTED, StepTimes

T = [0.010, 0.014, 0.016, 0.018, 0.020, 0.022, 0.024, 0.026, 0.028]  # a step up at 1, then a line


def learned(times: list[float] = T, widths=range(9), first: float = 5.0) -> StepTimes:
    """Steps of the widths that are asked for; the first one of each takes ``first`` times as long."""
    found, seen = StepTimes(widths), set()
    while (k := found.missing) is not None:
        found.took(k, times[k] * (1 if k in seen else first))
        seen.add(k)
    return found


def test_a_few_widths_are_timed_in_turns():
    found, asked = StepTimes(range(9)), []
    while (k := found.missing) is not None:
        asked.append(k)
        found.took(k, T[k])
    assert asked == [0, 1, 6] * (UNCOUNTED + SAMPLES)


@pytest.mark.parametrize("widths", [(0, 1), (0, 1, 2), (0, 1, 2, 4), (0, 1, 2, 4, 8), range(4)], ids=str)
def test_fewer_widths(widths):
    assert learned(widths=widths).relative == pytest.approx([T[k] / T[0] for k in widths])


def test_others_lie_on_a_line_and_the_first_step_does_not_count():
    found = learned()
    assert found.relative == pytest.approx([t / T[0] for t in T])
    assert [found.of(k) for k in range(9)] == pytest.approx([t / T[0] for t in T])
    assert found.seconds_plain == pytest.approx(T[0])


def test_the_first_step_does_not_count_and_then_the_shortest_does():
    found = StepTimes(range(9))
    for seconds in (0.5, 1.4, 1.2, 1.3, 1.4, 1.5):
        found.took(0, seconds)
    assert found.seconds_plain == pytest.approx(1.2)


def test_a_width_that_is_used_is_known_for_itself():
    found = learned()
    found.took(3, 9.0)
    for _ in range(20):
        found.took(3, 0.030)
        found.took(0, T[0])
    assert found.of(3) == pytest.approx(3.0, rel=0.1)
    assert found.of(4) >= found.of(3) and found.of(1) == pytest.approx(1.4, rel=0.1)  # and no longer step is cheaper


def test_a_change_of_speed_shows_in_one_width_and_counts_for_all():
    """The machine is half as fast from now on, and only K = 4 is used: that is no reason to choose another K."""
    found = learned()
    for _ in range(200):
        found.took(4, T[4])
    for _ in range(200):
        found.took(4, 2 * T[4])
    assert found.seconds_plain == pytest.approx(2 * T[0], rel=0.2)
    assert found.relative == pytest.approx([t / T[0] for t in T], rel=0.2)


def test_a_change_of_one_width_is_learned():
    found = learned()
    for _ in range(300):
        for k in (0, 4):
            found.took(k, T[k] * (2 if k == 4 else 1))
    assert found.of(4) == pytest.approx(4.0, rel=0.1)


def test_noise_and_interruptions_do_not_disturb():
    draw, found = random.Random(0), StepTimes(range(9))
    for _ in range(2000):
        k = found.missing
        k = draw.randrange(9) if k is None else k
        found.took(k, T[k] * draw.lognormvariate(0, 0.1) * (20 if draw.random() < 0.02 else 1))
    assert found.relative == pytest.approx([t / T[0] for t in T], rel=0.1)


def test_given_costs_stay():
    found = StepTimes((0, 1, 2), [2.0, 3.0, 5.0])
    assert found.missing is None
    for _ in range(10):
        found.took(1, 100.0)
    assert found.relative == [1.0, 1.5, 2.5] and found.of(1) == 1.5
    assert found.seconds_plain == pytest.approx(100 / 1.5)
