"""``specdec doctor``: what can run here."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def doctor() -> None:
    """Prints what was built, which backends can run on this machine, and why another cannot."""
    from specdec_kernels import build_info

    info: dict[str, Any] = build_info()
    console = Console()
    for name in ("version", "python", "platform", "torch", "triton", "cuda_device", "native", "native_cuda"):
        console.print(f"{name}: {info[name]}")
    table = Table("backend", "device", "runs here", "why not")
    for row in info["backends"]:
        table.add_row(row["backend"], row["device"], "yes" if row["available"] else "no", row["reason"] or "")
    console.print(table)
