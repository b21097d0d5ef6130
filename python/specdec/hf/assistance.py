"""Who drafts and how much, of what ``speculate`` was given and what ``GenerationConfig`` says of assistance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from ..checks import read_count, refuse
from ..drafters.draft_length import AdaptiveDrafts
from ..drafters.protocol import Drafter

NUM_DRAFTS = 4
# Fields of GenerationConfig, and what transformers fills in where they were not set.
_DEFAULTS = {
    "num_assistant_tokens": 20,
    "assistant_confidence_threshold": 0.4,
    "prompt_lookup_num_tokens": None,
    "max_matching_ngram_size": None,
    "assistant_early_exit": None,
}


@dataclass(frozen=True)
class Assistance:
    draft: PreTrainedModel | Drafter | None = None
    num_drafts: int | AdaptiveDrafts | None = None  # None: not said
    confidence: float | None = None
    lookup: int | None = None  # the longest n-gram of a PromptLookupDrafter in the place of ``draft``
    layers: int | None = None  # of an EarlyExitDrafter in its place

    def drafter_for(self, target: PreTrainedModel) -> PreTrainedModel | Drafter | None:
        if self.lookup is not None:
            from ..drafters.prompt_lookup import PromptLookupDrafter

            return PromptLookupDrafter(max_ngram=self.lookup, min_ngram=1)
        if self.layers is not None:
            from ..drafters.early_exit import EarlyExitDrafter

            return EarlyExitDrafter(target, self.layers)
        return self.draft


def read_assistance(ours: Assistance, config: GenerationConfig, given: dict[str, Any] | None) -> Assistance:
    """``ours`` and the fields that were set.

    Args:
        ours: what ``speculate`` was given.
        config: as ``generate`` prepared it: what was not set has transformers' default.
        given: the fields that were set; None: not known, then those are that differ from the default.

    Raises:
        ValueError: names a field that says another thing than ``speculate``'s arguments, or that has no effect.
    """
    values = {name: getattr(config, name, None) for name in _DEFAULTS}
    unset = {n for n, d in _DEFAULTS.items() if (values[n] == d if given is None else given.get(n) is None)}
    fields = {name: None if name in unset else value for name, value in values.items()}
    lookup, layers = fields["prompt_lookup_num_tokens"], fields["assistant_early_exit"]
    for name in ("prompt_lookup_num_tokens", "assistant_early_exit"):
        if fields[name] is not None and ours.draft is not None:
            refuse(name, fields[name], "None beside a drafter of specdec.speculate")
    if lookup is not None and layers is not None:
        refuse("assistant_early_exit", layers, "None beside prompt_lookup_num_tokens")
    if fields["max_matching_ngram_size"] is not None and lookup is None:
        refuse("max_matching_ngram_size", fields["max_matching_ngram_size"], "None without prompt_lookup_num_tokens")
    drafts = ours.draft is not None or lookup is not None or layers is not None
    lengths = {"prompt_lookup_num_tokens": lookup, "num_assistant_tokens": fields["num_assistant_tokens"]}
    num_drafts = ours.num_drafts
    for name, value in lengths.items():
        if value is None:
            continue
        read_count(name, value)
        if not drafts:
            refuse(name, value, "None without a drafter")
        if num_drafts is not None and num_drafts != value:
            refuse(name, value, f"None beside {num_drafts} drafts that were asked for elsewhere")
        num_drafts = value
    threshold = fields["assistant_confidence_threshold"]
    if threshold is not None:
        if not isinstance(ours.draft, PreTrainedModel):
            refuse("assistant_confidence_threshold", threshold, "None without a draft model")
        if ours.confidence is not None and ours.confidence != threshold or not 0 <= threshold < 1:
            refuse("assistant_confidence_threshold", threshold, "0 to below 1, and not beside confidence")
    confidence = next((c for c in (ours.confidence, threshold) if c is not None), 0.0)
    whole = replace(ours, num_drafts=NUM_DRAFTS if num_drafts is None else num_drafts, confidence=confidence)
    if lookup is not None:
        return replace(whole, lookup=fields["max_matching_ngram_size"] or 2)
    return replace(whole, layers=layers)
