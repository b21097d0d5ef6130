"""Checks of everything that callers pass, once for all backends. Every error names the argument, what was given and
what is allowed. Values on a GPU are not read, since that would wait for the GPU; kernels are defined for all values.
"""

from __future__ import annotations

import functools
from typing import NoReturn

import torch
from torch.compiler import is_compiling

from .ops import RULES, TREE_RULES, WORD_BITS, SamplingTensors, statistics_dtype
from .types import TABLE_PADDING, Rule, SamplingParams, TokenTable, TreeRule

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTEGER_DTYPES = (torch.int64, torch.int32)


def refuse(name: str, given: object, allowed: str) -> NoReturn:
    raise ValueError(f"{name}: got {given}, allowed: {allowed}")


def check_form(name: str, tensor: torch.Tensor) -> None:
    """Refuses a tensor whose memory is none of numbers in rows: kernels read nothing else."""
    if tensor.layout != torch.strided or tensor.is_nested:
        form = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        refuse(name, f"a tensor of the layout {form}", "one of torch.strided (to_dense())")
    if not is_compiling() and tensor.is_neg():  # of which nothing resolves those in lists of tensors
        refuse(name, "a view that negates numbers when they are read", "resolve_neg() of it")


def check_logits(name: str, logits: torch.Tensor, shape: str, *, reference: bool) -> None:
    if not isinstance(logits, torch.Tensor):
        refuse(name, type(logits).__name__, f"a tensor {shape}")
    check_form(name, logits)
    if logits.dim() != shape.count(",") + 1:
        refuse(name, f"shape {list(logits.shape)}", shape)
    if logits.dtype not in LOGIT_DTYPES and not (reference and logits.dtype == torch.float64):
        refuse(name, logits.dtype, "float32, bfloat16, float16 (and float64 with backend='reference')")
    if logits.shape[-1] < 1:
        refuse(name, f"shape {list(logits.shape)}", f"{shape} with V >= 1")


def check_like(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple, device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor):
        refuse(name, type(tensor).__name__, f"a tensor of shape {list(shape)}")
    check_form(name, tensor)
    if tensor.shape != shape:
        refuse(name, f"shape {list(tensor.shape)}", f"shape {list(shape)}")
    if tensor.dtype not in dtypes:
        refuse(name, tensor.dtype, " or ".join(str(d).removeprefix("torch.") for d in dtypes))
    if tensor.device != device:
        refuse(name, f"a tensor on {tensor.device}", f"{device}, where the logits are")


def as_int64(tensor: torch.Tensor) -> torch.Tensor:
    """What ``to`` would return, which takes longer to find that there is nothing to do than all checks of a tensor."""
    return tensor if tensor.dtype is torch.int64 else tensor.to(torch.int64)


def check_rule(rule: str) -> int:
    """The rule as the operations take it: its index in ``RULES``."""
    if rule not in RULES:
        Rule(rule)  # raises
    return RULES.index(rule)


def check_tree_rule(rule: str) -> int:
    """The same for the rules of trees: its index in ``TREE_RULES``."""
    if rule not in TREE_RULES:
        TreeRule(rule)  # raises
    return TREE_RULES.index(rule)


def sampling_of(
    params: SamplingParams | SamplingTensors, table: TokenTable | None, batch: int, device: torch.device
) -> SamplingTensors:
    """``params`` and ``table`` as the operations take them. The values of ``params`` were checked when it was made."""
    if isinstance(params, SamplingTensors):
        if table is not None:
            refuse("table", "a TokenTable beside SamplingTensors", "None: they hold the table")
        check_like("params.temperature", params.temperature, (batch,), (torch.float32,), device)
        if params.filters is not None:
            check_like("params.filters", params.filters, (batch, 3), (torch.float32,), device)
        if params.penalties is not None:
            check_like("params.penalties", params.penalties, (batch, 3), (torch.float32,), device)
        return params
    if not isinstance(params, SamplingParams):
        refuse("params", type(params).__name__, "a SamplingParams")
    temperature = _column(params, "temperature", batch, device)
    filters = _columns(params, SamplingParams.FILTERS, temperature, device)
    if table is None:
        if params.uses(SamplingParams.PENALTIES):
            refuse("table", "None with penalties in params", "a TokenTable")
        return SamplingTensors(temperature, filters)
    ends, first_end = check_table(table, batch, device)
    penalties = _columns(params, SamplingParams.PENALTIES, temperature, device)
    return SamplingTensors(temperature, filters, penalties, *table[:4], ends, first_end)


def check_table(table: TokenTable, batch: int, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Refuses a table with a wrong shape, dtype, device or order; returns its (ends, first_end)."""
    if not isinstance(table, TokenTable):
        refuse("table", type(table).__name__, "a TokenTable")
    if not isinstance(table.ids, torch.Tensor) or table.ids.dim() != 2:
        refuse("table.ids", getattr(table.ids, "shape", table.ids), "a tensor [B, N]")
    shape = (batch, table.ids.shape[1])
    for name, dtype in (
        ("ids", torch.int64),
        ("bias", torch.float32),
        ("in_prompt", torch.bool),
        ("count", torch.int32),
    ):
        check_like(f"table.{name}", getattr(table, name), shape, (dtype,), device)
    check_ascending("table.ids", table.ids, TABLE_PADDING)
    if (table.ends is None) != (table.first_end is None):
        refuse("table.ends / table.first_end", "one of them", "both or neither")
    if table.ends is None or table.first_end is None:
        return None, None
    if not isinstance(table.ends, torch.Tensor) or table.ends.dim() != 2:
        refuse("table.ends", getattr(table.ends, "shape", table.ends), "a tensor [B, E]")
    check_like("table.ends", table.ends, (batch, table.ends.shape[1]), (torch.int64,), device)
    return table.ends, per_sequence("table.first_end", table.first_end, batch, device, lowest=0)


def check_ascending(name: str, ids: torch.Tensor, padding: int | None = None) -> None:
    """Checks that ids ascend up to ``padding``: on a CPU, but not while torch.compile traces."""
    if ids.device.type == "cpu" and not is_compiling() and ids.numel():
        wrong = ids[..., 1:] <= ids[..., :-1]
        if padding is not None:
            wrong &= ids[..., 1:] < padding
        if wrong.any() or bool((ids < 0).any()):
            refuse(name, "ids that are negative or do not ascend", "ascending ids >= 0, each once")


def _columns(
    params: SamplingParams, names: tuple[str, ...], temperature: torch.Tensor, device: torch.device
) -> torch.Tensor | None:
    """[B, 3] float32, or None if these parameters are off. ``temperature``: [B], of the same call."""
    if not params.uses(names):
        return None
    batch, values = temperature.shape[0], tuple([getattr(params, name) for name in names])
    if any([isinstance(value, torch.Tensor) for value in values]):
        return torch.stack([_column(params, name, batch, device) for name in names], 1)
    # What a tracer takes for tensors is of another type.
    stream = _stream_of_constants(device) if type(temperature) is torch.Tensor else None
    if stream is None:
        return _columns_of_numbers(names, values, batch, device)
    return _kept_columns(names, values, batch, device, stream)


def _columns_of_numbers(
    names: tuple[str, ...], values: tuple[float | None, ...], batch: int, device: torch.device
) -> torch.Tensor:
    numbers = [SamplingParams.neutral(n) if value is None else value for n, value in zip(names, values, strict=True)]
    columns = [torch.full((batch,), float(value), dtype=torch.float32, device=device) for value in numbers]
    return torch.stack(columns, 1)


@functools.lru_cache(maxsize=256)
def _kept_columns(
    names: tuple[str, ...], values: tuple[float | None, ...], batch: int, device: torch.device, stream: int
) -> torch.Tensor:
    """What ``_columns_of_numbers`` gives by four launches, and nobody writes: most users give the same numbers in every
    call."""
    with torch.inference_mode(False):
        return _columns_of_numbers(names, values, batch, device)


def _stream_of_constants(device: torch.device) -> int | None:
    """The stream on which a tensor may be kept for later calls; None: it may not.

    What is made on a stream is read there alone, and its memory is given back there, as the order of the stream says.
    What is made or read in a CUDA graph would have to live as long as the graph."""
    if is_compiling() or device.type not in ("cpu", "cuda"):
        return None
    if device.type == "cpu":
        return 0
    return None if torch.cuda.is_current_stream_capturing() else torch.cuda.current_stream(device).cuda_stream


def _column(params: SamplingParams, name: str, batch: int, device: torch.device) -> torch.Tensor:
    """[B] float32 on ``device``."""
    value = getattr(params, name)
    if value is None:
        value = SamplingParams.neutral(name)
    if not isinstance(value, torch.Tensor):
        return torch.full((batch,), float(value), dtype=torch.float32, device=device)
    if value.dim() == 1 and value.shape[0] != batch:
        refuse(f"params.{name}", f"shape {list(value.shape)}", f"a number or shape [{batch}]")
    return value.to(device=device, dtype=torch.float32).expand(batch)


def per_sequence(name: str, value: int | torch.Tensor, batch: int, device: torch.device, lowest: int) -> torch.Tensor:
    """[B] int64 on ``device`` from a number (the same for every sequence) or a [B] tensor."""
    if isinstance(value, torch.Tensor):
        check_like(name, value, (batch,), INTEGER_DTYPES, device)
        return as_int64(value)
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value < 2**63:
        refuse(name, repr(value), f"an integer from {lowest} to 2**63 - 1, or an int64 tensor of shape [{batch}]")
    return torch.full((batch,), value, dtype=torch.int64, device=device)


def check_counts(name: str, counts: torch.Tensor, most: int, letter: str) -> None:
    """Checks the values on a CPU, but not while torch.compile traces. Kernels clamp them to [0, most]."""
    if counts.device.type == "cpu" and not is_compiling() and counts.numel():
        low, high = (int(v) for v in torch.aminmax(counts))
        if low < 0 or high > most:
            refuse(name, f"values from {low} to {high}", f"0 to {letter} = {most}")


def check_d2t(d2t: torch.Tensor, draft_vocabulary: int, device: torch.device) -> None:
    check_like("d2t", d2t, (draft_vocabulary,), (torch.int64,), device)
    check_ascending("d2t", d2t)


def check_allowed(
    allowed: torch.Tensor, rows: tuple[int, ...], vocabulary: int, device: torch.device, d2t: torch.Tensor | None = None
) -> None:
    """Refuses ``allowed`` that is not [*rows, W]. ``d2t``: the map of a reduced vocabulary, for whose ids any number of
    words is enough that has a bit for the last one."""
    if d2t is None:
        return check_like("allowed", allowed, (*rows, -(-vocabulary // WORD_BITS)), (torch.int32,), device)
    if not isinstance(allowed, torch.Tensor) or allowed.dim() != len(rows) + 1:
        refuse("allowed", getattr(allowed, "shape", type(allowed).__name__), f"a tensor {[*rows, 'W']}")
    check_form("allowed", allowed)
    words = allowed.shape[-1]
    check_like("allowed", allowed, (*rows, words), (torch.int32,), device)
    if device.type == "cpu" and not is_compiling() and d2t[-1] >= WORD_BITS * words:
        refuse("allowed", f"{words} words", f"words for all ids of d2t, up to {int(d2t[-1])}")


def check_q(
    draft_logits: torch.Tensor | None,
    draft_stats: tuple[torch.Tensor, torch.Tensor] | None,
    d2t: torch.Tensor | None,
    drafts: tuple[int, int],
    vocabulary: int,
    device: torch.device,
    rule: str,
    backend: str,
) -> tuple:
    """Checks the form of q that was given. Returns (draft_logits, cutoff, lse, d2t); None for what was not."""
    if rule == Rule.COUPLED:
        for name, value in (("draft_logits", draft_logits), ("draft_stats", draft_stats), ("d2t", d2t)):
            if value is not None:
                refuse(name, f"a value with rule={str(rule)!r}", "None: this rule needs no q")
    cutoff = lse = None
    check_draft_logits(draft_logits, d2t, "[B, K, V]", drafts, vocabulary, device, backend)
    if draft_stats is not None:
        if draft_logits is None:
            refuse("draft_stats", "statistics", "None where draft_logits is")
        if not isinstance(draft_stats, (tuple, list)) or len(draft_stats) != 2:
            refuse("draft_stats", type(draft_stats).__name__, "a pair (cutoff, lse)")
        cutoff, lse = draft_stats
        dtypes = (statistics_dtype(draft_logits),)
        check_like("draft_stats cutoff", cutoff, drafts, dtypes, device)
        check_like("draft_stats lse", lse, drafts, dtypes, device)
    return draft_logits, cutoff, lse, d2t


def check_draft_logits(
    draft_logits: torch.Tensor | None,
    d2t: torch.Tensor | None,
    shape: str,
    rows: tuple[int, int],
    vocabulary: int,
    device: torch.device,
    backend: str,
) -> None:
    """Refuses logits of q, ``rows`` of the target's vocabulary or of that of ``d2t``, that are not of this
    ``shape``."""
    if draft_logits is None:
        if d2t is not None:
            refuse("d2t", "a map", "None where draft_logits is")
        return
    check_logits("draft_logits", draft_logits, shape, reference=backend == "reference")
    if d2t is not None:
        check_d2t(d2t, draft_logits.shape[-1], device)
        if d2t.device.type == "cpu" and not is_compiling() and d2t[-1] >= vocabulary:
            refuse("d2t", f"an id of {int(d2t[-1])}", f"ids below {vocabulary}, the target's vocabulary")
        vocabulary = draft_logits.shape[-1]
    check_like("draft_logits", draft_logits, (*rows, vocabulary), (draft_logits.dtype,), device)


def check_parents(parents: torch.Tensor, batch: int, nodes: int, device: torch.device) -> torch.Tensor:
    """[B, N] int64 from [N] or [B, N]. Their values are checked on a CPU, but not while torch.compile traces. To
    kernels, a node whose parent does not come before it is in no tree."""
    if isinstance(parents, torch.Tensor) and parents.dim() == 1:
        check_like("parents", parents, (nodes,), INTEGER_DTYPES, device)
    else:
        check_like("parents", parents, (batch, nodes), INTEGER_DTYPES, device)
    if device.type == "cpu" and not is_compiling():
        wrong = (parents < -1) | (parents >= torch.arange(nodes))
        if wrong.any():
            at = wrong.nonzero()[0]
            refuse(
                "parents", f"{int(parents[*at])} for node {int(at[-1])}", "-1 (the root), or a node before the child"
            )
    return as_int64(parents).expand(batch, nodes)
