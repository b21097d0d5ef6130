"""``specdec verify``: whether speculative decoding is exact on your models and your machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer

from . import drafting, models, options
from .options import refuse
from .progress import progress
from .prompts import read_texts
from .show_verification import print_verification

CHECKS = ("greedy", "coupled", "distribution")
RULES = ("token", "block", "coupled")


def verify(
    prompt: Annotated[
        list[str] | None, typer.Argument(help="Default: beginnings of code or text.", show_default=False)
    ] = None,
    batch_file: options.BatchFile = None,
    target: options.Target = None,
    adapter: options.Adapter = None,
    draft: options.Draft = None,
    drafter: options.Drafters = None,
    exit_layers: options.ExitLayers = None,
    check: Annotated[
        list[str] | None, typer.Option(help="Repeatable: greedy, coupled, distribution. Default: all.")
    ] = None,
    rule: Annotated[list[str] | None, typer.Option(help="Repeatable: token, block, coupled. Default: all.")] = None,
    num_drafts: Annotated[
        list[str] | None, typer.Option("--num-drafts", "-k", help="Repeatable: a number, or auto. Default: 1 and 4.")
    ] = None,
    batch_size: Annotated[list[int] | None, typer.Option(help="Repeatable. Default: 1 and 8.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of every text that is compared.")] = 32,
    samples: Annotated[int, typer.Option(help="Texts that each test of the distribution samples.")] = 2048,
    temperature: Annotated[float, typer.Option(help="Of sampled texts.")] = 1.0,
    level: Annotated[float, typer.Option(help="Probability of a false alarm in the whole run.")] = 1e-4,
    seed: Annotated[int, typer.Option(help="Of the first text.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Checks on your models that speculative decoding changes nothing but the speed.

    Greedy texts, and texts of rule coupled with their seeds, are compared with those of transformers' generate: a
    difference that rounding explains is a near-tie, any other is a bug. Sampled texts are tested against the target's
    own probabilities, which needs scipy (pip install 'specdec[verify]'). All of this is done for every --drafter,
    --rule, -k and --batch-size. Exits with 1 if a bug is found. docs/verify.md has the details.
    """
    if prompt and batch_file is not None:
        refuse("PROMPT / --batch-file", "both", "at most one of the two")
    drafters = drafter or ["lookup", "suffix"] if target and not draft else drafter or ["model", "lookup", "suffix"]
    if "tree" in drafters:
        refuse("--drafter", "'tree'", "drafters of chains, which are what is checked")
    drafting.check_drafters(drafters, target, draft, exit_layers, adapter)
    texts: Sequence[str] = read_texts(prompt or [], batch_file)
    options.check_counts(1, max_new_tokens=max_new_tokens)
    for k in num_drafts or ():
        drafting.read_num_drafts(k, 1)
    with options.user_errors(batch_file), progress("loading models") as show:
        from ..evaluation.verify import VerifySettings, check_scipy, short_prompts, verify

        settings = VerifySettings(
            checks=tuple(check or CHECKS),
            rules=tuple(rule or RULES),
            num_drafts=tuple("auto" if k == "auto" else int(k) for k in num_drafts or ("1", "4")),
            batch_sizes=tuple(batch_size or (1, 8)),
            max_new_tokens=max_new_tokens,
            samples=samples,
            temperature=temperature,
            level=level,
            seed=seed,
        )
        if "distribution" in settings.checks:  # before models are loaded, which takes long
            check_scipy()
        loaded = models.load(target, draft, drafters, device, dtype, adapter)
        layers = {"early-exit": exit_layers}
        chosen = {name: loaded.drafter(name, layers.get(name)) for name in drafters if name != "none"}
        texts = texts or (short_prompts.TEXT if target else short_prompts.CODE)
        ids = loaded.tokenizer(list(texts)).input_ids
        verification = verify(loaded.target, chosen, ids, settings, show)
    if as_json:
        typer.echo(json.dumps(verification.to_dict(), allow_nan=False))
    else:
        print_verification(verification, loaded.tokenizer)
    if not verification.passed:
        raise typer.Exit(1)
