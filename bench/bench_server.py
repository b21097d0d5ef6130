"""The server over loopback beside a scheduler alone: tokens a second, latencies, and drafting under load.

    python bench/bench_server.py --json bench/results/server.json

README.md says how each number is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import report
import torch
import typer
from bench_lengths import PROMPT_TOKENS, spread
from jobs import Job, fixed_length, unseen_code
from measure import in_turns, ratios, summary
from specdec import AdaptiveDrafts, Request, Scheduler, SpeculativeDecoder, load_embedded_pair
from specdec.models.loading import Pair
from specdec.serving.server.address import bind
from specdec.serving.server.lanes import Lanes
from specdec.serving.server.life_cycle import Server
from specdec.serving.server.server_settings import ServerSettings
from specdec.serving.server.service import Service

CLIENTS = Path(__file__).with_name("streaming_clients.py")
ADAPTIVE, PLAIN, CAPPED = "K adapts", "plain", "K adapts, requests with num_drafts=0"
RULE = "coupled"  # the server's default: no text depends on K
ROWS = 8
NEW_TOKENS, QUICK_TOKENS = (24, 48), (12, 16)
TEXTS_OF_A_CLIENT = 1.5  # so that there are times at which not all rows are taken, and such at which clients wait
MANY, FEW = 7, 3  # rounds
OF_ALONE, OF_PLAIN = 0.9, 0.98  # goals
# What requests of a method say beside prompt, length, temperature and seed.
FIELDS = {ADAPTIVE: {"drafter": "model"}, PLAIN: {"drafter": "none"}, CAPPED: {"drafter": "model", "num_drafts": 0}}


def decoders_of(pair: Pair) -> dict[str, SpeculativeDecoder]:
    """One for each drafter of the server. A lane and the scheduler alone share it, and with it what it has learned of
    step times: they choose K by the same costs."""
    target, draft, _ = pair
    return {"model": SpeculativeDecoder(target, draft, AdaptiveDrafts()), "none": SpeculativeDecoder(target, None)}


@contextlib.contextmanager
def serving(service: Service) -> Iterator[tuple[int, int]]:
    """Yields the port of a server, and the clock of the CPU time of its event loop's thread."""
    with bind(service.settings) as bound:
        started = threading.Event()
        server = Server(service, bound, started.set)
        thread = threading.Thread(target=lambda: asyncio.run(server.run_until_signal()))
        thread.start()
        started.wait()
        try:
            assert thread.ident is not None
            yield bound.getsockname()[1], time.pthread_getcpuclockid(thread.ident)
        finally:
            server.stop()
            thread.join()


@contextlib.contextmanager
def clients() -> Iterator[Callable[[dict], dict]]:
    """Yields what has a process of clients follow a plan, and returns its answer."""
    with subprocess.Popen(
        [sys.executable, CLIENTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def ask(plan: dict) -> dict:
            print(json.dumps(plan), file=process.stdin, flush=True)
            if not (answer := process.stdout.readline()):
                raise RuntimeError("the clients failed; standard error says why")
            return json.loads(answer)

        yield ask


def body_of(request: Request, method: str) -> dict:
    assert request.params is not None
    asked = {"prompt": request.prompt, "max_tokens": request.max_new_tokens, "seed": request.seed}
    asked |= {"temperature": request.params.temperature, "ignore_eos": True, "model": "embedded"}
    return asked | {"stream": True, "stream_options": {"include_usage": True}, **FIELDS[method]}


def alone(scheduler: Scheduler, requests: list[Request], load: int) -> dict:
    """The requests through a scheduler, ``load`` of them at a time."""
    job, cpu = Job(scheduler, requests, load=load), time.process_time()
    ran = job.run()
    cpu = time.process_time() - cpu
    return {"speed": ran.speed, "server_cpu": cpu / ran.tokens, "tau": job.total.tau}


def served(ask: Callable[[dict], dict], port: int, clock: int, method: str, requests: list[Request], load: int) -> dict:
    """The requests over loopback, from ``load`` clients."""
    plan = {"port": port, "clients": load, "bodies": [body_of(request, method) for request in requests]}
    cpu, of_loop = time.process_time(), time.clock_gettime(clock)
    answer = ask(plan)
    cpu, of_loop = time.process_time() - cpu, time.clock_gettime(clock) - of_loop
    tokens = sum(tokens for _, tokens, _ in answer["texts"])
    if tokens != sum(request.max_new_tokens for request in requests):
        raise RuntimeError(f"{tokens} tokens came, which are not all that were asked for")
    came = [(asked, times) for asked, _, times in answer["texts"]]
    return {
        "speed": tokens / answer["seconds"],
        "server_cpu": cpu / tokens,
        "loop_cpu": of_loop / tokens,
        "client_cpu": answer["cpu_seconds"] / tokens,
        "first": [times[0] - asked for asked, times in came],
        "between": [b - a for _, times in came for a, b in itertools.pairwise(times)],
    }


def latency(seconds: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile: of all that were seen, that below which 99 % are."""
    ordered = sorted(seconds)
    return {"median": statistics.median(ordered), "p99": ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)]}


def measure(turns: dict[str, Callable[[], dict]], rounds: int) -> dict[str, list[dict]]:
    """What all found, by round. One round before warms up, and step times are learned in it."""
    found: dict[str, list[dict]] = {name: [] for name in turns}
    for turn, name in enumerate(in_turns([*turns], 1 + rounds)):
        gc.collect()
        result = turns[name]()
        if turn >= len(turns):
            found[name].append(result)
    return found


def judged(found: dict[str, list[dict]], load: int) -> dict:
    """A row of the results.

    Args:
        found: of "alone, METHOD" and "served, METHOD", by round.
    """
    speeds = {name: [each["speed"] for each in results] for name, results in found.items()}
    of_alone = {method: ratios(speeds[f"served, {method}"], speeds[f"alone, {method}"]) for method in (ADAPTIVE, PLAIN)}
    methods = {}
    for name, results in found.items():
        methods[name] = {"tokens_per_second": summary(speeds[name])}
        for what in ("server_cpu", "loop_cpu", "client_cpu", "tau"):
            if what in results[0]:
                methods[name][what] = summary([each[what] for each in results])
        for what in ("first", "between"):
            if what in results[0]:
                methods[name][what] = latency([seconds for each in results for seconds in each[what]])
    adaptive, plain, capped = (speeds[f"served, {method}"] for method in (ADAPTIVE, PLAIN, CAPPED))
    times_plain, num_drafts_0 = ratios(adaptive, plain), ratios(capped, plain)
    return {
        "clients": load,
        "tokens_per_second": summary(adaptive),
        "of_alone": of_alone[ADAPTIVE],
        "plain_of_alone": of_alone[PLAIN],
        "times_plain": times_plain,
        "num_drafts_0": num_drafts_0,
        "methods": methods,
        "reached": {
            f"{OF_ALONE} of the scheduler alone": of_alone[ADAPTIVE]["median"] >= OF_ALONE,
            f"num_drafts=0 {OF_PLAIN} of plain": num_drafts_0["median"] >= OF_PLAIN,
            f"adaptive {OF_PLAIN} of plain": times_plain["median"] >= OF_PLAIN,
        },
    }


def main(
    loads: Annotated[str | None, typer.Option(help="clients at a time; default: 1,8,64")] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help=f"after one to warm up; default: {MANY}, with over {ROWS} clients {FEW}")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0)] = 1.0,
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    """Measures the server on the embedded pair, over loopback."""
    numbers = report.read_integers("loads", loads or ("1,2" if quick else "1,8,64"))
    results = report.Report(
        "server",
        torch.device("cpu"),
        json_path,
        threads,
        quick=quick,
        rule=RULE,
        server_rows=ROWS,
        temperature=temperature,
    )
    pair, limits = load_embedded_pair(), QUICK_TOKENS if quick else NEW_TOKENS
    longest = PROMPT_TOKENS + max(limits)
    decoders = decoders_of(pair)

    def scheduler(drafter: str, rule: str = RULE) -> Scheduler:
        return Scheduler(decoders[drafter], rows=ROWS, max_length=longest, rule=rule)

    schedulers = {ADAPTIVE: scheduler("model"), PLAIN: scheduler("none")}
    lanes = Lanes(scheduler, [*decoders], [RULE])
    with serving(Service("embedded", pair[2], lanes, ServerSettings(port=0))) as (port, clock), clients() as ask:
        for load in numbers:
            count = load if quick else max(6, round(TEXTS_OF_A_CLIENT * load))
            requests = fixed_length(unseen_code(pair[2], [PROMPT_TOKENS] * count), spread(count, *limits), temperature)
            turns = {f"alone, {m}": partial(alone, s, requests, load) for m, s in schedulers.items()}
            turns |= {f"served, {m}": partial(served, ask, port, clock, m, requests, load) for m in FIELDS}
            results.add(judged(measure(turns, rounds or (1 if quick else FEW if load > ROWS else MANY)), load))
    columns = ("clients", "tokens_per_second", "of_alone", "plain_of_alone", "times_plain", "num_drafts_0")
    results.show("The server", results.rows, columns)
    results.finish()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    typer.run(main)
