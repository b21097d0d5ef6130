"""Steps with trees: texts, greedy and sampled, are those of plain decoding, whatever the tree holds."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from specdec import FinishReason, Producer, PromptLookupDrafter, Request, Scheduler, SpeculativeDecoder
from specdec.drafters import BatchState, Drafter, Drafts, DraftSession, Step
from specdec.drafters.copying import Branches, as_trees
from specdec.models.forward.cached_model import CachedModel
from support.dropped import drops_drafter
from support.model_types import model_of
from support.models import POSITIONS, prompts, tiny_model

from specdec_kernels import SamplingParams

SAMPLED = SamplingParams(0.7, top_p=0.9)
PENALISED = SamplingParams(0.7, repetition_penalty=1.3, frequency_penalty=0.2)


def add(tree: Branches, continuation: Sequence[int]) -> None:
    """Adds a continuation, as far as there is room."""
    node: int | None = -1
    for token in continuation:
        if node is not None:
            node = tree.child(node, token)


class Knowing(Drafter, DraftSession):
    """Knows the texts, and hides the next tokens among wrong ones: after others of its siblings, on paths that end
    early, or not at all. Paths are longer than allowed, and nodes lie below tokens that are none."""

    trees = True

    def __init__(self, texts: list[list[int]]):
        self.texts = texts

    def start(self, batch: BatchState) -> Knowing:
        self.nodes = batch.nodes
        return self

    def propose(self, step: Step) -> Drafts:
        trees = []
        for text, allowed in zip(step.texts, step.allowed, strict=True):
            trees.append(self.tree(text) if allowed else Branches(0))
        return as_trees(trees, step.position.device)

    def tree(self, text: list[int]) -> Branches:
        draw, tree = random.Random(len(text)), Branches(self.nodes)
        right = next((t[len(text) :] for t in self.texts if t[: len(text)] == text), [])
        for _ in range(draw.randrange(4)):
            add(tree, [draw.choice((*range(101), -1, 4000)) for _ in range(draw.randrange(1, 4))])
        for _ in range(draw.randrange(4)):  # right for a while, and then wrong
            kept = draw.randrange(5)
            add(tree, [*right[:kept], draw.randrange(101), draw.randrange(101)])
        add(tree, right[: draw.randrange(10)])
        return tree


def plain(model, ids, new, **settings):
    return SpeculativeDecoder(model, None, 0).generate(ids, max_new_tokens=new, rule="coupled", **settings)


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("llama", None),
        ("gemma3", SAMPLED),
        *(pytest.param(k, p, marks=pytest.mark.nightly) for k in ("gpt2", "qwen3") for p in (None, SAMPLED, PENALISED)),
        ("llama", PENALISED),
    ],
)
def test_texts_are_those_of_plain_decoding(kind, params):
    """One sequence and three of different lengths; accepted paths begin at any sibling."""
    model, produced = tiny_model(kind), set()
    for ids in (prompts(1, 20, 20), prompts(3, 1, 30)):
        settings = {"eos_token_id": [], "params": params, "seed": list(range(len(ids)))}
        expected = plain(model, ids, 60, **settings)
        knowing = Knowing([p + t for p, t in zip(ids, expected.tokens, strict=True)])
        got = SpeculativeDecoder(model, knowing, 6, tree=14).generate(ids, max_new_tokens=60, **settings)
        assert got.tokens == expected.tokens and got.drafter_error is None
        assert got.stats.tau > 2 and got.stats.accepted_by_position[5] > 0
        assert got.stats.steps == sum(len(own) for own in got.tokens) - got.stats.accepted
        produced.update(*got.produced_by)
    assert produced == {Producer.ACCEPTED, Producer.RECOVERED, Producer.BONUS}


def test_requests_that_join_while_others_decode():
    """Two rows for five requests, greedy and sampled; prompt lookup, whose trees have nothing for some rows."""
    model = tiny_model("gemma3")
    ids = [p * 3 for p in prompts(5, 2, 9)]
    params = [{"temperature": 0.0} if i % 2 else {"temperature": 0.3} for i in range(5)]
    expected = [
        plain(model, [p], 40 - 6 * i, params=SamplingParams(**own), seed=i, eos_token_id=[]).tokens[0]
        for i, (p, own) in enumerate(zip(ids, params, strict=True))
    ]
    for drafter in (PromptLookupDrafter(3, 1), Knowing([p + t for p, t in zip(ids, expected, strict=True)])):
        scheduler = Scheduler(SpeculativeDecoder(model, drafter, 5, tree=9), rows=2, max_length=80)
        requests = [
            Request(p, max_new_tokens=40 - 6 * i, params=SamplingParams(**own), seed=i, eos_token_id=[])
            for i, (p, own) in enumerate(zip(ids, params, strict=True))
        ]
        outcomes = {o.number: o for o in scheduler.run(requests)}
        assert [outcomes[i].tokens for i in range(5)] == expected and scheduler.drafter_error is None
        assert sum(o.stats.accepted for o in outcomes.values()) > 10


def test_ends_within_an_accepted_path():
    """An end-of-sequence token among accepted nodes; the last position of a model; stats of depths."""
    model, ids = tiny_model("llama"), prompts(1, 9, 9)
    expected = plain(model, ids, 40, eos_token_id=[]).tokens[0]
    eos = next(t for i, t in enumerate(expected) if i > 7 and t not in expected[:i])
    knowing = Knowing([ids[0] + expected])
    got = SpeculativeDecoder(model, knowing, 8, tree=20).generate(ids, max_new_tokens=40, eos_token_id=[eos])
    assert got.tokens[0] == expected[: expected.index(eos) + 1] and got.finish_reason == [FinishReason.EOS]
    gpt2 = tiny_model("gpt2")
    ids = [prompts(1, POSITIONS - 12, POSITIONS - 12)[0]]
    expected = plain(gpt2, ids, 12, eos_token_id=[]).tokens
    decoder = SpeculativeDecoder(gpt2, Knowing([ids[0] + expected[0] + [7] * 9]), 8, tree=30)
    got = decoder.generate(ids, max_new_tokens=12, eos_token_id=[])
    assert got.tokens == expected and got.finish_reason == [FinishReason.LENGTH]


def test_depths_are_counted():
    """A chain of three right tokens, and then one that has two wrong children, or none. What lies below an id outside
    the vocabulary does not count."""
    model, ids = tiny_model("llama"), prompts(1, 9, 9)
    text = ids[0] + plain(model, ids, 40, eos_token_id=[]).tokens[0]

    class Three(Knowing):
        def tree(self, text: list[int]) -> Branches:
            tree, right = Branches(self.nodes), self.texts[0][len(text) :]
            add(tree, right[:3])
            add(tree, [101, 5, 6, 7, 8])
            if self.texts[1]:
                add(tree, [*right[:3], (right[3] + 1) % 101])
                add(tree, [*right[:3], (right[3] + 2) % 101])
            return tree

    for wrong, drawn in (([], Producer.BONUS), ([1], Producer.RECOVERED)):
        decoder = SpeculativeDecoder(model, Three([text, wrong]), 5, tree=12)
        got = decoder.generate(ids, max_new_tokens=8, eos_token_id=[])
        # The second step has room for four tokens, so no node at depth four counts.
        three = [Producer.ACCEPTED] * 3
        assert got.produced_by[0] == [*three, drawn, *three, Producer.BONUS]
        counts = [2, 2, 2, len(wrong), 0]
        assert got.stats.drafted_by_position == got.stats.tested_by_position == counts
        assert got.stats.accepted_by_position == [2, 2, 2, 0, 0] and got.stats.tau == 4.0
        assert got.stats.nodes == 6 + 2 * len(wrong)


def test_attention_reads_the_slots_of_all_nodes(monkeypatch):
    """A tree may need more than the 64 slots that its depth would."""
    model, ids, layout, reads = tiny_model("llama"), prompts(1, 50, 50), CachedModel.layout, []
    text, trash = ids[0] + plain(model, ids, 20, eos_token_id=[]).tokens[0], 50 + 20 + 14

    def spied(self, positions, slots, visible, tree=None):
        reads.append((int(slots[slots < trash].max()), visible))
        return layout(self, positions, slots, visible, tree)

    monkeypatch.setattr(CachedModel, "layout", spied)
    SpeculativeDecoder(model, Knowing([text]), 2, tree=14).generate(ids, max_new_tokens=20, eos_token_id=[])
    assert all(last < visible for last, visible in reads)
    assert any(last >= 64 for last, _ in reads)


@pytest.mark.parametrize("case", (pytest.param("bloom", marks=pytest.mark.nightly), "mpt"))
def test_models_without_trees_decode_chains(case):
    model, ids = model_of(case), [p * 3 for p in prompts(2, 3, 9)]
    with pytest.warns(RuntimeWarning, match=f"tree: got 12, but a target of model type '{case}' takes its positions"):
        decoder = SpeculativeDecoder(model, PromptLookupDrafter(3, 1), 4, tree=12)
    got = decoder.generate(ids, max_new_tokens=30, eos_token_id=[], params=SAMPLED)
    assert got.tokens == plain(model, ids, 30, eos_token_id=[], params=SAMPLED).tokens and got.stats.drafted > 0


def test_a_drafter_that_fails_is_dropped():
    model, ids = tiny_model("llama"), prompts(2, 5, 9)
    expected = plain(model, ids, 12, eos_token_id=[], params=SAMPLED).tokens
    nothing = torch.zeros(2, 3, dtype=torch.int64)

    class Broken(Knowing):
        tree_of: object = None

        def propose(self, step: Step) -> Drafts:
            if step.index < 2:
                return Drafts(nothing - 1, nothing - 1)
            if isinstance(self.tree_of, Exception):
                raise self.tree_of
            return self.tree_of

    for bad, told in (
        (RuntimeError("lost"), "RuntimeError: lost"),
        (None, "returned NoneType, allowed: Drafts"),
        (Drafts(nothing, nothing), "parents: got .*allowed: for each of 3 nodes a node before it, or -1"),
        (Drafts(nothing, nothing[:, :2] - 1), r"parents: got \[\[-1, -1\], \[-1, -1\]\], allowed: for each of 3"),
        (
            Drafts(nothing.repeat(1, 5), nothing.repeat(1, 5) - 1),
            "tokens: got .*allowed: .*at most 9",
        ),
        (Drafts(nothing.int(), nothing - 1), "tokens: got torch.int32"),
        (Drafts(nothing), "parents: got NoneType, allowed: trees"),
    ):
        drafter = Broken([])
        drafter.tree_of = bad
        decoder = SpeculativeDecoder(model, drafter, 4, tree=9)
        with drops_drafter(told):
            got = decoder.generate(ids, max_new_tokens=12, eos_token_id=[], params=SAMPLED)
        assert got.tokens == expected


def test_what_trees_cannot_do_is_refused():
    model, lookup = tiny_model("llama"), PromptLookupDrafter()

    class Chains(Drafter):
        def start(self, batch):
            raise AssertionError("it is refused before")

    for arguments, told in (
        ((Chains(), 4, 8), "tree: got 8 with draft=Chains"),
        ((None, 0, 8), "tree: got 8 with draft=None"),
        ((lookup, 4, 0), "tree: got 0"),
    ):
        with pytest.raises(ValueError, match=told):
            SpeculativeDecoder(model, arguments[0], arguments[1], tree=arguments[2])
    decoder = SpeculativeDecoder(model, lookup, 4, tree=8)
    with pytest.raises(ValueError, match="rule: got 'block' with a tree of PromptLookupDrafter, allowed: 'coupled'"):
        decoder.generate([[1, 2]], max_new_tokens=4, rule="block")
    with pytest.raises(ValueError, match="rule: got 'token' with a tree"):
        Scheduler(decoder, rows=1, max_length=9, rule="token")
    with pytest.raises(ValueError, match=r"2 rows of 59 slots \(max_length=50, 8 nodes of a tree and the trash"):
        Scheduler(decoder, rows=2, max_length=50, cache_tokens=100)


# ---- proposals


def test_continuations_share_their_beginnings():
    tree = Branches(6)
    for continuation in ([1, 2, 3], [1, 2, 4], [5, 9, 1], [1, 2, 3, 6], [7]):
        add(tree, continuation)
    assert tree.tokens == [1, 2, 3, 4, 5, 9] and tree.parents == [-1, 0, 1, 1, -1, 4] and tree.full
    trees = as_trees([Branches(3), tree], torch.device("cpu"))
    assert trees.tokens.tolist() == [[-1] * 6, tree.tokens] and trees.parents.tolist() == [[-1] * 6, tree.parents]
