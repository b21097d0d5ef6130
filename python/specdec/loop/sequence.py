"""One sequence: its state while it is decoded, and what a step emits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from transformers import LogitsProcessorList

from specdec_kernels import SamplingParams, Status

from ..checks import read_as, read_count, refuse
from ..models.forward.cached_model import CachedModel
from ..prompts import read_eos, read_prompts
from ..result import FinishReason, Producer, TokenLogProb, error_text
from ..sampling.grammar import Grammar
from ..sampling.params import PARAMETERS, Bias, read_bias
from ..sampling.processors import read_processors
from ..stats import Stats
from .log_probs import read_scores, score
from .report import RowReport
from .request import Request

# Plain integers, because arithmetic on flags is slow.
_TARGET_FAULTS = int(Status.TARGET_FAULTS)
_DRAFT_FAULTS = int(Status.DRAFT_NAN | Status.DRAFT_POSITIVE_INFINITY)


class Output(NamedTuple):
    """What one step emitted for one sequence. The last one of a sequence has its finish reason, and may be without
    tokens. The log-probabilities are those of ``SequenceState``, of these tokens; None: not requested."""

    sequence: SequenceState
    tokens: list[int]
    produced_by: list[Producer]
    log_probs: list[float] | None = None
    raw_log_probs: list[float] | None = None
    top_log_probs: list[TokenLogProb] | None = None
    # What the step drafted for this sequence, before verification: [] if nothing. None: not requested, or a tree.
    drafts: list[int] | None = None
    drafted: int = 0  # how many these were; of a tree, its depth
    finish_reason: FinishReason | None = None  # None: the sequence continues

    @property
    def number(self) -> int:
        """``SequenceState.number``."""
        return self.sequence.number


@dataclass(eq=False)
class SequenceState:
    """The state of one sequence. Once it has a finish reason, it is the result of its request.

    Attributes:
        number: the sequence's place in a call of ``generate``, or what ``Scheduler.submit`` returned; -1: refused.
        text: prompt and output.
        seen: the text as processors and penalties see it; the same list as ``text`` if it is the same.
        params: a value for every name in ``PARAMETERS``.
        produced_by: where each emitted token came from.
        log_probs, raw_log_probs, top_log_probs: as in ``GenerationResult``; None: not requested.
        status: Status.OK, or what went wrong with the sequence's logits.
        exception: what ended it, if an exception did.
        begun: whether its prompt is stored, and it takes part in steps.
        stored: tokens of the prompt that the target's cache holds, while the prompt is read.
        reused: how many of these were not read, as an earlier text began with them; None: this was not looked for.
        may_draft: False: its request asks for no drafts, or its drafter has failed.
        unseen: None: the drafter has seen the text. Otherwise it missed tokens, in steps without drafts, and has seen
            at least so many.
    """

    number: int
    request: Request
    text: list[int]
    seen: list[int]
    eos: frozenset[int] = frozenset()
    params: Mapping[str, float] = field(default_factory=dict)
    bias: Bias = field(default_factory=dict)
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    prediction: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=lambda: Stats.empty(0))
    produced_by: list[Producer] = field(default_factory=list)
    log_probs: list[float] | None = None
    raw_log_probs: list[float] | None = None
    top_log_probs: list[TokenLogProb] | None = None
    logits: list[torch.Tensor] = field(default_factory=list)
    status: Status = Status.OK
    finish_reason: FinishReason | None = None
    exception: BaseException | None = None
    begun: bool = False
    stored: int = 0
    reused: int | None = None
    may_draft: bool = True
    unseen: int | None = 0
    _prompt_scores: dict[int, torch.Tensor] = field(default_factory=dict)  # by the first token's position

    @classmethod
    def of(cls, number: int, request: Request, target: CachedModel, most_drafts: int) -> SequenceState:
        """Reads a request: every argument of one sequence is checked here, once, or by ``Request.check``.

        Args:
            most_drafts: the largest K.

        Raises:
            ValueError: names the argument, what was given and what is allowed.
        """
        if not isinstance(request, Request):
            refuse("request", type(request).__name__, "a Request")
        r, vocab_size = request, target.vocab_size
        text = read_ids("prompt", r.prompt, vocab_size)
        r.check(None, r.grammar is not None)  # ids of biases are read below
        if r.num_drafts is not None and read_count("num_drafts", r.num_drafts) > most_drafts:
            refuse("num_drafts", r.num_drafts, f"None, or 0 to {most_drafts}")
        eos = frozenset(i for i in read_eos(r.eos_token_id, target.model) if 0 <= i < vocab_size)
        if r.grammar is not None:
            _check_grammar(r.grammar, eos, vocab_size)
        wanted = r.log_probs or r.top_log_probs is not None
        seen = text if r.processor_prompt is None else read_ids("processor_prompts", r.processor_prompt, vocab_size)
        return cls(
            number,
            request,
            text,
            seen,
            eos=eos,
            params=_read_params(r.params),
            bias=read_bias(r.logit_bias, r.banned_tokens, vocab_size),
            processors=read_processors(r.logits_processor, seen, vocab_size, target.device),
            prediction=[] if r.prediction is None else read_ids("prediction", r.prediction, vocab_size),
            stats=Stats.empty(most_drafts),
            log_probs=[] if wanted else None,
            raw_log_probs=[] if wanted else None,
            top_log_probs=None if r.top_log_probs is None else [],
            may_draft=r.num_drafts != 0,
        )

    @classmethod
    def refused(cls, request: Request, error: Exception) -> SequenceState:
        """Returns the result of a request that ``of`` refused."""
        return cls(-1, request, [], [], finish_reason=FinishReason.FAILED, exception=error)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.text)

    @property
    def live(self) -> bool:
        """Whether it has not ended."""
        return self.finish_reason is None

    @property
    def tokens(self) -> list[int]:
        """The emitted tokens, an end-of-sequence token included."""
        return self.text[self.prompt_length :]

    @property
    def room(self) -> int:
        """How many tokens it may still emit."""
        return self.request.max_new_tokens - len(self.text) + self.prompt_length

    @property
    def slots(self) -> int:
        """The tokens that its row of the cache must hold."""
        return self.prompt_length + self.request.max_new_tokens

    @property
    def error(self) -> str | None:
        """Why it failed, as "ValueError: ..."; None: it did not, or ``status`` says why."""
        return None if self.exception is None else error_text(self.exception)

    @property
    def prompt_log_probs(self) -> list[TokenLogProb | None] | None:
        """Of the prompt's tokens, as far as it was read, with None for the first; None: not requested."""
        if (top := self.request.prompt_log_probs) is None:
            return None
        return [None, *(each for scores in self._prompt_scores.values() for each in read_scores(scores, top))]

    def score_prompt(self, position: int, logits: torch.Tensor) -> None:
        """Scores the prompt's tokens after ``position`` by the logits [n, V] after n tokens from there on. The scores
        stay on the device, so that nothing waits for it."""
        assert self.request.prompt_log_probs is not None
        following = torch.tensor(self.text[position + 1 : position + 1 + len(logits)], device=logits.device)
        self._prompt_scores[position] = score(logits, following, self.request.prompt_log_probs)

    def take(self, report: RowReport, draft_forwards: int) -> tuple[int, int]:
        """Adds what a step emitted.

        Returns:
            How many tokens were emitted, and how many drafts accepted.

        Raises:
            Exception: an error of ``stop``, or ValueError if it returns an invalid number. The sequence is then
                unchanged.
        """
        tokens, accepted, status = report.tokens, report.num_accepted, report.status
        count = len(tokens)
        at_eos = count > 0 and tokens[-1] in self.eos
        self.text += tokens
        try:
            kept = None
            if self.request.stop is not None and count > 0:
                kept = _read_end(self.request.stop.first_end(self.number, self.text, count), count)
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
        if self.seen is not self.text:
            self.seen += tokens
        self.produced_by += [Producer.ACCEPTED] * accepted + [drawn] * (len(tokens) - accepted)
        if status:
            self.status |= Status(status)
        self.stats.record(report.drafted, tested, accepted, len(tokens), draft_forwards, report.nodes)
        if report.log_probs is not None:
            self._add_log_probs(report.log_probs[: len(tokens)])
        if failed:
            self.finish_reason = FinishReason.FAILED
        elif at_eos:
            self.finish_reason = FinishReason.EOS
        elif kept is not None:
            self.finish_reason = FinishReason.STOP
        elif self.room == 0:
            self.finish_reason = FinishReason.LENGTH
        return len(tokens), accepted

    def _add_log_probs(self, values: torch.Tensor) -> None:
        if self.log_probs is None or self.raw_log_probs is None:
            return
        self.log_probs += values[:, 0].tolist()
        self.raw_log_probs += values[:, 1].tolist()
        if self.top_log_probs is not None:
            assert self.request.top_log_probs is not None
            self.top_log_probs += read_scores(values[:, 2:], self.request.top_log_probs)

    def output(self, count: int = 0, report: RowReport | None = None) -> Output:
        """Returns the last ``count`` emitted tokens, of the step with this report; None: no step emitted them."""
        start = len(self.produced_by) - count

        def last(values: list | None) -> list | None:
            return None if values is None else values[start:]

        return Output(
            self,
            self.text[len(self.text) - count :],
            self.produced_by[start:],
            last(self.log_probs),
            last(self.raw_log_probs),
            last(self.top_log_probs),
            report.drafts if report is not None and self.request.report_drafts else None,
            0 if report is None else report.drafted,
            self.finish_reason,
        )

    def fail(self, error: BaseException) -> None:
        """Ends it because of an error."""
        self.finish_reason, self.exception = FinishReason.FAILED, error

    def drafter_failed(self) -> bool:
        """Whether draft logits were NaN or +inf. A row of all -inf does not count, since bans can cause it as well."""
        return int(self.status) & _DRAFT_FAULTS != 0


def decoding(sequences: Iterable[SequenceState | None]) -> dict[int, SequenceState]:
    """Returns those of a batch's sequences, by row, that take part in its steps."""
    return {row: s for row, s in enumerate(sequences) if s is not None and s.begun and s.live}


def read_ids(name: str, ids: object, vocab_size: int) -> list[int]:
    """Returns token ids as a list. Raises ValueError naming ``name``."""
    if not isinstance(ids, (Sequence, torch.Tensor)):
        refuse(name, type(ids).__name__, "a list of token ids")
    return list(read_as(name, read_prompts, [ids], None, vocab_size)[0])


def _check_grammar(grammar: Grammar | ValueError, eos: frozenset[int], vocab_size: int) -> None:
    if isinstance(grammar, ValueError):
        raise grammar
    if not isinstance(grammar, Grammar):
        refuse("grammar", type(grammar).__name__, "a Grammar, which a GrammarCompiler makes")
    if grammar.vocab_size != vocab_size:
        refuse("grammar", f"one for a vocabulary of {grammar.vocab_size} tokens", f"one for {vocab_size}")
    if not grammar.eos <= eos:
        refuse("eos_token_id", f"{sorted(eos)} with a grammar", f"ids among which are {sorted(grammar.eos)}")


def _read_params(params: SamplingParams | None) -> dict[str, float]:
    params = SamplingParams(temperature=0.0) if params is None else params
    if not isinstance(params, SamplingParams):
        refuse("params", type(params).__name__, "a SamplingParams")
    values = {name: getattr(params, name) for name in PARAMETERS}
    if any(isinstance(value, torch.Tensor) for value in values.values()):
        refuse("params", "tensors", "numbers: a request is one sequence")
    return {name: SamplingParams.neutral(name) if value is None else value for name, value in values.items()}


def _read_end(kept: int | None, new: int) -> int | None:
    """Returns ``kept``, the answer of stopping criteria about ``new`` tokens. Raises ValueError if it is invalid."""
    if kept is not None and (isinstance(kept, bool) or not isinstance(kept, int) or not 1 <= kept <= new):
        refuse("stop", f"{kept!r} from first_end", f"None, or 1 to {new}: how many of the new tokens are kept")
    return kept
