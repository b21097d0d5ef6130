"""Log-probabilities of given tokens under the softmax of the model's own logits, with ranks and most likely tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..checks import read_count, refuse
from ..result import TokenLogProb

MAX_TOP = 20  # the largest n, as in OpenAI's interface, and by default in vLLM's
_ROWS = 32  # scored at one time, so that scratch is this many rows of V numbers


class AskedLogProbs(NamedTuple):
    """Which log-probabilities a sequence is to have."""

    emitted: bool = False  # of its new tokens
    top: int | None = None  # n of ``top_log_probs``
    prompt: int | None = None  # n of ``prompt_log_probs``


def read_asked(log_probs: bool, top_log_probs: int | None, prompt_log_probs: int | None) -> AskedLogProbs:
    """Checks the arguments of these names of ``SpeculativeDecoder.generate``.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
    """
    if not isinstance(log_probs, bool):
        refuse("log_probs", repr(log_probs), "True or False")
    for name, count in (("top_log_probs", top_log_probs), ("prompt_log_probs", prompt_log_probs)):
        if count is not None and read_count(name, count) > MAX_TOP:
            refuse(name, count, f"None (off), or 0 to {MAX_TOP}")
    return AskedLogProbs(log_probs or top_log_probs is not None, top_log_probs, prompt_log_probs)


def score(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> torch.Tensor:
    """Scores one token in each row of logits, without waiting for the device.

    Args:
        logits: [R, V], of any floating dtype.
        tokens: [R] int64, ids below V.
        top: n, how many most likely tokens to find.

    Returns:
        [R, 2 + 2 min(n, V)] float64, which holds ids exactly: the token's log-probability and its rank, the ids of the
        most likely tokens, and their log-probabilities. Equal logits are in order of their ids, as in greedy decoding.
    """
    parts = zip(logits.split(_ROWS), tokens.split(_ROWS), strict=True)
    return torch.cat([_score(rows, own, min(top, logits.shape[1])) for rows, own in parts])


def _score(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> torch.Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    size, index = logits.shape[1], torch.arange(logits.shape[1], device=logits.device)
    normaliser, own = logits.logsumexp(-1, keepdim=True), logits.gather(1, tokens[:, None])
    before = (logits > own) | ((logits == own) & (index < tokens[:, None]))
    columns = [own - normaliser, 1 + before.sum(-1, keepdim=True)]
    if top:
        # topk takes any of the tokens that are equal to the last one; the lowest ids among them are the ones to take.
        last = logits.topk(top).values[:, -1:]
        lowest_first = (size - index).int()
        among_equals = torch.where(logits == last, lowest_first, 0)
        ids = torch.where(logits > last, lowest_first + size, among_equals).topk(top).indices.sort(-1).values
        values, order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True)
        columns += [ids.gather(1, order), values - normaliser]
    return torch.cat([column.double() for column in columns], 1)


def read_scores(scores: torch.Tensor, top: int) -> list[TokenLogProb]:
    """Returns what ``score`` found, with the ``top`` most likely of the tokens that it found. Waits for the device."""
    scores, found = scores.cpu(), (scores.shape[1] - 2) // 2
    log_probs, ranks = scores[:, 0].tolist(), scores[:, 1].long().tolist()
    ids, values = scores[:, 2 : 2 + found].long().tolist(), scores[:, 2 + found :].tolist()
    likely = [
        [(token, value) for token, value in zip(row_ids[:top], row, strict=False) if value > -torch.inf]
        for row_ids, row in zip(ids, values, strict=True)
    ]
    return [TokenLogProb(*each) for each in zip(log_probs, ranks, likely, strict=True)]
