"""How many kernels a call launches, by torch.profiler."""

from __future__ import annotations

from collections.abc import Callable

import torch
from measure import first_line


def launches(run: Callable[[int], object], device: torch.device) -> dict[str, object]:
    """{"kernels", "copies" (with memory sets), "names"} of one call, after one that is not counted; {"unknown": why}
    where they cannot be seen."""
    if device.type != "cuda":
        return {"unknown": "kernels are launched on GPUs"}
    try:
        run(0)
        torch.cuda.synchronize(device)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            run(0)
            torch.cuda.synchronize(device)
        on_gpu = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    except Exception as error:  # a profiler that does not work here is a result
        return {"unknown": first_line(error)}
    return counted(on_gpu)


def counted(names: list[str]) -> dict[str, object]:
    """Sorts what ran on the GPU."""
    if not names:
        return {"unknown": "the profiler saw nothing on the GPU"}
    copies = [n for n in names if n.startswith(("Memcpy", "Memset"))]
    kernels = [n for n in names if n not in copies]
    return {"kernels": len(kernels), "copies": len(copies), "names": sorted({n[:120] for n in kernels})}
