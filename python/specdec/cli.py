"""The command line: ``specdec generate`` and ``specdec doctor``."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Speculative decoding, exact and fast.")
COLOURS = {"accepted": "green", "recovered": "red", "bonus": "blue"}


@app.command()
def generate(
    prompt: str,
    target: Annotated[str | None, typer.Option(help="Path or hub name; default: the embedded pair.")] = None,
    draft: Annotated[str | None, typer.Option(help="Path or hub name of the draft model.")] = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    num_drafts: Annotated[int, typer.Option("-k", "--num-drafts")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt.")] = False,
    verbose: Annotated[bool, typer.Option("-v", help="Colour tokens by who produced them.")] = False,
) -> None:
    """Continues PROMPT."""
    import specdec
    from specdec_kernels import SamplingParams

    console = Console()
    if (target is None) != (draft is None):
        raise typer.BadParameter("--target and --draft belong together; give both or neither (the embedded pair)")
    try:
        models = specdec.load_embedded_pair() if target is None else specdec.load_pair(target, draft)
        target_model, draft_model, tokenizer = models
        decoder = specdec.SpeculativeDecoder(target_model, draft_model, num_drafts=num_drafts)
        input_ids = tokenizer(prompt, return_tensors="pt").input_ids
        params = SamplingParams(temperature=temperature)
        result = decoder.generate(input_ids, max_new_tokens=max_new_tokens, params=params, seed=seed)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    tokens, produced_by = result.tokens[0], [str(p) for p in result.produced_by[0]]
    text = tokenizer.decode(tokens)
    if as_json:
        stats = result.stats.to_dict()
        print(json.dumps({"text": text, "token_ids": tokens, "produced_by": produced_by, "stats": stats}))
        return
    shown = Text(prompt, style="dim")
    if verbose:
        for token, producer in zip(tokens, produced_by, strict=True):
            shown.append(tokenizer.decode([token]), style=COLOURS[producer])
    else:
        shown.append(text)
    console.print(shown)
    stats = result.stats
    console.print(
        f"{stats.emitted} tokens in {stats.steps} steps: tau {stats.tau:.2f}, "
        f"acceptance rate {stats.acceptance_rate:.2f}, alpha {stats.alpha:.2f}",
        style="dim",
    )


@app.command()
def doctor() -> None:
    """Prints what was built, which backends can run on this machine, and why another cannot."""
    from specdec_kernels import build_info

    info = build_info()
    console = Console()
    for name in ("version", "python", "platform", "torch", "triton", "cuda_device", "native"):
        console.print(f"{name}: {info[name]}")
    table = Table("backend", "device", "runs here", "why not")
    for row in info["backends"]:
        table.add_row(row["backend"], row["device"], "yes" if row["available"] else "no", row["reason"] or "")
    console.print(table)
