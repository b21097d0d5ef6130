"""The dtype in which keys and values are stored, and errors where precision would be lost unnoticed."""

from __future__ import annotations

import torch

from ..checks import refuse


def check_cache_dtype(dtype: torch.dtype | None, computes: torch.dtype) -> None:
    """Raises ValueError unless ``dtype`` is None, ``computes``, or a narrower floating dtype of 16 bits or more. The
    dtype of the model's keys is only known once it runs (``stored_dtype``)."""
    if dtype is None:
        return
    known = isinstance(dtype, torch.dtype) and dtype.is_floating_point and 2 <= dtype.itemsize <= computes.itemsize
    if not known or (dtype != computes and dtype.itemsize == computes.itemsize):
        refuse("cache_dtype", dtype, f"None, or a floating dtype of 16 bits or more, narrower than {computes}")


def stored_dtype(
    model: str, what: str, comes: torch.dtype, computes: torch.dtype, asked: torch.dtype | None
) -> torch.dtype:
    """Returns the dtype in which keys or values are stored.

    Args:
        model: the model's name, for errors.
        what: "keys" or "values", for errors.
        comes: the dtype in which the model computes them.
        computes: the dtype of the model's hidden states.
        asked: ``cache_dtype``, as the caller gave it.

    Raises:
        ValueError: ``comes`` is narrower than ``computes`` and ``asked`` does not accept it; or ``asked`` is not
            narrower than ``comes``.
    """
    if asked is None and comes.itemsize < computes.itemsize:
        given = f"{what} that come as {comes} from a model that computes in {computes} (autocast?)"
        refuse(model, given, f"cache_dtype={comes} to accept it")
    if asked not in (None, comes) and asked.itemsize >= comes.itemsize:
        refuse("cache_dtype", asked, f"None, or narrower than {comes}, as which the {model}'s {what} come")
    return asked or comes
