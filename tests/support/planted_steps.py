"""Steps of speculative decoding with the bugs that real systems have had. Each stands in the place of
``speculative_step`` in the loop."""

from __future__ import annotations

import torch

from specdec_kernels import SamplingParams, draft_step, speculative_step


def shifted(logits, drafts, q, **kwargs):
    """Row i + 1 decides the token that row i should."""
    return speculative_step(logits.roll(-1, 1) if logits.shape[1] > 1 else logits, drafts, q, **kwargs)


def biased(logits, drafts, q, **kwargs):
    """Recovers from p instead of max(0, p - q)."""
    out = speculative_step(logits, drafts, q, **kwargs)
    if not drafts.shape[1]:
        return out
    plain = speculative_step(logits[:, :1], drafts[:, :0], None, **_first_row(kwargs))
    rejected = (out.num_accepted == 0) & (kwargs["num_drafts"] > 0)
    out.tokens[:, 0] = torch.where(rejected, plain.tokens[:, 0], out.tokens[:, 0])
    return out


def _first_row(kwargs):
    names = ("params", "seed", "position", "rule", "backend")
    return {name: kwargs[name] for name in names}


def shared_noise(logits, drafts, q, **kwargs):
    """Recovers with the noise that drew the draft (vllm#54282)."""
    out = speculative_step(logits, drafts, q, **kwargs)
    temperature = kwargs["params"].temperature.expand(len(drafts)).tolist()
    for b, n in enumerate(out.num_accepted.tolist() if drafts.shape[1] else []):
        if temperature[b] > 0 and n < int(kwargs["num_drafts"][b]):
            p, drawn_from = ((row[b, n].double() / temperature[b]).softmax(-1) for row in (logits, q))
            residual = (p - drawn_from).clamp(min=0.0).log()[None]
            where = {name: kwargs[name][b : b + 1] for name in ("seed", "position")}
            recovered = draft_step(residual.float(), SamplingParams(1.0), **where, offset=n)
            out.tokens[b, n] = recovered.tokens[0]
    return out
