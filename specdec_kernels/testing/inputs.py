"""Inputs of whole steps, and a comparison of backends that allows for near-ties."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch

from .. import DraftStep, Rule, SamplingParams, SpeculativeStep, TokenTable, draft_step, speculative_step, validation
from ..ops import RULES, WORD_BITS, SamplingTensors

# A backend may decide otherwise than the reference only if the reference's margin is below this.
NEAR_TIE = 1e-4

# |difference of statistics| <= this * (1 + |lse| + |log q|), by their dtype: a few roundings of l / T - lse.
TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-12}

# A bound of |l / T| in the steps whose log-probabilities are compared.
_LOGITS = 50.0

KINDS = ("opposite", "near_equal", "one_hot")


def device_of(backend: str) -> torch.device:
    """Where tests put tensors for ``backend``: on the GPU for a GPU backend if there is a GPU, else on the CPU."""
    return torch.device("cuda" if backend in ("triton", "cuda") and torch.cuda.is_available() else "cpu")


def pair_of_rows(kind: str, num_drafts: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Fixed float32 logits of one of the KINDS: (target [K+1, V], draft [K, V] or None for one-hot drafts)."""
    generator = torch.Generator().manual_seed(num_drafts * 1000 + vocabulary)
    ramp = torch.linspace(0, 2.5, vocabulary)
    target = ramp + 0.3 * torch.randn(num_drafts + 1, vocabulary, generator=generator)
    if kind == "one_hot":
        return target, None
    if kind == "opposite":  # the draft's most likely tokens are the target's least likely ones
        return target, ramp.flip(0) + 0.3 * torch.randn(num_drafts, vocabulary, generator=generator)
    return target, target[:-1] + 0.1 * torch.randn(num_drafts, vocabulary, generator=generator)


def mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns an argument of an operation with ``function`` applied to every tensor in it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, TokenTable):
        return TokenTable(*(mapped(part, function) for part in value))
    if isinstance(value, tuple):
        return tuple(mapped(part, function) for part in value)
    if isinstance(value, SamplingParams):
        fields = (f.name for f in dataclasses.fields(value))
        return SamplingParams(**{name: mapped(getattr(value, name), function) for name in fields})
    return value


class BatchInputs:
    """Arguments of one call: a dataclass whose tensors have the batch as their dimension 0, but for ``d2t``."""

    params: SamplingParams
    seed: torch.Tensor
    d2t: torch.Tensor | None
    table: TokenTable | None

    def replace(self, **changes) -> Self:
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """A copy with ``function`` applied to every tensor whose dimension 0 is the batch."""
        return type(self)(**{k: v if k == "d2t" else mapped(v, function) for k, v in self.arguments().items()})

    def to(self, device: torch.device) -> Self:
        inputs = self.map(lambda t: t.to(device))
        if self.d2t is not None:
            inputs = inputs.replace(d2t=self.d2t.to(device))
        return inputs

    def arguments(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]

    def tensors(self) -> list[torch.Tensor]:
        """All tensors whose dimension 0 is the batch."""
        found: list[torch.Tensor] = []

        def remember(tensor: torch.Tensor) -> torch.Tensor:
            found.append(tensor)
            return tensor

        self.map(remember)
        return found

    def sampling(self) -> SamplingTensors:
        """Parameters and table as the operations take them."""
        return validation.sampling_of(self.params, self.table, len(self.seed), self.seed.device)


@dataclasses.dataclass
class StepInputs(BatchInputs):
    """All arguments of one ``speculative_step``."""

    target_logits: torch.Tensor
    draft_tokens: torch.Tensor
    draft_logits: torch.Tensor | None
    params: SamplingParams
    seed: torch.Tensor
    position: torch.Tensor
    num_drafts: torch.Tensor | None = None
    draft_stats: tuple[torch.Tensor, torch.Tensor] | None = None
    d2t: torch.Tensor | None = None
    table: TokenTable | None = None
    allowed: torch.Tensor | None = None
    masked_drafts: int = 0
    rule: str = "token"
    log_probs: bool = False

    def run(self, backend: str) -> SpeculativeStep:
        """Runs the step on ``backend``; the results are moved to the CPU."""
        inputs = self.to(device_of(backend))
        result = speculative_step(**inputs.arguments(), backend=backend)
        return result._replace(**on_cpu(result._asdict()))

    def operands(self) -> tuple:
        """The arguments of the operation ``speculative_step``."""
        cutoff, lse = self.draft_stats or (None, None)
        return (
            self.target_logits, self.draft_tokens, self.draft_logits, cutoff, lse, self.d2t, self.num_drafts,
            self.sampling(), self.allowed, self.masked_drafts, self.seed, self.position, RULES.index(self.rule),
            self.log_probs,
        )  # fmt: skip

    def reference(self) -> tuple[SpeculativeStep, torch.Tensor]:
        """(the reference's result, [B] its margins)."""
        from ..backends import reference

        (*step, drawn, raw), margin = reference.speculative_step_with_margin(*self.operands())
        return SpeculativeStep(*step, *((drawn, raw) if self.log_probs else (None, None))), margin

    def reference_margin(self) -> torch.Tensor:
        return self.reference()[1]

    def draft(self, draft_logits: torch.Tensor, offset: int, backend: str) -> DraftStep:
        """Runs ``draft_step`` on ``backend`` for draft number ``offset``; the results are moved to the CPU."""
        inputs, device = self.to(device_of(backend)), device_of(backend)
        drawn = draft_step(
            draft_logits.to(device), inputs.params, seed=inputs.seed, position=inputs.position, offset=offset,
            rule=self.rule, table=inputs.table, drafts=inputs.draft_tokens[:, :offset], d2t=inputs.d2t,
            allowed=inputs.allowed_to_draft(offset), backend=backend,
        )  # fmt: skip
        return drawn._replace(**on_cpu(drawn._asdict()))

    def allowed_to_draft(self, offset: int) -> torch.Tensor | None:
        """[B, W]: among which tokens this draft is drawn; None: among all."""
        return self.allowed[:, offset] if self.allowed is not None and offset < self.masked_drafts else None


def on_cpu(tensors: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items() if tensor is not None}


def random_table(
    batch: int, entries: int, vocabulary: int, position: torch.Tensor, generator: torch.Generator, num_drafts: int = 0
) -> TokenTable:
    """A random table of at most ``entries`` tokens per sequence, some beyond the vocabulary, a tenth of them banned.
    Each has two ``ends``, which are allowed from a random position within the step on."""
    shape, size = (batch, entries), vocabulary + 2
    ids = torch.full(shape, SamplingParams.TABLE_PADDING)
    for row in ids:
        length = min(int(torch.randint(entries // 2, entries + 1, (), generator=generator)), size)
        row[:length] = torch.randperm(size, generator=generator)[:length].sort().values
    banned, prompt, often = torch.rand((3, *shape), generator=generator)
    return TokenTable(
        ids,
        torch.randn(shape, generator=generator).masked_fill(banned < 0.1, float("-inf")),
        prompt < 0.5,
        (often * 3).to(torch.int32),
        torch.randint(0, vocabulary, (batch, 2), generator=generator),
        position + torch.randint(0, num_drafts + 2, (batch,), generator=generator),
    )


def bits_of(allowed: torch.Tensor) -> torch.Tensor:
    """Bool [..., V] as the operations take it: int32 [..., ceil(V / 32)]. Bits beyond V are set."""
    tail = -allowed.shape[-1] % WORD_BITS
    words = torch.nn.functional.pad(allowed, (0, tail), value=True).unflatten(-1, (-1, WORD_BITS))
    return (words << torch.arange(WORD_BITS, device=allowed.device)).sum(-1).to(torch.int32)


def random_step(
    batch: int,
    num_drafts: int,
    vocabulary: int,
    *,
    dtype: torch.dtype = torch.float32,
    draft_dtype: torch.dtype | None = None,
    kind: str = "similar",
    rule: str = "token",
    stats: bool = False,
    reduced: int = 0,
    table: int | None = None,
    allowed: float | None = None,
    masked_drafts: int = 0,
    log_probs: bool = False,
    random_state: int = 0,
    drafter: str = "reference",
    **sampling: float | Iterable[float],
) -> StepInputs:
    """A random step on the CPU.

    Args:
        kind: "similar" (target = draft + noise), "opposite" or "one_hot"; half of the one-hot drafts are the target's
            most likely token. Other drafts are drawn by ``draft_step``, as in decoding.
        drafter: the backend of that ``draft_step``.
        stats: hand q over with (cutoff, lse).
        reduced: the size of a reduced draft vocabulary; 0 is the whole vocabulary. Rule "coupled" has no q at all.
        table: the number of entries of a random table; None for no table.
        allowed: the share of tokens that may follow, at random in each row; None for no masks.
        masked_drafts: so many drafts, or all, are drawn among these tokens.
        sampling: arguments of SamplingParams: a number for all sequences, or numbers that repeat over the batch.

    Seeds cover all of int64.
    """
    generator = torch.Generator().manual_seed(random_state)
    target = 2 * torch.randn((batch, num_drafts + 1, vocabulary), generator=generator)
    noise = torch.randn((batch, num_drafts, vocabulary), generator=generator)
    draft = ((-target[:, :-1] if kind == "opposite" else target[:, :-1]) + noise).to(draft_dtype or dtype)
    target = target.to(dtype)
    seed = torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator)
    position = torch.randint(0, 2**31 + 2**20, (batch,), generator=generator)
    values: dict[str, Any] = {name: spread(value, name, batch) for name, value in sampling.items()}
    params = SamplingParams(**values)
    nothing = torch.zeros((batch, 0), dtype=torch.int64)
    inputs = StepInputs(target, nothing, None, params, seed, position, rule=rule, log_probs=log_probs)
    if table is not None:
        inputs.table = random_table(batch, table, vocabulary, position, generator, num_drafts)
    if allowed is not None:
        inputs.allowed = bits_of(torch.rand(target.shape, generator=generator) < allowed)
    if kind == "one_hot":
        tokens = torch.randint(0, vocabulary, (batch, num_drafts), generator=generator)
        favourite = torch.rand((batch, num_drafts), generator=generator) < 0.5
        return inputs.replace(draft_tokens=torch.where(favourite, target[:, :-1].argmax(-1), tokens))
    if reduced:
        inputs.d2t = torch.randperm(vocabulary, generator=generator)[:reduced].sort().values
        draft = draft[..., inputs.d2t]
    drawn = []
    inputs.masked_drafts = min(masked_drafts, num_drafts)
    for i in range(num_drafts):
        drawn.append(inputs.draft(draft[:, i], i, drafter))
        inputs.draft_tokens = torch.cat([inputs.draft_tokens, drawn[-1].tokens[:, None]], 1)
    if rule == Rule.COUPLED:
        return inputs.replace(d2t=None, masked_drafts=0)
    if stats:
        columns = ([getattr(d, name) for d in drawn] for name in ("cutoff", "lse"))
        cutoff, lse = (torch.stack(c, 1) if c else torch.zeros(batch, 0) for c in columns)
        inputs.draft_stats = cutoff, lse
    return inputs.replace(draft_logits=draft)


def spread(value: float | Iterable[float], name: str, batch: int) -> float | torch.Tensor:
    """A number as it is; several as a [batch] tensor in which they repeat."""
    if not isinstance(value, Iterable):
        return value
    dtype = torch.int64 if name == "top_k" else torch.float32
    return torch.tensor(list(itertools.islice(itertools.cycle(value), batch)), dtype=dtype)


def assert_same_step(actual, expected, margin: torch.Tensor, context: str = "") -> int:
    """Asserts that tokens, counts and status of each sequence are equal, except in near-ties, and log-probabilities
    equal up to rounding. Returns the number of sequences that differ by a near-tie."""
    differs = (actual.tokens != expected.tokens).any(-1)
    for name in ("num_accepted", "status", "num_emitted"):
        differs |= getattr(actual, name) != getattr(expected, name)
    wrong = (differs & (margin >= NEAR_TIE)).nonzero().flatten().tolist()
    if wrong:
        b = wrong[0]
        got, want = ([None if t is None else t[b].tolist() for t in step] for step in (actual, expected))
        raise AssertionError(
            f"{context}: {len(wrong)} of {len(margin)} sequences differ beyond near-ties; the first is {b} (margin "
            f"{margin[b]:.2e}):\n  got  {got}\n  want {want}"
        )
    if expected.log_probs is not None:
        for got, want in zip(actual[-2:], expected[-2:], strict=True):
            # A near-tie in a filter changes a row's sum even if it does not change the token.
            same = ~differs & (margin >= NEAR_TIE)
            assert_statistics_close(got[same], want[same], _LOGITS + want[same].abs())
    return int(differs.sum())


def assert_statistics_close(actual: torch.Tensor, expected: torch.Tensor, size: torch.Tensor) -> None:
    """Asserts that log_q or lse vectors are equal up to rounding at the magnitude ``size`` (|lse| + |log q|)."""
    assert actual.dtype == expected.dtype
    off = (actual - expected).abs() / (1 + size.abs())
    off = torch.where((actual == expected) | actual.isnan() & expected.isnan(), 0.0, off)
    assert (off <= TOLERANCES[expected.dtype]).all(), f"relative error {off.max()}"
