"""The questions of a suite, asked of servers: ours, and scripted ones that tell of drafts as vLLM and llama.cpp do."""

from __future__ import annotations

import itertools

import pytest
from specdec.evaluation.bench.served import (
    ServedQuestion,
    ServedSettings,
    ServedSpeaker,
    served_results,
    served_rounds,
)
from specdec.evaluation.bench.served_drafts import Drafts, drafts_of_answer, drafts_of_metrics
from specdec.evaluation.server_connection import ServerConnection, ServerError
from support.completions_server import completions_server, events

QUESTIONS = (
    ServedQuestion(81, "writing", ("One?", "Two?")),
    ServedQuestion(101, "coding", ("Three?",)),
    ServedQuestion("q1", "qa", ("Four?",)),
)
SETTINGS = ServedSettings(max_new_tokens=8, temperature=0.5, seed=7, repeats=2, warm_up=1)
HEADER = {
    "models": {"target": {"name": "toy"}},
    "suite": {
        "name": "spec-bench",
        "questions": [{"id": q.key, "category": q.category, "turns": len(q.turns)} for q in QUESTIONS],
    },
}


class Scripted:
    """Answers with seven tokens, of which each answer accepts four of five drafts; ``place``: who tells it."""

    def __init__(self, place: str = "metrics"):
        self.bodies: list[dict] = []
        self.place, self.fresh = place, False  # whether nobody has read the metrics since the last answer

    def __call__(self, body: dict) -> tuple[int, list[bytes]]:
        self.bodies.append(body)
        self.fresh = True
        said = f"answer {len(self.bodies)}"
        pieces = [{"choices": [{"delta": {"role": "assistant", "content": each}}]} for each in ("", " " + said, "\n")]
        pieces.append({"choices": [{"delta": {"reasoning_content": "Hm."}, "finish_reason": "stop"}]})
        last = {"choices": [], "usage": {"completion_tokens": 7}}
        if self.place == "timings":
            last = {"choices": [], "timings": {"predicted_n": 7, "draft_n": 5, "draft_n_accepted": 4}}
        return 200, events(*pieces, last)

    def metrics(self) -> str:
        """Of two engines, after what somebody else has asked. An answer is counted only in the second reading."""
        answers, self.fresh = len(self.bodies) - self.fresh, False
        names = ("num_draft_tokens_total", "num_accepted_tokens_total")
        lines = [
            f'vllm:spec_decode_{name}{{engine="{engine}",model_name="a {{toy}}"}} {before + counted * answers}.0'
            for name, counted in zip(names, (5, 4), strict=True)
            for engine, before, counted in ((0, 100, counted), (1, 50, 0))
        ]
        return "\n".join(["# HELP vllm:spec_decode_num_draft_tokens_total Drafts.", *lines, "vllm:other 3"])


def measured(scripted: Scripted, settings: ServedSettings = SETTINGS, **more):
    with completions_server(scripted, scripted.metrics if scripted.place == "metrics" else None) as url:
        return [*served_rounds(ServerConnection(url), QUESTIONS, settings, **more)]


def test_conversations_hear_the_servers_own_answers():
    scripted, seen = Scripted(), []
    first, second = measured(scripted, on_talk=lambda number, talk: seen.append((number, talk["question_id"])))
    assert seen == [(number, question.key) for number in (0, 1) for question in QUESTIONS]
    warm_up, one, two, three = scripted.bodies[:4]
    assert warm_up["messages"] == one["messages"] == [{"role": "user", "content": "One?"}]
    assert two["messages"] == [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "answer 2"},
        {"role": "user", "content": "Two?"},
    ]
    assert [body["seed"] for body in scripted.bodies[1:5]] == [7, 7, 8, 9] and len(scripted.bodies) == 1 + 2 * 4
    assert three["messages"][0]["content"] == "Three?" and (three["max_tokens"], three["temperature"]) == (8, 0.5)
    assert three["stream"] is True and three["stream_options"] == {"include_usage": True} and three["model"] == "toy"
    talk = first["cells"]["served"]["talks"][0]
    assert talk["turns"] == ["answer 2", "answer 3"] and talk["new_tokens"] == [7, 7] and second["round"] == 1
    assert all(0 < first <= whole for first, whole in zip(talk["first"], talk["wall_time"], strict=True))


@pytest.mark.parametrize("place", ("metrics", "timings"))
def test_what_servers_tell_of_drafts(place):
    """A step emits what it accepts and one token more: seven tokens of which four were drafted are of three steps."""
    rounds = measured(Scripted(place))
    whole, lines = served_results(HEADER, rounds)
    assert [row["group"] for row in whole["rows"]] == ["mt_bench", "qa", "overall"] and whole["rounds"] == 2
    for row in whole["rows"]:
        assert row["mean_accepted"] == pytest.approx(7 / 3) and row["acceptance_rate"] == pytest.approx(0.8)
        assert 0 < row["time_to_first_token"]["median"] <= row["time_to_first_token"]["p99"]
    assert [line["choices"][0]["decoding_steps"] for line in lines] == [[3, 3], [3], [3]]
    talks = rounds[0]["cells"]["served"]["talks"]
    speeds = [sum(talk["new_tokens"]) / sum(talk["wall_time"]) for talk in talks]
    least = whole["rows"][-1]["tokens_per_second"]["min"]
    assert least <= sum(speeds) / 3 * 1.0001


def test_a_server_that_tells_nothing():
    (played,) = measured(Scripted("nowhere"), ServedSettings(8, warm_up=0))
    whole, lines = served_results(HEADER, [played])
    assert {(row["mean_accepted"], row["acceptance_rate"]) for row in whole["rows"]} == {(None, None)}
    assert [choice["decoding_steps"] for line in lines for choice in line["choices"]] == [[]] * 3


def test_rounds_that_are_there_are_not_asked_again():
    scripted = Scripted()
    assert [line["round"] for line in measured(scripted, done=[0])] == [1] and len(scripted.bodies) == 5
    assert measured(scripted, done=[0, 1]) == [] and len(scripted.bodies) == 5


def test_counters_of_all_engines_and_whole_answers():
    assert drafts_of_metrics(Scripted().metrics()) == Drafts(150, 150)
    assert drafts_of_metrics("vllm:spec_decode_num_draft_tokens_total 3.0") is None
    told = {"num_draft_tokens": 5, "num_accepted_draft_tokens": 2, "mean_acceptance_length": 1.4}
    assert drafts_of_answer([{"choices": []}, {"metrics": {"speculative_decoding": told}}]) == Drafts(5, 2)
    assert drafts_of_answer([{"timings": {"predicted_n": 3}}]) == Drafts(0, 0)
    assert drafts_of_answer([{"metrics": None}, {"usage": {}}]) is None


def test_a_conversation_ends_where_a_later_prompt_is_refused():
    scripted = Scripted()

    def answers(body):
        return scripted(body) if len(body["messages"]) == 1 else (400, {"error": "too long"})

    with completions_server(answers) as url:
        speaker = ServedSpeaker(ServerConnection(url), SETTINGS)
        talk = speaker.run(QUESTIONS[0], 0)
    assert len(talk["turns"]) == 1
    talks = [talk, *({**talk, "question_id": q.key, "category": q.category} for q in QUESTIONS[1:])]
    round_of = {"setting": "served", "round": 0, "cells": {"served": {"talks": talks}}, "differences": []}
    assert served_results(HEADER, [round_of])[0]["unasked"] == ["81"]


CHUNK = {"choices": [{"delta": {"content": "a"}}]}
TOKENS = {"choices": [], "usage": {"completion_tokens": 3}}


@pytest.mark.parametrize(
    ("answer", "message"),
    (
        ((400, {"error": "too long"}), "answers 400 to /chat/completions: .*too long"),
        ((200, events(CHUNK)), "tells not how many tokens it has"),
        ((200, events(CHUNK, {"usage": {"completion_tokens": 0}})), "tells no token"),
        ((200, events(CHUNK, {"error": {"message": "broke"}})), "answers /chat/completions with .*broke"),
        ((200, events(CHUNK, TOKENS)[:-1]), r"ends the stream of /chat/completions without \[DONE\]"),
        ((200, events(CHUNK, ["a"])), r"answers /chat/completions with \['a'\]"),
        ((200, events({"choices": ["a"]})), "streams what is no chat completion .AttributeError"),
        ((200, [b"data: {\n\n"]), "JSONDecodeError"),
    ),
)
def test_what_is_no_answer(answer, message):
    with completions_server(lambda body: answer) as url:
        speaker = ServedSpeaker(ServerConnection(url), SETTINGS)
        with pytest.raises(ServerError, match=message):
            speaker.run(QUESTIONS[0], 0)


def test_an_answer_without_a_text_has_a_time():
    with completions_server(lambda body: (200, events(TOKENS))) as url:
        turn = ServedSpeaker(ServerConnection(url), SETTINGS).answer([{"role": "user", "content": "a"}], 0)
    assert turn.answer == "" and turn.tokens == 3 and turn.seconds == turn.first > 0 and turn.steps is None


def test_counters_that_go_away_are_an_error():
    scripted, readings = Scripted(), itertools.count()

    def metrics():
        return scripted.metrics() if next(readings) == 0 else ""

    with completions_server(scripted, metrics) as url, pytest.raises(ServerError, match="no counters of drafts"):
        ServedSpeaker(ServerConnection(url), SETTINGS).run(QUESTIONS[1], 0)
