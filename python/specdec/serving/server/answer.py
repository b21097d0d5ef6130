"""Decodes the texts of one request of a client, and answers with them and with what the work
behind them was, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from ...loop.sequence import SequenceState
from ...stats import Stats
from .decoded_text import DecodedText, Piece
from .errors import ApiError
from .events import Write
from .plan import Plan
from .request_bodies import GenerationBody
from .service import Service


class Form(Protocol):
    """How the choices of an endpoint look."""

    prefix: str  # of ids
    object: str
    chunk_object: str

    def choice(self, index: int, text: DecodedText, whole: Piece) -> dict[str, Any]:
        """A choice of a response, without ``finish_reason`` and ``prompt_logprobs``.

        Args:
            whole: all pieces of the text.
        """

    def openings(self, index: int) -> list[dict[str, Any]]:
        """The choices of the chunks with which a stream begins."""

    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        """The choice of a chunk."""

    def last(self, index: int) -> dict[str, Any]:
        """The choice of a text's last chunk, without ``finish_reason``."""

    def finish_reason(self, index: int, text: DecodedText) -> str:
        """Why a text ended, all of which was told."""

    def reasoning_tokens(self) -> int:
        """How many tokens of all texts were no content, but what the model thought before it."""


class Answer:
    """The texts of one request. ``close`` must be called in the end, whatever happens.

    Args:
        form: of the endpoint.
    """

    def __init__(self, service: Service, body: GenerationBody, plan: Plan, form: Form):
        self._service, self._body, self._plan, self._form = service, body, plan, form
        self._texts: list[DecodedText] = []
        self._begin = time.perf_counter()
        self._head = {
            "id": form.prefix + uuid.uuid4().hex,
            "object": form.chunk_object if body.stream else form.object,
            "created": int(time.time()),
            "model": service.name,
            "system_fingerprint": service.fingerprint,
        }

    async def begin(self) -> None:
        """Submits all of them, or none. Raises ApiError."""
        service, plan = self._service, self._plan
        try:
            for request, cut in zip(plan.requests, plan.cuts, strict=True):
                begun = await DecodedText.begin(plan.reading.detokenizer, plan.lane, request, service.metrics, cut)
                self._texts.append(begun)
        except BaseException as error:
            await self.close()
            if isinstance(error, ApiError):
                raise plan.renamed(error) from error
            raise

    async def close(self) -> None:
        """Cancels the texts that have not ended."""
        for text in self._texts:
            await text.close()

    @property
    def logged(self) -> dict[str, Any]:
        return logged(self._plan, self._texts, bool(self._body.stream))

    async def whole(self) -> dict[str, Any]:
        """The response. Raises ApiError if a text fails; the others are then cancelled."""
        choices = await _all([self._choice(i, text) for i, text in enumerate(self._texts)])
        return {**self._head, "choices": choices, **self._totals()}

    async def stream(self, write: Write) -> None:
        """Writes the response as events. An error is the last event but one."""
        head = json.dumps(self._head)[:-1]
        options, prompt_tokens, told = self._body.stream_options, self._plan.prompt_tokens, 0
        usage_asked = options is not None and options.include_usage
        continuous = usage_asked and options is not None and options.continuous_usage_stats

        def chunk(choice: dict[str, Any], tokens: int = 0) -> str:
            nonlocal told
            told += tokens
            tail = ', "usage": null' if usage_asked else ""
            if continuous:
                total = prompt_tokens + told
                so_far = {"prompt_tokens": prompt_tokens, "completion_tokens": told, "total_tokens": total}
                tail = f', "usage": {json.dumps(so_far)}'
            return f'data: {head}, "choices": [{json.dumps(choice)}]{tail}}}\n\n'

        last = ""
        try:
            await _all([self._follow(i, text, chunk, write) for i, text in enumerate(self._texts)])
            if usage_asked:
                last = f"data: {head}, {json.dumps({'choices': [], **self._totals()})[1:]}\n\n"
        except ApiError as error:
            last = f"data: {json.dumps(error.body)}\n\n"
        await write(f"{last}data: [DONE]\n\n")

    async def _choice(self, index: int, text: DecodedText) -> dict[str, Any]:
        pieces = [piece async for piece in text.pieces()]
        text.check()
        whole = Piece(
            "".join(piece.text for piece in pieces),
            [token for piece in pieces for token in piece.tokens],
            [step for piece in pieces for step in piece.steps],
        )
        choice = self._form.choice(index, text, whole)
        if (top := self._body.prompt_logprobs) is not None:
            choice["prompt_logprobs"] = self._service.names.prompt(text.request.prompt, text.prompt_scores(top))
        reason = self._form.finish_reason(index, text)
        return {**choice, "finish_reason": reason, "specdec": {**self._steps(whole), **self._told(text)}}

    async def _follow(self, index: int, text: DecodedText, chunk: Callable[..., str], write: Write) -> None:
        for opening in self._form.openings(index):
            await write(chunk({**opening, "finish_reason": None}))
        last = ""
        async for piece in text.pieces():
            choice = self._form.part(index, piece)
            choice["finish_reason"] = None
            if steps := self._steps(piece):
                choice["specdec"] = steps
            event = chunk(choice, len(piece.tokens))
            if text.ended is None:
                await write(event)
            else:  # what follows is there, too, so it is one write
                last = event
        try:
            text.check()
        except ApiError:
            await write(last)
            raise
        end = self._form.last(index)
        reason = self._form.finish_reason(index, text)
        await write(last + chunk({**end, "finish_reason": reason, "specdec": self._told(text)}))

    def _steps(self, of: Piece) -> dict[str, Any]:
        details, names = self._body.specdec, self._service.names
        if details is None or not details.steps:
            return {}
        steps = []
        for step in of.steps:
            drafts = None if step.drafts is None else [[draft, names.text(draft)] for draft in step.drafts]
            plain = step.drafts == []
            tokens = [[t.id, t.text, "plain" if plain else t.producer] for t in step.tokens]
            steps.append({"drafts": drafts, "tokens": tokens})
        return {"steps": steps}

    def _told(self, text: DecodedText) -> dict[str, Any]:
        """What we tell of a text that has ended, beside OpenAI's fields. With its seed the same request gives the same
        text."""
        assert text.ended is not None
        seconds = time.perf_counter() - self._begin
        return {"seed": text.request.seed, "stats": stats(text.ended.stats, seconds)}

    def _totals(self) -> dict[str, Any]:
        ended = [text.ended for text in self._texts if text.ended is not None]
        cached, thought = cached_tokens(self._plan, self._texts), self._form.reasoning_tokens()
        return {
            "usage": usage(self._plan.prompt_tokens, cached, ended, thought),
            "metrics": speculative_metrics(ended, self._plan.lane.most_drafts),
        }


def cached_tokens(plan: Plan, texts: Sequence[DecodedText]) -> int:
    """How many tokens of the prompts were not read. A prompt counts once: its further choices take over the first's."""
    firsts = [text.ended for text in texts[:: plan.copies]]
    return sum(text.reused or 0 for text in firsts if text is not None)


def logged(plan: Plan, texts: Sequence[DecodedText], stream: bool) -> dict[str, Any]:
    """What the log has of a request that has ended: counts and kinds of errors, and nothing that was said."""
    ended = [text.ended for text in texts if text.ended is not None]
    cached = cached_tokens(plan, texts)
    counts = usage(plan.prompt_tokens, cached, ended)
    facts = {name: counts[name] for name in ("prompt_tokens", "completion_tokens")}
    facts["cached_tokens"] = cached
    facts["accepted_tokens"] = counts["completion_tokens_details"]["accepted_prediction_tokens"]
    facts |= {"drafter": plan.lane.drafter, "rule": plan.lane.rule, "stream": stream}
    facts["finish"] = sorted({text.finish_reason for text in texts if text.ended is not None})
    errors = sorted({o.error.partition(":")[0] for o in ended if o.error is not None})
    return facts | ({"errors": errors} if errors else {})


async def _all(work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results of all. If one raises, the others are cancelled, and the first error is raised."""
    if len(work) == 1:
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def usage(
    prompt_tokens: int, cached_tokens: int, texts: Sequence[SequenceState], reasoning_tokens: int = 0
) -> dict[str, Any]:
    """OpenAI's ``usage``. All tokens that were generated count, those that a stop string cut off, too.

    Args:
        prompt_tokens: of all prompts; one that has several choices counts once.
        cached_tokens: how many of these were taken over from earlier prompts.
    """
    generated = sum(len(text.tokens) for text in texts)
    accepted = sum(text.stats.accepted for text in texts)
    drafted = sum(text.stats.drafted for text in texts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
            "reasoning_tokens": reasoning_tokens,
            "audio_tokens": 0,
        },
        "prompt_tokens_details": {"cached_tokens": cached_tokens, "audio_tokens": 0},
    }


def speculative_metrics(texts: Sequence[SequenceState], num_drafts: int) -> dict[str, Any]:
    """vLLM's ``metrics``, summed over all choices. Steps without drafts do not count, as there.

    Args:
        num_drafts: the largest K.
    """
    stats = [text.stats for text in texts]
    steps = sum(_from(s.drafted_by_position, 0) for s in stats)
    drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    # How many steps accepted at least 0, 1, ... drafts
    at_least = [steps, *(sum(_from(s.accepted_by_position, i) for s in stats) for i in range(num_drafts)), 0]
    histogram = {str(i): count - at_least[i + 1] for i, count in enumerate(at_least[:-1])}
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": {length: count for length, count in histogram.items() if count},
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": num_drafts,
        }
    }


def stats(of: Stats, seconds: float) -> dict[str, Any]:
    """Our own counts of one choice; ``seconds`` from its request to its end."""
    by_position = zip(of.accepted_by_position, of.drafted_by_position, strict=True)
    return {
        "steps": of.steps,
        "drafted": of.drafted,
        "accepted": of.accepted,
        "tau": of.tau,
        "acceptance_rate": of.acceptance_rate,
        "by_position": [accepted / drafted if drafted else 0.0 for accepted, drafted in by_position],
        "seconds": seconds,
        "tokens_per_second": of.emitted / seconds if seconds > 0 else 0.0,
    }


def _from(counts: list[int], index: int) -> int:
    return counts[index] if index < len(counts) else 0
