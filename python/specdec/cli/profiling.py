"""A trace of what a command does, for chrome://tracing or Perfetto."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .options import refuse


def check_trace(path: Path) -> None:
    """Refuses a file that cannot be written. To be called before models are loaded."""
    allowed = "a file in a folder that can be written to"
    if path.is_dir() or not path.parent.is_dir():
        refuse("--profile", f"{str(path)!r}, {'a folder' if path.is_dir() else 'in no folder'}", allowed)
    try:
        _new_file(path).unlink()
    except OSError as error:
        refuse("--profile", f"{str(path)!r} ({error.strerror})", allowed)


@contextmanager
def traced(path: Path | None) -> Iterator[None]:
    """Profiles the block and writes the trace as a whole or not at all. ``None`` switches profiling off."""
    if path is None:
        yield
        return
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as profiler:
        yield
    part = _new_file(path)
    try:
        profiler.export_chrome_trace(str(part))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _new_file(path: Path) -> Path:
    """A new file in the folder of ``path`` with its suffix, because torch compresses files whose name ends in .gz."""
    part = path.with_name(f".{os.getpid()}.{path.name}")
    part.touch(exist_ok=False)
    return part
