"""Scaled positions of GGUF files: what transformers computes for the same model, and what llama.cpp does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from specdec import load_model
from specdec.models.load.gguf.convert import convert_gguf
from specdec.models.load.gguf.rope import LLAMA3, LONG, SHORT
from specdec.models.load.loading import read_config
from support.gguf_files import write_gguf
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
OF_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
HALF = {**OF_YARN, "attention_factor": 0.5 * (1 + 0.1 * math.log(4))}
LLAMA31 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def frequencies(model: Any) -> dict[str, Any]:
    (rope,) = (m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding"))
    scales = {name: value for name, value in vars(rope).items() if name.endswith("attention_scaling")}
    return {**dict(rope.named_buffers()), **scales}


def divisors(factor: float, pairs: int, theta: float) -> np.ndarray:
    """As llama.cpp's converter writes them for Llama 3.1."""
    found = []
    for frequency in theta ** -(np.arange(pairs) / pairs):
        turns = LLAMA31["original_max_position_embeddings"] * frequency / (2 * math.pi)
        smooth = (turns - LLAMA31["low_freq_factor"]) / (LLAMA31["high_freq_factor"] - LLAMA31["low_freq_factor"])
        found.append(1 / ((1 - (s := min(max(smooth, 0), 1))) / factor + s))
    return np.array(found, np.float32)


def long_and_short(pairs: int) -> dict[str, np.ndarray]:
    return {LONG: np.linspace(1, 9, pairs, dtype=np.float32), SHORT: np.linspace(1, 2, pairs, dtype=np.float32)}


@pytest.mark.parametrize(
    ("kind", "metadata", "tensors", "meant"),
    [
        ("llama", LINEAR, {}, {"rope_type": "linear", "factor": 4.0}),
        ("gemma3_text", {"rope.scaling.factor": 8.0}, {}, {"rope_type": "linear", "factor": 8.0}),
        ("qwen2", YARN, {}, OF_YARN),
        ("qwen3", {**YARN, "rope.scaling.yarn_beta_fast": 16.0}, {}, {**OF_YARN, "beta_fast": 16.0}),
        ("llama", {**YARN, "rope.scaling.attn_factor": 0.5}, {}, HALF),
        ("llama", {}, {LLAMA3: divisors(32, 8, 5e4)}, {"rope_type": "llama3", "factor": 32.0, **LLAMA31}),
        ("llama", {}, {LLAMA3: np.ones(8, np.float32)}, {}),
        ("llama", {**LINEAR, "rope.scaling.type": "none"}, {}, {}),
        ("phi3", {"rope.dimension_count": 4}, {}, {"partial_rotary_factor": 0.5}),
        (
            "phi3",
            {"rope.scaling.attn_factor": 1.25, "rope.scaling.original_context_length": 64},
            long_and_short(4),
            {"rope_type": "longrope", "attention_factor": 1.25, "original_max_position_embeddings": 64}
            | {"long_factor": np.linspace(1, 9, 4).tolist(), "short_factor": np.linspace(1, 2, 4).tolist()},
        ),
    ],
)  # fmt: skip
def test_it_is_transformers_own(kind, metadata, tensors, meant, tmp_path):
    written = write_gguf(tmp_path / "model.gguf", kind, metadata, tensors)
    parameters = written.config.to_dict()["rope_parameters"]
    parameters.get("full_attention", parameters).update(meant)
    config = AutoConfig.for_model(**{**written.config.to_dict(), "rope_parameters": parameters})
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    theirs.load_state_dict(written.state_dict())
    ours = load_model(tmp_path / "model.gguf")
    ours.set_attn_implementation("eager")
    convert_gguf(tmp_path / "model.gguf", tmp_path / "folder")
    for model in (ours, load_model(tmp_path / "folder")):
        found, wanted = frequencies(model), frequencies(theirs)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=0, msg=name)
    ids = torch.arange(40)[None] + 3
    with torch.inference_mode():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)
        plain = written(ids).logits
        assert torch.allclose(ours(ids).logits, plain, rtol=1e-3, atol=1e-3) != bool(meant)


def test_llama_3_is_what_the_file_says(tmp_path):
    """llama.cpp divides each frequency by the file's number."""
    written = divisors(8, 8, 5e4)
    write_gguf(tmp_path / "model.gguf", tensors={LLAMA3: written})
    found, _ = ROPE_INIT_FUNCTIONS["llama3"](read_config("path", tmp_path / "model.gguf"))
    np.testing.assert_allclose(found.numpy(), 5e4 ** -(np.arange(8) / 8) / written, rtol=1e-5)
    assert len(set(written)) == 3  # one is between 1 and 8


def test_yarn_is_what_llama_cpp_computes(tmp_path):
    """By the formulas of ggml's rope_yarn and of its correction of dimensions."""
    write_gguf(tmp_path / "model.gguf", "llama", YARN)
    found, scale = ROPE_INIT_FUNCTIONS["yarn"](read_config("path", tmp_path / "model.gguf"))
    base, dims = 5e4, 16
    ends = [dims * math.log(32 / (beta * 2 * math.pi)) / (2 * math.log(base)) for beta in (32, 1)]
    low, high = max(0, math.floor(ends[0])), min(dims - 1, math.ceil(ends[1]))
    for i in range(dims // 2):
        extrapolated = base ** (-2 * i / dims)
        mix = 1 - min(max((i - low) / max(0.001, high - low), 0), 1)
        assert found[i].item() == pytest.approx(extrapolated / 4 * (1 - mix) + extrapolated * mix, rel=1e-5)
    assert scale == pytest.approx(1 + 0.1 * math.log(4))


@pytest.mark.parametrize(
    ("kind", "metadata", "tensors", "said"),
    [
        ("llama", {**LINEAR, "rope.scaling.type": "longrope"}, {}, "rope.scaling.type longrope, .*4.0"),
        ("llama", YARN, {LLAMA3: np.ones(8, np.float32)}, "rope_freqs.weight"),
        ("llama", {}, {LLAMA3: np.arange(1, 9, dtype=np.float32)}, r"other factors \(rope_freqs.weight\)"),
        ("llama", {}, {LLAMA3: np.full(7, 2, np.float32)}, r"other factors \(rope_freqs.weight\)"),
        ("llama", {}, long_and_short(8), "rope_factors_long.weight, rope_factors_short.weight"),
        ("phi3", {}, {LONG: np.ones(4, np.float32)}, "rope_factors_long.weight"),
        ("phi3", YARN, {}, "rope.scaling.type yarn"),
        ("llama", {**LINEAR, "rope.scaling.attn_factor": 0.5}, {}, "rope.scaling.attn_factor 0.5"),
        ("phi3", {"rope.scaling.attn_factor": 0.5}, {}, "rope.scaling.attn_factor 0.5"),
        ("llama", {"rope.scaling.factor": 0.5}, {}, "rope.scaling.factor 0.5"),
        ("gemma3_text", {}, {LLAMA3: divisors(8, 8, 1e6)}, "rope_freqs.weight"),
        ("llama", {}, {LLAMA3: np.ones(8, np.float16)}, "'rope_freqs.weight' is of type F16"),
        ("llama", {**YARN, "rope.scaling.yarn_log_multiplier": 0.1}, {}, "llama.rope.scaling.yarn_log_multiplier"),
    ],
)  # fmt: skip
def test_what_transformers_has_not_is_refused(kind, metadata, tensors, said, tmp_path):
    write_gguf(tmp_path / "model.gguf", kind, metadata, tensors)
    with pytest.raises(ValueError, match=f"draft: got .*model.gguf.*{said}.*allowed: "):
        load_model(tmp_path / "model.gguf", name="draft")
