"""Groups of options that several commands have.

Nothing here imports torch before a command runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .option_groups import option
from .user_errors import check_counts, option_name, refuse

if TYPE_CHECKING:
    from specdec_kernels import SamplingParams

    from ..sampling.grammar_source import GrammarSource

ROWS = 8  # of a scheduler, where --rows does not say it
_PREFIXES = tuple(enumerate("kMGT", 1))


@dataclass(frozen=True)
class MachineOptions:
    """Machine"""

    device: str | None = option(None, "cpu, cuda, cuda:1 and so on. Default: a GPU if there is one.")
    dtype: str | None = option(
        None,
        "float32, bfloat16, float16, float64. Default: as saved, but on a CPU bfloat16 weights are computed with in "
        "float32, which changes no bit of the float32 model; float32 for the embedded pair.",
    )

    def chosen_device(self) -> str:
        import torch

        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class FilterOptions:
    """Sampling"""

    temperature: float = option(0.0, "0 is greedy.")
    top_k: int | None = option(None, "Keep the k most likely tokens; 0 is off.")
    top_p: float | None = option(None, "Keep the most likely tokens of this total probability; 1 is off.")
    min_p: float | None = option(None, "Keep tokens of this fraction of the largest probability; 0 is off.")
    repetition_penalty: float | None = option(
        None, "Weakens tokens of prompt and output, as in transformers; 1 is off."
    )

    def params(self, rule: str) -> SamplingParams:
        """Checks them, and the accept rule, before models are loaded, which takes long."""
        return read_sampling(rule, **vars(self))


@dataclass(frozen=True)
class SamplingOptions(FilterOptions):
    """Sampling"""

    presence_penalty: float | None = option(None, "Subtracted from the logits of tokens that were generated; 0 is off.")
    frequency_penalty: float | None = option(None, "The same, once for each time that they were generated; 0 is off.")


@dataclass(frozen=True)
class StopOptions:
    """The text"""

    stop: list[str] | None = option(None, "The text ends after this. Repeatable.", metavar="TEXT")
    seed: int = option(0, "Of the first text; text i uses seed + i.")
    verbose: bool = option(False, "Colour tokens by what produced them.", "--verbose", "-v")
    json_schema: str | None = option(
        None, "The text is JSON that this JSON Schema validates: JSON, or a file of it.", metavar="SCHEMA"
    )
    regex: str | None = option(None, "The text is what this regular expression matches.", metavar="REGEX")

    def __post_init__(self) -> None:
        if "" in (self.stop or ()):
            refuse("--stop", "an empty text", "at least one character")

    def read_schema(self) -> str | None:
        """The JSON of the schema."""
        given = self.json_schema
        if given is None or given.lstrip().startswith("{"):
            return given
        try:
            return Path(given).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError):
            refuse("--json-schema", repr(given), "a JSON Schema that begins with {, or a file of one")

    def grammar(self) -> GrammarSource | None:
        """What the text has to be; None: anything."""
        from ..sampling.grammar_source import GrammarSource

        return GrammarSource.of_settings(self.read_schema(), self.regex)


@dataclass(frozen=True)
class SchedulingOptions:
    """Capacity"""

    rows: int | None = option(None, f"Sequences that are decoded at a time. Default: {ROWS}.")
    max_length: int | None = option(None, "Tokens of a prompt and its text, at most. Default: what fits.")
    cache_tokens: int | None = option(None, "Tokens in the caches, all rows together.")
    cache_bytes: str | None = option(None, "The same in bytes of target and draft: 800MB, 2GiB.", metavar="SIZE")
    prefill_chunk: int | None = option(None, "Tokens of a prompt that are read at a time. Default: 256.")

    def scheduling(self) -> dict[str, Any]:
        """The options that were given, checked, as arguments of ``Scheduler``."""
        names = [name for name in SchedulingOptions.__dataclass_fields__ if getattr(self, name) is not None]
        given = {name: getattr(self, name) for name in names}
        if "cache_bytes" in given:
            given["cache_bytes"] = read_bytes("--cache-bytes", given["cache_bytes"])
        check_counts(1, **given)
        if "cache_tokens" in given and "cache_bytes" in given:
            refuse("--cache-tokens / --cache-bytes", "both", "one of the two")
        return given


def as_json(help: str = "One JSON object.") -> Any:
    return option(False, help, "--json")


def read_counts(option: str, given: str, smallest: int) -> list[int]:
    """Integers with commas between them."""
    numbers = [int(n) if n.isascii() and n.isdigit() else -1 for n in (part.strip() for part in given.split(","))]
    if min(numbers) < smallest or len(set(numbers)) < len(numbers):
        refuse(option, repr(given), f"integers >= {smallest} with commas between them, each once: 1,2,4")
    return numbers


def read_bytes(option: str, given: str) -> int:
    """A size: a number of bytes, or with a unit of 1000 or 1024."""
    units = {"": 1, "B": 1}
    units |= {f"{c}{b}": (1024 if b == "iB" else 1000) ** i for i, c in _PREFIXES for b in ("B", "iB")}
    match = re.fullmatch(r"([0-9]+(?:[.][0-9]+)?) ?([A-Za-z]*)", given.strip())
    size = int(float(match[1]) * units[match[2]]) if match and match[2] in units else 0
    if size < 1:
        refuse(option, repr(given), "a number of bytes, or with a unit: 800MB, 2GiB, ...")
    return size


def read_sampling(rule: str, **params: Any) -> SamplingParams:
    from specdec_kernels import Rule, SamplingParams

    Rule(rule)  # refuses others
    sampling = SamplingParams(**params)
    for name in SamplingParams.FILTERS:
        if sampling.temperature == 0 and sampling.uses((name,)):
            allowed = "a temperature > 0: greedy text has no filters"
            refuse(option_name(name), f"{params[name]} with temperature 0", allowed)
    return sampling


def check_texts(texts: list[str]) -> list[str]:
    """Refuses arguments that no tokenizer takes."""
    for text in texts:
        if not text:
            refuse("PROMPT", "an empty prompt", "at least one character")
        if any("\ud800" <= c <= "\udfff" for c in text):  # from an argument that is not UTF-8
            refuse("PROMPT", ascii(text[:60]), "text without lone surrogates")
    return texts
