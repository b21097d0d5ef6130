"""Times ``draft_children`` and ``verify_tree`` against PyTorch and the bytes that they have to read.

    python bench/bench_trees.py --json bench/results/trees.json

The tree has 32 nodes: four below the root, and two below each of the next. Calls read cold logits, as those of
``bench_kernels.py`` do, whose rounds and ratios these are. README.md says how each number is made.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Annotated

import report
import torch
import typer
from bench_kernels import Bench, backends_of
from cases import DRAFTED_AT, DTYPES, LOGIT_STD, TYPICAL_NOISE_STD
from eager_trees import RULES, Rows
from measure import Method
from peers import Compiler, probabilities

from specdec_kernels import SamplingParams, draft_children, verify_tree

NODES, VOCABULARY = 32, 128256
PARENTS = (*[-1] * 4, *(node // 2 for node in range(NODES - 4)))
CHILDREN = [[node for node, parent in enumerate(PARENTS) if parent == row - 1] for row in range(NODES + 1)]
WIDTH = 4  # of draft_children
MOST_SETS = 16
RUNS = 200  # of the eager rule, which say how many rows it reads
PARAMS = SamplingParams(1.0)


class Inputs:
    """``sets`` trees over independent logits. Calls take them in turn, each with noise of its own."""

    def __init__(self, batch: int, vocabulary: int, dtype: str, device: torch.device, most_sets: int):
        self.batch, self.row_bytes = batch, vocabulary * DTYPES[dtype].itemsize
        # What calls read must exceed the caches. A call reads three of the target's rows, at least.
        self.sets = min(math.ceil(2 * report.cache_bytes(device) / (3 * batch * self.row_bytes)), most_sets)
        self.calls = max(self.sets, math.ceil(16 / batch))
        shape, like = (self.sets, batch, NODES + 1, vocabulary), {"device": device}
        self.target, self.draft = (torch.empty(shape, dtype=DTYPES[dtype], **like) for _ in range(2))
        torch.manual_seed(0)
        for target, draft in zip(self.target, self.draft, strict=True):
            noise = torch.randn(target.shape, **like)
            target.copy_(torch.randn(target.shape, **like) * LOGIT_STD)
            draft.copy_(target.float() + TYPICAL_NOISE_STD * noise)
        self.seed = torch.arange(self.sets * batch, **like).view(self.sets, batch)
        self.position = [torch.full((batch,), 1000 * i, **like) for i in range(self.calls)]
        self.parents = torch.tensor(PARENTS, **like)
        self.tokens = {sampled: self._nodes(sampled) for sampled in (False, True)}

    def _nodes(self, sampled: bool) -> torch.Tensor:
        """[sets, B, N]: the children of every row, from other noise than calls use."""
        tokens = torch.full((*self.seed.shape, NODES), -1, device=self.seed.device)
        for n, row in itertools.product(range(self.sets), range(NODES + 1)):
            if CHILDREN[row]:
                at = {"seed": self.seed[n], "position": DRAFTED_AT, "offset": row}
                drawn = draft_children(self.draft[n, :, row], len(CHILDREN[row]), PARAMS, **at, sampled=sampled)
                tokens[n, :, CHILDREN[row]] = drawn.tokens
        return tokens

    def method(self, name: str, run: Callable[[int, int], object], capturable: bool = True) -> Method:
        """``run(i, n)`` is call i, on set n."""
        return Method(name, lambda i: run(i, i % self.sets), self.calls, capturable, warm=lambda i: run(i, 0))

    def verify(self, rule: str, backend: str, i: int, n: int):
        draft = None if rule == "walk" else self.draft[n]
        at = {"seed": self.seed[n], "position": self.position[i % self.calls]}
        tokens = self.tokens[rule != "walk"][n]
        return verify_tree(self.target[n], tokens, self.parents, draft, params=PARAMS, **at, rule=rule, backend=backend)

    def eager(self, rule: str, i: int, n: int) -> list[tuple[Rows, Rows]]:
        """The rule in PyTorch, sequence by sequence. Returns the rows that it read of each."""
        rows = [(Rows(target), Rows(draft)) for target, draft in zip(self.target[n], self.draft[n], strict=True)]
        for (p, q), tokens in zip(rows, self.tokens[rule != "walk"][n].tolist(), strict=True):
            RULES[rule](p, q, tokens, CHILDREN)
        return rows

    def rows_read(self, rule: str, runs: int) -> tuple[float, float]:
        """How many rows of target and draft a sequence's verification reads, on average. Ours reads the same rows with
        the same probabilities."""
        read = [rows for i in range(math.ceil(runs / self.batch)) for rows in self.eager(rule, i, i % self.sets)]
        return statistics.mean(p.read for p, _ in read), statistics.mean(q.read for _, q in read)


def measure(inputs: Inputs, bench: Bench, ours: Callable, eager: Method, bytes_read: float) -> dict[str, object]:
    methods = [inputs.method(backend, partial(ours, backend)) for backend in bench.backends]
    floor = report.floor_seconds(bytes_read, bench.ceilings)
    beside = {backend: ({"floor": floor}, [eager.name]) for backend in bench.backends}
    row, _ = bench.timed([*methods, eager], beside, {})
    return row | {"bytes_read": bytes_read, "floor_seconds": floor}


def measure_children(inputs: Inputs, bench: Bench, sampled: bool) -> dict[str, object]:
    def ours(backend: str, i: int, n: int):
        at = {"seed": inputs.seed[n], "position": inputs.position[i % inputs.calls], "offset": 0}
        return draft_children(inputs.draft[n, :, 0], WIDTH, PARAMS, **at, sampled=sampled, backend=backend)

    def eager(i: int, n: int):
        q = probabilities(inputs.draft[n, :, 0])
        return ((q / torch.empty_like(q).exponential_()) if sampled else q).topk(WIDTH), q

    row = measure(inputs, bench, ours, inputs.method("eager", eager), inputs.batch * inputs.row_bytes)
    return {"operation": "draft_children", "sampled": sampled, "width": WIDTH} | row


def measure_verification(inputs: Inputs, bench: Bench, rule: str, runs: int) -> dict[str, object]:
    of_target, of_draft = inputs.rows_read(rule, runs)
    eager = inputs.method("eager", lambda i, n: inputs.eager(rule, i, n), capturable=False)
    bytes_read = inputs.batch * inputs.row_bytes * (of_target + of_draft)
    row = measure(inputs, bench, partial(inputs.verify, rule), eager, bytes_read)
    accepted = [inputs.verify(rule, bench.backends[0], i, i % inputs.sets).num_accepted for i in range(inputs.calls)]
    about = {"mean_accepted": torch.cat(accepted).float().mean().item()}
    return {"operation": "verify_tree", "rule": rule, "nodes": NODES, "rows_read": [of_target, of_draft]} | about | row


def main(
    device: report.DeviceName = "cpu",
    batches: Annotated[str, typer.Option("--batches", "-B")] = "1,8",
    dtypes: Annotated[str, typer.Option(help=f"some of {', '.join(DTYPES)}")] = "float32",
    seconds: Annotated[float, typer.Option(min=0, help="a row, at least 5 rounds")] = 4.0,
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    """Times draft_children and verify_tree."""
    where = report.read_device(device)
    backends, left_out = backends_of(where)
    shapes = itertools.product(report.read_names("dtypes", dtypes, DTYPES), report.read_integers("batches", batches))
    about = {"quick": quick, "backends_left_out": left_out}
    results = report.Report("trees", where, json_path, threads, **about)
    ceilings = results.content["bandwidth"] = report.bandwidth(where, quick)
    bench = Bench(where, backends, Compiler(0.0), ceilings, 0.01 if quick else seconds, 2 if quick else MOST_SETS)
    for dtype, batch in shapes:
        vocabulary = VOCABULARY // 100 if quick else VOCABULARY
        inputs = Inputs(batch, vocabulary, dtype, where, bench.most_sets)
        cases = [partial(measure_children, inputs, bench, sampled) for sampled in (True, False)]
        cases += [partial(measure_verification, inputs, bench, rule, 8 if quick else RUNS) for rule in RULES]
        for case in cases:
            row = {"B": batch, "V": vocabulary, "dtype": dtype, "input_sets": inputs.sets} | case()
            results.add(row)
            head = " ".join(f"{k}={row[k]}" for k in ("operation", "rule", "sampled", "B", "dtype") if k in row)
            results.show(head, [{"method": k, "seconds": v} for k, v in row["seconds"].items()], ("method", "seconds"))
            results.say(row["ratios"] | row["unavailable"])
    results.finish()


if __name__ == "__main__":
    typer.run(main)
