"""Schemas and fakes of every operation: the contract that native code and backends implement. Imports torch only.

Each operation exists once for native code (``draft_step``: the dispatcher picks CPU or CUDA by the tensors' device) and
once for every Python backend (``draft_step_reference``). All are pure functions of their tensors, but for
``advance_rows``, which writes its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

NAMESPACE = "specdec_kernels"
VARIANTS = ("", "_reference", "_triton")
WORD_BITS = 32  # tokens of one word of `allowed`, the lowest bit first
RULES = ("token", "block", "coupled")  # operations take a rule as its index here
TREE_RULES = ("walk", "token", "block")  # verify_tree's


class SamplingTensors(NamedTuple):
    """What turns the raw logits of every sequence into a distribution, as the operations take it. A decoding loop keeps
    these tensors from step to step, and passes them instead of ``SamplingParams`` and ``TokenTable``: nothing is then
    launched to prepare them. Their values must be known to be allowed; they are not read, so nothing waits for a GPU.
    """

    temperature: torch.Tensor  # [B] float32
    filters: torch.Tensor | None = None  # [B, 3] float32: top_k, top_p, min_p; None: all are off
    penalties: torch.Tensor | None = None  # [B, 3] float32: repetition, presence, frequency; None: all are off
    table_ids: torch.Tensor | None = None  # [B, N] int64, as in TokenTable; None: no table, and so no penalties
    table_bias: torch.Tensor | None = None  # [B, N] float32
    table_in_prompt: torch.Tensor | None = None  # [B, N] bool
    table_count: torch.Tensor | None = None  # [B, N] int32
    ends: torch.Tensor | None = None  # [B, E] int64
    first_end: torch.Tensor | None = None  # [B] int64; None if ends is None

    def table(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """(ids, bias, in_prompt, count) of the table, [B, N] each; None if there is none."""
        ids, bias, in_prompt, count = self.table_ids, self.table_bias, self.table_in_prompt, self.table_count
        if ids is None or bias is None or in_prompt is None or count is None:
            return None
        return ids, bias, in_prompt, count

    def repeated(self, times: int) -> SamplingTensors:
        """Returns the settings with every sequence's ``times`` times, copies next to each other."""
        return SamplingTensors(*(None if t is None else t.repeat_interleave(times, 0) for t in self))  # type: ignore[arg-type]


# `sampling`: the nine SamplingTensors in their order, of which only the temperature is always there; as a list, which
# the dispatcher reads faster than a tuple.
SCHEMAS = {
    # drafts [B, offset]: the step's drafts before this one, which the penalties count; d2t [V]: ascending target ids of
    # the draft's vocabulary; allowed [B, W]: bits by the target's ids.
    "draft_step": (
        "(Tensor logits, Tensor?[] sampling, Tensor? drafts, Tensor? d2t, Tensor? allowed, Tensor seed,"
        " Tensor position, int offset, int rule) -> (Tensor tokens, Tensor log_q, Tensor cutoff, Tensor lse,"
        " Tensor status)"
    ),
    # draft_logits [B, K, V], with d2t [B, K, length of d2t]; without them, q is one-hot. allowed [B, K+1, W], of which
    # the first `masked_drafts` rows hold for the draft's logits, too.
    "speculative_step": (
        "(Tensor target_logits, Tensor draft_tokens, Tensor? draft_logits, Tensor? draft_cutoff, Tensor? draft_lse,"
        " Tensor? d2t, Tensor? num_drafts, Tensor?[] sampling, Tensor? allowed, int masked_drafts, Tensor seed,"
        " Tensor position, int rule, bool log_probs) -> (Tensor tokens, Tensor num_accepted, Tensor status,"
        " Tensor num_emitted, Tensor log_probs, Tensor raw_log_probs)"
    ),
    # drafts [B, depth]: the tokens from the root's child down to the node; offset [B]: the row of the node in the tree.
    "draft_children": (
        "(Tensor logits, Tensor?[] sampling, Tensor? drafts, Tensor? d2t, Tensor seed, Tensor position, Tensor offset,"
        " int width, bool sampled) -> (Tensor tokens, Tensor log_q, Tensor cutoff, Tensor lse, Tensor status)"
    ),
    # parents [B, N]; draft_logits [B, N+1, V] (with d2t: [B, N+1, length of d2t]); depth: D, of which results have D +
    # 1 columns.
    "verify_tree": (
        "(Tensor target_logits, Tensor node_tokens, Tensor parents, Tensor? draft_logits, Tensor? d2t,"
        " Tensor? num_nodes, Tensor?[] sampling, Tensor seed, Tensor position, int rule, int depth) -> (Tensor path,"
        " Tensor tokens, Tensor num_accepted, Tensor num_emitted, Tensor status)"
    ),
    # known, room, wanted [n]; positions, slots [n, num_drafts + 2]; the others [n].
    "place_rows": (
        "(Tensor known, Tensor room, Tensor wanted, int num_drafts, int trash) -> (Tensor lengths, Tensor positions,"
        " Tensor slots, Tensor allowed, Tensor live)"
    ),
    # state [5 + E, n]; tokens [n, D]; num_emitted, status [n] int32; faults: bits of a status that end a sequence.
    "advance_rows": "(Tensor(a!) state, Tensor tokens, Tensor num_emitted, Tensor status, int faults) -> Tensor",
}


def statistics_dtype(logits: torch.Tensor) -> torch.dtype:
    """dtype of log-probabilities, cutoff and lse: float64 for float64 logits (``reference`` only), else float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _draft_step_fake(logits, *rest):
    (batch, _), dtype = logits.shape, statistics_dtype(logits)
    return (
        logits.new_empty((batch,), dtype=torch.int64),
        *(logits.new_empty((batch,), dtype=dtype) for _ in range(3)),
        logits.new_empty((batch,), dtype=torch.int32),
    )


def _speculative_step_fake(target_logits, *rest):
    batch, rows, _ = target_logits.shape
    counts = [target_logits.new_empty((batch,), dtype=torch.int32) for _ in range(3)]
    columns, dtype = rows if rest[-1] else 0, statistics_dtype(target_logits)
    logs = [target_logits.new_empty((batch, columns), dtype=dtype) for _ in range(2)]
    return (target_logits.new_empty((batch, rows), dtype=torch.int64), *counts, *logs)


def _draft_children_fake(logits, *rest):
    (batch, _), dtype, width = logits.shape, statistics_dtype(logits), rest[-2]
    return (
        logits.new_empty((batch, width), dtype=torch.int64),
        logits.new_empty((batch, width), dtype=dtype),
        *(logits.new_empty((batch,), dtype=dtype) for _ in range(2)),
        logits.new_empty((batch,), dtype=torch.int32),
    )


def _verify_tree_fake(target_logits, *rest):
    batch, columns = target_logits.shape[0], rest[-1] + 1
    paths = [target_logits.new_empty((batch, columns), dtype=torch.int64) for _ in range(2)]
    return (*paths, *(target_logits.new_empty((batch,), dtype=torch.int32) for _ in range(3)))


def _place_rows_fake(known, room, wanted, num_drafts, trash):
    (rows,), columns = known.shape, num_drafts + 2
    shapes = (rows,), (rows, columns), (rows, columns), (rows,)
    return (*(known.new_empty(shape) for shape in shapes), known.new_empty((rows,), dtype=torch.bool))


def _advance_rows_fake(state, *rest):
    return state.new_empty((state.shape[1],))


_FAKES = {
    "draft_step": _draft_step_fake,
    "speculative_step": _speculative_step_fake,
    "draft_children": _draft_children_fake,
    "verify_tree": _verify_tree_fake,
    "place_rows": _place_rows_fake,
    "advance_rows": _advance_rows_fake,
}


def _tensors(given: object) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, list | tuple):
        for part in given:
            yield from _tensors(part)


_library = torch.library.Library(NAMESPACE, "DEF")


def _define(schema: str, fake: Callable) -> None:
    """Defines an operation, and what stands in for it where no numbers are. One tensor on meta is enough to have that
    called, so it refuses those beside others, whose results would have no numbers either."""
    name = schema.partition("(")[0]

    def on_one_device(*given: object) -> object:
        devices = sorted({str(tensor.device) for tensor in _tensors(given)})
        if len(devices) > 1:
            raise RuntimeError(f"{name}: got tensors on {' and '.join(devices)}, allowed: one device")
        return fake(*given)

    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"{NAMESPACE}::{name}", on_one_device, lib=_library)


for _stem, _schema in SCHEMAS.items():
    for _variant in VARIANTS:
        _define(f"{_stem}{_variant}{_schema}", _FAKES[_stem])


def implement(name: str, function: Callable) -> None:
    """Registers a Python backend's implementation of the operation ``name``, for every device."""
    _library.impl(name, function, "CompositeExplicitAutograd")


def handle(name: str) -> torch._ops.OpOverload:
    """The callable of one operation, e.g. ``handle("draft_step_reference")``."""
    return getattr(getattr(torch.ops, NAMESPACE), name).default
