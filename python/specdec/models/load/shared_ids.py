"""The ids that two models share which pad the vocabulary of one tokenizer to different sizes, as Qwen2.5's models do
(151,936 and 152,064 for 151,665 tokens)."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .location import Location


def shared_ids(sizes: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> range | None:
    """Returns the ids of the tokenizer, if all models of these sizes have them, so that they differ in padding alone.

    Args:
        sizes: V of each model.
        tokenizer: that of all of them.
    """
    return range(len(tokenizer)) if min(sizes) >= len(tokenizer) else None


def ids_of_pair(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> range | None:
    """Returns the ids that both models have and the draft may propose; None: they have one size, so that all are, or it
    is not known that they have one tokenizer.

    Args:
        tokenizer: that of both models; None: those beside the files that the models' configurations name are compared.
            Nothing is downloaded for that.
    """
    sizes = [model.config.get_text_config(decoder=True).vocab_size for model in (target, draft)]
    if sizes[0] == sizes[1]:
        return None
    if tokenizer is None:
        tokenizer, other = _named(target), _named(draft)
        if tokenizer is None or other is None or tokenizer.get_vocab() != other.get_vocab():
            return None
    return shared_ids(sizes, tokenizer)


def _named(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside the model's files; None: there is none on this machine, or none that can be read."""
    if not (path := model.config.name_or_path):
        return None
    try:
        if Location("tokenizer", path).is_gguf:
            from .loading import load_tokenizer

            return load_tokenizer("tokenizer", path)
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception:  # tokenizers raises plain ones; whatever is wrong there, the model itself was loaded
        return None
