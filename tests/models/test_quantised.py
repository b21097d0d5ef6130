"""Quantised models, by libraries that may not be installed: their texts are those of the same model decoded plainly."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from specdec import SpeculativeDecoder, load_model
from specdec.evaluation.near_ties import Judge
from specdec.models.forward.cached_model import CachedModel
from support.models import generate, prompts, tiny_model, tunable_pair

from specdec_kernels import SamplingParams


@pytest.fixture(scope="module")
def quantised():
    """Weights of 8 bits; in this batch size the loop's forwards of one token and of five are the same to the bit, or
    near enough for these texts."""
    torchao = pytest.importorskip("torchao.quantization")
    model = copy.deepcopy(tunable_pair(0.3)[0])
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    assert "Int8" in type(model.model.layers[0].mlp.up_proj.weight).__name__
    return model


def test_texts_of_a_quantised_target(quantised):
    (target, draft), ragged = tunable_pair(0.3), prompts(6, 2, 20)
    sampling = {"params": SamplingParams(0.8, top_k=40), "seed": list(range(6)), "max_new_tokens": 30}
    for settings in ({"max_new_tokens": 30}, {"rule": "coupled", **sampling}):
        plain = generate(quantised, None, ragged, 0, **settings)
        result = generate(quantised, draft, ragged, **settings)
        assert result.tokens == plain.tokens != generate(target, None, ragged, 0, **settings).tokens
        assert result.stats.acceptance_rate > 0.2
    result = generate(quantised, draft, ragged, **sampling)
    assert not any(result.status) and 0 < result.stats.accepted < result.stats.drafted
    assert generate(target, quantised, ragged, max_new_tokens=30).stats.acceptance_rate > 0.7  # as a draft


def test_quantised_folders(quantised, tmp_path):
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    tunable_pair(0.3)[0].save_pretrained(tmp_path / "whole")
    how = TorchAoConfig(Int8WeightOnlyConfig(), modules_to_not_convert=[])
    AutoModelForCausalLM.from_pretrained(tmp_path / "whole", quantization_config=how).save_pretrained(tmp_path / "int8")
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(tmp_path / "int8", dtype)
        assert "Int8" in type(model.model.layers[0].mlp.up_proj.weight).__name__
        assert CachedModel(model).dtype == dtype
        assert [len(t) for t in generate(model, model, [[1, 2]], max_new_tokens=5).tokens] == [5]


@pytest.mark.parametrize("settings", [{"load_in_8bit": True}, {"load_in_4bit": True}], ids=str)
def test_bitsandbytes(settings, tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    (target, draft), ragged = tunable_pair(0.3), prompts(3, 2, 20)
    target.save_pretrained(tmp_path / "whole")
    how = BitsAndBytesConfig(**settings)
    AutoModelForCausalLM.from_pretrained(tmp_path / "whole", quantization_config=how).save_pretrained(tmp_path / "bits")
    model = load_model(tmp_path / "bits")
    assert not model.model.layers[0].mlp.up_proj.weight.is_floating_point() and CachedModel(model).dtype.itemsize > 1
    result = generate(model, draft, ragged, max_new_tokens=20)
    assert result.tokens == generate(model, None, ragged, 0, max_new_tokens=20).tokens
    assert result.stats.accepted > 0


def test_parameters_of_odd_dtypes_do_not_say_what_is_computed_in():
    """As where a library stores integers or 8-bit floats, before anything else."""
    for dtype in (torch.float8_e4m3fn, torch.uint8):
        model = copy.deepcopy(tiny_model("llama")).to(torch.bfloat16)
        model.scale = torch.nn.Parameter(torch.zeros(2).to(dtype), requires_grad=False)
        assert next(model.parameters()).dtype == dtype
        assert SpeculativeDecoder(model, None, 0).target.dtype == torch.bfloat16
        assert len(generate(model, model, [[1, 2]], max_new_tokens=5).tokens[0]) == 5


def test_scales_of_whole_forwards_are_refused():
    """A row would depend on the others: two forwards of torch.ao's dynamic quantisation do not agree."""
    linear = torch.ao.nn.quantized.dynamic.Linear(32, 48)
    model = copy.deepcopy(tiny_model("llama"))
    model.model.layers[0].mlp.up_proj = linear.eval()
    with pytest.raises(
        ValueError, match="target: got Linear of torch.ao.nn.quantized.dynamic.*, allowed: quantisation by"
    ):
        SpeculativeDecoder(model, None, 0)


def test_a_library_that_is_absent_is_named(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for quantisation, error, message in (
        ({"quant_method": "aqlm"}, OSError, "path: cannot load a model from .*AQLM"),
        ({"quant_method": "awq", "bits": 4}, OSError, "path: cannot load a model from .*gptqmodel"),
        (
            {"quant_method": "nonesuch"},
            ValueError,
            "path: .* its quantisation .*'nonesuch'.* none that transformers knows",
        ),
    ):
        file.write_text(json.dumps({**config, "quantization_config": quantisation}))
        with pytest.raises(error, match=message):
            load_model(tmp_path)


def test_differences_of_quantised_texts_are_judged_without_a_wider_copy(quantised, monkeypatch):
    """As ``specdec compare`` does; most quantised weights cannot be cast."""
    model = copy.copy(quantised)
    model.hf_quantizer = object()
    monkeypatch.setattr(type(model), "to", None)
    text = generate(model, None, [[1, 2]], 0, max_new_tokens=5).tokens[0]
    found = Judge(model).explain([1, 2], text, [*text[:3], 7, 7])
    assert (found.position, found.verdict, found.wide_dtype) == (3, "bug", "float32")
