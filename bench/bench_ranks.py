"""Measures a target over several processes beside the same in one: the logits' largest difference, and memory.

    torchrun --nproc-per-node 2 bench/bench_ranks.py FOLDER

Memory is what each process has after decoding, beyond what it had before the model was loaded: resident bytes, and of
these its own. The others are pages of the files, which the ranks share, and which the system can drop.
"""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import Annotated

import report
import torch
import typer
from specdec import SpeculativeDecoder, load_model
from specdec.models.load.load_sharded import join_ranks

EMBEDDED = Path(str(resources.files("specdec"))) / "embedded" / "target"
PROMPTS = [[*range(5, 37)], [*range(50, 58)]]
NEW = 48  # tokens


def memory(process: int) -> dict[str, int]:
    lines = [line.split() for line in Path(f"/proc/{process}/status").read_text().splitlines()]
    sizes = {line[0]: 1024 * int(line[1]) for line in lines if line[0] in ("VmRSS:", "RssAnon:")}
    return {"resident": sizes["VmRSS:"], "own": sizes["RssAnon:"]}


def siblings() -> list[int]:
    """The processes of the ranks, this one first: torchrun started all of them."""
    parent, found = os.getppid(), list[int]()
    for file in Path("/proc").glob("[0-9]*/stat"):
        if int(file.read_text().rpartition(")")[2].split()[1]) == parent:
            found.append(int(file.parent.name))
    return sorted(found, key=lambda process: (process != os.getpid(), process))


def main(
    folder: Annotated[Path, typer.Argument(help="of the model, which is computed in float32")] = EMBEDDED,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    join_ranks(ranks, "cpu")
    results = report.Report("ranks", torch.device("cpu"), json_path, None, quick=quick, target=folder.name)

    def decoded(model):
        decoder = SpeculativeDecoder(model, num_drafts=3)
        return decoder.generate(PROMPTS, max_new_tokens=4 if quick else NEW, eos_token_id=[], output_logits=True)

    def row(name: str, model, rank: int, process: int, before: dict[str, int]) -> dict[str, object]:
        weights = sum(getattr(p, "_local_tensor", p).nbytes for p in model.parameters())
        grown = {kind: size - before[kind] for kind, size in memory(process).items()}
        return {"model": name, "rank": rank, "weights": weights, **grown}

    # What is imported late, and buffers of threads and of the channel.
    decoded(load_model(EMBEDDED, "float32", tp=ranks) if ranks == 2 else load_model(EMBEDDED, "float32"))
    processes = siblings()
    before = [memory(process) for process in processes]
    divided = load_model(folder, "float32", tp=ranks)
    of_ranks = decoded(divided)
    rows = [
        row(f"over {ranks}", divided, rank, process, start)
        for rank, (process, start) in enumerate(zip(processes, before, strict=True))
    ]
    before = [memory(os.getpid())]
    whole = load_model(folder, "float32")
    of_one = decoded(whole)
    rows.append(row("in one", whole, 0, os.getpid(), before[0]))
    pairs = zip(of_one.logits, of_ranks.logits, strict=True)
    same = [a == b for a, b in zip(of_one.tokens, of_ranks.tokens, strict=True)]
    difference = max((a - b).abs().max().item() for (a, b), equal in zip(pairs, same, strict=True) if equal)
    found = {"largest_difference": difference, "largest_logit": of_one.logits[0].abs().max().item(), "same": sum(same)}
    for each in rows:
        results.add({**each, **found})
    results.show(folder.name, rows, ("model", "rank", "weights", "resident", "own"))
    print(found)
    results.finish()


if __name__ == "__main__":
    typer.run(main)
