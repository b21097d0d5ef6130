"""The loop of a training: one step after the other, judged now and then, and gone on with after it was killed."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save
from torch import nn
from transformers import PreTrainedModel

from ..checks import refuse
from ..files import write_whole
from ..line_file import LineFile
from ..models.load.reduced_head import reduced_ids
from .cached_logits import CachedLogits
from .held_out import Worth, Written, worth
from .lessons import Lessons
from .losses import DATA, NO_COLUMN, Wanted, loss_of
from .reduced_vocabulary import columns_of
from .settings import DistillSettings
from .trainer_checkpoint import load_checkpoint, save_checkpoint

WEIGHT_DECAY, BETAS = 0.05, (0.9, 0.98)
LAST_RATE = 0.02  # of the peak, at the end
TRIED, JUDGED = 3, 8  # where minutes limit a training: steps that are tried, and judgements that it has
RUN = "training"  # the folder of checkpoint and log, in that of what is trained
CHECKPOINT, BEST, LOG = "checkpoint.safetensors", "best.safetensors", "log.jsonl"


class Diverged(Exception):
    """The loss or a gradient is not a number. The last checkpoint is as it was."""


@dataclass(frozen=True)
class Watch:
    """Who is told how a training goes, and may stop it.

    Attributes:
        told: called with how many steps there are of how many, and how it goes.
        stopped: asked after each step: whether to stop, and to go on another time.
        say: called with what is to be known before anything is trained, such as what a reduced vocabulary costs.
    """

    told: Callable[[int, int, str], None] = lambda done, total, what: None
    stopped: Callable[[], bool] = lambda: False
    say: Callable[[str], None] = lambda words: None


@dataclass
class Progress:
    """How far a training is; what of a checkpoint is no tensor. ``steps`` is how many there are to be."""

    step: int = 0
    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    best_step: int = 0
    best: list[Worth] = field(default_factory=list)
    before: list[Worth] = field(default_factory=list)

    @classmethod
    def of(cls, state: dict) -> Progress:
        worths = {name: [Worth(**w) for w in state[name]] for name in ("best", "before")}
        return cls(**{**state, **worths})


def score(worths: Sequence[Worth]) -> float:
    """What the best checkpoint has most of: alpha, greedy and sampled alike."""
    return sum(w.alpha for w in worths) / len(worths)


class Trainer:
    """
    Args:
        draft: float32; its parameters that require a gradient are trained.
        written: what it is judged by.
        folder: of checkpoint, best weights and log, which is made.
        asked: all settings of the caller on which the result depends; another set cannot go on from a checkpoint.
        cached: the target's distributions on the data; None: they are computed in each step.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: nn.Module,
        lessons: Lessons,
        written: Sequence[Written],
        settings: DistillSettings,
        folder: Path,
        asked: Mapping[str, object],
        cached: CachedLogits | None = None,
    ):
        self._target, self._lessons, self._written, self._cached = target, lessons, written, cached
        self._settings, self._folder, self._asked = settings, folder, {**dataclasses.asdict(settings), **asked}
        self.draft = cast(Any, draft)
        self.draft.to(target.device)
        if settings.gradient_checkpointing:
            self.draft.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._parameters = {n: p for n, p in draft.named_parameters() if p.requires_grad}
        self._optimiser = torch.optim.AdamW(self._parameters.values(), betas=BETAS, weight_decay=WEIGHT_DECAY)
        self.progress = Progress(steps=settings.steps)
        folder.mkdir(parents=True, exist_ok=True)
        self._saved, self._ids = 0, reduced_ids(self.draft)
        if (folder / CHECKPOINT).exists():
            state, texts = load_checkpoint(folder / CHECKPOINT, self._parameters, self._optimiser, self._asked)
            self.progress, lessons.written = Progress.of(state), texts
            self._saved = self.progress.step

    @property
    def done(self) -> bool:
        return self.progress.step >= self.progress.steps

    @property
    def _every(self) -> int:
        """Steps between two judgements."""
        every = self._settings.every
        return every if self._settings.minutes is None else min(every, math.ceil(self.progress.steps / JUDGED))

    def run(self, watch: Watch) -> bool:
        """Trains to the end, or until it is stopped. Returns whether it is done.

        Raises:
            Diverged: says at which step.
            OSError: a file cannot be written.
        """
        log = LineFile(self._folder / LOG)
        try:
            self._cut(log)
            if not self.progress.before:
                began = time.perf_counter()
                self._judge(log, None)
                self._limit(watch, time.perf_counter() - began)
                self._save()
            losses: list[float] = []
            while not self.done and not watch.stopped():
                began, at = time.perf_counter(), self.progress.step
                losses.append(self._step(at))
                self.progress.seconds += time.perf_counter() - began
                self.progress.step += 1
                watch.told(at + 1, self.progress.steps, self._words(losses[-1]))
                if self.progress.step % self._every == 0 or self.done:
                    self._judge(log, sum(losses) / len(losses))
                    losses = []
                    self._save()
            self._save()
            return self.done
        finally:
            log.close()

    def take_best(self) -> None:
        """Gives the draft the weights with which it was judged best."""
        best = load_file(self._folder / BEST)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(best[name])

    def _step(self, step: int) -> float:
        for group in self._optimiser.param_groups:
            group["lr"] = self._settings.rate * self._share(step)
        loss, count = self._gradients(step)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), 1.0)
        if not math.isfinite(norm.item()):  # as it is not where the loss is not
            raise Diverged(
                f"loss: got {loss.item()} in step {step + 1}, with gradients of norm {norm.item():.3g}; "
                f"the checkpoint of step {self._saved} is as it was, and a smaller rate may help"
            )
        self._optimiser.step()
        self._optimiser.zero_grad()
        self.draft.eval()
        self.progress.tokens += count
        return loss.item()

    def _gradients(self, step: int) -> tuple[torch.Tensor, int]:
        """Computes those of a step. Returns its loss, and how many tokens it has."""
        torch.manual_seed(self._settings.seed * 1_000_003 + step)  # of dropout, so that a resumed step is the same
        tokens, blocks = self._lessons.batch(step)
        self.draft.train()
        loss = self._loss(step, tokens.to(self._target.device), blocks)
        loss.backward()
        return loss, tokens.numel()

    def _limit(self, watch: Watch, judging: float) -> None:
        """Takes as many steps as there are minutes for, by the time of some that change nothing, and of a judgement,
        which is so many seconds. A checkpoint keeps their number."""
        minutes, written = self._settings.minutes, dict(self._lessons.written)
        if minutes is None:
            return
        times = []
        for step in range(TRIED):
            began = time.perf_counter()
            self._gradients(step)
            self._optimiser.zero_grad()
            self.draft.eval()
            times.append(time.perf_counter() - began)
        self._lessons.written = written
        steps = int((60 * minutes - JUDGED * judging) / min(times))
        self.progress.steps = max(1, min(steps, self._settings.steps))
        seconds = self.progress.steps * min(times) + JUDGED * judging
        watch.say(f"{self.progress.steps:,} steps of {min(times):.2f} s: about {seconds / 60:.0f} minutes")

    def _autocast(self) -> torch.autocast:
        return self._settings.autocast(self._target.device)

    def _loss(self, step: int, tokens: torch.Tensor, blocks: torch.Tensor | None) -> torch.Tensor:
        """Of the texts ``tokens`` [B, L], which are these blocks of the data; None: they were written."""
        with self._autocast():
            logits = self.draft(input_ids=tokens[:, :-1], use_cache=False).logits.flatten(0, 1)
        columns, drafted = columns_of(tokens[:, 1:].flatten(), self._ids)
        columns = torch.where(drafted, columns, NO_COLUMN)
        return loss_of(self._settings.loss, logits, self._wanted(tokens, blocks), columns)

    @torch.no_grad()
    def _wanted(self, tokens: torch.Tensor, blocks: torch.Tensor | None) -> Wanted | None:
        if {*self._settings.loss} == {DATA}:
            return None
        if self._cached is not None and blocks is not None:
            return self._cached.of(blocks)
        with self._autocast():
            logits = self._target(input_ids=tokens[:, :-1], use_cache=False).logits
        return Wanted.of(logits if self._ids is None else logits[..., self._ids])

    def _share(self, step: int) -> float:
        """Of the peak rate."""
        fall = 0.5 + 0.5 * math.cos(math.pi * step / self.progress.steps)
        return min(1.0, (step + 1) / max(self._settings.warm_up, 1)) * max(fall, LAST_RATE)

    def _judge(self, log: LineFile, loss: float | None) -> None:
        """Writes a line of the log, and keeps the weights if they are the best so far."""
        progress = self.progress
        self.draft.eval()
        found = self._worth()
        if not progress.before:
            progress.before = found
        if not progress.best or score(found) > score(progress.best):
            weights = {name: p.detach().cpu().contiguous() for name, p in self._parameters.items()}
            write_whole(self._folder / BEST, save(weights))
            progress.best, progress.best_step = found, progress.step
        row: dict[str, Any] = {"step": progress.step, "loss": loss, "seconds": progress.seconds}
        row |= {"tokens": progress.tokens, "held_out": [dataclasses.asdict(w) for w in found], **self._noted()}
        log.append(row)

    def _worth(self) -> list[Worth]:
        return worth(self.draft, self._written, self._settings.num_drafts)

    def _noted(self) -> dict[str, Any]:
        """What else a line of the log has."""
        return {}

    def _save(self) -> None:
        state = dataclasses.asdict(self.progress)
        save_checkpoint(
            self._folder / CHECKPOINT, self._parameters, self._optimiser, self._lessons.written, state, self._asked
        )
        self._saved = self.progress.step

    def _cut(self, log: LineFile) -> None:
        """Leaves out lines of steps after the checkpoint, which come again."""
        for _, line in log.complete():
            if json.loads(line)["step"] > self.progress.step or not self.progress.before:
                break
            log.end += len(line)
        log.cut()

    def _words(self, loss: float) -> str:
        best = " ".join(f"alpha {w.alpha:.3f} at {w.temperature:g}" for w in self.progress.best)
        return f"loss {loss:.4f}, best so far: {best}"


def log_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of a training's log: the step, the mean loss since the line before, and what the draft was worth."""
    return [json.loads(line) for line in (folder / RUN / LOG).read_text().splitlines()]


def unfinished(folder: Path) -> Path:
    """Returns the folder in that of a training for what is not done.

    Raises:
        ValueError: names ``output``: the folder has what a training wrote that is done.
    """
    if (folder / "config.json").exists() and not (folder / RUN / CHECKPOINT).exists():
        allowed = "a folder without one, or of a training that is not done"
        refuse("output", f"{str(folder)!r}, which has a model", allowed)
    return folder / RUN


def finish(folder: Path, card: str, result: dict[str, Any]) -> None:
    """Writes the model card and the result of a training, and removes what it would go on from."""
    write_whole(folder / "README.md", card)
    write_whole(folder / RUN / "result.json", json.dumps(result, indent=1) + "\n")
    for name in (CHECKPOINT, BEST):
        (folder / RUN / name).unlink()
