"""Drafts the tokens that followed the previous occurrence of the last few tokens in the same sequence."""

from __future__ import annotations

import math

from ..checks import read_count, refuse
from .suffix import SuffixDrafter


class PromptLookupDrafter(SuffixDrafter):
    """Prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding; transformers'
    ``prompt_lookup_num_tokens``). It needs no model and keeps no state beyond a batch. It is useful where outputs
    repeat their input, as in editing, summaries and extraction.

    The longest n-gram that ends the text and also occurs earlier in it, in prompt or output, is looked up. The drafts
    are the tokens that followed its most recent earlier occurrence, up to an end-of-sequence token. They are a function
    of the text, so q is one-hot and the distribution is unchanged. A ``SuffixDrafter`` does the same with matches of
    any length, which limit how much is copied. In a text that repeated a piece more than 32 times without a break, an
    earlier occurrence than the most recent one may be taken.

    A tree has the continuations of several earlier occurrences, as that of a ``SuffixDrafter``.

    The defaults are the best of those tried on Python source, K = 4 to 12, where a draft costs 5 % of a step. Single
    tokens give more drafts, but most of these are rejected; n = 3 alone, as in the original, finds old versions of
    text that has been edited since.

    Args:
        max_ngram: tokens of the longest n-gram that is looked up, >= 1.
        min_ngram: tokens of the shortest one, 1 to ``max_ngram``.

    Raises:
        ValueError: names the argument, what was given and what is allowed.

    Example:
        >>> from specdec import PromptLookupDrafter, SpeculativeDecoder, load_embedded_pair
        >>> target, _, tokenizer = load_embedded_pair()
        >>> decoder = SpeculativeDecoder(target, PromptLookupDrafter(), num_drafts=4)
        >>> decoder.generate([tokenizer("x = [1, 2, 3, 1, 2, 3, 1, 2, 3,").input_ids], max_new_tokens=16).stats.tau > 1
        True
    """

    def __init__(self, max_ngram: int = 5, min_ngram: int = 2):
        read_count("max_ngram", max_ngram, 1)
        if isinstance(min_ngram, bool) or not isinstance(min_ngram, int) or not 1 <= min_ngram <= max_ngram:
            refuse("min_ngram", repr(min_ngram), f"an integer from 1 to max_ngram={max_ngram}")
        super().__init__(min_match=min_ngram, max_spec_factor=math.inf)
        self.max_match = max_ngram
