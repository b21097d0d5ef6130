"""In which dtype keys and values are stored, and what is refused because somebody would lose precision unawares."""

from __future__ import annotations

import torch

from ..checks import refuse


def check_cache_dtype(dtype: torch.dtype | None, computes: torch.dtype) -> None:
    """Refuses what cannot be narrower than what a model computes in. How its keys come is seen when it runs."""
    if dtype is None:
        return
    known = isinstance(dtype, torch.dtype) and dtype.is_floating_point and 2 <= dtype.itemsize <= computes.itemsize
    if not known or (dtype != computes and dtype.itemsize == computes.itemsize):
        refuse("cache_dtype", dtype, f"None, or a floating dtype of 16 bits or more, narrower than {computes}")


def stored_dtype(
    model: str, what: str, comes: torch.dtype, computes: torch.dtype, asked: torch.dtype | None
) -> torch.dtype:
    """The dtype in which keys or values (``what``) are stored.

    Args:
        model: its name, for errors.
        comes: the dtype in which they come.
        computes: that of the model's hidden states.
        asked: ``cache_dtype``.

    Raises:
        ValueError: they come narrower than the model computes, and nobody asked for it; or ``asked`` is not narrower
            than they come.
    """
    if asked is None and comes.itemsize < computes.itemsize:
        given = f"{what} that come as {comes} from a model that computes in {computes} (autocast?)"
        refuse(model, given, f"cache_dtype={comes} to accept it")
    if asked not in (None, comes) and asked.itemsize >= comes.itemsize:
        refuse("cache_dtype", asked, f"None, or narrower than {comes}, as which the {model}'s {what} come")
    return asked or comes
