"""``specdec advise``: should these models speculate, with what, and how."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import drafting, models, options
from .drafters import ALONE, EMBEDDED_HEADS, make_drafter
from .given_prompts import MeasuredPrompts
from .option_groups import command, option
from .progress_bar import progress
from .show import RATIOS
from .terminal import print_table, remark
from .user_errors import check_counts, refuse

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..drafters.protocol import Drafter
    from ..evaluation.advise import Advice, AdviseSettings
    from ..evaluation.advise.compatibility import Compatibility


@dataclass(frozen=True)
class LikeYours(MeasuredPrompts):
    """Prompts"""

    batch_file: Path | None = option(
        None,
        "Prompts like yours, as --batch-file of other commands takes them: acceptance depends on the text.",
        "--prompts",
        "--batch-file",
        metavar="FILE",
    )


@dataclass(frozen=True)
class AdviseOptions:
    """What is measured"""

    max_new_tokens: int = option(64, "New tokens of a text.")
    num_drafts: int = option(8, "The largest K.", *drafting.K)
    temperature: float = option(0.8, "Of sampled texts; greedy ones are measured anyway.")
    batch_size: list[int] | None = option(None, "Sequences at a time, beside 1. Repeatable. Default: 2, 4 and 8.")
    seconds: float = option(50.0, "For which steps are measured. More models need more.")
    seed: int = option(0, "Of the first text; text i uses seed + i.")
    draft_bits: int | None = option(None, "8: draft models in 8 bits. Default: as saved.", metavar="8")
    as_json: bool = options.as_json()

    def __post_init__(self) -> None:
        check_counts(2, max_new_tokens=self.max_new_tokens)
        check_counts(1, num_drafts=self.num_drafts)
        if not 0 < self.seconds < float("inf"):
            refuse("--seconds", self.seconds, "a number > 0")

    def settings(self) -> AdviseSettings:
        from ..evaluation.advise import AdviseSettings

        sizes: Any = {"batch_sizes": tuple(sorted({*self.batch_size} - {1}))} if self.batch_size else {}
        texts = (self.seconds, self.max_new_tokens, self.num_drafts, self.temperature)
        return AdviseSettings(*texts, seed=self.seed, **sizes)


@command
def advise(
    given: LikeYours,
    asked: AdviseOptions,
    machine: options.MachineOptions,
    target: Annotated[
        str | None,
        typer.Argument(
            help="Folder, hub name or GGUF file. Default: the embedded pair and its heads.", show_default=False
        ),
    ] = None,
    drafts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DRAFT]...",
            help=f"Draft models and heads: folders, hub names, GGUF files or {', '.join(ALONE)}. Default: these three.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Says whether speculation pays with TARGET on this machine, in a minute or two: with which drafter, K, rule and
    threads, up to which batch size, what it takes in memory, and what a better draft would be worth.

    It decodes prompts plainly and with every number of drafts in turns, and predicts from the acceptance by position
    and the times of steps. docs/advise.md says how."""
    at = models.ModelOptions(target=target, draft_bits=asked.draft_bits, machine=machine)
    if asked.draft_bits is not None and target is not None and not {*(drafts or ())} - {*ALONE}:
        refuse("--draft-bits", f"{asked.draft_bits} without a draft model", "none, or DRAFT as well")
    questions = given.questions(None, at)
    with progress("loading models") as show:
        from ..evaluation.advise import advise as measure

        settings = asked.settings()
        loaded = models.load(at, [])
        texts = [question.prompt for question in questions]
        found, kinds = _drafters(loaded, at, drafts or (), texts)
        ids = [question.tokens(loaded.tokenizer) for question in questions]
        advice = measure(loaded.target, found, ids, settings, show, kinds)
    if asked.as_json:
        typer.echo(json.dumps(advice.to_dict()))
        return
    for line in advice.words:
        remark(line, err=False)
    _print_tried(advice)


def _drafters(
    loaded: models.Models, at: models.ModelOptions, drafts: list[str] | tuple[str, ...], texts: list[str]
) -> tuple[dict[str, PreTrainedModel | Drafter], dict[str, Compatibility]]:
    """What is tried, by name, and what was found of the tokens of draft models."""
    target, found = at.target, dict[str, "PreTrainedModel | Drafter"]()
    kinds: dict[str, Compatibility] = {}
    if target is None:
        assert loaded.draft is not None
        found["model"] = loaded.draft
    names = [*(drafts or (ALONE if target is not None else EMBEDDED_HEADS))]
    if len({*names}) < len(names):
        refuse("DRAFT", ", ".join(names), "each once")
    for name in names:
        drafter: Drafter | None
        if name in ALONE or (target is None and name in EMBEDDED_HEADS):
            try:
                drafter = make_drafter(name, loaded.target)
            except ValueError:
                if drafts or name != "early-exit":
                    raise
                continue  # no model that can be left early
        else:
            drafter, kind = _named(name, loaded, texts, at)
            if kind is not None:
                kinds[name] = kind
        assert drafter is not None
        found[name] = drafter
    return found, kinds


def _named(
    name: str, loaded: models.Models, texts: list[str], at: models.ModelOptions
) -> tuple[Drafter | None, Compatibility | None]:
    """A draft model by folder, hub name or GGUF file, or a head by its folder."""
    from ..evaluation.advise.compatibility import compare_tokenizers
    from ..models.load.loading import load_draft, load_draft_tokenizer

    try:
        draft = load_draft(name, at.machine.dtype or "auto", loaded.target.device, None, at.draft_bits)
    except (OSError, ValueError) as error:
        if not Path(name).expanduser().is_dir() or str(error).startswith("draft_bits: "):
            raise
        if at.draft_bits is not None:
            allowed = "draft models, which have bits, or no --draft-bits"
            raise typer.BadParameter(f"got {name!r}, allowed: {allowed}: {error}", param_hint="DRAFT") from error
        return make_drafter(name, loaded.target, tokenizer=loaded.tokenizer), None
    own = load_draft_tokenizer(name)
    ours, theirs = (m.config.get_text_config(decoder=True).vocab_size for m in (loaded.target, draft))
    kind = compare_tokenizers(loaded.tokenizer, own, (ours, theirs), texts)
    if kind.drafter is None:
        refuse("DRAFT", f"{name!r}, with a vocabulary of {theirs} tokens and no tokenizer", f"{ours}, the target's")
    drafter = make_drafter(
        kind.drafter, loaded.target, draft, tokenizer=loaded.tokenizer, draft_tokenizer=own or loaded.tokenizer
    )
    return drafter, kind


def _print_tried(advice: Advice) -> None:
    """What was found of each drafter."""
    plain = advice.verdict.plain_tokens_per_second
    if plain is None:
        return
    columns = ("drafter", "K", "times\nplain", "tokens/s", "tau", "alpha", "c", "weights\nMB")
    print_table(
        columns,
        [
            (
                t.name, str(t.best.num_drafts), f"{t.best.speedup:.2f}", f"{t.best.speedup * plain:.1f}",
                f"{t.best.tau:.2f}", f"{t.alpha:.2f}", f"{t.c:.2f}" if t.has_model else "–",
                f"{t.memory.draft / 1e6:.1f}",
            )
            for t in advice.tried
        ],
    )  # fmt: skip
    remark(f"{RATIOS} c: the time of a draft model's forward over that of the target's.", err=False)
