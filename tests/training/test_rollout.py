"""Rollouts are plain sampling from the weights that the model has now, whatever drafts, and whatever changed them."""

from __future__ import annotations

import copy
import functools
import itertools
import types
from collections.abc import Callable

import pytest
import torch
from scipy.stats import chisquare
from specdec import Rollout, RolloutBatch, SpeculativeDecoder, StopStrings, SuffixDrafter, SuffixMemories
from specdec.training.rollout import MEMORY_TOKENS, evaluating, seed_of
from support.models import tiny_model, toy_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from specdec_kernels import SamplingParams

PROMPTS = [[5, 6, 7, 8, 9], [11], [5, 6, 7, 8, 9], [3, 1, 4, 1, 5, 9, 2, 6]]
COOL = SamplingParams(temperature=0.7)
CLOSE = 2e-5  # of log-probabilities: the logits of these models are wide, up to some 30


def own_model(kind: str = "llama") -> PreTrainedModel:
    """One that may be changed."""
    return copy.deepcopy(tiny_model(kind))


def assert_same(one: RolloutBatch, other: RolloutBatch, within: float = 0.0) -> None:
    """Log-probabilities may differ by so much: products that are not of ``nn.Linear`` round by how many tokens they
    have."""
    assert one.seeds == other.seeds and one.finish_reason == other.finish_reason
    for name in ("tokens", "mask", "lengths", "sequences", "prompt_lengths"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    for name in ("log_probs", "raw_log_probs"):
        assert torch.allclose(getattr(one, name), getattr(other, name), rtol=0, atol=within), name


# ---- texts


@pytest.mark.parametrize("settings", [{}, {"num_drafts": 0}, {"num_drafts": 5, "rows": 1}, {"rows": 3}])
def test_texts_are_those_of_plain_sampling(settings):
    model = own_model()
    rollout, plain = Rollout(model, **settings), SpeculativeDecoder(model, num_drafts=0)
    for epoch in range(2):  # in the second one, memories have the texts of the first
        batch = rollout(PROMPTS, samples=2, max_new_tokens=20, params=COOL, seed=epoch // 2)
        each = [prompt for prompt in PROMPTS for _ in range(2)]
        assert len(set(batch.seeds)) == 8
        for row, (prompt, seed) in enumerate(zip(each, batch.seeds, strict=True)):
            alone = plain.generate([prompt], max_new_tokens=20, params=COOL, seed=seed, log_probs=True)
            assert batch.tokens[row].tolist() == alone.tokens[0]
            assert torch.equal(batch.log_probs[row], torch.tensor(alone.log_probs[0]))
            assert torch.equal(batch.raw_log_probs[row], torch.tensor(alone.raw_log_probs[0]))
            assert batch.sequences[row, : len(prompt) + 20].tolist() == prompt + alone.tokens[0]


def test_a_text_depends_on_seed_prompt_and_number_alone():
    rollout = Rollout(own_model())
    batch = rollout(PROMPTS, samples=2, max_new_tokens=12, seed=3)
    (first,) = rollout([PROMPTS[3]], samples=1, max_new_tokens=12, seed=3).tokens.tolist()
    assert batch.tokens[6].tolist() == first
    four = rollout([PROMPTS[0]], samples=4, max_new_tokens=12, seed=3)  # given twice, it has four texts
    assert [batch.tokens[row].tolist() for row in (0, 1, 4, 5)] == four.tokens.tolist()
    assert batch.seeds[6:] == [seed_of(3, PROMPTS[3], 0), seed_of(3, PROMPTS[3], 1)]
    assert len({tuple(row) for row in batch.tokens.tolist()}) == 8
    others = rollout(PROMPTS, samples=2, max_new_tokens=12, seed=4)
    assert not set(batch.seeds) & set(others.seeds)
    assert (batch.tokens != others.tokens).any(1).all()


def test_samples_have_the_distribution_of_the_model():
    """All texts of two tokens, against their probabilities: chi-square. That of another temperature would be seen."""
    model, count = toy_model(1), 1000
    batch = Rollout(model, rows=64)([[1, 2]], samples=count, max_new_tokens=2, seed=9, eos_token_id=[])
    found = torch.zeros(5, 5).index_put((batch.tokens[:, 0], batch.tokens[:, 1]), torch.ones(count), accumulate=True)

    def expected(temperature: float) -> torch.Tensor:
        texts = torch.tensor([[1, 2, *pair] for pair in itertools.product(range(5), repeat=2)])
        with torch.no_grad():
            p = (model(texts).logits.double() / temperature).log_softmax(-1)
        both = p[:, 1].gather(1, texts[:, 2:3]) + p[:, 2].gather(1, texts[:, 3:4])
        return count * both.exp().view(5, 5)

    assert chisquare(found.flatten(), expected(1.0).flatten()).pvalue > 1e-4
    assert chisquare(found.flatten(), expected(1.5).flatten()).pvalue < 1e-6


def test_a_batch_is_what_a_trainer_takes():
    model = own_model()
    ended = Rollout(model)(PROMPTS, samples=4, max_new_tokens=16, seed=1, eos_token_id=[*range(0, 101, 13)])
    lengths, reasons = ended.lengths.tolist(), list(map(str, ended.finish_reason))
    assert set(reasons) == {"eos", "length"} and len(set(lengths)) > 2
    pad = 0  # the smallest of the ends, as the model has no padding of its own
    for row, prompt in enumerate(prompt for prompt in PROMPTS for _ in range(4)):
        n, new = lengths[row], ended.tokens[row].tolist()
        assert (new[n - 1] % 13 == 0) == (reasons[row] == "eos") or n == 16
        assert new[n:] == [pad] * (16 - n) and ended.mask[row].tolist() == [True] * n + [False] * (16 - n)
        whole = [*prompt, *new[:n]]
        assert ended.sequences[row].tolist() == whole + [pad] * (24 - len(whole))
        assert ended.attention_mask[row].sum() == len(whole) == ended.prompt_lengths[row] + n
        assert (ended.log_probs[row, n:] == 0).all() and (ended.log_probs[row, :n] < 0).all()
    assert ended.stats.emitted == sum(lengths) and ended.stats.seconds["total"] > 0


def test_padded_prompts_stops_and_no_prompts(pair):
    model, _, tokenizer = pair
    rollout = Rollout(model)
    prompts = tokenizer(["import os", "def add(a, b):\n"]).input_ids
    longest = max(map(len, prompts))
    left = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    batch = rollout(prompts, max_new_tokens=24, stop=StopStrings(tokenizer, ["\n"]))
    assert_same(batch, rollout(left, mask, max_new_tokens=24, stop=StopStrings(tokenizer, ["\n"])))
    assert "stop" in map(str, batch.finish_reason)
    none = rollout([])
    assert none.tokens.shape == none.log_probs.shape == none.attention_mask.shape == (0, 0) and none.seeds == []


# ---- weights


def in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))


def other_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return copy.deepcopy(tiny_model("llama", seed=1).state_dict())


def new_data(model: PreTrainedModel) -> None:
    for weight in model.parameters():
        weight.data = weight.data + 0.05 * torch.randn_like(weight)


def new_parameters(model: PreTrainedModel) -> None:
    for module in model.modules():
        for name, weight in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(weight.detach() + 0.05 * torch.randn_like(weight)))


def new_modules(model: PreTrainedModel) -> None:
    model.model.layers[0] = copy.deepcopy(tiny_model("llama", seed=1)).model.layers[0]
    model.lm_head = copy.deepcopy(tiny_model("llama", seed=1)).lm_head


def optimizer_step(model: PreTrainedModel) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model(torch.tensor([[1, 2, 3, 4]]), labels=torch.tensor([[1, 2, 3, 4]])).loss.backward()
    optimizer.step()
    model.zero_grad()


WAYS: dict[str, Callable[[PreTrainedModel], object]] = {
    "in place": in_place,
    "load_state_dict": lambda model: model.load_state_dict(other_state(model)),
    "assigned": lambda model: model.load_state_dict(other_state(model), assign=True),
    "new data": new_data,
    "new parameters": new_parameters,
    "new modules": new_modules,
    "optimizer": optimizer_step,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_change_of_weights_is_seen(way):
    """Also in the middle of an epoch's memories and recorded forwards, and the model can be trained after each call."""
    torch.manual_seed(0)
    model = own_model()
    rollout = Rollout(model, num_drafts=4)
    before = rollout(PROMPTS, samples=2, max_new_tokens=24, seed=0)
    for _ in range(2):
        WAYS[way](model)
        after = rollout(PROMPTS, samples=2, max_new_tokens=24, seed=0)
        assert_same(after, Rollout(copy.deepcopy(model), num_drafts=0)(PROMPTS, samples=2, max_new_tokens=24, seed=0))
        logits = model(after.sequences, after.attention_mask).logits
        scored = after.log_probs_under(logits)
        assert (scored - after.log_probs).abs().max() < CLOSE
        scored.sum().backward()
        assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())
        model.zero_grad()
    assert not torch.equal(before.tokens, after.tokens)


def test_adapters_are_seen():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.5)
    model = peft.get_peft_model(own_model(), config).train()
    rollout = Rollout(model)

    def sampled() -> RolloutBatch:
        return rollout(PROMPTS, max_new_tokens=16)

    plain = sampled()
    assert_same(plain, Rollout(own_model())(PROMPTS, max_new_tokens=16), CLOSE)  # B is 0 as it begins
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    adapted = sampled()
    assert not torch.equal(adapted.tokens, plain.tokens)
    model.eval()
    logits = model(adapted.sequences, attention_mask=adapted.attention_mask).logits
    assert (adapted.log_probs_under(logits) - adapted.log_probs).abs().max() < CLOSE
    model.train()
    with model.disable_adapter():
        assert torch.equal(sampled().tokens, plain.tokens)
    model.merge_adapter()
    merged = sampled()
    model.eval()
    logits = model(merged.sequences, attention_mask=merged.attention_mask).logits
    assert (merged.log_probs_under(logits) - merged.log_probs).abs().max() < CLOSE
    model.unmerge_adapter()
    model.add_adapter("other", config)
    model.set_adapter("other")  # which changes nothing yet
    assert torch.equal(sampled().tokens, plain.tokens)


def test_nothing_is_dropped_out():
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 101}
    rates = {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **rates, eos_token_id=None, bos_token_id=None)).eval()
    evaluated = Rollout(model)(PROMPTS, max_new_tokens=16)
    model.train()
    frozen = model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    rollout = Rollout(model)  # and it can be made in training mode
    for _ in range(2):
        assert_same(rollout(PROMPTS, max_new_tokens=16), evaluated, CLOSE)
        assert [module.training for module in model.modules()] == modes and not frozen.training
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(torch.nan)
    with pytest.raises(RuntimeError, match=r"text \d: its logits are no distribution \(TARGET_NAN\) after 0 tokens"):
        rollout(PROMPTS, max_new_tokens=16)
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(KeyError), evaluating(model):
        assert not any(module.training for module in model.modules())
        raise KeyError
    assert [module.training for module in model.modules()] == modes


def test_what_trainers_put_around_a_forward_is_put_aside():
    model, expected = own_model(), Rollout(own_model())(PROMPTS, max_new_tokens=16)

    def around(self: PreTrainedModel, *args, **kwargs):
        raise AssertionError("called in a rollout")

    early = Rollout(model)
    model.forward = types.MethodType(functools.wraps(type(model).forward)(around), model)
    late = Rollout(model)  # made when it was there
    for rollout in (early, late):
        assert_same(rollout(PROMPTS, max_new_tokens=16), expected)
        with pytest.raises(AssertionError, match="called in a rollout"):
            model(torch.tensor([PROMPTS[0]]))  # for the trainer it is still there


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3", "qwen3"])
def test_log_probs_are_the_trainers(kind):
    model = own_model(kind)
    batch = Rollout(model)(PROMPTS, samples=2, max_new_tokens=24, params=COOL, eos_token_id=[7, 17, 27])
    logits = model(batch.sequences, attention_mask=batch.attention_mask).logits
    assert (batch.log_probs_under(logits, 0.7) - batch.log_probs).abs().max() < CLOSE
    assert (batch.log_probs_under(logits) - batch.raw_log_probs).abs().max() < CLOSE
    alone = logits.log_softmax(-1)
    for row, (start, n) in enumerate(zip(batch.prompt_lengths.tolist(), batch.lengths.tolist(), strict=True)):
        own = alone[row, start - 1 : start - 1 + n].gather(1, batch.tokens[row, :n, None])[:, 0]
        assert torch.equal(own, batch.log_probs_under(logits)[row, :n])


# ---- memories


def test_an_epoch_drafts_from_the_one_before():
    model = own_model()
    memories = SuffixMemories(max_tokens=100, max_owners=3)
    rollout = Rollout(model, SuffixDrafter(memories), num_drafts=6)
    first, second = (rollout(PROMPTS, max_new_tokens=24, seed=5) for _ in range(2))
    assert_same(first, second)
    assert second.stats.tau > 3 > 1.5 > first.stats.tau
    assert len(memories) == 3  # of the four prompts, two are the same
    assert len(memories.of(tuple(PROMPTS[1]))) == 48 and len(memories.of(tuple(PROMPTS[0]))) == 96
    rollout([[1, 2, 3]], max_new_tokens=24)
    assert len(memories) == 3
    for seed in range(3):
        rollout([[1, 2, 3]], max_new_tokens=24, samples=3, seed=seed)
    assert len(memories.of((1, 2, 3))) <= 100
    # Another prompt's texts do not draft, though they are the same tokens.
    alone = Rollout(model, SuffixDrafter(SuffixMemories()), num_drafts=6)
    texts = alone([PROMPTS[0]], max_new_tokens=24, seed=5).sequences.tolist()
    nobody = alone([[100, *texts[0][1:8]]], max_new_tokens=16, seed=5)
    assert nobody.stats.tau < 2


def test_the_default_has_a_memory_for_each_prompt():
    rollout = Rollout(own_model())
    rollout(PROMPTS, samples=2, max_new_tokens=8)
    memories = rollout.decoder.drafter.memory
    assert len(memories) == 3 and memories.max_tokens == MEMORY_TOKENS
    assert [len(memories.of(tuple(prompt))) for prompt in PROMPTS[:2]] == [32, 16]


# ---- training


def trained(num_drafts: int) -> tuple[list[list[float]], PreTrainedModel, list[float]]:
    """Returns the rewards of each step, the model, and tau by step: REINFORCE, with the mean of a prompt's samples as
    baseline, for texts with small numbers."""
    model, prompts, samples = own_model().train(), PROMPTS[1:], 4
    rollout = Rollout(model, num_drafts=num_drafts)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rewards, taus = [], []
    for step in range(6):
        batch = rollout(prompts, samples=samples, max_new_tokens=12, params=COOL, seed=step)
        reward = (batch.tokens < 30).float().mean(1)
        advantage = (reward.view(-1, samples) - reward.view(-1, samples).mean(1, keepdim=True)).flatten()
        logits = model(batch.sequences, batch.attention_mask).logits
        (-advantage[:, None] * batch.log_probs_under(logits, 0.7)).sum(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        rewards.append(reward.tolist())
        taus.append(batch.stats.tau)
    return rewards, model, taus


def test_training_with_drafts_is_training_without():
    (rewards, model, taus), (others, other, plain) = trained(4), trained(0)
    assert rewards == others
    assert sum(rewards[-1]) > sum(rewards[0])
    for (name, weight), same in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(weight, same), name
    assert max(plain) == 1 and taus[-1] > 1


# ---- refusals


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"samples": 0}, "samples: got 0, allowed: an integer >= 1"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0, allowed: an integer >= 1"),
        ({"max_new_tokens": 300}, "max_new_tokens: got 300 after a prompt of 8 tokens, allowed: at most 248"),
        ({"seed": 2**63}, "seed: got 9223372036854775808, allowed: a signed 64-bit integer"),
        ({"seed": True}, "seed: got True"),
        ({"params": 0.7}, "params: got float, allowed: a SamplingParams"),
        ({"params": SamplingParams(temperature=torch.tensor([0.7]))}, "params: got tensors, allowed: numbers"),
        ({"input_ids": [[5], []]}, "input_ids: got no token for sequence 1"),
        ({"input_ids": [5, 6]}, "input_ids: got a flat list of ids"),
    ],
)
def test_arguments_that_are_refused(given, told):
    rollout = Rollout(tiny_model())
    with pytest.raises(ValueError) as error:
        rollout(**{"input_ids": PROMPTS, **given})
    assert str(error.value).startswith(told)


def test_models_and_logits_that_are_refused():
    with pytest.raises(ValueError, match="rows: got 0"):
        Rollout(tiny_model(), rows=0)
    with pytest.raises(ValueError, match="target: got 'model', allowed: a loaded model"):
        Rollout("model")
    batch = Rollout(tiny_model())(PROMPTS, max_new_tokens=4)
    with pytest.raises(ValueError, match=r"logits: got shape \[4, 4, 101\], allowed: \[4, 12, V\]"):
        batch.log_probs_under(torch.zeros(4, 4, 101))
    with pytest.raises(ValueError, match="temperature: got 0.0, allowed: a number > 0"):
        batch.log_probs_under(torch.zeros(4, 12, 101), 0.0)
