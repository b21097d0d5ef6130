"""Makes what runs a cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from transformers import PreTrainedModel

from ...drafters.protocol import Drafter
from ...loop.draft_length import AdaptiveDrafts
from ..contenders import CompareSettings, Method, SpecdecMethod, TransformersMethod
from .grid import ASSISTED, PLAIN, TRANSFORMERS, Cell


@dataclass
class Maker:
    """Makes methods of cells.

    Attributes:
        drafter: returns the drafter of a name. It is asked once for each name.
        assistant: for transformers' assisted generation.
        compile: whether specdec's methods, plain decoding among them, decode with compiled forwards. transformers'
            are eager, as they are for those who call ``generate``.
    """

    target: PreTrainedModel
    drafter: Callable[[str], Drafter | None]
    assistant: PreTrainedModel | Literal["lookup"] | None
    max_new_tokens: int
    compile: bool = False
    _drafters: dict[str, Drafter | None] = field(default_factory=dict)

    def make(self, cell: Cell) -> Method:
        s = cell.setting
        settings = CompareSettings(self.max_new_tokens, s.temperature, rule=cell.rule, **s.filters)
        if cell.method == TRANSFORMERS:
            return TransformersMethod(self.target, None, settings)
        if cell.method == ASSISTED:
            number = cell.num_drafts if isinstance(cell.num_drafts, int) else None
            return TransformersMethod(self.target, self.assistant, settings, number)
        if cell.method == PLAIN:
            return SpecdecMethod(self.target, None, 0, settings, compile=self.compile)
        if cell.method not in self._drafters:
            self._drafters[cell.method] = self.drafter(cell.method)
        k = cell.num_drafts if isinstance(cell.num_drafts, int) else AdaptiveDrafts()
        made = SpecdecMethod(self.target, self._drafters[cell.method], k, settings, cell.tree, self.compile)
        made.decoder.read_rule(cell.rule)  # refuses a rule that these drafts do not know, before anything runs
        return made
