"""``specdec serve``: its options, and one process that serves, drains and ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from specdec.cli import app, serve_command, served
from specdec.cli.drafters import TREE_DRAFTS
from specdec.cli.models import ModelOptions
from specdec.cli.options import MachineOptions
from specdec.cli.serve_command import CapacityOptions
from specdec.cli.served import ServedDrafts
from specdec.loop.draft_length import DEFAULT_DRAFTS, AdaptiveDrafts
from specdec.serving.server.server_settings import ServerSettings
from support.commands import invoke, refused, run
from typer.main import get_command

KEY = "a-key-of-the-test"


def test_help_is_grouped_and_whole():
    command = get_command(app).commands["serve"]
    text = run("serve", "--help").stdout
    headings = re.findall("^([A-Z].*):$", text, re.MULTILINE)
    groups = dict.fromkeys(param.rich_help_panel for param in command.params)
    assert headings == [*groups, "Other"] and len(headings) == 8
    assert all(max(param.opts, key=len) in text for param in command.params)
    assert text.index("Access:") < text.index("--api-key") < text.index("Limits of requests")


@pytest.mark.parametrize(
    "options, words",
    [
        (["--host", "0.0.0.0"], "--host: got '0.0.0.0', which other machines can reach, without an API key"),
        (["--api-key", "a"], "--api-key: got a key that is too short, allowed: 8 to 1024 characters"),
        (["--api-key", "k" * 1025], "--api-key: got a key that is too long, allowed: 8 to 1024 characters"),
        (["--api-key", "a key with blanks"], "--api-key: got a key with other characters, allowed: visible ASCII"),
        (["--api-key-file", "/nowhere"], "--api-key-file: got '/nowhere' (FileNotFoundError)"),
        (["--cors-origin", "*"], "--cors-origin: got '*' without an API key"),
        (["--port", "70000"], "--port: got 70000, allowed: 0 to 65535"),
        (["--max-body-bytes", "0"], "--max-body-bytes: got 0"),
        (["--write-seconds", "0"], "--write-seconds: got 0"),
        (["--requests-per-minute", "0"], "--requests-per-minute: got 0, allowed: an integer >= 1"),
        (["--ssl-certfile", "/nowhere"], "--ssl-certfile: got '/nowhere'"),
        (["--ssl-keyfile", "/nowhere"], "--ssl-keyfile: got '/nowhere', allowed: with ssl_certfile"),
        (["--response-template", "/nowhere"], "--response-template: got '/nowhere' (FileNotFoundError)"),
        (["--rows", "0"], "--rows: got 0, allowed: an integer >= 1"),
        (["--cache-tokens", "9", "--cache-bytes", "9MB"], "--cache-tokens / --cache-bytes: got both"),
        (["--rule", "walk"], "--rule: got walk, allowed: each once: coupled, token, block"),
        (["--drafter", "nobody"], "--drafter: got 'nobody'"),
        (["-k", "many"], "--num-drafts: got many"),
    ],
)
def test_refused_options(options, words):
    assert words in refused("serve", "--port", "0", *options).replace("Invalid value for ", "")


def test_keys_come_from_everywhere_and_never_from_nowhere(tmp_path: Path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("key-of-the-file\n\nother-of-the-file\nkey-of-the-line\n")
    assert serve_command.read_keys(["key-of-the-line"], file) == (
        "key-of-the-line",
        "key-of-the-file",
        "other-of-the-file",
    )
    assert serve_command.read_keys(None, None) == ()
    file.write_text("\n")
    assert "without a key" in refused("serve", "--port", "0", "--api-key-file", file)
    monkeypatch.setenv("SPECDEC_SERVE_API_KEY", "")
    assert "SPECDEC_SERVE_API_KEY: got no key" in refused("serve", "--port", "0")
    monkeypatch.setenv("SPECDEC_SERVE_API_KEY", "a-good-key bad")
    assert "--api-key: got a key that is too short" in refused("serve", "--port", "0")
    monkeypatch.setenv("SPECDEC_SERVE_ROWS", "0")
    monkeypatch.delenv("SPECDEC_SERVE_API_KEY")
    assert "--rows: got 0" in refused("serve", "--port", "0")


def test_a_response_template_is_read_from_a_file(pair, tmp_path: Path):
    file = tmp_path / "template.json"
    call = {"open": "CALL", "close": "END", "content": "json"}
    template = {"start_anchor": "A:", "fields": {"content": {}, "tool_calls": call}}
    for told in (template, {"response_template": template, "model_max_length": 9}):
        file.write_text(json.dumps(told))
        assert served.read_template(file) == template
    for told, words in (([], "without an object"), ({"fields": {}}, "one that cannot be used (response_template: ")):
        file.write_text(json.dumps(told))
        assert words in refused("serve", "--port", "0", "--device", "cpu", "--response-template", file)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(serve_command, "find_spec", lambda name: None if name == "uvicorn" else object())
    result = invoke("serve")
    assert result.exit_code == 2 and 'uvicorn is missing: pip install "specdec-kernels[serve]"' in result.stderr


def test_defaults_of_drafting(pair):
    assert served.drafts_of("auto", "coupled", None) == AdaptiveDrafts()
    for rule in ("token", "block"):
        assert served.drafts_of("auto", rule, None) == DEFAULT_DRAFTS and DEFAULT_DRAFTS.fixed == 4
    assert served.drafts_of("3", "token", None) == 3
    assert served.drafts_of("auto", "coupled", 8) == TREE_DRAFTS
    capacity = CapacityOptions(rows=2, max_length=64, prefill_chunk=16, max_waiting=5, prefix_reuse="rounding")
    scheduling = capacity.scheduling()
    assert "prefix_reuse" not in CapacityOptions().scheduling()

    def made(**changes):
        at, drafts = ModelOptions(machine=MachineOptions(device="cpu")), ServedDrafts(**changes)
        return served.make_service(at, drafts, scheduling, ServerSettings())

    lanes = made().lanes
    assert lanes.drafters == ["model", "none", "lookup", "suffix", "eagle3", "medusa", "dflash"]
    assert lanes.rules == ["coupled", "token", "block"]
    scheduler = lanes._make("suffix", "token")
    assert scheduler.max_waiting == 5 and scheduler.max_length == 64 and len(scheduler.batch.sequences) == 2
    assert scheduler.batch.config.prefix_reuse == "rounding"
    memories = scheduler.decoder.drafter.drafter.memory
    assert memories is lanes._make("suffix", "coupled").decoder.drafter.drafter.memory and memories.max_owners == 1
    assert "none" not in made(tree=8).lanes.drafters
    some = made(drafter=["lookup", "none"], rule=["block"]).lanes
    assert (some.drafters, some.rules) == (["lookup", "none"], ["block"])


class Process:
    """``specdec serve`` with its log."""

    def __init__(self, *options: str, **environment: str):
        self.lines: list[dict] = []
        self.running = subprocess.Popen(
            [sys.executable, "-m", "specdec", "serve", "--device", "cpu", "--log-format", "json", *options],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.running.stderr:
            if line.startswith("{"):  # and not torch's own warnings
                self.lines.append(json.loads(line))

    def wait_for(self, message: str, seconds: float = 120) -> dict:
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.running.poll() is None:
            for line in self.lines:
                if line["message"] == message:
                    return line
            time.sleep(0.05)
        raise AssertionError(f"no line {message!r}: {self.lines}")

    def end(self) -> None:
        self.running.kill()
        self.running.wait()
        self._reader.join()
        self.running.stderr.close()


def test_a_process_from_its_start_to_a_second_signal():
    """Takes 10 s, nearly all of them for the start of the process."""
    process = Process("--rows", "2", "--max-length", "1024", SPECDEC_SERVE_PORT="0", SPECDEC_SERVE_API_KEY=KEY)
    try:
        told = process.wait_for("serving")
        assert (told["model"], told["device"], told["rows"], told["cache_tokens"]) == (
            "specdec-embedded",
            "cpu",
            2,
            2048,
        )
        assert told["cache_bytes"] > 0 and told["drafters"][0] == "model" and told["rules"][0] == "coupled"
        asked = subprocess.run(
            told["curl"], shell=True, env=os.environ | {"SPECDEC_SERVE_API_KEY": KEY}, capture_output=True, check=True
        )
        answer = json.loads(asked.stdout)
        assert answer["choices"][0]["text"] and answer["usage"]["completion_tokens"] > 0
        logged = process.wait_for("request")  # probes have no line
        assert logged["status"] == 200 and logged["completion_tokens"] == answer["usage"]["completion_tokens"]
        with httpx.Client(base_url=told["url"], headers={"Authorization": f"Bearer {KEY}"}) as client:
            assert httpx.get(told["url"] + "/v1/models").status_code == 401
            body = {"model": told["model"], "prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}
            body["n"] = 40  # on two rows, so that it does not end before the test
            with client.stream("POST", "/v1/completions", json=body) as stream:
                parts = stream.iter_raw()  # kept, or the response would be closed
                next(parts)
                process.running.send_signal(signal.SIGTERM)
                assert process.wait_for("draining")["open"] == 1
                assert client.get("/ready").status_code == 503
                assert process.running.poll() is None
                process.running.send_signal(signal.SIGTERM)
                assert process.running.wait(timeout=5) == -signal.SIGTERM
        text = json.dumps([line for line in process.lines if line is not told])
        assert KEY not in text and "def read" not in text
    finally:
        process.end()
