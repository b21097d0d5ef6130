"""Tensors of every form in every argument of a public function: results are those of a plain copy, or one error names
the argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from specdec_kernels import (
    SamplingParams,
    TokenTable,
    add_linear,
    add_rms_norm,
    attend,
    draft_children,
    draft_step,
    gated,
    linear,
    norm_linear,
    rms_norm,
    rotate,
    speculative_step,
    verify_tree,
)

B, K, V = 2, 3, 40
SAMPLING = ("draft_step", "speculative_step", "draft_children", "verify_tree")


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
        "linear": (linear, {"x": torch.randn(1, 2, 32), "weight": torch.randn(16, 32), "bias": torch.randn(16)}),
        "norm_linear": (
            norm_linear,
            {"x": torch.randn(1, 2, 32), "norm_weight": torch.randn(32), "epsilon": 1e-6,
             "weight": torch.randn(16, 32), "bias": torch.randn(16), "activation": "silu"},
        ),
        "add_linear": (
            add_linear,
            {"base": torch.randn(1, 2, 16), "x": torch.randn(1, 2, 32), "weight": torch.randn(16, 32),
             "bias": torch.randn(16)},
        ),
        "rms_norm": (rms_norm, {"x": torch.randn(1, 2, 32), "weight": torch.randn(32), "epsilon": 1e-6}),
        "add_rms_norm": (
            add_rms_norm,
            {"x": torch.randn(1, 2, 32), "delta": torch.randn(1, 2, 32), "weight": torch.randn(32), "epsilon": 1e-6,
             "delta_weight": torch.randn(32), "delta_epsilon": 1e-6},
        ),
        "rotate": (rotate, {name: torch.randn(1, 2, 32)[:, None] if name == "x" else torch.randn(1, 2, 32)
                            for name in ("x", "cos", "sin")}),
        "gated": (gated, {"gate": torch.randn(1, 2, 32), "up": torch.randn(1, 2, 32), "activation": "silu"}),
        "attend": (
            attend,
            {"q": torch.randn(1, 2, 3, 8), "k": torch.randn(1, 2, 5, 8), "v": torch.randn(1, 2, 5, 8),
             "seen": torch.tensor([[[0, 3], [0, 4], [0, 5]]])},
        ),
    }  # fmt: skip


def same(t: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Other forms of the same numbers."""
    yield "strided", torch.stack([t, t], -1)[..., 0]
    yield "transposed", t.mT.contiguous().mT if t.dim() > 1 else t
    yield "parameter", torch.nn.Parameter(t, requires_grad=False)
    yield "expanded", t[:1].clone().expand_as(t) if torch.equal(t[:1].expand_as(t), t) else t
    if t.is_floating_point():
        yield "with gradients", t.clone().requires_grad_()
        yield "negated view", torch._neg_view(-t)
        yield "imaginary part of a conjugate", torch.complex(t, -t).conj().imag


def other(t: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """What is no such tensor."""
    yield "meta", t.to("meta")
    yield "sparse", t.to_sparse()
    yield "complex", t.to(torch.complex64)
    yield "int8", t.to(torch.int8)
    if t.is_floating_point():
        yield "quantised", torch.quantize_per_tensor(t, 0.1, 0, torch.quint8)
        yield "8 bits", t.to(torch.float8_e4m3fn)
        yield "mkldnn", t.to_mkldnn()
    if t.dim() > 1:
        yield "nested", torch.nested.nested_tensor([*t])
    yield from (("a list", t.tolist()), ("a text", "abc"), ("2^63", 2**63), ("-2^63 - 1", -(2**63) - 1))
    yield "a fraction", 0.5


def results(out: Any) -> list[torch.Tensor]:
    return [t for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor)]


BACKENDS = [("cpu", name) for name in calls()] + [("reference", name) for name in SAMPLING]


@pytest.mark.parametrize(("backend", "name"), BACKENDS)
def test_forms_of_tensors(backend, name):
    """Of layers, errors are PyTorch's own, RuntimeErrors, or those of the library about them."""
    call, plain = calls()[name]
    given = {"backend": backend} if name in SAMPLING else {}
    expected = results(call(**plain, **given))
    for argument, value in plain.items():
        if not isinstance(value, torch.Tensor):
            continue
        for form, tensor in same(value):
            try:
                got = results(call(**{**plain, argument: tensor}, **given))
            except ValueError as error:
                assert form in ("negated view", "imaginary part of a conjugate") and argument in str(error)
                continue
            wanted = expected
            if form == "imaginary part of a conjugate":
                wanted = results(call(**{**plain, argument: tensor.clone()}, **given))
            for a, b in zip(got, wanted, strict=True):
                assert torch.equal(a.detach().nan_to_num(7.0), b.nan_to_num(7.0)), (argument, form)
        for form, tensor in other(value):
            errors = (ValueError,) if name in SAMPLING else (ValueError, RuntimeError, AttributeError)
            try:
                got = results(call(**{**plain, argument: tensor}, **given))
            except errors as error:
                # The first argument says what the others have to be like.
                of_first = form == "meta" and "where the logits are" in str(error)
                assert argument in str(error) or of_first or name not in SAMPLING, (argument, form, error)
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
