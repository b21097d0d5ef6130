"""Reads what the command line gives. Every error names the option, what was given and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

from specdec_kernels import build_info

# The options that several benchmarks have.
Device = Annotated[str, typer.Option(help="cpu or cuda")]
Threads = Annotated[int | None, typer.Option(min=1, help="default: torch's")]
Quick = Annotated[bool, typer.Option(help="a smoke run: other defaults, small inputs, no compiling")]
JsonPath = Annotated[Path | None, typer.Option("--json", help="where the results go")]


@contextmanager
def reading() -> Iterator[None]:
    """A ValueError, which names an option, ends the command with exit code 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def read_device(name: str) -> torch.device:
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device: got {name!r}, allowed: 'cpu', 'cuda'")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: got 'cuda', but torch finds no GPU here; allowed: 'cpu'")
    return torch.device(name)


def read_integers(name: str, text: str) -> list[int]:
    """Integers >= 1 separated by commas."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise ValueError(f"{name}: got {text!r}, allowed: integers >= 1 separated by commas, such as 1,8")
    return values


def read_names(name: str, text: str, allowed: Iterable[str]) -> list[str]:
    """Names out of ``allowed``, separated by commas."""
    names, allowed = text.split(","), list(allowed)
    if unknown := [n for n in names if n not in allowed]:
        raise ValueError(f"{name}: got {unknown[0]!r}, allowed: {', '.join(allowed)}")
    return names


def read_backends(device: torch.device, asked: str | None) -> tuple[list[str], dict[str, str]]:
    """The backends to time, and why others are left out. One that was asked for is never left out."""
    rows = [r for r in build_info()["backends"] if r["device"] == device.type]
    left_out = {r["backend"]: r["reason"] for r in rows if not r["available"]}
    if asked is not None:
        names = read_names("backends", asked, [r["backend"] for r in rows])
        for name in names:
            if name in left_out:
                raise ValueError(f"backends: got {name!r}, which cannot run on {device}: {left_out[name]}")
        return names, left_out
    left_out["reference"] = "the oracle, not made to be fast; time it with --backends reference"
    if device.type == "cpu":
        left_out.setdefault("triton", "on a CPU it is Triton's interpreter, which serves tests")
    names = [r["backend"] for r in rows if r["backend"] not in left_out]
    if not names:
        raise ValueError(f"backends: none can run on {device}: {left_out}")
    return names, left_out
