"""The norm of a sum that was computed together with it, kept by the sum until the norm is called with it."""

from __future__ import annotations

import torch
from torch import nn

_KEPT = "_norm_ahead"


def keep_norm(x: torch.Tensor, norm: nn.Module, normed: torch.Tensor) -> None:
    """Keeps ``normed``, which is what ``norm`` gives for ``x``. It goes with this very tensor: others that are made of
    x do not have it, and it is gone when x is."""
    vars(x)[_KEPT] = norm, normed


def take_norm(x: torch.Tensor, norm: nn.Module | None) -> torch.Tensor | None:
    """Returns what is kept for ``norm``, and forgets it, as it forgets what is kept for another. A hook that is called
    before ``norm`` may have changed x in place: then there is nothing."""
    kept, normed = vars(x).pop(_KEPT, (None, None))
    return normed if norm is not None and kept is norm and not norm._forward_pre_hooks else None
