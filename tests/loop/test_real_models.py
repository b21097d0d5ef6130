"""Real models: what they say, and greedy text with drafts beside plain decoding."""

from __future__ import annotations

import pytest
import torch
from specdec import PromptLookupDrafter, SpeculativeDecoder, load_model
from specdec.models.load.loading import load_tokenizer

pytestmark = pytest.mark.real
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(",
    "One two three four, one two three four, one two three four, one two three",
    "The cat sat on the mat. The dog sat on the",
]


@pytest.fixture(params=("smollm2", "gemma3"))
def loaded(request):
    folder = request.getfixturevalue(request.param)
    return load_model(folder, "float32"), load_tokenizer("target", folder)


def test_tokens(smollm2, gemma3):
    pieces = {
        smollm2: ["x", " =", " ", "1", "2", "3", "4", "5", " #", " a", "ño"],
        gemma3: ["<bos>", "x", " =", " ", "1", "2", "3", "4", "5", " #", " año"],
    }
    for folder, expected in pieces.items():
        tokenizer = load_tokenizer("target", folder)
        assert [tokenizer.decode([i]) for i in tokenizer("x = 12345 # año").input_ids] == expected


def test_the_template_and_the_end_of_a_turn(smollm2):
    tokenizer, config = load_tokenizer("target", smollm2), load_model(smollm2).generation_config
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert asked.startswith("<|im_start|>system\n") and asked.endswith("<|im_start|>assistant\n")
    assert tokenizer.convert_ids_to_tokens(config.eos_token_id) == "<|im_end|>"


def test_paris(smollm2):
    tokenizer = load_tokenizer("target", smollm2)
    decoder = SpeculativeDecoder(load_model(smollm2, "float32"), PromptLookupDrafter(), 4)
    result = decoder.generate(tokenizer(PROMPTS[:1]).input_ids, max_new_tokens=4)
    assert tokenizer.decode(result.tokens[0]).startswith(" Paris")


def test_greedy_texts_are_those_of_plain_decoding_and_of_transformers(loaded):
    model, tokenizer = loaded
    ids = tokenizer(PROMPTS).input_ids
    plain = SpeculativeDecoder(model, None, 0).generate(ids, max_new_tokens=32)
    drafted = SpeculativeDecoder(model, PromptLookupDrafter(), 4).generate(ids, max_new_tokens=32)
    assert drafted.tokens == plain.tokens and drafted.stats.tau > 1.1
    for prompt, text in zip(ids, plain.tokens, strict=True):
        inputs = torch.tensor([prompt])
        own = model.generate(inputs, max_new_tokens=32, do_sample=False, pad_token_id=0)
        assert own[0, len(prompt) :].tolist() == text


def test_sliding_windows(gemma3):
    """A text that is longer than Gemma's window of 512 tokens: a lookup with the cache as transformers has it."""
    model, tokenizer = load_model(gemma3, "float32"), load_tokenizer("target", gemma3)
    assert model.config.sliding_window == 512 and {*model.config.layer_types} == {"full_attention", "sliding_attention"}
    lines = "".join(f"Line {i} says that {i * 7 % 100} is a number.\n" for i in range(60))
    ids = tokenizer([lines]).input_ids
    assert len(ids[0]) > 700
    drafted = SpeculativeDecoder(model, PromptLookupDrafter(), 4).generate(ids, max_new_tokens=24)
    own = model.generate(torch.tensor(ids), max_new_tokens=24, do_sample=False)
    assert own[0, len(ids[0]) :].tolist() == drafted.tokens[0]
    assert drafted.stats.tau > 1.5
