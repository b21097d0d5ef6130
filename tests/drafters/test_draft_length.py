"""K that adapts, in the loop: texts that do not depend on it, a draft that catches up, and what is learned once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from specdec import AdaptiveDrafts, PromptLookupDrafter, Request, Scheduler, SpeculativeDecoder
from specdec.drafters.adaptive_lengths import Learned, SharedLength, learned
from specdec.loop.draft_length import FixedLengths, RowResult
from specdec.drafters.model import ModelDrafter, ModelDraftSession, neighbours
from specdec.loop import batch, saved_costs
from specdec.models.cached_model import CachedModel
from support.models import generate, prompts, tiny_model, tunable_pair

from specdec_kernels import SamplingParams

CHEAP = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8]
DEAR = [1.0, 1.6, 2.2, 2.8, 3.4, 4.0, 4.6, 5.2, 5.8]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_drafts": 0}, "max_drafts: got 0, allowed: an integer >= 1"),
        ({"max_drafts": True}, "max_drafts: got True"),
        ({"max_drafts": 2, "costs": [1, 2]}, r"costs: got \[1, 2\], allowed: 3 numbers > 0 that do not fall"),
        ({"max_drafts": 1, "costs": [2, 1]}, "costs"),
        ({"max_drafts": 1, "costs": [0, 1]}, "costs"),
        ({"max_drafts": 1, "costs": [1, float("inf")]}, "costs"),
        ({"sampled": -1}, "sampled: got -1, allowed: an integer >= 0"),
        ({"max_drafts": 2, "sampled": 3}, "sampled: got 3, allowed: at most max_drafts=2"),
        ({"alone": True}, "alone: got True without costs, allowed: True with costs"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveDrafts(**arguments)


# ---- in the loop -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quality", ["good", "bad"])
@pytest.mark.parametrize("costs", [CHEAP, DEAR], ids=["cheap", "dear"])
def test_texts_depend_on_no_k(quality, costs):
    """Greedy, and coupled: the draft's cache misses the tokens of steps that asked for none, and catches up."""
    target, draft = tunable_pair(0.3)
    draft = draft if quality == "good" else tiny_model("llama", seed=99)
    ragged, adaptive = prompts(3, 1, 9), AdaptiveDrafts(costs=costs)
    more = {"max_new_tokens": 100, "seed": [4, 5, 6]}
    for arguments in (more, {**more, "params": SamplingParams(0.8), "rule": "coupled"}):
        result = generate(target, draft, ragged, adaptive, **arguments)
        assert result.tokens == generate(target, None, ragged, 0, **arguments).tokens
        drafted = [s.drafted for s in result.sequence_stats]
        assert min(drafted) > 0 and result.step_costs == costs
        if quality == "bad" and costs == DEAR:
            assert max(drafted) < 30  # of 100 steps


class Scripted(FixedLengths):
    """K by step and row."""

    def __init__(self, script: Callable[[int, int], int], results: list[RowResult]):
        super().__init__(0)
        self.__dict__.update(script=script, results=results, turn=-1)

    def next(self, drafting: Sequence[int], live: int, *more: object) -> dict[int, int]:
        self.__dict__["turn"] = self.turn + 1
        return {row: self.script(self.turn, row) for row in drafting}

    def record(self, num_drafts: int, results: Sequence[RowResult]) -> None:
        self.results.extend(results)


@pytest.fixture
def script(monkeypatch) -> Callable[[Callable[[int, int], int]], list[RowResult]]:
    """Sets the script. Returns a list of what is recorded."""

    def to(chosen: Callable[[int, int], int]) -> list[RowResult]:
        results: list[RowResult] = []
        monkeypatch.setattr(batch, "_draft_lengths", lambda config: Scripted(chosen, results))
        return results

    return to


GAPS = (0, 0, 3, 1, 0, 5, 0, 0, 0, 2)


@pytest.mark.parametrize("apart", [0, 1], ids=["together", "each_row_its_own"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3", "bloom"])
def test_the_draft_catches_up(kind, apart, script):
    """The target as its own draft: everything is accepted, after whatever gaps, as both know the same text."""
    model = tiny_model(kind)
    script(lambda turn, row: GAPS[(turn + apart * row) % len(GAPS)])
    adaptive = AdaptiveDrafts(max_drafts=5, costs=[1.0] * 6)
    for params in (None, SamplingParams(1.0)):
        result = generate(model, model, prompts(3, 1, 9), adaptive, max_new_tokens=90, params=params)
        assert result.stats.drafted > 30 and result.stats.alpha > 0.999


@pytest.mark.parametrize("deferred", [False, True], ids=["in_time", "deferred"])
def test_the_draft_catches_up_with_sequences_that_come_and_go(deferred, script):
    model = tiny_model("llama")
    script(lambda turn, row: GAPS[turn % len(GAPS)])
    decoder = SpeculativeDecoder(model, model, AdaptiveDrafts(max_drafts=5, costs=[1.0] * 6))
    scheduler = Scheduler(decoder, rows=2, max_length=64, deferred=deferred)
    requests = [Request(p, 11 + 7 * i, eos_token_id=[]) for i, p in enumerate(prompts(6, 1, 9))]
    outcomes = sorted(scheduler.run(requests), key=lambda outcome: outcome.number)
    for request, outcome in zip(requests, outcomes, strict=True):
        alone = generate(model, None, [request.prompt], 0, max_new_tokens=request.max_new_tokens).tokens[0]
        assert outcome.tokens == alone and outcome.stats.accepted == outcome.stats.tested
    assert sum(outcome.stats.drafted for outcome in outcomes) > 40


@pytest.mark.parametrize("deferred", [False, True], ids=["in_time", "deferred"])
def test_what_is_recorded(deferred, script):
    """A sequence that ends has no room for its last drafts; that they were not accepted says nothing of the draft."""
    model = tiny_model("llama")
    results = script(lambda turn, row: 5)
    decoder = SpeculativeDecoder(model, model, AdaptiveDrafts(max_drafts=5, costs=[1.0] * 6))
    scheduler = Scheduler(decoder, rows=2, max_length=40, deferred=deferred)
    list(scheduler.run(Request(p, 9 + i, eos_token_id=[]) for i, p in enumerate(prompts(5, 1, 9))))
    assert sum(r.emitted for r in results) == 9 + 10 + 11 + 12 + 13 and sum(r.ended for r in results) == 5
    assert all(r.accepted == r.asked == r.emitted - 1 for r in results) and {r.asked for r in results} > {5}


def fed(monkeypatch, model: CachedModel) -> list[tuple[int, int]]:
    """The shapes [rows, tokens] that the model is fed from now on."""
    shapes, run = [], model._run

    def spy(forward, tokens, *others):
        shapes.append(tuple(tokens.shape))
        return run(forward, tokens, *others)

    monkeypatch.setattr(model, "_run", spy)
    return shapes


def test_plain_steps_do_not_touch_the_draft(script, monkeypatch):
    """Not even for prompts."""
    target, draft = tunable_pair(0.3)
    script(lambda turn, row: 0)
    decoder = SpeculativeDecoder(target, draft, AdaptiveDrafts(costs=CHEAP))
    shapes = fed(monkeypatch, decoder.drafter.model)
    result = decoder.generate(prompts(3, 4, 9), max_new_tokens=20, eos_token_id=[])
    assert set(shapes) <= {(1, 1)} and result.stats.draft_forwards == 0  # which finds out what a slot takes
    assert result.stats.target_forwards == 20


def test_the_draft_catches_up_in_one_forward(script, monkeypatch):
    target, draft = tunable_pair(0.3)
    script(lambda turn, row: 2 * (turn >= 20))
    decoder = SpeculativeDecoder(target, draft, AdaptiveDrafts(costs=CHEAP))
    shapes = fed(monkeypatch, decoder.drafter.model)
    decoder.generate([[1] * 5, [2] * 9, [3] * 7], max_new_tokens=40, eos_token_id=[])
    drafting = [shape for shape in shapes if shape != (1, 1)]
    assert drafting[0] == (3, 9 + 20 - 2) and set(drafting[1:]) == {(3, 2), (3, 1)}


def test_neighbours():
    assert neighbours([]) == [] and neighbours({3: 0, 1: 0, 2: 0, 7: 0}) == [[1, 2, 3], [7]]


def test_a_drafter_that_fails_to_catch_up_costs_one_row_its_drafts(script, monkeypatch):
    target, draft = tunable_pair(0.3)
    script(lambda turn, row: 2 * (turn >= 5))
    decoder = SpeculativeDecoder(target, draft, AdaptiveDrafts(costs=CHEAP))
    extend = decoder.drafter.model.extend

    def fails(cache, texts, *others):
        if any(text[:1] == [7] for text in texts):
            raise RuntimeError("this text")
        extend(cache, texts, *others)

    monkeypatch.setattr(decoder.drafter.model, "extend", fails)
    scheduler = Scheduler(decoder, rows=3, max_length=40)
    requests = [Request([7 * (i == 1), 3, 4], 20, eos_token_id=[]) for i in range(3)]
    outcomes = sorted(scheduler.run(requests), key=lambda outcome: outcome.number)
    assert [outcome.stats.drafted > 0 for outcome in outcomes] == [True, False, True]
    assert outcomes[1].drafter_error == "RuntimeError: this text"
    for request, outcome in zip(requests, outcomes, strict=True):
        assert outcome.tokens == generate(target, None, [request.prompt], 0, max_new_tokens=20).tokens[0]


def test_a_sequence_alone_has_the_same_text_in_any_company():
    """Rule ``token``: K shapes the text, and K is the sequence's own."""
    target, draft = tunable_pair(0.3)
    ragged, adaptive = prompts(4, 3, 9), AdaptiveDrafts(costs=CHEAP, alone=True)
    arguments = {"max_new_tokens": 60, "params": SamplingParams(1.0)}
    together = generate(target, draft, ragged, adaptive, seed=[1, 2, 3, 4], **arguments)
    for b, prompt in enumerate(ragged):
        assert generate(target, draft, [prompt], adaptive, seed=b + 1, **arguments).tokens[0] == together.tokens[b]
    shared = generate(target, draft, ragged, AdaptiveDrafts(costs=CHEAP), seed=[1, 2, 3, 4], **arguments)
    assert shared.tokens != together.tokens


def test_by_default_k_is_chosen_only_where_no_text_depends_on_it():
    target, draft = tunable_pair(0.3)
    for params, rule, chosen in (
        (None, "token", True),
        (SamplingParams(0.9), "coupled", True),
        (SamplingParams(0.9), "token", False),
        (SamplingParams(0.9), "block", False),
    ):
        decoder, more = SpeculativeDecoder(target, draft), {"max_new_tokens": 60, "params": params, "rule": rule}
        result = decoder.generate(prompts(3, 4, 9), seed=[1, 2, 3], eos_token_id=[], **more)
        fixed = generate(target, draft, prompts(3, 4, 9), 0 if chosen else 4, seed=[1, 2, 3], **more)
        assert result.tokens == fixed.tokens
        taken = result.stats.steps_by_drafts
        assert (decoder.costs_of(3) is not None) == chosen and (taken[0] > 2) == chosen
        assert chosen or taken[4] > 3 * sum(taken[:4]) and sum(taken[5:]) == 0  # fewer than 4 where a text ends


def test_by_default_a_sampled_text_is_the_same_in_any_company():
    """Greedy rows come and go beside it, with K of their own choice when they are alone."""
    target, draft = tunable_pair(0.3)
    sampled = {"max_new_tokens": 40, "params": SamplingParams(0.9), "eos_token_id": []}
    alone = generate(target, draft, [[5, 6, 7]], 4, seed=8, **sampled).tokens[0]
    scheduler = Scheduler(SpeculativeDecoder(target, draft), rows=3, max_length=80)
    greedy = [Request(p, 11 + 9 * i, eos_token_id=[]) for i, p in enumerate(prompts(6, 1, 9))]
    requests = [*greedy, Request([5, 6, 7], seed=8, id="sampled", **sampled), *greedy]
    outcomes = {outcome.number: outcome for outcome in scheduler.run(requests)}
    assert outcomes[6].tokens == alone
    for number, request in enumerate(requests):
        if request.id is None:
            plain = generate(target, None, [request.prompt], 0, max_new_tokens=request.max_new_tokens).tokens[0]
            assert outcomes[number].tokens == plain
    taken = [outcomes[number].stats.steps_by_drafts for number in (0, 6)]
    assert taken[0][0] > 0 and sum(taken[1][:4]) <= 1 and sum(taken[1][5:]) == 0


def test_step_times_are_learned_once_for_a_batch_size():
    target, draft = tunable_pair(0.3)
    decoder = SpeculativeDecoder(target, draft, AdaptiveDrafts(max_drafts=3))
    arguments = {"max_new_tokens": 60, "eos_token_id": []}
    assert decoder.costs_of(2) is None
    first = decoder.generate(prompts(2, 3, 5), **arguments)
    assert first.tokens == generate(target, None, prompts(2, 3, 5), 0, max_new_tokens=60).tokens
    assert first.step_costs == decoder.costs_of(2) and len(first.step_costs) == 4 and first.step_costs[0] == 1.0
    assert first.step_costs == sorted(first.step_costs) and decoder.costs_of(3) is None
    assert first.stats.target_forwards == max(s.steps for s in first.sequence_stats)  # no step is there to be timed
    known = decoder.batch_config(2, 64, batch.Rule.TOKEN, 0, 1).learned(2)
    assert known.times.missing is None
    scheduler = Scheduler(decoder, rows=2, max_length=64)
    assert scheduler.batch.config.learned(2) is known
    assert generate(target, draft, prompts(2, 3, 5), 3, max_new_tokens=5).step_costs is None


def test_how_often_which_k_was_taken(script):
    target, draft = tunable_pair(0.3)
    script(lambda turn, row: (0, 2, 5)[turn % 3])
    result = generate(target, draft, prompts(1, 3, 5), AdaptiveDrafts(costs=CHEAP), max_new_tokens=60)
    taken = result.stats.steps_by_drafts
    assert len(taken) == 9 and sum(taken) == result.stats.steps and sum(taken[k] for k in (0, 2, 5)) >= sum(taken) - 2
    assert sum(k * count for k, count in enumerate(taken)) == result.stats.drafted
    assert result.stats.to_dict()["steps_by_drafts"] == taken


# ---- drafts that stop where the draft is not sure ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "threshold"), [(None, 0.15), (SamplingParams(1.0), 0.03)], ids=["greedy", "sampled"]
)
def test_an_unsure_draft_is_the_last_of_its_step(params, threshold, monkeypatch):
    """Every draft but a step's last is at least that likely, and a step that is not full ends with one that is not."""
    target, draft = tunable_pair(0.3)
    seen = []

    def spy(self, step):
        drafts = plain(self, step)
        for b, tokens in enumerate(drafts.tokens.tolist()):
            made = list(itertools.takewhile(lambda t: t >= 0, tokens))[: step.allowed[b]]
            ids = torch.tensor([[*step.texts[b], *made]])
            distribution = draft(ids).logits[0, -len(made) - 1 : -1].softmax(-1)
            seen.append(([distribution[i, t].item() for i, t in enumerate(made)], step.allowed[b]))
        return drafts

    plain = ModelDraftSession.draft
    monkeypatch.setattr(ModelDraftSession, "draft", spy)
    decoder = SpeculativeDecoder(target, draft, 6, confidence=threshold)
    result = decoder.generate(prompts(2, 4, 9), max_new_tokens=60, params=params, eos_token_id=[])
    assert all(q >= threshold - 1e-4 for likely, _ in seen for q in likely[:-1])
    short = [(likely, allowed) for likely, allowed in seen if likely and len(likely) < allowed]
    assert len(short) > 5 and all(likely[-1] < threshold + 1e-4 for likely, _ in short)
    assert any(len(likely) > 2 for likely, _ in seen)
    assert result.stats.drafted == sum(len(likely) for likely, _ in seen)
    if params is None:
        assert result.tokens == generate(target, None, prompts(2, 4, 9), 0, max_new_tokens=60).tokens


def test_confidence_saves_draft_forwards():
    target, draft = tunable_pair(1.0)
    arguments = {"max_new_tokens": 60, "eos_token_id": []}
    all_drafts, sure_ones = (
        SpeculativeDecoder(target, draft, 6, confidence=c).generate(prompts(1, 4, 9), **arguments).stats
        for c in (0.0, 0.9)
    )
    assert sure_ones.draft_forwards < all_drafts.draft_forwards / 2 and sure_ones.alpha >= all_drafts.alpha
    assert ModelDrafter(CachedModel(draft)).confidence == 0.0


# ---- step times in a file ---------------------------------------------------------------------------------------


def adaptive_decoder(eps: float = 0.3, **more) -> SpeculativeDecoder:
    return SpeculativeDecoder(*tunable_pair(eps), AdaptiveDrafts(max_drafts=3), **more)


def test_step_times_go_to_another_process(tmp_path):
    first, path = adaptive_decoder(), tmp_path / "costs.json"
    assert not first.load_costs(path)  # no file yet
    first.generate(prompts(2, 3, 5), max_new_tokens=60, eos_token_id=[])
    first.save_costs(path)
    second = adaptive_decoder()
    assert second.load_costs(path) and second.costs_of(2) == first.costs_of(2) and second.costs_of(1) is None
    second.generate(prompts(1, 3, 5), max_new_tokens=60, eos_token_id=[])
    second.save_costs(path)  # adds
    third = adaptive_decoder()
    third.load_costs(path)
    assert third.costs_of(1) == second.costs_of(1) and third.costs_of(2) == first.costs_of(2)
    assert len(third.costs_of(2)) == 4
    other = adaptive_decoder()
    other.generate(prompts(3, 3, 5), max_new_tokens=60, eos_token_id=[])
    other.save_costs(path)
    assert adaptive_decoder_from(path).costs_of(2) == first.costs_of(2)  # still there
    known = second.costs_of(2)
    path.write_text(path.read_text().replace('"0": ', '"0": 1'))  # times without drafts become other ones
    assert second.load_costs(path) and second.costs_of(2) == known != adaptive_decoder_from(path).costs_of(2)


def adaptive_decoder_from(path) -> SpeculativeDecoder:
    decoder = adaptive_decoder()
    decoder.load_costs(path)
    return decoder


def test_step_times_of_something_else_are_not_taken(tmp_path, monkeypatch):
    path, first = tmp_path / "costs.json", adaptive_decoder()
    first.generate(prompts(2, 3, 5), max_new_tokens=60, eos_token_id=[])
    first.save_costs(path)
    target, draft = tunable_pair(0.3)
    others = {
        "another draft": SpeculativeDecoder(target, tiny_model("gpt2"), AdaptiveDrafts(max_drafts=3)),
        "no draft model": SpeculativeDecoder(target, PromptLookupDrafter(), AdaptiveDrafts(max_drafts=3)),
        "no drafter": SpeculativeDecoder(target, None, AdaptiveDrafts(max_drafts=3)),
        "another backend": adaptive_decoder(backend="reference"),
        "another dtype of the cache": adaptive_decoder(cache_dtype=torch.bfloat16),
    }
    for what, other in others.items():
        assert not other.load_costs(path), what
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert not adaptive_decoder().load_costs(path)


@pytest.mark.parametrize("content", ["", "[]", '{"format": "abacus"}', '{"format": "specdec step times 1"}'])
def test_another_file_is_neither_read_nor_overwritten(tmp_path, content):
    path, decoder = tmp_path / "notes.json", adaptive_decoder()
    path.write_text(content)
    for call in (decoder.load_costs, decoder.save_costs):
        with pytest.raises(ValueError, match=r"path: got '.*notes.json' \(.*\), allowed: a file that save_costs wrote"):
            call(path)
    assert path.read_text() == content


def test_given_costs_are_not_loaded_over(tmp_path):
    decoder = SpeculativeDecoder(*tunable_pair(0.3), AdaptiveDrafts(costs=CHEAP))
    with pytest.raises(ValueError, match="load_costs: got num_drafts=AdaptiveDrafts.*, allowed: AdaptiveDrafts"):
        decoder.load_costs(tmp_path / "costs.json")


# ---- K of sampled texts as a function of a file


def with_costs(path, eps: float = 0.3) -> SpeculativeDecoder:
    decoder = SpeculativeDecoder(*tunable_pair(eps), AdaptiveDrafts(sampled=4))
    assert decoder.load_costs(path, sampled=True)
    return decoder


@pytest.fixture
def cheap_file(tmp_path):
    path = tmp_path / "costs.json"
    SpeculativeDecoder(*tunable_pair(0.3)).save_costs(path, {1: {k: cost / 100 for k, cost in enumerate(CHEAP)}})
    return path


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_sampled_text_is_a_function_of_file_and_seed(cheap_file, rule):
    """Whatever was measured before, and in any company, that of greedy rows, too."""
    arguments = {"max_new_tokens": 50, "eos_token_id": [], "rule": rule}
    ragged, sampled = prompts(3, 3, 9), {"params": SamplingParams(1.0), **arguments}
    first = with_costs(cheap_file)
    alone = [first.generate([p], seed=b, **sampled).tokens[0] for b, p in enumerate(ragged)]
    second = with_costs(cheap_file)
    second.generate([[5, 6, 7]], **arguments)  # measures steps of greedy texts
    second._learned_of(1).times.took(8, 100.0)
    assert second.generate(ragged, seed=[0, 1, 2], **sampled).tokens == alone
    mixed = SamplingParams(torch.tensor([1.0, 0.0, 1.0]))
    result = second.generate(ragged, seed=[0, 1, 2], params=mixed, **arguments)
    assert [result.tokens[0], result.tokens[2]] == [alone[0], alone[2]]
    assert result.tokens[1] == generate(tunable_pair(0.3)[0], None, [ragged[1]], 0, max_new_tokens=50).tokens[0]
    taken = first.generate([ragged[0]], seed=0, **sampled).stats.steps_by_drafts
    assert sum(count > 0 for count in taken) > 2  # K adapts
    fixed = generate(*tunable_pair(0.3), ragged, 4, seed=[0, 1, 2], **sampled)
    assert fixed.tokens != alone  # a K of 4 makes other texts


def test_a_sampled_text_does_not_depend_on_the_one_before_in_its_row(cheap_file):
    sampled = {"max_new_tokens": 30, "params": SamplingParams(1.0), "eos_token_id": []}
    expected = [with_costs(cheap_file).generate([[5, 6, 7]], seed=s, **sampled).tokens[0] for s in (1, 2, 3)]
    scheduler = Scheduler(with_costs(cheap_file), rows=1, max_length=60)
    outcomes = scheduler.run([Request([5, 6, 7], seed=s, **sampled) for s in (1, 2, 3)])
    assert [o.tokens for o in sorted(outcomes, key=lambda o: o.number)] == expected


def test_the_k_of_a_sampled_text_follows_its_acceptance(tmp_path):
    rates = {}
    for eps in (0.0, 4.0):
        path, decoder = tmp_path / f"{eps}.json", SpeculativeDecoder(*tunable_pair(eps))
        decoder.save_costs(path, {1: {k: 1.0 + k / 4 for k in range(9)}})
        stats = with_costs(path, eps).generate([[5, 6, 7]], None, 60, SamplingParams(1.0), eos_token_id=[]).stats
        rates[eps] = stats.drafted / stats.steps
    assert rates[0.0] > 4 > 2 > rates[4.0]


def test_given_costs_are_not_corrected_by_what_is_measured():
    measured, given = (
        SharedLength(known, 1) for known in (Learned(range(9), CHEAP), learned(AdaptiveDrafts(costs=CHEAP), False))
    )
    for lengths in (measured, given):
        lengths.begin(0)
        lengths.took(0, 1.0)
        lengths.caught_up(50.0)
    assert measured.learned.reading() > 0 and measured.learned.balance < 0
    assert given.learned.reading() == 0 and given.learned.balance == 0 and given.learned.times.seconds_plain is None


def test_costs_of_sampled_texts_are_checked():
    for bad in ([1.0, 2.0], [2.0] + [1.0] * 8, "12345678"):
        with pytest.raises(ValueError, match="^sampled: got"):
            AdaptiveDrafts(sampled=bad)


def test_times_of_any_cpu_come_after_those_of_this_one(tmp_path):
    path, decoder = tmp_path / "costs.json", adaptive_decoder()
    anywhere = saved_costs.described_anywhere(decoder.target, decoder.drafter, 0)
    saved_costs.save(path, anywhere, {1: {0: 1.0, 1: 1.5, 2: 1.75, 3: 2.0}})
    assert decoder.load_costs(path, sampled=True) and decoder.num_drafts.sampled == (1.0, 1.5, 1.75, 2.0)
    decoder.save_costs(path, {1: {0: 1.0, 1: 3.0, 2: 4.0, 3: 5.0}})
    other = adaptive_decoder()
    assert other.load_costs(path, sampled=True) and other.num_drafts.sampled == (1.0, 3.0, 4.0, 5.0)
    without_one_row = adaptive_decoder(cache_dtype=torch.bfloat16)
    without_one_row.save_costs(path, {2: {0: 1.0, 1: 3.0, 2: 4.0, 3: 5.0}})
    assert without_one_row.load_costs(path, sampled=True) and without_one_row.num_drafts.sampled is None
