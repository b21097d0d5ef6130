"""Pairs that pad the vocabulary of one tokenizer to different sizes, as Qwen2.5's models do."""

from __future__ import annotations

import copy

import pytest
import specdec
import torch
from specdec import SpeculativeDecoder, load_model, load_pair
from specdec.cli.drafters import make_drafter
from specdec.models.load.shared_ids import ids_of_pair
from support.models import VOCABULARY, tiny_model, tunable_pair
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(VOCABULARY - 4)]  # so that both sizes below have all of them
PROMPT = [[5, 6, 7]]


def save(model, folder, words=WORDS, size: int | None = None):
    """Saves the model with ``size`` rows of its embedding and head, and a tokenizer of these words, if any."""
    model = copy.deepcopy(model)
    if size is not None:
        model.resize_token_embeddings(size, mean_resizing=False)
    model.save_pretrained(folder)
    if words is not None:
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def folders(tmp_path):
    """Target and draft; the draft has two tokens fewer, which are padding."""
    target, draft = tunable_pair(0.1)
    return save(target, tmp_path / "target"), save(draft, tmp_path / "draft", size=VOCABULARY - 2)


def test_it_needs_no_argument(folders):
    """In Python and in ``generate``, from folders whose configurations name one tokenizer."""
    target, draft, tokenizer = load_pair(*folders)
    plain = SpeculativeDecoder(target, num_drafts=0).generate(PROMPT, max_new_tokens=20, eos_token_id=[])
    result = SpeculativeDecoder(target, draft).generate(PROMPT, max_new_tokens=20, eos_token_id=[])
    assert result.tokens == plain.tokens and result.stats.accepted > 0
    said = SpeculativeDecoder(target, draft, d2t=range(len(tokenizer)))
    assert said.generate(PROMPT, max_new_tokens=20, eos_token_id=[]).stats.accepted == result.stats.accepted
    ids = torch.tensor(PROMPT)
    settings = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    ours = target.generate(ids, custom_generate=specdec.speculate(draft), **settings)
    assert ours.tolist() == target.generate(ids, **settings).tolist()
    assert ids_of_pair(target, draft) == range(len(WORDS)) == ids_of_pair(target, draft, tokenizer)
    assert ids_of_pair(draft, target) == range(len(WORDS)) and ids_of_pair(target, target) is None


@pytest.mark.parametrize("why", ("other words", "no tokenizer", "too few columns", "no folder"))
def test_what_is_not_known_is_refused(folders, tmp_path, why):
    """With what can be passed instead; the command line, which has the target's tokenizer, as before."""
    target, small = load_model(folders[0]), VOCABULARY - 2
    draft = {
        "other words": lambda: load_model(save(tiny_model(), tmp_path / "a", WORDS[::-1], small)),
        "no tokenizer": lambda: load_model(save(tiny_model(), tmp_path / "b", None, small)),
        "too few columns": lambda: load_model(save(tiny_model(), tmp_path / "c", WORDS, VOCABULARY - 5)),
        "no folder": lambda: copy.deepcopy(load_model(folders[1])),
    }[why]()
    if why == "no folder":
        draft.config.name_or_path = ""
    size = draft.config.vocab_size
    with pytest.raises(ValueError, match=rf"draft: .* {size} tokens, allowed: {VOCABULARY}, .* one tokenizer.* d2t="):
        SpeculativeDecoder(target, draft)
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    if why == "too few columns":
        with pytest.raises(ValueError, match=f"draft: got a vocabulary of {size} tokens, allowed: {VOCABULARY}"):
            make_drafter("model", target, draft, tokenizer=tokenizer)
    else:
        assert make_drafter("model", target, draft, tokenizer=tokenizer).columns == len(WORDS)


def test_tokens_of_the_padding_are_fed(folders):
    """The target may emit ids that the draft does not have; texts stay the target's."""
    target, draft, _ = load_pair(*folders)
    settings = {"max_new_tokens": 12, "eos_token_id": [], "logit_bias": {VOCABULARY - 1: 12.0}}
    plain = SpeculativeDecoder(target, num_drafts=0).generate(PROMPT, **settings)
    assert VOCABULARY - 1 in plain.tokens[0]
    assert SpeculativeDecoder(target, draft).generate(PROMPT, **settings).tokens == plain.tokens
