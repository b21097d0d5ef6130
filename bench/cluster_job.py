"""Processes that run the shards of a job on one thread each, as ``specdec generate --shard i/n`` does, and what the
reading of prompts and the steps take in them. ``predict_cluster.py`` measures with them."""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from cluster_costs import Costs, Text
from race import spread_lengths, unseen_code
from specdec import Scheduler, SpeculativeDecoder, load_embedded_pair, load_pair
from specdec.jobs.input import JobFile
from specdec.jobs.lines import LineSettings
from specdec.jobs.output import Results
from specdec.jobs.run import RequestMaker, decode_lines, write_results
from specdec.jobs.shard import WHOLE, Shard
from specdec.jobs.signals import Signals
from specdec.loop.sequence import Output
from transformers import PreTrainedTokenizerBase
from tunable_pair import PRESETS, make_pair

PROMPTS, NEW = (16, 96), (16, 96)  # tokens of the shortest and the longest
LONGEST = 256  # of a prompt and its text


@dataclass(frozen=True)
class Case:
    """A pair, how it decodes, and a job of so many prompts. ``folder`` holds its ``target`` and ``draft``; None: the
    embedded pair."""

    name: str
    num_drafts: int
    rows: int
    prompts: int
    folder: Path | None = None


@dataclass
class Record:
    """What processes did, together: their (busy rows, seconds, tokens emitted) of each step, (tokens, seconds) of each
    part of a prompt, all their seconds, and how many prompts they finished."""

    steps: list[tuple[int, float, int]] = field(default_factory=list)
    read: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0
    prompts: int = 0

    def __add__(self, other: Record) -> Record:
        return Record(
            self.steps + other.steps, self.read + other.read, self.seconds + other.seconds, self.prompts + other.prompts
        )


def save_tunable_pair(preset: str, alpha: float, folder: Path) -> None:
    """A pair with random weights and this acceptance at temperature 1, with the embedded pair's tokenizer, so that
    prompts are texts."""
    tokenizer = load_embedded_pair()[2]
    pair = make_pair(PRESETS[preset]._replace(vocabulary=len(tokenizer)), torch.device("cpu"))
    pair.calibrate(alpha, 1.0)
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def write_prompts(path: Path, tokenizer: PreTrainedTokenizerBase, first: int, count: int) -> list[Text]:
    """Writes a file of prompts of unseen code, from the first-th on, with a number of new tokens each. Returns their
    lengths."""
    found = []
    code = unseen_code(tokenizer, first + count, PROMPTS[1])[first:]
    cut, new = spread_lengths(count, *PROMPTS), spread_lengths(count, *NEW)[::-1]
    with path.open("w", encoding="utf-8") as file:
        for ids, tokens, length in zip(code, cut, new, strict=True):
            line = {"prompt": tokenizer.decode(ids[:tokens]), "max_new_tokens": length, "min_new_tokens": length}
            file.write(json.dumps(line) + "\n")
            # The last token of a prompt is read by the first step.
            found.append(Text(len(tokenizer(line["prompt"]).input_ids) - 1, length))
    return found


def watch(scheduler: Scheduler, record: Record) -> None:
    """Has the scheduler note what its steps and its reading of prompts take."""
    batch, clock = scheduler.batch, time.perf_counter
    step, read_part = batch.step, batch.read_part

    def watched_step() -> list[Output]:
        live, begun = batch.live, clock()
        outputs = step()
        record.steps.append((live, clock() - begun, sum(len(output.tokens) for output in outputs)))
        return outputs

    def watched_read_part() -> int:
        begun = clock()
        tokens = read_part()
        record.read.append((tokens, clock() - begun))
        return tokens

    batch.step, batch.read_part = watched_step, watched_read_part


def costs_of(record: Record, rows: int) -> Costs:
    """The costs that processes had. Of a number of busy rows that never came, it is what lies between the others."""
    by_rows = defaultdict(list)
    for live, seconds, _ in record.steps:
        by_rows[live].append(seconds)
    seen = sorted(by_rows)
    steps = np.interp(range(1, rows + 1), seen, [statistics.fmean(by_rows[live]) for live in seen])
    tau = sum(tokens for *_, tokens in record.steps) / sum(live for live, *_ in record.steps)
    reading = sum(seconds for _, seconds in record.read)
    rest = record.seconds - reading - sum(seconds for _, seconds, _ in record.steps)
    token = reading / sum(tokens for tokens, _ in record.read)
    return Costs(steps.tolist(), tau, token, rest / record.prompts)


# ---- A process


def work(link: Connection, case: Case) -> None:
    """Loads the models and says so. Then it is told a file of prompts and a shard of it, says when it is ready, runs it
    when it is told to, so that processes begin together, and returns (begin, end, what it did); None ends it."""
    torch.set_num_threads(1)
    pair = load_embedded_pair() if case.folder is None else load_pair(case.folder / "target", case.folder / "draft")
    target, draft, tokenizer = pair
    decoder = SpeculativeDecoder(target, draft if case.num_drafts else None, case.num_drafts)
    chunk = case.rows * PROMPTS[1]  # a step reads the prompts of all rows, if they are free
    scheduler = Scheduler(decoder, rows=case.rows, max_length=LONGEST, prefill_chunk=chunk)
    make = RequestMaker(tokenizer, (), decoder.grammar_compiler)
    watch(scheduler, record := Record())
    link.send("ready")
    while (told := link.recv()) is not None:
        path, shard = told
        file = JobFile(path, LineSettings(temperature=1.0), target.config.vocab_size, shard=shard)
        with closing(file), tempfile.TemporaryDirectory() as folder, Signals() as signals:
            file.check()
            with closing(Results(Path(folder) / "out.jsonl")) as results:
                results.begin({"settings": {}})
                record.steps.clear()
                record.read.clear()
                link.send("ready")
                link.recv()
                begun = time.perf_counter()
                rows = decode_lines(scheduler, file.lines(), tokenizer, make)
                write_results(rows, results, signals, lambda row: None)
                ended = time.perf_counter()
                if results.totals.ends["length"] != file.prompts:
                    raise RuntimeError(f"texts ended as {dict(results.totals.ends)}")
        record.seconds, record.prompts = ended - begun, file.prompts
        link.send((begun, ended, record))


class Processes:
    """Some processes that have loaded a pair, and the seconds that each took to, one after the other."""

    def __init__(self, case: Case, count: int):
        spawn, self._links, self._processes, self.startup = multiprocessing.get_context("spawn"), [], [], []
        for _ in range(count):
            link, theirs = spawn.Pipe()
            process, begun = spawn.Process(target=work, args=(theirs, case), daemon=True), time.perf_counter()
            process.start()
            theirs.close()  # or its end would not be seen here
            link.recv()
            self.startup.append(time.perf_counter() - begun)
            self._links.append(link)
            self._processes.append(process)

    def run(self, path: Path, shards: Sequence[Shard]) -> tuple[float, Record]:
        """Each of the first processes runs a shard of the file. Returns the seconds from the first beginning to the
        last end, and what they did."""
        links = self._links[: len(shards)]
        for told in ([(path, shard) for shard in shards], ["begin"] * len(shards)):
            for link, what in zip(links, told, strict=True):
                link.send(what)
            found = [link.recv() for link in links]
        begins, ends, records = zip(*found, strict=True)
        return max(ends) - min(begins), sum(records, Record())

    def close(self) -> None:
        for link, process in zip(self._links, self._processes, strict=True):
            link.send(None)
            process.join()


@contextmanager
def processes(case: Case, count: int, warm_up: Path) -> Iterator[Processes]:
    """Processes that have run a file once, so that what they compile and record for later steps is done."""
    found = Processes(case, count)
    try:
        found.run(warm_up, [WHOLE] * count)
        yield found
    finally:
        found.close()
