"""The tree operations: on a chain they are the operations on chains, which random numbers they use, and parity of
backends."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from support import TREE_BACKENDS
from support.arrangements import LAYOUTS, NAN, identical, on_backend
from support.exact import Rows

from specdec_kernels import SamplingParams, draft_children, draft_step, verify_tree
from specdec_kernels.backends import reference
from specdec_kernels.ops import TREE_RULES
from specdec_kernels.testing import (
    TreeInputs,
    assert_same_children,
    assert_same_tree_step,
    path_of,
    random_step,
    random_tree_step,
)

MIXED = (0.0, 0.5, 1.0, 1.7)
FILTERS = {"top_k": (0, 20, 1, 0, 5), "top_p": (1.0, 0.9, 0.3), "min_p": (0.0, 0.02)}
PENALTIES = {"repetition_penalty": (1.0, 1.3, 0.8), "presence_penalty": (0.0, 0.5), "frequency_penalty": (0.2, -0.1, 0)}
SAMPLING = {"plain": {}, "filters": FILTERS, "all": {"table": 9, **FILTERS, **PENALTIES}}
FORK = (-1, -1, 0, 0, 1, 3, -1)
TREES = {
    "fork": FORK,
    "wide": (-1,) * 7,
    "several": [FORK, (-1, 0, 1, 2, 3, 4, 5), (-1, -1, -1, 0, 1, 2, 0)],  # which take turns over the batch
    "none": (),
}


# ---- Chains ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize(("rule", "of_chains"), [("walk", "coupled"), ("token", "token"), ("block", "block")])
def test_a_chain_is_verified_as_by_speculative_step(tree_backend, rule, of_chains, sampling):
    """The same tokens, counts and status with the same random numbers, and also if drafts are strange."""
    for random_state, vocabulary in enumerate((3, 1100)):
        step = random_step(
            40, 4, vocabulary, rule=of_chains, temperature=MIXED, random_state=random_state, drafter="cpu",
            **SAMPLING[sampling],
        )  # fmt: skip
        step = step.replace(num_drafts=torch.arange(40) % 5)
        step.draft_tokens[::7, 2] = torch.tensor([-1, -2, vocabulary, 2**40, -1, -2])
        row = torch.full((40, 1, vocabulary), NAN)
        q = None if step.draft_logits is None else torch.cat([step.draft_logits, row], 1)
        tree = TreeInputs(
            step.target_logits, step.draft_tokens, (torch.arange(4) - 1).expand(40, -1), q, step.params, step.seed,
            step.position, step.num_drafts, table=step.table, rule=rule,
        )  # fmt: skip
        want, got = step.run(tree_backend), tree.run(tree_backend)
        for name in ("tokens", "num_accepted", "num_emitted", "status"):
            assert torch.equal(getattr(got, name), getattr(want, name)), (vocabulary, name)
        nodes = torch.arange(5).expand(40, -1)
        assert torch.equal(got.path, torch.where(nodes < want.num_accepted[:, None], nodes, -1))


def test_walk_emits_the_text_of_plain_sampling(tree_backend):
    """Whatever the tree, the tokens are those that ``coupled`` draws at the same positions."""
    inputs = random_tree_step(TREES["several"], 20, 12, temperature=(0.7, 1.0), random_state=4)
    out = inputs.run(tree_backend)
    assert out.num_accepted.max() >= 2
    for b in range(20):
        for i in range(int(out.num_emitted[b])):
            row = 0 if i == 0 else int(out.path[b, i - 1]) + 1
            params = SamplingParams(inputs.params.temperature[b].item())
            common = {"seed": inputs.seed[b : b + 1], "offset": 0, "rule": "coupled", "backend": tree_backend}
            logits, position = inputs.target_logits[b, row][None], inputs.position[b : b + 1] + i
            plain = on_backend(draft_step, logits, params, position=position, **common)
            assert plain.tokens[0] == out.tokens[b, i]


# ---- Random numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["token", "block"])
def test_no_number_serves_twice(monkeypatch, rule):
    """In a whole decoded text, no two decisions use the same random number."""
    used: Counter = Counter()
    philox = reference.philox

    def recording(seed, index, position, offset, stream):
        rows = zip(
            *(torch.as_tensor(t).expand(len(seed)).tolist() for t in (seed, position, offset)),
            index.tolist(),
            strict=True,
        )
        for s, p, row, columns in rows:
            used.update((s, p, row, stream, n) for n in columns)
        return philox(seed, index, position, offset, stream)

    monkeypatch.setattr(reference, "philox", recording)
    monkeypatch.setattr(reference, "BLOCK", 4)
    target, draft = (Rows.random(6, 1, random_state).table.float() for random_state in (1, 2))
    text: list[int] = []
    lengths = set()
    while len(text) < 14:
        common = {"params": SamplingParams(), "seed": 3, "position": len(text), "backend": "reference"}
        context = [text[-1] + 1 if text else 0] + [0] * len(FORK)  # the rows of the tables
        for row in range(len(context)):
            if children := [node for node, parent in enumerate(FORK) if parent == row - 1]:
                drawn = draft_children(draft[context[row]][None], len(children), offset=row, **common)
                for child, token in zip(children, drawn.tokens[0].tolist(), strict=True):
                    context[child + 1] = token + 1
        tokens = torch.tensor([context[1:]]) - 1
        out = verify_tree(target[None, context], tokens, torch.tensor(FORK), draft[None, context], rule=rule, **common)
        text += out.tokens[0, : int(out.num_emitted)].tolist()
        lengths.add(int(out.num_emitted))
    assert len(lengths) > 1 and len(used) > 100
    assert max(used.values()) == 1, [number for number, times in used.items() if times > 1][:5]


# ---- Backends --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("rule", TREE_RULES)
@pytest.mark.parametrize("fast", TREE_BACKENDS[1:])
def test_parity(fast, rule, sampling):
    near_ties = sequences = 0
    dtypes = itertools.cycle((torch.float32, torch.bfloat16, torch.float16))
    for i, (name, vocabulary) in enumerate(itertools.product(TREES, (1, 5, 40, 1100))):
        dtype, draft_dtype = next(dtypes), next(dtypes)
        inputs = random_tree_step(
            TREES[name], 12, vocabulary, rule=rule, dtype=dtype, draft_dtype=draft_dtype, temperature=MIXED,
            random_state=i, drafter="cpu", similar=i % 4 > 0, reduced=(2 * vocabulary + 2) // 3 if i % 3 == 0 else 0,
            **SAMPLING[sampling],
        )  # fmt: skip
        nodes = inputs.node_tokens.shape[1]
        if i % 2:
            inputs = inputs.replace(num_nodes=torch.arange(12) % (nodes + 1))
        inputs = inputs.map(LAYOUTS[sorted(LAYOUTS)[i % len(LAYOUTS)]])
        near_ties += assert_same_tree_step(inputs.run(fast), *inputs.reference(), f"{name} V={vocabulary} {dtype}")
        sequences += 12
        if nodes:
            logits = inputs.target_logits if inputs.draft_logits is None else inputs.draft_logits
            row = i % (nodes + 1)
            arguments = (logits[:, row], row, path_of(inputs.parents[0].tolist(), row), 1 + i % 9)
            near_ties += assert_same_children(inputs.draft(*arguments, fast), *inputs.reference_draft(*arguments))
    assert near_ties < max(2, 2e-3 * sequences)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("fast", TREE_BACKENDS[1:])
def test_parity_where_many_are_rejected(fast, rule):
    """Several siblings that are far from the target's favourites, of a whole and of a reduced vocabulary."""
    for vocabulary, reduced in ((7, 0), (7, 5), (1500, 0), (1500, 1030)):
        inputs = random_tree_step(
            (-1, -1, -1, -1, 0, 0, 1), 100, vocabulary, rule=rule, similar=False, reduced=reduced, random_state=reduced
        )
        want, margin = inputs.reference()
        assert assert_same_tree_step(inputs.run(fast), want, margin, f"V={vocabulary}") < 2
        assert (want.path[:, 0] > 1).float().mean() > 0.05 * (vocabulary < 10)


@pytest.mark.parametrize("rule", TREE_RULES)
def test_batch_invariance(tree_backend, rule):
    """The same results, bit for bit, in a permuted batch, alone, and beside sequences with other trees."""
    inputs = random_tree_step(
        TREES["several"], 6, 1500, rule=rule, temperature=MIXED, random_state=5, **SAMPLING["all"]
    )
    inputs = inputs.replace(num_nodes=torch.tensor([7, 5, 7, 0, 6, 7]))
    together = inputs.run(tree_backend)
    for index in (torch.tensor([4, 2, 0, 5, 1, 3]), torch.tensor([1]), torch.tensor([4])):
        assert identical(inputs.map(lambda t, index=index: t[index]).run(tree_backend), [t[index] for t in together])


@pytest.mark.parametrize("rule", TREE_RULES)
def test_threads_change_nothing(rule):
    sampling = {"temperature": (0.8, 0.5, 0.0), "top_k": (0, 900), "top_p": (0.95, 1.0), "table": 5}
    inputs = random_tree_step(FORK, 3, 40_000, rule=rule, random_state=7, drafter="cpu", **sampling)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append([*inputs.run("cpu"), *inputs.draft(inputs.target_logits[:, 0], 0, (), 5, "cpu")])
    assert identical(results[1], results[0]) and identical(results[2], results[0])
