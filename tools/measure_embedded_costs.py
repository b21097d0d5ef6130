"""Writes the step times that come with the embedded pair: python tools/measure_embedded_costs.py, on an idle CPU.

They are kept as those of "any CPU": where a user has none of the machine (``specdec advise --save``), their ratios make
K of sampled texts the same function everywhere, and are the first guess of greedy ones. They are of one thread, since
most time of models that small goes into starting operations.
"""

from __future__ import annotations

from pathlib import Path

import specdec
import torch
from specdec import SpeculativeDecoder, load_embedded_head, load_embedded_pair
from specdec.cli.compare import CODE_PROMPTS
from specdec.drafters.heads.embedded import KINDS
from specdec.evaluation.advise.costs import measure
from specdec.loop import saved_costs

MOST, TOKENS, SECONDS = 8, 64, 14.0  # K, of a text, for one drafter
BATCHES = {2: 6.0, 4: 8.0, 8: 12.0}  # seconds by rows, for the draft model
PATH = Path(specdec.__file__).parent / "embedded" / "step_times.json"


def main() -> None:
    torch.set_num_threads(1)
    target, draft, tokenizer = load_embedded_pair()
    prompts = tokenizer(list(CODE_PROMPTS)).input_ids
    plain = SpeculativeDecoder(target, None, 0)
    for drafter in (draft, *(load_embedded_head(kind, target) for kind in KINDS)):
        decoder = SpeculativeDecoder(target, drafter, MOST)
        seconds = {}
        for rows, limit in {1: SECONDS, **(BATCHES if drafter is draft else {})}.items():
            measured = measure(plain, decoder, prompts, rows, range(1, MOST + 1), TOKENS, limit)
            seconds[rows] = {k: round(measured.seconds(k), 6) for k in range(MOST + 1)}
            ratios = ", ".join(f"{seconds[rows][k] / seconds[rows][0]:.2f}" for k in seconds[rows])
            print(f"{type(decoder.drafter).__name__}, {rows} rows: {ratios}")
        description = saved_costs.described_anywhere(decoder.target, decoder.drafter, 0)
        assert description is not None
        saved_costs.save(PATH, description, seconds)


if __name__ == "__main__":
    main()
