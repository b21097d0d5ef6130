"""Checks prompts, seeds and special tokens passed to ``generate``, and converts prompts to lists of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
from transformers import PreTrainedModel

from .checks import refuse

TokenIds = torch.Tensor | Sequence[torch.Tensor] | Sequence[Sequence[int]]


def read_prompts(input_ids: TokenIds, attention_mask: torch.Tensor | None, vocab_size: int) -> list[list[int]]:
    """Returns the prompts without padding. Raises ValueError naming ``input_ids`` or ``attention_mask``."""
    if isinstance(input_ids, torch.Tensor):
        if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
            refuse(
                "input_ids", f"{input_ids.dtype} of shape {list(input_ids.shape)}", "[B, P] int64 or int32, or a list"
            )
        prompts = input_ids.tolist()
        if attention_mask is not None:
            prompts = _without_padding(prompts, attention_mask, input_ids.shape)
    elif attention_mask is not None:
        refuse("attention_mask", "a mask beside a list of prompts", "None there: each prompt has its own length")
    elif not isinstance(input_ids, Iterable):
        refuse("input_ids", type(input_ids).__name__, "[B, P] int64 or int32, or a list of prompts")
    else:
        rows = [p.tolist() if isinstance(p, torch.Tensor) else p for p in input_ids]
        if any(isinstance(row, int) for row in rows):
            refuse("input_ids", "a flat list of ids", "a list of prompts, such as [[5, 6, 7]]")
        prompts = [list(row) if isinstance(row, Iterable) else [row] for row in rows]
        if not all(isinstance(token, int) for prompt in prompts for token in prompt):
            refuse("input_ids", "a list with other things than prompts", "1-D integer tensors or lists of ints")
    for b, prompt in enumerate(prompts):
        if not prompt:
            refuse("input_ids", f"no token for sequence {b}", "at least one token a sequence")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            refuse("input_ids", f"ids from {min(prompt)} to {max(prompt)} in sequence {b}", f"0 to {vocab_size - 1}")
    return prompts


def _without_padding(rows: list[list[int]], attention_mask: torch.Tensor, shape: torch.Size) -> list[list[int]]:
    if attention_mask.shape != shape:
        refuse("attention_mask", f"shape {list(attention_mask.shape)}", f"that of input_ids, {list(shape)}")
    prompts = []
    for b, (row, mask) in enumerate(zip(rows, attention_mask.tolist(), strict=True)):
        kept = [i for i, m in enumerate(mask) if m]
        if not set(mask) <= {0, 1} or kept != list(range(kept[0], kept[-1] + 1) if kept else ()):
            refuse(
                "attention_mask", f"{mask} for sequence {b}", "0 and 1, the ones side by side (left or right padding)"
            )
        prompts.append([row[i] for i in kept])
    return prompts


def check_room(prompts: list[list[int]], max_new_tokens: int, name: str, max_length: int | None) -> None:
    """Raises ValueError if a prompt and its new tokens need more positions than the model called ``name`` has."""
    longest = max(map(len, prompts), default=0)
    if max_length is None or longest + max_new_tokens <= max_length:
        return
    limit = f"the {name} model has {max_length} positions (max_position_embeddings)"
    if longest > max_length:
        refuse("input_ids", f"a prompt of {longest} tokens", f"at most {max_length}: {limit}")
    refuse(
        "max_new_tokens",
        f"{max_new_tokens} after a prompt of {longest} tokens",
        f"at most {max_length - longest}: {limit}",
    )


def read_seeds(seed: int | Sequence[int] | torch.Tensor, batch_size: int, device: torch.device) -> torch.Tensor:
    """Returns the seeds as [B] int64 on ``device``. Raises ValueError naming ``seed``."""
    given = [seed] * batch_size if isinstance(seed, int) else seed
    seeds: torch.Tensor | None = None
    # Fails for values that are not integers of 64 bits.
    with suppress(RuntimeError, TypeError, ValueError, OverflowError):
        seeds = torch.as_tensor(given, dtype=torch.int64, device=device)
    if seeds is None or seeds.shape != (batch_size,):
        refuse("seed", repr(seed), f"a signed 64-bit integer, or one for each of the {batch_size} sequences")
    return seeds


def read_eos(eos_token_id: int | Sequence[int] | torch.Tensor | None, model: PreTrainedModel) -> frozenset[int]:
    """Returns the ids that end a sequence. None takes them from the model's generation configuration, or else from its
    configuration."""
    if eos_token_id is None:
        eos_token_id = getattr(model.generation_config, "eos_token_id", None)
    if eos_token_id is None:
        eos_token_id = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    if eos_token_id is None:
        return frozenset()
    if isinstance(eos_token_id, torch.Tensor):
        eos_token_id = eos_token_id.tolist()
    ids = list(eos_token_id) if isinstance(eos_token_id, Iterable) else [eos_token_id]
    if not all(isinstance(i, int) for i in ids):
        refuse("eos_token_id", repr(eos_token_id), "an id, several ids, or [] for none")
    return frozenset(ids)


def read_pad(pad_token_id: int | None, eos: frozenset[int], model: PreTrainedModel) -> int:
    """Returns the id that fills rows after a sequence's end: the argument if given, else the model's padding id, else
    an end-of-sequence id, else 0."""
    if pad_token_id is None:
        pad_token_id = getattr(model.generation_config, "pad_token_id", None)
    if pad_token_id is None:
        pad_token_id = min(eos, default=0)
    return pad_token_id


def join(
    input_ids: TokenIds, prompts: list[list[int]], tokens: list[list[int]], pad: int, device: torch.device
) -> torch.Tensor:
    """Returns [B, prompt + new] int64. A tensor ``input_ids`` is kept as given, padding included, with the new tokens
    after it; prompts from a list are each followed directly by their own new tokens."""
    if isinstance(input_ids, torch.Tensor):
        new = max(map(len, tokens), default=0)
        rows = [[*t, *[pad] * (new - len(t))] for t in tokens]
        added = torch.tensor(rows, dtype=torch.int64, device=input_ids.device).view(len(rows), new)
        return torch.cat((input_ids.to(torch.int64), added), 1)
    whole = [[*p, *t] for p, t in zip(prompts, tokens, strict=True)]
    longest = max(map(len, whole), default=0)
    rows = [[*w, *[pad] * (longest - len(w))] for w in whole]
    return torch.tensor(rows, dtype=torch.int64, device=device).view(len(rows), longest)
