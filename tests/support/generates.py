"""Calls transformers' ``generate`` plainly and with ``speculate()``."""

from __future__ import annotations

import torch
from specdec import speculate

from .models import VOCABULARY, tunable_pair

ENDS = list(range(0, VOCABULARY, 9))
PAD = 7


def ragged(paddings: tuple[int, ...] = (0, 4, 8), length: int = 10) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(paddings))
    ids = torch.randint(1, VOCABULARY, (len(paddings), length), generator=generator)
    mask = torch.ones_like(ids)
    for b, padding in enumerate(paddings):
        ids[b, :padding], mask[b, :padding] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask}


def both(speculator=None, inputs=None, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    target, draft = tunable_pair(0.3)
    inputs = ragged() if inputs is None else inputs
    settings = {"max_new_tokens": 20, "eos_token_id": ENDS, "pad_token_id": PAD, **settings}
    theirs = target.generate(**inputs, **settings)
    return theirs, target.generate(**inputs, **settings, custom_generate=speculator or speculate(draft))
