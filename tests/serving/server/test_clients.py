"""Real clients of the ``openai`` package, synchronous and not, streaming and not. Texts are those of the engine alone,
and a stream tells what a whole response tells."""

from __future__ import annotations

import asyncio

import openai
from specdec import FinishReason, Request
from specdec.detokenize import continuation

from specdec_kernels import SamplingParams

PROMPT = "class Stack:\n    def push(self, item):"
MESSAGES = [{"role": "user", "content": "Write a loop."}]
LONG = [{"role": "user", "content": "Write a loop." + " again" * 50}]
SAMPLED = {"prompt": PROMPT, "max_tokens": 14, "seed": 5}

# Settings -> what a ``Request`` of them has beside prompt, 14 tokens and seed 5.
SETTINGS: list[tuple[dict, dict]] = [
    ({}, {}),
    ({"temperature": 0}, {"params": SamplingParams(0.0)}),
    ({"temperature": 0.7}, {"params": SamplingParams(0.7)}),
    ({"top_p": 0.3}, {"params": SamplingParams(1.0, top_p=0.3)}),
    ({"seed": -7}, {"seed": -7}),
    ({"max_tokens": 3}, {"max_new_tokens": 3}),
    ({"logit_bias": {"200": 40}}, {"logit_bias": {200: 40}}),
    ({"presence_penalty": 2, "temperature": 0}, {"params": SamplingParams(0.0, presence_penalty=2)}),
    ({"frequency_penalty": -2, "temperature": 0}, {"params": SamplingParams(0.0, frequency_penalty=-2)}),
    ({"top_k": 3, "seed": 6}, {"params": SamplingParams(1.0, top_k=3), "seed": 6}),
    ({"min_p": 0.1, "seed": 8}, {"params": SamplingParams(1.0, min_p=0.1), "seed": 8}),
    ({"repetition_penalty": 5, "temperature": 0}, {"params": SamplingParams(0.0, repetition_penalty=5)}),
    ({"logit_bias": {"0": 100}, "min_tokens": 4}, {"logit_bias": {0: 100}, "min_new_tokens": 4}),
    ({"logit_bias": {"0": 100}, "ignore_eos": True}, {"logit_bias": {0: 100}, "eos_token_id": []}),
    ({"logit_bias": {"0": 100}, "stop_token_ids": [200]}, {"logit_bias": {0: 100}, "eos_token_id": [0, 200]}),
    ({"logit_bias": {"200": 100}, "stop_token_ids": [200]}, {"logit_bias": {200: 100}, "eos_token_id": [0, 200]}),
    ({"num_drafts": 0, "temperature": 0.5}, {"params": SamplingParams(0.5), "num_drafts": 0}),
    ({"rule": "token", "temperature": 0.9}, {"params": SamplingParams(0.9), "rule": "token"}),
]


def gathered(served, calls) -> list:
    """What ``calls``, each of an asynchronous client, return; all of them run at one time."""

    async def main() -> list:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
            return await asyncio.gather(*(call(made) for call in calls))

    return asyncio.run(main())


def complete(**fields):
    own = {name: fields.pop(name) for name in [*fields] if name in EXTENSIONS}
    return lambda client: client.completions.create(model="embedded", extra_body=own, **{**SAMPLED, **fields})


def chat(**fields):
    own = {name: fields.pop(name) for name in [*fields] if name in EXTENSIONS}
    fields = {"messages": MESSAGES, "max_completion_tokens": 12, "seed": 5, **fields}
    return lambda client: client.chat.completions.create(model="embedded", extra_body=own, **fields)


EXTENSIONS = (
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "num_drafts", "rule"),
    *("include_stop_str_in_output", "add_special_tokens", "prompt_logprobs", "specdec", "prediction"),
)


def outcomes(served, prompt, settings: list[dict]) -> list:
    """Those of ``Request``s that have these fields, from schedulers like the server's."""
    found = {}
    for rule in {each.get("rule", "coupled") for each in settings}:
        requests = [
            Request(prompt, id=i, **{"max_new_tokens": 14, "params": SamplingParams(), "seed": 5, **each})
            for i, each in enumerate({k: v for k, v in each.items() if k != "rule"} for each in settings)
            if settings[i].get("rule", "coupled") == rule
        ]
        found |= {outcome.request.id: outcome for outcome in served.scheduler(rule).run(requests)}
    return [found[i] for i in range(len(settings))]


def test_texts_are_those_of_the_engine_alone(served):
    tokenizer = served.service.tokenizer
    prompt = tokenizer(PROMPT).input_ids
    told = gathered(served, [complete(**fields) for fields, _ in SETTINGS])
    expected = outcomes(served, prompt, [settings for _, settings in SETTINGS])
    for (fields, _), response, outcome in zip(SETTINGS, told, expected, strict=True):
        (choice,) = response.choices
        assert choice.text == continuation(tokenizer, prompt, outcome.tokens), fields
        assert choice.finish_reason == ("length" if outcome.finish_reason == FinishReason.LENGTH else "stop"), fields
        assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (len(prompt), len(outcome.tokens))
        assert choice.specdec["seed"] == outcome.request.seed
        drafted, accepted = outcome.stats.drafted, outcome.stats.accepted
        details, speculation = response.usage.completion_tokens_details, response.metrics["speculative_decoding"]
        assert details.accepted_prediction_tokens == speculation["num_accepted_draft_tokens"] == accepted
        assert details.rejected_prediction_tokens == drafted - accepted
        assert (speculation["num_draft_tokens"], speculation["num_spec_tokens"]) == (drafted, 4)
        histogram = {int(length): count for length, count in speculation["acceptance_histogram"].items()}
        assert sum(histogram.values()) == speculation["num_spec_steps"] <= outcome.stats.steps
        assert sum(length * count for length, count in histogram.items()) == accepted
    texts = [(response.choices[0].text, response.usage.completion_tokens) for response in told]
    assert len(set(texts)) == len(texts)  # so each of these fields does something


STREAMED = [
    {},
    {"logprobs": 2, "specdec": {"steps": True}},
    {"logprobs": 0, "stop": ["e"]},
    {"stop": ["def", "f(", "x"], "logprobs": 1, "seed": 6, "specdec": {"steps": True}},
    {"stop": "\n", "include_stop_str_in_output": True, "logprobs": 3, "specdec": {"steps": True}},
    {"n": 3, "logprobs": 1, "specdec": {"steps": True}},
    {"prompt": ["x = ", PROMPT], "n": 2, "stop": [" ", "="]},
    {"logit_bias": {"0": 20}, "logprobs": 1},
    {"echo": True, "max_tokens": 4},
    {"prompt": [306, 289], "temperature": 0, "frequency_penalty": 1},
    # The first of these bytes are not a character, the last ones never become one.
    {"logit_bias": {"127": 50, "163": 50, "98": 49}, "logprobs": 2, "specdec": {"steps": True}},
    {"prediction": {"type": "content", "content": "    return self.items.append(item)"}, "temperature": 0},
]


def gather_stream(chunks: list[dict]) -> dict:
    """What a stream of /v1/completions told, in the form of a whole response."""
    choices: dict[int, dict] = {}
    assert len({(c["id"], c["object"], c["created"], c["model"], c["system_fingerprint"]) for c in chunks}) == 1
    *chunks, last = chunks
    assert last["choices"] == []
    for chunk in chunks:
        assert chunk["usage"] is None
        (new,) = chunk["choices"]
        have = choices.setdefault(new["index"], {"index": new["index"], "text": "", "logprobs": None, "specdec": {}})
        assert have.get("finish_reason") is None  # so this is not after the last one
        have["text"] += new["text"]
        have["finish_reason"] = new["finish_reason"]
        if new["logprobs"] is not None:
            have["logprobs"] = have["logprobs"] or {name: [] for name in new["logprobs"]}
            for name, values in new["logprobs"].items():
                have["logprobs"][name] += values
        for name, values in new.get("specdec", {}).items():
            have["specdec"][name] = have["specdec"].get(name, []) + values if name == "steps" else values
    return {**last, "choices": [choices[i] for i in sorted(choices)]}


def settled(response: dict) -> dict:
    """Without what differs from response to response."""
    for choice in response["choices"]:
        for name in ("seconds", "tokens_per_second"):
            del choice["specdec"]["stats"][name]
    return {name: response[name] for name in ("choices", "usage", "metrics", "model", "object", "system_fingerprint")}


async def streamed(client, call) -> list[dict]:
    return [chunk.model_dump(exclude_unset=True) async for chunk in await call(client)]


def test_a_stream_tells_what_a_whole_response_tells(served):
    def both(fields):
        async def call(client):
            stream = complete(**fields, stream=True, stream_options={"include_usage": True})
            return await asyncio.gather(complete(**fields)(client), streamed(client, stream))

        return call

    for fields, (whole, chunks) in zip(STREAMED, gathered(served, map(both, STREAMED)), strict=True):
        told = settled(whole.model_dump(exclude_unset=True))
        assert settled(gather_stream(chunks)) == told, fields
        for choice in told["choices"]:
            check_details(fields, choice)
    by_choice = [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"]]
    assert by_choice == sorted(by_choice)


def check_details(fields: dict, choice: dict) -> None:
    """Log-probabilities and steps tell of the text, all of it, and of nothing that a stop string cut off."""
    text, log_probs = choice["text"], choice["logprobs"]
    if log_probs is not None:
        starts = log_probs["text_offset"]
        assert starts == sorted(starts) and {len(values) for values in log_probs.values()} == {len(starts)}
        for token, log_prob, top in zip(
            *(log_probs[n] for n in ("tokens", "token_logprobs", "top_logprobs")), strict=True
        ):
            assert top[token] == log_prob < 0 and len(top) <= fields["logprobs"] + 1
        if "stop" in fields and choice["finish_reason"] == "stop":
            assert all(start < len(text) for start in starts)
    if fields.get("specdec"):
        steps = choice["specdec"]["steps"]
        spelled = "".join(token[1] for step in steps for token in step["tokens"])
        assert text.startswith(spelled) and set(text[len(spelled) :]) <= {"\ufffd"}
        for step in steps:
            assert len(step["drafts"]) <= 4
            producers = [token[2] for token in step["tokens"]]
            accepted = producers.count("accepted")
            assert [t[0] for t in step["tokens"][:accepted]] == [d[0] for d in step["drafts"][:accepted]]
            assert all(p == ("accepted" if step["drafts"] else "plain") for p in producers[:-1])


def test_a_synchronous_client(served):
    """Whole and streamed, texts and chats, with the types that the package gives them."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        fields = {"messages": MESSAGES, "max_completion_tokens": 10, "seed": 5, "logprobs": True, "top_logprobs": 2}
        answer = client.chat.completions.create(model="embedded", **fields)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.chat.completions.create(model="embedded", **options, **fields))
        texts = list(complete(**options, stop=["\n"])(client))
        whole = complete(stop=["\n"])(client)
    assert answer.object == "chat.completion" and chunks[0].object == "chat.completion.chunk"
    assert answer.id.startswith("chatcmpl-") and whole.id.startswith("cmpl-") and whole.object == "text_completion"
    (choice,), *_, finish, last = answer.choices, *chunks
    assert choice.message.role == chunks[0].choices[0].delta.role == "assistant"
    parts = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(part.delta.content or "" for part in parts) == choice.message.content != ""
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
    assert finish.choices[0].delta.content is None and last.choices == [] and last.usage == answer.usage
    content = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
    assert content == choice.logprobs.content and len(content) == answer.usage.completion_tokens == 10
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == choice.message.content
    for entry in content:
        assert entry.token == bytes(entry.bytes).decode() and len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob >= entry.logprob
    assert "".join(chunk.choices[0].text for chunk in texts[:-1]) == whole.choices[0].text
    assert texts[-1].usage == whole.usage and "\n" not in whole.choices[0].text


def test_chats(served):
    """A chat is the completion of what the template makes of it; limits of two names; texts in parts; predictions."""
    tokenizer = served.service.tokenizer
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    parts = [{"role": "user", "content": [{"type": "text", "text": "Write a "}, {"type": "text", "text": "loop."}]}]
    predicted = {"type": "content", "content": [{"type": "text", "text": prompt}]}
    plain, *same, text, short, all_of_it, two, guessed = gathered(
        served,
        [
            chat(),
            chat(messages=parts),
            chat(user="a", safety_identifier="b", prompt_cache_key="c", service_tier="default", tools=[]),
            complete(prompt=prompt, max_tokens=12),
            chat(max_completion_tokens=None, max_tokens=2),
            chat(max_completion_tokens=None, temperature=0, logit_bias={"0": -100}, messages=LONG),
            chat(n=2, temperature=0.5),
            chat(prediction=predicted, temperature=0, messages=LONG),
        ],
    )
    assert all(each.choices[0].message.content == plain.choices[0].message.content for each in same)
    assert plain.choices[0].message.content == text.choices[0].text and plain.usage == text.usage
    assert (short.usage.completion_tokens, short.choices[0].finish_reason) == (2, "length")
    assert all_of_it.usage.total_tokens == 128  # as many as fit
    assert all_of_it.choices[0].message.content.startswith(guessed.choices[0].message.content)
    assert [choice.index for choice in two.choices] == [0, 1]
    assert [choice.specdec["seed"] for choice in two.choices] == [5, 6]
    assert two.usage.prompt_tokens == plain.usage.prompt_tokens and two.usage.completion_tokens <= 24


def test_copies_and_prompts(served):
    """Copy i has the text of seed + i; a prompt among others has the text that it has alone. Without a seed, each has
    one of its own, which is told and makes its text again."""
    copies, lists, *alone, drawn = gathered(
        served,
        [
            complete(n=2, best_of=2),
            complete(prompt=["x = ", PROMPT], n=2),
            complete(),
            complete(seed=6),
            complete(prompt="x = "),
            complete(prompt=[PROMPT] * 3, seed=None, temperature=1.5, logit_bias={"0": -100}),
        ],
    )
    texts = [each.choices[0].text for each in alone]
    assert [choice.text for choice in copies.choices] == texts[:2]
    assert [choice.text for choice in lists.choices][::2] == [texts[2], texts[0]]
    assert [choice.index for choice in lists.choices] == [0, 1, 2, 3]
    seeds = [choice.specdec["seed"] for choice in drawn.choices]
    assert len({choice.text for choice in drawn.choices}) == len(set(seeds)) == 3
    again = gathered(served, [complete(seed=seed, temperature=1.5, logit_bias={"0": -100}) for seed in seeds])
    assert [each.choices[0].text for each in again] == [choice.text for choice in drawn.choices]


def test_echo_and_scores_of_prompts(served):
    """As lm-evaluation-harness scores: nothing is decoded but one token or none, and the prompt's tokens are scored."""
    tokenizer = served.service.tokenizer
    ids = tokenizer(PROMPT).input_ids
    outcome = outcomes(served, ids, [{"prompt_log_probs": 2, "top_log_probs": 2, "max_new_tokens": 2}])[0]
    echoed, nothing, ranked, document, beginning = gathered(
        served,
        [
            complete(echo=True, logprobs=2, max_tokens=2),
            complete(prompt=ids, echo=True, logprobs=1, max_tokens=0),
            complete(prompt_logprobs=1, max_tokens=1),
            complete(prompt=None, max_tokens=4),
            complete(prompt=[tokenizer.bos_token_id], max_tokens=4),
        ],
    )
    (choice,) = echoed.choices
    assert choice.text == PROMPT + continuation(tokenizer, ids, outcome.tokens)
    expected = [None, *(each.log_prob for each in [*outcome.prompt_log_probs[1:], *outcome.top_log_probs])]
    assert choice.logprobs.token_logprobs == expected
    assert choice.logprobs.top_logprobs[0] is None and "".join(choice.logprobs.tokens) == choice.text
    for token, start in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        assert choice.text.startswith(token, start)
    assert nothing.choices[0].text == PROMPT and nothing.usage.completion_tokens == 0
    assert nothing.choices[0].logprobs.token_logprobs == expected[: len(ids)]
    first, *others = ranked.choices[0].prompt_logprobs
    assert first is None and len(others) == len(ids) - 1
    for token, entry, scores in zip(ids[1:], others, outcome.prompt_log_probs[1:], strict=True):
        assert entry[str(token)]["logprob"] == scores.log_prob and entry[str(token)]["rank"] == scores.rank
        assert min(each["rank"] for each in entry.values()) == 1 and len(entry) == 1 + (scores.rank > 1)
    assert document.choices[0].text == beginning.choices[0].text and document.usage.prompt_tokens == 1


def test_a_prediction_is_drafted(served):
    """A text that was predicted takes few steps, in which the drafts are those of the prediction."""
    fields = {"temperature": 0, "max_tokens": 15}
    (plain,) = gathered(served, [complete(**fields, num_drafts=0)])
    told = {"type": "content", "content": plain.choices[0].text}
    predicted, nothing = gathered(
        served,
        [
            complete(**fields, prediction=told, specdec={"steps": True}),
            complete(**fields, prediction={**told, "content": ""}),
        ],
    )
    (choice,) = predicted.choices
    assert choice.text == nothing.choices[0].text == plain.choices[0].text
    assert choice.specdec["stats"]["steps"] == 3 and plain.choices[0].specdec["stats"]["steps"] == 15
    assert predicted.usage.completion_tokens_details.accepted_prediction_tokens == 12
    for step in choice.specdec["steps"]:
        assert [draft[0] for draft in step["drafts"]] == [token[0] for token in step["tokens"][:-1]]
