"""What the loop refuses, by name and with the numbers, and how far it goes before that."""

from __future__ import annotations

import copy

import pytest
import torch
from models import POSITIONS, VOCABULARY, generate, prompts, tiny_model, tunable_pair
from specdec import SpeculativeDecoder
from transformers import LlamaConfig, LlamaForCausalLM

from specdec_kernels import SamplingParams


def test_what_does_not_fit_is_refused_with_its_numbers():
    target, draft = tunable_pair(0.1)
    decoder = SpeculativeDecoder(target, draft)
    prompt = prompts(1, 200, 200)[0]
    assert len(decoder.generate([prompt], max_new_tokens=POSITIONS - 200, eos_token_id=[]).tokens[0]) == 56
    with pytest.raises(
        ValueError, match=r"max_new_tokens: got 57 after a prompt of 200 tokens, allowed: at most 56.*target"
    ):
        decoder.generate([prompt], max_new_tokens=57)
    with pytest.raises(ValueError, match=r"input_ids: got a prompt of 257 tokens, allowed: at most 256.*target"):
        decoder.generate([[1] * 257], max_new_tokens=1)
    short = copy.deepcopy(draft)
    short.config.max_position_embeddings = 64
    with pytest.raises(ValueError, match=r"max_new_tokens: got 60 .* the draft model has 64 positions"):
        SpeculativeDecoder(target, short).generate([[1] * 10], max_new_tokens=60)


def test_gpt2_runs_to_its_last_position():
    """Its learned positions would crash on an index past the end: padding has position 0."""
    target, draft = tiny_model("gpt2"), tiny_model("gpt2", 7)
    result = generate(target, draft, [[1] * 250, [2, 3]], 8, max_new_tokens=6)
    assert [len(t) for t in result.tokens] == [6, 6]


@pytest.mark.parametrize("rope_type", ("dynamic", "longrope"))
def test_positions_past_which_a_draft_would_change_earlier_tokens(rope_type):
    """There all frequencies follow the longest position of the batch."""
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 2, "long_factor": [3.0] * 2}
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=40, **sizes, max_position_embeddings=64, rope_parameters=rope)
    target = LlamaForCausalLM(config).eval()
    assert len(generate(target, target, [[1] * 20], max_new_tokens=12).tokens[0]) == 12
    with pytest.raises(ValueError, match="max_new_tokens: got 13 .* allowed: at most 12: the target model has 32"):
        generate(target, target, [[1] * 20], max_new_tokens=13)


def test_vocabularies_must_agree():
    other = LlamaForCausalLM(
        LlamaConfig(vocab_size=77, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    ).eval()
    with pytest.raises(ValueError, match=rf"draft: its vocabulary has 77 tokens, allowed: {VOCABULARY}"):
        SpeculativeDecoder(tiny_model("llama"), other)


THREE = torch.tensor([[1, 2, 3]])


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("input_ids", {"input_ids": [[]]}),
        ("input_ids", {"input_ids": [[VOCABULARY]]}),
        ("input_ids", {"input_ids": [[-1, 2]]}),
        ("input_ids", {"input_ids": [[1.5]]}),
        ("input_ids", {"input_ids": torch.zeros(3)}),
        ("input_ids", {"input_ids": THREE, "attention_mask": torch.zeros(1, 3)}),
        ("attention_mask", {"input_ids": THREE, "attention_mask": torch.ones(1, 2)}),
        ("attention_mask", {"input_ids": THREE, "attention_mask": torch.tensor([[1, 0, 1]])}),
        ("attention_mask", {"input_ids": [[1]], "attention_mask": torch.ones(1, 1)}),
        ("max_new_tokens", {"max_new_tokens": -1}),
        ("max_new_tokens", {"max_new_tokens": 2.0}),
        ("eos_token_id", {"eos_token_id": ["x"]}),
        ("params.temperature: got shape", {"params": SamplingParams(torch.ones(3))}),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(name, arguments):
    with pytest.raises(ValueError, match=name):
        SpeculativeDecoder(*tunable_pair(0.1)).generate(**{"input_ids": [[1, 2]], "max_new_tokens": 5, **arguments})


def test_bad_construction_is_named():
    target, draft = tunable_pair(0.1)
    for bad in (-1, 1.5, True):
        with pytest.raises(ValueError, match="num_drafts"):
            SpeculativeDecoder(target, draft, bad)
    with pytest.raises(ValueError, match="draft: got None with num_drafts=4, allowed"):
        SpeculativeDecoder(target, None)
    with pytest.raises(ValueError, match="backend"):
        SpeculativeDecoder(target, draft, backend="abacus").generate([[1]], max_new_tokens=2)
