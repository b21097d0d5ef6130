"""Forms in which a public function may be given a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


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


def check_same_forms(call: Callable[..., Any], plain: dict[str, Any], argument: str, **given: Any) -> None:
    """Results are those of a plain copy, or an error names the argument."""
    expected = results(call(**plain, **given))
    for form, tensor in same(plain[argument]):
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
