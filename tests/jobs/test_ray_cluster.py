"""Jobs, pipelines and servers on a cluster of Ray: three nodes on this machine. They take minutes and gigabytes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from specdec import SpeculativeDecoder
from specdec.detokenize import continuation
from support import ROOT, killed_jobs
from support.jobs import finished

pytestmark = pytest.mark.nightly
PROMPTS, CLIENTS = 1000, 64
OPTIONS = ("--temperature", 0.8, "--rule", "coupled", "--max-length", 128)
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'python'}:{ROOT}", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture
def cluster() -> Iterator:
    """A head that decodes nothing, and two nodes with a CPU each."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PYTHONPATH", "RAY_USAGE_STATS_ENABLED"):
            patch.setenv(name, ENVIRONMENT[name])
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        cluster.workers = [cluster.add_node(num_cpus=1) for _ in range(2)]
        yield cluster
        cluster.shutdown()


def start(prompts, output, address: str) -> subprocess.Popen:
    command = ["generate", "--batch-file", prompts, "--output", output, "--ray", address, "--rows", 4, *OPTIONS]
    return subprocess.Popen([sys.executable, "-m", "specdec", *map(str, command)], env=ENVIRONMENT, cwd=output.parent)


def wait_for(output, lines: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 600
    while killed_jobs.number_of_lines(output) < lines:
        assert process.poll() is None and time.monotonic() < deadline, killed_jobs.number_of_lines(output)
        time.sleep(0.05)


def test_a_job_that_loses_a_node_and_then_its_driver(cluster, tmp_path):
    """Every prompt has one line, and it is that of a process alone."""
    prompts = killed_jobs.write_prompts(tmp_path / "prompts.jsonl", PROMPTS)
    output = tmp_path / "out.jsonl"
    driver = start(prompts, output, cluster.address)
    wait_for(output, 100, driver)
    cluster.remove_node(cluster.workers[1], allow_graceful=False)
    wait_for(output, killed_jobs.number_of_lines(output) + 200, driver)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    left = killed_jobs.number_of_lines(output)
    assert 300 <= left < PROMPTS
    cluster.add_node(num_cpus=1)
    assert start(prompts, output, cluster.address).wait() == 0
    lines = sorted(output.read_bytes().splitlines(keepends=True))
    assert len(lines) == PROMPTS and lines == finished(prompts, tmp_path / "alone.jsonl", *OPTIONS)


def test_a_node_with_another_model_is_told(cluster, tmp_path, pair):
    """It would write other texts under the same name."""
    folder = tmp_path / "target"
    pair[0].save_pretrained(folder)
    pair[2].save_pretrained(folder)
    prompts, output = killed_jobs.write_prompts(tmp_path / "prompts.jsonl", 8), tmp_path / "out.jsonl"
    code = (
        "import sys, pathlib; from specdec.cli import ray_job; checked = ray_job.Checked.__init__\n"
        "def other(self, at, drafts, options, settings):\n"
        "    checked(self, at, drafts, options, settings | {'target': 'another one'})\n"
        "ray_job.Checked.__init__ = other\n"
        "from specdec.cli import main; main()"
    )
    command = ["generate", "--batch-file", prompts, "--output", output, "--ray", cluster.address, "--target", folder]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, command)], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode and "this node has others than the job began with: target:" in done.stderr
    assert not output.exists()


def test_a_pipeline_from_parquet_to_parquet(cluster, tmp_path):
    """As docs/jobs.md has it."""
    code = f"""
import pyarrow, pyarrow.parquet, ray
from specdec.ray import Decoder
ray.init({cluster.address!r})
rows = [dict(id=i, prompt=f"def f{{i}}(", answer=i * 0.5) for i in range(40)]
pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), {str(tmp_path / "in.parquet")!r})
dataset = ray.data.read_parquet({str(tmp_path / "in.parquet")!r}, override_num_blocks=4)
settings = dict(max_new_tokens=8, temperature=1.0)
decoded = dataset.map_batches(
    Decoder, fn_constructor_kwargs=dict(defaults=settings, rule="coupled", rows=4), batch_size=8,
    batch_format='pyarrow',
    compute=ray.data.ActorPoolStrategy(size=1, max_concurrent_calls_per_actor=2), num_cpus=1,
)
decoded.write_parquet({str(tmp_path / "out")!r})
"""
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True)
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(tmp_path / "out").to_pylist()
    assert sorted(row["id"] for row in rows) == list(range(40))
    assert all(row["answer"] == row["id"] * 0.5 and len(row["token_ids"]) == 8 for row in rows)
    prompts = tmp_path / "same.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"def f{i}(", "seed": 0}) + "\n" for i in range(40)))
    options = ("--max-new-tokens", 8, "--temperature", 1, "--rule", "coupled")
    alone = {row["prompt"]: row["text"] for row in map(json.loads, finished(prompts, tmp_path / "out.jsonl", *options))}
    assert {row["id"]: row["text"] for row in rows} == alone


def test_two_replicas_of_the_server_of_which_one_is_killed(cluster, pair):
    """The texts of the other one are right, and whoever comes afterwards is answered."""
    import httpx
    import ray
    from ray import serve
    from specdec.ray import serve_app

    decoder = SpeculativeDecoder(pair[0], None)
    prompts = [f"{killed_jobs.BEGINNINGS[i % 8]}{i}" for i in range(CLIENTS)]
    asked = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True, "model": "specdec-embedded"}
    ids = [pair[2](prompt).input_ids for prompt in prompts]
    alone = [decoder.generate([own], max_new_tokens=60, eos_token_id=[]).tokens[0] for own in ids]
    texts = [continuation(pair[2], own, tokens) for own, tokens in zip(ids, alone, strict=True)]

    async def stream(client, prompt: str, begun: list[int]) -> str | None:
        """The whole text; None: the connection broke."""
        text, done = "", False
        try:
            async with client.stream("POST", "/v1/completions", json=asked | {"prompt": prompt}) as answer:
                assert answer.status_code == 200, await answer.aread()
                async for line in answer.aiter_lines():
                    done |= line == "data: [DONE]"
                    if line.startswith("data: {"):
                        choices = json.loads(line[6:]).get("choices") or [{"text": ""}]
                        text += choices[0]["text"]
                        begun.append(1)
        except httpx.TransportError:
            return None
        return text if done else None

    async def main(kill) -> list[str | None]:
        begun: list[int] = []
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300, limits=limits) as client:
            tasks = [asyncio.create_task(stream(client, prompt, begun)) for prompt in prompts]
            while kill is not None and len(begun) < CLIENTS:
                await asyncio.sleep(0.01)
            if kill is not None:
                kill()
            return await asyncio.gather(*tasks)

    def kill() -> None:
        names = ray.util.list_named_actors(all_namespaces=True)
        replicas = [name for name in names if name["name"].startswith("SERVE_REPLICA")]
        assert len(replicas) == 2
        ray.kill(ray.get_actor(replicas[0]["name"], namespace=replicas[0]["namespace"]))

    ray.init(cluster.address, log_to_driver=False)
    try:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        serve.start(http_options={"port": port})
        serve.run(serve_app(rows=8, drafter=["model"], replicas=2))
        assert asyncio.run(main(None)) == texts
        found = asyncio.run(main(kill))
        kept = [i for i, text in enumerate(found) if text is not None]
        assert 0 < len(kept) < CLIENTS and all(found[i] == texts[i] for i in kept)
        assert asyncio.run(main(None)) == texts
    finally:
        serve.shutdown()
        ray.shutdown()
