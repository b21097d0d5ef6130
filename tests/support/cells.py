"""Batches of chi-square cells: steps at fixed logits, one cell per batch row, with the exact distribution of each.

The rows of a batch interleave (row r of the batch is r, r + ROWS, r + 2 ROWS, ...) and differ in logits, temperature,
filters, tables and number of drafts, so a distribution that depended on a neighbour would be found. Drafts are drawn by
``draft_step`` itself, as in decoding.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from specdec.evaluation.verify.chi_square import chi_square

from specdec_kernels.ops import RULES
from specdec_kernels.testing import (
    KINDS,
    Distribution,
    Model,
    StepInputs,
    block_distribution,
    coupled_distribution,
    leviathan_distribution,
    pair_of_rows,
)
from specdec_kernels.types import SpeculativeStep

from .exact import Context, Setting, params_of, table_of

FAMILY = 1e-6  # false-alarm probability of all chi-square tests together
TESTS = 10_000  # an upper bound of their number, which tests/kernels/test_chi_square.py checks
LEVEL = FAMILY / TESTS
DRAWS, NIGHTLY = 100_000, 10_000_000
BIG_BACKENDS = ("cpu", "triton", "cuda") if torch.cuda.is_available() else ("cpu",)
BIG_TREE_BACKENDS = tuple(b for b in BIG_BACKENDS if b != "cuda")

INF = float("inf")
ROWS = 8  # cells in a batch
TEMPERATURES = (0.5, 1.0, 1.7)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUM_DRAFTS = (1, 3, 1, 0, 1, 2, 0)
NARROW, WIDE = 5, 64  # vocabularies
Q = ("stats", "d2t", "full", "one_hot")  # forms of q; "stats": "full" with (cutoff, lse)
DISTRIBUTIONS = {"token": leviathan_distribution, "block": block_distribution, "coupled": coupled_distribution}

_PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3, "prompt": (0, 2)}
_BANS = {"bias": ((1, 0.7), (3, -INF)), "prompt": (4,)}
_ENDS = {"ends": (2,), "min_new_tokens": 4}  # token 2 is banned in the first two rows of the step
# ROWS settings each; temperatures and numbers of drafts rotate through them.
SETTINGS = {
    "filters": {
        "none": {},
        "top_k": {"top_k": 3},
        "top_p": {"top_p": 0.8},
        "min_p": {"min_p": 0.15},
        "top_k+top_p": {"top_k": 4, "top_p": 0.75},
        "top_k+min_p": {"top_k": 3, "min_p": 0.1},
        "top_p+min_p": {"top_p": 0.9, "min_p": 0.12},
        "all": {"top_k": 4, "top_p": 0.85, "min_p": 0.1},
    },
    "tables": {
        "empty": {},
        "penalties": _PENALTIES,
        "repetition": {"repetition_penalty": 0.7, "prompt": (1, 4)},
        "bias and ban": _BANS,
        "ends": _ENDS,
        "everything": {**_PENALTIES, **_BANS, **_ENDS},
        "penalties+top_p": {**_PENALTIES, "top_p": 0.8},
        "everything+all": {**_PENALTIES, **_BANS, **_ENDS, "top_k": 4, "top_p": 0.9, "min_p": 0.05},
    },
}
GENERATED = (1, 1)  # the text before the step, in rows with a table


class Cell(NamedTuple):
    name: str
    context: Context
    num_drafts: int


class Batch(NamedTuple):
    """Cells that are drawn by the same calls."""

    rule: str
    q: str
    kind: str  # an argument of pair_of_rows
    dtype: torch.dtype
    settings: str
    vocabulary: int
    turn: int  # by how much temperatures and numbers of drafts are rotated

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.rule}-{self.q}-{self.kind}-{dtype}-{self.settings}-V{self.vocabulary}"

    @property
    def width(self) -> int:
        return max(NUM_DRAFTS) if self.vocabulary == NARROW else 1

    def cells(self) -> list[Cell]:
        found = []
        for row, (name, more) in enumerate(SETTINGS[self.settings].items()):
            temperature = TEMPERATURES[(row + self.turn) % len(TEMPERATURES)]
            num_drafts = min(NUM_DRAFTS[(row + self.turn) % len(NUM_DRAFTS)], self.width)
            context = Context(Setting(temperature, **more), GENERATED if self.settings == "tables" else ())
            found.append(Cell(f"row {row}: {name}, T = {temperature}, K = {num_drafts}", context, num_drafts))
        return found

    def logits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(target [ROWS, K+1, V], draft [ROWS, K, V])."""
        shape = (ROWS, self.width + 1, self.vocabulary)
        target, draft = pair_of_rows(self.kind, ROWS * (self.width + 1), self.vocabulary)
        target = target[:-1].view(shape).to(self.dtype)
        return target, target[:, :-1] if draft is None else draft.view(shape)[:, :-1].to(self.dtype)

    def d2t(self) -> torch.Tensor | None:
        """A draft vocabulary without the ids 1, 4, 7, ..."""
        ids = torch.arange(self.vocabulary)
        return ids[ids % 3 != 1] if self.q == "d2t" else None

    def favourites(self) -> torch.Tensor:
        """One-hot drafts [ROWS, K]: likely tokens, so that acceptances and rejections both occur."""
        return self.logits()[0][:, :-1].topk(2, dim=-1).indices[..., 1]

    def step(self) -> tuple[StepInputs, torch.Tensor]:
        """(one draw of every row, without seeds and drafts; the draft's logits)."""
        contexts = [cell.context for cell in self.cells()]
        target, draft = self.logits()
        inputs = StepInputs(
            target, self.favourites(), None, params_of([c.setting for c in contexts]), torch.arange(ROWS),
            torch.tensor([c.position() for c in contexts]), torch.tensor([c.num_drafts for c in self.cells()]),
            d2t=self.d2t(), table=table_of(contexts), rule=self.rule,
        )  # fmt: skip
        return inputs, draft if inputs.d2t is None else draft[..., inputs.d2t]

    def models(self, row: int) -> tuple[Model, Model]:
        """(target, draft) of a row, by the plain definitions of ``specdec_kernels.testing``."""
        target, draft = (t[row].double() for t in self.logits())
        if (d2t := self.d2t()) is not None:
            draft = torch.full_like(draft, -INF).index_copy(1, d2t, draft[:, d2t])
        setting, generated = self.cells()[row].context
        favourites = self.favourites()[row].tolist()

        def after(logits: torch.Tensor) -> Model:
            return functools.cache(lambda text: setting.probabilities(logits[len(text)].tolist(), generated + text))

        if self.q == "one_hot":
            return after(target), lambda text: np.eye(self.vocabulary)[favourites[len(text)]]
        return after(target), after(draft)


@functools.cache
def distribution_of(batch: Batch, row: int) -> Distribution:
    """The distribution of the texts that a row emits, by the rule's published algorithm."""
    return DISTRIBUTIONS[batch.rule](*batch.models(row), batch.cells()[row].num_drafts)


def drafted(inputs: StepInputs, draft: torch.Tensor, batch: Batch, backend: str) -> StepInputs:
    """``inputs`` with q and with drafts, which are drawn if num_drafts counts them and 0 otherwise."""
    if batch.q == "one_hot":
        return inputs
    n = len(inputs.seed)
    inputs = inputs.replace(draft_tokens=torch.zeros((n, batch.width), dtype=torch.int64))
    cutoff, lse = torch.zeros(2, n, batch.width)
    for i in range(batch.width):
        rows = (inputs.num_drafts > i).nonzero()[:, 0]
        drawn = inputs.map(lambda t, rows=rows: t[rows]).draft(draft[rows, i], i, backend)
        inputs.draft_tokens[rows, i], cutoff[rows, i], lse[rows, i] = drawn.tokens, drawn.cutoff, drawn.lse
    if batch.rule == "coupled":
        return inputs.replace(d2t=None)
    return inputs.replace(draft_logits=draft, draft_stats=None if batch.q == "full" else (cutoff, lse))


def steps(
    batch: Batch, backend: str, draws: int, bug: Callable[[StepInputs], StepInputs] = lambda inputs: inputs
) -> Iterator[SpeculativeStep]:
    """``draws`` steps of every row, with consecutive seeds, which are the hardest for a counter-based generator.

    ``bug`` changes the inputs between drafting and verification.
    """
    inputs, draft = batch.step()
    # The tables of one call stay in the cache.
    chunk = max((160_000 if backend == "reference" else 3_200_000) // inputs.target_logits.numel(), 1)
    for start in range(0, draws, chunk):
        n = min(chunk, draws - start)
        seed = (torch.arange(start, start + n) + (batch.turn << 40)).repeat_interleave(ROWS)
        repeated = functools.partial(_repeated, n=n)
        out = bug(drafted(inputs.map(repeated).replace(seed=seed), repeated(draft), batch, backend)).run(backend)
        assert not out.status.any() and torch.equal(out.num_emitted, out.num_accepted + 1)
        assert torch.equal(out.num_emitted, (out.tokens >= 0).sum(1, dtype=torch.int32))
        yield out


def _repeated(t: torch.Tensor, n: int) -> torch.Tensor:
    return t.repeat(n, *[1] * (t.dim() - 1))


def draw(batch: Batch, backend: str, draws: int, **more) -> list[dict]:
    """For every row, how often it emitted each text."""
    base, length = batch.vocabulary + 1, batch.width + 1
    counts, powers = torch.zeros(ROWS, base**length, dtype=torch.int64), [base**i for i in range(length)]
    for out in steps(batch, backend, draws, **more):
        row = torch.arange(ROWS).repeat(len(out.tokens) // ROWS)
        code = (out.tokens + 1) @ torch.tensor(powers) + base**length * row
        counts += code.bincount(minlength=counts.numel()).view_as(counts)
    return [
        {tuple(c // p % base - 1 for p in powers if c // p % base): int(row[c]) for c in row.nonzero()[:, 0].tolist()}
        for row in counts
    ]


# The statistics of the emitted texts that are tested. The number accepted is one less than the number emitted.
STATISTICS: dict[str, Callable] = {
    "first and second token": lambda text: text[:2],
    "number accepted and last token": lambda text: (len(text), text[-1]),
    "number accepted": len,
}


def marginal(distribution: dict, key: Callable) -> dict:
    found: dict = defaultdict(float)
    for text, mass in distribution.items():
        found[key(text)] += mass
    return dict(found)


def check(batch: Batch, backend: str, draws: int, **more) -> None:
    counts = draw(batch, backend, draws, **more)
    for row, cell in enumerate(batch.cells()):
        for name, key in STATISTICS.items():
            result = chi_square(marginal(counts[row], key), marginal(distribution_of(batch, row), key), LEVEL)
            assert result.p_value > LEVEL, (cell.name, name, result)


def narrow_batch(rule: str, q: str, kind: str, settings: str) -> Batch:
    return Batch(rule, q, kind, torch.float32, settings, NARROW, 0)


def _batches() -> tuple[Batch, ...]:
    found: list[Batch] = []
    for rule, q, kind, dtype in itertools.product(RULES, Q, KINDS, DTYPES):
        # Drafts are one-hot or not, and the coupled rule sees no q.
        if (q == "one_hot") != (kind == "one_hot") or rule == "coupled" and q == "full":
            continue
        if (q, kind) != ("full", "opposite"):  # recomputing (cutoff, lse) matters if p and q are close
            turn = len(found)
            found.append(Batch(rule, q, kind, dtype, tuple(SETTINGS)[turn % 2], NARROW, turn))
    wide = (("token", "stats", "opposite"), ("block", "d2t", "near_equal"), ("coupled", "d2t", "opposite"))
    return (*found, *(Batch(*more, torch.float32, "filters", WIDE, turn) for turn, more in enumerate(wide)))


BATCHES = _batches()
REFERENCE_BATCHES = tuple(
    b for b in BATCHES if (b.q, b.kind, b.dtype, b.vocabulary) == ("stats", "opposite", torch.float32, NARROW)
)
