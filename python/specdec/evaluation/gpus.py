"""What GPUs can do, from their vendors' data sheets and architecture papers; nothing of it was measured here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """
    Attributes:
        architecture: as nvcc or hipcc name it.
        multiprocessors: or compute units.
        gigahertz: boost.
        terabytes: that memory delivers in a second.
        l2_megabytes: of the last-level cache.
        teraflops: of dense matrix products of bfloat16 with float32 sums, a second. Data sheets also print twice as
            much, for sparse matrices.
        gigabytes: of memory.
        source: of these numbers.
    """

    name: str
    architecture: str
    multiprocessors: int
    gigahertz: float
    terabytes: float
    l2_megabytes: int
    teraflops: float
    gigabytes: int
    source: str


GPUS = (
    Gpu("A100 80GB SXM", "sm_80", 108, 1.41, 2.04, 40, 312, 80, "NVIDIA A100 data sheet, 2021"),
    Gpu("H100 SXM", "sm_90a", 132, 1.98, 3.35, 50, 989, 80, "NVIDIA H100 data sheet, 2023"),
    Gpu("H200 SXM", "sm_90a", 132, 1.98, 4.8, 50, 989, 141, "NVIDIA H200 data sheet, 2024"),
    Gpu("B200", "sm_100", 148, 1.97, 8.0, 126, 2250, 180, "NVIDIA DGX B200 data sheet, 2024, an eighth of it"),
    Gpu("RTX 5090", "sm_120", 170, 2.41, 1.79, 96, 209.5, 32, "NVIDIA RTX Blackwell architecture paper, 2025"),
    Gpu("MI300X", "gfx942", 304, 2.1, 5.3, 256, 1307, 192, "AMD Instinct MI300X data sheet, 2023"),
)
REACHED = 0.9  # share of the data sheet's bandwidth that a plain reduction reaches; published for H100s
