"""What every launch needs on the host."""

from __future__ import annotations

import torch
import triton


def dense_rows(logits: torch.Tensor) -> torch.Tensor:
    """The same logits with a last dimension that kernels can read; only others are copied."""
    return logits if logits.stride(-1) == 1 or logits.shape[-1] == 1 else logits.contiguous()


def padded_blocks(num_blocks: int) -> int:
    """How many blocks a row's merge and race take in at once: a power of 2, and 4 at least (one Philox call)."""
    return max(4, triton.next_power_of_2(num_blocks))


def device_guard(tensor: torch.Tensor):
    """Kernels run on the tensor's device, not on the current one; nothing on a CPU (Triton's interpreter)."""
    return torch.cuda.device_of(tensor)
