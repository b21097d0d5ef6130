"""Programs: native operations that run one after the other without Python between them, on a CPU."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .backends.native import missing
from .ops import handle

_keep_results = handle("keep_results")._op
_KEEPABLE = frozenset(
    handle(name)
    for name in (
        *("linear", "stored_rows", "attend", "rms_norm", "rotate", "rope_angles", "gated", "add", "reshaped"),
        "write_rows",
        *("conv_window", "delta_step", "ssd_step"),
    )
)
_aten = torch.ops.aten
_WITH_FORMS = frozenset((_aten.reshape.default, _aten.add.Tensor, _aten.index_copy_.default, _aten.embedding.default))
Call = tuple[Any, Sequence[Any], Mapping[str, Any]]  # an operation and its arguments


@functools.cache
def _has_native() -> bool:
    return missing() is None


class Program:
    """Calls of operations that are kept with their arguments and run again and again, each time on what the tensors
    then hold. What a call returns is written to tensors that are given with it.

    Raises:
        RuntimeError: there is no native code, with what is missing.

    Example:
        >>> import torch
        >>> from specdec_layers import Program
        >>> x, y = torch.tensor([[1.0]]), torch.empty(1, 1)
        >>> program = Program()
        >>> program.keep(torch.ops.specdec_layers.rms_norm.default, (x, None, 3.0, 0.0), results=[y])
        >>> program.run()
        >>> y
        tensor([[0.5000]])
    """

    def __init__(self) -> None:
        if reason := missing():
            raise RuntimeError(reason)
        self._native = importlib.import_module("specdec_layers._C")
        self._calls: Any = self._native.new_program()

    @staticmethod
    def keeps(operation: object) -> bool:
        """Whether it is an operation that programs can keep: ``linear`` and most others of layers, with native code."""
        return operation in _KEEPABLE and _has_native()

    def keep(
        self,
        kept: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        *,
        results: Sequence[torch.Tensor],
    ) -> None:
        """Adds a call, which does not run now.

        Args:
            kept: an operation that :meth:`keeps` knows.
            args, kwargs: its arguments, of CPU tensors.
            results: contiguous CPU tensors of the shapes and dtypes of what it returns, in that order.

        Raises:
            ValueError: names ``kept``, which no program keeps.
            RuntimeError: a result is not on a CPU.
        """
        if not self.keeps(kept):
            raise ValueError(f"kept: got {kept}, allowed: {', '.join(sorted(map(str, _KEEPABLE)))}")
        try:
            _keep_results([*results])
            self._native.keep_next(self._calls)
            kept._op(*args, **(kwargs or {}))
        finally:
            self._native.keep_next(None)

    def run(self) -> None:
        """Runs all calls in their order.

        Raises:
            RuntimeError: as the operations; later calls then do not run.
        """
        self._native.run_program(self._calls)


def native_form(called: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Returns a call of an operation of our own that does, to the last bit, what this call of PyTorch's does, or the
    call as it was given. Known are, on a CPU, the sum of two dense float32 tensors of one shape, ``index_copy_`` of
    whole rows, rows of a float32 ``embedding``, and a ``reshape`` that copies.

    Args:
        called: an operation of ``torch.ops``, such as ``torch.ops.aten.add.Tensor``.
        args, kwargs: what it is called with.

    Example:
        >>> import torch
        >>> from specdec_layers import native_form
        >>> x = torch.ones(2)
        >>> native_form(torch.ops.aten.add.Tensor, (x, x), {})[0]
        <OpOverload(op='specdec_layers.add', overload='default')>
    """
    if called not in _WITH_FORMS:
        return called, args, kwargs
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    if any(x.device.type != "cpu" for x in tensors) or not _has_native():
        return called, args, kwargs
    if called is torch.ops.aten.reshape.default and args[0].dim() <= 4 and not _is_view(*args):
        x, shape = args
        known = -math.prod(shape)  # -1 stands for what is left
        return handle("reshaped"), (x, torch.Size(x.numel() // known if n == -1 else n for n in shape)), {}
    if all(x.is_contiguous() for x in tensors):
        match called, [*args], kwargs:
            case torch.ops.aten.add.Tensor, [torch.Tensor() as x, torch.Tensor() as y], {**rest}:
                same = x.dtype == y.dtype == torch.float32 and x.shape == y.shape
                if same and rest.get("alpha", 1) == 1:
                    return handle("add"), (x, y), {}
            case torch.ops.aten.embedding.default, [weight, rows, *_], _:
                if weight.dtype == torch.float32 and rows.dtype == torch.int64:
                    return handle("stored_rows"), (weight, rows, 0), {}
            case torch.ops.aten.index_copy_.default, [target, 0, rows, source], _:
                if target.dim() == source.dim() == 2 and rows.dim() == 1:
                    return handle("write_rows"), (target, rows, source), {}
    return called, args, kwargs


def _is_view(x: torch.Tensor, shape: Sequence[int]) -> bool:
    try:
        x.view(shape)
    except RuntimeError:
        return False
    return True
