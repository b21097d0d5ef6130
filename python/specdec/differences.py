"""Why two greedy texts of one model differ: rounding decided between almost equal logits, or something is wrong."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import DynamicCache, PreTrainedModel, RepetitionPenaltyLogitsProcessor

Pair = tuple[float | None, float | None]


@dataclass(frozen=True)
class Difference:
    """The first position at which two methods chose different tokens.

    ``rounding`` is the most by which two forwards over the same tokens differ in any logit there: a full
    forward, a cached one, a full one in ``wide_dtype``, and never less than one unit in the last place of the
    largest logit. Two logits may each be off by that much, so a correct method can choose a token up to
    ``bound`` = 2 ``rounding`` below the best, not more. ``gap`` says how far below the best, in
    ``wide_dtype``, the worse of the two tokens lies.
    """

    prompt: int
    position: int  # among the new tokens
    methods: tuple[str, str]
    tokens: tuple[int | None, int | None]  # None: this method's text had ended
    logits: Pair  # of the two tokens, by a full forward in dtype; None: no token, or not finite
    wide_logits: Pair  # the same in wide_dtype
    dtype: str  # the target's
    wide_dtype: str
    gap: float | None
    rounding: float
    bound: float
    verdict: Literal["near-tie", "bug"]


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """The first index at which two sequences differ, the end of the shorter one included; None if equal."""
    if list(first) == list(second):
        return None
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


@torch.inference_mode()
def explain(
    target: PreTrainedModel,
    prompt: Sequence[int],
    first: Sequence[int],
    second: Sequence[int],
    methods: tuple[str, str] = ("first", "second"),
    prompt_index: int = 0,
    repetition_penalty: float | None = None,
) -> Difference | None:
    """Judges the first difference between two greedy continuations of ``prompt``.

    Args:
        target: the model that decided both. A copy of it in a wider dtype is made for the judgement, unless it is
            quantised.
        prompt, first, second: token ids; ``first`` and ``second`` without the prompt.
        methods: what produced them, for the report.
        prompt_index: likewise.
        repetition_penalty: what both were decoded with; all logits here are those after it.

    Returns:
        The difference, or None where there is none.
    """
    position = first_difference(first, second)
    if position is None:
        return None
    tokens = tuple(t[position] if position < len(t) else None for t in (first, second))
    common = torch.tensor([[*prompt, *first[:position]]], device=target.device)
    penalty = RepetitionPenaltyLogitsProcessor(float(repetition_penalty or 1.0))

    def last(logits: torch.Tensor) -> torch.Tensor:
        return penalty(common, logits[:, -1].double())[0]

    full = last(target(input_ids=common, use_cache=False).logits)
    if getattr(target, "hf_quantizer", None) is not None:  # no wider than it is: other weights would be another model
        wide_dtype, wide_model = target.dtype, target
    else:
        wide_dtype = torch.float32 if target.dtype.itemsize == 2 else torch.float64
        wide_model = copy.deepcopy(target).to(wide_dtype)
    wide = last(wide_model(input_ids=common, use_cache=False).logits)
    others = [wide]
    if common.shape[1] > 1:
        cache = DynamicCache(config=target.config)
        target(input_ids=common[:, :-1], past_key_values=cache)
        others.append(last(target(input_ids=common[:, -1:], past_key_values=cache).logits))
    # A model may rule tokens out with -inf; the difference of two of those is no number.
    finite = torch.stack([full, *others]).isfinite().all(0)
    errors = [torch.finfo(target.dtype).eps * full.abs(), *((full - other).abs() for other in others)]
    rounding = torch.stack(errors)[:, finite].amax().item() if finite.any() else 0.0
    bound = 2 * rounding
    gap = None if None in tokens else max((wide.max() - wide[t]).item() for t in tokens)
    near_tie = gap is not None and gap <= bound  # a nan is no near-tie
    return Difference(
        prompt=prompt_index,
        position=position,
        methods=methods,
        tokens=tokens,
        logits=tuple(_number(full, t) for t in tokens),
        wide_logits=tuple(_number(wide, t) for t in tokens),
        dtype=str(target.dtype).removeprefix("torch."),
        wide_dtype=str(wide_dtype).removeprefix("torch."),
        gap=gap if gap is not None and math.isfinite(gap) else None,
        rounding=rounding,
        bound=bound,
        verdict="near-tie" if near_tie else "bug",
    )


def _number(logits: torch.Tensor, token: int | None) -> float | None:
    value = math.nan if token is None else logits[token].item()
    return value if math.isfinite(value) else None
