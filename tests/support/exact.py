"""The exact distribution of a step of the reference, by enumerating its random choices.

The reference uses random numbers only through ``race``, ``flat_race`` and ``uniform(philox(...))``. A ``Probe``
replaces these by scripts: a race records its weights and returns a scripted winner, and a uniform number is a scripted
one. Every combination of choices is one row of a batch, so the distribution is a finite sum over rows. This file does
not know how a rule decides: it finds thresholds of uniform numbers by bisection, and reads the emitted tokens from the
step's result.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map

from specdec_kernels import SamplingParams, draft_step, speculative_step
from specdec_kernels.backends import reference
from specdec_kernels.testing import Distribution, Model, bits_of, penalised, probabilities, shared_race
from specdec_kernels.types import DraftStep, SpeculativeStep, TokenTable

INF = float("inf")
EXACT = 1e-9  # what tests of exactness allow as total variation
TEMPERATURES = (0.0, 0.5, 1.0, 2.0)
FILTERS = (
    {},
    {"top_k": 2},
    {"top_p": 0.7},
    {"min_p": 0.25},
    {"top_k": 3, "top_p": 0.85, "min_p": 0.1},
)
ALL = {
    **FILTERS[-1],
    "bias": ((0, 0.5), (1, -0.3)),
    "repetition_penalty": 1.5,
    "presence_penalty": -0.4,
    "frequency_penalty": 0.3,
    "prompt": (2, 0),
    "ends": (1,),
    "min_new_tokens": 2,
}
BISECTIONS = 33  # thresholds to 2^-33 = 1.2e-10
CERTAIN, IMPOSSIBLE = 1e-300, 1.0  # u that passes every test u < h with h > 0, and u that passes none


class Race(NamedTuple):
    weights: torch.Tensor  # [B, N], normalised; all 0 if a row has no mass
    index: torch.Tensor | None  # [B, N], which determines the noise; None: a race in two levels
    seed: torch.Tensor  # [B]; with the following, the rest of the noise's key and counter
    position: torch.Tensor
    offset: int
    stream: int | tuple[int, int]


class Probe:
    """Scripts the reference's random numbers: ``u`` [B, K + 1] and the winners of races, [B] or [B, races]."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(reference, "race", lambda weights, *key: self.race(weights, None, *key))
        monkeypatch.setattr(reference, "flat_race", self.race)
        monkeypatch.setattr(reference, "uniform", lambda offset: self.u[:, offset : offset + 1])
        monkeypatch.setattr(reference, "philox", self.philox)

    def script(self, winner: torch.Tensor | int, u: torch.Tensor | None = None) -> None:
        self.winner, self.u, self.races = torch.as_tensor(winner), u, []

    def philox(self, seed, index, position, offset, stream):
        assert stream == reference.ACCEPT, "the other streams are for races"
        return offset

    def race(self, weights, index, *key):
        mass = weights.sum(-1)
        winner = self.winner[:, len(self.races)] if self.winner.dim() == 2 else self.winner.expand(mass.shape)
        self.races.append(Race(torch.where(mass[:, None] > 0, weights / mass[:, None], 0.0), index, *key))
        return torch.where(mass > 0, winner, -1), torch.ones_like(mass)


class Rows:
    """Raw logits after every text. Texts are numbered: the empty one is 0, and text c followed by token t is
    c * ``base`` + t + 1."""

    def __init__(self, table: torch.Tensor, base: int):
        self.table, self.base = table.double(), base

    @staticmethod
    def random(base: int, length: int, random_state: int, vocabulary: int | None = None) -> Rows:
        """Independent random rows after every text of up to ``length`` tokens of ``base``."""
        generator = torch.Generator().manual_seed(random_state)
        shape = (sum(base**n for n in range(length + 1)), vocabulary or base)
        return Rows(1.5 * torch.randn(shape, dtype=torch.float64, generator=generator), base)

    def masked(self, allowed: torch.Tensor) -> Rows:
        """With -inf where ``allowed`` is False: bool [texts, V], maybe of fewer texts, the shortest ones."""
        table = self.table.clone()
        table[: len(allowed)].masked_fill_(~allowed, -torch.inf)
        return Rows(table, self.base)

    def number(self, text: Sequence[int]) -> int:
        return functools.reduce(lambda c, t: c * self.base + t + 1, text, 0)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One sequence's SamplingParams and TokenTable, in plain numbers."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    prompt: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    min_new_tokens: int = 0

    def probabilities(self, logits: Sequence[float], text: tuple[int, ...]) -> np.ndarray:
        """The distribution by the plain definitions of ``specdec_kernels.testing``."""
        penalties = {name: getattr(self, name) for name in SamplingParams.PENALTIES}
        more = {"bias": dict(self.bias), "ends": self.ends, "min_new_tokens": self.min_new_tokens}
        x = penalised(logits, text, self.prompt, **penalties, **more)
        return probabilities(x, self.temperature, self.top_k, self.top_p, self.min_p)

    def model(self, rows: Rows) -> Model:
        return functools.cache(lambda text: self.probabilities(rows.table[rows.number(text)].tolist(), text))

    def needs_table(self) -> bool:
        return bool(self.bias or self.ends) or any(
            getattr(self, name) != SamplingParams.neutral(name) for name in SamplingParams.PENALTIES
        )


class Context(NamedTuple):
    """The state in which a step begins: the text so far, without the prompt."""

    setting: Setting
    text: tuple[int, ...] = ()

    def position(self) -> int:
        return len(self.setting.prompt) + len(self.text)


def params_of(settings: Sequence[Setting], owner: torch.Tensor | slice = slice(None)) -> SamplingParams:
    """SamplingParams of numbers if all contexts agree, else of tensors with a row for each of ``owner``."""
    columns = {f.name: [getattr(s, f.name) for s in settings] for f in dataclasses.fields(SamplingParams)}
    return SamplingParams(**{k: c[0] if len(set(c)) == 1 else torch.tensor(c)[owner] for k, c in columns.items()})


def table_of(contexts: Sequence[Context]) -> TokenTable | None:
    if not any(setting.needs_table() for setting, _ in contexts):
        return None
    rows = []
    for setting, text in contexts:
        bias, prompt = dict(setting.bias), setting.prompt
        rows.append([(v, bias.get(v, 0.0), v in prompt, text.count(v)) for v in sorted({*bias, *prompt, *text})])
    width = max(map(len, rows)) + 1
    rows = [row + [(SamplingParams.TABLE_PADDING, 0.0, False, 0)] * (width - len(row)) for row in rows]
    dtypes = (torch.int64, torch.float32, torch.bool, torch.int32)
    columns = [torch.tensor([[entry[i] for entry in row] for row in rows], dtype=d) for i, d in enumerate(dtypes)]
    most = max(len(setting.ends) for setting, _ in contexts)
    ends = [[*setting.ends, *[-1] * (most - len(setting.ends))] for setting, _ in contexts]
    first_end = [len(s.prompt) + s.min_new_tokens if s.ends else 0 for s, _ in contexts]
    return TokenTable(*columns, torch.tensor(ends, dtype=torch.int64), torch.tensor(first_end))


class Drafts(NamedTuple):
    """Every path of drafts with a positive probability in every context: R rows. K is that of the batch."""

    owner: torch.Tensor  # [R] the index of the context
    tokens: torch.Tensor  # [R, K]
    mass: torch.Tensor  # [R] probability of the path
    logits: list[torch.Tensor]  # K times [R, draft vocabulary]
    steps: list[DraftStep]
    races: list[Race]

    def take(self, rows: torch.Tensor) -> Drafts:
        return tree_map(lambda t: t[rows] if isinstance(t, torch.Tensor) else t, self)

    def stack(self, name: str) -> torch.Tensor:
        return torch.stack([getattr(step, name) for step in self.steps], 1)


@dataclasses.dataclass
class Step:
    """A step to test: a rule, a pair of models and a form of q. Forms: ``one_hot`` (greedy drafts), ``full``, or
    ``stats`` (with the cutoff and lse that draft_step returned)."""

    rule: str
    target: Rows
    draft: Rows
    num_drafts: int
    q: str = "full"
    d2t: list[int] | None = None
    padding: int = 0  # number of the batch's drafts beyond num_drafts
    stops: frozenset[int] = frozenset()  # drafting ends after one of these tokens, which is still verified
    allowed: torch.Tensor | None = None  # bool [texts, V], numbered as in Rows: the tokens that may follow each text
    masked_drafts: int = 0

    def drafting(self, setting: Setting) -> Setting:
        return dataclasses.replace(setting, temperature=0.0) if self.q == "one_hot" else setting

    def target_model(self, setting: Setting) -> Model:
        """The target's distribution by the plain definitions."""
        return setting.model(self.target if self.allowed is None else self.target.masked(self.allowed))

    def masks(self, number: torch.Tensor) -> torch.Tensor | None:
        """The bits of the tokens that may follow the texts of these numbers."""
        return None if self.allowed is None else bits_of(self.allowed[number])

    def draft_model(self, setting: Setting) -> Model:
        """The distribution of drafts by the plain definitions, in the step that begins the text."""
        rows = self.draft
        if self.d2t is not None:
            rows = Rows(torch.full((len(rows.table), rows.base), -torch.inf), rows.base)
            rows.table[:, self.d2t] = self.draft.table
        if self.allowed is not None:
            rows = rows.masked(self.allowed[: sum(rows.base**n for n in range(self.masked_drafts))])
        return self.drafting(setting).model(rows)

    def drafts(self, probe: Probe, contexts: Sequence[Context]) -> Drafts:
        vocabulary = self.target.base
        tokens = torch.tensor(list(itertools.product(range(vocabulary), repeat=self.num_drafts)), dtype=torch.int64)
        # A ragged batch is padded with drafts of token 0, which must have no effect.
        tokens = torch.nn.functional.pad(tokens, (0, self.padding)).repeat(len(contexts), 1)
        owner = torch.arange(len(contexts)).repeat_interleave(len(tokens) // len(contexts))
        number = torch.tensor([self.draft.number(text) for _, text in contexts])[owner]
        arguments = arguments_of([c._replace(setting=self.drafting(c.setting)) for c in contexts], owner)
        d2t = None if self.d2t is None else torch.tensor(self.d2t)
        drafts = Drafts(owner, tokens, torch.ones(len(owner), dtype=torch.float64), [], [], [])
        for i in range(tokens.shape[1]):
            logits, q = self.draft.table[number], torch.zeros(len(owner), vocabulary, dtype=torch.float64)
            for winner in range(logits.shape[1]):
                probe.script(winner)
                mask = self.masks(number) if i < self.masked_drafts else None
                more = {"rule": self.rule, "drafts": tokens[:, :i], "d2t": d2t, "allowed": mask}
                out = draft_step(logits, offset=i, **more, **arguments)
                weight = probe.races[0].weights[:, winner]
                torch.testing.assert_close(out.log_q.exp()[weight > 0], weight[weight > 0], rtol=1e-12, atol=0)
                q.scatter_add_(1, out.tokens[:, None], weight[:, None])
            if i < self.num_drafts:
                made = ~self.stopped(tokens)[:, i]
                nothing = (tokens[:, i] == 0).double()  # keeps one of the paths that differ only after a stop
                drafts.mass.mul_(torch.where(made, q.gather(1, tokens[:, i : i + 1])[:, 0], nothing))
            for column, value in ((drafts.logits, logits), (drafts.steps, out), (drafts.races, probe.races[0])):
                column.append(value)
            number = number * vocabulary + tokens[:, i] + 1
        drafts = drafts._replace(tokens=tokens.masked_fill(self.stopped(tokens), -1))
        return drafts.take((drafts.mass > 0).nonzero()[:, 0])

    def stopped(self, tokens: torch.Tensor) -> torch.Tensor:
        """[R, K]: whether an earlier draft ended the drafting before this one."""
        stops = torch.isin(tokens, torch.tensor(sorted(self.stops), dtype=torch.int64)).cumsum(1) > 0
        return torch.nn.functional.pad(stops, (1, 0))[:, : tokens.shape[1]]

    def verify(self, probe: Probe, contexts: Sequence[Context], drafts: Drafts, winner, u=None) -> SpeculativeStep:
        return self.verifier(probe, contexts, drafts)(winner, u)

    def verifier(self, probe: Probe, contexts: Sequence[Context], drafts: Drafts) -> Callable[..., SpeculativeStep]:
        """The step as a function of its random choices, (winner, u)."""
        number = torch.tensor([self.target.number(text) for _, text in contexts])[drafts.owner]
        numbers = [number]
        for token in drafts.tokens.unbind(1):
            numbers.append(numbers[-1] * self.target.base + token + 1)
        number = torch.stack(numbers, 1)
        q: dict = {}
        if drafts.steps and self.rule != "coupled" and self.q != "one_hot":
            stats = (drafts.stack("cutoff"), drafts.stack("lse")) if "stats" in self.q else None
            q = {"draft_stats": stats, "d2t": None if self.d2t is None else torch.tensor(self.d2t)}
        full = torch.stack(drafts.logits, 1) if "draft_stats" in q else None
        num_drafts = torch.full_like(drafts.owner, self.num_drafts) if self.padding else None
        more = {"rule": self.rule, "num_drafts": num_drafts, **q, **arguments_of(contexts, drafts.owner)}
        more |= {"allowed": self.masks(number), "masked_drafts": 0 if full is None else self.masked_drafts}
        target = self.target.table[number]

        def run(winner, u=None) -> SpeculativeStep:
            probe.script(winner, u)
            return speculative_step(target, drafts.tokens, full, **more)

        return run

    def distributions(self, probe: Probe, contexts: Sequence[Context]) -> list[Distribution]:
        """For every context, the distribution of what one step emits."""
        drafts = self.drafts(probe, contexts)
        outcomes = self.races if self.rule == "coupled" else self.tests
        rows, probability, winner, u = outcomes(probe, contexts, drafts)
        likely = (probability > 0).nonzero()[:, 0]
        drafts, winner, u = drafts.take(rows[likely]), winner[likely], None if u is None else u[likely]
        out = self.verify(probe, contexts, drafts, winner, u)
        probability = probability[likely]
        if self.rule != "coupled":  # only the race at which the step ended counts
            weights = torch.stack([race.weights for race in probe.races])
            probability = probability * weights[out.num_accepted.long(), torch.arange(len(winner)), winner]
        assert (out.status == 0).all() and (out.num_emitted == out.num_accepted + 1).all()
        distributions: list[Distribution] = [defaultdict(float) for _ in contexts]
        columns = (drafts.owner, out.tokens, out.num_emitted, probability)
        for owner, tokens, emitted, p in zip(*(c.tolist() for c in columns), strict=True):
            assert min(tokens[:emitted]) >= 0 and set(tokens[emitted:]) <= {-1}
            if p > 0:
                distributions[owner][tuple(tokens[:emitted])] += p
        return distributions

    def thresholds(self, probe: Probe, contexts: Sequence[Context], drafts: Drafts) -> torch.Tensor:
        """[R, num_drafts]: draft j passes its test for u below this, if earlier drafts pass and later ones fail."""
        count = len(drafts.mass)
        rows, j = torch.arange(count).repeat_interleave(self.num_drafts), torch.arange(self.num_drafts).repeat(count)
        low, high = torch.zeros(len(rows), dtype=torch.float64), torch.ones(len(rows), dtype=torch.float64)
        column, run = torch.arange(drafts.tokens.shape[1] + 1), self.verifier(probe, contexts, drafts.take(rows))
        for _ in range(BISECTIONS if len(rows) else 0):
            middle = (low + high) / 2
            u = torch.where(column < j[:, None], CERTAIN, IMPOSSIBLE)
            u = torch.where(column == j[:, None], middle[:, None], u)
            passed = run(0, u).num_accepted > j
            low, high = torch.where(passed, middle, low), torch.where(passed, high, middle)
        return torch.where(high == 1, 1.0, low).view(count, self.num_drafts)

    def tests(self, probe: Probe, contexts: Sequence[Context], drafts: Drafts):
        """(rows of ``drafts``, probability, winner of the last race, u), for all choices of which drafts pass and which
        token follows."""
        threshold = self.thresholds(probe, contexts, drafts)
        passing = torch.tensor(list(itertools.product((True, False), repeat=self.num_drafts)), dtype=torch.bool)
        choices = (len(threshold), len(passing), self.target.base)
        rows, pattern, winner = (c.flatten() for c in torch.meshgrid(*map(torch.arange, choices), indexing="ij"))
        passes = passing[pattern]
        probability = drafts.mass[rows] * torch.where(passes, threshold[rows], 1 - threshold[rows]).prod(1)
        u = torch.where(passes, CERTAIN, IMPOSSIBLE).double()
        return rows, probability, winner, torch.nn.functional.pad(u, (0, self.padding + 1), value=IMPOSSIBLE)

    def races(self, probe: Probe, contexts: Sequence[Context], drafts: Drafts):
        """The same for rule ``coupled``, whose only choices are shared races; winners are [rows, K + 1]."""
        vocabulary, count = self.target.base, len(drafts.mass)
        self.verify(probe, contexts, drafts, 0)
        target = probe.races
        winners = torch.tensor(list(itertools.product(range(vocabulary), repeat=self.num_drafts + 1)))
        choices = (count, len(winners))
        rows, winner = (c.flatten() for c in torch.meshgrid(*map(torch.arange, choices), indexing="ij"))
        winner, probability = winners[winner], torch.ones(len(rows), dtype=torch.float64)
        for j in range(self.num_drafts):
            p, q = target[j], drafts.races[j]
            # The races of draft and target share their noise: that of token v is keyed by (v, position + j).
            assert (p.index == torch.arange(vocabulary)).all() and (p.offset, p.stream) == (0, reference.RACE)
            assert torch.equal(p.seed, q.seed) and torch.equal(p.position, q.position)
            assert (q.offset, q.stream) == (p.offset, p.stream)
            by_noise = torch.zeros_like(p.weights).scatter(1, q.index, q.weights)
            joint = [joint_of(*map(tuple, pair)) for pair in zip(p.weights.tolist(), by_noise.tolist(), strict=True)]
            draft, drawn = drafts.tokens[rows, j], winner[:, j]
            alone = p.weights[rows, drawn]  # without a draft there is only the target's race
            together = torch.tensor(np.array(joint))[rows, drawn, draft.clamp(min=0)]
            probability *= torch.where(draft < 0, alone, together)
        last = target[self.num_drafts]
        probability *= last.weights[rows].gather(1, winner[:, -1:])[:, 0]
        return rows, probability, torch.nn.functional.pad(winner, (0, self.padding)), None


def arguments_of(contexts: Sequence[Context], owner: torch.Tensor) -> dict:
    """Arguments that ``draft_step`` and ``speculative_step`` share. Every context has its own seed."""
    table = table_of(contexts)
    if table is not None:
        table = TokenTable(*(column[owner] for column in table))
    params = params_of([context.setting for context in contexts], owner)
    position = torch.tensor([c.position() for c in contexts])[owner]
    return {"params": params, "table": table, "seed": owner, "position": position, "backend": "reference"}


@functools.cache
def joint_of(p: tuple[float, ...], q: tuple[float, ...]) -> np.ndarray:
    return shared_race(np.array(p), np.array(q))
