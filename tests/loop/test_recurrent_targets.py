"""Targets and drafts with a state: rejected drafts leave nothing behind. Named after bugs of other engines, of which
each was planted once and found by the test under it."""

from __future__ import annotations

import copy
import functools
import random

import pytest
import torch
from specdec import (
    AdaptiveDrafts,
    EarlyExitDrafter,
    PromptLookupDrafter,
    Request,
    Scheduler,
    SpeculativeDecoder,
    SuffixDrafter,
)
from specdec.drafters import Drafter, Drafts, DraftSession
from specdec.drafters.model import ModelDraftSession
from specdec.models.cache.kv_cache import cache_argument
from specdec.models.supported import cached_model
from support.dropped import drops_drafter
from support.feeding import full_logits
from support.model_types import CASES, HYBRID, model_of
from support.models import VOCABULARY, generate, prompts
from support.scripted import script_k
from support.texts import assert_same_greedy, check_text_distribution
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from specdec_kernels import SamplingParams

# One of each kind of state: gated delta rule, the same by channel, convolution alone, Mamba-1, Mamba-2, and with keys
# in the same layer.
KINDS = ("qwen3_5_text", "kimi_linear", "lfm2", "jamba", "nemotron_h", "zamba2")
# Kimi's takes seconds, and a layer of Zamba's is one of Nemotron's with attention: every day they are in two tests.
SOME = [pytest.param(case, marks=pytest.mark.nightly) if case in ("kimi_linear", "zamba2") else case for case in KINDS]
ALL = [case if case in KINDS else pytest.param(case, marks=pytest.mark.nightly) for case in HYBRID]


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@functools.cache
@torch.inference_mode(False)
def long_model(case: str) -> PreTrainedModel:
    """The tiny model, with room for long texts."""
    model_type, settings = CASES[case]
    longer = {**settings, "max_position_embeddings": 2048} if "max_position_embeddings" in settings else settings
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**longer)).eval()
    model.load_state_dict(model_of(case).state_dict())
    return model


@functools.cache
def greedy_text(case: str, prompt: tuple[int, ...], new: int) -> list[int]:
    model = long_model(case)
    ids = torch.tensor([prompt])
    return model.generate(ids, do_sample=False, max_new_tokens=new, pad_token_id=0, eos_token_id=None)[0].tolist()


class Told(Drafter):
    """Drafts what a text is going to be, or not: ``right(i)`` says whether draft i of all is the right token."""

    def __init__(self, texts: list[list[int]], right):
        self.texts, self.right = texts, right

    def start(self, batch) -> DraftSession:
        return ToldSession(self)


class ToldSession(DraftSession):
    def __init__(self, drafter: Told):
        self.drafter, self.count = drafter, 0

    def propose(self, step) -> Drafts:
        proposals = []
        for text, allowed in zip(step.texts, step.allowed, strict=True):
            whole = next((t for t in self.drafter.texts if text and t[: len(text)] == text), text)
            drafts = whole[len(text) : len(text) + allowed]
            for i, token in enumerate(drafts):
                self.count += 1
                drafts[i] = token if self.drafter.right(self.count) else (token + 1) % VOCABULARY
            proposals.append(drafts)
        return Drafts.of(proposals, step)


RIGHT = {
    "always right": lambda i: True,
    "always wrong": lambda i: False,
    "at random": lambda i: random.Random(i).random() < 0.6,
}


def check_long_texts(case: str, new: int, drafts: str, num_drafts) -> None:
    model, rows = long_model(case), [tuple(p) for p in prompts(2, 1, 30, seed=3)]
    expected = [greedy_text(case, prompt, new) for prompt in rows]
    drafter = Told(expected, RIGHT[drafts])
    result = generate(model, drafter, [list(p) for p in rows], num_drafts, max_new_tokens=new)
    for prompt, got, whole in zip(rows, result.tokens, expected, strict=True):
        assert_same_greedy(model, list(prompt), got, whole[len(prompt) :])
    if drafts == "always wrong":
        assert result.stats.accepted == 0 < result.stats.drafted


@pytest.mark.parametrize("drafts", RIGHT)
@pytest.mark.parametrize("case", ALL)
def test_long_texts(case, drafts):
    """Rejected drafts stay in the state: vllm#39273, mlx-lm#980, sglang#25587, which differed after 100 tokens."""
    check_long_texts(case, 160, drafts, 4)


@pytest.mark.nightly
@pytest.mark.parametrize("num_drafts", [1, 3, 7, AdaptiveDrafts(max_drafts=6)], ids=["1", "3", "7", "adaptive"])
@pytest.mark.parametrize("drafts", RIGHT)
@pytest.mark.parametrize("case", HYBRID)
def test_longer_texts(case, drafts, num_drafts):
    check_long_texts(case, 600, drafts, num_drafts)


@pytest.mark.parametrize("case", SOME)
def test_k_changes_every_step(case, monkeypatch):
    """A short step after a long one restores what is stale: llama.cpp#29117, #26695; no drafts in a row: an index -1,
    vllm#50021."""
    chance = random.Random(1)
    script_k(monkeypatch, [chance.choice((0, 0, 1, 2, 5)) for _ in range(500)])
    check_long_texts(case, 120, "at random", 5)


@pytest.mark.parametrize("case", SOME)
def test_a_draft_model_with_a_state(case, monkeypatch):
    """It drafts for itself, so that all drafts are right unless its state is wrong; with steps without drafts, after
    which it reads what it has missed; and for a target of another kind."""
    model = model_of(case)
    ids = [*prompts(3, 1, 20, seed=5), [7]]
    plain = generate(model, None, ids, 0, max_new_tokens=60).tokens
    result = generate(model, copy.deepcopy(model), ids, 3, max_new_tokens=60)
    assert result.tokens == plain and result.stats.alpha > 0.97
    chance = random.Random(2)
    script_k(monkeypatch, [chance.choice((0, 0, 1, 3, 4)) for _ in range(500)])
    result = generate(model, copy.deepcopy(model), ids, 4, max_new_tokens=60)
    assert result.tokens == plain and result.stats.alpha > 0.97


@pytest.mark.parametrize("case", SOME)
def test_draft_models_of_rows_that_are_used_again(case):
    """A fresh slot held the state of another request: tpu-inference#3412. Later texts are longer."""
    model, asked = model_of(case), [prompts(1, n, n, seed=n)[0] for n in (2, 1, 3, 2, 30, 25, 40, 35)]
    decoder = SpeculativeDecoder(model, copy.deepcopy(model), 3)
    done = Scheduler(decoder, rows=2, max_length=60).run([Request(p, max_new_tokens=9, eos_token_id=[]) for p in asked])
    done = sorted(done, key=lambda sequence: sequence.number)
    assert [s.tokens for s in done] == [generate(model, None, [p], 0, max_new_tokens=9).tokens[0] for p in asked]
    assert sum(s.stats.accepted for s in done) > 0.97 * sum(s.stats.tested for s in done)


@pytest.mark.parametrize("case", SOME)
def test_a_draft_model_whose_drafts_are_rejected(case, monkeypatch):
    """In every step it drafts what full forwards of the text so far do."""
    target, draft, drafted = model_of(case), copy.deepcopy(model_of(case)), []
    head = draft.get_output_embeddings().weight
    head += 0.15 * head.std() * torch.randn(head.shape, generator=torch.Generator().manual_seed(0))
    propose = ModelDraftSession.propose

    def spy(self, step):
        drafts = propose(self, step)
        drafted.append((step.position.tolist(), step.allowed_on_device.tolist(), drafts.tokens.tolist()))
        return drafts

    monkeypatch.setattr(ModelDraftSession, "propose", spy)
    ids = [*prompts(2, 1, 12, seed=7), [5]]
    result = generate(target, draft, ids, 3, max_new_tokens=40)
    assert 0.2 < result.stats.alpha < 0.95
    for positions, allowed, tokens in drafted:
        for row, position in enumerate(positions):
            text = (ids[row] + result.tokens[row])[:position]
            for token in tokens[row][: allowed[row]]:
                logits = full_logits(draft, text)[-1]
                assert logits.max() - logits[token] < 1e-3
                text.append(token)


def test_a_draft_model_with_a_state_for_a_target_without():
    target, draft = model_of("llama"), model_of("lfm2")
    ids = prompts(3, 1, 20)
    expected = generate(target, None, ids, 0, max_new_tokens=30).tokens
    assert generate(target, draft, ids, 3, max_new_tokens=30).tokens == expected


@pytest.mark.parametrize("case", SOME)
def test_rows_join_and_leave(case):
    """Texts of many lengths in few rows, each the same as alone: llama.cpp#28019 was clean with two sequences, and
    wrong from three on."""
    model, chance = model_of(case), random.Random(4)
    asked = [(prompt, chance.randint(1, 40)) for prompt in prompts(14, 1, 30, seed=6)]
    alone = [generate(model, None, [prompt], 0, max_new_tokens=new).tokens[0] for prompt, new in asked]
    texts = [prompt + text for (prompt, _), text in zip(asked, alone, strict=True)]
    decoder = SpeculativeDecoder(model, Told(texts, RIGHT["at random"]), num_drafts=3)
    scheduler = Scheduler(decoder, rows=4, max_length=80, prefill_chunk=7)
    done = scheduler.run([Request(prompt, max_new_tokens=new, eos_token_id=[]) for prompt, new in asked])
    assert [sequence.tokens for sequence in sorted(done, key=lambda sequence: sequence.number)] == alone


@pytest.mark.parametrize("case", SOME)
def test_prompts_in_chunks(case):
    """Padding that reaches a state: transformers#47086. Ragged prompts, some shorter than a convolution, in chunks of
    any size."""
    cached = cached_model(model_of(case), "target")
    known = [prompts(1, n, n, seed=n)[0] for n in (1, 2, 3, 19, 40)]
    next_tokens = torch.tensor([[5], [6], [7], [8], [9]])
    found = []
    for size in (8192, 5 * 7, 5 * 2, 5):
        cached.prefill_chunk.size = size
        cache = cached.new_cache(5, 64)
        cached.prefill(cache, known)
        slots = cache.lengths[:, None]
        found.append(cached(next_tokens, cache, cached.layout(slots, slots, 63)))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", SOME)
def test_a_chunk_that_memory_ran_out_in(case):
    """Layers that had taken it into their states would take it a second time. Logits still come once for each token."""
    cached = cached_model(model_of(case), "target")
    known = prompts(2, 30, 30, seed=1)
    expected = cached.new_cache(2, 64)
    cached.prefill(expected, known)
    failing, fed, told = {2: True, 3: True}, [], {0: [], 1: []}
    inner = cached.forwards.run

    def run(module, tokens, *rest, **settings):
        result = inner(module, tokens, *rest, **settings)
        fed.append(tokens.shape[1])
        if failing.pop(len(fed), False):  # after all layers: the worst case
            raise torch.OutOfMemoryError
        return result

    cached.forwards.run = run
    cached.prefill_chunk.size = 16
    cache = cached.new_cache(2, 64)
    with pytest.warns(RuntimeWarning, match="out of memory in prefill"):
        cached.prefill(cache, known, lambda row, position, logits: told[row].append((position, len(logits))))
    assert sum(fed) > 30 and cached.prefill_chunk.size == 4
    for row in told:
        assert sum(count for _, count in told[row]) == 30
        places = [position for position, _ in told[row]]
        assert places == [sum(count for _, count in told[row][:i]) for i in range(len(places))]
    slots = cache.lengths[:, None]
    tokens, layout = torch.tensor([[5], [6]]), cached.layout(slots, slots, 63)
    torch.testing.assert_close(cached(tokens, cache, layout), cached(tokens, expected, layout), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", SOME)
def test_a_text_from_behind_its_state_is_read_again(case):
    """As where a text is translated anew for a draft model with another tokenizer; prefix caches gave such states to
    other texts: vllm#43559, SkyRL#1981."""
    cached = cached_model(model_of(case), "target")
    first, second = prompts(2, 20, 20, seed=3)
    cache, fresh = (cached.new_cache(1, 64, window=4) for _ in range(2))
    cached.prefill(cache, [first])
    text = first[:5] + second
    cached.extend(cache, [text], [5])
    cached.prefill(fresh, [text])
    slots = torch.arange(25, 28)[None]
    layout = cached.layout(slots, slots, 63)
    tokens = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(cached(tokens, cache, layout), cached(tokens, fresh, layout), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", SOME)
def test_not_a_number_ends_with_its_sequence(case):
    """A NaN in a state lives for ever ("!!!!", fak#11112): not in the next sequence of its row, nor in other rows."""
    cached = cached_model(model_of(case), "target")
    cache = cached.new_cache(3, 64, window=4)
    known = prompts(3, 9, 9, seed=2)
    for row in range(3):
        cache.begin(row)
    cached.prefill(cache, known)
    for layer in cache.recurrent:
        for part in (*(layer.state or ()), layer.inputs):
            if part.is_floating_point():
                part[1].fill_(torch.nan)
    tokens = torch.tensor([[1, 2, 3]] * 3)

    def step(cache):
        slots = cache.lengths[:, None] + torch.arange(3)
        return cached(tokens, cache, cached.layout(slots, slots, 63))

    logits = step(cache)
    assert logits[1].isnan().all() and logits[[0, 2]].isfinite().all()
    cache.begin(1)
    cached.extend(cache, [known[2]], [0], 1)
    torch.testing.assert_close(step(cache)[1], step(cache)[2], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["qwen3_5_text", "nemotron_h", "jamba", "lfm2"])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_distribution_of_texts(case, rule):
    """Sampled drafts of a model with a state, verified by another one."""
    check_text_distribution(toy(case, 1), toy(case, 2), 20_000, rule=rule)


@functools.cache
@torch.inference_mode(False)
def toy(case: str, seed: int) -> PreTrainedModel:
    """With a vocabulary of five tokens."""
    model_type, settings = CASES[case]
    config = CONFIG_MAPPING[model_type](**{**settings, "vocab_size": 5, "num_hidden_layers": 3})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "A_log" not in name:
                weight.normal_(std=1.0 if "emb" in name else 0.25)
    return model


DRAFTERS = {
    "lookup": lambda model: PromptLookupDrafter(),
    "suffix": lambda model: SuffixDrafter(),
    "early exit": lambda model: EarlyExitDrafter(model, num_layers=2),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("case", SOME)
def test_drafters_of_all_kinds(case, drafter):
    """With sampling by rule coupled, log-probabilities and adaptive K, too."""
    model, ids = model_of(case), prompts(5, 1, 30, seed=8)
    settings = {"max_new_tokens": 40, "logit_bias": dict.fromkeys(range(4), 30.0)}
    for num_drafts in (3, AdaptiveDrafts(max_drafts=4)):
        for params, rule in ((SamplingParams(0.0), "token"), (SamplingParams(1.0), "coupled")):
            plain = generate(model, None, ids, 0, params=params, rule=rule, seed=[1, 2, 3, 4, 5], **settings)
            own = DRAFTERS[drafter](model)
            got = generate(model, own, ids, num_drafts, params=params, rule=rule, seed=[1, 2, 3, 4, 5], **settings)
            assert got.drafter_error is None and got.tokens == plain.tokens
            assert drafter == "early exit" or isinstance(num_drafts, AdaptiveDrafts) or got.stats.accepted > 0


@pytest.mark.parametrize("case", ALL)
def test_trees(case):
    """Branches of which at most one is right; texts greedy and sampled by rule coupled are those without drafts."""
    model, ids = model_of(case), prompts(4, 1, 30, seed=8)
    settings = {"max_new_tokens": 40, "logit_bias": dict.fromkeys(range(4), 30.0)}
    for params in (SamplingParams(0.0), SamplingParams(1.0)):
        plain = generate(model, None, ids, 0, params=params, rule="coupled", seed=[1, 2, 3, 4], **settings)
        for drafter in (SuffixDrafter(), PromptLookupDrafter()):
            got = generate(model, drafter, ids, 3, tree=8, params=params, rule="coupled", seed=[1, 2, 3, 4], **settings)
            assert got.drafter_error is None and got.tokens == plain.tokens
            assert got.stats.accepted > 0


@pytest.mark.parametrize("case", ["nemotron_h", "zamba2"])
def test_steps_do_not_bound_what_prompts_do(case):
    """transformers bounds the time steps of Mamba-2 where it reads several tokens, and not where it decodes one. Here
    the last token of a prompt is fed in the first step, so it is one of these."""
    model_type, settings = CASES[case]
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**{**settings, "time_step_min": 0.5})).eval()
    model.load_state_dict(model_of(case).state_dict())
    prompt = prompts(1, 12, 12)[0]
    cache, text = DynamicCache(config=model.config), list(prompt)
    over = {cache_argument(model): cache, "use_cache": True}
    model(torch.tensor([prompt[:-1]]), **over)
    while len(text) < 52:
        ids, place = torch.tensor([text[-1:]]), torch.tensor([[len(text) - 1]])
        text.append(model(ids, position_ids=place, **over).logits[0, -1].argmax().item())
    got = generate(model, Told([text], RIGHT["at random"]), [prompt], 3, max_new_tokens=40).tokens[0]
    assert got == text[len(prompt) :]
    assert got != generate(model_of(case), None, [prompt], 0, max_new_tokens=40).tokens[0]


def test_what_they_lack_is_done_otherwise():
    model = model_of("lfm2")
    with pytest.warns(RuntimeWarning, match="draft of model type 'lfm2' has recurrent layers, .* each step drafts one"):
        decoder = SpeculativeDecoder(model, model, 3, tree=8)
    assert decoder.generate([[1, 2, 3]], max_new_tokens=5, eos_token_id=[]).tokens[0]
    cached = cached_model(model, "target")
    cache = cached.new_cache(1, 64, window=2)
    slots = torch.arange(3)[None]
    with pytest.raises(ValueError, match="window: got 2 for a forward of 3 tokens"):
        cached(slots, cache, cached.layout(slots, slots, 63))


@pytest.mark.parametrize("case", SOME)
def test_a_row_costs_what_is_allocated(case):
    cached = cached_model(model_of(case), "target")
    cache = cached.new_cache(3, 64, window=6)
    stored = [part for layer in cache.recurrent for part in (*(layer.state or ()), layer.inputs)]
    assert sum(part.nbytes for part in stored) == 3 * cached.row_bytes(6) > 0
    addresses = [part.data_ptr() for part in stored]
    cached.prefill(cache, prompts(3, 1, 20))
    assert addresses == [p.data_ptr() for layer in cache.recurrent for p in (*(layer.state or ()), layer.inputs)]
    budget = SpeculativeDecoder(model_of(case), None, 5).plan_caches(None, 63, cache_bytes=10 * 2**20)
    each = 64 * cached.slot_bytes() + cached.row_bytes(6)
    assert budget.rows == 10 * 2**20 // each and budget.bytes == budget.rows * each


class Shortened(Told):
    """From its third step on, the session says of its drafts that they were drawn from too few columns."""

    def start(self, batch) -> DraftSession:
        class Session(ToldSession):
            def propose(self, step) -> Drafts:
                drafts = super().propose(step)
                return drafts if step.index < 2 else drafts._replace(logits=torch.zeros(*drafts.tokens.shape, 3))

        return Session(self)


@pytest.mark.parametrize("case", KINDS[:3])
def test_a_step_whose_drafts_are_refused_runs_again(case):
    """By verification, when the target's state has seen them."""
    model, rows = long_model(case), [tuple(p) for p in prompts(2, 1, 30, seed=3)]
    expected = [greedy_text(case, prompt, 24) for prompt in rows]
    drafter = Shortened(expected, RIGHT["at random"])
    with drops_drafter("draft_logits: got"):
        result = generate(model, drafter, [list(p) for p in rows], 4, max_new_tokens=24)
    assert "draft_logits" in result.drafter_error and result.stats.drafted > 0
    for prompt, got, whole in zip(rows, result.tokens, expected, strict=True):
        assert_same_greedy(model, list(prompt), got, whole[len(prompt) :])
