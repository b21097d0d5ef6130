"""The most memory that a run needed."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch


class Peak:
    """The largest amount of memory in use since ``reset``: on a GPU what torch has allocated there; elsewhere what of
    the whole process was in memory, models and libraries included, at its high-water mark.

    Args:
        proc: of the process; Linux sets its mark back where it is asked to. Where nothing does, the mark is that of
            the process since it began.
    """

    def __init__(self, device: torch.device, proc: Path = Path("/proc/self")):
        self._device, self._proc = device, proc
        self.resets = device.type == "cuda" or self._reset()

    @property
    def what(self) -> str:
        """What is counted, in words."""
        if self._device.type == "cuda":
            return "most memory that torch had allocated on the GPU during a run of the cell"
        since = "during a run of the cell" if self.resets else "since the process began, the cells before included"
        return f"most memory of the whole process that was resident {since}"

    def reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self.resets:
            self._reset()

    def read(self) -> int:
        """Bytes."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if self.resets:
            for line in (self._proc / "status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024  # KiB, but on macOS bytes

    def _reset(self) -> bool:
        """Returns whether the mark was set back (proc(5): /proc/pid/clear_refs, 5)."""
        try:
            (self._proc / "clear_refs").write_text("5")
        except OSError:
            return False
        return True
