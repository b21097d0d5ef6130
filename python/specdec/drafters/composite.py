"""Drafts by copying where the text repeats itself, and with a model or a head elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from ..checks import refuse
from ..models.forward.cached_model import CachedModel
from .beside import BesideDrafter, BesideSession, replaced
from .model import model_drafter
from .protocol import BatchState, Copies, Drafter, Drafts, DraftSession, Share, Step

LONG_MATCH = 8  # matching tokens after which copies are preferred where nothing that was learned may decide


class Composite(BesideDrafter):
    """Lets each row of each step copy, or draft with a model or a head. Where all rows copy, the model is not called.

    Who drafts a row is decided before anything is drawn: by how many tokens match, by how often copies after such
    matches were right and drafts of the other drafter were accepted, and by the times of steps. So q is known, and the
    text's distribution is the target's. (TensorRT-LLM's ``use_sa_spec``, ArcticInference's suffix decoding beside
    another drafter and exllamav3's ``hybrid_draft_tokens`` decide by a fixed length of match.)

    In a batch in which a text depends on its drafts (sampled, rules ``token`` and ``block``), nothing that was learned
    or measured decides, so that a seed gives the same text every time: rows copy after ``LONG_MATCH`` matching tokens.

    Args:
        drafters: first one that copies (``SuffixDrafter``, ``PromptLookupDrafter``), then the other one: a model of the
            target's vocabulary, or a drafter. Chains only.

    Raises:
        ValueError: names ``drafters``, what was given and what is allowed.

    Example:
        >>> from specdec import Composite, SpeculativeDecoder, SuffixDrafter, load_embedded_pair
        >>> target, draft, tokenizer = load_embedded_pair()
        >>> decoder = SpeculativeDecoder(target, Composite([SuffixDrafter(), draft]))
        >>> len(decoder.generate([tokenizer("import os").input_ids], max_new_tokens=16).tokens[0])
        16
    """

    shares = True

    def __init__(self, drafters: Sequence[Drafter | PreTrainedModel]):
        given = [type(each).__name__ for each in drafters]
        allowed = "two: one that copies, as SuffixDrafter, then a model, or a drafter that does not copy"
        if len(given) != 2:
            refuse("drafters", given, allowed)
        first, other = drafters
        drafts = (
            not (other.copying or other.shares) if isinstance(other, Drafter) else isinstance(other, PreTrainedModel)
        )
        if not isinstance(first, Drafter) or not first.copying or not drafts:
            refuse("drafters", given, allowed)
        self.copier = first
        self.draft = other if isinstance(other, PreTrainedModel) else None  # until the target is known
        super().__init__(None if isinstance(other, PreTrainedModel) else other)
        self.max_length = None  # copies go on where the positions of a model end

    def of_target(self, target: CachedModel) -> Composite:
        """Returns a composite whose model drafts for this target; itself if its other drafter is no mere model.

        Raises:
            ValueError: as :func:`~specdec.drafters.model.model_drafter`.
        """
        return self if self.draft is None else Composite([self.copier, model_drafter(self.draft, target)])

    def start(self, batch: BatchState) -> CompositeSession:
        assert self.drafter is not None
        return CompositeSession(self.copier.start(batch), self.drafter.start(batch), batch)


class CompositeSession(BesideSession):
    """A session that copies, and another one."""

    def __init__(self, copier: DraftSession, other: DraftSession, batch: BatchState):
        super().__init__(other, batch)
        self.copier = copier

    def begin(self, prompts: Mapping[int, list[int]]) -> None:
        self.copier.begin(prompts)
        super().begin(prompts)

    def propose(self, step: Step) -> Drafts:
        copies = self.copier.propose(step)
        if not isinstance(copies, Copies):
            raise TypeError(f"propose() of a drafter that copies returned {type(copies).__name__}, allowed: Copies")
        share = step.share(copies, step.allowed, bool(self.behind))
        step = shortened(step, share.num_drafts)
        proposals = {
            row: copies.tokens[row][:most]
            for row, (most, copying) in enumerate(zip(step.allowed, share.copying, strict=True))
            if most and copying
        }
        drafts = self.of_other(step, proposals) or Drafts.none(step)
        if not isinstance(drafts, Drafts):
            raise TypeError("propose() of a drafter that does not copy returned Copies, allowed: Drafts")
        return replaced(drafts, proposals)._replace(copies=copies, share=share)

    def end(self, row: int, output: list[int]) -> None:
        self.copier.end(row, output)
        super().end(row, output)


def by_match(copies: Copies, allowed: Sequence[int], behind: bool) -> Share:
    """Decides who drafts each row by its text alone. The arguments are those of ``HostStep.share``."""
    pairs = zip(copies.matched, copies.tokens, strict=True)
    return Share(max(allowed), [matched >= LONG_MATCH and len(tokens) > 0 for matched, tokens in pairs])


def shortened(step: Step, count: int) -> Step:
    """Returns the step with ``count`` <= K drafts at most."""
    columns = slice(0, count + 2)
    return dataclasses.replace(
        step,
        num_drafts=count,
        allowed=[min(most, count) for most in step.allowed],
        positions=step.positions[:, columns],
        slots=step.slots[:, columns],
        allowed_on_device=step.allowed_on_device.clamp(max=count),
    )
