"""Reads the options of the fuzz programs. Every error names the option, what was given and what is allowed."""

from __future__ import annotations

import torch
import typer

BACKENDS = ("cpu", "triton", "cuda")


def read_device(name: str) -> torch.device:
    allowed = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    if name not in allowed:
        raise typer.BadParameter(f"device: got {name!r}, allowed here: {', '.join(allowed)}")
    return torch.device(name)


def read_backends(text: str) -> list[str]:
    """Names separated by commas."""
    names = text.split(",")
    if unknown := [name for name in names if name not in BACKENDS]:
        raise typer.BadParameter(f"backends: got {unknown[0]!r}, allowed: {', '.join(BACKENDS)}")
    return names
