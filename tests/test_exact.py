"""The exact law of the reference, by enumeration: total variation below 1e-9 from the target's law.

The reference consults randomness only through ``race`` and ``uniform(philox(...))``. Here both are replaced
by probes: a race records its weights and returns a scripted token, a uniform returns a scripted number. Every
branch of a step is one row of a batch, so the law of what a step emits is a finite sum over rows. Acceptance
probabilities are not read from the code: they are found by bisection over u. What comes out is compared with
two laws: plain sampling from the target, and Leviathan's Algorithm 1 written from the paper
(``testing.leviathan_law``)."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
import torch

from specdec_kernels import SamplingParams, draft_step, speculative_step
from specdec_kernels.backends import reference
from specdec_kernels.testing import completed, leviathan_law, probabilities, text_law, total_variation

INF = float("inf")
BISECTIONS = 40  # thresholds to 2^-40 = 1e-12
EXACT = 1e-9
TEMPERATURES = (0.0, 0.5, 1.0, 2.0)


class Probe:
    """Scripts the reference's randomness: ``u`` [B, K+1], ``token`` [B]; records the weights of every race."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(reference, "race", self.race)
        monkeypatch.setattr(reference, "uniform", self.uniform)
        monkeypatch.setattr(reference, "philox", lambda seed, index, position, offset, stream: offset)

    def script(self, u: torch.Tensor | None, token: torch.Tensor | int) -> None:
        self.u, self.token, self.weights = u, token, []

    def uniform(self, offset: int) -> torch.Tensor:
        return self.u[:, offset : offset + 1]

    def race(self, weights, seed, position, offset, streams):
        mass = weights.sum(-1)
        self.weights.append(torch.where(mass[:, None] > 0, weights / mass[:, None], 0.0))
        token = torch.as_tensor(self.token).expand(mass.shape)
        return torch.where(mass > 0, token, -1), torch.ones_like(mass)


class Markov:
    """Next-token logits that depend on the last token: [V + 1, V], the last row after an empty prefix."""

    def __init__(self, table: torch.Tensor, temperature: float):
        self.table, self.temperature = table.double(), temperature

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        return self.table[last]

    def __call__(self, prefix: tuple[int, ...]) -> np.ndarray:
        return probabilities(self.table[prefix[-1] if prefix else -1].tolist(), self.temperature)


def q_through_draft_step(probe: Probe, logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The law [B, V] from which draft_step draws."""
    probe.script(None, 0)
    if logits.shape[0]:
        draft_step(logits, params, seed=0, position=0, offset=0, backend="reference")
    return probe.weights[0] if probe.weights else logits


def law_of_step(probe: Probe, target: Markov, draft: Markov, num_drafts: int, last: int, *, one_hot: bool, width: int):
    """Law of what one step emits after token ``last``, and the acceptance probability of every position.

    ``width`` >= num_drafts is the K of the batch: num_drafts[b] of a ragged batch.
    """
    vocabulary, params = target.table.shape[1], SamplingParams(temperature=target.temperature)
    paths = torch.tensor(list(itertools.product(range(vocabulary), repeat=num_drafts)), dtype=torch.int64)
    before = torch.cat([torch.full((len(paths), 1), last), paths], 1)  # the token before each row
    mass = torch.ones(len(paths), dtype=torch.float64)
    for i in range(num_drafts):
        q = q_through_draft_step(probe, draft.logits(before[:, i]), SamplingParams(temperature=draft.temperature))
        mass *= q.gather(1, paths[:, i : i + 1])[:, 0]
    paths, before, mass = paths[mass > 0], before[mass > 0], mass[mass > 0]

    padding = torch.zeros(1, width - num_drafts, dtype=torch.int64)  # token 0: real ids that must not be looked at
    drafts = torch.cat([paths, padding.expand(len(paths), -1)], 1)
    rows = torch.cat([before, padding.expand(len(paths), -1)], 1)

    def run(which: torch.Tensor, u: torch.Tensor, token: torch.Tensor):
        probe.script(u, token)
        return speculative_step(
            target.logits(rows[which]),
            drafts[which],
            None if one_hot else draft.logits(rows[which, :-1]),
            params=params,
            seed=0,
            position=0,
            num_drafts=None if width == num_drafts else torch.full((len(which),), num_drafts),
            backend="reference",
        )

    # Acceptance probability of position j, given that those before it are accepted: bisect over u_j.
    which = torch.arange(len(paths)).repeat_interleave(max(num_drafts, 1))
    j = torch.arange(max(num_drafts, 1)).repeat(len(paths))
    low, high = torch.zeros(len(which), dtype=torch.float64), torch.ones(len(which), dtype=torch.float64)
    for _ in range(BISECTIONS if num_drafts else 0):
        u = torch.full((len(which), width + 1), 1e-300, dtype=torch.float64)
        middle = (low + high) / 2
        u[torch.arange(len(which)), j] = middle
        accepted = run(which, u, torch.zeros(())).num_accepted > j
        low, high = torch.where(accepted, middle, low), torch.where(accepted, high, middle)
    threshold = torch.where(high == 1, 1.0, torch.where(low == 0, 0.0, low)).view(len(paths), -1)[:, :num_drafts]

    # One row for every path, number of acceptances and token of the final race.
    which, n, token = (
        torch.tensor(c)
        for c in zip(*itertools.product(range(len(paths)), range(num_drafts + 1), range(vocabulary)), strict=True)
    )
    u = torch.full((len(which), width + 1), 1e-300, dtype=torch.float64)
    u[torch.arange(len(which)), n] = 1.0
    out = run(which, u, token)
    ones = torch.ones(len(paths), 1, dtype=torch.float64)
    reached = torch.cat([ones, threshold.cumprod(1)], 1)
    stopped = torch.cat([1 - threshold, ones], 1)
    probability = mass[which] * reached[which, n] * stopped[which, n]
    law: dict = defaultdict(float)
    for b in (probability > 0).nonzero().flatten().tolist():
        assert out.num_accepted[b] == n[b] and out.status[b] == 0
        weight = probe.weights[int(n[b])][b, token[b]]
        emitted = tuple(out.tokens[b, : int(n[b]) + 1].tolist())
        assert (out.tokens[b, int(n[b]) + 1 :] == -1).all()
        assert emitted[-1] == token[b]
        law[emitted] += float(probability[b] * weight)
    return {text: p for text, p in law.items() if p > 0}


def check(probe: Probe, target: torch.Tensor, draft: torch.Tensor, temperature: float, num_drafts: int, **options):
    """One step and two chained steps against both laws; the acceptance probability against sum min(p, q)."""
    options = {"one_hot": False, "width": num_drafts, **options}
    p, q = Markov(target, temperature), Markov(draft, 0.0 if options["one_hot"] else temperature)
    vocabulary = target.shape[1]
    one = law_of_step(probe, p, q, num_drafts, vocabulary, **options)
    assert abs(sum(one.values()) - 1) < EXACT
    assert total_variation(one, leviathan_law(p, q, num_drafts)) < EXACT
    assert total_variation(completed(one, p, num_drafts + 1), text_law(p, num_drafts + 1)) < EXACT

    # P(first draft accepted) = sum min(p, q), and so on down every accepted prefix.
    if num_drafts:
        at_least_one = sum(mass for text, mass in one.items() if len(text) > 1)
        assert abs(at_least_one - np.minimum(p(()), q(())).sum()) < EXACT

    # Two steps: what the second emits depends on the last token of the first.
    length = 2 * num_drafts + 2
    if vocabulary**length > 4096:
        return
    two: dict = defaultdict(float)
    for last in {text[-1] for text in one}:
        second = law_of_step(probe, p, q, num_drafts, last, **options)
        for text, mass in one.items():
            if text[-1] == last:
                for more, probability in second.items():
                    two[text + more] += mass * probability
    assert total_variation(completed(two, p, length), text_law(p, length)) < EXACT


def random_table(vocabulary: int, random_state: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(random_state)
    return 1.5 * torch.randn(vocabulary + 1, vocabulary, dtype=torch.float64, generator=generator)


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Probe:
    return Probe(monkeypatch)


@pytest.mark.parametrize("one_hot", [False, True], ids=["full_q", "one_hot_q"])
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(("vocabulary", "num_drafts"), [(1, 2), (2, 3), (3, 0), (3, 2), (5, 1), (4, 3)])
def test_law_is_the_targets(probe, vocabulary, num_drafts, temperature, one_hot):
    target, draft = random_table(vocabulary, 1), random_table(vocabulary, 2)
    check(probe, target, draft, temperature, num_drafts, one_hot=one_hot)


@pytest.mark.parametrize("one_hot", [False, True], ids=["full_q", "one_hot_q"])
@pytest.mark.parametrize("num_drafts", [0, 1, 2])
def test_ragged(probe, num_drafts, one_hot):
    """num_drafts[b] < K: the law is that of fewer drafts, and the tokens beyond are not looked at."""
    check(probe, random_table(3, 3), random_table(3, 4), 1.0, num_drafts, one_hot=one_hot, width=3)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("case", ["masked_p", "masked_q", "both", "disjoint", "equal", "one_token_left"])
def test_masks_and_special_supports(probe, case, temperature):
    target, draft = random_table(4, 5), random_table(4, 6)
    if case in ("masked_p", "both"):
        target[:, 1] = -INF
    if case in ("masked_q", "both"):
        draft[:, 2] = -INF
    if case == "disjoint":
        target[:, :2], draft[:, 2:] = -INF, -INF
    if case == "equal":
        draft = target.clone()
    if case == "one_token_left":
        target[:, [0, 1, 3]] = -INF
    check(probe, target, draft, temperature, 2)


def test_equal_models_accept_everything(probe):
    table = random_table(4, 7)
    law = law_of_step(probe, Markov(table, 0.5), Markov(table, 0.5), 3, 4, one_hot=False, width=3)
    assert {len(text) for text in law} == {4}


def test_expected_acceptance_of_every_position(probe):
    """Rows that do not depend on the text: position j is accepted with the product of sum min(p, q) up to it."""
    p, q = (random_table(4, r)[:1].repeat(5, 1) for r in (8, 9))
    target, draft = Markov(p, 0.5), Markov(q, 0.5)
    law = law_of_step(probe, target, draft, 3, 4, one_hot=False, width=3)
    alpha = np.minimum(target(()), draft(())).sum()
    for j in range(4):
        assert abs(sum(mass for text, mass in law.items() if len(text) > j) - alpha**j) < EXACT
    tau = sum(mass * len(text) for text, mass in law.items())
    assert abs(tau - (1 - alpha**4) / (1 - alpha)) < EXACT  # Leviathan et al., equation 1


def test_no_number_serves_twice(monkeypatch):
    """Over a whole decoded text, no (seed, counter, word) is asked for by two decisions."""
    used: dict[tuple[int, int, int, int], int] = {}
    philox = reference.philox

    def recording(seed, index, position, offset, stream):
        for b, n in itertools.product(range(index.shape[0]), range(index.shape[1])):
            key = (int(position[b]), offset, stream, int(index[b, n]))
            used[key] = used.get(key, 0) + 1
        return philox(seed, index, position, offset, stream)

    monkeypatch.setattr(reference, "philox", recording)
    monkeypatch.setattr(reference, "BLOCK", 4)
    table, position, calls = random_table(6, 10).float(), 0, 0
    while position < 12:
        rows = table[:4][None]
        drafts = [
            draft_step(table[i][None], SamplingParams(), seed=3, position=position, offset=i, backend="reference")
            for i in range(3)
        ]
        tokens = torch.stack([d.tokens for d in drafts], 1)
        arguments = {"params": SamplingParams(), "seed": 3, "position": position, "backend": "reference"}
        out = speculative_step(rows, tokens, rows[:, :3], **arguments)
        position += int(out.num_accepted) + 1
        calls += 1
    assert calls > 1 and len(used) > 100
    assert max(used.values()) == 1, [k for k, n in used.items() if n > 1][:5]
