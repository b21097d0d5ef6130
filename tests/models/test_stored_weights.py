"""bfloat16 weights on a CPU that compute in float32: the bits of the float32 model, half of its bytes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from specdec import PromptLookupDrafter, SpeculativeDecoder, load_model, load_pair
from specdec.models.exchanged.linear import NativeLinear
from specdec.models.exchanged.stored_weights import compute_in_float32, computing_dtype, stores_bfloat16
from specdec.models.machine.cpu_units import cpu_units
from specdec.models.supported import cached_model
from support.commands import save
from support.model_types import CASES, model_of
from support.models import prompts
from torch import nn

X86 = "processor : 0\nflags\t\t: fpu avx2 f16c avx512f {}\nbugs : none\n"
ARM = "processor : 0\nFeatures\t: fp asimd {} i8mm\n"
# Tied and own heads; biases; a scaled embedding; experts; states; layers that are no nn.Linear.
EVERY_DAY = ("llama", "qwen2", "gemma3_text", "mixtral", "nemotron_h", "gpt2", "qwen3_5_text")


@pytest.mark.parametrize(
    ("content", "units"),
    [
        (X86.format(""), ("AVX2", "AVX-512")),
        (X86.format("avx512_bf16 amx_bf16"), ("AVX2", "AVX-512", "AVX512-BF16", "AMX-BF16")),
        (ARM.format("bf16"), ("NEON", "Arm BF16")),
        (ARM.format(""), ("NEON",)),
        (None, ()),
    ],
)
def test_units_of_the_cpu(content, units, tmp_path):
    if content is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc" / "cpuinfo").write_text(content)
    assert cpu_units(tmp_path) == units


@pytest.fixture
def folder(pair, tmp_path) -> Path:
    """A model that was saved in bfloat16."""
    folder = save(tmp_path / "model", 0, tokenizer=pair[2])
    load_model(folder, "bfloat16").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", [c if c in EVERY_DAY else pytest.param(c, marks=pytest.mark.nightly) for c in CASES])
def test_every_bit_is_that_of_float32(case):
    """Of steps, prompts and whole forwards."""
    model = copy.deepcopy(model_of(case)).bfloat16()
    plain, stored = copy.deepcopy(model).float(), compute_in_float32(copy.deepcopy(model))
    assert stores_bfloat16(stored) and stored.dtype == computing_dtype(stored) == torch.float32
    assert type(stored).__name__ == type(plain).__name__ and type(stored).__module__ == type(plain).__module__
    ids = prompts(2, 5, 30, seed=3)
    read: list[list[torch.Tensor]] = []
    with torch.inference_mode():
        for m in (stored, plain):
            cached, logits = cached_model(m, "target"), list[torch.Tensor]()
            cached.prefill(cached.new_cache(2, 64), ids, lambda i, start, own, to=logits: to.append(own))
            read.append(logits)
        fed = torch.tensor(ids[:1])
        torch.testing.assert_close(stored(fed).logits, plain(fed).logits, atol=2e-4, rtol=1e-3)
    assert all(torch.equal(*pair) for pair in zip(*read, strict=True))
    texts = [
        SpeculativeDecoder(m, PromptLookupDrafter(), 3).generate(ids, max_new_tokens=20, eos_token_id=[]).tokens
        for m in (stored, plain)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("case", ["llama, tied", "gemma3_text"])
def test_only_what_is_read_in_steps_stays_narrow(case):
    stored = compute_in_float32(copy.deepcopy(model_of(case)).bfloat16())
    narrow = {id(p) for p in stored.parameters() if p.dtype == torch.bfloat16}
    assert narrow == {id(m.weight) for m in stored.modules() if isinstance(m, nn.Linear | nn.Embedding)}
    assert {type(m) for m in stored.modules() if isinstance(m, nn.Linear)} == {NativeLinear}
    assert (stored.lm_head.weight is stored.model.embed_tokens.weight) == (case == "llama, tied")
    assert not any(b.dtype == torch.bfloat16 for b in stored.buffers())


def test_weights_that_other_code_reads_are_float32():
    """Of Jamba a layer multiplies by its projection's weight, and Mamba-2 rounds to the dtype of its head's."""
    jamba, mamba = (compute_in_float32(copy.deepcopy(model_of(case)).bfloat16()) for case in ("jamba", "mamba2"))
    kinds = {name.split(".")[-2]: p.dtype for name, p in jamba.named_parameters() if name.endswith("proj.weight")}
    assert kinds["dt_proj"] == torch.float32 and kinds["in_proj"] == kinds["q_proj"] == torch.bfloat16
    assert mamba.lm_head.weight.dtype == torch.float32


def test_experts_that_do_not_fit(monkeypatch):
    model = copy.deepcopy(model_of("mixtral")).bfloat16()
    monkeypatch.setattr("specdec.models.exchanged.stored_weights.free_memory", lambda _: 1000)
    with pytest.warns(RuntimeWarning, match="would take .* linear layers, where 1000 bytes are free; .* bf"):
        assert compute_in_float32(model) is model
    assert model.dtype == torch.bfloat16 and {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert NativeLinear not in {type(m) for m in model.modules()}


def test_a_deeper_look_at_it():
    """As the checks of near-ties take a copy in float64, and training one in float32."""
    stored = compute_in_float32(copy.deepcopy(model_of("gemma3_text")).bfloat16())
    ids, plain = torch.arange(5)[None], copy.deepcopy(model_of("gemma3_text")).bfloat16().double()
    wide = copy.deepcopy(stored).double()
    with torch.no_grad():
        assert wide.dtype == torch.float64 and torch.equal(wide(ids).logits, plain(ids).logits)
    trained = copy.deepcopy(stored).float().train()
    trained(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.dtype == torch.float32 for p in trained.parameters())


def test_loading(folder):
    model = load_model(folder)
    assert stores_bfloat16(model) and model.dtype == torch.float32
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
    assert all(stores_bfloat16(m) for m in load_pair(folder, folder)[:2])
    for dtype in ("float32", "float64"):
        assert {p.dtype for p in load_model(folder, dtype).parameters()} == {getattr(torch, dtype)}
    assert {p.dtype for p in load_model(folder, "bfloat16").parameters()} == {torch.bfloat16}
    load_model(folder, "float16").save_pretrained(folder)
    assert load_model(folder).dtype == torch.float16


def test_it_can_be_saved_again(folder, tmp_path):
    load_model(folder).save_pretrained(tmp_path / "again")
    again = load_model(tmp_path / "again")
    assert type(again).__name__ == type(load_model(folder)).__name__
    with torch.inference_mode():
        ids = torch.arange(6)[None]
        torch.testing.assert_close(again(ids).logits, load_model(folder)(ids).logits, atol=2e-5, rtol=1e-4)


def test_without_native_code_all_of_it_is_float32(folder, monkeypatch):
    monkeypatch.setattr("specdec.models.exchanged.stored_weights.has_native", lambda: False)
    assert {p.dtype for p in load_model(folder).parameters()} == {torch.float32}
