"""Every entry of a head's config.json, changed one at a time: a head, or one error that names the entry or the tensor
that it contradicts. And headers and indices of safetensors."""

from __future__ import annotations

import json
import struct
import warnings

import pytest
from safetensors.torch import load_file, save_file
from specdec import load_head
from specdec.drafters.heads.fields import OF_HEADS, OF_LAYERS
from support.heads import exact_eagle, exact_eagle3, exact_medusa, exact_mtp, predictable_target, random_head, write
from support.mutated import VALUES, changed, entries, outcome

FILES = {
    "eagle3": exact_eagle3,
    "eagle": exact_eagle,
    "medusa": exact_medusa,
    "mtp": exact_mtp,
    **{kind: (lambda kind=kind: random_head(kind)) for kind in ("dflash", "dflash2", "domino", "dspark", "peagle")},
}
DAILY = {
    ("eagle3", "null"),
    ("eagle3", "2^63"),
    ("eagle3", "text"),
    ("dflash", "-1"),
    ("peagle", "list"),
    ("dflash2", "2^63"),
}
ROPES = ("rope_type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor")
IDS = ("layer_ids", "target_layer_ids", "eagle_aux_hidden_state_layer_ids", "mask_token_id", "block_size", "causal")
# Entries that are read, whether the file has them or not.
READ = [
    *((name,) for name in (*OF_HEADS, *OF_LAYERS, *IDS, "bias", "pard_token", "dspark_target_layer_ids", "dtype")),
    *(("rope_scaling", name) for name in ROPES),
    *((nested, name) for nested in ("eagle_config", "dflash_config") for name in (*IDS, "norm_output")),
]
# What is no entry of config.json but named instead: tensors, and the head's format.
OTHERS = ("path: ", "drafter: ", "fc.", "lm_head.", "layers.", "norm.", "d2t: ", "medusa_head", "input_norm.",
          "fc_norm.",
          "layer_ids: ", "target_layer_ids: ", "dflash_config.", "eagle_config.", "eagle_aux_hidden_state_layer_ids: ",
          "dspark_target_layer_ids: ", "embed_tokens.", "hidden_norm.", "choices: ", "target: ", "midlayer.",
          "num_nextn_predict_layers: ")  # fmt: skip


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ids that config.json does not say any more
        yield


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        pytest.param(kind, value, marks=[] if (kind, value) in DAILY else [pytest.mark.nightly])
        for kind in FILES
        for value in VALUES
    ],
)
def test_entries(kind, value, tmp_path):
    config, tensors = FILES[kind]()
    folder, target, wrong = write(tmp_path, config, tensors), predictable_target(), {}
    for path in dict.fromkeys((*entries(config), *READ)):
        (folder / "config.json").write_text(json.dumps(changed(config, path, VALUES[value])))
        if told := outcome(lambda: load_head(folder, target, check=False), "config.json: ", *OTHERS):
            wrong[path] = told
    assert not wrong


def test_null_says_that_there_is_no_entry(tmp_path):
    config, tensors = exact_eagle3()
    for name in ("attention_bias", "mlp_bias", "tie_word_embeddings", "vocab_size", "rope_scaling", "logit_scale"):
        assert load_head(write(tmp_path, config | {name: None}, tensors), predictable_target(), check=False).head


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"hidden_size": 2**62}, rf"config.json: got hidden_size {2**62}, allowed: an integer from 1 to 16777216"),
        ({"head_dim": 2**31}, r"config.json: got head_dim 2147483648, allowed: an integer from 0 to 65536"),
        ({"attention_bias": 3}, "config.json: got attention_bias 3, allowed: true or false"),
        ({"eagle_config": [1]}, r"config.json: got eagle_config \[1\], allowed: an object"),
        (
            {"eagle_config": {"norm_output": "x"}},
            "config.json: got eagle_config.norm_output 'x', allowed: true or false",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": -1}},
            "config.json: got rope_scaling.factor -1, allowed: a",
        ),
    ],
)
def test_an_entry_is_named_with_its_value_and_range(more, told, tmp_path):
    config, tensors = exact_eagle3()
    if "hidden_size" in more:  # by which the format is told
        more["speculators_model_type"] = "eagle3"
        more["transformer_layer_config"] = {**config, **more}
    with pytest.raises(ValueError, match=f"^{told}"):
        load_head(write(tmp_path, config | more, tensors), predictable_target(), check=False)


@pytest.mark.parametrize("field", ["dtype", "shape", "data_offsets", "size of the header"])
def test_headers_of_safetensors(field, tmp_path):
    folder = write(tmp_path, *exact_eagle3())
    whole = (folder / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + size])
    for value in [*VALUES.values(), [2**62, 2**62], [0, 2**63], [-1, 1]]:
        if field == "size of the header":
            if not isinstance(value, int) or isinstance(value, bool):
                continue
            made = struct.pack("<Q", value % 2**64) + whole[8:]
        else:
            text = json.dumps(changed(header, ("fc.weight", field), value)).encode()
            made = struct.pack("<Q", len(text)) + text + whole[8 + size :]
        (folder / "model.safetensors").write_bytes(made)
        assert outcome(lambda: load_head(folder, predictable_target(), check=False), "path: ", *OTHERS) is None, value


@pytest.mark.parametrize("value", VALUES)
def test_indices_of_safetensors(value, tmp_path):
    folder = write(tmp_path, *exact_eagle3())
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(load_file(folder / "model.safetensors"), "x")}
    save_file(load_file(folder / "model.safetensors"), folder / "x")
    for path in (("weight_map",), ("metadata",), ("weight_map", "fc.weight"), ("weight_map", "another")):
        (folder / "model.safetensors.index.json").write_text(json.dumps(changed(index, path, VALUES[value])))
        assert outcome(lambda: load_head(folder, predictable_target(), check=False), "path: ", *OTHERS) is None, path
    (folder / "model.safetensors.index.json").write_text(json.dumps(VALUES[value] if value != "removed" else []))
    assert outcome(lambda: load_head(folder, predictable_target(), check=False), "path: ", *OTHERS) is None
