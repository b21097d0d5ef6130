"""The comparison with transformers: what is measured, and what a difference of texts is called."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections import Counter

import pytest
import torch
from specdec import AdaptiveDrafts, SpeculativeDecoder
from specdec.cli import app
from specdec.evaluation.compare import Measurement, compare
from specdec.evaluation.contenders import CompareSettings, Run, SpecdecMethod, TransformersMethod, counted_forwards
from specdec.evaluation.rounds import fastest, play_round, runs_to_halve
from specdec.evaluation.work_counter import Work
from support.commands import PROMPT, invoke, rows, run
from support.model_types import model_of
from support.models import VOCABULARY, prompts, tiny_model, tunable_pair
from transformers import GenerationConfig
from typer.testing import CliRunner

from specdec_kernels import SamplingParams

QUICK = ("--max-new-tokens", 6, "--repeats", 1, "-k", 2)


# ---- the command


def spread(value: dict) -> list[float]:
    assert value["min"] <= value["median"] <= value["max"]
    assert min(value["per_round"]) == value["min"] and max(value["per_round"]) == value["max"]
    return value["per_round"]


def test_json(folders):
    result = run("compare", PROMPT, "x = ", "--json", *folders, "--max-new-tokens", 5, "--repeats", 2)
    assert result.stdout.count("\n") == 1
    whole = json.loads(result.stdout)
    assert list(whole) == ["methods", "ratios", "greedy_equal", "differences", "environment"]
    assert [m["name"] for m in whole["methods"]] == ["plain", "assisted", "specdec"]
    speeds = {}
    for m in whole["methods"]:
        seconds, speeds[m["name"]] = (spread(m["spread"][key]) for key in ("seconds", "tokens_per_second"))
        assert [s * t for s, t in zip(seconds, speeds[m["name"]], strict=True)] == pytest.approx([10, 10])
        assert m["tokens_per_second"] == m["spread"]["tokens_per_second"]["median"]
        assert m["seconds"] == m["spread"]["seconds"]["median"]
        assert m["tau"] >= 1
    plain, assisted, ours = whole["methods"]
    assert plain["acceptance_rate"] is plain["alpha"] is plain["loop_fraction"] is assisted["alpha"] is None
    assert 0 <= ours["acceptance_rate"] <= ours["alpha"] <= 1 and 0 < ours["loop_fraction"] < 1
    numbers = ["1", "2", "3", "4", "6", "8"]
    assert "swept" not in plain and list(ours["swept"]) == [*numbers, "auto"]
    assert list(assisted["swept"]) == [*numbers, "default"]
    for other in ("plain", "assisted"):
        ratios = [a / b for a, b in zip(speeds["specdec"], speeds[other], strict=True)]
        assert spread(whole["ratios"][f"specdec/{other}"]) == pytest.approx(ratios)
    assert whole["greedy_equal"] is True and whole["differences"] == []
    environment = whole["environment"]
    assert (environment["device"], environment["dtype"], environment["threads"]) == ("cpu", "float32", 1)
    assert environment["torch"] == torch.__version__ and environment["cpu"]


def test_the_table(folders):
    result, row = run("compare", PROMPT, *folders, *QUICK), rows(PROMPT, *folders, *QUICK[:2])[0]
    assert result.stdout.startswith(f"--- plain, assisted, specdec ---\n{PROMPT}{row['text']}\n")
    assert result.stdout.endswith("greedy texts of specdec and plain equal: yes\n")
    assert "specdec/plain: " in result.stdout and "specdec/assisted: " in result.stdout
    assert "…" not in result.stdout  # no number is cut off


def test_numbers_are_whole_on_a_narrow_terminal(folders):
    arguments = [str(a) for a in ("compare", "x = ", *folders, *QUICK, "--device", "cpu")]
    environment = {"COLUMNS": "60", "TTY_COMPATIBLE": "1", "FORCE_COLOR": "1", "NO_COLOR": "1"}
    shown = re.sub(r"\x1b\[[0-9;]*m", "", CliRunner().invoke(app, arguments, env=environment).stdout)
    table = shown[shown.index("method ") : shown.index("Medians of")]
    assert "…" not in table and max(map(len, table.splitlines())) <= 60
    joined = " ".join(table.split())
    for name in ("plain", "assisted", "specdec"):
        assert re.search(rf"method {name}, drafts a step [2–], seconds \d+\.\d{{3}}, tokens/s \d+\.\d \(", joined)


def tamper(monkeypatch, method: type) -> None:
    genuine = method.run

    def tampered(self, prompts, seed):
        done = genuine(self, prompts, seed)
        if self.name == "plain":
            return done
        (tokens,) = done.texts
        return dataclasses.replace(done, texts=[[*tokens[:-1], (tokens[-1] + 1) % VOCABULARY]])

    monkeypatch.setattr(method, "run", tampered)


def test_a_wrong_text_of_specdec_is_a_bug(folders, monkeypatch):
    tamper(monkeypatch, SpecdecMethod)
    result = invoke("compare", PROMPT, *QUICK, *folders, "--json")
    assert result.exit_code == 1
    whole = json.loads(result.stdout)
    assert whole["greedy_equal"] is False
    (found,) = whole["differences"]
    assert (found["verdict"], found["position"], found["methods"]) == ("bug", 5, ["plain", "specdec"])
    assert found["gap"] > found["bound"] > 0
    shown = invoke("compare", PROMPT, *QUICK, *folders)
    assert shown.exit_code == 1 and "bug: prompt 0, new token 5: plain " in shown.stdout
    assert "greedy texts of specdec and plain equal: no" in shown.stdout


def test_a_wrong_text_of_transformers_is_not_ours(folders, monkeypatch):
    tamper(monkeypatch, TransformersMethod)
    whole = json.loads(run("compare", PROMPT, *QUICK, *folders, "--json").stdout)
    assert whole["greedy_equal"] is True
    assert [(d["verdict"], d["methods"]) for d in whole["differences"]] == [("bug", ["plain", "assisted"])]


def test_sampled_texts_are_not_compared(folders):
    result = run("compare", PROMPT, *QUICK, *folders, "--json", "--temperature", 1)
    whole = json.loads(result.stdout)
    assert whole["greedy_equal"] is None and whole["differences"] == []
    assert "texts of specdec and plain" not in run("compare", PROMPT, *QUICK, *folders, "--temperature", 1).stdout


# ---- what the methods do and count


def test_every_round_and_prompt_has_its_seed():
    target, draft = tunable_pair(0.3)
    ragged, settings = prompts(3, 2, 9), CompareSettings(8, 1.0, seed=10, repeats=2, num_drafts=2)
    comparison = compare(target, draft, ragged, settings)
    ours = comparison.measurements[2]
    assert ours.setting == {"num_drafts": 2} and ours.swept is None and comparison.greedy_equal is None
    decoder, seeds = SpeculativeDecoder(target, draft, 2), iter(range(10, 16))
    for runs in ours.rounds:
        for prompt, done in zip(ragged, runs, strict=True):
            expected = decoder.generate([prompt], None, 8, SamplingParams(1.0), next(seeds))
            assert done.texts[0] == expected.tokens[0]
            assert (done.steps, done.accepted) == (expected.stats.steps, expected.stats.accepted)


def test_the_fastest_setting_is_taken(monkeypatch):
    """With a clock of our own: specdec is fastest with 6 drafts, assisted with transformers' default."""
    for method, best in ((SpecdecMethod, 6), (TransformersMethod, "default")):

        def timed(self, prompts, seed, best=best):
            setting = next(iter(self.setting.values()), None)
            return Run([[1, 2]], 1.0 if setting == best else 2.0, 1, 1, 1, 1)

        monkeypatch.setattr(method, "run", timed)
    told = []
    comparison = compare(*tunable_pair(0.3), [[1], [2]], progress=lambda *call: told.append(call))
    done, total, _ = told[-1]
    assert done == total == 5 + 2 * ((7 + 4 + 2) + (7 + 4 + 2) + 5 * 3) and {call[1] for call in told} == {total}
    assert [call[0] for call in told] == sorted(call[0] for call in told) and {call[0] for call in told} == {
        *range(total + 1)
    }
    assert {"warming up", "looking for the best numbers of drafts", "round 5 of 5"} < {call[2] for call in told}
    plain, assisted, ours = comparison.measurements
    assert (assisted.setting, ours.setting) == ({"num_assistant_tokens": "default"}, {"num_drafts": 6})
    assert ours.swept == {"1": 1.0, "2": 1.0, "3": 1.0, "4": 1.0, "6": 2.0, "8": 1.0, "auto": 1.0}
    assert assisted.swept == {"1": 1.0, "2": 1.0, "3": 1.0, "4": 1.0, "6": 1.0, "8": 1.0, "default": 2.0}
    assert comparison.ratio("plain").per_round == [2.0] * 5
    assert comparison.ratio("assisted").per_round == [1.0] * 5


class Timed:
    """A method that takes so many seconds for a text, and counts its texts."""

    name = "timed"

    def __init__(self, setting: int, *seconds: float):
        self.setting, self._seconds, self.runs = {"k": setting}, iter(seconds), 0

    def run(self, prompts, seed):
        self.runs += 1
        return Run([[1] * 4], next(self._seconds), 1, 0, 0, 0)


def test_a_target_that_transformers_does_not_assist():
    """It refuses models with a state, so that only its plain decoding is measured."""
    target = model_of("qwen3_5_text")
    with pytest.warns(RuntimeWarning, match="no assisted generation for model type 'qwen3_5_text': it is left out"):
        found = compare(target, copy.deepcopy(target), prompts(2, 3, 9), CompareSettings(8, num_drafts=2, repeats=1))
    assert [m.name for m in found.measurements] == ["plain", "specdec"] and found.greedy_equal


def test_the_slower_half_drops_out():
    """Groups of 5, 1 and 2, two prompts. The best time of each prompt counts, also that of an earlier round."""
    five = [
        Timed(1, 3.0, 3.0),
        Timed(2, 2.0, 2.0, 9.0, 9.0, 9.0, 9.0),
        Timed(3, 3.0, 1.0, 1.0, 9.0, 9.0, 9.0),
        Timed(4, 2.0, 2.5, 9.0, 9.0),
        Timed(5, 4.0, 4.0),
    ]
    alone, two = [Timed(7)], [Timed(1, 1.0, 1.0), Timed(2, 0.5, 0.5)]
    told = []
    work = Work(lambda done, total, what: told.append((done, total)), 24)
    assert fastest([five, alone, two], [[1], [2]], 0, work) == [
        (2, {"1": 8 / 6, "2": 8 / 4, "3": 8 / 2, "4": 8 / 4.5, "5": 8 / 8}),
        (0, None),
        (1, {"1": 4.0, "2": 8.0}),
    ]
    assert [m.runs for m in (*five, *alone, *two)] == [2, 6, 6, 4, 2, 0, 2, 2]
    assert told[-1][0] == 2 * sum(map(runs_to_halve, (5, 1, 2))) == 24 == told[-1][1]


def test_nothing_is_tried_where_the_number_was_given(monkeypatch):
    """It is that of both; ``auto`` leaves it to transformers as well. Every text is timed, or one of the warm-up."""
    texts = Counter()
    for method in (SpecdecMethod, TransformersMethod):

        def counted(self, prompts, seed):
            texts[self.name] += 1
            return Run([[1]], 1.0, 1, 1, 1, 1)

        monkeypatch.setattr(method, "run", counted)
    for asked, theirs, ours in ((3, 3, 3), (AdaptiveDrafts(2, costs=[1.0] * 3), "default", "auto")):
        texts.clear()
        settings, told = CompareSettings(4, repeats=2, num_drafts=asked), []

        def tell(*progress, told=told):
            told.append(progress)

        found = compare(*tunable_pair(0.3), [[1], [2]], settings, tell).measurements
        assert [m.setting for m in found] == [{}, {"num_assistant_tokens": theirs}, {"num_drafts": ours}]
        assert [m.swept for m in found] == [None] * 3
        assert texts == {"plain": 5, "assisted": 5, "specdec": 6} and told[-1][:2] == (17, 17)


def test_short_texts_are_a_methods_own():
    target, draft = tunable_pair(0.3)
    settings = CompareSettings(12, seed=3)
    for method in (SpecdecMethod(target, draft, 2, settings), TransformersMethod(target, draft, settings, 2)):
        whole = method.run([[1, 2, 3]], 3).texts[0]
        for most in (5, 12, 99):
            assert method.shortened(most).run([[1, 2, 3]], 3).texts[0] == whole[:most]
        assert method.run([[1, 2, 3]], 3).texts[0] == whole and len(whole) == 12


def test_measurements_add_up():
    parts = {"kernels": 0.25, "loop": 0.25, "target_forwards": 1.0}
    first = Run([[1] * 6], 2.0, 2, 8, 4, 5, seconds_by_part=parts)
    second = Run([[1] * 4], 3.0, 3, 12, 1, 3, seconds_by_part=parts)
    faster = dataclasses.replace(first, seconds=1.0), dataclasses.replace(second, seconds=1.5)
    measured = Measurement("specdec", {"num_drafts": 4}, None, [[first, second], list(faster)]).to_dict()
    assert measured["spread"]["seconds"] == {"median": 3.75, "min": 2.5, "max": 5.0, "per_round": [5.0, 2.5]}
    assert (measured["tokens_per_second"], measured["num_drafts"]) == (3.0, 4)
    names = ("acceptance_rate", "alpha", "tau", "loop_fraction")
    assert [measured[name] for name in names] == [5 / 20, 5 / 8, 10 / 5, 2.0 / 7.5]


@pytest.mark.parametrize("num_drafts", (1, 2, 3))
def test_assisted_counts(num_drafts):
    """The target as its own draft: everything is accepted, so the counts are known."""
    target, settings = tiny_model("llama"), CompareSettings(max_new_tokens=12)
    for prompt in prompts(3, 2, 9):
        done = TransformersMethod(target, copy.deepcopy(target), settings, num_drafts).run([prompt], 0)
        assert done.steps + done.accepted == len(done.texts[0]) == 12
        assert done.steps == 12 // (num_drafts + 1) and done.accepted == done.drafted == 12 - done.steps


def test_a_bad_draft_counts_as_rejected():
    target, draft = tiny_model("llama"), tiny_model("llama", seed=99)
    done = TransformersMethod(target, draft, CompareSettings(max_new_tokens=12), 3).run([[1, 2, 3]], 0)
    assert done.steps + done.accepted == 12 and done.accepted < done.drafted
    plain = TransformersMethod(target, None, CompareSettings(max_new_tokens=12)).run([[1, 2, 3]], 0)
    assert (plain.steps, plain.drafted, plain.accepted, plain.texts[0]) == (12, 0, 0, done.texts[0])


def test_forwards_are_counted_inside_the_block_only():
    target, draft = tunable_pair(0.3)
    ids = torch.tensor([[1, 2, 3]])
    with counted_forwards(target, None, draft) as counts:
        target(ids), target(ids), draft(ids)
    target(ids)
    assert counts == [2, 0, 1]
    assert not target._forward_hooks and not draft._forward_hooks


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_generation_configs_have_no_say_and_come_back(temperature):
    """What a model's own configuration would change: the distribution, the length, the draft's number of tokens."""
    pair = [copy.deepcopy(model) for model in tunable_pair(0.3)]
    for model in pair:
        model.generation_config = GenerationConfig(
            do_sample=True,
            temperature=3.0,
            top_k=2,
            repetition_penalty=9.0,
            num_assistant_tokens=7,
            max_length=5,
        )
    saved, before = [m.generation_config for m in pair], [m.generation_config.to_dict() for m in pair]
    settings = CompareSettings(9, temperature, repeats=1, num_drafts=2)
    texts = [[r[0].texts[0] for r in m.rounds] for m in compare(*pair, [[1, 2, 3]], settings).measurements]
    assert all(m.generation_config is c for m, c in zip(pair, saved, strict=True))
    assert [m.generation_config.to_dict() for m in pair] == before
    clean = compare(*tunable_pair(0.3), [[1, 2, 3]], settings).measurements
    assert texts == [[r[0].texts[0] for r in m.rounds] for m in clean] and len(texts[0][0]) == 9


def test_generation_configs_come_back_after_an_error(monkeypatch):
    target, draft = (copy.deepcopy(model) for model in tunable_pair(0.3))
    saved, method = (
        (target.generation_config, draft.generation_config),
        TransformersMethod(target, draft, CompareSettings(4)),
    )
    monkeypatch.setattr(target, "forward", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        method.run([[1, 2, 3]], 0)
    assert target.generation_config is saved[0] and draft.generation_config is saved[1]
    assert not target._forward_hooks and not draft._forward_hooks


def test_a_batch_is_its_texts_alone():
    """Of transformers, whose shorter prompts are padded, and of specdec; one text ends before the others."""
    target, draft = (copy.deepcopy(model) for model in tunable_pair(0.3))
    batch, settings = prompts(3, 2, 9), CompareSettings(12)
    text = SpeculativeDecoder(target, draft).generate([batch[1]], max_new_tokens=12).tokens[0]
    target.generation_config.eos_token_id = text[4]
    for method in (TransformersMethod(target, None, settings), SpecdecMethod(target, draft, 3, settings)):
        alone = [method.run([prompt], 0) for prompt in batch]
        together = method.run(batch, 0)
        assert together.texts == [run.texts[0] for run in alone]
        assert len(together.texts[1]) <= 5 < max(map(len, together.texts))
        assert (together.steps, together.accepted) == tuple(
            sum(getattr(done, name) for done in alone) for name in ("steps", "accepted")
        )
        for done in (together, *alone):
            assert [sum(a.tokens for a in arrivals) for arrivals in done.arrivals] == [len(t) for t in done.texts]
            assert all(0 < a.seconds <= done.seconds for arrivals in done.arrivals for a in arrivals)


def test_assisted_text_arrives_in_pieces():
    target = tiny_model("llama")
    done = TransformersMethod(target, copy.deepcopy(target), CompareSettings(12), 3).run([[1, 2, 3]], 0)
    assert [a.tokens for a in done.arrivals[0]] == [4, 4, 4]


def test_methods_take_turns():
    """In each batch another one begins, and each has the seed of the batch's first prompt."""
    order = []

    class Named:
        def __init__(self, name: str):
            self.name = name

        def run(self, prompts, seed):
            order.append((self.name, prompts, seed))
            return Run([[1]] * len(prompts), 1.0, 1, 0, 0, 0)

    batches = [[[1], [2]], [[3]]]
    runs = play_round([Named("a"), Named("b"), Named("c")], batches, 5, Work(lambda *_: None, 6), 1)
    assert [name for name, *_ in order] == ["b", "c", "a", "c", "a", "b"]
    assert [each[1:] for each in order] == [(batches[0], 5)] * 3 + [(batches[1], 7)] * 3
    assert [[len(run.texts) for run in of_method] for of_method in runs] == [[2, 1]] * 3


def test_texts_that_end_count_to_their_end():
    target, draft = (copy.deepcopy(model) for model in tunable_pair(0.3))
    text = SpeculativeDecoder(target, draft).generate([[1, 2, 3]], max_new_tokens=12).tokens[0]
    target.generation_config.eos_token_id = text[6]
    expected = text[: text.index(text[6]) + 1]
    for method in (
        SpecdecMethod(target, draft, 3, CompareSettings()),
        TransformersMethod(target, draft, CompareSettings(), 3),
    ):
        done = method.run([[1, 2, 3]], 0)
        assert done.texts[0] == expected
        assert done.accepted <= done.drafted


def test_no_prompts():
    with pytest.raises(ValueError, match="prompts: got none, allowed: at least one"):
        compare(*tunable_pair(0.3), [])
