"""Models of all types that can be divided, over two and four processes, and what is built on a divided target: heads, a
job, a server."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
import torch
from specdec import Scheduler, SpeculativeDecoder, load_embedded_head, load_embedded_pair, load_model
from support.commands import run
from support.model_types import CASES, draw_wide
from support.models import generate, prompts
from support.ranks import group
from support.servers import service, serving
from support.texts import assert_same_greedy
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from specdec_kernels import SamplingParams

pytestmark = pytest.mark.nightly
PLANNED = (
    "cohere", "cohere2", "gemma, one key head", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_neox",
    "granite", "granitemoe", "llama", "llama, tied", "ministral", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "phi",
    "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2",
)  # fmt: skip
OVER_FOUR = ("gemma2", "llama", "qwen3")


@pytest.fixture(scope="module")
def over_two():
    with group(2) as followers:
        yield followers


@pytest.fixture(scope="module")
def over_four():
    with group(4) as followers:
        yield followers


def check(case: str, tp: int, folder) -> None:
    kind, settings = CASES[case]
    few = {"num_key_value_heads": max(2, tp)} if "num_key_value_heads" in settings else {}
    torch.manual_seed(0)
    draw_wide(AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**settings, **few}))).save_pretrained(folder)
    one, two = load_model(folder, "float32"), load_model(folder, "float32", tp=tp)
    asked = prompts(3, 5, 40, seed=1)
    for more in ({}, {"tree": 5}):
        results = [generate(m, draft=one, ids=asked, max_new_tokens=16, output_logits=True, **more) for m in (one, two)]
        for i, prompt in enumerate(asked):
            expected, got = (result.tokens[i] for result in results)
            assert_same_greedy(one, prompt, got, expected)
            if got == expected:
                expected, got = (result.logits[i] for result in results)
                assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("case", PLANNED)
def test_two_processes(over_two, tmp_path, case):
    check(case, 2, tmp_path)


@pytest.mark.parametrize("case", OVER_FOUR)
def test_four_processes(over_four, tmp_path, case):
    check(case, 4, tmp_path)


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


def test_memory_that_runs_out_on_one_rank_ends_all(tmp_path):
    """In a group of its own: nothing is decoded after it. No rank tries again alone, with fewer tokens."""
    from specdec.models.channel import RanksParted

    with group(2) as followers:
        target, draft, _ = load_embedded_pair(tp=2)
        decoder = SpeculativeDecoder(target, draft, num_drafts=2)
        assert decoder.generate([[1, 2, 3]], max_new_tokens=4, params=SamplingParams(0.0)).tokens

        def full(*_):
            raise torch.OutOfMemoryError("out of memory")

        target.model.layers[1].self_attn.o_proj.forward = full  # where the other one waits for a sum
        with pytest.raises(RanksParted, match="rank 0 failed: OutOfMemoryError: out of memory"):
            decoder.generate([[1, 2, 3]], max_new_tokens=4)
        assert followers[0].wait(15) == 1
