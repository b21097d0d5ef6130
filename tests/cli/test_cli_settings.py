"""The command line's sampling settings: that they arrive, what they are called when they are wrong."""

from __future__ import annotations

import json

import pytest
import torch
from specdec import SpeculativeDecoder
from specdec.evaluation.contenders import CompareSettings, SpecdecMethod, TransformersMethod
from specdec.evaluation.near_ties import Judge
from support.commands import PROMPT, refused, rows, run
from support.models import prompts, tiny_model
from transformers import RepetitionPenaltyLogitsProcessor

from specdec_kernels import SamplingParams

# ---- generate

SETTINGS = {
    "--top-k": ("params", "top_k", 30),
    "--top-p": ("params", "top_p", 0.9),
    "--min-p": ("params", "min_p", 0.02),
    "--repetition-penalty": ("params", "repetition_penalty", 1.3),
    "--presence-penalty": ("params", "presence_penalty", 0.8),
    "--frequency-penalty": ("params", "frequency_penalty", 0.6),
    "--rule": ("argument", "rule", "coupled"),
    "--min-new-tokens": ("argument", "min_new_tokens", 15),
}


@pytest.mark.parametrize("chosen", [(), tuple(SETTINGS)])
def test_every_setting_reaches_the_decoder(monkeypatch, pair, chosen):
    target, draft, tokenizer = pair
    seen, decode = [], SpeculativeDecoder.decode
    monkeypatch.setattr(SpeculativeDecoder, "decode", lambda *a, **k: seen.append(a) or decode(*a, **k))
    options = [x for name in chosen for x in (name, SETTINGS[name][2])]
    row = rows(PROMPT, *options, "--temperature", 1.1, "--max-new-tokens", 15, "--seed", 4, "-k", 4)[0]
    params = {SETTINGS[name][1]: SETTINGS[name][2] for name in chosen if SETTINGS[name][0] == "params"}
    arguments = {SETTINGS[name][1]: SETTINGS[name][2] for name in chosen if SETTINGS[name][0] == "argument"}
    _, (request,), rule, _ = seen[0]
    assert request.params == SamplingParams(1.1, **params)
    asked = {"rule": rule, "min_new_tokens": request.min_new_tokens}
    assert asked == {"rule": "token", "min_new_tokens": 0, **arguments}
    expected = SpeculativeDecoder(target, draft).generate(
        tokenizer([PROMPT]).input_ids,
        max_new_tokens=15,
        params=SamplingParams(1.1, **params),
        seed=4,
        **arguments,
    )
    assert row["token_ids"] == expected.tokens[0]


def test_bias_and_bans():
    first = rows(PROMPT, "--max-new-tokens", 6)[0]["token_ids"]
    banned = rows(PROMPT, "--max-new-tokens", 6, "--ban", first[0], "--ban", first[1])[0]["token_ids"]
    assert not {*banned} & {*first[:2]}
    assert (
        rows(PROMPT, "--max-new-tokens", 6, "--logit-bias", f"{first[0]}=-inf", "--logit-bias", f"{first[1]}=-1e9")[0][
            "token_ids"
        ]
        == banned
    )
    assert rows(PROMPT, "--max-new-tokens", 6, "--logit-bias", "77=1e4")[0]["token_ids"] == [77] * 6


def test_log_probs(pair):
    target, _, tokenizer = pair
    row = rows(PROMPT, "--max-new-tokens", 8, "--temperature", 0.7, "--log-probs")[0]
    assert list(row)[-3:] == ["stats", "log_probs", "raw_log_probs"]
    prompt, tokens = tokenizer([PROMPT]).input_ids[0], row["token_ids"]
    with torch.inference_mode():
        logits = target(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    for name, temperature in (("log_probs", 0.7), ("raw_log_probs", 1.0)):
        expected = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert row[name] == pytest.approx(expected.tolist(), abs=1e-3)


# ---- compare


def test_compare_gives_its_settings_to_all_methods(monkeypatch, pair):
    seen, filters = [], {"top_k": 30, "top_p": 0.9, "min_p": 0.02}

    def spy(target, draft, prompts, settings, progress, assistant):
        seen.append(settings)
        raise ValueError("seed: enough")

    monkeypatch.setattr("specdec.evaluation.compare.compare", spy)
    given = {"temperature": 1.1, **filters, "repetition_penalty": 1.3}
    options = [x for name, value in given.items() for x in ("--" + name.replace("_", "-"), value)]
    refused("compare", "x", *options, "--rule", "block", "--max-new-tokens", 9)
    (settings,) = seen
    assert settings == CompareSettings(9, 1.1, **filters, repetition_penalty=1.3, rule="block")
    calls, generate = [], SpeculativeDecoder.generate
    monkeypatch.setattr(SpeculativeDecoder, "generate", lambda *a, **k: calls.append((a, k)) or generate(*a, **k))
    target, draft, tokenizer = pair
    prompt = tokenizer([PROMPT]).input_ids[0]
    SpecdecMethod(target, draft, 2, settings).run([prompt], 0)
    assert calls[0][0][4] == SamplingParams(**given) and calls[0][1]["rule"] == "block"
    configs, theirs = [], target.generate
    monkeypatch.setattr(target, "generate", lambda *a, **k: configs.append(target.generation_config) or theirs(*a, **k))
    for assistant in (None, draft):
        assert len(TransformersMethod(target, assistant, settings, 2).run([prompt], 0).texts[0]) == 9
    assert [{name: getattr(config, name) for name in given} for config in configs] == [given, given]


def test_penalised_greedy_texts_are_equal(folders):
    quick = ("--max-new-tokens", 12, "--repeats", 1, "-k", 2, "--repetition-penalty", 1.4)
    whole = json.loads(run("compare", PROMPT, *folders, *quick, "--json").stdout)
    assert whole["greedy_equal"] is True and whole["differences"] == []


def test_differences_of_penalised_texts_are_judged_by_penalised_logits():
    target = tiny_model("llama")
    prompt = prompts(1, 30, 30, seed=1)[0]
    with torch.inference_mode():
        logits = target(torch.tensor([prompt])).logits[:, -1]
    penalised = RepetitionPenaltyLogitsProcessor(3.0)(torch.tensor([prompt]), logits)[0]
    best, other = penalised.argmax().item(), max({*prompt}, key=lambda t: logits[0, t].item())
    found = Judge(target, 3.0).explain(prompt, [best], [other])
    assert found.logits == pytest.approx((penalised[best].item(), penalised[other].item()), rel=1e-4)
    assert found.gap == pytest.approx((penalised[best] - penalised[other]).item(), rel=1e-3)
    assert Judge(target).explain(prompt, [best], [other]).logits[1] == pytest.approx(logits[0, other].item(), rel=1e-4)


# ---- refusals


@pytest.mark.parametrize(
    "args, message",
    [
        (("--presence-penalty", "inf"), "--presence-penalty: got inf, allowed: -1000 to 1000 (0 is off)"),
        (("--frequency-penalty", "-2000"), "--frequency-penalty: got -2000.0, allowed: -1000 to 1000"),
        (("--logit-bias", "5"), "--logit-bias: got '5', allowed: ID=VALUE, an integer and a number, each ID once"),
        (("--logit-bias", "x=1"), "--logit-bias: got 'x=1', allowed: ID=VALUE"),
        (("--logit-bias", "5=nan"), "--logit-bias: got '5=nan', allowed: ID=VALUE"),
        (("--logit-bias", "5=1", "--logit-bias", "5=2"), "--logit-bias: got '5=2', allowed: ID=VALUE"),
        (("--logit-bias", "5=inf"), "--logit-bias: got inf for id 5, allowed: -1e+30 to 1e+30, or -inf"),
        (("--logit-bias", "4096=1"), "--logit-bias: got id 4096, allowed: ids from 0 to 4095"),
        (("--ban", "-1"), "--ban: got id -1, allowed: ids from 0 to 4095"),
        (("--min-new-tokens", "-1"), "--min-new-tokens: got -1, allowed: an integer >= 0"),
        (("--min-new-tokens", "129"), "--min-new-tokens: got 129, allowed: an integer from 0 to max_new_tokens = 128"),
        (("--log-probs",), "--log-probs: got --log-probs without --json, allowed: both, or --output"),
    ],
)
def test_bad_settings_are_named(args, message):
    assert f"Invalid value for {message}" in refused("generate", "x", *args)


def test_settings_are_refused_before_models_are_loaded(monkeypatch):
    monkeypatch.setattr("specdec.cli.models.load", lambda *_: pytest.fail("loaded"))
    for command in ("generate", "compare"):
        refused(command, "x", "--top-p", 2)
        refused(command, "x", "--rule", "abacus")
