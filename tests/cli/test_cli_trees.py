"""Trees and the embedded heads on the command line."""

from __future__ import annotations

import dataclasses
import json

import pytest
from specdec import SpeculativeDecoder
from specdec.cli import app, models
from specdec.cli.drafters import EMBEDDED_HEADS, TREE_DRAFTS, TREE_NODES
from specdec.cli.one_row import OneRow
from specdec.drafters.heads.load import KINDS
from specdec.evaluation.contenders import SpecdecMethod
from support.commands import PROMPT, invoke, refused, rows, run
from support.jobs import finished, job_refused, write_prompts
from typer.testing import CliRunner

TEXT = PROMPT * 2  # so that there is something to find
SHORT = ("--max-new-tokens", 12)
LOOKUP = ("--drafter", "lookup", "--tree", 8)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[SpeculativeDecoder]:
    decoders: list[SpeculativeDecoder] = []
    decode = SpeculativeDecoder.decode
    monkeypatch.setattr(SpeculativeDecoder, "decode", lambda *a, **k: decoders.append(a[0]) or decode(*a, **k))
    in_a_row = OneRow.decode  # of a chat
    monkeypatch.setattr(OneRow, "decode", lambda own, *a: decoders.append(own.decoder) or in_a_row(own, *a))
    return decoders


@pytest.mark.parametrize(
    "kind", ["eagle3", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in EMBEDDED_HEADS if kind != "eagle3")]
)
def test_embedded_heads_draft(made, kind):
    row = rows(PROMPT, *SHORT, "--drafter", kind, "-k", 3)[0]
    head = made[0].drafter.drafter  # beside tokens that grammars force
    assert head.head.kind == kind and head.report is None
    assert row["stats"]["accepted"] > 0
    assert row["token_ids"] == rows(PROMPT, *SHORT, "--drafter", "none")[0]["token_ids"]


def test_a_tree_is_the_decoders(made, pair):
    """Greedy and sampled: by default with rule ``coupled``, so its texts are plain decoding's."""
    target, _, _ = pair
    assert EMBEDDED_HEADS == KINDS
    for sampled in ((), ("--temperature", 0.6, "--seed", 5)):
        row = rows(TEXT, *SHORT, *LOOKUP, *sampled)[0]
        plain = rows(TEXT, *SHORT, *sampled, "--rule", "coupled", "--drafter", "none")[0]
        assert row["token_ids"] == plain["token_ids"]
        assert (made[-2].nodes, made[-2].num_drafts, made[-1].nodes) == (8, TREE_DRAFTS, 0)
        assert len(row["stats"]["accepted_by_position"]) == TREE_DRAFTS
    assert rows(TEXT, *SHORT, *LOOKUP, "-k", 3)[0]["stats"]["drafted"] > 0 and made[-1].num_drafts == 3


@pytest.mark.parametrize("given, nodes", [((), TREE_NODES), (("--tree", 5), 5)])
@pytest.mark.parametrize("command", ["generate", "chat", "compare"])
def test_a_tree_of_the_draft_model(monkeypatch, command, given, nodes):
    asked = []

    def told(self, target, draft, num_drafts, *more, tree=None, **others):
        asked.append((type(draft).__name__, num_drafts, tree))
        if tree is not None:
            raise ValueError("seed: enough")

    monkeypatch.setattr(SpeculativeDecoder, "__init__", told)
    refused(command, *([] if command == "chat" else [PROMPT]), "--drafter", "tree", *given)
    kind, num_drafts, tree = asked[-1]
    assert (kind, tree) == ("ModelDrafter", nodes) and num_drafts == (2 if command == "compare" else TREE_DRAFTS)


def test_what_is_told_of_trees():
    told = run("generate", TEXT, *SHORT, *LOOKUP, "-v").stderr
    stats = rows(TEXT, *SHORT, *LOOKUP)[0]["stats"]
    depths = ", ".join(f"{k} in {count}" for k, count in enumerate(stats["steps_by_drafts"]) if count)
    assert f"depth of the trees of up to 8 drafts: {depths} steps" in told
    counts = zip(stats["accepted_by_position"], stats["tested_by_position"], strict=True)
    rates = ", ".join(f"{i}: {passed / tested:.0%}" for i, (passed, tested) in enumerate(counts, 1) if tested)
    assert f"accepted by depth, of those tested: {rates}\n" in told and stats["tested"] < stats["drafted"]
    told = run("generate", "x = [1, 2, 3, 1, 2, 3,", *SHORT, *LOOKUP[:2], "-v").stderr
    assert "drafts asked for: " in told and "accepted by place, of those tested: 1: " in told


def test_chat(pair, monkeypatch, made):
    monkeypatch.setattr("specdec.models.load.loading.load_embedded_pair", lambda *_, **__: pair)
    lines = ("/drafter lookup", "/tree 8", TEXT.replace("\n", " "), "/stats", "/tree 0", "/drafter none", "/k 3", "x",
             "/tree off", "x", "/stats")  # fmt: skip
    result = CliRunner().invoke(app, ["chat", *map(str, SHORT), "--device", "cpu"], input="\n".join(lines))
    assert result.exit_code == 0
    assert [(d.nodes, d.num_drafts) for d in made[:2]] == [(8, TREE_DRAFTS), (8, 3)] and made[2].nodes == 0
    told = result.stderr
    assert f"drafter lookup, k {TREE_DRAFTS}, tree 8, rule coupled, " in told and "k 3, rule token, " in told
    assert "/tree: got '0', allowed: an integer >= 1, or off" in told
    assert "/drafter: tree: got 8 with draft=None, allowed: None, or a drafter that proposes trees" in told


def test_compare_measures_trees_beside_chains(monkeypatch, folders):
    monkeypatch.setattr("specdec.evaluation.compare.CANDIDATES", (2,))
    monkeypatch.setattr("specdec.evaluation.compare.PATHS", (2, 3))
    options = ("--max-new-tokens", 6, "--repeats", 1, *folders[:2], *LOOKUP)
    whole = json.loads(run("compare", "x = x = x = ", *options, "--json").stdout)
    assert [m["name"] for m in whole["methods"]] == ["plain", "assisted", "specdec", "specdec-tree"]
    assert whole["greedy_equal"] is True
    tree = whole["methods"][-1]
    assert tree["tree"] == 8 and tree["num_drafts"] in (2, 3) and list(tree["swept"]) == ["2", "3"]
    assert list(whole["ratios"]) == [
        "specdec/plain", "specdec/assisted", "specdec-tree/plain", "specdec-tree/assisted", "specdec-tree/specdec",
    ]  # fmt: skip
    genuine = SpecdecMethod.run

    def wrong(self, prompt, seed):
        done = genuine(self, prompt, seed)
        wrong = [[0, *text[1:]] for text in done.texts]
        return done if self.name == "specdec" else dataclasses.replace(done, texts=wrong)

    monkeypatch.setattr(SpecdecMethod, "run", wrong)
    result = invoke("compare", "x = x = x = ", *options, "-k", 2)
    assert result.exit_code == 1 and "greedy texts of specdec and plain equal: no" in result.stdout
    assert "2 deep of 8" in result.stdout and "specdec-tree/specdec: " in result.stdout


def test_a_job_with_trees(monkeypatch, pair, tmp_path):
    """Its texts are those without --output. It is resumed with the same trees only."""
    monkeypatch.setattr(models, "load", lambda *_: models.Models(*pair, None))
    nodes, configure = [], SpeculativeDecoder.batch_config
    monkeypatch.setattr(
        SpeculativeDecoder, "batch_config", lambda self, *a, **k: nodes.append(self.nodes) or configure(self, *a, **k)
    )
    file, output = write_prompts(tmp_path / "p.jsonl", [TEXT, "import os\n"]), tmp_path / "out.jsonl"
    lines = [json.loads(line) for line in finished(file, output, *SHORT, *LOOKUP)]
    assert nodes == [8]
    assert [line["token_ids"] for line in lines] == [
        rows(text, *SHORT)[0]["token_ids"] for text in (TEXT, "import os\n")
    ]
    assert len(lines[0]["stats"]["drafted_by_position"]) == TREE_DRAFTS
    assert sum(sum(line["stats"]["drafted_by_position"]) for line in lines) > 0
    for given, told in ((("--tree", 9), "tree: 8 then, 9 now"), ((), "tree: 8 then, null now")):
        assert told in job_refused(file, output, *SHORT, *LOOKUP[:2], *given)
    assert models.ModelOptions().paths("eagle3")["head"].endswith("/embedded/heads/eagle3")
    told = job_refused(file, tmp_path / "other.jsonl", *SHORT, "--drafter", "eagle3", "--target", tmp_path)
    assert told.startswith("Invalid value for --drafter: got 'eagle3', a head of the embedded target")


@pytest.mark.parametrize(
    "args, message",
    [
        (("--tree", 0), "--tree: got 0, allowed: an integer >= 1"),
        ((*LOOKUP[2:], "--drafter", "none"), "--tree: got 8 with --drafter none, allowed: a drafter that proposes"),
        ((*LOOKUP[2:], "--drafter", "universal"), "--tree: got 8 with --drafter universal, allowed: a drafter that"),
        (
            ("--target", "./t", "--drafter", "medusa"),
            "--drafter: got 'medusa', a head of the embedded target, with --target ./t, allowed: the folder of a head "
            "that was trained for this target; without --target, the embedded ones",
        ),
        (("--target", "t", "--drafter", "model"), "--target / --draft: got --target without --draft, allowed: both, "
         "neither (the embedded pair), or a --drafter that needs no draft: lookup, suffix, early-exit, none"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(args, message):
    assert f"Invalid value for {message}" in refused("generate", "x", *args)


def test_verify_has_no_trees():
    assert "--drafter: got 'tree', allowed: drafters of chains" in refused("verify", "--drafter", "tree")
