"""``specdec compare``: how fast specdec is, compared with transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from . import drafting, models, options
from .drafters import TEXTUAL, parts_of
from .given_prompts import MeasuredPrompts
from .option_groups import command, option
from .progress_bar import progress
from .show import print_comparison
from .user_errors import check_counts, refuse

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ComparedDrafts(drafting.DraftOptions):
    """Drafting"""

    num_drafts: str | None = option(
        None, "A number, or auto, for both. Default: the fastest of several for each.", *drafting.K
    )

    def check(self, at: models.ModelOptions) -> None:
        super().check(at)
        if self.drafter == "none":
            refuse("--drafter", "'none'", "one that proposes something: plain decoding is measured beside it anyway")


@dataclass(frozen=True)
class MeasureOptions:
    """What is measured"""

    max_new_tokens: int = option(64, "Of each text.")
    seed: int = option(0, "Of the first text; text i uses seed + i.")
    repeats: int = option(5, "Rounds; ratios are taken within each.")
    as_json: bool = options.as_json()

    def __post_init__(self) -> None:
        check_counts(1, max_new_tokens=self.max_new_tokens, repeats=self.repeats)


@command
def compare(
    given: MeasuredPrompts,
    at: models.ModelOptions,
    drafts: ComparedDrafts,
    sampling: options.FilterOptions,
    asked: MeasureOptions,
    prompt: Annotated[
        list[str] | None, typer.Argument(help="Default: a built-in set, one of each category.", show_default=False)
    ] = None,
) -> None:
    """Measures specdec, the target alone in transformers ("plain"), and transformers' assisted generation ("assisted").

    They continue the same prompts in turns, one at a time, in one process. The time is that from the prompt to the last
    new token, and only new tokens count. Assisted generation drafts with the draft model, or by transformers' prompt
    lookup with --drafter lookup or suffix; with other drafters it is left out. Each uses the number of drafts a step
    that is fastest here, which short rounds find; with -k both use that number, or for auto transformers its own way to
    choose it. With --tree N, or --drafter tree, trees of the same drafter are measured beside its chains
    ("specdec-tree"), and -k is the length of their longest paths. Exits with 1 if a
    greedy text of specdec differs from the plain one by more than rounding explains.
    """
    drafts = drafts.chosen(at)
    drafts.check(at)
    num_drafts = None if drafts.num_drafts is None else drafting.read_num_drafts(drafts.num_drafts, 1)
    sampling.params(drafts.accept_rule)
    questions = given.questions(prompt, at)
    with progress("loading models") as show:
        loaded = models.load(at, [drafts.drafter])
        from ..evaluation.compare import compare
        from ..evaluation.contenders import CompareSettings

        prompts = [question.tokens(loaded.tokenizer) for question in questions]
        settings = CompareSettings(
            asked.max_new_tokens,
            seed=asked.seed,
            repeats=asked.repeats,
            num_drafts=num_drafts,
            rule=drafts.rule,
            tree=drafts.nodes,
            **vars(sampling),
        )
        assistant: PreTrainedModel | Literal["lookup"] | None = "lookup" if drafts.drafter in TEXTUAL else None
        # transformers takes no assistant with a vocabulary of another size.
        if parts_of(drafts.drafter)[-1] in ("model", "tree") and loaded.same_size:
            assistant = loaded.draft
        proposer = loaded.drafter(drafts.drafter, drafts.exit_layers)
        comparison = compare(loaded.target, proposer, prompts, settings, show, assistant)
    if asked.as_json:
        typer.echo(json.dumps(comparison.to_dict()))
    else:
        print_comparison(comparison, loaded.tokenizer, prompts, shows_prompt=not questions[0].chat)
    if any(d.verdict == "bug" for d in comparison.ours):
        raise typer.Exit(1)
