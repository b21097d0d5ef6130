"""Trees of suffix matches: their nodes against counts in the whole text, and texts and acceptance in the loop."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec import PromptLookupDrafter, SpeculativeDecoder, SuffixDrafter, SuffixMemory
from support.drafting import start
from support.models import prompts, tiny_model

from specdec_kernels import SamplingParams

Path = tuple[int, ...]
texts = st.lists(st.integers(0, 2), max_size=20)


def paths_of(session, known: list[list[int]], most: int) -> list[list[Path]]:
    """The paths of each sequence's tree, in their order."""
    step = SimpleNamespace(texts=known, allowed=[most] * len(known), last_two=torch.empty(1, 2))
    tree, again = session.propose(step), session.propose(step)
    assert torch.equal(tree.tokens, again.tokens) and torch.equal(tree.parents, again.parents)
    found = []
    for tokens, parents in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths: list[Path] = []
        for token, parent in zip(tokens, parents, strict=True):
            if token >= 0:
                paths.append((*(paths[parent] if parent >= 0 else ()), token))
        found.append(paths)
    return found


# ---- from the definition ---------------------------------------------------------------------------------


def ends_of(text: list[int], piece: list[int]) -> list[int]:
    return [end for end in range(len(piece), len(text) + 1) if text[end - len(piece) : end] == piece]


def matches_of(text: list[int], other: list[int] | None) -> list[list[int]]:
    """The longest of the suffixes of ``text`` that occur equally often elsewhere; at most four."""
    found: dict[tuple[int, ...], list[int]] = {}
    for length in range(len(text), 0, -1):
        piece = text[-length:]
        ends = ends_of(other, piece) if other is not None else ends_of(text, piece)[:-1]
        if ends:
            found.setdefault(tuple(ends), piece)
    return list(found.values())[:4]


def shares(piece: list[int], text: list[int], other: list[int] | None) -> dict[int, float]:
    """How often each token followed ``piece``, of all times."""
    source = text if other is None else other
    if other is None and ends_of(text, piece) == [len(text)]:
        piece = next(iter(matches_of(text, None)), [])
        if not piece:
            return {}
    tokens = {source[end] for end in ends_of(source, piece) if end < len(source) and source[end] >= 0}
    # What the text itself ends in counts when a token follows, unless it has not occurred before.
    ends = {t: ends_of(source, [*piece, t]) for t in sorted(tokens)}
    counts = {t: max(1, sum(end < len(text) or other is not None for end in own)) for t, own in ends.items()}
    return {t: n / sum(counts.values()) for t, n in counts.items()}


def probabilities(text: list[int], other: list[int], most: int, factor: float, min_match: int) -> dict[Path, float]:
    sources = [(None, m) for m in matches_of(text, None)] + [(other, m) for m in matches_of(text, other)]
    sources = sorted((s for s in sources if len(s[1]) >= min_match), key=lambda s: -len(s[1]))
    found: dict[Path, float] = {}

    def extend(source: list[int] | None, piece: list[int], path: Path, weight: float, longest: int) -> None:
        for token, share in shares(piece, text, source).items() if len(path) < longest else ():
            found[(*path, token)] = found.get((*path, token), 0.0) + weight * share
            after = [*piece, token]
            if source is None and ends_of(text, piece) == [len(text)]:  # from the end on as from the match before it
                after = [*matches_of(text, None)[0], token]
            extend(source, after, (*path, token), weight * share, longest)

    for i, (source, match) in enumerate(sources, 1):
        extend(source, match, (), 0.5**i, max(1, math.floor(min(most, factor * len(match)))))
    return found


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    texts.filter(bool),
    texts,
    st.lists(texts.filter(bool), max_size=3),
    st.integers(1, 12),
    st.sampled_from([0.5, 2.0, math.inf]),
    st.integers(1, 2),
)
def test_the_likeliest_continuations(prompt, output, earlier, nodes, factor, min_match):
    memory = SuffixMemory()
    memory.add(earlier)
    session = start(SuffixDrafter(memory, min_match, factor), [prompt], nodes=nodes)
    past = [token for i, text in enumerate(earlier, 1) for token in (*text, -i)]
    for text in (prompt, prompt + output):
        expected = probabilities(text, past, 4, factor, min_match)
        paths = paths_of(session, [text], 4)[0]
        assert len(set(paths)) == len(paths) == min(nodes, len(expected))
        assert all(path[:-1] in paths for path in paths if len(path) > 1)
        best = sorted(expected.values(), reverse=True)
        assert [expected[path] for path in paths] == pytest.approx(best[: len(paths)])


def test_examples():
    def tree(drafter, text, most, nodes=20, ends=frozenset()):
        return paths_of(start(drafter, [text], [ends], nodes=nodes), [text], most)[0]

    own = [7, 1, 2, 3, 8, 2, 4, 9, 2, 4, 7, 1, 2]
    assert tree(SuffixDrafter(), own, 2, nodes=3) == [(3,), (3, 8), (4,)]
    assert tree(SuffixDrafter(), own, 2, ends=frozenset({3})) == [(3,), (4,), (4, 9), (4, 7)]
    assert tree(SuffixDrafter(), [1, 2, 1, 2, 1, 2], 9, nodes=5)[-1] == (1, 2, 1, 2, 1)  # a period goes on
    assert tree(SuffixDrafter(), [1, 2, 3], 9) == []
    assert tree(PromptLookupDrafter(), own, 2) == [(3,), (3, 8)]
    assert tree(PromptLookupDrafter(max_ngram=1, min_ngram=1), own, 1) == [(4,), (3,)]  # twice, and once
    often = [5, 1, 2] * 3 + [6, 1, 2, 7, 1, 3, 8, 1, 3, 4, 1, 3, 9, 1]
    assert tree(SuffixDrafter(), often, 1) == [(2,), (3,)]  # four times, and three times
    memory = SuffixMemory()
    memory.add([[7, 1, 2, 5], [2, 6], [2, 6, 6]])
    drafter = SuffixDrafter(memory)
    # First after 7 1 2, its own text before the memory, and then after 2.
    assert tree(drafter, own, 1) == [(3,), (5,), (4,), (6,)]
    session = start(drafter, [[8, 2]], nodes=9)
    assert paths_of(session, [[8, 2]], 1) == [[(6,), (5,)]]
    memory.add([[2, 5], [2, 30]] * 9)
    assert sorted(paths_of(session, [[8, 2, 7, 2]], 1)[0]) == [(5,), (6,), (7,)]  # 30 came too late
    assert paths_of(session, [[8, 2, 7, 2, 4]], 0) == [[]]


# ---- in the loop -----------------------------------------------------------------------------------------


def test_trees_accept_more_than_chains():
    """A text of four sentences in random order: what follows an end of a sentence is one of four."""
    draw, sentences = random.Random(0), [[0, *range(10 * i + 1, 10 * i + 5)] for i in range(4)]
    text = list(itertools.chain.from_iterable(draw.choices(sentences, k=80)))
    steps = {}
    for nodes in (0, 8, 16, 32):
        session, known, steps[nodes] = start(SuffixDrafter(), [text[:60]], nodes=nodes), 60, 0
        while known < len(text):
            accepted, paths = 0, set()
            step = SimpleNamespace(texts=[text[:known]], allowed=[8], last_two=torch.empty(1, 2))
            if nodes:
                paths = set(paths_of(session, [text[:known]], 8)[0])
            else:
                chain = session.propose(step).tokens[0]
                paths = {tuple(chain[:n]) for n in range(1, len(chain) + 1)}
            while known + accepted < len(text) and tuple(text[known : known + accepted + 1]) in paths:
                accepted += 1
            known, steps[nodes] = known + accepted + 1, steps[nodes] + 1
    assert steps[32] < steps[16] < steps[8] < steps[0] and steps[32] < 0.8 * steps[0]


@pytest.mark.parametrize("params", (None, SamplingParams(1.0)))
def test_texts_are_those_of_plain_decoding(params):
    """The second time, the memory knows them."""
    memory, ids, model = SuffixMemory(), prompts(3, 1, 20), tiny_model()
    arguments = {"max_new_tokens": 50, "eos_token_id": [], "params": params, "seed": [1, 2, 3]}
    plain = SpeculativeDecoder(model, None, 0).generate(ids, rule="coupled", **arguments)
    for least in (1.0, 5.0):
        got = SpeculativeDecoder(model, SuffixDrafter(memory), 8, tree=16).generate(ids, **arguments)
        assert got.tokens == plain.tokens and got.drafter_error is None and got.stats.accepted > 0
        assert got.stats.tau > least
