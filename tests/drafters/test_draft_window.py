"""Draft models that see the first tokens of a text and a window of its last ones."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from specdec import AdaptiveDrafts, Composite, Request, Scheduler, SpeculativeDecoder, SuffixDrafter
from specdec.drafters.draft_window import SINKS, DraftWindow, WindowedRows
from specdec.drafters.model import ModelDraftSession, model_drafter
from specdec.drafters.predicted import PredictedDrafter
from specdec.models.cache.dropped import Dropped
from specdec.models.supported import cached_model
from support.model_types import model_of
from support.models import TYPES, generate, prompts, tiny_model, toy_model, tunable_pair
from support.texts import check_text_distribution

from specdec_kernels import SamplingParams

nightly = functools.partial(pytest.param, marks=pytest.mark.nightly)
NEW = 40
K = 3
PROMPTS = prompts(5, 2, 90)
SETTINGS = {
    "chain": {"num_drafts": 4},
    "adaptive": {"num_drafts": AdaptiveDrafts(4, costs=[1.0, 1.01, 1.02, 1.03, 1.04])},
    "at times": {"num_drafts": AdaptiveDrafts(4, costs=[1.0, 1.6, 2.2, 2.8, 3.4])},
    "confidence": {"num_drafts": 3, "confidence": 0.3},
}


def windowed(target, draft, window: int):
    return model_drafter(draft, cached_model(target, "target"), draft_window=window)


def seen_of(text: list[int], known: int, window: int) -> tuple[list[int], list[int]]:
    """The tokens of ``text`` that are seen in a step with so many ``known`` tokens, and their positions."""
    first = SINKS
    while known - first > window:
        first += max(window // 8, 1)
    places = [*range(min(SINKS, len(text))), *range(first, len(text))]
    return [text[i] for i in places], places


@pytest.mark.parametrize("kind, layers, most", [("llama", 1, NEW), ("gpt2", 1, NEW), ("llama", 2, 1), ("qwen3", 2, 1)])
@torch.inference_mode()
def test_q_is_that_of_the_first_and_the_last_tokens(kind, layers, most, monkeypatch):
    """As transformers computes it, with the positions of the text: after rejections, in rows of different lengths, and
    while the window moves. Keys of a second layer are from tokens that saw what is dropped by now, so of two layers it
    is the first step that is compared."""
    target, draft, window = tiny_model(kind, 1, layers), tiny_model(kind, 0, layers), 16
    steps, propose = [], ModelDraftSession.propose

    def noted(self, step):
        texts = [list(text) for text in step.texts]
        steps.append((texts, step.allowed_on_device.tolist(), drafts := propose(self, step)))
        return drafts

    monkeypatch.setattr(ModelDraftSession, "propose", noted)
    decoder = SpeculativeDecoder(target, draft, K, draft_window=window)
    result = decoder.generate(
        PROMPTS, max_new_tokens=NEW, params=SamplingParams(1.5), seed=list(range(5)), eos_token_id=[]
    )
    assert result.drafter_error is None and 0 < result.stats.accepted < result.stats.drafted
    compared = 0
    for texts, allowed, drafts in steps[:most]:
        for row, text in enumerate(texts):
            for i in range(allowed[row]):
                fed, positions = seen_of([*text, *drafts.tokens[row, :i].tolist()], len(text), window)
                assert len(text) <= SINKS + window or 7 / 8 * window <= len(fed) - i - SINKS <= window
                plain = draft(torch.tensor([fed]), position_ids=torch.tensor([positions])).logits[0, -1]
                torch.testing.assert_close(drafts.logits[row, i], plain, atol=2e-4, rtol=1e-3)
                compared += positions[-1] >= len(positions)
    assert compared > most


@pytest.mark.parametrize("sampled", (False, nightly(True)))
@pytest.mark.parametrize(
    "name, window", [("chain", 20), ("at times", 2), *(nightly(*each) for each in itertools.product(SETTINGS, (3, 16)))]
)
def test_texts_are_those_of_plain_decoding(name, window, sampled):
    """Greedy and coupled, by ``generate`` and by a scheduler, which gives rows of long texts to short ones."""
    target, draft = tunable_pair(0.1)
    how = {"params": SamplingParams(1.0) if sampled else None, "rule": "coupled"}
    more = {"max_new_tokens": NEW, "eos_token_id": [], "seed": 3, **how}
    plain = SpeculativeDecoder(target, num_drafts=0).generate(PROMPTS, **more)
    decoder = SpeculativeDecoder(target, draft, draft_window=window, **SETTINGS[name])
    result = decoder.generate(PROMPTS, **more)
    assert result.tokens == plain.tokens and result.drafter_error is None and result.stats.drafted > 0
    for more in ({}, {"prefix_reuse": "exact"}, {"async_scheduling": True, "prefix_reuse": "rounding"}):
        scheduler = Scheduler(decoder, rows=2, prefill_chunk=8, rule="coupled", **more)
        asked = [Request(p, NEW, params=how["params"], seed=3, eos_token_id=[]) for p in (*PROMPTS, *PROMPTS)]
        found = sorted(scheduler.run(asked), key=lambda s: s.number)
        assert [s.tokens for s in found] == plain.tokens * 2 and scheduler.batch.session.alive
        assert name == "at times" or sum(s.stats.drafted for s in found) > 0


def test_what_is_drafted_depends_on_the_text_alone():
    """Sampled by rule ``token``, where a text is that of its drafts: alone, beside others, in a scheduler, and over a
    cache that was kept from another text."""
    target, draft = tunable_pair(0.3)
    more = {"params": SamplingParams(1.0), "max_new_tokens": NEW, "eos_token_id": []}
    decoder = SpeculativeDecoder(target, draft, K, draft_window=16)
    together = decoder.generate(PROMPTS, seed=7, **more)
    alone = [decoder.generate([p], seed=7, **more) for p in PROMPTS]
    assert [r.tokens[0] for r in alone] == together.tokens
    whole = SpeculativeDecoder(target, draft, K).generate(PROMPTS, seed=7, **more)
    assert whole.tokens != together.tokens and together.stats.accepted > 0
    scheduler = Scheduler(decoder, rows=2, prefill_chunk=8, prefix_reuse="exact")
    asked = [Request(p, NEW, params=more["params"], seed=7, eos_token_id=[]) for p in PROMPTS for _ in range(2)]
    found = sorted(scheduler.run(asked), key=lambda s: s.number)
    assert [s.tokens for s in found] == [text for text in together.tokens for _ in range(2)]
    assert any(s.reused for s in found)


def test_a_window_as_long_as_the_text_changes_nothing():
    target, draft = tunable_pair(0.3)
    more = {"params": SamplingParams(1.0), "max_new_tokens": NEW, "seed": 5}
    whole, wide = (generate(target, drafter, PROMPTS, K, **more) for drafter in (draft, windowed(target, draft, 200)))
    assert whole.tokens == wide.tokens and whole.stats.accepted == wide.stats.accepted


@pytest.mark.parametrize("rule", ("token", "block", nightly("coupled")))
def test_the_distribution_of_texts(rule):
    """The window moves within the text, by one token in each step or more."""
    target = toy_model(1)
    prompt = [1, 2, 0, 3, 4, 4, 1]
    check_text_distribution(target, windowed(target, toy_model(2), 2), 20_000, prompt=prompt, rule=rule)


@pytest.mark.parametrize("drafter", ("suffix", "predicted"))
def test_beside_drafters_that_leave_it_some_rows(drafter):
    target, draft = tunable_pair(0.1)
    repeats = [[*range(1, 9)] * 6, *PROMPTS]
    plain = generate(target, None, repeats, 0, max_new_tokens=NEW)
    model = windowed(target, draft, 16)
    beside = PredictedDrafter(model) if drafter == "predicted" else Composite([SuffixDrafter(), model])
    scheduler = Scheduler(SpeculativeDecoder(target, beside, K), rows=3, prefill_chunk=16)
    asked = [
        Request(p, NEW, eos_token_id=[], prediction=text if drafter == "predicted" and i % 2 else None)
        for i, (p, text) in enumerate(zip(repeats, plain.tokens, strict=True))
    ]
    found = sorted(scheduler.run(asked), key=lambda s: s.number)
    assert [s.tokens for s in found] == plain.tokens and scheduler.batch.session.alive
    assert sum(s.stats.draft_forwards for s in found) > 0


def test_its_positions_still_end_before_the_text_may():
    target, draft = tiny_model("gpt2", 1), tiny_model("gpt2")
    drafter = windowed(target, draft, 8)
    drafter.max_length = drafter.model.max_length = 24
    drafter.model.model = draft
    result = generate(target, drafter, [list(range(1, 15)), list(range(1, 40))], 4, max_new_tokens=NEW)
    plain = generate(target, None, [list(range(1, 15)), list(range(1, 40))], 0, max_new_tokens=NEW)
    assert result.tokens == plain.tokens and result.drafter_error is None
    first, second = result.sequence_stats
    assert first.drafted > 0 and second.drafted == 0


def test_memory_and_reading_are_bounded(monkeypatch):
    """Slots and bytes do not grow with the text, and a prompt's middle is not read."""
    target, draft = tunable_pair(0.1)
    window, made, fed = 16, [], []
    start = ModelDraftSession.__init__

    def noted(self, *arguments):
        start(self, *arguments)
        made.append(self.cache)

    monkeypatch.setattr(ModelDraftSession, "__init__", noted)
    decoder = SpeculativeDecoder(target, draft, K, draft_window=window)
    extend, model = decoder.drafter.model.extend, decoder.drafter.model
    monkeypatch.setattr(model, "extend", lambda c, texts, *more: fed.extend(map(len, texts)) or extend(c, texts, *more))
    decoder.generate([[5] * 200], max_new_tokens=20, eos_token_id=[])
    assert made[0].capacity == SINKS + window + K + 1
    assert fed == [1, SINKS + window - 2]  # one token to find out what a slot takes
    short, long = (decoder.plan_caches(2, length) for length in (50, 250))
    each = (long.bytes - short.bytes) / (long.slots - short.slots)
    assert each == decoder.target.slot_bytes()
    assert long.bytes - long.slots * each == 2 * made[0].capacity * model.slot_bytes()


def test_what_stays_is_moved_to_where_it_belongs():
    dropped = Dropped(2, 2, torch.device("cpu"))
    states = torch.arange(2 * 8).view(2, 1, 8, 1).clone()
    dropped.drop({0: 0, 1: 3}, [states])
    assert states[0].flatten().tolist() == [*range(8)] and states[1].flatten().tolist()[:5] == [8, 9, 13, 14, 15]
    places = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]])
    positions = dropped.positions(places)
    assert positions.tolist() == [[0, 1, 2, 3], [0, 1, 5, 6]] and torch.equal(dropped.places(positions), places)
    assert torch.equal(dropped.positions(places[1:], 1), positions[1:])
    dropped.drop({1: 4}, [states])
    assert states[1].flatten().tolist()[:4] == [8, 9, 14, 15]


@pytest.mark.parametrize(
    "kind, more, why",
    [
        ("gemma3", {}, "has sliding windows of its own"),
        ("bloom", {}, "takes its positions from a 2-D mask"),
        ("qwen3_5_text", {}, "has recurrent layers"),
        ("llama", {"tree": 6}, "tree=6"),
    ],
)
def test_what_has_no_window_is_refused(kind, more, why):
    model = tiny_model(kind) if kind in TYPES else model_of(kind)
    with pytest.raises(ValueError, match=f"draft_window: got 16 with .*{why}, allowed: None"):
        SpeculativeDecoder(model, model, K, draft_window=16, **more)


@pytest.mark.parametrize("window", (1, 0, -3, True, 2.5))
def test_a_size_that_is_none_is_refused(window):
    target, draft = tunable_pair(0.1)
    with pytest.raises(ValueError, match="draft_window: got .*, allowed: an integer >= 2"):
        SpeculativeDecoder(target, draft, draft_window=window)


def test_only_a_model_has_one():
    target, _ = tunable_pair(0.1)
    for drafter in (None, SuffixDrafter()):
        with pytest.raises(ValueError, match="draft_window: got a value with draft=.*, allowed: one with a model"):
            SpeculativeDecoder(target, drafter, draft_window=16)


def test_a_row_that_missed_tokens_reads_those_that_are_seen():
    window, text = DraftWindow(16), list(range(100))
    cache = cached_model(tiny_model("llama"), "draft").new_cache(1, window.tokens(K) + 1)
    rows = WindowedRows(window, cache, 200)
    rows.move({0: text[:40]})
    rows.move({0: text[:60]})
    seen = text[:SINKS] + text[SINKS + 40 : 58]
    # Up to a token in the window, in what is dropped, and among the first.
    assert [rows.seen(0, text[:58], start) for start in (50, 30, 3)] == [(seen, 10), (seen, SINKS), (seen, 3)]
