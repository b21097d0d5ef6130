"""A sequence's result is its own: it does not depend on its neighbours, its place in the batch, padding, memory layout
or the number of threads, bitwise."""

from __future__ import annotations

import itertools

import pytest
import torch
from support import BACKENDS
from support.arrangements import LAYOUTS, identical

from specdec_kernels import SamplingParams
from specdec_kernels.ops import RULES
from specdec_kernels.testing import StepInputs, device_of, random_step

MIXED = (0.0, 0.5, 1.0, 1.7)
SAMPLING = {
    "temperature": MIXED,
    "top_k": (0, 20, 1, 0, 5),
    "top_p": (1.0, 0.9, 0.3),
    "min_p": (0.0, 0.02),
    "repetition_penalty": (1.0, 1.3),
    "frequency_penalty": (0.2, 0.0, -0.1),
}
# random_step's arguments: every rule with every form of q, with filters, penalties and temperatures.
CASES = {
    "token": {},
    "token full": {"table": 6, **SAMPLING},
    "token stats": {"stats": True, "table": 6, **SAMPLING},
    "token reduced": {"reduced": 25, "table": 6, **SAMPLING},
    "token one_hot": {"kind": "one_hot", "table": 6, **SAMPLING},
    "block": {"rule": "block"},
    "block full": {"rule": "block", "table": 6, **SAMPLING},
    "block stats": {"rule": "block", "stats": True, "table": 6, **SAMPLING},
    "block reduced": {"rule": "block", "reduced": 25, "table": 6, **SAMPLING},
    "coupled": {"rule": "coupled", "table": 6, **SAMPLING},
}
# Triton's interpreter runs a part of them.
TRIED = [
    (backend, name)
    for backend, name in itertools.product(BACKENDS, CASES)
    if device_of(backend).type == "cuda" or backend != "triton" or name in ("token stats", "block reduced", "coupled")
]
every_case = pytest.mark.parametrize(("backend", "name"), TRIED)


def case(name: str, batch: int, num_drafts: int = 3, vocabulary: int = 40, **more) -> StepInputs:
    return random_step(batch, num_drafts, vocabulary, log_probs=True, **CASES[name], **more)


def rows_of(inputs: StepInputs, index: torch.Tensor) -> StepInputs:
    return inputs.map(lambda t: t[index] if t.dim() else t)


@every_case
@pytest.mark.parametrize("vocabulary", [40, 1500])
def test_batch_invariance(backend, name, vocabulary):
    """The same results, bit for bit, in a permuted batch, alone, and beside others with another K and other
    settings."""
    batch = 6 if backend != "triton" else 4
    inputs = case(name, batch, 3 if backend != "triton" else 1, vocabulary, random_state=5)
    inputs = inputs.replace(num_drafts=torch.arange(batch) % inputs.target_logits.shape[1])
    together = inputs.run(backend)
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(0))
    assert identical(rows_of(inputs, order).run(backend), (t[order] for t in together))
    for b in (1, 3):
        assert identical(rows_of(inputs, torch.tensor([b])).run(backend), (t[b : b + 1] for t in together))


@every_case
def test_padding_to_a_larger_k_changes_nothing(backend, name):
    """A sequence with 2 drafts in a batch with K = 2, and the same padded to K = 4 with garbage after its drafts."""
    inputs = case(name, 5, 2, random_state=6)

    def pad(t: torch.Tensor | None, value: float) -> torch.Tensor | None:
        return None if t is None else torch.cat([t, torch.full_like(t[:, :1], value).expand(-1, 2, *t.shape[2:])], 1)

    nan = float("nan")
    wide = inputs.replace(
        target_logits=pad(inputs.target_logits, nan),
        draft_tokens=pad(inputs.draft_tokens, 3),
        draft_logits=pad(inputs.draft_logits, nan),
        draft_stats=inputs.draft_stats and tuple(pad(t, nan) for t in inputs.draft_stats),
        num_drafts=torch.full((5,), 2),
    ).run(backend)
    narrow = inputs.run(backend)
    assert (wide.tokens[:, 3:] == -1).all() and wide.log_probs[:, 3:].isnan().all()
    assert identical((t[:, :3] if t.dim() == 2 else t for t in wide), narrow)


@every_case
def test_wider_tables_change_nothing(backend, name):
    """A table may be padded, whatever its other columns hold in the padding."""
    inputs = case(name, 4, random_state=8)
    if inputs.table is None:
        inputs = inputs.replace(table=random_step(4, 3, 40, table=0).table._replace(ends=None, first_end=None))
    padding = torch.full((4, 3), SamplingParams.TABLE_PADDING)
    more = (padding, torch.full((4, 3), 3.0), torch.ones(4, 3, dtype=torch.bool), torch.full((4, 3), 2).int())
    columns = (torch.cat(pair, 1) for pair in zip(inputs.table[:4], more, strict=True))
    wide = inputs.replace(table=type(inputs.table)(*columns, *inputs.table[4:]))
    assert identical(wide.run(backend), inputs.run(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_table_that_others_need_changes_nothing(backend):
    """Sequences without an entry in the batch's table have the same results as in a batch without a table, for which a
    backend may have other kernels."""
    inputs = random_step(2, 1, 1500, temperature=(0.7, 1.3), log_probs=True, random_state=9)
    table = random_step(2, 1, 1500, table=0).table._replace(ends=None, first_end=None)
    assert identical(inputs.replace(table=table).run(backend), inputs.run(backend))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("batch", [1, 7])
def test_threads_change_nothing(batch, rule):
    options = {"rule": rule, "temperature": (0.8, 0.5), "top_k": (0, 900), "top_p": (0.95, 1.0), "table": 5}
    inputs = random_step(batch, 3, 40_000, random_state=7, drafter="cpu", log_probs=True, **options)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append([*inputs.run("cpu"), *inputs.draft(inputs.target_logits[:, 0], 0, "cpu")])
    assert identical(results[1], results[0]) and identical(results[2], results[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels keep their constants")
def test_tiles_change_nothing(monkeypatch):
    """How many parts of a row Triton's filters read at once has no effect. Only a mass within rounding of top_p could
    show one."""
    from specdec_kernels.backends.triton import stages

    options = {"temperature": (0.8, 0.5), "top_k": (0, 900), "top_p": (0.95, 1.0), "min_p": 0.001}
    inputs = random_step(2, 1, 2100, random_state=7, **options)
    wide = inputs.run("triton")
    for parts in (4, 8):
        monkeypatch.setattr(stages, "parts_at_once", lambda kernel, table, parts=parts: parts)
        assert identical(inputs.run("triton"), wide)


# ---- Layouts ---------------------------------------------------------------------------------------------------------


# Two layouts for every case, in turn.
IN_LAYOUTS = [
    (*tried, layout)
    for i, tried in enumerate(TRIED)
    for j, layout in enumerate(sorted(LAYOUTS.keys() - {"contiguous"}))
    if (i + j) % 2
]


@pytest.mark.parametrize(("backend", "name", "layout"), IN_LAYOUTS)
def test_layouts_are_bitwise_equal(backend, name, layout):
    inputs = case(name, 4, 2, 70, random_state=1)
    assert identical(inputs.map(LAYOUTS[layout]).run(backend), inputs.run(backend))


@pytest.mark.parametrize("rule", RULES)
def test_expanded_views(backend, rule):
    """Batches with stride 0: one row of logits, one table and many seeds."""
    inputs = random_step(1, 2, 40, random_state=2, rule=rule, table=6, top_k=(20,), presence_penalty=(0.3,))
    n = 2 if backend == "triton" else 6
    many = inputs.map(lambda t: t.expand(n, *t.shape[1:]) if t.dim() else t).replace(seed=torch.arange(n))
    assert identical(many.run(backend), many.map(lambda t: t.contiguous()).run(backend))


def test_numbers_and_tensors_are_the_same_arguments(backend):
    inputs = random_step(3, 1, 20, temperature=0.5, random_state=4, top_k=5, top_p=0.9, min_p=0.01)
    values = {"temperature": 0.5, "top_p": 0.9, "min_p": 0.01}
    tensors = inputs.replace(
        seed=torch.full((3,), -5),
        position=torch.full((3,), 7),
        params=SamplingParams(top_k=torch.full((3,), 5), **{k: torch.full((3,), v) for k, v in values.items()}),
    )
    numbers = inputs.replace(seed=-5, position=7, draft_tokens=inputs.draft_tokens.int())
    assert identical(tensors.run(backend), numbers.run(backend))
