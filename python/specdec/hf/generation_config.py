"""Every field of transformers' ``GenerationConfig`` (5.17 to 5.23): how it is supported, or that it is refused.

``docs/transformers.md`` shows this table. The distribution itself is not read from the fields: transformers makes
processors and criteria of them, and those are what ``specdec.hf.convert_processors`` and ``specdec.speculate`` take.
"""

from __future__ import annotations

from typing import NamedTuple

from transformers import GenerationConfig
from transformers.generation import SynthIDTextWatermarkingConfig

from ..checks import refuse


class Field(NamedTuple):
    """Whether and how a field is supported."""

    text: str  # how it is supported, or what to do instead
    neutral: tuple | None = None  # refused but for None and these values; None: any value is supported
    overridden: bool = False  # where the model's own configuration sets it, since it says how, not what, is generated

    @property
    def supported(self) -> bool:
        return self.neutral is None

    @property
    def allowed(self) -> str:
        """For an error message."""
        return self.text.replace("`", "")


def _refused(instead: str, *neutral: object) -> Field:
    return Field(instead, neutral)


def _ours(instead: str, *neutral: object) -> Field:
    """About the way in which transformers generates: refused to a caller, and overridden in a model's configuration."""
    return Field(instead, neutral, overridden=True)


_WARPER = Field("sampling: in the kernels")
_PROCESSOR = Field("transformers' processor, row by row (slow)")
_NO_BEAMS = Field("no effect without beams, as in transformers")
_NOT_ENCODER_DECODER = Field("no effect on decoder-only models, as in transformers")
_OWN_CACHE = _ours("specdec has its own static cache")
_OTHER_DISTRIBUTION = _refused("another distribution than sampling from the target")

FIELDS: dict[str, Field] = {
    # length
    "max_length": Field("prompt, padding and output together; `max_new_tokens` goes before it"),
    "max_new_tokens": Field("exact, unless a sequence ends before"),
    "min_length": Field("in the kernels: no end of sequence before; counts padding, as in transformers"),
    "min_new_tokens": Field("in the kernels: no end of sequence before"),
    "early_stopping": _NO_BEAMS,
    "max_time": Field("seconds, looked at after every token"),
    "stop_strings": Field("by keyword, with `specdec.speculate(tokenizer=...)`; not in a configuration (see above)"),
    # strategy
    "do_sample": Field("False is greedy"),
    "num_beams": _refused("1: no beam search", 1),
    "use_mtp": _ours("None: specdec's drafters are given to `specdec.speculate`", False),
    "use_cache": _ours("True: the loop needs a cache", True),
    "cache_implementation": _OWN_CACHE,
    "cache_config": _OWN_CACHE,
    "max_cache_len": _OWN_CACHE,
    # logits
    "temperature": _WARPER,
    "top_k": Field("sampling: in the kernels; transformers' default is 50, 0 switches it off"),
    "top_p": Field("sampling: in the kernels; of tokens that tie at the cutoff all stay"),
    "min_p": _WARPER,
    "top_h": _PROCESSOR,
    "typical_p": _PROCESSOR,
    "epsilon_cutoff": _PROCESSOR,
    "eta_cutoff": _PROCESSOR,
    "repetition_penalty": Field("in the kernels; counts what transformers counts (5.17 the padding as well)"),
    "encoder_repetition_penalty": _PROCESSOR,
    "length_penalty": _NO_BEAMS,
    "no_repeat_ngram_size": _PROCESSOR,
    "bad_words_ids": Field("words of one token in the kernels, others by transformers' processor, row by row"),
    "renormalize_logits": _PROCESSOR,
    "forced_bos_token_id": _PROCESSOR,
    "forced_eos_token_id": _PROCESSOR,
    "remove_invalid_values": _PROCESSOR,
    "exponential_decay_length_penalty": _PROCESSOR,
    "suppress_tokens": Field("in the kernels"),
    "begin_suppress_tokens": _PROCESSOR,
    "sequence_bias": Field("of one token in the kernels, of several by transformers' processor, row by row"),
    "token_healing": _refused("False: heal the prompt before `generate`", False),
    "guidance_scale": _refused("1: its processor runs the model and keeps a state", 1, 1.0),
    "watermarking_config": Field(
        "`WatermarkingConfig` by its processor, row by row; SynthID, with a state, is refused"
    ),
    # output
    "num_return_sequences": Field("every row has a seed of its own"),
    "output_attentions": _refused("False: attention of rejected drafts would be among it", False),
    "output_hidden_states": _refused("False", False),
    "output_scores": Field("as in transformers; rows after a sequence's end are 0"),
    "output_logits": Field("as in transformers; rows after a sequence's end are 0"),
    "return_dict_in_generate": Field("`GenerateDecoderOnlyOutput` without a cache"),
    # special tokens
    "pad_token_id": Field("after a sequence's end"),
    "bos_token_id": Field("transformers starts an empty prompt with it"),
    "eos_token_id": Field("one or several"),
    # encoder-decoder
    "encoder_no_repeat_ngram_size": _PROCESSOR,
    "decoder_start_token_id": _NOT_ENCODER_DECODER,
    # assistance
    "is_assistant": _refused("False: transformers' own mark of a draft", False),
    "num_assistant_tokens": Field("K, where it is set; not beside `specdec.speculate(num_drafts=...)`"),
    "num_assistant_tokens_schedule": _ours(
        "constant; `specdec.speculate(num_drafts=AdaptiveDrafts())` adapts K", "constant"
    ),
    "assistant_confidence_threshold": Field("where it is set: after a less likely draft none is drafted"),
    "prompt_lookup_num_tokens": Field("K of a `PromptLookupDrafter`, where no other drafter was given"),
    "max_matching_ngram_size": Field("of that `PromptLookupDrafter`, 2 where it is not set"),
    "assistant_early_exit": Field("layers of an `EarlyExitDrafter`, where no other drafter was given"),
    "assistant_lookbehind": _ours("10, its default: `UniversalDrafter` aligns by text", 10),
    "target_lookbehind": _ours("10, its default: `UniversalDrafter` aligns by text", 10),
    "assistant_ensemble_weight": _OTHER_DISTRIBUTION,
    "speculation_type": _ours("None: drafters are given to `specdec.speculate`"),
    # performance
    "compile_config": _ours("None: nothing is compiled"),
    "disable_compile": Field("nothing is compiled"),
    "continuous_batching_config": _ours("None: not part of `generate`"),
    "low_memory": _ours("None: no beam search", False),
    "penalty_alpha": _refused("None: another distribution than sampling from the target", 0, 0.0),
    "dola_layers": _OTHER_DISTRIBUTION,
    "diversity_penalty": _NO_BEAMS,
    "num_beam_groups": _refused("1: no beam search", 1),
    "constraints": _OTHER_DISTRIBUTION,
    "force_words_ids": _OTHER_DISTRIBUTION,
    "prefill_chunk_size": _ours("None: the prompt is fed at once"),
    # no settings
    "transformers_version": Field("says where a file came from"),
}
_NO_SETTINGS = ("_from_model_config", "_commit_hash", "_original_object_hash", "_mask_length")


def defined_fields() -> set[str]:
    """The fields that the installed transformers defines."""
    return {*vars(GenerationConfig())} - {*_NO_SETTINGS}


def check_fields(config: GenerationConfig, of_model: GenerationConfig) -> None:
    """Raises ValueError naming the first field that is set to what is refused, or that this table does not know.

    Args:
        config: as ``generate`` prepared it. It does not tell who set a field: a value counts as the model's where it is
            the one in ``of_model``.
        of_model: the model's own configuration.
    """
    for name, field in FIELDS.items():
        value = getattr(config, name, None)
        if field.overridden and value == getattr(of_model, name, None):
            continue
        if field.neutral is not None and value is not None and value not in field.neutral:
            refuse(name, repr(value), field.allowed)
    if isinstance(config.watermarking_config, SynthIDTextWatermarkingConfig):
        refuse("watermarking_config", type(config.watermarking_config).__name__, "WatermarkingConfig, or None")
    # Entries of one's own are ignored, as in transformers; a field that a newer one defines is not.
    for name in sorted(defined_fields() - {*FIELDS}):
        if getattr(config, name, None) is not None:
            refuse(name, repr(getattr(config, name)), "None: a field of a transformers that is newer than this specdec")
