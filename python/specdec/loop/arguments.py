"""Checks the arguments for sequences once, for ``generate`` with several sequences and for a request with one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import LogitsProcessor

from specdec_kernels import SamplingParams

from ..checks import read_count, refuse
from ..models.cached_model import CachedModel
from ..prompts import read_processor_prompts, read_seeds, repeated
from ..sampling.params import of_each, read_bias, read_min_new_tokens, read_params, repeat_params
from ..sampling.processors import read_processors
from ..stats import Stats
from ..stopping import Stopping
from .sequence import DraftSettings, Ends, Entry, SequenceRecord
from .token_log_probs import AskedLogProbs


def read_entries(
    target: CachedModel,
    prompts: list[list[int]],
    max_new_tokens: int,
    params: SamplingParams | None,
    seed: int | Sequence[int] | torch.Tensor,
    eos: frozenset[int],
    stop: Stopping | None,
    *,
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None,
    banned_tokens: Sequence[int] | Sequence[Sequence[int]] | None,
    min_new_tokens: int | Sequence[int] | torch.Tensor,
    logits_processor: Sequence[LogitsProcessor] | Sequence[Sequence[LogitsProcessor]] | None,
    most_drafts: int,
    asked: AskedLogProbs,
    processor_prompts: Sequence[Sequence[int]] | None = None,
    copies: int = 1,
    drafting: DraftSettings | None = None,
) -> list[Entry]:
    """Returns one entry for each sequence of ``prompts``, numbered from 0. The other arguments are those of
    ``SpeculativeDecoder.generate``.

    Args:
        prompts: as ``read_prompts`` returns them. The caller has checked that they fit with ``max_new_tokens``.
        most_drafts: the largest K.
        asked: the log-probabilities that every sequence is to have.
        copies: sequences of each prompt, next to each other; the j-th has the prompt's seed + j.
        drafting: what every sequence asks of its drafts; None: nothing.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
    """
    size, vocab_size, cpu = len(prompts), target.vocab_size, torch.device("cpu")
    if stop is not None and not callable(getattr(stop, "first_end", None)):
        refuse("stop", type(stop).__name__, "a Stopping, such as StopStrings")
    seen = None if processor_prompts is None else read_processor_prompts(processor_prompts, size, vocab_size)
    params = read_params(params, size, cpu)
    bias = read_bias(logit_bias, banned_tokens, size, vocab_size)
    shortest = read_min_new_tokens(min_new_tokens, size, max_new_tokens)
    seeds = read_seeds(seed, size, cpu)
    if read_count("num_return_sequences", copies, 1) > 1:
        seeds = (seeds[:, None] + torch.arange(copies)).view(-1)
        params = repeat_params(params, copies)
        prompts, bias, shortest = repeated(prompts, copies), repeated(bias, copies), repeated(shortest, copies)
        seen = None if seen is None else repeated(seen, copies)
        if logits_processor and all(isinstance(own, Sequence) for own in logits_processor):
            logits_processor = [own for own in logits_processor if isinstance(own, Sequence) for _ in range(copies)]
    processors = read_processors(logits_processor, len(prompts))
    eos = frozenset(i for i in eos if 0 <= i < vocab_size)
    settings, ends, entries = of_each(params, len(prompts)), Ends(max_new_tokens, eos, stop), []
    for b, prompt in enumerate(prompts):
        text = list(prompt)
        processed = text if seen is None else list(seen[b])
        record = SequenceRecord(b, text, processed, Stats.empty(most_drafts), len(prompt), ends)
        record.asked, record.drafting = asked, drafting or record.drafting
        entries.append(Entry(record, settings[b], int(seeds[b]), bias[b], shortest[b], processors[b]))
    return entries
