"""Texts that a target writes itself, for a training that is given none: a job over built-in prompts, as many as there
is time for."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from . import models
from .drafting import GenerateDrafts
from .job import Job, JobOptions
from .options import MachineOptions
from .terminal import remark

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ROWS, NEW_TOKENS = 64, 160  # texts that are written together, and the most tokens of one
USUAL = 120  # tokens of a text, which often ends before
LEAST, MOST = 256, 9000  # texts
TRIED = 8  # tokens of each text that are written to measure the speed


@dataclass(frozen=True)
class OwnTexts:
    """
    Attributes:
        target: None: the embedded one.
        folder: of the two files, which is made. What is there already is gone on with.
        minutes: that the texts may take.
    """

    target: str | None
    machine: MachineOptions
    folder: Path
    minutes: float

    @property
    def prompts(self) -> Path:
        return self.folder / "prompts.jsonl"

    @property
    def texts(self) -> Path:
        return self.folder / "texts.jsonl"

    def write(self) -> None:
        """Has the target write the texts. Ends the command where it was stopped, or something failed."""
        from ..jobs.lines import LineSettings

        at = models.ModelOptions(target=self.target, machine=self.machine)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.prompts.exists():
            self._choose(at)
        asked = [json.loads(line) for line in self.prompts.read_text("utf-8").splitlines()]
        longest = max(len(_tokens(at.tokenizer, row)) for row in asked)
        # Rows for as many tokens as the target has positions would take more memory than many machines have.
        options = JobOptions(output=self.texts, rows=ROWS, max_length=longest + NEW_TOKENS)
        defaults = LineSettings(max_new_tokens=NEW_TOKENS)
        job = Job(self.prompts, defaults, at, GenerateDrafts(drafter="none", num_drafts="0"), options, False)
        if code := job.run():
            raise typer.Exit(code)

    def _choose(self, at: models.ModelOptions) -> None:
        """Writes as many prompts as there is time for, every other fifteen for a greedy text."""
        from ..files import write_whole
        from ..training.instruct_prompts import KINDS, instruct_prompts

        chat = bool(at.tokenizer.chat_template)
        rows = []
        for i, (kind, messages) in enumerate(islice(instruct_prompts(chat=chat), MOST)):
            asked = {"messages": messages} if chat else {"prompt": messages[0]["content"]}
            rows.append({"id": f"{kind}-{i}", **asked, "temperature": float(i // len(KINDS) % 2)})
        loaded = models.load(at, [])
        seconds = _seconds_of_a_text(loaded.target, loaded.tokenizer, rows[:ROWS])
        count = min(max(LEAST, round(60 * self.minutes / seconds)), len(rows))
        told = f"{count:,} texts of up to {NEW_TOKENS} tokens, each of which takes {seconds:.2f} s"
        remark(f"the target writes what is learned from: {told}, so about {count * seconds / 60:.0f} minutes")
        write_whole(self.prompts, "".join(json.dumps(row) + "\n" for row in rows[:count]))


def _seconds_of_a_text(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[dict]) -> float:
    """By the beginnings of so many, which are written together."""
    from ..decoder import SpeculativeDecoder

    prompts = [_tokens(tokenizer, row) for row in rows]
    decoder, seconds = SpeculativeDecoder(target, None, 0), []
    for new in (1, 1 + TRIED):
        began = time.perf_counter()
        decoder.generate(prompts, None, new, eos_token_id=[])
        seconds.append(time.perf_counter() - began)
    first, whole = seconds
    return (first + max(whole - first, 0.0) / TRIED * USUAL) / len(rows)


def _tokens(tokenizer: PreTrainedTokenizerBase, row: dict) -> list[int]:
    from ..chat_template import chat_prompt

    return chat_prompt(tokenizer, row["messages"]) if "messages" in row else tokenizer(row["prompt"]).input_ids


def fast_bfloat16(machine: MachineOptions) -> bool:
    """Whether this machine computes faster in bfloat16 than in float32."""
    import torch

    from ..models.machine.cpu_units import OF_BFLOAT16, cpu_units

    return torch.device(machine.chosen_device()).type != "cpu" or not OF_BFLOAT16.isdisjoint(cpu_units())


def fast_dtype(machine: MachineOptions) -> MachineOptions:
    """With bfloat16 where that is faster here and nothing else was asked for: rounding does not matter to what a draft
    learns."""
    return replace(machine, dtype="bfloat16") if machine.dtype is None and fast_bfloat16(machine) else machine
