"""What is advised: decisions and words on synthetic costs, the arithmetic of predictions, and one small run."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from specdec import SpeculativeDecoder, stats
from specdec.drafters import Drafter
from specdec.evaluation.advise import AdviseSettings, advise
from specdec.evaluation.advise.compatibility import compare_tokenizers
from specdec.evaluation.advise.costs import (
    LIKE_BEFORE,
    Acceptance,
    Measured,
    Sweep,
    Times,
    Workload,
    interpolated,
    measure,
)
from specdec.evaluation.advise.machine_trouble import Shares, Threads, shares, time_threads
from specdec.evaluation.advise.new_draft import GOOD_ALPHA, describe, new_draft, pays_from
from specdec.evaluation.advise.prediction import MARGIN, Memory, Tried, best, more_accepted, predict
from specdec.evaluation.advise.words import say, verdict
from specdec.loop.batch import Batch
from specdec.loop.draft_length import RowResult
from support.commands import invoke, refused, run
from support.models import prompts, tunable_pair

MEMORY = Memory(target=1000, draft=100, target_slot=16, draft_slot=2, target_row=0, draft_row=0)
QUIET = Threads(count=2, usable=2, load=0.1, seconds={1: 0.012, 2: 0.010})
CLEAN = Shares(matrix=0.6, copies=0.1, other=0.3)


def measured(alpha: float, c: float, wider: float = 0.0, rows: int = 1, most: int = 4) -> Measured:
    """A plain step takes 10 ms, each draft forward c of that, and each verified token ``wider`` of it more."""
    acceptance = Acceptance(most)
    for _ in range(1000):
        acceptance.tested, acceptance.accepted = [1000] * most, [round(1000 * alpha)] * most
    steps = {}
    for k in range(1, most + 1):
        draft, target = 0.01 * c * k, 0.01 * (1 + wider * k)
        parts = {"draft_forwards": [draft] * 3, "target_forwards": [target] * 3}
        steps[k] = Times([draft + target] * 3, parts)
    plain = Times([0.010] * 3, {"draft_forwards": [0.0] * 3, "target_forwards": [0.010] * 3})
    return Measured(rows, acceptance, plain, steps)


def tried(name: str, of: Measured) -> Tried:
    chances, parts = of.acceptance.by_position(), {}
    for k, times in of.steps.items():
        parts[k] = {part: times.part(part) for part in times.parts}
    steps = {k: predict(of, k, 64) for k in of.steps}
    half, more = (
        best(of, 64, faster_draft=2.0),
        best(of, 64, by_position=more_accepted(chances, of.acceptance.alpha, 0.05)),
    )
    forward, tests = of.plain.part("target_forwards"), of.acceptance.tested
    return Tried(
        name, True, best(of, 64), steps, of.acceptance.alpha, chances, tests, forward, parts, MEMORY, None, half, more
    )


# ---- predictions


def test_predictions_are_those_of_the_paper_where_its_assumptions_hold():
    """Theorem 3.8: (1 - a^(K+1)) / ((1 - a) (K c + 1))."""
    found = predict(measured(0.8, 0.1), 3, 64)
    assert found.tau == pytest.approx((1 - 0.8**4) / 0.2) and found.speedup == pytest.approx(found.tau / 1.3)
    assert found.tokens_per_second == pytest.approx(100 * found.speedup)
    assert best(measured(0.8, 0.1), 64).num_drafts == 4 and best(measured(0.3, 0.3), 64).num_drafts == 1


def test_a_prediction_has_what_verifying_and_reading_prompts_take():
    dear = measured(0.8, 0.1, wider=0.2)
    assert predict(dear, 3, 64).speedup == pytest.approx(predict(measured(0.8, 0.1), 3, 64).tau / 1.9)
    dear.begins = {False: [0.1], True: [0.3]}
    tau = predict(dear, 3, 64).tau
    assert predict(dear, 3, 64).speedup == pytest.approx((0.1 + 0.64) / (0.3 + 64 / tau * 0.019))


def test_what_a_better_draft_would_be_worth():
    of = measured(0.8, 0.4)
    half, more = (best(of, 64, faster_draft=2.0), best(of, 64, by_position=more_accepted([0.8] * 4, 0.8, 0.05)))
    assert half.speedup == pytest.approx(best(measured(0.8, 0.2), 64).speedup)
    assert more.speedup == pytest.approx(best(measured(0.85, 0.4), 64).speedup)
    assert more_accepted([0.9, 0.6], 0.75, 0.05) == pytest.approx([0.92, 0.68])  # four rejections where there were five
    assert more_accepted([0.9, 0.99], 0.97, 0.05) == [1.0, 1.0] == more_accepted([1.0, 1.0], 1.0, 0.05)


def test_times_between_measured_ones_do_not_fall():
    assert interpolated({0: 1.0, 1: 2.0, 4: 5.0}, 2) == 3.0
    assert interpolated({0: 1.0, 1: 2.0, 2: 1.5}, 2) == 2.0
    assert interpolated({0: 1.0, 1: 2.0}, 3) == 4.0


def test_acceptance_by_position():
    found = Acceptance(3)
    found.record([RowResult(3, 1, 2, False), RowResult(3, 3, 4, False), RowResult(1, 0, 1, False)])
    found.record([RowResult(3, 3, 4, True)])  # its text ended there
    assert (found.tested, found.accepted) == ([3, 2, 1], [2, 1, 1])
    first, second, _ = found.by_position()
    assert first == pytest.approx(2 / 3) and second == pytest.approx((1 + LIKE_BEFORE * first) / (2 + LIKE_BEFORE))
    assert found.alpha == pytest.approx(4 / 6)
    assert Acceptance(2).by_position() == [0.0, 0.0] and Acceptance(2).alpha == 0.0


# ---- decisions and words


def told(of: Measured, batches: dict | None = None, threads: Threads = QUIET, copies: Shares = CLEAN):
    first = tried("model", of)
    sampled = {"token": predict(of, 2, 64), "block": predict(of, 3, 64)}
    found = {1: first.best, **(batches or {})}
    result = verdict([first], sampled, found, threads, copies)
    return result, say(result, threads, copies, [first], sampled, found, 64, 0.8)


def test_it_says_yes_where_it_pays():
    of = measured(0.8, 0.1)
    result, words = told(of, {2: best(measured(0.8, 0.1, rows=2), 64), 4: best(measured(0.8, 0.1, 1.0, 4), 64)})
    assert (result.answer, result.drafter, result.num_drafts, result.rule) == ("speculate", "model", 4, "block")
    assert result.plain_tokens_per_second == pytest.approx(100) and result.stops_at_batch == 4
    text = "\n".join(words)
    assert words[0].startswith(
        "Yes, speculate: with model and K = 4, 240.1 tokens/s are expected, 2.40 times the 100.0"
    )
    assert "does not pay from 4 on" in text and "Use rule block" in text
    assert "model takes 100 bytes of weights (10% of the target's) and 2 bytes of cache" in text
    assert "One that takes half the time would give 2.80 times plain (K = 4)" in text


def test_the_parts_of_a_step_are_all_of_it():
    """Whatever the steps took: parts are shares of all of their time, so an odd one does not break the sum."""
    times = Times([1.0, 1.0, 4.0], {"draft_forwards": [0.5, 0.5, 0.5], "target_forwards": [0.5, 0.5, 2.5]})
    assert [times.part(name) for name in times.parts] == [pytest.approx(0.25), pytest.approx(3.5 / 6)]
    said = told(measured(0.8, 0.1, wider=0.05))[1][1]
    assert "in 16.00 ms, a plain step one in 10.00 ms: 2.10 times as fast, and 2.10 times with the reading" in said
    assert "are 4.00 ms of drafting (c = 0.10), 12.00 ms of the target's forward over 5 tokens (1.20 times" in said
    assert said.endswith("and 0.00 ms of everything else.")


def test_drafts_from_the_text_have_no_cost_of_a_model():
    of = measured(0.1, 0.0)
    first = replace(tried("lookup", of), has_model=False)
    result = verdict([first], {}, {1: first.best}, QUIET, CLEAN)
    text = "\n".join(say(result, QUIET, CLEAN, [first], {}, {1: first.best}, 64, 0.8))
    assert "c = " not in text and "drafting" not in text and "Memory" not in text and "half the time" not in text
    assert "were not measured" in text and "Times plain by sequences" not in text and "Recurrent" not in text
    first = replace(first, memory=replace(MEMORY, target_row=3 * 2**20))
    lines = say(result, QUIET, CLEAN, [first], {}, {1: first.best}, 64, 0.8)
    states = "3.00 MiB for the target's states and 0 bytes for those of lookup"
    assert f"Recurrent layers: each sequence takes {states}, however long it is." in lines


@pytest.mark.parametrize(
    ("of", "why"),
    [
        (measured(0.1, 0.1), "its drafts are seldom accepted"),
        (measured(0.9, 1.0), "the draft is nearly as expensive as the target"),
        (measured(0.9, 0.1, wider=1.0), "verifying several tokens costs nearly as much as decoding them"),
    ],
)
def test_it_says_no_and_why_where_it_does_not_pay(of, why):
    result, words = told(of)
    assert result.answer == "plain" and result.speedup < 1.03 and result.stops_at_batch == 1
    assert words[0].startswith("No, do not speculate: plain decoding writes 100.0 tokens/s.")
    assert why in words[1]


def test_a_small_gain_is_none():
    of = measured(0.31, 0.28)
    assert 1.0 < best(of, 64).speedup < 1.03 and told(of)[0].answer == "plain"


def test_threads_that_wait_are_told_instead():
    more_than_usable = Threads(4, 2, 0.0, {1: 0.01, 2: 0.008, 4: 0.02})
    busy = Threads(2, 2, 5.0, {1: 0.010, 2: 0.25})
    small_model = Threads(2, 2, 0.3, {1: 0.010, 2: 0.015})
    assert more_than_usable.oversubscribed and more_than_usable.best == 2
    assert busy.oversubscribed and busy.best == 1
    assert not small_model.oversubscribed and small_model.best == 1  # it is only faster with one
    assert not Threads(2, 2, 5.0, {1: 0.010, 2: 0.011}).oversubscribed  # busy, but it does not show
    result, words = told(measured(0.8, 0.1), threads=small_model)
    assert result.threads == 1 and any("set OMP_NUM_THREADS=1, and ask again" in line for line in words)


def test_copies_that_dominate_are_told_first():
    result, words = told(measured(0.8, 0.1), copies=Shares(0.3, 0.5, 0.2))
    assert result.answer == "copies" and words[0].startswith("First, the copies: 50% of the target's forward copies")


def test_shares_of_a_forward():
    found = shares({"aten::mm": 6.0, "aten::copy_": 2.0, "aten::index_copy_": 1.0, "aten::silu": 1.0})
    assert (found.matrix, found.copies, found.other) == pytest.approx((0.6, 0.3, 0.1)) and found.copies_dominate
    assert not shares({}).copies_dominate


def test_threads_are_timed_and_put_back():
    before, seen, now = torch.get_num_threads(), [], iter(range(1000))
    found = time_threads(lambda: seen.append(torch.get_num_threads()), 4, 0.0, clock=lambda: float(next(now)))
    assert sorted({*seen}) == sorted({1, 2, 4, before}) and torch.get_num_threads() == before
    assert found.seconds == dict.fromkeys(sorted({*seen}), 1.0)


# ---- a draft that does not exist yet


def test_from_which_alpha_a_draft_pays():
    """At that alpha the best K wins what counts as paying, and a draft that takes as long as the target never does."""
    of = tried("early-exit", measured(0.0, 0.5))
    assert pays_from(of, 0.002) == pytest.approx(0.2 * MARGIN + MARGIN - 1, abs=1e-4)  # 1 + a = MARGIN (1 + c), K = 1
    assert pays_from(of, 0.0) == pytest.approx(0.03 * 0.99, abs=2e-3) and pays_from(of, 0.05) is None
    assert best(measured(pays_from(of, 0.002), 0.2, most=1), 64).speedup == pytest.approx(MARGIN, abs=0.01)


def test_a_larger_target_needs_less():
    """All that does not grow with it, the draft and the loop, counts for less, and what verification takes remains."""
    of = tried("early-exit", measured(0.0, 0.5, wider=0.1))
    by_size = [pays_from(of, 0.004, size) for size in (1.0, 2.0, 10.0, 1000.0)]
    assert by_size == sorted(by_size, reverse=True) and by_size[0] > by_size[1] + 0.1
    assert by_size[-1] == pytest.approx(1.1 * MARGIN - 1, abs=0.01)


def test_what_layers_of_the_target_would_take():
    """Two of ten layers, where four take half of a forward and so the head takes a sixth."""
    found = new_draft(tried("early-exit", measured(0.0, 0.5)), 4, 10, 10_000_000)
    assert (found.layers, found.of_layers) == (2, 10) and found.c == pytest.approx(0.5 - 2 / 12)
    assert found.pays_at == 1.0 and found.pays_from < GOOD_ALPHA
    words = " ".join(describe(found))
    assert "2 of the target's 10 layers it would take 0.33 times the target's time" in words
    assert "10 times the size (100M): 0.0" in words and "alpha 0.7 is enough at this size" in words
    dear = new_draft(tried("early-exit", measured(0.0, 1.2)), 4, 10, 10_000_000)
    assert dear.pays_from is None and dear.pays_at > 1 and "M parameters on" in describe(dear)[1]
    assert "would not pay here, even if all of its drafts were accepted" in describe(dear)[0]
    never = new_draft(tried("early-exit", measured(0.0, 0.5, wider=2.0)), 4, 10, 10_000_000)
    assert never.pays_at is None and "it would pay beside none" in describe(never)[1]


# ---- tokenizers


def test_vocabularies(pair):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = pair[2]
    size = len(tokenizer)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "import": 1, "os": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    other = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    for theirs, sizes, kind, drafter in (
        (tokenizer, (size, size), "equal", "model"),
        (tokenizer, (size + 8, size), "padded", "model"),
        (None, (size, size), "equal", "model"),
        (None, (size, 7), "foreign", None),
        (other, (size, 3), "translated", "universal"),
    ):
        found = compare_tokenizers(tokenizer, theirs, sizes, ["import os\n"])
        assert (found.kind, found.drafter) == (kind, drafter)
    assert 0 < found.shared < 0.01 and found.tokens_each == pytest.approx(2 / len(tokenizer("import os\n").input_ids))


# ---- measuring


def test_steps_are_timed_by_their_number_of_drafts():
    """Each reading of the clock is a second after the one before, so every step takes one."""
    target, draft = tunable_pair(0.0)
    now = iter(range(10**6))
    plain, decoder = SpeculativeDecoder(target, None, 0), SpeculativeDecoder(target, draft, 3)
    found = measure(plain, decoder, Workload(prompts(2, 3, 5), 12), 1, (1, 3), 1.0, clock=lambda: float(next(now)))
    assert {*found.steps} >= {1, 3} and {*found.plain.whole} == {1.0} == {*found.steps[3].whole}
    assert min(map(found.begin, (False, True))) >= 1.0  # the first steps count as what reads prompts
    assert found.acceptance.by_position() == [1.0, 1.0, 1.0]  # both are one function
    assert predict(found, 3, 12).tau == 4.0 and found.seconds(2) == 1.0


def test_a_batch_is_not_charged_for_the_steps_of_the_other(monkeypatch):
    """By a clock of our own, plain steps take 100 seconds; nothing of that is in the times with drafts."""
    target, draft = tunable_pair(0.0)
    plain, decoder = SpeculativeDecoder(target, None, 0), SpeculativeDecoder(target, draft, 2)
    step, now = Batch.step, [0.0]

    def slow(self):
        now[0] += 100.0 if self.session is None else 1.0
        return step(self)

    def clock() -> float:
        return now[0]

    monkeypatch.setattr(Batch, "step", slow)
    monkeypatch.setattr(stats, "time", SimpleNamespace(perf_counter=clock))
    found = measure(plain, decoder, Workload(prompts(1, 3, 5), 8), 1, (1, 2), 0.1, clock=clock)
    assert {*found.plain.whole} == {100.0} and {*found.steps[2].whole} == {1.0} and found.begin(True) <= 1.0


def test_the_numbers_of_drafts_take_turns():
    """All of them once in each turn, and not in one order."""
    sweep = Sweep((1, 2, 4))
    turns = [tuple(sweep.choose(2, 2, [4, 4]) for _ in range(3)) for _ in range(20)]
    assert {tuple(sorted(turn)) for turn in turns} == {(1, 2, 4)} and len({*turns}) > 3


def test_a_drafter_that_fails_is_named():
    class Broken(Drafter):
        def start(self, batch):
            raise RuntimeError("no luck")

    target, _ = tunable_pair(0.0)
    plain, broken = SpeculativeDecoder(target, None, 0), SpeculativeDecoder(target, Broken(), 2)
    with pytest.raises(ValueError, match=r"drafter: got Broken, which failed \(.*no luck"):
        measure(plain, broken, Workload(prompts(1, 3, 5), 8), 1, (1, 2), 0.1)


def test_bad_settings_are_refused():
    for bad, name in (
        ({"seconds": 0}, "seconds"),
        ({"tokens": 1}, "max_new_tokens"),
        ({"most_drafts": 0}, "num_drafts"),
        ({"temperature": 0.0}, "temperature"),
        ({"batch_sizes": (1,)}, "batch_sizes"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: got"):
            AdviseSettings(**bad)
    target, draft = tunable_pair(0.0)
    with pytest.raises(ValueError, match="input_ids: got no prompts"):
        advise(target, {"model": draft}, [])
    with pytest.raises(ValueError, match="drafters: got none"):
        advise(target, {}, [[1]])
    with pytest.raises(ValueError, match="max_new_tokens: got 64 after a prompt of 250 tokens"):
        advise(target, {"model": draft}, [[1] * 250])


@pytest.mark.parametrize(("tokens", "largest"), [(2, 1), (64, 8)])
def test_short_texts_are_measured_in_longer_ones(tokens, largest, monkeypatch):
    """A text of 2 tokens has no step whose time is known beside that of its prompt, and no use for two drafts."""
    monkeypatch.setattr(Threads, "oversubscribed", False)
    target, draft = tunable_pair(0.0)
    found = advise(target, {"model": draft}, prompts(1, 3, 5), AdviseSettings(0.01, tokens, batch_sizes=()))
    assert [*found.tried[0].steps] == [*range(1, largest + 1)]
    with pytest.raises(ValueError, match="^max_new_tokens: got 17, allowed: an integer >= 18"):
        measure(*(SpeculativeDecoder(target, d, 8) for d in (None, draft)), Workload([[1]], 17), 1, (8,), 0.1)


def test_each_prompt_is_decoded_whatever_time_that_takes():
    """In a time that is over at once, and with texts that are shorter where forwards are slow."""
    target, draft = tunable_pair(0.0)
    seen, now = [], iter(range(10**6))
    decoder = SpeculativeDecoder(target, draft, 1)
    work = Workload(prompts(3, 3, 5), 12, least=3)
    texts = Workload.texts
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Workload, "texts", lambda self, first, rows: seen.append(first) or texts(self, first, rows))
        measure(SpeculativeDecoder(target, None, 0), decoder, work, 1, (1,), 0.1, clock=lambda: float(next(now)))
    assert seen == [0, 1, 2]
    settings = AdviseSettings()
    assert settings.written(0.001, 8, 10.0) == 64 and settings.written(0.02, 8, 10.0) == 31
    assert settings.written(1.0, 8, 10.0) == 24


# ---- the command


def test_the_command(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(Threads, "oversubscribed", False)  # whatever the machine of the tests does
    monkeypatch.setattr(Shares, "copies_dominate", False)
    quick = ("--seconds", 0.2, "--max-new-tokens", 6, "-k", 2, "--batch-size", 2, "--json")
    file = tmp_path / "prompts.txt"
    file.write_text("x = 1\nimport os\n")
    whole = json.loads(run("advise", folders[1], folders[3], "lookup", "--prompts", file, *quick).stdout)
    assert whole["verdict"]["answer"] in ("speculate", "plain")
    assert {*whole["batches"]} == ({"1", "2"} if whole["verdict"]["answer"] == "speculate" else {"1"})
    assert {t["name"] for t in whole["tried"]} == {str(folders[3]), "lookup"}


def test_a_target_alone(folders, monkeypatch, capfd):
    """Its text, its first layers and a draft that is to be made; and the profiler writes nothing."""
    monkeypatch.setattr(Threads, "oversubscribed", False)
    monkeypatch.setattr(Shares, "copies_dominate", False)
    quick = ("--seconds", 0.1, "--max-new-tokens", 4, "-k", 1, "--batch-size", 2, "--prompt-set", "code")
    shown = run("advise", folders[1], *quick).stdout
    assert "early-exit" in shown and "specdec distill makes one: of 1 of the target's 1 layers" in shown
    assert "USDT" not in capfd.readouterr().err
    only = json.loads(run("advise", folders[1], "lookup", "--category", "method", *quick, "--json").stdout)
    assert only["new_draft"] is None and not only["tried"][0]["has_model"]


def test_bad_options_are_refused(folders, tmp_path):
    assert refused("advise", "--seconds", 0).startswith("Invalid value for --seconds: got 0.0, allowed: a number > 0")
    assert "--max-new-tokens: got 1, allowed: an integer >= 2" in refused("advise", "--max-new-tokens", 1)
    assert "DRAFT: got lookup, lookup, allowed: each once" in refused("advise", folders[1], "lookup", "lookup")
    assert invoke("advise", folders[1], tmp_path / "none").exit_code == 2
