"""Requests that nobody would write: whatever comes, the answer is one that the schema documents, it comes soon, and the
next request is served as before.

Requests of the schema are schemathesis', valid and not. The others are valid ones in which some values, or bytes, were
replaced by worse ones. About 200 every day; 50,000 nightly."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st
from schemathesis import GenerationMode
from specdec.serving.server.app import create_app
from specdec.serving.server.predict import PredictBody
from specdec.serving.server.request_bodies import ChatRequest, CompletionRequest
from support.tiny_service import NAME, is_idle, tiny_service

PATHS = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest, "/predict": PredictBody}
VALID = {
    "/v1/completions": {"model": NAME, "prompt": "x = ", "max_tokens": 2},
    "/v1/chat/completions": {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/predict": {"prompt": "x"},
}
CANARY = {"model": NAME, "prompt": "def f(x):\n", "max_tokens": 6, "seed": 3, "logprobs": 1}
SECONDS = 20.0  # that an answer may take, on a machine that does much else
LONGEST_TURN = 10.0  # seconds of CPU time without a pause of the event loop; 0.2 is usual, and a fault took 156
LONGEST_ERROR = 2000  # bytes; a refused request is not sent back

parts = pytest.mark.parametrize(
    "part", [pytest.param(0), *(pytest.param(i, marks=pytest.mark.nightly) for i in range(1, 5))]
)


class Fuzzed:
    """A server within the process, and an event loop to talk to it."""

    def __init__(self, tokenizer: Any):
        self.service = tiny_service(tokenizer)
        self.app = create_app(self.service, on_loopback=True)
        self.seen: Counter = Counter()  # path and status of all answers
        self._runner = asyncio.Runner()
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://localhost")
        self._expected = self.post("/v1/completions", CANARY).json()["choices"][0]
        assert self._expected["text"]

    def send(self, method: str, path: str, **request: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            return await asyncio.wait_for(self._client.request(method, path, **request), SECONDS)

        answer = self._runner.run(send())
        check(answer)
        self.seen[path, answer.status_code] += 1
        return answer

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {name: value.encode("latin-1") for name, value in headers.items()}
        return self.send("POST", path, content=content, headers={"content-type": b"application/json", **given})

    def watch_loop(self) -> None:
        self._turns = self._runner.get_loop().create_task(longest_turn())

    def longest_turn(self) -> float:
        """Seconds of CPU time that the event loop worked without a pause, at most, since ``watch_loop``."""
        self._turns.cancel()

        async def ended() -> float:
            return await self._turns

        return self._runner.run(ended())

    def check_unharmed(self) -> None:
        choice = self.post("/v1/completions", CANARY).json()["choices"][0]
        for each in (choice, self._expected):
            each.pop("specdec", None)  # its time
        assert choice == self._expected
        assert is_idle(self.service)

    def close(self) -> None:
        print(self.seen)
        self._runner.run(self._client.aclose())
        self._runner.run(self.service.lanes.close())
        self._runner.close()


async def longest_turn() -> float:
    longest, last = 0.0, time.thread_time()
    try:
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            longest, last = max(longest, now - last), now
    except asyncio.CancelledError:
        return longest


def check(answer: httpx.Response) -> None:
    told = (answer.status_code, answer.text[:500])
    assert answer.status_code in (200, 400, 404, 405, 413, 415), told
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"} and error["message"], told
        assert len(answer.content) < LONGEST_ERROR, told
    elif answer.headers["content-type"].startswith("text/event-stream"):
        *events, done, rest = answer.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "") and events
        assert all("error" not in json.loads(event.removeprefix("data: ")) for event in events)
    elif answer.headers["content-type"] == "application/json":
        answer.json()


@pytest.fixture(scope="module")
def fuzzed(pair) -> Iterator[Fuzzed]:
    made = Fuzzed(pair[2])
    yield made
    made.close()


def examples(count: int, part: int) -> Callable:
    """Runs a test on so many, every day, and sixty times as many in each nightly part; those of a part are always the
    same. What fails is not made simpler, because this takes minutes."""
    checks = (
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
        HealthCheck.large_base_example,
    )
    quick = settings(
        max_examples=count if part == 0 else 60 * count,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=checks,
    )
    return lambda test: hypothesis_seed(part)(quick(test))


# ---- Requests of the schema ------------------------------------------------------------------------------------------


@parts
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", GenerationMode)
def test_requests_of_the_schema(fuzzed, path, mode, part):
    """Those of the schema are answered, or refused in a way that it documents; all others are refused."""
    operation = schemathesis.openapi.from_dict(fuzzed.app.openapi())[path]["POST"]
    documented = fuzzed.app.openapi()["paths"][path]["post"]["responses"]
    seen = set()

    @examples(8, part)
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case) -> None:
        body = case.body
        if mode is GenerationMode.POSITIVE and "model" in body:
            body = {**body, "model": NAME}
        request = {"content": body} if isinstance(body, bytes | str) else {"content": _json(body)}
        kind = case.media_type or "application/json"
        headers = {"content-type": kind}
        answer = fuzzed.send("POST", path, headers=headers, **request)
        seen.add(answer.status_code)
        assert str(answer.status_code) in documented or f"{answer.status_code // 100}XX" in documented
        if mode is GenerationMode.NEGATIVE:
            assert answer.status_code != 200, body

    run()
    assert 200 in seen or mode is GenerationMode.NEGATIVE or part == 0  # which has few examples
    fuzzed.check_unharmed()


def _json(body: Any) -> bytes:
    return json.dumps(body, default=str).encode()


# ---- Valid requests, spoilt ------------------------------------------------------------------------------------------

# Values as they are written, most of them no JSON of a usual kind.
NUMBERS = [
    *("0", "-0", "1", "-1", "2", "20", "21", "64", "128", "129", "0.5", "1.0", "2.0", "-2.5",
      "1e-5", "1e-400", "1e308"),
    *("1e400", "-1e400", "NaN", "Infinity", "-Infinity", "1e99999999999", "01", "+1", ".5", "1.", "0x10", "1_000"),
    *(str(sign * 2**bits + off) for bits in (31, 32, 53, 63, 64, 128) for sign in (1, -1) for off in (-1, 0)),
    "9" * 5000, "-" + "9" * 5000, "0." + "0" * 5000 + "1", "1e-" + "9" * 300,
]  # fmt: skip
TEXTS = [
    *('""', '" "', '"x"', '"\\n"', '"\\u0000"', '"\x00"', '"\\ud800"', '"\\udc00\\ud800"',
      '"\\ud83d\\ude00"', '"\U0001f600"'),
    *('"\\x"', '"', "'x'", '"%s%n"', '"../../etc/passwd"', '"{{ 7 * 7 }}"', '"<|endoftext|>"',
      '"<script>"', '"\ufeff"'),
    *('"text"', '"content"', '"user"', '"token"', '"coupled"', '"none"', '"model"', f'"{NAME}"', '"\u202e\u0301"'),
    '"' + "x" * 5000 + '"', '"' + "ab " * 2000 + '"', '"' + "\\u0301" * 3000 + '"',
]  # fmt: skip
NESTED = [
    *("[]", "{}", "[[]]", "[{}]", "[null]", '[""]', '["x"]', "[0]", "[[0]]", "[[0], []]", '["x", 0]', "[true]", "[-1]"),
    *("[4095]", "[4096]", '{"0": 1}', '{"0": 101}', '{"-1": 1}', '{"x": 1}', '{"4096": 1}',
      '{"\u0661": 1}', '{"0": null}'),
    *('{"steps": true}', '{"include_usage": true}', '{"type": "json_object"}', '{"type": "text"}', '{"a": 1, "a": 2}'),
    *('{"type": "content", "content": "x"}', '[{"role": "user", "content": "x"}]', '[{"type": "text", "text": "x"}]'),
    *("[" + ", ".join(["0"] * 3000) + "]", "[" + ", ".join(['"x"'] * 3000) + "]", "[" * 40 + "]" * 40),
    *("[" * 100_000, "[" * 2000 + "]" * 2000, '{"a": ' * 3000 + "1" + "}" * 3000),
    "{" + ", ".join(f'"{i}": 1' for i in range(3000)) + "}",
]  # fmt: skip
CONSTANTS = ["null", "true", "false", "True", "undefined", ""]
VALUES = [*NUMBERS, *TEXTS, *NESTED, *CONSTANTS]
DECENT = ["0", "1", "2", "0.5", "null", "true", "false", '"x"', '["x", "y"]', "[7, 8]", "[]", "{}", '{"7": 5}']
NAMES = ["", "x", "x" * 3000, "__proto__", "\\u0000", "\\ud800", "model\\u0000", "Model", "request", "body"]


@st.composite
def spoilt(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path, and a body in which a few fields have other values, or which has a name twice."""
    path = draw(st.sampled_from(sorted(PATHS)))
    fields = [(name, json.dumps(value)) for name, value in VALID[path].items()]
    names = [*PATHS[path].model_fields, *PATHS[path].model_fields, *NAMES]
    for _ in range(draw(st.integers(1, 3))):
        name, value = draw(st.sampled_from(names)), draw(st.sampled_from(VALUES) | st.sampled_from(DECENT))
        if not draw(st.integers(0, 15)):  # within a message, say
            value = draw(st.sampled_from(["[%s, %s]", '{"%s": %s}', '[{"role": %s, "content": %s}]'])) % (value, value)
        twice = not draw(st.integers(0, 9))
        fields = [each for each in fields if each[0] != name or twice] + [(name, value)]
    return path, ("{" + ", ".join(f'"{name}": {value}' for name, value in fields) + "}").encode()


@parts
def test_spoilt_values(fuzzed, part):
    @examples(120, part)
    @given(spoilt())
    def run(request) -> None:
        path, body = request
        fuzzed.post(path, body)

    run()
    fuzzed.check_unharmed()


ENCODINGS: list[Callable[[bytes], bytes]] = [
    *(lambda body, code=code: body.decode().encode(code) for code in ("utf-16", "utf-16-le", "utf-32", "utf-7")),
    *(lambda body, mark=mark: mark + body for mark in (b"\xef\xbb\xbf", b"\xff\xfe", b"\x00", b"\x1f\x8b", b"\x80")),
    lambda body: body + body,
    lambda body: body + b"\x00",
    lambda body: body.replace(b"x", b"\xff"),
    lambda body: body.replace(b"x", b"\xed\xa0\x80"),  # half of a surrogate pair
    lambda body: body.replace(b"x", b"\xc0\x80"),  # a zero of two bytes
    lambda body: b"",
]
HEADERS: list[dict[str, str]] = [
    *({"content-type": kind} for kind in ("", "text/plain", "application/x-www-form-urlencoded",
      "multipart/form-data")),
    *({"content-type": kind} for kind in ("application/json; charset=utf-16", "application/json,text/plain", "*/*")),
    *({"content-encoding": kind} for kind in ("gzip", "br", "identity", "x")),
    *({"content-length": length} for length in ("0", "-1", "1", "999999999999", "x", "1, 2", "\xd9\xa1")),
    *({"authorization": key} for key in ("", "Bearer", "Bearer x", "Basic eDp4", "Bearer " + "x" * 5000)),
    *({"host": host} for host in ("localhost:1", "127.0.0.1:99999999999")),
    *({"accept": kind} for kind in ("text/plain", "x" * 3000, "application/openmetrics-text; version=x")),
    *({"x-request-id": name} for name in ("x" * 3000, "\t", "a b")),
]  # fmt: skip


@st.composite
def garbled(draw: st.DrawFn) -> tuple[str, bytes, dict[str, str]]:
    """A path, a valid body in which some bytes are others, and headers that may not fit it."""
    path = draw(st.sampled_from(sorted(PATHS)))
    body = bytearray(json.dumps({**VALID[path], **draw(st.sampled_from([{}, {"stream": True}, {"n": 2}]))}).encode())
    for _ in range(draw(st.integers(0, 3))):
        start, length = draw(st.integers(0, len(body))), draw(st.integers(0, 4))
        body[start : start + length] = draw(
            st.binary(max_size=4) | st.sampled_from([b'"', b"{", b"]", b",", b"\\", b"\n"])
        )
    body = bytes(body[: draw(st.none() | st.integers(0, len(body)))])
    try:
        body = draw(st.sampled_from([bytes, bytes, bytes, gzip.compress, *ENCODINGS]))(body)
    except UnicodeDecodeError:
        pass
    return path, body, draw(st.sampled_from([{}, {}, *HEADERS]))


@parts
def test_garbled_bytes(fuzzed, part):
    @examples(60, part)
    @given(garbled())
    def run(request) -> None:
        path, body, headers = request
        fuzzed.post(path, body, **headers)

    run()
    fuzzed.check_unharmed()


# ---- Requests that are made to cost much -----------------------------------------------------------------------------

MUCH = {
    "a long prompt": {"prompt": "x" * 900_000},
    "a long prompt of many words": {"prompt": "ab cd\n" * 150_000},
    "a prompt of combining characters": {"prompt": "\u0301" * 400_000},
    "many ids": {"prompt": [0] * 300_000},
    "ids that are none": {"prompt": [-1] * 200_000},
    "many prompts": {"prompt": ["x"] * 150_000},
    "many empty prompts": {"prompt": [[]] * 200_000},
    "many kinds of prompts": {"prompt": ["x", 0, [0]] * 50_000},
    "long prompts": {"prompt": ["x" * 7_000] * 128},
    "long stop strings in many texts": {"stop": ["a" * 220_000 + "b"] * 4, "n": 128},
    "many stop strings": {"stop": ["x"] * 150_000},
    "many stop ids": {"stop_token_ids": [0] * 300_000, "n": 128},
    "stop ids that are none": {"stop_token_ids": [-1] * 200_000},
    "many biases in many texts": {"logit_bias": {str(i): 1 for i in range(4096)}, "n": 128},
    "biases of ids that are none": {"logit_bias": {f"{i:07}": 101 for i in range(60_000)}},
    "a long prediction in many texts": {"prediction": {"type": "content", "content": "ab " * 300_000}, "n": 128},
    "a prediction in many parts": {"prediction": {"type": "content", "content": [{"type": "text",
    "text": "a"}] * 25_000}},
    "many names": {f"name{i}": 0 for i in range(60_000)},
    "a long name": {"x" * 900_000: 0},
    "a long model": {"model": "x" * 900_000},
    "many texts with all there is": {"n": 128, "logprobs": 20, "prompt_logprobs": 20, "echo": True,
    "specdec": {"steps": True}},
}  # fmt: skip


EVERYDAY = (  # texts, ids, biases, and all that a request can ask for at once
    *("long prompts", "many kinds of prompts", "stop ids that are none", "many biases in many texts"),
    *("long stop strings in many texts", "many texts with all there is"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.nightly) for name in MUCH]
)
def test_requests_that_are_made_to_cost_much(fuzzed, name):
    """None keeps the event loop, which is everybody's, for long."""
    body = json.dumps({**VALID["/v1/completions"], **MUCH[name]}).encode()
    fuzzed.watch_loop()
    fuzzed.post("/v1/completions", body)
    assert fuzzed.longest_turn() < LONGEST_TURN
    fuzzed.check_unharmed()
