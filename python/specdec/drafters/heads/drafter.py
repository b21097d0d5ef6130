"""Drafts with a head, from the target's own hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ...checks import refuse
from ...models.cached_model import PREFILL_TOKENS, CachedModel
from ...models.features import tapped
from ...models.kv_cache import visible_slots
from ...models.prefill import PrefillChunk
from ..drawing import Drawing
from ..model import neighbours
from ..protocol import Drafts, Generation, Step
from .interface import Head, known_rows, layout_of

if TYPE_CHECKING:
    from .self_check import Report


class HeadDrafter:
    """Drafts tokens with a head, drawn with the batch's sampling parameters. :func:`~specdec.load_head` makes it.

    Attributes:
        model: the head.
        num_parameters: of the head.
        report: what the self-check after loading found; None: there was none.
    """

    def __init__(self, model: Head, report: Report | None = None):
        self.model, self.report = model, report
        self.num_parameters = sum(p.numel() for p in model.parameters())

    def start(self, generation: Generation) -> HeadDraftSession:
        return HeadDraftSession(self, generation)

    def slot_bytes(self) -> int:
        return self.model.slot_bytes()

    def check_target(self, target: CachedModel) -> None:
        """Raises ValueError unless the head can read this target's states."""
        head, config = self.model, target.config
        ours = head.hidden, head.vocab_size, head.weight.device
        theirs = config.hidden_size, target.vocab_size, target.device
        if ours != theirs:
            described = "a head ({}) for {} hidden numbers, {} tokens and device {}".format(head.kind, *ours)
            refuse("draft", described, "{} hidden numbers, {} tokens and device {}, the target's".format(*theirs))
        if max(head.states) > config.num_hidden_layers:
            refuse("draft", f"a head that reads hidden states {head.states}", f"0 to {config.num_hidden_layers}")
        if target.is_compiled:
            refuse("compile", "True with a head, which reads the target's states by hooks", "False")
        for part in (target.model, target.model.base_model):  # raises here what its forwards would raise
            tapped(part, head.states)


class HeadDraftSession:
    """Drafts for one batch. Every forward of the target records the features of the tokens that it is fed. A head's
    keys of drafted tokens are computed from guessed features, so each step first computes those of the last known
    tokens once more, from the target's: as many as the step before can have emitted."""

    reads_texts = False

    def __init__(self, drafter: HeadDrafter, generation: Generation):
        self.head, self.generation = drafter.model, generation
        size, capacity = generation.size, generation.capacity
        self.store = self.head.new_store(size, capacity)
        generation.target_cache.features = self.store
        shared = self.head.reads_target_cache
        self.cache = generation.target_cache if shared else self.head.new_cache(size, capacity)
        self.window = max(generation.most_drafts, self.head.lookahead) + 1
        self.chunk = PrefillChunk(PREFILL_TOKENS)

    def admit(self, prompts: Mapping[int, list[int]]) -> None:
        if self.head.reads_target_cache:
            return
        for row in prompts:
            self.cache.begin(row)

    def show(self, texts: Mapping[int, list[int]], starts: Mapping[int, int]) -> None:
        """Reads these texts as far as the target has, which is all but the last token."""
        if self.head.num_layers == 0:
            return
        for rows in neighbours(texts):
            # Of the tokens that it has seen, the last may have been drafts, read with guessed features.
            begin = [max(starts[row] - self.window, 0) for row in rows]
            self._read(begin, [texts[row] for row in rows], rows[0])
        self.generation.stopwatch.lap("prefill")

    def _read(self, begin: list[int], texts: list[list[int]], first_row: int) -> None:
        device = self.store.tokens.device
        starts = torch.tensor(begin, device=device)
        end = torch.tensor([len(text) - 1 for text in texts], device=device)
        last = torch.tensor([text[-1] for text in texts], device=device)
        longest = max(len(text) - 1 for text in texts)
        columns, first = longest - min(begin), 0

        def feed(count: int) -> int:
            places = (starts + first)[:, None] + torch.arange(count, device=device)
            visible = visible_slots(longest, self.cache.capacity)
            rows = known_rows(self.store, places, end, last, visible, first_row, self.head.lookahead)
            self.head.read(rows, self.cache)
            return first + count

        while first < columns:
            first = self.chunk.run(feed, columns - first, len(texts))

    def draft(self, step: Step) -> Drafts:
        head, lap, known = self.head, self.generation.stopwatch.lap, step.position
        count = min(step.num_drafts, head.most_drafts or step.num_drafts)
        drawing = Drawing(self.generation, step, head.d2t)
        places = known[:, None] + torch.arange(-1 - self.window, -1, device=known.device)
        # A row without a sequence has the trash slot in all columns of the step.
        end = torch.where(step.slots[:, 1] == self.cache.trash, 0, known - 1)
        rows = known_rows(self.store, places, end, step.last_two[:, 1], step.visible)
        ahead = layout_of(step.positions[:, 1:count], step.slots[:, 1:count], step.visible)
        lap("loop")
        distributions = head.draft(rows, ahead, self.cache, count)
        logits = next(distributions)
        for i in range(count):
            lap("draft_forwards")
            drawing.keep(drawing.draw(logits))
            if i + 1 < count:
                logits = distributions.send(drawing.to_feed())
        drafts = drawing.drafts()
        lap("loop")
        return drafts._replace(forwards=1) if head.at_once else drafts

    def release(self, row: int, output: list[int]) -> None:
        pass
