"""Streamers, and arguments that ``speculate()`` refuses or that were given to ``generate`` instead."""

from __future__ import annotations

import threading

import pytest
import torch
from specdec import speculate
from support.generates import both, ragged
from support.models import tiny_model, tunable_pair
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation import (
    BaseStreamer,
)

# ---- streamers ----------------------------------------------------------------------------------------------


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


# ---- what is refused ----------------------------------------------------------------------------------------


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
    assert torch.equal(*both(speculator))  # the refusal left nothing after


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
