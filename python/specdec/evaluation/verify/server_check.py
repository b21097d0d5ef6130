"""Whether somebody's server, which has drafts or not, answers with texts of the model that it says it serves.

docs/verify.md says what is checked, and how sure the result is."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...checks import refuse
from ...prompts import read_eos
from ..compare import environment
from ..contenders import Prompt
from ..near_ties import Difference, Judge
from ..server_connection import ServerError
from ..work_counter import Tell, Work, silent
from .chi_square import check_scipy
from .distributions import LEAST, DistributionTest, all_tests, scenes
from .server_client import TOKEN_IDS, ReadBy, ServerClient, TokenReader
from .verify_settings import VerifySettings

SAMPLED_TOKENS = 8  # a server's first token is not drafted, and K is often 4 or 5
MOST_ERRORS = 10  # requests that fail before no others are made


@dataclass(frozen=True)
class ServerVerification:
    url: str
    model: str
    read_by: ReadBy
    prompts_as_ids: bool
    refused: list[str]  # fields that the server does not take
    texts: int  # greedy ones
    tokens: int  # of them
    differences: list[Difference]  # every token of a greedy text that is not the reference's best one
    scenes: list[list[int]]  # the prompts of the sampled texts
    samples: int  # texts that came
    unread: int  # texts, greedy or sampled, whose tokens are known only up to some place, or not at all
    tests: list[DistributionTest]
    level: float  # the probability that a right server fails any of ``tests``
    errors: list[str]  # of requests
    seconds: float
    environment: dict[str, object]

    @property
    def bugs(self) -> list[Difference | DistributionTest]:
        wrong = [d for d in self.differences if d.verdict == "bug"]
        return [*wrong, *(test for test in self.tests if not test.passed)]

    @property
    def passed(self) -> bool:
        """Whether nothing was found, and every request was answered. Near-ties are no bugs."""
        return not self.bugs and not self.errors

    @property
    def largest_gap(self) -> float:
        """How far below the reference's best logit a token of a greedy text was."""
        return max((d.gap for d in self.differences if d.gap is not None), default=0.0)

    def to_dict(self) -> dict:
        whole = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        differences, tests = map(dataclasses.asdict, self.differences), [test.to_dict() for test in self.tests]
        passed = {"passed": self.passed, "bugs": len(self.bugs), "largest_gap": self.largest_gap}
        return {**passed, **whole, "differences": list(differences), "tests": tests}


def verify_server(
    client: ServerClient,
    reference: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    settings: VerifySettings | None = None,
    at_once: int = 8,
    margin: float = 0.0,
    progress: Tell = silent,
) -> ServerVerification:
    """Judges greedy texts of a server token by token, and tests its sampled texts against the reference's own
    probabilities: after the most frequent beginnings, by ranks, and by pairs of ranks.

    Args:
        client: of the server.
        reference: the model that the server says it serves, in evaluation mode, best in the server's dtype.
        tokenizer: of the reference.
        prompts: lists of token ids, at least one.
        settings: ``checks`` (of them "greedy" and "distribution"), ``max_new_tokens``, ``samples``,
            ``sampled_tokens``, ``temperature``, ``level`` and ``seed``, of the first text of either kind. None is
            VerifySettings(sampled_tokens=SAMPLED_TOKENS).
        at_once: requests that are open together, >= 1, so that the server has batches.
        margin: see :class:`~specdec.evaluation.near_ties.Judge`.
        progress: called with how many texts are done of how many, and of which kind is the next.

    Returns:
        ServerVerification. A request that fails for good is among its ``errors``; MOST_ERRORS of them end its kind of
        texts, and what came before is judged.

    Raises:
        ServerError: the first requests fail, which ask what the server takes.
        ValueError: names the argument; also where scipy is missing and "distribution" is among the checks.
    """
    settings, start = settings or VerifySettings(sampled_tokens=SAMPLED_TOKENS), time.perf_counter()
    if not prompts:
        refuse("prompts", "none", "at least one")
    if at_once < 1:
        refuse("at_once", at_once, "an integer >= 1")
    if not margin >= 0:
        refuse("margin", margin, "a number >= 0")
    if "distribution" in settings.checks:
        check_scipy()
    client.probe(prompts[0], str(tokenizer.decode(list(prompts[0]))))
    served = _Served(client, reference, tokenizer, settings, at_once)
    usable = [prompt for prompt in prompts if served.is_usable(prompt)]
    if not usable:
        refuse("prompts", "none that is the same tokens again after decoding", "at least one, for a server of texts")
    greedy = usable if "greedy" in settings.checks else []
    samples = settings.samples if "distribution" in settings.checks else 0
    work = Work(progress, len(greedy) + samples)
    work.begin("greedy texts")
    texts = served.texts(greedy, settings.max_new_tokens, 0.0, work)
    judge = Judge(reference, margin=margin)
    differences = [d for i, text in enumerate(texts) if text for d in served.judged(judge, i, greedy[i], text)]
    tests: list[DistributionTest] = []
    chosen, sampled = [], 0
    if samples:
        work.begin("sampled texts")
        chosen = scenes(reference, usable, settings, served.reader.allowed, served.is_usable)
        if not chosen:
            refuse("prompts", "none whose end is the same tokens again", "at least one, for a server of texts")
        asked = [chosen[i % len(chosen)].prompt for i in range(samples)]
        found = served.texts(asked, settings.sampled_tokens, settings.temperature, work)
        sampled = sum(text is not None for text in found)
        tests = _tests([[t.tokens for t in found[i :: len(chosen)] if t] for i in range(len(chosen))], chosen, settings)
        if not tests:
            served.errors.append(f"{sampled} sampled texts came, too few for a test")
    return ServerVerification(
        url=client.url,
        model=client.model,
        read_by=served.reader.by,
        prompts_as_ids=client.takes_ids,
        refused=client.refused,
        texts=sum(text is not None for text in texts),
        tokens=sum(len(text.tokens) for text in texts if text),
        differences=differences,
        scenes=[scene.prompt for scene in chosen],
        samples=sampled,
        unread=served.unread,
        tests=tests,
        level=settings.level,
        errors=served.errors,
        seconds=time.perf_counter() - start,
        environment=environment(reference),
    )


def _tests(texts: list[list[tuple[int, ...]]], chosen: list[Any], settings: VerifySettings) -> list[DistributionTest]:
    """All tests of the sampled texts, if there are enough."""
    if sum(map(len, texts)) < LEAST or not any(text for of in texts for text in of):
        return []
    return all_tests(texts, chosen, settings.sampled_tokens, settings.level, pairs=True)


class _Read(NamedTuple):
    tokens: tuple[int, ...]  # up to the first one that cannot be read
    ended: bool  # and the server says that the text ends here


class _Served:
    """Texts of a server, as tokens of the reference."""

    def __init__(
        self,
        client: ServerClient,
        reference: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: VerifySettings,
        at_once: int,
    ):
        self._client, self._tokenizer, self._seed, self._at_once = client, tokenizer, settings.seed, at_once
        self._ends = sorted(read_eos(None, reference))
        by: ReadBy = "logprobs" if "logprobs" in client.fields else "text"
        if any(name in client.fields for name in TOKEN_IDS):
            by = "ids"
        vocabulary = reference.config.get_text_config(decoder=True).vocab_size
        self.reader = TokenReader(tokenizer, vocabulary, self._ends, by)
        self.unread, self.errors = 0, list[str]()

    def _text_of(self, prompt: Prompt) -> str:
        return str(self._tokenizer.decode(list(prompt)))

    def is_usable(self, prompt: Prompt) -> bool:
        """Whether the server reads these tokens, where it is sent their text."""
        text = self._text_of(prompt)
        return self._client.takes_ids or self._tokenizer(text).input_ids == list(prompt)

    def texts(self, prompts: Sequence[Prompt], length: int, temperature: float, work: Work) -> list[_Read | None]:
        """Each prompt's text, as far as it can be read; None where the request failed."""

        def ask(i: int) -> _Read | None:
            if len(self.errors) >= MOST_ERRORS:
                return None
            text, sampled = self._text_of(prompts[i]), temperature > 0
            try:
                answer = self._client.complete(prompts[i], text, length, temperature, self._seed + i, sampled)
            except ServerError as error:
                self.errors.append(str(error).removeprefix("url: "))
                return None
            tokens, whole = self.reader.read(answer)
            self.unread += not whole
            return _Read(tokens[:length], whole and answer.ended)

        return list(_in_order(ask, len(prompts), self._at_once, work))

    def judged(self, judge: Judge, index: int, prompt: Prompt, text: _Read) -> list[Difference]:
        """The tokens of a greedy text that are not the reference's best, and its end if that is not."""
        found = judge.rest(prompt, text.tokens, 0, "server", index)
        if text.ended and not self._ends:
            self.errors.append(f"greedy text {index} ends, and the reference has no token that ends texts")
        elif text.ended:
            at = len(text.tokens)
            ends = [judge.rest(prompt, (*text.tokens, end), at, "server", index) for end in self._ends]
            if all(ends):  # none of them is the best token
                found.append(min((each[0] for each in ends), key=lambda d: inf if d.gap is None else d.gap))
        return found


def _in_order(ask: Callable[[int], _Read | None], count: int, at_once: int, work: Work) -> Iterator[_Read | None]:
    with ThreadPoolExecutor(at_once) as pool:
        for answer in pool.map(ask, range(count)):
            work.did_one()
            yield answer
