"""Every field of ``GenerationConfig``: refused by name, or of the effect that it has in transformers."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from specdec import AdaptiveDrafts, PromptLookupDrafter, SpeculativeDecoder, speculate
from specdec.hf.generation_config import FIELDS, defined_fields
from support import ROOT
from support.models import tunable_pair
from transformers import (
    CompileConfig,
    GenerationConfig,
    MptConfig,
    MptForCausalLM,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import ContinuousBatchingConfig

DOCS = ROOT / "docs" / "transformers.md"
ENDS = list(range(0, 101, 9))


def test_the_table_has_the_fields_that_transformers_defines():
    missing, gone = defined_fields() - {*FIELDS}, {*FIELDS} - defined_fields()
    assert not missing, f"this transformers defines fields that the table does not say anything about: {missing}"
    assert not gone, f"the table has fields that this transformers does not define: {gone}"


def test_the_docs_show_the_table():
    section = DOCS.read_text("utf-8").partition("field by field")[2]
    slow = section.partition("which is slow:")[2].partition("| supported |")[0]
    by_processor = {*re.findall(r"`(\w+)`", slow)}
    shown = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE))
    supported = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section.partition("| refused |")[0], re.MULTILINE))
    assert shown == {name: field.text for name, field in FIELDS.items() if name not in by_processor}
    assert {*supported} == {name for name in shown if FIELDS[name].supported}
    assert {FIELDS[name].text for name in by_processor} == {"transformers' processor, row by row (slow)"}


def batch() -> dict[str, torch.Tensor]:
    """Three prompts, padded on the left with a token that is also among the others."""
    generator = torch.Generator().manual_seed(3)
    ids, mask = torch.randint(1, 101, (3, 9), generator=generator), torch.ones(3, 9, dtype=torch.int64)
    for b, padding in enumerate((0, 3, 6)):
        ids[b, :padding], mask[b, :padding] = 7, 0
    return {"input_ids": ids, "attention_mask": mask}


def both(inputs: dict[str, torch.Tensor] | None = None, speculator=None, **settings):
    """What transformers makes of ``settings``, and what we do; and our result."""
    target, draft = tunable_pair(0.3)
    speculator = speculator or speculate(draft, num_drafts=3, seed=5)
    inputs = batch() if inputs is None else inputs
    settings = {"max_new_tokens": 16, "eos_token_id": ENDS, "pad_token_id": 7, **settings}
    settings = {name: value for name, value in settings.items() if value is not None}
    theirs = target.generate(**inputs, **settings)
    ours = target.generate(**inputs, **settings, custom_generate=speculator)
    return theirs, ours, speculator.last_result


@functools.cache
def plain() -> torch.Tensor:
    return both()[0]


# ---- refused -----------------------------------------------------------------------------------------------

REFUSED = {
    "num_beams": 2,
    "use_mtp": True,
    "use_cache": False,
    "cache_implementation": "static",
    "cache_config": {"backend": "quanto"},
    "max_cache_len": 64,
    "token_healing": True,
    "guidance_scale": 1.5,
    "output_attentions": True,
    "output_hidden_states": True,
    "is_assistant": True,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash",
    "compile_config": CompileConfig(),
    "continuous_batching_config": ContinuousBatchingConfig(),
    "low_memory": True,
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "num_beam_groups": 2,
    "constraints": [],
    "force_words_ids": [[5]],
    "prefill_chunk_size": 4,
}


def test_every_refused_field_has_a_value_to_be_refused():
    assert {*REFUSED} == {name for name, field in FIELDS.items() if not field.supported}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, "keyword") for name in REFUSED),
        ("use_cache", "configuration"),
        ("guidance_scale", "configuration"),
        ("guidance_scale", "model"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_refused_fields_are_refused_by_name(name, how):
    target, draft = tunable_pair(0.3)
    settings, mine = {"max_new_tokens": 4}, {name: REFUSED[name]}
    kept = target.generation_config
    try:
        if how == "keyword":
            settings |= mine
        elif how == "configuration":
            settings = {"generation_config": GenerationConfig(max_new_tokens=4, **mine)}
        else:
            target.generation_config = GenerationConfig(**mine)
        with pytest.raises(ValueError, match=f"^{name}: got "):
            target.generate(**batch(), **settings, custom_generate=speculate(draft))
    finally:
        target.generation_config = kept


@pytest.fixture
def configured():
    """Sets fields of the target's own configuration."""
    target, _ = tunable_pair(0.3)
    kept = target.generation_config

    def configure(**fields) -> None:
        target.generation_config = GenerationConfig(**fields)

    yield configure
    target.generation_config = kept


OVERRIDDEN = [name for name, field in FIELDS.items() if field.overridden]


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_how_the_model_would_generate_is_overridden(name, configured):
    """What a model says about transformers' way to the same text. A caller who says so is refused (above)."""
    target, draft = tunable_pair(0.3)
    settings = {"max_new_tokens": 16, "eos_token_id": ENDS, "pad_token_id": 7}
    expected = plain()
    configured(**{name: REFUSED[name]})
    assert torch.equal(expected, target.generate(**batch(), **settings, custom_generate=speculate(draft)))


def test_a_caller_is_refused_beside_a_model_that_says_something_else(configured):
    target, draft = tunable_pair(0.3)
    configured(prefill_chunk_size=4)
    with pytest.raises(ValueError, match="^prefill_chunk_size: got 5"):
        target.generate(**batch(), max_new_tokens=2, prefill_chunk_size=5, custom_generate=speculate(draft))


def test_a_model_whose_configuration_has_no_cache():
    torch.manual_seed(0)
    config = MptConfig(d_model=32, n_heads=4, n_layers=1, vocab_size=101, max_seq_len=64, tie_word_embeddings=False)
    model = MptForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=1.0)
    assert model.generation_config.use_cache is False
    ids = torch.tensor([[5, 6, 7]])
    theirs = model.generate(ids, max_new_tokens=12)
    assert len({*theirs[0].tolist()}) > 5
    assert torch.equal(
        theirs,
        model.generate(ids, max_new_tokens=12, custom_generate=speculate(drafter=PromptLookupDrafter(min_ngram=1))),
    )


@pytest.mark.parametrize("name", REFUSED)
def test_their_neutral_values_are_not(name):
    for value in FIELDS[name].neutral:
        theirs, ours, _ = both(max_new_tokens=4, **{name: value})
        assert torch.equal(theirs, ours)


def test_synthid_and_fields_of_the_future_are_refused(monkeypatch):
    target, draft = tunable_pair(0.3)
    settings = {"max_new_tokens": 4, "custom_generate": speculate(draft)}
    config = SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)
    with pytest.raises(ValueError, match="^watermarking_config: got SynthID"):
        target.generate(**batch(), watermarking_config=config, **settings)
    monkeypatch.delitem(FIELDS, "typical_p")
    with pytest.raises(ValueError, match="^typical_p: got 0.5, allowed: None: a field of a transformers that is newer"):
        target.generate(**batch(), typical_p=0.5, **settings)


# ---- supported ---------------------------------------------------------------------------------------------

# name -> settings beside it (with the field itself), and what the field is compared with
GREEDY = {
    "max_length": {"max_length": 14, "max_new_tokens": None},
    "max_new_tokens": {"max_new_tokens": 5},
    "min_length": {"min_length": 18},
    "min_new_tokens": {"min_new_tokens": 9},
    "max_time": {"max_time": 1e-9},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[t] for t in range(1, 70)]},
    "forced_eos_token_id": {"forced_eos_token_id": 5, "eos_token_id": None},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 1.6)},
    "suppress_tokens": {"suppress_tokens": list(range(30, 101))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(1, 95))},
    "sequence_bias": {"sequence_bias": {(t,): 9.0 for t in range(40, 60)}},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=9.0)},
    "eos_token_id": {"eos_token_id": list(range(0, 101, 2))},
    "pad_token_id": {"pad_token_id": 11},
}
SAMPLED = {
    "do_sample": {},
    "temperature": {"temperature": 1.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.3},
    "top_h": {"top_h": 0.4},
    "typical_p": {"typical_p": 0.5},
    "epsilon_cutoff": {"epsilon_cutoff": 0.1},
    "eta_cutoff": {"eta_cutoff": 0.3},
    "renormalize_logits": {"renormalize_logits": True},
    "remove_invalid_values": {"remove_invalid_values": True},
}
NO_EFFECT = {
    "early_stopping": True,
    "length_penalty": 0.5,
    "diversity_penalty": 0.5,
    "decoder_start_token_id": 3,
    "disable_compile": True,
    "transformers_version": "5.0.0",
}
TESTED_BELOW = {
    "stop_strings",  # and in test_speculate.py
    "num_return_sequences",
    "output_scores",
    "output_logits",
    "return_dict_in_generate",
    "bos_token_id",
    "forced_bos_token_id",
    "num_assistant_tokens",
    "assistant_confidence_threshold",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
    "assistant_early_exit",
}


def test_every_supported_field_is_tested():
    tested = [*GREEDY, *SAMPLED, *NO_EFFECT, *TESTED_BELOW]
    assert sorted(tested) == sorted(name for name, field in FIELDS.items() if field.supported)


@pytest.mark.parametrize("name", GREEDY)
@pytest.mark.filterwarnings("ignore")
def test_greedy_texts_are_those_of_transformers(name):
    theirs, ours, result = both(**GREEDY[name])
    assert torch.equal(theirs, ours)
    assert not torch.equal(theirs, plain())  # the field does something here
    assert result.stats.accepted > 0 or name == "max_time"


@pytest.fixture
def with_log_probs(monkeypatch):
    """Speculators' results say under which distribution every token was drawn."""
    generate = SpeculativeDecoder.generate
    monkeypatch.setattr(SpeculativeDecoder, "generate", lambda *args, **kw: generate(*args, log_probs=True, **kw))


def distributions(output, tokens: list[list[int]]) -> list[list[float]]:
    """log p of the tokens under the scores that transformers' processors make of the logits."""
    scores = torch.stack(output.scores).log_softmax(-1)
    return [[scores[i, b, token].item() for i, token in enumerate(own)] for b, own in enumerate(tokens)]


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.filterwarnings("ignore")
def test_samples_have_the_distribution_of_transformers(name, with_log_probs):
    """What each token was drawn with is its probability among the processed scores."""
    shown = {"do_sample": True, "output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    base = {"temperature": 3.0, "top_k": 0, "bad_words_ids": [[1]], **shown}
    theirs, ours, result = both(**base | SAMPLED[name])
    for own, expected in zip(result.log_probs, distributions(ours, result.tokens), strict=True):
        assert own == pytest.approx(expected, abs=2e-4)
    torch.testing.assert_close(ours.scores[0], theirs.scores[0], atol=1e-4, rtol=1e-4)
    if name == "do_sample":
        assert not torch.equal(ours.sequences, both(**base | {"do_sample": False})[1].sequences)
    else:
        assert not torch.equal(theirs.scores[0], both(**base)[0].scores[0])  # the field does something here


def test_top_k_is_50_when_sampling(with_log_probs):
    """transformers' default, which counts even where no one asked."""
    _, ours, _ = both(do_sample=True, output_scores=True, return_dict_in_generate=True)
    assert ((ours.scores[0] > -torch.inf).sum(1) == 50).all()


@pytest.mark.parametrize("name", NO_EFFECT)
@pytest.mark.filterwarnings("ignore")
def test_fields_without_effect_have_none(name):
    theirs, ours, _ = both(**{name: NO_EFFECT[name]})
    assert torch.equal(theirs, ours) and torch.equal(theirs, plain())


def test_num_return_sequences():
    """As many rows, side by side; of different texts, and the same from the same seeds."""
    settings = {"do_sample": True, "num_return_sequences": 3, "temperature": 3.0, "eos_token_id": None}
    theirs, ours, result = both(**settings)
    assert theirs.shape == ours.shape and torch.equal(theirs[:, :9], ours[:, :9])
    assert len({tuple(tokens) for tokens in result.tokens}) == 9
    assert torch.equal(ours, both(**settings)[1])


def test_scores_and_logits_are_those_of_transformers():
    """Also after the end of a shorter sequence, where ours are 0 and theirs of no use."""
    settings = {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3, "eos_token_id": list(range(0, 101, 4))}
    shown = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    theirs, ours, result = both(**settings, **shown)
    assert type(ours) is type(theirs) and ours.past_key_values is None
    assert torch.equal(theirs.sequences, ours.sequences) and len({*map(len, result.tokens)}) > 1
    for name in ("scores", "logits"):
        pairs = list(zip(getattr(theirs, name), getattr(ours, name), strict=True))
        assert len(pairs) == max(map(len, result.tokens))
        for i, (expected, got) in enumerate(pairs):
            assert got.shape == expected.shape and got.dtype == expected.dtype
            for b, tokens in enumerate(result.tokens):
                wanted = expected[b] if i < len(tokens) else torch.zeros(101)
                torch.testing.assert_close(got[b], wanted, atol=1e-4, rtol=1e-4)
    _, ours, _ = both(**settings, output_logits=True, return_dict_in_generate=True)
    assert ours.scores is None and ours.logits is not None
    _, ours, _ = both(**settings, return_dict_in_generate=True)
    assert ours.scores is None and ours.logits is None


def test_bos_token_id_starts_an_empty_prompt():
    theirs, ours, _ = both(inputs={}, bos_token_id=5)
    assert torch.equal(theirs, ours) and ours[0, 0] == 5
    forced = {"inputs": {"input_ids": torch.tensor([[9], [8]])}, "forced_bos_token_id": 77}
    theirs, ours, _ = both(**forced)
    assert torch.equal(theirs, ours) and (ours[:, 1] == 77).all()


def test_stop_strings_of_a_configuration_need_a_tokenizer_in_transformers_itself():
    """transformers makes a criterion of them before it calls anything, and hands us no tokenizer to make one."""
    target, draft = tunable_pair(0.3)
    with pytest.raises(ValueError, match="stop strings.* could not locate a tokenizer"):
        target.generate(
            **batch(), generation_config=GenerationConfig(stop_strings="a"), custom_generate=speculate(draft)
        )


# ---- assistance --------------------------------------------------------------------------------------------


def drafted(result) -> int:
    """K: how many places of a step were ever drafted."""
    return sum(1 for count in result.stats.drafted_by_position if count)


def test_num_assistant_tokens_is_k_where_it_was_set():
    target, draft = tunable_pair(0.3)
    settings = {"max_new_tokens": 30, "eos_token_id": None}
    inputs = {"input_ids": batch()["input_ids"][:1]}

    def k(speculator, **more) -> int:
        theirs = target.generate(**inputs, max_new_tokens=30)
        assert torch.equal(theirs, target.generate(**inputs, **settings, **more, custom_generate=speculator))
        return drafted(speculator.last_result)

    assert k(speculate(draft)) <= 8  # it adapts; not 20, which transformers fills in
    assert k(speculate(draft), num_assistant_tokens=20) == 20  # set by keyword, although to the same
    assert k(speculate(draft), num_assistant_tokens=2) == 2
    assert k(speculate(draft, num_drafts=3)) == 3
    assert k(speculate(draft, num_drafts=AdaptiveDrafts(5, costs=[1.0] * 6))) == 5
    kept = target.generation_config
    try:
        target.generation_config = GenerationConfig(num_assistant_tokens=6)
        assert k(speculate(draft)) == 6
        assert k(speculate(draft), num_assistant_tokens=2) == 2  # a keyword goes before a configuration
    finally:
        target.generation_config = kept
    with pytest.raises(ValueError, match="^num_assistant_tokens: got 5, allowed: None beside 3 drafts"):
        k(speculate(draft, num_drafts=3), num_assistant_tokens=5)
    assert 0 < k(speculate(), num_assistant_tokens=5) <= 5  # of the drafter that needs no draft


def test_what_the_model_suggests_gives_way(configured):
    """Its fields about assistance contradict no caller, and count where nobody chose."""
    target, draft = tunable_pair(0.3)
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8] * 4])}
    plain = target.generate(**inputs, max_new_tokens=20)

    def k(speculator, **more) -> int:
        assert torch.equal(plain, target.generate(**inputs, max_new_tokens=20, **more, custom_generate=speculator))
        return drafted(speculator.last_result)

    configured(num_assistant_tokens=6, assistant_confidence_threshold=0.99, max_matching_ngram_size=3)
    assert (k(speculate(num_drafts=0)), k(speculate(draft, num_drafts=3, confidence=0.0))) == (0, 3)
    assert k(speculate(draft)) < 6 < k(speculate(draft, confidence=0.0), num_assistant_tokens=7)
    configured(prompt_lookup_num_tokens=5, assistant_early_exit=2)
    assert (k(speculate()), k(speculate(num_drafts=3))) == (5, 3) and k(speculate(draft)) <= 8
    assert k(speculate(), num_assistant_tokens=2) == 2
    assert k(speculate(), assistant_early_exit=2, num_assistant_tokens=6) == 6
    configured(assistant_early_exit=2, num_assistant_tokens=3)
    assert (k(speculate()), k(speculate(), prompt_lookup_num_tokens=5)) == (3, 5)


def test_assistant_confidence_threshold_ends_drafting():
    theirs, ours, sure = both(
        speculator=speculate(tunable_pair(0.3)[1], num_drafts=4), assistant_confidence_threshold=0.99
    )
    _, _, free = both(speculator=speculate(tunable_pair(0.3)[1], num_drafts=4))  # not 0.4, which transformers fills in
    assert torch.equal(theirs, ours) and sure.stats.drafted < free.stats.drafted
    _, _, same = both(speculator=speculate(tunable_pair(0.3)[1], num_drafts=4, confidence=0.99))
    assert same.stats.drafted == sure.stats.drafted
    for speculator, value in (
        (speculate(), 0.5),
        (speculate(tunable_pair(0.3)[1], confidence=0.3), 0.5),
        (speculate(tunable_pair(0.3)[1]), 1.5),
    ):
        with pytest.raises(ValueError, match="^assistant_confidence_threshold: got"):
            tunable_pair(0.3)[0].generate(
                **batch(), max_new_tokens=4, assistant_confidence_threshold=value, custom_generate=speculator
            )


def test_drafters_that_the_configuration_names():
    target, draft = tunable_pair(0.3)
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8] * 4])}
    plain = target.generate(**inputs, max_new_tokens=20)
    for fields, k in (
        ({"prompt_lookup_num_tokens": 5}, 5),
        ({"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 4}, 3),
        ({"assistant_early_exit": 2, "num_assistant_tokens": 3}, 3),
    ):
        speculator = speculate()
        ours = target.generate(**inputs, max_new_tokens=20, **fields, custom_generate=speculator)
        assert torch.equal(plain, ours) and drafted(speculator.last_result) == k
        name = next(iter(fields))
        with pytest.raises(ValueError, match=f"^{name}: got {fields[name]}, allowed: None beside a drafter"):
            target.generate(**inputs, max_new_tokens=20, **fields, custom_generate=speculate(draft))
    for fields, name in (
        ({"max_matching_ngram_size": 3}, "max_matching_ngram_size"),
        ({"prompt_lookup_num_tokens": 2, "assistant_early_exit": 2}, "assistant_early_exit"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: got"):
            target.generate(**inputs, max_new_tokens=4, **fields, custom_generate=speculate())
