"""The oracle's distribution of a row: raw logits, masks, penalties, temperature and filters to probabilities, float64.

``margin`` is how close the closest decision was, as a relative distance. Here, filters decide which tokens to keep.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..ops import WORD_BITS, SamplingTensors, statistics_dtype
from ..types import Status

# In float32, masses and thresholds of filters are right to 3e-6, what other decisions compare only to 1e-4. Margins of
# filters are multiplied by this factor, so that one bound serves for all margins.
_FINER = 30.0
_LARGE = 1e5  # where numbers in float32 are 0.004 to 0.008 apart

TARGET_STATUS = (Status.TARGET_NAN, Status.TARGET_POSITIVE_INFINITY, Status.TARGET_EMPTY)
DRAFT_STATUS = (Status.DRAFT_NAN, Status.DRAFT_POSITIVE_INFINITY, Status.DRAFT_EMPTY)


class Distribution(NamedTuple):
    probability: torch.Tensor  # [B, V] float64; one-hot at temperature 0
    log_probability: torch.Tensor
    cutoff: torch.Tensor  # [B], in the dtype of ``draft_step``'s output
    lse: torch.Tensor
    margin: torch.Tensor  # [B] float64


def adjusted(
    logits: torch.Tensor,
    sampling: SamplingTensors,
    position: torch.Tensor,
    drafts: torch.Tensor,
    d2t: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, V] logits after mask, bias and penalties, in the dtype of statistics, in which kernels compute them.

    position: [B] absolute position of the step's first token; drafts: [B, j], the step's drafts before this row;
    allowed: [B, W] bits of the tokens that are not masked.
    """
    x = logits.to(statistics_dtype(logits))
    columns = torch.arange(x.shape[1], device=x.device) if d2t is None else d2t
    if allowed is not None:
        x = torch.where((allowed[:, columns // WORD_BITS] >> columns % WORD_BITS) & 1 == 1, x, float("-inf"))
    table = sampling.table()
    if table is None:
        return x
    table_ids, table_bias, table_in_prompt, table_count = table
    size = int(columns[-1]) + 1

    def dense(values: torch.Tensor) -> torch.Tensor:
        """One column of the table as [B, V]; ids beyond the vocabulary share one more slot, which is left out."""
        whole = values.new_zeros((len(x), size + 1)).scatter(1, table_ids.clamp(max=size), values)
        return whole[:, columns]

    bias, in_prompt, count = dense(table_bias), dense(table_in_prompt), dense(table_count)
    for i in range(drafts.shape[1]):
        count = count + (columns == drafts[:, i : i + 1])
    x = x + bias
    if sampling.penalties is not None:
        repetition, presence, frequency = sampling.penalties.to(x.dtype)[:, :, None].unbind(1)
        penalised = torch.where(x < 0, x * repetition, x / repetition)
        x = torch.where(in_prompt | (count > 0), penalised, x)
        x = torch.where(count > 0, x - presence - frequency * count, x)
    if sampling.ends is not None and sampling.first_end is not None:
        early = position + drafts.shape[1] < sampling.first_end
        for i in range(sampling.ends.shape[1]):
            x = torch.where(early[:, None] & (columns == sampling.ends[:, i : i + 1]), float("-inf"), x)
    return x


def row_status(x: torch.Tensor, temperature: torch.Tensor, flags: tuple[Status, Status, Status]) -> torch.Tensor:
    """[B] int32: why each of [B, V] adjusted rows has no distribution; 0 if it has one. NaN takes precedence over +inf,
    which l / T is also where the dtype of statistics has no such number."""
    nan, infinity, empty = map(int, flags)
    scaled = (x.double() / torch.where(temperature == 0, 1.0, temperature.double())[:, None]).to(x.dtype)
    fault = torch.where(scaled.isneginf().all(-1), empty, 0)
    fault = torch.where(scaled.isposinf().any(-1), infinity, fault)
    return torch.where(scaled.isnan().any(-1), nan, fault).to(torch.int32)


def cutoff_of(x: torch.Tensor, temperature: torch.Tensor, filters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """([B] smallest logit that top-k, then top-p, then min-p keep; [B] margins). x: [B, V] float64, temperature > 0."""
    top_k, top_p, min_p = filters.double().unbind(1)
    falling = x.sort(-1, descending=True).values
    largest, finest = falling[:, 0], torch.finfo(torch.float64).tiny
    nothing, infinity = torch.full_like(largest, float("-inf")), torch.full_like(largest, float("inf"))

    k = torch.minimum(top_k.long(), (x > -torch.inf).sum(-1)).clamp(min=1)  # masked tokens do not count
    by_k = torch.where(top_k > 0, falling.gather(1, k[:, None] - 1)[:, 0], nothing)

    weight = ((falling - largest[:, None]) / temperature[:, None]).exp()
    weight = torch.where(falling >= by_k[:, None], weight, 0.0)
    total = weight.sum(-1)
    wanted = (top_p * total).clamp(min=finest)
    # The cutoff of top-p: the largest logit such that the tokens at or above it weigh at least ``wanted``.
    index = (weight.cumsum(-1) < wanted[:, None]).sum(-1).clamp(max=x.shape[1] - 1)
    by_p = torch.where(top_p < 1, falling.gather(1, index[:, None])[:, 0], nothing)
    above, up_to = ((weight * keep).sum(-1) for keep in (falling > by_p[:, None], falling >= by_p[:, None]))
    margin_p = torch.where(top_p < 1, torch.minimum(up_to - wanted, wanted - above) / total, infinity)

    by_min = largest + temperature * min_p.log()
    distance = ((falling - by_min[:, None]) / temperature[:, None]).abs().amin(-1) / (1 + largest.abs())
    margin_min = torch.where((min_p > 0) & (by_min >= torch.maximum(by_k, by_p)), distance, infinity)

    cutoff = torch.maximum(torch.maximum(by_k, by_p), by_min)
    return cutoff, _FINER * torch.minimum(margin_p, margin_min)


def distribution(
    x: torch.Tensor,
    sampling: SamplingTensors,
    handed_over: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> Distribution:
    """The distribution of [B, V] adjusted rows. ``handed_over``: (cutoff, lse), [B] each, if drafting computed them."""
    dtype, x = statistics_dtype(x), x.double()
    greedy = sampling.temperature == 0
    temperature = torch.where(greedy, 1.0, sampling.temperature.double())
    margin = torch.full_like(temperature, float("inf"))
    cutoff, lse = handed_over
    if cutoff is None:
        cutoff = torch.full_like(temperature, float("-inf"))
        if sampling.filters is not None:
            found, found_margin = cutoff_of(x, temperature, sampling.filters)
            cutoff, margin = torch.where(greedy, cutoff, found), torch.where(greedy, margin, found_margin)
        cutoff = cutoff.to(dtype)
    scaled = x / temperature[:, None]
    scaled = torch.where(x >= cutoff.double()[:, None], scaled, float("-inf"))
    if lse is None:
        # Rounded as in ``draft_step``'s output, so that drafting and verification see the same q, bit for bit.
        lse = torch.where(greedy, x.amax(-1), torch.logsumexp(scaled, -1)).to(dtype)
    # Where l / T is so large that rounding lse is worth whole nats, l / T is rounded to the same grid, as kernels do.
    large = lse.double()[:, None].abs() > _LARGE
    log_p = torch.where(large, scaled.to(dtype).double(), scaled) - lse.double()[:, None]
    one_hot = torch.nn.functional.one_hot(x.argmax(-1), x.shape[-1]).double()
    log_p = torch.where(greedy[:, None], one_hot.log(), log_p)
    return Distribution(log_p.exp(), log_p, cutoff, lse, margin)
