"""Drafts from the target's own first layers, in the target's own cache."""

from __future__ import annotations

import copy
import itertools
from collections import Counter

import pytest
import torch
from specdec import AdaptiveDrafts, EarlyExitDrafter
from specdec.drafters import Drafter, Drafts, DraftSession
from specdec.drafters.early_exit import check_keys_are_shared, first_layers
from specdec.evaluation.verify.chi_square import chi_square
from specdec.models.cache.kv_cache import StaticKVCache
from specdec.models.forward.cached_model import CachedModel
from specdec.models.forward.forwards import Forwards
from specdec.models.supported import cached_model
from support.allocations import unrecorded
from support.models import POSITIONS, TYPES, VOCABULARY, WINDOW, generate, prompts, tiny_model, tunable_pair
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
)

from specdec_kernels import SamplingParams

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GATED = {**_SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
MORE = {
    "mistral": lambda: MistralConfig(**_GATED, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(**_GATED),
    "phi3": lambda: Phi3Config(**_GATED),
    "gpt_neox": lambda: GPTNeoXConfig(**_SIZES, intermediate_size=48),
    "opt": lambda: OPTConfig(**_SIZES, ffn_dim=48, word_embed_proj_dim=32),
    "olmo2": lambda: Olmo2Config(**_GATED),  # types that are checked on first use
    "falcon": lambda: FalconConfig(**_SIZES, alibi=False),
}


def model_of(kind: str) -> PreTrainedModel:
    """Three layers."""
    if kind in TYPES:
        return tiny_model(kind, layers=3)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MORE[kind]()).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=1.0 if "emb" in name else 0.3)
    return model


class Recording(Drafter, DraftSession):
    """A drafter whose steps ``seen(step, batch, propose)`` takes, where ``propose`` asks the drafter."""

    def __init__(self, drafter, seen):
        self.drafter, self.seen = drafter, seen

    def start(self, batch):
        self.batch, self.session = batch, self.drafter.start(batch)
        return self

    def propose(self, step) -> Drafts:
        return self.seen(step, self.batch, self.session.propose)

    def begin(self, prompts) -> None:
        self.session.begin(prompts)

    def end(self, row, output) -> None:
        self.session.end(row, output)


def fingerprint(model: PreTrainedModel) -> list:
    """Everything that a model's copy might have changed."""
    modules = [(name, id(m), list(m._modules), vars(m).get("forward")) for name, m in model.named_modules()]
    weights = [(name, w.data_ptr(), w.clone()) for name, w in model.state_dict().items()]
    return [modules, model.config.to_dict(), weights]


def same(a: list, b: list) -> bool:
    return a[:2] == b[:2] and all(x[:2] == y[:2] and torch.equal(x[2], y[2]) for x, y in zip(a[2], b[2], strict=True))


@pytest.mark.parametrize("kind", (*TYPES, *(pytest.param(kind, marks=pytest.mark.nightly) for kind in MORE)))
def test_greedy_text_and_the_target_stay_as_they_are(kind):
    target, ragged = model_of(kind), prompts(4, 1, 20)
    before = fingerprint(target)
    plain = generate(target, None, ragged, 0, max_new_tokens=20).tokens
    for layers, num_drafts in ((1, 3), (2, 5)):
        result = generate(target, EarlyExitDrafter(target, layers), ragged, num_drafts, max_new_tokens=20)
        assert result.tokens == plain and result.drafter_error is None
        assert 0 < result.stats.accepted < result.stats.drafted
    assert same(before, fingerprint(target))


@pytest.mark.parametrize("kind", (*TYPES, *MORE))
def test_all_layers_are_the_target(kind):
    target, ragged = model_of(kind), prompts(3, 1, 12)
    drafter = EarlyExitDrafter(target, 3)
    for temperature in (0.0, 1.0):
        stats = generate(target, drafter, ragged, 4, max_new_tokens=20, params=SamplingParams(temperature)).stats
        assert stats.drafted > 0 and stats.acceptance_rate == 1.0
    # The same drafts as from the target as a model of its own.
    assert stats.tau == generate(target, target, ragged, 4, max_new_tokens=20, params=SamplingParams(1.0)).stats.tau


def test_the_first_layers_then_norm_and_head():
    target = tiny_model("llama", layers=3)
    ids = torch.tensor(prompts(2, 9, 9))
    with torch.inference_mode():
        hidden = target(ids, output_hidden_states=True).hidden_states
        for layers in (1, 2):
            exit_early = first_layers(target, layers)
            assert torch.equal(exit_early(ids).logits, target.lm_head(target.model.norm(hidden[layers])))
            assert {id(w) for w in exit_early.parameters()} < {id(w) for w in target.parameters()}


# ---- one cache ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ("llama", "gemma3", "bloom"))
def test_what_the_target_stored_is_never_written(kind, monkeypatch):
    """And what the draft stores leaves no trace: the keys are bitwise those of the same drafts from nowhere."""
    target, ragged = model_of(kind), prompts(3, 1, 12)
    proposed, caches, written, calls = [], [], [], itertools.count()
    write_at = StaticKVCache.write_at

    def spy(self, slots, *others, **more):
        written.append(slots)
        write_at(self, slots, *others, **more)

    unrecorded(monkeypatch)
    monkeypatch.setattr(StaticKVCache, "write_at", spy)

    def seen(step, generation, draft):
        written.clear()
        skipped = step.index % 4 == 2  # the next step finds tokens that it did not draft for
        drafts = Drafts(step.last_two[:, :0]) if skipped else draft(step)
        assert len(written) == (0 if skipped else step.num_drafts)
        for b, stored in enumerate(step.lengths.tolist()):
            assert all(slot >= stored for slots in written for slot in slots[b].tolist())
        proposed.append(drafts)
        caches.append(generation.target_cache)
        return drafts

    def replay(step, generation, draft):
        caches.append(generation.target_cache)
        return Drafts(proposed[next(calls)].tokens)

    texts = []
    for drafter in (Recording(EarlyExitDrafter(target, 1), seen), Recording(EarlyExitDrafter(target, 1), replay)):
        result = generate(target, drafter, ragged, 3, max_new_tokens=25)
        assert result.drafter_error is None
        texts.append(result.tokens)
    assert texts[0] == texts[1]
    shared, alone = caches[0], caches[-1]
    assert shared is not alone
    for a, b in zip(shared.layers, alone.layers, strict=True):
        for sequence, (prompt, tokens) in enumerate(zip(ragged, texts[0], strict=True)):
            known = len(prompt) + len(tokens) - 1
            assert torch.equal(a.keys[sequence, :, :known], b.keys[sequence, :, :known])
            assert torch.equal(a.values[sequence, :, :known], b.values[sequence, :, :known])


def test_no_second_cache_and_no_second_prefill(monkeypatch):
    unrecorded(monkeypatch)
    built, fed = [], []
    new, run = StaticKVCache.__init__, Forwards.run

    def init(self, config, rows, capacity, *args, **kwargs):
        new(self, config, rows, capacity, *args, **kwargs)
        if capacity > 2:  # no measuring of what a slot costs
            built.append(self)

    def spy(self, module, tokens, cache, *others, **settings):
        if cache in built:
            fed.append((len(self.model.model.layers), tokens.shape[1], cache))
        return run(self, module, tokens, cache, *others, **settings)

    monkeypatch.setattr(StaticKVCache, "__init__", init)
    monkeypatch.setattr(Forwards, "run", spy)
    target = tiny_model("llama", layers=3)
    result = generate(target, EarlyExitDrafter(target, 1), prompts(2, 9, 9), 3, max_new_tokens=20)
    assert len(built) == 1
    assert [columns for layers, columns, _ in fed if layers == 1] == [1] * result.stats.draft_forwards
    assert [columns for layers, columns, _ in fed if layers == 3][0] == 8  # the prompts but for their last token


# ---- sampling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", (pytest.param({"rule": "block"}, marks=pytest.mark.nightly), {"rule": "block", "logit_bias": {1: 1.0}})
)
def test_sampled_text_has_the_distribution_of_the_target(options):
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=5,
        initializer_range=0.7,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    target, count = AutoModelForCausalLM.from_config(config).eval(), 10_000
    drafter = EarlyExitDrafter(target, 1)
    params = SamplingParams(1.3)
    result = generate(
        target, drafter, [[1, 2]] * count, 2, max_new_tokens=3, params=params, seed=list(range(count)), **options
    )
    assert result.drafter_error is None and 0.1 < result.stats.alpha < 0.95
    texts = list(itertools.product(range(5), repeat=3))
    bias = torch.tensor([options.get("logit_bias", {}).get(token, 0.0) for token in range(5)])
    with torch.inference_mode():
        logits = target(torch.tensor([[1, 2, *t] for t in texts])).logits[:, 1:4] + bias
    chosen = (logits.double() / 1.3).log_softmax(-1).gather(2, torch.tensor(texts)[..., None])
    distribution = dict(zip(texts, chosen.sum((1, 2)).exp().tolist(), strict=True))
    found = chi_square(Counter(map(tuple, result.tokens)), distribution, level=1e-4)
    assert found.p_value > 1e-4 and found.detectable < 0.14, found


def test_coupled_text_is_that_of_plain_sampling():
    target, ragged = tiny_model("llama", layers=3), prompts(4, 1, 20)
    options = {"params": SamplingParams(0.9, top_k=20), "seed": [3, 4, 5, 6], "rule": "coupled", "max_new_tokens": 30}
    plain = generate(target, None, ragged, 0, **options).tokens
    for layers, num_drafts in ((1, 2), (2, 6)):
        result = generate(target, EarlyExitDrafter(target, layers), ragged, num_drafts, **options)
        assert result.tokens == plain and result.drafter_error is None


def test_confidence_and_gaps_leave_the_text():
    target, ragged = tunable_pair(0.3)[0], prompts(4, 1, 20)
    plain = generate(target, None, ragged, 0, max_new_tokens=40).tokens
    always = generate(target, EarlyExitDrafter(target, 2), ragged, 4, max_new_tokens=40)
    sure = generate(target, EarlyExitDrafter(target, 2, confidence=0.5), ragged, 4, max_new_tokens=40)
    assert sure.tokens == always.tokens == plain
    assert 0 < sure.stats.drafted < always.stats.drafted
    assert sure.stats.acceptance_rate > always.stats.acceptance_rate

    def every_third(step, batch, propose):
        return propose(step) if step.index % 3 == 0 else Drafts(step.last_two[:, :0])

    # Between its steps the target alone has stored keys, and each of them: a cache that lacked some would show.
    whole = Recording(EarlyExitDrafter(target, 4), every_third)
    result = generate(target, whole, ragged, AdaptiveDrafts(4, costs=[1.0, 1.0, 1.0, 1.0, 1.0]), max_new_tokens=40)
    assert result.tokens == plain and result.drafter_error is None
    assert result.stats.drafted > 20 and result.stats.acceptance_rate == 1.0


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", (0, 4, -1, True, 1.5))
def test_num_layers_is_checked(layers):
    with pytest.raises(ValueError, match=r"num_layers: got .*, allowed: 1 to 3"):
        EarlyExitDrafter(tiny_model("llama", layers=3), layers)


def test_other_structures_are_refused_by_name():
    model = copy.deepcopy(tiny_model("llama", layers=3))
    model.model.more = torch.nn.ModuleList(torch.nn.Identity() for _ in range(3)).eval()
    with pytest.raises(ValueError, match=r"target: got model type 'llama', with 2 lists of 3 modules"):
        EarlyExitDrafter(model, 1)
    model = copy.deepcopy(tiny_model("llama", layers=3))
    model.model.forward = model.model.forward  # as accelerate's hooks do
    with pytest.raises(ValueError, match=r"target: got model type 'llama', whose forward was replaced"):
        EarlyExitDrafter(model, 1)


def test_keys_that_depend_on_later_layers_are_refused():
    target = tiny_model("llama", layers=3)
    check_keys_are_shared(cached_model(target, "target"), CachedModel(first_layers(target, 2)))
    with pytest.raises(ValueError, match=r"'llama', whose layer 0 stores other keys"):
        check_keys_are_shared(cached_model(target, "target"), CachedModel(tiny_model("llama", 5, layers=2)))
    broken = CachedModel(first_layers(target, 2))
    broken.model.model.layers = torch.nn.ModuleList((torch.nn.Linear(1, 1),)).eval()
    with pytest.raises(ValueError, match=r"'llama', which fails without its last layers \(TypeError: "):
        check_keys_are_shared(cached_model(target, "target"), broken)
