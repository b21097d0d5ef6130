"""bench_trees.py: that its peers follow the rules of trees, and what it reports."""

from __future__ import annotations

import json
from collections import Counter

import bench_trees
import eager_trees
import pytest
import torch
from specdec.evaluation.verify.chi_square import chi_square
from support.benches import run_main
from support.cells import LEVEL

from specdec_kernels import SamplingParams, draft_children, testing

CHILDREN, PARENTS = [[0, 1], [2], [], []], (-1, -1, 0)
DEPTHS = [0, 1, 1, 2]  # of the rows: after texts of one length, the logits are the same
PUBLISHED = {
    "token": testing.multi_round_distribution,
    "block": testing.traversal_distribution,
    "walk": testing.walk_distribution,
}


@pytest.mark.parametrize("rule", eager_trees.RULES)
def test_the_eager_rules_are_the_published_ones(rule):
    target, draft = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(3)) * 1.5
    p, q = (lambda text, rows=rows: rows[len(text)].double().softmax(-1).numpy() for rows in (target, draft))

    def best(text: tuple[int, ...], count: int) -> list[int]:
        return (-q(text)).argsort()[:count].tolist()

    expected = PUBLISHED[rule](p, best if rule == "walk" else q, PARENTS)
    seed = torch.arange(2000)
    nodes = torch.empty(len(seed), 3, dtype=torch.int64)
    for row in (0, 1):
        at = {"seed": seed, "position": 0, "offset": row, "sampled": rule != "walk", "backend": "cpu"}
        logits = draft[DEPTHS[row]].expand(len(seed), -1)
        nodes[:, CHILDREN[row]] = draft_children(logits, len(CHILDREN[row]), SamplingParams(1.0), **at).tokens
    torch.manual_seed(0)
    counts: Counter[tuple[int, ...]] = Counter()
    for tokens in nodes.tolist():
        rows = (eager_trees.Rows(logits[DEPTHS]) for logits in (target, draft))
        path, token = eager_trees.RULES[rule](*rows, tokens, CHILDREN)
        counts[*(tokens[node] for node in path), token] += 1
    assert chi_square(counts, expected, LEVEL).p_value > LEVEL


def test_trees(tmp_path):
    path = tmp_path / "out.json"
    done = run_main(bench_trees, "--quick", "--threads", "1", "-B", "2", "--json", path)
    assert done.exit_code == 0, done.output
    content = json.loads(path.read_text())
    assert content["complete"] and content["benchmark"] == "trees" and content["bandwidth"]["read"] > 0
    rows = content["rows"]
    assert [(r["operation"], r.get("rule", r.get("sampled"))) for r in rows] == [
        *(("draft_children", sampled) for sampled in (True, False)),
        *(("verify_tree", rule) for rule in ("walk", "token", "block")),
    ]
    for row in rows:
        assert row["seconds"].keys() == {"cpu", "eager"} and row["ratios"].keys() == {"cpu/floor", "cpu/eager"}
    assert rows[0]["bytes_read"] == 2 * 1282 * 4
    walk, token, block = rows[2:]
    assert walk["rows_read"][1] == 0 and 1 <= walk["rows_read"][0] < token["rows_read"][0]
    for row in (token, block):
        assert row["bytes_read"] == 2 * 1282 * 4 * sum(row["rows_read"]) and row["rows_read"][1] > 1
