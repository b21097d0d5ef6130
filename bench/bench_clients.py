"""Many clients of a server at a time, of whom all, half or none want a text that obeys a JSON Schema, beside the first
of them one at a time: the server's throughput, what was lost, and whether a text depends on who else is there.

    python bench/bench_clients.py real_models/SmolLM2-135M-Instruct --json bench/results/cpu/clients.json

The crowds have their turns in every round. A free text has as many tokens as the text of the same client that obeys.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx
import jsonschema
import report
import torch
import typer
from json_schemas import Schema, schemas
from measure import ratios, summary

CROWDS = {"free": lambda i: False, "half": lambda i: i % 2 == 1, "grammars": lambda i: True}  # who has a grammar
ALONE = "one at a time"  # an eighth of the free ones, each after the other
MODEL = "asked"  # its name
SECONDS = 900.0  # that a client waits, at most


class Text(NamedTuple):
    content: str
    tokens: int
    whole: bool  # it ended by itself


@contextmanager
def server(target: str, *options: object) -> Iterator[str]:
    """Its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "specdec", "serve", "--target", target, "--port", str(port)]
    command += ["--name", MODEL, *map(str, options)]
    process, url = subprocess.Popen(command, stderr=subprocess.DEVNULL), f"http://127.0.0.1:{port}"
    try:
        while not is_ready(url):
            if process.poll() is not None:
                raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").is_success
    except httpx.TransportError:
        return False


def is_valid(text: str, schema: Schema) -> bool:
    """Whether it parses and validates, formats included."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).is_valid(value)


async def ask(client: httpx.AsyncClient, number: int, schema: Schema, tokens: int | None, most: int) -> Text | None:
    """``tokens``: how many a free text has; None: it obeys the schema. None is returned where there was no answer."""
    question = f"Write one example of JSON for the schema of client {number}."
    body: dict[str, Any] = {"messages": [{"role": "user", "content": question}]}
    body |= {"model": MODEL, "temperature": 1, "seed": number}
    if tokens is None:
        form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
        body |= {"response_format": form, "max_tokens": most}
    else:
        body |= {"max_tokens": tokens, "ignore_eos": True}
    answer = await client.post("/v1/chat/completions", json=body)
    if answer.status_code != 200:
        return None
    whole = answer.json()
    choice = whole["choices"][0]
    return Text(choice["message"]["content"], whole["usage"]["completion_tokens"], choice["finish_reason"] == "stop")


async def crowd(
    url: str, asked: Sequence[Schema], has_grammar: Any, lengths: Sequence[int], most: int, at_once: int | None = None
) -> tuple[list[Text | None], float]:
    """All texts, and the seconds that they took together. ``at_once``: clients at a time; None: all."""
    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS, limits=limits) as client:
        began = time.perf_counter()
        free = [None if has_grammar(i) else lengths[i] for i in range(len(asked))]
        texts = await asyncio.gather(*(ask(client, i, s, free[i], most) for i, s in enumerate(asked)))
        return texts, time.perf_counter() - began


def main(
    target: Annotated[str, typer.Argument(help="a model with a chat template")],
    clients: Annotated[int, typer.Option(min=1)] = 64,
    rows: Annotated[int, typer.Option(min=1, help="of the server")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="of each text")] = 200,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    clients, rounds, max_new_tokens = (4, 1, 30) if quick else (clients, rounds, max_new_tokens)
    results = report.Report(
        "clients", torch.device("cpu"), json_path, None, quick=quick, target=Path(target).name, clients=clients,
        server_rows=rows, max_new_tokens=max_new_tokens,
    )  # fmt: skip
    asked = schemas(clients)
    speeds: dict[str, list[float]] = {name: [] for name in (ALONE, *CROWDS)}
    counts = {name: dict.fromkeys(("lost", "obeying", "whole", "valid", "changed"), 0) for name in speeds}
    with server(target, "--rows", rows, "--max-waiting", clients) as url:
        first, _ = asyncio.run(crowd(url, asked, CROWDS["grammars"], [], max_new_tokens))
        lengths = [1 if text is None else text.tokens for text in first]
        for _ in range(rounds):
            few, free = asked[: max(clients // 8, 1)], CROWDS["free"]
            texts, seconds = asyncio.run(crowd(url, few, free, lengths, max_new_tokens, at_once=1))
            speeds[ALONE].append(sum(text.tokens for text in texts if text is not None) / seconds)
            counts[ALONE]["lost"] += texts.count(None)
            for name, has_grammar in CROWDS.items():
                texts, seconds = asyncio.run(crowd(url, asked, has_grammar, lengths, max_new_tokens))
                speeds[name].append(sum(text.tokens for text in texts if text is not None) / seconds)
                count = counts[name]
                count["lost"] += texts.count(None)
                for i in (i for i in range(clients) if has_grammar(i)):
                    text = texts[i]
                    count["obeying"] += 1
                    count["changed"] += text != first[i]
                    if text is not None:
                        count["whole"] += text.whole
                        count["valid"] += is_valid(text.content, asked[i])
    for name, mine in speeds.items():
        beside = {"times_alone": ratios(mine, speeds[ALONE]), "of_free": ratios(mine, speeds["free"])}
        results.add({"crowd": name, "tokens_per_second": summary(mine), **beside, **counts[name]})
    results.show(f"{Path(target).name}, {clients} clients, {rows} rows", results.rows, tuple(results.rows[0]))
    results.finish()


if __name__ == "__main__":
    typer.run(main)
