"""One name that switches off all that computes in the place of a model's own modules."""

from __future__ import annotations

import os

from ...checks import refuse

SETTING = "SPECDEC_NATIVE"


def is_wanted() -> bool:
    """Whether modules are exchanged for ours at all: not where the environment has ``SPECDEC_NATIVE=0`` when a model's
    steps are made. Weights that are stored in 8 or 4 bits, and recurrent layers, are ours anyway.

    Raises:
        ValueError: ``SPECDEC_NATIVE`` is neither 0 nor 1.
    """
    if (asked := os.environ.get(SETTING, "1")) not in ("0", "1"):
        refuse(SETTING, repr(asked), "'0' or '1'")
    return asked == "1"
