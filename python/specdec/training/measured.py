"""What a head is worth: alpha and tau of decoders. Unlike a draft model's, its drafts depend on where their step began,
so they do not follow from one forward over a text."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from specdec_kernels import SamplingParams

from ..decoder import SpeculativeDecoder
from ..drafters.heads import HeadDrafter
from ..stats import Stats
from .held_out import AT_ONCE, TEMPERATURES, Worth


def measure(
    target: PreTrainedModel,
    drafter: HeadDrafter,
    prompts: Sequence[Sequence[int]],
    new: int,
    num_drafts: int,
    seed: int,
) -> tuple[list[Worth], list[float]]:
    """Continues the prompts by ``new`` tokens greedily and at temperature 1. Returns what the drafter was worth at each
    of the two, and how often a greedy draft was accepted at each depth, of those that were tested there."""
    decoder, worths, hits = SpeculativeDecoder(target, drafter, num_drafts, graph_bytes=0), [], list[float]()
    for temperature in TEMPERATURES:
        counts = []
        for first in range(0, len(prompts), AT_ONCE):
            some = [list(p) for p in prompts[first : first + AT_ONCE]]
            seeds = list(range(seed + first, seed + first + len(some)))
            done = decoder.generate(some, None, new, SamplingParams(temperature=temperature), seeds)
            if done.drafter_error is not None:
                raise RuntimeError(f"the head failed: {done.drafter_error}")
            counts.append(done.stats)
        total = Stats.total(counts, num_drafts)
        worths.append(Worth(temperature, total.alpha, total.tau))
        if temperature == 0:
            tested = zip(total.accepted_by_position, total.tested_by_position, strict=True)
            hits = [accepted / of for accepted, of in tested if of]
    return worths, hits
