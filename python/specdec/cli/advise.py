"""``specdec advise``: should these models speculate, with what, and how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import models, options
from .drafters import EMBEDDED_HEADS, make_drafter
from .layout import print_table
from .options import refuse
from .progress import progress
from .prompts import read_texts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..drafters.protocol import Drafter
    from ..evaluation.advise import Advice
    from ..evaluation.advise.compatibility import Compatibility

TEXTUAL = ("lookup", "suffix")  # drafters that need no model


def advise(
    target: Annotated[
        str | None,
        typer.Argument(help="Folder or hub name. Default: the embedded pair and its heads.", show_default=False),
    ] = None,
    drafts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DRAFT]...",
            help=f"Draft models and heads, by folder or hub name, or {', '.join(TEXTUAL)}. Default: these two.",
            show_default=False,
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts like yours, as --batch-file of other commands takes them: acceptance depends on the text.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="New tokens of a text.")] = 64,
    num_drafts: Annotated[int, typer.Option("--num-drafts", "-k", help="The largest K.")] = 8,
    temperature: Annotated[float, typer.Option(help="Of sampled texts; greedy ones are measured anyway.")] = 0.8,
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Sequences at a time, beside 1. Repeatable. Default: 2, 4 and 8.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="For which steps are measured. More models need more.")] = 50.0,
    seed: options.Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Says whether speculation pays with TARGET on this machine, in about a minute: with which drafter, K, rule and
    threads, up to which batch size, what it takes in memory, and what a better draft would be worth.

    It decodes prompts plainly and with every number of drafts in turns, and predicts from the acceptance by position
    and the times of steps. docs/advise.md says how."""
    texts = read_texts([], prompts) if prompts is not None else []
    options.check_counts(2, max_new_tokens=max_new_tokens)
    options.check_counts(1, num_drafts=num_drafts)
    if not 0 < seconds < float("inf"):
        refuse("--seconds", seconds, "a number > 0")
    with options.user_errors(prompts), progress("loading models") as show:
        from ..evaluation.advise import AdviseSettings
        from ..evaluation.advise import advise as measure

        sizes = {"batch_sizes": tuple(sorted({*batch_size} - {1}))} if batch_size else {}
        settings = AdviseSettings(seconds, max_new_tokens, num_drafts, temperature, seed=seed, **sizes)
        loaded = models.load(target, None, [], device, dtype)
        texts = texts or _own_texts(target)
        found, kinds = _drafters(loaded, target, drafts or (), texts, dtype)
        ids = loaded.tokenizer(texts).input_ids
        advice = measure(loaded.target, found, ids, settings, show, kinds)
    if as_json:
        typer.echo(json.dumps(advice.to_dict()))
        return
    for line in advice.words:
        typer.echo(line)
    _print_tried(advice)


def _own_texts(target: str | None) -> list[str]:
    from ..evaluation.verify import short_prompts
    from .compare import CODE_PROMPTS

    return list(short_prompts.TEXT if target else CODE_PROMPTS)


def _drafters(
    loaded: models.Models, target: str | None, drafts: list[str] | tuple[str, ...], texts: list[str], dtype: str | None
) -> tuple[dict[str, PreTrainedModel | Drafter], dict[str, Compatibility]]:
    """What is tried, by name, and what was found of the tokens of draft models."""
    found: dict[str, PreTrainedModel | Drafter] = {}
    kinds: dict[str, Compatibility] = {}
    if target is None:
        assert loaded.draft is not None
        found["model"] = loaded.draft
    names = [*(drafts or (TEXTUAL if target is not None else EMBEDDED_HEADS))]
    if len({*names}) < len(names):
        refuse("DRAFT", ", ".join(names), "each once")
    for name in names:
        if name in TEXTUAL or (target is None and name in EMBEDDED_HEADS):
            drafter = make_drafter(name, loaded.target)
        else:
            drafter, kind = _named(name, loaded, texts, dtype)
            if kind is not None:
                kinds[name] = kind
        assert drafter is not None
        found[name] = drafter
    return found, kinds


def _named(
    name: str, loaded: models.Models, texts: list[str], dtype: str | None
) -> tuple[Drafter | None, Compatibility | None]:
    """A draft model by folder or hub name, or a head by its folder."""
    from ..evaluation.advise.compatibility import compare_tokenizers
    from ..models.loading import load_model, load_tokenizer

    try:
        draft = load_model(name, dtype or "auto", loaded.target.device, name="draft")
    except (OSError, ValueError):
        if not Path(name).expanduser().is_dir():
            raise
        return make_drafter(name, loaded.target, tokenizer=loaded.tokenizer), None
    own: PreTrainedTokenizerBase | None
    try:
        own = load_tokenizer("draft", name)
    except OSError:
        own = None  # a draft needs no tokenizer of its own
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
    if not advice.tried:
        return
    columns = ("drafter", "K", "times\nplain", "tokens/s", "tau", "alpha", "c", "weights\nMB")
    print_table(
        columns,
        [
            (
                t.name, str(t.best.num_drafts), f"{t.best.speedup:.2f}", f"{t.best.tokens_per_second:.1f}",
                f"{t.best.tau:.2f}", f"{t.alpha:.2f}", f"{t.c:.2f}", f"{t.memory.draft / 1e6:.1f}",
            )
            for t in advice.tried
        ],
    )  # fmt: skip
