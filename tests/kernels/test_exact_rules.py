"""What the published rules promise about acceptance, tested exactly, and tests of the definitions that test_exact.py
compares with."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from specdec.evaluation.verify.chi_square import chi_square
from support.exact import CERTAIN, Context, Probe, Rows, Setting, Step

from specdec_kernels import SamplingParams, Status, draft_step, speculative_step
from specdec_kernels.testing import (
    Distribution,
    Model,
    block_distribution,
    chen_distribution,
    coupled_distribution,
    expected_accepted,
    leviathan_distribution,
    penalised,
    probabilities,
    shared_race,
    total_variation,
)

EXACT = 1e-9
LEVEL = 1e-6


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Probe:
    return Probe(monkeypatch)


def distributions_of(
    probe: Probe, rule: str, target: Rows, draft: Rows, num_drafts: int, settings: list[Setting]
) -> list[Distribution]:
    return Step(rule, target, draft, num_drafts).distributions(probe, [Context(setting) for setting in settings])


def after(text: tuple[int, ...], model: Model) -> Model:
    return lambda rest: model(text + rest)


def accepted_by_block(target: Model, draft: Model, num_drafts: int) -> float:
    """The expected number of accepted drafts by the paper's closed form. At least a given prefix is kept with
    probability w, so w is summed over all prefixes."""
    total = 0.0
    for length in range(1, num_drafts + 1):
        for x in itertools.product(range(len(target(()))), repeat=length):
            path = w = 1.0
            for i in range(length):
                q, p = draft(x[:i])[x[i]], target(x[:i])[x[i]]
                path, w = path * q, min(w * p / q, 1.0) if q > 0 else 0.0
            total += path * w
    return total


def test_google_and_deepmind_published_one_distribution():
    """Leviathan et al., Algorithm 1, and Chen et al., Algorithm 2, each written from its own pseudo-code, agree."""
    for random_state, num_drafts in itertools.product(range(10), (0, 1, 3)):
        target, draft = Rows.random(3, 3, random_state), Rows.random(3, 3, random_state + 100)
        target.table[::2, 0] = -np.inf
        p, q = Setting(0.7).model(target), Setting(0.7, top_k=2).model(draft)
        assert total_variation(leviathan_distribution(p, q, num_drafts), chen_distribution(p, q, num_drafts)) < 1e-14


def test_the_example_of_block_verification(probe):
    """The example of Sun et al.: two drafts and two tokens. Token verification accepts 10/9 drafts, block 11/9."""
    p, q = (torch.tensor(weights, dtype=torch.float64).log() for weights in ([1, 2], [2, 1]))
    target, draft = (Rows(row.expand(7, 2), 2) for row in (p, q))
    for rule, expected in (("token", 10 / 9), ("block", 11 / 9)):
        (distribution,) = distributions_of(probe, rule, target, draft, 2, [Setting()])
        assert abs(expected_accepted(distribution) - expected) < EXACT


@pytest.mark.parametrize("num_drafts", [1, 2, pytest.param(3, marks=pytest.mark.nightly)])
def test_block_never_accepts_fewer(probe, num_drafts):
    """For random pairs of models, ``block`` follows the paper's closed form, and accepts never fewer drafts than
    ``token``, and sometimes more if there are at least two drafts. The pairs are the models after different texts; high
    temperatures make p and q similar, filters make them different."""
    target, draft = Rows.random(3, num_drafts + 2, 20), Rows.random(3, num_drafts + 2, 21)
    settings = [Setting(t, **f) for t in (0.5, 1.0, 3.0) for f in ({}, {"top_p": 0.8}, {"top_k": 2, "min_p": 0.1})]
    contexts = [Context(s, text) for s in settings for text in ((), (0,), (1,), (2,), (0, 1), (2, 2))]
    token, block = (Step(rule, target, draft, num_drafts).distributions(probe, contexts) for rule in ("token", "block"))
    gains = []
    for (setting, text), a, b in zip(contexts, token, block, strict=True):
        p, q = (after(text, setting.model(rows)) for rows in (target, draft))
        assert abs(expected_accepted(b) - accepted_by_block(p, q, num_drafts)) < EXACT
        gains.append(expected_accepted(b) - expected_accepted(a))
    gains = np.array(gains)
    assert gains.min() > -EXACT
    if num_drafts == 1:
        assert gains.max() < EXACT  # with one draft, the rules are the same
    else:
        assert gains.max() > 0.05


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_equal_models_accept_everything(probe, rule):
    rows = Rows.random(3, 3, 22)
    settings = [Setting(t, **f) for t in (0.0, 0.5, 1.0) for f in ({}, {"top_k": 2}, {"top_p": 0.6, "min_p": 0.1})]
    for distribution in distributions_of(probe, rule, rows, rows, 3, settings):
        assert {len(text) for text in distribution} == {4}


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_acceptance_of_the_first_draft(probe, rule):
    """The first draft is accepted with probability sum min(p, q), or, by the shared race, with the smaller one
    sum 1 / sum max(p_u / p_v, q_u / q_v)."""
    target, draft = Rows.random(4, 1, 23), Rows.random(4, 1, 24)
    settings = [Setting(t, top_k=k) for t in (0.5, 1.0, 2.0) for k in (0, 2, 3)]
    for setting, distribution in zip(settings, distributions_of(probe, rule, target, draft, 1, settings), strict=True):
        p, q = setting.model(target)(()), setting.model(draft)(())
        coin = np.minimum(p, q).sum()
        both = [v for v in range(4) if p[v] > 0 and q[v] > 0]
        race = sum(1 / sum(max(p[u] / p[v], q[u] / q[v]) for u in range(4)) for v in both)
        assert abs(expected_accepted(distribution) - (race if rule == "coupled" else coin)) < EXACT
        assert race <= coin + EXACT


def test_expected_acceptance_of_every_position(probe):
    """If rows do not depend on the text, draft j is accepted with the product of sum min(p, q) up to its row."""
    target, draft = (Rows(Rows.random(4, 0, r).table.expand(85, 4), 4) for r in (25, 26))
    setting = Setting(0.5)
    (distribution,) = distributions_of(probe, "token", target, draft, 3, [setting])
    alpha = np.minimum(setting.model(target)(()), setting.model(draft)(())).sum()
    for j in range(4):
        assert abs(sum(mass for text, mass in distribution.items() if len(text) > j) - alpha**j) < EXACT
    assert (
        abs(expected_accepted(distribution) + 1 - (1 - alpha**4) / (1 - alpha)) < EXACT
    )  # Leviathan et al., equation 1


@pytest.mark.parametrize("form", ["masked", "filtered", "d2t"])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_draft_that_q_never_yields(probe, rule, form):
    """q(x) = 0 for draft 1 of two: it is rejected although u passes every test, and a token is recovered as usual."""
    target, draft = Rows.random(4, 2, 27).table[None, :3], Rows.random(4, 2, 28).table[None, :2]
    q = np.array([probabilities(row, 1.0) for row in draft[0].tolist()])
    x = [int(q[0].argmax()), int(q[1].argmin())]
    if form == "filtered":
        q[1] = probabilities(draft[0, 1].tolist(), 1.0, top_k=3)
    else:
        q[1, x[1]] = 0
        q[1] /= q[1].sum()
    params, arguments = SamplingParams(), {"draft_logits": draft.clone()}
    if form == "masked":
        arguments["draft_logits"][0, 1, x[1]] = -np.inf
    elif form == "filtered":
        params = SamplingParams(top_k=torch.tensor([3]))
        q[0] = probabilities(draft[0, 0].tolist(), 1.0, top_k=3)
    elif form == "d2t":
        kept = [v for v in range(4) if v != x[1]]
        q[0] = probabilities(np.where(np.isin(range(4), kept), draft[0, 0].tolist(), -np.inf), 1.0)
        x[0] = kept[int(q[0, kept].argmax())]
        arguments = {"draft_logits": draft[:, :, kept], "d2t": torch.tensor(kept)}
    p = np.array([probabilities(row, 1.0, top_k=3 if form == "filtered" else 0) for row in target[0].tolist()])
    assert p[0, x[0]] > 0
    probe.script(0, torch.full((1, 3), CERTAIN, dtype=torch.float64))
    more = {"params": params, "seed": 0, "position": 0, "rule": rule, "backend": "reference"}
    out = speculative_step(target, torch.tensor([x]), **arguments, **more)
    assert out.num_accepted.tolist() == [1] and out.status.tolist() == [Status.DRAFT_ZERO_PROBABILITY]
    w = min(p[0, x[0]] / q[0, x[0]], 1.0) if rule == "block" else 1.0
    residual = np.maximum(w * p[1] - q[1], 0)
    np.testing.assert_allclose(probe.races[1].weights[0], residual / residual.sum(), rtol=1e-9, atol=1e-12)


def test_shared_race():
    """Each winner has the distribution of its own race, supports may differ, and equal distributions have the same
    winner."""
    generator = np.random.default_rng(0)
    for size, masked in itertools.product((1, 2, 3, 6), (False, True)):
        p, q = generator.dirichlet(np.ones(size), 2)
        if masked and size > 1:
            p[0] = q[-1] = 0
            p, q = p / p.sum(), q / q.sum()
        joint = shared_race(p, q)
        np.testing.assert_allclose(joint.sum(1), p, atol=1e-14)
        np.testing.assert_allclose(joint.sum(0), q, atol=1e-14)
        np.testing.assert_allclose(shared_race(p, p), np.diag(p), atol=1e-14)


def test_the_race_is_shared():
    """The joint distribution of both winners, drawn with real noise, against the integral."""
    batch, vocabulary = 200_000, 4
    target, draft = (Rows.random(vocabulary, 0, r).table.float() for r in (29, 30))
    seed = torch.arange(batch)
    arguments = {"params": SamplingParams(), "position": 5, "rule": "coupled", "seed": seed, "backend": "reference"}
    drafted = draft_step(draft.expand(batch, -1), offset=2, **arguments).tokens
    # The same position: draft 2 of a step that begins at 5, and the first token of one that begins at 7.
    emitted = speculative_step(
        target.expand(batch, 1, -1), torch.empty(batch, 0, dtype=torch.int64), None, **{**arguments, "position": 7}
    ).tokens[:, 0]
    counts = torch.bincount(emitted * vocabulary + drafted, minlength=vocabulary**2).tolist()
    joint = shared_race(*(probabilities(rows[0].tolist(), 1.0) for rows in (target, draft))).flatten()
    test = chi_square(dict(enumerate(counts)), dict(enumerate(joint.tolist())), LEVEL)
    assert test.p_value > LEVEL and test.detectable < 0.03


def test_published_distributions_are_distributions():
    """Every published distribution sums to 1, also if p and q are equal or have disjoint supports."""
    row = Rows.random(3, 0, 31).table[0].tolist()
    p, other = probabilities(row, 1.0), np.array([0.0, 0.0, 1.0])
    for a, b in ((p, p), (p, other), (other, p), (other, other), (other, np.array([0.5, 0.5, 0.0]))):
        for distribution in (leviathan_distribution, chen_distribution, block_distribution, coupled_distribution):
            assert abs(sum(distribution(lambda text, a=a: a, lambda text, b=b: b, 2).values()) - 1) < 1e-12


def test_plain_definitions_are_those_of_transformers():
    """``penalised`` and ``probabilities`` equal transformers' processors in float64."""
    from transformers import (
        MinNewTokensLengthLogitsProcessor,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    generator = torch.Generator().manual_seed(32)
    for _ in range(50):
        logits = 2 * torch.randn(1, 6, dtype=torch.float64, generator=generator)
        prompt, generated = (tuple(torch.randint(0, 6, (3,), generator=generator).tolist()) for _ in range(2))
        processors = (
            SequenceBiasLogitsProcessor({(1,): 0.5, (2,): -3.0}),
            RepetitionPenaltyLogitsProcessor(1.5),
            MinNewTokensLengthLogitsProcessor(3, 4, [0]),
            TemperatureLogitsWarper(0.5),
            TopKLogitsWarper(4),
            TopPLogitsWarper(0.75),
            MinPLogitsWarper(0.125),
        )
        x = logits
        for process in processors:
            x = process(torch.tensor([prompt + generated]), x)
        more = {"bias": {1: 0.5, 2: -3.0}, "repetition_penalty": 1.5, "ends": (0,), "min_new_tokens": 4}
        p = probabilities(penalised(logits[0].tolist(), generated, prompt, **more), 0.5, 4, 0.75, 0.125)
        np.testing.assert_allclose(p, x.softmax(-1)[0], rtol=1e-6, atol=0)
