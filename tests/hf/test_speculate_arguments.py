"""Streamers, and arguments of ``speculate()`` and of ``generate`` that are refused."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from specdec import SpeculativeDecoder, speculate
from specdec.models.cache.kv_cache import cache_argument
from support.generates import both, ragged
from support.models import tiny_model, tunable_pair
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation import (
    BaseStreamer,
)

CACHE = cache_argument(tiny_model("llama"))  # what transformers calls it

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
        (
            {"stop_strings": ["a"]},
            r"^stop_strings: got \['a'\] in generate\(\), .*, allowed: .* specdec.speculate\(tokenizer=",
        ),
        ({"token_healing": True}, "^token_healing: got True, allowed: False: heal the prompt before generate"),
        ({"top_log_probs": 2}, r"\['top_log_probs'\]"),  # transformers knows of no such argument
        ({CACHE: DynamicCache()}, f"^{CACHE}: got a DynamicCache, allowed: None"),
        ({CACHE: "filled"}, f"^{CACHE}: got a DynamicCache, allowed: None"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused(arguments, message):
    target, draft = tunable_pair(0.3)
    speculator, arguments = speculate(draft), {**arguments}
    if arguments.get(CACHE) == "filled":
        arguments[CACHE] = DynamicCache(config=target.config)
        target(**ragged((0,), 4), **{CACHE: arguments[CACHE]})
    with pytest.raises(ValueError, match=message):
        target.generate(**ragged((0,)), custom_generate=speculator, **arguments)
    assert torch.equal(*both(speculator))  # the refusal left nothing behind


def test_a_draft_model_that_would_not_draft_is_refused():
    target, draft = tunable_pair(0.3)
    settings = {"max_new_tokens": 3, "custom_generate": speculate()}
    message = (
        r"^assistant_model: got a LlamaForCausalLM in generate\(\) .* allowed: None there: pass it as specdec.spec"
    )
    with pytest.raises(ValueError, match=message):
        target.generate(**ragged((0,)), assistant_model=draft, **settings)
    with pytest.raises(ValueError, match="^prompt_lookup_num_tokens: got 3, allowed: None beside a drafter"):
        settings["custom_generate"] = speculate(draft)
        target.generate(**ragged((0,)), prompt_lookup_num_tokens=3, **settings)


def test_names_and_paths_are_no_drafts():
    for given in ("suffix", Path("models/draft")):
        with pytest.raises(ValueError, match=r"^draft_model: got '.*', allowed: .*load_pair.*SuffixDrafter\(\)"):
            speculate(given)
        with pytest.raises(ValueError, match=r"^draft: got '.*', allowed: .*load_pair.*SuffixDrafter\(\)"):
            SpeculativeDecoder(tunable_pair(0.3)[0], given)
    with pytest.raises(ValueError, match=r"^drafter: got 'suffix', allowed: a drafter such as SuffixDrafter\(\)"):
        speculate(drafter="suffix")


def test_speculate_that_was_not_called_is_told_of():
    target, draft = tunable_pair(0.3)
    for more in ({}, {"num_drafts": 3, "seed": 5}, {"draft_model": draft}):  # which generate hands on
        with pytest.raises(
            ValueError, match=r"^custom_generate: got specdec.speculate itself, allowed: .*speculate\(\)"
        ):
            target.generate(**ragged((0,)), max_new_tokens=3, custom_generate=speculate, **more)
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_draft'"):
        speculate(num_draft=3)


def test_what_it_returns_is_shown_in_a_line():
    draft = tunable_pair(0.3)[1]
    said = "<specdec.speculate: a LlamaForCausalLM drafts, num_drafts=3, rule=None>"
    assert repr(speculate(draft, num_drafts=3)) == said
    assert repr(speculate()) == "<specdec.speculate: whatever generate names drafts, num_drafts=None, rule=None>"


def test_a_processor_with_a_state_is_refused_by_its_own_name():
    class Counts(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            return scores - self.calls * (scores == scores.max())

    target, draft = tunable_pair(0.3)
    settings = {"max_new_tokens": 3, "custom_generate": speculate(draft)}
    for rows in ((0,), (0, 1)):  # alone, and as a row of a batch
        with pytest.raises(ValueError, match="^logits_processor: got a Counts, which keeps a state between calls"):
            target.generate(**ragged(rows), logits_processor=LogitsProcessorList([Counts()]), **settings)


def test_stop_strings_of_generate_do_not_meet_those_of_speculate(pair):
    target, draft, tokenizer = pair
    speculator = speculate(draft, stop_strings="a", tokenizer=tokenizer)
    inputs = {"input_ids": torch.tensor([tokenizer("def read(").input_ids])}
    with pytest.raises(
        ValueError, match=r"^stop_strings: got 'b' in generate\(\), allowed: None beside those of specd"
    ):
        target.generate(**inputs, max_new_tokens=2, stop_strings="b", custom_generate=speculator)


def test_what_is_left_out_is_none():
    nothing = dict.fromkeys(("streamer", "assistant_model", "tokenizer", "assistant_tokenizer", "stop_strings"))
    assert torch.equal(*both(synced_gpus=False, token_healing=False, **nothing))


def test_a_streamer_of_generate_gets_the_prompt_and_nothing_else():
    """What docs/transformers.md says of it: transformers does not hand it on."""
    target, draft = tunable_pair(0.3)
    streamer = Recorder()
    with pytest.warns(RuntimeWarning, match="streamer: got one in generate.*specdec.speculate.streamer="):
        target.generate(**ragged((0,)), max_new_tokens=4, streamer=streamer, custom_generate=speculate(draft))
    assert len(streamer.events) == 1 and torch.equal(streamer.events[0], ragged((0,))["input_ids"])


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
        ({"tree": 0}, "tree: got 0"),
        ({"num_drafts": 2.0}, "num_drafts: got 2.0"),
        ({"drafter": object(), "draft_model": object()}, "drafter: got one beside draft_model"),
        ({"draft_tokenizer": object()}, "draft_model: got None with draft_tokenizer"),
        ({"draft_tokenizer": object(), "draft_model": torch.nn.Module()}, "tokenizer: got None with draft_tokenizer"),
        ({"draft_model": object()}, "draft_model: got a object, allowed: a causal LM"),
        ({"stop_strings": "a"}, "tokenizer: got None with stop_strings"),
    ],
)
def test_speculate_refuses_at_once(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        speculate(**arguments)


def test_models_and_drafts_that_the_loop_cannot_drive():
    target, draft = tunable_pair(0.3)
    for speculator, message in (
        (speculate(tiny_model("gpt2").train(False), confidence=2.0), "^confidence: got 2.0"),
        (speculate(torch.nn.Linear(2, 2)), "^draft: got Linear"),
    ):
        with pytest.raises(ValueError, match=message):
            target.generate(**ragged(), max_new_tokens=3, custom_generate=speculator)
