"""What many tokens a day cost on machines like one of roofline.py, with and without speculation. A prediction, too."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..checks import refuse
from .roofline import Pair, Prediction

SECONDS_A_DAY = 86_400


@dataclass(frozen=True)
class Fleet:
    """The cheapest way to decode with so many rows on each machine.

    Attributes:
        num_drafts: K; 0: plain decoding.
        per_second: tokens of one machine, which may be several GPUs.
        per_user: tokens a second of one sequence.
        gpus: how many GPUs decode the tokens of a day, if they come evenly; None: not asked.
        per_million: what a million tokens cost, in the unit of the price; None: not asked.
    """

    rows: int
    num_drafts: int
    per_second: float
    per_user: float
    gpus: int | None
    per_million: float | None


def cheapest(
    pair: Pair,
    context: int,
    speculative: bool,
    num_drafts: int | None = None,
    least_per_user: float = 0.0,
    tokens_per_day: float | None = None,
    price_per_hour: float | None = None,
) -> Fleet | None:
    """Returns the number of rows with the most tokens a second for each machine, among those that fit in memory and
    give every sequence ``least_per_user`` tokens a second; None: there is none.

    Speculation saves bytes and spends operations. Where many rows already share each read of the weights, operations
    are the limit, and it costs more; at a speed for each user that plain decoding reaches with few rows only, or not at
    all, it costs less.

    Args:
        num_drafts: K; None: the best for each number of rows.
        price_per_hour: of one GPU.
    """
    for name, value in (("tokens_per_day", tokens_per_day), ("price_per_hour", price_per_hour)):
        if value is not None and not 0 < value < math.inf:
            refuse(name, value, "a finite number > 0")
    if not 0 <= least_per_user < math.inf:
        refuse("tokens_per_user", least_per_user, "a finite number >= 0")
    most = pair.most_rows(context, speculative)
    tried = sorted({min(most, math.ceil(2 ** (i / 4))) for i in range(65)} - {0})
    found = [_of(pair.best(rows, context, num_drafts), speculative) for rows in tried]
    fast = [(per_second, rows, k) for per_second, rows, k in found if per_second / rows >= least_per_user]
    if not fast:
        return None
    per_second, rows, k = max(fast)
    count = pair.machine.count
    return Fleet(
        rows=rows,
        num_drafts=k,
        per_second=per_second,
        per_user=per_second / rows,
        gpus=None if tokens_per_day is None else count * math.ceil(tokens_per_day / SECONDS_A_DAY / per_second),
        per_million=None if price_per_hour is None else price_per_hour * count / 3600 / per_second * 1e6,
    )


def _of(p: Prediction, speculative: bool) -> tuple[float, int, int]:
    return (p.per_second, p.rows, p.num_drafts) if speculative else (p.plain_per_second, p.rows, 0)
