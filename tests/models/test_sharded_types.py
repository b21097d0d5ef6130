"""Models of all types that can be divided, over two processes, and what is built on a divided target: heads, a
job, a server."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from specdec import Scheduler, SpeculativeDecoder, load_embedded_head, load_embedded_pair
from support.commands import run
from support.ranks import group
from support.servers import service, serving
from support.sharded import check_divided

pytestmark = pytest.mark.nightly
PLANNED = (
    "cohere", "cohere2", "gemma, one key head", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_neox",
    "granite", "granitemoe", "llama", "llama, tied", "ministral", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "phi",
    "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2",
)  # fmt: skip


@pytest.fixture(scope="module")
def over_two():
    with group(2) as followers:
        yield followers


@pytest.mark.parametrize("case", PLANNED)
def test_two_processes(over_two, tmp_path, case):
    check_divided(case, 2, tmp_path)


@pytest.mark.parametrize("tree", [None, 6])
@pytest.mark.parametrize("kind", ["medusa", "eagle3", "dflash"])
def test_heads(pair, over_two, kind, tree):
    divided, results = load_embedded_pair(tp=2), []
    ids = pair[2](["def read(self, size=-1):\n", "import os"]).input_ids
    for target in (pair[0], divided[0]):
        decoder = SpeculativeDecoder(target, load_embedded_head(kind, target), num_drafts=3, tree=tree)
        results.append(decoder.generate(ids, max_new_tokens=24, eos_token_id=[]))
    assert results[0].tokens == results[1].tokens
    assert results[0].stats.accepted == results[1].stats.accepted > 0
    assert results[1].drafter_error is None


def test_a_job(over_two, tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(f'{{"prompt": "def f{i}("}}\n' for i in range(5)))
    settings = ("--rule", "coupled", "--temperature", 0.7, "--max-new-tokens", 12, "--rows", 2, "--no-progress")
    for name, more in (("one", ()), ("two", ("--tp", 2))):
        run("generate", "--batch-file", tmp_path / "in.jsonl", "--output", tmp_path / name, *settings, *more)
    assert (tmp_path / "one").read_text() == (tmp_path / "two").read_text()
    made = json.loads((tmp_path / "two.settings.json").read_text())
    assert made["rounding"]["tp"] == 2 and "tp" not in made["settings"]


def test_a_server(pair, over_two):
    texts = []

    async def ask(target, draft, tokenizer) -> str:
        def make(drafter: str, rule: str) -> Scheduler:
            return Scheduler(SpeculativeDecoder(target, draft, num_drafts=3), rule=rule, rows=2, max_length=128)

        async with serving(service(make, tokenizer)) as (_, port), httpx.AsyncClient() as client:
            body = {"model": "tiny", "prompt": "import os", "max_tokens": 16, "temperature": 0.8, "seed": 3}
            answer = await client.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
            return answer.raise_for_status().json()["choices"][0]["text"]

    for models in (pair, load_embedded_pair(tp=2)):
        texts.append(asyncio.run(ask(*models)))
    assert texts[0] == texts[1] != ""
