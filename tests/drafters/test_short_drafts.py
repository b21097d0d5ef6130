"""Draft models whose positions end before the text does: they draft as far as they can, and the text goes on."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from specdec import AdaptiveDrafts, Request, Scheduler, SpeculativeDecoder
from specdec.drafters.model import ModelDraftSession, model_drafter
from specdec.drafters.predicted import PredictedDrafter
from specdec.models.cache import kept_cache
from specdec.models.supported import cached_model
from support.models import generate, tiny_model, toy_model, tunable_pair
from support.texts import check_text_distribution

from specdec_kernels import SamplingParams

nightly = functools.partial(pytest.param, marks=pytest.mark.nightly)
END = 24  # positions of the draft
NEW = 30
PROMPTS = [[5, 6, 7], list(range(1, 30)), list(range(1, END)), list(range(3, END + 3)), [8] * (END + 1)]
SETTINGS = {
    "chain": {"num_drafts": 4},
    "adaptive": {"num_drafts": AdaptiveDrafts(costs=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8])},
    "confidence": {"num_drafts": 3, "confidence": 0.3},
    "tree": {"num_drafts": 4, "tree": 9},
}


def shortened(model, positions: int = END):
    model = copy.deepcopy(model)
    model.config.max_position_embeddings = positions
    if hasattr(model.config, "n_positions"):  # which are learned: an index past them is an error
        table = model.transformer.wpe
        model.transformer.wpe = torch.nn.Embedding.from_pretrained(table.weight[:positions].detach())
    return model


@pytest.mark.parametrize("sampled", (False, True))
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", ("llama", "gpt2"))
def test_texts_are_those_of_plain_decoding(kind, name, sampled):
    """Greedy and coupled, by ``generate`` and a scheduler; nothing is drafted past the end, and all that may be."""
    target = tunable_pair(0.1)[0] if kind == "llama" else tiny_model("gpt2")
    draft = shortened(tunable_pair(0.1)[1] if kind == "llama" else target)
    how = {"params": SamplingParams(1.0) if sampled else None, "rule": "coupled"}
    more = {"max_new_tokens": NEW, "eos_token_id": [], "seed": 3, **how}
    plain = SpeculativeDecoder(target, num_drafts=0).generate(PROMPTS, **more)
    decoder = SpeculativeDecoder(target, draft, **SETTINGS[name])
    result = decoder.generate(PROMPTS, **more)
    assert result.tokens == plain.tokens and result.drafter_error is None
    drafted = [stats.drafted for stats in result.sequence_stats]
    assert drafted[0] > 0 and drafted[1] == drafted[4] == 0
    assert drafted[2] <= 3 and drafted[3] <= 1 and (name in ("adaptive", "confidence") or min(drafted[2:4]) > 0)
    scheduler = Scheduler(decoder, rows=2, prefill_chunk=8, rule="coupled")
    requests = [Request(p, NEW, params=how["params"], seed=3, eos_token_id=[]) for p in PROMPTS]
    found = sorted(scheduler.run(requests), key=lambda s: s.number)
    assert [s.tokens for s in found] == plain.tokens
    assert scheduler.max_length == decoder.max_length == 256 and sum(s.stats.drafted for s in found) > 0


@pytest.mark.parametrize("tree", (None, 9))
def test_all_of_a_perfect_draft_is_accepted(tree):
    """Up to its end: what a model drafts from positions that it does not have would be rejected."""
    target = tiny_model("llama")
    result = generate(target, shortened(target), [[5, 6, 7], [8] * (END - 2)], 4, tree=tree, max_new_tokens=NEW)
    assert result.drafter_error is None
    for stats, prompt in zip(result.sequence_stats, (3, END - 2), strict=True):
        assert stats.drafted == stats.accepted and 0.6 * (END - prompt) <= stats.accepted <= END + 1 - prompt


@pytest.mark.parametrize("tree", (None, 6))
def test_its_cache_has_no_slots_past_its_end(tree, monkeypatch):
    made = []
    start = ModelDraftSession.__init__

    def noted(self, *arguments):
        start(self, *arguments)
        made.append(self.cache.capacity)

    monkeypatch.setattr(ModelDraftSession, "__init__", noted)
    monkeypatch.setattr(kept_cache, "ROOMY", 0)
    target, draft = tunable_pair(0.1)
    draft = shortened(draft)
    nodes = 0 if tree is None else 8  # which it looks at to find six
    for long, most in ((100, END + 1 + nodes), (5, 10 + 1 + nodes)):
        generate(target, draft, [[5, 6, 7, 8, 9]], 4, tree=tree, max_new_tokens=long)
        assert made.pop() <= most


@pytest.mark.parametrize("rule, tree", [("token", None), nightly("block", None), nightly("token", 4)])
def test_the_distribution_across_the_end(rule, tree):
    """Two, one and no drafts, by position: the texts of a draft that ends within them are the target's."""
    check_text_distribution(toy_model(1), shortened(toy_model(2), 3), 5_000, rule=rule, tree=tree)


def test_a_text_past_the_end_gives_what_it_shares():
    """A scheduler shows the draft a longer text than it can read, of which a new one has the beginning."""
    target, draft = tunable_pair(0.1)
    decoder = SpeculativeDecoder(target, shortened(draft), num_drafts=3)
    extend, ends = decoder.drafter.model.extend, []

    def noted(cache, texts, *arguments):
        ends.extend(map(len, texts))
        return extend(cache, texts, *arguments)

    decoder.drafter.model.extend = noted
    scheduler = Scheduler(decoder, rows=2, prefill_chunk=4, prefix_reuse="exact")
    long, short = list(range(1, 40)), list(range(1, 18))
    scheduler.submit(Request(long, NEW, eos_token_id=[]))
    for _ in range(12):
        scheduler.step()
    found = next(s for s in scheduler.run([Request(short, 10, eos_token_id=[])]) if s.request.prompt == short)
    assert max(ends) == END and scheduler.batch.session.alive and found.reused and found.stats.drafted > 0
    (alone,) = generate(target, None, [short], 0, max_new_tokens=10, eos_token_id=[]).tokens
    assert found.tokens == alone


def test_beside_predictions():
    """What the drafter is asked for in other rows of the batch than those with a prediction."""
    target, draft = tunable_pair(0.1)
    drafter = PredictedDrafter(model_drafter(shortened(draft), cached_model(target, "target")))
    plain = [generate(target, None, [p], 0, max_new_tokens=NEW, eos_token_id=[]).tokens[0] for p in PROMPTS]
    scheduler = Scheduler(SpeculativeDecoder(target, drafter, num_drafts=4), rows=3)
    requests = [
        Request(p, NEW, eos_token_id=[], prediction=text if i % 2 else None)
        for i, (p, text) in enumerate(zip(PROMPTS, plain, strict=True))
    ]
    assert [s.tokens for s in sorted(scheduler.run(requests), key=lambda s: s.number)] == plain
    assert scheduler.batch.session.alive
