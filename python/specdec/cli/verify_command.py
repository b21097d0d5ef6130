"""``specdec verify``: whether speculative decoding is exact on your models and your machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from . import drafting, models, options
from .drafters import COMBINED, HEAD, NAMES, parts_of
from .given_prompts import MeasuredPrompts
from .option_groups import command, option
from .progress_bar import progress
from .show_verification import print_verification
from .user_errors import check_counts, refuse

if TYPE_CHECKING:
    from ..evaluation.verify import VerifySettings

CHECKS = ("greedy", "coupled", "distribution")
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

        same = ("max_new_tokens", "samples", "temperature", "level", "seed")
        return VerifySettings(
            checks=tuple(self.check or CHECKS),
            rules=tuple(self.rule or RULES),
            num_drafts=tuple("auto" if k == "auto" else int(k) for k in self.num_drafts or ("1", "4")),
            batch_sizes=tuple(self.batch_size or (1, 8)),
            **{name: getattr(self, name) for name in same},
        )


@command
def verify(
    given: MeasuredPrompts,
    at: models.ModelOptions,
    asked: CheckOptions,
    prompt: Annotated[
        list[str] | None, typer.Argument(help="Default: beginnings of code or text.", show_default=False)
    ] = None,
) -> None:
    """Checks on your models that speculative decoding changes nothing but the speed.

    Greedy texts, and texts of rule coupled with their seeds, are compared with those of transformers' generate: a
    difference that rounding explains is a near-tie, any other is a bug. Sampled texts are tested against the target's
    own probabilities, which needs scipy (pip install 'specdec-kernels[verify]'). All of this is done for every
    --drafter, --rule, -k and --batch-size. Exits with 1 if a bug is found. docs/verify.md has the details.
    """
    names = asked.drafters(at)
    questions = given.questions(prompt, at) if given.given(prompt) else None
    with progress("loading models") as show:
        from ..evaluation.verify import check_scipy, short_prompts, verify

        settings = asked.settings()
        if "distribution" in settings.checks:  # before models are loaded, which takes long
            check_scipy()
        loaded = models.load(at, names)
        layers = {"early-exit": asked.exit_layers}
        chosen = {name: loaded.drafter(name, layers.get(parts_of(name)[-1])) for name in names if name != "none"}
        if questions is None:
            ids = loaded.tokenizer(list(short_prompts.TEXT if at.target else short_prompts.CODE)).input_ids
        else:
            ids = [question.tokens(loaded.tokenizer) for question in questions]
        verification = verify(loaded.target, chosen, ids, settings, show)
    if asked.as_json:
        typer.echo(json.dumps(verification.to_dict(), allow_nan=False))
    else:
        print_verification(verification, loaded.tokenizer)
    if not verification.passed:
        raise typer.Exit(1)
