"""How long the operations of recurrent layers should take on a GPU: the larger of what their bytes and what their
instructions take. **A prediction**: nothing of it was measured, and no kernel of it has run on a GPU.

    python bench/predict_recurrent.py                 # Qwen3.5-27B on an H100, at 1, 8 and 64 rows
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import report
import typer
from specdec.evaluation.gpus import GPUS, Gpu

# Of a warp for one token, in machine code for sm_90a (tests/kernels/test_recurrent_machine_code.py holds them).
INSTRUCTIONS = {"delta_step_kernel<8>": 500, "ssd_step_kernel<32, 1>": 370, "ssd_step_kernel<4, 1>": 270}
SCHEDULERS = 4  # of a multiprocessor, each of which issues one instruction in a cycle
# Cycles that a token takes a warp beside its instructions, where no other warp fills them: a read of the L2 cache, and
# two rounds of sums over lanes, each of five shuffles that wait for each other. Assumed.
WAITS = 700
COLUMNS = 8  # of a head's state in a warp


@dataclass(frozen=True)
class DeltaLayer:
    """A layer of the gated delta rule with its convolution; numbers of the model have ``number`` bytes."""

    heads: int
    key_heads: int
    dk: int
    dv: int
    taps: int = 4
    number: int = 2

    @property
    def state(self) -> int:
        """Bytes of a row."""
        return 4 * self.heads * self.dk * self.dv

    @property
    def inputs(self) -> int:
        """Bytes of a token's k, v, g and beta; g is float32."""
        return self.number * (self.key_heads * self.dk + self.heads * self.dv + self.heads) + 4 * self.heads

    def scan_bytes(self, rows: int, lacking: int, fed: int) -> int:
        """The state is read and written once, the lacking tokens are read from the window, q and the inputs of the fed
        ones are read and stored, and what they give is written in float32."""
        token = self.inputs + self.number * self.key_heads * self.dk + 4 * self.heads * self.dv
        return rows * (2 * self.state + lacking * self.inputs + fed * (token + 2 * self.inputs))

    def conv_bytes(self, rows: int, fed: int) -> int:
        """A token is read, and what it gives and itself are written; of the ring the inputs before it are read."""
        channels = 2 * self.key_heads * self.dk + self.heads * self.dv
        return rows * self.number * channels * (3 * fed + self.taps - 1)

    def warps(self, rows: int) -> int:
        return rows * self.heads * -(-self.dv // COLUMNS)

    def scan_seconds(self, gpu: Gpu, rows: int, lacking: int, fed: int) -> tuple[float, float]:
        """(By bytes, by instructions.)"""
        instructions, schedulers = INSTRUCTIONS["delta_step_kernel<8>"], gpu.multiprocessors * SCHEDULERS
        of_token = max(self.warps(rows) / schedulers * instructions, instructions + WAITS)
        by_bytes = self.scan_bytes(rows, lacking, fed) / (gpu.terabytes * 1e12)
        return by_bytes, (lacking + fed) * of_token / (gpu.gigahertz * 1e9)


QWEN_27B, LAYERS, WEIGHTS = DeltaLayer(heads=48, key_heads=16, dk=128, dv=128), 48, 27e9 * 2


def main(
    gpu: Annotated[str, typer.Option(help="one of specdec.evaluation.gpus")] = "H100 SXM",
    drafts: Annotated[int, typer.Option(help="K; half of them are accepted")] = 3,
) -> None:
    """Predicts a step of Qwen3.5-27B's recurrent layers, and the time of its weights beside it."""
    names = [each.name for each in GPUS]
    report.read_names("gpu", gpu, names)
    machine = GPUS[names.index(gpu)]
    weights = WEIGHTS / (machine.terabytes * 1e12)
    print(f"PREDICTION, not measured: {gpu}, {LAYERS} layers")
    units = ("MB of a layer", "by bytes, µs", "by instructions, µs", "convolution, µs", "all layers, ms", "weights, ms")
    print(f"| rows | K | {' | '.join(units)} |")
    print("|---|---|---|---|---|---|---|---|")
    for rows in (1, 8, 64):
        for k in sorted({0, drafts}):
            lacking, fed = 1 + k // 2, 1 + k
            by_bytes, by_instructions = QWEN_27B.scan_seconds(machine, rows, lacking, fed)
            conv = QWEN_27B.conv_bytes(rows, fed) / (machine.terabytes * 1e12)
            step = LAYERS * (max(by_bytes, by_instructions) + conv)
            moved = QWEN_27B.scan_bytes(rows, lacking, fed) / 1e6
            cells = [moved, 1e6 * by_bytes, 1e6 * by_instructions, 1e6 * conv, 1e3 * step, 1e3 * weights]
            print(f"| {rows} | {k} | " + " | ".join(f"{cell:.3g}" for cell in cells) + " |")


if __name__ == "__main__":
    typer.run(main)
