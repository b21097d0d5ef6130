"""Exact distributions of what a step emits, as plain loops after the published pseudo-code. They share no code with
any backend."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping

import numpy as np

Distribution = dict[tuple[int, ...], float]  # probability of every sequence of tokens
Model = Callable[[tuple[int, ...]], np.ndarray]  # the probabilities [V] of the next token after a prefix


def _single(x: float) -> float:
    """``x`` rounded to float32, which is how backends take parameters."""
    return float(np.float32(x))


def penalised(
    logits: Iterable[float],
    generated: tuple[int, ...] = (),
    prompt: tuple[int, ...] = (),
    *,
    bias: Mapping[int, float] | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    ends: Collection[int] = (),
    min_new_tokens: int = 0,
) -> np.ndarray:
    """Logits [V] after bias (-inf bans), penalties, and the ban of ``ends`` among the first ``min_new_tokens``."""
    x = np.array(logits, dtype=np.float64)
    for v in range(len(x)):
        x[v] += _single((bias or {}).get(v, 0.0))
        times = generated.count(v)
        if times > 0 or v in prompt:
            x[v] = x[v] * _single(repetition_penalty) if x[v] < 0 else x[v] / _single(repetition_penalty)
        if times > 0:
            x[v] -= _single(presence_penalty)
        x[v] -= times * _single(frequency_penalty)
        if v in ends and len(generated) < min_new_tokens:
            x[v] = -np.inf
    return x


def probabilities(
    logits: Iterable[float], temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """softmax(logits / T) in float64 over the tokens that top-k, then top-p, then min-p keep; tied tokens are kept or
    dropped together. At temperature 0 one-hot, at the first of the largest logits."""
    x = np.asarray(logits, dtype=np.float64)
    if temperature == 0:
        return np.eye(len(x))[int(np.argmax(x))]

    def softmax(x: np.ndarray) -> np.ndarray:
        weight = np.exp(x - x.max())
        return weight / weight.sum()

    x = x / _single(temperature)
    if 0 < top_k < len(x):
        x = np.where(x >= sorted(x)[-top_k], x, -np.inf)
    if top_p < 1:
        p = softmax(x)
        larger = np.array([sum(p[u] for u in range(len(x)) if x[u] > x[v]) for v in range(len(x))])
        x = np.where((larger < _single(top_p)) | (x == x.max()), x, -np.inf)
    if min_p > 0:
        p = softmax(x)
        x = np.where(p >= _single(min_p) * p.max(), x, -np.inf)
    return softmax(x)


def leviathan_distribution(target: Model, draft: Model, num_drafts: int, prefix: tuple[int, ...] = ()) -> Distribution:
    """The distribution of what one step emits by Leviathan et al. 2023, Algorithm 1, line by line, summed over all
    random choices."""
    distribution: Distribution = defaultdict(float)
    vocabulary = len(target(prefix))
    for x in itertools.product(range(vocabulary), repeat=num_drafts):  # x_i ~ q_i
        q = [draft(prefix + x[:i]) for i in range(num_drafts)]
        p = [target(prefix + x[:i]) for i in range(num_drafts + 1)]
        path = float(np.prod([q[i][x[i]] for i in range(num_drafts)]))
        if path == 0:
            continue
        for n in range(num_drafts + 1):  # n = the number of accepted guesses
            if n == num_drafts:
                final, here = p[n], path
            else:
                final = np.maximum(0, p[n] - q[n])
                here = path * (1 - min(1.0, p[n][x[n]] / q[n][x[n]]))
                path *= min(1.0, p[n][x[n]] / q[n][x[n]])
            if here > 0 and final.sum() > 0:
                for t in range(vocabulary):
                    distribution[x[:n] + (t,)] += here * final[t] / final.sum()
    return dict(distribution)


def chen_distribution(target: Model, draft: Model, num_drafts: int, prefix: tuple[int, ...] = ()) -> Distribution:
    """The distribution of what one step emits by Chen et al. 2023, Algorithm 2: its loop over t = 1..K, for all
    outcomes at once.

    Draft tokens after an exit from the loop are never looked at, so leaving them undrawn sums over them.
    """
    distribution: Distribution = defaultdict(float)
    looping: Distribution = {(): 1.0}  # the accepted text so far: the probability that the loop still runs with it
    for _ in range(num_drafts):
        running: Distribution = defaultdict(float)
        for text, mass in looping.items():
            p, q = target(prefix + text), draft(prefix + text)  # the paper calls them q and p
            positive_part = [max(0.0, float(a) - float(b)) for a, b in zip(p, q, strict=True)]
            total = sum(positive_part)
            for x, proposed in enumerate(q):
                if proposed > 0:
                    accept = min(1.0, float(p[x]) / float(proposed))
                    running[text + (x,)] += mass * float(proposed) * accept
                    for t, weight in enumerate(positive_part):
                        if total > 0:
                            distribution[text + (t,)] += mass * float(proposed) * (1 - accept) * weight / total
        looping = running
    for text, mass in looping.items():  # all drafts were accepted: one more token from the target
        for t, probability in enumerate(target(prefix + text)):
            distribution[text + (t,)] += mass * float(probability)
    return dict(distribution)


def block_distribution(target: Model, draft: Model, num_drafts: int, prefix: tuple[int, ...] = ()) -> Distribution:
    """The distribution of what one step emits by Sun et al. 2025, Algorithm 2 (block verification), summed over all
    random choices.

    h[i] is the probability that eta_i <= h_i, which sets tau = i, so tau is the length of the longest prefix that
    passes. Where the paper's h is 0 / 0 (p = q), a longer prefix passes with certainty.
    """
    distribution: Distribution = defaultdict(float)
    vocabulary = len(target(prefix))
    for x in itertools.product(range(vocabulary), repeat=num_drafts):
        small = [draft(prefix + x[:i]) for i in range(num_drafts)]
        big = [target(prefix + x[:i]) for i in range(num_drafts + 1)]
        path = float(np.prod([small[i][x[i]] for i in range(num_drafts)]))
        if path == 0:
            continue
        weight, residual, h = [1.0], [], []
        for i in range(num_drafts):
            weight.append(min(weight[i] * big[i][x[i]] / small[i][x[i]], 1.0))
            residual.append(np.maximum(weight[i] * big[i] - small[i], 0))
            mass = float(residual[i].sum())
            h.append(mass / (mass + 1 - weight[i]) if mass > 0 else float(weight[i] == 1))
        residual.append(big[num_drafts])
        h.append(weight[num_drafts])
        h[0] = 1.0  # tau = 0 to begin with

        for tau in range(num_drafts, -1, -1):
            here, path = path * h[tau], path * (1 - h[tau])
            for t in range(vocabulary):
                if here > 0 and residual[tau].sum() > 0:
                    distribution[x[:tau] + (t,)] += here * residual[tau][t] / residual[tau].sum()
    return dict(distribution)


def shared_race(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """[V, V] float64: P(argmin E / p = a, argmin E / q = b) for two races that share their exponential noise E [V].

    With s = E_a / p_a, t = E_b / q_b and r = s / t the joint density of s and t is p_a q_b exp(-t f(r)), f(r) =
    sum max(r p, q), wherever r p_a >= q_a and r p_b <= q_b. Over t that leaves p_a q_b / f(r)^2, which is integrated
    piece by piece: f is linear between the r where some r p_v = q_v.
    """
    joint = np.zeros((len(p), len(p)))
    for a, b in itertools.product(range(len(p)), repeat=2):
        if p[a] == 0 or q[b] == 0:
            continue
        if a == b:
            joint[a, b] = 1 / np.maximum(p / p[a], q / q[a]).sum()
            continue
        low, high = q[a] / p[a], q[b] / p[b] if p[b] > 0 else np.inf
        corners = sorted({q[v] / p[v] for v in range(len(p)) if p[v] > 0 and low < q[v] / p[v] < high})
        edges = [low, *corners, high] if low < high else []
        for left, right in itertools.pairwise(edges):
            middle = (left + right) / 2 if right < np.inf else left + 1
            slope, constant = p[middle * p > q].sum(), q[middle * p <= q].sum()
            beyond = 0.0 if right == np.inf else 1 / (constant + slope * right)
            joint[a, b] += p[a] * q[b] * (1 / (constant + slope * left) - beyond) / slope
    return joint


def coupled_distribution(target: Model, draft: Model, num_drafts: int, prefix: tuple[int, ...] = ()) -> Distribution:
    """The distribution of what one step emits by Daliri et al. 2024: a draft is accepted iff it wins the target's race
    as well."""
    distribution: Distribution = defaultdict(float)
    agreed: Distribution = {(): 1.0}
    for _ in range(num_drafts):
        running: Distribution = defaultdict(float)
        for text, mass in agreed.items():
            joint = shared_race(target(prefix + text), draft(prefix + text))
            for t, x in itertools.product(range(len(joint)), repeat=2):
                (running if t == x else distribution)[text + (t,)] += mass * float(joint[t, x])
        agreed = {text: mass for text, mass in running.items() if mass > 0}
    for text, mass in agreed.items():
        for t, probability in enumerate(target(prefix + text)):
            distribution[text + (t,)] += mass * float(probability)
    return dict(distribution)


def text_distribution(target: Model, length: int, prefix: tuple[int, ...] = ()) -> Distribution:
    """The distribution of the next ``length`` tokens in plain sampling from the target."""
    distribution: Distribution = {(): 1.0}
    for _ in range(length):
        distribution = {
            text + (t,): mass * float(p)
            for text, mass in distribution.items()
            for t, p in enumerate(target(prefix + text))
            if mass * p > 0
        }
    return distribution


def completed(distribution: Distribution, target: Model, length: int, prefix: tuple[int, ...] = ()) -> Distribution:
    """A distribution over texts of up to ``length`` tokens, each of them continued to ``length`` by plain sampling."""
    whole: Distribution = defaultdict(float)
    for text, mass in distribution.items():
        for rest, p in text_distribution(target, length - len(text), prefix + text).items():
            whole[text + rest] += mass * p
    return dict(whole)


def expected_accepted(distribution: Distribution) -> float:
    """The expected number of accepted drafts in a step whose emitted tokens have this distribution."""
    return sum(mass * (len(text) - 1) for text, mass in distribution.items())


def total_variation(a: Distribution, b: Distribution) -> float:
    return 0.5 * sum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in {*a, *b})
