"""Tensors of every form in every argument of a public function: results are those of a plain copy, or one error names
the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.forms import check_same_forms, other, results

from specdec_kernels import SamplingParams, TokenTable, draft_children, draft_step, speculative_step, verify_tree

B, K, V = 2, 3, 40


def longs(*shape: int, fill: int = 0) -> torch.Tensor:
    return torch.full(shape, fill, dtype=torch.int64)


def calls() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    torch.manual_seed(0)
    step = {"params": SamplingParams(), "seed": longs(B), "position": longs(B)}
    return {
        "draft_step": (
            draft_step,
            {**step, "logits": torch.randn(B, V), "offset": 0, "d2t": torch.arange(V),
             "allowed": torch.full((B, 2), -1, dtype=torch.int32)},
        ),
        "speculative_step": (
            speculative_step,
            {**step, "target_logits": torch.randn(B, K + 1, V), "draft_tokens": longs(B, K),
             "draft_logits": torch.randn(B, K, V), "num_drafts": longs(B, fill=K), "d2t": torch.arange(V),
             "allowed": torch.full((B, K + 1, 2), -1, dtype=torch.int32), "masked_drafts": 0},
        ),
        "draft_children": (
            draft_children,
            {**step, "logits": torch.randn(B, V), "width": 3, "offset": longs(B), "d2t": torch.arange(V)},
        ),
        "verify_tree": (
            verify_tree,
            {**step, "target_logits": torch.randn(B, K + 1, V), "node_tokens": longs(B, K), "rule": "token",
             "parents": torch.tensor([-1, 0, 1]), "draft_logits": torch.randn(B, K + 1, V),
             "num_nodes": longs(B, fill=K)},
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls())
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_forms_of_tensors(backend, name):
    call, plain = calls()[name]
    for argument, value in plain.items():
        if not isinstance(value, torch.Tensor):
            continue
        check_same_forms(call, plain, argument, backend=backend)
        for form, tensor in other(value):
            try:
                results(call(**{**plain, argument: tensor}, backend=backend))
            except ValueError as error:
                # The first argument says what the others have to be like.
                of_first = form == "meta" and "where the logits are" in str(error)
                assert argument in str(error) or of_first, (argument, form, error)
            except RuntimeError as error:
                assert form == "meta" and "cannot run here: " in str(error), (argument, form, error)
            else:
                raise AssertionError(f"{argument} as {form} was taken")


@pytest.mark.parametrize("backend", ["cpu", "reference", "auto"])
def test_all_on_meta_is_refused(backend):
    with pytest.raises(RuntimeError, match="^backend .* cannot run here: .*meta"):
        draft_step(torch.empty(B, V, device="meta"), SamplingParams(), seed=0, position=0, offset=0, backend=backend)


@pytest.mark.parametrize("field", ["bias", "ids", "count"])
def test_tables_of_lazy_views_are_refused(field):
    """The dispatcher resolves none in a list of tensors, so a kernel would read numbers of the other sign."""
    ones = torch.ones(B, 1)
    table = TokenTable(3 * ones.long(), ones, ones.bool(), ones.int())
    lazy = table._replace(**{field: torch._neg_view(getattr(table, field))})
    options = {"params": SamplingParams(), "seed": 0, "position": 0, "offset": 0}
    with pytest.raises(ValueError, match=rf"^table.{field}: got a view that negates"):
        draft_step(torch.zeros(B, V), table=lazy, **options)


@pytest.mark.parametrize(
    "value", [torch.ones(B, device="meta"), torch.ones(B).to_sparse(), torch._neg_view(-torch.ones(B))]
)
def test_parameters_without_numbers_in_memory_are_refused(value):
    with pytest.raises(ValueError, match="^temperature: got a tensor of "):
        SamplingParams(temperature=value)
