"""``specdec chat --url``, its lines piped in, with servers that say what these tests tell them to."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from specdec.cli import app
from specdec.cli.remote_chat import _Answer
from typer.testing import CliRunner

OURS = {"drafters": ["model", "lookup"], "rules": ["coupled"], "chat": False}
STATS = {"steps": 2, "drafted": 8, "accepted": 2, "by_position": [1.0, 0.25, 0.0], "tau": 2.5}
USAGE = {"choices": [], "usage": {"completion_tokens": 5}}


def event(chunk: object) -> bytes:
    return b"data: " + (chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode()) + b"\n\n"


def completion(text: str, **specdec: object) -> dict:
    return {"choices": [{"index": 0, "text": text, "specdec": specdec or None}]}


def message(text: str) -> dict:
    return {"choices": [{"index": 0, "delta": {"role": "assistant", "content": text}}]}


class Scripted(BaseHTTPRequestHandler):
    """Lists ``models``, and answers POST with ``answer``: the chunks of a stream, or (status, headers, body). ``ours``
    is what a server of specdec offers; None: it is another one."""

    models: object = {"data": [{"id": "small"}]}
    ours: dict | None = OURS
    answer: Callable[[dict], object]
    asked: list[tuple[str, dict, str | None]]
    left: threading.Event  # set when a client has left before the end

    def do_GET(self) -> None:
        found = {"/v1/models": self.models, "/v1/specdec": self.ours}[self.path]
        status = 404 if found is None else 200
        self.reply(status, {"Content-Type": "application/json"}, json.dumps(found).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, body, self.headers.get("Authorization")))
        answer = type(self).answer(body)
        if isinstance(answer, tuple):
            self.reply(*answer)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()
        try:
            for chunk in answer:
                self.wfile.write(event(chunk))
        except OSError:
            self.left.set()

    def reply(self, status: int, headers: dict, body: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[Scripted]]]:
    class Own(Scripted):
        asked: list = []
        answer = staticmethod(lambda body: [completion("x", stats=STATS), USAGE, b"[DONE]"])

    Own.asked, Own.left = [], threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Own) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}/v1", Own
        listening.shutdown()
        thread.join()


def chat(url: str, *lines: str, options: tuple[str, ...] = ()):
    result = CliRunner().invoke(app, ["chat", "--url", url, *options], input="".join(f"{line}\n" for line in lines))
    assert result.exit_code == 0, result.output
    return result


def refused(*options: str) -> str:
    result = CliRunner().invoke(app, ["chat", *options], input="")
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.split())


def test_a_conversation_without_a_template_is_one_text(server):
    url, script = server
    script.answer = lambda body: [completion("a"), completion("b", stats=STATS), USAGE, b"[DONE]"]
    options = ("--seed", "7", "--top-k", "5", "--stop", "end", "--max-new-tokens", "9", "--api-key", "key")
    result = chat(url, "def f", "/k 3", "/drafter lookup", "/rule coupled", "more", "/stats", options=options)
    assert result.stdout == "ab\nab\n"
    (first_path, first, key), (_, second, _) = script.asked
    assert (first_path, key) == ("/v1/completions", "Bearer key")
    assert first == {
        "model": "small", "max_tokens": 9, "seed": 7, "temperature": 0.0, "top_k": 5, "stop": ["end"], "stream": True,
        "include_stop_str_in_output": True, "stream_options": {"include_usage": True}, "specdec": {"steps": False},
        "prompt": "def f",
    }  # fmt: skip
    assert (second["prompt"], second["seed"]) == ("def fab\nmore", 8)
    assert (second["num_drafts"], second["drafter"], second["rule"]) == (3, "lookup", "coupled")
    assert (
        result.stderr.count("5 tokens in 2 steps, ") == 2
        and ": tau 2.50 tokens a step, acceptance rate 0.25 (accepted / drafted)\n" in result.stderr
    )
    assert "drafter lookup, rule coupled, k 3, seed 9, max-new-tokens 9" in result.stderr
    assert "2 answers, 10 tokens in 4 steps, " in result.stderr


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_what_a_model_thinks_is_shown_apart(server, name):
    """On stderr, once under either of its names, and it is no part of the conversation."""
    url, script = server
    script.ours = None

    def thought(text: str) -> dict:
        return {"choices": [{"index": 0, "delta": {name: text, "reasoning_content": text}}]}

    script.answer = lambda body: [thought("so "), thought("be it"), message("yes"), message("!"), USAGE, b"[DONE]"]
    result = chat(url, "a", "b")
    assert result.stdout == "yes!\nyes!\n" and result.stderr.count("so be it\n") == 2
    assert [each["content"] for each in script.asked[1][1]["messages"]] == ["a", "yes!", "b"]


def test_another_server_gets_messages_and_none_of_our_fields(server, tmp_path):
    url, script = server
    script.models, script.ours = {"data": [{"id": "gpt"}, {"id": "chosen"}]}, None
    script.answer = lambda body: [message("hel"), message("lo"), USAGE, b"[DONE]"]
    saved = tmp_path / "said.json"
    result = chat(
        url, "/system be brief", "hi", "/k 3", f"/save {saved}", "/clear", "hi", options=("--target", "chosen", "-v")
    )
    assert result.stdout == "hello\nhello\n" and "\n5 tokens, " in result.stderr
    assert "/k: got '3', allowed: nothing, as this is no server of specdec" in result.stderr
    (path, body, key), (_, again, _) = script.asked
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert (path, key, body["model"], body["messages"]) == ("/v1/chat/completions", None, "chosen", said)
    assert again["messages"] == said and not {"specdec", "include_stop_str_in_output", "num_drafts"} & {*body, *again}
    assert json.loads(saved.read_text())["messages"][1] == {"role": "assistant", "content": "hello"}


def test_colours_are_those_of_the_steps(server, monkeypatch):
    url, script = server
    monkeypatch.setattr("specdec.cli.terminal.on_terminal", lambda: True)
    steps = [{"drafts": [[1, "a"]], "tokens": [[1, "a", "accepted"], [2, "b\x1b", "bonus"], [3, "c", "plain"]]}]
    script.answer = lambda body: [completion("ab"), completion("\x1bcd", steps=steps, stats=STATS), USAGE, b"[DONE]"]
    arguments = ["chat", "--url", url, "--verbose"]
    result = CliRunner().invoke(app, arguments, input="x\n", color=True)
    assert result.stdout.replace("\x1b[22m", "") == "\x1b[32ma\x1b[0m\x1b[34mb\\x1b\x1b[0mcd\n"
    assert script.asked[0][1]["specdec"] == {"steps": True}
    told = " ".join(result.stderr.split())
    assert "tokens: accepted 1, recovered 0, bonus 1, plain 1" in told
    assert "accepted by place, of those drafted: 1: 100%, 2: 25%" in told


REFUSALS = [
    (
        (401, {}, b'{"error": {"message": "who are you", "code": null}}'),
        "answered 401: who are you; give its API key with --api-key or SPECDEC_API_KEY",
    ),
    ((429, {"Retry-After": "3"}, b'{"error": {"message": "full"}}'), "answered 429: full; try again in 3 seconds"),
    ((400, {}, b'{"error": {"message": "top_p: got 2"}}'), "answered 400: top_p: got 2"),
    ((502, {"Content-Type": "text/html"}, b"<html>"), "answered 502: Bad Gateway"),
    ((200, {"Content-Type": "text/html"}, b"<html>"), "answered with text/html, not with a stream"),
    ([completion("part")], "the connection ended before the answer did"),
    ([completion("part"), {"error": {"message": "it broke"}}], "not answered: it broke"),
    ([b"[1]"], "no server with OpenAI's interface"),
    ([{"choices": [5]}], "a chunk that is not as OpenAI's interface has it"),
    ([{"error": {"message": "\x1b[2J"}}], "not answered: \\x1b[2J"),
]


@pytest.mark.parametrize("answer, told", REFUSALS, ids=[told for _, told in REFUSALS])
def test_errors_are_told_and_the_chat_goes_on(server, answer, told):
    url, script = server
    answers = [answer, [completion("fine"), USAGE, b"[DONE]"]]
    script.answer = lambda body: answers.pop(0)
    result = chat(url, "one", "two")
    assert told in result.stderr and result.stdout.endswith("fine\n")
    assert script.asked[1][1]["prompt"] == "two" and script.asked[1][1]["seed"] == 0


def test_wrong_commands_change_nothing(server):
    url, script = server
    wrong = {
        "/drafter abacus": "/drafter: got 'abacus', allowed: model, lookup",
        "/rule block": "/rule: got 'block', allowed: coupled",
        "/k -1": "/k: got '-1', allowed: an integer >= 0, or auto",
        "/tree 4": "/tree: got '4', allowed: nothing; trees are an option of the server",
        "/system x": "/system: got a text, allowed: none, as this model has no chat template",
        "/abacus": "/abacus: got /abacus, allowed: /help, /drafter, /k, ",
    }
    result = chat(url, "/stats", *wrong, "/stats", "/exit", "never")
    before, *_, after = result.stderr.partition("\n/drafter: ")
    assert after.endswith(before + "\n") and not script.asked
    for told in wrong.values():
        assert told in result.stderr


def test_ctrl_c_closes_the_connection_and_keeps_what_was_shown(server, monkeypatch):
    url, script = server
    taken, take = [], _Answer.take

    def press(self, chunk):
        take(self, chunk)
        taken.append(chunk)
        if len(taken) == 1:
            signal.raise_signal(signal.SIGINT)

    def long(body):
        yield completion("shown")
        if body["prompt"] == "one":
            yield from (completion("") for _ in range(100_000))
        yield from (completion("!"), USAGE, b"[DONE]")

    monkeypatch.setattr(_Answer, "take", press)
    script.answer = staticmethod(long)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have background processes ignore it
    try:
        result = chat(url, "one", "two")
    finally:
        signal.signal(signal.SIGINT, before)
    assert script.left.wait(10)
    assert result.stdout == "shown\nshown!\n" and "(stopped)" in result.stderr
    assert script.asked[1][1]["prompt"] == "oneshown\ntwo"


def test_no_server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        told = refused("--url", url)
    assert f"--url: nothing listens at {url}; a server is started with: specdec serve" in told


def test_a_server_that_speaks_no_http():
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            connection.recv(100)
            connection.sendall(b"220 mail server\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        told = refused("--url", f"http://127.0.0.1:{listening.getsockname()[1]}/v1")
        thread.join()
    assert "does not answer as an HTTP server" in told


@pytest.mark.parametrize("models", [{"data": []}, {"data": [{"name": "x"}]}, {}, [], "x"])
def test_a_server_without_models(server, models):
    url, script = server
    script.models = models
    assert "server with OpenAI's interface" in refused("--url", url)


@pytest.mark.parametrize(
    "options, told",
    [
        (("--target", "other"), "got model 'other', allowed: small"),
        (("--drafter", "abacus"), "got 'abacus', allowed: model, lookup"),
        (("--tree", "4"), "--tree: got 4 with --url, allowed: this option without --url"),
        (("--draft", "x"), "--draft: got x with --url"),
        (("--device", "cpu"), "--device: got cpu with --url"),
    ],
)
def test_options_that_do_not_fit(server, options, told):
    assert told in refused("--url", server[0], *options)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x/v1", "http://", "http://x:port/v1", "http://me:pw@x/v1"])
def test_urls(url):
    assert f"got '{url}', allowed: a URL such as http://127.0.0.1:8000/v1" in refused("--url", url)


def test_a_key_without_a_server():
    assert "--api-key: got a key, allowed: one with --url" in refused("--api-key", "x")


def test_no_model_library_is_imported(server):
    code = (
        "import sys; from specdec.cli import app; app(standalone_mode=False); "
        "assert not {'torch', 'transformers', 'fastapi'} & {*sys.modules}"
    )
    arguments = [sys.executable, "-c", code, "chat", "--url", server[0]]
    process = subprocess.run(arguments, input="x\n", capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stdout) == (0, "x\n"), process.stderr
