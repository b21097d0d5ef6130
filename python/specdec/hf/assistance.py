"""Who drafts and how much: from the arguments of ``speculate`` and the fields of ``GenerationConfig`` on assistance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from ..checks import read_count, refuse
from ..drafters.protocol import Drafter
from ..loop.draft_length import AdaptiveDrafts

# Fields of GenerationConfig, and what transformers fills in where they were not set.
DEFAULTS = {
    "num_assistant_tokens": 20,
    "assistant_confidence_threshold": 0.4,
    "prompt_lookup_num_tokens": None,
    "max_matching_ngram_size": None,
    "assistant_early_exit": None,
}


@dataclass(frozen=True)
class Assistance:
    """How the text is drafted; None means that nobody chose."""

    draft: PreTrainedModel | Drafter | None = None
    num_drafts: int | AdaptiveDrafts | None = None
    confidence: float | None = None
    lookup: int | None = None  # the longest n-gram of a PromptLookupDrafter, which then drafts
    layers: int | None = None  # how many layers of the target an EarlyExitDrafter uses, which then drafts

    def drafter_for(self, target: PreTrainedModel) -> PreTrainedModel | Drafter | None:
        """As ``SpeculativeDecoder`` takes it."""
        if self.lookup is not None:
            from ..drafters.prompt_lookup import PromptLookupDrafter

            return PromptLookupDrafter(max_ngram=self.lookup, min_ngram=1)
        if self.layers is not None:
            from ..drafters.early_exit import EarlyExitDrafter

            return EarlyExitDrafter(target, self.layers)
        return self.draft


def read_assistance(
    ours: Assistance, config: GenerationConfig, given: Mapping[str, Any], model_config: GenerationConfig
) -> Assistance:
    """``ours`` and the fields that were set.

    Args:
        ours: what ``speculate`` was given.
        config: as ``generate`` prepared it. A field counts as set if it differs from transformers' default, since a
            default may be the caller's or transformers' own.
        given: the fields that ``generate`` was given by keyword, which go before ``config``; None: not given.
        model_config: the model's own configuration. A field with this value contradicts nothing: it counts where the
            caller chose nothing, and where it has an effect.

    Raises:
        ValueError: names a field that contradicts the arguments of ``speculate``, or that would have no effect.
    """
    asked: dict[str, Any] = {}
    of_model: dict[str, Any] = {}
    for name, default in DEFAULTS.items():
        configured = getattr(config, name, None)
        asked[name], of_model[name] = given.get(name), None
        if asked[name] is None and configured != default:
            (of_model if configured == getattr(model_config, name, None) else asked)[name] = configured
    drafted = _who_drafts(ours, asked, of_model)
    return replace(
        drafted,
        num_drafts=_how_many(drafted, asked, of_model),
        confidence=_how_sure(ours, asked["assistant_confidence_threshold"], of_model["assistant_confidence_threshold"]),
    )


def _who_drafts(ours: Assistance, asked: Mapping[str, Any], of_model: Mapping[str, Any]) -> Assistance:
    """``ours``, or prompt lookup, or layers of the target, as nobody may choose two of them."""
    lookup, layers = asked["prompt_lookup_num_tokens"], asked["assistant_early_exit"]
    for name in ("prompt_lookup_num_tokens", "assistant_early_exit"):
        if asked[name] is not None and ours.draft is not None:
            refuse(name, asked[name], "None beside a drafter of specdec.speculate")
    if lookup is not None and layers is not None:
        refuse("assistant_early_exit", layers, "None beside prompt_lookup_num_tokens")
    looks_up = lookup is not None
    if ours.draft is None and lookup is None and layers is None:
        looks_up = of_model["prompt_lookup_num_tokens"] is not None
        layers = None if looks_up else of_model["assistant_early_exit"]
    longest = asked["max_matching_ngram_size"]
    if longest is not None and not looks_up:
        refuse("max_matching_ngram_size", longest, "None without prompt_lookup_num_tokens")
    if looks_up:
        return replace(ours, lookup=longest or of_model["max_matching_ngram_size"] or 2)
    return replace(ours, layers=layers)


def _how_many(
    drafted: Assistance, asked: Mapping[str, Any], of_model: Mapping[str, Any]
) -> int | AdaptiveDrafts | None:
    """K. Whoever names it twice must name the same."""
    drafts = any(each is not None for each in (drafted.draft, drafted.lookup, drafted.layers))
    num_drafts = drafted.num_drafts
    for name in ("prompt_lookup_num_tokens", "num_assistant_tokens"):
        if (value := asked[name]) is None:
            continue
        read_count(name, value)
        if num_drafts is not None and num_drafts != value:
            refuse(name, value, f"None beside {num_drafts} drafts that were asked for elsewhere")
        num_drafts = value
    if num_drafts is None and drafts:
        return of_model["num_assistant_tokens" if drafted.lookup is None else "prompt_lookup_num_tokens"]
    return num_drafts


def _how_sure(ours: Assistance, asked: float | None, of_model: float | None) -> float | None:
    """The confidence below which a draft model drafts no more."""
    if asked is not None:
        if not isinstance(ours.draft, PreTrainedModel):
            refuse("assistant_confidence_threshold", asked, "None without a draft model")
        if ours.confidence not in (None, asked) or not 0 <= asked < 1:
            refuse("assistant_confidence_threshold", asked, "0 to below 1, and not beside confidence")
    elif isinstance(ours.draft, PreTrainedModel):
        asked = of_model
    return asked if ours.confidence is None else ours.confidence
