"""The reference is exact: its distribution has a total variation below 1e-9 from the target's and from that of the
published algorithm.

The joint distribution of all tokens that a step emits is enumerated (support/exact.py). Target and draft depend on the
whole text: their raw logits are independent after every text, and penalties count generated tokens. The result is
compared with plain sampling from the target, and with the rule's algorithm as written in its paper
(``specdec_kernels.testing``)."""

from __future__ import annotations

import functools
from collections import defaultdict

import pytest
import torch
from support.exact import ALL, EXACT, FILTERS, INF, TEMPERATURES, Context, Probe, Rows, Setting, Step

from specdec_kernels.testing import (
    Distribution,
    block_distribution,
    chen_distribution,
    completed,
    coupled_distribution,
    leviathan_distribution,
    text_distribution,
    total_variation,
)

PUBLISHED = {
    "token": (leviathan_distribution, chen_distribution),
    "block": (block_distribution,),
    "coupled": (coupled_distribution,),
}
FORMS = [(rule, q) for rule in ("token", "block") for q in ("one_hot", "full", "stats")]
FORMS += [("coupled", "one_hot"), ("coupled", "full")]
FEWER_FORMS = [(rule, q) for rule, q in FORMS if q in ("one_hot", "full")]
TABLES = {
    "no_table": ({},),
    "table": (
        {},
        {"bias": ((0, 0.5), (1, -INF))},
        {"repetition_penalty": 1.5, "prompt": (1, 1, 2)},
        {"presence_penalty": 0.8, "frequency_penalty": 0.5, "prompt": (1,), "ends": (3, 5), "min_new_tokens": 2},
    ),
}


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Probe:
    return Probe(monkeypatch)


def check(probe: Probe, step: Step, settings: list[Setting], num_steps: int = 1) -> list[Distribution]:
    """Compares one step with the published algorithm and the target, and several steps, which continue from any text,
    with the target. Returns the distributions of the first step."""
    first = distributions = step.distributions(probe, [Context(setting) for setting in settings])
    targets = [step.target_model(setting) for setting in settings]
    for setting, target, distribution in zip(settings, targets, distributions, strict=True):
        draft = functools.cache(step.draft_model(setting))
        assert abs(sum(distribution.values()) - 1) < EXACT, setting
        for published in PUBLISHED[step.rule]:
            assert total_variation(distribution, published(target, draft, step.num_drafts)) < EXACT, (
                setting,
                published,
            )
    for number in range(1, num_steps + 1):
        length = number * (step.num_drafts + 1)
        for setting, target, distribution in zip(settings, targets, distributions, strict=True):
            assert (
                total_variation(completed(distribution, target, length), text_distribution(target, length)) < EXACT
            ), setting
        distributions = followed(probe, step, settings, distributions) if number < num_steps else distributions
    return first


def followed(
    probe: Probe, step: Step, settings: list[Setting], distributions: list[Distribution]
) -> list[Distribution]:
    """The distributions after one more step."""
    ends = [(i, text) for i, distribution in enumerate(distributions) for text in distribution]
    longer: list[Distribution] = [defaultdict(float) for _ in distributions]
    for (i, text), distribution in zip(
        ends, step.distributions(probe, [Context(settings[i], text) for i, text in ends]), strict=True
    ):
        for more, probability in distribution.items():
            longer[i][text + more] += distributions[i][text] * probability
    return longer


@pytest.mark.parametrize(
    ("table", "d2t"),
    [
        pytest.param("no_table", None, id="no_table-same_vocabulary"),
        pytest.param("no_table", [0, 2, 3], id="no_table-d2t"),
        pytest.param("table", None, id="table-same_vocabulary", marks=pytest.mark.nightly),
        pytest.param("table", [0, 2, 3], id="table-d2t"),  # has all that the one above has
    ],
)
@pytest.mark.parametrize(("rule", "q"), FORMS)
def test_distribution_is_the_targets(probe, rule, q, table, d2t):
    """Every temperature with every filter and every table, all in one batch."""
    settings = [Setting(t, **f, **more) for t in TEMPERATURES for f in FILTERS for more in TABLES[table]]
    draft = Rows.random(4, 1, 2, vocabulary=d2t and len(d2t))
    check(probe, Step(rule, Rows.random(4, 2, 1), draft, 2, q, d2t), settings)


@pytest.mark.parametrize("rule", PUBLISHED)
@pytest.mark.parametrize(
    ("vocabulary", "num_drafts"),
    [(1, 2), (3, 0), (4, 3), *(pytest.param(*sizes, marks=pytest.mark.nightly) for sizes in ((2, 3), (3, 3), (6, 1)))],
)
def test_sizes(probe, rule, vocabulary, num_drafts):
    """Several K and V, with parameters as numbers instead of tensors."""
    target, draft = (Rows.random(vocabulary, num_drafts, random_state) for random_state in (3, 4))
    for settings in ([Setting(1.0)], [Setting(0.5, **FILTERS[-1])]):
        check(probe, Step(rule, target, draft, num_drafts), settings)


@pytest.mark.parametrize(("rule", "q"), FEWER_FORMS)
@pytest.mark.parametrize(
    ("vocabulary", "num_drafts"),
    [*(pytest.param(*sizes, marks=pytest.mark.nightly) for sizes in ((2, 2), (3, 1))), (3, 2)],
)
def test_two_steps(probe, rule, vocabulary, num_drafts, q):
    """The second step depends on the whole text of the first one, through logits, penalties and positions."""
    target, draft = (Rows.random(vocabulary, 2 * num_drafts + 1, random_state) for random_state in (5, 6))
    step = Step(rule, target, draft, num_drafts, q)
    check(probe, step, [Setting(1.0), Setting(0.5, **ALL)], num_steps=2)


@pytest.mark.parametrize(("rule", "q"), FEWER_FORMS)
@pytest.mark.parametrize("num_drafts", [0, 1, 2])
def test_ragged(probe, rule, num_drafts, q):
    """num_drafts[b] < K: the distribution is that of fewer drafts, and later tokens have no effect."""
    target, draft = (Rows.random(3, 3, random_state) for random_state in (7, 8))
    step = Step(rule, target, draft, num_drafts, q, padding=3 - num_drafts)
    check(probe, step, [Setting(0.0), Setting(1.0), Setting(2.0, **FILTERS[-1])])


@pytest.mark.parametrize(("rule", "q"), FEWER_FORMS)
def test_a_draft_may_stop_those_after_it(probe, rule, q):
    """Drafting may end because of a drafted token (one of low confidence, an end of sequence) that is still
    verified."""
    target, draft = (Rows.random(3, 4, random_state) for random_state in (9, 10))
    settings = [Setting(1.0), Setting(0.5, **ALL)]
    for num_drafts, stops in ((2, {1, 2}), (3, {0})):
        step = Step(rule, target, draft, num_drafts, q, stops=frozenset(stops))
        for setting, distribution in zip(
            settings, step.distributions(probe, [Context(setting) for setting in settings]), strict=True
        ):
            model = setting.model(target)
            assert abs(sum(distribution.values()) - 1) < EXACT
            assert total_variation(completed(distribution, model, 4), text_distribution(model, 4)) < EXACT


@pytest.mark.parametrize(("rule", "q"), FEWER_FORMS)
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=pytest.mark.nightly) for case in ("masked_p", "masked_q")),
        *("both", "disjoint", "disjoint_by_filter", "one_token_left"),
    ],
)
def test_masks_and_special_supports(probe, rule, case, q):
    target, draft = (Rows.random(4, 2, random_state) for random_state in (9, 10))
    if case in ("masked_p", "both"):
        target.table[:, 1] = -INF
    if case in ("masked_q", "both"):
        draft.table[:, 2] = -INF
    if case == "disjoint":
        target.table[:, :2], draft.table[:, 2:] = -INF, -INF
    if case == "disjoint_by_filter":  # every draft is a token that the target's top-k drops
        draft.table = -target.table
    if case == "one_token_left":
        target.table[:, [0, 1, 3]] = -INF
    filters = ({"top_k": 2}, {"top_k": 2, "min_p": 0.3}) if case == "disjoint_by_filter" else ({}, FILTERS[-1])
    step = Step(rule, target, draft, 2, q)
    distributions = check(probe, step, [Setting(t, **f) for t in TEMPERATURES for f in filters])
    if case.startswith("disjoint"):
        assert {len(text) for distribution in distributions for text in distribution} == {1}


def some_allowed(texts: int, random_state: int, one_of: tuple[int, ...] = (0, 2, 3)) -> torch.Tensor:
    """Bool [texts, 4]: half of the tokens may follow each text, at random, and one of ``one_of`` may for certain."""
    generator = torch.Generator().manual_seed(random_state)
    allowed = torch.rand((texts, 4), generator=generator) < 0.5
    sure = torch.tensor(one_of)[torch.randint(len(one_of), (texts, 1), generator=generator)]
    return allowed.scatter(1, sure, True)


@pytest.mark.parametrize(("masked_drafts", "d2t"), [(0, None), (1, None), (2, [0, 2, 3])])
@pytest.mark.parametrize(("rule", "q"), FORMS)
def test_allowed_tokens(probe, rule, q, masked_drafts, d2t):
    """Other tokens may follow each text. None, one or both of the drafts were drawn among them."""
    settings = [Setting(t, **f) for t in (0.0, 1.0) for f in FILTERS] + [Setting(0.5, **ALL)]
    target, draft = Rows.random(4, 2, 13), Rows.random(4, 1, 14, vocabulary=d2t and len(d2t))
    step = Step(rule, target, draft, 2, q, d2t, allowed=some_allowed(21, 15), masked_drafts=masked_drafts)
    distributions = check(probe, step, settings)
    for distribution in distributions:
        for text in distribution:
            assert all(step.allowed[target.number(text[:i]), text[i]] for i in range(len(text)))


@pytest.mark.parametrize(("rule", "q"), FEWER_FORMS)
def test_allowed_tokens_of_two_steps(probe, rule, q):
    """The second step's masks are those of the text that the first one emitted."""
    target, draft = (Rows.random(4, 3, random_state) for random_state in (16, 17))
    step = Step(rule, target, draft, 1, q, allowed=some_allowed(85, 18), masked_drafts=1)
    check(probe, step, [Setting(1.0), Setting(0.5, **ALL)], num_steps=2)


@pytest.mark.parametrize("num_tied", [2, 3, 4])
@pytest.mark.parametrize(("rule", "q"), [(rule, q) for rule, q in FEWER_FORMS if q != "one_hot"])
def test_ties_at_the_cutoff_are_kept(probe, rule, q, num_tied):
    """Filters keep all tokens of a tie, in p and in q."""
    target, draft = (Rows.random(4, 1, random_state) for random_state in (11, 12))
    for rows in (target, draft):
        rows.table[:] = rows.table.sort(-1).values
        rows.table[:, -num_tied:] = rows.table[:, -1:]
    settings = [Setting(1.0, **f) for f in ({"top_k": 1}, {"top_p": 0.1}, {"min_p": 1.0})]
    distributions = check(probe, Step(rule, target, draft, 1, q), settings)
    assert {text[0] for distribution in distributions for text in distribution} == set(range(4 - num_tied, 4))
