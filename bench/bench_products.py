"""Times the linear layers of an 8B and a 1B model for few rows: the operation ``linear`` against PyTorch's, which is
cuBLAS's on a GPU, and the floor.

    python bench/bench_products.py --device cuda --json bench/results/h200/products.json

A forward reads all its weights between two calls of one layer. So calls go over many weights in turn, more than the
caches hold. README.md says how each number is made.
"""

from __future__ import annotations

import itertools
import time
from typing import Annotated

import report
import torch
import typer
from measure import Method, compared, interleave, prepare, summary
from specdec_layers import linear
from torch.nn import functional as F

MODELS = {  # hidden, ffn, outputs of q, k and v, vocabulary: Llama-3.1-8B and Llama-3.2-1B
    "8B": (4096, 14336, 6144, 128256),
    "1B": (2048, 8192, 3072, 128256),
}
TINY = {"tiny": (64, 96, 128, 160)}
ROWS = (1, 2, 5, 8, 16, 40)


def products_of(hidden: int, ffn: int, qkv: int, vocabulary: int) -> dict[str, tuple[int, int]]:
    """{product: (outputs, inputs)}, of which those that read the same are one."""
    return {
        "qkv": (qkv, hidden), "o": (hidden, hidden), "gate_up": (2 * ffn, hidden), "down": (hidden, ffn),
        "head": (vocabulary, hidden),
    }  # fmt: skip


def weights_of(outputs: int, inputs: int, device: torch.device, most_bytes: int) -> list[torch.Tensor]:
    """As many as exceed the caches, with random numbers, as products of zeros take less power."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    count = max(most_bytes // (outputs * inputs * dtype.itemsize), 1) + 1
    return [torch.empty(outputs, inputs, dtype=dtype, device=device).normal_(0, 0.02) for _ in range(count)]


def measure_row(
    model: str, product: str, rows: int, weights: list[torch.Tensor], ceilings: dict[str, float], seconds: float
) -> dict[str, object]:
    outputs, inputs = weights[0].shape
    x = torch.randn(1, rows, inputs, dtype=weights[0].dtype, device=weights[0].device)
    ways = {"ours": linear, "pytorch": F.linear}
    methods = [Method(name, lambda i, way=way: way(x, weights[i]), len(weights)) for name, way in ways.items()]
    ready, unavailable = prepare(methods, x.device, seconds)
    samples = interleave(ready, x.device, seconds)
    floor = report.floor_seconds(weights[0].nbytes + x.nbytes + rows * outputs * x.element_size(), ceilings)
    ratios: dict[str, object] = {}
    for method in ready:
        ratios |= compared(method, [m for m in ready if m.name != method.name], samples, {"floor": floor})
    error = None
    if "ours" not in unavailable:
        expected = F.linear(x.float(), weights[0].float())
        error = ((linear(x, weights[0]) - expected).norm() / expected.norm()).item()
    row = {"model": model, "product": product, "outputs": outputs, "inputs": inputs, "rows": rows}
    row |= {"weights": len(weights), "floor_seconds": floor, "error": error}
    seconds_by_method = {key: summary(values) for key, values in samples.items()}
    return row | {"seconds": seconds_by_method, "ratios": ratios, "unavailable": unavailable}


def main(
    device: report.DeviceName = "cpu",
    threads: report.Threads = None,
    seconds: Annotated[float, typer.Option(min=0, help="a row, at least 5 rounds")] = 0.3,
    limit: Annotated[float, typer.Option(min=0, help="seconds after which no row begins")] = 55.0,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    """Times every product. Rows come in an order in which a run that is cut short has something of each."""
    begun, place = time.perf_counter(), report.read_device(device)
    models = TINY if quick else MODELS
    most_bytes = 1 << 16 if quick else 3 * report.cache_bytes(place)
    ceilings = report.bandwidth(place, quick)
    results = report.Report("products", place, json_path, threads, quick=quick, bandwidth=ceilings)
    shapes = {(model, name): shape for model, sizes in models.items() for name, shape in products_of(*sizes).items()}
    weights = {key: weights_of(*shape, place, most_bytes) for key, shape in shapes.items()}
    results.content["skipped"] = skipped = []
    with torch.inference_mode():
        for rows, (model, product) in itertools.product(ROWS, shapes):
            if time.perf_counter() - begun > limit:
                skipped.append([model, product, rows])
                continue
            results.add(measure_row(model, product, rows, weights[model, product], ceilings, seconds))
    ours, theirs = (f"{name} [cold]" if place.type == "cuda" else name for name in ("ours", "pytorch"))
    lines = [{**row, **row["seconds"], **row["ratios"]} for row in results.rows]
    columns = ("model", "product", "rows", ours, theirs, f"{ours}/{theirs}", f"{ours}/floor", "error")
    results.show("products", lines, columns)
    results.finish()


if __name__ == "__main__":
    typer.run(main)
