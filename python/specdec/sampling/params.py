"""Checks the callers' sampling settings once, and converts them to the form of one sequence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch

from specdec_kernels import SamplingParams

from ..checks import refuse

PARAMETERS = ("temperature", *SamplingParams.FILTERS, *SamplingParams.PENALTIES)
LARGEST_BIAS = 1e30  # divided by the lowest temperature, a larger logit would be infinite in float32
Bias = dict[int, float]  # token -> number that is added to its logit; -inf bans the token


def split_params(params: SamplingParams | None, batch_size: int) -> list[SamplingParams | None]:
    """Returns the parameters of each sequence, as numbers. Raises ValueError naming the parameter."""
    if params is None:
        return [None] * batch_size
    if not isinstance(params, SamplingParams):
        refuse("params", type(params).__name__, "a SamplingParams")
    columns = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if isinstance(value, torch.Tensor):
            if value.dim() == 1 and len(value) != batch_size:
                refuse(f"params.{field.name}", f"shape {list(value.shape)}", f"a number or shape [{batch_size}]")
            columns[field.name] = value.expand(batch_size).tolist()
        else:
            columns[field.name] = [value] * batch_size
    return [SamplingParams(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def read_bias(logit_bias: Mapping[int, float] | None, banned_tokens: Sequence[int], vocab_size: int) -> Bias:
    """Returns the biases of one sequence; a banned token has -inf. Raises ValueError naming the argument."""
    if not isinstance(logit_bias, Mapping | None):
        refuse("logit_bias", repr(logit_bias), "a dict of ids and numbers")
    if not isinstance(banned_tokens, Sequence):
        refuse("banned_tokens", repr(banned_tokens), "a list of ids")
    bias = {**(logit_bias or {})}
    for token, value in bias.items():
        _check_token("logit_bias", token, vocab_size)
        fine = isinstance(value, (int, float)) and (value == -math.inf or abs(value) <= LARGEST_BIAS)
        if isinstance(value, bool) or not fine:
            refuse("logit_bias", f"{value!r} for id {token}", "-1e+30 to 1e+30, or -inf (never this token)")
    for token in banned_tokens:
        _check_token("banned_tokens", token, vocab_size)
        bias[token] = -math.inf
    return bias


def _check_token(name: str, token: object, vocab_size: int) -> None:
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
        refuse(name, f"id {token!r}", f"ids from 0 to {vocab_size - 1}")
