"""Chi-square of what trees emit: cells of one step against the published algorithm, and whole texts over many steps
against plain sampling from a toy language model. Children are drawn by ``draft_children``.

Noise that is used in two steps, or in drafting and verification, biases texts although every single step has the right
distribution, so only whole texts can show it. ``test_power`` computes what the tests can see."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from specdec.evaluation.verify.chi_square import ChiSquare, chi_square, detectable_bias
from support.arrangements import on_backend
from support.cells import (
    BIG_TREE_BACKENDS,
    DRAWS,
    GENERATED,
    LEVEL,
    NIGHTLY,
    ROWS,
    SETTINGS,
    STATISTICS,
    TEMPERATURES,
    marginal,
)
from support.exact import Context, Setting, params_of, table_of

from specdec_kernels import SamplingParams, TokenTable, draft_children, verify_tree
from specdec_kernels.backends import reference
from specdec_kernels.ops import TREE_RULES
from specdec_kernels.testing import (
    Distribution,
    TreeInputs,
    multi_round_distribution,
    path_of,
    probabilities,
    text_distribution,
    traversal_distribution,
    walk_distribution,
)

VOCABULARY, LENGTH = 4, 7
# Logits after the last token, in the last row those of the beginning.
TARGET, DRAFT = 1.2 * torch.randn(2, VOCABULARY + 1, VOCABULARY, generator=torch.Generator().manual_seed(3))
DRAFT = DRAFT + 0.3 * TARGET
TREES = {"pairs": (-1, -1, 0, 0, 1), "three": (-1, -1, -1, 1, 3, 3), "chain": (-1, 0, 1)}
FEWEST = 1  # nodes of a sequence after a step that accepted none, and all of them otherwise


class Cells(NamedTuple):
    """ROWS cells that are drawn by the same calls: a step with each of these settings."""

    rule: str
    tree: str
    settings: str

    def __str__(self) -> str:
        return f"{self.rule}-{self.tree}-{self.settings}"

    def contexts(self) -> list[Context]:
        return [
            Context(Setting(TEMPERATURES[row % 3], **more), GENERATED if self.settings == "tables" else ())
            for row, more in enumerate(SETTINGS[self.settings].values())
        ]


CELLS = [
    Cells(rule, tree, settings)
    for rule in TREE_RULES
    for tree, settings in zip(TREES, [*SETTINGS, "filters"], strict=True)
]


def drafted(
    rule: str, parents: Sequence[int], last: torch.Tensor, num_nodes, stops: bool, backend: str, **common
) -> TreeInputs:
    """A step after the tokens ``last`` [n], with its nodes drawn. ``stops``: token 0 has no children."""
    tokens = torch.full((len(last), len(parents)), -1)
    for row in range(len(parents) + 1):
        children = [node for node, parent in enumerate(parents) if parent == row - 1]
        if not children:
            continue
        before = last if row == 0 else tokens[:, row - 1]
        drawn = on_backend(
            draft_children, DRAFT[before], len(children), offset=row, drafts=tokens[:, path_of(parents, row)],
            sampled=rule != "walk", backend=backend, **common,
        )  # fmt: skip
        tokens[:, children] = drawn.tokens
        if stops and row:
            tokens[:, children] = torch.where(before[:, None] == 0, -1, drawn.tokens)
    context = torch.cat([last[:, None], tokens], 1)
    draft = None if rule == "walk" else DRAFT[context]
    tree = torch.tensor(parents).expand(len(last), -1)
    return TreeInputs(TARGET[context], tokens, tree, draft, num_nodes=num_nodes, rule=rule, **common)


def model(logits: torch.Tensor, setting: Setting, generated: tuple[int, ...] = ()):
    def after(text: tuple[int, ...]) -> np.ndarray:
        whole = generated + text
        return setting.probabilities(logits[whole[-1] if whole else -1].tolist(), whole)

    return functools.cache(after)


@functools.cache
def distribution_of(cells: Cells, row: int) -> Distribution:
    setting, generated = cells.contexts()[row]
    target, draft = (model(logits, setting, generated) for logits in (TARGET, DRAFT))
    if cells.rule == "token":
        return multi_round_distribution(target, draft, TREES[cells.tree])
    if cells.rule == "block":
        return traversal_distribution(target, draft, TREES[cells.tree])

    def best(text: tuple[int, ...], count: int) -> list[int]:
        q = draft(text)
        return [v for v in np.argsort(-q, kind="stable").tolist() if q[v] > 0][:count]

    return walk_distribution(target, best, TREES[cells.tree])


def counted(cells: Cells, backend: str, draws: int) -> list[dict]:
    """For every row, how often it emitted each text."""
    contexts, parents = cells.contexts(), TREES[cells.tree]
    table = table_of(contexts)
    common = {
        "params": params_of([context.setting for context in contexts]),
        "seed": torch.arange(ROWS),
        "position": torch.tensor([context.position() for context in contexts]),
    }
    last = torch.tensor([context.text[-1] if context.text else -1 for context in contexts])
    nothing = torch.zeros(ROWS, 0, dtype=torch.int64)
    step = TreeInputs(TARGET[last], nothing, nothing, None, table=table, **common)
    base, columns = VOCABULARY + 1, len(parents) + 1
    counts, powers = torch.zeros(ROWS, base**columns, dtype=torch.int64), [base**i for i in range(columns)]
    for seed in torch.arange(draws).split(2_000 if backend == "reference" else 10_000):
        n = len(seed)
        whole = step.map(lambda t, n=n: t.repeat(n, *[1] * (t.dim() - 1)))
        common = {"params": whole.params, "position": whole.position, "table": whole.table}
        common["seed"] = seed.repeat_interleave(ROWS)
        out = drafted(cells.rule, parents, last.repeat(n), None, False, backend, **common).run(backend)
        assert not out.status.any() and torch.equal(out.num_emitted, out.num_accepted + 1)
        code = (out.tokens + 1) @ torch.tensor(powers) + base**columns * torch.arange(ROWS).repeat(n)
        counts += code.bincount(minlength=counts.numel()).view_as(counts)
    return [
        {tuple(c // p % base - 1 for p in powers if c // p % base): int(row[c]) for c in row.nonzero()[:, 0].tolist()}
        for row in counts
    ]


@pytest.mark.parametrize("cells", [cells for cells in CELLS if cells.tree != "chain"], ids=str)
@pytest.mark.parametrize("backend", BIG_TREE_BACKENDS)
def test_one_step(backend, cells):
    """A chain is verified bitwise as by ``speculative_step``, as test_trees.py sees every day."""
    check_cells(cells, backend, DRAWS // 10)


@pytest.mark.nightly
@pytest.mark.parametrize("cells", CELLS, ids=str)
@pytest.mark.parametrize("backend", ["reference", *BIG_TREE_BACKENDS])
def test_one_step_of_many(backend, cells):
    check_cells(cells, backend, DRAWS // 5 if backend == "reference" else NIGHTLY // 20)


def check_cells(cells: Cells, backend: str, draws: int) -> None:
    for row, counts in enumerate(counted(cells, backend, draws)):
        for name, key in STATISTICS.items():
            expected = marginal(distribution_of(cells, row), key)
            result = chi_square(marginal(counts, key), expected, LEVEL)
            assert result.p_value > LEVEL, (row, name, result)


@pytest.mark.parametrize(
    ("rule", "published"), [("token", multi_round_distribution), ("block", traversal_distribution)]
)
@pytest.mark.parametrize("backend", ["reference", *BIG_TREE_BACKENDS])
def test_second_children_of_a_peaked_q(backend, rule, published):
    """The first child takes all of q but 2e-5, and the second one is tested against what is left. In float32, a
    difference from 1 would be wrong by a fifth."""
    target, draft = torch.tensor([0.0, 1.0, 0.3, -0.5]), torch.tensor([112.0, 100.0, 100.5, 99.0])
    n = DRAWS // 5
    common = {"params": SamplingParams(), "seed": torch.arange(n), "position": 0, "backend": backend}
    tokens = on_backend(draft_children, draft.expand(n, -1), 2, offset=0, **common).tokens
    target_rows, draft_rows = (logits.expand(n, 3, -1) for logits in (target, draft))
    parents = torch.tensor([-1, -1])
    out = on_backend(verify_tree, target_rows, tokens, parents, draft_rows, rule=rule, depth=1, **common)
    counts = Counter(zip(out.num_emitted.tolist(), out.tokens[:, 0].tolist(), strict=True))
    p, q = (probabilities(logits.tolist(), 1.0) for logits in (target, draft))
    expected = published(lambda text: p, lambda text: q, (-1, -1))
    result = chi_square(counts, marginal(expected, lambda text: (len(text), text[0])), LEVEL)
    assert result.p_value > LEVEL and result.detectable < 0.1, result


# ---- Whole texts -----------------------------------------------------------------------------------------------------


class Decoding(NamedTuple):
    """How texts are decoded."""

    rule: str
    tree: str
    setting: Setting = Setting()
    ragged: bool = False  # FEWEST nodes after a step that accepted none
    stops: bool = False

    def __str__(self) -> str:
        return f"{self.rule}-{self.tree}{'-penalties' * (self.setting != Setting())}{'-stops' * self.stops}"


PENALTIES = Setting(0.9, top_p=0.95, repetition_penalty=1.2, presence_penalty=-0.2, frequency_penalty=0.15)
DECODINGS = (
    *(Decoding(rule, "three") for rule in TREE_RULES),
    *(Decoding(rule, "pairs", PENALTIES, ragged=True, stops=rule != "walk") for rule in TREE_RULES),
)
WINDOWS = {str(key): key for key in (slice(3), slice(2, 5), slice(4, 7), slice(LENGTH))}


def decode(decoding: Decoding, backend: str, seed: torch.Tensor, forget_position: bool = False) -> torch.Tensor:
    """Texts [n, LENGTH] for seeds [n]. Positions advance by the number of emitted tokens."""
    parents, setting = TREES[decoding.tree], decoding.setting
    text = torch.full((len(seed), LENGTH + len(parents) + 1), -1)
    length, num_nodes = torch.zeros_like(seed), torch.full_like(seed, len(parents))
    while (active := (length < LENGTH).nonzero()[:, 0]).numel():
        last = text[active, length[active] - 1]  # at first this reads the empty column -1, and so TARGET[-1]
        common = {
            "params": params_of([setting]),
            "seed": seed[active],
            "position": length[active] * (not forget_position),
            "table": table_after(text[active]) if setting.needs_table() else None,
        }
        nodes = num_nodes[active] if decoding.ragged else None
        step = drafted(decoding.rule, parents, last, nodes, decoding.stops, backend, **common)
        out = step.run(backend)
        kept = out.tokens >= 0
        slots = length[active, None] + torch.arange(out.tokens.shape[1])
        text[active[:, None].expand_as(slots)[kept], slots[kept]] = out.tokens[kept]
        length[active] += out.num_emitted
        num_nodes[active] = torch.where(out.num_accepted > 0, len(parents), FEWEST)
    return text[:, :LENGTH]


def table_after(text: torch.Tensor) -> TokenTable:
    count = torch.stack([(text == v).sum(1) for v in range(VOCABULARY)], 1)
    nothing = torch.zeros_like(count)
    return TokenTable(nothing + torch.arange(VOCABULARY), nothing.float(), nothing.bool(), count.int())


@functools.cache
def distribution_of_texts(setting: Setting) -> Distribution:
    return text_distribution(model(TARGET, setting), LENGTH)


def results(decoding: Decoding, backend: str, draws: int, **more) -> Iterator[tuple[str, ChiSquare]]:
    counts, powers = torch.zeros(VOCABULARY**LENGTH, dtype=torch.int64), [VOCABULARY**i for i in range(LENGTH)]
    for seed in torch.arange(draws).split(10_000 if backend == "reference" else 50_000):
        code = decode(decoding, backend, seed, **more) @ torch.tensor(powers)
        counts += code.bincount(minlength=len(counts))
    found = {tuple(c // p % VOCABULARY for p in powers): n for c, n in enumerate(counts.tolist()) if n}
    expected = distribution_of_texts(decoding.setting)
    for name, window in WINDOWS.items():
        yield name, chi_square(*(marginal(m, lambda text, w=window: text[w]) for m in (found, expected)), LEVEL)


@pytest.mark.parametrize("decoding", DECODINGS, ids=str)
@pytest.mark.parametrize("backend", ["reference", *BIG_TREE_BACKENDS])
def test_whole_texts(backend, decoding):
    """The reference is slow, and its distributions are enumerated; what is tested here is its noise."""
    for name, result in results(decoding, backend, DRAWS // 50 if backend == "reference" else DRAWS // 4):
        assert result.p_value > LEVEL, (name, result)


@pytest.mark.nightly
@pytest.mark.parametrize("decoding", DECODINGS, ids=str)
@pytest.mark.parametrize("backend", BIG_TREE_BACKENDS)
def test_whole_texts_of_many(backend, decoding):
    for name, result in results(decoding, backend, NIGHTLY // 4):
        assert result.p_value > LEVEL, (name, result)


def found(*arguments, **more) -> bool:
    return min(result.p_value for _, result in results(*arguments, **more)) < 1e-20


@pytest.mark.parametrize("rule", ["token", "block"])
def test_noise_reused_between_steps_is_found(rule):
    """A loop that forgets to advance positions: every step draws the same numbers."""
    assert found(Decoding(rule, "three"), "cpu", DRAWS // 10, forget_position=True)


def test_noise_by_absolute_position_is_found_in_block(monkeypatch):
    """``block`` uses the noise of nodes that it then does not decide, and would use it again in the next step."""
    philox = reference.philox

    def by_position(seed, index, position, offset, stream):
        depth = torch.as_tensor([0, 1, 2, 3])[torch.as_tensor(offset)]
        return philox(seed, index, position + depth, 0, stream)

    monkeypatch.setattr(reference, "philox", by_position)
    assert found(Decoding("block", "chain"), "reference", DRAWS // 5)


def test_power():
    """With power 0.999, a cell finds that probabilities of 16 pairs of tokens are wrong by a factor of 1 +- 0.114, and
    a window of three tokens of a text 1 +- 0.086. Nightly, these figures are 0.0163 and 0.0087."""
    for draws, outcomes, figure in (
        (DRAWS // 10, VOCABULARY**2, 0.114),
        (DRAWS // 4, VOCABULARY**3, 0.086),
        (NIGHTLY // 20, VOCABULARY**2, 0.0163),
        (NIGHTLY // 4, VOCABULARY**3, 0.0087),
    ):
        assert figure / 1.1 < detectable_bias(draws, outcomes - 1, LEVEL) < figure
