"""Times ``specdec_kernels.speculative_step`` against other ways to verify drafts, and against its bytes.

    python bench/bench_speculative_step.py --device cpu --json bench/results/speculative_step.json

bench/README.md says how each number is made.
"""

from __future__ import annotations

import itertools
from typing import Annotated

import torch
import typer
from launches import launches
from machine import bandwidth, floor_seconds
from measure import compared, interleave, prepare, summary
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
from peer_methods import peer_methods
from peers import Compiler
from report import Report, show_steps, terminal
from step_inputs import ACCEPTANCE, MOST_SETS, Shape, StepInputs


def measure_shape(
    inputs: StepInputs,
    device: torch.device,
    backends: list[str],
    compiler: Compiler,
    ceilings: dict[str, float],
    seconds: float,
) -> dict[str, object]:
    shape = inputs.shape
    ours = {backend + ("+stats" if stats else ""): (backend, stats) for backend in backends for stats in (False, True)}
    methods = [inputs.method(name, *choice) for name, choice in ours.items()]
    others, absent = peer_methods(inputs, compiler)
    methods, unavailable = prepare(methods + others, device, seconds)
    samples = interleave(methods, device, seconds)

    accepted = inputs.num_accepted(backends[0])
    bytes_read = {
        mode: {
            "all_rows": shape.bytes_all_rows(stats),
            "reached_rows": shape.bytes_reached_rows(stats, accepted),
        }
        for mode, stats in (("recomputed", False), ("stats", True))
    }
    floors = {
        mode: {rows: floor_seconds(size, ceilings) for rows, size in sizes.items()}
        for mode, sizes in bytes_read.items()
    }
    peers = [m for m in methods if m.name not in ours]
    found = {}
    for m in (m for m in methods if m.name in ours):
        its_floors = floors["stats" if ours[m.name][1] else "recomputed"]
        found |= compared(m, peers, samples, {f"floor_{rows}": floor for rows, floor in its_floors.items()})
    tested = (accepted + 1).clamp(max=shape.K)
    return {
        "alpha": (accepted.sum() / tested.sum()).item(),
        "acceptance_rate": accepted.float().mean().item() / shape.K,
        "input_sets": inputs.sets,
        "inputs_exceed_cache": inputs.exceed_cache,
        "calls_a_sample": {m.key: m.calls_a_sample for m in methods},
        "launches": {name: launches(inputs.ours(*choice), device) for name, choice in ours.items()},
        "bytes_read": bytes_read,
        "floor_seconds": floors,
        "seconds": {key: summary(values) for key, values in samples.items()},
        "ratios": found,
        "unavailable": absent | unavailable,
    }


def main(
    device: Device = "cpu",
    batches: Batches = None,
    num_drafts: Annotated[str | None, typer.Option("--num-drafts", "-K", help="default: 5,1,8")] = None,
    vocabularies: Vocabularies = None,
    dtypes: str = "bfloat16,float32",
    temperature: Annotated[float, typer.Option(help="> 0; at 1 no peer pays for a division")] = 1.0,
    backends: Backends = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="a row, at least 5 rounds; default: 2")] = None,
    compile_seconds: Annotated[
        float | None, typer.Option(min=0, help="for torch.compile in all; 0: without it; default: 900")
    ] = None,
    threads: Threads = None,
    quick: Quick = False,
    json_path: JsonPath = None,
) -> None:
    """Times speculative_step; the options list shapes."""
    with reading():
        where = read_device(device)
        sizes = (
            read_integers("num-drafts", num_drafts or ("5" if quick else "5,1,8")),
            *read_shapes(batches, vocabularies, quick),
        )
        names = read_names("dtypes", dtypes, DTYPES)
        if not 0 < temperature < float("inf"):
            raise ValueError(f"temperature: got {temperature}, allowed: a number > 0")
        chosen, left_out = read_backends(where, backends)
    seconds = (0.2 if quick else 2.0) if seconds is None else seconds
    compiler = Compiler((0.0 if quick else 900.0) if compile_seconds is None else compile_seconds)
    if threads is not None:
        torch.set_num_threads(threads)
    console = terminal()
    ceilings = bandwidth(where, quick)
    console.print(f"read {ceilings['read'] / 1e9:.1f} GB/s, copy {ceilings['copy'] / 1e9:.1f} GB/s")
    settings = {"quick": quick, "bandwidth": ceilings, "temperature": temperature}
    report = Report("speculative_step", where, json_path, **settings, backends_left_out=left_out)
    for dtype, (K, V, B), drafts in itertools.product(names, itertools.product(*sizes), ACCEPTANCE):
        head = {"B": B, "K": K, "V": V, "dtype": dtype, "drafts": drafts}
        inputs = StepInputs(Shape(B, K, V, dtype), drafts, temperature, where, 4 if quick else MOST_SETS)
        report.add(head | measure_shape(inputs, where, chosen, compiler, ceilings, seconds))
        console.print(" ".join(f"{k}={v}" for k, v in head.items()), style="dim")
    report.finish()
    columns = ("B", "K", "V", "dtype", "drafts", "alpha")
    show_steps(console, "median microseconds a step", report.rows, columns, "/floor_reached_rows")


if __name__ == "__main__":
    typer.run(main)
