"""Checks the callers' sampling settings once, and converts them to the form that every step uses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch

from specdec_kernels import Rule, SamplingParams

from ..checks import read_count, refuse

Bias = dict[int, float]  # token -> number that is added to its logit; -inf bans the token


def read_params(params: SamplingParams | None, batch_size: int, device: torch.device) -> SamplingParams:
    """Returns ``params`` (None: greedy) as [B] tensors on ``device``, made once for all steps. Parameters without an
    effect become None: those that are neutral everywhere, and filters if the whole batch is greedy."""
    params = SamplingParams(temperature=0.0) if params is None else params
    if not isinstance(params, SamplingParams):
        refuse("params", type(params).__name__, "a SamplingParams")
    columns: dict[str, torch.Tensor] = {}
    for field in dataclasses.fields(params):
        name, given = field.name, getattr(params, field.name)
        if given is None:
            continue
        value = torch.as_tensor(given)
        if value.dim() == 1 and value.shape[0] != batch_size:
            refuse(f"params.{name}", f"shape {list(value.shape)}", f"a number or shape [{batch_size}]")
        if name == "temperature" or torch.any(value != SamplingParams.neutral(name)):
            dtype = torch.int64 if name == "top_k" else torch.float32
            columns[name] = value.to(device, dtype).expand(batch_size).contiguous()
    if not columns["temperature"].any():
        columns = {name: value for name, value in columns.items() if name not in SamplingParams.FILTERS}
    return SamplingParams(**columns)


def of_each(params: SamplingParams, batch_size: int) -> list[dict[str, float]]:
    """Returns all parameters of each sequence by name, with the neutral value for those that are off. ``params`` must
    come from ``read_params``."""
    columns = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        columns[field.name] = [SamplingParams.neutral(field.name)] * batch_size if value is None else value.tolist()
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def repeat_params(params: SamplingParams, times: int) -> SamplingParams:
    """Returns the parameters with every sequence repeated ``times`` times, copies next to each other. ``params`` must
    come from ``read_params``."""
    columns = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    return SamplingParams(**{n: v.repeat_interleave(times) for n, v in columns.items() if v is not None})


def repeated_rows(params: SamplingParams, times: int) -> SamplingParams:
    """Does what ``repeat_params`` does for parameters that ``SamplingParams.packed`` made. Their values are not
    read."""

    def stacked(names: tuple[str, ...]) -> torch.Tensor | None:
        columns = [c for name in names if (c := getattr(params, name)) is not None]
        return torch.stack(columns, 1).repeat_interleave(times, 0) if columns else None

    temperature = torch.as_tensor(params.temperature).repeat_interleave(times, 0)
    return SamplingParams.packed(temperature, stacked(SamplingParams.FILTERS), stacked(SamplingParams.PENALTIES))


def read_rule(rule: str, compact_q: int) -> Rule:
    """Returns the rule. Raises ValueError if it is unknown, or cannot be combined with ``compact_q``."""
    known = Rule(rule)  # raises for an unknown rule
    if read_count("compact_q", compact_q) > SamplingParams.MAX_COMPACT:
        refuse("compact_q", compact_q, f"an integer from 0 (off) to {SamplingParams.MAX_COMPACT}")
    if compact_q and known == Rule.COUPLED:
        refuse("compact_q", compact_q, "0 with rule='coupled', which needs no q")
    return known


def read_bias(
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None,
    banned_tokens: Sequence[int] | Sequence[Sequence[int]] | None,
    batch_size: int,
    vocab_size: int,
) -> list[Bias]:
    """Returns the biases of every sequence; a banned token has -inf."""
    if logit_bias is None or isinstance(logit_bias, Mapping):
        logit_bias = [logit_bias] * batch_size
    banned: Sequence = [] if banned_tokens is None else banned_tokens
    if not isinstance(banned, Sequence):
        refuse("banned_tokens", repr(banned), "a list of ids, or one for each sequence")
    if all(isinstance(token, int) for token in banned):
        banned = [banned] * batch_size
    for name, given in (("logit_bias", logit_bias), ("banned_tokens", banned)):
        if not isinstance(given, Sequence) or len(given) != batch_size:
            refuse(name, repr(given), f"one for all, or a list of {batch_size}, one for each sequence")
    whole: list[Bias] = []
    for of_sequence, forbidden in zip(logit_bias, banned, strict=True):
        if not isinstance(of_sequence, Mapping | None):
            refuse("logit_bias", repr(of_sequence), "a dict of ids and numbers")
        if not isinstance(forbidden, Sequence):
            refuse("banned_tokens", repr(forbidden), "a list of ids")
        bias = {**(of_sequence or {})}
        for token, value in bias.items():
            _check_token("logit_bias", token, vocab_size)
            # The kernels use float32, in which a larger number would be infinite.
            fine = isinstance(value, (int, float)) and (value == -math.inf or abs(value) <= _LARGEST)
            if isinstance(value, bool) or not fine:
                refuse("logit_bias", f"{value!r} for id {token}", "a finite number, or -inf (never this token)")
        for token in forbidden:
            _check_token("banned_tokens", token, vocab_size)
            bias[token] = -math.inf
        whole.append(bias)
    return whole


_LARGEST = torch.finfo(torch.float32).max


def _check_token(name: str, token: object, vocab_size: int) -> None:
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
        refuse(name, f"id {token!r}", f"ids from 0 to {vocab_size - 1}")


def read_min_new_tokens(
    min_new_tokens: int | Sequence[int] | torch.Tensor, batch_size: int, max_new_tokens: int
) -> list[int]:
    """Returns, for each sequence, how many tokens it must emit before it may end."""
    counts = min_new_tokens.tolist() if isinstance(min_new_tokens, torch.Tensor) else min_new_tokens
    counts = counts if isinstance(counts, Sequence) else [counts] * batch_size
    right = all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= max_new_tokens for n in counts)
    if not right or len(counts) != batch_size:
        allowed = f"an integer from 0 to max_new_tokens = {max_new_tokens}"
        refuse("min_new_tokens", repr(min_new_tokens), f"{allowed}, or one for each of the {batch_size} sequences")
    return list(counts)
