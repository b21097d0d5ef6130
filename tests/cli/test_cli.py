"""The command line: what goes where, what equals what, and how bad input is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import click
import pytest
import torch
from specdec import SpeculativeDecoder
from specdec.cli.show import Page
from specdec.detokenize import continuation
from support.commands import PROMPT, refused, rows, run, save
from transformers import LlamaForCausalLM
from transformers.utils import logging

from specdec_kernels import SamplingParams

# ---- generate


@pytest.mark.parametrize("temperature, seed, num_drafts", [(0.0, 0, 4), (0.8, -6, 2)])
def test_generate_is_the_decoder(pair, temperature, seed, num_drafts):
    target, draft, tokenizer = pair
    prompt = tokenizer([PROMPT]).input_ids
    expected = SpeculativeDecoder(target, draft, num_drafts).generate(
        prompt, max_new_tokens=15, params=SamplingParams(temperature=temperature), seed=seed
    )
    options = ("--temperature", temperature, "--seed", seed, "-k", num_drafts, "--max-new-tokens", 15)
    result = run("generate", PROMPT, "--json", *options)
    assert result.stdout.count("\n") == 1 and result.stderr == ""
    row = json.loads(result.stdout)
    assert list(row) == ["id", "prompt", "text", "token_ids", "produced_by", "finish_reason", "status", "stats"]
    end = "eos" if row["token_ids"][-1] == target.generation_config.eos_token_id else "length"
    assert (row["id"], row["prompt"], row["finish_reason"], row["status"]) == (0, 0, end, "OK")
    assert row["token_ids"] == expected.tokens[0]
    assert row["produced_by"] == [str(p) for p in expected.produced_by[0]]
    assert row["text"] == continuation(tokenizer, prompt[0], expected.tokens[0])
    stats, emitted = row["stats"], len(row["token_ids"])
    assert stats["emitted"] == emitted == stats["accepted"] + stats["steps"] - stats["cut_steps"]
    assert len(stats["drafted_by_position"]) == num_drafts and stats["seconds"]["total"] > 0


def test_text_is_streamed_and_stats_go_to_stderr(monkeypatch):
    row, shown = rows(PROMPT, "-k", 4, "--max-new-tokens", 12)[0], []
    show = Page.show

    def spy(self, tokens, produced_by):
        shown.append(list(tokens))
        show(self, tokens, produced_by)

    monkeypatch.setattr(Page, "show", spy)
    result = run("generate", PROMPT, "-k", 4, "--max-new-tokens", 12)
    assert result.stdout == PROMPT + row["text"] + "\n"
    assert len(shown) == row["stats"]["steps"] and sum(shown, []) == row["token_ids"]
    assert result.stderr.startswith(f"12 tokens in {row['stats']['steps']} steps: tau ")
    assert result.stderr.count("\n") == 1


def test_verbose_colours_add_up(monkeypatch):
    produced_by = rows(PROMPT, "-k", 4, "--max-new-tokens", 12)[0]["produced_by"]
    plain = run("generate", PROMPT, "-k", 4, "--max-new-tokens", 12)
    monkeypatch.setattr("specdec.cli.terminal.on_terminal", lambda: True)
    verbose = run("generate", PROMPT, "-k", 4, "--max-new-tokens", 12, "-v", color=True)
    assert click.unstyle(verbose.stdout) == plain.stdout
    legend = click.unstyle(verbose.stderr).splitlines()[0]
    names = ("accepted", "recovered", "bonus")
    assert legend == "tokens: " + ", ".join(f"{name} {produced_by.count(name)}" for name in names)
    assert sum(produced_by.count(name) for name in names) == 12
    for code, name in zip((32, 31, 34), names, strict=True):
        assert verbose.stdout.count(f"\x1b[{code}m") == produced_by.count(name)
    assert "\x1b" not in plain.output


@pytest.mark.parametrize("suffix", (".txt", ".jsonl"))
def test_a_batch_equals_its_prompts_one_by_one(tmp_path, suffix):
    texts = [PROMPT.strip(), "class A:\x0c", " import os # é"]
    if suffix == ".txt":
        content = "\ufeff" + "\r\n\n".join(texts)
    else:
        lines = (texts[0], {"prompt": texts[1]}, {"prompt": texts[2], "id": 7})
        content = "\n\n".join(map(json.dumps, lines))
    file = tmp_path / f"prompts{suffix}"
    file.write_bytes(content.encode())
    options = ("--temperature", 0.9, "--max-new-tokens", 6)
    batch = rows("--batch-file", file, *options, "--seed", 3)
    assert len(batch) == 3
    for i, (text, row) in enumerate(zip(texts, batch, strict=True)):
        alone = rows(text, *options, "--seed", 3 + i)[0]
        assert (row["token_ids"], row["text"]) == (alone["token_ids"], alone["text"])
    shown = run("generate", "--batch-file", file, *options, "--seed", 3).stdout
    whole = [text + row["text"] for text, row in zip(texts, batch, strict=True)]
    assert shown == "".join(f"--- {i} of 3 ---\n{text}\n" for i, text in enumerate(whole, 1))


def test_no_drafts_decode_plainly():
    plain, drafted = rows(PROMPT, "--max-new-tokens", 12, "-k", 0), rows(PROMPT, "--max-new-tokens", 12)
    assert plain[0]["text"] == drafted[0]["text"] and plain[0]["produced_by"] == ["bonus"] * 12
    assert (plain[0]["stats"]["drafted"], plain[0]["stats"]["draft_forwards"]) == (0, 0)


def test_no_new_tokens():
    assert rows(PROMPT, "--max-new-tokens", 0)[0]["text"] == ""
    assert run("generate", PROMPT, "--max-new-tokens", 0).stdout == PROMPT + "\n"


def test_dtype_reaches_the_models(monkeypatch):
    from specdec.models.load import loading

    monkeypatch.undo()  # load the pair
    seen, load = [], loading.load_model
    monkeypatch.setattr(loading, "load_model", lambda *a, **k: seen.append(load(*a, **k)) or seen[-1])
    for given, dtype in (((), torch.float32), (("--dtype", "bfloat16"), torch.bfloat16)):
        run("generate", PROMPT, "--max-new-tokens", 1, *given)
        assert {m.dtype for m in seen[-2:]} == {dtype}


def test_no_loading_bar(monkeypatch):
    monkeypatch.undo()  # load the pair
    logging.enable_progress_bar()  # another test may have silenced it
    assert "Loading" not in run("generate", PROMPT, "--max-new-tokens", 1).output


def test_as_a_process():
    """The same output outside of typer's runner; torch waits until a command needs it. What was imported and loaded is
    not garbage, and is not looked through while a text is decoded."""
    code = (
        "import gc, sys; from specdec.cli import main; assert 'torch' not in sys.modules\n"
        "try: main()\nfinally: assert gc.isenabled() and gc.get_freeze_count() > 10_000"
    )
    args = ["generate", PROMPT, "-k", "4", "--max-new-tokens", "8", "--device", "cpu"]
    process = subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    expected = run(*args)
    assert process.stdout.decode() == expected.stdout
    assert process.stderr.decode().endswith(expected.stderr)  # a library that transformers imports may complain before


# ---- models from folders


def test_models_from_folders(pair, folders):
    target, draft = (LlamaForCausalLM.from_pretrained(folder) for folder in folders[1::2])
    prompt = pair[2]([PROMPT]).input_ids
    expected = SpeculativeDecoder(target, draft).generate(prompt, max_new_tokens=9).tokens[0]
    assert rows(PROMPT, *folders, "--max-new-tokens", 9)[0]["token_ids"] == expected


def test_logits_without_a_distribution_are_told(pair, tmp_path):
    folder = save(tmp_path, 0, tokenizer=pair[2])
    model = LlamaForCausalLM.from_pretrained(folder)
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    model.save_pretrained(folder)
    for flags in ((), ("--json",)):
        models = ("--target", folder, "--draft", folder)
        result = run("generate", PROMPT, *models, "-k", 4, "--max-new-tokens", 5, *flags)
        assert "Warning: prompt 0: " in result.stderr and "TARGET_NAN" in result.stderr
    row = json.loads(result.stdout)
    assert (row["token_ids"], row["finish_reason"], row["status"]) == ([], "failed", "TARGET_NAN|DRAFT_NAN")
    assert row["error"] == "the target's logits have no distribution: TARGET_NAN|DRAFT_NAN"


# ---- refusals


@pytest.mark.parametrize("command", ("generate", "compare"))
@pytest.mark.parametrize(
    "args, message",
    [
        (["x", "--temperature", "-1"], "--temperature: got -1.0, allowed: 0 (greedy), or 0.001 to 1e+30"),
        (["x", "--temperature", "nan"], "--temperature: got nan, allowed: 0 (greedy)"),
        (["x", "--temperature", "inf"], "--temperature: got inf, allowed: 0 (greedy)"),
        (["x", "--temperature", "1e39"], "--temperature: got inf, allowed: 0 (greedy)"),
        (["x", "--temperature", "1e-9"], "--temperature: got 1e-09, allowed: 0 (greedy), or 0.001 to 1e+30"),
        (["x", "--top-k", "-1"], "--top-k: got -1, allowed: an integer >= 1, or 0 (off)"),
        (["x", "--top-p", "1.5"], "--top-p: got 1.5, allowed: 0 to 1 (1 is off)"),
        (["x", "--min-p", "nan"], "--min-p: got nan, allowed: 0 to 1 (0 is off)"),
        (["x", "--top-k", "5"], "--top-k: got 5 with temperature 0, allowed: a temperature > 0"),
        (["x", "--top-p", "0.5"], "--top-p: got 0.5 with temperature 0, allowed: a temperature > 0"),
        (["x", "--min-p", "0.5"], "--min-p: got 0.5 with temperature 0, allowed: a temperature > 0"),
        (["x", "--repetition-penalty", "0"], "--repetition-penalty: got 0.0, allowed: 0.001 to 1000 (1 is off)"),
        (["x", "--rule", "typical"], "--rule: got 'typical', allowed: 'token', 'block', 'coupled'"),
        (["x", "--num-drafts", "-1"], "--num-drafts: got -1, allowed: an integer >= "),
        (["x", "--max-new-tokens", "-1"], "--max-new-tokens: got -1, allowed: an integer >= "),
        (["x", "--seed", str(2**63)], "--seed: got "),
        (
            ["x", "--target", "t", "--drafter", "model"],
            "--target / --draft: got --target without --draft, allowed: both",
        ),
        (["x", "--draft", "d"], "--target / --draft: got --draft without --target, allowed: both"),
        (["x", "--target", "./no", "--draft", "./no"], "--target: there is no folder './no'"),
        (["x", "--dtype", "int3"], "--dtype: got 'int3', allowed: auto, float32, bfloat16, float16, float64"),
        (["x", "--device", "abacus"], "--device: got 'abacus', allowed: cpu"),
        (["x", "--device", "meta"], "--device: got 'meta', allowed: cpu"),
        (["x " * 2100], "PROMPT: got a prompt of 2101 tokens, allowed: at most 2048: the target"),
        (["x", "--max-new-tokens", "2048"], "--max-new-tokens: got 2048 after a prompt of 1 tokens, allowed"),
        ([""], "PROMPT: got an empty prompt, allowed: at least one character"),
        (["\udcff"], "PROMPT: got '\\udcff', allowed: text without lone surrogates"),
        (
            ["--batch-file", "no"],
            "--batch-file: got 'no' (No such file or directory), allowed: a file that can be read",
        ),
    ],
)
def test_bad_input_is_named(command, args, message):
    assert f"Invalid value for {message}" in refused(command, *args)


def test_one_source_of_prompts():
    named = "PROMPT / --batch-file / --prompt-file"
    assert f"{named}: got none, allowed: one of them" in refused("generate")
    for given in (("x", "--batch-file", __file__), ("--batch-file", __file__, "--prompt-file", __file__)):
        assert f"{named}: got several, allowed: one of them" in refused("generate", *given)
    assert "PROMPT / --batch-file / --prompt-set: got several, allowed: " in refused(
        "compare", "x", "--batch-file", __file__
    )


def test_compare_needs_something_to_measure():
    for option in ("--num-drafts", "--max-new-tokens", "--repeats"):
        assert f"{option}: got 0, allowed: an integer >= 1" in refused("compare", option, 0)


@pytest.mark.parametrize("command", ("generate", "compare"))
@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", b"", "a.txt' without a prompt, allowed: at least one line that is not empty"),
        ("a.txt", b" \n\r\n\t\n", "a.txt' without a prompt, allowed: at least one line that is not empty"),
        ("a.txt", b"fine\n\xff\n", "a.txt', which is not UTF-8"),
        ("a.txt", b"fine\n" + b"x " * 2100, "got a prompt of 2101 tokens, allowed: at most 2048"),
        ("a.jsonl", b'"fine"\n\n{"prompt"', "line 3 of 'a.jsonl': got '{\"prompt\"', allowed: a JSON string or {"),
        ("a.jsonl", b'"fine"\n7', "line 2 of 'a.jsonl': got '7', allowed: a JSON string or {"),
        ("a.jsonl", b'{"text": "x"}', "line 1 of 'a.jsonl': keys: got 'text', allowed: id, prompt"),
        ("a.jsonl", b"9" * 5000, "line 1 of 'a.jsonl': got '999"),
        ("a.jsonl", b"[" * 100_000, "line 1 of 'a.jsonl': got '[[["),
        ("a.jsonl", b'"fine"\n""', "line 2 of 'a.jsonl': prompt: got an empty prompt, allowed: at least one character"),
        ("a.jsonl", b'"fine"\n"\\ud800"', "line 2 of 'a.jsonl': prompt: got '\\ud800', allowed: text without lone"),
        ("a.jsonl", b'"x"\n{"prompt": "y", "id": 0}', "line 2 of 'a.jsonl': id: got 0, which line 1 has, allowed: ev"),
        ("a.jsonl", b'{"prompt": "x", "prompt": "y"}', "line 1 of 'a.jsonl': keys: got 'prompt' twice, allowed: every"),
    ],
)
def test_bad_files_are_named(tmp_path, command, name, content, message):
    file = tmp_path / name
    file.write_bytes(content)
    told = refused(command, "--batch-file", file)
    assert told.startswith("Invalid value for --batch-file: ") and message in told.replace(str(file), name)


@pytest.mark.parametrize(("command", "hint"), (("generate", "--drafter"), ("bench", "--method")))
def test_vocabularies_that_differ(folders, tmp_path, command, hint):
    """The hint is of an option that the command has."""
    other, output = save(tmp_path, 0, vocabulary=77), ("--output", tmp_path / "out") if command == "bench" else ()
    told = refused(command, PROMPT, *folders[:2], "--draft", other, *output)
    assert "--draft: got a vocabulary of 77 tokens, allowed: 4096, the target's; universal (" in told
    assert hint in told.partition("universal")[2]
    assert "d2t" not in told  # which the command line does not have
