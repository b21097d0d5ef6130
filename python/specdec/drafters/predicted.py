"""Drafts what is known of a text beforehand, beside another drafter or none: what its request predicts (OpenAI's
Predicted Outputs), and tokens that its grammar forces."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import takewhile

import torch

from ..checks import refuse
from ..models.forward.cached_model import CachedModel
from .copying import until_end
from .protocol import BatchState, Copies, Drafter, Drafts, DraftSession, Step
from .suffix_automaton import Cursor, SuffixAutomaton

LEAST_MATCH = 2  # tokens of a match by which a place is found again; a single token occurs in too many places
CERTAIN = 1 << 20  # matching tokens, where none but these can follow
LEAST_FORCED = 2  # tokens in a row that are worth more than the drafts of another drafter, which finds single ones, too


class PredictedDrafter(Drafter):
    """Proposes, for each sequence with a prediction (``Request.prediction``), the tokens that follow the place in it
    where the text continues; and for each sequence with a grammar, the tokens without which the text could not go on.
    The others get the drafts of another drafter.

    These tokens are functions of the text, so q is one-hot and the distribution is unchanged.

    Args:
        drafter: the other one; None: nothing else is drafted. Chains only.

    Example:
        >>> from specdec import Request, Scheduler, SpeculativeDecoder, load_embedded_pair
        >>> from specdec.drafters.predicted import PredictedDrafter
        >>> target, _, tokenizer = load_embedded_pair()
        >>> scheduler = Scheduler(SpeculativeDecoder(target, PredictedDrafter(), num_drafts=8), rows=1)
        >>> prompt = tokenizer("import os").input_ids
        >>> (plain,) = scheduler.run([Request(prompt, max_new_tokens=16)])
        >>> (again,) = scheduler.run([Request(prompt, max_new_tokens=16, prediction=plain.tokens)])
        >>> again.tokens == plain.tokens, plain.stats.steps, again.stats.steps
        (True, 16, 2)
    """

    def __init__(self, drafter: Drafter | None = None):
        self.drafter = drafter
        if drafter is not None:
            self.model, self.max_length = drafter.model, drafter.max_length

    @property
    def name(self) -> str:
        return super().name if self.drafter is None else self.drafter.name

    @property
    def copying(self) -> bool:  # type: ignore[override]  # it depends on the other one
        return self.drafter is None or self.drafter.copying

    @property
    def reads_only_filled(self) -> bool:
        return self.drafter is None or self.drafter.reads_only_filled

    def start(self, batch: BatchState) -> PredictedSession:
        return PredictedSession(None if self.drafter is None else self.drafter.start(batch), batch)

    def check(self, target: CachedModel, nodes: int, most_drafts: int) -> None:
        if nodes:
            refuse("tree", f"{nodes} with a PredictedDrafter", "None")
        if self.drafter is not None:
            self.drafter.check(target, nodes, most_drafts)

    def cache_bytes(self) -> int:
        return 0 if self.drafter is None else self.drafter.cache_bytes()

    def row_bytes(self, most_drafts: int) -> int:
        return 0 if self.drafter is None else self.drafter.row_bytes(most_drafts)


class PredictedSession(DraftSession):
    """The place of each sequence in its prediction, and its grammar, beside another drafter's session or none."""

    def __init__(self, other: DraftSession | None, batch: BatchState):
        self.other, self.batch = other, batch
        self.places: dict[int, Place] = {}  # of the rows with a prediction
        self._behind: dict[int, int] = {}  # rows of which the other session missed tokens -> how many it has seen

    @property
    def needs_host(self) -> bool:  # type: ignore[override]  # it changes with the rows
        return bool(self.places or self._behind) or (self.other is not None and self.other.needs_host)

    def copy_rows(self, sources: Sequence[int], rows: Sequence[int], count: int) -> None:
        if self.other is not None:
            self.other.copy_rows(sources, rows, count)

    def begin(self, prompts: Mapping[int, list[int]]) -> None:
        for row, prompt in prompts.items():
            self._forget(row)
            if prediction := self.batch.predictions[row]:
                self.places[row] = Place(prediction, len(prompt))
        self.batch.timer.lap("prefill")
        if self.other is not None:
            self.other.begin(prompts)

    def observe(self, texts: Mapping[int, list[int]], starts: Mapping[int, int]) -> None:
        if self.other is not None and texts:
            self.other.observe(texts, {row: min(start, self._behind.get(row, start)) for row, start in starts.items()})
        for row in texts:
            self._behind.pop(row, None)

    def propose(self, step: Step) -> Drafts:
        rows = {*self.places, *self.batch.grammars.rows} & {row for row, most in enumerate(step.allowed) if most}
        known = {row: self._known(row, step.texts[row], step.allowed[row]) for row in sorted(rows)}
        proposals = {row: until_end(tokens, self.batch.ends[row]) for row, (tokens, _) in known.items() if tokens}
        drafts = self._of_other(step, proposals)
        if not proposals:
            return drafts
        tokens, matched = drafts.copies or Copies([[] for _ in step.allowed], [0] * len(step.allowed))
        for row, proposal in proposals.items():
            tokens[row], matched[row] = proposal, known[row][1]
        return _replaced(drafts, proposals)._replace(copies=Copies(tokens, matched))

    def _known(self, row: int, text: list[int], most: int) -> tuple[list[int], int]:
        """Returns up to ``most`` tokens with which a row's text is known to go on, and how many before them match."""
        predicted = self.places[row].propose(text, most) if row in self.places else []
        forced = self.batch.grammars.forced(row)[:most]
        if predicted and predicted[: len(forced)] == forced:
            return predicted, self.places[row].matched
        return (forced if predicted or self.other is None or len(forced) >= LEAST_FORCED else []), CERTAIN

    def _of_other(self, step: Step, proposals: Mapping[int, list[int]]) -> Drafts:
        """Returns the other session's drafts for the rows without proposals."""
        if self.other is None:
            return Drafts.none(step)
        if self._behind:
            missed = {row: n for row, n in self._behind.items() if step.allowed[row] and row not in proposals}
            self.observe({row: step.texts[row] for row in missed}, missed)
        if not proposals:
            return self.other.propose(step)
        allowed = [0 if row in proposals else most for row, most in enumerate(step.allowed)]
        # It sees no other drafts than its own, and needs the last two tokens of a text in its next drafts only.
        for row in proposals if any(allowed) else [row for row, text in enumerate(step.texts) if text]:
            self._behind.setdefault(row, max(len(step.texts[row]) - 2, 0))
        if not any(allowed):
            return Drafts.none(step)
        # A drafter with a state must not be fed a text with a gap.
        apart = torch.tensor([row in proposals for row in range(len(allowed))], device=step.slots.device)[:, None]
        slots = step.slots.masked_fill(apart, self.batch.capacity - 1)
        step = dataclasses.replace(step, allowed=allowed, slots=slots, positions=step.positions.masked_fill(apart, 0))
        return self.other.propose(step)

    def end(self, row: int, output: list[int]) -> None:
        self._forget(row)
        if self.other is not None:
            self.other.end(row, output)

    def release(self) -> None:
        if self.other is not None:
            self.other.release()

    def _forget(self, row: int) -> None:
        self.places.pop(row, None)
        self._behind.pop(row, None)


class Place:
    """Where a growing text is in its prediction. At first the text is expected to begin as the prediction does. It is
    followed as long as it is as predicted. After a difference, the place is found again by the longest suffix of the
    output that is in the prediction: where that occurs more than once, at its next occurrence.

    Args:
        known: tokens of the text that are before the predicted ones.

    Attributes:
        matched: how many tokens before the place are as predicted.
    """

    def __init__(self, prediction: Sequence[int], known: int):
        self.prediction, self._known = list(prediction), known
        self._cursor = Cursor(SuffixAutomaton(self.prediction))
        self._next: int | None = 0  # the predicted token that is expected next; None: the text is nowhere
        self._last = 0  # where the text was last as predicted
        self.matched = 0

    def propose(self, text: list[int], most: int) -> list[int]:
        """Returns up to ``most`` tokens that are expected after ``text``, which must begin with the text of the
        previous call."""
        if new := text[self._known :]:
            self._cursor.follow(new)
            self._known = len(text)
            self._next = self._after(text, new)
        return [] if self._next is None else self.prediction[self._next : self._next + most]

    def _after(self, text: list[int], new: list[int]) -> int | None:
        """Returns the place after ``text``, whose last tokens are ``new``."""
        if self._next is not None:
            expected = self.prediction[self._next : self._next + len(new)]
            same = next(
                (i for i, pair in enumerate(zip(expected, new, strict=False)) if pair[0] != pair[1]), len(expected)
            )
            self._last = self._next + same
            if same == len(new):
                self.matched += same
                return self._last
        length, end = self._cursor.longest_suffix()
        if length < LEAST_MATCH:
            return None
        self.matched, suffix = length, text[-length:]
        places = range(max(self._last + 1, end), len(self.prediction) + 1)
        following = (i for i in places if self.prediction[i - length : i] == suffix)
        self._last = next(following, end)
        return self._last


def _replaced(drafts: Drafts, proposals: Mapping[int, list[int]]) -> Drafts:
    """Returns the drafts with these rows replaced by ``proposals``, whose q is one-hot."""
    d2t, device = drafts.d2t, drafts.tokens.device
    if d2t is not None:  # q has no column for other tokens
        known = {*d2t.tolist()}
        proposals = {row: [*takewhile(known.__contains__, tokens)] for row, tokens in proposals.items()}
    columns = max(drafts.tokens.shape[1], *map(len, proposals.values()))
    drafts, rows = drafts.widened(columns), torch.tensor([*proposals], device=device)
    padded = [[*tokens, *[-1] * (columns - len(tokens))] for tokens in proposals.values()]
    proposed = torch.tensor(padded, dtype=torch.int64, device=device)
    tokens, status, ids = drafts.tokens.index_copy(0, rows, proposed), drafts.status, proposed.clamp(min=0)
    drafts = drafts._replace(tokens=tokens, status=None if status is None else status.index_fill(0, rows, 0))
    each = rows[:, None], torch.arange(columns, device=device)
    if drafts.logits is not None:
        logits = drafts.logits.index_fill(0, rows, -torch.inf)
        logits[(*each, ids if d2t is None else torch.searchsorted(d2t, ids))] = 0.0
        # Verification computes the statistics again, since those of one-hot rows depend on all settings.
        return drafts._replace(logits=logits, stats=None)
    return drafts
