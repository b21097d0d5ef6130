"""The options that commands share: their types, their checks, and the option that an error of the library is about.

Nothing here imports torch before a command runs."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ..stopping import StoppingCriteria, StopStrings
from .drafters import HEAD, NAMES, NO_TREES, TREE_DRAFTS, TREE_NODES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specdec_kernels import SamplingParams


Target = Annotated[str | None, typer.Option(help="Folder or hub name of the target. Default: the embedded pair.")]
Adapter = Annotated[
    str | None, typer.Option(help="Folder of a peft adapter of the target, in safetensors.", show_default=False)
]
Draft = Annotated[str | None, typer.Option(help="Folder or hub name of the draft.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k most likely tokens; 0 is off.")]
TopP = Annotated[float | None, typer.Option(help="Keep the most likely tokens of this total probability; 1 is off.")]
MinP = Annotated[float | None, typer.Option(help="Keep tokens of this fraction of the largest probability; 0 is off.")]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Weakens tokens of prompt and output, as in transformers; 1 is off.")
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Subtracted from the logits of tokens that were generated; 0 is off.")
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(help="The same, once for each time that they were generated; 0 is off.")
]
LogitBias = Annotated[
    list[str] | None, typer.Option(metavar="ID=VALUE", help="Added to the logit of a token. Repeatable.")
]
Ban = Annotated[list[int] | None, typer.Option(metavar="ID", help="A token that is never generated. Repeatable.")]
MinNewTokens = Annotated[int, typer.Option(help="No end of sequence before so many tokens.")]
AcceptRule = Annotated[
    str | None,
    typer.Option(
        help="token, block (accepts more), or coupled (the text depends on target and seed alone). Default: token; "
        "with a tree, coupled."
    ),
]
Drafter = Annotated[
    str,
    typer.Option(help=f"Who proposes tokens: {', '.join(NAMES)}, or {HEAD}."),
]
ChatDrafter = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help=f"Who proposes tokens: {', '.join(NAMES)}, or {HEAD}. Default: model; with --url, the server's.",
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        help="Of a server with OpenAI's interface: http://127.0.0.1:8000/v1. --target is then a name of a model there."
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        help="Of that server. Other users see it in the list of processes, unlike the variable SPECDEC_API_KEY.",
    ),
]
Drafters = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter",
        help=f"Repeatable: {', '.join(n for n in NAMES if n != 'tree')}, {HEAD}. Default: model (if there is one), "
        "lookup, suffix.",
    ),
]
ExitLayers = Annotated[int | None, typer.Option(help="Layers of the target that draft, with --drafter early-exit.")]
Confidence = Annotated[
    float, typer.Option(help="After a token that the draft model finds less likely than this, no more are drafted.")
]
NumDrafts = Annotated[
    str | None,
    typer.Option(
        "--num-drafts",
        "-k",
        help="K, drafted tokens a step; 0 decodes plainly; auto adapts it. Default: auto where no text depends on it, "
        "which is at temperature 0 and with --rule coupled; 4 elsewhere, and with --output. With a tree: the "
        f"most tokens of a path through it; default {TREE_DRAFTS}.",
    ),
]
Tree = Annotated[
    int | None,
    typer.Option(
        "--tree",
        metavar="N",
        help="Verify a tree of up to N drafts in each step, instead of one chain: several continuations, which "
        f"share their beginnings. For every drafter but {' and '.join(NO_TREES)}; --drafter tree has {TREE_NODES}.",
    ),
]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="The text ends after this. Repeatable.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Colour tokens by what produced them.")]
Seed = Annotated[int, typer.Option(help="Of the first text; text i uses seed + i.")]
BatchFile = Annotated[
    Path | None,
    typer.Option(
        help='UTF-8, one prompt a line; in a .jsonl file and in standard input (-) a JSON string or {"prompt": ...} a '
        "line (docs/jobs.md).",
    ),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        help="A text file that is one prompt as it stands, its last line end included; - is standard input.",
    ),
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json", help="Print results, one JSON object a text, a line each. With --output: those that it writes."
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(help="Write results of --batch-file to this file as they end, and resume where it has some."),
]
Rows = Annotated[int | None, typer.Option(help="Prompts that are decoded at a time, with --output.", show_default="8")]
MaxLength = Annotated[
    int | None, typer.Option(help="Tokens of a prompt and its text, at most, with --output. Default: what fits.")
]
CacheTokens = Annotated[int | None, typer.Option(help="Tokens in the caches, all rows together, with --output.")]
CacheBytes = Annotated[
    str | None, typer.Option(metavar="SIZE", help="The same in bytes of target and draft: 800MB, 2GiB.")
]
PrefillChunk = Annotated[int | None, typer.Option(help="Tokens of a prompt that are read at a time, with --output.")]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="Say nothing while a job runs.")]
LogProbs = Annotated[bool, typer.Option("--log-probs", help="Add log-probabilities of the tokens to the JSON.")]
TopLogProbs = Annotated[
    int | None,
    typer.Option(metavar="N", help="The same, and of every token its rank and the N most likely ones, up to 20."),
]
PromptLogProbs = Annotated[
    int | None, typer.Option(metavar="N", help="Add the same of the prompt's tokens, each given those before it.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 and so on. Default: a GPU if there is one.")]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16, float16, float64. Default: as saved; float32 for the embedded pair."),
]

_SETTINGS = (
    *("target", "adapter", "draft", "num_drafts", "max_new_tokens", "min_new_tokens", "seed", "device", "dtype"),
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "rule", "drafter", "exit_layers", "confidence", "num_return_sequences"),
    *("alpha", "c", "c_hat", "steps", "gpu", "tokens_per_day", "price_per_hour", "tokens_per_user"),
    *("tree", "log_probs", "top_log_probs", "prompt_log_probs"),
    *("rows", "max_length", "cache_tokens", "cache_bytes", "prefill_chunk"),
    *("host", "port", "max_body_bytes", "max_header_bytes", "max_connections"),
    *("data", "held_out", "text", "loss", "batch_size", "length", "output", "tensorboard"),
    *("layers", "intermediate", "config", "vocabulary", "lora"),
    *("cache_logits", "rate", "warm_up", "precision", "every", "judged", "output_dtype"),
    *("kind", "depth", "layer_ids", "cache_features", "format"),
    *("header_seconds", "body_seconds", "write_seconds", "idle_seconds", "drain_seconds"),
)
# Arguments whose option has another name.
_OTHERWISE = {
    "banned_tokens": "--ban",
    "bits": "--load-in-8bit / --load-in-4bit",
    "cache": "--cache-bytes",
    "num_layers": "--exit-layers",
    "stop_strings": "--stop",
    "checks": "--check",
    "rules": "--rule",
    "batch_sizes": "--batch-size",
    "samples": "--samples",
    "level": "--level",
    "api_keys": "--api-key",
    "cors_origins": "--cors-origin",
    "draft_tokenizer": "--draft",
    "embed_tokens.weight": "TARGET",  # of which a head cannot be trained
    "lm_head.weight": "TARGET",
    "TARGET": "TARGET",
    "DRAFT": "DRAFT",
    "formats": "--format",
    "report": "--report",
    "results": "FOLDER|FILE",
    "SPECDEC_CPU_ISA": "SPECDEC_CPU_ISA",
}


def refuse(option: str, given: object, allowed: str) -> NoReturn:
    raise typer.BadParameter(f"got {given}, allowed: {allowed}", param_hint=option)


def refuse_with(other: str, **given: object) -> None:
    """Refuses options that mean nothing beside another one."""
    for name, value in given.items():
        if value is not None:
            refuse(_option(name), f"{value} with {other}", f"this option without {other}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_counts(smallest: int, **counts: int | None) -> None:
    """Refuses smaller ones. typer's own message would not say what was given, and the library's would come after the
    models were loaded."""
    for name, count in counts.items():
        if count is not None and count < smallest:
            refuse(_option(name), count, f"an integer >= {smallest}")


def read_counts(option: str, given: str, smallest: int) -> list[int]:
    """Integers with commas between them."""
    numbers = [int(n) if n.isascii() and n.isdigit() else -1 for n in (part.strip() for part in given.split(","))]
    if min(numbers) < smallest or len(set(numbers)) < len(numbers):
        refuse(option, repr(given), f"integers >= {smallest} with commas between them, each once: 1,2,4")
    return numbers


def read_bytes(option: str, given: str) -> int:
    """A size: a number of bytes, or with a unit of 1000 or 1024."""
    units = {
        "": 1,
        "B": 1,
        **{f"{c}{b}": (1024 if b == "iB" else 1000) ** i for i, c in _PREFIXES for b in ("B", "iB")},
    }
    match = re.fullmatch(r"([0-9]+(?:[.][0-9]+)?) ?([A-Za-z]*)", given.strip())
    size = int(float(match[1]) * units[match[2]]) if match and match[2] in units else 0
    if size < 1:
        refuse(option, repr(given), "a number of bytes, or with a unit: 800MB, 2GiB, ...")
    return size


_PREFIXES = tuple(enumerate("kMGT", 1))


def read_stop(stop: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> StoppingCriteria | None:
    return StopStrings(tokenizer, stop) if stop else None


def read_logit_bias(given: Sequence[str]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for text in given:
        before, _, after = text.partition("=")
        try:
            token, value = int(before), float(after)
        except ValueError:
            token, value = 0, math.nan
        if math.isnan(value) or token in bias:
            refuse("--logit-bias", repr(text), "ID=VALUE, an integer and a number, each ID once")
        bias[token] = value
    return bias


def read_sampling(rule: str, **params: Any) -> SamplingParams:
    """Checks them before models are loaded, which takes long. To be called within ``user_errors``."""
    from specdec_kernels import Rule, SamplingParams

    Rule(rule)  # refuses others
    sampling = SamplingParams(**params)
    for name in SamplingParams.FILTERS:
        if sampling.temperature == 0 and sampling.uses((name,)):
            refuse(_option(name), f"{params[name]} with temperature 0", "a temperature > 0: greedy text has no filters")
    return sampling


@contextmanager
def without_warnings() -> Iterator[None]:
    """Hides the warnings of the loop: results hold the same, and commands print it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the drafter failed|sequence [0-9]+: its drafts")
        yield


@contextmanager
def user_errors(batch_file: Path | None = None, prompt_file: Path | None = None) -> Iterator[None]:
    """The library's errors begin with the name of an argument. Here they end the command with exit code 2 and name the
    option instead. Any other error is a bug and keeps its traceback."""
    names = {name: _option(name) for name in _SETTINGS} | _OTHERWISE
    names["input_ids"] = "--batch-file" if batch_file else "--prompt-file" if prompt_file else "PROMPT"
    try:
        with without_warnings():
            yield
    except (ValueError, OSError) as error:
        argument, _, what = str(error).partition(": ")
        if argument not in names:
            raise
        raise typer.BadParameter(what, param_hint=names[argument]) from error
