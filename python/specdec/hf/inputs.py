"""The prompts as ``generate`` hands them over, and the model arguments beside them that are refused."""

from __future__ import annotations

from typing import Any

import torch

from ..checks import refuse
from ..models.cache.kv_cache import CACHE_ARGUMENTS

_HANDLED = {
    *CACHE_ARGUMENTS,
    "attention_mask",
    "position_ids",
    "use_cache",  # a field of the configuration as well
    "logits_to_keep",
    "return_dict",
}


def read_inputs(input_ids: torch.LongTensor, model_kwargs: dict[str, Any]) -> torch.Tensor | None:
    """What the model would be fed besides the prompts, of which only a mask is honoured.

    Args:
        input_ids: [B, P] int64.
        model_kwargs: as ``generate`` prepared them for the model's forward.

    Returns:
        [B, P], 0 where there is padding; None where there is none.

    Raises:
        ValueError: names the first argument that has no place here.
    """
    for name, value in model_kwargs.items():
        if name not in _HANDLED and value is not None and value is not False:
            refuse(name, f"a {type(value).__name__}", "None: specdec feeds input_ids and attention_mask alone")
    for name in CACHE_ARGUMENTS:
        cache = model_kwargs.get(name)
        if cache is not None and (cache.get_seq_length() or getattr(cache, "_is_user_defined", False)):
            refuse(name, f"a {type(cache).__name__}", "None: specdec has its own static cache")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.all():
        mask = None
    if mask is not None and not mask[:, -1].all():
        refuse("attention_mask", "padding on the right", "padding on the left: tokenizer.padding_side='left'")
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        ones = torch.ones_like(input_ids) if mask is None else mask.long()
        expected = ones.cumsum(-1) - 1
        if positions.shape[-1] != expected.shape[-1] or ((positions != expected) & (ones != 0)).any():
            refuse("position_ids", "others than the mask's", "None, or 0, 1, ... from the first token")
    return mask


def paddings_of(mask: torch.Tensor | None, size: int) -> list[int]:
    """How many tokens of padding each of ``size`` prompts begins with."""
    return [0] * size if mask is None else (mask == 0).sum(1).tolist()
