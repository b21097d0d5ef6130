"""What the loop refuses, by name and with the numbers, and how far it goes before that."""

from __future__ import annotations

import copy

import pytest
import torch
from specdec import SpeculativeDecoder
from support.models import POSITIONS, VOCABULARY, generate, prompts, tiny_model, tunable_pair
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, SynthIDTextWatermarkLogitsProcessor

from specdec_kernels import SamplingParams, Status


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
    with pytest.raises(
        ValueError, match=rf"draft: its vocabulary has 77 tokens, allowed: {VOCABULARY}, .* d2t=range.* Universal"
    ):
        SpeculativeDecoder(tiny_model("llama"), other)


THREE = torch.tensor([[1, 2, 3]])


class CountsCalls(LogitsProcessor):
    """Bans more tokens at every call, as one that thinks that a call is a token."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores.index_fill(1, torch.arange(self.calls), -torch.inf)


class CountsTokens(LogitsProcessor):
    """Remembers how long the text has been: it answers alike when it is called twice, and not after a rollback."""

    def __init__(self):
        self.longest = 0

    def __call__(self, input_ids, scores):
        self.longest = max(self.longest, input_ids.shape[1])
        return scores * self.longest


class ActsLate(LogitsProcessor):
    """Lets a text think for some tokens, which it counts by its own calls."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0, -1])
        return scores if len(self.seen) < 50 else scores.index_fill(1, torch.tensor([3]), torch.inf)


STATEFUL = SynthIDTextWatermarkLogitsProcessor(5, [1, 2], 16, 4, 0, "cpu")


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("input_ids", {"input_ids": [[]]}),
        ("input_ids", {"input_ids": [[VOCABULARY]]}),
        ("input_ids", {"input_ids": [[-1, 2]]}),
        ("input_ids", {"input_ids": [[1.5]]}),
        ("input_ids", {"input_ids": torch.zeros(3)}),
        (r"input_ids: got a flat list of ids, allowed: .* \[\[5, 6, 7\]\]", {"input_ids": [5, 6, 7]}),
        ("input_ids: got a flat list of ids", {"input_ids": [torch.tensor(5)]}),
        ("input_ids: got a list with other things", {"input_ids": [1.5]}),
        ("input_ids: got int", {"input_ids": 5}),
        ("input_ids", {"input_ids": THREE, "attention_mask": torch.zeros(1, 3)}),
        ("attention_mask", {"input_ids": THREE, "attention_mask": torch.ones(1, 2)}),
        ("attention_mask", {"input_ids": THREE, "attention_mask": torch.tensor([[1, 0, 1]])}),
        ("attention_mask", {"input_ids": [[1]], "attention_mask": torch.ones(1, 1)}),
        ("max_new_tokens", {"max_new_tokens": -1}),
        ("max_new_tokens", {"max_new_tokens": 2.0}),
        ("eos_token_id", {"eos_token_id": ["x"]}),
        ("params.temperature: got shape", {"params": SamplingParams(torch.ones(3))}),
        ("params.top_k: got shape", {"params": SamplingParams(top_k=torch.ones(2, dtype=torch.int64))}),
        ("params: got float", {"params": 0.7}),
        ("rule: got 'typical', allowed: 'token', 'block', 'coupled'", {"rule": "typical"}),
        ("rule: got 'google', .*'coupled' .'token' is Google's and DeepMind's, which are the same", {"rule": "google"}),
        ("rule: got 'deepmind', .*'token' is Google's and DeepMind's", {"rule": "deepmind"}),
        ("logit_bias: got id 101, allowed: ids from 0 to 100", {"logit_bias": {VOCABULARY: 1.0}}),
        ("logit_bias: got nan for id 3", {"logit_bias": {3: float("nan")}}),
        ("logit_bias: got inf for id 3", {"logit_bias": {3: float("inf")}}),
        ("logit_bias: got 1e[+]39 for id 3", {"logit_bias": {3: 1e39}}),
        ("logit_bias: got .*, allowed: one for all, or a list of 1", {"logit_bias": [{}, {}]}),
        ("logit_bias: got 'x'", {"logit_bias": ["x"]}),
        ("banned_tokens: got id -1", {"banned_tokens": [-1]}),
        ("banned_tokens: got id 101", {"banned_tokens": [[VOCABULARY]]}),
        ("banned_tokens: got .*, allowed: one for all, or a list of 1", {"banned_tokens": [[1], [2]]}),
        ("banned_tokens: got 5", {"banned_tokens": 5}),
        ("min_new_tokens: got 6, allowed: an integer from 0 to max_new_tokens = 5", {"min_new_tokens": 6}),
        ("min_new_tokens: got -1", {"min_new_tokens": -1}),
        (r"min_new_tokens: got \[1, 2\]", {"min_new_tokens": [1, 2]}),
        ("logit_bias: got True for id 2", {"logit_bias": {2: True}}),
        ("logits_processor: got 'x'", {"logits_processor": "x"}),
        ("logits_processor: got scores of shape", {"logits_processor": [lambda ids, scores: scores[:, :5]]}),
        ("logits_processor: got a SynthIDText.*a state", {"logits_processor": [STATEFUL]}),
        ("logits_processor: got a CountsCalls, which keeps a state", {"logits_processor": [CountsCalls()]}),
        ("logits_processor: got a CountsTokens, which keeps a state", {"logits_processor": [CountsTokens()]}),
        ("logits_processor: got a function, which keeps", {"logits_processor": [lambda i, s: s + torch.rand(1)]}),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(name, arguments):
    with pytest.raises(ValueError, match=name):
        SpeculativeDecoder(*tunable_pair(0.1)).generate(**{"input_ids": [[1, 2]], "max_new_tokens": 5, **arguments})


def test_a_processor_that_counts_its_calls_is_warned_of():
    """What it does with the number later is no longer seen by a trial."""
    with pytest.warns(RuntimeWarning, match="logits_processor: a ActsLate counts its calls"):
        generate(*tunable_pair(0.1), [[1, 2]], max_new_tokens=2, logits_processor=[ActsLate()])


def test_penalties_of_a_batch_without_sequences():
    params = SamplingParams(1.0, repetition_penalty=1.2)
    result = generate(*tunable_pair(0.1), [], params=params, logit_bias={1: 2.0}, min_new_tokens=3, log_probs=True)
    assert (result.tokens, result.log_probs) == ([], [])


def test_a_sequence_without_a_token_left_ends():
    target, draft = tunable_pair(0.1)
    everything = list(range(VOCABULARY))
    result = generate(target, draft, [[1, 2], [3]], max_new_tokens=5, banned_tokens=[everything, []])
    assert [len(t) for t in result.tokens] == [0, 5]
    assert result.status == [Status.TARGET_EMPTY | Status.DRAFT_EMPTY, Status.OK]


@pytest.mark.parametrize(
    "d2t, message",
    [
        (range(50), "d2t: got int64 of shape .50., allowed: 40 integers"),
        ([0.5] * 40, "d2t: got float32 of shape .40., allowed: 40 integers"),
        ([*range(39), 38], "d2t: got ids that do not ascend"),
        ([*range(39), VOCABULARY], "d2t: got ids .* out of range, allowed: ascending ids from 0 to 100"),
        ([-1, *range(39)], "d2t: got ids .* out of range"),
    ],
)
def test_maps_of_a_vocabulary_are_checked(d2t, message):
    target, draft = tunable_pair(0.1)
    pruned = copy.deepcopy(draft)
    pruned.lm_head = torch.nn.Linear(32, 40, bias=False)
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder(target, pruned, d2t=list(d2t))


def test_maps_need_a_model_that_takes_the_targets_tokens():
    target = tiny_model("llama")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    small = LlamaForCausalLM(LlamaConfig(vocab_size=77, **sizes)).eval()
    with pytest.raises(ValueError, match="draft: got an embedding of 77 tokens with d2t, allowed: 101"):
        SpeculativeDecoder(target, small, d2t=[*range(76), 80])
    with pytest.raises(ValueError, match="d2t: got a value with draft=NoneType, allowed: one with a model"):
        SpeculativeDecoder(target, None, 0, d2t=[1])


def test_bad_construction_is_named():
    target, draft = tunable_pair(0.1)
    for bad in (-1, 1.5, True):
        with pytest.raises(ValueError, match="num_drafts"):
            SpeculativeDecoder(target, draft, bad)
    for bad in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="confidence: got .*, allowed: a number from 0"):
            SpeculativeDecoder(target, draft, confidence=bad)
    with pytest.raises(ValueError, match="confidence: got a value with draft=NoneType"):
        SpeculativeDecoder(target, None, confidence=0.5)
    with pytest.raises(ValueError, match="backend"):
        SpeculativeDecoder(target, draft, backend="abacus").generate([[1]], max_new_tokens=2)
