"""The roofline model: bytes and operations counted by hand, limits, and the command."""

from __future__ import annotations

import dataclasses
import json

import pytest
from specdec.evaluation.gpus import GPUS
from specdec.evaluation.model_shapes import parameters_of, read_shape, shape_of
from specdec.evaluation.roofline import MOST_ROWS, Machine, ModelShape, Pair, gpu_machine
from specdec.evaluation.theory import expected_speedup, expected_tau
from support.commands import refused, run
from support.models import VOCABULARY, tiny_model
from transformers import MixtralConfig

LARGE = ModelShape("large", 1000, 900, layers=2, attended=16, cached=8, vocabulary=50, weight_bytes=2.0)
SMALL = ModelShape("small", 90, 90, layers=1, attended=8, cached=4, vocabulary=50, weight_bytes=2.0)
FREE = Machine("free layers", bandwidth=100.0, rate=1e9, layer=0.0, memory=None, about="by hand")


def test_bytes_and_operations_by_hand():
    """Three sequences with ten known tokens and two new ones each."""
    assert LARGE.moved(3, 2, 10) == 900 * 2 + 3 * 12 * 8 * 2 + 2 * 3 * 2 * 50 * 2
    assert LARGE.operations(3, 2, 10) == 3 * 2 * (2 * 900 + 4 * 16 * 10)
    assert LARGE.seconds(FREE, 3, 2, 10) == LARGE.moved(3, 2, 10) / 100
    slow = dataclasses.replace(FREE, rate=10.0, layer=0.5)
    assert LARGE.seconds(slow, 3, 2, 10) == LARGE.operations(3, 2, 10) / 10 + 2 * 0.5


def test_where_only_weights_cost_it_is_theorem_3_8():
    """A draft of a tenth of the weights, with no cache and no logits to speak of, is c = 0.1."""
    target, draft = (dataclasses.replace(s, number_bytes=0.0) for s in (LARGE, SMALL))
    for k in (1, 4, 9):
        p = Pair(target, draft, FREE, 0.8).predict(1, 100, k)
        assert p.speedup == pytest.approx(expected_speedup(0.8, 0.1, k)) and p.bound == "bytes"
        assert p.bytes == pytest.approx((k * 0.1 + 1) / expected_tau(0.8, k)) and p.operations > 1


def test_where_operations_are_the_limit_nothing_is_gained():
    machine = dataclasses.replace(FREE, rate=1.0)
    pair = Pair(LARGE, SMALL, machine, 0.8)
    p = pair.best(1, 10)
    assert p.bound == "operations" and p.speedup < 1 and p.speedup == pytest.approx(1 / p.operations)
    assert pair.pays_up_to(10) == 0


def test_the_batch_size_up_to_which_it_pays():
    pair = Pair(LARGE, SMALL, dataclasses.replace(FREE, rate=2000.0), 0.7)
    most = pair.pays_up_to(10)
    assert 1 < most < MOST_ROWS
    assert pair.best(most, 10).speedup > 1 >= pair.best(most + 1, 10).speedup
    assert pair.pays_up_to(10_000) > most  # reading a long context is what speculation shares as well


def test_memory_limits_the_rows():
    room = 1000 * 2 + 90 * 2 + 7.5 * 11 * (8 + 4) * 2
    target, draft = (dataclasses.replace(s, vocabulary=0) for s in (LARGE, SMALL))
    pair = Pair(target, draft, dataclasses.replace(FREE, memory=room), 0.7)
    assert pair.most_rows(10) == 7 and pair.most_rows(10, speculative=False) > 7
    assert pair.pays_up_to(10) == 7
    assert Pair(LARGE, SMALL, dataclasses.replace(FREE, memory=100.0), 0.7).most_rows(10) == 0


def test_gpus_by_name():
    assert gpu_machine("h100").name == "H100 SXM" and gpu_machine("RTX 5090").memory == 32e9
    assert gpu_machine("B200").times(4).rate == 4 * gpu_machine("B200").rate
    for gpu in GPUS:
        assert gpu_machine(gpu.name).bandwidth < gpu.terabytes * 1e12 and gpu.source
    with pytest.raises(ValueError, match="gpu: got 'V100'"):
        gpu_machine("V100")
    with pytest.raises(ValueError, match="gpu: got 'H'"):
        gpu_machine("H")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3"])
def test_shapes_are_those_of_the_models(kind):
    """Parameters by the model itself, keys and values by a cache that it filled."""
    model = tiny_model(kind)
    shape = shape_of(model.config, kind)
    assert shape is not None
    assert shape.parameters == sum(p.numel() for p in model.parameters()) and shape.vocabulary == VOCABULARY
    embedding = model.get_input_embeddings().weight.numel()
    assert shape.read == shape.parameters - embedding
    cache = model(model.dummy_inputs["input_ids"][:1, :3] % VOCABULARY, use_cache=True).past_key_values
    stored = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert stored == 3 * shape.cached


def test_sizes_and_what_is_no_size():
    assert [parameters_of(text) for text in ("8B", "0.5b", "7e9", "110M")] == [8e9, 5e8, 7e9, 1.1e8]
    assert [parameters_of(text) for text in ("folder", "8X", "", "-1B", "B")] == [None] * 5
    guessed = read_shape("TARGET", "70B", 4, 16)
    assert guessed.weights == 35e9 and 60 <= guessed.layers <= 90 and guessed.number_bytes == 2
    assert shape_of(MixtralConfig(num_hidden_layers=1), "experts") is None


def test_the_command_says_that_it_predicts():
    said = run("roofline", "8B", "1B", "--alpha", 0.8).stdout
    assert said.count("PREDICTION, not measured") == 1 and "H100 SXM" in said and "of which 60% (assumed)" in said
    assert "speculation pays" in said
    options = ("--contexts", 512, "--batch-sizes", "1,4", "-k", 3, "--gpu", "mi300x", "--gpus", 2)
    found = json.loads(run("roofline", "8B", "1B", "--alpha", 0.8, *options, "--json").stdout)
    assert found["prediction"] is True and found["machine"]["count"] == 2
    assert [(row["rows"], row["num_drafts"]) for row in found["rows"]] == [(1, 3), (4, 3)]
    assert found["rows"][0]["tau"] == pytest.approx(expected_tau(0.8, 3))


def test_as_many_gpus_as_hold_the_models():
    told = run("roofline", "70B", "1B", "--alpha", 0.8, "--gpu", "H100").stdout
    assert "on 2 x H100 SXM" in told and "With 8192 tokens of context, speculation pays" in told
    found = [run("roofline", "8B", "1B", "--alpha", 0.8, "--contexts", n, "--json").stdout for n in (1, 10**6)]
    assert [json.loads(text)["machine"]["count"] for text in found] == [1, 4]
    pair = Pair(LARGE, SMALL, dataclasses.replace(FREE, memory=600.0), 0.7)  # of 2180 bytes of weights
    assert pair.on_enough(8).machine.memory == 2400 and pair.on_enough(9).machine.memory == 4800


def test_a_folder_is_read_without_its_weights(folders, tmp_path):
    (tmp_path / "config.json").write_text((folders[1] / "config.json").read_text())
    found = json.loads(run("roofline", tmp_path, folders[3], "--alpha", 0.5, "--json").stdout)
    assert found["target"]["parameters"] == found["draft"]["parameters"] > 4096 * 16


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("8B", "1B", "--alpha", "2"), "--alpha: got 2"),
        (("8B", "1B", "--alpha", "0.5", "--gpu", "abacus"), "--gpu: got 'abacus', allowed: cpu, or one of A100"),
        (("8B", "1B", "--alpha", "0.5", "-k", "0"), "--num-drafts: got 0"),
        (("8B", "1B", "--alpha", "0.5", "--batch-sizes", "1,0"), "--batch-sizes: got '1,0'"),
        (("8B", "1B", "--alpha", "0.5", "--weight-bits", "5"), "--weight-bits: got 5"),
        (
            ("405B", "8B", "--alpha", "0.5", "--gpus", "2"),
            "--gpus: got 2, with 826 GB of weights on 160 GB, allowed: as many as hold them and a sequence: 16 do",
        ),
        (("8B", "1B", "--alpha", "0.5", "--gpu", "cpu", "--gpus", "2"), "--gpus: got 2 with --gpu cpu"),
        (("/", "1B", "--alpha", "0.5"), "TARGET: '/' does not hold a causal language model"),
    ],
)
def test_what_roofline_refuses(arguments, said):
    assert said in refused("roofline", *arguments)
