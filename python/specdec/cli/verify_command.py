"""``specdec verify``: whether speculative decoding is exact on your models and your machine."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import drafting, models, options
from .drafters import COMBINED, HEAD, NAMES, parts_of
from .given_prompts import MeasuredPrompts
from .option_groups import command, option
from .progress_bar import progress
from .server_address import ServerAddress
from .show_verification import print_server, print_verification
from .user_errors import check_counts, option_name, refuse

if TYPE_CHECKING:
    from ..evaluation.verify import ServerVerification, Verification, VerifySettings
    from ..jobs.questions import Question

CHECKS = ("greedy", "coupled", "distribution")
OF_SERVERS = ("greedy", "distribution")
RULES = ("token", "block", "coupled")


@dataclass(frozen=True)
class CheckOptions:
    """What is checked"""

    check: list[str] | None = option(None, "Repeatable: greedy, coupled, distribution. Default: all.")
    drafter: list[str] | None = option(
        None,
        f"Repeatable: {', '.join(n for n in NAMES if n != 'tree')}, {HEAD}, {COMBINED}. Default: "
        "model (if there is one), lookup, suffix.",
    )
    exit_layers: int | None = option(*drafting.EXIT_LAYERS)
    rule: list[str] | None = option(None, "Repeatable: token, block, coupled. Default: all.")
    num_drafts: list[str] | None = option(None, "Repeatable: a number, or auto. Default: 1 and 4.", *drafting.K)
    batch_size: list[int] | None = option(None, "Repeatable. Default: 1 and 8.")
    max_new_tokens: int = option(32, "Length of every text that is compared.")
    samples: int = option(2048, "Texts that each test of the distribution samples.")
    temperature: float = option(1.0, "Of sampled texts.")
    level: float = option(1e-4, "Probability of a false alarm in the whole run.")
    seed: int = option(0, "Of the first text.")
    as_json: bool = options.as_json()

    OF_LOOPS = ("drafter", "exit_layers", "rule", "num_drafts", "batch_size")

    def __post_init__(self) -> None:
        check_counts(1, max_new_tokens=self.max_new_tokens)
        for k in self.num_drafts or ():
            drafting.read_num_drafts(k, 1)

    def drafters(self, at: models.ModelOptions) -> list[str]:
        """Their names, checked."""
        names = self.drafter or [*(("model",) if at.draft or not at.target else ()), "lookup", "suffix"]
        if "tree" in names:
            refuse("--drafter", "'tree'", "drafters of chains, which are what is checked")
        drafting.check_drafters(names, at, self.exit_layers)
        return names

    def settings(self) -> VerifySettings:
        from ..evaluation.verify import VerifySettings

        return VerifySettings(
            checks=tuple(self.check or CHECKS),
            rules=tuple(self.rule or RULES),
            num_drafts=tuple("auto" if k == "auto" else int(k) for k in self.num_drafts or ("1", "4")),
            batch_sizes=tuple(self.batch_size or (1, 8)),
            **self._of_texts(),
        )

    def settings_of_server(self) -> VerifySettings:
        """Refuses what only a loop of ours has."""
        for name in self.OF_LOOPS:
            if getattr(self, name) is not None:
                refuse(option_name(name), "it with --url", "none: the server chooses how it decodes")
        checks = tuple(self.check or OF_SERVERS)
        if "coupled" in checks:
            refuse("--check", "coupled with --url", ", ".join(OF_SERVERS))
        from ..evaluation.verify import SAMPLED_TOKENS, VerifySettings

        return VerifySettings(checks=checks, sampled_tokens=SAMPLED_TOKENS, **self._of_texts())

    def _of_texts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("max_new_tokens", "samples", "temperature", "level", "seed")}


@dataclass(frozen=True)
class ServerOptions(ServerAddress):
    """Somebody's server"""

    url: str | None = option(
        None, "Verify what answers at this address by OpenAI's /v1/completions, against --reference."
    )
    reference: str | None = option(
        None, "Folder, hub name or GGUF file of the model that the server serves. Default: the embedded pair's target."
    )
    at_once: int = option(8, "Requests that are open together.")
    margin: float = option(
        0.0, "How far below the best logit a greedy token may be; more only for a server of another dtype."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(1, at_once=self.at_once)
        if not 0 <= self.margin < math.inf:
            refuse("--margin", self.margin, "a finite number >= 0")
        if self.url is None and self.reference is not None:
            refuse("--reference", "it without --url", "it with --url")

    def models(self, at: models.ModelOptions) -> models.ModelOptions:
        """Those of the reference."""
        for name in ("target", "draft", "draft_bits"):
            if getattr(at, name) is not None:
                refuse(option_name(name), "it with --url", "--reference for the server's model, and no draft")
        return dataclasses.replace(at, target=self.reference)


@command
def verify(
    given: MeasuredPrompts,
    at: models.ModelOptions,
    asked: CheckOptions,
    of: ServerOptions,
    prompt: Annotated[
        list[str] | None, typer.Argument(help="Default: beginnings of code or text.", show_default=False)
    ] = None,
) -> None:
    """Checks on your models that speculative decoding changes nothing but the speed.

    Greedy texts, and texts of rule coupled with their seeds, are compared with those of transformers' generate: a
    difference that rounding explains is a near-tie, any other is a bug. Sampled texts are tested against the target's
    own probabilities, which needs scipy (pip install 'specdec-kernels[verify]'). All of this is done for every
    --drafter, --rule, -k and --batch-size. With --url the texts are those of somebody's server, tested against the
    model --reference. Exits with 1 if a bug is found. docs/verify.md has the details.
    """
    if of.url is not None:
        return verify_url(given, of.models(at), asked, of, prompt)
    names = asked.drafters(at)
    questions = given.questions(prompt, at) if given.given(prompt) else None
    with progress("loading models") as show:
        from ..evaluation.verify import check_scipy, verify

        settings = asked.settings()
        if "distribution" in settings.checks:  # before models are loaded, which takes long
            check_scipy()
        loaded = models.load(at, names)
        layers = {"early-exit": asked.exit_layers}
        chosen = {name: loaded.drafter(name, layers.get(parts_of(name)[-1])) for name in names if name != "none"}
        verification = verify(loaded.target, chosen, token_ids(questions, loaded, at), settings, show)
    end(verification, asked, lambda: print_verification(verification, loaded.tokenizer))


def verify_url(
    given: MeasuredPrompts, at: models.ModelOptions, asked: CheckOptions, of: ServerOptions, prompt: list[str] | None
) -> None:
    settings = asked.settings_of_server()
    questions = given.questions(prompt, at) if given.given(prompt) else None
    with progress("loading the reference") as show:
        from ..evaluation.verify import ServerClient, check_scipy, verify_server

        if "distribution" in settings.checks:
            check_scipy()
        client = ServerClient(of.url or "", of.api_key, of.model, of.timeout)
        loaded = models.load(at, [])
        ids = token_ids(questions, loaded, at)
        verification = verify_server(
            client, loaded.target, loaded.tokenizer, ids, settings, of.at_once, of.margin, show
        )
    end(verification, asked, lambda: print_server(verification, loaded.tokenizer))


def token_ids(questions: list[Question] | None, loaded: models.Models, at: models.ModelOptions) -> list[list[int]]:
    """Those of the given prompts, or of the default ones."""
    if questions is not None:
        return [question.tokens(loaded.tokenizer) for question in questions]
    from ..evaluation.verify import short_prompts

    return loaded.tokenizer(list(short_prompts.TEXT if at.target else short_prompts.CODE)).input_ids


def end(verification: Verification | ServerVerification, asked: CheckOptions, show: Callable[[], None]) -> None:
    if asked.as_json:
        typer.echo(json.dumps(verification.to_dict(), allow_nan=False))
    else:
        show()
    if not verification.passed:
        raise typer.Exit(1)
