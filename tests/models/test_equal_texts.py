"""Greedy texts are the same however many tokens are drafted, in chains and trees, alone and in batches: of bfloat16 on
a GPU, where a token's result depends, to the last bit, on no other one; and, of few prompts, in Triton's
interpreter."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import specdec
import specdec_layers
import torch
from specdec import AdaptiveDrafts, SpeculativeDecoder, load_embedded_pair
from specdec.models.exchanged import linear, product
from specdec.models.forward.attention_choice import choose
from support.captured import on_gpu
from support.models import prompts, tiny_model

EQUAL_COSTS = [1.0] * 8
WAYS = {
    "4 drafts": {"num_drafts": 4},
    "adaptive": {"num_drafts": AdaptiveDrafts(7, costs=EQUAL_COSTS)},
    "7 nodes": {"num_drafts": 3, "tree": 7},
}


def texts(pair, asked: list[list[int]], new: int, **how) -> tuple[list[list[int]], float]:
    """What is generated, and how many tokens a step emitted."""
    decoder = SpeculativeDecoder(*pair, **how)
    assert decoder.target.attention.name == "fused"
    found = decoder.generate(asked, max_new_tokens=new, eos_token_id=[])
    assert found.drafter_error is None
    return found.tokens, found.stats.tau


@pytest.fixture(scope="module")
def on_the_gpu():
    """(target, draft), and 60 prompts: how the package's own files begin."""
    target, draft, tokenizer = load_embedded_pair(torch.bfloat16, "cuda")
    files = sorted(Path(specdec.__file__).parent.rglob("*.py"), key=lambda path: path.name)
    beginnings = [path.read_text(encoding="utf-8")[: 60 + 3 * i] for i, path in enumerate(files[:60])]
    asked = tokenizer(beginnings).input_ids
    assert len(asked) == 60
    return (target, draft), asked


@on_gpu
def test_of_60_prompts_alone(on_the_gpu):
    """With graphs, as it comes: of up to 8 tokens, all products are the kernel's for few rows."""
    pair, asked = on_the_gpu
    plain = [texts(pair, [prompt], 16, num_drafts=0)[0] for prompt in asked]
    for way, how in WAYS.items():
        found = [texts(pair, [prompt], 16, **how) for prompt in asked]
        assert [text for text, _ in found] == plain, way
        assert sum(tau for _, tau in found) > 1.3 * len(asked)  # it drafts


@on_gpu
def test_of_60_prompts_in_batches(on_the_gpu, monkeypatch):
    """Of 8 rows, whose prompts are read in one batch for each way, since how others are read is PyTorch's."""
    monkeypatch.setattr(product, "MOST_ROWS", 64)
    pair, asked = on_the_gpu
    for first in range(0, 60, 8):
        batch = asked[first : first + 8]
        plain, _ = texts(pair, batch, 16, num_drafts=0)
        for way, how in WAYS.items():
            assert texts(pair, batch, 16, **how)[0] == plain, way


# ---- the same in Triton's interpreter


def rounded(x, weight, bias=None, *others):
    """In place of the kernel of a GPU, what it has: each row for itself, summed in float32."""
    wide = [each if each is None else each.float() for each in (x, weight, bias)]
    return specdec_layers.linear(*wide, *others).to(x.dtype)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Attention, and products of 16 bits."""
    monkeypatch.setattr("specdec.models.forward.cached_model.choose", lambda model, requested: choose(model, "fused"))
    monkeypatch.setattr(product, "linear", rounded)
    monkeypatch.setattr(product, "has_kernel", lambda: True)
    monkeypatch.setattr(product, "UNIT", 16)
    for module in (product, linear):
        monkeypatch.setattr(module, "DEVICE", "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="those above have it there")
@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        (None, torch.float16),
        *(pytest.param(w, d, marks=pytest.mark.nightly) for w in WAYS for d in (torch.float32, torch.float16)),
    ],
    ids=str,
)
def test_of_few_prompts(way, dtype, as_on_a_gpu):
    """Every day two ways at once, short; the others nightly."""
    models = tiny_model("llama", layers=1), tiny_model("llama", layers=1, seed=1)
    pair = [copy.deepcopy(model).to(dtype) for model in models]
    asked, new = prompts(2, 5, 9), 3 if way is None else 5
    plain, _ = texts(pair, asked, new, num_drafts=0)
    for how in ({"num_drafts": 2}, {"num_drafts": 2, "tree": 3}) if way is None else (WAYS[way],):
        assert texts(pair, asked, new, **how)[0] == plain
    if way is not None:
        alone = texts(pair, asked[:1], new, num_drafts=0)[0]
        assert texts(pair, asked[:1], new, **WAYS[way])[0] == alone
