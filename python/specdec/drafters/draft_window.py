"""What a draft model sees of a long text: the first tokens, and a window that ends with the last one (StreamingLLM,
Xiao et al., arXiv 2309.17453, section 3). The target sees all of it, so texts keep its distribution."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..checks import read_count, refuse
from ..models.cache.dropped import Dropped
from ..models.cache.kv_cache import StaticKVCache, visible_slots
from ..models.forward.cached_model import CachedModel
from .protocol import Step

SINKS = 4  # the first tokens, on which attention leans; more were found to help no further (section 3.1, table 2)


@dataclass(frozen=True)
class DraftWindow:
    """The draft sees the first ``SINKS`` tokens and no more than the last ``size`` >= 2 known ones, beside its drafts.

    The oldest eighth of the window is dropped at once, so between 7/8 and all of ``size`` are seen, and what stays
    moves once in so many tokens. How many these are follows from the text's length alone, and so, with the same drafts
    a step, does what is drafted."""

    size: int

    def __post_init__(self) -> None:
        read_count("draft_window", self.size, 2)  # the last two tokens are fed in every step

    def check(self, model: CachedModel, nodes: int) -> None:
        """Raises ValueError if this draft cannot have a window, or not with trees of ``nodes`` (0: chains)."""
        described = f"a draft of model type {model.config.model_type!r}"
        lacks = {
            f"tree={nodes}": nodes > 0,
            f"{described}, whose weights are over several devices (tp)": model.is_sharded,
            f"{described}, which has recurrent layers": bool(model.recurrent),
            f"{described}, which has sliding windows of its own": model.attention.slides,
            f"{described}, which {model.lacks_trees}": model.lacks_trees is not None and not model.recurrent,
        }
        for why, is_so in lacks.items():
            if is_so:
                refuse("draft_window", f"{self.size} with {why}", "None")

    def tokens(self, most_drafts: int) -> int:
        """Returns how many tokens of a text are stored at most."""
        return SINKS + self.size + most_drafts

    @property
    def at_once(self) -> int:
        """How many tokens are dropped at a time."""
        return max(self.size // 8, 1)

    def dropped(self, length: int) -> int:
        """Returns how many tokens after the first ones are dropped of a text of ``length`` known tokens."""
        return max(-(-(length - SINKS - self.size) // self.at_once) * self.at_once, 0)


class WindowedRows:
    """The texts of a batch's rows in a cache that has a window of each.

    Args:
        cache: of the draft.
        outside: the slot of what is not stored, as steps have it.
    """

    def __init__(self, window: DraftWindow, cache: StaticKVCache, outside: int):
        if cache.dropped is None:  # else it was kept for a new text
            cache.dropped = Dropped(SINKS, cache.rows, cache.lengths.device)
        self._window, self._cache, self._dropped, self._outside = window, cache, cache.dropped, outside

    def move(self, texts: Mapping[int, list[int]]) -> None:
        """Moves the windows of these texts, by row, to their ends."""
        self._dropped.drop({r: self._window.dropped(len(text)) for r, text in texts.items()}, self._cache.storage())

    def seen(self, row: int, known: list[int], start: int) -> tuple[list[int], int]:
        """Returns what is seen of the ``known`` tokens of a row, in the order of the slots, and how many of these are
        stored, if of the text the tokens before ``start`` are, or were. The others are read as if there were none
        between them, so what the keys of deeper layers are computed from has a window, too."""
        gone = self._dropped.of_rows[row]
        seen = known[:SINKS] + known[SINKS + gone :]
        return seen, min(start if start <= SINKS else max(start - gone, SINKS), len(seen))

    def place(self, step: Step) -> Step:
        """Returns the step with the places that its tokens have in the cache. Their positions in the text are known to
        the cache (``Dropped``)."""
        texts = {row: text for row, text in enumerate(step.texts) if text}
        self.move(texts)
        longest = max((len(text) - self._dropped.of_rows[row] for row, text in texts.items()), default=1)
        places = self._dropped.places
        return dataclasses.replace(
            step,
            visible=visible_slots(longest + step.num_drafts, self._cache.capacity),
            lengths=places(step.lengths[:, None])[:, 0],
            positions=places(step.positions),
            slots=torch.where(step.slots == self._outside, self._cache.trash, places(step.slots)),
        )
