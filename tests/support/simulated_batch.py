"""A batch whose drafts are accepted with given probabilities and whose steps take given times, without any model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec.drafters.adaptive_lengths import Learned, SharedLength
from specdec.loop.draft_length import RowResult

Alpha = Callable[[int, int], float]  # of a row and a step


@dataclass
class Run:
    """What a simulated batch did."""

    tokens: int = 0
    time: float = 0.0
    chosen: Counter = field(default_factory=Counter)

    @property
    def speed(self) -> float:
        return self.tokens / self.time


def expected(alpha: float, k: int) -> float:
    return sum(alpha**i for i in range(k + 1))


def simulate(
    costs: Sequence[float],
    alpha: Alpha,
    rows: int = 1,
    steps: int = 2000,
    *,
    fixed: int | None = None,
    oracle: bool = False,
    learned: Learned | None = None,
    lengths: SharedLength | None = None,
    noise: float = 0.0,
    widths: Sequence[int] | None = None,
    catch_up: float = 0.0,
    text: int | None = None,
    prompt: int = 0,
    seed: int = 0,
) -> Run:
    """Decodes ``steps`` steps.

    Args:
        costs: T(0), T(1), ...
        fixed: K; None: chosen.
        oracle: K is the best one for the true probabilities.
        learned: what is known at first; None: the costs.
        lengths: continues an earlier simulation.
        noise: standard deviation of the logarithm of a step's time.
        widths: the K that may be chosen.
        catch_up: time that the drafter takes for each token that it was not shown.
        prompt: tokens of each sequence's prompt, which the drafter has to read.
        text: tokens of a sequence, after which the next one begins in its row; None: it never ends.
    """
    draw, run = random.Random(seed), Run()
    widths = range(len(costs)) if widths is None else widths
    lengths = lengths or SharedLength(learned or Learned(widths, [costs[k] for k in widths]), rows)
    everybody, unseen, room = [*range(rows)], prompt * rows, [text] * rows
    for step in range(steps):
        alphas = [alpha(row, step) for row in everybody]
        if oracle:
            k = max(widths, key=lambda k, a=alphas: sum(expected(alpha, k) for alpha in a) / costs[k])
        else:
            k = lengths.next(everybody, rows)[0] if fixed is None else fixed
        if k and unseen:
            run.time += catch_up * unseen
            lengths.caught_up(catch_up * unseen)
            unseen = 0
        seconds = costs[k] * draw.lognormvariate(0, noise)
        results = []
        for row, a in enumerate(alphas):
            accepted = next((i for i in range(k) if draw.random() >= a), k)
            left = room[row]
            emitted = accepted + 1 if left is None else min(accepted + 1, left)
            ended = left is not None and emitted == left
            if left is not None:
                room[row] = text if ended else left - emitted
            results.append(RowResult(row, k, accepted, emitted, ended))
            if ended:
                lengths.begin(row)
                unseen += prompt
        run.time += seconds
        run.tokens += sum(r.emitted for r in results)
        run.chosen[k] += 1
        unseen += k == 0
        lengths.took(k, seconds)
        lengths.record(k, results)
    return run
