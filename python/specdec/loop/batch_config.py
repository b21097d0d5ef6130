"""The settings of a batch."""

from __future__ import annotations

from dataclasses import dataclass

from ..drafters.protocol import BatchState, Drafter
from ..models.forward.cached_model import CachedModel
from ..sampling.grammar_masks import GrammarMasks
from ..sampling.processors import Processors
from ..stats import Timer
from .draft_length import DraftLength
from .first_drafts import FirstDrafts
from .graphs import StepGraphs
from .prefixes import PrefixReuse
from .step import AcceptRule


@dataclass(frozen=True)
class BatchConfig:
    """The settings of a batch, which are independent of each other, but for the last one.

    Attributes:
        num_drafts: chooses K.
        size: the number of rows. A row holds one sequence at a time.
        capacity: slots of a row, the trash slot included.
        max_eos: the largest number of end-of-sequence tokens of one sequence.
        nodes: the most nodes of a tree that a step verifies, whose paths have up to K; 0: chains.
        logits: whether the target's logits are recorded for every emitted token.
        async_scheduling: whether the device may be one step ahead of the host.
        graphs: runs a step as one CUDA graph; None: no graphs.
        prefill_chunk: prompts are read one at a time, in parts of so many tokens; None: all at once.
        first_drafts: watches whether any of the first drafts is accepted; None: nobody does.
        prefix_reuse: what such prompts take over from earlier ones.
    """

    target: CachedModel
    drafter: Drafter | None
    num_drafts: DraftLength
    rule: AcceptRule
    size: int
    capacity: int
    max_eos: int
    backend: str = "auto"
    nodes: int = 0
    logits: bool = False
    async_scheduling: bool = False
    graphs: StepGraphs | None = None
    prefill_chunk: int | None = None
    prefix_reuse: PrefixReuse = PrefixReuse.OFF
    first_drafts: FirstDrafts | None = None

    def new_state(self) -> BatchState:
        """Returns the state of a batch without sequences."""
        size, most, vocab_size = self.size, self.num_drafts.most, self.target.vocab_size
        return BatchState(
            size=size,
            capacity=self.capacity,
            most_drafts=most,
            nodes=self.nodes,
            rule=self.rule.rule,
            backend=self.backend,
            timer=Timer(),
            target_cache=self.target.new_cache(size, self.capacity, max(most, self.nodes) + 1),
            processors=Processors(size, vocab_size),
            grammars=GrammarMasks(vocab_size, self.target.device),
            ends=[frozenset()] * size,
            predictions=[()] * size,
            owners=[None] * size,
            prefill_chunk=self.prefill_chunk,
        )
