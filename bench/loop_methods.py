"""Ways to decode one cell of batch and context: transformers' two, and ours with graphs, compiled or as it is."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from bench_decoding import assistant_with
from job_slices import synchronized
from loop_efficiency import Mark
from specdec import Outcome, Request, Scheduler, SpeculativeDecoder, Stats
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from tunable_pair import TunablePair

from specdec_kernels import SamplingParams

GRAPH_BYTES = 2 << 30  # for CUDA graphs, as by default
SLACK = 64  # tokens beyond the last window


@dataclass(frozen=True)
class Cell:
    batch: int
    context: int
    new_tokens: int  # of a sequence in a window
    windows: int
    num_drafts: int
    temperature: float

    @property
    def window(self) -> int:
        return self.batch * self.new_tokens

    @property
    def tokens(self) -> int:
        """Of all sequences and windows."""
        return self.window * self.windows

    @property
    def room(self) -> int:
        """Tokens of one sequence: until the last window ends none must end, and some are ahead of others."""
        return 2 * self.new_tokens * self.windows + SLACK

    def prompts(self, model: PreTrainedModel) -> list[list[int]]:
        """Random, the same for every method."""
        shape, generator = (self.batch, self.context), torch.Generator().manual_seed(0)
        return torch.randint(model.config.vocab_size, shape, generator=generator).tolist()


class Ran(NamedTuple):
    marks: list[Mark]
    stats: Stats | None  # None where the method does not say


class Unavailable(Exception):
    """Why a method cannot run here."""


# ---- transformers


class _Marks(StoppingCriteria):
    """Notes when the text has grown, and ends it when it is long enough. Its first call is after the prompt's
    forward and the first tokens."""

    def __init__(self, cell: Cell):
        self.cell, self.marks = cell, list[Mark]()

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        if not self.marks:
            synchronized(input_ids.device)
        made = self.cell.batch * (input_ids.shape[1] - self.cell.context)
        self.marks.append(Mark(time.perf_counter(), made, len(self.marks)))
        enough = made - self.marks[0].tokens >= self.cell.tokens
        return torch.full((self.cell.batch,), enough, dtype=torch.bool, device=input_ids.device)


class Transformers:
    """``generate`` with its dynamic cache, eager; ``assistant``: assisted."""

    def __init__(self, name: str, model: PreTrainedModel, assistant: PreTrainedModel | None = None):
        self.name, self.model, self.assistant = name, model, assistant

    def run(self, cell: Cell) -> Ran:
        torch.manual_seed(0)
        ids = torch.tensor(cell.prompts(self.model), device=self.model.device)
        sampling = {"do_sample": False}
        if cell.temperature > 0:
            sampling = {"do_sample": True, "temperature": cell.temperature, "top_k": 0}
        noted = _Marks(cell)
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=cell.room,
            pad_token_id=0,
            assistant_model=self.assistant,
            stopping_criteria=StoppingCriteriaList([noted]),
            **sampling,
        )
        return Ran(noted.marks, None)


# ---- ours


class Mode(NamedTuple):
    compiled: bool
    graphs: bool
    deferred: bool

    def __str__(self) -> str:
        return "+".join(name for name, on in zip(self._fields, self, strict=True) if on) or "eager"


MODES = {str(m): m for m in (Mode(c, g, d) for c in (False, True) for g in (False, True) for d in (False, True))}


def decoder_of(pair: TunablePair, cell: Cell, speculative: bool, compiled: bool) -> SpeculativeDecoder:
    models = (pair.target, pair.draft, cell.num_drafts) if speculative else (pair.target, None, 0)
    return SpeculativeDecoder(*models, compile=compiled)


class Specdec:
    """A scheduler with a row for each prompt. Prompts are read by its first step, so marks begin after them."""

    def __init__(self, name: str, decoder: SpeculativeDecoder, cell: Cell, mode: Mode):
        if mode.graphs and decoder.target.device.type != "cuda":
            raise Unavailable("CUDA graphs are of GPUs")
        self.name, self.mode, self.decoder = name, mode, decoder
        decoder.graph_bytes = GRAPH_BYTES if mode.graphs else 0
        self.scheduler = Scheduler(
            decoder,
            rows=cell.batch,
            max_length=cell.context + cell.room,
            prefill_chunk=cell.batch * cell.context,
            deferred=mode.deferred,
        )

    def begin(self, cell: Cell) -> None:
        """All prompts are read, and the first step is done."""
        params = SamplingParams(temperature=cell.temperature)
        for i, prompt in enumerate(cell.prompts(self.decoder.target.model)):
            self.scheduler.submit(Request(prompt, cell.room, params, seed=i, eos_token_id=[]))
        self.step()

    def step(self) -> int:
        """How many tokens it made."""
        updates = self.scheduler.step()
        if ended := [u for u in updates if isinstance(u, Outcome)]:
            raise RuntimeError(f"a sequence ended too early: {ended[0].end}: {ended[0].error}")
        return sum(len(u.tokens) for u in updates)

    def run(self, cell: Cell, more: int = 0) -> Ran:
        """``more``: steps beyond the last window."""
        try:
            self.begin(cell)
            marks = [Mark(synchronized(self.decoder.target.device), 0, 0)]
            while marks[-1].tokens < cell.tokens or more > 0:
                more -= marks[-1].tokens >= cell.tokens
                made = self.step()
                marks.append(Mark(time.perf_counter(), marks[-1].tokens + made, len(marks)))
        except BaseException:
            self.end()
            raise
        return Ran(marks, Stats.total((o.stats for o in self.end()), self.decoder.most_drafts))

    def end(self) -> list[Outcome]:
        """Takes back what was begun."""
        self.scheduler.close()
        found: list[Outcome] = []
        while not self.scheduler.idle:
            found += [u for u in self.scheduler.step() if isinstance(u, Outcome)]
        return found

    def graphs(self) -> dict[str, int] | None:
        graphs = self.scheduler.batch.graphs
        return None if graphs is None else {"count": len(graphs), "bytes": graphs.bytes, "replays": graphs.replays}

    def close(self) -> None:
        """Frees caches and graphs."""
        del self.scheduler


def transformers_methods(pair: TunablePair, cell: Cell) -> list[Transformers]:
    found = [Transformers("transformers", pair.target)]
    if cell.batch == 1:  # its assisted generation takes one sequence
        for name, k in ((f"assisted K={cell.num_drafts}", cell.num_drafts), ("assisted default", None)):
            found.append(Transformers(name, pair.target, assistant_with(pair.draft, k)))
    return found
