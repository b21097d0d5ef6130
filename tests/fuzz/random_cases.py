"""Random steps for compare.py. A number decides everything about a case: the same number, limits and device give the
same case again.

Drafts are drawn by the reference, one after the other, so a case also holds K drawings to compare."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import NamedTuple

import torch

from specdec_kernels import DraftStep, SamplingParams
from specdec_kernels.testing import StepInputs, reference_draft
from specdec_kernels.testing.inputs import random_table

INF, NAN = float("inf"), float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RULES_AND_FORMS = (
    *((rule, form) for rule in ("token", "block") for form in ("full", "stats", "reduced", "one_hot")),
    *(("coupled", form) for form in ("full", "reduced", "one_hot")),  # how its drafts are drawn
)
# About vectors of 8 logits, warps, blocks of 1024, and what several blocks do with a rest.
EDGES = (1, 2, 3, 7, 8, 9, 31, 32, 33, 255, 257, 1000, 1023, 1024, 1025, 2047, 2050, 4097, 8191, 8193, 32_000, 65_537)
MOST_DRAFTS = 8
SAMPLING = {
    "temperature": (0.0, 0.5, 0.8, 1.0, 1.7),
    "top_k": (0, 1, 5, 50, 4000),
    "top_p": (1.0, 0.95, 0.6, 0.0),
    "min_p": (0.0, 0.02, 0.5),
    "repetition_penalty": (1.0, 1.3, 0.8),
    "presence_penalty": (0.0, 0.5, -0.3),
    "frequency_penalty": (0.0, 0.2, -0.1),
}


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of a case's size: V, B, and B (K+1) V."""

    vocabulary: int = 200_000
    batch: int = 1024
    logits: int = 1 << 22


@dataclasses.dataclass(frozen=True)
class Structure:
    """What is compiled for: Triton compiles every structure anew."""

    rule: str
    form: str  # of q
    dtype: torch.dtype
    draft_dtype: torch.dtype
    filters: bool
    table: str  # "none", "bias" or "penalties"
    log_probs: bool
    ragged: bool

    @classmethod
    def of(cls, number: int) -> Structure:
        rng = random.Random(f"structure {number}")
        rule, form = rng.choice(RULES_AND_FORMS)
        table = rng.choice(("none", "none", "bias", "penalties"))
        dtypes = (rng.choice(DTYPES), rng.choice(DTYPES))
        return cls(rule, form, *dtypes, rng.random() < 0.5, table, rng.random() < 0.3, rng.random() < 0.3)

    def counted_by(self) -> dict[str, str]:
        """What counts of cases are kept by."""
        distribution = "+".join(["filters"] * self.filters + [self.table] * (self.table != "none")) or "plain"
        dtypes = (str(d).removeprefix("torch.") for d in (self.dtype, self.draft_dtype))
        named = dict(zip(("dtype", "draft_dtype"), dtypes, strict=True))
        return {"rule": self.rule, "form_of_q": self.form, "distribution": distribution, **named}


class Drawing(NamedTuple):
    """A ``draft_step`` of the case and what the reference makes of it."""

    inputs: StepInputs  # whose draft_tokens are those before, and which has next to nothing of the target's logits
    logits: torch.Tensor
    offset: int
    expected: DraftStep
    margin: torch.Tensor


@dataclasses.dataclass
class Case:
    structure: Structure
    traits: dict[str, str]
    inputs: StepInputs
    drawings: list[Drawing]


def random_case(number: int, device: torch.device, limits: Limits, variants: int = 0) -> Case:
    """Case ``number``. ``variants``: how many structures there are; 0: any."""
    structure = Structure.of(number % variants if variants else number)
    rng = random.Random(f"case {number}")
    generator = torch.Generator(device).manual_seed(rng.getrandbits(60))
    on_cpu = torch.Generator().manual_seed(rng.getrandbits(60))
    batch, num_drafts, vocabulary = random_sizes(rng, limits)
    layout, corner = rng.choice(tuple(LAYOUTS)), rng.choice(CORNERS)
    traits = {**structure.counted_by(), "layout": layout, "corner": corner}

    target, draft = random_logits(rng, generator, batch, num_drafts, vocabulary)
    d2t = None
    if structure.form == "reduced":
        size = max(1, 2 * vocabulary // 3)
        d2t = torch.randperm(vocabulary, generator=on_cpu)[:size].sort().values.to(device)
        draft = draft[..., d2t]
    for rows in (target, draft):
        plant(rows, corner, rng)
    target, draft = (
        LAYOUTS[layout](rows.to(dtype)) for rows, dtype in ((target, structure.dtype), (draft, structure.draft_dtype))
    )
    seed = torch.randint(-(2**63), 2**63 - 1, (batch,), generator=on_cpu)
    position = torch.randint(0, rng.choice((100, 2**31 + 2**20, 2**62)), (batch,), generator=on_cpu)
    table = None
    if structure.table != "none":
        table = random_table(batch, rng.randint(0, 12), vocabulary, position, on_cpu, num_drafts)
    inputs = StepInputs(
        target, torch.zeros((batch, 0), dtype=torch.int64), None, SamplingParams(), seed, position,
        table=table, rule=structure.rule, log_probs=structure.log_probs,
    )  # fmt: skip
    inputs = inputs.replace(params=random_params(rng, structure, batch), d2t=d2t).to(device)
    inputs, drawings = drawn(inputs, draft, structure, generator)
    if structure.ragged:
        ragged = torch.randint(0, num_drafts + 1, (batch,), generator=on_cpu).to(device)
        inputs = inputs.replace(num_drafts=ragged.int() if rng.random() < 0.5 else ragged)
    if rng.random() < 0.2:
        inputs = inputs.replace(draft_tokens=strange(inputs.draft_tokens, vocabulary, on_cpu))
    if rng.random() < 0.2:  # all small tensors strided
        inputs = inputs.map(lambda t: t if t.dim() == 3 else torch.stack([t, torch.zeros_like(t)], -1)[..., 0])
    return Case(structure, traits, inputs, drawings)


def random_sizes(rng: random.Random, limits: Limits) -> tuple[int, int, int]:
    """(B, K, V); B and V are small as often as large."""
    vocabulary = rng.choice((rng.choice(EDGES), int(math.exp(rng.uniform(0, math.log(limits.vocabulary))))))
    vocabulary = min(vocabulary, limits.vocabulary)
    num_drafts = rng.randint(0, MOST_DRAFTS)
    most = max(1, min(limits.batch, limits.logits // ((num_drafts + 1) * vocabulary)))
    return int(math.exp(rng.uniform(0, math.log(most + 0.99)))), num_drafts, vocabulary


def random_logits(
    rng: random.Random, generator: torch.Generator, batch: int, num_drafts: int, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Target [B, K+1, V] and draft [B, K, V], float32; at |logits| a float32 kernel can still resolve, or so large that
    it can tell the largest alone from the others."""
    shape, like = (batch, num_drafts + 1, vocabulary), {"generator": generator, "device": generator.device}
    target = rng.choice((0.1, 1.0, 2.0, 4.0)) * torch.randn(shape, **like)
    kind = rng.choice(("plain", "plain", "peaked", "tied"))
    if kind == "peaked":
        target.scatter_add_(
            2, torch.randint(0, vocabulary, (*shape[:2], 1), **like), target.new_full((*shape[:2], 1), 12)
        )
    elif kind == "tied":
        target.round_()
    sign, noise = rng.choice(((1, 1.0), (1, 0.1), (1, 0.0), (-1, 0.5)))
    draft = sign * target[:, :-1] + noise * torch.randn((batch, num_drafts, vocabulary), **like)
    size = 10 ** rng.uniform(9, 39) if rng.random() < 0.08 else 1.0
    return target * size, draft * size


CORNERS = ("none", "none", "none", "masks", "same_masks", "faults")


def plant(rows: torch.Tensor, corner: str, rng: random.Random) -> None:
    """Writes the corner into rows [B, rows, V]: masked tokens, or some rows without a distribution."""
    if corner in ("masks", "same_masks") and rows.numel():
        share = rng.choice((0.05, 0.5, 0.99)) if corner == "masks" else 0.5
        state = rng.getrandbits(60) if corner == "masks" else 0  # a row masks the same tokens for p and q
        generator = torch.Generator(rows.device).manual_seed(state)
        rows[:, :, torch.rand(rows.shape[2], generator=generator, device=rows.device) < share] = -INF
    elif corner == "faults":
        for b in range(min(len(rows), 64)):
            if rng.random() < 0.4 and rows.shape[1]:
                row, at = rng.randrange(rows.shape[1]), rng.randrange(rows.shape[2])
                what = rng.choice((NAN, INF, None))
                rows[b, row, slice(None) if what is None else at] = -INF if what is None else what


def strange(tokens: torch.Tensor, vocabulary: int, on_cpu: torch.Generator) -> torch.Tensor:
    """Some of them are no ids."""
    values = torch.tensor([-1, -2, vocabulary, 2**40])[torch.randint(0, 4, tokens.shape, generator=on_cpu)]
    where = torch.rand(tokens.shape, generator=on_cpu) < 0.2
    return torch.where(where.to(tokens.device), values.to(tokens.device), tokens)


def random_params(rng: random.Random, structure: Structure, batch: int) -> SamplingParams:
    """Numbers for all, or for each sequence; greedy ones in between."""
    names = ["temperature"]
    names += ["top_k", "top_p", "min_p"] * structure.filters
    names += ["repetition_penalty", "presence_penalty", "frequency_penalty"] * (structure.table == "penalties")
    values: dict[str, float | torch.Tensor] = {}
    for name in names:
        each = torch.tensor([rng.choice(SAMPLING[name]) for _ in range(batch)])
        values[name] = each if name == "temperature" or rng.random() < 0.7 else rng.choice(SAMPLING[name])
    return SamplingParams(**values)


def drawn(
    inputs: StepInputs, draft: torch.Tensor, structure: Structure, generator: torch.Generator
) -> tuple[StepInputs, list[Drawing]]:
    """The step with K drafts and q in its form, and how each was drawn."""
    target, (batch, num_drafts) = inputs.target_logits, draft.shape[:2]
    if structure.form == "one_hot":
        like = {"generator": generator, "device": generator.device}
        tokens = torch.randint(0, target.shape[2], (batch, num_drafts), **like)
        favourite = torch.rand((batch, num_drafts), **like) < 0.5
        one = Drawing(without_target(inputs), target[:, 0], 0, *reference_draft(inputs, target[:, 0], 0))
        return inputs.replace(draft_tokens=torch.where(favourite, target[:, :-1].argmax(-1), tokens)), [one]
    drawings: list[Drawing] = []
    for i in range(num_drafts):
        expected = reference_draft(inputs, draft[:, i], i)
        drawings.append(Drawing(without_target(inputs), draft[:, i], i, *expected))
        inputs = inputs.replace(draft_tokens=torch.cat([inputs.draft_tokens, expected[0].tokens[:, None]], 1))
    if structure.rule == "coupled":
        return inputs.replace(d2t=None), drawings
    if structure.form == "stats" and drawings:
        stats = (torch.stack([getattr(d.expected, name) for d in drawings], 1) for name in ("cutoff", "lse"))
        inputs = inputs.replace(draft_stats=tuple(stats))
    return inputs.replace(draft_logits=draft), drawings


def without_target(inputs: StepInputs) -> StepInputs:
    """A drawing needs none of the target's logits, which may have to be copied to another device."""
    return inputs.replace(target_logits=inputs.target_logits[:, :1, :1])


# ---- Memory layouts of logits; gaps between rows hold NaN ----------------------------------------------------------


def unaligned(t: torch.Tensor) -> torch.Tensor:
    """Rows that begin one element after an aligned address, with an odd distance."""
    wide = torch.full((*t.shape[:2], t.shape[2] + 3 + t.shape[2] % 2), NAN, dtype=t.dtype, device=t.device)
    view = wide[..., 1 : 1 + t.shape[2]]
    return view.copy_(t)


def sliced(t: torch.Tensor) -> torch.Tensor:
    """Out of a larger batch with more rows."""
    wide = torch.full((len(t) + 1, t.shape[1] + 2, t.shape[2] + 8), NAN, dtype=t.dtype, device=t.device)
    view = wide[1:, 1 : 1 + t.shape[1], 8:]
    return view.copy_(t)


LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "unaligned": unaligned,
    "sliced": sliced,
    "expanded": lambda t: t[:1].expand(t.shape),  # one sequence's logits for all
    "rows_first": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "last_not_dense": lambda t: t.transpose(0, 2).contiguous().transpose(0, 2),
}
