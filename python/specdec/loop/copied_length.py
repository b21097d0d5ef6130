"""How many copied tokens a step verifies, chosen after they were found.

A drafter that copies finds its tokens in microseconds, so it is asked for the most. Which of them are worth their
verification is seen only then: after twenty matching tokens a copy is nearly always right, after one hardly
ever, and less after a word that went on in many ways. So the chance of a copied token is learned by how many tokens
before it match, and by what else followed the text's last token. (SuffixDecoding, Oliaro et al., arXiv 2411.04975,
section 3, estimates it by how often the token followed.) Tokens that were not verified teach it as
well: the text shows whether they were right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, zip_longest
from operator import mul

from ..drafters.protocol import Copies, Votes
from .draft_length import SHARE, AdaptiveDrafts, StepOutcome, TimedK
from .step_times import GUESS_WEIGHT

MARGIN = 1.1  # by which copies must be expected to win: a short answer has too few of them to even out bad luck
LONGEST = 20  # matching tokens; more are like these
MEMORY = 0.99  # weight of older tokens in the chance of those with as many matching ones
LATELY = 0.9  # the same in whether more or fewer were right than by these chances
TOKEN = 0.12  # of a plain step's time, for each copied token, as far as nothing is timed
LOOKING = 0.25  # plain steps that looking in vain may take, before it may take no more than ``LOOKS`` of the time
LOOKS = SHARE / 2  # since what is learned of what was found takes about as long
PAUSE = 32  # steps without looking, at most
LOOK_AROUND = 32  # choices, after which one step has a neighbouring width, so that its time stays known
LOOK_AROUND_0 = 128  # the same where nothing is verified, as the neighbour then is dear


class Chances:
    """How likely a copied token is right, by the number of tokens before it that match and the votes of its copy, and
    less so while fewer were right than these numbers say: texts differ in how much they repeat."""

    def __init__(self) -> None:
        self._tested, self._right = ([[0.0] * (LONGEST + 1) for _ in Votes] for _ in range(2))
        self._chances = [[_guess(n) for n in range(LONGEST + 1)] for _ in Votes]
        self._lately_expected = self._lately_right = GUESS_WEIGHT

    def accepted(self, matched: int, count: int, votes: Votes = Votes.UNKNOWN) -> Iterator[float]:
        """Yields the probabilities that the first, the second, ... of ``count`` copied tokens is accepted."""
        first, lately = min(matched, LONGEST), min(self._lately_right / self._lately_expected, 1.0)
        chances = self._chances[votes][first : first + count]
        chances += chances[-1:] * (count - len(chances))
        return accumulate((lately * chance for chance in chances), mul)

    def learn(self, matched: int, copied: Sequence[int], emitted: Sequence[int], votes: Votes = Votes.UNKNOWN) -> None:
        """Records what a text emitted where it was expected to emit ``copied``."""
        tested, right, chances = self._tested[votes], self._right[votes], self._chances[votes]
        for n, (guess, token) in enumerate(zip(copied, emitted, strict=False), matched):
            n = min(n, LONGEST)
            forgotten = (1 - LATELY) * GUESS_WEIGHT
            self._lately_expected = LATELY * self._lately_expected + forgotten + chances[n]
            self._lately_right = LATELY * self._lately_right + forgotten + (guess == token)
            tested[n] = MEMORY * tested[n] + 1
            right[n] = MEMORY * right[n] + (guess == token)
            chances[n] = (right[n] + GUESS_WEIGHT * _guess(n)) / (tested[n] + GUESS_WEIGHT)
            if guess != token:
                return


def _guess(matched: int) -> float:
    """The chance before anything was seen. A prediction that nothing has confirmed yet is somebody's own."""
    return matched / (matched + 2) if matched else 0.8


class CopiedK(TimedK):
    """Chooses how many copied tokens are verified, such that the batch emits the most tokens a second."""

    def __init__(self, drafts: AdaptiveDrafts):
        super().__init__(drafts, few=True)
        # What is worth one draft is nearly always worth two, and each width has to be recorded or captured.
        self.widths = [k for k in self.widths if k != 1 or self.most == 1]
        self.chances, self._choices = Chances(), 0
        self._looked = 0.0  # plain steps' time for which nothing was worth verifying, beyond ``LOOKS``

    def _guess(self, rows: int) -> Callable[[int], float]:
        """As little as a machine may take for a token more, so that drafts are tried where they may pay."""
        return super()._guess(rows) or (lambda k: 1 + TOKEN * k)

    def choose(self, rows: int, live: int, caps: Sequence[int]) -> int:
        return 0 if self._looked > LOOKING and self._given is None else self.most

    def observe(self, step: StepOutcome) -> None:
        for row in step.results:
            if row.copy is not None:
                self.chances.learn(*row.copy)
        if step.seconds is not None:
            self.times(step.rows).took(step.width, step.width, step.seconds)
            looked = self._looked + step.looking / step.seconds - LOOKS
            self._looked = 0.0 if step.width else min(max(looked, 0.0), LOOKING + PAUSE * LOOKS)

    def cut(self, rows: int, live: int, copies: Copies) -> int:
        return self.around(self.best(rows, live, copies)[0], copies) if any(copies.tokens) else 0

    def around(self, best: int, copies: Copies) -> int:
        """Returns a neighbour of the ``best`` width now and then, else ``best``."""
        self._choices += 1
        pause = LOOK_AROUND if best else LOOK_AROUND_0
        if self._choices % pause:
            return best
        longest = max(map(len, copies.tokens))
        widths = [k for k in self.widths if k <= longest]
        place = widths.index(best) + (1 if self._choices // pause % 2 else -1)
        return widths[min(max(place, 0), len(widths) - 1)]

    def best(self, rows: int, live: int, copies: Copies) -> tuple[int, float]:
        """Returns how many copied tokens are best verified, and the tokens a unit of time that are then expected; with
        none, those of a plain step and ``MARGIN``. The arguments are those of ``cut``."""
        times = self.times(rows)
        best, rate = 0, MARGIN * live / times.of(0)
        of_rows = [self.chances.accepted(n, len(tokens), votes) for tokens, n, votes in copies.of_rows() if tokens]
        expected = [*accumulate(map(sum, zip_longest(*of_rows, fillvalue=0.0)), initial=live)]
        for k in self.widths[1:]:
            if k < len(expected) and expected[k] / times.of(k) > rate:
                best, rate = k, expected[k] / times.of(k)
        return best, rate
