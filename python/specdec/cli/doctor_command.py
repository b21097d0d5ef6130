"""``specdec doctor``: what can run here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .option_groups import command
from .options import MachineOptions
from .terminal import UNLIMITED
from .user_errors import refuse


@command
def doctor(
    model: Annotated[str | None, typer.Argument(help="A folder, a GGUF file, or a name on the hub.")] = None,
    device: Annotated[str | None, typer.Option(help="Of the model. Default: a GPU if there is one.")] = None,
    bits: Annotated[
        int | None, typer.Option(help="8: as its weights are rounded by --draft-bits 8.", metavar="8")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Reports versions, CPUs and memory that this process may use, what was built, which backends can run on this
    machine and why others cannot, and what would make it slow. Of a model, which of its parts run by operations of
    specdec."""
    if device is not None and model is None:
        refuse("--device", repr(device), "one with a model")
    if bits is not None and (model is None or bits != 8):
        refuse("--bits", bits, "8, with a model")
    where = MachineOptions(device=device).chosen_device()
    from importlib import metadata

    import specdec_layers
    import torch

    import specdec_kernels

    from ..evaluation.machine import machine, page_hints, thread_hints
    from ..models.exchanged.slow_dtype import slowdown

    built, layers = specdec_kernels.build_info(), specdec_layers.build_info()
    info: dict[str, Any] = {**built, "layers": layers, "transformers": metadata.version("transformers"), **machine()}
    info["bfloat16_slowdown"] = slowdown(torch.bfloat16)
    info["hints"] = [*thread_hints(info["cpus"]["usable"], info["threads"], info["load"]), *page_hints()]
    if model is not None:
        info["native_parts"] = _native_parts(model, where, bits)
    if as_json:
        typer.echo(json.dumps(info, default=str))
        return
    versions = ("python", "torch", "triton", "transformers", "platform")
    backends = {f"{row['backend']} on {row['device']}": row["reason"] or "runs" for row in info["backends"]}
    parts: dict[str, Mapping[str, object]] = {
        f"specdec {info['version']}": {name: info[name] or "not installed" for name in versions},
        "machine": _machine(info),
        "built": {"for CPUs": _built(info["native"]), "for NVIDIA GPUs": _built(info["native_cuda"])},
        "built of layers": {"for CPUs": _built(layers["native"]), "for NVIDIA GPUs": _built(layers["native_cuda"])},
        "backends": backends,
    }
    if model is not None:
        parts[f"{model}, natively on {'a CPU' if where == 'cpu' else where}"] = info["native_parts"]
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = UNLIMITED  # what reads a pipe may look for whole lines
    for title, rows in parts.items():
        console.print(Text(title, "bold"))
        table = Table.grid(padding=(0, 2), pad_edge=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows.items():
            table.add_row(name, Text(str(value)))
        console.print(Padding(table, (0, 0, 1, 2), expand=False))
    for hint in info["hints"]:
        console.print(Text(f"hint: {hint}", "yellow"))


def _native_parts(model: str, device: str, bits: Any) -> dict[str, str]:
    from ..models.load.loading import load_model
    from ..models.native_report import native_report

    return native_report(load_model(model, device=device, bits=bits, name="model"))


def _machine(info: Mapping[str, Any]) -> dict[str, object]:
    from ..models.machine.free_memory import size_text

    cpus, memory = info["cpus"], info["memory"]
    limits = {"affinity": f"{cpus['affinity']} by affinity"}
    if cpus["quota"] is not None:
        limits["quota"] = f"{cpus['quota']:g} by the control group's quota"
    sizes = {name: "unknown" if size is None else size_text(size) for name, size in memory.items()}
    limit = "" if memory["limit"] is None else f", {sizes['limit']} by the control group's limit"
    return {
        "CPU": info["cpu"],
        "units": ", ".join(info["units"]) or "unknown",
        "bfloat16": f"a step's products take {info['bfloat16_slowdown']:.2g} times as long as in float32",
        "CPUs": f"{cpus['usable']} of {cpus['machine']} ({', '.join(limits.values())})",
        "threads": f"{info['threads']} of torch, load {'unknown' if info['load'] is None else info['load']}",
        "memory": f"{sizes['free']} free of {sizes['total']}{limit}",
        "GPU": info["cuda_device"] or "none that torch can use",
    }


def _built(extension: Mapping[str, Any]) -> str:
    """What an extension says of itself, or why it is missing."""
    if "missing" in extension:
        return f"no: {extension['missing']}"
    shown = {name: value if isinstance(value, str) else ", ".join(value) for name, value in extension.items()}
    return "yes: " + "; ".join(f"{name.replace('_', ' ')} {value}" for name, value in shown.items())
