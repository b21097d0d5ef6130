"""bench_server.py: how it judges, and what it reports."""

from __future__ import annotations

import json

import bench_server
import figures_decoding
import pytest
import streaming_clients
from bench_server import ADAPTIVE, CAPPED, PLAIN
from support.benches import run_main


def test_latencies_have_the_percentile_of_all():
    assert bench_server.latency([float(i) for i in range(200)][::-1]) == {"median": 99.5, "p99": 198.0}
    assert bench_server.latency([2.0]) == {"median": 2.0, "p99": 2.0}


@pytest.mark.parametrize(
    ("served", "capped", "reached"), [(95, 49, [True, True, True]), (80, 48, [False, False, True])]
)
def test_ratios_are_of_rounds(served, capped, reached):
    speeds = {f"alone, {ADAPTIVE}": 100, f"alone, {PLAIN}": 50, f"served, {ADAPTIVE}": served}
    speeds |= {f"served, {PLAIN}": 50, f"served, {CAPPED}": capped}
    # The second round's machine has half of the speed.
    found = {
        name: [{"speed": speed, "server_cpu": 1.0}, {"speed": speed / 2, "server_cpu": 1.0}]
        for name, speed in speeds.items()
    }
    row = bench_server.judged(found, 8)
    assert row["of_alone"]["q1"] == row["of_alone"]["q3"] == served / 100 and row["plain_of_alone"]["median"] == 1
    assert row["num_drafts_0"]["median"] == capped / 50 and [*row["reached"].values()] == reached


def test_a_response_is_read_as_it_came():
    def event(text: str, **more: object) -> bytes:
        return b"5\r\ndata: " + json.dumps({"choices": [{"text": text}], **more}).encode() + b"\n\n\r\n"

    usage = b'5\r\ndata: {"choices": [], "usage": {"completion_tokens": 7}}\n\n\r\n'
    head, end = b"HTTP/1.1 200 OK\r\n\r\n", b"5\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    came = [(1.0, head), (2.0, event("\ndata: x")), (3.0, event("b") + event("")), (4.0, event("")), (5.0, usage + end)]
    assert streaming_clients.read(came) == (7, [2.0, 3.0])


def test_it_reports(tmp_path):
    done = run_main(bench_server, "--quick", "--threads", "1", "--loads", "2", "--json", tmp_path / "server.json")
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "server.json").read_text())
    (row,) = content["rows"]
    assert content["complete"] and content["quick"] and row["clients"] == 2
    assert {*row["methods"]} == {f"alone, {m}" for m in (ADAPTIVE, PLAIN)} | {
        f"served, {m}" for m in (ADAPTIVE, PLAIN, CAPPED)
    }
    for name, method in row["methods"].items():
        assert method["tokens_per_second"]["median"] > 0 < method["server_cpu"]["median"]
        assert ("loop_cpu" in method) == ("first" in method) == ("between" in method) == name.startswith("served")
    assert "| 2 |" in figures_decoding.server({"server": content})
    assert "| 2 | plain |" in figures_decoding.server_latency({"server": content})
