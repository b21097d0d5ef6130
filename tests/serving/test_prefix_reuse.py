"""What a prompt takes over of earlier texts changes nothing but the time: texts, log-probabilities and drafts are those
of a scheduler that reads every prompt, to the last bit. Bugs that others had are planted in ``tests/mutations/``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from specdec import (
    AdaptiveDrafts,
    EarlyExitDrafter,
    FinishReason,
    PromptLookupDrafter,
    Request,
    Scheduler,
    SequenceState,
    SpeculativeDecoder,
    SuffixDrafter,
    load_head,
)
from specdec.drafters.predicted import PredictedDrafter
from support.allocations import masked
from support.crowds import Processor, Stop
from support.heads import V, exact_eagle3, exact_medusa, predictable_target, random_head, write
from support.model_types import model_of
from support.models import VOCABULARY, prompts, tiny_model, tunable_pair

from specdec_kernels import SamplingParams

ROWS, MAX_LENGTH, TURNS, NEW = 4, 64, 3, 5


class Told(NamedTuple):
    """All that must not depend on what was reused. Floats are compared to the last bit."""

    tokens: list[int]
    log_probs: list[float] | None
    raw_log_probs: list[float] | None
    produced_by: list
    drafts: list  # of each step; None for a tree
    drafted: int


def decode(scheduler: Scheduler, requests: Sequence[Request]) -> tuple[list[Told], list[SequenceState]]:
    """Decodes them side by side. Checks that no drafter was dropped."""
    numbers, drafts, ended = [scheduler.submit(request) for request in requests], {}, {}
    while not scheduler.idle:
        for output in scheduler.step():
            drafts.setdefault(output.number, []).append(output.drafts)
            if output.finish_reason is not None:
                ended[output.number] = output.sequence
    assert scheduler.drafter_error is None
    sequences = [ended[number] for number in numbers]
    told = [
        Told(s.tokens, s.log_probs, s.raw_log_probs, s.produced_by, drafts[s.number], s.stats.drafted)
        for s in sequences
    ]
    return told, sequences


def asked(prompt: list[int], new: int = NEW, **settings) -> Request:
    return Request(prompt, new, **{"eos_token_id": [], "log_probs": True, "report_drafts": True, **settings})


def talk(scheduler: Scheduler, vocabulary: int = VOCABULARY, turns: int = TURNS, between=lambda: None, **settings):
    """Three conversations side by side, of which two have the same system prompt."""
    first, second = (prompts(1, n, n, seed=n)[0] for n in (9, 6))
    texts = [first + [7, 8, 9], first + [11], second]
    told, reused = [], []
    for turn in range(turns):
        texts = [[token % vocabulary for token in text] for text in texts]
        requests = [asked(text, seed=10 * turn + i, **settings) for i, text in enumerate(texts)]
        more, sequences = decode(scheduler, requests)
        told.append(more)
        reused.append([s.reused for s in sequences])
        new = prompts(3, 3, 6, seed=turn)
        texts = [s.text + own for s, own in zip(sequences, new, strict=True)]
        between()
    return told, reused


def parts_of(model) -> list[tuple[int, tuple[int, ...]]]:
    """Records where each part that ``model`` reads begins, and the text up to its end."""
    parts, extend = [], model.extend

    def counted(cache, sequences, starts, *more):
        assert len(sequences) == 1
        parts.append((starts[0], tuple(sequences[0])))
        extend(cache, sequences, starts, *more)

    model.extend = counted
    return parts


def read(parts) -> int:
    return sum(len(text) - start for start, text in parts)


@torch.inference_mode()
def spoil(scheduler: Scheduler) -> None:
    """Whatever free rows hold, and nobody may take over, becomes NaN."""
    batch = scheduler.batch
    held = [batch.prompts.prefixes._held(row) for row in range(len(batch.sequences))]
    caches = [(batch.state.target_cache, held)]
    session = None if batch.session is None else batch.session._session
    session = getattr(session, "other", session)
    if (parts := getattr(session, "parts", None)) is not None and session.cache is not batch.state.target_cache:
        caches.append((session.cache, [parts.held(row) for row in range(len(batch.sequences))]))
    for cache, kept in caches:
        for row, count in enumerate(kept):
            if batch.sequences[row] is None and row in cache._used_rows:
                for states in cache.storage():
                    states[row, :, count:] = torch.nan


def check_warm_is_cold(new_decoder, chunk, async_scheduling, rule, vocabulary=VOCABULARY, rows=ROWS, **settings):
    runs = {}
    for mode in ("off", "exact"):
        decoder = new_decoder()
        scheduler = Scheduler(
            decoder, rows=rows, max_length=MAX_LENGTH, prefill_chunk=chunk, rule=rule, prefix_reuse=mode,
            async_scheduling=async_scheduling,
        )  # fmt: skip
        models = [decoder.target, *([decoder.drafter.model] if decoder.drafter and decoder.drafter.model else [])]
        parts = [parts_of(model) for model in models]
        told, reused = talk(scheduler, vocabulary, between=lambda s=scheduler: spoil(s), **settings)
        runs[mode] = told, reused, parts
    (cold, none, all_parts), (warm, reused, parts) = runs["off"], runs["exact"]
    assert cold == warm
    assert none == [[None] * 3] * TURNS
    for own, others in zip(parts, all_parts, strict=True):  # on the same grid, from a later beginning
        assert {*own} <= {*others}
        assert read(own) < read(others) or not own
    return cold, reused


DRAFTERS = {
    "none": lambda target, draft: None,
    "model": lambda target, draft: draft,
    "early_exit": lambda target, draft: EarlyExitDrafter(target, 1),
    "lookup": lambda target, draft: PromptLookupDrafter(min_ngram=1),
    "suffix": lambda target, draft: SuffixDrafter(),
    "predicted": lambda target, draft: PredictedDrafter(SpeculativeDecoder(target, draft).drafter),
}


@functools.cache
def pair(kind: str):
    if kind == "llama":
        return tunable_pair(0.5, layers=1)
    return tiny_model(kind, layers=2), tiny_model(kind, layers=1)


def decoder_of(kind: str, drafter: str, tree: int | None = None) -> SpeculativeDecoder:
    target, draft = pair(kind)
    return SpeculativeDecoder(target, DRAFTERS[drafter](target, draft), 3, tree=tree)


EVERYDAY = [  # target, drafter, rule, chunk, whether the device runs ahead, nodes of a tree
    ("llama", "model", "token", 4, False, None),
    ("llama", "model", "block", 3, True, None),
    ("llama", "model", "coupled", 5, True, None),
    ("llama", "model", "token", 4, True, 6),
    ("llama", "model", "coupled", 3, False, 6),
    ("llama", "none", "token", 4, False, None),
    ("llama", "early_exit", "token", 3, True, None),
    ("llama", "lookup", "coupled", 4, False, None),
    ("llama", "suffix", "token", 1, True, None),
    ("llama", "suffix", "coupled", 4, False, 6),
    ("llama", "predicted", "token", 4, False, None),
    ("gemma3", "model", "token", 4, True, None),
    ("gpt2", "model", "block", 5, False, None),
    ("bloom", "model", "token", 3, False, None),
]
NIGHTLY = [
    (kind, drafter, rule, chunk, ahead, nodes)
    for kind in ("llama", "gemma3", "bloom")
    for drafter in DRAFTERS
    for rule in ("token", "block", "coupled")
    for chunk in (1, 2, 3, 5, 8)
    for ahead in (False, True)
    for nodes in (None, 6)
    if (kind, drafter, rule, chunk, ahead, nodes) not in EVERYDAY
    and (nodes is None or kind == "llama" and (drafter == "model" or drafter == "suffix" and rule == "coupled"))
]


@pytest.mark.parametrize(
    ("kind", "drafter", "rule", "chunk", "ahead", "nodes"),
    [*EVERYDAY, *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY)],
)
def test_warm_is_cold(kind, drafter, rule, chunk, ahead, nodes):
    params = {"params": SamplingParams(0.9), "report_drafts": nodes is None}
    cold, reused = check_warm_is_cold(lambda: decoder_of(kind, drafter, nodes), chunk, ahead, rule, **params)
    # Of each turn the whole parts of what was its prompt before; of the second conversation's first, what is shared.
    assert reused[0] == [0, 9 // chunk * chunk, 0]
    lengths = [12, 10, 6]
    for turn in range(1, TURNS):
        assert reused[turn] == [(n - 1) // chunk * chunk for n in lengths]
        lengths = [n + NEW + len(own) for n, own in zip(lengths, prompts(3, 3, 6, seed=turn - 1), strict=True)]
    assert len({tuple(told.tokens) for turn in cold for told in turn}) > TURNS


def test_warm_is_cold_where_results_depend_on_shapes(monkeypatch):
    """Attention over a mask of slots, as on other devices."""
    masked(monkeypatch)
    check_warm_is_cold(lambda: decoder_of("llama", "model"), 4, False, "token", params=SamplingParams(0.9))


def test_greedy_texts_with_fewer_rows_than_conversations():
    _, reused = check_warm_is_cold(lambda: decoder_of("llama", "model"), 3, False, "token", rows=2)
    assert any(count for turn in reused for count in turn)


HEADS = {
    "eagle3": lambda: exact_eagle3(noise=0.3),
    "medusa": exact_medusa,
    "peagle": lambda: random_head("peagle"),
    "dflash": lambda: random_head("dflash"),
    "dspark": lambda: random_head("dspark"),
    "dflash2": lambda: random_head("dflash2"),
}


@pytest.mark.parametrize("kind", HEADS)
def test_heads_draft_the_same(kind, tmp_path):
    """Their features are copied with the target's keys, and what they store themselves follows from the next token,
    too."""
    target = predictable_target(1 if kind == "medusa" else 2)
    head = load_head(write(tmp_path / kind, *HEADS[kind]()), target, check=False)
    for chunk, ahead in ((3, False), (4, True)):
        new = functools.partial(SpeculativeDecoder, target, head, 3)
        _, reused = check_warm_is_cold(new, chunk, ahead, "coupled", V, params=SamplingParams(0.9))
        assert all(reused[-1])


def test_a_head_reads_the_last_part_again(tmp_path):
    """What it stores of a part's last token follows from the token after it, and each step computes the last tokens
    once more."""
    target = predictable_target(2)
    head = load_head(write(tmp_path, *random_head("peagle")), target, check=False)
    decoder = SpeculativeDecoder(target, head, 3)
    scheduler = Scheduler(decoder, rows=2, max_length=MAX_LENGTH, prefill_chunk=4, rule="coupled")
    session, parts = scheduler.batch.session._session, []
    inner = session._read

    def counted(begin, texts, row, stop):
        parts.append((begin[0], stop))
        inner(begin, texts, row, stop)

    session._read = counted
    (text,) = ([token % V for token in own] for own in prompts(1, 20, 20))
    assert session.window == 4  # so of 19 tokens 15 stay as they were read
    reads = {
        (*text,): [(0, 4), (4, 8), (8, 12), (12, 16), (16, 19)],
        (*text, 1): [(12, 16), (16, 20)],
        (*text[:8], (text[8] + 1) % V, 5, 6, 7, 8, 9): [(4, 8), (8, 12), (12, 13)],
    }
    for prompt, expected in reads.items():
        parts.clear()
        decode(scheduler, [asked([*prompt])])
        assert parts == expected


def test_a_drafter_with_a_state_reads_anew():
    draft = model_of("qwen3_5_text")
    target, _ = pair("llama")
    new = functools.partial(SpeculativeDecoder, target, draft, 3)
    runs = []
    for mode in ("off", "exact"):
        scheduler = Scheduler(new(), rows=3, max_length=MAX_LENGTH, prefill_chunk=4, prefix_reuse=mode)
        runs.append(talk(scheduler, params=SamplingParams(0.9)))
    assert runs[0][0] == runs[1][0] and all(runs[1][1][-1])


# ---- which row ---------------------------------------------------------------------------------------------------


def scheduler_of(drafter="model", **settings) -> Scheduler:
    return Scheduler(
        decoder_of("llama", drafter), **{"rows": 3, "max_length": MAX_LENGTH, "prefill_chunk": 4, **settings}
    )


def reused(scheduler: Scheduler, prompt: list[int], **settings) -> int | None:
    _, (sequence,) = decode(scheduler, [asked(prompt, 2, **settings)])
    return sequence.reused


def test_several_texts_of_a_prompt_read_it_once():
    """Also from a row that decodes."""
    scheduler, (prompt,) = scheduler_of(rows=4), prompts(1, 15, 15, seed=2)
    parts, draft = parts_of(scheduler.target), parts_of(scheduler.decoder.drafter.model)
    requests = [asked(prompt, seed=i, params=SamplingParams(1.0)) for i in range(4)]
    told, sequences = decode(scheduler, requests)
    assert [s.reused for s in sequences] == [0, 12, 12, 12]
    assert read(parts) == 14 + 3 * 2 and read(draft) == 13 + 3 * 1
    cold, _ = decode(scheduler_of(rows=4, prefix_reuse="off"), requests)
    assert told == cold and len({tuple(t.tokens) for t in told}) > 1


def test_the_last_token_of_a_prompt_is_not_taken_over():
    """It is fed with the first drafts, also where a longer prompt had it in a full part."""
    (long,) = prompts(1, 13, 13)
    for length, expected in ((8, 4), (9, 8), (12, 8), (13, 12)):
        scheduler = scheduler_of()
        told, _ = decode(scheduler, [asked(long[:length])])
        assert reused(scheduler, long) == expected
        more, (sequence,) = decode(scheduler, [asked(long[:length])])
        assert more == told and sequence.reused == expected


def test_a_part_with_one_other_token_is_read():
    (prompt,) = prompts(1, 14, 14, seed=3)
    for place in range(12):
        scheduler = scheduler_of()
        other = [*prompt]
        other[place] = (other[place] + 1) % VOCABULARY
        told, _ = decode(scheduler, [asked(prompt, params=SamplingParams(1.0))])
        more, (sequence,) = decode(scheduler, [asked(other, params=SamplingParams(1.0))])
        assert sequence.reused == place // 4 * 4
        cold, _ = decode(scheduler_of(prefix_reuse="off"), [asked(other, params=SamplingParams(1.0))])
        assert more == cold


def test_scopes_are_apart():
    """A hit is told by the time to the first token. Tuples are compared, not joined texts."""
    scheduler, (prompt,) = scheduler_of(rows=8), prompts(1, 10, 10)
    scopes = (None, "ab", ("a", "bc"), ("ab", "c"), ("a", None))
    assert [reused(scheduler, prompt, scope=scope) for scope in scopes] == [0] * 5
    assert [reused(scheduler, prompt, scope=scope) for scope in scopes] == [8] * 5
    with pytest.raises(ValueError, match="^scope: got a list, allowed: None, or a hashable value"):
        scheduler.submit(asked(prompt, scope=[]))


def test_the_row_that_was_used_least_recently_is_given_up():
    scheduler, texts = scheduler_of("none"), prompts(4, 13, 13, seed=5)
    assert [reused(scheduler, text) for text in texts[:3]] == [0, 0, 0]
    assert [reused(scheduler, texts[i]) for i in (0, 2)] == [12, 12]
    assert reused(scheduler, texts[3]) == 0  # in the row of texts[1]
    assert [reused(scheduler, texts[i]) for i in (0, 2, 3)] == [12, 12, 12]
    assert reused(scheduler, texts[1]) == 0


def test_a_short_beginning_does_not_take_a_long_texts_row():
    """ollama#5492: a system prompt in common, and another conversation's row was lost."""
    scheduler, (long,) = scheduler_of("none", rows=2), prompts(1, 30, 30)
    assert reused(scheduler, long) == 0
    assert [reused(scheduler, long[:9] + [7] * n) for n in (3, 4)] == [8, 8]
    assert reused(scheduler, long) == 28


def test_a_row_is_not_lost_to_a_text_that_continues_in_place():
    scheduler, (text,) = scheduler_of("none", rows=2), prompts(1, 13, 13)
    other = prompts(1, 13, 13, seed=1)[0]
    assert [reused(scheduler, each) for each in (text, other, text + [1, 2, 3, 4], other)] == [0, 0, 12, 12]


@pytest.mark.parametrize("drafter", ("model", "none"))
def test_a_lone_text_is_in_the_first_row_where_steps_have_the_rows_in_use(drafter):
    """What was there moves, and is not lost. The draft model's keys move as well."""
    target, draft = pair("llama")
    decoder = SpeculativeDecoder(target, DRAFTERS[drafter](target, draft), AdaptiveDrafts())
    scheduler = Scheduler(decoder, rows=3, max_length=MAX_LENGTH, prefill_chunk=4, rule="coupled")
    texts = prompts(3, 13, 13, seed=6)
    plain = [decode(scheduler_of("none", prefix_reuse="off"), [asked(text)])[0][0].tokens for text in texts]
    for turn, expected in enumerate((0, 12, 12)):
        for text, tokens in zip(texts, plain, strict=True):
            number = scheduler.submit(asked(text))
            while not scheduler.idle:
                outputs = scheduler.step()
                assert scheduler.batch.sequences[1:] == [None, None], turn
            assert outputs[-1].number == number and outputs[-1].sequence.tokens == tokens
            assert outputs[-1].sequence.reused == expected
            spoil(scheduler)


# ---- what is not taken over --------------------------------------------------------------------------------------


def test_log_probabilities_of_a_prompt_need_it_read():
    scheduler, (prompt,) = scheduler_of(), prompts(1, 14, 14)
    _, (cold,) = decode(scheduler, [asked(prompt, prompt_log_probs=2)])
    assert reused(scheduler, prompt) == 0  # what was read for them is not taken over, either
    _, (warm,) = decode(scheduler, [asked(prompt, prompt_log_probs=2)])
    assert warm.reused is None and warm.prompt_log_probs == cold.prompt_log_probs
    assert len(warm.prompt_log_probs) == 14 and reused(scheduler, prompt) == 12


def test_a_text_that_failed_leaves_nothing():
    scheduler, (prompt,) = scheduler_of("none"), prompts(1, 14, 14)
    _, (failed,) = decode(scheduler, [asked(prompt, logits_processor=[Processor(lambda scores: scores * torch.nan)])])
    assert failed.finish_reason is FinishReason.FAILED
    _, (failed,) = decode(scheduler, [asked(prompt, stop=Stop(RuntimeError("its own"), 1))])
    assert failed.finish_reason is FinishReason.FAILED and failed.reused == 0
    assert [reused(scheduler, prompt) for _ in range(2)] == [0, 12]


def test_an_error_of_a_copy_ends_one_text(monkeypatch):
    scheduler, (prompt,) = scheduler_of(), prompts(1, 14, 14)
    cold = decode(scheduler, [asked(prompt)])[0]
    with monkeypatch.context() as patch:
        patch.setattr(
            scheduler.batch.state.target_cache, "copy_rows", lambda *_: (_ for _ in ()).throw(MemoryError("no room"))
        )
        _, (failed,) = decode(scheduler, [asked(prompt)])
    assert failed.error == "MemoryError: no room"
    assert decode(scheduler, [asked(prompt)])[0] == cold == decode(scheduler, [asked(prompt)])[0]


@pytest.mark.parametrize("mode", ("exact", "rounding"))
def test_a_prompt_that_was_cancelled_is_kept_as_far_as_it_was_read(mode):
    scheduler, (prompt,) = scheduler_of(prefix_reuse=mode), prompts(1, 30, 30)
    number = scheduler.submit(asked(prompt))
    for _ in range(3):
        scheduler.step()
    assert scheduler.cancel(number) and scheduler.step()[0].finish_reason is FinishReason.CANCELLED
    spoil(scheduler)
    told, (sequence,) = decode(scheduler, [asked(prompt)])
    assert sequence.reused == 12
    assert told == decode(scheduler_of(prefix_reuse="off"), [asked(prompt)])[0]


@pytest.mark.parametrize("model", ("target", "draft"))
def test_what_was_read_in_larger_parts_is_not_taken_over(model):
    """Where memory has run out, parts are read in smaller forwards from then on, and round differently."""
    scheduler, (prompt,) = scheduler_of(), prompts(1, 15, 15)
    parts = parts_of(scheduler.decoder.drafter.model)
    decode(scheduler, [asked(prompt)])
    chunk = (scheduler.target if model == "target" else scheduler.decoder.drafter.model).prefill_chunk
    before = chunk.size
    try:
        chunk.size = 2
        parts.clear()
        assert reused(scheduler, prompt) == (0 if model == "target" else 12)
        assert read(parts) == 13  # the draft model takes over no more than the target
        parts.clear()
        assert reused(scheduler, prompt) == 12 and read(parts) == 1
    finally:
        chunk.size = before


def test_rounding_takes_over_generated_tokens_as_well():
    """In this order of computation the results are even the same."""
    scheduler, (prompt,) = scheduler_of("none", prefix_reuse="rounding"), prompts(1, 9, 9)
    _, (first,) = decode(scheduler, [asked(prompt, 6)])
    assert len(first.tokens) == 6
    more = first.text + [3, 4, 5]
    told, (second,) = decode(scheduler, [asked(more, 6)])
    assert second.reused == 14  # the last token was not fed
    assert [t.tokens for t in told] == [t.tokens for t in decode(scheduler_of(prefix_reuse="off"), [asked(more, 6)])[0]]
    assert reused(scheduler, more[:5]) == 4 and reused(scheduler, more[:12] + [1]) == 12


def test_a_text_that_is_cut_leaves_what_is_left_of_it():
    scheduler = scheduler_of("none", prefix_reuse="rounding")
    _, (cut,) = decode(scheduler, [asked([5, 6, 7], 9, stop=Stop(1, 1))])
    assert cut.finish_reason is FinishReason.STOP and len(cut.text) == 4
    assert reused(scheduler, [*cut.text, 1, 2]) == 3


def test_reuse_can_be_off_and_models_with_a_state_have_none():
    scheduler, (prompt,) = scheduler_of(prefix_reuse="off"), prompts(1, 14, 14)
    assert [reused(scheduler, prompt) for _ in range(2)] == [None, None]
    with pytest.raises(ValueError, match="^prefix_reuse: got 'on', allowed: None, off, exact, rounding$"):
        scheduler_of(prefix_reuse="on")
    decoder = SpeculativeDecoder(model_of("qwen3_5_text"), None, 2)
    with pytest.raises(ValueError, match="^prefix_reuse: got 'exact', allowed: None, off, for model type .*cut$"):
        Scheduler(decoder, rows=1, max_length=20, prefix_reuse="exact")
    scheduler = Scheduler(decoder, rows=1, max_length=20, prefill_chunk=4)
    assert [reused(scheduler, prompt[:9]) for _ in range(2)] == [None, None]


def test_requests_are_not_changed():
    request = asked(prompts(1, 9, 9)[0])
    scheduler = scheduler_of()
    decode(scheduler, [request, replace(request, seed=1)])
    assert request == asked(prompts(1, 9, 9)[0])
