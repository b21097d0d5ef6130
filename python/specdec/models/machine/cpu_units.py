"""What this CPU computes with."""

from __future__ import annotations

from pathlib import Path

# By the word for it in /proc/cpuinfo, on x86 and on Arm.
_UNITS = {
    "avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX-BF16",
    "asimd": "NEON", "sve": "SVE", "bf16": "Arm BF16",
}  # fmt: skip
OF_BFLOAT16 = frozenset(("AVX512-BF16", "AMX-BF16", "Arm BF16"))


def cpu_units(root: Path = Path("/")) -> tuple[str, ...]:
    """Returns the names of the vector and matrix units that matter for a model; () if they are unknown, as on systems
    other than Linux.

    Args:
        root: the root of the file system in which /proc is read.
    """
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return tuple(unit for flag, unit in _UNITS.items() if flag in flags)
