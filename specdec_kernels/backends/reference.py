"""The oracle: eager PyTorch on any device, float64 inside, written to be read. docs/numerics.md states the same rules.

Every function also returns a *margin*: the relative distance of its closest decision from the other outcome. A float32
kernel may decide otherwise only where that margin is within rounding: so tests tell such near-ties from bugs.
"""

from __future__ import annotations

import torch

from ..ops import implement, statistics_dtype
from ..types import Status

BLOCK = 1024  # consecutive vocabulary entries that race as one in the first level; a constant of the contract

# Streams: the last word of the counter. No two kinds of decision share noise.
DRAFT_BLOCK, DRAFT_TOKEN, ACCEPT, RECOVER_BLOCK, RECOVER_TOKEN = range(5)

_LOW32 = 0xFFFFFFFF


def _multiply_high_low(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both halves of the 64-bit product of 32-bit words, within signed int64."""
    low = (a & 0xFFFF) * b
    return ((a >> 16) * b + (low >> 16)) >> 16, (a * b) & _LOW32


def philox(seed: torch.Tensor, index: torch.Tensor, position: torch.Tensor, offset: int, stream: int) -> torch.Tensor:
    """32 random bits for every (sequence, index), as int64. Philox4x32-10, Salmon et al., SC 2011.

    seed, position: [B] int64; index: [B, N] int64. Key = seed; counter = (index / 4, position, offset, stream); the
    index's remainder picks one of the four words.
    """
    key = [(seed & _LOW32)[:, None], ((seed >> 32) & _LOW32)[:, None]]
    c = [index // 4, (position & _LOW32)[:, None], torch.tensor(offset), torch.tensor(stream)]
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
    """[B] argmax over the last dimension (lowest index of a tie) and how far behind the runner-up is, relatively."""
    best, index = score.max(-1)
    others = score.scatter(-1, index[:, None], 0.0).amax(-1)
    return index, torch.where(best > 0, 1 - others / best, 1.0)


def race(weights, seed, position, offset: int, streams: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one index of each row of ``weights`` [B, V] (unnormalised): argmin E / w, of blocks, then in the winner.

    Returns ([B] token, -1 where all weights are 0; [B] margin).
    """
    batch, vocabulary = weights.shape
    blocks = -(-vocabulary // BLOCK)
    padded = torch.nn.functional.pad(weights, (0, blocks * BLOCK - vocabulary)).view(batch, blocks, BLOCK)
    mass = padded.sum(-1)

    def level(w, index, stream):
        u = uniform(philox(seed, index, position, offset, stream))
        return _argmax_with_margin(w / -torch.log1p(-u))

    block, margin = level(mass, torch.arange(blocks, device=mass.device).expand(batch, -1), streams[0])
    inside = padded[torch.arange(batch, device=mass.device), block]
    index = block[:, None] * BLOCK + torch.arange(BLOCK, device=mass.device)
    token, inner_margin = level(inside, index, streams[1])
    token = torch.where(mass.sum(-1) > 0, block * BLOCK + token, -1)
    return token, torch.minimum(margin, inner_margin)


def distribution(logits: torch.Tensor, temperature: torch.Tensor, lse: torch.Tensor | None = None):
    """softmax(logits / T) of [B, V] rows: (probabilities float64, log-probabilities, lse as handed over).

    At temperature 0: one-hot at the largest logit, lse = that logit. ``lse``: as drafting handed it over.
    """
    greedy = temperature == 0
    x = logits.double()
    scaled = x / torch.where(greedy, 1.0, temperature.double())[:, None]
    if lse is None:
        lse = torch.where(greedy, x.amax(-1), torch.logsumexp(scaled, -1))
    # Rounded as it is handed over, so that drafting and verification see bitwise the same q.
    lse = lse.to(statistics_dtype(logits))
    log_p = scaled - lse.double()[:, None]
    one_hot = torch.nn.functional.one_hot(x.argmax(-1), x.shape[-1]).double()
    log_p = torch.where(greedy[:, None], one_hot.log(), log_p)
    return log_p.exp(), log_p, lse


def row_status(logits: torch.Tensor, nan: Status, infinity: Status, empty: Status) -> torch.Tensor:
    """[B] int32: what is wrong with each of [B, V] rows that have no distribution. NaN hides the rest."""
    fault = torch.where(logits.isneginf().all(-1), int(empty), 0)
    fault = torch.where(logits.isposinf().any(-1), int(infinity), fault)
    return torch.where(logits.isnan().any(-1), int(nan), fault).to(torch.int32)


_TARGET = (Status.TARGET_NAN, Status.TARGET_POSITIVE_INFINITY, Status.TARGET_EMPTY)
_DRAFT = (Status.DRAFT_NAN, Status.DRAFT_POSITIVE_INFINITY, Status.DRAFT_EMPTY)


def draft_step_with_margin(logits, temperature, seed, position, offset: int):
    """As ``draft_step``, and [B] margins."""
    status = row_status(logits, *_DRAFT)
    bad = status != 0
    logits = torch.where(bad[:, None], 0.0, logits)
    q, log_q, lse = distribution(logits, temperature)
    token, margin = race(q, seed, position, offset, (DRAFT_BLOCK, DRAFT_TOKEN))
    margin = torch.where((temperature == 0) | bad, 1.0, margin)
    log_q = log_q.gather(-1, token[:, None]).squeeze(-1).to(lse.dtype)
    nothing = torch.full_like(lse, float("-inf"))
    outputs = (
        torch.where(bad, -1, token),
        torch.where(bad, nothing, log_q),
        nothing.clone(),
        torch.where(bad, torch.nan, lse),
        status,
    )
    return outputs, margin


def draft_step(logits, temperature, seed, position, offset: int):
    return draft_step_with_margin(logits, temperature, seed, position, offset)[0]


def speculative_step_with_margin(
    target_logits, draft_tokens, draft_logits, draft_lse, num_drafts, temperature, seed, position
):
    """As ``speculative_step``, and [B] margins of the closest decision that was taken on the way."""
    batch, rows, vocabulary = target_logits.shape
    device, greedy = target_logits.device, temperature == 0
    tokens = torch.full((batch, rows), -1, dtype=torch.int64, device=device)
    num_accepted = torch.zeros(batch, dtype=torch.int32, device=device)
    status = torch.zeros(batch, dtype=torch.int32, device=device)
    margin = torch.ones(batch, dtype=torch.float64, device=device)
    walking = torch.ones(batch, dtype=torch.bool, device=device)
    if num_drafts is None:
        num_drafts = torch.full((batch,), rows - 1, device=device)

    for j in range(rows):
        fault = row_status(target_logits[:, j], *_TARGET)
        status = torch.where(walking, status | fault, status)
        walking = walking & (fault == 0)
        p, log_p, _ = distribution(torch.where(walking[:, None], target_logits[:, j], 0.0), temperature)

        # Is there a draft here that can be tested?
        drafted = walking & (j < num_drafts)
        x = draft_tokens[:, j] if j < rows - 1 else torch.full_like(seed, -1)
        in_range = (x >= 0) & (x < vocabulary)
        out_of_range = drafted & ~in_range & (x != -1)
        status = torch.where(out_of_range, status | int(Status.DRAFT_OUT_OF_RANGE), status)
        drafted = drafted & in_range
        x = x.clamp(0, vocabulary - 1)
        q = torch.nn.functional.one_hot(x, vocabulary).double()
        log_q = q.log()
        if draft_logits is not None and j < rows - 1:
            fault = row_status(draft_logits[:, j], *_DRAFT)
            if draft_lse is not None:  # NaN is how draft_step hands over a row without a distribution
                fault = torch.where(draft_lse[:, j].isnan() & (fault == 0), int(Status.DRAFT_NAN), fault)
            fault = torch.where(drafted & ~greedy, fault, 0)
            status = status | fault
            drafted = drafted & (fault == 0)
            usable = torch.where((drafted & ~greedy)[:, None], draft_logits[:, j], 0.0)
            full_q, full_log_q, _ = distribution(usable, temperature, None if draft_lse is None else draft_lse[:, j])
            q, log_q = (torch.where(greedy[:, None], one, full) for one, full in ((q, full_q), (log_q, full_log_q)))

        # Accept iff u q(x) < p(x), with the ratio in the log domain: p == q bitwise gives exactly 1.
        p_x, q_x = (d.gather(-1, x[:, None]).squeeze(-1) for d in (p, q))
        log_ratio = (log_p - log_q).gather(-1, x[:, None]).squeeze(-1)
        ratio = torch.where(p_x > 0, log_ratio.exp(), 0.0)
        u = uniform(philox(seed, torch.zeros_like(seed)[:, None], position, j, ACCEPT)).squeeze(-1)
        zero_q = drafted & (q_x == 0)
        status = torch.where(zero_q, status | int(Status.DRAFT_ZERO_PROBABILITY), status)
        accepted = drafted & (u < ratio) & ~zero_q
        margin = torch.where(drafted & ~greedy & ~zero_q, torch.minimum(margin, (1 - u / ratio).abs()), margin)

        # The first rejection recovers from max(0, p - q); without a draft the token comes from p. If the residual has
        # no mass in floating point, p and q are equal up to rounding: the draft stands (unless p never yields it).
        weights = torch.where(drafted[:, None], (p - q).clamp(min=0.0), p)
        no_mass = drafted & ~accepted & (weights.sum(-1) == 0)
        accepted = accepted | (no_mass & (p_x > 0))
        weights = torch.where((no_mass & (p_x == 0))[:, None], p, weights)
        drawn, race_margin = race(weights, seed, position, j, (RECOVER_BLOCK, RECOVER_TOKEN))
        margin = torch.where(walking & ~accepted & ~greedy, torch.minimum(margin, race_margin), margin)

        tokens[:, j] = torch.where(walking, torch.where(accepted, x, drawn), -1)
        num_accepted = num_accepted + accepted.to(torch.int32)
        walking = accepted
    return (tokens, num_accepted, status), margin


def speculative_step(target_logits, draft_tokens, draft_logits, draft_lse, num_drafts, temperature, seed, position):
    return speculative_step_with_margin(
        target_logits, draft_tokens, draft_logits, draft_lse, num_drafts, temperature, seed, position
    )[0]


implement("draft_step_reference", draft_step)
implement("speculative_step_reference", speculative_step)
