"""A batch whose drafts are accepted with given probabilities and whose steps take given times, without any model."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec.loop.draft_length import AdaptiveDrafts, AdaptiveK, RowResult, StepOutcome

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


def adaptive(costs: Sequence[float], given: bool = False, few: bool = False) -> AdaptiveK:
    """Chooses up to as many drafts as there are costs. ``given``: it knows these; otherwise it learns them."""
    return AdaptiveK(AdaptiveDrafts(len(costs) - 1, costs if given else None), few)


@functools.cache
def expected(alpha: float, k: int) -> float:
    return sum(alpha**i for i in range(k + 1))


def simulate(
    costs: Sequence[float],
    alpha: Alpha,
    rows: int = 1,
    steps: int = 2000,
    *,
    lengths: AdaptiveK | None = None,
    widths: Sequence[int] = (),
    speed: Callable[[int], float] = lambda step: 1.0,
    noise: float = 0.0,
    catch_up: float = 0.0,
    text: int | None = None,
    prompt: int = 0,
    finds: Sequence[int] = (),
    seed: int = 0,
) -> Run:
    """Decodes ``steps`` steps.

    Args:
        costs: T(0), T(1), ...
        lengths: chooses K; None: an oracle that knows the probabilities and the costs, and takes one of ``widths``.
        speed: a factor of a step's time.
        noise: standard deviation of the logarithm of a step's time.
        catch_up: time that the drafter takes for each token that it was not shown.
        prompt: tokens of each sequence's prompt, which the drafter has to read.
        finds: the most drafts that are found in a step of all rows, by turns; (): whatever is asked for.
        text: tokens of a sequence, after which the next one begins in its row; None: it never ends.
    """
    draw, run = random.Random(seed), Run()
    unseen, room = prompt * rows, [text] * rows
    for step in range(steps):
        alphas = [alpha(row, step) for row in range(rows)]
        if lengths is None:
            known = widths or range(len(costs))
            k = max(known, key=lambda k, of=alphas: sum(expected(alpha, k) for alpha in of) / costs[k])
        else:
            k = lengths.choose(rows, rows, [lengths.most] * rows)
        catching_up = catch_up * unseen if k and unseen else None
        if catching_up is not None:
            run.time += catching_up
            unseen = 0
        width = min(k, finds[step % len(finds)]) if finds else k
        seconds = costs[width] * draw.lognormvariate(0, noise) * speed(step)
        results = []
        for row, a in enumerate(alphas):
            accepted = next((i for i in range(width) if draw.random() >= a), width)
            left = room[row]
            emitted = accepted + 1 if left is None else min(accepted + 1, left)
            ended = left is not None and emitted == left
            if left is not None:
                room[row] = text if ended else left - emitted
            results.append(RowResult(k, accepted, emitted, ended))
            unseen += prompt * ended
        run.time += seconds
        run.tokens += sum(r.emitted for r in results)
        run.chosen[k] += 1
        unseen += k == 0
        if lengths is not None:
            lengths.observe(StepOutcome(rows, k, width, results, seconds, catching_up))
    return run
