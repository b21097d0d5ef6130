"""Checks that speculative decoding from a target is exact, on the models and drafters that are going to be used.

docs/verify.md says what is checked, and how sure the result is."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from ...checks import refuse
from ...decoder import SpeculativeDecoder
from ...drafters.protocol import Drafter
from ..compare import environment
from ..contenders import Prompt
from ..server_connection import ServerError
from ..work_counter import Tell, Work, silent
from .chi_square import check_scipy
from .distributions import DistributionCheck, DistributionResult, DistributionTest
from .server_check import SAMPLED_TOKENS, ServerVerification, verify_server
from .server_client import ServerClient
from .text_check import TextCheck, TextResult
from .verify_settings import Cell, VerifySettings, cells

TEXTS = ("greedy", "coupled")  # the checks that compare texts

__all__ = [
    "SAMPLED_TOKENS",
    "Cell",
    "DistributionResult",
    "DistributionTest",
    "ServerClient",
    "ServerError",
    "ServerVerification",
    "TextResult",
    "Verification",
    "VerifySettings",
    "verify",
    "verify_server",
]


@dataclass(frozen=True)
class Verification:
    texts: list[TextResult]
    distributions: list[DistributionResult]
    level: float  # the probability that a correct loop fails any of ``distributions``
    never_accepted: list[str]  # drafters of which no draft was accepted: what follows one was not checked
    seconds: float
    environment: dict[str, object]

    @property
    def passed(self) -> bool:
        """Whether no bug was found. Near-ties are not bugs."""
        results: list[TextResult | DistributionResult] = [*self.texts, *self.distributions]
        return not any(result.bugs or result.error for result in results)

    def difference_rate(self, check: str) -> float:
        """Texts that differ from those of transformers, divided by the number of tokens that were compared."""
        results = [r for r in self.texts if r.cell.check == check]
        tokens = sum(r.tokens for r in results)
        return sum(r.differing for r in results) / tokens if tokens else 0.0

    def to_dict(self) -> dict:
        return {
            "passed": self.passed,
            "difference_rate": {check: self.difference_rate(check) for check in TEXTS},
            "texts": [result.to_dict() for result in self.texts],
            "distributions": [result.to_dict() for result in self.distributions],
            "level": self.level,
            "never_accepted": self.never_accepted,
            "seconds": self.seconds,
            "environment": self.environment,
        }


def verify(
    target: PreTrainedModel,
    drafters: Mapping[str, PreTrainedModel | Drafter | None],
    prompts: Sequence[Prompt],
    settings: VerifySettings | None = None,
    progress: Tell = silent,
) -> Verification:
    """Compares greedy texts and those of rule ``coupled`` with the texts of transformers' ``generate``, and tests
    sampled texts against the target's own probabilities, for every drafter, rule, K and batch size. Plain decoding by
    the same loop is always checked as well.

    Args:
        target: decoder-only, in evaluation mode.
        drafters: name -> what ``SpeculativeDecoder`` takes as ``draft``.
        prompts: lists of token ids, at least one; many of various lengths are best.
        settings: None is ``VerifySettings()``.
        progress: called with how many cells are done of how many, and which is next.

    Returns:
        Verification; ``passed`` says whether a bug was found.

    Raises:
        ValueError: as ``SpeculativeDecoder``; also where ``prompts`` is empty, and where scipy is missing and
            "distribution" is among the checks.
    """
    settings, start = settings or VerifySettings(), time.perf_counter()
    if not prompts:
        refuse("prompts", "none", "at least one")
    if "distribution" in settings.checks:
        check_scipy()
    drafters = {"none": None, **drafters}
    plan = cells(drafters, settings)
    decoders: dict[tuple, SpeculativeDecoder] = {}
    for cell in plan:  # models and drafters that cannot be used are refused before anything runs
        key = (cell.drafter, cell.num_drafts)
        if key not in decoders:
            decoders[key] = SpeculativeDecoder(target, drafters[cell.drafter], cell.drafts())
    tests_planned = sum(cell.check == "distribution" for cell in plan)
    text_check = TextCheck(target, prompts, settings)
    distribution_check = DistributionCheck(target, prompts, settings, settings.level / max(tests_planned, 1))
    texts: list[TextResult] = []
    distributions: list[DistributionResult] = []
    accepted = dict.fromkeys(drafters, 0)
    work = Work(progress, len(plan))
    for cell in plan:
        work.begin(f"{cell.check}: {cell.name}")
        with warnings.catch_warnings():
            # About a drafter that was dropped: the result has the error.
            warnings.simplefilter("ignore", RuntimeWarning)
            decoder = decoders[cell.drafter, cell.num_drafts]
            if cell.check == "distribution":
                distributions.append(distribution_check.run(cell, decoder))
                accepted[cell.drafter] += distributions[-1].stats.accepted
            else:
                texts.append(text_check.run(cell, decoder))
                accepted[cell.drafter] += texts[-1].stats.accepted
        work.did_one()
    never = [name for name, drafter in drafters.items() if drafter is not None and not accepted[name]]
    seconds = time.perf_counter() - start
    return Verification(texts, distributions, settings.level, never, seconds, environment(target))
