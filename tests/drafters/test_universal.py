"""Drafts from a model with another tokenizer."""

from __future__ import annotations

import copy
import functools
import json
import random

import pytest
import torch
from specdec import AdaptiveDrafts, UniversalDrafter
from specdec.drafters import Drafter, Drafts, DraftSession, universal
from specdec.drafters.translation import TokenText, Translation
from specdec.drafters.universal import UniversalDraftSession, common_length
from specdec.models.forward.cached_model import CachedModel
from support.models import generate, tiny_model
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers import models as tokenizer_models
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec_kernels import SamplingParams

CODE = '''def mean(values: list[float]) -> float:
    """The arithmetic mean; raises for an empty list."""
    if not values:
        raise ValueError("values: got none, allowed: at least one")
    return sum(values) / len(values)


class Counter:
    def __init__(self, start=0):
        self.count = start

    def add(self, number):
        self.count += number
        return self.count
'''
UNICODE = "naïve café — 日本語のテキスト, 🎉🎉 and 👩‍👩‍👧 families; Ελληνικά. "
KINDS = ("bytes", "characters", "metaspace")


@functools.cache
def other_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a BOS, single bytes, or BPE that marks spaces and falls back to bytes, as Llama-2's."""
    specials = ["<s>", "</s>"]
    if kind == "metaspace":
        t = Tokenizer(tokenizer_models.BPE(byte_fallback=True))
        t.pre_tokenizer = pre_tokenizers.Metaspace()
        strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        t.decoder = decoders.Sequence(strip)
        first = [*specials, *(f"<0x{i:02X}>" for i in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=450, special_tokens=first, show_progress=False)
    else:
        t = Tokenizer(tokenizer_models.BPE())
        t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        t.decoder = decoders.ByteLevel()
        size = 258 if kind == "characters" else 400
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
        )
    t.train_from_iterator([CODE], trainer)
    saved = json.loads(t.to_str())
    saved["added_tokens"] = [a for a in saved["added_tokens"] if a["content"] in specials]  # bytes are not special
    t = Tokenizer.from_str(json.dumps(saved))
    t.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", eos_token="</s>")


@functools.cache
def renumbered(draft, tokenizer) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The same model and tokenizer under other ids: as good a draft, by way of text only."""
    order = torch.randperm(draft.config.vocab_size, generator=torch.Generator().manual_seed(0))  # old id of each new
    model = copy.deepcopy(draft)
    with torch.no_grad():
        embeddings = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
        for weight in {id(w): w for w in embeddings}.values():  # one, where they are tied
            weight.copy_(weight[order].clone())
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    new = {old: i for i, old in enumerate(order.tolist())}
    saved = json.loads(tokenizer.backend_tokenizer.to_str())
    saved["model"]["vocab"] = {token: new[i] for token, i in saved["model"]["vocab"].items()}
    for added in saved["added_tokens"]:
        added["id"] = new[added["id"]]
    saved["added_tokens"].sort(key=lambda added: added["id"])
    names = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token, "pad_token": tokenizer.pad_token}
    return model, PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(saved)), **names)


@functools.cache
def stranger(kind: str, positions: int = 2048) -> LlamaForCausalLM:
    """A tiny random draft of another vocabulary."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(other_tokenizer(kind)), max_position_embeddings=positions, **sizes)
    return LlamaForCausalLM(config).eval()


# ---- translation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", (CODE * 2, UNICODE * 4), ids=("code", "unicode"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("there", (True, False))
def test_translation_of_a_growing_text(pair, kind, there, text):
    """In pieces of any length it is what encoding the whole text gives, at a cost that does not grow."""
    source, into = TokenText(pair[2]), TokenText(other_tokenizer(kind))
    if not there:
        source, into = into, source
    sequence, translation, longest, choice = source.prefix + source.encode(text), Translation(source, into), 0, None
    encode = into.encode

    def counted(text: str) -> list[int]:
        nonlocal longest
        tokens = encode(text)
        longest = max(longest, len(tokens))
        return tokens

    into.encode = counted
    choice, end = random.Random(0), 0
    while end < len(sequence):
        end += choice.choice((1, 1, 2, 3, 6))
        translation.update(sequence[:end])
        once = list(translation.tokens)
        translation.update(sequence[:end])
        assert translation.tokens == once
        said = into.decode(once[len(into.prefix) :])
        assert text.startswith(said)
        assert said.startswith(source.decode(sequence[len(source.prefix) : end]).rstrip("\ufffd"))
    assert translation.tokens == into.prefix + encode(text)
    assert longest < 120 < len(translation.tokens)


@pytest.mark.parametrize("text", (CODE * 2, UNICODE * 4), ids=("code", "unicode"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("there", (True, False))
def test_way_back(pair, kind, there, text):
    """Whatever is proposed says, after what is known, exactly what the draft said."""
    source, into = TokenText(pair[2]), TokenText(other_tokenizer(kind))
    if not there:
        source, into = into, source
    sequence, whole = source.prefix + source.encode(text), into.prefix + into.encode(text)
    tried = found = right = 0
    for end in range(len(source.prefix) + 3, len(sequence) - 10, 3):
        known, translation = sequence[:end], Translation(source, into)
        translation.update(known)
        if translation.tokens != whole[: len(translation.tokens)]:
            continue  # the tokens known end within one of the other
        more = whole[len(translation.tokens) :][:12]
        said = into.decode([*translation.tokens[len(into.prefix) :], *more]).split("\ufffd")[0]
        back = translation.back(known, more)
        tried += 1
        if back:
            assert source.decode([*known, *back][len(source.prefix) :]) == said
            found += len(back)
            right += common_length(back, sequence[end:])
    assert tried > 20 and found > 2 * tried and right > 0.7 * found


def test_half_a_character(pair):
    """A draft that completes it is understood; other text after it is not."""
    source, into = TokenText(pair[2]), TokenText(other_tokenizer("bytes"))
    text, rest = "party = '🎉", "' # 🎉"
    known, end = source.encode(text), source.encode(text + rest)
    assert end[: len(known)] == known
    translation = Translation(source, into)
    translation.update(known[:-1])
    assert into.decode(translation.tokens[1:]) == "party = '"
    assert translation.back(known[:-1], into.encode("🎉" + rest)) == end[len(known) - 1 :]
    assert translation.back(known[:-1], into.encode(rest)) == []
    # Bytes that never become one are read at last.
    broken = known[:-1] * 2 + source.encode("and more of it")
    translation.update(broken)
    assert into.decode(translation.tokens[1:]).endswith("and more of it")


def test_special_tokens(pair):
    """Those that both write alike are handed over as such, others have no text."""
    target, other = pair[2], copy.deepcopy(other_tokenizer("bytes"))
    other.add_special_tokens({"additional_special_tokens": ["<|pad|>"]})
    spoken = frozenset(("<|pad|>",))
    source, into = TokenText(target, spoken), TokenText(other, spoken)
    end, pad = target.eos_token_id, target.pad_token_id
    translation = Translation(source, into)
    translation.update([*source.encode("a = 1"), end, pad, *source.encode("b")])
    assert translation.tokens == [0, *into.encode("a = 1"), other.convert_tokens_to_ids("<|pad|>"), *into.encode("b")]
    # What each puts before a text it puts there once.
    spoken = frozenset(("<s>",))
    source, into = (TokenText(other_tokenizer(kind), spoken) for kind in ("metaspace", "bytes"))
    sequence, translation = source.prefix + source.encode("def f(x):"), Translation(source, into)
    for end in range(1, len(sequence) + 1):
        translation.update(sequence[:end])
    assert translation.tokens == into.prefix + into.encode("def f(x):")


# ---- decoding ----------------------------------------------------------------------------------------------


class Checked(Drafter, DraftSession):
    """A drafter that is asked twice for every step, and must not propose ``never``."""

    def __init__(self, drafter: UniversalDrafter, never=()):
        self.drafter, self.never, self.proposed = drafter, frozenset(never), 0

    def start(self, batch):
        self.session = self.drafter.start(batch)
        return self

    def propose(self, step) -> Drafts:
        drafts, again = self.session.propose(step), self.session.propose(step)
        assert torch.equal(drafts.tokens, again.tokens)
        rows = drafts.tokens.tolist()
        for row, allowed in zip(rows, step.allowed, strict=True):
            count = len([t for t in row if t >= 0])
            assert count <= allowed and row[count:] == [-1] * (len(row) - count)
            assert not self.never & set(row)
            self.proposed += count
        return drafts

    def begin(self, prompts) -> None:
        self.session.begin(prompts)

    def observe(self, texts, starts) -> None:
        self.session.observe(texts, starts)

    def end(self, row, output) -> None:
        self.session.end(row, output)


PROMPTS = ("def fibonacci(n):\n", "import os\nimport sys\n\n\ndef main(", "x", CODE)
NEW = 32


@functools.cache
def plain(pair) -> list[list[int]]:
    prompts = pair[2](list(PROMPTS)).input_ids
    return generate(pair[0], None, prompts, 0, max_new_tokens=NEW).tokens


def test_as_good_as_the_draft_itself(pair):
    """The embedded draft under other ids accepts what it accepts directly."""
    target, draft, tokenizer = pair
    prompts = tokenizer(list(PROMPTS)).input_ids
    direct = generate(target, draft, prompts, 4, max_new_tokens=NEW)
    drafter = Checked(UniversalDrafter(*renumbered(draft, tokenizer), tokenizer), tokenizer.all_special_ids)
    result = generate(target, drafter, prompts, 4, max_new_tokens=NEW)
    assert result.drafter_error is None
    assert result.tokens == direct.tokens == plain(pair)
    assert result.stats.tau > 0.9 * direct.stats.tau > 1.5


@pytest.mark.parametrize("kind", KINDS)
def test_text_does_not_depend_on_the_draft(pair, kind):
    target, _, tokenizer = pair
    prompts = tokenizer(list(PROMPTS[:3])).input_ids
    drafter = Checked(UniversalDrafter(stranger(kind), other_tokenizer(kind), tokenizer), tokenizer.all_special_ids)
    for num_drafts in (2, AdaptiveDrafts(3, costs=[1.0, 1.1, 1.2, 1.3])):
        result = generate(target, drafter, prompts, num_drafts, max_new_tokens=20)
        assert result.tokens == [t[:20] for t in plain(pair)[:3]] and result.drafter_error is None
    assert drafter.proposed > 20


def test_drafts_are_the_models_own(pair, monkeypatch):
    """Through cache and catching up: what the draft says without a cache after the same tokens."""
    target, tokenizer = pair[0], pair[2]
    through_cache, extend, extended, widths = UniversalDraftSession._continue, CachedModel.extend, [], []
    monkeypatch.setattr(universal, "NARROW", 3)
    monkeypatch.setattr(CachedModel, "extend", lambda *args: (extended.append(True), extend(*args)))

    def checked(self, rows, count):
        extended.clear()
        drafted = through_cache(self, rows, count)
        widths.append(bool(extended))
        for b in rows:
            tokens = list(self.translations[b].tokens)
            for token in drafted[b]:
                assert token == self.model.model(torch.tensor([tokens])).logits[0, -1].argmax()
                tokens.append(token)
        return drafted

    monkeypatch.setattr(UniversalDraftSession, "_continue", checked)
    prompts = tokenizer(list(PROMPTS[:3])).input_ids
    torch.manual_seed(3)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=258, hidden_size=16, n_layer=1, n_head=2)).eval()
    for drafter, new in (
        (UniversalDrafter(stranger("characters"), other_tokenizer("characters"), tokenizer), 20),
        (UniversalDrafter(bloom, other_tokenizer("characters"), tokenizer), 12),
        (UniversalDrafter(target, tokenizer, tokenizer), 8),  # of which all are accepted
    ):
        assert generate(target, drafter, prompts, 3, max_new_tokens=new).drafter_error is None
    assert min(widths.count(True), widths.count(False)) > 1


def test_coupled_text_is_that_of_plain_sampling(pair):
    target, draft, tokenizer = pair
    prompts = tokenizer(list(PROMPTS[:2])).input_ids
    drafter = UniversalDrafter(*renumbered(draft, tokenizer), tokenizer)
    options = {"params": SamplingParams(0.4), "seed": 5, "rule": "coupled", "max_new_tokens": 20}
    result = generate(target, drafter, prompts, 4, **options)
    assert result.tokens == generate(target, None, prompts, 0, **options).tokens
    assert result.stats.accepted > 8 and result.drafter_error is None


def test_prompts_that_end_within_a_character(pair):
    target, draft, tokenizer = pair
    ids = tokenizer(UNICODE).input_ids
    cuts = [i for i in range(1, len(ids)) if tokenizer.decode(ids[:i]).endswith("\ufffd")][:6]
    prompts = [ids[:i] for i in cuts]
    drafter = Checked(UniversalDrafter(*renumbered(draft, tokenizer), tokenizer))
    result = generate(target, drafter, prompts, 3, max_new_tokens=12)
    assert len(prompts) == 6 and result.drafter_error is None
    assert result.tokens == generate(target, None, prompts, 0, max_new_tokens=12).tokens


def test_no_room_no_drafts(pair):
    """A text longer than the draft's positions, from the start or while it grows, goes on without it."""
    target, _, tokenizer = pair
    prompts = tokenizer(list(PROMPTS)).input_ids
    drafted = []
    for positions in (40, 2048):
        drafter = UniversalDrafter(stranger("characters", positions), other_tokenizer("characters"), tokenizer)
        result = generate(target, drafter, prompts, 3, max_new_tokens=NEW)
        assert result.tokens == plain(pair) and result.drafter_error is None
        drafted.append([stats.drafted for stats in result.sequence_stats])
    few, many = drafted
    assert few[3] == 0 < many[3] and all(0 < a < b for a, b in zip(few[:3], many, strict=False))


@pytest.mark.parametrize("common", (True, False))
def test_drafts_end_where_the_draft_ends(pair, monkeypatch, common):
    """Whether its end reads as something to the target or not."""
    target, draft, tokenizer = pair
    prompts = tokenizer(list(PROMPTS[:2])).input_ids
    if not common:
        draft, other = stranger("bytes"), other_tokenizer("bytes")
    else:
        other = tokenizer
    (a, b), end, seen = (other.encode(c, add_special_tokens=False)[0] for c in "ab"), other.eos_token_id, []
    monkeypatch.setattr(UniversalDraftSession, "_continue", lambda self, rows, count: [[a, end, b, b]] * 2)

    class Watched(Checked):
        def propose(self, step):
            drafts = super().propose(step)
            seen.extend(tokenizer.decode([t for t in row if t >= 0]) for row in drafts.tokens.tolist())
            return drafts

    result = generate(target, Watched(UniversalDrafter(draft, other, tokenizer)), prompts, 4, max_new_tokens=6)
    assert result.tokens == [t[:6] for t in plain(pair)[:2]] and set(seen) - {""} == {"a"}


# ---- what is refused ---------------------------------------------------------------------------------------


def test_arguments_are_checked(pair):
    tokenizer = pair[2]
    with pytest.raises(ValueError, match="draft_tokenizer: got ids up to 4095, allowed: up to 100"):
        UniversalDrafter(tiny_model("llama"), tokenizer, tokenizer)
    with pytest.raises(ValueError, match="tokenizer: got str, allowed: a transformers tokenizer"):
        UniversalDrafter(pair[1], tokenizer, "gpt2")
    with pytest.raises(ValueError, match="draft: got '.*', allowed: a loaded model"):
        UniversalDrafter("gpt2", tokenizer, tokenizer)
