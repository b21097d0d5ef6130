"""``custom_generate=specdec.speculate(...)`` against transformers' own ``generate``."""

from __future__ import annotations

import inspect
import random
import threading

import pytest
import torch
from models import VOCABULARY, tiny_model, tunable_pair
from specdec import SpeculativeDecoder, speculate
from specdec.law import read_law
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation import (
    BaseStreamer,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from specdec_kernels import SamplingParams

ENDS = list(range(0, VOCABULARY, 9))
PAD = 7


def ragged(paddings: tuple[int, ...] = (0, 4, 8), length: int = 10) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(paddings))
    ids = torch.randint(1, VOCABULARY, (len(paddings), length), generator=generator)
    mask = torch.ones_like(ids)
    for b, padding in enumerate(paddings):
        ids[b, :padding], mask[b, :padding] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask}


def both(speculator=None, inputs=None, **settings) -> tuple[torch.Tensor, torch.Tensor]:
    target, draft = tunable_pair(0.3)
    inputs = ragged() if inputs is None else inputs
    settings = {"max_new_tokens": 20, "eos_token_id": ENDS, "pad_token_id": PAD, **settings}
    theirs = target.generate(**inputs, **settings)
    return theirs, target.generate(**inputs, **settings, custom_generate=speculator or speculate(draft))


# ---- the same text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ("token", "block", "coupled"))
@pytest.mark.parametrize("paddings", ((0,), (0, 0), (0, 4, 8), (9, 2, 5, 0, 7)))
def test_greedy_batches_have_the_text_of_transformers(paddings, rule):
    speculator = speculate(tunable_pair(0.3)[1], num_drafts=5, rule=rule)
    theirs, ours = both(speculator, ragged(paddings))
    assert ours.dtype == theirs.dtype and torch.equal(theirs, ours)
    assert speculator.last_result.stats.accepted > 0


def test_the_embedded_pair_with_stop_strings_as_transformers_finds_them(pair):
    target, draft, tokenizer = pair
    texts = ["def read(self", "import os\nimport", "class A:\n    def __init__(self, x", "for i in range("]
    inputs = dict(tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False))
    for strings in (["):\n", "self.x"], "n", ["\n\n"], ["return self", " os"]):
        theirs = target.generate(**inputs, max_new_tokens=24, stop_strings=strings, tokenizer=tokenizer)
        speculator = speculate(draft, stop_strings=strings, tokenizer=tokenizer)
        ours = target.generate(**inputs, max_new_tokens=24, custom_generate=speculator)
        assert torch.equal(theirs, ours)
        assert any(len(tokens) < 24 for tokens in speculator.last_result.tokens)


def test_plain_decoding_and_an_unpadded_prompt_without_a_mask():
    theirs, ours = both(speculate(), {"input_ids": ragged((0,))["input_ids"]}, eos_token_id=None)
    assert torch.equal(theirs, ours) and ours.shape[1] == 30


def test_position_ids_of_the_mask_are_taken():
    inputs = ragged()
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    assert torch.equal(*both(inputs={**inputs, "position_ids": positions}))


# ---- processors --------------------------------------------------------------------------------------------


class SumBan(LogitsProcessor):
    """Bans what depends on every token that is shown, padding and drafts included."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, ids in zip(scores, input_ids, strict=True):
            row[(ids.sum() + 3 * len(ids)) % 5 :: 5] = -torch.inf
        return scores


class RowBias(LogitsProcessor):
    """Looks at the number of the row."""

    def __call__(self, input_ids, scores):
        return scores + torch.arange(len(scores))[:, None] * (torch.arange(scores.shape[1]) % 3)


def test_processors_see_what_transformers_shows_them():
    for processor in (SumBan(), RowBias()):
        theirs, ours = both(logits_processor=LogitsProcessorList([processor]))
        assert torch.equal(theirs, ours) and not torch.equal(theirs, both()[0])


def test_prefix_allowed_tokens_fn_knows_its_row():
    def allowed(row: int, text: torch.Tensor) -> list[int]:
        return list(range(10 * row + 1, 10 * row + 9)) + [int(text[-1])]

    theirs, ours = both(prefix_allowed_tokens_fn=allowed)
    assert torch.equal(theirs, ours)
    assert all(10 * b < t < 10 * b + 9 or t == PAD for b in (1, 2) for t in ours[b, 11:].tolist())


def pool(rng: random.Random, length: int) -> list[LogitsProcessor]:
    """Any of transformers' processors, in any order."""
    some = [rng.randrange(VOCABULARY) for _ in range(12)]
    everything = [
        SequenceBiasLogitsProcessor({(t,): rng.choice([-4.0, 3.0, 8.0]) for t in some}),
        RepetitionPenaltyLogitsProcessor(rng.choice([0.7, 1.5, 2.5])),
        RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=rng.choice([3, length])),
        NoBadWordsLogitsProcessor([[t] for t in some], ENDS),
        NoBadWordsLogitsProcessor([[t, t + 1] for t in range(90)], ENDS),
        MinLengthLogitsProcessor(length + rng.randrange(9), torch.tensor(ENDS)),
        MinNewTokensLengthLogitsProcessor(length - rng.randrange(2), rng.randrange(9), torch.tensor(ENDS)),
        MinLengthLogitsProcessor(length + 5, torch.tensor(ENDS[:4])),  # other ends than those of the text
        SuppressTokensLogitsProcessor([*some, -1]),
        NoRepeatNGramLogitsProcessor(2),
        TemperatureLogitsWarper(rng.choice([0.5, 1.5])),
        TopKLogitsWarper(20),
        TopPLogitsWarper(0.8),
        MinPLogitsWarper(0.02),
        TypicalLogitsWarper(0.9),
        SumBan(),
        RowBias(),
    ]
    return rng.sample(everything, rng.randint(1, 4))


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(6, 300))])
def test_any_list_of_processors_has_its_law(seed, monkeypatch):
    """Greedy texts, and the probability that every sampled token was drawn with; half of the lists begin with what the
    kernels can say, so that both ways and their mixtures are met."""
    generate = SpeculativeDecoder.generate
    monkeypatch.setattr(SpeculativeDecoder, "generate", lambda *args, **kw: generate(*args, log_probs=True, **kw))
    rng, speculator = random.Random(seed), speculate(tunable_pair(0.3)[1], seed=seed)
    processors = pool(rng, 10)
    if seed % 2:
        processors = [p for p in processors if type(p) not in (SumBan, RowBias, TypicalLogitsWarper)] or [SumBan()]
    settings = {"max_new_tokens": 10, "logits_processor": LogitsProcessorList(processors)}
    theirs, ours = both(speculator, **settings)
    assert torch.equal(theirs, ours), processors
    warpers = {"temperature": rng.choice([1.0, 0.7, 3.0]), "top_k": rng.choice([0, 30]), "top_p": rng.choice([1.0, 0.9])}
    shown = {"do_sample": True, "output_scores": True, "return_dict_in_generate": True}
    _, ours = both(speculator, **settings, **warpers, **shown)
    scores = torch.stack(ours.scores).log_softmax(-1)
    for b, (tokens, given) in enumerate(
        zip(speculator.last_result.tokens, speculator.last_result.log_probs, strict=True)
    ):
        expected = [scores[i, b, token].item() for i, token in enumerate(tokens)]
        assert given == pytest.approx(expected, abs=5e-4), processors


def law_of(processors: list, do_sample: bool = True, rows: int = 2):
    return read_law(processors, [[1, 2, 3, 4]] * rows, do_sample, frozenset(ENDS), 10, VOCABULARY)


@pytest.mark.parametrize(
    ("processors", "params"),
    [
        ([], SamplingParams()),
        ([TemperatureLogitsWarper(0.5), TopKLogitsWarper(5)], SamplingParams(0.5, top_k=5)),
        ([TopPLogitsWarper(0.5), MinPLogitsWarper(0.1)], SamplingParams(1.0, top_p=0.5, min_p=0.1)),
        ([RepetitionPenaltyLogitsProcessor(1.5)], SamplingParams(repetition_penalty=1.5)),
        ([TopKLogitsWarper(3, min_tokens_to_keep=5)], SamplingParams(top_k=5)),
    ],
)
def test_what_the_kernels_can_say(processors, params):
    law = law_of(processors)
    assert law.params == params and law.logits_processor is None


def test_biases_bans_and_lengths_in_the_kernels():
    bias = SequenceBiasLogitsProcessor({(5,): 2.0, (6,): float("-inf")})
    penalty = RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=1)
    bans = [NoBadWordsLogitsProcessor([[7], [0]], ENDS), SuppressTokensLogitsProcessor([8, 500, -1])]
    lengths = [MinLengthLogitsProcessor(7, torch.tensor(ENDS)), MinNewTokensLengthLogitsProcessor(3, 99, ENDS)]
    law = law_of([bias, penalty, *bans, lengths[0], TemperatureLogitsWarper(2.0)])
    assert law.logits_processor is None and law.params == SamplingParams(2.0, repetition_penalty=1.5)
    assert law.logit_bias == {5: 2.0} and law.banned_tokens == [6, 7, 8] and law.min_new_tokens == 3
    assert law.processor_prompts == [[2, 3, 4]] * 2
    assert law_of(lengths).min_new_tokens == 10  # all of them
    assert law_of(lengths, do_sample=False).params == SamplingParams(0.0)


@pytest.mark.parametrize(
    ("processors", "left", "params"),
    [
        # all of what stands before the kernels' temperature, if one of it is not theirs
        ([NoRepeatNGramLogitsProcessor(2), TemperatureLogitsWarper(0.5)], 1, SamplingParams(0.5)),
        ([RepetitionPenaltyLogitsProcessor(1.5), SumBan(), TopKLogitsWarper(5)], 2, SamplingParams(top_k=5)),
        # an order that is not theirs
        ([TopKLogitsWarper(5), TemperatureLogitsWarper(0.5)], 1, SamplingParams(0.5)),
        ([RepetitionPenaltyLogitsProcessor(1.5), SequenceBiasLogitsProcessor({(5,): 2.0})], 2, SamplingParams()),
        ([RepetitionPenaltyLogitsProcessor(1.5)] * 2, 2, SamplingParams()),
        ([SequenceBiasLogitsProcessor({(5,): 2.0})] * 2, 2, SamplingParams()),
        # a warper behind them that they lack
        ([TemperatureLogitsWarper(0.5), TopKLogitsWarper(5), TypicalLogitsWarper(0.9)], 3, SamplingParams()),
        # numbers that they do not take
        ([TemperatureLogitsWarper(1e-4)], 1, SamplingParams()),
        ([TopPLogitsWarper(0.5, filter_value=-9.0)], 1, SamplingParams()),
        ([TopPLogitsWarper(0.5, min_tokens_to_keep=2)], 1, SamplingParams()),
        ([RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=9)], 1, SamplingParams()),
        ([SequenceBiasLogitsProcessor({(5, 6): 2.0})], 1, SamplingParams()),
        ([MinLengthLogitsProcessor(7, torch.tensor([5]))], 1, SamplingParams()),
    ],
)
def test_what_runs_as_it_is(processors, left, params):
    law = law_of(processors)
    assert law.params == params and [len(own) for own in law.logits_processor] == [left] * 2
    assert law.processor_prompts == [[1, 2, 3, 4]] * 2 and not law.banned_tokens and law.logit_bias is None


def test_a_temperature_that_only_transformers_takes():
    """Below 0.001, where the texts are greedy."""
    _, ours = both(do_sample=True, temperature=1e-5, top_k=0)
    assert torch.equal(ours, both()[0])


def test_processors_with_a_state_are_refused():
    target, draft = tunable_pair(0.3)
    guidance = UnbatchedClassifierFreeGuidanceLogitsProcessor(2.0, target)
    with pytest.raises(ValueError, match="^logits_processor: got a UnbatchedClassifierFreeGuidance"):
        target.generate(
            **ragged(), logits_processor=[guidance], max_new_tokens=3, custom_generate=speculate(draft)
        )


# ---- ends --------------------------------------------------------------------------------------------------


def test_stopping_criteria_end_their_own_rows():
    def ends_on_a_multiple_of_its_row(ids, scores):
        rows = torch.arange(len(ids)) + 3
        return (ids[:, -1] % rows == 0) & (ids.shape[1] > 12)

    theirs, ours = both(stopping_criteria=[ends_on_a_multiple_of_its_row])
    assert torch.equal(theirs, ours) and not torch.equal(ours, both()[0])


def test_a_length_of_ones_own():
    for length in (3, 10, 14):  # shorter than the prompt, too: one token comes, as in transformers
        theirs, ours = both(stopping_criteria=[MaxLengthCriteria(length)])
        assert torch.equal(theirs, ours) and ours.shape[1] == max(length, 11)


# ---- seeds -------------------------------------------------------------------------------------------------


def sample(speculator, **settings) -> list[list[int]]:
    settings = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 8, **settings}
    both_rows = ragged((0, 3))
    tunable_pair(0.3)[0].generate(**both_rows, **settings, custom_generate=speculator)
    return speculator.last_result.tokens


def test_torchs_generator_decides_where_no_seed_was_given():
    draft = tunable_pair(0.3)[1]
    torch.manual_seed(5)
    first, second = sample(speculate(draft)), sample(speculate(draft))
    torch.manual_seed(5)
    assert first == sample(speculate(draft)) and first != second
    state = torch.get_rng_state()
    sample(speculate(draft), do_sample=False, temperature=1.0)
    assert torch.equal(state, torch.get_rng_state())  # greedy texts need none


def test_seeds_count_up_over_the_texts_of_a_prompt():
    target, draft = tunable_pair(0.3)
    texts = sample(speculate(draft, seed=7), num_return_sequences=3, top_k=0)
    decoder, inputs = SpeculativeDecoder(target, draft), ragged((0, 3))
    params = SamplingParams(2.0)
    expected = decoder.generate(**inputs, max_new_tokens=8, params=params, seed=7, num_return_sequences=3)
    assert texts == expected.tokens and len({*map(tuple, texts)}) == 6
    assert sample(speculate(draft, seed=[7, 8, 9, 7, 8, 9]), num_return_sequences=3, top_k=0) == texts
    with pytest.raises(ValueError, match="^seed: got"):
        sample(speculate(draft, seed=[1, 2, 3]))


# ---- streamers ---------------------------------------------------------------------------------------------


class Recorder(BaseStreamer):
    def __init__(self, fails_at: int = 99):
        self.events, self.fails_at = [], fails_at

    def put(self, value):
        if len(self.events) == self.fails_at:
            raise OSError("the reader has gone")
        self.events.append(value)

    def end(self):
        self.events.append("end")


def test_a_streamer_gets_the_prompt_the_tokens_and_the_end():
    target, draft = tunable_pair(0.3)
    inputs, streamer = ragged((0,)), Recorder()
    ours = target.generate(**inputs, max_new_tokens=20, custom_generate=speculate(draft, streamer=streamer))
    prompt, *steps, end = streamer.events
    assert torch.equal(prompt, inputs["input_ids"]) and end == "end"
    assert all(step.dim() == 1 and step.dtype == torch.int64 for step in steps) and len(steps) < 20
    assert torch.equal(torch.cat(steps), ours[0, 10:])


def test_text_streamers_show_what_they_show_in_transformers(pair, capsys):
    target, draft, tokenizer = pair
    inputs = dict(tokenizer(["def read(self):"], return_tensors="pt", return_token_type_ids=False))
    target.generate(**inputs, max_new_tokens=30, streamer=TextStreamer(tokenizer))
    expected = capsys.readouterr().out
    speculator = speculate(draft, streamer=TextStreamer(tokenizer))
    target.generate(**inputs, max_new_tokens=30, custom_generate=speculator)
    assert capsys.readouterr().out == expected
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    settings = {"max_new_tokens": 30, "custom_generate": speculate(draft, streamer=streamer)}
    thread = threading.Thread(target=target.generate, kwargs={**inputs, **settings})
    thread.start()
    assert "def read(self):" + "".join(streamer) == expected.removesuffix("\n")
    thread.join()


class Fails(LogitsProcessor):
    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > 16:
            raise ArithmeticError("on purpose")
        return scores


@pytest.mark.parametrize(
    ("error", "streamer", "settings", "before_the_end"),
    [
        (ValueError, Recorder(), {"num_beams": 2}, 0),  # our refusal
        (ValueError, Recorder(), {"tokenizer": object()}, 0),  # one while generate sorts its arguments
        (ValueError, Recorder(), {"inputs": ragged()}, 0),  # a batch
        (OSError, Recorder(fails_at=0), {}, 0),
        (OSError, Recorder(fails_at=2), {}, 2),  # the reader's own error
        (ArithmeticError, Recorder(), {"logits_processor": [Fails()]}, 2),  # one in the middle
    ],
)
@pytest.mark.filterwarnings("ignore:.*drafter")
def test_a_streamer_always_ends(error, streamer, settings, before_the_end):
    target, draft = tunable_pair(0.3)
    settings = {"max_new_tokens": 20, **settings}
    inputs = settings.pop("inputs", ragged((0,)))
    with pytest.raises(error):
        target.generate(**inputs, **settings, custom_generate=speculate(draft, streamer=streamer))
    assert streamer.events[-1] == "end" and streamer.events.count("end") == 1
    assert len(streamer.events) - 1 >= before_the_end


def test_more_than_one_sequence_does_not_stream():
    target, draft = tunable_pair(0.3)
    with pytest.raises(ValueError, match="^streamer: got a batch of 3 sequences, allowed: one sequence"):
        target.generate(**ragged(), max_new_tokens=3, custom_generate=speculate(draft, streamer=Recorder()))


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"streamer": Recorder()}, r"^streamer: got a Recorder in generate\(\), allowed: specdec.speculate\(streamer"),
        ({"assistant_model": "draft"}, r"^assistant_model: got .* allowed: specdec.speculate\(draft_model=...\)"),
        ({"tokenizer": Recorder()}, r"^tokenizer: got .* allowed: specdec.speculate\(tokenizer=...\)"),
        ({"assistant_tokenizer": Recorder()}, r"^assistant_tokenizer: got .*specdec.speculate\(draft_tokenizer=...\)"),
        ({"synced_gpus": True}, "^synced_gpus: got True in generate"),
        ({"stop_strings": ["a"]}, r"^stop_strings: got \['a'\] in generate\(\), allowed: specdec.speculate\(stop_str"),
        ({"generation_config": GenerationConfig(stop_strings="a")}, "^stop_strings: got 'a' in generate"),
        ({"past_key_values": DynamicCache()}, "^past_key_values: got a DynamicCache, allowed: None"),
    ],
)
def test_arguments_in_the_wrong_place_are_refused(arguments, message):
    target, draft = tunable_pair(0.3)
    speculator, arguments = speculate(draft), {**arguments}
    if "assistant_model" in arguments:
        arguments["assistant_model"] = draft
    with pytest.raises(ValueError, match=message):
        target.generate(**ragged((0,)), custom_generate=speculator, **arguments)
    if isinstance(arguments.get("streamer"), Recorder):
        assert arguments["streamer"].events == ["end"]
    assert torch.equal(*both(speculator))  # the refusal left nothing behind


def test_values_that_say_nothing_are_not_misplaced():
    nothing = dict.fromkeys(("streamer", "assistant_model", "tokenizer", "assistant_tokenizer"))
    assert torch.equal(*both(synced_gpus=False, **nothing))


def test_what_else_the_model_would_be_fed_is_refused():
    target, draft = tunable_pair(0.3)
    inputs, settings = ragged(), {"max_new_tokens": 3, "custom_generate": speculate(draft)}
    embedded = target.get_input_embeddings()(inputs["input_ids"])
    mask = inputs["attention_mask"]
    holes = mask.clone()
    holes[0, 4] = 0
    for more, message in (
        ({"inputs_embeds": embedded}, "^inputs_embeds: got a Tensor, allowed: None"),
        ({"position_ids": torch.arange(10)[None] + 1}, "^position_ids: got others than the mask's"),
        ({"attention_mask": mask.flip(1)}, "^attention_mask: got padding on the right"),
        ({"attention_mask": holes}, r"^attention_mask: got \[1, 1, 1, 1, 0"),
    ):
        with pytest.raises(ValueError, match=message):
            target.generate(**{**inputs, **more}, **settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "best"}, "rule: got"),
        ({"num_drafts": -1}, "num_drafts: got -1"),
        ({"num_drafts": 2.0}, "num_drafts: got 2.0"),
        ({"drafter": object(), "draft_model": object()}, "drafter: got one beside draft_model"),
        ({"draft_tokenizer": object()}, "draft_model: got None with draft_tokenizer"),
        ({"draft_tokenizer": object(), "draft_model": object()}, "tokenizer: got None with draft_tokenizer"),
        ({"stop_strings": "a"}, "tokenizer: got NoneType"),
    ],
)
def test_speculate_refuses_at_once(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        speculate(**arguments)


def test_models_and_drafts_that_the_loop_cannot_drive():
    target, draft = tunable_pair(0.3)
    for speculator, message in (
        (speculate(tiny_model("gpt2").train(False), confidence=2.0), "^confidence: got 2.0"),
        (speculate(object()), "^draft: got object"),
    ):
        with pytest.raises(ValueError, match=message):
            target.generate(**ragged(), max_new_tokens=3, custom_generate=speculator)


# ---- the callable ------------------------------------------------------------------------------------------


def test_a_second_call_sets_nothing_up_again(monkeypatch):
    made, build = [], SpeculativeDecoder.__init__
    monkeypatch.setattr(SpeculativeDecoder, "__init__", lambda self, *args: made.append(args) or build(self, *args))
    target, draft = tunable_pair(0.3)
    speculator = speculate(draft)
    for _ in range(2):
        target.generate(**ragged(), max_new_tokens=3, custom_generate=speculator)
    assert len(made) == 1
    target.generate(**ragged(), max_new_tokens=3, num_assistant_tokens=2, custom_generate=speculator)
    assert len(made) == 2  # another K
    tiny_model("llama").generate(**ragged(), max_new_tokens=3, custom_generate=speculator)
    assert len(made) == 3  # another model
    try:
        with pytest.raises(ValueError, match="target: is in training mode"):
            target.train().generate(**ragged(), max_new_tokens=3, custom_generate=speculator)
    finally:
        target.eval()


def test_it_looks_like_any_function():
    speculator = speculate(tunable_pair(0.3)[1])
    names = ["model", "input_ids", "logits_processor", "stopping_criteria", "generation_config", "model_kwargs"]
    assert [*inspect.signature(speculator).parameters] == names
    inspect.signature(type(speculator))
    assert speculator.last_result is None


@pytest.mark.filterwarnings("error")
def test_logits_without_a_distribution_end_with_a_warning():
    class Breaks(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores * float("nan") if input_ids.shape[1] > 12 else scores

    with pytest.raises(RuntimeWarning, match=r"sequences ended where .* \(0: TARGET_NAN, 1: TARGET_NAN"):
        both(speculate(), eos_token_id=None, logits_processor=[Breaks()])
