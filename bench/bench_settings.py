"""Times ``speculative_step`` under filters and accept rules, against its own time without, and against transformers.

    python bench/bench_settings.py --json bench/results/settings.json

bench/README.md says how each number is made.
"""

from __future__ import annotations

import itertools

import torch
import typer
from machine import bandwidth
from measure import Method, interleave, prepare, ratios, summary
from options import (
    DTYPES,
    Backends,
    Batches,
    Device,
    JsonPath,
    Quick,
    Threads,
    Vocabularies,
    read_backends,
    read_device,
    read_integers,
    read_names,
    read_shapes,
    reading,
)
from peers import transformers_step
from report import Report, terminal
from rich.console import Console
from rich.table import Table
from step_inputs import ACCEPTANCE, Shape, StepInputs

FILTERS = {
    "none": {},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "top_k+top_p": {"top_k": 50, "top_p": 0.95},
}
MOST_SETS = 16  # every setting has its own drafts


def measure_shape(
    inputs: StepInputs, device: torch.device, backend: str, settings: list[str], seconds: float
) -> dict[str, object]:
    """Every rule and filter of one shape, in turns. ``+stats``: the draft's (cutoff, lse) are handed over."""
    methods, accepted = [], {}
    for name in settings:
        rules = ("token", "block", "coupled") if name in ("none", "top_k+top_p") else ("token",)
        for rule in rules:
            of_setting = inputs.with_settings(FILTERS[name], rule)
            accepted[f"{rule} {name}"] = of_setting.num_accepted(backend).float().mean().item()
            for stats in (False,) if rule == "coupled" else (False, True):
                key = f"{rule} {name}" + ("+stats" if stats else "")
                methods.append(of_setting.method(key, backend, stats))
            if rule == "token":
                peer = transformers_step(inputs.temperature, FILTERS[name])
                arguments = of_setting.arguments("target", "tokens", "draft_float32")
                methods.append(
                    Method(
                        f"transformers {name}",
                        lambda i, s=peer, a=arguments: s(*a(i)),
                        inputs.calls,
                        capturable=False,
                    )
                )
    methods, unavailable = prepare(methods, device, seconds)
    samples = interleave(methods, device, seconds)
    compared = {}
    for m in methods:
        rule, name = m.name.split(" ", 1)
        stats = "+stats" if name.endswith("+stats") else ""
        name = name.removesuffix("+stats")
        if rule == "transformers":
            continue
        for other in (f"token none{stats}", f"token {name}{stats}", f"transformers {name}"):
            key = m.key.replace(m.name, other)  # timed alike
            if key in samples and other != m.name:
                compared[f"{m.key}/{key}"] = ratios(samples[m.key], samples[key])
    return {
        "mean_emitted": {key: 1 + n for key, n in accepted.items()},
        "input_sets": inputs.sets,
        "inputs_exceed_cache": inputs.exceed_cache,
        "seconds": {key: summary(values) for key, values in samples.items()},
        "ratios": compared,
        "unavailable": unavailable,
    }


def main(
    device: Device = "cpu",
    batches: Batches = "8,1",
    num_drafts: str = "5",
    vocabularies: Vocabularies = "128256",
    dtypes: str = "float32",
    settings: str = ",".join(FILTERS),
    backends: Backends = None,
    seconds: float = 60.0,
    threads: Threads = None,
    quick: Quick = False,
    json_path: JsonPath = None,
) -> None:
    """Times speculative_step under filters and rules."""
    with reading():
        where = read_device(device)
        sizes = (
            read_integers("num-drafts", num_drafts),
            *read_shapes("1" if quick else batches, "1000" if quick else vocabularies, quick),
        )
        names, chosen_settings = read_names("dtypes", dtypes, DTYPES), read_names("settings", settings, FILTERS)
        chosen, left_out = read_backends(where, backends)
    if threads is not None:
        torch.set_num_threads(threads)
    console = terminal()
    report = Report(
        "settings", where, json_path, quick=quick, bandwidth=bandwidth(where, quick), backends_left_out=left_out
    )
    for dtype, (K, V, B), drafts in itertools.product(names, itertools.product(*sizes), ACCEPTANCE):
        head = {"B": B, "K": K, "V": V, "dtype": dtype, "drafts": drafts}
        inputs = StepInputs(Shape(B, K, V, dtype), drafts, 1.0, where, 4 if quick else MOST_SETS)
        for backend in chosen:
            row = measure_shape(inputs, where, backend, chosen_settings, 0.5 if quick else seconds)
            report.add(head | {"backend": backend} | row)
    report.finish()
    for row in report.rows:
        show(console, row)


def show(console: Console, row: dict) -> None:
    """A line for each method: its time, and ratios to rule `token` without filters and to transformers, timed alike."""
    table = Table("method", "emitted", "microseconds", "/token none", "/transformers", title=title(row))
    for key, seconds in row["seconds"].items():
        method, _, timing = key.partition(" [")
        name, timed = method.removesuffix("+stats"), f" [{timing}" if timing else ""
        plain = row["ratios"].get(f"{key}/token none{'+stats' if method.endswith('+stats') else ''}{timed}")
        peer = row["ratios"].get(f"{key}/transformers {name.split(' ')[1]}{timed}")
        emitted = row["mean_emitted"].get(name)
        cells = [emitted, seconds["median"] * 1e6, plain and plain["median"], peer and peer["median"]]
        table.add_row(key, *("-" if c is None else f"{c:.3g}" if c < 1000 else f"{c:.0f}" for c in cells))
    console.print(table)
    for name, reason in row["unavailable"].items():
        console.print(f"{name}: not measured: {reason}")


def title(row: dict) -> str:
    return " ".join(f"{name}={row[name]}" for name in ("backend", "B", "K", "V", "dtype", "drafts"))


if __name__ == "__main__":
    typer.run(main)
