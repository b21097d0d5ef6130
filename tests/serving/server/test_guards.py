"""What is refused before a route sees it, what is told of an error, and what the log holds."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI, Request
from specdec.serving.server import guards, logs
from specdec.serving.server.app import create_app
from specdec.serving.server.request_log import peer
from specdec.serving.server.server_settings import ServerSettings
from support.servers import service

KEYS = ("first-key-of-two", "second-key-of-two")
SECRET = "what the prompt says"


def routes(app: FastAPI) -> None:
    @app.post("/body")
    async def body(request: Request) -> dict:
        return {"body": await request.json(), "owner": request.state.owner}

    @app.get("/owner")
    async def owner(request: Request) -> dict:
        request.state.log["tokens"] = 7
        return {"owner": request.state.owner, "request_id": request.state.request_id}

    @app.post("/fail")
    async def fail(request: Request) -> None:
        raise RuntimeError(f"{await request.body()!r}: got {SECRET}")


def run(call: Callable[[httpx.AsyncClient], Awaitable], on_loopback: bool = True, **settings):
    async def main():
        app = create_app(service(**settings), on_loopback)
        routes(app)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
            return await asyncio.wait_for(call(client), 20)

    return asyncio.run(main())


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def error_of(answer: httpx.Response) -> dict:
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def test_every_route_but_probes_and_the_page_needs_a_key(monkeypatch):
    compared = []
    compare = guards.hmac.compare_digest
    monkeypatch.setattr(guards.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or compare(a, b))

    async def test(client):
        paths = {path for path in client._transport.app.openapi()["paths"]} | {"/openapi.json", "/nothing", "/owner"}
        assert {"/metrics", "/v1/models", "/v1/completions"} <= paths
        for path in paths - {"/health", "/ready"}:
            for method in ("GET", "POST", "OPTIONS"):
                answer = await client.request(method, path)
                assert answer.status_code == 401 and error_of(answer)["type"] == "authentication_error"
                assert answer.headers["WWW-Authenticate"] == "Bearer"
        for path in ("/health", "/"):
            assert (await client.get(path)).status_code == 200
            assert (await client.post(path)).status_code == 401
        assert not compared
        for given in ("", "Bearer", "Bearer ", "Basic " + KEYS[0], KEYS[0], "Bearer wrong", f"Bearer {KEYS[0]}x"):
            assert (await client.get("/owner", headers={"Authorization": given})).status_code == 401
        twice = [("Authorization", f"Bearer {KEYS[0]}"), ("Authorization", "Bearer other")]
        assert (await client.get("/owner", headers=twice)).status_code == 401
        compared.clear()
        owners = [(await client.get("/owner", headers=bearer(key))).json()["owner"] for key in KEYS]
        assert len(compared) == len(KEYS) ** 2  # each with all, right or wrong
        assert len({*owners}) == 2 and not any(key in owner for key in KEYS for owner in owners)
        assert (await client.get("/owner", headers={"Authorization": f"bearer {KEYS[1]}"})).json()["owner"] == owners[1]

    run(test, api_keys=KEYS)


def test_names_of_other_hosts_are_refused_on_the_loopback_interface():
    async def status(client, host):
        return (await client.get("/health", headers={"Host": host})).status_code

    async def test(client):
        for host in (
            "localhost",
            "LOCALHOST:80",
            "127.0.0.1",
            "127.0.0.1:8000",
            "[::1]",
            "[::1]:8000",
            "proxy.example",
        ):
            assert await status(client, host) == 200, host
        for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "localhost:x", "", "127.0.0.2"):
            assert await status(client, host) == 403, host

    async def elsewhere(client):
        assert await status(client, "name.example") == 200

    run(test, allowed_hosts=("proxy.example",))
    run(elsewhere, on_loopback=False)


@pytest.mark.parametrize(
    "body, words",
    [
        (b'{"a": 1, "a": 2}', "occurs twice"),
        (b'{"a": {"b": [{"c": 1, "c": 1}]}}', "occurs twice"),
        (b"[" * 100_000, "nesting"),
        (b"[" * 33 + b"]" * 33, "32 levels of nesting"),
        (b'{"a": NaN}', "NaN"),
        (b"[-Infinity]", "-Infinity"),
        (b"1e999", "float64"),
        (b"0.123456789012345678", "more digits than a float64"),
        (b"1e-99999999999999999999999", "more digits than a float64"),
        (b"-" + b"9" * 10_000, "64 bits"),
        (b"18446744073709551616", "64 bits"),
        (b'"\\ud800"', "surrogate"),
        (b'{"\\udc00": 1}', "surrogate"),
        (b'"\xff"', "UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "UTF-8"),
        (b"{'a': 1}", "character 1"),
        (b" ", "character 1"),
        (b"{} {}", "character 3"),
    ],
    ids=str,
)
def test_json_that_parsers_read_differently(body, words):
    async def test(client):
        answer = await client.post("/body", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400 and words in error_of(answer)["message"]
        assert error_of(answer)["code"] == "invalid_json"

    run(test)


def test_json_passes_as_it_is():
    body = {"a": [1, -(2**63), 2**64 - 1, 1.5e300, 0.1 + 0.2, "\U0001f600\x00", None, True], "b": {"": {}}}
    nested: list = []
    for _ in range(29):
        nested = [nested]
    body["c"] = nested

    async def test(client):
        for kind in ("application/json", "Application/JSON; charset=utf-8"):
            answer = await client.post("/body", content=json.dumps(body), headers={"Content-Type": kind})
            assert answer.json() == {"body": body, "owner": guards.EVERYONE}

    run(test)


def test_a_byte_order_mark_before_the_body_is_no_part_of_it():
    """Clients on Windows send it. One is, inside of a text or before another one."""
    content, kind = b"\xef\xbb\xbf" + json.dumps({"a": "\ufeff"}).encode(), {"Content-Type": "application/json"}

    async def test(client):
        answer = await client.post("/body", content=content, headers=kind)
        assert answer.json()["body"] == {"a": "\ufeff"}
        answer = await client.post("/body", content=content[:3] + content, headers=kind)
        assert answer.status_code == 400 and error_of(answer)["code"] == "invalid_json"

    run(test)


def test_other_content_types_are_refused():
    async def test(client):
        async def status(**headers):
            return (await client.post("/body", content=b"{}", headers=headers)).status_code

        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonx", ""):
            assert await status(**{"Content-Type": kind}) == 415
        assert await status(**{"Content-Type": "application/json", "Content-Encoding": "gzip"}) == 415
        assert (await client.post("/body", content=b"{}")).status_code == 415
        assert await status(**{"Content-Type": "application/json"}) == 200

    run(test)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/json", None])
def test_what_no_route_takes_is_told_of_the_routes_whatever_its_body_is(kind):
    headers = {} if kind is None else {"Content-Type": kind}

    async def test(client):
        for path, status, code in (
            ("/v1/embeddings", 404, "not_found"),
            ("/health", 405, "method_not_allowed"),
            ("/body", 400 if kind == "application/json" else 415, None),  # which there is
        ):
            answer = await client.post(path, content=b"{not JSON", headers=headers)
            error = error_of(answer)
            assert answer.status_code == status and error["code"] == (code or error["code"])
            if code is not None:
                assert error["message"].startswith(f"POST {path}: ")
                for route in ("POST /v1/chat/completions", "GET /v1/models/{name}", "GET /", "POST /predict"):
                    assert route in re.split(", |allowed: ", error["message"])

    run(test)


def test_pages_of_other_sites_are_allowed_only_if_asked_for():
    ask = {"Origin": "https://site.example", "Access-Control-Request-Method": "POST"}
    ask["Access-Control-Request-Headers"] = "authorization"

    async def closed(client):
        answers = [await client.options("/owner", headers=ask), await client.get("/health", headers=ask)]
        assert not any(name.startswith("access-control") for answer in answers for name in answer.headers)
        assert answers[1].headers["Cross-Origin-Resource-Policy"] == "same-origin"

    async def opened(client):
        assert (await client.options("/owner", headers=ask)).status_code == 200  # which has no key
        answer = await client.get("/owner", headers=ask)
        assert answer.status_code == 401 and answer.headers["Access-Control-Allow-Origin"] == ask["Origin"]
        other = await client.get("/health", headers={"Origin": "https://other.example"})
        assert "Access-Control-Allow-Origin" not in other.headers

    run(closed)
    run(opened, api_keys=KEYS, cors_origins=(ask["Origin"],))


def test_no_answer_can_be_run_framed_or_guessed():
    async def test(client):
        for path in ("/health", "/nothing", "/owner", "/"):
            headers = (await client.get(path)).headers
            policy = dict(rule.split(" ", 1) for rule in headers["Content-Security-Policy"].split("; "))
            assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
            assert not any("unsafe" in sources or "*" in sources for sources in policy.values())
            assert headers["X-Content-Type-Options"] == "nosniff" and headers["X-Frame-Options"] == "DENY"

    run(test)


def test_the_line_of_a_refused_request_says_why_and_whose_it_was(caplog):
    caplog.set_level("INFO", "specdec")

    async def test(client):
        for headers in ({}, bearer(KEYS[0])):
            await client.post("/body", json=1, headers=headers)
            await client.get("/nothing", headers=headers)
        await client.get("/metrics")  # of which nothing is said where it is answered
        await client.get("/metrics", headers=headers)
        await client.delete("/body", headers=headers)
        await client.post("/body", content="x", headers=headers)
        await client.post("/body", content="{", headers={**headers, "Content-Type": "application/json"})

    run(test, api_keys=KEYS)
    lines = [record.facts for record in caplog.records]
    told = ["invalid_api_key"] * 2 + [None, "not_found", "invalid_api_key"]
    told += ["method_not_allowed", "unsupported_media_type", "invalid_json"]
    assert [facts.get("code") for facts in lines] == told
    assert [facts.get("peer") for facts in lines] == [None if code is None else "127.0.0.1:123" for code in told]
    assert peer(("::1", 8000, 0, 0)) == "[::1]:8000" and peer(None) is None


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_unexpected_error_is_told_without_details_and_logged_without_texts(form):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JsonLines() if form == "json" else logs.TextLines())
    logger = logging.getLogger("specdec")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("DEBUG")

    async def test(client):
        headers = bearer(KEYS[0]) | {"X-Request-Id": "mine-1"}
        failed = await client.post("/fail", json={"prompt": SECRET}, headers=headers)
        assert failed.status_code == 500 and failed.headers["X-Request-Id"] == "mine-1"
        told = error_of(failed)
        assert told["type"] == "server_error" and "mine-1" in told["message"]
        assert "RuntimeError" not in failed.text and SECRET not in failed.text and "line" not in failed.text
        for odd in ("", "a b", "x" * 129, '"', "é"):
            answer = await client.get("/owner", headers=bearer(KEYS[1]) | {"X-Request-Id": odd.encode()})
            assert answer.headers["X-Request-Id"] == answer.json()["request_id"] != odd
        await client.get("/%1b[31m%0a{}", headers={"X-Request-Id": "odd-path"})

    try:
        run(test, api_keys=KEYS)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    text = stream.getvalue()
    assert not any(secret in text for secret in (*KEYS, SECRET)) and text.isascii() and "\x1b" not in text
    assert "RuntimeError" in text and "test_guards.py" in text and "request_id" in text and "odd-path" in text
    if form == "json":
        lines = [json.loads(line) for line in text.splitlines()]
        assert all({"time", "level", "message", "request_id"} <= line.keys() for line in lines)
        request = next(line for line in lines if line.get("path") == "/owner")
        assert {"method": "GET", "status": 200, "tokens": 7, "level": "info"}.items() <= request.items()
        assert 0 <= request["seconds"] < 60
        failed = [line for line in lines if line["request_id"] == "mine-1"]
        assert [line["level"] for line in failed] == ["error", "error"] and failed[1]["status"] == 500


@pytest.mark.parametrize(
    "name, value",
    [
        ("api_keys", ("s-key",)),
        ("api_keys", ("with a blank",)),
        ("api_keys", ("ümlaut-and-so-on",)),
        ("cors_origins", ("*",)),
        ("cors_origins", ("site.example",)),
        ("cors_origins", ("https://site.example/path",)),
        ("port", 65536),
        ("max_body_bytes", 0),
        ("drain_seconds", -1.0),
        ("header_seconds", float("nan")),
    ],
)
def test_settings_that_are_refused(name, value):
    with pytest.raises(ValueError, match=f"^{name}: got .*, allowed: ") as error:
        ServerSettings(**{name: value})
    assert name != "api_keys" or value[0] not in str(error.value)
    assert "secret-key" not in repr(ServerSettings(api_keys=("secret-key",)))


def test_requests_a_minute(monkeypatch):
    """Each key has its own; a minute after the first of them, one more is admitted. What is refused does not count, nor
    do other methods, and the metrics have how many it were."""
    clock = [1000.0]
    monkeypatch.setattr(guards, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def test(client):
        async def post(key: str) -> httpx.Response:
            return await client.post("/body", json={}, headers=bearer(key))

        for _ in range(2):
            assert (await post(KEYS[0])).status_code == 200
            clock[0] += 20
        for _ in range(3):
            refused = await post(KEYS[0])
            error = error_of(refused)
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "20")
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert (await client.get("/owner", headers=bearer(KEYS[0]))).status_code == 200
        assert (await post(KEYS[1])).status_code == 200
        assert (await post("wrong-key-of-nobody")).status_code == 401
        clock[0] += 19.5
        assert (await post(KEYS[0])).headers["Retry-After"] == "1"
        clock[0] += 0.5
        assert [(await post(KEYS[0])).status_code for _ in range(2)] == [200, 429]
        told = (await client.get("/metrics", headers=bearer(KEYS[0]))).text
        assert 'specdec:requests_over_rate_total{model_name="tiny"} 5.0' in told

    run(test, api_keys=KEYS, requests_per_minute=2)
    clock[0] = 0.0

    async def without_keys(client):
        assert [(await client.post("/body", json={})).status_code for _ in range(3)] == [200, 200, 429]

    run(without_keys, requests_per_minute=2)
