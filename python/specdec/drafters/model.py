"""Drafts tokens with a smaller causal language model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from transformers import PreTrainedModel

from specdec_kernels import DraftStep

from ..checks import refuse
from ..models.cache.kv_cache import StaticKVCache
from ..models.cache.tree import Tree
from ..models.exchanged.stored_weights import computing_dtype
from ..models.forward.cached_model import CachedModel
from ..models.forward.layout import Layout
from ..models.forward.prompt_parts import PromptParts
from ..models.load.reduced_head import reduced_ids
from ..models.load.shared_ids import ids_of_pair
from ..models.supported import cached_model
from .d2t import read_d2t
from .draft_window import DraftWindow, WindowedRows
from .drawing import Drawing
from .protocol import BatchState, Drafter, Drafts, DraftSession, Step
from .tree_growth import Growth, TreeGrowth


class ModelDrafter(Drafter):
    """Drafts tokens with a draft model, drawn with the batch's sampling parameters.

    Args:
        model: the draft model; it is fed the target's ids.
        d2t: [columns] int64, ascending: the target's ids of the columns of its logits; None: they are the same ids.
        confidence: a draft to which the model gives a smaller probability than this is its sequence's last draft of
            the step. It is still verified, because withdrawing a token after it was drawn would change the
            distribution. 0: off. Otherwise each draft costs one synchronisation with the device.
        columns: how many columns of its logits count, from the first; None: all of them.
        growth: how it grows trees, where the decoder asks for them.
        window: how many of the last tokens it sees, beside the first ones; None: all of the text.
    """

    trees = samples_trees = True
    doubt: str | None = (
        "Has the draft model the target's tokenizer, weights that were trained, and a dtype that it was made for?"
    )
    model: CachedModel

    def __init__(
        self,
        model: CachedModel,
        d2t: torch.Tensor | None = None,
        confidence: float = 0.0,
        columns: int | None = None,
        growth: TreeGrowth | None = None,
        window: int | None = None,
    ):
        self.window = None if window is None else DraftWindow(window)
        self.model, self.d2t, self.confidence, self.columns = model, d2t, confidence, columns
        self.growth, self.max_length = growth or TreeGrowth(), model.max_length

    def start(self, batch: BatchState) -> ModelDraftSession:
        return ModelDraftSession(self, batch)

    def check(self, target: CachedModel, nodes: int, most_drafts: int) -> None:
        if nodes and self.confidence:
            refuse("confidence", f"{self.confidence} with tree={nodes}", "0")
        if self.window is not None:
            self.window.check(self.model, nodes)

    def cache_bytes(self) -> int:
        return self.model.slot_bytes() if self.window is None else 0

    def row_bytes(self, most_drafts: int) -> int:
        slots = self.window_slots(most_drafts) or 0
        return self.model.row_bytes(most_drafts + 1) + slots * self.model.slot_bytes()

    def window_slots(self, most_drafts: int) -> int | None:
        """Returns the most slots of a row, however long its text is; None: there is no window."""
        return None if self.window is None else self.model.capacity(self.window.tokens(most_drafts))

    def tree_slots(self, nodes: int, depth: int) -> int:
        return self.growth.slots(nodes, depth)


def model_drafter(
    draft: PreTrainedModel,
    target: CachedModel,
    d2t: torch.Tensor | Sequence[int] | None = None,
    confidence: float = 0.0,
    cache_dtype: torch.dtype | None = None,
    draft_window: int | None = None,
) -> ModelDrafter:
    """Returns a drafter with the model ``draft`` for this target; the arguments are those of ``SpeculativeDecoder``.

    Raises:
        ValueError: names ``draft``, ``d2t`` or ``draft_window``.
    """
    if cache_dtype is not None and cache_dtype.itemsize >= computing_dtype(draft).itemsize:
        cache_dtype = None  # the draft's keys are not wider than this
    model, columns = cached_model(draft, "draft", cache_dtype, target.vocab_size), None
    ids: torch.Tensor | None = None
    if d2t is None and (d2t := reduced_ids(draft)) is None:
        d2t = ids_of_pair(target.model, draft)
    if d2t is not None:
        ids, columns = read_d2t(d2t, model, target)
    elif model.vocab_size != target.vocab_size:
        raise ValueError(
            f"draft: its vocabulary has {model.vocab_size} tokens, allowed: {target.vocab_size}, the target's; another "
            "size where both models were loaded from folders with one tokenizer, all of whose tokens they have, or "
            "with d2t=range(len(tokenizer)); a draft with another tokenizer takes UniversalDrafter"
        )
    if model.device != target.device:
        raise ValueError(f"draft: is on {model.device}, allowed: {target.device}, the target's device")
    return ModelDrafter(model, ids, confidence, columns, window=draft_window)


class ModelDraftSession(DraftSession):
    """Drafts for one batch, with the batch's draft cache.

    Texts may be longer than the draft model's positions. Whether a token is drafted then depends on its position alone:
    the model is fed nothing at its last position + 1 or later, so its cache has no slots for that.

    Args:
        shared: the target's cache, if the draft model is a part of the target. At every step it holds all known tokens
            but the last, and the target overwrites the keys of drafts. None: the draft model has its own cache.
    """

    def __init__(self, drafter: ModelDrafter, batch: BatchState, shared: StaticKVCache | None = None):
        self.model, self.d2t, self.confidence = drafter.model, drafter.d2t, drafter.confidence
        self.columns, self.batch = drafter.columns, batch
        self.is_shared = shared is not None
        self.needs_host = drafter.confidence > 0 or drafter.window is not None
        # With its own cache, the draft model is first fed the last *two* known tokens: after K acceptances the last
        # draft was never fed, and writing the other token's key again costs less than a shape that depends on
        # acceptance. In the target's cache that key would replace the target's own, whose rounding may differ.
        self.first = 1 if self.is_shared else 2
        # None: the model has a position for every token of a text.
        self.num_positions, slots = self.model.max_length, batch.capacity
        tree_slots = max(batch.nodes, drafter.tree_slots(batch.nodes, batch.most_drafts))
        if self.is_shared or self.num_positions is None or self.num_positions >= slots - tree_slots - 1:
            self.num_positions = None
        else:
            slots = min(slots, self.model.capacity(self.num_positions, tree_slots))
        slots = min(slots, drafter.window_slots(batch.most_drafts) or slots)
        self.cache = shared or self.model.new_cache(batch.size, slots, batch.most_drafts + 1)
        self.trash, self.windowed = self.cache.trash, None
        if drafter.window is not None:
            self.trash = batch.capacity - 1  # until the step is placed in the window
            self.windowed = WindowedRows(drafter.window, self.cache, self.trash)
        self.growth = Growth(drafter.growth, batch, self.d2t)
        self.parts: PromptParts | None = None
        if batch.prefill_chunk is not None and self.windowed is None:  # whose keys follow from more than a beginning
            self.parts = PromptParts(self.model.prefill_chunk, batch.prefill_chunk, batch.size)

    def copy_rows(self, sources: Sequence[int], rows: Sequence[int], count: int) -> None:
        if self.parts is None or self.is_shared:
            return
        self.parts.take(sources, rows, 0 if self.cache.recurrent else count)
        self.cache.copy_rows(sources, rows, max(self.parts.held(row) for row in rows))

    def release(self) -> None:
        if not self.is_shared:
            self.model.keep(self.cache)

    def begin(self, prompts: Mapping[int, list[int]]) -> None:
        if not self.is_shared:
            for row in prompts:
                self.cache.begin(row, 0 if self.parts is None else self.parts.begin(row))

    def observe(self, texts: Mapping[int, list[int]], starts: Mapping[int, int]) -> None:
        """Stores the keys of these texts up to the two last tokens, which are fed with the next drafts. Where texts are
        not read each alone, in parts, rows that are neighbours are fed together."""
        if self.is_shared:
            return
        # The host may not know of the last steps with drafts, whose tokens a state contains.
        committed = self.cache.committed()
        if self.windowed is not None:
            self.windowed.move(texts)
        for rows in neighbours(texts) if self.batch.prefill_chunk is None else [[row] for row in texts]:
            # A row has two tokens or more once a token was emitted; a prompt may have one, which is fed twice.
            known = [texts[row][: max(len(texts[row]) - 2, 0)][: self.num_positions] for row in rows]
            begin = [min(max(starts[row], committed[row]), len(text)) for row, text in zip(rows, known, strict=True)]
            if self.windowed is not None:
                seen = [self.windowed.seen(*of_row) for of_row in zip(rows, known, begin, strict=True)]
                known, begin = [own[0] for own in seen], [own[1] for own in seen]
            if self.parts is None:
                self.model.extend(self.cache, known, begin, rows[0])
            else:
                self._read_alone(rows[0], known[0], begin[0])
        self.batch.timer.lap("prefill")

    def _read_alone(self, row: int, known: list[int], start: int) -> None:
        assert self.parts is not None
        start = min(max(start, self.parts.held(row)), len(known))
        self.parts.read(row, start, len(known), lambda a, b: self.model.extend(self.cache, [known[:b]], [a], row))

    def propose(self, step: Step) -> Drafts:
        step = step if self.num_positions is None else self._before_end(step, self.num_positions)
        drafts = self._tree(step) if self.batch.nodes else self._chain(step)
        return drafts if self.num_positions is None else _no_deeper(drafts, step.allowed_on_device)

    def _before_end(self, step: Step, end: int) -> Step:
        """Returns the step as a model with positions 0 to ``end`` - 1 can be fed it. From its last position it drafts
        the token after that, and no more."""
        there = step.slots < end
        return dataclasses.replace(
            step,
            visible=min(step.visible, self.trash),
            lengths=step.lengths.clamp(max=end - 1),
            positions=step.positions * there,
            slots=torch.where(there, step.slots, self.trash),
            allowed_on_device=torch.minimum(step.allowed_on_device, end + 1 - step.position).clamp(min=0),
        )

    def _chain(self, step: Step) -> Drafts:
        cache, lap = self.cache, self.batch.timer.lap
        step = step if self.windowed is None else self.windowed.place(step)
        drawing = Drawing(self.batch, step, self.d2t)
        cache.lengths = step.lengths
        skipped = slice(2 - self.first, None)
        layout = self.model.layout(step.positions[:, skipped], step.slots[:, skipped], step.visible)
        layouts = layout.split([self.first] + [1] * step.num_drafts)  # the last is not used, since draft K is never fed
        fed, going = step.last_two[:, skipped], step.allowed
        lap("loop")
        for i in range(step.num_drafts):
            logits = self._logits(fed, layouts[i])[:, -1]
            draw = drawing.draw(logits)
            if self.confidence > 0:
                draw, going = self._stop_unsure(step, draw, drawing.rows[i], going, i)
            drawing.keep(draw)
            if not any(n > i + 1 for n in going):
                break
            fed = drawing.to_feed()
        drafts = drawing.drafts()
        lap("loop")
        return drafts

    def _tree(self, step: Step) -> Drafts:
        cache, lap, root = self.cache, self.batch.timer.lap, step.lengths
        growing, visible = self.growth.begin(step, step.num_drafts), self.growth.visible(step, self.cache.capacity)
        cache.lengths = root
        known, forwards = slice(2 - self.first, 2), 1
        layout = self.model.layout(step.positions[:, known], step.slots[:, known], visible)
        lap("loop")
        growing.take(self._logits(step.last_two[:, known], layout)[:, -1:])
        while (level := growing.next()) is not None:
            positions, slots = level.places(root, cache.trash)
            layout = self.model.layout(positions * level.counts, slots, visible, level.tree._replace(root=root))
            growing.take(self._logits(level.tokens, layout))
            forwards += 1
        tree = self.growth.tree(growing, forwards)
        lap("loop")
        return tree

    def accepted(self, path: torch.Tensor) -> None:
        """Moves the keys of accepted nodes to where those of text are. A node that was not fed is one of the last two
        tokens, which are fed with the next drafts."""
        if not self.is_shared:  # else the target's are moved
            self.cache.compact(self.growth.fed(path))

    def _logits(self, tokens: torch.Tensor, layout: Layout) -> torch.Tensor:
        logits = self.model(tokens, self.cache, layout)[:, :, : self.columns]
        self.batch.timer.lap("draft_forwards")
        return logits

    def _stop_unsure(
        self, step: Step, draw: DraftStep, logits: torch.Tensor, going: list[int], offset: int
    ) -> tuple[DraftStep, list[int]]:
        """Removes the drafts of sequences that have stopped, and stops sequences whose draft is below the confidence.
        Returns the drafts, and how many drafts each sequence has in this step."""
        log_q, temperature = draw.log_q, step.sampling.temperature
        # A greedy draft has q = 1, so the confidence is compared with the model's own probability.
        log_q = torch.where(temperature == 0, logits.float().log_softmax(-1).amax(-1), log_q)
        sure = (log_q >= math.log(self.confidence)).tolist()
        stopped = torch.tensor([n <= offset for n in going], device=logits.device)
        tokens, status = draw.tokens.masked_fill(stopped, -1), draw.status.masked_fill(stopped, 0)
        draw = draw._replace(tokens=tokens, status=status)
        return draw, [n if likely else min(n, offset + 1) for n, likely in zip(going, sure, strict=True)]


def _no_deeper(drafts: Drafts, allowed: torch.Tensor) -> Drafts:
    """Returns the drafts without those of a row that come after its first ``allowed`` [n] int64, or are deeper."""
    if drafts.parents is None:
        depths = torch.arange(1, drafts.tokens.shape[1] + 1, device=allowed.device)[None]
    else:
        depths = Tree.of(drafts.parents).depths[:, 1:]
    return drafts._replace(tokens=drafts.tokens.masked_fill(depths > allowed[:, None], -1))


def neighbours(rows: Iterable[int]) -> list[list[int]]:
    """Returns the rows in runs of neighbours, ascending."""
    runs: list[list[int]] = []
    for row in sorted(rows):
        if runs and row == runs[-1][-1] + 1:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs
