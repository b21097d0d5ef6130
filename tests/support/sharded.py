"""Compares models over several processes with the same in one."""

from __future__ import annotations

from pathlib import Path

import torch
from specdec import load_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from .model_types import CASES, draw_wide
from .models import generate, prompts
from .texts import assert_same_greedy


def check_divided(case: str, tp: int, folder: Path) -> None:
    """Decodes a batch, by chains and trees, and compares texts (near-ties aside) and logits."""
    kind, settings = CASES[case]
    few: dict = {"vocab_size": 104}  # older transformers divide no other vocabularies than even ones
    few |= {"num_key_value_heads": max(2, tp)} if "num_key_value_heads" in settings else {}
    torch.manual_seed(0)
    draw_wide(AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**settings, **few}))).save_pretrained(folder)
    one, two = load_model(folder, "float32"), load_model(folder, "float32", tp=tp)
    asked = prompts(3, 5, 40, seed=1)
    for more in ({}, {"tree": 5}):
        results = [generate(m, draft=one, ids=asked, max_new_tokens=16, output_logits=True, **more) for m in (one, two)]
        for i, prompt in enumerate(asked):
            expected, got = (result.tokens[i] for result in results)
            assert_same_greedy(one, prompt, got, expected)
            if got == expected:
                expected, got = (result.logits[i] for result in results)
                assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
