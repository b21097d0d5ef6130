"""Log-probabilities of given tokens under the softmax of the model's own logits, with ranks and most likely tokens."""

from __future__ import annotations

import torch

from specdec_kernels import draft_step

from ..checks import read_count, refuse
from ..drafters.protocol import Step
from ..result import TokenLogProb

MAX_TOP = 20  # the most likely tokens of a position, as in OpenAI's interface, and by default in vLLM's
_ROWS = 32  # scored at one time, so that scratch is this many rows of V numbers


def check_log_probs(log_probs: object, top_log_probs: int | None, prompt_log_probs: int | None) -> None:
    """Raises ValueError unless the arguments of these names of ``SpeculativeDecoder.generate`` are allowed."""
    if not isinstance(log_probs, bool):
        refuse("log_probs", repr(log_probs), "True or False")
    for name, count in (("top_log_probs", top_log_probs), ("prompt_log_probs", prompt_log_probs)):
        if count is not None and read_count(name, count) > MAX_TOP:
            refuse(name, count, f"None (off), or 0 to {MAX_TOP}")


def score(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> torch.Tensor:
    """Scores one token in each row of logits, without waiting for the device.

    Args:
        logits: [R, V], of any floating dtype.
        tokens: [R] int64, ids below V.
        top: how many most likely tokens to find.

    Returns:
        [R, 2 + 2 min(top, V)] float64, which holds ids exactly: the token's log-probability and its rank, the ids of
        the most likely tokens, and their log-probabilities. Equal logits are in order of their ids, as in greedy
        decoding.
    """
    parts = zip(logits.split(_ROWS), tokens.split(_ROWS), strict=True)
    return torch.cat([_score(rows, of_rows, min(top, logits.shape[1])) for rows, of_rows in parts])


def _score(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> torch.Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    size, index = logits.shape[1], torch.arange(logits.shape[1], device=logits.device)
    normaliser, scored = logits.logsumexp(-1, keepdim=True), logits.gather(1, tokens[:, None])
    before = (logits > scored) | ((logits == scored) & (index < tokens[:, None]))
    columns = [scored - normaliser, 1 + before.sum(-1, keepdim=True)]
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
    scores, count = scores.cpu(), (scores.shape[1] - 2) // 2
    log_probs, ranks = scores[:, 0].tolist(), scores[:, 1].long().tolist()
    ids, values = scores[:, 2 : 2 + count].long().tolist(), scores[:, 2 + count :].tolist()
    likely = [
        [(token, value) for token, value in zip(row_ids[:top], row, strict=False) if value > -torch.inf]
        for row_ids, row in zip(ids, values, strict=True)
    ]
    return [TokenLogProb(*each) for each in zip(log_probs, ranks, likely, strict=True)]


def ranked(logits: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, top: int) -> torch.Tensor:
    """Returns the scores [m, D + 1, w] of the emitted ``tokens`` [n, D + 1] of some ``rows`` [m] under ``logits``
    [n, D + 1, V]."""
    decided, emitted = logits.index_select(0, rows).flatten(0, 1), tokens.index_select(0, rows).clamp(min=0)
    return score(decided, emitted.flatten(), top).view(*emitted.shape, -1)


def on_path(rows: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """Returns the rows [n, D + 1, V] that decided the emitted tokens: the root's, and those of accepted nodes.

    Args:
        rows: [n, N + 1, V], of the root and of all nodes.
        path: [n, D + 1] int64, the accepted nodes, then -1. What is returned beyond them says nothing.
    """
    index = torch.nn.functional.pad(path[:, :-1] + 1, (1, 0))
    return rows.gather(1, index[:, :, None].expand(-1, -1, rows.shape[2]))


def log_probs_of_path(
    step: Step, logits: torch.Tensor, processed: torch.Tensor, tokens: torch.Tensor, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-probabilities of the emitted ``tokens`` [n, D + 1] of a tree, since ``verify_tree`` does not:
    under the distribution that each was drawn from, and under the softmax of the model's own logits.

    log p is the token's logit after penalties and temperature less the row's log-sum-exp after filters, and the former
    is the log-sum-exp of the row in which all other tokens are banned. Of a greedy sequence both are the largest logit,
    so that log p is 0. What is drawn here is not used.

    Args:
        logits, processed: [n, D + 1, V], the rows that decided the tokens, before and after processors.
    """
    tokens = tokens.clamp(min=0)
    raw = score(logits.flatten(0, 1), tokens.flatten(), 0)[:, 0].view(tokens.shape)
    index, drawn = tokens[:, :, None], []
    alone = torch.full_like(processed, -torch.inf).scatter(2, index, processed.gather(2, index))
    for depth in range(tokens.shape[1]):
        all_tokens, one_token = (
            draft_step(
                each[:, depth],
                step.sampling,
                seed=step.seed,
                position=step.position,
                offset=depth,
                drafts=tokens[:, :depth],
                backend=backend,
            )
            for each in (processed, alone)
        )
        drawn.append(one_token.lse - all_tokens.lse)
    return torch.stack(drawn, 1), raw
