"""A grammar as a logits processor of transformers."""

from __future__ import annotations

from typing import cast

import torch
from transformers import LogitsProcessor

from ..sampling.grammar import Grammar
from ..sampling.grammar_masks import GrammarMasks


class GrammarProcessor(LogitsProcessor):
    """Lets texts be only what a grammar allows, in ``model.generate(logits_processor=[GrammarProcessor(...)])``. With
    ``custom_generate=specdec.speculate(...)`` the kernels read the grammar's masks. In transformers' own loop it works,
    too, but walks through the whole text for every token.

    Args:
        grammar: made by a ``GrammarCompiler`` for the model.
        prompt_length: tokens of the prompts with their padding, which are no part of the text.

    In transformers' own loop a GrammarError ends the whole batch, where a grammar fails in the middle of a text.

    Example:
        >>> import specdec
        >>> from specdec.hf.grammar_processor import GrammarProcessor
        >>> target, draft, tokenizer = specdec.load_embedded_pair()
        >>> compiler = specdec.GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
        >>> grammar = compiler.compile(specdec.GrammarSource.regex("[0-9]{3}"))
        >>> inputs = tokenizer("x = ", return_tensors="pt")
        >>> own = [GrammarProcessor(grammar, inputs.input_ids.shape[1])]
        >>> plain = target.generate(**inputs, logits_processor=own, max_new_tokens=8)
        >>> drafted = target.generate(
        ...     **inputs, logits_processor=own, max_new_tokens=8, custom_generate=specdec.speculate(draft)
        ... )
        >>> drafted.tolist() == plain.tolist()
        True
    """

    def __init__(self, grammar: Grammar, prompt_length: int):
        self.grammar, self.prompt_length = grammar, prompt_length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        masks = GrammarMasks(self.grammar.vocab_size, torch.device("cpu"))
        for row, text in enumerate(input_ids[:, self.prompt_length :].tolist()):
            if not self.grammar.eos.intersection(text):  # after its end a text is padding
                masks.begin(row, self.grammar)
                masks.follow(row, text)
        words = masks.after(masks.send(input_ids[:, :0].cpu()))[:, 0]
        if masks.failures:
            raise min(masks.failures.items())[1].error
        bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
        allowed = bits.flatten(1)[:, : scores.shape[1]].bool().to(scores.device)
        return cast(torch.FloatTensor, scores.masked_fill(~allowed, -torch.inf))
