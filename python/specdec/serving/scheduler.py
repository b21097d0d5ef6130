"""Continuous batching: when a sequence ends, a waiting request is prefilled into its row."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from ..checks import read_count, refuse
from ..decoder import SpeculativeDecoder
from ..loop.batch import Batch
from ..loop.prefixes import PrefixReuse
from ..loop.request import Request
from ..loop.sequence import Output, SequenceState
from ..loop.step import AcceptRule
from ..loop.warm_up import warm_up
from ..models.forward.cached_model import CachedModel
from ..prompts import read_eos
from ..result import FinishReason

MAX_EOS = 8  # the most end-of-sequence tokens of one request


class QueueFull(Exception):
    """The queue of waiting requests is full; the new request was not taken."""


class Usage(NamedTuple):
    """The current load of a scheduler."""

    rows: int
    live: int  # rows that decode
    prefilling: int  # rows whose prompt has not been read completely
    waiting: int  # requests without a row
    cache_tokens: int  # tokens that sequences may reserve at one time
    cache_tokens_used: int
    steps: int  # decoding steps so far
    busy: float  # mean of live rows / rows over these steps; 0 before the first step
    num_drafts: int  # K of the last step; 0 before the first


class Scheduler:
    """Decodes any number of requests on R rows. When a sequence ends, the next one begins in its row, while the other
    rows continue.

    Each step reads a part of the prompts of new sequences, and then decodes all rows. With a fixed K all decoding
    forwards have the same shape ([R, K + 1] tokens), and each prompt is read alone, so a row's results do not depend on
    the other rows: a request with a seed gets the same text alone, among others, and in any order. With
    ``AdaptiveDrafts``, K and the rows of a step depend on the other rows, while all texts are greedy or of rule
    ``coupled``; these then differ in rounding only.

    An error of one request (in its logits, processors, stop or prefill) ends that request with a status or an error.
    An error of the drafter only costs drafts. An error in a forward of all rows ends all sequences that decode. An
    interrupt does so, too, and is then raised again. Other requests are not affected.

    Only one thread may use a scheduler; for asyncio there is ``Engine``. Code that a step calls (processors, stops,
    drafters) may call ``submit``, ``cancel`` and ``close``; a cancellation then takes effect at the end of the step.

    Args:
        decoder: the models, the drafter, K and the backend.
        rows: R, the sequences that decode at one time; None: as many as the budget allows.
        max_length: the most tokens of prompt and output of one sequence; None: as many as the budget and the models'
            positions allow.
        cache_tokens: the most slots of all rows together: the cache has rows x (max_length + 1) slots, and those of a
            tree, all allocated here. The tokens that sequences reserve at one time (prompt + ``max_new_tokens``) stay
            below.
        cache_bytes: the most bytes of the caches of target and draft together.
        prefill_chunk: how many tokens of a prompt are read at once. A step reads no more prompts after this many
            tokens, so it bounds the time by which a long prompt delays the other rows.
        max_waiting: the most requests that may wait for a row.
        rule: as in ``generate``, for all requests.
        prefix_reuse: "off", "exact" or "rounding" (``specdec.loop.prefixes.PrefixReuse``): what a prompt takes over of
            earlier texts of its ``scope`` that a row still holds, instead of reading it. Exact: full parts of
            ``prefill_chunk`` tokens of prompts, which changes nothing but the time. Rounding: all tokens, also
            generated ones; where the target has a near-tie, the text may then be another one. None: exact, and off for
            a target with recurrent layers, since a state cannot be cut.
        async_scheduling: let the device run one step ahead of the host, so that it does not wait for reports, while no
            setting needs the host before a step (stop strings do not). The texts are the same.

    Raises:
        ValueError: names the argument, what was given and what is allowed.

    Example:
        >>> from specdec import Request, Scheduler, SpeculativeDecoder, load_embedded_pair
        >>> target, draft, tokenizer = load_embedded_pair()
        >>> scheduler = Scheduler(SpeculativeDecoder(target, draft), rows=2, max_length=64)
        >>> prompts = [tokenizer(text).input_ids for text in ("import os", "def read(self):", "class Error(")]
        >>> for sequence in scheduler.run(Request(prompt, max_new_tokens=8, id=i) for i, prompt in enumerate(prompts)):
        ...     assert len(sequence.tokens) == 8  # in the order in which they end
        >>> number = scheduler.submit(Request(prompts[0], max_new_tokens=8))  # or step by step
        >>> while not scheduler.idle:
        ...     outputs = scheduler.step()
        >>> outputs[-1].number == number, str(outputs[-1].finish_reason)
        (True, 'length')
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        *,
        rows: int | None = 8,
        max_length: int | None = None,
        cache_tokens: int | None = None,
        cache_bytes: int | None = None,
        prefill_chunk: int = 256,
        max_waiting: int = 1024,
        rule: str | AcceptRule | None = None,
        async_scheduling: bool = False,
        prefix_reuse: str | None = None,
    ):
        for name, value in (("prefill_chunk", prefill_chunk), ("max_waiting", max_waiting)):
            read_count(name, value, 1)
        self.decoder, self.prefill_chunk, self.max_waiting = decoder, prefill_chunk, max_waiting
        self.target = target = decoder.target
        self.budget = decoder.plan_caches(rows, max_length, cache_tokens, cache_bytes)
        self.max_eos = max(MAX_EOS, len(read_eos(None, target.model)))
        self.rule = decoder.read_rule(rule)
        config = replace(
            decoder.batch_config(self.budget.rows, self.budget.capacity, self.rule, self.max_eos),
            async_scheduling=async_scheduling,
            prefill_chunk=prefill_chunk,
            prefix_reuse=_read_reuse(prefix_reuse, target),
        )
        with torch.inference_mode():
            self.batch = Batch(config)
        self._numbers = 0
        self._waiting: deque[SequenceState] = deque()
        self._ended: deque[SequenceState] = deque()  # that ``run`` has not yielded yet
        self._busy_rows = 0
        self._stepping = False
        self._to_cancel: list[int] = []  # requests cancelled by code that the current step calls

    def warm_up(self) -> None:
        """Makes the first request as fast as later ones, as :meth:`SpeculativeDecoder.warm_up` does, for requests that
        come one by one if steps may have few rows, and else for steps of all rows."""
        warm_up(self.batch)

    # ---- requests ------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> int:
        """Takes a request and returns its number.

        Raises:
            ValueError: names its field, what was given and what is allowed.
            QueueFull: ``max_waiting`` requests wait already.
        """
        self.check_queue()
        sequence = self.read(request)
        self.take(sequence)
        return sequence.number

    def check_queue(self, coming: int = 0) -> None:
        """Raises QueueFull if there is no place after the waiting requests and ``coming`` others."""
        if (waiting := len(self._waiting) + coming) >= self.max_waiting:
            raise QueueFull(f"{waiting} requests wait, allowed: {self.max_waiting}")

    def read(self, request: Request) -> SequenceState:
        """Checks a request and numbers it: the first part of ``submit``. Uses no state that ``step`` changes, so it may
        run in another thread."""
        sequence = SequenceState.of(self._numbers, request, self.target, self.decoder.most_drafts)
        longest = self.max_length
        if sequence.slots > longest:
            given = f"{sequence.prompt_length} tokens with max_new_tokens={request.max_new_tokens}"
            refuse("prompt", given, f"{longest} tokens together")
        if len(sequence.eos) > self.max_eos:
            refuse("eos_token_id", f"{len(sequence.eos)} ids", f"up to {self.max_eos}")
        if sequence.prediction and not self.decoder.predicts:
            refuse("prediction", f"{len(sequence.prediction)} tokens", "None, or a decoder with a PredictedDrafter")
        if len(sequence.prediction) > longest:
            refuse("prediction", f"{len(sequence.prediction)} tokens", f"up to {longest}")
        self.decoder.check(sequence, self.rule)
        self._numbers += 1
        return sequence

    @property
    def max_length(self) -> int:
        """The most tokens of prompt and output of one sequence."""
        return self.budget.max_length

    def take(self, sequence: SequenceState) -> None:
        """Puts a sequence into the queue: the second part of ``submit``."""
        if sequence.room == 0 and sequence.request.prompt_log_probs is None:
            self._finish(sequence, FinishReason.LENGTH)
        else:
            self._waiting.append(sequence)

    def cancel(self, number: int) -> bool:
        """Ends a request, whether it waits or has a row. Its last output comes with the next step. Returns False if the
        request has already ended or does not exist. A call from inside a step takes effect at the end of the step,
        unless the request has ended by then."""
        sequences = (*self._waiting, *self.batch.sequences)
        sequence = next((s for s in sequences if s is not None and s.number == number), None)
        if sequence is None or not sequence.live:
            return False
        if self._stepping:
            self._to_cancel.append(number)
        else:
            if sequence in self._waiting:
                self._waiting.remove(sequence)
            self._finish(sequence, FinishReason.CANCELLED)
        return True

    def _finish(self, sequence: SequenceState, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self.batch.finish(sequence)

    @property
    def idle(self) -> bool:
        """Whether there is no request left to decode and no output left to return."""
        return not (self._waiting or any(self.batch.sequences) or self.batch.has_outputs)

    @property
    def usage(self) -> Usage:
        """The current load."""
        steps, rows = self.batch.steps, len(self.batch.sequences)
        return Usage(
            rows=rows,
            live=self.batch.live,
            prefilling=self.batch.prefilling,
            waiting=len(self._waiting),
            cache_tokens=self.budget.tokens,
            cache_tokens_used=sum(sequence.slots for sequence in self.batch.sequences if sequence is not None),
            steps=steps,
            busy=self._busy_rows / (steps * rows) if steps else 0.0,
            num_drafts=self.batch.num_drafts,
        )

    @property
    def drafter_error(self) -> str | None:
        """Why the drafter was dropped; None if it was not dropped, or there is none."""
        return None if self.batch.session is None else self.batch.session.error

    # ---- the loop ------------------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Reads about ``prefill_chunk`` tokens of prompts (always less than twice as many), and decodes all rows once.
        Each request has one ``Output`` with a finish reason, its last."""
        return self._step()

    def run(self, requests: Iterable[Request]) -> Iterator[SequenceState]:
        """Decodes all ``requests``, which are taken from the iterable as rows become free. Yields the sequences in the
        order in which they end; that of a refused request has number -1.

        An error of the iterable itself is raised at once. After it, or if the caller stops at any sequence, the
        requests already taken remain in the scheduler, and ``run(())`` yields theirs."""
        coming, more = iter(requests), True
        ahead = min(2 * len(self.batch.sequences) + 1, self.max_waiting)  # for many rows that become free at once
        while more or not self.idle or self._ended:
            while more and len(self._waiting) < ahead:
                try:
                    request = next(coming)
                except StopIteration:
                    more = False
                    break
                try:
                    self.submit(request)
                except ValueError as error:
                    yield SequenceState.refused(request, error)
            self._ended += [output.sequence for output in self._step() if output.finish_reason is not None]
            while self._ended:
                yield self._ended.popleft()

    @torch.inference_mode()
    def _step(self) -> list[Output]:
        if self._stepping:
            raise RuntimeError("step: called by what a step calls")
        self._stepping = True
        try:
            self._read_prompts()
            before, live = self.batch.steps, self.batch.live
            outputs = self.batch.step()
            self._busy_rows += live * (self.batch.steps - before)
        finally:
            self._stepping = False
            for number in self._to_cancel:
                self.cancel(number)
            self._to_cancel.clear()
        return outputs

    def _read_prompts(self) -> None:
        """Reads about ``prefill_chunk`` tokens of prompts, in order. A request gets a row once those before it have
        been read, since it may begin as they do. A row has room for every request that was taken."""
        batch, read = self.batch, 0
        while read < self.prefill_chunk and (batch.prefilling or self._waiting and None in batch.sequences):
            if not batch.prefilling:
                batch.admit(self._waiting.popleft())
            if batch.prefilling:
                read += max(batch.read_part(), 1)

    def close(self) -> None:
        """Cancels all requests; their last outputs come with the next step."""
        for sequence in [*self._waiting, *(s for s in self.batch.sequences if s is not None)]:
            self.cancel(sequence.number)


def _read_reuse(given: str | None, target: CachedModel) -> PrefixReuse:
    allowed = ["off"] if target.recurrent else [str(mode) for mode in PrefixReuse]
    if given is None:
        return PrefixReuse.OFF if target.recurrent else PrefixReuse.EXACT
    if given not in allowed:
        why = f", for model type {target.config.model_type!r}, whose state cannot be cut" if target.recurrent else ""
        refuse("prefix_reuse", repr(given), f"None, {', '.join(allowed)}{why}")
    return PrefixReuse(given)
