"""``GrammarProcessor``: the texts of ``speculate`` are those of transformers' own loop with it."""

from __future__ import annotations

import re

import pytest
import specdec
from specdec import GrammarSource, SpeculativeDecoder
from specdec.hf import convert_processors
from specdec.hf.grammar_processor import GrammarProcessor
from transformers.generation import NoRepeatNGramLogitsProcessor

FORM = "(yes|no), [a-z ]{5,12}[.]"


@pytest.fixture(scope="module")
def grammar(pair):
    return SpeculativeDecoder(pair[0], num_drafts=0).grammar_compiler(pair[2]).compile(GrammarSource.regex(FORM))


@pytest.mark.parametrize("others", [(), (NoRepeatNGramLogitsProcessor(3),)])
def test_texts_are_those_of_transformers(pair, grammar, monkeypatch, others):
    """Alone it is read by the kernels; beside a processor that has no other form it is one, too."""
    target, draft, tokenizer = pair
    inputs = tokenizer(["def read(self):", "import"], return_tensors="pt", padding=True, padding_side="left")
    own = {"max_new_tokens": 24, "logits_processor": [*others, GrammarProcessor(grammar, inputs.input_ids.shape[1])]}
    plain = target.generate(**inputs, **own)
    found, read = [], convert_processors._Native.take
    monkeypatch.setattr(convert_processors._Native, "take", lambda self, p: found.append(read(self, p)) or found[-1])
    speculator = specdec.speculate(draft, num_drafts=3)
    drafted = target.generate(**inputs, **own, custom_generate=speculator)
    assert drafted.tolist() == plain.tolist() and all(found) != bool(others)
    texts = tokenizer.batch_decode(drafted[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    assert all(re.fullmatch(FORM, text) for text in texts) and speculator.last_result.stats.drafted > 0
