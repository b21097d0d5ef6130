"""The loop: exact text under every batch, drafter and K; ends, faults, streaming and counts."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from specdec import Output, Producer, SpeculativeDecoder, Stats
from specdec.drafters import BatchState, Drafter, Drafts, DraftSession, Step
from specdec.models.cache.kv_cache import StaticKVCache
from support.models import TYPES, VOCABULARY, generate, prompts, tiny_model, tunable_pair
from support.texts import assert_same_greedy

from specdec_kernels import SamplingParams, Status

EVERY_DAY, NIGHTLY = 48, 128  # new tokens


# ---- Greedy equality: nightly 208 prompts of 128 tokens, every day 20 of 48 -----------------------------


GOOD, ADVERSARIAL = "good", "adversarial"
SINGLE = 2  # prompts alone a configuration: 16 configurations, 32 prompts
BATCHES = 11  # batches of 8 prompts for each kind of draft: 176 prompts


@functools.cache
def greedy_texts(new_tokens: int) -> list[tuple[list[int], list[int]]]:
    """(prompt, what model.generate says) of 208 prompts of several lengths, 32 prompts of one length at a time."""
    target, texts = tunable_pair(0.3)[0], []
    for length in (1, 2, 7, 12, 20, 33, 50):
        group = prompts(32, length, length, seed=length)
        whole = target.generate(
            torch.tensor(group),
            attention_mask=torch.ones(32, length),
            do_sample=False,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
        texts += zip(group, whole[:, length:].tolist(), strict=True)
    return [texts[i] for i in torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()][:208]


def draft_of(quality: str):
    return tunable_pair(0.3)[1] if quality == GOOD else tiny_model("llama", seed=99)


def some_nightly(values, every_day):
    return [v if v in every_day else pytest.param(v, marks=pytest.mark.nightly) for v in values]


def all_nightly(values, every_day):
    return [(v, EVERY_DAY) for v in every_day] + [pytest.param(v, NIGHTLY, marks=pytest.mark.nightly) for v in values]


@pytest.mark.parametrize(
    ("quality", "num_drafts", "new_tokens"),
    [
        (GOOD, 8, EVERY_DAY),
        (ADVERSARIAL, 1, EVERY_DAY),
        *(
            pytest.param(quality, num_drafts, NIGHTLY, marks=pytest.mark.nightly)
            for quality, num_drafts in itertools.product((GOOD, ADVERSARIAL), range(1, 9))
        ),
    ],
)
def test_greedy_equals_plain_one_by_one(quality, num_drafts, new_tokens):
    target = tunable_pair(0.3)[0]
    first = SINGLE * (2 * (num_drafts - 1) + (quality == GOOD))
    for prompt, expected in greedy_texts(new_tokens)[first : first + SINGLE]:
        result = generate(target, draft_of(quality), [prompt], num_drafts, max_new_tokens=new_tokens)
        assert_same_greedy(target, prompt, result.tokens[0], expected)


@pytest.mark.parametrize(("number", "new_tokens"), all_nightly(range(2 * BATCHES), (1, 14)))
def test_greedy_equals_plain_in_batches(number, new_tokens):
    target, quality = tunable_pair(0.3)[0], (GOOD, ADVERSARIAL)[number % 2]
    texts = greedy_texts(new_tokens)[32 + 8 * number : 40 + 8 * number]
    ids = [p for p, _ in texts]
    result = generate(target, draft_of(quality), ids, 1 + number // 2 % 8, max_new_tokens=new_tokens)
    for (prompt, expected), got in zip(texts, result.tokens, strict=True):
        assert_same_greedy(target, prompt, got, expected)


@pytest.mark.parametrize("kind", some_nightly(TYPES, ("gpt2",)))  # tests/models/test_model_types.py has more
def test_greedy_equals_plain_for_every_model_type(kind):
    target, ragged = tiny_model(kind), prompts(4, 1, 20)
    expected = [
        target.generate(torch.tensor([p]), do_sample=False, max_new_tokens=30, pad_token_id=0)[0, len(p) :].tolist()
        for p in ragged
    ]
    for draft, num_drafts in ((tiny_model(kind, 7), 3), (target, 3), (None, 0), (tiny_model("llama"), 5)):
        result = generate(target, draft, ragged, num_drafts, max_new_tokens=30)
        for prompt, got, text in zip(ragged, result.tokens, expected, strict=True):
            assert_same_greedy(target, prompt, got, text)


# ---- sampling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", some_nightly(("token", "block"), ("token",)))
def test_sampled_text_does_not_depend_on_the_batch(rule):
    target, draft = tunable_pair(0.3)
    ragged, seeds = prompts(6, 1, 30, seed=5), [11, 12, 13, 14, 15, -16]
    temperature = torch.tensor([0.7, 1.0, 0.0, 1.3, 0.2, 0.9])
    alone = [
        generate(target, draft, [p], max_new_tokens=40, params=SamplingParams(t), seed=s, rule=rule).tokens[0]
        for p, t, s in zip(ragged, temperature.tolist(), seeds, strict=True)
    ]

    def together(order: list[int], ids=None, mask=None) -> list[list[int]]:
        return generate(
            target,
            draft,
            [ragged[i] for i in order] if ids is None else ids,
            attention_mask=mask,
            max_new_tokens=40,
            params=SamplingParams(temperature[order]),
            seed=torch.tensor([seeds[i] for i in order]),
            rule=rule,
        ).tokens

    everyone = list(range(6))
    assert together(everyone) == alone
    assert together([4, 2, 0]) == [alone[4], alone[2], alone[0]]
    longest = max(map(len, ragged))
    for left in (True, False):
        pads = [[7] * (longest - len(p)) for p in ragged]
        rows = [pad + p if left else p + pad for p, pad in zip(ragged, pads, strict=True)]
        ones = [
            [0] * len(pad) + [1] * len(p) if left else [1] * len(p) + [0] * len(pad)
            for p, pad in zip(ragged, pads, strict=True)
        ]
        assert together(everyone, torch.tensor(rows), torch.tensor(ones)) == alone


def test_seeds():
    target, draft = tunable_pair(0.3)
    prompt = prompts(1, 9, 9)[0]
    params = SamplingParams(1.0)
    same = generate(target, draft, [prompt] * 3, max_new_tokens=20, params=params, seed=3).tokens
    assert same[0] == same[1] == same[2]
    several = generate(target, draft, [prompt] * 3, max_new_tokens=20, params=params, seed=[3, 4, 5]).tokens
    assert several[0] == same[0] and len({tuple(t) for t in several}) == 3
    for bad in ([1, 2], 2**70, 1.5, [[1, 2, 3]], "x"):
        with pytest.raises(ValueError, match="seed"):
            generate(target, draft, [prompt] * 3, seed=bad)


# ---- ends --------------------------------------------------------------------------------------------------


def test_eos_inside_an_accepted_run():
    target, _ = tunable_pair(0.3)
    prompt = prompts(1, 9, 9)[0]
    text = generate(target, target, [prompt], 4, max_new_tokens=24).tokens[0]
    checked = 0
    for index, eos in enumerate(text):
        if text.index(eos) < index or index % 5 == 4:  # seen before, or the bonus token of its step
            continue
        result = generate(target, target, [prompt], 4, max_new_tokens=24, eos_token_id=[eos, VOCABULARY + 5])
        assert result.tokens[0] == text[: index + 1]
        assert result.produced_by[0][-1] == Producer.ACCEPTED
        assert result.stats.cut_steps == 1 and result.stats.emitted == index + 1
        checked += 1
    assert checked > 5


def test_several_eos_ids_and_padding():
    target, draft = tunable_pair(0.3)
    ragged = prompts(4, 3, 9)
    free = generate(target, draft, ragged, max_new_tokens=30).tokens
    ends = [free[0][5], free[2][11]]
    cut = [t[: next((i + 1 for i, token in enumerate(t) if token in ends), 30)] for t in free]
    assert len({len(t) for t in cut}) > 1
    result = generate(target, draft, ragged, max_new_tokens=30, eos_token_id=ends, pad_token_id=77)
    assert result.tokens == cut
    longest = max(len(p) + len(t) for p, t in zip(ragged, cut, strict=True))
    for row, prompt, tokens in zip(result.sequences.tolist(), ragged, cut, strict=True):
        assert row == prompt + tokens + [77] * (longest - len(prompt) - len(tokens))


def test_sequences_as_transformers_returns_them():
    target, draft = tunable_pair(0.3)
    ids, mask = (
        torch.tensor([[5, 5, 1, 2, 3], [9, 8, 7, 6, 4]]),
        torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
    )
    eos = generate(target, draft, [[1, 2, 3]], max_new_tokens=9).tokens[0][4]
    expected = target.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=24, eos_token_id=eos, pad_token_id=0
    )
    result = generate(target, draft, ids, attention_mask=mask, max_new_tokens=24, eos_token_id=eos, pad_token_id=0)
    assert result.sequences.tolist() == expected.tolist()
    assert not result.sequences.is_inference()


def test_eos_and_pad_default_to_the_model():
    target, draft = tunable_pair(0.3)
    target = copy.deepcopy(target)
    text = generate(target, draft, [[1, 2, 3]], max_new_tokens=30).tokens[0]
    target.config.eos_token_id = text[6]
    decoder = SpeculativeDecoder(target, draft)
    assert decoder.generate([[1, 2, 3]], max_new_tokens=30).tokens[0] == text[: text.index(text[6]) + 1]
    target.generation_config.eos_token_id = [text[3]]
    target.generation_config.pad_token_id = 55
    result = decoder.generate([[1, 2, 3], [1, 2, 3, text[0], text[1]]], max_new_tokens=30)
    assert result.tokens[0] == text[: text.index(text[3]) + 1]


@pytest.mark.parametrize("new", (0, 1, 2, 5, 6))
def test_max_new_tokens_is_exact(new):
    target, draft = tunable_pair(0.1)
    for num_drafts in (0, 1, 4, 8):
        result = generate(target, draft, prompts(3, 1, 9), num_drafts, max_new_tokens=new)
        assert [len(t) for t in result.tokens] == [new] * 3
        full = generate(target, None, prompts(3, 1, 9), 0, max_new_tokens=9)
        assert result.tokens == [t[:new] for t in full.tokens]
    assert result.sequences.shape[1] >= new


def test_empty_batches():
    target, draft = tunable_pair(0.1)
    assert generate(target, draft, torch.zeros(0, 5, dtype=torch.int64)).sequences.shape == (0, 5)
    result = generate(target, draft, [])
    assert (result.tokens, result.status, result.sequence_stats, result.stats.tau) == ([], [], [], 0.0)


# ---- streaming and counts ----------------------------------------------------------------------------------


def test_stats_show_their_ratios():
    stats = Stats(
        steps=3, emitted=8, drafted_by_position=[3, 3], tested_by_position=[3, 3], accepted_by_position=[3, 2]
    )
    shown = repr(stats)
    assert shown.startswith("Stats(steps=3, ") and "\n" not in shown
    assert {"acceptance_rate=0.8333", "alpha=0.8333", "tau=2.667", "accepted=5"} <= {*shown[6:-1].split(", ")}
    assert shown in repr([stats])


def test_streaming_and_stats_agree_with_the_result():
    target, draft = tunable_pair(0.3)
    ragged, outputs = prompts(5, 1, 20), []
    params = SamplingParams(torch.tensor([0.0, 1.0, 0.5, 0.0, 2.0]))
    eos = generate(target, draft, ragged, max_new_tokens=50, params=params).tokens[1][20]
    result = generate(
        target, draft, ragged, 3, max_new_tokens=50, params=params, eos_token_id=eos, on_emit=outputs.append
    )
    assert all(isinstance(e, Output) and e.tokens for e in outputs)
    for b, stats in enumerate(result.sequence_stats):
        mine = [e for e in outputs if e.number == b]
        assert [t for e in mine for t in e.tokens] == result.tokens[b]
        assert [p for e in mine for p in e.produced_by] == result.produced_by[b]
        assert stats.steps == len(mine) and stats.emitted == len(result.tokens[b])
        assert stats.accepted == result.produced_by[b].count(Producer.ACCEPTED)
        assert stats.target_forwards == stats.steps
        assert stats.seconds == {}
    for stats in (result.stats, *result.sequence_stats):
        assert stats.emitted == stats.accepted + stats.steps - stats.cut_steps
        assert stats.accepted <= stats.tested <= stats.drafted
        by_position = (stats.drafted_by_position, stats.tested_by_position, stats.accepted_by_position)
        assert all(len(counts) == 3 and counts == sorted(counts, reverse=True) for counts in by_position)
        # A draft is tested where the one before it was accepted.
        assert all(t <= a for t, a in zip(by_position[1][1:], by_position[2], strict=False))
    total = result.stats
    for name in ("steps", "emitted", "drafted", "tested", "accepted", "cut_steps"):
        assert getattr(total, name) == sum(getattr(s, name) for s in result.sequence_stats)
    assert total.target_forwards == max(s.steps for s in result.sequence_stats)
    assert set(total.seconds) == {
        "prefill",
        "draft_forwards",
        "target_forwards",
        "kernels",
        "replays",
        "loop",
        "total",
    }
    assert total.seconds["total"] == pytest.approx(sum(total.seconds.values()) / 2)
    assert total.to_dict()["tau"] == total.tau == total.emitted / total.steps


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_the_target_as_its_own_draft_is_always_accepted(temperature):
    target, _ = tunable_pair(0.3)
    params = SamplingParams(temperature)
    stats = generate(target, target, prompts(3, 4, 9), 4, max_new_tokens=25, params=params).stats
    assert stats.alpha == stats.acceptance_rate == 1.0
    assert stats.tau == 5.0 and stats.target_forwards == 5 and stats.draft_forwards == 20


def test_prompts_of_one_token_are_drafted_for_as_any_other():
    """There is no token before theirs, which a draft is fed as well."""
    target, _ = tunable_pair(0.3)
    result = generate(target, target, [[5], [7]], 4, max_new_tokens=10)
    assert result.drafter_error is None and result.stats.alpha == 1.0 and result.stats.tau == 5.0


def test_acceptance_follows_the_draft():
    alphas = [
        generate(*tunable_pair(eps), prompts(8, 4, 9), max_new_tokens=40).stats.alpha for eps in (0.0, 0.1, 0.3, 1.0)
    ]
    assert alphas[0] == 1.0 and alphas == sorted(alphas, reverse=True) and alphas[-1] < 0.5


def test_plain_decoding_counts_bonus_tokens():
    result = generate(tunable_pair(0.3)[0], None, prompts(1, 4, 4), 0, max_new_tokens=7)
    assert result.produced_by == [[Producer.BONUS] * 7]
    assert (result.stats.tau, result.stats.drafted, result.stats.draft_forwards) == (1.0, 0, 0)


def test_memory_does_not_grow_with_steps(monkeypatch):
    """Every cache keeps its storage from its first keys to the last step."""
    seen: dict[int, set] = {}
    write_at = StaticKVCache.write_at

    def spy(self, *arguments, **more):
        for layer in self.layers:
            if layer.is_initialized:
                storage = (
                    layer.keys.data_ptr(),
                    layer.values.data_ptr(),
                    layer.keys.untyped_storage().nbytes(),
                )
                seen.setdefault(id(layer), set()).add(storage)
        write_at(self, *arguments, **more)

    monkeypatch.setattr(StaticKVCache, "write_at", spy)
    result = generate(*tunable_pair(0.3), prompts(2, 4, 9), max_new_tokens=100)
    assert result.stats.target_forwards > 20
    assert len(seen) == 4 + 2 and all(len(storages) == 1 for storages in seen.values())


# ---- drafters and faults -----------------------------------------------------------------------------------


class Scripted(Drafter):
    """A drafter that knows the texts: it proposes ``wrong`` where told to, and the right token elsewhere."""

    def __init__(self, texts: list[list[int]], wrong: dict[int, int]):
        self.texts, self.wrong = texts, wrong

    def start(self, batch: BatchState):
        lengths = [0] * batch.size

        class Session(DraftSession):
            def begin(_, prompts: dict[int, list[int]]) -> None:
                for row, prompt in prompts.items():
                    lengths[row] = len(prompt)

            def propose(_, step: Step) -> Drafts:
                rows = []
                for text, start in zip(self.texts, (step.position - torch.tensor(lengths)).tolist(), strict=False):
                    row = (text + [0] * 50)[start : start + step.num_drafts]
                    rows.append([self.wrong.get(i, token) for i, token in enumerate(row)])
                return Drafts(torch.tensor(rows))

        return Session()


def test_any_drafter_gives_the_same_text():
    target, ragged = tunable_pair(0.3)[0], prompts(3, 2, 9)
    texts = generate(target, None, ragged, 0, max_new_tokens=30).tokens
    for wrong, tau, status in (({}, 5, 0), ({2: -1}, 3, 0), ({0: VOCABULARY}, 1, Status.DRAFT_OUT_OF_RANGE)):
        result = generate(target, Scripted(texts, wrong), ragged, 4, max_new_tokens=30)
        assert result.tokens == texts
        assert result.stats.tau == tau and result.stats.alpha in (0.0, 1.0)
        assert set(result.status) == {Status(status)}
    assert set(itertools.chain(*result.produced_by)) == {Producer.BONUS}


def with_nan_token(model, token: int):
    """Answers NaN from the position of ``token`` on."""
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.embed_tokens.weight[token] = float("nan")
    return broken


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_nan_ends_its_own_sequence_only(temperature):
    target, draft = tunable_pair(0.3)
    ragged, params = prompts(4, 5, 12, seed=8), SamplingParams(temperature)
    unused = next(t for t in range(VOCABULARY) if all(t not in p for p in ragged))
    bad = [*ragged[:2], [1, unused, 3], *ragged[2:]]
    broken = with_nan_token(target, unused)
    result = generate(broken, draft, bad, max_new_tokens=30, params=params)
    assert result.tokens[2] == [] and result.status[2] == Status.TARGET_NAN
    others = [b for b in range(5) if b != 2]
    alone = generate(broken, draft, ragged, max_new_tokens=30, params=params)
    assert [result.tokens[b] for b in others] == alone.tokens
    assert [result.status[b] for b in others] == alone.status
    assert all(stats.emitted == len(t) for stats, t in zip(result.sequence_stats, result.tokens, strict=True))


def test_nan_in_the_middle_keeps_what_was_emitted():
    target, _ = tunable_pair(0.3)
    prompt = prompts(1, 6, 6)[0]
    text = generate(target, None, [prompt], 0, max_new_tokens=30).tokens[0]
    poison = next(i for i, token in enumerate(text) if i >= 8 and text.index(token) == i and token not in prompt)
    broken = with_nan_token(target, text[poison])
    result = generate(broken, None, [prompt, [1]], 0, max_new_tokens=30)
    assert result.tokens[0] == text[: poison + 1] and result.status[0] == Status.TARGET_NAN
    # Attention multiplies what it masks by 0, so a drafted token of NaN reaches all rows of its sequence's
    # forward: the text may end up to K tokens sooner than in plain decoding, never later and never with
    # another token.
    result = generate(broken, target, [prompt, [1]], 4, max_new_tokens=30)
    ended = len(result.tokens[0])
    assert poison + 1 - 4 <= ended <= poison + 1 and result.tokens[0] == text[:ended]
    assert result.status[0] == Status.TARGET_NAN and result.stats.emitted == sum(map(len, result.tokens))


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_nan_drafts_cost_speed_only(temperature):
    target, draft = tunable_pair(0.3)
    ragged, params = prompts(3, 5, 12, seed=8), SamplingParams(temperature)
    unused = next(t for t in range(VOCABULARY) if all(t not in p for p in ragged))
    broken = with_nan_token(draft, unused)
    bad = [ragged[0], [4, unused, 6], *ragged[1:]]
    result = generate(target, broken, bad, max_new_tokens=30, params=params)
    assert result.status[1] & Status.DRAFT_NAN and not result.status[1] & Status.TARGET_NAN
    assert set(result.produced_by[1]) == {Producer.BONUS} and result.sequence_stats[1].drafted == 0
    if temperature == 0:
        assert result.tokens == generate(target, None, bad, 0, max_new_tokens=30).tokens
    assert [len(t) for t in result.tokens] == [30] * 4
