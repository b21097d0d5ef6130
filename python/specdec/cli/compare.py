"""``specdec compare``: how fast specdec is, compared with transformers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from . import drafting, models, options
from .drafters import nodes_of
from .options import refuse
from .progress import progress
from .prompts import read_texts
from .show import print_comparison

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Source code, which the embedded pair was trained on.
CODE_PROMPTS = (
    "import os\nimport sys\n\n\ndef main():\n",
    'class Error(Exception):\n    """',
    "    def __init__(self, name, value=None):\n",
    "    def read(self, size=-1):\n        ",
)


def compare(
    prompt: Annotated[
        list[str] | None, typer.Argument(help="Default: some beginnings of code.", show_default=False)
    ] = None,
    batch_file: options.BatchFile = None,
    target: options.Target = None,
    adapter: options.Adapter = None,
    draft: options.Draft = None,
    drafter: options.Drafter = "model",
    exit_layers: options.ExitLayers = None,
    max_new_tokens: int = 64,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    rule: options.AcceptRule = None,
    seed: options.Seed = 0,
    num_drafts: Annotated[
        str | None,
        typer.Option(
            "--num-drafts", "-k", help="A number, or auto, for both. Default: the fastest of several for each."
        ),
    ] = None,
    tree: options.Tree = None,
    compile: Annotated[bool, typer.Option("--compile", help="specdec uses torch.compile.")] = False,
    repeats: Annotated[int, typer.Option(help="Rounds; ratios are taken within each.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
) -> None:
    """Measures specdec, the target alone in transformers ("plain"), and transformers' assisted generation ("assisted").

    They continue the same prompts in turns, one at a time, in one process. The time is that from the prompt to the last
    new token, and only new tokens count. Assisted generation drafts with the draft model, or by transformers' prompt
    lookup with --drafter lookup; with other drafters it is left out. Each uses the number of drafts a step that is
    fastest here, which short rounds find; with -k both use that number, or for auto transformers its own way to choose
    it. With --tree N, or --drafter tree, trees of the same drafter are measured beside its chains ("specdec-tree"), and
    -k is the length of their longest paths. With --compile only specdec is compiled, which takes minutes the first time
    and does not count; transformers is as it is for those who call generate. Exits with 1 if a greedy text of specdec
    differs from the plain one by more than rounding explains.
    """
    if prompt and batch_file is not None:
        refuse("PROMPT / --batch-file", "both", "at most one of the two")
    texts = read_texts(prompt or ([] if batch_file else list(CODE_PROMPTS)), batch_file)
    options.check_counts(1, max_new_tokens=max_new_tokens, repeats=repeats)
    drafting.check_drafters([drafter], target, draft, exit_layers, adapter, tree)
    if drafter == "none":
        refuse("--drafter", "'none'", "one that proposes something: plain decoding is measured beside it anyway")
    lengths = None if num_drafts is None else drafting.read_num_drafts(num_drafts, 1)
    with options.user_errors(batch_file), progress("loading models") as show:
        filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        sampling: dict[str, Any] = {"temperature": temperature, **filters, "repetition_penalty": repetition_penalty}
        nodes = nodes_of(drafter, tree)
        options.read_sampling(drafting.read_rule(rule, nodes), **sampling)
        loaded = models.load(target, draft, [drafter], device, dtype, adapter)
        from ..evaluation.compare import compare
        from ..evaluation.contenders import CompareSettings

        prompts = loaded.tokenizer(texts).input_ids
        settings = CompareSettings(
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            num_drafts=lengths,
            seed=seed,
            rule=rule,
            tree=nodes,
            **sampling,
        )
        assistant: PreTrainedModel | Literal["lookup"] | None = "lookup" if drafter == "lookup" else None
        # transformers takes no assistant with a vocabulary of another size.
        if drafter in ("model", "tree") and loaded.same_size:
            assistant = loaded.draft
        proposer = loaded.drafter(drafter, exit_layers)
        comparison = compare(loaded.target, proposer, prompts, settings, show, assistant, compile)
    if as_json:
        typer.echo(json.dumps(comparison.to_dict()))
    else:
        print_comparison(comparison, loaded.tokenizer, prompts)
    if any(d.verdict == "bug" for d in comparison.ours):
        raise typer.Exit(1)
