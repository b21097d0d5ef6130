"""Drafts with a head, from the target's own hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ...checks import refuse
from ...models.cache.features import tapped
from ...models.cache.kv_cache import visible_slots
from ...models.exchanged.elementwise import with_elementwise
from ...models.exchanged.merged import with_merged
from ...models.forward.cached_model import CachedModel
from ...models.forward.layout import Layout
from ...models.forward.prefill import PREFILL_TOKENS, PrefillChunk
from ...models.forward.prompt_parts import PromptParts
from ..drawing import Drawing
from ..model import neighbours
from ..product_tree import ProductTrees
from ..protocol import BatchState, Drafter, Drafts, DraftSession, Step
from ..tree_growth import Growth, Level, TreeGrowth
from ..tree_paths import read_paths
from .fused import with_fused_attention
from .interface import WHOSE, Head, HeadInput, Logits, known_rows, returned

if TYPE_CHECKING:
    from .self_check import Report


class HeadDrafter(Drafter):
    """Drafts tokens with a head, drawn with the batch's sampling parameters. :func:`~specdec.load_head` makes it.

    Attributes:
        head: the network.
        num_parameters: of the head.
        report: what the self-check after loading found; None: there was none.
        growth: how it grows trees, where its drafts depend on each other.
        choices: where they do not, the paths of a static tree; None: trees have the most probable paths.
        confidence: a sequence's drafts end, in each step, before the first that the head finds less likely to be
            accepted than this, so that no more are verified. 0: off. Otherwise each step waits once for the device.
    """

    doubt = WHOSE

    def __init__(
        self,
        head: Head,
        report: Report | None = None,
        growth: TreeGrowth | None = None,
        choices: Sequence[Sequence[int]] | None = None,
        confidence: float = 0.0,
    ):
        self.head, self.report, self.growth, self.choices = head, report, growth or TreeGrowth(), None
        if confidence and not (0 < confidence < 1 and head.says_how_sure):
            with_confidence = "a DSpark head with confidence_head, and a number from 0 (off) to below 1"
            refuse("confidence", f"{confidence} with a head of the format {head.kind!r}", with_confidence)
        self.confidence = confidence
        self.trees = self.samples_trees = head.independent or head.grows_trees
        self.num_parameters = sum(p.numel() for p in head.parameters())
        if choices is not None:
            if not head.independent:
                refuse("choices", f"a value with a head of the format {head.kind!r}", "None")
            columns = head.vocab_size if head.d2t is None else len(head.d2t)
            self.choices = read_paths("choices", choices, head.most_drafts, columns)

    @property
    def name(self) -> str:
        return self.head.kind

    def start(self, batch: BatchState) -> HeadDraftSession:
        return HeadDraftSession(self, batch)

    def steps(self) -> Head:
        """Returns the head with operations of our own in place of what they compute. It is kept, since with it goes the
        memory in which weights lie beside each other."""
        head = with_fused_attention(self.head)
        self._steps = with_elementwise(with_merged(head, names=head.beside), defers=head.fuses)
        return self._steps

    @property
    def reads_only_filled(self) -> bool:
        return False

    def cache_bytes(self) -> int:
        return self.head.slot_bytes()

    def tree_slots(self, nodes: int, depth: int) -> int:
        return nodes if self.head.independent else self.growth.slots(nodes, depth)

    def check(self, target: CachedModel, nodes: int, most_drafts: int) -> None:
        """Raises ValueError unless the head can read this target's states, and its choices fit."""
        head, config = self.head, target.config
        ours = head.hidden, head.vocab_size, head.weight.device
        theirs = config.hidden_size, target.vocab_size, target.device
        if ours != theirs:
            described = "a head ({}) for {} hidden numbers, {} tokens and device {}".format(head.kind, *ours)
            refuse("draft", described, "{} hidden numbers, {} tokens and device {}, the target's".format(*theirs))
        if target.is_sharded and head.reads_target_cache:
            refuse("draft", f"a head ({head.kind}) that reads the target's keys, with tp", "another drafter")
        if max(head.states) > config.num_hidden_layers:
            refuse("draft", f"a head that reads hidden states {head.states}", f"0 to {config.num_hidden_layers}")
        for part in (target.model, target.model.base_model):  # raises here what its forwards would raise
            tapped(part, head.states)
        if nodes and self.choices is not None:
            longest = len(self.choices[-1])
            if nodes < len(self.choices):
                refuse("tree", f"{nodes} with {len(self.choices)} choices", f"{len(self.choices)} or more")
            if most_drafts < longest:
                refuse("num_drafts", f"{most_drafts} with choices of {longest} tokens", f"{longest} or more")


class HeadDraftSession(DraftSession):
    """Drafts for one batch. Every forward of the target records the features of the tokens that it is fed. A head's
    keys of drafted tokens are computed from guessed features, so each step first computes those of the last known
    tokens once more, from the target's: as many as the step before can have emitted."""

    def __init__(self, drafter: HeadDrafter, batch: BatchState):
        self.head, self.batch, self.confidence = drafter.steps(), batch, drafter.confidence
        self.needs_host = drafter.confidence > 0
        size, capacity = batch.size, batch.capacity
        self.store = self.head.new_store(size, capacity)
        batch.target_cache.features = self.store
        shared = self.head.reads_target_cache
        self.cache = batch.target_cache if shared else self.head.new_cache(size, capacity)
        self.window = max(batch.most_drafts, self.head.lookahead) + 1
        self.chunk = PrefillChunk(PREFILL_TOKENS)
        self.growth = Growth(drafter.growth, batch, self.head.d2t)
        self.parts: PromptParts | None = None
        if batch.prefill_chunk is not None:
            self.parts = PromptParts(self.chunk, batch.prefill_chunk, size)
        self.trees: ProductTrees | None = None
        if batch.nodes and self.head.independent:
            most = min(batch.most_drafts, self.head.most_drafts or batch.most_drafts)
            self.trees = ProductTrees(batch, most, self.store.tokens.device, drafter.choices)

    def copy_rows(self, sources: Sequence[int], rows: Sequence[int], count: int) -> None:
        """The features are copied with the target's keys."""
        if self.parts is None or self.head.reads_target_cache:
            return
        # What a head stores of a token depends on the tokens after it, of which the text may have others.
        self.parts.take(sources, rows, max(count - 1 - self.head.lookahead, 0))
        self.cache.copy_rows(sources, rows, max(self.parts.held(row) for row in rows))

    def begin(self, prompts: Mapping[int, list[int]]) -> None:
        if self.head.reads_target_cache:
            return
        for row in prompts:
            self.cache.begin(row, 0 if self.parts is None else self.parts.begin(row))

    def observe(self, texts: Mapping[int, list[int]], starts: Mapping[int, int]) -> None:
        """Reads these texts as far as the target has, which is all but the last token."""
        if self.head.num_layers == 0:
            return
        # Of the tokens that it has seen, the last may have been drafts, read with guessed features.
        begin = {row: max(starts[row] - self.window, 0) for row in texts}
        if self.parts is None:
            for rows in neighbours(texts):
                own = [texts[row] for row in rows]
                self._read([begin[row] for row in rows], own, rows[0], max(map(len, own)) - 1)
        else:
            for row, text in texts.items():
                self._read_alone(self.parts, row, text, begin[row])
        self.batch.timer.lap("prefill")

    def _read_alone(self, parts: PromptParts, row: int, text: list[int], start: int) -> None:
        start = min(max(start, parts.held(row)), len(text) - 1)
        # Each step computes the last ones once more.
        parts.read(row, start, len(text) - 1, lambda a, b: self._read([a], [text], row, b), again=self.window)

    def _read(self, begin: list[int], texts: list[list[int]], first_row: int, stop: int) -> None:
        """Reads what comes before ``stop``."""
        device = self.store.tokens.device
        starts = torch.tensor(begin, device=device)
        end = torch.tensor([len(text) - 1 for text in texts], device=device)
        last = torch.tensor([text[-1] for text in texts], device=device)
        columns, first = stop - min(begin), 0

        def feed(count: int) -> int:
            places = (starts + first)[:, None] + torch.arange(count, device=device)
            visible = visible_slots(stop, self.cache.capacity)
            rows = known_rows(self.head, self.store, places, end, last, visible, first_row, self.head.lookahead)
            self.head.read(rows, self.cache)
            return first + count

        while first < columns:
            first = self.chunk.run(feed, columns - first, len(texts))

    def propose(self, step: Step) -> Drafts:
        return self._tree(step) if self.batch.nodes else self._chain(step)

    def _chain(self, step: Step) -> Drafts:
        head, lap, drawing = self.head, self.batch.timer.lap, Drawing(self.batch, step, self.head.d2t)
        distributions, count = self._distributions(step), self._most(step)
        logits = next(distributions)
        for i in range(count):
            lap("draft_forwards")
            drawing.keep(drawing.draw(logits))
            if i + 1 < count:
                logits = distributions.send(drawing.to_feed())
        drafts = drawing.drafts()
        if self.confidence:
            drafts = self._sure(drafts, step, returned(distributions, drawing.to_feed()))
        lap("loop")
        return drafts._replace(forwards=1) if head.at_once else drafts

    def _sure(self, drafts: Drafts, step: Step, sure: torch.Tensor | None) -> Drafts:
        """Returns each row's drafts before the first whose ``sure`` [n, k] is below the confidence. That is known
        before the draft is drawn: to withdraw one because of what it is would change the distribution."""
        assert sure is not None and drafts.status is not None
        going = (sure >= self.confidence).cumprod(1).bool()
        most = int(going.sum(1).minimum(step.allowed_on_device).max())
        tokens, status = drafts.tokens.where(going, -1), drafts.status.where(going, 0)
        return drafts._replace(tokens=tokens, status=status).first(most)

    def _tree(self, step: Step) -> Drafts:
        if self.trees is not None:
            return self.trees.tree(self._distributions(step), step, self.head.d2t)
        lap, visible = self.batch.timer.lap, self.growth.visible(step, self.cache.capacity)
        growing, rows = self.growth.begin(step, self._most(step)), self._known(step, visible)
        root = step.lengths - 1  # the last known token with a feature

        def layout(level: Level) -> Layout:
            return self.head.layout(*level.places(root, self.cache.trash), visible, level.tree._replace(root=root))

        lap("loop")
        tree = self.growth.tree(growing, self.head.grow(rows, growing, layout, self.cache))
        lap("draft_forwards")
        return tree

    def _distributions(self, step: Step) -> Logits:
        """Returns what the head's ``draft`` yields for this step, ``_most`` times."""
        count, rows = self._most(step), self._known(step, step.visible)
        ahead = self.head.layout(step.positions[:, 1:count], step.slots[:, 1:count], step.visible, fed=1)
        self.batch.timer.lap("loop")
        return self.head.draft(rows, ahead, self.cache, count)

    def _most(self, step: Step) -> int:
        return min(step.num_drafts, self.head.most_drafts or step.num_drafts)

    def _known(self, step: Step, visible: int) -> HeadInput:
        """Returns the last known tokens that have features."""
        places = step.position[:, None] + torch.arange(-1 - self.window, -1, device=step.position.device)
        # A row without a sequence has the trash slot in all columns of the step.
        end = torch.where(step.slots[:, 1] == self.cache.trash, 0, step.position - 1)
        return known_rows(self.head, self.store, places, end, step.last_two[:, 1], visible)
