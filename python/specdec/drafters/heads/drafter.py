"""Drafts with a head, from the target's own hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ...checks import refuse
from ...models.cached_model import PREFILL_TOKENS, CachedModel, Layout
from ...models.features import tapped
from ...models.kv_cache import visible_slots
from ...models.prefill import PrefillChunk
from ..drawing import Drawing
from ..model import neighbours
from ..product_tree import ProductTrees
from ..protocol import Drafts, DraftTree, Generation, Step
from ..tree_growth import Growth, Level, TreeGrowth
from ..tree_paths import read_paths
from .interface import Head, Logits, Rows, known_rows, layout_of

if TYPE_CHECKING:
    from .self_check import Report


class HeadDrafter:
    """Drafts tokens with a head, drawn with the batch's sampling parameters. :func:`~specdec.load_head` makes it.

    Attributes:
        model: the head.
        num_parameters: of the head.
        report: what the self-check after loading found; None: there was none.
        growth: how it grows trees, where its drafts depend on each other.
        choices: where they do not, the paths of a static tree; None: trees have the most probable paths.
    """

    def __init__(
        self,
        model: Head,
        report: Report | None = None,
        growth: TreeGrowth | None = None,
        choices: Sequence[Sequence[int]] | None = None,
    ):
        self.model, self.report, self.growth, self.choices = model, report, growth or TreeGrowth(), None
        self.num_parameters = sum(p.numel() for p in model.parameters())
        if choices is not None:
            if not model.independent:
                refuse("choices", f"a value with a head of the format {model.kind!r}", "None")
            columns = model.vocab_size if model.d2t is None else len(model.d2t)
            self.choices = read_paths("choices", choices, model.most_drafts, columns)

    @property
    def proposes_trees(self) -> bool:
        return self.model.independent or self.model.grows_trees

    @property
    def samples_trees(self) -> bool:
        return self.proposes_trees

    def start(self, generation: Generation) -> HeadDraftSession:
        return HeadDraftSession(self, generation)

    def slot_bytes(self) -> int:
        return self.model.slot_bytes()

    def tree_slots(self, nodes: int, depth: int) -> int:
        return nodes if self.model.independent else self.growth.slots(nodes, depth)

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

    def check_tree(self, nodes: int, num_drafts: int) -> None:
        """Raises ValueError unless the choices are in trees of so many nodes, of paths of so many drafts."""
        if self.choices is not None:
            longest = len(self.choices[-1])
            if nodes < len(self.choices):
                refuse("tree", f"{nodes} with {len(self.choices)} choices", f"{len(self.choices)} or more")
            if num_drafts < longest:
                refuse("num_drafts", f"{num_drafts} with choices of {longest} tokens", f"{longest} or more")


class HeadDraftSession:
    """Drafts for one batch. Every forward of the target records the features of the tokens that it is fed. A head's
    keys of drafted tokens are computed from guessed features, so each step first computes those of the last known
    tokens once more, from the target's: as many as the step before can have emitted."""

    reads_texts = False
    takes_fewer_rows = True

    def __init__(self, drafter: HeadDrafter, generation: Generation):
        self.head, self.generation = drafter.model, generation
        size, capacity = generation.size, generation.capacity
        self.store = self.head.new_store(size, capacity)
        generation.target_cache.features = self.store
        shared = self.head.reads_target_cache
        self.cache = generation.target_cache if shared else self.head.new_cache(size, capacity)
        self.window = max(generation.most_drafts, self.head.lookahead) + 1
        self.chunk = PrefillChunk(PREFILL_TOKENS)
        self.growth = Growth(drafter.growth, generation, self.head.d2t)
        self.trees: ProductTrees | None = None
        if generation.nodes and self.head.independent:
            most = min(generation.most_drafts, self.head.most_drafts or generation.most_drafts)
            self.trees = ProductTrees(generation, most, self.store.tokens.device, drafter.choices)

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
        head, lap, drawing = self.head, self.generation.stopwatch.lap, Drawing(self.generation, step, self.head.d2t)
        distributions, count = self._distributions(step), self._most(step)
        logits = next(distributions)
        for i in range(count):
            lap("draft_forwards")
            drawing.keep(drawing.draw(logits))
            if i + 1 < count:
                logits = distributions.send(drawing.to_feed())
        drafts = drawing.drafts()
        lap("loop")
        return drafts._replace(forwards=1) if head.at_once else drafts

    def draft_tree(self, step: Step) -> DraftTree:
        if self.trees is not None:
            return self.trees.tree(self._distributions(step), step, self.head.d2t)
        lap, visible = self.generation.stopwatch.lap, self.growth.visible(step, self.cache.capacity)
        growing, rows = self.growth.begin(step, self._most(step)), self._known(step, visible)
        root = step.lengths - 1  # the last known token with a feature

        def layout(level: Level) -> Layout:
            return layout_of(*level.places(root, self.cache.trash), visible, level.tree._replace(root=root))

        lap("loop")
        tree = self.growth.tree(growing, self.head.grow(rows, growing, layout, self.cache))
        lap("draft_forwards")
        return tree

    def _distributions(self, step: Step) -> Logits:
        """Returns what the head's ``draft`` yields for this step, ``_most`` times."""
        count, rows = self._most(step), self._known(step, step.visible)
        ahead = layout_of(step.positions[:, 1:count], step.slots[:, 1:count], step.visible)
        self.generation.stopwatch.lap("loop")
        return self.head.draft(rows, ahead, self.cache, count)

    def _most(self, step: Step) -> int:
        return min(step.num_drafts, self.head.most_drafts or step.num_drafts)

    def _known(self, step: Step, visible: int) -> Rows:
        """Returns the last known tokens that have features."""
        places = step.position[:, None] + torch.arange(-1 - self.window, -1, device=step.position.device)
        # A row without a sequence has the trash slot in all columns of the step.
        end = torch.where(step.slots[:, 1] == self.cache.trash, 0, step.position - 1)
        return known_rows(self.store, places, end, step.last_two[:, 1], visible)

    def release(self, row: int, output: list[int]) -> None:
        pass
