"""Compares a head in the loop with one that is written plainly, or with its publisher's."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from specdec import SpeculativeDecoder, load_head
from specdec.drafters import Drafter, Drafts
from specdec.drafters.protocol import Step
from transformers import PreTrainedModel

from specdec_kernels import SamplingParams

from .models import TIE, prompts, tiny_model

LAYERS = 7
Plain = Callable[[list[torch.Tensor], list[int], list[int]], torch.Tensor]


class Drafted(NamedTuple):
    """What was drafted after one text."""

    text: list[int]
    tokens: list[int]
    parents: list[int]  # of a chain, the token before
    logits: torch.Tensor | None  # row i + 1 is what the children of node i were drawn from, row 0 those of the root

    def path(self, node: int) -> list[int]:
        """The tokens from the root to ``node``, which is among them; none to -1, the root."""
        found = []
        while node >= 0:
            found.append(self.tokens[node])
            node = self.parents[node]
        return found[::-1]


class Compared(NamedTuple):
    """A node of a tree or chain of drafts."""

    depth: int
    children: list[int]
    logits: torch.Tensor | None  # [columns], from which these were drawn
    row: torch.Tensor  # [columns], from which they should have been


def compare(
    path,
    plain: Plain,
    new: int = 14,
    target: PreTrainedModel | None = None,
    *,
    texts: list[list[int]] | None = None,
    num_drafts: int = 3,
    tree: int | None = None,
    rounded: Plain | None = None,
    **settings,
) -> list[list[int]]:
    """Compares the drafts in each step with ``plain(states, text, drafts)``, [len(drafts) + 1, V]: of sampled texts q,
    of greedy ones which tokens are the most likely. Of trees, at each node that has children.

    Args:
        target: None: a tiny Llama.
        texts: prompts; None: three of them.
        rounded: the same as ``plain`` in the target's dtype of 16 bits: of the drafts in each place of sampled texts,
            half are as near to ``plain`` as half of these. None: all are as in float32.

    Returns:
        Of each text, how many drafts each step accepted.
    """
    target = tiny_model("llama", layers=LAYERS) if target is None else target
    head = load_head(path, target, check=False)
    texts = prompts(3, 2, 9) if texts is None else texts
    found: list[Drafted] = []

    class Recording(Drafter):
        trees = samples_trees = head.trees

        def tree_slots(self, nodes, depth):
            return head.tree_slots(nodes, depth)

        def start(self, batch):
            session = head.start(batch)
            propose = session.propose

            def noted(step):
                drafts = propose(step)
                assert drafts.logits is None or drafts.d2t is head.head.d2t
                found.extend(_drafted(drafts, step))
                return drafts

            session.propose, session.needs_host = noted, True
            return session

    decoder = SpeculativeDecoder(target, Recording(), num_drafts, tree=tree)
    settings = {"params": SamplingParams(1.0), "seed": [*range(1, len(texts) + 1)], "eos_token_id": []} | settings
    decoder.generate(texts, max_new_tokens=new, **settings)

    def all_of(plain: Plain) -> list[Compared]:
        return [each for drafted in found for each in _expected(drafted, plain, target, head.head.d2t)]

    compared = all_of(plain)
    assert len(compared) > len(texts) * new / 2
    if rounded is None:
        for each in compared:
            _check(each, head.head.d2t)
    else:
        _check_rounded(compared, all_of(rounded))
    lengths = [[len(each.text) for each in found if each.text[: len(text)] == text] for text in texts]
    return [[after - before - 1 for before, after in itertools.pairwise(own)] for own in lengths]


def _drafted(drafts: Drafts, step: Step) -> Iterator[Drafted]:
    """Yields what was drafted for each row, as far as it counts."""
    count = drafts.tokens.shape[1]
    parents = torch.arange(-1, count - 1) if drafts.parents is None else drafts.parents
    for row, most in enumerate(step.allowed_on_device.tolist()):
        own = Drafted(
            list(step.texts[row]),
            drafts.tokens[row].tolist(),
            parents.expand(len(drafts.tokens), -1)[row].tolist(),
            None if drafts.logits is None else drafts.logits[row].clone(),
        )
        yield own._replace(tokens=[-1 if len(own.path(i)) > most else t for i, t in enumerate(own.tokens)])


def _expected(drafted: Drafted, plain: Plain, target: PreTrainedModel, d2t: torch.Tensor | None) -> list[Compared]:
    """What the children of each node that has any were drawn from, and should have been."""
    assert d2t is None or (d2t.diff() > 0).all()
    children: dict[int, list[int]] = {}
    for token, parent in zip(drafted.tokens, drafted.parents, strict=True):
        if token >= 0:
            children.setdefault(parent, []).append(token)
    if not children:  # a row without a sequence, or at its end
        return []
    with torch.no_grad():
        states = [s[0] for s in target(torch.tensor([drafted.text]), output_hidden_states=True).hidden_states]
    expected: dict[int, torch.Tensor] = {}
    for last in sorted(children, reverse=True):  # of the nodes on one path, the last one first
        if last in expected:
            continue
        with torch.no_grad():
            rows = plain(states, drafted.text, drafted.path(last)).float()
        node = last
        for row in reversed(rows):
            expected[node] = row if d2t is None or len(row) == len(d2t) else row[d2t]
            node = drafted.parents[node]  # of the root's, which is arbitrary, there is no row
    logits = drafted.logits
    return [
        Compared(len(drafted.path(n)), own, None if logits is None else logits[n + 1].float(), expected[n])
        for n, own in children.items()
    ]


def _check(each: Compared, d2t: torch.Tensor | None) -> None:
    if each.logits is not None:
        torch.testing.assert_close(each.logits, each.row, rtol=1e-3, atol=2e-3)
        return
    chosen = torch.tensor(each.children)
    columns = chosen if d2t is None else torch.searchsorted(d2t, chosen)
    others = each.row.scatter(0, columns, -torch.inf)
    assert len(chosen.unique()) == len(chosen) and each.row[columns].min() > others.max() - TIE


def _check_rounded(compared: list[Compared], rounded: list[Compared]) -> None:
    """``rounded`` has the same drafts in the same order, with what was expected of them in 16 bits."""
    ours, theirs = defaultdict(list), defaultdict(list)
    for each, own in zip(compared, rounded, strict=True):
        ours[each.depth].append((each.logits - each.row).abs().max())
        theirs[each.depth].append((own.row - each.row).abs().max())
    for depth in ours:
        assert torch.stack(ours[depth]).median() < 1.5 * torch.stack(theirs[depth]).median()
