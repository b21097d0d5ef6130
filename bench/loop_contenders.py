"""Who decodes in bench_loop.py: transformers' plain and assisted generation, and the loop of a scheduler. All
decode the same random prompts, window by window."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from measure import profiled, synchronisations, synchronize
from specdec import Request, Scheduler, SpeculativeDecoder, Stats
from specdec.evaluation.contenders import assistant_config
from specdec.loop.sequence import SequenceState
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from tunable_pair import TunablePair

from specdec_kernels import SamplingParams

GRAPH_BYTES = 2 << 30  # for CUDA graphs, as by default
SLACK = 64  # tokens beyond the last window
WATCHED = 20  # steps


@dataclass(frozen=True)
class Cell:
    batch: int
    context: int
    new_tokens: int  # of a sequence in a window
    windows: int
    num_drafts: int

    @property
    def window(self) -> int:
        """Tokens of all sequences in a window."""
        return self.batch * self.new_tokens

    @property
    def middle(self) -> int:
        """Tokens of a sequence in the middle of what is timed."""
        return self.context + self.new_tokens * self.windows // 2

    @property
    def room(self) -> int:
        """Tokens of one sequence. None must end before the last window does, and some are ahead of others."""
        return 2 * self.new_tokens * self.windows + SLACK

    def prompts(self, model: PreTrainedModel) -> list[list[int]]:
        """Random tokens, the same for every method."""
        shape, generator = (self.batch, self.context), torch.Generator().manual_seed(0)
        return torch.randint(model.config.vocab_size, shape, generator=generator).tolist()


class Window(NamedTuple):
    """A stretch of decoding, without any prefill."""

    seconds: float
    tokens: int  # of all sequences
    steps: int


# ---- transformers


class _Marks(StoppingCriteria):
    """Notes (time, tokens) whenever the text has grown, and ends it with the window. The first call comes after the
    prompt's forward and the first tokens."""

    def __init__(self, cell: Cell):
        self.cell, self.marks = cell, list[tuple[float, int]]()

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        if not self.marks:
            synchronize(input_ids.device)
        made = self.cell.batch * (input_ids.shape[1] - self.cell.context)
        self.marks.append((time.perf_counter(), made))
        enough = made - self.marks[0][1] >= self.cell.window
        return torch.full((self.cell.batch,), enough, dtype=torch.bool, device=input_ids.device)


class Transformers:
    """``generate`` with its dynamic cache, eager, or with a static one, with which it compiles on a GPU; with an
    ``assistant``: assisted, which takes static caches since transformers 5.24. Each window is a text of its own."""

    def __init__(
        self,
        name: str,
        cell: Cell,
        model: PreTrainedModel,
        assistant: PreTrainedModel | None = None,
        static: bool = False,
    ):
        self.name, self.cell, self.model, self.assistant = name, cell, model, assistant
        self.cache = "static" if static else None

    def open(self) -> None:
        for _ in range(1 if self.cache is None else 3):  # compiled in the first, captured in the second
            self.window()

    def window(self) -> Window:
        torch.manual_seed(0)
        ids = torch.tensor(self.cell.prompts(self.model), device=self.model.device)
        noted = _Marks(self.cell)
        most = self.cell.new_tokens + SLACK  # a static cache has no more slots than the window needs
        ends = {"max_new_tokens": most, "stopping_criteria": StoppingCriteriaList([noted]), "pad_token_id": 0}
        how = {"assistant_model": self.assistant, "cache_implementation": self.cache, "do_sample": True, "top_k": 0}
        self.model.generate(ids, attention_mask=torch.ones_like(ids), **ends, **how)
        (begun, first), (ended, last) = noted.marks[0], noted.marks[-1]
        return Window(ended - begun, last - first, len(noted.marks) - 1)

    def close(self) -> dict[str, object]:
        return {"alpha": None}


def assistant_with(draft: PreTrainedModel, num_drafts: int | None) -> PreTrainedModel:
    """The draft as transformers' assistant: K drafts and no early stop, or (None) its own defaults."""
    assistant = copy.copy(draft)  # the weights are shared; only the generation settings are its own
    assistant.generation_config = assistant_config(num_drafts)
    return assistant


# ---- The loop of a scheduler


class Mode(NamedTuple):
    graphs: bool
    deferred: bool

    def __str__(self) -> str:
        return "+".join(name for name, on in zip(self._fields, self, strict=True) if on) or "eager"


MODES = {str(m): m for m in (Mode(g, d) for g in (False, True) for d in (False, True))}


class Specdec:
    """A scheduler with a row for each prompt, which goes on from window to window. Its first step reads the prompts, so
    windows begin after it."""

    def __init__(self, name: str, cell: Cell, decoder: SpeculativeDecoder, mode: Mode):
        self.name, self.cell, self.mode, self.decoder = name, cell, mode, decoder
        self.device = decoder.target.device
        self.watch = self.device.type == "cuda" and cell.batch == 1

    def open(self) -> None:
        """Decodes the same texts once before they are timed, so that every shape is captured."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.decoder.graph_bytes = GRAPH_BYTES if self.mode.graphs else 0
        rows, context = self.cell.batch, self.cell.context
        sizes = {"rows": rows, "max_length": context + self.cell.room, "prefill_chunk": rows * context}
        self.scheduler = Scheduler(self.decoder, **sizes, async_scheduling=self.mode.deferred)
        self._begin()
        for _ in range(self.cell.windows):
            self.window()
        for _ in range(4):  # so that also the last shapes come at least twice
            self._step()
        self._end()
        self.captured = self._graphs()
        self._begin()
        synchronize(self.device)

    def window(self) -> Window:
        begun, tokens, steps = time.perf_counter(), 0, 0  # a wait for the device would cost deferred steps their lead
        while tokens < self.cell.window:
            tokens, steps = tokens + self._step(), steps + 1
        return Window(time.perf_counter() - begun, tokens, steps)

    def close(self) -> dict[str, object]:
        """Ends the texts, and says what is to be known besides speed."""
        graphs = self._graphs()
        stats = Stats.total((o.stats for o in self._end()), self.decoder.most_drafts)
        about: dict[str, object] = {
            "alpha": stats.alpha if self.decoder.most_drafts else None,
            "graphs": graphs,
            "captured_while_timed": graphs["count"] - self.captured["count"] if graphs and self.captured else None,
            "peak_bytes": torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None,
        }
        if self.watch:
            self._begin()
            for _ in range(3):
                self._step()
            about["profile"] = profiled(self._step, WATCHED)
            about["synchronisations"] = synchronisations(self._step, WATCHED)  # an error may end what is decoded
            self._end()
        return about

    def _begin(self) -> None:
        """Reads all prompts and does the first step."""
        for i, prompt in enumerate(self.cell.prompts(self.decoder.target.model)):
            self.scheduler.submit(Request(prompt, self.cell.room, SamplingParams(), seed=i, eos_token_id=[]))
        self._step()

    def _step(self) -> int:
        """Returns how many tokens it made."""
        updates = self.scheduler.step()
        if ended := [u.sequence for u in updates if u.finish_reason is not None]:
            raise RuntimeError(f"a sequence ended too early: {ended[0].error}")
        return sum(len(u.tokens) for u in updates)

    def _end(self) -> list[SequenceState]:
        """Takes back what was begun."""
        self.scheduler.close()
        found: list[SequenceState] = []
        while not self.scheduler.idle:
            found += [u.sequence for u in self.scheduler.step() if u.finish_reason is not None]
        return found

    def _graphs(self) -> dict[str, int] | None:
        graphs = self.scheduler.batch.config.graphs
        return None if graphs is None else {"count": len(graphs), "bytes": graphs.bytes, "replays": graphs.replays}


def contenders(
    pair: TunablePair, cell: Cell, modes: Sequence[str], assisted: bool = True
) -> list[Transformers | Specdec]:
    theirs: list[tuple[str, PreTrainedModel | None]] = [("transformers", None)]
    if cell.batch == 1 and assisted:  # transformers' assisted generation takes one sequence
        for name, k in ((f"assisted K={cell.num_drafts}", cell.num_drafts), ("assisted default", None)):
            theirs.append((name, assistant_with(pair.draft, k)))
    found: list[Transformers | Specdec] = [Transformers(name, cell, pair.target, other) for name, other in theirs]
    decoders: dict[bool, SpeculativeDecoder] = {}
    for mode, speculative in itertools.product((MODES[m] for m in modes), (False, True)):
        models = (pair.target, pair.draft, cell.num_drafts) if speculative else (pair.target, None, 0)
        decoders[speculative] = decoders.get(speculative) or SpeculativeDecoder(*models)
        name = f"{f'specdec K={cell.num_drafts}' if speculative else 'plain'} {mode}"
        found.append(Specdec(name, cell, decoders[speculative], mode))
    # These compile for minutes on a GPU, so they are the first that a limit of time leaves out.
    return found + [Transformers(f"{name} static", cell, pair.target, other, True) for name, other in theirs]
