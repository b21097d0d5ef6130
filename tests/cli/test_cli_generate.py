"""Options of ``specdec generate`` and ``compare`` beyond the distribution: drafters, ends, traces, several texts."""

from __future__ import annotations

import copy
import gzip
import json
import warnings

import pytest
import torch
from specdec import PromptLookupDrafter, SequenceState, SpeculativeDecoder, SuffixDrafter, load_model
from specdec.cli import models
from specdec.cli.drafters import NAMES, make_drafter
from specdec.drafters.draft_window import DraftWindow
from support.commands import PROMPT, invoke, refused, rows, run, save
from support.heads import write

from specdec_kernels import SamplingParams

SHORT = ("--max-new-tokens", 12)


def greedy() -> list[int]:
    return rows(PROMPT, *SHORT)[0]["token_ids"]


@pytest.mark.parametrize(
    "name, kind", [("model", "ModelDrafter"), ("lookup", "PromptLookupDrafter"), ("suffix", "SuffixDrafter")]
)
def test_drafters(monkeypatch, name, kind):
    made, init = [], SpeculativeDecoder.__init__
    monkeypatch.setattr(
        SpeculativeDecoder, "__init__", lambda self, *a, **k: made.append((a, k)) or init(self, *a, **k)
    )
    prompt = PROMPT * 2  # so that there is something to find
    plain = rows(prompt, *SHORT, "--drafter", "none")[0]
    own = ("--confidence", 0.3, "--draft-window", 8) if name == "model" else ()
    row = rows(prompt, *SHORT, "--drafter", name, "-k", 3, *own)[0]
    assert row["token_ids"] == plain["token_ids"] and row["stats"]["drafted"] > 0 == plain["stats"]["drafted"]
    (_, around, k), named = made[-1]
    drafter = around.drafter  # what is around it drafts the tokens that grammars force
    assert (type(drafter).__name__, k) == (kind, 3) and named == {"tree": None}
    assert getattr(drafter, "confidence", None) == (0.3 if own else None)
    assert getattr(drafter, "window", None) == (DraftWindow(8) if own else None)
    assert made[0][0][1] is None


def test_a_target_needs_no_draft(folders):
    target = folders[:2]
    plain = rows(PROMPT, *target, "--drafter", "none", *SHORT)[0]["token_ids"]
    for drafter in (("lookup",), ("suffix",), ("early-exit", "--exit-layers", 1)):
        assert rows(PROMPT, *target, "--drafter", *drafter, *SHORT)[0]["token_ids"] == plain
    both = rows(PROMPT, *target, "--drafter", "suffix+early-exit", "--exit-layers", 1, *SHORT)[0]
    assert both["token_ids"] == plain and both["stats"]["drafted"] > 0
    for name in ("suffix+lookup", "early-exit+suffix", "suffix+", "suffix+none"):
        assert f"--drafter: got '{name}', allowed: model" in refused("generate", PROMPT, *target, "--drafter", name)
    assert "--tree: got 4 with --drafter suffix+early-exit" in refused(
        "generate", PROMPT, *target, "--drafter", "suffix+early-exit", "--tree", 4
    )
    assert "--exit-layers: got 2, allowed: 1 to 1, the layers of the target" in refused(
        "generate", PROMPT, *target, "--drafter", "early-exit", "--exit-layers", 2
    )


def test_a_draft_with_another_tokenizer(pair, folders, tmp_path):
    """Its text is translated; as a drafter of tokens it is refused."""
    other = copy.deepcopy(pair[2])
    other.add_tokens(["another token"])
    draft = save(tmp_path, 3, vocabulary=4097, tokenizer=other)
    models = (*folders[:2], "--draft", draft)
    told = refused("generate", PROMPT, *models)
    assert "--draft: its tokenizer has 4097 tokens, the target's 4096" in told and "--drafter universal" in told
    row = rows(PROMPT, *models, "--drafter", "universal", *SHORT)[0]
    assert row["stats"]["drafted"] > 0
    assert row["token_ids"] == rows(PROMPT, *folders, *SHORT)[0]["token_ids"]


def test_adaptive_drafts():
    row = rows(PROMPT, *SHORT, "-k", "auto")[0]
    assert row["token_ids"] == greedy()


def test_texts_end_after_stop_strings():
    whole = rows(PROMPT, "--max-new-tokens", 24)[0]["text"]
    stop = whole[5:8]
    end = whole.index(stop) + len(stop)
    row = rows(PROMPT, "--max-new-tokens", 24, "--stop", stop, "--stop", "never so")[0]
    assert row["text"] == whole[:end]
    shown = run("generate", PROMPT, "--max-new-tokens", 24, "--stop", stop)
    assert shown.stdout == PROMPT + whole[:end] + "\n"


def test_several_texts_for_each_prompt(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("x = \ny\n")
    options = ("--temperature", 1, "--max-new-tokens", 5, "-k", 2)
    several = rows("--batch-file", file, *options, "--num-return-sequences", 2, "--seed", 3)
    assert len(several) == 4
    for i, (prompt, row) in enumerate(zip(("x = ", "x = ", "y", "y"), several, strict=True)):
        assert row["token_ids"] == rows(prompt, *options, "--seed", 3 + i)[0]["token_ids"]
    shown = run("generate", "y", *options, "--num-return-sequences", 2, "--seed", 5).stdout
    assert shown == f"--- 1 of 2 ---\ny{several[2]['text']}\n--- 2 of 2 ---\ny{several[3]['text']}\n"


def test_profile(tmp_path, folders, monkeypatch):
    """The first steps alone are recorded, whatever the length of the text, and the longest operations are listed."""
    monkeypatch.setattr("specdec.cli.profiling.STEPS", 2)
    path = tmp_path / "trace.json.gz"
    path.write_text("old")
    result = run("generate", PROMPT, *SHORT, "-k", 2, *folders, "--profile", path)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    steps = [event for event in events if event.get("name") == "specdec_kernels::speculative_step"]
    assert len(steps) == 2 and path.stat().st_size < 500_000 and list(tmp_path.iterdir()) == [path]
    assert result.stdout == run("generate", PROMPT, *SHORT, "-k", 2, *folders).stdout
    assert "CPU ms part calls operation" in result.stderr and "specdec_layers::linear" in result.stderr
    assert f"2 steps and the prefill are in '{path}'" in result.stderr


def test_a_trace_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "trace.json.gz"
    path.write_text("old")
    monkeypatch.setattr("torch.profiler.profile.export_chrome_trace", lambda *_: 1 / 0)
    result = invoke("generate", PROMPT, "--max-new-tokens", 1, "--profile", path)
    assert isinstance(result.exception, ZeroDivisionError)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_drafter_that_fails_is_told(monkeypatch):
    monkeypatch.setattr(PromptLookupDrafter, "start", lambda *_: 1 / 0)
    for flags in ((), ("--json",)):
        result = run("generate", PROMPT, *SHORT, "--drafter", "lookup", *flags)
        assert "Warning: the drafter failed" in result.stderr and "ZeroDivisionError" in result.stderr
        assert "RuntimeWarning" not in result.stderr
    assert json.loads(result.stdout)["token_ids"] == greedy()


def test_compare_with_a_drafter(folders, monkeypatch):
    monkeypatch.setattr("specdec.evaluation.compare.CANDIDATES", (2,))
    quick = ("--max-new-tokens", 6, "--repeats", 1, "-k", 2, "--json", *folders[:2])
    methods = ["plain", "assisted", "specdec"]
    for drafter in ("lookup", "suffix"):  # transformers has prompt lookup beside both
        whole = json.loads(run("compare", "x = x = x = ", "--drafter", drafter, *quick).stdout)
        assert [m["name"] for m in whole["methods"]] == methods and whole["greedy_equal"] is True
        assert list(whole["ratios"]) == [f"specdec/{name}" for name in methods[:-1]]
        assert {m["acceptance_rate"] for m in whole["methods"][:-1]} == {None}
    auto = json.loads(run("compare", "x = ", "--drafter", "suffix", *quick, "-k", "auto").stdout)
    assert auto["methods"][-1]["num_drafts"] == "auto"
    assert "specdec/plain: " in run("compare", "x = ", "--drafter", "suffix", *quick[:6], *folders[:2]).stdout


def test_make_drafter(pair):
    target, draft, tokenizer = pair
    assert make_drafter("model", target, draft).model.model is draft and make_drafter("none", target) is None
    assert isinstance(make_drafter("suffix", target), SuffixDrafter)
    with pytest.raises(ValueError, match="drafter: got 'model' without a draft model, allowed: lookup, suffix"):
        make_drafter("model", target)
    with pytest.raises(ValueError, match=f"drafter: got 'abacus', allowed: {', '.join(NAMES)}"):
        make_drafter("abacus", target)


@pytest.mark.parametrize(
    "args, message",
    [
        (
            ("--drafter", "abacus"),
            "--drafter: got 'abacus', allowed: model, lookup, suffix, early-exit, universal, tree, medusa",
        ),
        (("--exit-layers", 2), "--exit-layers: got 2 with --drafter model, allowed: an integer >= 1 with --drafter"),
        (("--target", "t", "--drafter", "tree"), "--target / --draft: got --target without --draft, allowed: both"),
        (
            ("--target", "t", "--draft", "d", "--drafter", "lookup"),
            "--draft: got a model with --drafter lookup, allowed",
        ),
        (("-k", "many"), "--num-drafts: got many, allowed: an integer >= 0, or auto"),
        (("--confidence", 1), "--confidence: got 1.0, allowed: a number from 0 (off) to below 1"),
        (("--confidence", 0.5, "--drafter", "suffix"), "--confidence: got 0.5 with --drafter suffix, allowed: 0, --d"),
        (("--draft-window", 1), "--draft-window: got 1, allowed: an integer >= 2"),
        (
            ("--draft-window", 9, "--drafter", "suffix"),
            "--draft-window: got 9 with --drafter suffix, allowed: none",
        ),
        (("--draft-window", 9, "--tree", 8), "--draft-window: got 9 with --drafter model --tree 8, allowed: none, or"),
        (("--stop", ""), "--stop: got an empty text, allowed: at least one character"),
        (("--num-return-sequences", 0), "--num-return-sequences: got 0, allowed: an integer >= 1"),
        (
            ("--profile", "/no/such/folder/x.json"),
            "--profile: got '/no/such/folder/x.json', in no folder, allowed: a file",
        ),
        (("--profile", "x.json"), "--profile: got 'x.json', allowed: a name that ends in .json.gz"),
        (("--profile", "/"), "--profile: got '/', a folder, allowed: a file in a folder that can be written to"),
    ],
)
def test_bad_options_are_named(monkeypatch, args, message):
    monkeypatch.setattr("specdec.cli.models.load", lambda *_: pytest.fail("loaded"))
    assert message in refused("generate", "x", *args)


def test_comparing_nothing_with_nothing():
    assert "--drafter: got 'none', allowed: one that proposes something" in refused("compare", "--drafter", "none")


def test_a_target_alone_drafts_from_its_own_text(pair, tmp_path):
    """The text of plain decoding with the same seed, and one line that says who drafts and what would be better."""
    target = save(tmp_path / "target", 3, 4160, pair[2])
    options = ("--target", target, "--temperature", 0.8, *SHORT, "--json", PROMPT)
    alone, plain = run("generate", *options), run("generate", *options, "--drafter", "none", "--rule", "coupled")
    texts = [json.loads(result.stdout)["token_ids"] for result in (alone, plain)]
    assert texts[0] == texts[1]
    told = " ".join(alone.stderr.split())
    assert told.count("No --draft, so the text itself drafts (suffix).") == 1 and f"specdec advise {target}" in told
    assert "No --draft" not in run("generate", *options, "--drafter", "suffix").stderr
    quarter = json.loads(run("generate", *options, "--drafter", "early-exit", "-k", 2).stdout)
    assert quarter["stats"]["drafted"] > 0


def test_models_that_pad_one_tokenizer_to_different_sizes(pair, tmp_path):
    """As the Qwen2.5 family does."""
    sizes = {"target": 4160, "draft": 4128}
    folders = [save(tmp_path / name, 3, size, pair[2]) for name, size in sizes.items()]
    options = ("--target", folders[0], *SHORT)
    plain = rows(PROMPT, *options, "--drafter", "none")[0]
    row = rows(PROMPT, *options, "--draft", folders[1])[0]
    assert row["token_ids"] == plain["token_ids"] and row["stats"]["drafted"] > 0
    compared = run("compare", *options, "--draft", folders[1], "--repeats", 1, "-k", 2, "--json", PROMPT)
    names = [method["name"] for method in json.loads(compared.stdout)["methods"]]
    assert names == ["plain", "specdec"]  # transformers takes no such assistant


def test_no_token_that_only_pads_the_vocabulary(pair, tmp_path):
    """A random target of 4160 ids, of which the tokenizer has 4096, draws the others one time in sixty."""
    target = save(tmp_path / "padded", 3, 4160, pair[2])
    options = ("--target", target, "--drafter", "none", "--temperature", 2, "--max-new-tokens", 40)
    found = rows("ab", "--num-return-sequences", 16, *options)
    assert max(token for row in found for token in row["token_ids"]) < 4096
    result = SpeculativeDecoder(load_model(target), None, 0).generate(
        pair[2](["ab"]).input_ids, max_new_tokens=40, params=SamplingParams(2.0), num_return_sequences=16
    )
    assert max(token for tokens in result.tokens for token in tokens) >= 4096


def test_a_folder_of_a_head(pair, tmp_path):
    target = pair[0]
    hidden, vocabulary = target.config.hidden_size, target.config.vocab_size
    tensors = {"0.0.linear.weight": torch.zeros(hidden, hidden), "0.0.linear.bias": torch.zeros(hidden)}
    tensors["0.1.weight"] = target.get_output_embeddings().weight.detach().clone()
    folder = write(tmp_path / "head", {"medusa_num_heads": 1, "medusa_num_layers": 1}, tensors)
    row = rows(PROMPT, *SHORT, "--drafter", folder, "-k", 3)[0]
    assert row["token_ids"] == greedy() and row["stats"]["drafted"] > 0
    write(folder, {}, tensors | {"0.1.weight": torch.zeros(7, hidden)})
    told = refused("generate", PROMPT, "--drafter", folder)
    assert f"0.1.weight: got shape [7, {hidden}], allowed: [{vocabulary}, {hidden}]" in told and "--drafter" in told
    assert "the folder of a head" in refused("generate", PROMPT, "--drafter", tmp_path / "none")
    assert models.ModelOptions().paths(str(folder))["head"] == str(folder)  # a job is resumed with the same head only


def test_a_sequence_whose_drafts_fail_is_told_once(monkeypatch):
    """By its status, in the command's words, and not by a warning of the loop as well."""
    monkeypatch.setattr(SequenceState, "drafter_failed", lambda _: True)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = run("generate", PROMPT, *SHORT, "--drafter", "lookup", "--json")
    assert json.loads(result.stdout)["token_ids"] == greedy()
    assert not [str(w.message) for w in warned if "drafts no more" in str(w.message)]
