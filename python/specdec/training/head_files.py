"""The files of a trained head: written, loaded back, and tried."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save
from transformers import PreTrainedTokenizerBase

from ..drafters.heads import HeadDrafter, load_head
from ..drafters.heads.self_check import LENGTH, acceptance_on
from ..files import write_whole
from .heads.learner import Files, Learner

WEIGHTS, CONFIG = "model.safetensors", "config.json"
ROUNDING = 0.1  # of a draft's acceptance: what the files' dtype may cost. Wrong wiring costs most of it


class WrongFiles(Exception):
    """What was loaded back is not what was trained, which is a bug."""


def write_files(folder: Path, files: Files, dtype: torch.dtype) -> None:
    """Writes weights in ``dtype``, and config.json. An embedding keeps the target's dtype, so that loading finds it
    equal to the target's, which it then shares. Raises OSError."""
    config, tensors = files
    placed = {}
    for name, tensor in tensors.items():
        cast = tensor.is_floating_point() and name != "embed_tokens.weight"
        placed[name] = tensor.detach().to("cpu", dtype if cast else tensor.dtype).contiguous()
    write_whole(folder / WEIGHTS, save(placed, {"format": "pt"}))
    config = {**config, "dtype": str(dtype).removeprefix("torch.")}
    write_whole(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")


def loaded_back(
    folder: Path, learner: Learner, tokenizer: PreTrainedTokenizerBase | None, text: Sequence[int]
) -> tuple[HeadDrafter, str | None]:
    """Returns the head as a user will load it, and what its self-check warns of.

    Args:
        tokenizer: of the self-check's text; None: the target writes one.
        text: of the target's tokens, on which it is compared with ``learner``.

    Raises:
        WrongFiles: its drafts are accepted less often than those of what was trained.
        ValueError, OSError: what :func:`~specdec.load_head` raises.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", RuntimeWarning)
        drafter = load_head(folder, learner.target.model, tokenizer=tokenizer)
    some = [*text[:LENGTH]]
    with torch.inference_mode():
        trained, written = (acceptance_on(head, learner.target, some) for head in (learner.head, drafter.head))
    if any(after < before - ROUNDING for before, after in zip(trained, written, strict=True)):
        before, after = (", ".join(f"{a:.0%}" for a in found) for found in (trained, written))
        told = f"{after} accepted, not {before}"
        raise WrongFiles(f"the files in {str(folder)!r} draft worse than what was trained: {told}")
    troubles = [str(warning.message) for warning in said if issubclass(warning.category, RuntimeWarning)]
    return drafter, "; ".join(troubles) or None
