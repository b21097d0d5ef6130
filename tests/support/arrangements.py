"""Steps written out by hand, memory layouts of their inputs, and bitwise equality of their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specdec_kernels import SamplingParams, draft_step
from specdec_kernels.ops import RULES
from specdec_kernels.testing import StepInputs, device_of
from specdec_kernels.testing.inputs import mapped

INF, NAN = float("inf"), float("nan")


def identical(actual, expected) -> bool:
    """Whether results are the same, bit for bit; NaN equals NaN."""
    pairs = zip(actual, expected, strict=True)
    return all(a is b if b is None else torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in pairs)


def seeds(backend: str) -> int:
    """How many seeds stand for "whatever u is". test_exact.py covers every u, for the reference."""
    return {
        "reference": 100,
        "cpu": 2000,
        "triton": 2000 if torch.cuda.is_available() else 4,
        "cuda": 2000 if torch.cuda.is_available() else 100,
    }[backend]


def only(tokens: torch.Tensor, allowed: set[int]) -> bool:
    """Whether all of tokens [n] are in ``allowed``, and, unless n is small, each of ``allowed`` occurs."""
    found = {*tokens.tolist()}
    return found == allowed if len(tokens) >= 100 else found <= allowed


def rules_for(backend: str, case: int) -> tuple[str, ...]:
    """All rules; for Triton's interpreter, which is slow, one of them, and another one for the next case."""
    return RULES if backend != "triton" or torch.cuda.is_available() else (RULES[case % len(RULES)],)


def step(target: list, tokens: list, draft: list | None, n: int, temperature: float = 1.0, **more) -> StepInputs:
    """A step with target rows [K+1, V], tokens [K] and draft rows [K, V], repeated for n seeds. With a rule that takes
    no q, the draft rows are left out."""
    rows = torch.tensor(target)
    sampling = {name: more.pop(name) for name in ("top_k", "top_p", "min_p") if name in more}
    draft = None if more.get("rule") == "coupled" else draft
    return StepInputs(
        rows.expand(n, -1, -1),
        torch.tensor(tokens, dtype=torch.int64).expand(n, -1),
        None if draft is None else torch.tensor(draft).reshape(-1, rows.shape[1]).expand(n, -1, -1),
        SamplingParams(temperature=temperature, **sampling),
        torch.arange(n),
        torch.zeros(n, dtype=torch.int64),
        **more,
    )


def on_backend(operation: Callable[..., Any], *arguments: Any, backend: str, **options: Any) -> Any:
    """What an operation returns for these arguments, computed where ``backend`` runs, and moved to the CPU."""
    device = device_of(backend)
    arguments = mapped(arguments, lambda t: t.to(device))
    options = {name: mapped(value, lambda t: t.to(device)) for name, value in options.items()}
    out = operation(*arguments, **options, backend=backend)
    return type(out)(*(None if t is None else t.cpu() for t in out))


def drafted(backend: str, logits: torch.Tensor, temperature: float = 1.0, **options):
    arguments = {"seed": 0, "position": 0, "offset": 0, **options}
    return on_backend(draft_step, logits, SamplingParams(temperature), **arguments, backend=backend)


def padded_rows(t: torch.Tensor) -> torch.Tensor:
    """A view of the same values in a wider buffer, whose strides are not products of the sizes. The gaps hold NaN or a
    huge number."""
    if t.dim() == 0:
        return t
    fill = float("nan") if t.is_floating_point() else -(2**62)
    wide = torch.full([s + 3 for s in t.shape], fill).to(t.dtype)
    view = wide[tuple(slice(1, s + 1) for s in t.shape)]
    view.copy_(t)
    return view


LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "padded": padded_rows,
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() else t,
    "every_second": lambda t: torch.stack([t, torch.zeros_like(t)], -1)[..., 0],
    "middle_transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() > 1 else t,
}
