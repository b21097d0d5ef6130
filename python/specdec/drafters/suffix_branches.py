"""The tree of a text's likely continuations, by what followed its longest suffixes before."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from .copying import Branches
from .suffix_automaton import Cursor, SuffixAutomaton

_MATCHES = 4  # of each source; more add nothing to tau on Python source


class _Match(NamedTuple):
    """Occurrences of one suffix of the text, with the tokens of a path after it."""

    source: SuffixAutomaton | Cursor
    state: int
    weight: float  # the probability of the path after these occurrences, and the match's share in the tree's
    most: int  # tokens of a path


def branch(
    sources: Sequence[SuffixAutomaton | Cursor],
    min_match: int,
    max_match: int,
    longest: Callable[[int], int],
    tree: Branches,
) -> None:
    """Adds the likeliest continuations to ``tree``, best first, until it is full or there are no more.

    The probability of a token after a match is the share that it has in the tokens which followed it before (as in
    SuffixDecoding, Oliaro et al., arXiv 2411.04975), and that of a path the product of its tokens'. Matches are mixed:
    the longest one counts half, and each shorter one half of the one before, whose occurrences it has as well. Of equal
    lengths, the source that is named first counts as longer.

    Args:
        sources: where suffixes of the text are looked up, the text itself or another one.
        min_match, max_match: the least and the greatest number of tokens of a match.
        longest: the most tokens of a path after a match of so many tokens, >= 1.
    """
    matches = []
    for source in sources:
        matches += [(length, source, state) for length, state in source.suffixes(min_match, max_match, _MATCHES)]
    matches.sort(key=lambda match: -match[0])
    root = [_Match(source, state, 0.5**i, longest(n)) for i, (n, source, state) in enumerate(matches, 1)]
    numbers = itertools.count()  # of equally probable nodes, the one that was found first is added first
    candidates: list[tuple[float, int, int, int, int, list[_Match]]] = []
    node, depth, here = -1, 0, root
    while True:
        after: dict[int, list[_Match]] = {}
        for match in here:
            if depth < match.most:
                for token, moved in _moved(match):
                    after.setdefault(token, []).append(moved)
        for token, moved_here in after.items():
            weight = sum(match.weight for match in moved_here)
            heappush(candidates, (-weight, next(numbers), node, depth + 1, token, moved_here))
        if not candidates or tree.full:
            return
        _, _, parent, depth, token, here = heappop(candidates)
        child = tree.child(parent, token)
        assert child is not None
        node, here = child, [] if token in tree.ends else here


def _moved(match: _Match) -> list[tuple[int, _Match]]:
    """Returns each token that follows the match, and the match with it."""
    following = match.source.following(match.state)
    whole = sum(count for _, _, count in following)
    return [(t, match._replace(state=state, weight=match.weight * n / whole)) for t, state, n in following]
