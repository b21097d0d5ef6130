"""The host's record of one sequence: its text, where every token came from, and how it ended."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from transformers import LogitsProcessorList

from specdec_kernels import Status

from ..checks import refuse
from ..result import Emission, End, Producer, TokenLogProb
from ..sampling.params import Bias
from ..stats import Stats
from ..stopping import Stopping
from .step_report import SequenceReport
from .token_log_probs import AskedLogProbs, read_scores, score

# Plain integers, because arithmetic on flags is slow.
_TARGET_FAULTS = int(Status.TARGET_FAULTS)
_DRAFT_FAULTS = int(Status.DRAFT_NAN | Status.DRAFT_POSITIVE_INFINITY)


@dataclass(frozen=True)
class Ends:
    """The conditions that end a sequence."""

    max_new_tokens: int
    eos: frozenset[int]
    stop: Stopping | None


class DraftSettings(NamedTuple):
    """What one sequence asks of its drafts."""

    most: int | None = None  # how many a step may draft for it; None: as many as for others
    reported: bool = False  # whether its emissions say what was drafted
    prediction: Sequence[int] = ()  # tokens that it is likely to emit
    owner: Hashable = None  # whose memory of earlier texts serves it; None: nobody's


@dataclass
class SequenceRecord:
    """One sequence of a generation, as the host knows it."""

    number: int
    text: list[int]  # prompt and output
    processed: list[int]  # the text as processors and penalties see it; the same list as ``text`` if it is the same
    stats: Stats
    prompt_length: int
    ends: Ends
    produced_by: list[Producer] = field(default_factory=list)
    status: Status = Status.OK
    log_probs: list[float] = field(default_factory=list)
    raw_log_probs: list[float] = field(default_factory=list)
    asked: AskedLogProbs = AskedLogProbs()
    drafting: DraftSettings = DraftSettings()
    top_log_probs: list[TokenLogProb] = field(default_factory=list)
    prompt_scores: dict[int, torch.Tensor] = field(default_factory=dict)  # by the first token's position, as ``score``
    logits: list[torch.Tensor] = field(default_factory=list)
    end: End | None = None  # None: it has not ended
    error: BaseException | None = None  # the exception that ended it, if any
    drafts: bool = True  # False: nothing can be drafted for it, or its drafter has failed
    drafter_error: str | None = None

    @property
    def live(self) -> bool:
        return self.end is None

    @property
    def tokens(self) -> list[int]:
        """The emitted tokens."""
        return self.text[self.prompt_length :]

    @property
    def emitted(self) -> int:
        return len(self.text) - self.prompt_length

    @property
    def room(self) -> int:
        """How many tokens it may still emit."""
        return self.ends.max_new_tokens - self.emitted

    def take(self, report: SequenceReport, draft_forwards: int) -> tuple[list[int], int]:
        """Adds a step's report to the record.

        Returns:
            The emitted tokens, and how many drafts were accepted.

        Raises:
            Exception: an error of ``ends.stop``, or ValueError if it returns an invalid number. The record is then
                unchanged.
        """
        tokens, accepted, status = report.tokens, report.num_accepted, report.status
        count = len(tokens)
        at_eos = count > 0 and tokens[-1] in self.ends.eos
        self.text += tokens
        try:
            kept = None
            if self.ends.stop is not None and count > 0:
                kept = _read_end(self.ends.stop.first_end(self.number, self.text, count), count)
        except BaseException:
            del self.text[len(self.text) - count :]
            raise
        if kept is not None:
            at_eos = at_eos and kept == count
            del self.text[len(self.text) - count + kept :]
            tokens = tokens[:kept]
        ended = at_eos or kept is not None
        if ended:
            status &= ~_TARGET_FAULTS  # faults in rows after the end do not matter
        failed = status & _TARGET_FAULTS != 0
        drawn = Producer.RECOVERED if report.tested > accepted else Producer.BONUS
        tested = accepted if failed else report.tested
        if ended:
            accepted, tested = min(accepted, len(tokens)), min(tested, len(tokens))
        if self.processed is not self.text:
            self.processed += tokens
        self.produced_by += [Producer.ACCEPTED] * accepted + [drawn] * (len(tokens) - accepted)
        if status:
            self.status |= Status(status)
        self.stats.record(report.drafted, tested, accepted, len(tokens), draft_forwards, report.nodes)
        if failed:
            self.end = End.FAILED
        elif at_eos:
            self.end = End.EOS
        elif kept is not None:
            self.end = End.STOP
        elif self.room == 0:
            self.end = End.LENGTH
        return tokens, accepted

    def add_log_probs(self, report: SequenceReport, count: int) -> None:
        """Records the log-probabilities of the first ``count`` emitted tokens of a step."""
        assert report.log_probs is not None, "the step was not asked for log-probabilities"
        values = report.log_probs[:count]
        self.log_probs += values[:, 0].tolist()
        self.raw_log_probs += values[:, 1].tolist()
        if self.asked.top is not None:
            self.top_log_probs += read_scores(values[:, 2:], self.asked.top)

    def score_prompt(self, position: int, logits: torch.Tensor) -> None:
        """Scores the prompt's tokens after ``position`` by the logits [n, V] after n tokens from there on. The scores
        stay on the device, so that nothing waits for it."""
        assert self.asked.prompt is not None
        following = self.text[position + 1 : position + 1 + len(logits)]
        self.prompt_scores[position] = score(logits, torch.tensor(following, device=logits.device), self.asked.prompt)

    @property
    def prompt_log_probs(self) -> list[TokenLogProb | None] | None:
        """Of the prompt's tokens, as far as it was read, with None for the first; None: not asked for."""
        if (top := self.asked.prompt) is None:
            return None
        return [None, *(each for scores in self.prompt_scores.values() for each in read_scores(scores, top))]

    def emission(self, count: int, report: SequenceReport) -> Emission:
        """The last ``count`` >= 1 emitted tokens, of the step with this report."""
        asked = self.asked
        return Emission(
            self.number,
            self.text[-count:],
            self.produced_by[-count:],
            self.log_probs[-count:] if asked.emitted else None,
            self.raw_log_probs[-count:] if asked.emitted else None,
            self.top_log_probs[-count:] if asked.top is not None else None,
            report.drafts if self.drafting.reported else None,
            report.drafted,
        )

    def fail(self, error: BaseException) -> None:
        self.end, self.error = End.FAILED, error

    def drafter_failed(self) -> bool:
        """Whether draft logits were NaN or +inf. A row of all -inf does not count, since bans can cause it as well."""
        return int(self.status) & _DRAFT_FAULTS != 0


class Entry(NamedTuple):
    """A sequence that can begin in a row, with its settings."""

    record: SequenceRecord
    params: Mapping[str, float]  # all parameters of SamplingParams, by name
    seed: int
    bias: Bias
    min_new_tokens: int
    processors: LogitsProcessorList


def _read_end(kept: int | None, new: int) -> int | None:
    """Returns ``kept``, the answer of a stop about ``new`` tokens. Raises ValueError if it is invalid."""
    if kept is not None and (isinstance(kept, bool) or not isinstance(kept, int) or not 1 <= kept <= new):
        refuse("stop", f"{kept!r} from first_end", f"None, or 1 to {new}: how many of the new tokens are kept")
    return kept
