"""specdec.ray: decoders as actors of Ray Data hold them, and where they find place. No cluster is needed for this."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pyarrow
import pytest
import typer
from specdec.cli import models
from specdec.cli.ray_decoder import LineDecoder
from specdec.cli.ray_job import Cluster, Node, place
from specdec.jobs.input import JobFile
from specdec.jobs.lines import LineReader, LineSettings
from specdec.ray import Decoder
from specdec.serving.scheduler import Scheduler
from support.commands import rows
from support.jobs import finished, write_prompts

TEXTS = ["def read(self):", "import os\n", "class Node", "x = ["]
OPTIONS = ("--temperature", 1, "--rule", "coupled", "--max-new-tokens", 6)
SETTINGS = {"temperature": 1.0, "max_new_tokens": 6}


@pytest.fixture
def loaded(monkeypatch, pair):
    found = models.Models(*pair, None)
    monkeypatch.setattr(models, "load", lambda *_: found)
    return found


def test_columns_in_and_out(loaded):
    """Texts are those of the command with the same seeds; a row has its own settings; what is not right fails alone."""
    decode = Decoder(rows=2, rule="coupled", defaults=SETTINGS)
    batch = {
        "id": np.array(["a", "b", "c", "d"]),
        "prompt": np.array([*TEXTS[:3], ""], dtype=object),
        "seed": np.array([0, 1, 2, 3]),
        "max_new_tokens": np.array([None, 3, np.nan, None], dtype=object),
        "answer": np.array([1.5, 2.5, 3.5, 4.5]),  # not ours
    }
    table = asyncio.run(decode(batch))
    found = table.to_pylist()
    assert table.column_names[:5] == [*batch] and [row["answer"] for row in found] == [1.5, 2.5, 3.5, 4.5]
    for i, row in enumerate(found[:3]):
        (alone,) = rows(TEXTS[i], "--seed", i, "-k", 4, *OPTIONS, *(("--max-new-tokens", 3) if i == 1 else ()))
        for key in ("text", "token_ids", "produced_by", "finish_reason", "status"):
            assert row[key] == alone[key]
        assert row["error"] is None and row["stats"]["emitted"] == len(alone["token_ids"])
    assert found[3]["finish_reason"] == "failed" and "prompt: got no token" in found[3]["error"]


def test_every_block_has_the_same_types(loaded):
    """Also one whose texts have one length, or all fail; messages and settings come as Arrow has them."""
    loaded.tokenizer.chat_template = "{{ messages[0].content }}"
    try:
        decode = Decoder(rows=2, defaults=SETTINGS)
        messages = [[{"role": "user", "content": text}] for text in TEXTS]
        tables = [
            asyncio.run(decode(batch))
            for batch in (
                pyarrow.table({"messages": messages, "logit_bias": ['{"5": 2.0}', None, None, None]}),
                pyarrow.table({"messages": messages[:1], "logit_bias": ["no JSON"]}),
                pyarrow.table({"messages": messages[:2], "logit_bias": ['{"5": 2.0}', '{"x": 1}']}),
            )
        ]
    finally:
        loaded.tokenizer.chat_template = None
    assert len({table.schema for table in tables}) == 1
    assert [table["finish_reason"].to_pylist() for table in tables] == [
        ["length"] * 4,
        ["failed"],
        ["length", "failed"],
    ]
    assert "logit_bias: got id 'x'" in tables[2]["error"][1].as_py()


def test_log_probabilities(loaded):
    asked = SETTINGS | {"top_log_probs": 2, "prompt_log_probs": 1}
    table = asyncio.run(Decoder(rows=1, defaults=asked)({"prompt": TEXTS[:1]}))
    (row,) = table.to_pylist()
    assert len(row["log_probs"]) == len(row["raw_log_probs"]) == len(json.loads(row["top_log_probs"])) == 6
    assert json.loads(row["prompt_log_probs"])[0] is None
    assert "log_probs" not in asyncio.run(Decoder(rows=1, defaults=SETTINGS)({"prompt": TEXTS[:1]})).column_names


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"drafter": "nobody"}, "drafter: got 'nobody'"),
        ({"num_drafts": -1}, "num_drafts: got -1"),
        ({"rows": 0}, "rows: got 0"),
        ({"defaults": {"temprature": 1}}, "keys: got 'temprature'"),
        ({"defaults": {"temperature": -1}}, "temperature: got -1"),
        ({"defaults": {"logit_bias": {"5000": 1}}}, "logit_bias"),
        ({"target": "x"}, "target"),
    ],
)
def test_what_is_refused(loaded, given, told):
    with pytest.raises((ValueError, OSError), match=f"^{told}"):
        Decoder(**given)


def test_lines_of_a_job_are_those_of_the_job(loaded, tmp_path):
    """Batches side by side, more prompts than may wait, one that is refused."""
    prompts = write_prompts(tmp_path / "p.jsonl", [*TEXTS, "", *TEXTS])
    lines = [json.loads(line) for line in finished(prompts, tmp_path / "o.jsonl", *OPTIONS, "--rows", 2, exit_code=3)]
    file = JobFile(LineReader(prompts, LineSettings(**SETTINGS), 4096))
    file.check()
    scheduler = Scheduler(loaded.decoder(loaded.drafter("model"), 4, None), rows=2, rule="coupled", max_waiting=1)
    decode = LineDecoder(lambda: (scheduler, loaded))

    async def main():
        asked = [*file.lines()]
        return await asyncio.gather(*(decode({"line": part}) for part in (asked[:2], asked[2:7], asked[7:])))

    found = [json.loads(text) for batch in asyncio.run(main()) for text in batch["result"]]
    assert found == sorted(lines, key=lambda line: line["prompt"])


@pytest.mark.parametrize(
    ("nodes", "asked", "found"),
    [
        ([Node(8, 0)], (None, None, None), Cluster("cpu", 1, 8)),
        ([Node(8, 0), Node(4, 0)], (None, None, None), Cluster("cpu", 3, 4)),
        ([Node(8, 0)], (None, None, 2), Cluster("cpu", 4, 2)),
        ([Node(8, 0)], (None, 2, 3), Cluster("cpu", 2, 3)),
        ([Node(8, 2), Node(4, 0)], (None, None, None), Cluster("cuda", 2, 1)),
        ([Node(8, 2), Node(4, 1)], (None, None, 4), Cluster("cuda", 3, 4)),
        ([Node(8, 2), Node(4, 0)], ("cpu", None, None), Cluster("cpu", 3, 4)),
        ([Node(0, 0), Node(4, 0)], (None, None, None), Cluster("cpu", 1, 4)),  # a head that decodes nothing
    ],
)
def test_who_decodes(nodes, asked, found):
    assert place(nodes, *asked) == found


@pytest.mark.parametrize(
    ("nodes", "asked", "told"),
    [
        ([Node(2, 0)], (None, 3, 1), "got 3 decoders with 1 CPUs each, allowed: .* room for: 2 (2 CPUs and 0 GPUs)"),
        ([Node(2, 0), Node(2, 0)], (None, None, 3), "got 1 decoders with 3 CPUs each, allowed: .* room for: 0"),
        ([Node(8, 1)], (None, 2, None), "got 2 decoders with 1 CPUs and a GPU each, allowed: .* room for: 1"),
        ([Node(8, 0)], ("cuda", None, None), "got 1 decoders with 1 CPUs and a GPU each, allowed: .* room for: 0"),
        ([], (None, None, None), "no nodes"),
    ],
)
def test_what_would_wait_for_ever_is_refused(nodes, asked, told):
    with pytest.raises(typer.BadParameter, match=told.replace("(", r"\(").replace(")", r"\)")):
        place(nodes, *asked)
