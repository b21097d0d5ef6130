"""The heads that tools/ trains: what they learn in, and what ``load_head`` makes of their files."""

from __future__ import annotations

import importlib
import json

import pytest
import torch
from safetensors.torch import save_file
from specdec import SpeculativeDecoder, load_head
from support import ROOT
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH = 96, 40


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "dflash"])
def test_a_head_learns_and_its_files_load(monkeypatch, tmp_path, target, kind):
    """After some steps on one text most of its tokens are the target's, in training and in drafting, which are the same
    network."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    layers, module = (importlib.import_module(f"heads.{name}") for name in ("layers", kind))
    torch.manual_seed(1)
    with torch.no_grad():
        tokens = target.generate(
            torch.randint(VOCABULARY, (1, 8)), max_new_tokens=LENGTH - 8, do_sample=False, eos_token_id=-1
        )
        told = target(tokens, output_hidden_states=True)
    embedding = target.get_input_embeddings().weight.detach()
    lesson = layers.Lesson(tokens, told.hidden_states, told.logits, embedding)
    monkeypatch.setattr(module, "ANCHORS", 20, raising=False)
    head = getattr(module, kind.capitalize())(target.config, embedding, torch.arange(VOCABULARY))
    optimiser, chance = torch.optim.Adam(head.parameters(), 5e-3), torch.Generator().manual_seed(2)
    for _ in range(60):
        loss, hits = head.learn(lesson, chance)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert min(hits) > 0.7, hits
    assert all(parameter.grad is not None for parameter in head.parameters())
    save_file({name: tensor.contiguous() for name, tensor in head.tensors().items()}, tmp_path / head.file)
    (tmp_path / "config.json").write_text(json.dumps(head.config()))
    decoder = SpeculativeDecoder(target, load_head(tmp_path, target, check=False), num_drafts=3)
    result = decoder.generate([tokens[0, :8].tolist()], max_new_tokens=LENGTH - 8, eos_token_id=[])
    assert result.tokens[0] == tokens[0, 8:].tolist()
    assert result.stats.acceptance_rate > 0.6
