"""Times ``specdec_kernels.draft_step`` against eager sampling, and against reading the logits once.

python bench/bench_draft_step.py --device cpu --json bench/results/draft_step.json
"""

from __future__ import annotations

import itertools
import math
from typing import Annotated

import torch
import typer
from machine import bandwidth, cache_bytes, floor_seconds
from measure import Method, compared, first_line, interleave, prepare, summary
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
    read_names,
    read_shapes,
    reading,
)
from peers import Compiler, probabilities
from report import Report, show_steps, terminal
from step_inputs import LOGIT_STD, MOST_SETS

from specdec_kernels import SamplingParams, draft_step


def race(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws by an exponential race and keeps q: what an eager verifier needs later."""
    q = probabilities(logits)
    return (q / torch.empty_like(q).exponential_()).argmax(-1), q


def multinomial(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As transformers samples. On a GPU ``torch.multinomial`` waits for the device: no graph can hold it."""
    q = probabilities(logits)
    return torch.multinomial(q, 1)[:, 0], q


def measure_shape(
    logits: torch.Tensor,  # [sets, B, V]
    backends: list[str],
    compiler: Compiler,
    ceilings: dict[str, float],
    seconds: float,
) -> dict[str, object]:
    (sets, B, _), device = logits.shape, logits.device
    params = SamplingParams(temperature=torch.ones(B, device=device))
    seed = torch.arange(B, device=device)
    position = [torch.full((B,), i, device=device) for i in range(sets)]

    def ours(backend: str) -> Method:
        def run(i: int, of_set: int | None = None):
            rows, at = logits[i if of_set is None else of_set], position[i % sets]
            return draft_step(rows, params, seed=seed, position=at, offset=0, backend=backend)

        return Method(backend, run, sets, capturable=backend != "reference", warm=lambda i: run(i, 0))

    methods, absent = [ours(b) for b in backends], {}
    methods.append(Method("eager", lambda i: race(logits[i]), sets, warm=lambda i: race(logits[0])))
    methods.append(Method("multinomial", lambda i: multinomial(logits[i]), sets, capturable=False))
    try:
        compiled = compiler.compiled(race, logits[0])
        methods.append(Method("compile", lambda i: compiled(logits[i]), sets, warm=lambda i: compiled(logits[0])))
    except Exception as error:
        absent["compile"] = first_line(error)
    methods, unavailable = prepare(methods, device, seconds)
    samples = interleave(methods, device, seconds)
    bytes_read = logits[0].numel() * logits.element_size()
    floor = floor_seconds(bytes_read, ceilings)
    peers = [m for m in methods if m.name not in backends]
    found = {}
    for m in (m for m in methods if m.name in backends):
        found |= compared(m, peers, samples, {"floor": floor})
    return {
        "input_sets": sets,
        "inputs_exceed_cache": sets * bytes_read >= 2 * cache_bytes(device),
        "calls_a_sample": {m.key: m.calls_a_sample for m in methods},
        "bytes_read": bytes_read,
        "floor_seconds": floor,
        "seconds": {key: summary(values) for key, values in samples.items()},
        "ratios": found,
        "unavailable": absent | unavailable,
    }


def random_logits(B: int, V: int, dtype: str, device: torch.device, most_sets: int) -> torch.Tensor:
    """[sets, B, V], twice as large as the caches unless that takes more than ``most_sets``."""
    wanted = math.ceil(2 * cache_bytes(device) / (B * V * DTYPES[dtype].itemsize))
    torch.manual_seed(0)
    logits = torch.empty(min(wanted, most_sets), B, V, dtype=DTYPES[dtype], device=device)
    for one in logits:  # float32 noise for all at once would need several times their memory
        one.copy_(torch.randn(B, V, device=device) * LOGIT_STD)
    return logits


def main(
    device: Device = "cpu",
    batches: Batches = None,
    vocabularies: Vocabularies = None,
    dtypes: str = "bfloat16,float32",
    backends: Backends = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="a row, at least 5 rounds; default: 1")] = None,
    compile_seconds: Annotated[
        float | None, typer.Option(min=0, help="for torch.compile in all; 0: without it; default: 300")
    ] = None,
    threads: Threads = None,
    quick: Quick = False,
    json_path: JsonPath = None,
) -> None:
    """Times draft_step; the options list shapes."""
    with reading():
        where = read_device(device)
        sizes = read_shapes(batches, vocabularies, quick)
        names = read_names("dtypes", dtypes, DTYPES)
        chosen, left_out = read_backends(where, backends)
    seconds = (0.2 if quick else 1.0) if seconds is None else seconds
    compiler = Compiler((0.0 if quick else 300.0) if compile_seconds is None else compile_seconds)
    if threads is not None:
        torch.set_num_threads(threads)
    ceilings = bandwidth(where, quick)
    settings = {"quick": quick, "bandwidth": ceilings, "temperature": 1.0}
    report = Report("draft_step", where, json_path, **settings, backends_left_out=left_out)
    for dtype, (V, B) in itertools.product(names, itertools.product(*sizes)):
        logits = random_logits(B, V, dtype, where, 4 if quick else MOST_SETS)
        head = {"B": B, "V": V, "dtype": dtype}
        report.add(head | measure_shape(logits, chosen, compiler, ceilings, seconds))
    report.finish()
    show_steps(terminal(), "median microseconds a draft", report.rows, ("B", "V", "dtype"), "/floor")


if __name__ == "__main__":
    typer.run(main)
