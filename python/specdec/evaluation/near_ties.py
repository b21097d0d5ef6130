"""Why two greedy texts of one model differ: rounding decided between almost equal logits, or something is wrong."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import DynamicCache, PreTrainedModel, RepetitionPenaltyLogitsProcessor

from ..models.cache.kv_cache import cache_argument

Pair = tuple[float | None, float | None]
_What = tuple[int, int, tuple[str, str], tuple[int | None, int | None]]
# For sampled texts: absolute position -> [V], which is added to logits / temperature there. The largest sum wins.
Noise = Callable[[int], torch.Tensor]
RACE_ROUNDING = 1e-4  # how closely backends agree about races (docs/numerics.md)


@dataclass(frozen=True)
class Difference:
    """The first position at which two methods chose different tokens.

    ``rounding`` is the most by which two forwards over the same tokens differ in any logit there: a full
    forward, a cached one, a full one in ``wide_dtype``, and never less than one unit in the last place of the
    largest logit. Two logits may each be off by that much, so a correct method can choose a token up to
    ``bound`` = 2 ``rounding`` below the best, not more (plus RACE_ROUNDING for sampled texts, whose logits have noise
    added). ``gap`` says how far below the best, in ``wide_dtype``, the worse of the two tokens lies.
    """

    prompt: int
    position: int  # among the new tokens
    methods: tuple[str, str]
    tokens: tuple[int | None, int | None]  # None where the method's text had ended
    logits: Pair  # by a full forward in ``dtype``; None where there is no token, or no finite logit
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


class Judge:
    """
    Args:
        target: the model that decided. A copy of it in a wider dtype is made when the first difference is judged,
            unless it is quantised.
        repetition_penalty: with which the texts were decoded. All logits here are those after the penalty.
        temperature: of texts that were sampled by a race with known noise. Logits are divided by it before the noise is
            added, because such a text chose the largest of these sums.
        margin: a bound that is allowed in any case, >= 0, for texts of the same model in another dtype or on another
            machine, whose rounding cannot be measured here.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        repetition_penalty: float | None = None,
        temperature: float = 1.0,
        margin: float = 0.0,
    ):
        self._target, self._temperature, self._margin = target, temperature, margin
        self._penalty = RepetitionPenaltyLogitsProcessor(float(repetition_penalty or 1.0))
        self._wide: PreTrainedModel | None = None
        self._seen: set[tuple] = set()
        self._wide_dtype = torch.float32 if target.dtype.itemsize == 2 else torch.float64
        if getattr(target, "hf_quantizer", None) is not None:  # a wider copy would have other weights
            self._wide, self._wide_dtype = target, target.dtype

    @torch.inference_mode()
    def explain(
        self,
        prompt: Sequence[int],
        first: Sequence[int],
        second: Sequence[int],
        methods: tuple[str, str] = ("first", "second"),
        prompt_index: int = 0,
        noise: Noise | None = None,
    ) -> Difference | None:
        """Judges the first difference between two continuations of ``prompt``.

        Args:
            prompt, first, second: token ids; ``first`` and ``second`` without the prompt.
            methods: names of what produced the texts, for the report.
            prompt_index: for the report.
            noise: of sampled texts, see :data:`Noise`; None for greedy ones.

        Returns:
            The difference, or None where there is none.
        """
        position = first_difference(first, second)
        if position is None:
            return None
        tokens = _token(first, position), _token(second, position)
        ids = torch.tensor([[*prompt, *first[:position]]], device=self._target.device)
        full, wide = (self._scores(model, ids, noise)[-1] for model in (self._target, self._wide_model()))
        others = [wide]
        if ids.shape[1] > 1:
            others.append(self._cached(ids, noise))
        return self._judge(full, others, (prompt_index, position, methods, tokens), noise is not None)

    def explain_once(
        self, prompt: Sequence[int], first: Sequence[int], second: Sequence[int], methods: tuple[str, str], index: int
    ) -> Difference | None:
        """The same; None also where these texts of these methods were judged before, as rounds repeat them."""
        key = (methods, index, tuple(first), tuple(second))
        if key in self._seen:
            return None
        self._seen.add(key)
        return self.explain(prompt, first, second, methods, index)

    @torch.inference_mode()
    def rest(
        self,
        prompt: Sequence[int],
        text: Sequence[int],
        start: int,
        method: str,
        prompt_index: int = 0,
        noise: Noise | None = None,
    ) -> list[Difference]:
        """Judges every token of ``text`` from ``start`` on that is not the best one in the wide dtype. After a first
        difference there is no other text to compare with. The bound comes from a full and a wide forward alone."""
        ids = torch.tensor([[*prompt, *text]], device=self._target.device)
        full, wide = (self._scores(model, ids, noise, len(prompt)) for model in (self._target, self._wide_model()))
        best, found = wide.argmax(-1).tolist(), []
        for i in range(start, len(text)):
            if best[i] != text[i]:
                what = prompt_index, i, ("best", method), (best[i], text[i])
                found.append(self._judge(full[i], [wide[i]], what, noise is not None))
        return found

    def _wide_model(self) -> PreTrainedModel:
        if self._wide is None:
            wide: Any = copy.deepcopy(self._target)
            self._wide = wide.to(self._wide_dtype)
        return self._wide

    def _scores(
        self, model: PreTrainedModel, ids: torch.Tensor, noise: Noise | None, first: int | None = None
    ) -> torch.Tensor:
        """[n + 1, V] float64, the scores of the token after ids[:first], ids[: first + 1], ... up to all ids (which is
        ``first`` where None)."""
        first = ids.shape[1] if first is None else first
        logits = model(input_ids=ids, use_cache=False).logits[0, first - 1 :].double()
        return torch.stack([self._perturbed(row, ids[:, : first + i], noise) for i, row in enumerate(logits)])

    def _cached(self, ids: torch.Tensor, noise: Noise | None) -> torch.Tensor:
        cache = DynamicCache(config=self._target.config)
        over = {cache_argument(self._target): cache}
        self._target(input_ids=ids[:, :-1], **over)
        logits = self._target(input_ids=ids[:, -1:], **over).logits[0, -1].double()
        return self._perturbed(logits, ids, noise)

    def _perturbed(self, logits: torch.Tensor, before: torch.Tensor, noise: Noise | None) -> torch.Tensor:
        logits = self._penalty(before, logits[None])[0] / self._temperature
        return logits if noise is None else logits + noise(before.shape[1]).to(logits)

    def _judge(self, full: torch.Tensor, others: list[torch.Tensor], what: _What, noisy: bool) -> Difference:
        """``what``: the first fields of the difference."""
        wide, tokens = others[0], what[-1]
        # A model may rule tokens out with -inf; the difference of two of those would be NaN.
        finite = torch.stack([full, *others]).isfinite().all(0)
        errors = [torch.finfo(self._target.dtype).eps * full.abs(), *((full - other).abs() for other in others)]
        rounding = torch.stack(errors)[:, finite].amax().item() if finite.any() else 0.0
        bound = max(2 * rounding + (RACE_ROUNDING if noisy else 0.0), self._margin)
        gap = None if None in tokens else max((wide.max() - wide[t]).item() for t in tokens if t is not None)
        near_tie = gap is not None and gap <= bound  # NaN is not a near-tie
        return Difference(
            *what,
            logits=(_number(full, tokens[0]), _number(full, tokens[1])),
            wide_logits=(_number(wide, tokens[0]), _number(wide, tokens[1])),
            dtype=str(self._target.dtype).removeprefix("torch."),
            wide_dtype=str(self._wide_dtype).removeprefix("torch."),
            gap=gap if gap is not None and math.isfinite(gap) else None,
            rounding=rounding,
            bound=bound,
            verdict="near-tie" if near_tie else "bug",
        )


def _token(text: Sequence[int], position: int) -> int | None:
    """None where the text has ended."""
    return text[position] if position < len(text) else None


def _number(logits: torch.Tensor, token: int | None) -> float | None:
    value = math.nan if token is None else logits[token].item()
    return value if math.isfinite(value) else None
