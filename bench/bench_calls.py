"""What a call from Python costs the host, without a GPU: everything that it does there, but for CUDA's driver.

python bench/bench_calls.py
python bench/bench_calls.py --profile triton:filters

``triton`` compiles its kernels for an H100 and launches them by Triton's own launcher, on CPU tensors and on a driver
that does nothing (``no_driver.c``, which needs a C compiler). ``cpu`` computes one row of 8 logits: arguments, the
dispatcher and the native half of a call, which are those of ``cuda`` but for its launches. On a GPU, a driver's launch
and an allocation cost more than none here.
"""

from __future__ import annotations

import cProfile
import ctypes
import os
import pstats
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import report
import torch
import typer

from specdec_kernels import SamplingParams, SamplingTensors, backends, draft_step, speculative_step

K, V, FEW = 5, 128256, 8
CALLS = 200  # of a sample, whose median counts
BACKENDS = ("triton", "cpu")


def without_driver(folder: str) -> None:
    """Makes Triton take a driver that does nothing, and compile for compute capability 9.0."""
    import triton
    from triton.backends.nvidia import driver as nvidia

    library, here = Path(folder, "libcuda.so.1"), Path(__file__).parent
    compiler = shutil.which(os.environ.get("CC", "cc")) or report.refuse("CC", "no C compiler", "one that is there")
    headers = Path(nvidia.__file__).parent / "include"
    flags = ["-shared", "-fPIC", "-O2", "-Wl,-soname,libcuda.so.1", f"-I{headers}"]
    subprocess.run([compiler, *flags, str(here / "no_driver.c"), "-o", str(library)], check=True)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    os.environ["TRITON_LIBCUDA_PATH"] = folder
    driver = nvidia.CudaDriver()
    driver.get_current_device, driver.get_current_stream = lambda: 0, lambda device: 0
    driver.get_device_capability = lambda device=0: (9, 0)
    triton.runtime.driver.set_active(driver)

    from specdec_kernels.backends.triton import tables

    tables.family = lambda device: "hopper"  # type: ignore[assignment]
    known = backends._suffix
    backends._suffix = lambda stem, name, device: (  # type: ignore[assignment]
        "_triton" if name == "triton" else known(stem, name, device)
    )


def calls(backend: str) -> dict[str, Callable[[], object]]:
    """The calls of a decoding loop (tensors), with filters, and of a user who gives numbers."""
    vocabulary = V if backend == "triton" else FEW
    target, draft = torch.randn(1, K + 1, vocabulary).bfloat16(), torch.randn(1, K, vocabulary).bfloat16()
    tokens, row = torch.randint(vocabulary, (1, K)), draft[:, 0]
    at = {"seed": torch.tensor([1]), "position": torch.tensor([7])}
    stats = torch.zeros(1, K), torch.zeros(1, K)
    plain = SamplingTensors(torch.full((1,), 0.8))
    filtered = plain._replace(filters=torch.tensor([[50, 0.95, 0]]))

    def verify(params: SamplingParams | SamplingTensors, **options) -> Callable[[], object]:
        given = {**at, **options}
        return lambda: speculative_step(
            target, tokens, draft, params=params, draft_stats=stats, backend=backend, **given
        )

    def drafted(params: SamplingParams | SamplingTensors, **options) -> Callable[[], object]:
        given = {**at, **options}
        return lambda: draft_step(row, params, offset=0, backend=backend, **given)

    numbers, pair = {"seed": 1, "position": 7}, SamplingParams(temperature=0.8, top_k=50, top_p=0.95)
    return {
        "plain": verify(plain),
        "filters": verify(filtered),
        "block": verify(plain, rule="block"),
        "numbers": verify(SamplingParams(temperature=0.8), **numbers),
        "numbers, filters": verify(pair, **numbers),
        "draft": drafted(plain),
        "draft, filters": drafted(filtered),
        "draft, numbers": drafted(SamplingParams(temperature=0.8), **numbers),
    }


def microseconds(call: Callable[[], object], samples: int) -> list[float]:
    """Of a call, by sample."""
    found = []
    for _ in range(samples):
        start = time.thread_time()
        for _ in range(CALLS):
            call()
        found.append((time.thread_time() - start) / CALLS * 1e6)
    return found


def main(
    backend: Annotated[str, typer.Option(help="triton and cpu, or one of them")] = ",".join(BACKENDS),
    profile: Annotated[
        str | None, typer.Option(help="a call, such as triton:plain, of which functions are timed")
    ] = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    """Times calls, and writes the medians in us."""
    chosen, device = report.read_names("backend", backend, BACKENDS), torch.device("cpu")
    torch.set_num_threads(1)
    results = report.Report("calls", device, json_path, None, quick=quick)
    with tempfile.TemporaryDirectory() as folder:
        if "triton" in chosen:
            without_driver(folder)
        if profile is not None:
            its_backend, _, name = profile.partition(":")
            call = calls(its_backend)[name]
            microseconds(call, 1)
            with cProfile.Profile() as profiler:
                for _ in range(10 * CALLS):
                    call()
            pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
            return
        for its_backend in chosen:
            for name, call in calls(its_backend).items():
                microseconds(call, 1)
                found = microseconds(call, 1 if quick else 15)
                row = {"backend": its_backend, "call": name, "us": statistics.median(found), "least": min(found)}
                results.add({**row, "samples": found})
                print(f"{its_backend:8} {name:18} {row['us']:8.1f} us, least {row['least']:8.1f}", flush=True)
    results.finish()


if __name__ == "__main__":
    typer.run(main)
