"""lm-evaluation-harness: the answers are those of its own ``hf``, on tasks of local files (harness/)."""

from __future__ import annotations

import copy
import json
import os

import pytest
import torch
from support import ROOT
from support.commands import save

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when lm_eval imports datasets
lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'specdec-kernels[harness]'")

from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from specdec import SuffixDrafter  # noqa: E402
from specdec.cli.lm_eval_model import SpecdecLM, StopsInOutput  # noqa: E402
from specdec.harness import main  # noqa: E402

EMBEDDED = ROOT / "python" / "specdec" / "embedded"
TASKS = ROOT / "tests" / "cli" / "harness"
SAMPLED = "do_sample=true,temperature=0.8,top_p=0.9"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch, tmp_path_factory):
    monkeypatch.chdir(ROOT)  # the tasks name their files from there
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")


@pytest.fixture(scope="module")
def manager():
    return TaskManager(include_path=str(TASKS), include_defaults=False)


def answers(model, manager, task="local_code", **more):
    """The answer to each question, the score, and what the results say of the drafts."""
    found = lm_eval.simple_evaluate(
        model=model, tasks=[task], task_manager=manager, bootstrap_iters=0, log_samples=True, **more
    )
    said = [sample["resps"] for sample in found["samples"][task]]
    metric = next(value for name, value in found["results"][task].items() if name.endswith(",none"))
    return said, metric, found["config"].get("specdec")


@pytest.fixture(scope="module")
def plain(pair, manager):
    target, _, tokenizer = pair
    said, score, _ = answers(HFLM(target, tokenizer=tokenizer, batch_size=1), manager)
    assert score == 0.5 and len({answer for ((answer,),) in said}) == 8  # half of the answers of the file are its own
    return said


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("drafts", [{}, {"num_drafts": 3}, {"tree": 6}, {"drafter": "suffix", "draft": None}], ids=str)
def test_greedy_answers_are_those_of_hf(pair, manager, plain, drafts, batch_size):
    """They end at stop strings, each text of a batch at its own."""
    target, draft, tokenizer = pair
    model = SpecdecLM(target, tokenizer=tokenizer, batch_size=batch_size, **{"draft": draft, **drafts})
    said, score, counted = answers(model, manager)
    assert said == plain and score == 0.5
    assert counted == model.statistics and counted["emitted"] >= 100
    assert 0 < counted["accepted"] < counted["drafted"] and 1 < counted["tau"] == counted["emitted"] / counted["steps"]


def test_log_likelihoods_are_those_of_hf(pair, manager):
    target, draft, tokenizer = pair
    models = [
        HFLM(target, tokenizer=tokenizer, batch_size=4),
        SpecdecLM(target, draft=draft, tokenizer=tokenizer, batch_size=4),
    ]
    theirs, ours = (answers(model, manager, "local_choice") for model in models)
    assert ours[:2] == theirs[:2] and ours[1] == 1.0 and ours[2]["steps"] == 0


def test_sampled_answers_depend_on_the_seed_alone(pair, manager):
    target, draft, tokenizer = pair

    def sampled(batch_size, seed):
        model = SpecdecLM(target, draft=draft, tokenizer=tokenizer, batch_size=batch_size)
        return answers(model, manager, gen_kwargs=SAMPLED, torch_random_seed=seed)[0]

    first = sampled(1, 7)
    assert sampled(4, 7) == first != sampled(4, 8)


def test_the_command_line(monkeypatch, tmp_path, capsys, plain):
    """Models by their folders, and results in a file."""
    args = (
        f"pretrained={EMBEDDED / 'target'},tokenizer={EMBEDDED / 'tokenizer'},draft={EMBEDDED / 'draft'},dtype=float32"
    )
    argv = ["lm_eval", "run", "--model", "specdec", "--model_args", args, "--tasks", "local_code", "--device", "cpu"]
    argv += ["--include_path", str(TASKS), "--batch_size", "4", "--output_path", str(tmp_path), "--log_samples"]
    monkeypatch.setattr("sys.argv", argv)
    main()
    assert "exact_match" in capsys.readouterr().out
    (results,) = tmp_path.rglob("results_*.json")
    assert json.loads(results.read_text())["config"]["specdec"]["tau"] > 1
    (samples,) = tmp_path.rglob("samples_*.jsonl")
    said = [json.loads(line)["resps"] for line in samples.read_text().splitlines()]
    assert said == plain


@pytest.mark.parametrize(
    "given, named",
    [
        ({"draft": None}, "drafter: got none, and no draft, allowed: draft=DIR, or one of lookup"),
        ({"drafter": "lookup"}, "draft: got a model with drafter 'lookup'"),
        ({"drafter": "abacus", "draft": None}, "drafter: got 'abacus'"),
        ({"drafter": "early-exit", "draft": None}, "exit_layers: got none"),
        ({"num_drafts": "many"}, "num_drafts: got 'many', allowed: an integer >= 0, or auto"),
        ({"num_drafts": -1}, "num_drafts: got -1"),
        ({"rule": "majority"}, "rule"),
        ({"parallelize": True}, "parallelize: got True, allowed: False"),
        ({"tp_plan": "auto"}, "tp_plan: got 'auto', allowed: None"),
        ({"mixed_precision_dtype": "bfloat16"}, "mixed_precision_dtype: got 'bfloat16'"),
        ({"trust_remote_code": True}, "trust_remote_code: got True"),
        ({"backend": "seq2seq"}, "backend: got 'seq2seq', allowed: causal"),
    ],
)
def test_what_is_not_supported_is_named(pair, given, named):
    target, draft, tokenizer = pair
    with pytest.raises(ValueError, match=named):
        SpecdecLM(target, tokenizer=tokenizer, **{"draft": draft, **given})


def test_a_task_may_ask_for_what_is_not_supported(pair, manager):
    target, draft, tokenizer = pair
    model = SpecdecLM(target, draft=draft, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="num_beams: got 2, allowed: 1"):
        answers(model, manager, gen_kwargs="num_beams=2")


def test_a_draft_of_another_vocabulary_is_refused(pair, tmp_path):
    target, _, tokenizer = pair
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["one more"])
    folder = save(tmp_path / "draft", 1, tokenizer=other)
    with pytest.raises(ValueError, match="draft: its tokenizer has 4097 tokens, the target's 4096"):
        SpecdecLM(target, draft=str(folder), tokenizer=tokenizer)


def test_stop_strings_count_in_the_output_only(pair):
    """By whatever tokens it is spelt, and each row for itself; the prompt does not count."""
    tokenizer = pair[2]
    word, one, two, other = (tokenizer(s, add_special_tokens=False).input_ids for s in ("return", "re", "turn", "self"))
    assert [len(ids) for ids in (word, one, two, other)] == [1] * 4
    prompts = [other, word, word, other]
    outputs = [one + two, other + other, two + one, word + other]
    shown = torch.tensor([prompt + output for prompt, output in zip(prompts, outputs, strict=True)])
    assert StopsInOutput(tokenizer, ["return", "no such text"], 1)(shown, None).tolist() == [True, False, False, True]


def test_a_drafter_by_name(pair):
    target, _, tokenizer = pair
    model = SpecdecLM(target, drafter="suffix", tokenizer=tokenizer)
    assert isinstance(model.speculator.assistance.draft, SuffixDrafter) and model.statistics["tau"] == 0
