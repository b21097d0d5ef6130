"""The host's side of a launch: tensors as kernels take them, and warps and registers by family of GPUs."""

from __future__ import annotations

import functools

import torch

# Compute capability 8 and newer; AMD, whose warps have 64 lanes. On NVIDIA's GPUs of all generations, the numbers of
# these kernels are the same.
# fmt: off
WARPS = {
    "conv_window_kernel": {"nvidia": 1, "amd": 1},
    "delta_step_kernel":  {"nvidia": 4, "amd": 2},
    "ssd_step_kernel":    {"nvidia": 4, "amd": 2},
    "store_kernel":       {"nvidia": 4, "amd": 2},
}
# fmt: on
# Without a bound, the assembler would spill some of their registers to fit one more program on a multiprocessor.
MANY_REGISTERS = {"delta_step_kernel", "ssd_step_kernel"}


def dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, copied only if the last dimension is not dense, which kernels require."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def device_guard(tensor: torch.Tensor):
    """A context in which kernels run on the tensor's device; it does nothing for a CPU tensor (the interpreter's)."""
    return torch.cuda.device_of(tensor)


@functools.cache
def family(device: torch.device) -> str:
    """Whose GPU it is. Triton's interpreter has neither warps nor registers, so a CPU is any."""
    return "amd" if device.type == "cuda" and torch.version.hip is not None else "nvidia"


def options(kernel: str, device: torch.device) -> dict[str, int]:
    """Options for the launch of ``kernel``."""
    num_warps = WARPS[kernel][family(device)]
    return {"num_warps": num_warps} | (registers(device, num_warps) if kernel in MANY_REGISTERS else {})


def registers(device: torch.device, num_warps: int) -> dict[str, int]:
    """As many registers as a thread can have where so many run: there are 65,536 for all together."""
    return {} if family(device) == "amd" else {"maxnreg": min(255, 65536 // (32 * num_warps))}
