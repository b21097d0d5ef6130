"""The reference's tree operations are exact: the joint distribution of all tokens that a step emits, enumerated in
float64 (support/exact_trees.py), has a total variation below 1e-9 from the target's and from that of the published
algorithm (``specdec_kernels.testing``).

Target and draft depend on the whole text: their raw logits are independent after every text, and penalties count
generated tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from support.exact import ALL, EXACT, FILTERS, INF, TEMPERATURES, Context, Rows, Setting
from support.exact_trees import TreeProbe, TreeStep

from specdec_kernels.ops import TREE_RULES
from specdec_kernels.testing import (
    Distribution,
    completed,
    expected_accepted,
    multi_round_distribution,
    text_distribution,
    total_variation,
    traversal_distribution,
    walk_distribution,
)

TREES = {
    # name: (vocabulary, parents)
    "root": (3, ()),
    "three of five": (5, (-1, -1, -1)),
    "more than there are": (2, (-1, -1, -1, 1)),
    "chain": (3, (-1, 0, 1)),
    "pairs": (4, (-1, -1, 0, 0, 1, 1)),
    "first and last": (4, (-1, -1, -1, 0, 2, 2)),
    "deep": (3, (-1, -1, 1, 1, 3, 3)),
    "interleaved": (3, (-1, -1, 0, 1, 0, 2, 1)),
}
LARGE = {
    "threes": (3, (-1, -1, -1, *(parent for parent in range(3) for _ in range(3)))),
    "three levels": (3, (-1, -1, 0, 0, 1, 1, 2, 3, 4, 5)),
    "three, two and one of five": (5, (-1, -1, -1, 0, 2, 2)),
    "three, three, two of five": (5, (-1, -1, -1, 1, 1, 1, 3, 3)),
}
TABLES = (
    {},
    {"bias": ((0, 0.5), (1, -INF))},
    {"presence_penalty": 0.8, "frequency_penalty": 0.5, "prompt": (1,), "ends": (3, 5), "min_new_tokens": 2},
)


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> TreeProbe:
    return TreeProbe(monkeypatch)


def published(step: TreeStep, setting: Setting) -> Distribution:
    target, draft = setting.model(step.target), step.draft_model(setting)
    if step.rule != "walk":
        rule = {"token": multi_round_distribution, "block": traversal_distribution}[step.rule]
        return rule(target, draft, step.parents)

    def best(text: tuple[int, ...], count: int) -> list[int]:
        q = draft(text)
        return [v for v in np.argsort(-q, kind="stable").tolist() if q[v] > 0][:count]

    return walk_distribution(target, best, step.parents)


def check(
    probe: TreeProbe, step: TreeStep, settings: list[Setting], texts: Sequence[tuple[int, ...]] = ()
) -> list[Distribution]:
    """Compares one step with the published algorithm and the target. Returns the step's distributions."""
    distributions = step.distributions(probe, [Context(setting) for setting in settings])
    for setting, distribution in zip(settings, distributions, strict=True):
        target = setting.model(step.target)
        assert abs(sum(distribution.values()) - 1) < EXACT, setting
        if step.rule != "walk" or setting.temperature:  # at temperature 0, walk's children are those of temperature 1
            assert total_variation(distribution, published(step, setting)) < EXACT, setting
        length = step.depth + 1
        whole = completed(distribution, target, length)
        assert total_variation(whole, text_distribution(target, length)) < EXACT, setting
    return distributions


def step_of(rule: str, vocabulary: int, parents: Sequence[int], random_state: int, **more) -> TreeStep:
    depth = TreeStep(rule, None, None, parents).depth
    return TreeStep(rule, *(Rows.random(vocabulary, depth, random_state + i) for i in range(2)), parents, **more)


@pytest.mark.parametrize("rule", TREE_RULES)
def test_settings(probe, rule):
    """Every temperature with every filter and every table, all in one batch."""
    settings = [Setting(t, **f, **more) for t in TEMPERATURES for f in FILTERS for more in TABLES]
    check(probe, step_of(rule, 4, (-1, -1, 1), 1), settings)


@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("tree", TREES)
def test_trees(probe, rule, tree):
    check(probe, step_of(rule, *TREES[tree], 3), [Setting(1.0), Setting(0.5, **ALL)])


@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("case", ["d2t", "padding", "masked_p", "masked_q", "disjoint", "one_token_left", "few_drafts"])
def test_special_cases(probe, rule, case):
    """Reduced vocabularies, nodes that do not count, tokens without probability, and fewer tokens in q than
    children."""
    parents = (-1, -1, 0, 0)
    step = step_of(rule, 4, parents, 7, padding=2 if case == "padding" else 0)
    if case == "d2t":
        step.d2t, step.draft = [0, 2, 3], Rows(step.draft.table[:, 1:], 4)
    if case == "masked_p":
        step.target.table[:, 1] = -INF
    if case == "masked_q":
        step.draft.table[:, 2] = -INF
    if case == "disjoint":
        step.target.table[:, :2], step.draft.table[:, 2:] = -INF, -INF
    if case == "one_token_left":
        step.target.table[:, [0, 1, 3]] = -INF
    filters = {"top_k": 1} if case == "few_drafts" else {}
    distributions = check(probe, step, [Setting(t, **filters) for t in TEMPERATURES])
    if case == "disjoint":
        assert {len(text) for distribution in distributions for text in distribution} == {1}


@pytest.mark.parametrize("rule", TREE_RULES)
def test_two_steps(probe, rule):
    """The second step depends on the whole text of the first one, through logits, penalties and positions."""
    parents, settings = (-1, -1, 0), [Setting(1.0), Setting(0.5, **ALL)]
    step = TreeStep(rule, Rows.random(3, 5, 8), Rows.random(3, 5, 9), parents)
    first = step.distributions(probe, [Context(setting) for setting in settings])
    ends = [(i, text) for i, distribution in enumerate(first) for text in distribution]
    second = step.distributions(probe, [Context(settings[i], text) for i, text in ends])
    whole: list[Distribution] = [defaultdict(float) for _ in settings]
    for (i, text), distribution in zip(ends, second, strict=True):
        for more, probability in distribution.items():
            whole[i][text + more] += first[i][text] * probability
    for setting, distribution in zip(settings, whole, strict=True):
        target = setting.model(step.target)
        assert total_variation(completed(distribution, target, 6), text_distribution(target, 6)) < EXACT


def test_more_is_accepted(probe):
    """``block`` never accepts fewer than ``token``, and both more with a second child. ``walk`` accepts a node with the
    target's probability of its path, which is the most that is possible for deterministic children."""
    settings = [Setting(t, **f) for t in (0.5, 1.0, 3.0) for f in ({}, {"top_p": 0.8}, {"top_k": 2, "min_p": 0.1})]

    def accepted(rule: str, parents: Sequence[int]) -> np.ndarray:
        step = step_of(rule, 4, parents, 10)
        contexts = [Context(setting) for setting in settings]
        return np.array([expected_accepted(d) for d in step.distributions(probe, contexts)])

    tree, chain = (-1, 0, 0, -1), (-1, 0)
    token, block = (accepted(rule, tree) for rule in ("token", "block"))
    assert (block - token).min() > -EXACT and (block - token).max() > 1e-3
    for rule, wider in (("token", token), ("block", block)):
        gain = wider - accepted(rule, chain)
        assert gain.min() > -EXACT and gain.max() > 0.1
    for setting, walked in zip(settings, accepted("walk", tree), strict=True):
        p, q = (
            setting.model(rows) for rows in (step_of("walk", 4, tree, 10).target, step_of("walk", 4, tree, 10).draft)
        )
        best = [v for v in np.argsort(-q(()), kind="stable")[:2] if q(())[v] > 0]
        below = [v for v in np.argsort(-q((best[0],)), kind="stable")[:2] if q((best[0],))[v] > 0]
        expected = sum(p(())[v] for v in best) + p(())[best[0]] * sum(p((best[0],))[v] for v in below)
        assert abs(walked - expected) < EXACT


@pytest.mark.nightly
@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("tree", LARGE)
def test_large_trees(probe, rule, tree):
    check(probe, step_of(rule, *LARGE[tree], 5), [Setting(0.8)])
