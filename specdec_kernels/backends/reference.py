"""The oracle: eager PyTorch on any device, in float64, written to be read. docs/numerics.md states the same rules.

Randomness, draws and the operations are here; the distribution of a row is in reference_distribution.py. Functions that
decide something also return a *margin*: how far, relatively, the closest decision was from going the other way. A
float32 kernel may decide otherwise only if the margin is within rounding. Tests tell near-ties from bugs by it.
"""

from __future__ import annotations

import torch

from ..ops import RULES, SamplingTensors, implement, statistics_dtype
from ..types import Status
from .reference_distribution import DRAFT_STATUS, TARGET_STATUS, adjusted, distribution, row_status

BLOCK = 1024  # consecutive vocabulary entries that race as one in the first level; the same in all backends

# Streams: the last word of Philox' counter. No two kinds of decision share noise.
DRAFT_BLOCK, DRAFT_TOKEN, ACCEPT, RECOVER_BLOCK, RECOVER_TOKEN, RACE = range(6)

_LOW32 = 0xFFFFFFFF


def _multiply_high_low(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(high, low) 32 bits of the product of two 32-bit words, computed without overflow of int64."""
    low = (a & 0xFFFF) * b
    return ((a >> 16) * b + (low >> 16)) >> 16, (a * b) & _LOW32


def philox(
    seed: torch.Tensor, index: torch.Tensor, position: torch.Tensor, offset: int | torch.Tensor, stream: int
) -> torch.Tensor:
    """32 random bits for every (sequence, index), as int64. Philox4x32-10, Salmon et al., SC 2011.

    seed, position: [B] int64; offset: the same, or a number; index: [B, N] int64. The key is the seed, the counter
    (index // 4, position, offset, stream); index % 4 picks one of the four words.
    """
    key = [(seed & _LOW32)[:, None], ((seed >> 32) & _LOW32)[:, None]]
    c = [index // 4, (position & _LOW32)[:, None], torch.as_tensor(offset).view(-1, 1), torch.tensor(stream)]
    c = list(torch.broadcast_tensors(*(w.to(index.device) for w in c)))
    for _ in range(10):
        high0, low0 = _multiply_high_low(0xD2511F53, c[0])
        high1, low1 = _multiply_high_low(0xCD9E8D57, c[2])
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) & _LOW32, (key[1] + 0xBB67AE85) & _LOW32]
    return torch.stack(c, -1).gather(-1, (index % 4)[..., None]).squeeze(-1)


def uniform(bits: torch.Tensor) -> torch.Tensor:
    """u in the open interval (0, 1): (bits + 1/2) / 2^32 rounded to float32, so that small u keep their resolution."""
    u = (bits.to(torch.float32) + 0.5) * 2.0**-32
    return u.clamp(max=1 - 2.0**-24).double()


def _argmax_with_margin(score: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """([B] argmax over the last dimension, the lowest index of a tie; [B] relative distance of the runner-up)."""
    best, index = score.max(-1)
    others = score.scatter(-1, index[:, None], 0.0).amax(-1)
    return index, torch.where(best > 0, 1 - others / best, 1.0)


def race(weights, seed, position, offset: int, streams: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one index from each row of ``weights`` [B, V] (unnormalised) by a race, argmin E / w, in two levels: first
    among blocks, then within the block that won.

    Returns ([B] index, -1 if all weights are 0; [B] margin).
    """
    batch, vocabulary = weights.shape
    blocks, width = -(-vocabulary // BLOCK), min(BLOCK, vocabulary)
    padded = torch.nn.functional.pad(weights, (0, blocks * width - vocabulary)).view(batch, blocks, width)
    mass = padded.sum(-1)

    def level(w, index, stream):
        u = uniform(philox(seed, index, position, offset, stream))
        return _argmax_with_margin(w / -torch.log1p(-u))

    block, margin = level(mass, torch.arange(blocks, device=mass.device).expand(batch, -1), streams[0])
    inside = padded[torch.arange(batch, device=mass.device), block]
    index = block[:, None] * BLOCK + torch.arange(width, device=mass.device)
    token, inner_margin = level(inside, index, streams[1])
    token = torch.where(mass.sum(-1) > 0, block * BLOCK + token, -1)
    return token, torch.minimum(margin, inner_margin)


def flat_race(weights, index, seed, position, offset: int, stream: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one column from each row of ``weights`` [B, N] in one level; column n races with the noise of
    ``index[:, n]``. Returns as ``race``."""
    u = uniform(philox(seed, index, position, offset, stream))
    column, margin = _argmax_with_margin(weights / -torch.log1p(-u))
    return torch.where(weights.sum(-1) > 0, column, -1), margin


def coupled_race(p: torch.Tensor, ids: torch.Tensor, seed, position) -> tuple[torch.Tensor, torch.Tensor]:
    """The race of rule ``coupled`` at an absolute position, in one level; ``ids`` [V] are the tokens' target ids."""
    return flat_race(p, ids.expand(p.shape), seed, position, 0, RACE)


def draft_step_with_margin(logits, sampling, drafts, d2t, allowed, seed, position, offset, rule):
    """(the outputs of ``draft_step``, [B] margins)."""
    sampling = SamplingTensors(*sampling)
    drafts = torch.empty((len(seed), 0), dtype=torch.int64, device=seed.device) if drafts is None else drafts
    greedy, ids = sampling.temperature == 0, torch.arange(logits.shape[1], device=logits.device) if d2t is None else d2t
    x = adjusted(logits, sampling, position, drafts, d2t, allowed)
    status = row_status(x, sampling.temperature, DRAFT_STATUS)
    bad = status != 0
    x = torch.where(bad[:, None], 0.0, x)
    q = distribution(x, sampling)
    if rule == RULES.index("coupled"):
        drawn, margin = coupled_race(q.probability, ids, seed, position + offset)
    else:
        drawn, margin = race(q.probability, seed, position, offset, (DRAFT_BLOCK, DRAFT_TOKEN))
    log_q = q.log_probability.gather(1, drawn[:, None]).squeeze(-1)
    margin = torch.where(greedy | bad, 1.0, torch.minimum(margin, q.margin))
    outputs = (
        torch.where(bad, -1, ids[drawn]),
        torch.where(bad, -torch.inf, log_q).to(q.lse.dtype),
        torch.where(bad, -torch.inf, q.cutoff),
        torch.where(bad, torch.nan, q.lse),
        status,
    )
    return outputs, margin


def draft_step(*arguments):
    return draft_step_with_margin(*arguments)[0]


class _Verification:
    """One call of ``speculative_step``. Rows of sequences that have ended are computed as well, and ignored."""

    def __init__(self, target_logits, draft_tokens, draft_logits, draft_cutoff, draft_lse, d2t, num_drafts, sampling,
                 allowed, masked_drafts, seed, position, rule, log_probs):  # fmt: skip
        self.seed, self.position, self.rule, self.wants_log_probs = seed, position, rule, log_probs
        self.sampling, self.target, self.drafts = SamplingTensors(*sampling), target_logits, draft_tokens
        self.draft, self.stats, self.d2t = draft_logits, (draft_cutoff, draft_lse), d2t
        self.allowed, self.masked_drafts = allowed, masked_drafts
        self.batch, self.rows, self.vocabulary = target_logits.shape
        self.greedy = self.sampling.temperature == 0
        full = torch.full_like(self.seed, self.rows - 1)
        self.num_drafts = full if num_drafts is None else num_drafts.clamp(max=self.rows - 1)
        self.tokens = torch.full((self.batch, self.rows), -1, dtype=torch.int64, device=target_logits.device)
        self.num_accepted = torch.zeros_like(self.seed, dtype=torch.int32)
        self.status = torch.zeros_like(self.num_accepted)
        self.margin = torch.ones_like(self.seed, dtype=torch.float64)

    def run(self):
        (self.walk, self.walk_jointly, self.walk_coupled)[self.rule]()
        num_emitted = (self.tokens >= 0).sum(1).to(torch.int32)
        columns, dtype = self.rows if self.wants_log_probs else 0, statistics_dtype(self.target)
        logs = torch.full((2, self.batch, columns), torch.nan, dtype=dtype, device=self.tokens.device)
        plain = self.sampling._replace(temperature=torch.ones_like(self.sampling.temperature), filters=None)
        for j in range(columns):
            _, p = self.target_row(j)
            raw = distribution(self.target[:, j].to(dtype), plain)
            for log, out in zip((p.log_probability, raw.log_probability), logs, strict=True):
                of_token = log.gather(1, self.tokens[:, j : j + 1].clamp(min=0)).squeeze(-1)
                out[:, j] = torch.where(self.tokens[:, j] >= 0, of_token, torch.nan)
        return (self.tokens, self.num_accepted, self.status, num_emitted, *(log.clone() for log in logs)), self.margin

    def target_row(self, j: int):
        """(status flags, p) of row j. A row that has no distribution gets a uniform p, which is not used."""
        allowed = None if self.allowed is None else self.allowed[:, j]
        x = adjusted(self.target[:, j], self.sampling, self.position, self.drafts[:, :j], allowed=allowed)
        fault = row_status(x, self.sampling.temperature, TARGET_STATUS)
        return fault, distribution(torch.where((fault != 0)[:, None], 0.0, x), self.sampling)

    def draft_row(self, j: int, wanted):
        """(whether there is a draft to test, status, the draft, q, log q, margin) of row j. ``wanted``: [B], the
        sequences that still need it."""
        wanted = wanted & (j < self.num_drafts)
        x = self.drafts[:, j] if j < self.rows - 1 else torch.full_like(self.seed, -1)
        in_range = (x >= 0) & (x < self.vocabulary)
        status = torch.where(wanted & ~in_range & (x != -1), int(Status.DRAFT_OUT_OF_RANGE), 0).to(torch.int32)
        wanted, x = wanted & in_range, x.clamp(0, self.vocabulary - 1)
        q = torch.nn.functional.one_hot(x, self.vocabulary).double()
        log_q, margin = q.log(), torch.full_like(self.margin, torch.inf)
        if j == self.rows - 1 or self.draft is None:
            return wanted, status, x, q, log_q, margin
        allowed = self.allowed[:, j] if self.allowed is not None and j < self.masked_drafts else None
        logits = adjusted(self.draft[:, j], self.sampling, self.position, self.drafts[:, :j], self.d2t, allowed)
        cutoff, lse = (None if s is None else s[:, j] for s in self.stats)
        fault = row_status(logits, self.sampling.temperature, DRAFT_STATUS)
        if lse is not None:  # draft_step returns NaN for a row that has no distribution
            fault = torch.where(lse.isnan() & (fault == 0), int(Status.DRAFT_NAN), fault)
        fault = torch.where(wanted & ~self.greedy, fault, 0).to(torch.int32)
        status, wanted = status | fault, wanted & (fault == 0)
        logits = torch.where((wanted & ~self.greedy)[:, None], logits, 0.0)
        full = distribution(logits, self.sampling, (cutoff, lse))
        ids = torch.arange(self.vocabulary, device=x.device) if self.d2t is None else self.d2t
        full_log_q = torch.full_like(log_q, -torch.inf)
        full_log_q[:, ids] = full.log_probability
        # Greedy sequences treat drafts as one-hot, whatever the draft logits are.
        log_q = torch.where(self.greedy[:, None], log_q, full_log_q)
        return wanted, status, x, log_q.exp(), log_q, full.margin

    def uniform_of(self, j: int):
        """u in (0, 1): the random number that tests draft j."""
        return uniform(philox(self.seed, torch.zeros_like(self.seed)[:, None], self.position, j, ACCEPT)).squeeze(-1)

    def closer(self, margin, where) -> None:
        """Lowers the margins of the sequences ``where`` to ``margin``. Greedy sequences have none."""
        self.margin = torch.where(where & ~self.greedy, torch.minimum(self.margin, margin), self.margin)

    def draw(self, weights, j: int, where):
        """[B] recovered or bonus tokens of row j, drawn from ``weights`` [B, V]."""
        drawn, margin = race(weights, self.seed, self.position, j, (RECOVER_BLOCK, RECOVER_TOKEN))
        self.closer(margin, where)
        return drawn

    def walk(self) -> None:
        """Rule ``token``: tests one draft after another until one is rejected."""
        walking = torch.ones_like(self.greedy)
        for j in range(self.rows):
            fault, p = self.target_row(j)
            self.status = torch.where(walking, self.status | fault, self.status)
            walking = walking & (fault == 0)
            drafted, flags, x, q, log_q, q_margin = self.draft_row(j, walking)
            self.status = self.status | flags

            # Accept iff u q(x) < p(x), with the ratio in the log domain: p == q bitwise gives exactly 1.
            ratio, p_x, zero_q = ratio_of(p.log_probability, log_q, x)
            u, zero_q = self.uniform_of(j), drafted & zero_q
            self.status = torch.where(zero_q, self.status | int(Status.DRAFT_ZERO_PROBABILITY), self.status)
            accepted = drafted & (u < ratio) & ~zero_q
            self.closer((1 - u / ratio).abs(), drafted & ~zero_q)
            self.closer(p.margin, walking)
            self.closer(q_margin, drafted)

            # After the first rejection a token is drawn from the residual max(0, p - q); without a draft, from p. If
            # the residual has no mass in floating point, p and q are equal up to rounding, and the draft is accepted
            # after all, unless p(x) = 0: then a token is drawn from p.
            weights = torch.where(drafted[:, None], (p.probability - q).clamp(min=0.0), p.probability)
            no_mass = drafted & ~accepted & (weights.sum(-1) == 0)
            accepted = accepted | (no_mass & (p_x > 0))
            weights = torch.where((no_mass & (p_x == 0))[:, None], p.probability, weights)
            drawn = self.draw(weights, j, walking & ~accepted)

            self.tokens[:, j] = torch.where(walking, torch.where(accepted, x, drawn), -1)
            self.num_accepted = self.num_accepted + accepted.to(torch.int32)
            walking = accepted

    def walk_jointly(self) -> None:
        """Rule ``block`` (Sun et al., arXiv 2403.10444, Algorithm 2): keeps the longest prefix that passes its test."""
        walking, w = torch.ones_like(self.greedy), torch.ones_like(self.margin)
        weights_of, flags_of, faulty_of, p_of, x_of, margin_of, passed_of = ([] for _ in range(7))
        for j in range(self.rows):
            fault, p = self.target_row(j)
            drafted, flags, x, q, log_q, q_margin = self.draft_row(j, walking & (fault == 0))
            ratio, _, zero_q = ratio_of(p.log_probability, log_q, x)
            zero_q = drafted & zero_q
            flags = torch.where(zero_q, flags | int(Status.DRAFT_ZERO_PROBABILITY), flags | fault)
            weights = (w[:, None] * p.probability - q).clamp(min=0.0)
            mass = weights.sum(-1)
            # h is the probability that the first j drafts are kept, given that no longer prefix is.
            h = torch.where(drafted, torch.where(mass + 1 - w > 0, mass / (mass + 1 - w), 1.0), w)
            u = self.uniform_of(j - 1) if j > 0 else torch.zeros_like(h)
            passed_of.append(walking & (u < h))
            distance = torch.where(drafted, (mass * (1 - u) - u * (1 - w)).abs(), (w - u).abs())
            certain = (h == 1) | (w == 0) if j > 0 else torch.ones_like(walking)
            margin = torch.minimum(torch.where(certain, torch.inf, 30 * distance), torch.minimum(p.margin, q_margin))
            margin_of.append(torch.where(walking, margin, torch.inf))
            weights_of.append(torch.where(drafted[:, None], weights, p.probability))
            flags_of.append(flags)
            faulty_of.append(fault != 0)
            p_of.append(p)
            x_of.append((drafted, x))
            # 0 stays 0, even if the ratio is infinite.
            w = torch.where(zero_q | (w == 0), 0.0, (w * ratio).clamp(max=1.0))
            walking = drafted & ~zero_q
        passed = torch.stack(passed_of)
        passed[0] = True
        kept = (passed * torch.arange(self.rows, device=passed.device)[:, None]).amax(0)
        for j in range(self.rows):
            here = kept == j
            drafted, x = x_of[j]
            # A residual without mass: p and q are equal up to rounding, and the draft is accepted, as in rule `token`.
            no_mass = drafted & (weights_of[j].sum(-1) == 0)
            p_x = p_of[j].probability.gather(1, x[:, None]).squeeze(-1)
            kept = torch.where(here & no_mass & (p_x > 0), j + 1, kept)
            here = kept == j
            weights = torch.where(no_mass[:, None], p_of[j].probability, weights_of[j])
            drawn = torch.where(faulty_of[j], -1, self.draw(weights, j, here & ~faulty_of[j]))
            self.tokens[:, j] = torch.where(here, drawn, torch.where(kept > j, x, -1))
            self.status = torch.where(here, flags_of[j], self.status)
            self.num_accepted = torch.where(here, j, self.num_accepted).to(torch.int32)
            # The margin is that of all tests that led here: every longer prefix failed, and this one passed.
            for longer in range(j, self.rows):
                self.closer(margin_of[longer], here)
            for shorter in range(j):
                self.closer(p_of[shorter].margin, here)

    def walk_coupled(self) -> None:
        """Rule ``coupled``: emits the winner of p's race at each row, as long as the draft is that winner."""
        walking = torch.ones_like(self.greedy)
        ids = torch.arange(self.vocabulary, device=self.seed.device)
        for j in range(self.rows):
            fault, p = self.target_row(j)
            self.status = torch.where(walking, self.status | fault, self.status)
            walking = walking & (fault == 0)
            drafted, flags, x, *_ = self.draft_row(j, walking)
            self.status = self.status | flags
            drawn, margin = coupled_race(p.probability, ids, self.seed, self.position + j)
            self.closer(torch.minimum(margin, p.margin), walking)
            self.tokens[:, j] = torch.where(walking, drawn, -1)
            walking = drafted & (x == drawn)
            self.num_accepted = self.num_accepted + walking.to(torch.int32)


def ratio_of(log_p, log_q, x):
    """([B] p(x) / q(x), which is 0 if p(x) = 0; [B] p(x); [B] whether q(x) = 0)."""
    log_p_x, log_q_x = (log.gather(1, x[:, None]).squeeze(-1) for log in (log_p, log_q))
    p_x = log_p_x.exp()
    return torch.where(p_x > 0, (log_p_x - log_q_x).exp(), 0.0), p_x, log_q_x == -torch.inf


def speculative_step_with_margin(*arguments):
    """(the outputs of ``speculative_step``, [B] margins of the closest decision in each sequence)."""
    return _Verification(*arguments).run()


def speculative_step(*arguments):
    return speculative_step_with_margin(*arguments)[0]


implement("draft_step_reference", draft_step)
implement("speculative_step_reference", speculative_step)
