"""Says once where transformers is newer than the newest that specdec was tested with."""

from __future__ import annotations

import functools
import warnings

import transformers

NEWEST = (5, 24)  # the oldest is pyproject.toml's


@functools.cache
def warn_if_untested() -> None:
    """Warns once a process. What a model does is looked at and not concluded from a version, so most of what is newer
    works, and the first use of an unknown model checks it anyway."""
    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    if (major, minor) > NEWEST:
        tested = ".".join(map(str, NEWEST))
        told = (
            f"transformers: {transformers.__version__} is newer than {tested}, the newest that specdec was tested with"
        )
        warnings.warn(told, RuntimeWarning, stacklevel=4)
