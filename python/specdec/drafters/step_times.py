"""T(K), the time of a step with K drafts, learned from the steps of a decoder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

UNCOUNTED = 1  # the first step of a width compiles, allocates and warms the caches
SAMPLES = 5  # timed steps of a width before it is known; the shortest counts, since others were interrupted
SPEED_RATE = 0.25  # how fast the machine's speed is followed, and
WIDTH_RATE = 0.03  # how fast the times of widths among each other, at least
SURPRISE = 0.4  # the largest error that counts, as a logarithm: a longer step was interrupted by something


class StepTimes:
    """T(K) for the K in ``widths``, in units of T(0).

    Three widths are timed first: no drafts, one, and many. T is a straight line between timed widths, since each draft
    adds a draft forward and a token to verify; the first draft differs, because a target forward of two tokens can
    take much longer than one of a single token. All steps are timed from then on. A change of the machine's speed
    shows in whatever width is in use, so the speed is a factor of its own, and the times of widths relative to each
    other change slowly.

    Args:
        widths: the K that may be chosen, ascending from 0.
        costs: T for each of the widths, relative to each other; it is then never changed. None: learned.
    """

    def __init__(self, widths: Sequence[int], costs: Sequence[float] | None = None):
        self.widths = tuple(widths)
        last = len(self.widths) - 1
        self._first = tuple(dict.fromkeys(self.widths[i] for i in (0, min(1, last), -(-3 * last // 4))))
        self._speed = 0.0  # logarithm of a factor of all times
        self._times: dict[int, float] = {}  # logarithms, by width, of the time at speed 0
        self._samples: dict[int, list[float]] = {}  # the first ones
        self._visits = dict.fromkeys(self.widths, 0)
        self._relative: list[float] | None = None
        self.fixed = costs is not None
        if costs is not None:
            self._relative = [c / costs[0] for c in costs]

    @property
    def missing(self) -> int | None:
        """A width that has to be timed before T is known; None: T is known. Widths take turns, so that a change of the
        machine's load affects all of them."""
        return self.missing_to(self.widths[-1])

    def missing_to(self, most: int) -> int | None:
        """As ``missing``, for the T of widths up to ``most`` >= 1."""
        if self.fixed:
            return None
        fewest = min((k for k in self._first if k <= most), key=self._visits.__getitem__)
        return fewest if self._visits[fewest] < UNCOUNTED + SAMPLES else None

    @property
    def relative(self) -> list[float]:
        """T(K) / T(0) for each of the widths, not falling, of which those count up to which
        none is ``missing_to``."""
        if self._relative is None:
            known = sorted(self._times.items())
            base, so_far, found = known[0][1], 1.0, []
            points = [(k, math.exp(t - base)) for k, t in known]
            for k in self.widths:
                so_far = max(so_far, _on_line(points, k))
                found.append(so_far)
            self._relative = found
        return self._relative

    def of(self, width: int) -> float:
        """Returns T(width) / T(0), as ``relative``, for a width between those that may be chosen, too."""
        return _on_line(list(zip(self.widths, self.relative, strict=True)), width)

    def took(self, width: int, seconds: float) -> None:
        """Records a step's time."""
        if seconds <= 0:
            return
        if self.fixed:
            plain = math.log(seconds / self.of(width))
            self._times.setdefault(0, plain)
            self._times[0] += SPEED_RATE * (plain - self._times[0])
            return
        if width not in self._visits:
            return
        self._visits[width] += 1
        counted = self._visits[width] - UNCOUNTED
        if counted < 1:
            return
        time = math.log(seconds) - self._speed
        if width in self._first and counted <= SAMPLES:
            self._relative = None
            self._samples.setdefault(width, []).append(time)
            self._times[width] = min(self._samples[width])
            return
        if width not in self._times:
            if self.missing_to(width) is not None:
                return
            self._times[width] = math.log(self.of(width)) + self._times[0]  # on the line, until its own steps tell
        self._relative = None
        error = min(max(time - self._times[width], -SURPRISE), SURPRISE)
        self._speed += SPEED_RATE * error
        self._times[width] += max(1 / (counted + 1), WIDTH_RATE) * error

    @property
    def seconds(self) -> dict[int, float]:
        """The times of the widths that were timed, in seconds."""
        return {} if self.fixed else {k: math.exp(t + self._speed) for k, t in sorted(self._times.items())}

    def take(self, seconds: Mapping[int, float]) -> None:
        """Takes over what another process has learned, as first estimates. Widths that cannot be chosen are left out,
        and widths that are known already stay."""
        for k, time in seconds.items():
            if not self.fixed and k in self._visits and self._visits[k] == 0:
                self._times[k], self._visits[k] = math.log(time) - self._speed, UNCOUNTED + SAMPLES
                self._relative = None

    @property
    def seconds_plain(self) -> float | None:
        """T(0) in seconds; None if it was not timed."""
        return math.exp(self._times[0] + self._speed) if 0 in self._times else None


def _on_line(points: Sequence[tuple[int, float]], k: int) -> float:
    """Returns the value at ``k`` of straight lines through ``points``, extended at the end."""
    if len(points) == 1:
        return points[0][1]
    i = next((i for i in range(1, len(points)) if points[i][0] >= k), len(points) - 1)
    (k0, t0), (k1, t1) = points[i - 1], points[i]
    return t0 + (t1 - t0) * (k - k0) / (k1 - k0)
